/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_simd's AMX kernels with its tile instructions done by vectors, for machines without tiles.
 * Each thread has tiles of its own. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static _Thread_local unsigned char tiles[8][16][64];

static void tile_load(int tile, const void *memory, int64_t stride)
{
    for (int i = 0; i < 16; i++) {
        memcpy(tiles[tile][i], (const char *)memory + i * stride, 64);
    }
}

static void tile_store(int tile, void *memory, int64_t stride)
{
    for (int i = 0; i < 16; i++) {
        memcpy((char *)memory + i * stride, tiles[tile][i], 64);
    }
}

static void tile_zero(int tile)
{
    memset(tiles[tile], 0, sizeof tiles[tile]);
}

static __m512 of_bf16(__m512i bits)
{
    return _mm512_castsi512_ps(bits);
}

/* As the manual has it: the products of even and of odd elements are summed apart, and both sums
 * are added to c at the end. */
static void tile_multiply(int c, int a, int b)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    for (int i = 0; i < 16; i++) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int k = 0; k < 16; k++) {
            int pair;
            memcpy(&pair, tiles[a][i] + sizeof pair * (size_t)k, sizeof pair);
            __m512i left = _mm512_set1_epi32(pair), right = _mm512_loadu_si512(tiles[b][k]);
            even = _mm512_fmadd_ps(of_bf16(_mm512_slli_epi32(left, 16)),
                                   of_bf16(_mm512_slli_epi32(right, 16)), even);
            odd = _mm512_fmadd_ps(of_bf16(_mm512_and_si512(left, upper)),
                                  of_bf16(_mm512_and_si512(right, upper)), odd);
        }
        __m512 sum = _mm512_add_ps(_mm512_loadu_ps(tiles[c][i]), _mm512_add_ps(even, odd));
        _mm512_storeu_ps(tiles[c][i], sum);
    }
}

/* Four signed bytes each. */
static void tile_multiply_bytes(int c, int a, int b)
{
    for (int i = 0; i < 16; i++) {
        int32_t sums[16];
        memcpy(sums, tiles[c][i], sizeof sums);
        for (int n = 0; n < 16; n++) {
            for (int k = 0; k < 64; k++) {
                sums[n] += (int8_t)tiles[a][i][k] * (int8_t)tiles[b][k / 4][4 * n + k % 4];
            }
        }
        memcpy(tiles[c][i], sums, sizeof sums);
    }
}

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_loadconfig
#undef _tile_release
#define _tile_loadd(tile, memory, stride) tile_load(tile, memory, stride)
#define _tile_stream_loadd(tile, memory, stride) tile_load(tile, memory, stride)
#define _tile_stored(tile, memory, stride) tile_store(tile, memory, stride)
#define _tile_zero(tile) tile_zero(tile)
#define _tile_dpbf16ps(c, a, b) tile_multiply(c, a, b)
#define _tile_dpbssd(c, a, b) tile_multiply_bytes(c, a, b)
#define _tile_loadconfig(config) ((void)(config))
#define _tile_release() ((void)0)

#include "cpu_simd/vec/isa_amx.c" /* NOLINT(bugprone-suspicious-include): with tiles of C */
