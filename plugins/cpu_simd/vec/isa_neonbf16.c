/* SPDX-License-Identifier: Apache-2.0 */
#include "vec_neon.h"

#include "f32_decode.h"

#include "bfdot_decode.h"

static const struct tile_kernels f32_kernels = F32_TILE_KERNELS;

static const struct tile_kernels bf16_kernels = {
    .element_bytes = 2,
    .element = ELEMENT_BF16,
    .row_block = 24,
    .decode_rows = 8,
    .unpack = {bf16_from_f32, bf16_from_f16, bf16_from_bf16, bf16_from_e4m3, bf16_from_e5m2,
               bf16_from_int8},
    .pack_keys = bf16_pack_keys,
    .pack_values = bf16_pack_values,
    .gemm = bf16_gemm,
    .softmax = bf16_softmax,
    .decode = &bf16_decode,
};

const struct variant variant_neonbf16 = {
    .name = "neonbf16", .f32 = &f32_kernels, .bf16 = &bf16_kernels, ROW_OPERATIONS};
