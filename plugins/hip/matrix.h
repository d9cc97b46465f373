/* SPDX-License-Identifier: Apache-2.0 */
/* 16 x 16 x 16 products of the matrix units under one set of names, D = A B + C with C and D in
 * float32. In all of them lane l has column l % 16 of B and D and row l % 16 of A; its group
 * g = l / 16 says which part of the depth, and which rows of D:
 *
 *                          lanes  depth of a lane, element e      row of D, element e
 *   CDNA (gfx90a, gfx942)  64     4 of them, 4 g + e              4 of them, 4 g + e
 *   RDNA3 (gfx11)          32     all 16, in both groups          8 of them, 2 e + g
 *   RDNA4 (gfx12)          32     8 of them, 8 g + e              8 of them, 8 g + e
 *
 * RDNA4's manual has another order of the depth, the same in A and B: it does not matter here.
 * Sources: AMD's reference guides of CDNA3, RDNA3 and RDNA4, chapters on matrix instructions. */
#ifndef HIP_MATRIX_H
#define HIP_MATRIX_H

#include "gpu/device/number.h"

#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#define MATRIX_CDNA 1
#if !defined(__gfx90a__)
#define MATRIX_CODES 32 /* depth of a product of e4m3 codes; none where it is not defined */
#endif
#define MATRIX_DEPTH 4 /* elements of a lane in A and B */
#define MATRIX_ROWS 4  /* elements of a lane in D */
#elif defined(__GFX11__)
#define MATRIX_RDNA3 1
#define MATRIX_DEPTH 16
#define MATRIX_ROWS 8
#elif defined(__GFX12__)
#define MATRIX_RDNA4 1
#define MATRIX_CODES 16
#define MATRIX_DEPTH 8
#define MATRIX_ROWS 8
#endif

#if defined(__HIP__)
#define HIP_REGISTER(x) "+v"(x)
#else /* as fibres of a CPU: tests/hip/fibres.h */
#define HIP_REGISTER(x) "+r"(x)
#endif

#if defined(MATRIX_DEPTH)
#define MATRIX_GROUPS (GPU_LANES / 16)

/* FP8: e4m3 keys and values, and queries in e4m3, too. */
enum matrix_kind { KIND_F16, KIND_BF16, KIND_E4M3, KIND_E5M2, KIND_INT8, KIND_FP8 };

/* Two 16-bit elements a word: f16, or bf16 for KIND_BF16. */
typedef uint32_t matrix_part __attribute__((ext_vector_type(MATRIX_DEPTH / 2)));
typedef float matrix_sum __attribute__((ext_vector_type(MATRIX_ROWS)));
typedef _Float16 half_pair __attribute__((ext_vector_type(2)));

#if defined(MATRIX_CODES)
/* 8 codes of a lane in a part's first two words: depth 8 g + e. */
GPU_INLINE matrix_sum multiply_codes(matrix_part a, matrix_part b, matrix_sum c)
{
#if defined(MATRIX_CDNA)
    return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(__builtin_bit_cast(long, a),
                                                      __builtin_bit_cast(long, b), c, 0, 0, 0);
#else
    typedef int32_t words __attribute__((ext_vector_type(2)));
    return __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(
        words{(int32_t)a[0], (int32_t)a[1]}, words{(int32_t)b[0], (int32_t)b[1]}, c);
#endif
}

/* gfx942's e4m3 (fnuz) has half of the number that OCP's has with the same code, and one zero; NaN
 * is the other one's code. */
#if defined(__gfx942__)
#define MATRIX_CODES_SCALE 4.0f /* factor on a product of two codes */

GPU_INLINE uint32_t own_codes(uint32_t x)
{
    uint32_t size = x & 0x7f7f7f7fu;
    uint32_t nan = (size + 0x01010101u) & 0x80808080u;
    uint32_t some = (size + 0x7f7f7f7fu) & 0x80808080u; /* not zero */
    return (x & (size | some) & ~(nan - (nan >> 7))) | nan;
}
#else
#define MATRIX_CODES_SCALE 1.0f

