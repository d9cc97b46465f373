/* SPDX-License-Identifier: Apache-2.0 */
/* Integer scores of up to 4 rows against int4 keys in one warp. One operation turns 4 codes into
 * bytes: codes at even places as they are, codes at odd places times 16. A query is 16 bits
 * relative to its row's largest element, split into two signed digits of 8 bits: columns 0 - 3 of a
 * product have the rows' upper digits, columns 4 - 7 the lower ones. All sums are exact. */
#ifndef CUDA_FLASH_SM80_INT4_SCORES_CUH
#define CUDA_FLASH_SM80_INT4_SCORES_CUH

#include "sm80_tile.cuh"

#define DIGITS_LARGEST 32639.0f /* 127 x 256 + 127 */
#define DIGITS_BIAS 0x8080u     /* makes both digits non-negative */

struct code_bytes {
    uint32_t x[4];
};

/* Codes at even places and, times 16, at odd places of words. */
GPU_INLINE code_bytes lower_codes(const uint32_t (&a)[4])
{
    return {{a[0] & 0x0f0f0f0fu, a[1] & 0x0f0f0f0fu, a[2] & 0x0f0f0f0fu, a[3] & 0x0f0f0f0fu}};
}

GPU_INLINE code_bytes upper_codes(const uint32_t (&a)[4])
{
    return {{a[0] & 0xf0f0f0f0u, a[1] & 0xf0f0f0f0u, a[2] & 0xf0f0f0f0u, a[3] & 0xf0f0f0f0u}};
}

/* Writes the queries of a run as digits in the order of the codes, D bytes for each column; a warp
 * has a row. terms[row] is the factor of an integer score; terms[16 + row] is an integer, what a
 * zero point of 1 subtracts from it. */
template <int D>
static __device__ __noinline__ void prepare_digits(const gpu_params &p, const gpu_run &run,
                                                   const char *sq, char *digits, float *terms)
{
    constexpr int own = own_dims<D>;
    const int lane = threadIdx.x & 31, row = threadIdx.x >> 5;
    const bool real = row < run.row_tile.num_rows && lane * own < D;
    const char *chunk = sq + (row * (D / 8) + swizzle<D / 8>(row, real ? lane * own / 8 : 0)) * 16;
    const int first = lane * own % 8;
    float x[own], largest = 0.0f, sum = 0.0f;
#pragma unroll
    for (int e = 0; e < own; e++) {
        x[e] = real ? number_load(chunk, p.q.dtype, first + e) * p.k.signs[lane * own + e] : 0.0f;
    }
    hadamard_row<D>(x, lane);
#pragma unroll
    for (int e = 0; e < own; e++) {
        largest = fmaxf(largest, fabsf(x[e]));
        sum += x[e];
    }
    largest = warp_largest(largest, false);
    sum = warp_sum(sum); /* NaN if an element is NaN */
    const bool usual = largest > 1e-30f && largest < 1e34f;
    const float factor = usual ? DIGITS_LARGEST / largest : 1.0f;
    int total = 0;
#pragma unroll
    for (int e = 0; e < own; e++) {
        int whole = __float2int_rn(fminf(fmaxf(x[e] * factor, -DIGITS_LARGEST), DIGITS_LARGEST));
        uint32_t both = ((uint32_t)whole + DIGITS_BIAS) ^ DIGITS_BIAS;
        const int d = lane * own + e; /* the lane's 32 dims are ordered (16, parity, 8, place) */
        const int at = (d & ~15) | (d & 1) << 3 | (d & 8) >> 1 | (d & 6) >> 1;
        if (lane * own < D) {
            digits[row * D + at] = (char)(both >> 8);
            digits[(row + 4) * D + at] = (char)both;
        }
        total += whole;
    }
    total = __reduce_add_sync(0xffffffffu, total);
    if (lane == 0) {
        terms[row] =
            (usual ? largest / (DIGITS_LARGEST * 16.0f * D) : 1.0f / (16.0f * D)) + 0.0f * sum;
        ((int32_t *)terms)[16 + row] = total * 16;
    }
    barrier_consumers(); /* all rows are written */
}

/* A lane's digits of its column, and the terms of its rows. */
template <int D> struct digit_queries {
    uint32_t digits[D / 16];
    float unit[2];
    int32_t offset[2];

    __device__ __forceinline__ void load(const char *from, const float *terms, int lane,
                                         float scale)
    {
        const uint4 *at = (const uint4 *)(from + (lane >> 2) * D + (lane & 3) * (D / 4));
#pragma unroll
        for (int i = 0; i < D / 64; i++) {
            uint4 x = at[i];
            digits[4 * i] = x.x, digits[4 * i + 1] = x.y;
            digits[4 * i + 2] = x.z, digits[4 * i + 3] = x.w;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = (lane & 1) * 2 + i;
            unit[i] = terms[row] * scale;
            offset[i] = ((const int32_t *)terms)[16 + row];
        }
    }
};

/* Scores against the warp's 32 keys. `codes` is the lane's address of key g, with D / 32 words of
 * keys g + 8 i each; `scales` starts with the lane's first key. */
template <int D>
GPU_INLINE void score_digits(const char *codes, const float *scales,
                             const digit_queries<D> &queries, int lane, float (&acc_s)[1][4])
{
    constexpr int words = D / 32, pitch = D / 2;
    const bool lower = (lane & 2) != 0; /* whether the lane's columns have lower digits */
    const int32_t own_weight = lower ? 1 : 256, other_weight = lower ? 256 : 1;
    uint32_t x[4][words];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        load_words<words, 16>(codes + i * 8 * pitch, x[i]);
    }
#pragma unroll
    for (int sub = 0; sub < 2; sub++) { /* keys g + 8 sub and g + 8 sub + 16 */
        int32_t even[4] = {}, odd[4] = {};
#pragma unroll
        for (int j = 0; j < words; j += 2) {
            const uint32_t a[4] = {x[sub][j], x[sub + 2][j], x[sub][j + 1], x[sub + 2][j + 1]};
            multiply_bytes(even, lower_codes(a).x, queries.digits[2 * j],
                           queries.digits[2 * j + 1]);
            multiply_bytes(odd, upper_codes(a).x, queries.digits[2 * j + 2],
                           queries.digits[2 * j + 3]);
        }
        const uint32_t both = float_bits(scales[8 * sub]);
        const float scale = bits_float(both & ~ZERO_POINT_MASK);
        const int32_t zero = (int32_t)(both & ZERO_POINT_MASK);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int32_t low = even[i] * 16 + odd[i], high = even[i + 2] * 16 + odd[i + 2];
            int32_t got = __shfl_xor_sync(0xffffffffu, lower ? low : high, 2);
            int32_t sum =
                (lower ? high : low) * own_weight + got * other_weight - queries.offset[i] * zero;
            acc_s[0][2 * sub + i] = (float)sum * (queries.unit[i] * scale);
        }
    }
}

#endif
