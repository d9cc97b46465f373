/* SPDX-License-Identifier: Apache-2.0 */
/* Products of floats by tiles: an operand is two bf16, the second what the first rounds off. Of the
 * four products the three larger are summed, which loses 2^-16 of a product. Operands lie in the
 * order in which they are read, as blocks of two tiles of each part, the larger first. Left ones
 * [m / 32][k / 32][part][2][16][32], right ones [k / 32][n / 32][part][2][16][16][2] with pairs
 * along k.
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

enum { PART = 2 * TILE_ELEMENTS, PARTS = 2 * PART }; /* a part of a block, and both */

/* x and y, and what their upper parts round off */
INLINE void amx_left_parts(uint16_t *out, __m512 x, __m512 y)
{
    const __m512 upper_x = amx_upper(x), upper_y = amx_upper(y);
    _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh(upper_y, upper_x));
    x = _mm512_sub_ps(x, upper_x);
    y = _mm512_sub_ps(y, upper_y);
    _mm512_store_si512(out + PART, (__m512i)_mm512_cvtne2ps_pbh(y, x));
}

static void amx_left(struct product_operand *operand, const float *rows, int64_t stride, int32_t m,
                     int32_t k, const float *by)
{
    operand->data = operand->memory;
    operand->block = PARTS;
    operand->stride = (int64_t)k / UNIT * PARTS;
    for (int32_t i = 0; i < m; i++, rows += stride) {
        uint16_t *out =
            (uint16_t *)operand->memory + i / UNIT * operand->stride + i % UNIT * (int64_t)UNIT;
        for (int32_t p = 0; p < k; p += UNIT, out += PARTS) {
            __m512 x = _mm512_loadu_ps(rows + p), y = _mm512_loadu_ps(rows + p + 16);
            if (by != NULL) {
                x = _mm512_mul_ps(x, _mm512_loadu_ps(by + p));
                y = _mm512_mul_ps(y, _mm512_loadu_ps(by + p + 16));
            }
            amx_left_parts(out, x, y);
        }
    }
}

/* 16 columns of two rows as pairs */
INLINE void amx_pairs(uint16_t *out, const float *even, const float *odd)
{
    const __m512i in_turn =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512 x = _mm512_loadu_ps(even), y = _mm512_loadu_ps(odd);
    const __m512 upper_x = amx_upper(x), upper_y = amx_upper(y);
    _mm512_store_si512(out, _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(upper_x), 16),
                                            _mm512_castps_si512(upper_y)));
    x = _mm512_sub_ps(x, upper_x);
    y = _mm512_sub_ps(y, upper_y);
    _mm512_store_si512(out + PART,
                       _mm512_permutexvar_epi16(in_turn, (__m512i)_mm512_cvtne2ps_pbh(y, x)));
}

static void amx_right(struct product_operand *operand, const float *rows, int64_t stride,
                      int32_t first, int32_t k, int32_t n)
{
    operand->data = operand->memory;
    operand->block = PARTS;
    operand->stride = (int64_t)n / UNIT * PARTS;
    for (int32_t p = first; p < k; p += 2) {
        uint16_t *out =
            (uint16_t *)operand->memory + p / UNIT * operand->stride + p % UNIT / 2 * (int64_t)UNIT;
        const float *even = rows + p * stride, *odd = even + stride;
        for (int32_t j = 0; j < n; j += UNIT, out += PARTS) {
            amx_pairs(out, even + j, odd + j);
            amx_pairs(out + TILE_ELEMENTS, even + j + 16, odd + j + 16);
        }
    }
}

/* Each tile instruction is followed by a gap. */
#define AMX_DO(instruction)                                                                        \
    instruction;                                                                                   \
    tile_gap();

#define AMX_FOUR                                                                                   \
    AMX_DO(_tile_dpbf16ps(0, 4, 6))                                                                \
    AMX_DO(_tile_dpbf16ps(1, 4, 7))                                                                \
    AMX_DO(_tile_dpbf16ps(2, 5, 6))                                                                \
    AMX_DO(_tile_dpbf16ps(3, 5, 7))

/* Writes a block's sums to out, rows at a time. */
struct amx_rest {
    const float *sums;
    const struct product_args *args;
    float *out;
    uint16_t *packed; /* the block of args->packed; NULL: none */
    int32_t i, end;   /* rows still to do */
};

