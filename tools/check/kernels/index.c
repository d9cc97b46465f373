/* SPDX-License-Identifier: Apache-2.0 */
/* Indexers: index keys are written, then chosen from, and each list is held to the scores that the
 * oracle computes of what lies in the cache. Most inputs are small whole numbers: every sum is
 * exact in float32, many scores are equal, and so there is one right list. */
#include <attn/draft/indexer.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cases/kernel_test.h"
#include "common/names.h"
#include "harness/planned.h"
#include "kernels/kernels.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/oracle.h"
#include "support/random.h"

enum { REQS = 5, BLOCK = 64, FIRST_ROW = 2, PADDING = 3, POISON_BLOCKS = 2 };
enum { COLUMNS = 5, LONG_COLUMNS = 160 }; /* columns of the block table */

/* Keys before the step, and its queries: of steps of one token, of prompts, and of both. A request
 * has none, one is shorter than a list, one ends within a row. In long ones a kernel cannot keep
 * all scores of a list in its shared memory. */
static const struct shape {
    const char *name;
    int32_t columns;
    int32_t before[REQS], queries[REQS];
} shapes[] = {{"decode", COLUMNS, {300, 0, 5, 127, 63}, {1, 0, 1, 1, 1}},
              {"prefill", COLUMNS, {0, 100, 0, 0, 190}, {70, 33, 1, 0, 65}},
              {"mixed", COLUMNS, {255, 18, 0, 64, 0}, {1, 4, 17, 0, 130}},
              {"long", LONG_COLUMNS, {9999, 100, 5000, 0, 10220}, {4, 1, 3, 0, 2}}};

struct form {
    const char *name;
    int32_t heads, head_size;
    struct attn_indexer_desc desc;
};
static const struct form forms[] = {
    {"dsa", 8, 64, {.topk = 48, .activation = ATTN_INDEXER_RELU, .has_weights = 1}},
    {"identity", 3, 40, {.topk = 7}},
    {"msa", 4, 32, {.topk = 4, .num_groups = 4, .rows_per_entry = 32, .last_entries = 1}},
    {"msa_ends",
     4,
     32,
     {.topk = 5, .num_groups = 2, .rows_per_entry = 16, .first_entries = 1, .last_entries = 2}},
    {"ends_on_top", 2, 32, {.topk = 6, .first_entries = 3, .last_entries = 9, .forced_on_top = 1}},
    {"qsa",
     4,
     64,
     {.topk = 16,
      .activation = ATTN_INDEXER_RELU,
      .tokens_per_row = 4,
      .tail = 1,
      .forced_on_top = 1}},
    {"tail_inside",
     4,
     32,
     {.topk = 5,
      .activation = ATTN_INDEXER_RELU,
      .has_weights = 1,
      .tokens_per_row = 16,
      .tail = 1}},
    {"csa",
     6,
     32,
     {.topk = 32, .activation = ATTN_INDEXER_RELU, .has_weights = 1, .tokens_per_row = 4}},
    {"dsa_128", 16, 128, {.topk = 40, .activation = ATTN_INDEXER_RELU, .has_weights = 1}},
    /* where a token has a negative weight or 0, the best are thousands of zeros */
    {"zeros", 1, 32, {.topk = 48, .activation = ATTN_INDEXER_RELU, .has_weights = 1}},
    {"pooled",
     4,
     16,
     {.topk = 3, .num_groups = 2, .has_weights = 1, .tokens_per_row = 4, .rows_per_entry = 5}}};

struct index_variant {
    const struct form *form;
    const struct shape *shape;
    int32_t dtype, kv_dtype;
    bool drawn; /* numbers of a normal distribution: near scores may be taken for one another */
    bool nan;   /* in the first key of each request */
    bool e4m3_q;
};

struct index_case {
    struct index_variant v;
    int32_t starts[REQS + 1], lens[REQS], num_slots, num_context, room;
    double *keys; /* [REQS, longest, D], as the step's dtype has them */
    size_t q, rows, context, weights, cache, scales, out, lengths, seq_lens, start_loc, table,
        slots, context_slots;
};

