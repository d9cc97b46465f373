/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of quantized caches that carry scales of their own: one slot and head at a time. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "common/number.h"
#include "common/tensors.h"
#include "common/turboquant.h"
#include "reference.h"

#define LEAST_SCALE 1e-6
#define INT8_LARGEST 127.0
#define FP8_LARGEST 448.0
#define INT4_LARGEST 15.0
#define NVFP4_BLOCK 16
#define MXFP4_BLOCK 32
#define E2M1_LARGEST 6.0
#define ZERO_POINT_MASK 15u
#define DS_LATENT 512
#define DS_TILE 128
#define DS_ROPE 64
#define DS_ROPE_AT (DS_LATENT + DS_LATENT / DS_TILE * 4)
#define V4_LATENT 448
#define V4_TILE 64
#define V4_LEAST 1e-4 /* magnitude that a scale is made for, as of DeepSeek's kernels */
#define MXFP4_LEAST (E2M1_LARGEST / (1ull << 63) / (1ull << 63)) /* as of the same */
#define E8M0_BIAS 127
#define E8M0_LARGEST 254 /* 255 is NaN */

static const struct attn_kv_quant_params *quant_params(const struct attn_layer_params *params)
{
    return ext_of(params->next, ATTN_EXT_KV_QUANT_PARAMS);
}

enum row_form row_form(const struct attn_layer_desc *layer, bool is_v)
{
    const int32_t kv_dtype = layer_kv_dtype(layer, is_v);
    switch (kv_dtype) {
    case ATTN_KV_FP8_PER_TOKEN_HEAD:
        return ROW_FP8_SCALED;
    case ATTN_KV_INT8_PER_TOKEN_HEAD:
        return ROW_INT8_SCALED;
    case ATTN_KV_INT4_PER_TOKEN_HEAD:
        return ROW_INT4_HADAMARD;
    case ATTN_KV_INT8_KV:
        return is_v ? ROW_INT8_CHANNEL : ROW_INT8_SCALED;
    case ATTN_KV_INT8_K:
        return is_v ? ROW_NUMBERS : ROW_INT8_SCALED;
    case ATTN_KV_NVFP4:
        return ROW_NVFP4;
    case ATTN_KV_MXFP4:
        return is_v ? ROW_UNKNOWN : ROW_MXFP4;
    case ATTN_KV_FP8_DS_MLA:
        return is_v ? ROW_UNKNOWN : ROW_DS_MLA;
    case ATTN_KV_FP8_DS_V4:
        return is_v ? ROW_UNKNOWN : ROW_DS_V4;
    case ATTN_KV_Q8_0:
    case ATTN_KV_Q4_0:
        return ROW_BLOCKS;
    case ATTN_KV_TURBOQUANT_K8V4:
        return is_v ? ROW_TURBOQUANT : ROW_NUMBERS;
    default:
        return turboquant_bits(kv_dtype, is_v) > 0 ? ROW_TURBOQUANT
               : number_of_kv(kv_dtype) >= 0       ? ROW_NUMBERS
                                                   : ROW_UNKNOWN;
    }
}

/* Address of element d, of `bits` each; of the byte that holds it where bits is 4. */
static uint8_t *element_at(const struct attn_kv_view *view, uint8_t *memory, int32_t d,
                           int32_t bits)
{
    int32_t pack = view->pack;
    if (pack == 0 || pack == view->head_size) {
        return memory + d * bits / 8;
    }
    return memory + d / pack * view->stride_pack + d % pack * bits / 8;
}

static uint32_t nibble(const struct attn_kv_view *view, uint8_t *memory, int32_t d)
{
    return *element_at(view, memory, d, 4) >> (d % 2 * 4) & 15;
}

static void set_nibble(const struct attn_kv_view *view, uint8_t *memory, int32_t d, uint32_t code)
{
    uint8_t *byte = element_at(view, memory, d, 4);
    *byte = (uint8_t)(d % 2 ? (*byte & 15) | code << 4 : (*byte & 0xf0) | code);
}

/* NaN if any element is: the row's scale then carries it to its readers. */
static double largest_magnitude(const double *row, int32_t count)
{
    double largest = 0;
    for (int32_t d = 0; d < count; d++) {
        largest = isnan(row[d]) || isnan(largest) ? NAN : fmax(largest, fabs(row[d]));
    }
    return largest;
}

