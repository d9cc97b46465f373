/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla and attend_mla_sparse over latent rows: the step's rows are written, then attended.
 * Numbers of heads that tiles do not divide, soft caps and trees among them. */
#include <attn/mla.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/names.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/random.h"
#include "cases/compare.h"
#include "kernels/kernels.h"
#include "cases/lists.h"
#include "cases/kernel_test.h"
#include "cases/problem_copy.h"
#include "harness/planned.h"

enum { REQS = 4, BLOCK = 64, TABLE = 4, BLOCKS = REQS * TABLE, MAX_TOKENS = 5 * REQS };
enum { TREE_ROW = 2 }; /* words or floats; a request has as many rows at most */
enum { WINDOW = 70 };  /* from one tile of keys into another */
enum { DS_MLA_RANK = 512, DS_MLA_ROPE = 64, DS_MLA_ROW = 656 };

/* Next to causal rows without one. */
static const struct mla_term {
    uint64_t term;
    const char *name;
} mla_terms[] = {
    {ATTN_TERM_SOFT_CAP, ".soft_cap"},           {ATTN_TERM_TREE_BITS, ".tree_bits"},
    {ATTN_TERM_TREE_BIAS, ".tree_bias"},         {ATTN_TERM_SINKS, ".sinks"},
    {ATTN_TERM_SLIDING_WINDOW, ".window"},       {ATTN_TERM_SYMMETRIC_WINDOW, ".windows"},
    {ATTN_TERM_BIDIRECTIONAL, ".bidirectional"},
};

/* Within what attn_mla_caps says. */
struct mla_sizes {
    int32_t rank, rope, heads, topk;
};

struct mla_variant {
    struct mla_sizes n;
    int32_t dtype;
    int32_t kv_dtype;
    bool sparse;
    bool parts; /* q and new rows come as two tensors each */
    int32_t query_len;
    uint64_t term; /* 0 or one of mla_terms */
    bool nan;      /* in each request's last row, which only its last query sees */
    bool invariant;
    struct case_lists lists; /* in place of a sparse layer's top k */
};

struct mla_case {
    struct mla_variant v;
    struct lists_shape shape;
    int32_t lens[REQS], starts[REQS + 1];
    int32_t num_tokens;
    int32_t row; /* elements of a latent row */
    size_t q, rows, context, cache, out, lse, seq_lens, start_loc, table, slots, context_slots,
        topk, list_lengths, tree, sinks;
    int32_t num_context;
    int32_t part; /* the request that runs alone; -1: all of them */
};

static size_t row_bytes(const struct mla_variant *v)
{
    size_t row = (size_t)(v->n.rank + v->n.rope);
    return v->kv_dtype == ATTN_KV_FP8_DS_MLA ? DS_MLA_ROW
           : kv_is_fp8(v->kv_dtype)          ? row
                                             : row * number_bytes(v->dtype);
}

/* Everything that both kernels of a step take, over one copy of the image. */
struct mla_step {
    struct attn_mla_desc mla;
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_batch batch;
    struct attn_kv_view view;
    struct attn_io_mla io;
    struct lists_binding lists;
    struct case_tensor q, q_nope, q_pe, rows, kv_c, k_pe, context, out, lse;
    struct attn_attend_args attend;
    struct attn_write_kv_args write;
};

static void describe_term(struct attn_layer_desc *layer, uint64_t term)
{
    layer->soft_cap = term == ATTN_TERM_SOFT_CAP ? 15 : 0;
    layer->has_sinks = term == ATTN_TERM_SINKS;
    layer->causal = term != ATTN_TERM_BIDIRECTIONAL && term != ATTN_TERM_SYMMETRIC_WINDOW
                        ? ATTN_CAUSAL_YES
                        : ATTN_CAUSAL_NO;
    if (term == ATTN_TERM_TREE_BITS || term == ATTN_TERM_TREE_BIAS) {
        layer->tree_mask = term == ATTN_TERM_TREE_BITS ? ATTN_TREE_BITS : ATTN_TREE_BIAS;
    } else if (term == ATTN_TERM_SLIDING_WINDOW || term == ATTN_TERM_SYMMETRIC_WINDOW) {
        layer->has_window = 1;
        layer->window_left = WINDOW - 1;
        layer->window_right = term == ATTN_TERM_SYMMETRIC_WINDOW ? WINDOW - 1 : 0;
    }
}