struct index_step {
    struct attn_indexer_desc desc;
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_batch batch;
    struct attn_kv_view view;
    struct attn_io_indexer io;
    struct case_tensor q, rows, context, weights, out;
    struct attn_attend_args attend;
    struct attn_write_kv_args write;
};

static int32_t columns_of(const struct index_case *c)
{
    return c->v.shape->columns;
}

static int32_t longest_of(const struct index_case *c)
{
    return columns_of(c) * BLOCK;
}

static int32_t rows_in_block(const struct index_case *c)
{
    const int32_t tokens = c->v.form->desc.tokens_per_row;
    return BLOCK / (tokens > 0 ? tokens : 1);
}

static size_t row_bytes(const struct index_case *c)
{
    return (size_t)c->v.form->head_size *
           (c->v.kv_dtype <= ATTN_KV_F32 ? number_bytes(c->v.kv_dtype) : 1);
}

static int32_t q_dtype(const struct index_case *c)
{
    return c->v.e4m3_q ? ATTN_DTYPE_FP8_E4M3 : c->v.dtype;
}

static double scale_of_rows(const struct index_case *c)
{
    return c->v.kv_dtype == ATTN_KV_FP8_E4M3 ? 0.5 : 1;
}

static void describe(struct index_step *s, const struct index_case *c)
{
    memset(s, 0, sizeof *s);
    s->desc = c->v.form->desc;
    s->layer = (struct attn_layer_desc){.struct_size = sizeof s->layer,
                                        .name = "indexer",
                                        .dtype = c->v.dtype,
                                        .kv_dtype = c->v.kv_dtype,
                                        .num_q_heads = c->v.form->heads,
                                        .head_size = c->v.form->head_size,
                                        .window_left = -1,
                                        .window_right = -1,
                                        .block_size = BLOCK};
    layer_set_indexer(&s->layer, &s->desc);
    s->layer.scale = 0.25f;
    s->layer.k_scale_form =
        c->v.kv_dtype == ATTN_KV_FP8_E4M3 ? ATTN_SCALE_PER_TENSOR : ATTN_SCALE_NONE;
    s->params = (struct attn_layer_params){.struct_size = sizeof s->params,
                                           .q_scale_host = c->v.e4m3_q ? 0.5f : 0,
                                           .k_scale_host = (float)scale_of_rows(c)};
    if (c->v.e4m3_q) {
        s->layer.q_scale_form = ATTN_SCALE_PER_TENSOR;
        s->layer.q_dtype = ATTN_DTYPE_FP8_E4M3;
    }
}

