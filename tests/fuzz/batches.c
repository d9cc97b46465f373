/* SPDX-License-Identifier: Apache-2.0 */
/* Batches under ATTN_VALIDATE=1: a sound one of some requests with some of its words and arrays
 * changed, planned for one layer of each sort, captured and replayed, and run. Arrays are as long
 * as the batch says, so that reading more is caught; the backend's plan slot (backend.c)
 * follows every number that it is handed. */
#include <attn/draft/mm_encoder.h>

#include <stdlib.h>
#include <string.h>

#include <sanitizer/asan_interface.h> /* libFuzzer comes with it; without the sanitizer it does nothing */

#include "backend.h"
#include "bind/bound.h"
#include "io.h"
#include "support/client.h"

#define MOST_REQUESTS 8
#define MOST_TOKENS 64
#define MOST_KEYS 96
#define MOST_BLOCKS 6 /* blocks of a request */
#define BLOCK 16
#define HEADS 2
#define LONGEST_ARRAY 4096
#define MOST_WORKSPACE ((size_t)4 << 20)
#define MOST_HOST_ARRAYS 8

struct step {
    struct fixture fixture;
    struct blocks blocks;
    struct {
        int32_t *numbers;
        size_t bytes;
    } host[MOST_HOST_ARRAYS]; /* host copies of the last batch */
    int32_t num_host;
    int32_t num_requests;  /* that its arrays have */
    int64_t further_slots; /* the batch's table 1 has */
    struct sampled sampled;
    attn_model *model;
    attn_layer *layer;
    bool made; /* or it cannot be */
    attn_plan *plans[2];
    struct attn_limits limits;
    struct attn_error error;
};

/* Ways to serve each sort of layer. */
static const char *const texts[] = {"whole", "parts?", "decode=parts?;prefill=whole", ""};
enum { NUM_TEXTS = sizeof texts / sizeof *texts };

static int64_t clamp(int64_t value, int64_t low, int64_t high)
{
    return value < low ? low : value > high ? high : value;
}

/* Limits may ask for more than a fuzzer has; the core zeroes what it gets. */
static void *allocate_some(void *user, size_t size, size_t alignment)
{
    return size <= MOST_WORKSPACE
               ? aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment)
               : NULL;
}

static void do_all(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                   void *argument)
{
    body(argument, 0, count, 0);
}

/* The model of a sort of layer. Inputs are about plans and batches, so one is made for all of them:
 * that is three quarters of an input's time. */
static struct step *find_model(int32_t sample, int32_t text)
{
    static struct step models[SAMPLE_COUNT][NUM_TEXTS];
    struct step *s = &models[sample][text];
    const struct attn_layer_desc *layers[1] = {&s->sampled.desc};
    attn_assignment *assignment = NULL;
    if (s->made) {
        return s;
    }
    s->made = true;
    s->error = (struct attn_error)ATTN_ERROR_INIT;
    backend_init(&s->fixture);
    s->fixture.runtime.settings.validate = true;
    s->fixture.runtime.host.allocate = allocate_some;
    s->fixture.runtime.host.parallel_for = do_all;
    sample_layer(&s->sampled, sample);
    const int32_t kind = s->sampled.desc.kind;
    s->sampled.desc.block_size =
        kind == ATTN_LAYER_ENCODER || kind == ATTN_LAYER_RECURRENT ? 0 : BLOCK;
    const struct attn_select_options options = SIZED(attn_select_options, .backend = texts[text]);
    attn_status status =
        select_layers(&s->fixture.runtime, &options, layers, 1, &assignment, &s->error);
    if (status == ATTN_OK) {
        status = model_create(&s->fixture.runtime, assignment, NULL, &s->model, &s->error);
    }
    assignment_destroy(assignment);
    fuzz_check_error(status, &s->error);
    FUZZ_CHECK(status == ATTN_OK || text > 0); /* `whole` serves all: else nothing is tested here */
    if (status == ATTN_OK) {
        s->layer = model_layer(s->model, 0);
        sample_bind(&s->sampled, s->layer, &s->error);
    }
    return s;
}

