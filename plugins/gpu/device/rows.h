/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of a cache of any layout and form, one (block, slot, head) at a time, by a whole warp. */
#ifndef GPU_DEVICE_ROWS_H
#define GPU_DEVICE_ROWS_H

#include "gpu/params.h"
#include "gpu/device/turboquant.h"

GPU_INLINE float cache_scale(const gpu_cache &c, int32_t head)
{
    return c.scale != nullptr ? c.scale[c.scale_per_head ? head : 0] : c.scale_host;
}

/* The scale of quantized queries for a KV head; else 1. */
GPU_INLINE float query_scale(const gpu_params &p, int32_t head)
{
    return p.q_scale != nullptr ? p.q_scale[p.q_scale_per_head ? head : 0] : p.q_scale_host;
}

GPU_INLINE float *row_scale_at(const gpu_cache &c, int64_t block, int64_t slot, int32_t head)
{
    return (float *)(c.row_scale + block * c.row_scale_block + slot * c.row_scale_slot +
                     head * c.row_scale_head);
}

GPU_INLINE const char *row_at(const gpu_cache &c, int64_t block, int64_t slot, int32_t head)
{
    return c.data + block * c.block + slot * c.slot + head * c.head;
}

/* A row to read: element d is row_element * row_scale; for GPU_ROW_LEVELS, divided by the length of
 * the row's levels. Loads are used later, so that several rows are in flight. NIBBLES: K or V may
 * have codes of less than 8 bits. */
struct gpu_cache_row {
    const char *data;
    uint32_t scale_bits; /* float32; INT4: the zero point in the last 4 bits; STEPS: two float16 */
    uint8_t *blocks;     /* GPU_ROW_NVFP4's scales */
};

template <bool NIBBLES>
GPU_INLINE gpu_cache_row enter_row(const gpu_cache &c, int64_t block, int64_t slot, int32_t head)
{
    gpu_cache_row row = {row_at(c, block, slot, head), float_bits(1.0f), nullptr};
    if (NIBBLES && c.form >= GPU_ROW_LEVELS) {
        const char *at = (const char *)row_scale_at(c, block, slot, head);
        uint32_t first = half_bits_at(at);
        row.scale_bits = c.form == GPU_ROW_STEPS ? first | half_bits_at(at + 2) << 16
                                                 : float_bits(float_of_half((uint16_t)first));
    } else if (c.form == (NIBBLES ? GPU_ROW_INT4 : GPU_ROW_SCALED)) {
        row.scale_bits = *(const uint32_t *)row_scale_at(c, block, slot, head);
    } else if (c.form != GPU_ROW_CHANNEL) { /* each element has a scale of its own */
        row.scale_bits = float_bits(cache_scale(c, head));
    }
    if (NIBBLES && c.form == GPU_ROW_NVFP4) {
        row.blocks = first_block_scale(c, block, slot, head);
    }
    return row;
}

template <bool NIBBLES> GPU_INLINE float row_scale(const gpu_cache &c, const gpu_cache_row &row)
{
    bool zero_point = NIBBLES && c.form == GPU_ROW_INT4;
    if (NIBBLES && c.form == GPU_ROW_STEPS) {
        return 1.0f;
    }
    return bits_float(zero_point ? row.scale_bits & ~ZERO_POINT_MASK : row.scale_bits);
}

/* A stored element; for GPU_ROW_NVFP4 with its block's scale. */
struct gpu_element {
    uint32_t bits, scale;
};

template <bool NIBBLES>
GPU_INLINE gpu_element load_element(const gpu_cache &c, const gpu_cache_row &row, int32_t d)
{
    gpu_element x = {0, 0};
    if (NIBBLES && c.form >= GPU_ROW_LEVELS) {
        x.bits = code_at(row.data, d, c.bits);
        return x;
    }
    if (NIBBLES && c.form != GPU_ROW_NUMBERS) {
        x.bits = *(const uint8_t *)nibble_at(c, (char *)row.data, d);
        if (c.form == GPU_ROW_NVFP4) {
            x.scale = *block_scale_at(c, row.blocks, d / NVFP4_BLOCK);
        }
        return x;
    }
    int32_t outer = c.pack > 0 ? d / c.pack : 0, inner = c.pack > 0 ? d - outer * c.pack : d;
    int32_t bytes = number_bytes_of(c.dtype);
    const char *at = row.data + outer * c.pack_stride + inner * bytes;
    x.bits = bytes == 1   ? *(const uint8_t *)at
             : bytes == 2 ? *(const uint16_t *)at
                          : *(const uint32_t *)at;
    return x;
}

