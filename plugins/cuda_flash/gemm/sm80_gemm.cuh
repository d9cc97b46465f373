/* SPDX-License-Identifier: Apache-2.0 */
/* batched_gemm by mma.sync, m16n8k16. A CTA has a tile of out, ROWS x 128, and loops over k in
 * steps of 64, with GEMM_STAGES stages in shared memory. Tiles differ in rows only: 16 where
 * weights are the limit (each is read once; 16 KiB a step, 3 steps in flight; the L2 gets them
 * while earlier kernels run), 256 where tensor cores are (48 KiB and 4.2 MFLOP a step, 87 FLOP a
 * byte). Every element of out is the sum of the same products in the same order, k ascending, 16 at
 * a time, in every tile: its bits depend neither on the number of rows nor on its position among
 * them. */
#ifndef CUDA_FLASH_SM80_GEMM_CUH
#define CUDA_FLASH_SM80_GEMM_CUH

#include "cuda_flash/ptx/ptx.cuh"
#include "gpu/device/matrix.h"
#include "sm80_gemm.h"

#define GEMM_STEP 64 /* steps of k: 128 bytes of 16-bit elements */
#define GEMM_TILE_COLUMNS 128
#define GEMM_STAGES 4
#define GEMM_FETCHED_K 1024 /* the longest k of items whose weights are prefetched to the L2 */

/* Warps of a CTA along m and n, 16 x 8 products of each warp, and CTAs of a multiprocessor. */
template <int WARPS_M, int WARPS_N, int PRODUCTS_M, int PRODUCTS_N, int CTAS> struct gemm_shape {
    static constexpr int ctas = CTAS, warps_n = WARPS_N, products_m = PRODUCTS_M,
                         products_n = PRODUCTS_N;
    static constexpr int threads = WARPS_M * WARPS_N * 32;
    static constexpr int rows = WARPS_M * PRODUCTS_M * 16;
    static constexpr int a_bytes = rows * GEMM_STEP * 2;
    static constexpr int stage_bytes = a_bytes + GEMM_TILE_COLUMNS * GEMM_STEP * 2;
    static_assert(WARPS_N * PRODUCTS_N * 8 == GEMM_TILE_COLUMNS, "warps share the columns");
    static_assert(PRODUCTS_N % 4 == 0, "rows go out four products at a time");
};

/* A CTA's tile of out. */
struct gemm_item {
    int64_t b;
    int32_t m0, n0;
};

/* The offset of 16 bytes in a tile with lines of 8 or 16 chunks, swizzled for ldmatrix. */
template <int CHUNKS> GPU_INLINE uint32_t place_of_chunk(int line, int chunk)
{
    return (line * CHUNKS + (chunk ^ (line & 7))) * 16;
}

/* This thread's part of an operand: its first line in the first step. */
struct gemm_source {
    const char *from; /* the address, for copies of 16 bytes */
    int64_t apart;    /* bytes from one of its lines to the next */
};

/* apart: elements between lines; line, number: where the tile begins. */
template <int CHUNKS, int THREADS>
GPU_INLINE gemm_source source_of(const gpu_batch_matrix &x, int64_t b, int64_t apart, int32_t line,
                                 int32_t number = 0)
{
    const int32_t first = line + (int32_t)threadIdx.x / CHUNKS;
    number += (int32_t)threadIdx.x % CHUNKS * 8;
    return {x.data + (b * x.batch + first * apart + number) * 2, THREADS / CHUNKS * apart * 2};
}

/* Copies a tile's lines. From this thread's first line on `real` lines exist, and from its chunk on
 * `numbers` elements; the rest becomes zero. */
template <int CHUNKS, int LINES, int THREADS>
GPU_INLINE void copy_lines(uint32_t to, const gemm_source &source, int64_t ahead, int32_t real,
                           int32_t numbers)
{
    constexpr int STEP = THREADS / CHUNKS;
    static_assert(STEP % 8 == 0 && LINES % STEP == 0, "lines of a thread lie in the same banks");
    const uint32_t place = to + place_of_chunk<CHUNKS>(threadIdx.x / CHUNKS, threadIdx.x % CHUNKS);
    const int bytes = min(max(numbers, 0), 8) * 2;
    const char *from = source.from + ahead;
#pragma unroll
    for (int i = 0; i < LINES / STEP; i++) { /* with 0 bytes cp.async reads nothing */
        copy16(place + i * STEP * CHUNKS * 16, from + i * source.apart,
               i * STEP < real ? bytes : 0);
    }
}

GPU_INLINE void store_words(uint32_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z),
                 "r"(w)
                 : "memory");
}

