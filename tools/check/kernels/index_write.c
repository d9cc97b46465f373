/* SPDX-License-Identifier: Apache-2.0 */
/* write_kv of an indexer's keys that are normed, rotated and transformed first: each row of the
 * cache is held to the formula, the transform to the definition of its matrix. */
#include <attn/draft/index_write.h>
#include <attn/indexer.h>
#include <math.h>

#include "common/names.h"
#include "kernels/kernels.h"
#include "kernels/latent.h"
#include "support/kv_format.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/random.h"

enum { TOKENS = 75, SLOTS = 256, MAX_POSITION = 300, MAX_SIZE = 512 };
#define NORM_EPS 1e-3f
#define CACHE_SCALE 0.5

static const struct form {
    const char *name;
    int32_t head_size, tokens_per_row;
    bool bias;
    struct attn_index_write write;
    int32_t apart; /* elements between rows of k, and of cos_sin */
} forms[] = {
    /* clang-format off */
    {"dsa", 128, 1, true, {.norm = ATTN_KEY_NORM_LAYER, .rope = ATTN_ROPE_NEOX, .rotary_dim = 64, .hadamard = 1}},
    {"glm", 64, 1, false, {.norm = ATTN_KEY_NORM_LAYER, .rope = ATTN_ROPE_GPTJ, .rotary_dim = 32}},
    {"msa", 128, 1, false, {.norm = ATTN_KEY_NORM_RMS, .rope = ATTN_ROPE_NEOX, .rotary_dim = 128}},
    {"qsa", 96, 4, false, {.norm = ATTN_KEY_NORM_RMS, .rope = ATTN_ROPE_NEOX, .rotary_dim = 32}},
    {"last", 512, 16, false, {.rope = ATTN_ROPE_GPTJ, .rotary_dim = 64, .rotary_first = 448, .hadamard = 1}},
    {"middle", 40, 1, false, {.rope = ATTN_ROPE_NEOX, .rotary_dim = 8, .rotary_first = 24}},
    {"apart", 64, 1, true, {.norm = ATTN_KEY_NORM_LAYER, .rope = ATTN_ROPE_GPTJ, .rotary_dim = 48, .rotary_first = 7}, .apart = 8},
    {"norm", 72, 2, true, {.norm = ATTN_KEY_NORM_LAYER}},
    {"hadamard", 32, 1, false, {.hadamard = 1}},
    /* clang-format on */
};

struct write_variant {
    const struct form *form;
    int32_t dtype, kv_dtype;
    bool float_parameters; /* in float32, not in the activations' dtype */
};

enum { KEYS, CACHE, SCALES, SLOT, POSITIONS, COS_SIN, WEIGHT, BIAS, NUM_OPERANDS };
enum { NAN_KEY = 3, ZERO_KEY = 5, INFINITE_KEY = 7 }; /* counted among written ones */

/* What describes the layer, and what a run brings. */
struct described {
    struct attn_indexer_desc indexer;
    struct attn_index_write write;
    struct attn_layer_desc layer;
};

static void describe(const struct write_variant *v, struct described *d)
{
    d->indexer = (struct attn_indexer_desc){.topk = 1, .tokens_per_row = v->form->tokens_per_row};
    d->layer = index_layer(v->dtype, v->kv_dtype, 1, v->form->head_size, &d->indexer);
    d->write = v->form->write;
    d->write.ext = (struct attn_ext){ATTN_EXT_DRAFT_INDEX_WRITE, 0, sizeof d->write, NULL};
    d->indexer.ext.next = &d->write.ext;
}

static attn_status call_write(struct kernel_call *call, const void *context,
                              struct attn_error *error)
{
    const struct write_variant *v = context;
    const bool norm = v->form->write.norm != ATTN_KEY_NORM_NONE;
    const bool rope = v->form->write.rope != ATTN_ROPE_NONE;
    struct described d;
    describe(v, &d);
    const struct attn_layer_params params =
        SIZED(attn_layer_params, .k_scale_host = (float)CACHE_SCALE);
    const struct attn_kv_view view =
        index_view(&d.layer, SLOTS / LATENT_BLOCK, LATENT_BLOCK / v->form->tokens_per_row,
                   call_array(call, CACHE), call_array(call, SCALES));
    const struct attn_io_index_write io = EXTENSION(
        attn_io_index_write, ATTN_EXT_DRAFT_IO_INDEX_WRITE, NULL,
        .positions = rope ? call_array(call, POSITIONS) : NULL,
        .cos_sin = rope ? &call->tensors[COS_SIN] : NULL,
        .norm_weight = norm ? &call->tensors[WEIGHT] : NULL,
        .norm_bias = v->form->bias ? &call->tensors[BIAS] : NULL, .norm_eps = norm ? NORM_EPS : 0);
    const struct attn_write_kv_args args = SIZED(
        attn_write_kv_args, .next = &io.ext, .instance = call->backend->instance, .layer = &d.layer,
        .params = &params, .k_cache = &view, .slot_mapping = call_array(call, SLOT),
        .num_slots = TOKENS, .stream = call->stream, .k = &call->tensors[KEYS]);
    return KERNEL_CALL(call, write_kv, &args, error);
}

