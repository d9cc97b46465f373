/* SPDX-License-Identifier: Apache-2.0 */
/* The operands of amx_flash.h: tiles of b, 1 KiB each, in the order in which they are read. Keys
 * [column / 32][depth / 32][2][16 depth pairs][16 keys][2], values
 * [width / 32][key / 32][2][16 key pairs][16 columns][2] with the pairs (i, i + 16) of 32 keys. */
#ifndef CPU_SIMD_AMX_PACK_H
#define CPU_SIMD_AMX_PACK_H

#include "bf16_tile.h"

enum {
    UNIT = 32,          /* keys, and rows of a chain of products */
    TILE_ELEMENTS = 512 /* bf16 of one tile register */
};

static void amx_flash_pack_keys(void *packed, const void *const *rows, int32_t n, int32_t columns,
                                int32_t depth)
{
    float *out = packed;
    for (int32_t j = 0; j < columns; j += UNIT) {
        for (int32_t d = 0; d < depth; d += UNIT) {
            for (int32_t half = j; half < j + UNIT; half += 16, out += 256) {
                __m512 block[16];
#pragma GCC unroll 16
                for (int32_t i = 0; i < 16; i++) {
                    block[i] = half + i < n ? _mm512_loadu_ps((const uint16_t *)rows[half + i] + d)
                                            : _mm512_setzero_ps();
                }
                vf_transpose(block);
#pragma GCC unroll 16
                for (int32_t i = 0; i < 16; i++) {
                    _mm512_storeu_ps(out + 16 * i, block[i]);
                }
            }
        }
    }
}

static int amx_flash_pack_values(void *packed, const void *const *rows, int32_t n, int32_t n_padded,
                                 int32_t width)
{
    uint16_t *out = packed;
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i most = _mm512_setzero_si512();
    for (int32_t k = 0; k < n_padded; k += UNIT) {
        for (int32_t i = k; i < k + 16; i++) {
            uint16_t *pair = out + (int64_t)k / UNIT * 2 * TILE_ELEMENTS + (i - k) * UNIT;
            for (int32_t d = 0; d < width; d += UNIT) {
                __m512i even = _mm512_setzero_si512();
                __m512i odd = _mm512_setzero_si512();
                if (i < n) {
                    even = _mm512_loadu_si512((const uint16_t *)rows[i] + d);
                }
                if (i + 16 < n) {
                    odd = _mm512_loadu_si512((const uint16_t *)rows[i + 16] + d);
                }
                most = _mm512_max_epu16(most, _mm512_and_si512(even, magnitude));
                most = _mm512_max_epu16(most, _mm512_and_si512(odd, magnitude));
                __m512i first;
                __m512i last;
                interleave_pairs(even, odd, &first, &last);
                _mm512_storeu_si512(pair + (int64_t)d * FLASH_KEYS, first);
                _mm512_storeu_si512(pair + (int64_t)d * FLASH_KEYS + TILE_ELEMENTS, last);
            }
        }
    }
    return bf16_not_finite(most) != 0 ||
           _mm512_cmpgt_epu16_mask(most, _mm512_set1_epi16(0x7f80)) != 0;
}

#endif
