/* SPDX-License-Identifier: Apache-2.0 */
/* Shared memory of a prefill CTA, and the copies of its tiles. Each warp copies its share of a
 * tile's keys. */
#ifndef CUDA_FLASH_SM80_PREFILL_TILES_CUH
#define CUDA_FLASH_SM80_PREFILL_TILES_CUH

#include "cuda_flash/decode/sm80_tile.cuh"
#include "sm80_prefill.h"

template <int D, int TILES, int ROWS> struct prefill_shape {
    static constexpr int size = D, items = ROWS;             /* dims, rows of an item */
    static constexpr int tile = SM80_PREFILL_KEYS(D, TILES); /* keys of a tile */
    static constexpr bool pairs = TILES != SM80_PREFILL_NARROW;
    /* The kind of 8-bit keys, which become f16 in shared memory; 0: keys have 16 bits. */
    static constexpr int codes = TILES == SM80_PREFILL_E4M3   ? KIND_E4M3
                                 : TILES == SM80_PREFILL_E5M2 ? KIND_E5M2
                                                              : 0;
    /* tiles of 16 rows in a warp */
    static constexpr int blocks = D <= 128 && ROWS == SM80_PREFILL_ROWS ? 2 : 1;
    static constexpr int rows = 16 * blocks; /* rows of a warp */
    static constexpr int warps = ROWS / rows, threads = 32 * warps;
    static constexpr int copied = tile / warps; /* rows of a tile that a warp copies */
    /* A lane copies a piece of 16 bytes of every step-th row, all in one stretch. */
    static constexpr int chunks = D * (codes ? 1 : 2) / 16; /* pieces of a row */
    static constexpr int lane_rows = 32 / chunks;           /* rows of one instruction */
    static constexpr int stretches =
        copied > SM80_PREFILL_STRETCH ? copied / SM80_PREFILL_STRETCH : 1;
    static constexpr int step = lane_rows / stretches, copies = copied / lane_rows;
    static_assert(step == SM80_PREFILL_STEP(D, TILES), "the host counts on it");
    static_assert(stretches * SM80_PREFILL_STRETCH >= copied, "a lane has one stretch");
    /* Copies of the next tile are issued between the products of this one, `group` rows of K and V
     * after every other 16 dims. */
    static constexpr bool spreads = pairs && !codes;
    static constexpr int group = D <= 128 ? copies : 2;
    static constexpr int half = tile * D * 2; /* bytes of K or V of a tile */
    static constexpr int q_bytes = ROWS * D * 2;
    static constexpr int smem = SM80_PREFILL_SMEM(D, TILES, ROWS);
    static constexpr int most = D <= 128 ? 2 : 1; /* CTAs of a multiprocessor, by registers */
    static constexpr int ctas = codes && most * (smem + 1024) > SM80_SMEM_OF_SM ? 1 : most;
};

/* Followed by the tiles. */
template <class S> struct prefill_storage {
    alignas(128) char q[S::q_bytes];
    int4 bounds[S::warps]; /* bounds_of_warp */
    gpu_run run;
    const char *rows[2];  /* K and V of the run's head */
    const int32_t *table; /* the request's row of the block table */
    int32_t inner[2];     /* the first and last key that all rows of the item see */
    int32_t taken;
};

template <class S> GPU_INLINE char *tile_at(prefill_storage<S> &smem, int tile, bool values)
{
    static_assert(sizeof smem <= S::q_bytes + SM80_PREFILL_FIXED, "room for it");
    const int stage = S::pairs && !S::codes ? tile & 1 : 0;
    return (char *)&smem + S::q_bytes + SM80_PREFILL_FIXED + (2 * stage + values) * S::half;
}

/* The codes of the next tile's keys or values. */
template <class S> GPU_INLINE char *codes_at(prefill_storage<S> &smem, bool values)
{
    return (char *)&smem + S::q_bytes + SM80_PREFILL_FIXED + 2 * S::half + values * (S::half / 2);
}

/* The first of a tile's rows that the lane copies. */
template <class S> GPU_INLINE int first_copied()
{
    const int hi = (threadIdx.x & 31) / S::chunks;
    return (threadIdx.x >> 5) * S::copied + hi / S::step * SM80_PREFILL_STRETCH + hi % S::step;
}

/* Where in K or V of a stage the lane's piece of its i-th row lies; `to`: that of its first row.
 * Codes are in the order of the threads that copy and widen them. */
template <class S> GPU_INLINE uint32_t place_of_copy(uint32_t to, int i)
{
    return S::codes ? to + (threadIdx.x + i * S::threads) * 16
                    : (to ^ ((i * S::step & 7) << 4)) + i * S::step * 128;
}

/* from + i * step in one instruction. */
GPU_INLINE const char *further_row(const char *from, int32_t step, int i)
{
    const char *v;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(v) : "r"(step), "r"(i), "l"(from));
    return v;
}

/* As copy16, of 16 bytes if `copies`. */
GPU_INLINE void copy16_if(bool copies, uint32_t to, const char *from)
{
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0;\n"
                 "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16; }" ::"r"(to),
                 "l"(from), "r"((int)copies)
                 : "memory");
}

/* The location of a lane's key: page, its column in the block table, and slot. */
struct key_place {
    int32_t column, slot, page;
};

/* Locates `key`, or moves a place by a tile to it (over codes registers are scarce, so each key is
 * located). The page is used one tile later, so this does not wait for it. Columns past the
 * request's last are not read. */