static void bind_step(struct index_step *s, const struct index_case *c, struct backend *backend,
                      uint8_t *base, const struct device *device, void *stream)
{
    const int32_t tokens = c->starts[REQS], heads = c->v.form->heads, d = c->v.form->head_size;
    describe(s, c);
    s->batch = (struct attn_batch){.struct_size = sizeof s->batch,
                                   .num_reqs = REQS,
                                   .num_tokens = tokens + PADDING,
                                   .num_actual_tokens = tokens,
                                   .max_query_len = longest_of(c),
                                   .max_seq_len = longest_of(c),
                                   .query_start_loc = (const int32_t *)(base + c->start_loc),
                                   .query_start_loc_host = c->starts,
                                   .seq_lens = (const int32_t *)(base + c->seq_lens),
                                   .seq_lens_host = c->lens,
                                   .block_table = (const int32_t *)(base + c->table),
                                   .block_table_stride = columns_of(c),
                                   .block_table_rows = REQS,
                                   .slot_mapping = (const int64_t *)(base + c->slots),
                                   .num_slots = c->num_slots};
    const int64_t row = (int64_t)row_bytes(c), in_block = rows_in_block(c);
    s->view = (struct attn_kv_view){.struct_size = sizeof s->view,
                                    .data = base + c->cache,
                                    .num_blocks = REQS * columns_of(c) + POISON_BLOCKS,
                                    .block_size = (int32_t)in_block,
                                    .num_heads = 1,
                                    .head_size = d,
                                    .stride_block = in_block * row,
                                    .stride_slot = row,
                                    .stride_head = row};
    if (c->v.kv_dtype == ATTN_KV_FP8_PER_TOKEN_HEAD) {
        s->view.scale = base + c->scales;
        s->view.scale_stride_block = in_block * 4;
        s->view.scale_stride_slot = s->view.scale_stride_head = 4;
    }
    s->q = case_rows(tokens + PADDING, heads, d);
    s->rows = case_rows(c->num_slots, 1, d);
    s->context = case_rows(c->num_context, 1, d);
    s->out = case_rows(tokens + PADDING, s->desc.num_groups, c->room);
    s->weights = (struct case_tensor){.shape = {tokens + PADDING, heads}, .strides = {heads, 1}};
    case_bind(&s->context, base + c->context, device, c->v.dtype, 3);
    s->io = (struct attn_io_indexer){
        .ext = {ATTN_EXT_DRAFT_IO_INDEXER, 0, sizeof s->io, NULL},
        .weights = s->desc.has_weights
                       ? case_bind(&s->weights, base + c->weights, device, ATTN_DTYPE_F32, 2)
                       : NULL,
        .lengths = (int32_t *)(base + c->lengths)};
    s->write = (struct attn_write_kv_args){
        .struct_size = sizeof s->write,
        .instance = backend->instance,
        .layer = &s->layer,
        .params = &s->params,
        .k_cache = &s->view,
        .slot_mapping = s->batch.slot_mapping,
        .num_slots = c->num_slots,
        .stream = stream,
        .k = case_bind(&s->rows, base + c->rows, device, c->v.dtype, 3)};
    s->attend = (struct attn_attend_args){
        .struct_size = sizeof s->attend,
        .next = &s->io.ext,
        .instance = backend->instance,
        .layer = &s->layer,
        .params = &s->params,
        .batch = &s->batch,
        .k_cache = &s->view,
        .stream = stream,
        .flags = ATTN_RUN_NO_WRITE,
        .phase = c->v.shape == &shapes[0] ? ATTN_PHASE_DECODE : ATTN_PHASE_PREFILL,
        .q = case_bind(&s->q, base + c->q, device, q_dtype(c), 3),
        .out = case_bind(&s->out, base + c->out, device, ATTN_DTYPE_F32, 3)};
    s->out.tensor.dtype = (struct attn_dtype){ATTN_CODE_INT, 32, 1};
}

static attn_status call_index(struct backend *backend, uint8_t *base, const struct device *device,
                              void *stream, const void *context, struct attn_error *error)
{
    const struct index_case *c = context;
    const struct attn_limits limits = {
        sizeof limits, NULL,          REQS,          c->starts[REQS] + PADDING,
        longest_of(c), longest_of(c), columns_of(c), 0};
    struct index_step s;
    bind_step(&s, c, backend, base, device, stream);
    attn_status status = backend->kernels.write_kv(&s.write, error);
    return status == ATTN_OK
               ? planned_call(backend, device, &limits, &s.attend, backend->kernels.attend, error)
               : status;
}

static double draw(const struct index_case *c, uint64_t *random)
{
    return c->v.drawn ? random_normal(random) : random_below(random, 5) - 2;
}

