/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of a cache, one (block, slot, head) at a time, by a whole warp: any layout and any form. */
#ifndef CUDA_FLASH_ROWS_CUH
#define CUDA_FLASH_ROWS_CUH

#include "flash.h"
#include "number.cuh"

static __device__ __forceinline__ float cache_scale(const flash_cache &c, int32_t head)
{
    return c.scale != nullptr ? c.scale[c.scale_per_head ? head : 0] : c.scale_host;
}

static __device__ __forceinline__ float *row_scale_at(const flash_cache &c, int64_t block,
                                                      int64_t slot, int32_t head)
{
    return (float *)(c.row_scale + block * c.row_scale_block + slot * c.row_scale_slot +
                     head * c.row_scale_head);
}

/* What all elements of a row are multiplied by; FLASH_ROW_CHANNEL has 1 here. */
static __device__ __forceinline__ float row_scale_of(const flash_cache &c, int64_t block,
                                                     int64_t slot, int32_t head)
{
    return c.form == FLASH_ROW_SCALED    ? *row_scale_at(c, block, slot, head)
           : c.form == FLASH_ROW_CHANNEL ? 1.0f
                                         : cache_scale(c, head);
}

static __device__ __forceinline__ const char *row_at(const flash_cache &c, int64_t block,
                                                     int64_t slot, int32_t head)
{
    return c.data + block * c.block + slot * c.slot + head * c.head;
}

/* Element d, without its row's scale. */
static __device__ __forceinline__ float row_element(const flash_cache &c, const char *row,
                                                    int32_t head, int32_t d)
{
    int32_t outer = c.pack > 0 ? d / c.pack : 0, inner = c.pack > 0 ? d - outer * c.pack : d;
    float x = number_load(row + outer * c.pack_stride, c.dtype, inner);
    return c.form == FLASH_ROW_CHANNEL ? x * c.channel[(int64_t)head * c.head_size + d] : x;
}

/* A row of numbers `from` into the cache. */
static __device__ __forceinline__ void row_store(const flash_cache &c, int64_t block, int64_t slot,
                                                 int32_t head, const char *from, int32_t dtype,
                                                 int lane)
{
    char *to = (char *)row_at(c, block, slot, head);
    float scale = 1.0f;
    if (c.form == FLASH_ROW_SCALED) {
        float largest = 0.0f;
        for (int32_t d = lane; d < c.head_size; d += 32) {
            float x = fabsf(number_load(from, dtype, d));
            largest = isnan(x) || isnan(largest) ? NAN : fmaxf(largest, x);
        }
        largest = warp_largest(largest, true);
        scale = __fdiv_rn(largest, c.dtype == ATTN_DTYPE_INT8 ? INT8_LARGEST : FP8_LARGEST);
        scale = scale < LEAST_ROW_SCALE ? LEAST_ROW_SCALE : scale;
        if (lane == 0) {
            *row_scale_at(c, block, slot, head) = scale;
        }
    } else if (c.form == FLASH_ROW_NUMBERS && c.dtype >= ATTN_DTYPE_FP8_E4M3) {
        scale = cache_scale(c, head);
    }
    number_divisor by = divisor_of(scale);
    for (int32_t d = lane; d < c.head_size; d += 32) {
        int32_t outer = c.pack > 0 ? d / c.pack : 0, inner = c.pack > 0 ? d - outer * c.pack : d;
        float x = number_load(from, dtype, d);
        if (c.form == FLASH_ROW_CHANNEL) {
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

/* The last i of 0 .. count - 1 with starts[i] <= x. */
static __device__ __forceinline__ int32_t find_start(const int32_t *starts, int32_t count,
                                                     int32_t x)
{
    int32_t low = 0, high = count - 1;
    while (low < high) {
        int32_t middle = (low + high + 1) >> 1;
        if (starts[middle] <= x) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

#endif