/* Usual limits, smaller ones, or any: what does not fit in 64 bits is refused, and no plan is
 * smaller than its batches. */
static struct attn_limits draw_limits(struct input *input)
{
    struct attn_limits limits = client_limits(MOST_REQUESTS, MOST_TOKENS, 0, MOST_KEYS, 0);
    const uint8_t tag = input_byte(input);
    if (tag > 240) {
        limits.max_num_reqs = input_int(input);
        limits.max_num_tokens = input_int(input);
        limits.max_seq_len = input_int(input);
        limits.max_query_len = input_int(input);
        limits.max_blocks_per_req = input_int(input);
    } else if (tag > 200) {
        limits.max_num_reqs = 1 + tag % MOST_REQUESTS;
        limits.max_num_tokens = 1 + input_byte(input) % MOST_TOKENS;
        limits.max_seq_len = tag & 1 ? 0 : MOST_KEYS;
    }
    return limits;
}

/* Zeros, and what lies after may not be touched. To the allocator it would be a mapping of its own
 * for each input, which is more work than all else. */
static void *workspace_of(int32_t plan, size_t bytes)
{
    static uint8_t memories[2][MOST_WORKSPACE + 4096] __attribute__((aligned(256)));
    static size_t used[2];
    uint8_t *memory = memories[plan];
    ASAN_UNPOISON_MEMORY_REGION(memory, sizeof memories[0]);
    memset(memory, 0, used[plan] > bytes ? used[plan] : bytes);
    used[plan] = bytes;
    ASAN_POISON_MEMORY_REGION(memory + bytes, sizeof memories[0] - bytes);
    return memory;
}

/* Makes the step's two plans; false: a plan was refused, or its memory would be more than a fuzzer
 * gets. */
static bool make_plan(struct step *s, int32_t index, bool graph)
{
    const struct attn_plan_options options = {
        .struct_size = sizeof options, .limits = &s->limits, .graph = graph};
    const attn_status status = plan_create(s->model, 0, &options, &s->plans[index], &s->error);
    fuzz_check_error(status, &s->error);
    struct attn_workspace room = {.struct_size = sizeof room};
    if (status != ATTN_OK || plan_workspace(s->plans[index], &room, &s->error) != ATTN_OK ||
        room.bytes > MOST_WORKSPACE) {
        return false;
    }
    room.memory = workspace_of(index, room.bytes);
    FUZZ_CHECK(plan_bind_workspace(s->plans[index], &room, &s->error) == ATTN_OK);
    return true;
}

static int32_t *numbers(struct blocks *blocks, int64_t count)
{
    return blocks_add(blocks, (size_t)count * sizeof(int32_t));
}

/* Numbers that the host reads until the batch is planned, and not in a run. */
static const int32_t *host_copy(struct step *s, int32_t *numbers, int64_t count)
{
    FUZZ_CHECK(s->num_host < MOST_HOST_ARRAYS);
    s->host[s->num_host].numbers = numbers;
    s->host[s->num_host++].bytes = (size_t)count * sizeof *numbers;
    return numbers;
}

static void forbid_host_copies(const struct step *s, bool forbid)
{
    for (int32_t i = 0; i < s->num_host; i++) {
        if (forbid) {
            ASAN_POISON_MEMORY_REGION(s->host[i].numbers, s->host[i].bytes);
        } else {
            ASAN_UNPOISON_MEMORY_REGION(s->host[i].numbers, s->host[i].bytes);
        }
    }
}

/* Does the core look at what arrays hold? Else they are sound: kernels follow them. */
static bool looks(const struct step *s)
{
    return s->fixture.runtime.settings.validate;
}

