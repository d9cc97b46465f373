/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of bf16 on levels with products of its pairs: a pair is one 32-bit element of a packed
 * operand. fp8 and int8 fit into bf16 exactly; scales are applied to scores and outputs. */
#ifndef CPU_SIMD_BF16_ROWS_H
#define CPU_SIMD_BF16_ROWS_H

#include "f32_tile.h"

static void bf16_pack_keys(void *packed, const void *const *rows, int32_t n, int32_t columns,
                           int32_t depth)
{
    f32_pack_keys(packed, rows, n, columns, depth / 2);
}

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
        for (; i + 2 * VF_WIDTH <= n; i += 2 * VF_WIDTH) {                                         \
            vf_store_pairs(out + i, load(in + i), load(in + i + VF_WIDTH));                        \
        }                                                                                          \
        for (; i < n; i++) {                                                                       \
            out[i] = f32_to_bf16(convert(in[i]));                                                  \
        }                                                                                          \
    }
DEFINE_UNPACK_BF16(bf16_from_f32, float, vf_load, SAME)
DEFINE_UNPACK_BF16(bf16_from_f16, uint16_t, vf_load_f16, number_from_f16)
#ifndef __AVX512VBMI__ /* which has look-ups: code_tables.h */
DEFINE_UNPACK_BF16(bf16_from_e4m3, uint8_t, vf_load_e4m3, number_from_e4m3)
DEFINE_UNPACK_BF16(bf16_from_e5m2, uint8_t, vf_load_e5m2, number_from_e5m2)
DEFINE_UNPACK_BF16(bf16_from_int8, int8_t, vf_load_int8, SAME)
#endif

/* What bf16 levels' tile_kernels have in common. */
#define BF16_TILE_KERNELS                                                                          \
    .element_bytes = 2, .element = ELEMENT_BF16,                                                   \
    .unpack = {bf16_from_f32,  bf16_from_f16,  bf16_from_bf16,                                     \
               bf16_from_e4m3, bf16_from_e5m2, bf16_from_int8},                                    \
    .pack_keys = bf16_pack_keys, .pack_values = bf16_pack_values, .softmax = bf16_softmax

#endif