static double at_least(double value, double least)
{
    return value < least ? least : value; /* NaN stays */
}

static int8_t round_int8(double value) /* half away from zero; NaN shows in the scale */
{
    return isnan(value) ? 0 : (int8_t)fmax(-INT8_LARGEST, fmin(INT8_LARGEST, round(value)));
}

static const float *hadamard_signs(const struct attn_layer_params *params, bool is_v)
{
    const struct attn_kv_quant_params *quant = quant_params(params);
    return quant == NULL ? NULL : is_v ? quant->hadamard_signs_v : quant->hadamard_signs_k;
}

static uint8_t *memory_of(const struct cache_place *at)
{
    return view_row(at->view, at->block, at->slot, at->head);
}

static float *scale_of(const struct cache_place *at)
{
    return view_scale(at->view, at->block, at->slot, at->head);
}

/* zero point in the low mantissa bits of the scale, which are no part of its value */
static void store_int4(const struct cache_place *at, const double *row)
{
    const float *signs = hadamard_signs(at->params, at->is_v);
    float *scale_memory = scale_of(at);
    double turned[REF_MAX_HEAD_SIZE], low = INFINITY, high = -INFINITY;
    int32_t count = at->view->head_size;
    for (int32_t d = 0; d < count; d++) {
        turned[d] = row[d] * signs[d];
    }
    hadamard(turned, count);
    for (int32_t d = 0; d < count; d++) {
        low = isnan(turned[d]) ? NAN : fmin(low, turned[d]);
        high = fmax(high, turned[d]);
        if (isnan(low)) {
            *scale_memory = NAN;
            return;
        }
    }
    float scale = (float)at_least((high - low) / INT4_LARGEST, LEAST_SCALE);
    double zero = fmax(0, fmin(INT4_LARGEST, round(-low / scale)));
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits = (bits & ~ZERO_POINT_MASK) | (uint32_t)zero;
    memcpy(scale_memory, &bits, sizeof bits);
    for (int32_t d = 0; d < count; d++) {
        double code = fmax(0, fmin(INT4_LARGEST, round(turned[d] / scale) + zero));
        set_nibble(at->view, memory_of(at), d, (uint32_t)code);
    }
}

static void load_int4(const struct cache_place *at, double *row)
{
    const struct attn_kv_view *view = at->view;
    const float *signs = hadamard_signs(at->params, at->is_v);
    uint8_t *memory = memory_of(at);
    uint32_t bits;
    memcpy(&bits, scale_of(at), sizeof bits);
    double scale = number_from_bits(bits & ~ZERO_POINT_MASK);
    for (int32_t d = 0; d < view->head_size; d++) {
        row[d] = ((double)nibble(view, memory, d) - (bits & ZERO_POINT_MASK)) * scale;
    }
    hadamard(row, view->head_size);
    for (int32_t d = 0; d < view->head_size; d++) {
        row[d] *= signs[d] / view->head_size;
    }
}

/* Block scale s of slot t: K's lie in order, V's are swizzled within groups of 4 slots. */
static uint8_t *nvfp4_scale(const struct attn_kv_view *view, bool is_v, int64_t block, int64_t t,
                            int64_t head, int64_t s)
{
    int64_t quarter = view->head_size / NVFP4_BLOCK / 4;
    int64_t slot = is_v ? t / 4 * 4 + s / quarter : t;
    int64_t index = is_v ? s % quarter * 4 + t % 4 : s;
    return (uint8_t *)view_scale(view, block, slot, head) + index;
}

static double global_of(const struct cache_place *at)
{
    const struct attn_layer_params *p = at->params;
    return 1 / (at->is_v ? scale_of_head(p->v_scale, p->v_scale_host, ATTN_SCALE_PER_TENSOR, 0)
                         : scale_of_head(p->k_scale, p->k_scale_host, ATTN_SCALE_PER_TENSOR, 0));
}