static void describe(struct mla_step *s, const struct mla_case *c, uint8_t *base)
{
    bool fp8 = kv_is_fp8(c->v.kv_dtype);
    s->mla = (struct attn_mla_desc){.kv_lora_rank = c->v.n.rank,
                                    .qk_nope_head_dim = 128,
                                    .qk_rope_head_dim = c->v.n.rope,
                                    .v_head_dim = 128,
                                    .topk = c->v.sparse ? c->v.n.topk : 0};
    s->layer =
        (struct attn_layer_desc){.struct_size = sizeof s->layer,
                                 .name = "mla",
                                 .dtype = c->v.dtype,
                                 .kv_dtype = c->v.kv_dtype,
                                 .num_q_heads = c->v.n.heads,
                                 .window_left = -1,
                                 .window_right = -1,
                                 .block_size = BLOCK,
                                 .num_speculative_tokens = c->v.query_len - 1,
                                 .batch_invariant = c->v.invariant,
                                 .k_scale_form = fp8 ? ATTN_SCALE_PER_TENSOR : ATTN_SCALE_NONE,
                                 .v_scale_form = fp8 ? ATTN_SCALE_PER_TENSOR : ATTN_SCALE_NONE,
                                 .needs_lse = 1};
    layer_set_mla(&s->layer, &s->mla);
    if (c->v.lists.granularity > 0) {
        lists_bind(&c->v.lists, &c->shape, (const int32_t *)(base + c->topk),
                   (const int32_t *)(base + c->list_lengths), &s->lists);
        s->mla.topk = c->shape.entries;
        s->mla.ext.next = &s->lists.layer.ext;
    }
    s->layer.head_size_v = c->v.n.rank; /* the kernels' outputs are latent */
    s->layer.scale = (float)(1 / sqrt(192));
    describe_term(&s->layer, c->v.term);
    s->params = (struct attn_layer_params){
        .struct_size = sizeof s->params, .k_scale_host = 0.05f, .v_scale_host = 0.05f};
    s->params.sinks = s->layer.has_sinks ? (const float *)(base + c->sinks) : NULL;
    s->batch = (struct attn_batch){.struct_size = sizeof s->batch,
                                   .num_reqs = REQS,
                                   .num_tokens = c->num_tokens,
                                   .num_actual_tokens = c->num_tokens,
                                   .max_query_len = c->v.query_len,
                                   .max_seq_len = TABLE * BLOCK,
                                   .query_start_loc = (const int32_t *)(base + c->start_loc),
                                   .query_start_loc_host = c->starts,
                                   .seq_lens = (const int32_t *)(base + c->seq_lens),
                                   .seq_lens_host = c->lens,
                                   .block_table = (const int32_t *)(base + c->table),
                                   .block_table_stride = TABLE,
                                   .block_table_rows = REQS,
                                   .slot_mapping = (const int64_t *)(base + c->slots),
                                   .num_slots = c->num_tokens};
    if (s->layer.tree_mask != ATTN_TREE_NONE) {
        s->batch.tree = base + c->tree;
        s->batch.tree_stride_row = TREE_ROW;
        s->batch.tree_stride_request = TREE_ROW * TREE_ROW;
    }
    int64_t row = (int64_t)row_bytes(&c->v);
    s->view = (struct attn_kv_view){.struct_size = sizeof s->view,
                                    .data = base + c->cache,
                                    .num_blocks = BLOCKS,
                                    .block_size = BLOCK,
                                    .num_heads = 1,
                                    .head_size = c->row,
                                    .stride_block = BLOCK * row,
                                    .stride_slot = row,
                                    .stride_head = row};
}

