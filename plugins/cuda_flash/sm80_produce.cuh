/* SPDX-License-Identifier: Apache-2.0 */
/* The last two warps of an attend CTA: both walk the CTA's segments and copy into shared memory,
 * some stages ahead of the four warps that compute, one the queries and keys, the other the values.
 */
#ifndef CUDA_FLASH_SM80_PRODUCE_CUH
#define CUDA_FLASH_SM80_PRODUCE_CUH

#include "gpu/device/rows.h"
#include "gpu/device/softmax.h"
#include "gpu/device/visible.h"
#include "ptx/ptx.cuh"
#include "sm80_attend.h"

#define NO_RUN (-1)

/* The tiles of one item in one segment: what the four warps compute without looking up. */
struct gpu_run {
    gpu_row_tile row_tile;
    int32_t head, tile, count;    /* tiles tile .. tile + count - 1 of the item */
    int32_t segment, first, last; /* segments that share the item */
    int32_t item, reserved;       /* item: row_tile x KV heads + head */
};

template <int KIND, int D, bool SPLIT> struct shape {
    static constexpr bool bytes = KIND >= KIND_E4M3;
    static constexpr int element = bytes ? 1 : 2;
    static constexpr int chunks = D * element / 16; /* 16-byte pieces of a key's row */
    static constexpr int tile = SPLIT && bytes && D <= 128 ? SM80_NARROW_TILE : SM80_TILE;
    static constexpr int half = tile * D * element;
    /* rows' scales; later 4 warps' m and l */
    static constexpr int tail = SPLIT || bytes ? 1024 : 0;
    static constexpr int stage = 2 * half + tail;
    static constexpr int rows = SPLIT ? 16 : 64;
    static constexpr int q_bytes = rows * D * 2;
    static constexpr int q_buffers = SPLIT ? 2 : 1;
    static constexpr int ctas = D > 128 ? 1 : 2; /* of a multiprocessor, for the registers */
};

/* The stages follow it in memory. */
template <int KIND, int D, bool SPLIT> struct shared {
    using S = shape<KIND, D, SPLIT>;
    alignas(128) char q[S::q_buffers][S::q_bytes];
    gpu_run runs[SM80_MAX_STAGES + 1]; /* a stage holds a tile of one run */
    uint64_t full[SM80_MAX_STAGES], empty[SM80_MAX_STAGES], q_empty[S::q_buffers];
    int32_t run_of_stage[SM80_MAX_STAGES];
    int32_t last_one, taken[2];
};

template <int KIND, int D, bool SPLIT>
static __device__ __forceinline__ char *stage_at(shared<KIND, D, SPLIT> &mine, int stage)
{
    using S = shape<KIND, D, SPLIT>;
    static_assert(sizeof mine <= S::q_buffers * S::q_bytes + SM80_FIXED_SMEM, "room for it");
    return (char *)&mine + S::q_buffers * S::q_bytes + SM80_FIXED_SMEM + stage * S::stage;
}

/* Neighbouring rows put the same chunk into different banks. */
template <int CHUNKS> static __device__ __forceinline__ int swizzle(int row, int chunk)
{
    return CHUNKS >= 8 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
}

/* Byte of a chunk of a tile: columns of 128 bytes, as TMA swizzles them. */
template <int CHUNKS, int TILE> static __device__ __forceinline__ int place_of(int row, int chunk)
{
    return CHUNKS >= 8 ? (chunk >> 3) * TILE * 128 + row * 128 + ((chunk & 7) ^ (row & 7)) * 16
                       : row * CHUNKS * 16 + swizzle<CHUNKS>(row, chunk) * 16;
}

/* Where a tile's keys lie: in `block` from `slot` on, for the box of this lane or for each of its
 * keys lane, lane + 32 and so on. */
template <int TILE> struct tile_place {
    int32_t block[TILE / 32], slot[TILE / 32];
    int32_t low, high; /* keys of the tile that are read: low .. high - 1 */
};

