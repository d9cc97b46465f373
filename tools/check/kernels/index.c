/* SPDX-License-Identifier: Apache-2.0 */
/* Indexers: index keys are written, then chosen from, and each list is held to the scores that the
 * oracle computes of what lies in the cache. Most inputs are small whole numbers: every sum is
 * exact in float32, many scores are equal, and so there is one right list. */
#include <attn/indexer.h>
#include <math.h>

#include "common/command.h"
#include "common/names.h"
#include "kernels/kernels.h"
#include "kernels/latent.h"
#include "support/kv_format.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/oracle.h"
#include "support/random.h"

enum { REQS = 5, FIRST_ROW = 2, PADDING = 3, POISON_BLOCKS = 2, MOST_HEADS = 64, MOST_SIZE = 128 };
#define SCALE 0.25f
/* Columns of the block table. */
enum { COLUMNS = 5, LONG_COLUMNS = 160, LONGEST_COLUMNS = 640 };

/* Keys before the step, and its queries: of steps of one token, of prompts, and of both. A request
 * has none, one is shorter than a list, one ends within a row. In long ones a kernel cannot keep
 * all scores of a list in its shared memory; in the longest it may choose by a sample
 * first, with several groups for a list. */
static const struct shape {
    const char *name;
    int32_t columns;
    int32_t before[REQS], queries[REQS];
} shapes[] = {{"decode", COLUMNS, {300, 0, 5, 127, 63}, {1, 0, 1, 1, 1}},
              {"prefill", COLUMNS, {0, 100, 0, 0, 190}, {70, 33, 1, 0, 65}},
              {"mixed", COLUMNS, {255, 18, 0, 64, 0}, {1, 4, 17, 0, 130}},
              {"long", LONG_COLUMNS, {9999, 100, 5000, 0, 10220}, {4, 1, 3, 0, 2}},
              {"longest", LONGEST_COLUMNS, {40000, 0, 16300, 0, 33000}, {2, 0, 1, 0, 1}}};

/* The step's max_seq_len is far above its lengths. By such a bound kernels for a GPU with 132
 * multiprocessors give a thread block 8 or 16 stages of 128 rows in place of 4, so that a ring of 4
 * stages is used again. */
enum { BOUND = 416 * 128, BOUND_COLUMNS = 24 };
static const struct shape bound_shape = {
    "bound", BOUND_COLUMNS, {1500, 0, 130, 0, 700}, {1, 0, 1, 0, 1}};

/* Many tokens over more keys than a kernel keeps candidates: all places of a list's candidates are
 * used, and of as many lists as a kernel works on at once. */
enum { FULL_COLUMNS = 9 };
static const struct shape full_shape = {"full", FULL_COLUMNS, {420, 0, 9, 0, 0}, {130, 0, 1, 0, 3}};

struct form {
    const char *name;
    int32_t heads, head_size;
    struct attn_indexer_desc desc;
};
/* After four of the highest scores each key's is above all before it. */
static const struct form rising_form = {
    "rising", MOST_HEADS, 16, {.topk = 10, .activation = ATTN_INDEXER_RELU, .has_weights = 1}};
