/* SPDX-License-Identifier: Apache-2.0 */
/* AVX512_BF16. gemm: 24 dot instructions for 4 loads and 6 embedded broadcasts; Zen 5 retires two
 * of 64 FLOPs a cycle. */
#include "vec_avx512.h"

#include "f32_decode.h"

#include "bf16_tile.h"

#include "int8_decode.h"

static void bf16_gemm(float *c, int64_t ldc, const void *a, int64_t lda, const void *b, int64_t ldb,
                      int32_t m, int32_t n, int32_t k, int accumulate)
{
    const struct tile_product of = {c, a, b, ldc, lda / 2, ldb, k / 2, accumulate, NULL, NULL};
    tile_gemm(of, m, n, true, false);
}

static const struct tile_kernels bf16_kernels = {
    BF16_TILE_KERNELS,           .row_block = 24,
    .decode_rows = DECODE_ROWS,  .gemm = bf16_gemm,
    .decode = &bf16_decode,      .decode_fp8 = &fp8_decode,
    .decode_int8 = &int8_decode, .decode_int4 = &int4_decode,
};

const struct variant variant_avx512bf16 = {
    .name = "avx512bf16", .rank = 80, .f32 = &f32_kernels, .bf16 = &bf16_kernels, ROW_OPERATIONS};
