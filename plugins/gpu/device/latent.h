/* SPDX-License-Identifier: Apache-2.0 */
/* Latent rows of MLA in a cache, [c : rank | k_pe : rope]: numbers with one scale; fp8_ds_mla,
 * which has 512 e4m3, 4 float32 scales for 128 of them each, and 64 bf16; or fp8_ds_v4, which has
 * 448 e4m3 and 64 bf16, and elsewhere 7 scales in e8m0 for 64 of them each. */
#ifndef GPU_DEVICE_LATENT_H
#define GPU_DEVICE_LATENT_H

#include "gpu/device/rows.h"
#include "gpu/latent.h"

#define DS_MLA_SCALES_AT LATENT_MAX_RANK
#define DS_MLA_ROPE_AT (LATENT_MAX_RANK + LATENT_MAX_RANK / DS_MLA_TILE * 4)
#define FLT_LEAST 1.17549435e-38f

GPU_INLINE uint8_t *latent_scales(const gpu_cache &c, int64_t block, int64_t slot)
{
    return (uint8_t *)row_scale_at(c, block, slot, 0);
}

/* Element d of the row at `row`; `scale` is for plain numbers, `scales` for fp8_ds_v4. */
GPU_INLINE float latent_number(const gpu_cache &c, const char *row, const uint8_t *scales,
                               float scale, int32_t d)
{
    if (c.form == GPU_ROW_DS_V4) {
        return d < DS_V4_CODES
                   ? number_load(row, ATTN_DTYPE_FP8_E4M3, d) * e8m0_number(scales[d / DS_V4_TILE])
                   : number_load(row + DS_V4_CODES, ATTN_DTYPE_BF16, d - DS_V4_CODES);
    }
    if (c.form != GPU_ROW_DS_MLA) {
        return number_load(row, c.dtype, d) * scale;
    }
    if (d >= LATENT_MAX_RANK) {
        return number_load(row + DS_MLA_ROPE_AT, ATTN_DTYPE_BF16, d - LATENT_MAX_RANK);
    }
    return number_load(row, ATTN_DTYPE_FP8_E4M3, d) *
           number_load(row + DS_MLA_SCALES_AT, ATTN_DTYPE_F32, d / DS_MLA_TILE);
}

#define LATENT_AT_ONCE 9 /* elements that a lane loads together, of its 18 of 576 */

/* Writes a row of plain numbers; raw is the type of the new elements. */
template <class raw>
GPU_INLINE void store_latent_numbers(const gpu_latent_write_params &p, char *to, const char *latent,
                                     const char *rope)
{
    const bool narrow = p.to.dtype >= ATTN_DTYPE_FP8_E4M3;
    const number_divisor by = divisor_of(narrow ? cache_scale(p.to, 0) : 1.0f);
    const int32_t size = p.to.head_size;
    for (int32_t first = lane_index(); first < size; first += GPU_LANES * LATENT_AT_ONCE) {
        raw numbers[LATENT_AT_ONCE] = {};
#pragma unroll
        for (int i = 0; i < LATENT_AT_ONCE; i++) {
            const int32_t d = first + i * GPU_LANES;
            if (d < size) {
                numbers[i] =
                    d < p.rank ? ((const raw *)latent)[d] : ((const raw *)rope)[d - p.rank];
            }
        }
#pragma unroll
        for (int i = 0; i < LATENT_AT_ONCE; i++) {
            const int32_t d = first + i * GPU_LANES;
            if (d < size) {
                const float x = number_of(numbers[i], p.latent.dtype);
                number_store(to, p.to.dtype, d, narrow ? divide_odd(x, by) : x);
            }
        }
    }
}

/* The least exponent with `largest`, or 1e-4, up to 448 2^exponent; 127 of NaN and infinity. */
GPU_INLINE int32_t exponent_of_tile(float largest)
{
    const uint32_t bits = float_bits(fmaxf(largest, 1e-4f));
    const uint32_t mantissa_of_448 = float_bits(FP8_LARGEST) & 0x7fffff;
    const int32_t exponent = (int32_t)(bits >> 23) - 127 - 8;
    return isfinite(largest) ? exponent + ((bits & 0x7fffff) > mantissa_of_448) : 127;
}

