/* SPDX-License-Identifier: Apache-2.0 */
/* A CTA's share of the tiles, its shared memory, and the warps that copy queries and latent rows.
 */
#ifndef CUDA_FLASH_SM90_LATENT_COPY_CUH
#define CUDA_FLASH_SM90_LATENT_COPY_CUH

#include "gpu/device/rows.h"
#include "ptx/sm90_copy.cuh"
#include "sm90_latent.h"

#define LATENT_COLUMNS (LATENT_MAX_SIZE / 64) /* of 64 dims, 128 bytes a row */
#define LATENT_COLUMN_BYTES (SM90_LATENT_ROWS * 128)
#define LATENT_THIRDS 3 /* of a tile's columns, with a barrier each */

static_assert(SM90_LATENT_ROWS == GPU_TILE, "rows and keys of a tile have one layout");

struct latent_shared {
    alignas(1024) char q[LATENT_COLUMNS][LATENT_COLUMN_BYTES];
    alignas(1024) char k[2][LATENT_COLUMNS][LATENT_COLUMN_BYTES];
    float high[2][SM90_LATENT_ROWS];   /* largest scores behind a pair's first and second tile */
    float sum[2][2][SM90_LATENT_ROWS]; /* of weights, by run and warp group */
    uint64_t q_full, q_empty, full[2][LATENT_THIRDS], empty[2];
    uint64_t weights[2]; /* of a pair's first and second tile are there */
    uint64_t sums;       /* of a run's weights are there */
};

/* The tiles of one item that a CTA has in one piece. */
struct latent_run {
    gpu_row_tile item;
    int32_t base, count; /* first key, tiles */
    int32_t part;        /* where its sums go; -1: it has the whole item */
    int32_t next;        /* segment, -1: none */
};

/* Shares of the stream (schedule.by_item 2) begin with segment blockIdx.x, and their pieces are
 * linked; batch-invariant ones are taken in turn. */
static __device__ __forceinline__ latent_run enter_run(const gpu_schedule &plan, int32_t segment)
{
    const gpu_segment &s = plan.segments[segment];
    latent_run run;
    run.item = s.row_tile;
    int32_t tile = s.begin - run.item.start;
    run.base = (run.item.k0 & ~(GPU_TILE - 1)) + tile * GPU_TILE;
    run.count = s.end - s.begin;
    run.part = run.count == run.item.num_tiles ? -1
               : plan.by_item == 2             ? 2 * s.index + (tile == 0)
                                               : s.index;
    run.next = segment + (int32_t)gridDim.x;
    if (plan.by_item == 2) {
        run.next = s.next;
    } else if (run.next >= plan.header->segments) {
        run.next = -1;
    }
    return run;
}

static __device__ __forceinline__ int32_t first_segment(const gpu_schedule &plan)
{
    return (int32_t)blockIdx.x < plan.header->segments ? (int32_t)blockIdx.x : -1;
}

/* 16 bytes of a row: byte of a tile's column. */
static __device__ __forceinline__ uint32_t place_in_column(int row, int chunk)
{
    return row * 128 + ((chunk & 7) ^ (row & 7)) * 16;
}

/* 8 numbers at any address. */
static __device__ __noinline__ uint4 read_slowly(const char *from)
{
    const uint16_t *x = (const uint16_t *)from;
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = x[2 * i] | (uint32_t)x[2 * i + 1] << 16;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

static __device__ __forceinline__ void store16(uint32_t to, uint4 x)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}

/* One of 8 threads that copy a row: chunk t % 8 of each column. */
static __device__ __forceinline__ void copy_row(const char *latent, const char *rope, bool real,
                                                bool wide, const void *any, uint32_t to, int row)
{
    const int chunk = threadIdx.x & 7;
#pragma unroll
    for (int c = 0; c < LATENT_COLUMNS; c++) {
        uint32_t place = to + c * LATENT_COLUMN_BYTES + place_in_column(row, chunk);
        const char *x = (c < LATENT_COLUMNS - 1 ? latent + c * 128 : rope) + chunk * 16;
        if (wide) {
            copy16(place, real ? x : any, real ? 16 : 0);
        } else {
            store16(place, real ? read_slowly(x) : make_uint4(0, 0, 0, 0));
        }
    }
}

/* This thread's rows are on their way, or there. */
static __device__ __forceinline__ void arrive_rows(bool wide, uint64_t &barrier)
{
    if (wide) {
        barrier_arrive_copies(shared_address(&barrier));
    } else {
        fence_for_boxes();
        barrier_arrive(shared_address(&barrier));
    }
}

/* By the last 64 threads that copy. */
static __device__ __forceinline__ void copy_queries(const sm90_latent_params &a,
                                                    const gpu_row_tile &item, latent_shared &mine)
{
    const gpu_params &p = a.p.attend;
#pragma unroll 1
    for (int row = (threadIdx.x & 63) >> 3; row < SM90_LATENT_ROWS; row += 8) {
        int32_t at = item.first_row + row, index = at / p.problem.group;
        int64_t token = item.query_start + index, head = at - index * p.problem.group;
        copy_row(p.q.data + token * p.q.row + head * p.q.head,
                 a.p.q_rope.data + token * a.p.q_rope.row + head * a.p.q_rope.head,
                 row < item.num_rows, a.wide_queries, p.q.data, shared_address(mine.q), row);
    }
    arrive_rows(a.wide_queries, mine.q_full);
}

