/* SPDX-License-Identifier: Apache-2.0 */
/* The warps that copy queries and latent rows. */
#ifndef CUDA_FLASH_SM90_LATENT_COPY_CUH
#define CUDA_FLASH_SM90_LATENT_COPY_CUH

#include "sm90_latent_convert.cuh"

/* One of 8 threads that copy a row: chunk t % 8 of column c. NARROWS: bf16 that becomes f16. */
template <bool NARROWS>
static __device__ __forceinline__ void copy_chunk(const char *latent, const char *rope, bool real,
                                                  bool wide, const void *any, uint32_t to, int row,
                                                  int c)
{
    const int chunk = threadIdx.x & 7;
    uint32_t place = to + c * LATENT_COLUMN_BYTES + place_in_column(row, chunk);
    const char *x = (c < LATENT_ROPE ? latent + c * 128 : rope) + chunk * 16;
    if (NARROWS) {
        uint4 y = make_uint4(0, 0, 0, 0);
        if (real) {
            y = wide ? __ldg((const uint4 *)x) : read_slowly(x);
        }
        store16(place, halves_of_bf16(y));
    } else if (wide) {
        copy16(place, real ? x : any, real ? 16 : 0);
    } else {
        store16(place, real ? read_slowly(x) : make_uint4(0, 0, 0, 0));
    }
}

/* This thread's chunks are on their way, or there. */
static __device__ __forceinline__ void arrive_chunks(bool wide, uint64_t &barrier)
{
    if (wide) {
        barrier_arrive_copies(shared_address(&barrier));
    } else {
        fence_for_boxes();
        barrier_arrive(shared_address(&barrier));
    }
}

/* By the last THREADS threads that copy. */
template <int THREADS, bool NARROWS>
static __device__ __forceinline__ void
copy_query_rows(const sm90_latent_params &a, const gpu_row_tile &item, latent_shared &mine)
{
    constexpr int UNROLLED = NARROWS ? 3 : LATENT_COLUMNS;
    const gpu_params &p = a.p.attend;
#pragma unroll 1
    for (int row = (threadIdx.x & (THREADS - 1)) >> 3; row < SM90_LATENT_ROWS; row += THREADS / 8) {
        int32_t at = item.first_row + row, index = at / p.problem.group;
        int64_t token = item.query_start + index, head = at - index * p.problem.group;
        const char *latent = p.q.data + token * p.q.row + head * p.q.head;
        const char *rope = a.p.q_rope.data + token * a.p.q_rope.row + head * a.p.q_rope.head;
#pragma unroll(UNROLLED)
        for (int c = 0; c < LATENT_COLUMNS; c++) {
            copy_chunk<NARROWS>(latent, rope, row < item.num_rows, a.wide_queries, p.q.data,
                                shared_address(mine.q), row, c);
        }
    }
    arrive_chunks(a.wide_queries && !NARROWS, mine.q_full);
}

template <int KIND, int THREADS>
static __device__ __forceinline__ void copy_queries(const sm90_latent_params &a,
                                                    const gpu_row_tile &item, latent_shared &mine)
{
    if (KIND == KIND_F16 && a.p.attend.q.dtype == ATTN_DTYPE_BF16) {
        copy_query_rows<THREADS, true>(a, item, mine);
    } else {
        copy_query_rows<THREADS, false>(a, item, mine);
    }
}

/* Columns first .. first + COUNT - 1 of a tile of rows in 16 bits, by cp.async. */
template <int COUNT>
static __device__ __forceinline__ void copy_columns(const sm90_latent_params &a,
                                                    latent_shared &mine, int b, int first,
                                                    const latent_rows_of_thread &rows)
{
#pragma unroll
    for (int c = 0; c < COUNT; c++) {
#pragma unroll
        for (int i = 0; i < LATENT_COPY_ROWS; i++) {
            int row = ((threadIdx.x & 127) >> 3) + i * (GPU_TILE / LATENT_COPY_ROWS);
            uint32_t place =
                shared_address(mine.k[b][first + c]) + place_in_column(row, threadIdx.x & 7);
            const char *x = rows.from[i] + (first + c) * 128 + (threadIdx.x & 7) * 16;
            if (a.wide_keys) {
                copy16(place, rows.from[i] != nullptr ? x : a.p.attend.k.data,
                       rows.from[i] != nullptr ? 16 : 0);
            } else {
                store16(place, rows.from[i] != nullptr ? read_slowly(x) : make_uint4(0, 0, 0, 0));
            }
        }
        arrive_chunks(a.wide_keys, mine.full[b][first + c]);
    }
}