/* clang-format off */
static const struct form forms[] = {
    {"dsa", 8, 64, {.topk = 48, .activation = ATTN_INDEXER_RELU, .has_weights = 1}},
    {"identity", 3, 40, {.topk = 7}},
    {"msa", 4, 32, {.topk = 4, .num_groups = 4, .rows_per_entry = 32, .last_entries = 1}},
    {"msa_ends", 4, 32, {.topk = 5, .num_groups = 2, .rows_per_entry = 16, .first_entries = 1, .last_entries = 2}},
    {"ends_on_top", 2, 32, {.topk = 6, .first_entries = 3, .last_entries = 9, .forced_on_top = 1}},
    {"qsa", 4, 64, {.topk = 16, .activation = ATTN_INDEXER_RELU, .tokens_per_row = 4, .tail = 1, .forced_on_top = 1}},
    {"tail_inside", 4, 32, {.topk = 5, .activation = ATTN_INDEXER_RELU, .has_weights = 1, .tokens_per_row = 16, .tail = 1}},
    {"csa", 6, 32, {.topk = 32, .activation = ATTN_INDEXER_RELU, .has_weights = 1, .tokens_per_row = 4}},
    {"dsa_128", 16, 128, {.topk = 40, .activation = ATTN_INDEXER_RELU, .has_weights = 1}},
    {"msa_128", 4, 128, {.topk = 4, .num_groups = 4, .rows_per_entry = 32, .last_entries = 1}},
    {"pairs", 4, 64, {.topk = 33, .num_groups = 2, .activation = ATTN_INDEXER_RELU, .has_weights = 1}},
    {"blocks_of_4", 4, 128, {.topk = 10, .activation = ATTN_INDEXER_RELU, .has_weights = 1, .rows_per_entry = 16}},
    {"blocks_of_16", 16, 128, {.topk = 6, .activation = ATTN_INDEXER_RELU, .has_weights = 1, .rows_per_entry = 32}},
    {"lists_of_32", 64, 64, {.topk = 20, .num_groups = 2, .activation = ATTN_INDEXER_RELU, .has_weights = 1}},
    {"pools_of_32", 32, 32, {.topk = 6, .activation = ATTN_INDEXER_RELU, .has_weights = 1, .rows_per_entry = 5}},
    {"csa_32", 32, 32, {.topk = 12, .activation = ATTN_INDEXER_RELU, .has_weights = 1, .tokens_per_row = 4}},
    {"dsa_64", 64, 128, {.topk = 40, .activation = ATTN_INDEXER_RELU, .has_weights = 1}},
    /* where a token has a negative weight or 0, the best are thousands of zeros */
    {"zeros", 1, 32, {.topk = 48, .activation = ATTN_INDEXER_RELU, .has_weights = 1}},
    {"pooled", 4, 16, {.topk = 3, .num_groups = 2, .has_weights = 1, .tokens_per_row = 4, .rows_per_entry = 5}}
};
/* clang-format on */

struct index_variant {
    const struct form *form;
    const struct shape *shape;
    int32_t dtype, kv_dtype;
    bool drawn; /* numbers of a normal distribution: near scores may be taken for one another */
    bool nan;   /* in the first key of each request */
    bool e4m3_q;
};

enum { WEIGHTS = LATENT_OPERANDS, SCALES, LENGTHS, NUM_OPERANDS };

struct index_case {
    const struct index_variant *v;
    struct latent_batch batch;
    struct attn_indexer_desc desc; /* zeros read as 1 are 1 */
    int32_t room;                  /* in a list */
    double *keys;                  /* [REQS, longest, D], as the step's dtype has them */
};

struct index_step {
    struct latent_step step;
    struct attn_indexer_desc desc;
    struct attn_io_indexer io;
};

static int32_t q_dtype(const struct index_variant *v)
{
    return v->e4m3_q ? ATTN_DTYPE_FP8_E4M3 : v->dtype;
}

static double scale_of_rows(const struct index_variant *v)
{
    return v->kv_dtype == ATTN_KV_FP8_E4M3 ? 0.5 : 1;
}

static struct attn_layer_desc layer_of(const struct index_variant *v,
                                       struct attn_indexer_desc *desc)
{
    *desc = v->form->desc;
    struct attn_layer_desc layer =
        index_layer(v->dtype, v->kv_dtype, v->form->heads, v->form->head_size, desc);
    layer.q_scale_form = v->e4m3_q ? ATTN_SCALE_PER_TENSOR : ATTN_SCALE_NONE;
    layer.q_dtype = v->e4m3_q ? ATTN_DTYPE_FP8_E4M3 : 0;
    layer.scale = SCALE;
    return layer;
}