/* up to `rows` more rows */
INLINE void amx_finish(struct amx_rest *rest, int32_t rows)
{
    const struct product_args *args = rest->args;
    int32_t i = rest->i, end = i + rows < rest->end ? i + rows : rest->end;
    float *out = rest->out;
    const float *sums = rest->sums;
    for (; i < end; i++, sums += UNIT, out += args->stride) {
        const __m512 by = _mm512_set1_ps(args->by[i]);
        __m512 first = _mm512_mul_ps(_mm512_load_ps(sums), by);
        __m512 last = _mm512_mul_ps(_mm512_load_ps(sums + 16), by);
        if (args->keep != NULL) {
            __m512 keep = _mm512_set1_ps(args->keep[i]);
            first = _mm512_fmadd_ps(_mm512_loadu_ps(out), keep, first);
            last = _mm512_fmadd_ps(_mm512_loadu_ps(out + 16), keep, last);
        }
        _mm512_storeu_ps(out, first);
        _mm512_storeu_ps(out + 16, last);
        if (rest->packed != NULL && i % 2 == 1) {
            uint16_t *pairs = rest->packed + i % UNIT / 2 * UNIT;
            const float *even = out - args->stride;
            amx_pairs(pairs, even, out);
            amx_pairs(pairs + TILE_ELEMENTS, even + 16, out + 16);
        }
    }
    rest->i = i;
    rest->sums = sums;
    rest->out = out;
}

/* Registers 0 .. 3 hold a block of sums, stored to `sums` one at a time as the next block begins:
 * products wait for one store each, not for four. */
#define AMX_TURN(i)                                                                                \
    _tile_stored(i, sums + (i) / 2 * 16 * UNIT + (i) % 2 * 16, UNIT * sizeof(float));              \
    _tile_zero(i);

#define AMX_A(part)                                                                                \
    AMX_DO(_tile_loadd(4, a + (part)*PART, 64))                                                    \
    AMX_DO(_tile_loadd(5, a + (part)*PART + TILE_ELEMENTS, 64))

#define AMX_B(part)                                                                                \
    AMX_DO(_tile_stream_loadd(6, b + (part)*PART, 64))                                             \
    AMX_DO(_tile_stream_loadd(7, b + (part)*PART + TILE_ELEMENTS, 64))

/* The first of a block's products, after the loads of one part of both operands. */
INLINE void amx_begin(float *sums, const uint16_t *a, const uint16_t *b)
{
    AMX_DO(_tile_loadd(4, a, 64))
    AMX_DO(_tile_stream_loadd(6, b, 64))
    AMX_TURN(0)
    AMX_DO(_tile_dpbf16ps(0, 4, 6))
    AMX_DO(_tile_stream_loadd(7, b + TILE_ELEMENTS, 64))
    AMX_TURN(1)
    AMX_DO(_tile_dpbf16ps(1, 4, 7))
    AMX_DO(_tile_loadd(5, a + TILE_ELEMENTS, 64))
    AMX_TURN(2)
    AMX_DO(_tile_dpbf16ps(2, 5, 6))
    AMX_TURN(3)
    AMX_DO(_tile_dpbf16ps(3, 5, 7))
}

/* Products, then some rows of the last block's output. */
#define AMX_GO_ON                                                                                  \
    AMX_FOUR                                                                                       \
    tiles_and_memory();                                                                            \
    amx_finish(rest, rows);                                                                        \
    tiles_and_memory();

/* the next 32 x 32 sums, while the last block's output is written; the left block's lines stay in
 * L1 for the next columns */
INLINE void amx_product(float *sums, const uint16_t *a, int64_t a_step, const uint16_t *b,
                        int64_t b_step, int32_t k, struct amx_rest *rest)
{
    const int32_t shares = 3 * (k / UNIT) - 1, rows = (UNIT + shares - 1) / shares;
    tiles_and_memory();
    for (int32_t p = 0; p < k; p += UNIT, a += a_step, b += b_step) {
        if (p == 0) {
            amx_begin(sums, a, b + PART);
        } else {
            AMX_A(0)
            AMX_B(1)
            AMX_GO_ON
        }
        AMX_B(0)
        AMX_GO_ON
        AMX_A(1)
        AMX_GO_ON
    }
}

static void amx_multiply(const struct product_args *args)
{
    _Alignas(64) float sums[UNIT * UNIT];
    const struct product_operand *left = args->left, *right = args->right;
    const uint16_t *a = (const uint16_t *)left->data + args->first / UNIT * left->stride;
    const int32_t end = args->first + args->m;
    struct amx_rest rest = {.args = args};
    uint16_t *packed = args->packed != NULL ? args->packed->memory : NULL;
    for (int32_t i = args->first; i < end; i += UNIT, a += left->stride) {
        const uint16_t *b = right->data;
        for (int32_t j = 0; j < args->n; j += UNIT, b += right->block) {
            amx_product(sums, a, left->block, b, right->stride, args->k, &rest);
            rest = (struct amx_rest){.sums = sums,
                                     .args = args,
                                     .out = args->out + i * args->stride + j,
                                     .packed = packed,
                                     .i = i,
                                     .end = i + UNIT < end ? i + UNIT : end};
            packed += packed != NULL ? args->packed->block : 0;
        }
    }
    tiles_and_memory();
    AMX_TURN(0)
    AMX_TURN(1)
    AMX_TURN(2)
    AMX_TURN(3)
    tiles_and_memory();
    amx_finish(&rest, UNIT);
}
#undef AMX_DO
#undef AMX_FOUR
#undef AMX_TURN
#undef AMX_A
#undef AMX_B
#undef AMX_GO_ON

static const struct product_kernels amx_products = {amx_left, amx_right, amx_multiply};

#endif