/* Stores eight elements of any type and strides. */
template <int KIND, class NUMBER> GPU_INLINE void store_numbers(uint32_t to, NUMBER number)
{
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = pack2<KIND>(number(2 * i), number(2 * i + 1));
    }
    store_words(to, x[0], x[1], x[2], x[3]);
}

/* Loads rows m0 .. of a, 64 elements of k each. WIDE: all operands are read 16 bytes at a time. */
template <int KIND, bool WIDE, class S>
GPU_INLINE void load_a(const sm80_gemm_params &q, const gemm_item &item, const gemm_source &source,
                       int32_t k0, uint32_t to)
{
    const gpu_gemm_params &p = q.p;
    const int chunk = threadIdx.x & 7;
    if (WIDE || q.wide_a) {
        copy_lines<8, S::rows, S::threads>(
            to, source, k0 * 2, p.m - item.m0 - (int32_t)threadIdx.x / 8, p.k - k0 - chunk * 8);
    } else {
#pragma unroll 1
        for (int line = threadIdx.x >> 3; line < S::rows; line += S::threads / 8) {
            store_numbers<KIND>(to + place_of_chunk<8>(line, chunk), [&](int i) {
                const int32_t m = item.m0 + line, k = k0 + chunk * 8 + i;
                return m < p.m && k < p.k ? gemm_number(p.a, item.b, m, k) : 0.0f;
            });
        }
    }
}

/* Eight adjacent codes, and their block scales. */
struct gemm_codes {
    uint2 codes, scales;
};

GPU_INLINE gemm_codes read_codes(const sm80_gemm_params &q, int64_t b, int32_t k, int32_t n)
{
    const gpu_gemm_params &p = q.p;
    const int64_t at = b * p.w.batch + k * p.w.row + n * p.w.column;
    const gpu_batch_matrix &s = p.block_scale;
    gemm_codes x = {};
    if (q.weights == GEMM_WEIGHTS_FP8) {
        x.codes = __ldg((const uint2 *)(p.w.data + at));
        return x;
    }
    const char *scale =
        s.data + b * s.batch + k / p.scale_rows * s.row + n / p.scale_columns * s.column;
    x.codes.x = __ldg((const uint32_t *)(p.w.data + at / 2));
    if (q.weights == GEMM_WEIGHTS_MXFP4_SHARED) {
        x.scales.x = x.scales.y = __ldg((const uint8_t *)scale) * 0x01010101u;
    } else {
        x.scales = __ldg((const uint2 *)scale);
    }
    return x;
}

/* Converts elements 2 i and 2 i + 1 of eight. An e2m1 in the upper bits of an f16 is 2^-14 times
 * its value. */
template <int KIND>
GPU_INLINE uint32_t widen_codes(const sm80_gemm_params &q, const gemm_codes &x, int i)
{
    if (q.weights == GEMM_WEIGHTS_FP8) {
        const uint32_t two = (i < 2 ? x.codes.x : x.codes.y) >> i % 2 * 16 & 0xffff;
        const uint32_t halves =
            q.p.w.dtype == ATTN_DTYPE_FP8_E5M2 ? widen<KIND_E5M2>(two) : widen<KIND_E4M3>(two);
        const float2 y = __half22float2(*(const __half2 *)&halves);
        return KIND == KIND_F16 ? halves : pack2<KIND>(y.x, y.y);
    }
    const uint32_t two = x.codes.x >> i * 8,
                   scales = (i < 2 ? x.scales.x : x.scales.y) >> i % 2 * 16;
    const uint32_t halves =
        (two & 7) << 9 | (two & 8) << 12 | (two & 0x70) << 21 | (two & 0x80) << 24;
    const float2 y = __half22float2(*(const __half2 *)&halves);
    return pack2<KIND>(y.x * 16384.0f * e8m0_number(scales & 0xff),
                       y.y * 16384.0f * e8m0_number(scales >> 8 & 0xff));
}