GPU_INLINE uint32_t own_codes(uint32_t x)
{
    return x;
}
#endif
#endif

template <int KIND> GPU_INLINE matrix_sum multiply(matrix_part a, matrix_part b, matrix_sum c)
{
    typedef _Float16 halves __attribute__((ext_vector_type(MATRIX_DEPTH)));
    typedef short shorts __attribute__((ext_vector_type(MATRIX_DEPTH)));
#if defined(MATRIX_CODES)
    if constexpr (KIND == KIND_FP8) {
        return multiply_codes(a, b, c);
    }
#endif
#if defined(MATRIX_CDNA)
    if constexpr (KIND == KIND_BF16) {
        return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(shorts, a),
                                                         __builtin_bit_cast(shorts, b), c, 0, 0, 0);
    }
    return __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(halves, a),
                                                 __builtin_bit_cast(halves, b), c, 0, 0, 0);
#elif defined(MATRIX_RDNA3)
    if constexpr (KIND == KIND_BF16) {
        return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(__builtin_bit_cast(shorts, a),
                                                           __builtin_bit_cast(shorts, b), c);
    }
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(__builtin_bit_cast(halves, a),
                                                      __builtin_bit_cast(halves, b), c);
#else
    if constexpr (KIND == KIND_BF16) {
        return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(__builtin_bit_cast(shorts, a),
                                                                 __builtin_bit_cast(shorts, b), c);
    }
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(__builtin_bit_cast(halves, a),
                                                            __builtin_bit_cast(halves, b), c);
#endif
}

/* Row of D that a lane's element e is. */
GPU_INLINE int32_t row_of_sum(int e, int g)
{
#if defined(MATRIX_RDNA3)
    return 2 * e + g;
#else
    return MATRIX_ROWS * g + e;
#endif
}

/* A sum's rows become the depth of the next product: at which depth element e then stands. */
GPU_INLINE int32_t depth_of_part(int e, int g)
{
#if defined(MATRIX_RDNA3)
    (void)g; /* even rows, then odd ones */
    return e < 8 ? 2 * e : 2 * (e - 8) + 1;
#else
    return MATRIX_DEPTH * g + e;
#endif
}

/* Rounded to nearest; bf16: ties away from zero. */
template <int KIND> GPU_INLINE uint32_t pack_pair(float low, float high)
{
    if constexpr (KIND == KIND_BF16) {
        return __builtin_amdgcn_perm(float_bits(high) + 0x8000u, float_bits(low) + 0x8000u,
                                     0x07060302u);
    }
    half_pair two = {(_Float16)low, (_Float16)high};
    return __builtin_bit_cast(uint32_t, two);
}

#if defined(MATRIX_RDNA3)
/* From the lane in the other row of 16. */
GPU_INLINE uint32_t other_row(uint32_t x)
{
    return __builtin_amdgcn_permlanex16(x, x, 0x76543210u, 0xfedcba98u, true, false);
}
#endif

/* A sum, as B of the next product by depth_of_part. */
template <int KIND> GPU_INLINE matrix_part part_of_sum(matrix_sum x, int g)
{
    matrix_part part;
    uint32_t own[MATRIX_ROWS / 2];
#pragma unroll
    for (int i = 0; i < MATRIX_ROWS / 2; i++) {
        own[i] = pack_pair<KIND>(x[2 * i], x[2 * i + 1]);
    }
#if defined(MATRIX_RDNA3)
#pragma unroll
    for (int i = 0; i < MATRIX_ROWS / 2; i++) {
        uint32_t other = other_row(own[i]);
        part[i] = g == 0 ? own[i] : other;
        part[4 + i] = g == 0 ? other : own[i];
    }
#else
    (void)g;
#pragma unroll
    for (int i = 0; i < MATRIX_ROWS / 2; i++) {
        part[i] = own[i];
    }
#endif
    return part;
}

