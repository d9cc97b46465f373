/* SPDX-License-Identifier: Apache-2.0 */
/* Decode from caches of codes, fp8, int8 and int4, on AVX512_BF16 and VBMI: 64 codes become two
 * vectors of bf16 by two byte look-ups of their magnitudes, the sign and one interleaving: 5
 * instructions, for int8 and int4 7. Half the bytes of a bf16 cache, so the arithmetic decides
 * (fp8: 1.1 of the time of a bf16 tile in L2).
 *
 * The interleaving leaves dims in the order (0-7, 16-23, 32-39, 48-55), (8-15, ...) of each 64; q
 * is brought into the same order once (fp8_order), the output back (codes_finish). */
#ifndef CPU_SIMD_CODES_DECODE_H
#define CPU_SIMD_CODES_DECODE_H

#include "bf16_decode.h"
#include "code_tables.h"

INLINE void bytes_load(const struct code_lookup *lookup, const char *row, const enum code_kind kind,
                       __m512i *first, __m512i *second)
{
    bytes_widen(lookup, _mm512_loadu_si512(row), kind, first, second);
}

/* 32 bytes of two codes each */
INLINE __m512i widened_nibbles(const char *row)
{
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)row));
}

INLINE void nibbles_load(const char *row, int32_t zero, __m512i *first, __m512i *second)
{
    const uint8_t *lows = table_nibbles.low + 15 - zero, *highs = table_nibbles.high + 15 - zero;
    __m512i pairs = widened_nibbles(row);
    /* (pairs | pairs << 4) & 0x0f0f: a code in each byte, in order */
    __m512i codes =
        _mm512_ternarylogic_epi32(pairs, _mm512_slli_epi16(pairs, 4), _mm512_set1_epi8(0x0f), 0xa8);
    __m512i low = _mm512_shuffle_epi8(
        _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)lows)), codes);
    __m512i high = _mm512_shuffle_epi8(
        _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)highs)), codes);
    *first = _mm512_unpacklo_epi8(low, high);
    *second = _mm512_unpackhi_epi8(low, high);
}

/* 64 columns of a value, from `column` on */
INLINE void codes_load(const struct code_lookup *lookup, const struct decode_args *args,
                       const char *row, int32_t key, const enum code_kind kind, __m512i *first,
                       __m512i *second)
{
    if (kind == CODES_INT4) {
        nibbles_load(row + args->column / 2, args->zeros[key], first, second);
    } else {
        bytes_load(lookup, row + args->column, kind, first, second);
    }
}