/* Loads columns n0 .. of w, 64 elements of k. A line is a column (ALONG_K) or a row of k. */
template <int KIND, bool ALONG_K, bool WIDE, class S>
GPU_INLINE void load_w(const sm80_gemm_params &q, const gemm_item &item, const gemm_source &source,
                       int32_t k0, uint32_t to)
{
    constexpr int CHUNKS = ALONG_K ? 8 : GEMM_TILE_COLUMNS / 8;
    constexpr int LINES = ALONG_K ? GEMM_TILE_COLUMNS : GEMM_STEP;
    const gpu_gemm_params &p = q.p;
    const int chunk = threadIdx.x % CHUNKS, first = threadIdx.x / CHUNKS;
    if (WIDE || q.weights == GEMM_WEIGHTS_WIDE) {
        const int32_t k = p.k - k0, n = p.n - item.n0;
        copy_lines<CHUNKS, LINES, S::threads>(to, source, (ALONG_K ? k0 : k0 * p.w.row) * 2,
                                              (ALONG_K ? n : k) - first,
                                              (ALONG_K ? k : n) - chunk * 8);
    } else if (q.weights != GEMM_WEIGHTS_ANY) {
        constexpr int STEP = S::threads / CHUNKS;
        gemm_codes x[LINES / STEP] = {};
#pragma unroll
        for (int i = 0; i < LINES / STEP; i++) {
            const int32_t k = k0 + (ALONG_K ? chunk * 8 : first + i * STEP);
            const int32_t n = item.n0 + (ALONG_K ? first + i * STEP : chunk * 8);
            if (k < p.k && n < p.n) { /* all eight exist or none */
                x[i] = read_codes(q, item.b, k, n);
            }
        }
#pragma unroll
        for (int i = 0; i < LINES / STEP; i++) {
            store_words(to + place_of_chunk<CHUNKS>(first + i * STEP, chunk),
                        widen_codes<KIND>(q, x[i], 0), widen_codes<KIND>(q, x[i], 1),
                        widen_codes<KIND>(q, x[i], 2), widen_codes<KIND>(q, x[i], 3));
        }
    } else {
#pragma unroll 1
        for (int line = first; line < LINES; line += S::threads / CHUNKS) {
            store_numbers<KIND>(to + place_of_chunk<CHUNKS>(line, chunk), [&](int i) {
                const int32_t k = k0 + (ALONG_K ? chunk * 8 + i : line);
                const int32_t n = item.n0 + (ALONG_K ? line : chunk * 8 + i);
                return k < p.k && n < p.n ? weight_number(p, item.b, k, n) : 0.0f;
            });
        }
    }
}

/* sum += a w for one step. */
template <int KIND, bool ALONG_K, class S>
GPU_INLINE void multiply_step(uint32_t a, uint32_t w, float (&sum)[S::products_m][S::products_n][4])
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int m = warp / S::warps_n * (S::products_m * 16);
    const int n = warp % S::warps_n * (S::products_n * 8);
#pragma unroll
    for (int i = 0; i < GEMM_STEP / 16; i++) {
        uint32_t rows[S::products_m][4];
#pragma unroll
        for (int x = 0; x < S::products_m; x++) {
            load4(rows[x], a + place_of_chunk<8>(m + x * 16 + (lane & 15), i * 2 + (lane >> 4)));
        }
#pragma unroll
        for (int y = 0; y < S::products_n; y += 2) {
            uint32_t columns[4]; /* W's columns of two products */
            if constexpr (ALONG_K) {
                const int line = n + y * 8 + (lane & 7) + (lane >> 4) * 8;
                load4(columns, w + place_of_chunk<8>(line, i * 2 + (lane >> 3 & 1)));
            } else {
                load4_transposed(columns, w + place_of_chunk<GEMM_TILE_COLUMNS / 8>(
                                                  i * 16 + (lane & 15), n / 8 + y + (lane >> 4)));
            }
#pragma unroll
            for (int x = 0; x < S::products_m; x++) {
                multiply<KIND>(sum[x][y], rows[x], columns[0], columns[1]);
                multiply<KIND>(sum[x][y + 1], rows[x], columns[2], columns[3]);
            }
        }
    }
}

/* Writes eight elements of each of four lanes, 16 bytes a lane. */
template <int KIND>
GPU_INLINE void write_wide(const gpu_gemm_params &p, int64_t row, bool real, int32_t n0,
                           const float (&x)[8])
{
    const int32_t n = n0 + (threadIdx.x & 3) * 8;
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        r[i] = pack2<KIND>(x[2 * i], x[2 * i + 1]);
    }
    transpose_4x4(r);
    if (real && n < p.n) {
        *(uint4 *)(p.out.data + (row + n) * 2) = make_uint4(r[0], r[1], r[2], r[3]);
    }
}

/* Writes an element of any type and strides. */
static __device__ __noinline__ void write_slowly(const gpu_gemm_params &p, int64_t row, int32_t n,
                                                 float x)
{
    if (n < p.n) {
        const int64_t at = row + n * p.out.column;
        number_store(p.out.data + at * number_bytes_of(p.out.dtype), p.out.dtype, 0, x);
    }
}

