/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of every storage type to bf16. fp8 and int8 fit into bf16 exactly; scales are applied to
 * scores and outputs, never here. */
#ifndef CPU_SIMD_BF16_UNPACK_H
#define CPU_SIMD_BF16_UNPACK_H

#include "f32_tile.h"

static void bf16_from_bf16(void *destination, const void *source, int64_t n)
{
    memcpy(destination, source, (size_t)n * 2);
}

#define DEFINE_UNPACK_BF16(name, type, load, convert)                                              \
    static void name(void *destination, const void *source, int64_t n)                             \
    {                                                                                              \
        uint16_t *out = destination;                                                               \
        const type *in = source;                                                                   \
        int64_t i = 0;                                                                             \
        for (; i + 32 <= n; i += 32) {                                                             \
            __m512bh pair = _mm512_cvtne2ps_pbh(load(in + i + 16), load(in + i));                  \
            _mm512_storeu_si512(out + i, (__m512i)pair);                                           \
        }                                                                                          \
        for (; i < n; i++) {                                                                       \
            out[i] = f32_to_bf16(convert(in[i]));                                                  \
        }                                                                                          \
    }
DEFINE_UNPACK_BF16(bf16_from_f32, float, vf_load, SAME)
DEFINE_UNPACK_BF16(bf16_from_f16, uint16_t, vf_load_f16, f16_to_f32)
DEFINE_UNPACK_BF16(bf16_from_int8, int8_t, vf_load_int8, SAME)

/* fp8 to bf16 is a matter of bits: the exponent is rebiased by one addition, and the few codes for
 * which that is wrong are looked up or patched. Codes are 16 bits wide, sign apart. */
INLINE __m512i with_sign(__m512i codes, __m512i magnitude)
{
    __m512i sign = _mm512_slli_epi16(codes, 8);
    return _mm512_ternarylogic_epi32(magnitude, sign, _mm512_set1_epi16((short)0x8000), 0xf8);
}

/* 8 mantissa steps below 2^-6 are 2^-9 times 0 .. 7; 0x7f is NaN */
static void bf16_from_e4m3(void *destination, const void *source, int64_t n)
{
    uint16_t *out = destination;
    const uint8_t *in = source;
    const __m512i small = _mm512_zextsi128_si512(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(in + i)));
        __m512i x = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
        __mmask32 subnormal = _mm512_cmplt_epu16_mask(x, _mm512_set1_epi16(8));
        __mmask32 nan = _mm512_cmpeq_epi16_mask(x, _mm512_set1_epi16(0x7f));
        __m512i value = _mm512_add_epi16(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(120 << 7));
        value = _mm512_mask_permutexvar_epi16(value, subnormal, x, small);
        value = _mm512_mask_mov_epi16(value, nan, _mm512_set1_epi16(0x7fc0));
        _mm512_storeu_si512(out + i, with_sign(codes, value));
    }
    for (; i < n; i++) {
        out[i] = f32_to_bf16(e4m3_to_f32(in[i]));
    }
}

/* 4 mantissa steps below 2^-14 are 2^-16 times 0 .. 3; exponent 31 is infinity or NaN */
static void bf16_from_e5m2(void *destination, const void *source, int64_t n)
{
    uint16_t *out = destination;
    const uint8_t *in = source;
    const __m512i small =
        _mm512_zextsi128_si512(_mm_setr_epi16(0, 0x3780, 0x3800, 0x3840, 0, 0, 0, 0));
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(in + i)));
        __m512i x = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
        __mmask32 subnormal = _mm512_cmplt_epu16_mask(x, _mm512_set1_epi16(4));
        __mmask32 special = _mm512_cmpge_epu16_mask(x, _mm512_set1_epi16(0x7c));
        __m512i shifted = _mm512_slli_epi16(x, 5);
        __m512i value = _mm512_add_epi16(shifted, _mm512_set1_epi16(112 << 7));
        value = _mm512_mask_permutexvar_epi16(value, subnormal, x, small);
        value = _mm512_mask_add_epi16(value, special, shifted, _mm512_set1_epi16(224 << 7));
        _mm512_storeu_si512(out + i, with_sign(codes, value));
    }
    for (; i < n; i++) {
        out[i] = f32_to_bf16(e5m2_to_f32(in[i]));
    }
}

#endif