/* The same numbers in memory of their own: a device's next to the host's. */
static int32_t *twin(struct step *s, struct input *input, const int32_t *source, int64_t count)
{
    int32_t *copy = numbers(&s->blocks, count);
    memcpy(copy, source, (size_t)count * sizeof *copy);
    if (looks(s) && input_byte(input) == 1) {
        input_patch(input, copy, 0, (size_t)count * sizeof *copy);
    }
    return copy;
}

/* Lengths and rows: sound ones, then some of them changed. */
static void add_lengths(struct step *s, struct input *input, struct attn_batch *b, int32_t requests)
{
    int32_t *start = numbers(&s->blocks, requests + 1), *lens = numbers(&s->blocks, requests);
    int32_t row = 0;
    for (int32_t r = 0; r < requests; r++) {
        const uint8_t tag = input_byte(input);
        const int32_t left = MOST_TOKENS - row;
        const int32_t count = tag < 128 ? 1 : tag % 24;
        start[r] = row;
        row += count < left ? count : left;
        lens[r] = (int32_t)clamp(row - start[r] + input_byte(input) % 64, 0, MOST_KEYS);
    }
    start[requests] = row;
    b->num_reqs = requests;
    b->num_tokens = b->num_actual_tokens = row;
    if (input_byte(input) == 1) {
        input_patch(input, start, 0, (size_t)(requests + 1) * sizeof *start);
    }
    if (looks(s) && requests > 0 && input_byte(input) == 1) {
        input_patch(input, lens, 0, (size_t)requests * sizeof *lens);
    }
    b->query_start_loc_host = host_copy(s, start, requests + 1);
    b->query_start_loc = twin(s, input, start, requests + 1);
    b->seq_lens_host = host_copy(s, lens, requests);
    b->seq_lens = twin(s, input, lens, requests);
    b->encoder_seq_lens_host = lens;
    b->encoder_seq_lens = twin(s, input, lens, requests);
}

static void add_tables(struct step *s, struct input *input, struct attn_batch *b)
{
    struct blocks *blocks = &s->blocks;
    const int64_t requests = clamp(b->num_reqs, 0, MOST_REQUESTS);
    const int64_t rows = clamp(b->block_table_rows > 0 ? b->block_table_rows : requests, 0, 64);
    b->block_table_stride = clamp(b->block_table_stride, -8, 64);
    b->block_table_rows = b->block_table_rows > 64 ? 64 : b->block_table_rows;
    b->num_slots = clamp(b->num_slots, -8, LONGEST_ARRAY);
    const int64_t entries = b->block_table_stride > 0 ? rows * b->block_table_stride : 0;
    int32_t *table = numbers(blocks, entries), *row = numbers(blocks, requests);
    int64_t *slots =
        blocks_add(blocks, (size_t)clamp(b->num_slots, 0, LONGEST_ARRAY) * sizeof *slots);
    for (int64_t i = 0; i < entries; i++) {
        table[i] = (int32_t)(i * 7 % NUM_BLOCKS);
    }
    for (int64_t i = 0; i < b->num_slots; i++) {
        slots[i] = i * 5 % (NUM_BLOCKS * BLOCK);
    }
    for (int64_t r = 0; r < requests; r++) {
        row[r] = (int32_t)(requests - 1 - r);
    }
    if (looks(s) && entries > 0 && input_byte(input) == 1) {
        input_patch(input, table, 0, (size_t)entries * sizeof *table);
    }
    if (looks(s) && b->num_slots > 0 && input_byte(input) == 1) {
        slots[input_byte(input) % b->num_slots] = input_int64(input);
    } else if (looks(s) && b->num_slots > 0 && input_byte(input) == 1) { /* an alias */
        slots[input_byte(input) % b->num_slots] = slots[input_byte(input) % b->num_slots];
    }
    const uint8_t tag = input_byte(input);
    b->block_table = tag == 1 ? NULL : table;
    b->slot_mapping = tag == 2 ? NULL : slots;
    if (tag >= 3 && tag < 16 && requests > 0) {
        input_patch(input, row, 0, (size_t)requests * sizeof *row);
        b->block_table_row = row;
    }
}

