/* SPDX-License-Identifier: Apache-2.0 */
/* Shared memory of a prefill CTA, and the copies of its tiles. Each warp copies its share of a
 * tile's keys. */
#ifndef CUDA_FLASH_SM80_PREFILL_TILES_CUH
#define CUDA_FLASH_SM80_PREFILL_TILES_CUH

#include "cuda_flash/decode/sm80_tile.cuh"
#include "sm80_prefill.h"

template <int D, int TILES> struct prefill_shape {
    static constexpr int tile = SM80_PREFILL_KEYS(D, TILES); /* keys of a tile */
    static constexpr bool pairs = TILES != SM80_PREFILL_NARROW;
    /* The kind of 8-bit keys, which become f16 in shared memory; 0: keys have 16 bits. */
    static constexpr int codes = TILES == SM80_PREFILL_E4M3   ? KIND_E4M3
                                 : TILES == SM80_PREFILL_E5M2 ? KIND_E5M2
                                                              : 0;
    static constexpr int blocks = D <= 128 ? 2 : 1; /* tiles of 16 rows in a warp */
    static constexpr int rows = 16 * blocks;        /* rows of a warp */
    static constexpr int warps = SM80_PREFILL_ROWS / rows, threads = 32 * warps;
    static constexpr int chunks = D / 8;        /* pieces of 16 bytes in a row */
    static constexpr int copied = tile / warps; /* rows of a tile that a warp copies */
    static constexpr int half = tile * D * 2;   /* bytes of K or V of a tile */
    static constexpr int q_bytes = SM80_PREFILL_ROWS * D * 2;
    static constexpr int smem = SM80_PREFILL_SMEM(D, TILES);
    static constexpr int most = D <= 128 ? 2 : 1; /* CTAs of a multiprocessor, by registers */
    static constexpr int ctas = codes && most * (smem + 1024) > SM80_SMEM_OF_SM ? 1 : most;
};

/* Followed by the tiles. */
template <int D, int TILES> struct prefill_storage {
    using S = prefill_shape<D, TILES>;
    alignas(128) char q[S::q_bytes];
    int4 bounds[S::warps]; /* bounds_of_warp */
    gpu_run run;
    int32_t taken;
};

template <int D, int TILES>
GPU_INLINE char *tile_at(prefill_storage<D, TILES> &smem, int tile, bool values)
{
    using S = prefill_shape<D, TILES>;
    static_assert(sizeof smem <= S::q_bytes + SM80_PREFILL_FIXED, "room for it");
    const int stage = S::pairs && !S::codes ? tile & 1 : 0;
    return (char *)&smem + S::q_bytes + SM80_PREFILL_FIXED + (2 * stage + values) * S::half;
}

/* The codes of the next tile's keys or values. */
template <int D, int TILES> GPU_INLINE char *codes_at(prefill_storage<D, TILES> &smem, bool values)
{
    using S = prefill_shape<D, TILES>;
    return (char *)&smem + S::q_bytes + SM80_PREFILL_FIXED + 2 * S::half + values * (S::half / 2);
}

/* The location of a lane's key: block and slot; block -1: not read. */
struct key_place {
    int32_t block, slot;
};

/* Locates the key of the lane among those of a tile that its warp copies. The block is used one
 * tile later, so this does not wait for it. */
template <int D, int TILES>
GPU_INLINE key_place place_key(const gpu_problem &p, const gpu_row_tile &items, int32_t tile)
{
    using S = prefill_shape<D, TILES>;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int32_t base = (items.k0 & ~(S::tile - 1)) + tile * S::tile;
    const int32_t key = base + warp * S::copied + (lane & (S::copied - 1));
    key_place at = {-1, 0};
    if (key >= items.k0 && key < items.k1) {
        const int32_t index = p.paged ? key / p.block_size : 0;
        at.block = p.paged ? p.block_table[items.table + index] : items.key_start + key;
        at.slot = p.paged ? key - index * p.block_size : 0;
    }
    return at;
}