/* fold_four and fold_lanes for this element type. */
INLINE __m512i fold_four_int(__m512i a, __m512i b, __m512i c, __m512i d)
{
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

INLINE __m512i fold_lanes_int(const __m512i *v)
{
    __m512i a = _mm512_add_epi32(_mm512_shuffle_i32x4(v[0], v[1], 0x88),
                                 _mm512_shuffle_i32x4(v[0], v[1], 0xdd));
    __m512i b = _mm512_add_epi32(_mm512_shuffle_i32x4(v[2], v[3], 0x88),
                                 _mm512_shuffle_i32x4(v[2], v[3], 0xdd));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

/* 64 dims of a key: int8's in order, of int4 the even ones before the odd, less the zero point. */
INLINE void whole_load(const char *key, int c, __m512i zero, const int nibbles, __m512i *x,
                       __m512i *y)
{
    if (nibbles) {
        __m512i pairs = widened_nibbles(key + 32 * c);
        *x = _mm512_sub_epi16(_mm512_and_si512(pairs, _mm512_set1_epi16(15)), zero);
        *y = _mm512_sub_epi16(_mm512_srli_epi16(pairs, 4), zero);
        return;
    }
    const __m256i *codes = (const __m256i *)(const void *)(key + 64 * c);
    *x = _mm512_cvtepi8_epi16(_mm256_loadu_si256(codes));
    *y = _mm512_cvtepi8_epi16(_mm256_loadu_si256(codes + 1));
}

/* sum += x . y of 32 pairs: of bf16 into floats, of 16-bit whole numbers into 32-bit ones */
INLINE __m512i codes_dot(__m512i sum, __m512i x, __m512i y, const enum code_kind kind)
{
    if (kind == CODES_FP8) {
        return _mm512_castps_si512(
            _mm512_dpbf16_ps(_mm512_castsi512_ps(sum), bf16_bits(y), bf16_bits(x)));
    }
    return dot_words(sum, x, y);
}

/* The scores of four keys, [row][key], of sums [key][row]. */
INLINE __m512 codes_fold(__m512i (*sum)[4], const enum code_kind kind)
{
    const __m512i by_head = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512 folded[4];
    __m512i whole[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        if (kind == CODES_FP8) {
            folded[i] = fold_four(_mm512_castsi512_ps(sum[i][0]), _mm512_castsi512_ps(sum[i][1]),
                                  _mm512_castsi512_ps(sum[i][2]), _mm512_castsi512_ps(sum[i][3]));
        } else {
            whole[i] = fold_four_int(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
        }
    }
    if (kind == CODES_FP8) {
        return _mm512_permutexvar_ps(by_head, fold_lanes(folded));
    }
    return _mm512_cvtepi32_ps(_mm512_permutexvar_epi32(by_head, fold_lanes_int(whole)));
}

/* Four keys and four rows at a time, which share each other's loads; chunks of 64 dims. */
INLINE void codes_scores_rows(float *scores, const uint16_t *q, const float *q_scale,
                              const struct decode_args *args, const int chunks,
                              const enum code_kind kind, struct burst *burst)
{
    const struct code_lookup lookup = code_lookup_of(args->element, CODES_FP8);
    __m512 scale = _mm512_setzero_ps();
    if (kind != CODES_FP8) {
        scale =
            _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                  _mm512_castps128_ps512(_mm_loadu_ps(q_scale)));
    }
    for (int32_t j = 0; j < args->keys; j += 4) {
        __m512i sum[4][4], zero[4];
        const char *key[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            key[i] = (const char *)key_row(args, j + i);
            zero[i] = _mm512_set1_epi16(kind == CODES_INT4 ? (int16_t)args->zeros[j + i] : 0);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                sum[i][r] = _mm512_setzero_si512();
            }
        }
#pragma GCC unroll 2
        for (int c = 0; c < chunks; c++) {
            __m512i x[4], y[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                if (kind == CODES_FP8) {
                    bytes_load(&lookup, key[i] + 64 * c, CODES_FP8, &x[i], &y[i]);
                } else {
                    whole_load(key[i], c, zero[i], kind == CODES_INT4, &x[i], &y[i]);
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                const uint16_t *left = q + r * args->depth + 64 * c;
                __m512i front = _mm512_loadu_si512(left);
                __m512i back = _mm512_loadu_si512(left + 32);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    sum[i][r] = codes_dot(sum[i][r], x[i], front, kind);
                    sum[i][r] = codes_dot(sum[i][r], y[i], back, kind);
                }
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            prefetch_burst(burst);
        }
        __m512 all = codes_fold(sum, kind);
        all = kind == CODES_FP8 ? all : _mm512_mul_ps(all, scale);
        _mm_storeu_ps(scores + j, _mm512_castps512_ps128(all));
        _mm_storeu_ps(scores + SCORE_STRIDE + j, _mm512_extractf32x4_ps(all, 1));
        _mm_storeu_ps(scores + 2 * SCORE_STRIDE + j, _mm512_extractf32x4_ps(all, 2));
        _mm_storeu_ps(scores + 3 * SCORE_STRIDE + j, _mm512_extractf32x4_ps(all, 3));
    }
}

/* Rows of `row` dims, 128 in most models; q's rows may have room for more. */
INLINE void codes_scores(float *scores, const void *q, const struct decode_args *args, int32_t row,
                         const enum code_kind kind)
{
    struct burst burst = burst_begin(args, (args->keys + 3) / 4 * args->rows);
    for (int32_t r = 0; r < args->rows; r += 4) {
        float *s = scores + (int64_t)r * SCORE_STRIDE;
        const uint16_t *left = (const uint16_t *)q + (int64_t)r * args->depth;
        const float *scale = kind == CODES_FP8 ? NULL : args->q_scale + r;
        if (row == 128) {
            codes_scores_rows(s, left, scale, args, 2, kind, &burst);
        } else {
            codes_scores_rows(s, left, scale, args, row / 64, kind, &burst);
        }
    }
}

static void fp8_decode_scores(float *scores, const void *q, const struct decode_args *args)
{
    codes_scores(scores, q, args, args->depth, CODES_FP8);
}

/* 4 rows x 64 columns */
INLINE void codes_values_block(float *acc, const uint16_t *p, const struct decode_args *args,
                               const enum code_kind kind, struct burst *burst)
{
    struct code_lookup lookup = code_lookup_of(args->element, kind);
    __m512 sum[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            sum[r][c] = _mm512_loadu_ps(acc + r * args->depth + 16 * c);
        }
    }
    for (int32_t j = 0; j < args->keys; j += 2) {
        const char *odd_row =
            j + 1 < args->keys ? (const char *)key_row(args, j + 1) : args->zero_row;
        __m512i even[2], odd[2], pair[4];
        codes_load(&lookup, args, (const char *)key_row(args, j), j, kind, &even[0], &even[1]);
        codes_load(&lookup, args, odd_row, j + 1, kind, &odd[0], &odd[1]);
        pair[0] = _mm512_unpacklo_epi16(even[0], odd[0]);
        pair[1] = _mm512_unpackhi_epi16(even[0], odd[0]);
        pair[2] = _mm512_unpacklo_epi16(even[1], odd[1]);
        pair[3] = _mm512_unpackhi_epi16(even[1], odd[1]);
        prefetch_burst(burst);
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            __m512i left = pair_broadcast(p + r * 2 * SCORE_STRIDE + j);
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                sum[r][c] = _mm512_dpbf16_ps(sum[r][c], bf16_bits(left), bf16_bits(pair[c]));
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            _mm512_storeu_ps(acc + r * args->depth + 16 * c, sum[r][c]);
        }
    }
}