/* Whether the token finishes a row of the cache. */
static bool is_written(const struct form *form, int64_t slot)
{
    return slot >= 0 && (slot + 1) % form->tokens_per_row == 0;
}

/* As number_store, which saturates. */
static void store_infinity(void *to, int64_t at, int32_t dtype)
{
    if (dtype == ATTN_DTYPE_F32) {
        ((float *)to)[at] = -INFINITY;
    } else {
        ((uint16_t *)to)[at] = dtype == ATTN_DTYPE_F16 ? 0xfc00 : 0xff80;
    }
}

/* Keys of tokens that write nothing are NaN, and their positions no rows of the table. Three of the
 * others have a NaN, only zeros, and, where a norm makes it NaN, an infinity. */
static void fill(const struct write_variant *v, struct kernel_test *test, uint64_t *random)
{
    const struct operand *o = test->operands;
    const int32_t size = v->form->head_size, rotary = (int32_t)o[COS_SIN].shape[1];
    const int32_t half = rotary / 2, apart = rotary + v->form->apart;
    int32_t order[SLOTS], written = 0;
    random_order(random, order, SLOTS, 0);
    for (int64_t t = 0; t < TOKENS; t++) {
        const int64_t slot = t % 9 == 4 ? -1 - t : order[t];
        const bool own = is_written(v->form, slot);
        written += own;
        ((int64_t *)test_input(test, SLOT))[t] = slot;
        ((int64_t *)test_input(test, POSITIONS))[t] =
            own ? random_below(random, MAX_POSITION) : (int64_t)1 << 40;
        for (int64_t d = 0; d < size; d++) {
            const double drawn = 1 + 2 * random_normal(random);
            const int64_t at = t * (size + v->form->apart) + d;
            if (own && written == INFINITE_KEY && d == 5 &&
                v->form->write.norm != ATTN_KEY_NORM_NONE) {
                store_infinity(test_input(test, KEYS), at, v->dtype);
                continue;
            }
            const bool nan = !own || (written == NAN_KEY && d == 5);
            number_store(test_input(test, KEYS), at, v->dtype,
                         nan                   ? NAN
                         : written == ZERO_KEY ? 0
                                               : drawn);
        }
    }
    for (int32_t i = 0; i < MAX_POSITION * half; i++) {
        const int32_t position = i / half, pair = i % half, at = position * apart + pair;
        const double angle = position * pow(10000, -2.0 * pair / rotary);
        number_store(test_input(test, COS_SIN), at, o[COS_SIN].dtype, cos(angle));
        number_store(test_input(test, COS_SIN), at + half, o[COS_SIN].dtype, sin(angle));
    }
    for (int32_t i = 0; i < 2 * size; i++) {
        number_store(test_input(test, i % 2 ? BIAS : WEIGHT), i / 2, o[WEIGHT].dtype,
                     0.5 + random_unit(random));
    }
}