/* Writes the accumulators; four lanes have two of the 8 columns of a product each. */
template <int KIND, bool WIDE, class S>
GPU_INLINE void write_sums(const sm80_gemm_params &q, const gemm_item &item,
                           float (&sum)[S::products_m][S::products_n][4])
{
    const gpu_gemm_params &p = q.p;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int32_t m0 = item.m0 + warp / S::warps_n * (S::products_m * 16) + (lane >> 2);
    const int32_t n0 = item.n0 + warp % S::warps_n * (S::products_n * 8);
    const float scale = p.scale != nullptr ? p.scale[p.scale_per_batch ? item.b : 0] : 1.0f;
#pragma unroll
    for (int x = 0; x < S::products_m * 2; x++) { /* 8 rows */
        const int32_t m = m0 + x * 8;
        const int64_t row = item.b * p.out.batch + m * p.out.row;
#pragma unroll
        for (int y = 0; y < S::products_n; y += 4) {
            float numbers[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                numbers[i] = sum[x / 2][y + i / 2][x % 2 * 2 + i % 2] * scale;
            }
            if (WIDE || q.wide_out) {
                write_wide<KIND>(p, row, m < p.m, n0 + y * 8, numbers);
            } else if (m < p.m) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    write_slowly(p, row, n0 + (y + i / 2) * 8 + (lane & 3) * 2 + i % 2, numbers[i]);
                }
            }
        }
    }
}

/* Prefetches an item's weights to the L2, which earlier kernels may still write. */
template <bool ALONG_K, class S>
GPU_INLINE void fetch_weights(const gpu_gemm_params &p, const gemm_item &item)
{
    const int32_t columns = min(p.n - item.n0, GEMM_TILE_COLUMNS);
    const int32_t lines = ALONG_K ? columns : p.k, numbers = ALONG_K ? p.k : columns;
    const int32_t pieces = (numbers + 63) / 64; /* 128 bytes each */
    const int64_t apart = ALONG_K ? p.w.column : p.w.row;
    const char *from = p.w.data + (item.b * p.w.batch + item.n0 * (ALONG_K ? apart : 1)) * 2;
    for (int32_t i = threadIdx.x; i < lines * pieces; i += S::threads) {
        const int32_t line = i / pieces;
        asm volatile(
            "prefetch.global.L2 [%0];" ::"l"(from + line * apart * 2 + (i - line * pieces) * 128));
    }
}

template <int KIND, bool ALONG_K, bool WIDE, class S>
__global__ void __launch_bounds__(S::threads, !WIDE ? 2 : S::ctas)
    gemm_tiles(const __grid_constant__ sm80_gemm_params q)
{
    extern __shared__ __align__(128) char memory[];
    const gpu_gemm_params &p = q.p;
    const uint32_t stages = shared_address(memory);
    const int32_t row_tiles = (p.m + S::rows - 1) / S::rows;
    const int32_t column_tiles = (p.n + GEMM_TILE_COLUMNS - 1) / GEMM_TILE_COLUMNS;
    const int32_t steps = (p.k + GEMM_STEP - 1) / GEMM_STEP;
    const int64_t items = (int64_t)p.count * row_tiles * column_tiles;
    const auto item_of = [&](int64_t i) {
        const int32_t rest = (int32_t)(i % (row_tiles * column_tiles));
        return gemm_item{i / (row_tiles * column_tiles), rest / column_tiles * S::rows,
                         rest % column_tiles * GEMM_TILE_COLUMNS};
    };
    if (S::rows == 16 && p.k <= GEMM_FETCHED_K) {
        fetch_weights<ALONG_K, S>(p, item_of(blockIdx.x));
    }
    wait_for_earlier_kernels();
    let_later_kernels_begin();
#pragma unroll 1
    for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
        const gemm_item item = item_of(i);
        const gemm_source a = source_of<8, S::threads>(p.a, item.b, p.a.row, item.m0);
        const gemm_source w = ALONG_K ? source_of<8, S::threads>(p.w, item.b, p.w.column, item.n0)
                                      : source_of<16, S::threads>(p.w, item.b, p.w.row, 0, item.n0);
        float sum[S::products_m][S::products_n][4] = {};
        auto load = [&](int32_t step) {
            if (step < steps) {
                const uint32_t to = stages + step % GEMM_STAGES * S::stage_bytes;
                load_a<KIND, WIDE, S>(q, item, a, step * GEMM_STEP, to);
                load_w<KIND, ALONG_K, WIDE, S>(q, item, w, step * GEMM_STEP, to + S::a_bytes);
            }
            commit_copies();
        };
        for (int32_t step = 0; step < GEMM_STAGES - 1; step++) {
            load(step);
        }
#pragma unroll 1
        for (int32_t step = 0; step < steps; step++) {
            wait_for_copies_but<GEMM_STAGES - 2>();
            __syncthreads(); /* the stage is complete, and all warps have read the previous one */
            load(step + GEMM_STAGES - 1);
            const uint32_t at = stages + step % GEMM_STAGES * S::stage_bytes;
            multiply_step<KIND, ALONG_K, S>(at, at + S::a_bytes, sum);
        }
        write_sums<KIND, WIDE, S>(q, item, sum);
        __syncthreads(); /* all warps have read the last stages */
    }
}

#endif