/* The entries are used a tile later, so that they are not waited for here. */
template <int TILE>
static __device__ __forceinline__ tile_place<TILE>
place_tile(const sm80_params &a, const gpu_run &run, int32_t tile, int lane, int boxes_of_page)
{
    const gpu_problem &p = a.p.problem;
    tile_place<TILE> at;
    int32_t base = (run.row_tile.k0 & ~(TILE - 1)) + tile * TILE;
    at.low = run.row_tile.k0 - base;
    at.high = run.row_tile.k1 - base;
    if (a.mapped) {
        int32_t rows = a.box_rows, key = lane / boxes_of_page * rows;
        at.block[0] = -1;
        at.slot[0] = 0;
        if (key < TILE && key < at.high && key + rows > at.low) {
            int32_t index = p.paged ? (base + key) / p.block_size : 0;
            at.slot[0] = base + key - index * p.block_size + run.row_tile.key_start;
            at.block[0] = p.paged ? p.block_table[run.row_tile.table + index] : 0;
        }
        return at;
    }
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
        int32_t key = lane + 32 * i;
        at.block[i] = at.slot[i] = 0;
        if (!p.paged) {
            at.block[i] = run.row_tile.key_start + base + key;
        } else if (key >= at.low && key < at.high) {
            int32_t index = (base + key) / p.block_size;
            at.slot[i] = base + key - index * p.block_size;
            at.block[i] = p.block_table[run.row_tile.table + index];
        }
    }
    return at;
}

/* One of K and V of a tile by TMA: a box per block and column of 128 bytes, each from a lane. Slots
 * of a block that no query sees come along; blocks of them do not. */
template <int KIND, int D, int TILE>
static __device__ __forceinline__ void copy_boxes(const sm80_params &a, const tensor_map &map,
                                                  int32_t head, const tile_place<TILE> &at,
                                                  uint32_t to, uint32_t barrier, int lane)
{
    using S = shape<KIND, D, true>;
    constexpr int columns = S::chunks >= 8 ? S::chunks / 8 : 1;
    constexpr int row_bytes = S::chunks >= 8 ? 128 : S::chunks * 16;
    int32_t rows = a.box_rows, page = lane / columns, column = lane - page * columns;
    bool mine = at.block[0] >= 0;
    int count = __popc(__ballot_sync(0xffffffffu, mine));
    if (lane == 0) {
        barrier_expect(barrier, count * rows * row_bytes);
    }
    __syncwarp();
    if (mine) {
        copy_box(to + column * TILE * row_bytes + page * rows * row_bytes, &map,
                 column * row_bytes / S::element, at.slot[0], head, at.block[0], barrier);
    }
}

/* One of K and V of a tile. Rows that no query sees, and dims past the head size, become zero. A
 * stretch is 16 rows that lie one stride apart: all block sizes that 16 divides. */
template <int KIND, int D, int TILE>
static __device__ __forceinline__ void copy_half(const gpu_params &p, const gpu_cache &cache,
                                                 int32_t head_size, int32_t head,
                                                 const tile_place<TILE> &at, uint32_t to, int lane)
{
    using S = shape<KIND, D, true>;
    constexpr int rows = 32 / S::chunks; /* that one instruction copies */
    const char *base = cache.data + head * cache.head;
    const int hi = lane / S::chunks, chunk = lane % S::chunks;
    int bytes = head_size * S::element;
    int32_t offset[TILE / 32]; /* in 16 bytes */
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
        offset[i] = (int32_t)((at.block[i] * cache.block + at.slot[i] * cache.slot) >> 4);
    }
    bool straight = !p.problem.paged || p.problem.block_size % 16 == 0;
    if (straight && at.low <= 0 && at.high >= TILE && bytes == D * S::element) {
        int64_t step = p.problem.paged ? cache.slot : cache.block;
        base += hi * step + chunk * 16;
#pragma unroll
        for (int stretch = 0; stretch < TILE / 16; stretch++) {
            int32_t found = __shfl_sync(0xffffffffu, offset[stretch / 2], (stretch & 1) * 16);
            const char *from = base + ((int64_t)found << 4);
#pragma unroll
            for (int i = 0; i < 16 / rows; i++) {
                copy16(to + place_of<S::chunks, TILE>(stretch * 16 + i * rows + hi, chunk),
                       from + i * rows * step, 16);
            }
        }
        return;
    }