/* A part of wider rows: columns `first` on. */
static struct attn_tensor *part(struct case_tensor *shaped, const struct mla_case *c, uint8_t *data,
                                const struct device *device, int64_t heads, int64_t first,
                                int64_t width)
{
    bool flat = heads == 0;
    int64_t row = (flat ? 1 : heads) * c->row;
    *shaped = (struct case_tensor){.shape = {c->num_tokens, flat ? width : heads, width},
                                   .strides = {row, flat ? 1 : c->row, 1}};
    return case_bind(shaped, data + (size_t)first * number_bytes(c->v.dtype), device, c->v.dtype,
                     flat ? 2 : 3);
}

static void bind_step(struct mla_step *s, const struct mla_case *c, struct backend *backend,
                      uint8_t *base, const struct device *device, void *stream)
{
    memset(s, 0, sizeof *s);
    describe(s, c, base);
    s->q = case_rows(c->num_tokens, c->v.n.heads, c->row);
    s->rows = case_rows(c->num_tokens, 1, c->row);
    s->context = case_rows(c->num_context, 1, c->row);
    s->out = case_rows(c->num_tokens, c->v.n.heads, c->v.n.rank);
    s->lse =
        (struct case_tensor){.shape = {c->v.n.heads, c->num_tokens}, .strides = {c->num_tokens, 1}};
    case_bind(&s->context, base + c->context, device, c->v.dtype, 3);
    s->io = (struct attn_io_mla){.ext = {ATTN_EXT_IO_MLA, 0, sizeof s->io, NULL}};
    if (c->v.parts) {
        s->io.q_nope = part(&s->q_nope, c, base + c->q, device, c->v.n.heads, 0, c->v.n.rank);
        s->io.q_pe = part(&s->q_pe, c, base + c->q, device, c->v.n.heads, c->v.n.rank, c->v.n.rope);
        s->io.kv_c = part(&s->kv_c, c, base + c->rows, device, 0, 0, c->v.n.rank);
        s->io.k_pe = part(&s->k_pe, c, base + c->rows, device, 0, c->v.n.rank, c->v.n.rope);
    }
    if (c->v.lists.granularity > 0) {
        s->io.ext.next = &s->lists.io.ext;
    } else if (c->v.sparse) {
        s->io.topk_indices = (const int32_t *)(base + c->topk);
        s->io.topk_stride = c->v.n.topk;
    }
    const struct attn_ext *next = c->v.parts || c->v.sparse ? &s->io.ext : NULL;
    const struct attn_tensor *rows = case_bind(&s->rows, base + c->rows, device, c->v.dtype, 3);
    const struct attn_tensor *q = case_bind(&s->q, base + c->q, device, c->v.dtype, 3);
    s->write = (struct attn_write_kv_args){.struct_size = sizeof s->write,
                                           .next = c->v.parts ? next : NULL,
                                           .instance = backend->instance,
                                           .layer = &s->layer,
                                           .params = &s->params,
                                           .k_cache = &s->view,
                                           .slot_mapping = s->batch.slot_mapping,
                                           .num_slots = c->num_tokens,
                                           .stream = stream,
                                           .k = c->v.parts ? NULL : rows};
    s->attend = (struct attn_attend_args){
        .struct_size = sizeof s->attend,
        .next = next,
        .instance = backend->instance,
        .layer = &s->layer,
        .params = &s->params,
        .batch = &s->batch,
        .k_cache = &s->view,
        .stream = stream,
        .flags = ATTN_RUN_NO_WRITE,
        .phase = ATTN_PHASE_DECODE,
        .q = c->v.parts ? NULL : q,
        .out = case_bind(&s->out, base + c->out, device, c->v.dtype, 3),
        .lse = case_bind(&s->lse, base + c->lse, device, ATTN_DTYPE_F32, 2)};
}

/* Only request c->part of the step. */
static void narrow(struct mla_step *s, const struct mla_case *c)
{
    const int32_t first = c->starts[c->part];
    const size_t e = number_bytes(c->v.dtype);
    s->batch = batch_of_request(&s->batch, c->part);
    s->batch.block_table_rows = 1;
    s->write.slot_mapping += first;
    s->write.num_slots = c->v.query_len;
    struct case_tensor *rows[] = {&s->rows, &s->kv_c, &s->k_pe};
    for (int32_t i = 0; i < 3; i++) {
        rows[i]->shape[0] = c->v.query_len;
        rows[i]->tensor.data =
            (uint8_t *)rows[i]->tensor.data + (size_t)(first * rows[i]->strides[0]) * e;
    }
}