/* Keys of all runs by 64 threads: any block size and alignment. */
static __device__ __forceinline__ void copy_rows(const sm90_latent_params &a, latent_shared &mine)
{
    const gpu_params &p = a.p.attend;
    int phase[2] = {0, 0};
#pragma unroll 1
    for (int32_t s = first_segment(p.schedule); s >= 0;) {
        latent_run run = enter_run(p.schedule, s);
        s = run.next;
#pragma unroll 1
        for (int32_t t = 0; t < run.count; t++) {
            const int b = t & 1;
            barrier_wait(shared_address(&mine.empty[b]), (b ? phase[1] : phase[0]) ^ 1);
            phase[0] ^= b == 0;
            phase[1] ^= b;
#pragma unroll 1
            for (int row = (threadIdx.x & 63) >> 3; row < GPU_TILE; row += 8) {
                int32_t key = run.base + t * GPU_TILE + row, index = key / p.problem.block_size;
                bool real = key >= run.item.k0 && key < min(run.item.k1, run.item.length);
                const char *from = p.k.data;
                if (real) {
                    from = row_at(p.k, p.problem.block_table[run.item.table + index],
                                  key - index * p.problem.block_size, 0);
                }
                copy_row(from, from + LATENT_MAX_RANK * 2, real, a.wide_keys, p.k.data,
                         shared_address(mine.k[b]), row);
            }
            for (int third = 0; third < LATENT_THIRDS; third++) {
                arrive_rows(a.wide_keys, mine.full[b][third]);
            }
        }
    }
    wait_for_copies(); /* none may end behind the CTA */
}

/* Keys that are copied: those that some row sees. */
static __device__ __forceinline__ int32_t end_of_keys(const gpu_row_tile &item)
{
    return min(item.k1, item.length);
}

/* The block of a lane's box, -1: no key of it is seen. Lanes 3 i to 3 i + 2 have page i. */
static __device__ __forceinline__ int32_t block_of_lane(const sm90_latent_params &a,
                                                        const gpu_row_tile &item, int32_t base,
                                                        int lane)
{
    const gpu_problem &p = a.p.attend.problem;
    int32_t row = lane / 3 * a.box_rows, key = base + row;
    bool real = row < GPU_TILE && key < end_of_keys(item) && key + a.box_rows > item.k0;
    return real ? p.block_table[item.table + key / p.block_size] : -1;
}

/* The same by TMA and one warp. */
static __device__ __forceinline__ void copy_boxes(const sm90_latent_params &a, latent_shared &mine)
{
    const gpu_params &p = a.p.attend;
    const int lane = threadIdx.x & 31, page = lane / 3, column = lane - page * 3;
    int phase[2] = {0, 0};
#pragma unroll 1
    for (int32_t s = first_segment(p.schedule); s >= 0;) {
        latent_run run = enter_run(p.schedule, s);
        s = run.next;
        int32_t block = block_of_lane(a, run.item, run.base, lane);
#pragma unroll 1
        for (int32_t t = 0; t < run.count; t++) {
            const int b = t & 1;
            int32_t base = run.base + t * GPU_TILE, here = block;
            int32_t slot = (base + page * a.box_rows) % p.problem.block_size;
            if (t + 1 < run.count) {
                block = block_of_lane(a, run.item, base + GPU_TILE, lane);
            }
            int count = __popc(__ballot_sync(0xffffffffu, here >= 0));
            barrier_wait(shared_address(&mine.empty[b]), (b ? phase[1] : phase[0]) ^ 1);
            phase[0] ^= b == 0;
            phase[1] ^= b;
#pragma unroll
            for (int third = 0; third < LATENT_THIRDS; third++) {
                uint32_t barrier = shared_address(&mine.full[b][third]);
                if (lane == 0) {
                    barrier_arrive_expect(barrier, count * a.box_rows * 128);
                }
                __syncwarp();
                if (here >= 0) {
                    copy_box(shared_address(mine.k[b][third * 3 + column]) +
                                 page * a.box_rows * 128,
                             &a.k_map, (third * 3 + column) * 64, slot, 0, here, barrier);
                }
            }
        }
    }
}

static __device__ __forceinline__ void copy_all_queries(const sm90_latent_params &a,
                                                        latent_shared &mine)
{
    const gpu_schedule &plan = a.p.attend.schedule;
    int phase = 0;
#pragma unroll 1
    for (int32_t s = first_segment(plan); s >= 0; phase ^= 1) {
        latent_run run = enter_run(plan, s);
        s = run.next;
        barrier_wait(shared_address(&mine.q_empty), phase ^ 1);
        copy_queries(a, run.item, mine);
    }
    wait_for_copies();
}

#endif