/* What the token's row is before it is quantized. */
static void expect(const struct write_variant *v, const struct kernel_test *test, int64_t t,
                   double *row)
{
    const struct attn_index_write *w = &v->form->write;
    const int32_t size = v->form->head_size, half = w->rotary_dim / 2;
    const int32_t dtype = test->operands[WEIGHT].dtype;
    const int64_t position = ((const int64_t *)test_input(test, POSITIONS))[t];
    double weight[MAX_SIZE], bias[MAX_SIZE];
    for (int32_t d = 0; d < size; d++) {
        row[d] = number_load(test_input(test, KEYS), t * (size + v->form->apart) + d, v->dtype);
        weight[d] = number_load(test_input(test, WEIGHT), d, dtype);
        bias[d] = number_load(test_input(test, BIAS), d, dtype);
    }
    if (w->norm != ATTN_KEY_NORM_NONE) {
        oracle_norm(row, size, w->norm == ATTN_KEY_NORM_LAYER, (double)NORM_EPS, weight,
                    v->form->bias ? bias : NULL);
    }
    for (int32_t i = 0; i < half; i++) {
        const bool neox = w->rope == ATTN_ROPE_NEOX;
        const int64_t at = position * (w->rotary_dim + v->form->apart) + i;
        double *a = row + w->rotary_first + (neox ? i : 2 * i), *b = a + (neox ? half : 1), y = *a;
        const double c = number_load(test_input(test, COS_SIN), at, dtype);
        const double s = number_load(test_input(test, COS_SIN), at + half, dtype);
        *a = y * c - *b * s;
        *b = *b * c + y * s;
    }
    if (w->hadamard) {
        oracle_hadamard(row, size);
    }
}

/* Half a step of the cache's format, next to float32's error. */
static double bound_of(const struct write_variant *v, double value, double scale, double largest)
{
    const double size = fabs(value), rest = 1e-5 * (largest + 1);
    return rest + (v->kv_dtype == ATTN_KV_MXFP4  ? fmax(size, scale) / 4
                   : v->kv_dtype > ATTN_KV_F32   ? size / 16 + scale * 0x1p-10
                   : v->kv_dtype == ATTN_KV_BF16 ? size * 0x1p-8
                   : v->kv_dtype == ATTN_KV_F16  ? size * 0x1p-11
                                                 : size * 1e-5);
}

/* Whether the scale is the least that brings `largest` into the format's range, or of small numbers
 * the least of all. */
static bool is_least(const struct write_variant *v, double scale, double largest)
{
    const bool mxfp4 = v->kv_dtype == ATTN_KV_MXFP4;
    const double least = fmax(largest / (mxfp4 ? 6 : 448), mxfp4 ? 0x1p-126 : 1e-6);
    const double most = mxfp4 ? 2 * least : least;
    return scale >= least * (1 - 1e-4) && scale <= most * (1 + 1e-4);
}

/* Whether a block of mxfp4 has only zeros in its bytes, as one with a NaN has. */
static bool has_no_codes(const struct kernel_test *test, int64_t row_bytes, int64_t row,
                         int32_t first)
{
    const uint8_t *codes = (uint8_t *)test_found(test, CACHE) + row * row_bytes + first / 2;
    uint8_t all = 0;
    for (int32_t i = 0; i < 16; i++) {
        all |= codes[i];
    }
    return all == 0;
}

static enum trial_result verify(struct kernel_test *test, const struct write_variant *v)
{
    const int32_t size = v->form->head_size, per_row = v->form->tokens_per_row;
    const int64_t bytes = kv_row_bytes(v->kv_dtype, false, size);
    const int64_t scale_bytes = kv_scale_bytes(v->kv_dtype, false, size);
    struct described described;
    describe(v, &described);
    for (int64_t t = 0; t < TOKENS; t++) {
        const int64_t slot = ((const int64_t *)test_input(test, SLOT))[t];
        double expected[MAX_SIZE], values[MAX_SIZE], scales[MAX_SIZE];
        if (!is_written(v->form, slot)) {
            continue;
        }
        expect(v, test, t, expected);
        const int32_t block = index_load(
            &described.layer, test_found(test, CACHE), test_found(test, SCALES), slot / per_row,
            v->kv_dtype == ATTN_KV_FP8_E4M3 ? CACHE_SCALE : 1, values, scales);
        for (int32_t first = 0; first < size; first += block) {
            double largest = 0;
            bool nan = false;
            for (int32_t d = first; d < first + block; d++) {
                nan = nan || isnan(expected[d]);
                largest = fmax(largest, fabs(expected[d]));
            }
            TRIAL_FAIL_IF(test->trial, !nan && block > 1 && !is_least(v, scales[first], largest),
                          "token %d: the scale of dims %d to %d, of up to %g, is %g", (int)t, first,
                          first + block - 1, largest, scales[first]);
            TRIAL_FAIL_IF(test->trial,
                          nan && v->kv_dtype == ATTN_KV_MXFP4 &&
                              !has_no_codes(test, bytes, slot / per_row, first),
                          "token %d: dims %d to %d have a NaN and codes that are not 0", (int)t,
                          first, first + block - 1);
            for (int32_t d = first; d < first + block; d++) {
                const bool right =
                    nan ? isnan(values[d])
                        : fabs(values[d] - expected[d]) <=
                              bound_of(v, expected[d], scales[d], block > 1 ? largest : 8);
                TRIAL_FAIL_IF(test->trial, !right, "token %d, dim %d: %g, expected %g", (int)t, d,
                              values[d], nan ? NAN : expected[d]);
            }
        }
        test_take(test, CACHE, (size_t)(slot / per_row * bytes), (size_t)bytes);
        test_take(test, SCALES, (size_t)(slot / per_row * scale_bytes), (size_t)scale_bytes);
    }
    TRIAL_TRY(kernel_test_rest(test, CACHE)); /* rows that no token finishes */
    return kernel_test_rest(test, SCALES);
}

