/* SPDX-License-Identifier: Apache-2.0 */
/* The last two warps of an attend CTA: both walk the CTA's segments and copy into shared memory, some
 * stages ahead of the four warps that compute, one the queries and keys, the other the values. */
#ifndef CUDA_FLASH_PRODUCE_CUH
#define CUDA_FLASH_PRODUCE_CUH

#include "ptx.cuh"
#include "rows.cuh"
#include "visible.cuh"

#define NO_RUN (-1)

/* The tiles of one item in one segment: what the four warps compute without looking up. */
struct flash_run {
    flash_pair pair;
    int32_t head, tile, count;  /* tiles tile .. tile + count - 1 of the item */
    int32_t segment, first, last; /* segments that share the item */
    int32_t item, reserved;       /* item: pair x KV heads + head */
};

template <int KIND, int D, bool SPLIT> struct shape {
    static constexpr bool bytes = KIND >= KIND_E4M3;
    static constexpr int element = bytes ? 1 : 2;
    static constexpr int chunks = D * element / 16; /* 16-byte pieces of a key's row */
    static constexpr int half = FLASH_TILE * D * element;
    static constexpr int tail = SPLIT || bytes ? 512 : 0; /* rows' scales; later 4 warps' m and l */
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
    flash_run runs[FLASH_MAX_STAGES + 1]; /* a stage holds a tile of one run */
    uint64_t full[FLASH_MAX_STAGES], empty[FLASH_MAX_STAGES], q_empty[S::q_buffers];
    int32_t run_of_stage[FLASH_MAX_STAGES];
    int32_t last_one, taken[2];
};

template <int KIND, int D, bool SPLIT>
static __device__ __forceinline__ char *stage_at(shared<KIND, D, SPLIT> &mine, int stage)
{
    using S = shape<KIND, D, SPLIT>;
    static_assert(sizeof mine <= S::q_buffers * S::q_bytes + FLASH_FIXED_SMEM, "room for it");
    return (char *)&mine + S::q_buffers * S::q_bytes + FLASH_FIXED_SMEM + stage * S::stage;
}

/* Neighbouring rows put the same chunk into different banks. */
template <int CHUNKS> static __device__ __forceinline__ int swizzle(int row, int chunk)
{
    return CHUNKS >= 8 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
}

/* Where a tile's keys lie: rows of one stretch of memory, or a row for each of a lane's two keys. */
struct tile_place {
    int32_t block[2], slot[2]; /* of keys lane and lane + 32 */
    int32_t low, high;         /* keys of the tile that are read: low .. high - 1 */
};

/* The entries are used a tile later, so that nobody waits for them here. */
static __device__ __forceinline__ tile_place place_tile(const flash_params &p, const flash_run &run,
                                                        int32_t tile, int lane)
{
    tile_place at;
    int32_t base = (run.pair.k0 & ~(FLASH_TILE - 1)) + tile * FLASH_TILE;
    at.low = run.pair.k0 - base;
    at.high = run.pair.k1 - base;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t key = lane + 32 * i;
        at.block[i] = at.slot[i] = 0;
        if (!p.paged) {
            at.block[i] = run.pair.key_start + base + key;
        } else if (key >= at.low && key < at.high) {
            int32_t index = (base + key) / p.block_size;
            at.slot[i] = base + key - index * p.block_size;
            at.block[i] = p.block_table[run.pair.table + index];
        }
    }
    return at;
}

/* One of K and V of a tile. Rows that no query sees, and dims past the head size, become zero. A
 * stretch is 16 rows that lie one stride apart: all block sizes that 16 divides. */
template <int KIND, int D>
static __device__ __forceinline__ void copy_half(const flash_params &p, const flash_cache &cache,
                                                 int32_t head_size, int32_t head,
                                                 const tile_place &at, uint32_t to, int lane)
{
    using S = shape<KIND, D, true>;
    constexpr int rows = 32 / S::chunks; /* that one instruction copies */
    const char *base = cache.data + head * cache.head;
    const int hi = lane / S::chunks, chunk = lane % S::chunks;
    int bytes = head_size * S::element;
    int32_t offset[2]; /* in 16 bytes */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        offset[i] = (int32_t)((at.block[i] * cache.block + at.slot[i] * cache.slot) >> 4);
    }
    if ((!p.paged || p.block_size % 16 == 0) && at.low <= 0 && at.high >= FLASH_TILE &&
        bytes == D * S::element) {
        int64_t step = p.paged ? cache.slot : cache.block;
        base += hi * step + chunk * 16;
#pragma unroll 1
        for (int stretch = 0; stretch < FLASH_TILE / 16; stretch++) {
            int32_t found = __shfl_sync(0xffffffffu, stretch < 2 ? offset[0] : offset[1],
                                        (stretch & 1) * 16);
            const char *from = base + ((int64_t)found << 4);
            uint32_t row_to = to + stretch * 16 * S::chunks * 16;
#pragma unroll
            for (int i = 0; i < 16 / rows; i++) {
                /* the row's bits of `hi` and of `i * rows` are apart: so are their swizzles */
                int low_row = (i * rows) & 7;
                int place = swizzle<S::chunks>(low_row, swizzle<S::chunks>(hi, chunk));
                copy16(row_to + ((i * rows + hi) * S::chunks + place) * 16, from + i * rows * step,
                       16);
            }
        }
        return;
    }