/* The step's rows are written, then attended. */
static attn_status call_mla(struct backend *backend, uint8_t *base, const struct device *device,
                            void *stream, const void *context, struct attn_error *error)
{
    const struct mla_case *c = context;
    const struct attn_kernels *k = &backend->kernels;
    const struct attn_limits limits = {sizeof limits,  NULL,          REQS,  c->num_tokens,
                                       c->v.query_len, TABLE * BLOCK, TABLE, 0};
    struct mla_step s;
    bind_step(&s, c, backend, base, device, stream);
    if (c->part >= 0) {
        narrow(&s, c);
    }
    attn_status status = k->write_kv(&s.write, error);
    return status == ATTN_OK
               ? planned_call(backend, device, &limits, &s.attend,
                              c->v.sparse ? k->attend_mla_sparse : k->attend_mla, error)
               : status;
}

static void draw_lengths(struct mla_case *c, uint64_t *random)
{
    for (int32_t r = 0; r < REQS; r++) {
        c->lens[r] = c->v.query_len + random_below(random, TABLE * BLOCK - c->v.query_len);
        c->starts[r + 1] = c->starts[r] + c->v.query_len;
        c->num_context += c->lens[r] - c->v.query_len;
    }
    c->num_tokens = c->starts[REQS];
}

/* Each query sees itself; whether the second sees the first is drawn. */
static void fill_trees(const struct mla_case *c, uint8_t *base, uint64_t *random)
{
    uint32_t *bits = (uint32_t *)(base + c->tree);
    float *bias = (float *)(base + c->tree);
    for (int32_t i = 0; i < REQS * TREE_ROW; i++) {
        const bool sees_first = i % TREE_ROW == 0 || random_below(random, 2) != 0;
        if (c->v.term == ATTN_TERM_TREE_BITS) {
            bits[i * TREE_ROW] = i % TREE_ROW == 0 ? 1u : 2u + (sees_first ? 1u : 0u);
            bits[i * TREE_ROW + 1] = 0;
        } else {
            bias[i * TREE_ROW] = sees_first ? (float)random_normal(random) : -INFINITY;
            bias[i * TREE_ROW + 1] = (float)random_normal(random);
        }
    }
}

static void fill(struct mla_case *c, uint8_t *base, uint64_t *random)
{
    int32_t *table = (int32_t *)(base + c->table), *topk = (int32_t *)(base + c->topk);
    int64_t *slots = (int64_t *)(base + c->slots), *context = (int64_t *)(base + c->context_slots);
    memcpy(base + c->seq_lens, c->lens, sizeof c->lens);
    memcpy(base + c->start_loc, c->starts, sizeof c->starts);
    for (int32_t i = 0; i < BLOCKS; i++) { /* shuffled */
        int32_t other = random_below(random, i + 1);
        table[i] = table[other];
        table[other] = i;
    }
    for (int32_t r = 0; r < REQS; r++) {
        for (int32_t j = 0; j < c->lens[r]; j++) {
            int64_t slot = (int64_t)table[r * TABLE + j / BLOCK] * BLOCK + j % BLOCK;
            if (j < c->lens[r] - c->v.query_len) {
                *context++ = slot;
            } else {
                *slots++ = slot;
            }
        }
        const struct listed_request request = {c->lens[r], BLOCK, table + r * TABLE,
                                               BLOCKS * BLOCK};
        lists_fill(&c->v.lists, &c->shape, &request, c->starts[r], c->starts[r + 1], topk,
                   (int32_t *)(base + c->list_lengths), random);
        const int32_t ranked = c->v.lists.granularity > 0 ? 0 : c->v.query_len * c->v.n.topk;
        for (int32_t i = 0; i < ranked; i++) { /* -1 and past the end: none */
            int32_t pick = random_below(random, c->lens[r] + 20);
            topk[c->starts[r] * c->v.n.topk + i] = random_below(random, 9) ? pick : -1;
        }
    }
    if (c->v.term == ATTN_TERM_TREE_BITS || c->v.term == ATTN_TERM_TREE_BIAS) {
        fill_trees(c, base, random);
    }
    for (int32_t h = 0; h < c->v.n.heads && c->v.term == ATTN_TERM_SINKS; h++) {
        ((float *)(base + c->sinks))[h] = (float)(4 + 4 * random_normal(random)); /* as scores */
    }
    number_fill_normal(base + c->q, 0, (int64_t)c->num_tokens * c->v.n.heads * c->row, c->v.dtype,
                       2, random);
    number_fill_normal(base + c->rows, 0, (int64_t)c->num_tokens * c->row, c->v.dtype, 1, random);
    for (int32_t r = 0; r < REQS && c->v.nan; r++) {
        number_store(base + c->rows, (int64_t)(c->starts[r + 1] - 1) * c->row + 100 * r, c->v.dtype,
                     NAN);
    }
    number_fill_normal(base + c->context, 0, (int64_t)c->num_context * c->row, c->v.dtype, 1,
                       random);
}