/* Elements between rows: the usual, or any number, with an array of as many. */
static int64_t draw_stride(struct input *input, int64_t usual)
{
    return input_byte(input) == 1 ? clamp(input_int64(input), INT64_MIN, 64) : usual;
}

/* Slots of `requests` rows of `wide` of them, so far apart; what a negative stride would reach is
 * not there. */
static const int32_t *add_slots(struct step *s, struct input *input, int32_t requests, int64_t wide,
                                int64_t stride)
{
    const int64_t apart = stride > 0 ? stride : 1; /* 0 reads as 1 */
    const int64_t count = requests > 0 ? (requests - 1) * apart + wide : wide;
    int32_t *slots = numbers(&s->blocks, count);
    for (int64_t i = 0; i < count; i++) {
        slots[i] = (int32_t)(i % NUM_SLOTS);
    }
    if (looks(s)) {
        input_patch(input, slots, 0, (size_t)count * sizeof *slots);
    }
    return slots;
}

/* States and, of layers that have them, where they come from, checkpoints, and a ring's tokens. */
static struct attn_ext *add_states(struct step *s, struct input *input, int32_t requests,
                                   uint8_t more)
{
    const struct sampled *sampled = &s->sampled;
    const bool rule = sample_has(sampled, &sampled->rule.ext);
    const bool ring = sample_has(sampled, &sampled->caches.ext);
    const int32_t wide = 1 + sampled->gdn.num_speculative_tokens;
    struct attn_batch_recurrent gdn =
        EXTENSION(attn_batch_recurrent, ATTN_EXT_BATCH_RECURRENT, NULL, NULL, wide, NULL, NULL);
    gdn.state_slots_stride = rule || ring ? draw_stride(input, wide) : wide;
    const int32_t *slots = add_slots(s, input, requests, wide, gdn.state_slots_stride);
    int32_t *accepted = numbers(&s->blocks, requests);
    for (int32_t r = 0; r < requests; r++) {
        accepted[r] = 1;
    }
    gdn.state_slots = more & 32 ? NULL : slots;
    gdn.num_accepted_tokens = more & 64 ? accepted : NULL;
    if (rule) {
        const uint8_t tag = input_byte(input);
        gdn.initial_slots_stride = draw_stride(input, wide);
        gdn.checkpoint_slots_stride = draw_stride(input, 24);
        slots = add_slots(s, input, requests, wide, gdn.initial_slots_stride);
        gdn.initial_slots = tag & 1 ? slots : NULL;
        slots = add_slots(s, input, requests, 24, gdn.checkpoint_slots_stride);
        gdn.checkpoint_slots = tag & 2 ? slots : NULL;
        gdn.has_initial_state = tag & 4 ? blocks_add(&s->blocks, (size_t)requests) : NULL;
    }
    if (ring && input_byte(input) != 1) {
        int32_t *tokens = numbers(&s->blocks, requests);
        if (looks(s) && requests > 0) {
            input_patch(input, tokens, 0, (size_t)requests * sizeof *tokens);
        }
        const struct attn_batch_replay replay =
            EXTENSION(attn_batch_replay, ATTN_EXT_DRAFT_BATCH_REPLAY, NULL, .ring_tokens = tokens);
        gdn.ext.next = blocks_struct(&s->blocks, input, &replay, sizeof replay, sizeof replay);
    }
    return blocks_struct(&s->blocks, input, &gdn, sizeof gdn, sizeof gdn);
}