/* Copies the warp's rows of K or V of a tile. Rows that no query sees and dims past the head size
 * become zero. `together`: all rows are read, and those of a stretch have a constant stride. Codes
 * are in the order of the threads that copy and widen them. */
template <int D, int TILES>
GPU_INLINE void copy_rows(const gpu_problem &p, const gpu_cache &cache, int32_t head_size,
                          int32_t head, const key_place &at, bool together, uint32_t to)
{
    using S = prefill_shape<D, TILES>;
    constexpr int element = S::codes ? 1 : 2, chunks = D * element / 16;
    constexpr int rows = 32 / chunks; /* rows of one instruction */
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int hi = lane / chunks, chunk = lane % chunks, first = warp * S::copied + hi;
    const char *from = cache.data + head * cache.head + chunk * 16;
    const int32_t offset = /* in 16 bytes */
        at.block < 0 ? -1 : (int32_t)((at.block * cache.block + at.slot * cache.slot) >> 4);
    to += S::codes ? threadIdx.x * 16
                   : (chunk >> 3) * S::tile * 128 + first * 128 + (((chunk ^ first) & 7) << 4);
    auto place = [&](int i) {
        return S::codes ? to + i / rows * S::threads * 16 : (to ^ ((i & 7) << 4)) + i * 128;
    };
    if (together) {
        constexpr int stretch = S::copied < SM80_PREFILL_STRETCH ? S::copied : SM80_PREFILL_STRETCH;
        static_assert(SM80_PREFILL_STRETCH % stretch == 0 && S::copied % stretch == 0,
                      "stretches are in one page");
        const int64_t step = p.paged ? cache.slot : cache.block;
        from += hi * step;
#pragma unroll
        for (int first_row = 0; first_row < S::copied; first_row += stretch) {
            const char *row = from + ((int64_t)__shfl_sync(0xffffffffu, offset, first_row) << 4);
#pragma unroll
            for (int i = first_row; i < first_row + stretch; i += rows, row += rows * step) {
                copy16(place(i), row, 16);
            }
        }
        return;
    }
#pragma unroll 2
    for (int i = 0; i < S::copied; i += rows) {
        const int32_t found = __shfl_sync(0xffffffffu, offset, i + hi);
        const bool real = found >= 0 && chunk * (16 / element) < head_size;
        copy16(place(i), real ? from + ((int64_t)found << 4) : cache.data, real ? 16 : 0);
    }
}

/* Makes f16 of the codes that the thread has copied. */
template <int D, int TILES> GPU_INLINE void widen_rows(const char *codes, char *tile)
{
    using S = prefill_shape<D, TILES>;
    constexpr int chunks = D / 16, rows = 32 / chunks;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, chunk = lane % chunks * 2;
#pragma unroll
    for (int i = 0; i < S::copied; i += rows) {
        const int row = warp * S::copied + i + lane / chunks;
        const uint4 x = *(const uint4 *)(codes + (i / rows * S::threads + threadIdx.x) * 16);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
        uint32_t y[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            y[j] = widen<S::codes>(words[j / 2] >> j % 2 * 16 & 0xffff);
        }
        *(uint4 *)(tile + place_of<S::chunks, S::tile>(row, chunk)) =
            make_uint4(y[0], y[1], y[2], y[3]);
        *(uint4 *)(tile + place_of<S::chunks, S::tile>(row, chunk + 1)) =
            make_uint4(y[4], y[5], y[6], y[7]);
    }
}

/* Makes f16 of the bf16 queries that the thread has copied. */
template <int D, int THREADS> GPU_INLINE void convert_queries(char *sq)
{
#pragma unroll 4
    for (int i = threadIdx.x; i < SM80_PREFILL_ROWS * D / 8; i += THREADS) {
        const int row = i / (D / 8);
        uint4 *at = (uint4 *)(sq + (row * (D / 8) + swizzle<D / 8>(row, i % (D / 8))) * 16),
              x = *at;
        *at = make_uint4(bf16_to_f16(x.x), bf16_to_f16(x.y), bf16_to_f16(x.z), bf16_to_f16(x.w));
    }
}

#endif
