/* SPDX-License-Identifier: Apache-2.0 */
/* A CTA's share of the tiles, its shared memory, and where the rows of a tile are. */
#ifndef CUDA_FLASH_SM90_LATENT_SHARED_CUH
#define CUDA_FLASH_SM90_LATENT_SHARED_CUH

#include "cuda_flash/ptx/sm90_copy.cuh"
#include "gpu/device/latent.h"
#include "gpu/device/softmax.h"
#include "gpu/device/visible.h"
#include "sm90_latent.h"

#define LATENT_COLUMNS (LATENT_MAX_SIZE / 64) /* of 64 dims, 128 bytes a row */
#define LATENT_COLUMN_BYTES (SM90_LATENT_ROWS * 128)
#define LATENT_ROPE (LATENT_COLUMNS - 1) /* the column that values do not have */
#define LATENT_PART (SM90_LATENT_ROWS * (LATENT_MAX_RANK + 2)) /* numbers of a part */
#define LATENT_AHEAD 2         /* tiles that boxes are fetched into the L2 before they are copied */
#define FETCHING_QUERIES 8     /* of a request; rows that more of them list are in the L2 anyway */
#define LATENT_COPY_WARPS 4    /* that copy rows */
#define LATENT_CONVERT_WARPS 8 /* that make rows of 8 bits f16 */
#define LATENT_COPY_ROWS (GPU_TILE / (LATENT_COPY_WARPS * 4)) /* of a tile, of a copying thread */
#define BASE_ROOM 8.0f /* a score may be so far above the base of its row: weights up to 2^8 */

static_assert(SM90_LATENT_ROWS == GPU_TILE, "rows and keys of a tile have one layout");

/* What the lookups of a run's keys need: its query, and the blocks of its request. */
struct latent_look {
    const int32_t *list; /* positions of the query's keys; NULL: all of the request */
    const int32_t *blocks;
    int32_t first, last; /* keys that the query sees, or may see */
    int32_t fetches;     /* rows come into the L2 first */
    int32_t base, end;   /* the run's first place in the list, or key; the list's end, or of keys */
    int32_t segment;
};