static void store_nvfp4(const struct cache_place *at, const double *row)
{
    const double global = global_of(at);
    for (int32_t first = 0; first < at->view->head_size; first += NVFP4_BLOCK) {
        double largest = largest_magnitude(row + first, NVFP4_BLOCK);
        uint8_t code = number_to_e4m3(global * largest / E2M1_LARGEST);
        double scale = number_from_e4m3(code);
        *nvfp4_scale(at->view, at->is_v, at->block, at->slot, at->head, first / NVFP4_BLOCK) = code;
        for (int32_t d = first; d < first + NVFP4_BLOCK; d++) {
            double value = scale == 0 || isnan(scale) ? 0 : row[d] * global / scale;
            set_nibble(at->view, memory_of(at), d, number_to_e2m1(value));
        }
    }
}

static void load_nvfp4(const struct cache_place *at, double *row)
{
    uint8_t *memory = memory_of(at);
    const double global = global_of(at);
    for (int32_t first = 0; first < at->view->head_size; first += NVFP4_BLOCK) {
        double scale = number_from_e4m3(
            *nvfp4_scale(at->view, at->is_v, at->block, at->slot, at->head, first / NVFP4_BLOCK));
        for (int32_t d = first; d < first + NVFP4_BLOCK; d++) {
            row[d] = number_from_e2m1((uint8_t)nibble(at->view, memory, d)) * scale / global;
        }
    }
}

/* 512 e4m3, 4 float32 scales of 128 of them each, 64 bf16. */
static void store_ds_mla(const struct cache_place *at, const double *row)
{
    uint8_t *memory = memory_of(at);
    for (int32_t tile = 0; tile < DS_LATENT / DS_TILE; tile++) {
        const double *x = row + (size_t)tile * DS_TILE;
        float scale = (float)at_least(largest_magnitude(x, DS_TILE) / FP8_LARGEST, FLT_MIN);
        memcpy(memory + DS_LATENT + tile * sizeof scale, &scale, sizeof scale);
        for (int32_t d = 0; d < DS_TILE; d++) {
            memory[tile * DS_TILE + d] = number_to_e4m3(x[d] / scale);
        }
    }
    number_store_row(memory + DS_ROPE_AT, row + DS_LATENT, ATTN_DTYPE_BF16, DS_ROPE);
}

static void load_ds_mla(const struct cache_place *at, double *row)
{
    const uint8_t *memory = memory_of(at);
    for (int32_t d = 0; d < DS_LATENT; d++) {
        float scale;
        memcpy(&scale, memory + DS_LATENT + d / DS_TILE * sizeof scale, sizeof scale);
        row[d] = (double)number_from_e4m3(memory[d]) * scale;
    }
    number_load_row(row + DS_LATENT, memory + DS_ROPE_AT, ATTN_DTYPE_BF16, DS_ROPE);
}

/* The exponent of the least power of two that brings `largest` to at most `limit`, in e8m0. */
static uint8_t e8m0_of(double largest, double limit)
{
    const double exponent =
        fmin(fmax(ceil(log2(largest / limit)), -E8M0_BIAS), E8M0_LARGEST - E8M0_BIAS);
    return isnan(largest) ? E8M0_LARGEST + 1 : (uint8_t)(exponent + E8M0_BIAS);
}

static double number_from_e8m0(uint8_t code)
{
    return code > E8M0_LARGEST ? NAN : ldexp(1, code - E8M0_BIAS);
}

/* e2m1, whose scales of 32 are powers of two apart in e8m0. */
static void store_mxfp4(const struct cache_place *at, const double *row)
{
    uint8_t *scales = (uint8_t *)scale_of(at);
    for (int32_t first = 0; first < at->view->head_size; first += MXFP4_BLOCK) {
        const double largest = at_least(largest_magnitude(row + first, MXFP4_BLOCK), MXFP4_LEAST);
        const uint8_t code = e8m0_of(largest, E2M1_LARGEST);
        scales[first / MXFP4_BLOCK] = code;
        for (int32_t d = first; d < first + MXFP4_BLOCK; d++) {
            const double value = isnan(largest) ? 0 : row[d] / number_from_e8m0(code);
            set_nibble(at->view, memory_of(at), d, number_to_e2m1(value));
        }
    }
}

static void load_mxfp4(const struct cache_place *at, double *row)
{
    const uint8_t *scales = (const uint8_t *)scale_of(at);
    for (int32_t d = 0; d < at->view->head_size; d++) {
        row[d] = number_from_e2m1((uint8_t)nibble(at->view, memory_of(at), d)) *
                 number_from_e8m0(scales[d / MXFP4_BLOCK]);
    }
}

