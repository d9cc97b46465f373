/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of 4-bit elements, a warp each; lane l has dims l, l + GPU_LANES and so on. What is stored
 * is found in double: codes and scales are then those of exact arithmetic. */
#ifndef GPU_DEVICE_NIBBLES_H
#define GPU_DEVICE_NIBBLES_H

#include "gpu/params.h"
#include "gpu/device/number.h"

#define LANE_DIMS (512 / GPU_LANES) /* dims of a lane: head sizes to 512 */
#define INT4_LARGEST 15.0
#define LEAST_INT4_SCALE 1e-6
#define ZERO_POINT_MASK 15u
#define NVFP4_BLOCK 16
#define MXFP4_BLOCK 32

/* Sylvester's matrix, not normalised, times a row of `count` elements, a power of two. */
template <class T, int DIMS> GPU_INLINE void hadamard(T (&x)[DIMS], int32_t count, int lane)
{
#pragma unroll
    for (int span = 1; span < GPU_LANES; span <<= 1) {
        if (span >= count) {
            return;
        }
#pragma unroll
        for (int i = 0; i < DIMS; i++) {
            auto other = lane_xor(x[i], span);
            x[i] = (lane & span) != 0 ? other - x[i] : x[i] + other;
        }
    }
#pragma unroll
    for (int span = 1; span < DIMS; span <<= 1) {
        if (span * GPU_LANES >= count) {
            return;
        }
#pragma unroll
        for (int i = 0; i < DIMS; i++) {
            if ((i & span) == 0) {
                auto a = x[i], b = x[i + span];
                x[i] = a + b;
                x[i + span] = a - b;
            }
        }
    }
}

GPU_INLINE char *nibble_at(const gpu_cache &c, char *row, int32_t d)
{
    int32_t outer = c.pack > 0 ? d / c.pack : 0, inner = c.pack > 0 ? d - outer * c.pack : d;
    return row + outer * c.pack_stride + (inner >> 1);
}

/* Codes of two neighbouring lanes share a byte, which the even lane writes. */
GPU_INLINE void store_nibble(const gpu_cache &c, char *row, int32_t d, uint32_t code)
{
    uint32_t high = lane_down(code, 1);
    if ((d & 1) == 0 && d < c.head_size) {
        *(uint8_t *)nibble_at(c, row, d) = (uint8_t)(code | high << 4);
    }
}

/* Block scale i of a row: K's lie in order, V's over the slots of a group of 4, S = D / 16 of them:
 * i / (S / 4) slots after the group's first, there at i % (S / 4) * 4 + slot % 4. */
GPU_INLINE uint8_t *first_block_scale(const gpu_cache &c, int64_t block, int64_t slot, int32_t head)
{
    uint8_t *at = (uint8_t *)c.row_scale + block * c.row_scale_block + head * c.row_scale_head;
    return c.swizzled ? at + (slot & ~(int64_t)3) * c.row_scale_slot + (slot & 3)
                      : at + slot * c.row_scale_slot;
}

GPU_INLINE uint8_t *block_scale_at(const gpu_cache &c, uint8_t *first, int32_t i)
{
    int32_t quarter = c.head_size / NVFP4_BLOCK / 4;
    return c.swizzled ? first + i / quarter * c.row_scale_slot + i % quarter * 4 : first + i;
}

GPU_INLINE float e2m1_number(uint32_t code)
{
    uint32_t size = code & 7;
    float x =
        size < 2 ? 0.5f * (float)size : bits_float(((size >> 1) + 126) << 23 | (size & 1) << 22);
    return (code & 8) != 0 ? -x : x;
}

GPU_INLINE double warp_extreme(double x, bool largest)
{
    for (int d = GPU_LANES / 2; d > 0; d >>= 1) {
        double y = lane_xor(x, d);
        x = isnan(x) || isnan(y) ? NAN : largest ? fmax(x, y) : fmin(x, y);
    }
    return x;
}

/* scale = max((max - min) / 15, 1e-6), zero point = round(-min / scale) in its last 4 bits. */
GPU_CALL void store_int4_row(const gpu_cache &c, char *row, float *scale_memory, const char *from,
                             int32_t dtype, int lane)
{
    double x[LANE_DIMS], low = INFINITY, high = -INFINITY;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        int32_t d = i * GPU_LANES + lane;
        x[i] = d < c.head_size ? (double)number_load(from, dtype, d) * (double)c.signs[d] : 0.0;
    }
    hadamard(x, c.head_size, lane);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        if (i * GPU_LANES + lane < c.head_size) {
            low = isnan(x[i]) || isnan(low) ? NAN : fmin(low, x[i]);
            high = fmax(high, x[i]);
        }
    }
    low = warp_extreme(low, false);
    high = warp_extreme(high, true);
    if (isnan(low)) { /* codes after it mean nothing */
        if (lane == 0) {
            *scale_memory = NAN;
        }
        return;
    }
    double size = (high - low) / INT4_LARGEST;
    float scale = (float)(size < LEAST_INT4_SCALE ? LEAST_INT4_SCALE : size);
    double zero = fmax(0.0, fmin(INT4_LARGEST, round(-low / (double)scale)));
    if (lane == 0) {
        *scale_memory = bits_float((float_bits(scale) & ~ZERO_POINT_MASK) | (uint32_t)zero);
    }
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        if (i * GPU_LANES < c.head_size) {
            double code = fmax(0.0, fmin(INT4_LARGEST, round(x[i] / (double)scale) + zero));
            store_nibble(c, row, i * GPU_LANES + lane, (uint32_t)code);
        }
    }
}

/* 16 lanes have a block: its scale = e4m3(g amax / 6), an element = e2m1(x g / scale), with
 * g = 1 / the tensor's scale. */
GPU_CALL void store_nvfp4_row(const gpu_cache &c, char *row, uint8_t *scales, double inverse,
                              const char *from, int32_t dtype, int lane)
{
#pragma unroll 1
    for (int32_t first = 0; first < c.head_size; first += GPU_LANES) {
        int32_t d = first + lane;
        double x = d < c.head_size ? (double)number_load(from, dtype, d) : 0.0;
        double largest = fabs(x);
        for (int i = 8; i > 0; i >>= 1) {
            double other = lane_xor(largest, i);
            largest = isnan(largest) || isnan(other) ? NAN : fmax(largest, other);
        }
        uint8_t code = number_to_fp8(ATTN_DTYPE_FP8_E4M3, odd_float(inverse * largest / 6.0));
        double scale = (double)number_load((const char *)&code, ATTN_DTYPE_FP8_E4M3, 0);
        bool none = scale == 0.0 || isnan(scale);
        if ((lane & 15) == 0 && d < c.head_size) {
            *block_scale_at(c, scales, d / NVFP4_BLOCK) = code;
        }
        store_nibble(c, row, d, e2m1_of(none ? 0.0 : x * inverse / scale));
    }
}

#endif
