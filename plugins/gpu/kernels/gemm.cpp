/* SPDX-License-Identifier: Apache-2.0 */
/* batched_gemm on FMA units. gemm serves any strides and dtypes: a group has GEMM_ROWS x
 * GEMM_COLUMNS of out, a thread 2 x 4 of them. Weights are read once for each GEMM_ROWS rows of a:
 * with at most as many tokens memory is the limit, with more the FMA rate. gemm_few serves at most
 * GEMM_FEW rows and 16-bit weights that are contiguous in one direction: they stream through
 * registers once. Both sum over k in order, whatever else is in the batch. */
#include "gpu/device/matrix.h"

#define GEMM_DEPTH 32
#define GEMM_THREAD_ROWS 2
#define GEMM_THREAD_COLUMNS 4

static_assert(GEMM_ROWS / GEMM_THREAD_ROWS * (GEMM_COLUMNS / GEMM_THREAD_COLUMNS) ==
                  GPU_THREADS_gemm,
              "a thread for each part of the tile");

struct gemm_memory {
    float a[GEMM_DEPTH][GEMM_ROWS + 1];
    float w[GEMM_DEPTH][GEMM_COLUMNS + 1];
};

/* A tile [ROWS of k][columns], read such that neighbouring threads read neighbouring elements. */
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
        bool real = n0 + n < p.n && k0 + k < p.k;
        memory.w[k][n] = real ? weight_number(p, b, k0 + k, n0 + n) : 0.0f;
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
            sync_group(); /* the previous tiles have been read */
            load_tiles(p, b, m0, n0, k0, memory);
            sync_group(); /* the tiles are written */
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

#define FEW_DEPTH 512 /* elements of a's rows in shared memory at a time */
/* Loads of weights that a thread has in flight. */
#ifdef __OPENCL_CPP_VERSION__ /* Intel: 32 lanes have 8 KiB of registers */
#define FEW_LOADS 1
#else
#define FEW_LOADS 8
#endif

struct few_memory {
    alignas(16) float a[GEMM_FEW][FEW_DEPTH];
};

GPU_INLINE float few_number(uint32_t pair, int32_t high, int32_t dtype)
{
    const uint16_t bits = (uint16_t)(high != 0 ? pair >> 16 : pair);
    return dtype == ATTN_DTYPE_F16 ? float_of_half(bits) : float_of_bf16(bits);
}

GPU_INLINE void few_load_a(const gpu_gemm_params &p, int64_t b, int32_t k0, int32_t rows,
                           few_memory &memory)
{
    for (int32_t i = (int32_t)thread_index(); i < rows * FEW_DEPTH; i += GPU_THREADS_gemm_few) {
        const int32_t m = i / FEW_DEPTH, k = i % FEW_DEPTH;
        const bool real = m < p.m && k0 + k < p.k;
        memory.a[m][k] = real ? gemm_number(p.a, b, m, k0 + k) : 0.0f;
    }
}

/* Weights contiguous along k: 8 elements of a column in one load. k is a multiple of 8. */
template <int ROWS>
GPU_INLINE void few_along_k(const few_memory &memory, const char *w, int32_t dtype, int32_t depth,
                            float (&sum)[ROWS][2])
{
    for (int32_t k = 0; k < depth; k += 8 * FEW_LOADS) {
        uint4 x[FEW_LOADS];
#pragma unroll
        for (int u = 0; u < FEW_LOADS; u++) {
            if (k + 8 * u < depth) {
                x[u] = load_once((const uint4 *)w + k / 8 + u);
            }
        }
#pragma unroll
        for (int u = 0; u < FEW_LOADS; u++) {
            if (k + 8 * u < depth) {
                const uint32_t pairs[4] = {x[u].x, x[u].y, x[u].z, x[u].w};
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    const float number = few_number(pairs[e / 2], e % 2, dtype);
#pragma unroll
                    for (int m = 0; m < ROWS; m++) {
                        sum[m][0] += memory.a[m][k + 8 * u + e] * number;
                    }
                }
            }
        }
    }
}

/* Weights contiguous along n: two columns in one load for each k, `step` bytes apart. */
template <int ROWS>
GPU_INLINE void few_along_n(const few_memory &memory, const char *w, int64_t step, int32_t dtype,
                            int32_t depth, float (&sum)[ROWS][2])
{
    for (int32_t k = 0; k < depth; k += 2 * FEW_LOADS) {
        uint32_t x[2 * FEW_LOADS];
#pragma unroll
        for (int u = 0; u < 2 * FEW_LOADS; u++) {
            x[u] = k + u < depth ? *(const uint32_t *)(w + (k + u) * step) : 0;
        }
#pragma unroll
        for (int u = 0; u < 2 * FEW_LOADS; u++) {
            if (k + u < depth) {
                const float low = few_number(x[u], 0, dtype), high = few_number(x[u], 1, dtype);
#pragma unroll
                for (int m = 0; m < ROWS; m++) {
                    sum[m][0] += memory.a[m][k + u] * low;
                    sum[m][1] += memory.a[m][k + u] * high;
                }
            }
        }
    }
}

template <int ROWS> GPU_INLINE void few_rows(const gpu_gemm_params &p, few_memory &memory)
{
    const bool along_k = p.w.row == 1;
    const int32_t columns = along_k ? 1 : 2, tile = columns * GPU_THREADS_gemm_few;
    const int32_t tiles = (p.n + tile - 1) / tile, t = (int32_t)thread_index();
    for (int64_t item = group_index(); item < (int64_t)p.count * tiles; item += group_count()) {
        const int64_t b = item / tiles;
        const int32_t n = (int32_t)(item % tiles) * tile + t * columns;
        float sum[ROWS][2] = {};
        for (int32_t k0 = 0; k0 < p.k; k0 += FEW_DEPTH) {
            const int32_t depth = p.k - k0 < FEW_DEPTH ? p.k - k0 : FEW_DEPTH;
            const char *w = p.w.data + 2 * (b * p.w.batch + k0 * p.w.row + n * p.w.column);
            sync_group(); /* the previous piece has been read */
            few_load_a(p, b, k0, ROWS, memory);
            sync_group(); /* the piece is written */
            if (n < p.n && along_k) {
                few_along_k<ROWS>(memory, w, p.w.dtype, depth, sum);
            } else if (n < p.n) {
                few_along_n<ROWS>(memory, w, 2 * p.w.row, p.w.dtype, depth, sum);
            }
        }
        const float scale = p.scale != nullptr ? p.scale[p.scale_per_batch ? b : 0] : 1.0f;
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (m < p.m && j < columns && n < p.n) {
                    int64_t at = b * p.out.batch + m * p.out.row + (n + j) * p.out.column;
                    number_store(p.out.data + at * number_bytes_of(p.out.dtype), p.out.dtype, 0,
                                 sum[m][j] * scale);
                }
            }
        }
    }
}

GPU_KERNEL(gemm_few, gpu_gemm_params)
{
    GPU_SHARED few_memory memory;
    if (p.m == 1) {
        few_rows<1>(p, memory);
    } else {
        few_rows<GEMM_FEW>(p, memory);
    }
}
