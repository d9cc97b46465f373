/* SPDX-License-Identifier: Apache-2.0 */
/* batched_gemm on FMA units, any strides and dtypes: GEMM_ROWS x GEMM_COLUMNS of out to a group, a
 * thread has 2 x 4 of them. Weights are read once for each GEMM_ROWS rows of a: with as many tokens
 * or fewer the limit is memory, with more the units' rate. Sums run over k in order, whatever else
 * is in the batch. */
#include "gpu/device/number.h"
#include "gpu/latent.h"

#define GEMM_DEPTH 32
#define GEMM_THREAD_ROWS 2
#define GEMM_THREAD_COLUMNS 4
#define E8M0_NAN 255

static_assert(GEMM_ROWS / GEMM_THREAD_ROWS * (GEMM_COLUMNS / GEMM_THREAD_COLUMNS) ==
                  GPU_THREADS_gemm,
              "a thread for each part of the tile");

struct gemm_memory {
    float a[GEMM_DEPTH][GEMM_ROWS + 1];
    float w[GEMM_DEPTH][GEMM_COLUMNS + 1];
};

GPU_INLINE float gemm_number(const gpu_batch_matrix &m, int64_t b, int64_t i, int64_t j)
{
    int64_t at = b * m.batch + i * m.row + j * m.column;
    return number_load(m.data + at * number_bytes_of(m.dtype), m.dtype, 0);
}

/* An e2m1 times its block's power of two. */
GPU_INLINE float mxfp4_number(const gpu_gemm_params &p, int64_t b, int64_t i, int64_t j)
{
    int64_t at = b * p.w.batch + i * p.w.row + j * p.w.column;
    uint32_t code = ((const uint8_t *)p.w.data)[at / 2] >> (at & 1) * 4 & 15, size = code & 7;
    float x =
        size < 2 ? 0.5f * (float)size : bits_float(((size >> 1) + 126) << 23 | (size & 1) << 22);
    const gpu_batch_matrix &s = p.block_scale;
    uint32_t power =
        ((const uint8_t *)
             s.data)[b * s.batch + i / p.scale_rows * s.row + j / p.scale_columns * s.column];
    float scale = power == E8M0_NAN ? NAN
                  : power == 0      ? bits_float(1u << 22) /* 2^-127 */
                                    : bits_float(power << 23);
    return (code & 8) != 0 ? -x * scale : x * scale;
}

/* A tile [ROWS of depth][columns] so that neighbouring threads read neighbouring elements. */
GPU_INLINE void load_tiles(const gpu_gemm_params &p, int64_t b, int32_t m0, int32_t n0, int32_t k0,
                           gemm_memory &memory)
{
    int32_t t = (int32_t)thread_index();
    for (int32_t i = t; i < GEMM_DEPTH * GEMM_ROWS; i += GPU_THREADS_gemm) {
        int32_t k = i % GEMM_DEPTH, m = i / GEMM_DEPTH;
        bool real = m0 + m < p.m && k0 + k < p.k;
        memory.a[k][m] = real ? gemm_number(p.a, b, m0 + m, k0 + k) : 0.0f;
    }
    bool along_k = p.w.column != 1;
    for (int32_t i = t; i < GEMM_DEPTH * GEMM_COLUMNS; i += GPU_THREADS_gemm) {
        int32_t k = along_k ? i % GEMM_DEPTH : i / GEMM_COLUMNS;
        int32_t n = along_k ? i / GEMM_DEPTH : i % GEMM_COLUMNS;
        float x = 0.0f;
        if (n0 + n < p.n && k0 + k < p.k) {
            x = p.block_scale.data != nullptr ? mxfp4_number(p, b, k0 + k, n0 + n)
                                              : gemm_number(p.w, b, k0 + k, n0 + n);
        }
        memory.w[k][n] = x;
    }
}

GPU_KERNEL(gemm, gpu_gemm_params)
{
    GPU_SHARED gemm_memory memory;
    int32_t row_tiles = (p.m + GEMM_ROWS - 1) / GEMM_ROWS;
    int32_t column_tiles = (p.n + GEMM_COLUMNS - 1) / GEMM_COLUMNS;
    int32_t t = (int32_t)thread_index(), columns = GEMM_COLUMNS / GEMM_THREAD_COLUMNS;
    int32_t tm = t / columns, tn = t % columns;
    int64_t items = (int64_t)p.count * row_tiles * column_tiles;
    for (int64_t item = group_index(); item < items; item += group_count()) {
        int64_t b = item / (row_tiles * column_tiles), rest = item % (row_tiles * column_tiles);
        int32_t m0 = (int32_t)(rest / column_tiles) * GEMM_ROWS;
        int32_t n0 = (int32_t)(rest % column_tiles) * GEMM_COLUMNS;
        float sum[GEMM_THREAD_ROWS][GEMM_THREAD_COLUMNS] = {};
        for (int32_t k0 = 0; k0 < p.k; k0 += GEMM_DEPTH) {
            sync_group(); /* the tiles before are done with */
            load_tiles(p, b, m0, n0, k0, memory);
            sync_group(); /* the tiles are there */
#pragma unroll 4
            for (int k = 0; k < GEMM_DEPTH; k++) {
#pragma unroll
                for (int i = 0; i < GEMM_THREAD_ROWS; i++) {
                    float a = memory.a[k][tm + i * (GEMM_ROWS / GEMM_THREAD_ROWS)];
#pragma unroll
                    for (int j = 0; j < GEMM_THREAD_COLUMNS; j++) {
                        sum[i][j] += a * memory.w[k][tn + j * columns];
                    }
                }
            }
        }
        float scale = p.scale != nullptr ? p.scale[p.scale_per_batch ? b : 0] : 1.0f;
#pragma unroll
        for (int i = 0; i < GEMM_THREAD_ROWS; i++) {
#pragma unroll
            for (int j = 0; j < GEMM_THREAD_COLUMNS; j++) {
                int32_t m = m0 + tm + i * (GEMM_ROWS / GEMM_THREAD_ROWS), n = n0 + tn + j * columns;
                if (m < p.m && n < p.n) {
                    int64_t at = b * p.out.batch + m * p.out.row + n * p.out.column;
                    number_store(p.out.data + at * number_bytes_of(p.out.dtype), p.out.dtype, 0,
                                 sum[i][j] * scale);
                }
            }
        }
    }
}
