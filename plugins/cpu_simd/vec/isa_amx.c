/* SPDX-License-Identifier: Apache-2.0 */
/* AMX: gemm in tiles of 16 x 32 bf16; all other kernels are those of AVX512_BF16. Each step has 2 x
 * 2 accumulators: four tdpbf16ps (16 x 16 x 32 each) for four tile loads. */
/* L1 has 16 buffers for lines under way, L2 three times as many. */
#define PREFETCH_HINT 2

#include "vec_avx512.h"

#include "f32_decode.h"

#include "bf16_tile.h"

#include "amx_codes.h"
#include "amx_index.h"
#include "amx_int8.h"
#include "amx_products.h"

struct tile_config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
};

/* gcc 12's tile intrinsics do not declare which memory they read: without this barrier, the
 * compiler may drop earlier stores or move them past the load. */
static inline void memory_is_read(const void *memory)
{
    __asm__ volatile("" : : "r"(memory) : "memory");
}

#define REST_DEPTH 64 /* depth of rows copied at a time: 4 KiB of stack with the sums */

static int amx_enter(void)
{
    struct tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.column_bytes[i] = 64;
        config.rows[i] = 16;
    }
    memory_is_read(&config);
    _tile_loadconfig(&config);
    return 0;
}

static void amx_leave(void)
{
    _tile_release();
}

/* 32 x 32 of c; k is a multiple of 32 */
static void amx_block_2x2(float *c, int64_t ldc, const uint16_t *a, int64_t lda, const uint16_t *b,
                          int64_t ldb, int32_t k, int accumulate)
{
    if (accumulate) {
        _tile_loadd(0, c, ldc * 4);
        _tile_loadd(1, c + 16, ldc * 4);
        _tile_loadd(2, c + 16 * ldc, ldc * 4);
        _tile_loadd(3, c + 16 * ldc + 16, ldc * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int32_t p = 0; p < k; p += 32) {
        _tile_loadd(4, a + p, lda * 2);
        tile_gap();
        _tile_loadd(6, b + p * ldb, ldb * 4);
        tile_gap();
        _tile_loadd(7, b + p * ldb + 32, ldb * 4);
        tile_gap();
        _tile_loadd(5, a + 16 * lda + p, lda * 2);
        tile_gap();
        _tile_dpbf16ps(0, 4, 6);
        tile_gap();
        _tile_dpbf16ps(1, 4, 7);
        tile_gap();
        _tile_dpbf16ps(2, 5, 6);
        tile_gap();
        _tile_dpbf16ps(3, 5, 7);
        tile_gap();
    }
    _tile_stored(0, c, ldc * 4);
    _tile_stored(1, c + 16, ldc * 4);
    _tile_stored(2, c + 16 * ldc, ldc * 4);
    _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
}

static void amx_block_1x2(float *c, int64_t ldc, const uint16_t *a, int64_t lda, const uint16_t *b,
                          int64_t ldb, int32_t k, int accumulate)
{
    if (accumulate) {
        _tile_loadd(0, c, ldc * 4);
        _tile_loadd(1, c + 16, ldc * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    for (int32_t p = 0; p < k; p += 32) {
        _tile_loadd(4, a + p, lda * 2);
        _tile_loadd(6, b + p * ldb, ldb * 4);
        _tile_loadd(7, b + p * ldb + 32, ldb * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, c, ldc * 4);
    _tile_stored(1, c + 16, ldc * 4);
}

/* Fewer than 16 rows, padded with rows of zeros. A row's result then does not depend on the other
 * rows of its tile, as it would if vectors added it in another order. */
static void amx_rest(float *c, int64_t ldc, const uint16_t *a, int64_t lda, const uint16_t *b,
                     int64_t ldb, int32_t m, int32_t n, int32_t k, int accumulate)
{
    _Alignas(64) uint16_t rows[16][REST_DEPTH];
    _Alignas(64) float sums[16][32];
    memset(rows, 0, sizeof rows);
    memset(sums, 0, sizeof sums);
    for (int32_t p = 0; p < k; p += REST_DEPTH) {
        int32_t deep = k - p < REST_DEPTH ? k - p : REST_DEPTH;
        int more = accumulate || p > 0;
        for (int32_t i = 0; i < m; i++) {
            memcpy(rows[i], a + i * lda + p, (size_t)deep * sizeof *a);
        }
        for (int32_t j = 0; j < n; j += 32) {
            for (int32_t i = 0; i < m && more; i++) {
                memcpy(sums[i], c + i * ldc + j, sizeof sums[i]);
            }
            memory_is_read(rows);
            amx_block_1x2(sums[0], 32, rows[0], REST_DEPTH, b + p * ldb + 2 * j, ldb, deep, more);
            memory_is_read(sums);
            for (int32_t i = 0; i < m; i++) {
                memcpy(c + i * ldc + j, sums[i], sizeof sums[i]);
            }
        }
    }
}

static void amx_gemm(float *c, int64_t ldc, const void *a, int64_t lda, const void *b, int64_t ldb,
                     int32_t m, int32_t n, int32_t k, int accumulate)
{
    const uint16_t *left = a;
    const uint16_t *right = b;
    int32_t i = 0;
    memory_is_read(a);
    for (; i + 32 <= m; i += 32) {
        for (int32_t j = 0; j < n; j += 32) {
            amx_block_2x2(c + i * ldc + j, ldc, left + i * lda, lda, right + 2 * j, ldb, k,
                          accumulate);
        }
    }
    if (i + 16 <= m) {
        for (int32_t j = 0; j < n; j += 32) {
            amx_block_1x2(c + i * ldc + j, ldc, left + i * lda, lda, right + 2 * j, ldb, k,
                          accumulate);
        }
        i += 16;
    }
    if (i < m) {
        amx_rest(c + i * ldc, ldc, left + i * lda, lda, right, ldb, m - i, n, k, accumulate);
    }
}

static const struct tile_kernels bf16_kernels = {
    BF16_TILE_KERNELS,
    .row_block = 32,
    .decode_rows = DECODE_ROWS,
    .gemm = amx_gemm,
    .flash = &amx_flash,
    .index_scores = amx_index_scores,
    .decode = &amx_decode,
    .decode_fp8 = &amx_fp8_decode,
    .decode_int8 = &amx_int8_decode,
    .decode_int4 = &int4_decode,
};

const struct variant variant_amx = {.name = "amx",
                                    .rank = 100,
                                    .f32 = &f32_kernels,
                                    .bf16 = &bf16_kernels,
                                    .split_products = &amx_products,
                                    .enter = amx_enter,
                                    .leave = amx_leave,
                                    ROW_OPERATIONS};