static void fill(struct index_case *c, uint8_t *base, uint64_t *random)
{
    const int32_t d = c->v.form->head_size, tokens = c->starts[REQS], heads = c->v.form->heads;
    int32_t *table = (int32_t *)(base + c->table);
    int64_t *slots = (int64_t *)(base + c->slots), *earlier = (int64_t *)(base + c->context_slots);
    int64_t row = 0, context = 0;
    memcpy(base + c->seq_lens, c->lens, sizeof c->lens);
    memcpy(base + c->start_loc, c->starts, sizeof c->starts);
    for (int32_t i = 0; i < REQS * columns_of(c);
         i++) { /* shuffled; the first blocks hold poison */
        const int32_t other = random_below(random, i + 1);
        table[i] = table[other];
        table[other] = i + POISON_BLOCKS;
    }
    for (int32_t r = 0; r < REQS; r++) {
        for (int32_t j = 0; j < c->lens[r]; j++) {
            const int64_t slot = (int64_t)table[r * columns_of(c) + j / BLOCK] * BLOCK + j % BLOCK;
            const bool now = j >= c->v.shape->before[r];
            uint8_t *to = base + (now ? c->rows : c->context);
            int64_t *at = now ? &row : &context;
            double *key = &c->keys[((int64_t)r * longest_of(c) + j) * d];
            for (int32_t i = 0; i < d; i++) {
                double x = draw(c, random);
                x = c->v.nan && j == 0 && i == 3 ? NAN : x;
                number_store(to, *at * d + i, c->v.dtype, x);
                key[i] = number_load(to, *at * d + i, c->v.dtype);
            }
            (now ? slots : earlier)[(*at)++] = slot;
        }
    }
    for (int64_t i = 0; i < (int64_t)(tokens - FIRST_ROW) * heads * d; i++) {
        number_store(base + c->q, (int64_t)FIRST_ROW * heads * d + i, q_dtype(c), draw(c, random));
    }
    for (int32_t i = FIRST_ROW * heads; i < tokens * heads; i++) {
        ((float *)(base + c->weights))[i] = (float)draw(c, random);
    }
}

/* A row of the cache as its true values, and what it should hold; false: it does not. */
static bool load_row(const struct index_case *c, const uint8_t *base, int32_t r, int64_t row,
                     double *values)
{
    const int32_t d = c->v.form->head_size, in_block = rows_in_block(c);
    const int32_t *table = (const int32_t *)(base + c->table);
    const int64_t at =
        (int64_t)table[r * columns_of(c) + row / in_block] * in_block + row % in_block;
    const double *key =
        &c->keys[((int64_t)r * longest_of(c) + (row + 1) * (BLOCK / in_block) - 1) * d];
    const bool scaled = c->v.kv_dtype == ATTN_KV_FP8_PER_TOKEN_HEAD;
    const double scale =
        scaled ? (double)((const float *)(base + c->scales))[at] : scale_of_rows(c);
    double largest = 0;
    bool right = true;
    for (int32_t i = 0; i < d; i++) {
        values[i] =
            number_load(base + c->cache, at * d + i, scaled ? ATTN_DTYPE_FP8_E4M3 : c->v.kv_dtype) *
            scale;
        largest = fmax(largest, fabs(key[i]));
    }
    for (int32_t i = 0; i < d; i++) { /* half a step of e4m3 */
        const double bound = c->v.kv_dtype <= ATTN_KV_F32 ? 0 : largest / 16;
        right &= isnan(key[i]) ? isnan(values[i]) : fabs(values[i] - key[i]) <= bound;
    }
    return right;
}

