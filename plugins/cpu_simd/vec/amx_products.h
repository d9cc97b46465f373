/* SPDX-License-Identifier: Apache-2.0 */
/* Products of floats by tiles: an operand is two bf16, what the first rounds off is the second, and
 * of their four products the three larger are summed. What is lost is 2^-16 of a product. Operands
 * lie in the order in which they are read, as blocks of four tiles, 4 KiB: two of upper halves, two
 * of lower ones. Left ones [m / 32][k / 32][2][2][16][32], right ones [n / 32][k /
 * 32][2][2][16][16][2] with pairs along k.
 *
 * 32 x 32 of the result and 32 of k: 12 tdpbf16ps (192 cycles) on 8 tile loads (64). */
#ifndef CPU_SIMD_AMX_PRODUCTS_H
#define CPU_SIMD_AMX_PRODUCTS_H

#include "amx_chain.h"

/* x as a bf16, in a float */
INLINE __m512 amx_upper(__m512 x)
{
    const __m512i half = _mm512_set1_epi32(0x8000), kept = _mm512_set1_epi32((int)0xffff0000u);
    __m512i bits = _mm512_add_epi32(_mm512_castps_si512(x), half);
    return _mm512_castsi512_ps(_mm512_and_si512(bits, kept));
}

enum { SPLIT_BLOCK = 4 * TILE_ELEMENTS, SPLIT_LOWER = 2 * TILE_ELEMENTS };

static void amx_left(struct product_operand *operand, const float *rows, int64_t stride, int32_t m,
                     int32_t k)
{
    operand->data = operand->memory;
    operand->stride = (int64_t)k / UNIT * SPLIT_BLOCK;
    for (int32_t i = 0; i < m; i++, rows += stride) {
        uint16_t *out =
            (uint16_t *)operand->memory + i / UNIT * operand->stride + i % UNIT * (int64_t)UNIT;
        for (int32_t p = 0; p < k; p += UNIT, out += SPLIT_BLOCK) {
            __m512 x = _mm512_loadu_ps(rows + p), y = _mm512_loadu_ps(rows + p + 16);
            __m512 upper_x = amx_upper(x), upper_y = amx_upper(y);
            x = _mm512_sub_ps(x, upper_x);
            y = _mm512_sub_ps(y, upper_y);
            _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh(upper_y, upper_x));
            _mm512_store_si512(out + SPLIT_LOWER, (__m512i)_mm512_cvtne2ps_pbh(y, x));
        }
    }
}

/* 16 columns of two rows, as pairs */
INLINE void amx_pairs(uint16_t *out, const float *even, const float *odd)
{
    const __m512i in_turn =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512 x = _mm512_loadu_ps(even), y = _mm512_loadu_ps(odd);
    __m512 upper_x = amx_upper(x), upper_y = amx_upper(y);
    __m512i upper = _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(upper_x), 16),
                                    _mm512_castps_si512(upper_y));
    __m512i lower =
        (__m512i)_mm512_cvtne2ps_pbh(_mm512_sub_ps(y, upper_y), _mm512_sub_ps(x, upper_x));
    _mm512_store_si512(out, upper);
    _mm512_store_si512(out + SPLIT_LOWER, _mm512_permutexvar_epi16(in_turn, lower));
}

static void amx_right(struct product_operand *operand, const float *rows, int64_t stride, int32_t k,
                      int32_t n)
{
    operand->data = operand->memory;
    operand->stride = (int64_t)k / UNIT * SPLIT_BLOCK;
    for (int32_t p = 0; p < k; p += 2) {
        uint16_t *out = (uint16_t *)operand->memory + (int64_t)p / UNIT * SPLIT_BLOCK +
                        p % UNIT / 2 * (int64_t)UNIT;
        const float *even = rows + p * stride, *odd = even + stride;
        for (int32_t j = 0; j < n; j += UNIT, out += operand->stride) {
            amx_pairs(out, even + j, odd + j);
            amx_pairs(out + TILE_ELEMENTS, even + j + 16, odd + j + 16);
        }
    }
}

#define AMX_FOUR                                                                                   \
    _tile_dpbf16ps(0, 4, 6);                                                                       \
    _tile_dpbf16ps(1, 4, 7);                                                                       \
    _tile_dpbf16ps(2, 5, 6);                                                                       \
    _tile_dpbf16ps(3, 5, 7);

/* 32 x 32 sums; the left block's lines stay in L1 for the columns to come */
INLINE void amx_product(float *sums, const uint16_t *a, const uint16_t *b, int32_t k)
{
    tiles_and_memory();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int32_t p = 0; p < k; p += UNIT, a += SPLIT_BLOCK, b += SPLIT_BLOCK) {
        _tile_loadd(4, a, 64);
        _tile_stream_loadd(6, b + SPLIT_LOWER, 64);
        _tile_stream_loadd(7, b + SPLIT_LOWER + TILE_ELEMENTS, 64);
        _tile_loadd(5, a + TILE_ELEMENTS, 64);
        AMX_FOUR
        _tile_stream_loadd(6, b, 64);
        _tile_stream_loadd(7, b + TILE_ELEMENTS, 64);
        AMX_FOUR
        _tile_loadd(4, a + SPLIT_LOWER, 64);
        _tile_loadd(5, a + SPLIT_LOWER + TILE_ELEMENTS, 64);
        AMX_FOUR
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 16 * UNIT, 128);
    _tile_stored(3, sums + 16 * UNIT + 16, 128);
    tiles_and_memory();
}
#undef AMX_FOUR

/* What becomes of sums at row i and column j. */
INLINE void amx_finish(const float *sums, const struct product_args *args, int32_t i, int32_t j)
{
    const int32_t end = args->first + args->m;
    for (int32_t r = i; r < i + UNIT && r < end; r++, sums += UNIT) {
        float *out = args->out + r * args->stride + j;
        const __m512 by = _mm512_set1_ps(args->by[r]);
        __m512 first = _mm512_mul_ps(_mm512_load_ps(sums), by);
        __m512 last = _mm512_mul_ps(_mm512_load_ps(sums + 16), by);
        if (args->keep != NULL) {
            __m512 keep = _mm512_set1_ps(args->keep[r]);
            first = _mm512_fmadd_ps(_mm512_loadu_ps(out), keep, first);
            last = _mm512_fmadd_ps(_mm512_loadu_ps(out + 16), keep, last);
        }
        _mm512_storeu_ps(out, first);
        _mm512_storeu_ps(out + 16, last);
    }
}

/* Each block's sums are finished behind the next one's tiles, which they need not wait for. */
static void amx_multiply(const struct product_args *args)
{
    _Alignas(64) float sums[2][UNIT * UNIT];
    const uint16_t *a =
        (const uint16_t *)args->left->data + args->first / UNIT * args->left->stride;
    int32_t done_i = -1, done_j = 0, turn = 0;
    for (int32_t i = args->first; i < args->first + args->m; i += UNIT, a += args->left->stride) {
        const uint16_t *b = args->right->data;
        for (int32_t j = 0; j < args->n; j += UNIT, b += args->right->stride, turn ^= 1) {
            amx_product(sums[turn], a, b, args->k);
            if (done_i >= 0) {
                amx_finish(sums[turn ^ 1], args, done_i, done_j);
            }
            done_i = i;
            done_j = j;
        }
    }
    if (done_i >= 0) {
        amx_finish(sums[turn ^ 1], args, done_i, done_j);
    }
}

static const struct product_engine amx_products = {amx_left, amx_right, amx_multiply};

#endif