#pragma unroll 4
    for (int i = 0; i < FLASH_TILE / rows; i++) {
        int row = i * rows + hi;
        int32_t low = __shfl_sync(0xffffffffu, offset[0], row & 31);
        int32_t high = __shfl_sync(0xffffffffu, offset[1], row & 31);
        bool real = row >= at.low && row < at.high && chunk * 16 < bytes;
        const char *from = base + (real ? ((int64_t)(row < 32 ? low : high) << 4) + chunk * 16 : 0);
        copy16(to + (row * S::chunks + swizzle<S::chunks>(row, chunk)) * 16, from, real ? 16 : 0);
    }
}

static __device__ __forceinline__ void copy_scales(const flash_cache &cache, int32_t head,
                                                   const tile_place &at, uint32_t to, int lane)
{
    if (cache.form != FLASH_ROW_SCALED) {
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t key = lane + 32 * i;
        bool real = key >= at.low && key < at.high;
        const float *from = row_scale_at(cache, real ? at.block[i] : 0, real ? at.slot[i] : 0, head);
        copy4(to + key * 4, from, real ? 4 : 0);
    }
}

/* Raw 16-bit queries of a run; rows past the last become zero. */
template <int D, int ROWS>
static __device__ __forceinline__ void copy_query(const flash_params &p, const flash_run &run,
                                                  uint32_t to, int lane)
{
#pragma unroll 4
    for (int i = lane; i < ROWS * (D / 8); i += 32) {
        int row = i / (D / 8), chunk = i % (D / 8);
        bool real = row < run.pair.num_rows && chunk * 8 < p.head_size;
        int32_t at = run.pair.first_row + (real ? row : 0), token = at / p.group;
        const char *from = p.q.data + (int64_t)(run.pair.query_start + token) * p.q.row +
                           (int64_t)(run.head * p.group + at - token * p.group) * p.q.head;
        copy16(to + (row * (D / 8) + swizzle<D / 8>(row, chunk)) * 16, from + (real ? chunk * 16 : 0),
               real ? 16 : 0);
    }
}

template <int KIND, int D, bool SPLIT> struct producer {
    using S = shape<KIND, D, SPLIT>;
    const flash_params &p;
    shared<KIND, D, SPLIT> &mine;
    const bool values; /* which of the two warps this is */
    const int lane;
    int stage = 0, phase = 0, run_slot = 0, q_slot = 0, q_phase = 0;

    __device__ producer(const flash_params &params, shared<KIND, D, SPLIT> &memory, int thread)
        : p(params), mine(memory), values(thread >= 32), lane(thread & 31)
    {
    }

    __device__ __forceinline__ void next_stage()
    {
        stage++;
        if (stage == p.stages) {
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

    __device__ __forceinline__ void copy_run(const flash_run &run)
    {
        tile_place at = place_tile(p, run, run.tile, lane);
        for (int32_t i = 0; i < run.count; i++) {
            barrier_wait(shared_address(&mine.empty[stage]), phase ^ 1);
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
            uint32_t to = shared_address(stage_at(mine, stage)) + (values ? S::half : 0);
            const flash_cache &cache = values ? p.v : p.k;
            copy_half<KIND, D>(p, cache, values ? p.head_size_v : p.head_size, run.head, at, to, lane);
            if (S::bytes) {
                to += values ? S::half + FLASH_TILE * 4 : 2 * S::half;
                copy_scales(cache, run.head, at, to, lane);
            }
            commit(run_slot);
            if (i + 1 < run.count) {
                at = place_tile(p, run, run.tile + i + 1, lane);
            }
        }
        run_slot = run_slot == FLASH_MAX_STAGES ? 0 : run_slot + 1;
    }

    __device__ __forceinline__ void copy_segment(int32_t index)
    {
        const flash_segment segment = p.segments[index];
        int32_t pair = segment.pair, t = segment.begin;
        flash_run run;
        run.pair = p.pairs[pair];
        run.segment = index;
        while (t < segment.end) {
            int32_t within = t - run.pair.start;
            if (within >= run.pair.num_tiles * p.num_kv_heads) {
                pair++;
                run.pair = p.pairs[pair];
                continue;
            }
            run.head = within / run.pair.num_tiles;
            run.tile = within - run.head * run.pair.num_tiles;
            run.count = min(run.pair.num_tiles - run.tile, segment.end - t);
            run.item = pair * p.num_kv_heads + run.head;
            run.first = run.tile > 0 ? segment.first : index;
            run.last = run.tile + run.count < run.pair.num_tiles ? segment.last : index;
            copy_run(run);
            t += run.count;
        }
    }

    /* The first segment is the CTA's own; further ones are taken as CTAs become free, since not all
     * multiprocessors read equally fast. Who takes the last number puts the counter back. One warp
     * takes, one segment ahead, and tells the other. */
    __device__ __forceinline__ void work()
    {
        int32_t segments = p.header->segments, index = blockIdx.x, taken = 0, turn = 0;
        bool shares = segments > (int32_t)gridDim.x;
        if (shares && !values && lane == 0) {
            taken = atomicAdd(&p.header->taken, 1);
        }
        while (index < segments) {
            copy_segment(index);
            if (!shares) {
                break;
            }
            if (!values && lane == 0) {
                mine.taken[turn] = taken;
                if (taken == segments - 1) {
                    p.header->taken = 0;
                }
            }
            asm volatile("bar.sync 2, 64;" ::: "memory"); /* the number is there */
            index = (int32_t)gridDim.x + mine.taken[turn];
            turn ^= 1; /* read by both before it is written again: a barrier lies between */
            if (!values && lane == 0 && index < segments) {
                taken = atomicAdd(&p.header->taken, 1);
            }
        }
        barrier_wait(shared_address(&mine.empty[stage]), phase ^ 1);
        commit(NO_RUN);
    }
};

#endif