static enum trial_result verify_query(struct kernel_test *test, const struct index_case *c,
                                      int32_t r, int32_t token, const double *keys, double *q,
                                      double *scores)
{
    const struct form *f = c->v.form;
    struct index_step s;
    describe(&s, c);
    const int32_t groups = s.desc.num_groups, d = f->head_size, heads = f->heads / groups;
    const int64_t position = c->lens[r] - c->starts[r + 1] + token;
    const struct oracle_indexer oracle = {heads,
                                          d,
                                          s.desc.topk,
                                          s.desc.tokens_per_row,
                                          s.desc.rows_per_entry,
                                          s.desc.first_entries,
                                          s.desc.last_entries,
                                          s.desc.activation == ATTN_INDEXER_RELU,
                                          s.desc.tail,
                                          s.desc.forced_on_top,
                                          (double)s.layer.scale};
    for (int32_t g = 0; g < groups; g++) {
        double weights[16], slack = 0;
        const int32_t *list =
            (const int32_t *)(test->found + c->out) + ((int64_t)token * groups + g) * c->room;
        const int32_t *lengths = (const int32_t *)(test->found + c->lengths);
        for (int32_t i = 0; i < heads * d; i++) {
            q[i] = number_load(test->image.bytes + c->q,
                               ((int64_t)token * f->heads + g * heads) * d + i, q_dtype(c));
        }
        for (int32_t h = 0; h < heads; h++) {
            weights[h] = (double)((const float *)(test->image.bytes +
                                                  c->weights))[token * f->heads + g * heads + h];
        }
        oracle_index_scores(&oracle, position, q, s.desc.has_weights ? weights : NULL, keys,
                            scores);
        const int64_t entries = oracle_index_entries(&oracle, position);
        for (int64_t e = 0; e < entries; e++) {
            const bool inexact = c->v.drawn || c->v.kv_dtype == ATTN_KV_FP8_PER_TOKEN_HEAD;
            slack = inexact ? fmax(slack, 1e-3 * fabs(scores[e])) : 0;
        }
        const char *wrong = oracle_index_judge(&oracle, position, scores, list, c->room, slack);
        int32_t length = 0;
        while (length < c->room && list[length] >= 0) {
            length++;
        }
        if (wrong == NULL && lengths[token * groups + g] != length) {
            wrong = "its length is not what `lengths` says";
        }
        if (wrong != NULL) {
            return trial_say(test->trial, TRIAL_FAILED,
                             "request %d, token %d (position %lld), list %d of %d entries: %s", r,
                             token, (long long)position, g, length, wrong);
        }
    }
    return TRIAL_PASSED;
}

static enum trial_result verify_index(struct kernel_test *test, const struct index_case *c)
{
    const int32_t d = c->v.form->head_size, tokens = BLOCK / rows_in_block(c);
    double *memory =
        malloc((size_t)(longest_of(c) * (d + 1) + c->v.form->heads * d) * sizeof *memory);
    double *scores = memory + longest_of(c) * d, *q = scores + longest_of(c);
    enum trial_result result = TRIAL_PASSED;
    const size_t bytes = row_bytes(c), in_block = (size_t)rows_in_block(c);
    if (memory == NULL) {
        return trial_say(test->trial, TRIAL_FAILED, "no memory for the case");
    }
    for (int32_t r = 0; r < REQS && result == TRIAL_PASSED; r++) {
        const int32_t rows = c->lens[r] / tokens;
        for (int32_t j = 0; j < rows && result == TRIAL_PASSED; j++) {
            if (!load_row(c, test->found, r, j, memory + (int64_t)j * d)) {
                result = trial_say(test->trial, TRIAL_FAILED,
                                   "request %d: row %d of the cache is not that of its last token",
                                   r, j);
            }
        }
        const size_t next = (size_t)rows, block = next / in_block;
        if (result == TRIAL_PASSED &&
            block < (size_t)columns_of(c)) { /* the row that is not finished */
            const int32_t *table = (const int32_t *)(test->image.bytes + c->table);
            const size_t at =
                c->cache +
                ((size_t)table[(size_t)(r * columns_of(c)) + block] * in_block + next % in_block) *
                    bytes;
            if (memcmp(test->found + at, test->image.bytes + at, bytes) != 0) {
                result = trial_say(test->trial, TRIAL_FAILED,
                                   "request %d: row %d of the cache was written and its last token "
                                   "has not come",
                                   r, rows);
            }
        }
        for (int32_t t = c->starts[r]; t < c->starts[r + 1] && result == TRIAL_PASSED; t++) {
            result = verify_query(test, c, r, t, memory, q, scores);
        }
    }
    free(memory);
    const size_t list = (size_t)c->room * 4 *
                        (size_t)(c->v.form->desc.num_groups > 0 ? c->v.form->desc.num_groups : 1);
    const size_t end = c->out + (size_t)c->starts[REQS] * list;
    if (result == TRIAL_PASSED &&
        (memcmp(test->found + c->out, test->image.bytes + c->out, FIRST_ROW * list) != 0 ||
         memcmp(test->found + end, test->image.bytes + end, PADDING * list) != 0)) {
        result = trial_say(test->trial, TRIAL_FAILED, "rows next to the step's were written");
    }
    return result;
}