static void bind_step(struct index_step *s, const struct index_case *c, struct kernel_call *call)
{
    const struct index_variant *v = c->v;
    memset(s, 0, sizeof *s);
    s->step.layer = layer_of(v, &s->desc);
    s->step.params = SIZED(attn_layer_params, .q_scale_host = v->e4m3_q ? 0.5f : 0,
                           .k_scale_host = (float)scale_of_rows(v));
    latent_bind(&c->batch, call, &s->step);
    s->step.batch.max_query_len = c->batch.longest;
    s->step.view =
        index_view(&s->step.layer, s->step.view.num_blocks, latent_rows_in_block(&c->batch),
                   call_array(call, LATENT_CACHE), call_array(call, SCALES));
    s->io = EXTENSION(attn_io_indexer, ATTN_EXT_IO_INDEXER, NULL,
                      .weights = s->desc.has_weights ? &call->tensors[WEIGHTS] : NULL,
                      .lengths = call_array(call, LENGTHS));
    s->step.attend.next = &s->io.ext;
    s->step.attend.phase =
        v->shape == &shapes[0] || v->shape == &bound_shape ? ATTN_PHASE_DECODE : ATTN_PHASE_PREFILL;
}

static attn_status call_index(struct kernel_call *call, const void *context,
                              struct attn_error *error)
{
    const struct index_case *c = context;
    struct index_step s;
    bind_step(&s, c, call);
    return latent_call(&c->batch, call, &s.step, call->backend->kernels.attend, error);
}

static double draw(const struct index_variant *v, uint64_t *random)
{
    return v->drawn ? random_normal(random) : random_below(random, 5) - 2;
}

static double draw_key(const struct index_variant *v, int32_t j, int32_t i, uint64_t *random)
{
    if (v->form == &rising_form) {
        return i == 0 ? (j < 4 ? 200 : j / 16) : i == 1 ? j % 16 : 0;
    }
    return v->nan && j == 0 && i == 3 ? NAN : draw(v, random);
}

/* Element i of all queries of a token. */
static double draw_query(const struct index_variant *v, int64_t i, uint64_t *random)
{
    const int64_t dim = i % v->form->head_size;
    return v->form != &rising_form ? draw(v, random) : dim == 0 ? 16 : dim == 1 ? 1 : 0;
}

static void fill(const struct index_case *c, struct kernel_test *test, uint64_t *random)
{
    const struct latent_batch *b = &c->batch;
    const struct index_variant *v = c->v;
    const int32_t d = v->form->head_size, heads = v->form->heads;
    int64_t at[2] = {0, 0}; /* rows of earlier steps, and of this one */
    latent_fill(b, test, random);
    for (int32_t r = 0; r < REQS; r++) {
        for (int32_t j = 0; j < b->lens[r]; j++) {
            const bool now = j >= b->before[r];
            uint8_t *rows = test_input(test, now ? LATENT_ROWS : LATENT_CONTEXT);
            double *key = &c->keys[((int64_t)r * b->longest + j) * d];
            for (int32_t i = 0; i < d; i++) {
                number_store(rows, at[now] * d + i, v->dtype, draw_key(v, j, i, random));
                key[i] = number_load(rows, at[now] * d + i, v->dtype);
            }
            at[now]++;
        }
    }
    for (int64_t i = (int64_t)FIRST_ROW * heads * d; i < (int64_t)b->num_actual_rows * heads * d;
         i++) {
        number_store(test_input(test, LATENT_Q), i, q_dtype(v), draw_query(v, i, random));
    }
    for (int32_t i = FIRST_ROW * heads; i < b->num_actual_rows * heads; i++) {
        ((float *)test_input(test, WEIGHTS))[i] =
            v->form == &rising_form ? 1 : (float)draw(v, random);
    }
}

/* Rounding that a row's elements may have: half a step of e4m3; of mxfp4, whose scale may be twice
 * the least, a sixth of the largest; small integers are exact in mxfp4. */
static double bound_of(const struct index_variant *v, double largest)
{
    return v->kv_dtype <= ATTN_KV_F32     ? 0
           : v->kv_dtype != ATTN_KV_MXFP4 ? largest / 16
           : v->drawn                     ? largest / 3
                                          : 0;
}

