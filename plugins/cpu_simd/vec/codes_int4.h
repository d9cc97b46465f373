/* SPDX-License-Identifier: Apache-2.0 */
/* int4's rows on AVX-512: the same sums in the same order as codes_to_int4, eight doubles at a
 * time. */
#ifndef CPU_SIMD_CODES_INT4_H
#define CPU_SIMD_CODES_INT4_H

/* Sums and differences of elements 1, 2 and 4 apart within a vector: a difference is the upper one
 * times -1 plus the lower. */
INLINE __m512d rotate_eight(__m512d x)
{
    const __m512d ones = _mm512_set1_pd(1.0), minus = _mm512_set1_pd(-1.0);
    x = _mm512_fmadd_pd(x, _mm512_mask_mov_pd(ones, 0xaa, minus), _mm512_permute_pd(x, 0x55));
    x = _mm512_fmadd_pd(x, _mm512_mask_mov_pd(ones, 0xcc, minus), _mm512_permutex_pd(x, 0x4e));
    return _mm512_fmadd_pd(x, _mm512_mask_mov_pd(ones, 0xf0, minus),
                           _mm512_shuffle_f64x2(x, x, 0x4e));
}

/* Rotates each 8 `count` elements of the row; a constant where this is inlined. */
INLINE void rotate_part(double *row, const float *x, const float *signs, const int count)
{
    __m512d part[16];
#pragma GCC unroll 16
    for (int i = 0; i < count; i++) {
        __m512d value = _mm512_cvtps_pd(_mm256_loadu_ps(x + 8 * i));
        value = _mm512_mul_pd(value, _mm512_cvtps_pd(_mm256_loadu_ps(signs + 8 * i)));
        part[i] = rotate_eight(value);
    }
#pragma GCC unroll 4
    for (int half = 1; half < count; half *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < count; i++) {
            if ((i & half) == 0) {
                __m512d a = part[i], b = part[i + half];
                part[i] = _mm512_add_pd(a, b);
                part[i + half] = _mm512_sub_pd(a, b);
            }
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < count; i++) {
        _mm512_store_pd(row + 8 * i, part[i]);
    }
}

/* codes_to_int4's sums, into a row aligned to a vector */
INLINE void rotate_by_eights(double *row, const float *x, const float *signs, int32_t n)
{
    if (n == 16) {
        rotate_part(row, x, signs, 2);
    } else if (n == 32) {
        rotate_part(row, x, signs, 4);
    } else if (n == 64) {
        rotate_part(row, x, signs, 8);
    }
    for (int32_t d = 0; d + 128 <= n; d += 128) {
        rotate_part(row + d, x + d, signs + d, 16);
    }
    for (int32_t half = 128; half < n; half *= 2) {
        for (int32_t first = 0; first < n; first += 2 * half) {
            for (int32_t d = first; d < first + half; d += 8) {
                __m512d a = _mm512_load_pd(row + d), b = _mm512_load_pd(row + d + half);
                _mm512_store_pd(row + d, _mm512_add_pd(a, b));
                _mm512_store_pd(row + d + half, _mm512_sub_pd(a, b));
            }
        }
    }
}

/* nibble_of for eight; as doubles */
INLINE __m512d nibbles_of(__m512d q, __m512d zero)
{
    const __m512i magnitude = _mm512_set1_epi64(INT64_MAX);
    const __m512i most = _mm512_castpd_si512(_mm512_set1_pd(32.0));
    __m512i bits = _mm512_castpd_si512(q);
    __m512i size = _mm512_min_epi64(_mm512_and_si512(bits, magnitude), most);
    q = _mm512_castsi512_pd(_mm512_or_si512(size, _mm512_andnot_si512(magnitude, bits)));
    enum { toward_zero = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC };
    __m512d whole = _mm512_roundscale_pd(q, toward_zero), part = _mm512_sub_pd(q, whole);
    __m512d more = _mm512_roundscale_pd(_mm512_add_pd(part, part), toward_zero);
    __m512d code = _mm512_add_pd(_mm512_add_pd(whole, more), zero);
    return _mm512_max_pd(_mm512_setzero_pd(), _mm512_min_pd(_mm512_set1_pd(15.0), code));
}

/* n a power of two from 16 on */
static int32_t codes_to_int4_by_eights(uint8_t *codes, const float *x, const float *signs,
                                       int32_t n, float *scale)
{
    _Alignas(64) double row[MAX_HEAD_SIZE];
    __m512d least = _mm512_set1_pd(INFINITY), most = _mm512_set1_pd(-INFINITY);
    __mmask8 nan = 0;
    rotate_by_eights(row, x, signs, n);
    for (int32_t d = 0; d < n; d += 8) {
        __m512d value = _mm512_load_pd(row + d);
        least = _mm512_min_pd(least, value);
        most = _mm512_max_pd(most, value);
        nan |= _mm512_cmp_pd_mask(value, value, _CMP_UNORD_Q);
    }
    const double low = _mm512_reduce_min_pd(least), high = _mm512_reduce_max_pd(most);
    const double exact = (high - low) / 15.0;
    *scale = exact < LEAST_ROW_SCALE ? (float)LEAST_ROW_SCALE : (float)exact;
    *scale = nan != 0 ? __builtin_nanf("") : *scale;
    if (*scale != *scale) {
        return 0;
    }
    const double by = *scale;
    const int32_t zero = nibble_of(-low / by, 0);
    const __m512d by_eight = _mm512_set1_pd(by), from = _mm512_set1_pd(zero);
    for (int32_t d = 0; d < n; d += 16) {
        __m512d even = nibbles_of(_mm512_div_pd(_mm512_load_pd(row + d), by_eight), from);
        __m512d odd = nibbles_of(_mm512_div_pd(_mm512_load_pd(row + d + 8), by_eight), from);
        __m512i wide = _mm512_inserti32x8(_mm512_castsi256_si512(_mm512_cvtpd_epi32(even)),
                                          _mm512_cvtpd_epi32(odd), 1);
        /* the second code of each pair, in the upper half, into the first one's byte */
        __m512i pairs = _mm512_or_si512(wide, _mm512_srli_epi64(wide, 28));
        _mm_storel_epi64((__m128i *)(codes + d / 2), _mm512_cvtepi64_epi8(pairs));
    }
    return zero;
}

#endif