/* Over the lanes of one column. */
GPU_INLINE float column_largest(float x)
{
#if defined(MATRIX_CDNA)
    x = fmaxf(x, lane_xor(x, 16));
    return fmaxf(x, lane_xor(x, 32));
#else
    return fmaxf(x, lane_xor(x, 16));
#endif
}

GPU_INLINE float column_total(float x)
{
#if defined(MATRIX_CDNA)
    x += lane_xor(x, 16);
    return x + lane_xor(x, 32);
#else
    return x + lane_xor(x, 16);
#endif
}

/* Four 8-bit elements as f16, which holds them exactly: 0 and 1 in the low word. */
template <int KIND> GPU_INLINE void widen_bytes(uint32_t x, uint32_t (&to)[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t high = __builtin_amdgcn_perm(0, x, i == 0 ? 0x010c000cu : 0x030c020cu);
        if constexpr (KIND == KIND_E5M2) {
            to[i] = high;
        } else if constexpr (KIND == KIND_E4M3 || KIND == KIND_FP8) {
            const half_pair scale = {(_Float16)256.0f, (_Float16)256.0f};
            uint32_t size = (high & 0x7f007f00u) >> 1;
            half_pair number = __builtin_bit_cast(half_pair, (high & 0x80008000u) | size) * scale;
            uint32_t odd = (size + 0x40804080u) & 0x80008000u; /* the code of NaN */
            to[i] = __builtin_bit_cast(uint32_t, number) | (odd - (odd >> 6));
        } else { /* 1024 + 128 + x as f16 */
            const half_pair base = {(_Float16)1152.0f, (_Float16)1152.0f};
            uint32_t low = __builtin_amdgcn_perm(0x64646464u, x ^ 0x80808080u,
                                                 i == 0 ? 0x04010400u : 0x04030402u);
            to[i] = __builtin_bit_cast(uint32_t, __builtin_bit_cast(half_pair, low) - base);
        }
    }
}

/* A bit in each half: whether that element is a NaN or an infinity. */
template <int KIND> GPU_INLINE uint32_t odd_of_pair(uint32_t x)
{
    const uint32_t mask = KIND == KIND_BF16 ? 0x7f807f80u : 0x7c007c00u;
    const uint32_t one = KIND == KIND_BF16 ? 0x00800080u : 0x04000400u;
    return ((x & mask) + one) >> 15 & 0x00010001u;
}

/* 1 in the place of an element that is +inf, 32 of -inf, 33 of NaN, else 0: 16 of them have a sum
 * that says which there were. */
template <int KIND> GPU_INLINE uint32_t count_odd(uint32_t x)
{
    const uint32_t mantissa = KIND == KIND_BF16 ? 0x007f007fu : 0x03ff03ffu;
    const uint32_t up = KIND == KIND_BF16 ? 0x3f80u : 0x3c00u;   /* 1 */
    const uint32_t down = KIND == KIND_BF16 ? 0x4200u : 0x5000u; /* 32 */
    const uint32_t both = KIND == KIND_BF16 ? 0x4204u : 0x5020u; /* 33 */
    uint32_t odd = odd_of_pair<KIND>(x);
    uint32_t nan = odd & ((x & mantissa) + mantissa) >> (KIND == KIND_BF16 ? 7 : 10);
    uint32_t negative = odd & x >> 15;
    return (odd & ~(nan | negative)) * up + (negative & ~nan) * down + nan * both;
}

/* What values add to a sum by count_odd's sum of them: 0, +inf, -inf or NaN. */
GPU_INLINE float sum_of_odd(float count)
{
    int32_t n = (int32_t)count;
    return ((n & 31) != 0 ? INFINITY : 0.0f) - (n >= 32 ? INFINITY : 0.0f);
}

#endif
#endif