/* A second table, of a cache whose rows stand for several tokens. */
static void add_further(struct step *s, struct input *input, struct attn_batch *b)
{
    const int32_t requests = (int32_t)clamp(b->num_reqs, 0, s->num_requests);
    struct attn_batch_table table = {.num_slots = clamp(b->num_tokens / 4, 0, MOST_TOKENS)};
    const uint8_t tag = input_byte(input);
    table.block_table_stride = tag == 1 ? input_int(input) : MOST_BLOCKS;
    table.num_slots = tag == 2 ? clamp(input_int(input), -8, MOST_TOKENS) : table.num_slots;
    table.block_table_rows = tag == 3 ? input_int(input) : 0;
    table.max_seq_len = tag == 4 ? input_int(input) : 0;
    const int64_t rows = clamp(table.block_table_rows, requests, 64);
    table.block_table_stride = clamp(table.block_table_stride, -8, 64);
    int32_t *blocks = numbers(&s->blocks, clamp(rows * table.block_table_stride, 0, 4096));
    int32_t *lens = numbers(&s->blocks, requests);
    int64_t *slots =
        blocks_add(&s->blocks, (size_t)clamp(table.num_slots, 0, MOST_TOKENS) * sizeof *slots);
    for (int32_t r = 0; r < requests; r++) {
        lens[r] = b->seq_lens != NULL ? (int32_t)clamp(b->seq_lens[r], 0, MOST_KEYS) / 4 : 0;
    }
    for (int64_t i = 0; i < table.num_slots; i++) {
        slots[i] = i;
    }
    if (looks(s) && requests > 0 && input_byte(input) == 1) {
        input_patch(input, lens, 0, (size_t)requests * sizeof *lens);
    }
    table.block_table = tag == 5 ? NULL : blocks;
    table.slot_mapping = slots;
    table.seq_lens_host = host_copy(s, tag == 6 ? NULL : lens, tag == 6 ? 0 : requests);
    table.seq_lens = twin(s, input, lens, requests);
    s->further_slots = table.num_slots;
    b->tables = blocks_struct(&s->blocks, input, &table, sizeof table, sizeof table);
    b->num_tables = tag == 7 ? input_int(input) : 1;
    b->num_tables = b->num_tables > 1 ? 1 : b->num_tables;
    b->table_stride = tag == 8 ? (int32_t)clamp(input_int(input), INT32_MIN, sizeof table)
                               : (int32_t)sizeof table;
}

/* What a batch may carry besides. */
static void add_more(struct step *s, struct input *input, struct attn_batch *b)
{
    const int32_t requests = (int32_t)clamp(b->num_reqs, 0, MOST_REQUESTS);
    const uint8_t more = input_byte(input);
    struct attn_ext *next = NULL;
    if (more & 1) {
        int32_t *keys = numbers(&s->blocks, requests + 1);
        for (int32_t r = 0; r <= requests; r++) {
            keys[r] = r * 3;
        }
        input_patch(input, keys, 0, (size_t)(requests + 1) * sizeof *keys);
        b->key_start_loc_host = host_copy(s, more & 2 ? keys : NULL, more & 2 ? requests + 1 : 0);
        b->key_start_loc = twin(s, input, keys, requests + 1);
    }
    if (more & 4) {
        b->causal_per_request = blocks_add(&s->blocks, (size_t)requests);
    }
    if (more & 8) {
        b->tree = blocks_add(&s->blocks, MOST_TOKENS * MOST_TOKENS * sizeof(int32_t));
    }
    if (more & 2) {
        const int32_t spans = input_byte(input) % 8;
        int32_t *start = numbers(&s->blocks, requests + 1);
        for (int32_t r = 0; r <= requests; r++) {
            start[r] = r < spans ? r : spans;
        }
        input_patch(input, start, 0, (size_t)(requests + 1) * sizeof *start);
        b->num_spans = spans;
        b->spans = numbers(&s->blocks, 2 * spans);
        b->span_start_loc = start;
        int32_t *logits = numbers(&s->blocks, spans);
        input_patch(input, logits, 0, (size_t)spans * sizeof *logits);
        b->logits_indices = logits;
        b->num_logits_indices = spans;
    }
    if ((more & 16) || s->sampled.desc.kind == ATTN_LAYER_RECURRENT) {
        next = add_states(s, input, requests, more);
    }
    if ((more & 128) || sample_has(&s->sampled, &s->sampled.cp.ext)) {
        struct attn_batch_context_parallel cp = {
            .ext = {ATTN_EXT_BATCH_CONTEXT, 0, sizeof cp, next}};
        int32_t *lens = numbers(&s->blocks, requests);
        for (int32_t r = 0; r < requests; r++) {
            lens[r] = r * 5;
        }
        if (requests > 0) {
            input_patch(input, lens, 0, (size_t)requests * sizeof *lens);
        }
        cp.local_seq_lens_host = host_copy(s, lens, requests);
        cp.local_seq_lens = twin(s, input, lens, requests);
        cp.max_local_seq_len = input_int(input);
        next = blocks_struct(&s->blocks, input, &cp, sizeof cp, sizeof cp);
    }
    b->next = next;
    if (sample_has(&s->sampled, &s->sampled.compressed.ext)) {
        add_further(s, input, b);
    }
}