#pragma unroll
    for (int part = 0; part < TILE / 32; part++) {
#pragma unroll 4
        for (int i = 0; i < 32 / rows; i++) {
            int row = part * 32 + i * rows + hi;
            int32_t found = __shfl_sync(0xffffffffu, offset[part], row & 31);
            bool real = row >= at.low && row < at.high && chunk * 16 < bytes;
            const char *from = base + (real ? ((int64_t)found << 4) + chunk * 16 : 0);
            copy16(to + place_of<S::chunks, TILE>(row, chunk), from, real ? 16 : 0);
        }
    }
}

/* Rows' scales: the keys' places are looked up here, since boxes know blocks alone. */
template <int TILE>
static __device__ __forceinline__ void copy_scales(const gpu_params &p, const gpu_cache &cache,
                                                   const gpu_run &run, int32_t tile, uint32_t to,
                                                   int lane)
{
    if (cache.form != GPU_ROW_SCALED) {
        return;
    }
    int32_t base = (run.row_tile.k0 & ~(TILE - 1)) + tile * TILE;
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
        int32_t key = base + lane + 32 * i, index = key / p.problem.block_size;
        bool real = key >= run.row_tile.k0 && key < run.row_tile.k1;
        int64_t block = real ? p.problem.block_table[run.row_tile.table + index] : 0;
        int64_t slot = real ? key - index * p.problem.block_size : 0;
        copy4(to + (lane + 32 * i) * 4, row_scale_at(cache, block, slot, run.head), real ? 4 : 0);
    }
}

/* Raw 16-bit queries of a run; rows past the last become zero. */
template <int D, int ROWS>
static __device__ __forceinline__ void copy_query(const gpu_params &p, const gpu_run &run,
                                                  uint32_t to, int lane)
{
#pragma unroll 4
    for (int i = lane; i < ROWS * (D / 8); i += 32) {
        int row = i / (D / 8), chunk = i % (D / 8);
        bool real = row < run.row_tile.num_rows && chunk * 8 < p.problem.head_size;
        int32_t at = run.row_tile.first_row + (real ? row : 0), token = at / p.problem.group;
        const char *from =
            p.q.data + (int64_t)(run.row_tile.query_start + token) * p.q.row +
            (int64_t)(run.head * p.problem.group + at - token * p.problem.group) * p.q.head;
        copy16(to + (row * (D / 8) + swizzle<D / 8>(row, chunk)) * 16,
               from + (real ? chunk * 16 : 0), real ? 16 : 0);
    }
}