/* Every finished row of a request as numbers, which have to be those of its last token. */
static enum trial_result verify_rows(struct kernel_test *test, const struct index_case *c,
                                     int32_t r, double *values)
{
    const struct latent_batch *b = &c->batch;
    const struct index_variant *v = c->v;
    const int32_t d = v->form->head_size, tokens = b->tokens_per_row;
    const size_t row = (size_t)kv_row_bytes(v->kv_dtype, false, d);
    const size_t scale = (size_t)kv_scale_bytes(v->kv_dtype, false, d);
    struct attn_indexer_desc desc;
    const struct attn_layer_desc layer = layer_of(v, &desc);
    double scales[MOST_SIZE];
    for (int32_t j = 0; j < b->lens[r] / tokens; j++, values += d) {
        const int64_t at = latent_slot(b, test_input(test, LATENT_TABLE), r, j);
        const double *key = &c->keys[((int64_t)r * b->longest + (j + 1) * tokens - 1) * d];
        double largest = 0;
        bool right = true;
        index_load(&layer, test_found(test, LATENT_CACHE), test_found(test, SCALES), at,
                   scale_of_rows(v), values, scales);
        for (int32_t i = 0; i < d; i++) {
            largest = fmax(largest, fabs(key[i]));
        }
        for (int32_t i = 0; i < d; i++) {
            right &=
                isnan(key[i]) ? isnan(values[i]) : fabs(values[i] - key[i]) <= bound_of(v, largest);
        }
        TRIAL_FAIL_IF(test->trial, !right,
                      "request %d: row %d of the cache is not that of its last token", r, j);
        test_take(test, LATENT_CACHE, (size_t)at * row, row);
        test_take(test, SCALES, (size_t)at * scale, scale);
    }
    return TRIAL_PASSED;
}

static enum trial_result verify_query(struct kernel_test *test, const struct index_case *c,
                                      int32_t r, int32_t token, const double *keys, double *q,
                                      double *scores)
{
    const struct index_variant *v = c->v;
    const struct attn_indexer_desc *x = &c->desc;
    const int32_t groups = x->num_groups, d = v->form->head_size, heads = v->form->heads / groups;
    const int64_t position = c->batch.lens[r] - c->batch.starts[r + 1] + token;
    const bool inexact = v->drawn || v->kv_dtype == ATTN_KV_FP8_PER_TOKEN_HEAD;
    const struct oracle_indexer oracle = layer_index_oracle(x, v->form->heads, d, (double)SCALE);
    for (int32_t g = 0; g < groups; g++) {
        const int64_t which = (int64_t)token * groups + g, first = which * heads;
        const int32_t *list = (const int32_t *)test_found(test, LATENT_OUT) + which * c->room;
        double weights[MOST_HEADS], slack = 0;
        for (int32_t i = 0; i < heads * d; i++) {
            q[i] = number_load(test_input(test, LATENT_Q), first * d + i, q_dtype(v));
        }
        for (int32_t h = 0; h < heads; h++) {
            weights[h] = (double)((const float *)test_input(test, WEIGHTS))[first + h];
        }
        oracle_index_scores(&oracle, position, q, x->has_weights ? weights : NULL, keys, scores);
        const int64_t entries = oracle_index_entries(&oracle, position);
        for (int64_t e = 0; e < entries && inexact; e++) {
            slack = fmax(slack, 1e-3 * fabs(scores[e]));
        }
        const char *wrong = oracle_index_judge(&oracle, position, scores, list, c->room, slack);
        int32_t length = 0;
        while (length < c->room && list[length] >= 0) {
            length++;
        }
        if (wrong == NULL && ((const int32_t *)test_found(test, LENGTHS))[which] != length) {
            wrong = "its length is not what `lengths` says";
        }
        TRIAL_FAIL_IF(test->trial, wrong != NULL,
                      "request %d, token %d (position %lld), list %d of %d entries: %s", r, token,
                      (long long)position, g, length, wrong);
    }
    return TRIAL_PASSED;
}

