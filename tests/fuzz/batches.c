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
#include "support/client.h"

#define MOST_REQUESTS 8
#define MOST_TOKENS 64
#define MOST_KEYS 96
#define MOST_BLOCKS 6 /* blocks of a request */
#define BLOCK 16
#define NUM_BLOCKS 40
#define NUM_SLOTS 12 /* slots of recurrent states */
#define HEADS 2
#define LONGEST_ARRAY 4096
#define MOST_WORKSPACE ((size_t)4 << 20)

struct step {
    struct fixture fixture;
    struct blocks blocks;
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

/* The caches are addresses: nothing reads or writes them here. */
static uint8_t cache[1 << 20] __attribute__((aligned(256)));

static void bind_memory(struct step *s)
{
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    if (layer_num_caches(s->layer) > 0) {
        FUZZ_CHECK(layer_cache_spec(s->layer, 0, &spec, &s->error) == ATTN_OK);
    }
    if (spec.kind == ATTN_KV_SPEC_STATE) {
        const struct attn_cache_memory memory =
            SIZED(attn_cache_memory, .base = cache, .num_blocks = NUM_SLOTS);
        FUZZ_CHECK(spec.padded_page_bytes * NUM_SLOTS <= (int64_t)sizeof cache);
        FUZZ_CHECK(layer_bind_memory(s->layer, &memory, &s->error) == ATTN_OK);
    } else if (spec.kind != ATTN_KV_SPEC_NONE) {
        const bool latent =
            spec.kind == ATTN_KV_SPEC_MLA || spec.kind == ATTN_KV_SPEC_SLIDING_WINDOW_MLA;
        FUZZ_CHECK(spec.padded_page_bytes * NUM_BLOCKS <= (int64_t)sizeof cache);
        FUZZ_CHECK(layer_kv_views(s->layer, cache, NUM_BLOCKS, &k, &v, &s->error) == ATTN_OK);
        const struct attn_kv_view *const views[] = {&k, &v};
        FUZZ_CHECK(layer_bind_caches(s->layer, views, latent ? 1 : 2, &s->error) == ATTN_OK);
    }
}

static struct attn_tensor addressed(int64_t *shape, int32_t ndim)
{
    return (struct attn_tensor){
        cache, {ATTN_DEVICE_CPU, 0}, ndim, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
}

static void bind_params(struct step *s)
{
    const struct attn_layer_desc *l = &s->sampled.desc;
    const struct attn_mla_desc *m = &s->sampled.mla;
    const struct attn_recurrent_desc *g = &s->sampled.gdn;
    int64_t sink_shape[] = {l->sink_len, l->num_kv_heads, l->head_size};
    int64_t proj_shape[] = {l->num_q_heads * (m->qk_nope_head_dim + m->v_head_dim),
                            m->kv_lora_rank};
    int64_t conv_shape[] = {2 * g->num_k_heads * g->head_size_k + g->num_v_heads * g->head_size_v,
                            g->conv_width};
    const struct attn_tensor sink = addressed(sink_shape, 3), proj = addressed(proj_shape, 2),
                             conv = addressed(conv_shape, 2);
    const struct attn_mla_weights mla =
        EXTENSION(attn_mla_weights, ATTN_EXT_MLA_WEIGHTS, NULL, .kv_b_proj = &proj);
    const struct attn_recurrent_weights gdn =
        EXTENSION(attn_recurrent_weights, ATTN_EXT_RECURRENT_WEIGHTS, NULL, (const float *)cache,
                  (const float *)cache, &conv, NULL);
    const struct attn_mm_encoder_state encoder = EXTENSION(
        attn_mm_encoder_state, ATTN_EXT_DRAFT_MM_ENCODER_STATE, NULL, NULL, (float *)(void *)cache);
    const struct attn_layer_params params =
        SIZED(attn_layer_params,
              .next = l->kind == ATTN_LAYER_RECURRENT       ? &gdn.ext
                      : l->next == &s->sampled.mm_quant.ext ? &encoder.ext
                      : l->next == &s->sampled.mla.ext      ? &mla.ext
                                                            : NULL,
              .sink_k = l->sink_len > 0 ? &sink : NULL, .sink_v = l->sink_len > 0 ? &sink : NULL);
    const attn_status status = layer_bind_params(s->layer, &params, &s->error);
    fuzz_check_error(status, &s->error);
    FUZZ_CHECK(status == ATTN_OK);
}

/* Limits may ask for more than a fuzzer has; the core zeroes what it gets. */
static void *allocate_some(void *user, size_t size, size_t alignment)
{
    return size <= MOST_WORKSPACE
               ? aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment)
               : NULL;
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
        bind_params(s);
        bind_memory(s);
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

/* The same numbers in memory of their own: a device's next to the host's. */
static int32_t *twin(struct blocks *blocks, struct input *input, const int32_t *source,
                     int64_t count)
{
    int32_t *copy = numbers(blocks, count);
    memcpy(copy, source, (size_t)count * sizeof *copy);
    if (input_byte(input) == 1) {
        input_patch(input, copy, 0, (size_t)count * sizeof *copy);
    }
    return copy;
}

/* Lengths and rows: sound ones, then some of them changed. */
static void add_lengths(struct blocks *blocks, struct input *input, struct attn_batch *b,
                        int32_t requests)
{
    int32_t *start = numbers(blocks, requests + 1), *lens = numbers(blocks, requests);
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
    if (requests > 0 && input_byte(input) == 1) {
        input_patch(input, lens, 0, (size_t)requests * sizeof *lens);
    }
    b->query_start_loc_host = start;
    b->query_start_loc = twin(blocks, input, start, requests + 1);
    b->seq_lens_host = lens;
    b->seq_lens = twin(blocks, input, lens, requests);
    b->encoder_seq_lens_host = lens;
    b->encoder_seq_lens = twin(blocks, input, lens, requests);
}

static void add_tables(struct blocks *blocks, struct input *input, struct attn_batch *b)
{
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
    if (entries > 0 && input_byte(input) == 1) {
        input_patch(input, table, 0, (size_t)entries * sizeof *table);
    }
    if (b->num_slots > 0 && input_byte(input) == 1) {
        slots[input_byte(input) % b->num_slots] = input_int64(input);
    } else if (b->num_slots > 0 && input_byte(input) == 1) { /* an alias */
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

/* What a batch may carry besides. */
static void add_more(struct step *s, struct input *input, struct attn_batch *b)
{
    const int32_t requests = (int32_t)clamp(b->num_reqs, 0, MOST_REQUESTS);
    const int32_t wide = 1 + s->sampled.gdn.num_speculative_tokens;
    const uint8_t more = input_byte(input);
    struct attn_ext *next = NULL;
    if (more & 1) {
        int32_t *keys = numbers(&s->blocks, requests + 1);
        for (int32_t r = 0; r <= requests; r++) {
            keys[r] = r * 3;
        }
        input_patch(input, keys, 0, (size_t)(requests + 1) * sizeof *keys);
        b->key_start_loc_host = more & 2 ? keys : NULL;
        b->key_start_loc = twin(&s->blocks, input, keys, requests + 1);
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
        struct attn_batch_recurrent gdn =
            EXTENSION(attn_batch_recurrent, ATTN_EXT_BATCH_RECURRENT, NULL, NULL, wide, NULL, NULL);
        int32_t *slots = numbers(&s->blocks, (int64_t)requests * wide);
        for (int32_t i = 0; i < requests * wide; i++) {
            slots[i] = i % NUM_SLOTS;
        }
        if (requests > 0) {
            input_patch(input, slots, 0, (size_t)(requests * wide) * sizeof *slots);
        }
        gdn.state_slots = more & 32 ? NULL : slots;
        gdn.num_accepted_tokens = more & 64 ? numbers(&s->blocks, requests) : NULL;
        next = blocks_struct(&s->blocks, input, &gdn, sizeof gdn, sizeof gdn);
    }
    if ((more & 128) || s->sampled.desc.next == &s->sampled.cp.ext) {
        struct attn_batch_context_parallel cp = {
            .ext = {ATTN_EXT_BATCH_CONTEXT, 0, sizeof cp, next}};
        int32_t *lens = numbers(&s->blocks, requests);
        for (int32_t r = 0; r < requests; r++) {
            lens[r] = r * 5;
        }
        if (requests > 0) {
            input_patch(input, lens, 0, (size_t)requests * sizeof *lens);
        }
        cp.local_seq_lens_host = lens;
        cp.local_seq_lens = twin(&s->blocks, input, lens, requests);
        cp.max_local_seq_len = input_int(input);
        next = blocks_struct(&s->blocks, input, &cp, sizeof cp, sizeof cp);
    }
    b->next = next;
}

static struct attn_batch make_batch(struct step *s, struct input *input)
{
    struct attn_batch b = {.struct_size = sizeof b};
    add_lengths(&s->blocks, input, &b, input_byte(input) % (MOST_REQUESTS + 1));
    b.max_encoder_seq_len = MOST_KEYS;
    b.block_table_stride = MOST_BLOCKS;
    b.num_slots = b.num_tokens;
    const int32_t sound = b.num_reqs;
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
    add_tables(&s->blocks, input, &b);
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
        FUZZ_CHECK(split.num_decodes + split.num_prefills == b->num_reqs);
    }
}

static struct attn_tensor rows(struct step *s, int64_t *shape, int64_t count, int64_t heads,
                               int64_t size)
{
    shape[0] = count;
    shape[1] = heads;
    shape[2] = size;
    void *data = blocks_add(&s->blocks, (size_t)(count * heads * size) * sizeof(float));
    return (struct attn_tensor){
        data, {ATTN_DEVICE_CPU, 0}, 3, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
}

/* One of a run's tensors other than it has to be: each as long as it says, or refused unread. */
static void spoil_tensor(struct step *s, struct input *input, struct attn_tensor *t)
{
    int64_t *strides = blocks_add(&s->blocks, 3 * sizeof *strides);
    switch (input_byte(input) % 8) {
    case 0:
        t->data = NULL;
        break;
    case 1:
        t->ndim = input_int(input);
        break;
    case 2:
        t->dtype = (struct attn_dtype){input_byte(input), input_byte(input), input_byte(input)};
        break;
    case 3:
        t->device = (struct attn_device){input_int(input), input_int(input)};
        break;
    case 4:
        t->shape = NULL;
        break;
    default:
        strides[2] = input_byte(input) < 128 ? 1 : input_int(input);
        strides[1] = t->shape[2] * (input_byte(input) % 2); /* 0: heads in one place */
        strides[0] = t->shape[2] * (input_byte(input) % 2 ? t->shape[1] : 1);
        t->strides = strides;
    }
}

/* Lists of just the tokens that the batch has, whose numbers are any; each way of leaving them out
 * is an input of its own. */
static const struct attn_ext *add_lists(struct step *s, struct input *input, int64_t tokens)
{
    const int64_t groups = s->sampled.desc.num_q_heads, entries = s->sampled.lists.max_entries;
    struct attn_io_index_lists *io = blocks_add(&s->blocks, sizeof *io);
    const size_t bytes = (size_t)(tokens * groups * entries) * sizeof(int32_t);
    int32_t *indices = blocks_add(&s->blocks, bytes);
    int32_t *lengths = blocks_add(&s->blocks, (size_t)(tokens * groups) * sizeof(int32_t));
    const uint8_t tag = input_byte(input);
    if (s->sampled.desc.next != &s->sampled.lists.ext) {
        return NULL;
    }
    for (int64_t i = 0; i < tokens * groups * entries; i++) {
        indices[i] = (int32_t)(i % entries);
    }
    input_patch(input, indices, 0, bytes);
    input_patch(input, lengths, 0, (size_t)(tokens * groups) * sizeof *lengths);
    *io = (struct attn_io_index_lists){
        .ext = {ATTN_EXT_DRAFT_IO_INDEX_LISTS, 0, input_struct_size(input, sizeof *io), NULL},
        .indices = tag == 1 ? NULL : indices,
        .token_stride = tag == 2 ? input_byte(input) % (groups * entries) : groups * entries,
        .group_stride = tag == 3 ? input_byte(input) % entries : entries,
        .lengths = tag == 4 ? NULL : lengths,
        .length_stride = tag == 5 ? input_byte(input) % groups : groups};
    io->ext.struct_size = io->ext.struct_size < sizeof *io ? io->ext.struct_size : sizeof *io;
    return tag == 6 ? NULL : &io->ext;
}

/* Tensors of just the rows that the batch has. */
static void run(struct step *s, struct input *input, attn_plan *plan, const struct attn_batch *b)
{
    const struct attn_layer_desc *l = &s->sampled.desc;
    const int64_t tokens = clamp(b->num_tokens, 0, MOST_TOKENS);
    const int64_t keys = clamp(b->num_slots > tokens ? b->num_slots : tokens, 0, LONGEST_ARRAY);
    int64_t shapes[5][3];
    struct attn_tensor tensors[5] = {rows(s, shapes[0], tokens, l->num_q_heads, l->head_size),
                                     rows(s, shapes[1], keys, l->num_kv_heads, l->head_size),
                                     rows(s, shapes[2], keys, l->num_kv_heads, l->head_size),
                                     rows(s, shapes[3], tokens, l->num_q_heads, l->head_size),
                                     rows(s, shapes[4], l->num_q_heads, tokens, 1)};
    tensors[4].ndim = 2;
    input_patch(input, shapes, 0, sizeof shapes);
    const uint8_t tag = input_byte(input);
    const struct attn_step_io io = SIZED(
        attn_step_io, .next = add_lists(s, input, tokens), .flags = tag < 8 ? tag : 0,
        .q = tag == 8 ? NULL : &tensors[0], .k = tag == 9 ? NULL : &tensors[1], .v = &tensors[2],
        .out = tag == 10 ? NULL : &tensors[3], .lse = tag >= 192 ? &tensors[4] : NULL);
    for (int32_t t = 0; t < 5; t++) { /* what a shape claims, its tensor has */
        const int64_t *own = shapes[t];
        int64_t there = t == 1 || t == 2 ? keys * l->num_kv_heads : tokens * l->num_q_heads;
        there *= t < 4 ? l->head_size : 1;
        if (own[0] < 0 || own[1] < 0 || (t < 4 && own[2] < 0) || own[0] > there || own[1] > there ||
            (t < 4 && own[2] > 1024) || own[0] * own[1] > there ||
            (t < 4 && own[0] * own[1] * own[2] > there)) {
            return;
        }
    }
    if (tag >= 128 && tag < 192) {
        spoil_tensor(s, input, &tensors[tag % 5]);
    }
    fuzz_check_error(plan_run(plan, s->layer, &io, &s->error), &s->error);
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
    const attn_status status =
        plan_update_block_table(s->plans[1], s->plans[0], &tables, NULL, &s->error);
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
        const bool spread = s->sampled.desc.next == &s->sampled.cp.ext;
        promised = (struct promised){.max_num_reqs = s->limits.max_num_reqs,
                                     .max_num_tokens = s->limits.max_num_tokens,
                                     .num_blocks = spread ? 0 : NUM_BLOCKS};
        attn_status status = way < 224 ? plan_batch(s->plans[0], &b, NULL, &s->error)
                                       : plan_graph(s->plans[0], way % 4, &b, NULL, &s->error);
        fuzz_check_error(status, &s->error);
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