template <int KIND, int D, bool SPLIT> struct producer {
    using S = shape<KIND, D, SPLIT>;
    const sm80_params &a;
    const gpu_params &p;
    shared<KIND, D, SPLIT> &mine;
    const bool values; /* which of the two warps this is */
    const int lane;
    int stage = 0, phase = 0, run_slot = 0, q_slot = 0, q_phase = 0;

    __device__ producer(const sm80_params &params, shared<KIND, D, SPLIT> &memory, int thread)
        : a(params), p(params.p), mine(memory), values(thread >= 32), lane(thread & 31)
    {
    }

    __device__ __forceinline__ void next_stage()
    {
        stage++;
        if (stage == a.stages) {
            stage = 0;
            phase ^= 1;
        }
    }

    /* All 64 lanes' copies and the first's ordinary stores: 65 arrivals. */
    __device__ __forceinline__ void commit(int32_t run)
    {
        if (!values && lane == 0) {
            mine.run_of_stage[stage] = run;
            barrier_arrive(shared_address(&mine.full[stage]));
        }
        barrier_arrive_copies(shared_address(&mine.full[stage]));
        next_stage();
    }

    __device__ __forceinline__ void copy_run(const gpu_run &run)
    {
        constexpr int columns = S::chunks >= 8 ? S::chunks / 8 : 1;
        tile_place<S::tile> at = place_tile<S::tile>(a, run, run.tile, lane, columns);
        for (int32_t i = 0; i < run.count; i++) {
            barrier_wait(shared_address(&mine.empty[stage]), phase ^ 1);
            uint32_t to = shared_address(stage_at(mine, stage));
            const gpu_cache &cache = values ? p.v : p.k;
            if (S::bytes) {
                copy_scales<S::tile>(p, cache, run, run.tile + i,
                                     to + 2 * S::half + (values ? S::tile * 4 : 0), lane);
            }
            to += values ? S::half : 0;
            if (a.mapped) {
                copy_boxes<KIND, D, S::tile>(a, values ? a.v_map : a.k_map, run.head, at, to,
                                             shared_address(&mine.full[stage]), lane);
            } else {
                copy_half<KIND, D, S::tile>(p, cache,
                                            values ? p.problem.head_size_v : p.problem.head_size,
                                            run.head, at, to, lane);
            }
            if (i == 0 && !values) { /* a stage is free, so this run's place is */
                if (lane == 0) {
                    mine.runs[run_slot] = run;
                }
                barrier_wait(shared_address(&mine.q_empty[q_slot]), q_phase ^ 1);
                copy_query<D, S::rows>(p, run, shared_address(mine.q[q_slot]), lane);
                q_slot++;
                if (q_slot == S::q_buffers) {
                    q_slot = 0;
                    q_phase ^= 1;
                }
            }
            commit(run_slot);
            if (i + 1 < run.count) {
                at = place_tile<S::tile>(a, run, run.tile + i + 1, lane, columns);
            }
        }
        run_slot = run_slot == SM80_MAX_STAGES ? 0 : run_slot + 1;
    }

    __device__ __forceinline__ void copy_segment(const gpu_segment &segment)
    {
        int32_t row_tile = segment.row_tile_index, t = segment.begin;
        gpu_run run;
        run.row_tile = segment.row_tile;
        run.segment = segment.index;
        while (t < segment.end) {
            int32_t within = t - run.row_tile.start;
            if (within >= run.row_tile.num_tiles * p.problem.num_kv_heads) {
                row_tile++;
                run.row_tile = p.schedule.row_tiles[row_tile];
                continue;
            }
            run.head = within / run.row_tile.num_tiles;
            run.tile = within - run.head * run.row_tile.num_tiles;
            run.count = min(run.row_tile.num_tiles - run.tile, segment.end - t);
            run.item = row_tile * p.problem.num_kv_heads + run.head;
            run.first = run.tile > 0 ? segment.first : segment.index;
            run.last = run.tile + run.count < run.row_tile.num_tiles ? segment.last : segment.index;
            copy_run(run);
            t += run.count;
        }
    }

    /* The first segment is the CTA's own; further ones are taken as CTAs become free, since not all
     * multiprocessors read equally fast. Who takes the last number puts the counter back. One warp
     * takes, one segment ahead, and tells the other. */
    __device__ __forceinline__ void work()
    {
        gpu_segment segment =
            p.schedule.segments[blockIdx.x]; /* there is room for one of each CTA */
        int32_t segments = p.schedule.header->segments, index = blockIdx.x, taken = 0, turn = 0;
        bool shares = segments > (int32_t)gridDim.x;
        if (shares && !values && lane == 0) {
            taken = atomicAdd(&p.schedule.header->taken, 1);
        }
        while (index < segments) {
            copy_segment(segment);
            if (!shares) {
                break;
            }
            if (!values && lane == 0) {
                mine.taken[turn] = taken;
                if (taken == segments - 1) {
                    p.schedule.header->taken = 0;
                }
            }
            barrier_producers(); /* the number is there */
            index = (int32_t)gridDim.x + mine.taken[turn];
            turn ^= 1; /* read by both before it is written again: a barrier lies between */
            if (index >= segments) {
                break;
            }
            if (!values && lane == 0) {
                taken = atomicAdd(&p.schedule.header->taken, 1);
            }
            segment = p.schedule.segments[index];
        }
        barrier_wait(shared_address(&mine.empty[stage]), phase ^ 1);
        commit(NO_RUN);
    }
};

#endif