/* The rows of a tile into buffer b, in the form that the cache has. */
template <int KIND>
static __device__ __forceinline__ void bring_tile(const sm90_latent_params &a, latent_shared &mine,
                                                  int b, int phase, int32_t t)
{
    if (a.form == LATENT_FORM_OWN) {
        latent_rows_of_thread rows = rows_of_thread(mine, t);
        barrier_wait(shared_address(&mine.empty[b][0]), phase);
        copy_columns<4>(a, mine, b, 0, rows);
        barrier_wait(shared_address(&mine.empty[b][1]), phase);
        copy_columns<LATENT_COLUMNS - 4>(a, mine, b, 4, rows);
    } else if constexpr (KIND == KIND_F16) {
        if (a.form == LATENT_FORM_E4M3) {
            convert_tile<KIND_E4M3, false>(mine, b, phase, a.wide_keys, t);
        } else if (a.form == LATENT_FORM_E5M2) {
            convert_tile<KIND_E5M2, false>(mine, b, phase, a.wide_keys, t);
        } else {
            convert_tile<KIND_E4M3, true>(mine, b, phase, a.wide_keys, t);
        }
    }
}

static __device__ __forceinline__ void arrive_warp(uint64_t &barrier)
{
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        barrier_arrive(shared_address(&barrier));
    }
}

/* Queries and keys of all runs by 128 threads: any block size, alignment, list and form of rows. */
template <int KIND, bool TERMS>
static __device__ __forceinline__ void copy_rows(const sm90_latent_params &a, latent_shared &mine)
{
    const gpu_params &p = a.p.attend;
    int phases = 7; /* bit b: of buffer b; bit 2: of the queries; bit 3: which run */
#pragma unroll 1
    for (int32_t s = first_segment(p.schedule); s >= 0; phases ^= 12) {
        latent_run run = enter_run(p.schedule, s);
        const gpu_row_tile &item = p.schedule.segments[s].row_tile; /* read where it is used */
        latent_query query = query_of(a, item);
        int32_t key[2], block[2];
        s = run.next;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            key[i] = key_of_lane(item, query, run.base + i * GPU_TILE);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            block[i] = block_of_lane(a, item, key[i]);
        }
        /* both warp groups are in the run before: nobody reads terms of the one before that */
        barrier_wait(shared_address(&mine.q_empty), phases >> 2 & 1);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            put_row<TERMS>(a, mine, item, query, phases >> 3, i, key[i], block[i]);
        }
        copy_queries<KIND, LATENT_COPY_THREADS>(a, item, mine);
        int32_t later = 2 < run.count ? key_of_lane(item, query, run.base + 2 * GPU_TILE) : -1;
#pragma unroll 1
        for (int32_t t = 0; t < run.count; t++) {
            const int b = t & 1;
            int32_t next = later, next_block = block_of_lane(a, item, next);
            later =
                t + 3 < run.count ? key_of_lane(item, query, run.base + (t + 3) * GPU_TILE) : -1;
            __syncwarp(); /* the rows' places are there */
            bring_tile<KIND>(a, mine, b, phases >> b & 1, t);
            phases ^= 1 << b;
            if (TERMS) { /* they are there, too */
                arrive_warp(mine.full[b][LATENT_ROPE]);
            }
            __syncwarp(); /* they have been read */
            put_row<TERMS>(a, mine, item, query, phases >> 3, t + 2, next, next_block);
        }
    }
    wait_for_copies(); /* none may end behind the CTA */
}

/* Keys that are copied: those that some row sees. */
static __device__ __forceinline__ int32_t end_of_keys(const gpu_row_tile &item)
{
    return min(item.k1, item.length);
}

