/* SPDX-License-Identifier: Apache-2.0 */
/* quantize and amax: each row is read once, in pieces that lie in L1. Bytes bound both. */
#include <math.h>

#include "common/amax.h"
#include "cpu_simd/internal.h"

#define GROUP_LEAST_AMAX 1e-10
#define NVFP4_BLOCK 16
#define PIECE 128 /* columns at a time: a multiple of every form's group */

struct quantize_loop {
    const struct attn_quantize_args *args;
    const struct variant *variant;
    int64_t columns; /* heads * D, taken as one row */
    int32_t x_element;
    int32_t out_element; /* largest code of the forms in 8 bits */
};

/* Where column `column` of a token's [heads, D] row is, and how many of `count` follow it there. */
static char *columns_at(const struct attn_tensor *tensor, int64_t token, int64_t column,
                        int32_t *count)
{
    int64_t size = tensor->shape[2], within = column % size;
    *count = size - within < *count ? (int32_t)(size - within) : *count;
    return (char *)tensor_row(tensor, token, column / size) + within * (tensor->dtype.bits / 8);
}

static void load_columns(const struct quantize_loop *loop, int64_t token, int64_t column,
                         int32_t count, float *row)
{
    for (int32_t at = 0, n; at < count; at += n) {
        n = count - at;
        const char *from = columns_at(loop->args->x, token, column + at, &n);
        loop->variant->f32->unpack[loop->x_element](row + at, from, n);
    }
}

static void store_columns(const struct quantize_loop *loop, int64_t token, int64_t column,
                          int32_t count, const uint8_t *codes)
{
    for (int32_t at = 0, n; at < count; at += n) {
        n = count - at;
        char *to = columns_at(loop->args->out, token, column + at, &n);
        memcpy(to, codes + at, (size_t)n);
    }
}

/* Largest magnitude of the elements that are not NaN. */
static float amax_of(const struct variant *variant, const float *row, int32_t count)
{
    float largest = variant->codes->largest(row, count);
    if (!isnan(largest)) {
        return largest;
    }
    largest = 0;
    for (int32_t i = 0; i < count; i++) {
        largest = fmaxf(largest, fabsf(row[i]));
    }
    return largest;
}

/* Queries in int8: to nearest even, unlike rows of a cache, down to -128. */
static void encode_query(uint8_t *codes, const float *row, float scale, int32_t count)
{
    const double whole = 0x1.8p52; /* only whole numbers are next to it */
    for (int32_t i = 0; i < count; i++) {
        double x = (double)row[i] / (double)scale;
        x = x < 127 ? x : 127;
        x = x > -128 ? x : -128;
        codes[i] = (uint8_t)(int8_t)(x + whole - whole);
    }
}

static void quantize_static(const struct quantize_loop *loop, int64_t token)
{
    const struct attn_quantize_args *args = loop->args;
    int64_t size = args->x->shape[2];
    float row[PIECE];
    uint8_t codes[PIECE];
    for (int64_t c = 0; c < loop->columns;) {
        int64_t head = c / size, left = (head + 1) * size - c;
        int32_t count = left < PIECE ? (int32_t)left : PIECE;
        float scale = args->scale[args->scale_form == ATTN_SCALE_PER_HEAD ? head : 0];
        load_columns(loop, token, c, count, row);
        if (loop->out_element == ELEMENT_INT8) {
            encode_query(codes, row, scale, count);
        } else {
            loop->variant->codes->encode[loop->out_element](codes, row, scale, NULL, count);
        }
        store_columns(loop, token, c, count, codes);
        c += count;
    }
}

/* Element `group` of one token's row of scales, which may be a column. */
static float *scale_at(const struct attn_quantize_args *args, int64_t token, int64_t group)
{
    const struct attn_tensor *scales = args->block_scales;
    int64_t i = args->scale_column_major ? group : token;
    int64_t j = args->scale_column_major ? token : group;
    return (float *)tensor_data(scales) + i * tensor_stride(scales, 0) +
           j * tensor_stride(scales, 1);
}