static enum trial_result verify_index(struct kernel_test *test, const struct index_case *c)
{
    const struct latent_batch *b = &c->batch;
    const int32_t d = c->v->form->head_size;
    OWNED(memory_end) uint8_t *own = command_calloc((size_t)b->num_rows, 1);
    OWNED(memory_end)
    double *keys =
        command_calloc((size_t)(b->longest * (d + 1) + c->v->form->heads * d), sizeof *keys);
    double *scores = keys + b->longest * d, *q = scores + b->longest;
    for (int32_t r = 0; r < REQS; r++) {
        TRIAL_TRY(verify_rows(test, c, r, keys));
        for (int32_t t = b->starts[r]; t < b->starts[r + 1]; t++) {
            own[t] = 1;
            TRIAL_TRY(verify_query(test, c, r, t, keys, q, scores));
        }
    }
    TRIAL_TRY(kernel_test_rest(test, LATENT_CACHE)); /* rows whose last token has not come */
    TRIAL_TRY(kernel_test_rest(test, SCALES));
    return kernel_test_other_rows(test, LATENT_OUT, own);
}

static void describe_operands(struct index_case *c, struct operand *o)
{
    const struct latent_batch *b = &c->batch;
    const struct index_variant *v = c->v;
    const int64_t heads = v->form->heads, d = v->form->head_size;
    const int64_t rows = (REQS * b->columns + POISON_BLOCKS) * latent_rows_in_block(b);
    const int64_t lists = c->desc.num_groups;
    const int32_t scale = kv_scale_bytes(v->kv_dtype, false, v->form->head_size);
    latent_operands(b, v->dtype, heads, d,
                    (size_t)kv_row_bytes(v->kv_dtype, false, v->form->head_size), 0, o);
    o[LATENT_Q].dtype = q_dtype(v);
    o[LATENT_OUT] = (struct operand){"out",
                                     ATTN_DTYPE_F32,
                                     3,
                                     {b->num_rows, lists, c->room},
                                     .as = {ATTN_CODE_INT, 32, 1},
                                     .written = true};
    o[WEIGHTS] = (struct operand){"weights", ATTN_DTYPE_F32, 2, {b->num_rows, heads}};
    o[SCALES] = (struct operand){
        "scales of k_cache", .bytes = (size_t)(rows * (scale > 0 ? scale : 4)), .written = true};
    o[LENGTHS] =
        (struct operand){"lengths", .bytes = (size_t)(b->num_rows * lists) * 4, .written = true};
}

static enum trial_result run_index(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct index_variant *v = variant;
    const int32_t tokens = v->form->desc.tokens_per_row;
    struct index_case c = {.v = v,
                           .batch = {REQS, v->shape->columns, .spare_blocks = POISON_BLOCKS,
                                     .tokens_per_row = tokens > 0 ? tokens : 1,
                                     .first_row = FIRST_ROW, .padding = PADDING}};
    if (v->shape == &bound_shape) {
        c.batch.spare_len = BOUND - BOUND_COLUMNS * LATENT_BLOCK;
    }
    struct operand operands[NUM_OPERANDS];
    OWNED(kernel_test_finish) struct kernel_test test;
    struct kernel_call call;
    struct index_step step;
    memcpy(c.batch.before, v->shape->before, sizeof v->shape->before);
    memcpy(c.batch.queries, v->shape->queries, sizeof v->shape->queries);
    latent_init(&c.batch);
    (void)layer_of(v, &c.desc);
    c.room = layer_list_room(&c.desc);
    describe_operands(&c, operands);
    OWNED(memory_end)
    double *keys =
        command_calloc((size_t)(REQS * c.batch.longest * v->form->head_size), sizeof *keys);
    c.keys = keys;
    kernel_test_init(&test, trial, operands, NUM_OPERANDS, &seed);
    fill(&c, &test, &seed);
    call_bind(&call, &test, trial->reference, &device_host, test.image.bytes);
    bind_step(&step, &c, &call);
    TRIAL_TRY(latent_run(&c.batch, &test, &call, &step.step, call_index, &c));
    return verify_index(&test, &c);
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
    const bool plain = v->kv_dtype <= ATTN_KV_F32;
    if (!(sink->caps->dtypes >> v->dtype & 1) ||
        !(sink->caps->kv_dtypes >> v->kv_dtype & 1 ||
          (plain && sink->caps->kv_dtypes >> ATTN_KV_AUTO & 1))) {
        return;
    }
    if (v->kv_dtype == ATTN_KV_MXFP4 && v->form->head_size % 32 != 0) {
        return;
    }
    if (v->e4m3_q && !(sink->caps->features & ATTN_FEATURE_QUANTIZED_QUERY &&
                       sink->caps->q_dtypes >> ATTN_DTYPE_FP8_E4M3 & 1)) {
        return;
    }
    kernel_try(sink, run_index, v, "index.%s.%s.%s.%s%s%s%s", v->form->name, v->shape->name,
               dtype_name(v->dtype), kv_dtype_name(v->kv_dtype), v->drawn ? ".drawn" : "",
               v->nan ? ".nan" : "", v->e4m3_q ? ".q_e4m3" : "");
}