/* A warp writes a row of fp8_ds_v4. */
GPU_INLINE void store_ds_v4_row(const gpu_latent_write_params &p, char *to, uint8_t *scales,
                                const char *latent, const char *rope)
{
    for (int32_t first = 0; first < DS_V4_SIZE; first += DS_V4_TILE) {
        float x[DS_V4_TILE / GPU_LANES], largest = 0.0f;
#pragma unroll
        for (int i = 0; i < DS_V4_TILE / GPU_LANES; i++) {
            const int32_t d = first + i * GPU_LANES + lane_index();
            x[i] = d < p.rank ? number_load(latent, p.latent.dtype, d)
                              : number_load(rope, p.rope.dtype, d - p.rank);
            largest = isnan(x[i]) || isnan(largest) ? NAN : fmaxf(largest, fabsf(x[i]));
        }
        largest = warp_largest(largest, true);
        const int32_t exponent = exponent_of_tile(largest);
        const float root =
            bits_float((uint32_t)(127 - exponent / 2) << 23); /* no factor underflows */
        const float rest = bits_float((uint32_t)(127 - exponent + exponent / 2) << 23);
#pragma unroll
        for (int i = 0; i < DS_V4_TILE / GPU_LANES; i++) {
            const int32_t d = first + i * GPU_LANES + lane_index();
            if (first < DS_V4_CODES) {
                number_store(to, ATTN_DTYPE_FP8_E4M3, d, x[i] * root * rest);
            } else {
                number_store(to + DS_V4_CODES, ATTN_DTYPE_BF16, d - DS_V4_CODES, x[i]);
            }
        }
        if (lane_index() == 0) { /* after those of 7 tiles a byte of padding */
            scales[first / DS_V4_TILE] = (uint8_t)(first == DS_V4_CODES ? 0
                                                   : isnan(largest)     ? 255
                                                                        : exponent + 127);
        }
    }
}

/* A warp writes a row of new numbers. */
GPU_INLINE void store_latent_row(const gpu_latent_write_params &p, char *to, uint8_t *scales,
                                 const char *latent, const char *rope)
{
    int32_t lane = lane_index();
    if (p.to.form == GPU_ROW_DS_V4) {
        store_ds_v4_row(p, to, scales, latent, rope);
        return;
    }
    if (p.to.form != GPU_ROW_DS_MLA) {
        if (p.latent.dtype == ATTN_DTYPE_F32) {
            store_latent_numbers<float>(p, to, latent, rope);
        } else {
            store_latent_numbers<uint16_t>(p, to, latent, rope);
        }
        return;
    }
    for (int32_t first = 0; first < LATENT_MAX_RANK; first += DS_MLA_TILE) {
        float largest = 0.0f;
        for (int32_t d = first + lane; d < first + DS_MLA_TILE; d += GPU_LANES) {
            float x = fabsf(number_load(latent, p.latent.dtype, d));
            largest = isnan(x) || isnan(largest) ? NAN : fmaxf(largest, x);
        }
        float scale = divide_nearest(warp_largest(largest, true), FP8_LARGEST);
        scale = scale < FLT_LEAST ? FLT_LEAST : scale;
        number_divisor by = divisor_of(scale);
        for (int32_t d = first + lane; d < first + DS_MLA_TILE; d += GPU_LANES) {
            number_store(to, ATTN_DTYPE_FP8_E4M3, d,
                         divide_odd(number_load(latent, p.latent.dtype, d), by));
        }
        if (lane == 0) {
            number_store(to + DS_MLA_SCALES_AT, ATTN_DTYPE_F32, first / DS_MLA_TILE, scale);
        }
    }
    for (int32_t d = lane; d < p.to.head_size - LATENT_MAX_RANK; d += GPU_LANES) {
        number_store(to + DS_MLA_ROPE_AT, ATTN_DTYPE_BF16, d, number_load(rope, p.rope.dtype, d));
    }
}

#endif