template <class S>
GPU_INLINE void move_place(const sm80_prefill_params &a, const prefill_storage<S> &smem,
                           bool is_first, int32_t key, key_place &at)
{
    const bool paged = a.p.problem.paged;
    if (is_first || S::codes) {
        at.column = paged ? key / a.page_keys : 0;
        at.slot = paged ? key - at.column * a.page_keys : key + smem.run.row_tile.key_start;
    } else {
        at.column += a.tile_pages;
        at.slot += a.tile_slots;
        if (at.slot >= a.page_keys) {
            at.slot -= a.page_keys;
            at.column++;
        }
    }
    at.page = paged && key < smem.run.row_tile.k1 ? __ldg(smem.table + at.column) : 0;
}

/* The address of the lane's piece of K or V. */
template <class S>
GPU_INLINE const char *row_of_place(const sm80_prefill_params &a, const prefill_storage<S> &smem,
                                    const key_place &at, bool values)
{
    const sm80_prefill_strides &strides = a.strides[values];
    const int chunk = threadIdx.x % S::chunks;
    return smem.rows[values] +
           ((int64_t)(at.page * strides.page + at.slot * strides.slot + chunk) << 4);
}

/* Copies the warp's rows of K or V of a tile, the lane's first at `key`. Rows that no query sees
 * and dims past the head size become zero. */
template <class S>
GPU_INLINE void copy_rows(const sm80_prefill_params &a, const prefill_storage<S> &smem,
                          const key_place &at, int32_t key, bool values, uint32_t to)
{
    const uint32_t k0 = smem.run.row_tile.k0, seen = smem.run.row_tile.k1 - k0;
    const char *own = row_of_place(a, smem, at, values);
    if (a.has_stretches) {
#pragma unroll
        for (int i = 0; i < S::copies; i++) {
            copy16(place_of_copy<S>(to, i), further_row(own, a.strides[values].step, i),
                   key + i * S::step - k0 < seen ? 16 : 0);
        }
        return;
    }
    /* The lane has located the row lane % copied of its warp's. */
    const int chunk = threadIdx.x % S::chunks, first_dim = chunk * (S::codes ? 16 : 8);
    const bool exists = first_dim < (values ? a.p.problem.head_size_v : a.p.problem.head_size);
#pragma unroll 1
    for (int i = 0; i < S::copies; i++) {
        const int row = first_copied<S>() % S::copied + i * S::step;
        const char *from = (const char *)__shfl_sync(
            0xffffffffu, (unsigned long long)(uintptr_t)(own - chunk * 16), row);
        const bool real = __shfl_sync(0xffffffffu, key - k0 < seen, row) && exists;
        copy16(place_of_copy<S>(to, i), real ? from + chunk * 16 : smem.rows[values],
               real ? 16 : 0);
    }
}

/* The lane's own one of its warp's rows: those with the same lane >> 2 are 8 apart, as in acc_s. */
template <int BLOCKS> GPU_INLINE int own_row()
{
    const int lane = threadIdx.x & 31;
    return (lane >> 2) + 8 * (lane & (2 * BLOCKS - 1));
}

/* The lane that has row `row` of its warp. */
GPU_INLINE int lane_of_row(int row)
{
    return (row & 7) * 4 + (row >> 3);
}

/* Copies the warp's rows of the queries. Rows past the last and dims past the head size become
 * zero. */
template <int D, int BLOCKS>
GPU_INLINE void copy_queries(const gpu_params &p, const gpu_run &run, int first_row, uint32_t to)
{
    constexpr int chunks = D / 8, step = 32 / chunks;
    const int lane = threadIdx.x & 31, chunk = lane % chunks;
    const int32_t rest = run.row_tile.num_rows - first_row;
    const int32_t at =
        run.row_tile.first_row + (own_row<BLOCKS>() < rest ? first_row + own_row<BLOCKS>() : 0);
    const int32_t token = at / p.problem.group;
    const char *own =
        p.q.data + (int64_t)(run.row_tile.query_start + token) * p.q.row +
        (int64_t)(run.head * p.problem.group + at - token * p.problem.group) * p.q.head;
    const bool whole = chunk * 8 < p.problem.head_size;
#pragma unroll
    for (int i = 0; i < 16 * BLOCKS; i += step) {
        const int row = i + lane / chunks;
        const char *from = (const char *)__shfl_sync(
            0xffffffffu, (unsigned long long)(uintptr_t)own, lane_of_row(row));
        const bool real = row < rest && whole;
        copy16(to + (row * chunks + swizzle<chunks>(row, chunk)) * 16,
               from + (real ? chunk * 16 : 0), real ? 16 : 0);
    }
}

/* Makes f16 of the codes that the thread has copied. */
template <class S> GPU_INLINE void widen_rows(const char *codes, char *tile)
{
    const int chunk = threadIdx.x % S::chunks * 2;
#pragma unroll
    for (int i = 0; i < S::copies; i++) {
        const int row = first_copied<S>() + i * S::step;
        const uint4 x = *(const uint4 *)(codes + (i * S::threads + threadIdx.x) * 16);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
        uint32_t y[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            y[j] = widen<S::codes>(words[j / 2] >> j % 2 * 16 & 0xffff);
        }
        *(uint4 *)(tile + place_of<S::size / 8, S::tile>(row, chunk)) =
            make_uint4(y[0], y[1], y[2], y[3]);
        *(uint4 *)(tile + place_of<S::size / 8, S::tile>(row, chunk + 1)) =
            make_uint4(y[4], y[5], y[6], y[7]);
    }
}

/* Makes f16 of the warp's bf16 queries. */
template <int D, int ROWS> GPU_INLINE void convert_queries(char *own)
{
#pragma unroll 4
    for (int i = threadIdx.x & 31; i < ROWS * D / 8; i += 32) {
        uint4 *at = (uint4 *)(own + i * 16), x = *at;
        *at = make_uint4(bf16_to_f16(x.x), bf16_to_f16(x.y), bf16_to_f16(x.z), bf16_to_f16(x.w));
    }
}

#endif