static enum trial_result verify_mla(struct kernel_test *test, const struct mla_case *c)
{
    struct factor_value v[FACTOR_COUNT] = {{0, 0}};
    v[FACTOR_DTYPE].a = c->v.dtype;
    v[FACTOR_KV_DTYPE].a = c->v.kv_dtype;
    if (kernel_test_compare(test, "out", c->out, c->num_tokens, c->v.n.heads, c->v.n.rank,
                            c->v.dtype, bound_of_case(v)) != TRIAL_PASSED) {
        return TRIAL_FAILED;
    }
    const struct compared_lse lse = {c->v.n.heads, c->num_tokens, 1, 0, c->num_tokens, NULL};
    if (compare_lse(test->trial, &lse, test->expected + c->lse, test->found + c->lse,
                    bound_of_lse(v)) != TRIAL_PASSED) {
        return TRIAL_FAILED;
    }
    size_t bytes = BLOCKS * BLOCK * row_bytes(&c->v);
    bool plain = !kv_is_fp8(c->v.kv_dtype) && c->v.kv_dtype != ATTN_KV_FP8_DS_MLA &&
                 !c->v.nan; /* which may be another NaN */
    if (plain && memcmp(test->expected + c->cache, test->found + c->cache, bytes) != 0) {
        return trial_say(test->trial, TRIAL_FAILED, "the latent rows differ from the reference's");
    }
    return TRIAL_PASSED;
}

/* The rows before the step, by the reference. */
static attn_status write_context(struct trial *trial, const struct mla_case *c, uint8_t *base,
                                 struct attn_error *error)
{
    struct mla_step s;
    bind_step(&s, c, trial->reference, base, &device_host, NULL);
    s.write.next = NULL;
    s.write.k = &s.context.tensor;
    s.write.slot_mapping = (const int64_t *)(base + c->context_slots);
    s.write.num_slots = c->num_context;
    return trial->reference->kernels.write_kv(&s.write, error);
}

