/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla and attend_mla_sparse over latent rows: the step's rows are written, then attended.
 * Numbers of heads that tiles do not divide, soft caps and trees among them. */
#include <attn/mla.h>
#include <math.h>
#include <stdio.h>

#include "cases/lists.h"
#include "cases/problem_copy.h"
#include "common/names.h"
#include "kernels/kernels.h"
#include "kernels/latent.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/random.h"

enum { REQS = 4, TABLE = 4, LONGEST = TABLE * LATENT_BLOCK };
enum { TREE_ROW = 2 }; /* words or floats; a request has as many rows at most */
enum { WINDOW = 70 };  /* from one tile of keys into another */
enum { DS_MLA_RANK = 512, DS_MLA_ROPE = 64, DS_MLA_ROW = 656 };
enum { DS_V4_ROW = 576, DS_V4_SCALES = 8 }; /* rank 512 without a rope part */

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

enum mla_nan {
    NAN_NONE,
    NAN_ROW,  /* in each request's last row, which only its last query sees */
    NAN_QUERY /* in the rope part of one head of each request's first query */
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
    int32_t nan;   /* enum mla_nan */
    int32_t invariant;
    struct case_lists lists; /* in place of a sparse layer's top k */
};

/* Parts of q and of the rows are slices of the whole ones. */
enum {
    Q_NOPE = LATENT_OPERANDS,
    Q_PE,
    KV_C,
    K_PE,
    LSE,
    TOPK,
    LIST_LENGTHS,
    TREE,
    SINKS,
    NUM_OPERANDS
};
_Static_assert(NUM_OPERANDS <= MAX_OPERANDS, "room in a test");

struct mla_case {
    const struct mla_variant *v;
    struct latent_batch batch;
    struct lists_shape shape; /* the lists' */
};

static size_t row_bytes(const struct mla_variant *v)
{
    size_t row = (size_t)(v->n.rank + v->n.rope);
    return v->kv_dtype == ATTN_KV_FP8_DS_MLA  ? DS_MLA_ROW
           : v->kv_dtype == ATTN_KV_FP8_DS_V4 ? DS_V4_ROW + DS_V4_SCALES
           : kv_is_fp8(v->kv_dtype)           ? row
                                              : row * number_bytes(v->dtype);
}