static void add_buffers(struct kernel_test *test, struct index_case *c)
{
    struct index_step s;
    describe(&s, c);
    const size_t d = (size_t)c->v.form->head_size, e = number_bytes(c->v.dtype);
    const size_t tokens = (size_t)(c->starts[REQS] + PADDING), heads = (size_t)c->v.form->heads;
    const size_t rows = (size_t)(REQS * columns_of(c) + POISON_BLOCKS) * (size_t)rows_in_block(c);
    const size_t lists = tokens * (size_t)s.desc.num_groups;
    c->room = layer_list_room(&s.desc);
    c->q = kernel_test_add(test, "q", tokens * heads * d * e, false);
    c->rows = kernel_test_add(test, "k", (size_t)(c->num_slots + 1) * d * e, false);
    c->context =
        kernel_test_add(test, "keys of earlier steps", (size_t)(c->num_context + 1) * d * e, false);
    c->weights = kernel_test_add(test, "weights", tokens * heads * sizeof(float), false);
    c->cache = kernel_test_add(test, "k_cache", rows * row_bytes(c), true);
    c->scales = kernel_test_add(test, "scales of k_cache", rows * sizeof(float), true);
    c->out = kernel_test_add(test, "out", lists * (size_t)c->room * sizeof(int32_t), true);
    c->lengths = kernel_test_add(test, "lengths", lists * sizeof(int32_t), true);
    c->seq_lens = kernel_test_add(test, "seq_lens", sizeof c->lens, false);
    c->start_loc = kernel_test_add(test, "query_start_loc", sizeof c->starts, false);
    c->table = kernel_test_add(test, "block_table",
                               (size_t)(REQS * columns_of(c)) * sizeof(int32_t), false);
    c->slots = kernel_test_add(test, "slot_mapping", tokens * sizeof(int64_t), false);
    c->context_slots = kernel_test_add(test, "slots of earlier steps",
                                       (size_t)(c->num_context + 1) * sizeof(int64_t), false);
}

static enum trial_result run_index(struct trial *trial, const void *variant, uint64_t seed)
{
    struct index_case c = {.v = *(const struct index_variant *)variant};
    struct attn_error error = ATTN_ERROR_INIT;
    struct index_step s;
    struct kernel_test test;
    c.starts[0] = FIRST_ROW;
    for (int32_t r = 0; r < REQS; r++) {
        c.starts[r + 1] = c.starts[r] + c.v.shape->queries[r];
        c.lens[r] = c.v.shape->before[r] + c.v.shape->queries[r];
        c.num_context += c.v.shape->before[r];
    }
    c.num_slots = c.starts[REQS] - FIRST_ROW;
    kernel_test_init(&test, trial);
    add_buffers(&test, &c);
    c.keys = calloc((size_t)(REQS * longest_of(&c) * c.v.form->head_size), sizeof *c.keys);
    enum trial_result result = trial_say(trial, TRIAL_FAILED, "no memory for the case");
    if (!test.image.failed && c.keys != NULL) {
        fill(&c, test.image.bytes, &seed);
        bind_step(&s, &c, trial->reference, test.image.bytes, &device_host, NULL);
        s.write.k = &s.context.tensor;
        s.write.slot_mapping = (const int64_t *)(test.image.bytes + c.context_slots);
        s.write.num_slots = c.num_context;
        attn_status status = trial->reference->kernels.write_kv(&s.write, &error);
        result = !trial_supports(trial, trial->tested, &s.layer, s.attend.phase) ? TRIAL_SKIPPED
                 : status == ATTN_OK
                     ? kernel_test_run(&test, call_index, &c)
                     : trial_call_failed(trial, "reference write_kv", status, &error);
    }
    result = result == TRIAL_PASSED ? verify_index(&test, &c) : result;
    free(c.keys);
    kernel_test_finish(&test);
    return result;
}