static enum trial_result run_mla(struct trial *trial, const void *variant, uint64_t seed)
{
    struct mla_case c = {.v = *(const struct mla_variant *)variant, .part = -1};
    struct attn_error error = ATTN_ERROR_INIT;
    struct kernel_test test;
    size_t e = number_bytes(c.v.dtype);
    c.row = c.v.n.rank + c.v.n.rope;
    c.shape = lists_shape(&trial->tested->caps, &c.v.lists, c.v.n.heads, 1);
    kernel_test_init(&test, trial);
    draw_lengths(&c, &seed);
    c.q = kernel_test_add(&test, "q", (size_t)(c.num_tokens * c.v.n.heads * c.row) * e, false);
    c.rows = kernel_test_add(&test, "kv_c and k_pe", (size_t)(c.num_tokens * c.row) * e, false);
    c.context =
        kernel_test_add(&test, "rows of earlier steps", (size_t)(c.num_context * c.row) * e, false);
    c.cache = kernel_test_add(&test, "k_cache", BLOCKS * BLOCK * row_bytes(&c.v), true);
    c.out =
        kernel_test_add(&test, "out", (size_t)(c.num_tokens * c.v.n.heads * c.v.n.rank) * e, true);
    c.lse =
        kernel_test_add(&test, "lse", (size_t)(c.num_tokens * c.v.n.heads) * sizeof(float), true);
    c.seq_lens = kernel_test_add(&test, "seq_lens", sizeof c.lens, false);
    c.start_loc = kernel_test_add(&test, "query_start_loc", sizeof c.starts, false);
    c.table = kernel_test_add(&test, "block_table", BLOCKS * sizeof(int32_t), false);
    c.slots = kernel_test_add(&test, "slot_mapping", MAX_TOKENS * sizeof(int64_t), false);
    c.context_slots = kernel_test_add(&test, "slots of earlier steps",
                                      (size_t)c.num_context * sizeof(int64_t), false);
    const size_t row = (size_t)(c.v.n.topk + c.shape.token_stride);
    c.topk = kernel_test_add(&test, "topk_indices", MAX_TOKENS * row * sizeof(int32_t), false);
    c.list_lengths = kernel_test_add(
        &test, "lengths of lists", MAX_TOKENS * (size_t)c.shape.per_token * sizeof(int32_t), false);
    c.tree = kernel_test_add(&test, "tree", REQS * TREE_ROW * TREE_ROW * sizeof(float), false);
    c.sinks = kernel_test_add(&test, "sinks", (size_t)c.v.n.heads * sizeof(float), false);
    enum trial_result result = trial_say(trial, TRIAL_FAILED, "no memory for the case");
    if (!test.image.failed) {
        struct mla_step step;
        fill(&c, test.image.bytes, &seed);
        memset(&step, 0, sizeof step);
        describe(&step, &c, test.image.bytes);
        attn_status status = write_context(trial, &c, test.image.bytes, &error);
        result =
            !trial_supports(trial, trial->tested, &step.layer, ATTN_PHASE_DECODE) ? TRIAL_SKIPPED
            : status == ATTN_OK ? kernel_test_run(&test, call_mla, &c)
                                : trial_call_failed(trial, "reference write_kv", status, &error);
    }
    if (result == TRIAL_PASSED) {
        result = verify_mla(&test, &c);
    }
    if (result == TRIAL_PASSED && c.v.invariant) {
        result = kernel_test_parts(&test, call_mla, &c, &c.part, REQS);
    }
    kernel_test_finish(&test);
    return result;
}

static int32_t at_most(int32_t value, int32_t most)
{
    return most > 0 && value > most ? most : value; /* 0: any */
}

/* The multiple next to `wanted`, above it if that is allowed. */
static int32_t multiple_of(int32_t wanted, int32_t multiple, int32_t most)
{
    multiple = multiple > 1 ? multiple : 1;
    int32_t size = (wanted + multiple - 1) / multiple * multiple;
    return most > 0 && size > most ? most / multiple * multiple : size;
}

/* What most models have, or sizes that divide by nothing that is not declared. `large`: heads of
 * one GPU without tensor parallelism, and lists longer than a tile of keys. */
static struct mla_sizes sizes_within(const struct attn_mla_caps *caps, bool odd, bool large)
{
    return (struct mla_sizes){.rank = at_most(odd ? 320 : DS_MLA_RANK, caps->kv_lora_rank_max),
                              .rope = at_most(odd ? 40 : DS_MLA_ROPE, caps->qk_rope_head_dim_max),
                              .heads = multiple_of(odd     ? 17
                                                   : large ? 128
                                                           : 64,
                                                   caps->num_q_heads_multiple, 0),
                              .topk = multiple_of(odd     ? 33
                                                  : large ? 200
                                                          : 48,
                                                  caps->topk_multiple, caps->topk_max)};
}