INLINE void codes_values(float *acc, const void *p, const struct decode_args *args,
                         const enum code_kind kind)
{
    int32_t blocks = args->rows / 4 * (args->depth / 64);
    struct burst burst = burst_begin(args, (args->keys + 1) / 2 * blocks);
    for (int32_t r = 0; r < args->rows; r += 4) {
        struct decode_args block = *args;
        for (block.column = 0; block.column < args->depth; block.column += 64) {
            float *out = acc + (int64_t)r * args->depth + block.column;
            const uint16_t *left = (const uint16_t *)p + (int64_t)r * 2 * SCORE_STRIDE;
            codes_values_block(out, left, &block, kind, &burst);
        }
    }
}

static void fp8_decode_values(float *acc, const void *p, const struct decode_args *args)
{
    codes_values(acc, p, args, CODES_FP8);
}

static float fp8_order(void *q, int32_t n)
{
    uint16_t *row = q;
    for (int32_t d = 0; d < n; d += 64) {
        __m512i front = _mm512_loadu_si512(row + d);
        __m512i back = _mm512_loadu_si512(row + d + 32);
        _mm512_storeu_si512(row + d, _mm512_shuffle_i64x2(front, back, 0x88));
        _mm512_storeu_si512(row + d + 32, _mm512_shuffle_i64x2(front, back, 0xdd));
    }
    return 1.0f;
}

/* Vector c of each four holds columns 4 c .. 4 c + 3 of every 16. */
static bool codes_finish(float *sums, int32_t rows, int32_t depth)
{
    for (int32_t d = 0; d < rows * depth; d += 64) {
        __m512 z[4];
        for (int c = 0; c < 4; c++) {
            z[c] = _mm512_loadu_ps(sums + d + 16 * c);
        }
        __m512 a = _mm512_shuffle_f32x4(z[0], z[1], 0x44);
        __m512 b = _mm512_shuffle_f32x4(z[2], z[3], 0x44);
        __m512 c = _mm512_shuffle_f32x4(z[0], z[1], 0xee);
        __m512 e = _mm512_shuffle_f32x4(z[2], z[3], 0xee);
        _mm512_storeu_ps(sums + d, _mm512_shuffle_f32x4(a, b, 0x88));
        _mm512_storeu_ps(sums + d + 16, _mm512_shuffle_f32x4(a, b, 0xdd));
        _mm512_storeu_ps(sums + d + 32, _mm512_shuffle_f32x4(c, e, 0x88));
        _mm512_storeu_ps(sums + d + 48, _mm512_shuffle_f32x4(c, e, 0xdd));
    }
    return true;
}

static const struct decode_kernels fp8_decode = {
    .scores = fp8_decode_scores,
    .values = fp8_decode_values,
    .finish = codes_finish,
    .many_rows = MANY_ROWS,
    .order = fp8_order,
};

#endif