static bool takes(const struct attn_indexer_caps *caps, const struct form *f)
{
    const struct attn_indexer_desc *x = &f->desc;
    const uint32_t activations = caps->activations != 0 ? caps->activations : 1;
    return activations >> x->activation & 1 && f->head_size <= caps->head_size_max &&
           x->topk <= caps->topk_max &&
           (x->num_groups <= 1 || x->num_groups <= caps->num_groups_max) &&
           (x->tokens_per_row <= 1 || x->tokens_per_row <= caps->tokens_per_row_max) &&
           (x->rows_per_entry <= 1 || x->rows_per_entry <= caps->rows_per_entry_max) &&
           x->first_entries + x->last_entries + x->tail <= caps->forced_max;
}

static void try_index(const struct kernel_sink *sink, const struct index_variant *v)
{
    char name[128];
    const bool plain = v->kv_dtype <= ATTN_KV_F32;
    if (!(sink->caps->dtypes >> v->dtype & 1) ||
        !(sink->caps->kv_dtypes >> v->kv_dtype & 1 ||
          (plain && sink->caps->kv_dtypes >> ATTN_KV_AUTO & 1))) {
        return;
    }
    if (v->e4m3_q && !(sink->caps->features & ATTN_FEATURE_QUANTIZED_QUERY &&
                       sink->caps->q_dtypes >> ATTN_DTYPE_FP8_E4M3 & 1)) {
        return;
    }
    snprintf(name, sizeof name, "index.%s.%s.%s.%s%s%s%s", v->form->name, v->shape->name,
             dtype_name(v->dtype), kv_dtype_name(v->kv_dtype), v->drawn ? ".drawn" : "",
             v->nan ? ".nan" : "", v->e4m3_q ? ".q_e4m3" : "");
    sink->try(sink->user, name, run_index, v);
}

void index_cases(const struct kernel_sink *sink)
{
    const struct attn_indexer_caps *caps = (const struct attn_indexer_caps *)backend_extension(
        sink->caps, ATTN_EXT_DRAFT_INDEXER_CAPS, sizeof *caps);
    static const int32_t kv_dtypes[] = {0, ATTN_KV_FP8_E4M3, ATTN_KV_FP8_PER_TOKEN_HEAD};
    enum { SHAPES = sizeof shapes / sizeof *shapes, FORMS = sizeof forms / sizeof *forms };
    if (!(sink->caps->layer_kinds >> ATTN_LAYER_DRAFT_INDEXER & 1) || caps == NULL) {
        return;
    }
    for (int32_t i = 0; i < FORMS * SHAPES; i++) {
        const int32_t form = i / SHAPES;
        const bool is_long = shapes[i % SHAPES].columns == LONG_COLUMNS;
        if (!takes(caps, &forms[form]) || (is_long && forms[form].heads > 3)) {
            continue;
        }
        for (int32_t k = 0; k < 3; k++) { /* each form in each dtype, in one shape or another */
            const int32_t dtype = ATTN_DTYPE_F16 + (form + i + k) % 3;
            const struct index_variant v = {.form = &forms[form],
                                            .shape = &shapes[i % SHAPES],
                                            .dtype = dtype,
                                            .kv_dtype = kv_dtypes[k] != 0 ? kv_dtypes[k] : dtype};
            struct index_variant more = v;
            try_index(sink, &v);
            more.drawn = k == i % 3;
            more.nan = k == 0 && i % 2 == 0 && !more.drawn;
            more.e4m3_q = k >= 1 && (k == 1 || forms[form].head_size == 128) && !more.drawn;
            if (more.drawn || more.nan || more.e4m3_q) {
                try_index(sink, &more);
            }
        }
    }
}