static bool served(const struct attn_backend_caps *caps, const struct mla_variant *v)
{
    uint64_t kernel = v->sparse ? ATTN_KERNEL_ATTEND_MLA_SPARSE : ATTN_KERNEL_ATTEND_MLA;
    bool plain = v->kv_dtype <= ATTN_KV_F32;
    bool cached =
        (caps->kv_dtypes >> v->kv_dtype & 1) || (plain && (caps->kv_dtypes >> ATTN_KV_AUTO & 1));
    bool whole =
        v->kv_dtype != ATTN_KV_FP8_DS_MLA || (v->n.rank == DS_MLA_RANK && v->n.rope == DS_MLA_ROPE);
    whole = whole && (!v->sparse || v->n.topk > 0);
    return (caps->kernels & kernel) && (caps->dtypes >> v->dtype & 1) && cached && whole &&
           (caps->terms & v->term) == v->term;
}

static void try_mla(const struct kernel_sink *sink, const struct mla_variant *v)
{
    char name[192], lists[64];
    const char *term = "";
    for (size_t i = 0; i < sizeof mla_terms / sizeof *mla_terms; i++) {
        term = mla_terms[i].term == v->term ? mla_terms[i].name : term;
    }
    if (!served(sink->caps, v)) {
        return;
    }
    int length = snprintf(name, sizeof name, "attend_mla%s.%s.%s.d%d+%d.h%d",
                          v->sparse ? "_sparse" : "", dtype_name(v->dtype),
                          kv_dtype_name(v->kv_dtype), v->n.rank, v->n.rope, v->n.heads);
    case_lists_name(&v->lists, lists, sizeof lists);
    length +=
        v->sparse ? snprintf(name + length, sizeof name - (size_t)length, ".k%d", v->n.topk) : 0;
    snprintf(name + length, sizeof name - (size_t)length, ".q%d%s%s%s%s%s%s", v->query_len,
             lists[0] != '\0' ? "." : "", lists, v->parts ? ".parts" : "", term,
             v->nan ? ".nan" : "", v->invariant ? ".invariant" : "");
    sink->try(sink->user, name, run_mla, v);
}

/* In bf16: heads that no tile divides or that several queries have of one, and every term. */
static void term_cases(const struct kernel_sink *sink, const struct attn_mla_caps *caps)
{
    static const struct {
        uint64_t term;
        int32_t heads;
        int32_t kv_dtype;
        bool sparse;
        int32_t queries; /* 0: 2 */
        bool nan, invariant;
        bool nope; /* rows without a rope part */
    } rows[] = {
        {0, 48, ATTN_KV_BF16, false},
        {0, 96, ATTN_KV_BF16, false},
        {0, 16, ATTN_KV_BF16, false, 1},
        {0, 16, ATTN_KV_BF16, false},
        {0, 16, ATTN_KV_BF16, false, 5},
        {0, 6, ATTN_KV_BF16, false, 4},
        {0, 16, ATTN_KV_BF16, false, 5, true},
        {0, 48, ATTN_KV_BF16, false, 2, true},
        {0, 16, ATTN_KV_BF16, false, 5, true, true},
        {0, 24, ATTN_KV_BF16, false, 2, false, true},
        {0, 80, ATTN_KV_FP8_E4M3, true},
        {ATTN_TERM_SOFT_CAP, 48, ATTN_KV_BF16, false},
        {ATTN_TERM_SOFT_CAP, 64, ATTN_KV_FP8_E4M3, false},
        {ATTN_TERM_SOFT_CAP, 64, ATTN_KV_BF16, true},
        {ATTN_TERM_TREE_BITS, 48, ATTN_KV_BF16, false},
        {ATTN_TERM_TREE_BITS, 16, ATTN_KV_BF16, false},
        {ATTN_TERM_TREE_BIAS, 64, ATTN_KV_BF16, false},
        {ATTN_TERM_TREE_BIAS, 16, ATTN_KV_BF16, false},
        {ATTN_TERM_TREE_BITS, 16, ATTN_KV_FP8_E4M3, false},
        {ATTN_TERM_SINKS, 64, ATTN_KV_BF16, false},
        {ATTN_TERM_SINKS, 48, ATTN_KV_BF16, false},
        {ATTN_TERM_SINKS, 16, ATTN_KV_BF16, false},
        {ATTN_TERM_SINKS, 16, ATTN_KV_FP8_E4M3, true},
        {ATTN_TERM_SLIDING_WINDOW, 64, ATTN_KV_BF16, false},
        {ATTN_TERM_SLIDING_WINDOW, 48, ATTN_KV_BF16, false},
        {ATTN_TERM_SLIDING_WINDOW, 16, ATTN_KV_BF16, false, 5},
        {ATTN_TERM_SLIDING_WINDOW, 16, ATTN_KV_BF16, false, 5, false, true},
        {ATTN_TERM_SLIDING_WINDOW, 16, ATTN_KV_FP8_E4M3, true},
        {ATTN_TERM_SYMMETRIC_WINDOW, 16, ATTN_KV_FP8_E4M3, false},
        {ATTN_TERM_SYMMETRIC_WINDOW, 16, ATTN_KV_BF16, false, 3},
        {ATTN_TERM_BIDIRECTIONAL, 64, ATTN_KV_BF16, false},
        {ATTN_TERM_BIDIRECTIONAL, 16, ATTN_KV_BF16, true},
        {0, 48, ATTN_KV_BF16, false, 1, false, false, true},
        {ATTN_TERM_SINKS, 16, ATTN_KV_FP8_E4M3, false, 5, false, false, true},
        {ATTN_TERM_SLIDING_WINDOW, 64, ATTN_KV_BF16, false, 2, false, false, true},
        {ATTN_TERM_BIDIRECTIONAL, 64, ATTN_KV_BF16, false, 4, false, false, true},
        {ATTN_TERM_BIDIRECTIONAL, 64, ATTN_KV_BF16, true, 4, false, false, true},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct mla_variant v = {sizes_within(caps, false, false),
                                ATTN_DTYPE_BF16,
                                rows[i].kv_dtype,
                                rows[i].sparse,
                                false,
                                rows[i].queries > 0 ? rows[i].queries : 2,
                                rows[i].term,
                                rows[i].nan,
                                rows[i].invariant};
        v.n.heads = multiple_of(rows[i].heads, caps->num_q_heads_multiple, 0);
        v.n.rope = rows[i].nope ? 0 : v.n.rope;
        if (at_most(v.query_len, caps->max_query_len) == v.query_len) {
            try_mla(sink, &v);
        }
    }
}