/* The block of a page of the tile at `base`, -1: no key of it is seen. */
static __device__ __forceinline__ int32_t block_of_page(const sm90_latent_params &a,
                                                        const gpu_row_tile &item, int32_t base,
                                                        int page)
{
    const gpu_problem &p = a.p.attend.problem;
    int32_t row = page * a.box_rows, key = base + row;
    bool real = row < GPU_TILE && key < end_of_keys(item) && key + a.box_rows > item.k0;
    return real ? p.block_table[item.table + key / p.block_size] : -1;
}

/* One half of all tiles by TMA and one warp: 4 columns, and the rope column where it goes with the
 * half. A lane has a page of one of the columns. Of CTAs that walk the same keys one fetches them
 * into the L2, LATENT_AHEAD tiles before; where each has its own keys, that only costs. */
static __device__ __forceinline__ void copy_boxes(const sm90_latent_params &a, latent_shared &mine,
                                                  int half)
{
    const gpu_params &p = a.p.attend;
    const int pages = GPU_TILE / a.box_rows, lane = threadIdx.x & 31;
    const int column = lane / pages, page = lane - column * pages;
    const bool fetches = p.schedule.abreast > 1 && blockIdx.x % p.schedule.abreast == 0;
    int phase[2] = {0, 0};
#pragma unroll 1
    for (int32_t s = first_segment(p.schedule); s >= 0;) {
        latent_run run = enter_run(p.schedule, s);
        s = run.next;
        int32_t block[LATENT_AHEAD + 1]; /* of this tile and of those behind it */
#pragma unroll
        for (int i = 0; i <= LATENT_AHEAD; i++) {
            block[i] =
                i < run.count ? block_of_page(a, run.item, run.base + i * GPU_TILE, page) : -1;
        }
#pragma unroll 1
        for (int32_t t = 0; t < run.count; t++) {
            const int b = t & 1;
            int32_t base = run.base + t * GPU_TILE, here = block[0];
            int32_t slot = (base + page * a.box_rows) % p.problem.block_size;
            int bytes =
                __popc(__ballot_sync(0xffffffffu, here >= 0 && column == 0)) * a.box_rows * 128;
            barrier_wait(shared_address(&mine.empty[b][half]), (b ? phase[1] : phase[0]) ^ 1);
            phase[0] ^= b == 0;
            phase[1] ^= b;
            const int c = half * 4 + (column & 3);
            const bool with_rope = b != half;
            if (column < 4 && page == 0) {
                barrier_arrive_expect(shared_address(&mine.full[b][c]), bytes);
            }
            if (lane == 0 && with_rope) {
                barrier_arrive_expect(shared_address(&mine.full[b][LATENT_ROPE]), bytes);
            }
            __syncwarp();
            if (column < 4 && here >= 0) {
                copy_box(shared_address(mine.k[b][c]) + page * a.box_rows * 128, &a.k_map, c * 64,
                         slot, 0, here, shared_address(&mine.full[b][c]));
            }
            if (column == 0 && with_rope && here >= 0) {
                copy_box(shared_address(mine.k[b][LATENT_ROPE]) + page * a.box_rows * 128, &a.k_map,
                         LATENT_MAX_RANK, slot, 0, here,
                         shared_address(&mine.full[b][LATENT_ROPE]));
            }
            int32_t far = base + LATENT_AHEAD * GPU_TILE;
            int32_t far_slot = (far + page * a.box_rows) % p.problem.block_size;
            if (fetches && block[LATENT_AHEAD] >= 0 && column < 4) {
                fetch_box(&a.k_map, c * 64, far_slot, 0, block[LATENT_AHEAD]);
            }
            if (fetches && block[LATENT_AHEAD] >= 0 && column == 0 && half == 0) {
                fetch_box(&a.k_map, LATENT_MAX_RANK, far_slot, 0, block[LATENT_AHEAD]);
            }
#pragma unroll
            for (int i = 0; i < LATENT_AHEAD; i++) {
                block[i] = block[i + 1];
            }
            block[LATENT_AHEAD] = t + LATENT_AHEAD + 1 < run.count
                                      ? block_of_page(a, run.item, far + GPU_TILE, page)
                                      : -1;
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
        copy_query_rows<64, false>(a, run.item, mine); /* TMA: keys of their type */
    }
    wait_for_copies();
}

#endif
