/* SPDX-License-Identifier: Apache-2.0 */
/* TurboQuant's rows (common/turboquant.h), a warp each; lane l has dims l, l + GPU_LANES and so on.
 * What is stored is found in double, as nibbles.h does. */
#ifndef GPU_DEVICE_TURBOQUANT_H
#define GPU_DEVICE_TURBOQUANT_H

#include "common/turboquant.h"
#include "gpu/device/nibbles.h"

/* No array: its index would make it memory. */
GPU_INLINE float pick4(uint32_t i, float a, float b, float c, float d)
{
    return (i & 2) != 0 ? (i & 1) != 0 ? d : c : (i & 1) != 0 ? b : a;
}

GPU_INLINE float pick8(uint32_t i, float a, float b, float c, float d, float e, float f, float g,
                       float h)
{
    return (i & 4) != 0 ? pick4(i, e, f, g, h) : pick4(i, a, b, c, d);
}

/* The level of a rotated key's code; a row's are brought to unit length by whoever has them all. */
GPU_INLINE float level_of(uint32_t code, int32_t bits)
{
    uint32_t above = 1u << (bits - 1), i = ((code & above) != 0 ? code : ~code) & (above - 1);
    float x = bits == 3 ? pick4(i, TURBOQUANT_LEVELS_3) : pick8(i, TURBOQUANT_LEVELS_4);
    return (code & above) != 0 ? x : -x;
}

/* The nearest level's code; a middle belongs to the upper one. */
GPU_INLINE uint32_t nearest_level(double x, int32_t bits)
{
    const double three[4] = {TURBOQUANT_LEVELS_3}, four[8] = {TURBOQUANT_LEVELS_4};
    uint32_t above = 1u << (bits - 1), away = 0;
#pragma unroll
    for (int i = 0; i < 7; i++) {
        double middle = bits == 4 ? (four[i] + four[i + 1]) / 2
                        : i < 3   ? (three[i] + three[i + 1]) / 2
                                  : (double)INFINITY;
        away += x >= 0.0 ? x >= middle : x < -middle;
    }
    return x >= 0.0 ? above + away : above - 1 - away;
}

GPU_INLINE uint32_t code_at(const char *row, int32_t d, int32_t bits)
{
    const uint8_t *at = (const uint8_t *)row + (d * bits >> 3);
    int32_t shift = d * bits & 7;
    /* the second byte is the first where the code ends there */
    uint32_t two = at[0] | (uint32_t)at[shift + bits > 8] << 8;
    return two >> shift & ((1u << bits) - 1);
}

/* Codes of 8 neighbouring lanes are `bits` bytes, a lane each. All lanes take part. */
GPU_INLINE void store_codes(const gpu_cache &c, char *row, int32_t d, uint32_t code)
{
    uint32_t word = code << c.bits * (d & 7);
    word |= lane_xor(word, 1);
    word |= lane_xor(word, 2);
    word |= lane_xor(word, 4);
    if ((d & 7) < c.bits && d < c.head_size) {
        ((uint8_t *)row)[(d >> 3) * c.bits + (d & 7)] = (uint8_t)(word >> 8 * (d & 7));
    }
}

/* float16 at any address. */
GPU_INLINE void store_half_at(char *to, double x)
{
    double most = TURBOQUANT_LARGEST;
    uint16_t bits = isnan(x) ? 0x7e00 : half_of(odd_float(fmax(-most, fmin(most, x))));
    ((uint8_t *)to)[0] = (uint8_t)bits;
    ((uint8_t *)to)[1] = (uint8_t)(bits >> 8);
}

GPU_INLINE uint32_t half_bits_at(const char *from)
{
    return ((const uint8_t *)from)[0] | (uint32_t)((const uint8_t *)from)[1] << 8;
}

GPU_CALL void store_levels_row(const gpu_cache &c, char *row, char *scale, const char *from,
                               int32_t dtype, int lane)
{
    double x[LANE_DIMS], sum = 0.0;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        int32_t d = i * GPU_LANES + lane;
        x[i] = d < c.head_size ? (double)number_load(from, dtype, d) : 0.0;
        sum += x[i] * x[i];
    }
    for (int d = GPU_LANES / 2; d > 0; d >>= 1) {
        sum += lane_xor(sum, d);
    }
    double norm = isfinite(sum) ? sqrt(sum) : (double)NAN;
    if (lane == 0) {
        store_half_at(scale, norm);
    }
    if (isnan(norm)) { /* codes after it mean nothing */
        return;
    }
    hadamard(x, c.head_size, lane);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        if (i * GPU_LANES < c.head_size) {
            store_codes(c, row, i * GPU_LANES + lane,
                        nearest_level(x[i] / (norm + TURBOQUANT_EPSILON), c.bits));
        }
    }
}

GPU_CALL void store_steps_row(const gpu_cache &c, char *row, char *scale, const char *from,
                              int32_t dtype, int lane)
{
    double low = INFINITY, high = -INFINITY, most = (double)((1 << c.bits) - 1);
    for (int32_t d = lane; d < c.head_size; d += GPU_LANES) {
        double x = (double)number_load(from, dtype, d);
        low = isnan(x) || isnan(low) ? (double)NAN : fmin(low, x);
        high = fmax(high, x);
    }
    low = warp_extreme(low, false);
    high = warp_extreme(high, true);
    bool finite = isfinite(high - low);
    double step = fmax((high - low) / most, TURBOQUANT_STEP);
    if (lane == 0) {
        store_half_at(scale, finite ? step : (double)NAN);
        store_half_at(scale + 2, finite ? low + 0.0 : (double)NAN); /* no -0 */
    }
    for (int32_t first = 0; first < c.head_size && finite; first += GPU_LANES) {
        int32_t d = first + lane;
        double x = d < c.head_size ? (double)number_load(from, dtype, d) : low;
        store_codes(c, row, d, (uint32_t)fmin(floor((x - low) / step + 0.5), most));
    }
}

#endif