/* Everything that both kernels of a step take, over one copy of the image. */
struct mla_step {
    struct latent_step step;
    struct attn_mla_desc mla;
    struct attn_io_mla io;
    struct lists_binding lists;
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

static void describe(struct mla_step *s, const struct mla_case *c, const struct kernel_call *call)
{
    const struct mla_variant *v = c->v;
    struct attn_layer_desc *layer = &s->step.layer;
    const int32_t scales = kv_is_fp8(v->kv_dtype) ? ATTN_SCALE_PER_TENSOR : ATTN_SCALE_NONE;
    s->mla = (struct attn_mla_desc){.kv_lora_rank = v->n.rank,
                                    .qk_nope_head_dim = 128,
                                    .qk_rope_head_dim = v->n.rope,
                                    .v_head_dim = 128,
                                    .topk = v->sparse ? v->n.topk : 0};
    *layer = SIZED(attn_layer_desc, .name = "mla", .dtype = v->dtype, .kv_dtype = v->kv_dtype,
                   .num_q_heads = v->n.heads, .window_left = -1, .window_right = -1,
                   .block_size = LATENT_BLOCK, .num_speculative_tokens = v->query_len - 1,
                   .batch_invariant = v->invariant, .k_scale_form = scales, .v_scale_form = scales,
                   .needs_lse = 1);
    layer_set_mla(layer, &s->mla);
    if (v->lists.granularity > 0) {
        lists_bind(&v->lists, &c->shape, call_array(call, TOPK), call_array(call, LIST_LENGTHS),
                   &s->lists);
        s->mla.topk = c->shape.entries;
        s->mla.ext.next = &s->lists.layer.ext;
    }
    layer->head_size_v = v->n.rank; /* the kernels' outputs are latent */
    layer->scale = (float)(1 / sqrt(192));
    describe_term(layer, v->term);
    s->step.params = SIZED(attn_layer_params, .k_scale_host = 0.05f, .v_scale_host = 0.05f,
                           .sinks = layer->has_sinks ? call_array(call, SINKS) : NULL);
}

static void bind_step(struct mla_step *s, const struct mla_case *c, struct kernel_call *call)
{
    const struct mla_variant *v = c->v;
    struct attn_tensor *t = call->tensors;
    memset(s, 0, sizeof *s);
    describe(s, c, call);
    latent_bind(&c->batch, call, &s->step);
    if (v->kv_dtype == ATTN_KV_FP8_DS_V4) {
        struct attn_kv_view *view = &s->step.view;
        view->stride_slot = view->stride_head = DS_V4_ROW;
        view->scale = (char *)view->data + view->block_size * DS_V4_ROW;
        view->scale_stride_block = view->stride_block;
        view->scale_stride_slot = view->scale_stride_head = DS_V4_SCALES;
    }
    if (s->step.layer.tree_mask != ATTN_TREE_NONE) {
        s->step.batch.tree = call_array(call, TREE);
        s->step.batch.tree_stride_row = TREE_ROW;
        s->step.batch.tree_stride_request = TREE_ROW * TREE_ROW;
    }
    s->io = EXTENSION(attn_io_mla, ATTN_EXT_IO_MLA, NULL, );
    if (v->lists.granularity > 0) {
        s->io.ext.next = &s->lists.io.ext;
    } else if (v->sparse) {
        s->io.topk_indices = call_array(call, TOPK);
        s->io.topk_stride = v->n.topk;
    }
    if (v->parts) {
        s->io.q_nope = &t[Q_NOPE];
        s->io.q_pe = &t[Q_PE];
        s->io.kv_c = &t[KV_C];
        s->io.k_pe = &t[K_PE];
        s->step.attend.q = s->step.write.k = NULL;
        s->step.write.next = &s->io.ext;
    }
    s->step.attend.next = v->parts || v->sparse ? &s->io.ext : NULL;
    s->step.attend.lse = &t[LSE];
}

/* A part of the call is a request of the step; where prefixes do not count either, half of one. */
static attn_status call_mla(struct kernel_call *call, const void *context, struct attn_error *error)
{
    static const int32_t by_row[] = {LATENT_ROWS, KV_C, K_PE};
    const struct mla_case *c = context;
    const struct attn_kernels *k = &call->backend->kernels;
    planned_kernel *attend = c->v->sparse ? k->attend_mla_sparse : k->attend_mla;
    struct mla_step s;
    struct batch_part part;
    bind_step(&s, c, call);
    if (call->part < 0) {
        return latent_call(&c->batch, call, &s.step, attend, error);
    }
    batch_part_init(&part, &s.step.batch, call->part, c->v->invariant >= 2);
    const int32_t r = part.request, first = part.starts[0], count = part.batch.max_query_len;
    if (count == 0) {
        return ATTN_OK;
    }
    s.step.batch = part.batch;
    s.step.batch.block_table_rows = 1;
    s.step.write.slot_mapping += first;
    s.step.write.num_slots = count;
    for (int32_t i = 0; i < 3; i++) {
        call_narrow(call, by_row[i], 0, first, count);
    }
    if (!batch_put_lengths(call->device, &part.batch, part.starts, &part.length)) {
        return ATTN_ERROR_DEVICE;
    }
    attn_status status = latent_call(&c->batch, call, &s.step, attend, error);
    return batch_put_lengths(call->device, &part.batch, c->batch.starts + r, c->batch.lens + r) ||
                   status != ATTN_OK
               ? status
               : ATTN_ERROR_DEVICE;
}

/* Each query sees itself; whether the second sees the first is drawn. */
static void fill_trees(struct kernel_test *test, uint64_t term, uint64_t *random)
{
    uint32_t *bits = test_input(test, TREE);
    float *bias = test_input(test, TREE);
    for (int32_t i = 0; i < REQS * TREE_ROW; i++) {
        const bool sees_first = i % TREE_ROW == 0 || random_below(random, 2) != 0;
        if (term == ATTN_TERM_TREE_BITS) {
            bits[i * TREE_ROW] = i % TREE_ROW == 0 ? 1u : 2u + (sees_first ? 1u : 0u);
            bits[i * TREE_ROW + 1] = 0;
        } else {
            bias[i * TREE_ROW] = sees_first ? (float)random_normal(random) : -INFINITY;
            bias[i * TREE_ROW + 1] = (float)random_normal(random);
        }
    }
}

static void fill_lists(const struct mla_case *c, struct kernel_test *test, uint64_t *random)
{
    const struct latent_batch *b = &c->batch;
    int32_t *topk = test_input(test, TOPK), *table = test_input(test, LATENT_TABLE);
    for (int32_t r = 0; r < REQS && c->v->lists.granularity > 0; r++) {
        const struct listed_request request = {b->lens[r], LATENT_BLOCK, table + r * TABLE,
                                               REQS * LONGEST};
        lists_fill(&c->v->lists, &c->shape, &request, b->starts[r], b->starts[r + 1], topk,
                   test_input(test, LIST_LENGTHS), random);
    }
    const int32_t ranked = c->v->lists.granularity > 0 ? 0 : c->v->query_len * c->v->n.topk;
    for (int32_t i = 0; i < REQS * ranked; i++) { /* -1 and past the end: none */
        const int32_t pick = random_below(random, b->lens[i / ranked] + 20);
        topk[i] = random_below(random, 9) ? pick : -1;
    }
}

static void fill(const struct mla_case *c, struct kernel_test *test, uint64_t *random)
{
    const struct latent_batch *b = &c->batch;
    const struct mla_variant *v = c->v;
    latent_fill(b, test, random);
    fill_lists(c, test, random);
    if (v->term == ATTN_TERM_TREE_BITS || v->term == ATTN_TERM_TREE_BIAS) {
        fill_trees(test, v->term, random);
    }
    for (int32_t h = 0; h < v->n.heads; h++) {
        ((float *)test_input(test, SINKS))[h] =
            (float)(4 + 4 * random_normal(random)); /* as scores */
    }
    for (int32_t r = 0; r < REQS; r++) {
        const int64_t row = v->n.rank + v->n.rope;
        if (v->nan == NAN_ROW) {
            number_store(test_input(test, LATENT_ROWS), (b->starts[r + 1] - 1) * row + 100 * r,
                         v->dtype, NAN);
        } else if (v->nan == NAN_QUERY) {
            const int64_t head = b->starts[r] * (int64_t)v->n.heads + (r + 1) * v->n.heads / REQS;
            number_store(test_input(test, LATENT_Q), head * row - 1 - 3 * r, v->dtype, NAN);
        }
    }
}

static enum trial_result verify_mla(struct kernel_test *test, const struct mla_case *c)
{
    const int32_t tokens = c->batch.num_rows;
    struct factor_value v[FACTOR_COUNT] = {{0, 0}};
    v[FACTOR_DTYPE].a = c->v->dtype;
    v[FACTOR_KV_DTYPE].a = c->v->kv_dtype;
    const struct compared_lse lse = {c->v->n.heads, tokens, 1, 0, tokens, NULL};
    if (kernel_test_compare(test, LATENT_OUT, NULL, bound_of_case(v)) != TRIAL_PASSED ||
        compare_lse(test->trial, &lse, test_expected(test, LSE), test_found(test, LSE),
                    bound_of_lse(v)) != TRIAL_PASSED) {
        return TRIAL_FAILED;
    }
    bool plain = !kv_is_fp8(c->v->kv_dtype) && c->v->kv_dtype != ATTN_KV_FP8_DS_MLA &&
                 c->v->kv_dtype != ATTN_KV_FP8_DS_V4 &&
                 c->v->nan != NAN_ROW; /* which may be another NaN */
    return !plain || test_same(test, LATENT_CACHE, test->operands[LATENT_CACHE].bytes)
               ? TRIAL_PASSED
               : trial_say(test->trial, TRIAL_FAILED,
                           "the latent rows differ from the reference's");
}

static void describe_operands(struct mla_case *c, struct operand *o)
{
    const struct mla_sizes *n = &c->v->n;
    const int32_t tokens = c->batch.num_rows, dtype = c->v->dtype;
    const int64_t heads = n->heads, rank = n->rank, row = rank + n->rope;
    const size_t listed = (size_t)(n->topk + c->shape.token_stride);
    const struct operand parts[] = {
        operand_in(operand_rows("q_nope", dtype, tokens, heads * row, heads, row, rank), LATENT_Q,
                   0),
        operand_in(operand_rows("q_pe", dtype, tokens, heads * row, heads, row, n->rope), LATENT_Q,
                   rank),
        operand_in(operand_rows("kv_c", dtype, tokens, row, 0, 0, rank), LATENT_ROWS, 0),
        operand_in(operand_rows("k_pe", dtype, tokens, row, 0, 0, n->rope), LATENT_ROWS, rank)};
    latent_operands(&c->batch, dtype, heads, row, row_bytes(c->v), 1, o);
    memcpy(&o[Q_NOPE], parts, sizeof parts);
    o[LATENT_OUT] = (struct operand){"out", dtype, 3, {tokens, heads, rank}, .written = true};
    o[LSE] = (struct operand){"lse", ATTN_DTYPE_F32, 2, {n->heads, tokens}, .written = true};
    o[TOPK] = (struct operand){"topk_indices", .bytes = (size_t)tokens * listed * 4};
    o[LIST_LENGTHS] =
        (struct operand){"lengths of lists", .bytes = (size_t)(tokens * c->shape.per_token) * 4};
    o[TREE] = (struct operand){"tree", .bytes = REQS * TREE_ROW * TREE_ROW * sizeof(float)};
    o[SINKS] = (struct operand){"sinks", .bytes = (size_t)n->heads * sizeof(float)};
}

static enum trial_result run_mla(struct trial *trial, const void *variant, uint64_t seed)
{
    struct mla_case c = {.v = variant, .batch = {REQS, TABLE, .tokens_per_row = 1}};
    struct operand operands[NUM_OPERANDS];
    OWNED(kernel_test_finish) struct kernel_test test;
    struct kernel_call call;
    struct mla_step step;
    for (int32_t r = 0; r < REQS; r++) {
        c.batch.queries[r] = c.v->query_len;
        c.batch.before[r] = random_below(&seed, LONGEST - c.v->query_len);
    }
    if (c.v->invariant >= 2) { /* the first request's queries see one tile of keys, or one more */
        const int32_t tiles = 1 + random_below(&seed, TABLE - 1);
        c.batch.before[0] = tiles * LATENT_BLOCK - c.v->query_len / 2;
    }
    latent_init(&c.batch);
    c.shape = lists_shape(&trial->tested->caps, &c.v->lists, c.v->n.heads, 1);
    describe_operands(&c, operands);
    kernel_test_init(&test, trial, operands, NUM_OPERANDS, &seed);
    fill(&c, &test, &seed);
    call_bind(&call, &test, trial->reference, &device_host, test.image.bytes);
    bind_step(&step, &c, &call);
    TRIAL_TRY(latent_run(&c.batch, &test, &call, &step.step, call_mla, &c));
    TRIAL_TRY(verify_mla(&test, &c));
    return c.v->invariant > 0
               ? kernel_test_parts(&test, call_mla, &c, c.v->invariant >= 2 ? 2 * REQS : REQS)
               : TRIAL_PASSED;
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
    whole = whole && (v->kv_dtype != ATTN_KV_FP8_DS_V4 || v->n.rank == DS_MLA_RANK) &&
            (!v->sparse || v->n.topk > 0);
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
             (const char *const[]){"", ".nan", ".nan_query"}[v->nan],
             v->invariant >= 2  ? ".invariant2"
             : v->invariant > 0 ? ".invariant"
                                : "");
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
        int32_t nan;
        int32_t invariant;
        bool nope; /* rows without a rope part */
    } rows[] = {
        {0, 48, ATTN_KV_BF16, false},
        {0, 96, ATTN_KV_BF16, false},
        {0, 16, ATTN_KV_BF16, false, 1},
        {0, 16, ATTN_KV_BF16, false},
        {0, 16, ATTN_KV_BF16, false, 5},
        {0, 6, ATTN_KV_BF16, false, 4},
        {0, 16, ATTN_KV_BF16, false, 5, NAN_ROW},
        {0, 48, ATTN_KV_BF16, false, 2, NAN_ROW},
        {0, 16, ATTN_KV_BF16, false, 5, NAN_ROW, 1},
        {0, 64, ATTN_KV_FP8_E4M3, false, 1, NAN_QUERY},
        {0, 16, ATTN_KV_FP8_E4M3, false, 2, NAN_QUERY},
        {0, 128, ATTN_KV_FP8_E4M3, true, 2, NAN_QUERY},
        {0, 16, ATTN_KV_FP8_DS_MLA, false, 2, NAN_QUERY},
        {0, 16, ATTN_KV_BF16, false, 5, NAN_QUERY},
        {0, 24, ATTN_KV_BF16, false, 2, NAN_NONE, 1},
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
        {ATTN_TERM_SLIDING_WINDOW, 16, ATTN_KV_BF16, false, 5, NAN_NONE, 1},
        {ATTN_TERM_SLIDING_WINDOW, 16, ATTN_KV_FP8_E4M3, true},
        {0, 16, ATTN_KV_BF16, false, 3, NAN_NONE, 2},
        {0, 128, ATTN_KV_FP8_E4M3, false, 3, NAN_NONE, 2},
        {0, 32, ATTN_KV_BF16, false, 5, NAN_NONE, 2},
        {ATTN_TERM_SINKS, 128, ATTN_KV_BF16, false, 4, NAN_NONE, 2},
        {ATTN_TERM_SLIDING_WINDOW, 16, ATTN_KV_BF16, false, 5, NAN_NONE, 2},
        {ATTN_TERM_SLIDING_WINDOW, 24, ATTN_KV_BF16, false, 3, NAN_NONE, 2},
        {ATTN_TERM_SOFT_CAP, 24, ATTN_KV_BF16, false, 5, NAN_NONE, 2},
        {0, 16, ATTN_KV_BF16, true, 4, NAN_NONE, 2},
        {ATTN_TERM_SLIDING_WINDOW, 24, ATTN_KV_FP8_E4M3, false, 5, NAN_NONE, 2},
        {0, 16, ATTN_KV_FP8_DS_MLA, false, 4, NAN_NONE, 2},
        {0, 16, ATTN_KV_FP8_DS_MLA, true, 4, NAN_NONE, 2},
        {ATTN_TERM_SYMMETRIC_WINDOW, 16, ATTN_KV_FP8_E4M3, false},
        {ATTN_TERM_SYMMETRIC_WINDOW, 16, ATTN_KV_BF16, false, 3},
        {ATTN_TERM_BIDIRECTIONAL, 64, ATTN_KV_BF16, false},
        {ATTN_TERM_BIDIRECTIONAL, 16, ATTN_KV_BF16, true},
        {0, 48, ATTN_KV_BF16, false, 1, NAN_NONE, 0, true},
        {ATTN_TERM_SINKS, 16, ATTN_KV_FP8_E4M3, false, 5, NAN_NONE, 0, true},
        {ATTN_TERM_SLIDING_WINDOW, 64, ATTN_KV_BF16, false, 2, NAN_NONE, 0, true},
        {ATTN_TERM_BIDIRECTIONAL, 64, ATTN_KV_BF16, false, 4, NAN_NONE, 0, true},
        {ATTN_TERM_BIDIRECTIONAL, 64, ATTN_KV_BF16, true, 4, NAN_NONE, 0, true},
        {ATTN_TERM_SLIDING_WINDOW, 128, ATTN_KV_BF16, false, 1, NAN_NONE, 0, true},
        {ATTN_TERM_SINKS, 128, ATTN_KV_BF16, true, 2, NAN_NONE, 0, true},
        {ATTN_TERM_SOFT_CAP, 24, ATTN_KV_BF16, false, 5, NAN_ROW, 0, true},
        {0, 24, ATTN_KV_BF16, false, 5, NAN_NONE, 1, true},
        {0, 128, ATTN_KV_FP8_DS_V4, true, 2, NAN_NONE, 0, true},
        {ATTN_TERM_SINKS, 64, ATTN_KV_FP8_DS_V4, true, 1, NAN_NONE, 0, true},
        {ATTN_TERM_SLIDING_WINDOW, 64, ATTN_KV_FP8_DS_V4, false, 2, NAN_NONE, 0, true},
        {ATTN_TERM_BIDIRECTIONAL, 16, ATTN_KV_FP8_DS_V4, false, 5, NAN_NONE, 0, true},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct mla_variant v = {sizes_within(caps, false, rows[i].nope),
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
        const bool declared =
            v.invariant < 2 || sink->caps->features & ATTN_FEATURE_BATCH_INVARIANT_PREFIX;
        if (declared && at_most(v.query_len, caps->max_query_len) == v.query_len) {
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
        const bool declared = case_lists_declared(sink->caps, &v.lists, true);
        if (declared) {
            try_mla(sink, &v);
        }
        if (declared && i == 7 && sink->caps->features & ATTN_FEATURE_BATCH_INVARIANT_PREFIX) {
            v.invariant = 2;
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