/* 448 e4m3, whose scales of 64 are powers of two apart in e8m0, and 64 bf16. */
static void store_ds_v4(const struct cache_place *at, const double *row)
{
    uint8_t *memory = memory_of(at), *scales = (uint8_t *)scale_of(at);
    scales[V4_LATENT / V4_TILE] = 0;
    for (int32_t first = 0; first < V4_LATENT; first += V4_TILE) {
        const double largest = at_least(largest_magnitude(row + first, V4_TILE), V4_LEAST);
        const uint8_t code = e8m0_of(largest, FP8_LARGEST);
        scales[first / V4_TILE] = code;
        for (int32_t d = first; d < first + V4_TILE; d++) {
            memory[d] = number_to_e4m3(row[d] / number_from_e8m0(code));
        }
    }
    number_store_row(memory + V4_LATENT, row + V4_LATENT, ATTN_DTYPE_BF16, DS_ROPE);
}

static void load_ds_v4(const struct cache_place *at, double *row)
{
    const uint8_t *memory = memory_of(at), *scales = (const uint8_t *)scale_of(at);
    for (int32_t d = 0; d < V4_LATENT; d++) {
        row[d] = number_from_e4m3(memory[d]) * number_from_e8m0(scales[d / V4_TILE]);
    }
    number_load_row(row + V4_LATENT, memory + V4_LATENT, ATTN_DTYPE_BF16, DS_ROPE);
}

static double channel_scale(const struct cache_place *at, int32_t d)
{
    return quant_params(at->params)->v_channel_scale[at->head * at->view->head_size + d];
}

/* One scale for the row or, in int8, one for each channel. */
static void store_scaled(const struct cache_place *at, const double *row)
{
    const struct attn_kv_view *view = at->view;
    const enum row_form form = row_form(at->layer, at->is_v);
    float scale = 1;
    if (form != ROW_INT8_CHANNEL) {
        double limit = form == ROW_FP8_SCALED ? FP8_LARGEST : INT8_LARGEST;
        scale = (float)at_least(largest_magnitude(row, view->head_size) / limit, LEAST_SCALE);
        *scale_of(at) = scale;
    }
    for (int32_t d = 0; d < view->head_size; d++) {
        double value = row[d] / (form == ROW_INT8_CHANNEL ? channel_scale(at, d) : scale);
        *element_at(view, memory_of(at), d, 8) =
            form == ROW_FP8_SCALED ? number_to_e4m3(value) : (uint8_t)round_int8(value);
    }
}

static void load_scaled(const struct cache_place *at, double *row)
{
    const struct attn_kv_view *view = at->view;
    const enum row_form form = row_form(at->layer, at->is_v);
    double scale = 1;
    if (form != ROW_INT8_CHANNEL) {
        scale = *view_scale(view, at->block, at->slot, at->head);
    }
    for (int32_t d = 0; d < view->head_size; d++) {
        uint8_t code = *element_at(view, memory_of(at), d, 8);
        double value = form == ROW_FP8_SCALED ? number_from_e4m3(code) : (double)(int8_t)code;
        row[d] = value * (form == ROW_INT8_CHANNEL ? channel_scale(at, d) : scale);
    }
}

static const struct {
    void (*store)(const struct cache_place *at, const double *row);
    void (*load)(const struct cache_place *at, double *row);
} forms[] = {
    [ROW_FP8_SCALED] = {store_scaled, load_scaled},
    [ROW_INT8_SCALED] = {store_scaled, load_scaled},
    [ROW_INT8_CHANNEL] = {store_scaled, load_scaled},
    [ROW_INT4_HADAMARD] = {store_int4, load_int4},
    [ROW_NVFP4] = {store_nvfp4, load_nvfp4},
    [ROW_MXFP4] = {store_mxfp4, load_mxfp4},
    [ROW_DS_MLA] = {store_ds_mla, load_ds_mla},
    [ROW_DS_V4] = {store_ds_v4, load_ds_v4},
    [ROW_BLOCKS] = {blocks_store, blocks_load},
    [ROW_TURBOQUANT] = {turboquant_store, turboquant_load},
};

void row_store(const struct cache_place *at, const double *row)
{
    forms[row_form(at->layer, at->is_v)].store(at, row);
}

void row_load(const struct cache_place *at, double *row)
{
    forms[row_form(at->layer, at->is_v)].load(at, row);
}
