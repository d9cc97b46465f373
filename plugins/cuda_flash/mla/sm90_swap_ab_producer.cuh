/* SPDX-License-Identifier: Apache-2.0 */
/* Shared memory of attend_latent_swap_ab, and its producer warps, which copy queries and keys. */
#ifndef CUDA_FLASH_SM90_SWAP_AB_PRODUCER_CUH
#define CUDA_FLASH_SM90_SWAP_AB_PRODUCER_CUH

#include "sm90_latent_producer.cuh"

/* ROWS is the most rows of an item: 16 or 32. */
template <int ROWS> struct swap_ab_shared {
    static constexpr int SLOTS = ROWS == 16 ? 25 : 22;
    alignas(1024) char q[LATENT_COLUMNS][ROWS * 128];
    alignas(1024) char k[SLOTS][LATENT_COLUMN_BYTES];
    alignas(1024) char p[2][ROWS * 128];   /* P of 64 keys, one row for each row of the item */
    float term[SWAP_AB_QUERIES][GPU_TILE]; /* terms of a tile with masked keys */
    int32_t query_of[ROWS];    /* the query of each row, counted from the item's first */
    float tile_max[4][ROWS];   /* maximum of a tile, by warp */
    float row_max[2][ROWS];    /* reference of P, valid if row_max_moved */
    float row_sum[2][4][ROWS]; /* a run's, by warp; written with its last tile */
    int32_t row_max_moved[2];
    uint64_t full[SLOTS], empty[SLOTS];
    uint64_t p_full[2], p_empty[2];
    uint64_t q_full, q_empty;
};

/* Iterates over the runs of a CTA. */
struct run_iterator {
    latent_run run;
    bool real;

    __device__ __forceinline__ explicit run_iterator(const gpu_schedule &plan)
    {
        enter(plan, first_segment(plan));
    }
    __device__ __forceinline__ void advance(const gpu_schedule &plan)
    {
        enter(plan, run.next);
    }
    __device__ __forceinline__ void enter(const gpu_schedule &plan, int32_t segment)
    {
        real = segment >= 0;
        if (real) {
            run = load_run(plan, segment);
        }
    }
};

/* The position of a tile in the ring of slots. Its columns are the rope column, which values do not
 * have, then eight columns of 64 dims. `phase` is the parity of the ring's rounds. */
template <int SLOTS> struct ring_state {
    int slot, phase;

    __device__ __forceinline__ int slot_of(int n) const
    {
        return slot + n < SLOTS ? slot + n : slot + n - SLOTS;
    }
    __device__ __forceinline__ int phase_of(int n) const
    {
        return slot + n < SLOTS ? phase : phase ^ 1;
    }
    __device__ __forceinline__ void advance()
    {
        phase = phase_of(LATENT_COLUMNS);
        slot = slot_of(LATENT_COLUMNS);
    }
};

/* The column of the n-th slot of a tile. */
GPU_INLINE int column_of(int n)
{
    return n == 0 ? LATENT_ROPE : n - 1;
}

/* The queries of an item. */
struct item_queries {
    int32_t first, count, head; /* first: in the request; head: of the item's first row */
};

GPU_INLINE item_queries queries_of(const gpu_problem &p, const gpu_row_tile &item)
{
    item_queries q;
    q.first = item.first_row / p.group;
    q.head = item.first_row - q.first * p.group;
    q.count = (item.first_row + item.num_rows - 1) / p.group - q.first + 1;
    return q;
}

/* The query of an item's row. Rows out of range get the last query. */
GPU_INLINE int32_t query_of_row(const gpu_problem &p, const item_queries &q, int32_t row)
{
    return min((q.head + row) / p.group, q.count - 1);
}

/* Copies a column of a tile at any alignment. */
GPU_INLINE void copy_column_slowly(const sm90_latent_params &a, const gpu_row_tile &item,
                                   int32_t first, int column, uint32_t to)
{
    const gpu_params &p = a.p.attend;
#pragma unroll 1
    for (int i = threadIdx.x & 31; i < GPU_TILE * 8; i += 32) {
        const int row = i >> 3, chunk = i & 7;
        const int32_t key = first + row, block = block_of_key(a, key);
        uint4 x = make_uint4(0, 0, 0, 0);
        if (key >= item.k0 && key < end_of_keys(item)) {
            x = read_slowly(row_at(p.k, p.problem.block_table[item.table + block],
                                   key - block * p.problem.block_size, 0) +
                            column * 128 + chunk * 16);
        }
        store16(to + place_in_column(row, chunk), x);
    }
    fence_async_proxy();
    __syncwarp(); /* all lanes have written */
}

/* One warp copies all tiles. All columns of a tile are requested together, since memory delivers
 * whole rows faster than parts of them at different times. */