struct latent_shared {
    alignas(1024) char q[LATENT_COLUMNS][LATENT_COLUMN_BYTES];
    alignas(1024) char k[2][LATENT_COLUMNS][LATENT_COLUMN_BYTES];
    float base[2][SM90_LATENT_ROWS]; /* that weights of a pair's first and second tile count from */
    float sum[2][2][SM90_LATENT_ROWS]; /* of weights, by run and warp group */
    const char *from[4][GPU_TILE]; /* rows of tile t & 3; NULL: nobody sees the key, it is zero */
    /* of tile t & 7, for even and odd runs: added to a key's scores; -inf: unseen */
    float term[2][8][GPU_TILE];
    /* of such a tile, by copying warp: 1: a term is not 0, or there is a soft cap */
    alignas(8) uint8_t odd[2][8][LATENT_CONVERT_WARPS];
    latent_look look[LATENT_CONVERT_WARPS]; /* of each copying warp's run: registers are few */
    uint64_t q_full, q_empty;
    /* A buffer's columns are there. Where threads copy rows, 0 counts the half that is copied first
     * and 1 the other with the rope column. */
    uint64_t full[2][LATENT_COLUMNS];
    /* Its halves may be filled again: dims 0 .. 255 and 256 .. 511. The rope column, where weights
     * lie, goes with the half of the warp group that reads them: buffer 0's with the second one. */
    uint64_t empty[2][2];
    uint64_t weights[2]; /* of a pair's first and second tile are there */
    uint64_t sums;       /* of a run's weights are there */
    /* first and last key of each row, by warp group */
    alignas(16) int2 seen[2][SM90_LATENT_ROWS];
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

/* Of numbers that were 8 bits wide and have one scale; it is in the scores and, at the end, in the
 * values. */
static __device__ __forceinline__ float value_scale(const gpu_cache &k)
{
    return k.form == GPU_ROW_NUMBERS ? cache_scale(k, 0) : 1.0f;
}

/* 16 bytes of a row: byte of a tile's column. */
static __device__ __forceinline__ uint32_t place_in_column(int row, int chunk)
{
    return row * 128 + ((chunk & 7) ^ (row & 7)) * 16;
}

/* 16 bytes at any address. */
static __device__ __forceinline__ uint4 read_bytes(const char *from)
{
    const uint8_t *x = (const uint8_t *)from;
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = x[4 * i] | x[4 * i + 1] << 8 | x[4 * i + 2] << 16 | (uint32_t)x[4 * i + 3] << 24;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

static __device__ __noinline__ uint4 read_slowly(const char *from)
{
    return read_bytes(from);
}

static __device__ __forceinline__ uint4 load16(uint32_t from)
{
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

static __device__ __forceinline__ uint2 load8(uint32_t from)
{
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return x;
}

static __device__ __forceinline__ void store16(uint32_t to, uint4 x)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}

/* Of 16-bit numbers, those that are not finite become zero. */
template <int KIND> static __device__ __forceinline__ uint4 finite_halves(uint4 x)
{
    constexpr uint32_t EXPONENT = KIND == KIND_BF16 ? 0x7f80 : 0x7c00;
    uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t low = (w[i] & EXPONENT) == EXPONENT ? 0 : w[i] & 0xffff;
        const uint32_t high = (w[i] >> 16 & EXPONENT) == EXPONENT ? 0 : w[i] & 0xffff0000;
        w[i] = low | high;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* Spans or a tree decide which keys a query sees. */
static __device__ __forceinline__ bool sees_slowly(const gpu_problem &p)
{
    return p.spans != nullptr || p.tree != nullptr;
}

static __device__ __forceinline__ latent_look look_of(const sm90_latent_params &a,
                                                      const latent_run &run, int32_t segment)
{
    const gpu_row_tile &item = run.item;
    const gpu_problem &p = a.p.attend.problem;
    const int32_t index = item.first_row / p.group;
    gpu_interval seen = interval_of(p, request_of_row_tile(item), index);
    latent_look look;
    look.list =
        a.p.topk != nullptr ? a.p.topk + (item.query_start + index) * a.p.topk_stride : nullptr;
    look.blocks = p.block_table + item.table;
    look.first = sees_slowly(p) ? item.k0 : max(seen.first, 0);
    look.last = sees_slowly(p) ? item.length - 1 : min(seen.last, item.length - 1);
    look.base = run.base;
    look.end = item.k1;
    look.segment = segment;
    look.fetches = a.wide_keys && item.query_len <= FETCHING_QUERIES;
    return look;
}

/* What is added to the scores of key j where spans or a tree decide. */
static __device__ __noinline__ float term_slow(const gpu_problem &p, const gpu_row_tile &item,
                                               int32_t j)
{
    gpu_request request = request_of_row_tile(item);
    const int32_t index = item.first_row / p.group;
    gpu_interval seen = interval_of(p, request, index);
    bool sees = j >= max(seen.first, 0) && j <= seen.last && j < item.length;
    const float bias = bias_of(p, request, index, seen.position, 0.0f, j) * LOG2E;
    return sees_slow(p, request, index, seen.position, j, sees) ? bias : -INFINITY;
}

/* A copying warp, one of WARPS, looks up the rows that it copies of two tiles at once, well before:
 * the place of a key in a list, its block, its address. A lane has a row of one of the tiles; of
 * eight warps each has 16 rows for its lanes, and the upper ones have none. */
template <int WARPS> static __device__ __forceinline__ int row_of_lane()
{
    const int lane = threadIdx.x & (GPU_TILE / WARPS - 1);
    return (threadIdx.x >> 5 & (WARPS - 1)) * 4 + (lane & 3) + (lane >> 2) * (WARPS * 4);
}

template <int WARPS> static __device__ __forceinline__ int tile_of_lane()
{
    return (threadIdx.x & 31) / (GPU_TILE / WARPS);
}

/* The key of this lane's row of tiles t and t + 1 of the run, -1: none. */
template <int WARPS>
static __device__ __forceinline__ int32_t key_of_lane(const latent_look &look, int32_t t)
{
    int32_t at = look.base + (t + tile_of_lane<WARPS>()) * GPU_TILE + row_of_lane<WARPS>();
    bool real = at < look.end && tile_of_lane<WARPS>() < 2;
    return !real ? -1 : look.list != nullptr ? look.list[at] : at;
}

/* The block of a key. */
static __device__ __forceinline__ int32_t block_of_key(const sm90_latent_params &a, int32_t key)
{
    return a.block_shift >= 0 ? key >> a.block_shift : key / a.p.attend.problem.block_size;
}

/* Its number in the cache, -1: the key is not seen. */
static __device__ __forceinline__ int32_t block_of_lane(const sm90_latent_params &a,
                                                        const latent_look &look, int32_t key)
{
    return key >= look.first && key <= look.last ? look.blocks[block_of_key(a, key)] : -1;
}

/* A row by one instruction, which the lanes of a warp do one after another; where the warps have
 * more to do than to copy, by a line of 128 bytes each, which they do together. */
template <int WARPS>
static __device__ __forceinline__ void fetch_row(const char *from, int32_t bytes)
{
    if constexpr (WARPS == LATENT_COPY_WARPS) {
        fetch_bytes(from, bytes);
    } else {
        for (int32_t i = 0; i < bytes; i += 128) {
            fetch_line(from + i);
        }
    }
}

/* Address and term of the row of this lane go to those of tiles t and t + 1; the row comes into the
 * L2, by one of the CTAs that walk the same keys. */
template <int WARPS>
static __device__ __forceinline__ void put_row(const sm90_latent_params &a, latent_shared &mine,
                                               const latent_look &look, int turn, int32_t t,
                                               int32_t key, int32_t block)
{
    constexpr int ROWS = GPU_TILE / WARPS;
    const gpu_params &p = a.p.attend;
    const char *from = nullptr;
    float term = block >= 0 ? 0.0f : -INFINITY;
    if (block >= 0 && sees_slowly(p.problem)) {
        term = term_slow(p.problem, p.schedule.segments[look.segment].row_tile, key);
    }
    const int lane = threadIdx.x & 31;
    const uint32_t odd = __ballot_sync(0xffffffffu, term != 0.0f || p.problem.soft_cap > 0.0f);
    if (tile_of_lane<WARPS>() > 1) {
        return;
    }
    t += tile_of_lane<WARPS>();
    if (lane % ROWS == 0) {
        mine.odd[turn][t & 7][threadIdx.x >> 5] = (odd >> lane & ((1u << ROWS) - 1)) != 0;
    }
    mine.term[turn][t & 7][row_of_lane<WARPS>()] = term;
    if (term != -INFINITY) {
        from = row_at(p.k, block, key - block_of_key(a, key) * p.problem.block_size, 0);
        /* warps that convert have no register left for the look's */
        if ((WARPS == LATENT_CONVERT_WARPS ? a.wide_keys : look.fetches) &&
            (p.schedule.abreast < 2 || ((threadIdx.x ^ blockIdx.x) & 1) == 0)) {
            fetch_row<WARPS>(from, a.row_bytes);
        }
    }
    mine.from[t & 3][row_of_lane<WARPS>()] = from;
}

/* Row i of those that 8 threads copy: one of the tile's first 4 WARPS rows, and each so many behind
 * it. */
template <int WARPS> static __device__ __forceinline__ int copied_row(int i)
{
    return ((threadIdx.x & (WARPS * 32 - 1)) >> 3) + i * (WARPS * 4);
}

template <int WARPS>
static __device__ __forceinline__ const char *row_of_thread(const latent_shared &mine, int32_t t,
                                                            int i)
{
    return mine.from[t & 3][copied_row<WARPS>(i)];
}

#endif
