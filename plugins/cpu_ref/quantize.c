/* SPDX-License-Identifier: Apache-2.0 */
/* quantize and amax. */
#include <math.h>

#include "common/amax.h"
#include "common/number.h"
#include "common/tensors.h"
#include "reference.h"

#define FP8_LARGEST 448.0
#define GROUP_LEAST_AMAX 1e-10
#define NVFP4_BLOCK 16

static double amax_of(const double *row, int32_t count)
{
    double largest = 0;
    for (int32_t i = 0; i < count; i++) {
        largest = fmax(largest, fabs(row[i]));
    }
    return largest;
}

/* Element `at` of a row of scales of one token; group forms may be column-major. */
static float *scale_at(const struct attn_quantize_args *args, int64_t token, int64_t group)
{
    const struct attn_tensor *scales = args->block_scales;
    int64_t i = args->scale_column_major ? group : token;
    int64_t j = args->scale_column_major ? token : group;
    return (float *)((uint8_t *)scales->data + scales->byte_offset) + i * tensor_stride(scales, 0) +
           j * tensor_stride(scales, 1);
}

/* Columns c .. c+count-1 of a token's [heads, D] row, taken as one row of heads * D. */
static void load_columns(const struct attn_tensor *x, int64_t token, int64_t column, int32_t count,
                         double *row)
{
    for (int32_t i = 0; i < count; i++) {
        int64_t c = column + i;
        const uint8_t *head = tensor_row(x, token, c / x->shape[2]);
        number_load_row(row + i, head + c % x->shape[2] * (x->dtype.bits / 8),
                        number_dtype_name(x->dtype), 1);
    }
}

static void store_columns(const struct attn_tensor *out, int64_t token, int64_t column,
                          int32_t count, const double *row)
{
    for (int32_t i = 0; i < count; i++) {
        int64_t c = column + i;
        uint8_t *head = tensor_row(out, token, c / out->shape[2]);
        number_store_row(head + c % out->shape[2], row + i, number_dtype_name(out->dtype), 1);
    }
}

static void quantize_static(const struct attn_quantize_args *args, int64_t token)
{
    int64_t group = args->scale_form == ATTN_SCALE_PER_HEAD ? args->x->shape[2] : 0;
    int64_t columns = args->x->shape[1] * args->x->shape[2];
    for (int64_t c = 0; c < columns; c++) {
        double value, scale = args->scale[group > 0 ? c / group : 0];
        load_columns(args->x, token, c, 1, &value);
        value /= scale;
        store_columns(args->out, token, c, 1, &value);
    }
}

static void quantize_groups(const struct attn_quantize_args *args, int64_t token, int32_t size)
{
    double row[128];
    int64_t columns = args->x->shape[1] * args->x->shape[2];
    for (int64_t c = 0; c < columns; c += size) {
        load_columns(args->x, token, c, size, row);
        double scale = fmax(amax_of(row, size), GROUP_LEAST_AMAX) / FP8_LARGEST;
        if (args->scale_pow2) {
            scale = exp2(ceil(log2(scale)));
        }
        scale = (float)scale;
        *scale_at(args, token, c / size) = (float)scale;
        for (int32_t i = 0; i < size; i++) {
            row[i] /= scale;
        }
        store_columns(args->out, token, c, size, row);
    }
}

/* block scale = e4m3(g amax / 6), value = e2m1(x g / block scale); even columns in low nibbles. */
static void quantize_nvfp4(const struct attn_quantize_args *args, int64_t token)
{
    double row[NVFP4_BLOCK];
    double global = args->scale != NULL ? *args->scale : 1;
    int64_t columns = args->x->shape[1] * args->x->shape[2];
    const struct attn_tensor *scales = args->block_scales;
    uint8_t *out_row =
        (uint8_t *)args->out->data + args->out->byte_offset + token * tensor_stride(args->out, 0);
    uint8_t *scale_row =
        (uint8_t *)scales->data + scales->byte_offset + token * tensor_stride(scales, 0);
    for (int64_t c = 0; c < columns; c += NVFP4_BLOCK) {
        load_columns(args->x, token, c, NVFP4_BLOCK, row);
        uint8_t code = number_to_e4m3(global * amax_of(row, NVFP4_BLOCK) / 6);
        double block_scale = number_from_e4m3(code);
        scale_row[c / NVFP4_BLOCK] = code;
        for (int32_t i = 0; i < NVFP4_BLOCK; i += 2) {
            double low = block_scale == 0 ? 0 : row[i] * global / block_scale;
            double high = block_scale == 0 ? 0 : row[i + 1] * global / block_scale;
            out_row[(c + i) / 2] = (uint8_t)(number_to_e2m1(low) | number_to_e2m1(high) << 4);
        }
    }
}

static void quantize_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct attn_quantize_args *args = argument;
    for (int64_t t = begin; t < end; t++) {
        switch (args->form) {
        case ATTN_OUTPUT_FP8_STATIC:
            quantize_static(args, t);
            break;
        case ATTN_OUTPUT_NVFP4:
            quantize_nvfp4(args, t);
            break;
        default:
            quantize_groups(args, t, args->form == ATTN_OUTPUT_FP8_GROUP_64 ? 64 : 128);
        }
    }
}

attn_status ref_quantize(const struct attn_quantize_args *args, struct attn_error *error)
{
    const struct attn_host *host = args->instance->host;
    host->parallel_for(host->user, args->x->shape[0], 1, quantize_rows, (void *)(uintptr_t)args);
    return ATTN_OK;
}

attn_status ref_amax(const struct attn_amax_args *args, struct attn_error *error)
{
    const struct attn_tensor *x = args->x;
    int64_t count = args->per_head ? x->shape[1] : 1;
    for (int64_t i = 0; i < count && !args->accumulate; i++) {
        args->out[i] = 0;
    }
    for (int64_t t = 0; t < x->shape[0]; t++) {
        for (int64_t h = 0; h < x->shape[1]; h++) {
            const uint8_t *row = tensor_row(x, t, h);
            float *out = &args->out[args->per_head ? h : 0];
            for (int64_t d = 0; d < x->shape[2]; d++) {
                double value;
                number_load_row(&value, row + d * (x->dtype.bits / 8), number_dtype_name(x->dtype),
                                1);
                *out = fmaxf(*out, (float)fabs(value));
            }
        }
    }
    amax_keep(args);
    return ATTN_OK;
}