static void quantize_groups(const struct quantize_loop *loop, int64_t token, int32_t size)
{
    float row[PIECE];
    uint8_t codes[PIECE];
    for (int64_t c = 0; c < loop->columns; c += size) {
        load_columns(loop, token, c, size, row);
        double scale =
            fmax((double)amax_of(loop->variant, row, size), GROUP_LEAST_AMAX) / E4M3_LARGEST;
        if (loop->args->scale_pow2) {
            scale = exp2(ceil(log2(scale)));
        }
        *scale_at(loop->args, token, c / size) = (float)scale;
        loop->variant->codes->encode[ELEMENT_E4M3](codes, row, (float)scale, NULL, size);
        store_columns(loop, token, c, size, codes);
    }
}

/* block scale = e4m3(g amax / 6), value = e2m1(x g / block scale); even columns in low nibbles. */
static void quantize_nvfp4(const struct quantize_loop *loop, int64_t token)
{
    const struct attn_quantize_args *args = loop->args;
    float row[NVFP4_BLOCK];
    double global = args->scale != NULL ? *args->scale : 1;
    char *out_row = tensor_data(args->out) + token * tensor_stride(args->out, 0);
    char *scale_row =
        tensor_data(args->block_scales) + token * tensor_stride(args->block_scales, 0);
    for (int64_t c = 0; c < loop->columns; c += NVFP4_BLOCK) {
        load_columns(loop, token, c, NVFP4_BLOCK, row);
        double largest = (double)amax_of(loop->variant, row, NVFP4_BLOCK);
        scale_row[c / NVFP4_BLOCK] =
            (char)nvfp4_block(row, global, largest, (uint8_t *)out_row + c / 2);
    }
}

static void quantize_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct quantize_loop *loop = argument;
    for (int64_t t = begin; t < end; t++) {
        switch (loop->args->form) {
        case ATTN_OUTPUT_FP8_STATIC:
            quantize_static(loop, t);
            break;
        case ATTN_OUTPUT_NVFP4:
            quantize_nvfp4(loop, t);
            break;
        default:
            quantize_groups(loop, t, loop->args->form == ATTN_OUTPUT_FP8_GROUP_64 ? 64 : 128);
        }
    }
}

attn_status simd_quantize(const struct attn_quantize_args *args, struct attn_error *error)
{
    struct quantize_loop loop = {.args = args,
                                 .variant = args->instance->variant,
                                 .columns = args->x->shape[1] * args->x->shape[2],
                                 .x_element = element_of_any(args->x),
                                 .out_element = element_of_any(args->out)};
    return run_parallel(args->instance, args->x->shape[0], 1, quantize_rows, &loop);
}

/* Magnitudes are ordered as their bits are. */
static void raise_to(float *out, float largest)
{
    uint32_t wanted, *bits = (uint32_t *)(void *)out;
    memcpy(&wanted, &largest, sizeof wanted);
    uint32_t found = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (found < wanted && !__atomic_compare_exchange_n(bits, &found, wanted, true,
                                                          __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

/* Items are tokens. */
static void amax_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct attn_amax_args *args = argument;
    const struct attn_tensor *x = args->x;
    const struct variant *variant = args->instance->variant;
    int32_t element = element_of_any(x);
    float row[PIECE];
    for (int64_t h = 0; h < x->shape[1]; h++) {
        float largest = 0;
        for (int64_t t = begin; t < end; t++) {
            const char *from = (const char *)tensor_row(x, t, h);
            for (int64_t d = 0; d < x->shape[2]; d += PIECE) {
                int64_t left = x->shape[2] - d;
                int32_t count = left < PIECE ? (int32_t)left : PIECE;
                variant->f32->unpack[element](row, from + d * element_bytes[element], count);
                largest = fmaxf(largest, amax_of(variant, row, count));
            }
        }
        raise_to(&args->out[args->per_head ? h : 0], largest);
    }
}

attn_status simd_amax(const struct attn_amax_args *args, struct attn_error *error)
{
    if (element_of_any(args->x) < 0) { /* calibration inputs may have any dtype */
        return plugin_error(error, ATTN_ERROR_UNSUPPORTED, "x",
                            "its dtype is code %d of %d bits; f16, bf16, f32, fp8_e4m3, fp8_e5m2 "
                            "and int8 are served",
                            args->x->dtype.code, args->x->dtype.bits);
    }
    int64_t count = args->per_head ? args->x->shape[1] : 1;
    for (int64_t i = 0; i < count; i++) {
        args->out[i] = args->accumulate ? fmaxf(args->out[i], 0) : 0;
    }
    run_parallel(args->instance, args->x->shape[0], 16, amax_rows, args);
    amax_keep(args);
    return ATTN_OK;
}