/* What kernels for tensor cores take: queries in bf16 and in e4m3. */
static void try_bound(const struct kernel_sink *sink, const struct form *form, int32_t kv_dtype)
{
    const bool e4m3 = kv_dtype == ATTN_KV_FP8_E4M3 || kv_dtype == ATTN_KV_FP8_PER_TOKEN_HEAD;
    const struct index_variant v = {.form = form,
                                    .shape = &bound_shape,
                                    .dtype = ATTN_DTYPE_BF16,
                                    .kv_dtype = kv_dtype != 0 ? kv_dtype : ATTN_DTYPE_BF16,
                                    .e4m3_q = e4m3};
    try_index(sink, &v);
}

void index_cases(const struct kernel_sink *sink)
{
    const struct attn_indexer_caps *caps =
        backend_extension(sink->caps, ATTN_EXT_CAPS_INDEXER, sizeof *caps);
    static const int32_t kv_dtypes[] = {0, ATTN_KV_FP8_E4M3, ATTN_KV_FP8_PER_TOKEN_HEAD,
                                        ATTN_KV_MXFP4};
    enum { SHAPES = sizeof shapes / sizeof *shapes, FORMS = sizeof forms / sizeof *forms };
    static const int32_t heads_of_shape[] = {MOST_HEADS, 16, 32, 3, 2}; /* most, by time */
    if (!(sink->caps->layer_kinds >> ATTN_LAYER_INDEXER & 1) || caps == NULL) {
        return;
    }
    for (int32_t i = 0; i < FORMS * SHAPES; i++) {
        const int32_t form = i / SHAPES;
        const int32_t heads_max = heads_of_shape[i % SHAPES];
        if (!takes(caps, &forms[form]) || forms[form].heads > heads_max) {
            continue;
        }
        for (int32_t k = 0; k < 4; k++) { /* each form in each dtype, in one shape or another */
            const int32_t dtype = ATTN_DTYPE_F16 + (2 * form + i + k) % 3;
            const struct index_variant v = {.form = &forms[form],
                                            .shape = &shapes[i % SHAPES],
                                            .dtype = dtype,
                                            .kv_dtype = kv_dtypes[k] != 0 ? kv_dtypes[k] : dtype};
            struct index_variant more = v;
            try_index(sink, &v);
            more.nan = k == 0 && i % 2 == 0;
            more.drawn = (k == i % 3 || k == 3) && !more.nan;
            more.e4m3_q = k >= 1 && (k == 1 || forms[form].head_size == 128) && !more.drawn;
            if (more.drawn || more.nan || more.e4m3_q) {
                try_index(sink, &more);
            }
        }
    }
    for (int32_t i = 0; i < 3 && takes(caps, &rising_form); i++) {
        const int32_t dtype = ATTN_DTYPE_F16 + i;
        const struct index_variant v = {&rising_form, &full_shape, dtype, dtype};
        try_index(sink, &v);
    }
    for (int32_t i = 0; i < FORMS * 4; i++) {
        if (takes(caps, &forms[i / 4]) && forms[i / 4].head_size == 128) {
            try_bound(sink, &forms[i / 4], kv_dtypes[i % 4]);
        }
    }
}