/* Without the row's scale; for GPU_ROW_INT4, still Hadamard-transformed. */
template <bool NIBBLES>
GPU_INLINE float element_number(const gpu_cache &c, const gpu_cache_row &row, gpu_element x,
                                int32_t head, int32_t d)
{
    if (NIBBLES && c.form == GPU_ROW_LEVELS) {
        return level_of(x.bits, c.bits);
    }
    if (NIBBLES && c.form == GPU_ROW_STEPS) {
        return fmaf((float)x.bits, float_of_half((uint16_t)row.scale_bits),
                    float_of_half((uint16_t)(row.scale_bits >> 16)));
    }
    if (NIBBLES && c.form != GPU_ROW_NUMBERS) {
        uint32_t code = x.bits >> ((d & 1) * 4) & 15;
        if (c.form == GPU_ROW_INT4) {
            return (float)code - (float)(row.scale_bits & ZERO_POINT_MASK);
        }
        return e2m1_number(code) * number_load((const char *)&x.scale, ATTN_DTYPE_FP8_E4M3, 0);
    }
    float number = number_load((const char *)&x.bits, c.dtype, 0);
    return c.form == GPU_ROW_CHANNEL ? number * c.channel[(int64_t)head * c.head_size + d] : number;
}

template <bool NIBBLES>
GPU_INLINE float row_element(const gpu_cache &c, const gpu_cache_row &row, int32_t head, int32_t d)
{
    return element_number<NIBBLES>(c, row, load_element<NIBBLES>(c, row, d), head, d);
}

/* Whether rows are stored Hadamard-transformed. */
GPU_INLINE bool is_turned(const gpu_cache &c)
{
    return c.form == GPU_ROW_INT4 || c.form == GPU_ROW_LEVELS;
}

/* The factor of dim d before or after the Hadamard matrix; the matrix applied twice is head_size
 * times the identity. */
GPU_INLINE float turn_factor(const gpu_cache &c, int32_t d)
{
    return c.form == GPU_ROW_INT4 ? c.signs[d] / (float)c.head_size
                                  : 1.0f / sqrtf((float)c.head_size);
}

/* Undoes the Hadamard transform of x, which is a row or a sum of transformed rows, in place. */
GPU_INLINE void turn_back(const gpu_cache &c, float (&x)[LANE_DIMS], int lane)
{
    hadamard(x, c.head_size, lane);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        int32_t d = i * GPU_LANES + lane;
        x[i] *= d < c.head_size ? turn_factor(c, d) : 0.0f;
    }
}

/* Writes a row of numbers `from` into the cache. */
GPU_INLINE void row_store(const gpu_cache &c, int64_t block, int64_t slot, int32_t head,
                          const char *from, int32_t dtype, int lane)
{
    char *to = (char *)row_at(c, block, slot, head);
    float scale = 1.0f;
    if (c.form == GPU_ROW_INT4) {
        store_int4_row(c, to, row_scale_at(c, block, slot, head), from, dtype, lane);
        return;
    }
    if (c.form >= GPU_ROW_LEVELS) {
        char *at = (char *)row_scale_at(c, block, slot, head);
        if (c.form == GPU_ROW_LEVELS) {
            store_levels_row(c, to, at, from, dtype, lane);
        } else {
            store_steps_row(c, to, at, from, dtype, lane);
        }
        return;
    }
    if (c.form == GPU_ROW_NVFP4) {
        store_nvfp4_row(c, to, first_block_scale(c, block, slot, head),
                        1.0 / (double)cache_scale(c, head), from, dtype, lane);
        return;
    }
    if (c.form == GPU_ROW_SCALED) {
        float largest = 0.0f;
        for (int32_t d = lane; d < c.head_size; d += GPU_LANES) {
            float x = fabsf(number_load(from, dtype, d));
            largest = isnan(x) || isnan(largest) ? NAN : fmaxf(largest, x);
        }
        largest = warp_largest(largest, true);
        scale = divide_nearest(largest, c.dtype == ATTN_DTYPE_INT8 ? INT8_LARGEST : FP8_LARGEST);
        scale = scale < LEAST_ROW_SCALE ? LEAST_ROW_SCALE : scale;
        if (lane == 0) {
            *row_scale_at(c, block, slot, head) = scale;
        }
    } else if (c.form == GPU_ROW_NUMBERS && c.dtype >= ATTN_DTYPE_FP8_E4M3) {
        scale = cache_scale(c, head);
    }
    number_divisor by = divisor_of(scale);
    for (int32_t d = lane; d < c.head_size; d += GPU_LANES) {
        int32_t outer = c.pack > 0 ? d / c.pack : 0, inner = c.pack > 0 ? d - outer * c.pack : d;
        float x = number_load(from, dtype, d);
        if (c.form == GPU_ROW_CHANNEL) {
            by = divisor_of(c.channel[(int64_t)head * c.head_size + d]);
        }
        char *at = to + outer * c.pack_stride;
        if (c.dtype == ATTN_DTYPE_INT8) {
            ((int8_t *)at)[inner] = number_to_int8(divide_odd(x, by));
        } else if (c.dtype >= ATTN_DTYPE_FP8_E4M3) {
            number_store(at, c.dtype, inner, divide_odd(x, by));
        } else {
            number_store(at, c.dtype, inner, x);
        }
    }
}

#endif