/* Lists that are not a layer's top k, under each term in turn. */
static void list_cases(const struct kernel_sink *sink, const struct attn_mla_caps *caps)
{
    const int32_t num_terms = sizeof mla_terms / sizeof *mla_terms;
    for (int32_t i = 0; i < CASE_LISTS; i++) {
        struct mla_variant v = {.n = sizes_within(caps, i % 2, false),
                                .dtype = ATTN_DTYPE_F16 + i % 3,
                                .kv_dtype = i % 5 == 0 ? ATTN_KV_FP8_E4M3 : ATTN_KV_F16 + i % 3,
                                .sparse = true,
                                .query_len = at_most(1 + i % 2, caps->max_query_len),
                                .term = mla_terms[i % num_terms].term,
                                .invariant = i % 4 == 2,
                                .lists = case_lists_at(i)};
        if (case_lists_declared(sink->caps, &v.lists, true)) {
            try_mla(sink, &v);
        }
    }
}

void mla_cases(const struct kernel_sink *sink)
{
    static const struct attn_mla_caps any = {.kv_lora_rank_max = 0};
    const struct attn_ext *ext = backend_extension(sink->caps, ATTN_EXT_CAPS_MLA, sizeof any);
    const struct attn_mla_caps *caps = ext != NULL ? (const struct attn_mla_caps *)ext : &any;
    for (int32_t i = 0; i < 2 * 3 * 3 * 4; i++) {
        int32_t dtype = ATTN_DTYPE_F16 + i / 12 % 3, kv = i / 4 % 3;
        struct mla_variant v = {sizes_within(caps, i >= 36, (i & 2) != 0),
                                dtype,
                                kv == 0   ? dtype
                                : kv == 1 ? ATTN_KV_FP8_E4M3
                                          : ATTN_KV_FP8_DS_MLA,
                                i & 1,
                                (i & 2) != 0,
                                at_most(1 + (i / 2 + i) % 2, caps->max_query_len)};
        try_mla(sink, &v);
    }
    term_cases(sink, caps);
    list_cases(sink, caps);
}