template <int ROWS>
GPU_INLINE void key_producer(const sm90_latent_params &a, swap_ab_shared<ROWS> &smem)
{
    const gpu_params &p = a.p.attend;
    const int pages = a.mapped ? GPU_TILE / a.box_rows : 1, lane = threadIdx.x & 31;
    ring_state<swap_ab_shared<ROWS>::SLOTS> place = {0, 1};
#pragma unroll 1
    for (run_iterator runs(p.schedule); runs.real; runs.advance(p.schedule)) {
        const latent_run &run = runs.run;
        latent_pages here = {-1, 0}, behind = {-1, 0};
        if (a.mapped) {
            here = pages_of_lane(a, run, 0), behind = pages_of_lane(a, run, 32);
        }
#pragma unroll 1
        for (int32_t t = 0; t < run.count; t++) {
            const int32_t first = t * pages;
            if (a.mapped && first > 0 && (first & 31) == 0) {
                here = behind;
                behind = pages_of_lane(a, run, first + 32);
            }
            const uint32_t real = __ballot_sync(0xffffffffu, here.block >= 0) >> (first & 31);
            const int bytes = __popc(real & ((1u << pages) - 1)) * a.box_rows * 128;
            if (lane < LATENT_COLUMNS) {
                const int slot = place.slot_of(lane);
                barrier_wait(shared_address(&smem.empty[slot]), place.phase_of(lane));
                if (a.mapped) {
                    barrier_arrive_expect(shared_address(&smem.full[slot]), bytes);
                }
            }
            __syncwarp(); /* the slots are free, and the expected bytes are announced */
#pragma unroll 1
            for (int page = 0; page < pages && a.mapped; page++) {
                const latent_pages of = page_of_warp(here, first + page);
                if (of.block < 0 || !elected()) {
                    continue;
                }
#pragma unroll 1
                for (int n = 0; n < LATENT_COLUMNS; n++) {
                    const int slot = place.slot_of(n);
                    copy_box(shared_address(smem.k[slot]) + page * a.box_rows * 128, &a.k_map,
                             column_of(n) * 64, of.slot, 0, of.block,
                             shared_address(&smem.full[slot]));
                }
            }
            __syncwarp();
#pragma unroll 1
            for (int n = 0; n < LATENT_COLUMNS && !a.mapped; n++) {
                const int slot = place.slot_of(n);
                copy_column_slowly(a, run.item, run.base + t * GPU_TILE, column_of(n),
                                   shared_address(smem.k[slot]));
                if (elected()) {
                    barrier_arrive(shared_address(&smem.full[slot]));
                }
                __syncwarp();
            }
            place.advance();
        }
    }
}

/* One warp copies the queries of all runs. */
template <int ROWS>
GPU_INLINE void query_producer(const sm90_latent_params &a, swap_ab_shared<ROWS> &smem)
{
    const gpu_params &p = a.p.attend;
    const uint32_t full = shared_address(&smem.q_full);
    int phase = 1;
#pragma unroll 1
    for (run_iterator runs(p.schedule); runs.real; runs.advance(p.schedule), phase ^= 1) {
        const latent_run &run = runs.run;
        const item_queries queries = queries_of(p.problem, run.item);
        barrier_wait(shared_address(&smem.q_empty), phase);
        if (a.q_mapped) {
            if (elected()) {
                const int32_t token = run.item.query_start + queries.first;
                barrier_arrive_expect(full, LATENT_COLUMNS * a.q_rows * 128);
#pragma unroll 1
                for (int c = 0; c < LATENT_COLUMNS; c++) {
                    copy_box(shared_address(smem.q[c]), &a.q_maps[c == LATENT_ROPE],
                             c == LATENT_ROPE ? 0 : c * 64, queries.head, token, 0, full);
                }
            }
            __syncwarp();
            continue;
        }
#pragma unroll 1
        for (int i = threadIdx.x & 31; i < run.item.num_rows * LATENT_COLUMNS * 8; i += 32) {
            const int row = i / (LATENT_COLUMNS * 8), n = i - row * LATENT_COLUMNS * 8, c = n >> 3;
            const int32_t index = (queries.head + row) / p.problem.group;
            const int32_t head = queries.head + row - index * p.problem.group;
            const int64_t token = run.item.query_start + queries.first + index;
            const gpu_tensor &from = c == LATENT_ROPE ? a.p.q_rope : p.q;
            const char *x = from.data + token * from.row + head * from.head;
            store16(shared_address(smem.q[c]) + place_in_column(row, n),
                    read_slowly(x + (c == LATENT_ROPE ? n & 7 : n) * 16));
        }
        fence_async_proxy();
        __syncwarp(); /* all lanes have written */
        if (elected()) {
            barrier_arrive(full);
        }
        __syncwarp();
    }
}

#endif