static enum trial_result run_write(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct write_variant *v = variant;
    const int32_t size = v->form->head_size, rows = SLOTS / v->form->tokens_per_row;
    const int32_t rotary = v->form->write.rotary_dim > 0 ? v->form->write.rotary_dim : 2;
    const int32_t dtype = v->float_parameters ? ATTN_DTYPE_F32 : v->dtype;
    const int32_t apart = v->form->apart;
    const int64_t scales = kv_scale_bytes(v->kv_dtype, false, size);
    const struct operand o[NUM_OPERANDS] = {
        [KEYS] = {"k", v->dtype, 3, {TOKENS, 1, size}, {size + apart, size + apart, 1}},
        [CACHE] = {"k_cache", .bytes = (size_t)(rows * kv_row_bytes(v->kv_dtype, false, size)),
                   .written = true},
        [SCALES] = {"scales of k_cache", .bytes = (size_t)(rows * (scales > 0 ? scales : 4)),
                    .written = true},
        [SLOT] = {"slot_mapping", .bytes = TOKENS * sizeof(int64_t)},
        [POSITIONS] = {"positions", .bytes = TOKENS * sizeof(int64_t)},
        [COS_SIN] = {"cos_sin", dtype, 2, {MAX_POSITION, rotary}, {rotary + apart, 1}},
        [WEIGHT] = {"norm_weight", dtype, 1, {size}},
        [BIAS] = {"norm_bias", dtype, 1, {size}},
    };
    struct described d;
    describe(v, &d);
    OWNED(kernel_test_finish) struct kernel_test test;
    kernel_test_init(&test, trial, o, NUM_OPERANDS, NULL);
    fill(v, &test, &seed);
    if (!trial_supports(trial, trial->tested, &d.layer, ATTN_PHASE_DECODE)) {
        return TRIAL_SKIPPED;
    }
    TRIAL_TRY(kernel_test_run_tested(&test, call_write, v));
    return verify(&test, v);
}

void index_write_cases(const struct kernel_sink *sink)
{
    const struct attn_indexer_caps *caps =
        backend_extension(sink->caps, ATTN_EXT_CAPS_INDEXER, sizeof *caps);
    static const int32_t kv_dtypes[] = {0, ATTN_KV_FP8_E4M3, ATTN_KV_FP8_PER_TOKEN_HEAD,
                                        ATTN_KV_MXFP4};
    if (!(sink->caps->features & ATTN_FEATURE_DRAFT_INDEX_WRITE) || caps == NULL) {
        return;
    }
    for (int32_t i = 0; i < (int32_t)(sizeof forms / sizeof *forms) * 12; i++) {
        const int32_t dtype = ATTN_DTYPE_F16 + i % 3, kv = kv_dtypes[i / 3 % 4];
        const struct write_variant v = {.form = &forms[i / 12],
                                        .dtype = dtype,
                                        .kv_dtype = kv != 0 ? kv : dtype,
                                        .float_parameters = (i / 12 + i) % 2 == 0};
        const int32_t rows = v.form->tokens_per_row;
        if (sink->caps->dtypes >> dtype & 1 && sink->caps->kv_dtypes >> v.kv_dtype & 1 &&
            v.form->head_size <= caps->head_size_max &&
            (rows == 1 || rows <= caps->tokens_per_row_max) &&
            (kv != ATTN_KV_MXFP4 || v.form->head_size % 32 == 0)) {
            kernel_try(sink, run_write, &v, "index_write.%s.%s.%s%s", v.form->name,
                       dtype_name(dtype), kv_dtype_name(v.kv_dtype),
                       v.float_parameters ? ".f32" : "");
        }
    }
}