static struct attn_batch make_batch(struct step *s, struct input *input)
{
    struct attn_batch b = {.struct_size = sizeof b};
    s->num_host = 0;
    s->further_slots = 0;
    add_lengths(s, input, &b, input_byte(input) % (MOST_REQUESTS + 1));
    b.max_encoder_seq_len = MOST_KEYS;
    b.block_table_stride = MOST_BLOCKS;
    b.num_slots = b.num_tokens;
    const int32_t sound = s->num_requests = b.num_reqs;
    input_patch(input, &b, offsetof(struct attn_batch, mode), offsetof(struct attn_batch, causal));
    /* Fewer requests leave longer arrays; more than the arrays have must be over the limit. */
    const int32_t most = s->limits.max_num_reqs;
    b.num_reqs = b.num_reqs > sound && (most <= 0 || b.num_reqs <= most) ? sound : b.num_reqs;
    b.causal = input_byte(input) == 1 ? input_int(input) : b.causal;
    const uint8_t tag = input_byte(input);
    b.seq_lens_host = tag == 1 ? NULL : b.seq_lens_host;
    b.query_start_loc_host = tag == 2 ? NULL : b.query_start_loc_host;
    b.encoder_seq_lens = tag == 3 ? NULL : b.encoder_seq_lens;
    b.common_prefix_len = tag == 4 ? input_int(input) : 0;
    b.block_table_rows = tag == 5 ? input_int(input) : 0;
    b.block_table_stride = tag == 6 ? input_int(input) : b.block_table_stride;
    b.num_slots = tag == 7 ? input_int(input) : b.num_slots;
    b.max_encoder_seq_len = tag == 8 ? input_int(input) : b.max_encoder_seq_len;
    b.mode = tag == 9 ? ATTN_BATCH_IDLE : tag == 10 ? ATTN_BATCH_PROFILE : b.mode;
    add_tables(s, input, &b);
    add_more(s, input, &b);
    return b;
}

static void check_split(const attn_plan *plan, const struct attn_batch *b)
{
    struct attn_batch_split split = {.struct_size = sizeof split};
    FUZZ_CHECK(plan_split(plan, &split) == ATTN_OK);
    FUZZ_CHECK(split.num_decodes >= 0 && split.num_prefills >= 0);
    FUZZ_CHECK(split.num_decode_tokens >= 0 && split.num_prefill_tokens >= 0);
    if (b->mode != ATTN_BATCH_PROFILE && b->mode != ATTN_BATCH_IDLE && b->num_actual_tokens > 0) {
        /* requests that are cut into chunks count for each of them */
        FUZZ_CHECK(split.num_decodes + split.num_prefills >= b->num_reqs);
    }
}

