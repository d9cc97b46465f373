/* SPDX-License-Identifier: Apache-2.0 */
#include "vec_neon.h"

#include "bfdot_tile.h"

static const struct tile_kernels bf16_kernels = {
    BF16_TILE_KERNELS, .row_block = 24, .decode_rows = 8, .gemm = bf16_gemm, .decode = &bf16_decode,
};

const struct variant variant_neonbf16 = {
    .name = "neonbf16", .rank = 60, .f32 = &f32_kernels, .bf16 = &bf16_kernels, ROW_OPERATIONS};