/* Tensors of just the rows that the batch has. */
static void run(struct step *s, struct input *input, attn_plan *plan, const struct attn_batch *b)
{
    const int64_t tokens = clamp(b->num_tokens, 0, MOST_TOKENS);
    const struct io_rows rows = {
        .tokens = tokens,
        .keys = clamp(b->num_slots > tokens ? b->num_slots : tokens, 0, LONGEST_ARRAY),
        .further = clamp(s->further_slots, 0, MOST_TOKENS)};
    struct io io;
    if (io_draw(&s->blocks, input, &s->sampled, rows, &io)) {
        fuzz_check_error(plan_run(plan, s->layer, &io.run, &s->error), &s->error);
    }
}

/* The second plan by the tables of the first one's batch, and other ones; the first may be gone
 * before it runs. */
static void follow_plan(struct step *s, struct input *input, struct attn_batch *b)
{
    if (s->plans[1] == NULL && !make_plan(s, 1, false)) {
        return;
    }
    struct attn_batch tables = *b;
    const uint8_t way = input_byte(input);
    tables.block_table = way & 1 ? NULL : tables.block_table;
    tables.slot_mapping = way & 2 ? NULL : tables.slot_mapping;
    tables.num_slots = way & 4 ? 0 : tables.num_slots;
    forbid_host_copies(s, false);
    const attn_status status =
        plan_update_block_table(s->plans[1], s->plans[0], &tables, NULL, &s->error);
    forbid_host_copies(s, true);
    fuzz_check_error(status, &s->error);
    if (way & 8) {
        plan_destroy(s->plans[0]);
        s->plans[0] = NULL;
    }
    if (status == ATTN_OK) {
        check_split(s->plans[1], b);
        run(s, input, s->plans[1], &tables);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct input input = {bytes, size};
    const uint8_t how = input_byte(&input);
    const uint8_t sample = input_byte(&input);
    hostile = (struct hostile){.after = 0};
    struct step *s = find_model(sample % SAMPLE_COUNT, how % NUM_TEXTS);
    if (s->model == NULL) {
        return 0;
    }
    s->fixture.runtime.settings.validate = !(how & 64);
    s->limits = draw_limits(&input);
    if (how & 8) {
        hostile.after = 1 + input_byte(&input) % 16;
        hostile.status = input_int(&input);
        hostile.bytes = how & 16 ? (size_t)input_int64(&input) : 0;
    }
    bool ready = make_plan(s, 0, how >> 2 & 1);
    for (int32_t i = 0; ready && i < 2 && s->plans[0] != NULL; i++) {
        struct attn_batch b = make_batch(s, &input);
        const uint8_t way = input_byte(&input);
        const bool spread = sample_has(&s->sampled, &s->sampled.cp.ext);
        const bool rows = sample_has(&s->sampled, &s->sampled.compressed.ext);
        promised = (struct promised){.max_num_reqs = s->limits.max_num_reqs,
                                     .max_num_tokens = s->limits.max_num_tokens,
                                     .slots = looks(s),
                                     .num_blocks = spread || rows || !looks(s) ? 0 : NUM_BLOCKS};
        attn_status status = way < 224 ? plan_batch(s->plans[0], &b, NULL, &s->error)
                                       : plan_graph(s->plans[0], way % 4, &b, NULL, &s->error);
        fuzz_check_error(status, &s->error);
        forbid_host_copies(s, true);
        if (status == ATTN_OK && way % 4 == ATTN_PLAN_OUT_OF_GRAPH && way >= 224) {
            status = plan_graph(s->plans[0], ATTN_PLAN_IN_GRAPH, NULL, NULL, &s->error);
            fuzz_check_error(status, &s->error);
        }
        if (status == ATTN_OK) {
            check_split(s->plans[0], &b);
            run(s, &input, s->plans[0], &b);
            if (how & 32) {
                follow_plan(s, &input, &b);
            }
        }
    }
    for (int32_t i = 0; i < 2; i++) {
        plan_destroy(s->plans[i]);
        s->plans[i] = NULL;
    }
    blocks_free(&s->blocks);
    return 0;
}
