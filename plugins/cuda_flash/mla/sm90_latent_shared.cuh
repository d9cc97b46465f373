/* SPDX-License-Identifier: Apache-2.0 */
/* Shared memory of a CTA, its runs, and the lookup of a tile's rows. */
#ifndef CUDA_FLASH_SM90_LATENT_SHARED_CUH
#define CUDA_FLASH_SM90_LATENT_SHARED_CUH

#include "cuda_flash/ptx/sm90_copy.cuh"
#include "gpu/device/latent.h"
#include "gpu/device/search.h"
#include "gpu/device/softmax.h"
#include "gpu/device/visible.h"
#include "sm90_latent.h"

#define LATENT_COLUMNS (LATENT_MAX_SIZE / 64) /* columns of 64 dims, 128 bytes a row */
#define LATENT_COLUMN_BYTES (SM90_LATENT_ROWS * 128)
#define LATENT_ROPE (LATENT_COLUMNS - 1) /* the rope column, which values do not have */
/* Columns of keys; without a rope part the rope column holds P only. */
template <bool ROPE> constexpr int key_columns = ROPE ? LATENT_COLUMNS : LATENT_ROPE;
#define LATENT_PART (SM90_LATENT_ROWS * (LATENT_MAX_RANK + 2)) /* floats of a part */
#define V4_WIDE 7      /* the column of fp8_ds_v4 that is bf16 */
#define LATENT_AHEAD 2 /* tiles that are fetched into the L2 ahead of their copies */
/* queries of a request; with more, listed rows are in the L2 anyway */
#define FETCHING_QUERIES 8
#define LATENT_COPY_WARPS 4    /* producer warps that copy rows */
#define LATENT_CONVERT_WARPS 8 /* producer warps that convert 8-bit rows */
/* rows of a tile that a producer thread copies */
#define LATENT_COPY_ROWS (GPU_TILE / (LATENT_COPY_WARPS * 4))
#define RESCALE_THRESHOLD 8.0f /* scores may exceed row_max by this, in base 2: P is up to 2^8 */

static_assert(SM90_LATENT_ROWS == GPU_TILE, "rows and keys of a tile have one layout");

/* What the lookup of a run's keys needs to know of its query and request. */
struct key_lookup {
    const int32_t *list; /* the query's list of positions; NULL: all keys */
    const int32_t *blocks;
    int32_t first, last; /* keys that the query may see */
    int32_t fetches;     /* bits 0 and 1: even and odd rows are fetched into the L2 first */
    /* the run's first index in the list, or key; the end of the list or keys */
    int32_t base, end;
    int32_t segment, count; /* the run's segment and tiles */
};

/* A run of an attend to both caches, of schedule.tile_rows heads of a token. */
struct latent_item {
    int32_t base, count, next; /* as in latent_run */
    int32_t token, head;
};

/* With both caches lookup.base is the run's first tile of its item, and lookup.end the end of the
 * list or of all finished rows. */
struct second_lookup {
    const int32_t *blocks;
    int32_t own_tiles, rows; /* tiles of the window; finished rows */
    latent_item item;
};

struct latent_shared {
    alignas(1024) char q[LATENT_COLUMNS][LATENT_COLUMN_BYTES];
    alignas(1024) char k[2][LATENT_COLUMNS][LATENT_COLUMN_BYTES];
    float row_max[2]
                 /* row_max that P of a pair's first and second tile is relative to */
                 [SM90_LATENT_ROWS];
    float row_sum[2][2][SM90_LATENT_ROWS]; /* by run parity and warp group */
    union {
        /* rows of tile t & 7; NULL: the key is hidden and its row zero */
        alignas(16) const char *from[8][GPU_TILE];
        /* where TMA copies keys: the first and last key of each row, by warp group */
        int2 seen[2][SM90_LATENT_ROWS];
    };
    /* Terms of tile t & 7, for even and odd runs, which are added to a key's scores; -inf: hidden.
     */
    float term[2][8][GPU_TILE];
    /* By producer warp: 1 if a term of the tiles that are looked up at once is not 0, or there is a
     * soft cap. */
    alignas(8) uint8_t has_terms[2][8][LATENT_CONVERT_WARPS];
    key_lookup lookup[LATENT_CONVERT_WARPS]; /* each producer warp's, not in registers */
    uint64_t q_full, q_empty;
    /* The buffer's columns have arrived. Where threads copy rows, index 0 stands for the half that
     * is copied first and 1 for the other with the rope column. */
    uint64_t full[2][LATENT_COLUMNS];
    /* The buffer's halves are free: dims 0 .. 255 and 256 .. 511. The rope column holds P and is
     * freed with the half of the warp group that reads it: buffer 0's with the second. */
    uint64_t empty[2][2];
    uint64_t p_full[2]; /* P of a pair's first and second tile is written */
    uint64_t sums_full; /* row_sum of a run is written */
    /* With both caches, in a cluster: all of its CTAs have ended the run's tiles; their parts are
     * here; and have been read, so that the buffers are free. */
    uint64_t tiles_done, parts_full, parts_read;
    uint64_t item_full; /* with both caches: the run's item is written */
    latent_item items[2];
    second_lookup second[LATENT_CONVERT_WARPS];
};

/* Consecutive tiles of one item in one CTA. */
struct latent_run {
    gpu_row_tile item;
    int32_t base, count;            /* first key, tiles */
    int32_t part;                   /* index of the part to write; -1: the run is the whole item */
    int32_t next;                   /* next segment; -1: none */
    int32_t own_tiles, rows, tiles; /* both caches: as in second_lookup; the item's tiles */
};

/* Loads a run. With schedule.by_item == 2 a CTA's share starts with segment blockIdx.x and links
 * its further runs; batch-invariant schedules assign segments round-robin. */
GPU_INLINE latent_run load_run(const gpu_schedule &plan, int32_t segment)
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

GPU_INLINE int32_t first_segment(const gpu_schedule &plan)
{
    return (int32_t)blockIdx.x < plan.header->segments ? (int32_t)blockIdx.x : -1;
}

/* With both caches a segment is an item, (token, heads), and has a cluster. */
GPU_INLINE int32_t count_items(const sm90_latent_params &a)
{
    const gpu_problem &p = a.p.attend.problem;
    return (p.query_start[p.num_reqs] - p.query_start[0]) * a.p.attend.schedule.concurrent;
}

/* The request of a token, `n` tokens after the first: most requests have as many queries. */
GPU_INLINE int32_t request_of_token(const gpu_problem &p, int32_t token, uint32_t n)
{
    const uint32_t tokens = (uint32_t)(p.query_start[p.num_reqs] - p.query_start[0]);
    const int32_t r = (int32_t)min(n * (uint32_t)p.num_reqs / tokens, (uint32_t)p.num_reqs - 1);
    return p.query_start[r] <= token && token < p.query_start[r + 1]
               ? r
               : find_last(p.query_start, p.num_reqs, token);
}

/* A warp reads the parameters' lines at once: where each is used first a warp would wait for it. */
GPU_INLINE uint32_t touch_params(const sm90_latent_params &a)
{
    const uint32_t at = (threadIdx.x & 31) * 64;
    return at < sizeof a ? *(const uint32_t *)((const char *)&a + at) : 0;
}

/* A warp fetches into the L2 what will be looked up one after another, while earlier kernels run.
 * With more than 1024 requests it fetches a part. */
GPU_INLINE void fetch_lookups(const sm90_latent_params &a)
{
    const gpu_problem &p = a.p.attend.problem;
    const int32_t at = (int32_t)(threadIdx.x & 31) * 32, request = min(at, p.num_reqs - 1);
    fetch_line(p.query_start + request + 1);
    fetch_line(p.seq_lens + request);
    if (p.block_table_row != nullptr) {
        fetch_line(p.block_table_row + request);
    }
    if (a.second.block_table_row != nullptr) {
        fetch_line(a.second.block_table_row + request);
    }
    if (p.sinks != nullptr) {
        fetch_line(p.sinks + min(at, p.group - 1));
    }
    if (a.p.topk != nullptr && at < a.p.num_topk) { /* the first item's list */
        const int32_t token =
            (int32_t)(blockIdx.x / cluster_size()) / a.p.attend.schedule.concurrent;
        fetch_line(a.p.topk + token * a.p.topk_stride + at);
    }
}

/* Reads some of it into the L1, all at once. */
GPU_INLINE uint32_t touch_lookups(const sm90_latent_params &a)
{
    const gpu_problem &p = a.p.attend.problem;
    const int32_t at = (int32_t)(threadIdx.x & 31) * 32, request = min(at, p.num_reqs - 1);
    int32_t sum = p.query_start[request + 1] + p.seq_lens[request];
    if (p.block_table_row != nullptr) {
        sum += p.block_table_row[request];
    }
    if (p.sinks != nullptr) {
        sum += __float_as_int(p.sinks[min(at, p.group - 1)]);
    }
    return (uint32_t)sum;
}

/* A CTA's equal part of an item: tiles of the window and then of the second cache. */
GPU_INLINE latent_run load_item(const sm90_latent_params &a, int32_t n)
{
    const gpu_problem &p = a.p.attend.problem;
    const int32_t rows = a.p.attend.schedule.tile_rows, parts = a.p.attend.schedule.concurrent;
    const int32_t place = n / parts, token = p.query_start[0] + place;
    const gpu_request request = load_request(p, request_of_token(p, token, (uint32_t)place));
    const int32_t index = token - request.query_start;
    const gpu_interval seen = interval_of(p, request, index);
    latent_run run = {};
    gpu_row_tile &item = run.item;
    item.k0 = max(seen.first, 0);
    item.k1 = max(seen.last + 1, item.k0);
    item.query_start = request.query_start;
    item.query_len = request.query_len;
    item.length = request.length;
    item.causal = request.causal;
    item.request = request.r;
    item.first_row = index * p.group + (n - place * parts) * rows;
    item.num_rows = rows;
    item.table =
        (int64_t)(p.block_table_row != nullptr ? p.block_table_row[request.r] : request.r) *
        p.block_table_stride;
    run.rows = max(seen.position + 1, 0) / a.second.tokens_per_row;
    run.own_tiles = (item.k1 - item.k0 + GPU_TILE - 1) / GPU_TILE;
    const int32_t listed = a.p.topk != nullptr ? a.p.num_topk : run.rows;
    run.tiles = run.own_tiles + (listed + GPU_TILE - 1) / GPU_TILE;
    const int32_t rank = (int32_t)cluster_rank(), size = (int32_t)cluster_size();
    run.base = run.tiles * rank / size;
    run.count = run.tiles * (rank + 1) / size - run.base;
    if (run.count == 0) { /* a tile of hidden keys, since a run has one */
        run.base = run.tiles;
        run.count = 1;
    }
    run.part = -1;
    run.next = n + (int32_t)gridDim.x / size;
    run.next = run.next < count_items(a) ? run.next : -1;
    return run;
}

template <bool BOTH> GPU_INLINE latent_run run_of(const sm90_latent_params &a, int32_t segment)
{
    if constexpr (BOTH) {
        return load_item(a, segment);
    } else {
        return load_run(a.p.attend.schedule, segment);
    }
}

/* The item of a run, for the copy of its queries. */
GPU_INLINE gpu_row_tile rows_of_item(const sm90_latent_params &a, const latent_item &of)
{
    gpu_row_tile item = {};
    item.query_start = of.token;
    item.first_row = of.head;
    item.num_rows = a.p.attend.schedule.tile_rows;
    return item;
}

/* The item of a producer warp's run, for the copy of its queries. */
template <bool BOTH>
GPU_INLINE decltype(auto) item_of(const sm90_latent_params &a, const latent_shared &smem,
                                  int32_t segment)
{
    if constexpr (BOTH) {
        return rows_of_item(a, smem.second[threadIdx.x >> 5].item);
    } else {
        return (a.p.attend.schedule.segments[segment].row_tile);
    }
}

template <bool BOTH> GPU_INLINE int32_t first_run(const sm90_latent_params &a)
{
    if constexpr (BOTH) {
        const int32_t first = (int32_t)(blockIdx.x / cluster_size());
        return first < count_items(a) ? first : -1;
    } else {
        return first_segment(a.p.attend.schedule);
    }
}

/* The scale of rows that were 8 bits with a single scale, for scores and values. */
GPU_INLINE float value_scale(const gpu_cache &k)
{
    return k.form == GPU_ROW_NUMBERS ? cache_scale(k, 0) : 1.0f;
}

/* The byte offset of a 16-byte chunk in a column of a tile. */
GPU_INLINE uint32_t place_in_column(int row, int chunk)
{
    return row * 128 + ((chunk & 7) ^ (row & 7)) * 16;
}

/* Reads 16 bytes at any address. */
GPU_INLINE uint4 read_bytes(const char *from)
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

GPU_INLINE uint4 load16(uint32_t from)
{
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

GPU_INLINE uint2 load8(uint32_t from)
{
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return x;
}

GPU_INLINE void store16(uint32_t to, uint4 x)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}

/* Replaces 16-bit numbers that are not finite by zero. */
template <int KIND> GPU_INLINE uint4 finite_halves(uint4 x)
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

/* Whether spans or a tree decide which keys a query sees. */
GPU_INLINE bool sees_slowly(const gpu_problem &p)
{
    return p.spans != nullptr || p.tree != nullptr;
}

template <bool BOTH>
GPU_INLINE key_lookup lookup_of(const sm90_latent_params &a, const latent_run &run, int32_t segment)
{
    const gpu_row_tile &item = run.item;
    const gpu_problem &p = a.p.attend.problem;
    const int32_t index = item.first_row / p.group;
    gpu_interval seen = interval_of(p, request_of_row_tile(item), index);
    key_lookup lookup;
    lookup.list =
        a.p.topk != nullptr ? a.p.topk + (item.query_start + index) * a.p.topk_stride : nullptr;
    lookup.blocks = p.block_table + item.table;
    lookup.first = sees_slowly(p) ? item.k0 : max(seen.first, 0);
    lookup.last = sees_slowly(p) ? item.length - 1 : min(seen.last, item.length - 1);
    lookup.base = run.base;
    lookup.end = item.k1;
    lookup.segment = segment;
    lookup.count = run.count;
    const bool fetches =
        a.wide_keys && (a.form != LATENT_FORM_OWN || (!BOTH && item.query_len <= FETCHING_QUERIES));
    const uint32_t part = BOTH ? blockIdx.x / cluster_size() : blockIdx.x;
    lookup.fetches = !fetches ? 0 : a.p.attend.schedule.concurrent < 2 ? 3 : 1 << (part & 1);
    if constexpr (BOTH) {
        lookup.end = a.p.topk != nullptr ? a.p.num_topk : run.rows;
    }
    return lookup;
}

GPU_INLINE second_lookup lookup_of_second(const sm90_latent_params &a, const latent_run &run)
{
    const sm90_second_cache &s = a.second;
    const int32_t r = run.item.request;
    const int64_t row = s.block_table_row != nullptr ? s.block_table_row[r] : r;
    const int32_t group = a.p.attend.problem.group, index = run.item.first_row / group;
    return {s.block_table + row * s.block_table_stride,
            run.own_tiles,
            run.rows,
            {run.base, run.count, run.next, run.item.query_start + index,
             run.item.first_row - index * group}};
}

/* The term of key j where spans or a tree decide. */
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

/* Each of WARPS producer warps looks up its rows of WARPS / 2 tiles at once, well ahead: position
 * in the list, block, address. A lane has one row of one of the tiles. Of eight warps each has 8
 * consecutive rows of a tile. */
template <int WARPS> GPU_INLINE int row_of_lane()
{
    const int warp = threadIdx.x >> 5 & (WARPS - 1), lane = threadIdx.x & (GPU_TILE / WARPS - 1);
    return WARPS == LATENT_CONVERT_WARPS ? warp * 8 + lane
                                         : warp * 4 + (lane & 3) + (lane >> 2) * (WARPS * 4);
}

template <int WARPS> GPU_INLINE int tile_of_lane()
{
    return (threadIdx.x & 31) / (GPU_TILE / WARPS);
}

/* What the list has for this lane's row of the tiles from t on; -1: nothing. Of all keys, the key;
 * with BOTH caches a key of the window or a row of the second cache. */
template <int WARPS, bool BOTH>
GPU_INLINE int32_t entry_of_lane(const latent_shared &smem, const key_lookup &lookup, int32_t t)
{
    int32_t at = lookup.base + (t + tile_of_lane<WARPS>()) * GPU_TILE + row_of_lane<WARPS>();
    if constexpr (BOTH) {
        const int32_t own_tiles = smem.second[threadIdx.x >> 5].own_tiles;
        const int32_t tile = lookup.base + t + tile_of_lane<WARPS>();
        at = (tile - own_tiles) * GPU_TILE + row_of_lane<WARPS>();
        if (tile < own_tiles) {
            return lookup.first + tile * GPU_TILE + row_of_lane<WARPS>();
        }
    }
    return at >= lookup.end ? -1 : lookup.list != nullptr ? lookup.list[at] : at;
}

/* The key of such an entry; -1: none; with BOTH caches below -1: row -2 - key of the second.
 * Waits for the load of the entry. */
template <int WARPS, bool BOTH>
GPU_INLINE int32_t key_of_entry(const latent_shared &smem, const key_lookup &lookup, int32_t t,
                                int32_t entry)
{
    if constexpr (BOTH) {
        const second_lookup &second = smem.second[threadIdx.x >> 5];
        if (lookup.base + t + tile_of_lane<WARPS>() < second.own_tiles) {
            return entry <= lookup.last ? entry : -1;
        }
        return entry >= 0 && entry < second.rows ? -2 - entry : -1;
    }
    return entry;
}

/* The index of a key's block in the block table. */
GPU_INLINE int32_t block_of_key(const sm90_latent_params &a, int32_t key)
{
    return a.block_shift >= 0 ? key >> a.block_shift : key / a.p.attend.problem.block_size;
}

GPU_INLINE int32_t block_of_second(const sm90_second_cache &s, int32_t row)
{
    return s.block_shift >= 0 ? row >> s.block_shift : row / s.block_size;
}

/* The block's number in the cache; -1: the key is hidden. */
template <bool BOTH>
GPU_INLINE int32_t block_of_lane(const sm90_latent_params &a, const latent_shared &smem,
                                 const key_lookup &lookup, int32_t key)
{
    if constexpr (BOTH) {
        return key == -1 ? -1
               : key < 0 ? smem.second[threadIdx.x >> 5].blocks[block_of_second(a.second, -2 - key)]
                         : lookup.blocks[block_of_key(a, key)];
    }
    return key >= lookup.first && key <= lookup.last ? lookup.blocks[block_of_key(a, key)] : -1;
}

/* Fetches a row into the L2: with one instruction, which the lanes of a warp issue one after
 * another, or line by line in all lanes at once for warps that also convert. */
template <int WARPS> GPU_INLINE void fetch_row(const char *from, int32_t bytes)
{
    if constexpr (WARPS == LATENT_COPY_WARPS) {
        fetch_bytes(from, bytes);
    } else {
#pragma unroll
        for (int i = 0; i < LATENT_MAX_RANK; i += 128) {
            fetch_line(from + i);
        }
        fetch_line(from + bytes - 16);
        fetch_line(from + LATENT_MAX_RANK);
    }
}

/* Where fp8_ds_v4 has the scales of the rows of tile t & 7, two in a number, NULL for hidden keys;
 * in place of the queries' rope column. */
GPU_INLINE const uint16_t **scales_of_tile(const latent_shared &smem, int32_t t)
{
    return (const uint16_t **)smem.q[LATENT_ROPE] + (t & 7) * GPU_TILE;
}

/* The place of a row of a cache; the fields are chosen one by one, as a pointer to one of two
 * parameters would copy both to local memory. */
struct row_place {
    const char *row, *scales;
};

template <bool IS_V4>
GPU_INLINE row_place place_in_both(const sm90_latent_params &a, int32_t key, int32_t block)
{
    const gpu_cache &x = a.p.attend.k, &y = a.second.k;
    const bool own = key >= 0;
    const int32_t at = own ? key : -2 - key;
    const int32_t slot = own ? at - block_of_key(a, at) * a.p.attend.problem.block_size
                             : at - block_of_second(a.second, at) * a.second.block_size;
    row_place place = {(own ? x.data : y.data) + block * (own ? x.block : y.block) +
                           slot * (own ? x.slot : y.slot),
                       nullptr};
    if (IS_V4) {
        place.scales = (own ? x.row_scale : y.row_scale) +
                       block * (own ? x.row_scale_block : y.row_scale_block) +
                       slot * (own ? x.row_scale_slot : y.row_scale_slot);
    }
    return place;
}

/* Writes address and term of this lane's row of the tiles from t on. Of the CTAs that walk the same
 * keys, one fetches even and one odd rows into the L2. */
template <int WARPS, bool IS_V4, bool BOTH>
GPU_INLINE void publish_row(const sm90_latent_params &a, latent_shared &smem,
                            const key_lookup &lookup, int turn, int32_t t, int32_t key,
                            int32_t block)
{
    const gpu_params &p = a.p.attend;
    const char *from = nullptr, *scales = nullptr;
    float term = block >= 0 ? 0.0f : -INFINITY;
    if (block >= 0 && sees_slowly(p.problem)) {
        term = term_slow(p.problem, p.schedule.segments[lookup.segment].row_tile, key);
    }
    const bool has_terms = __any_sync(0xffffffffu, term != 0.0f || p.problem.soft_cap > 0.0f);
    int row = row_of_lane<WARPS>();
    /* hides where it comes from: the compiler would keep what it computes of it over the loop */
    asm volatile("mov.b32 %0, %0;" : "+r"(row));
    t += tile_of_lane<WARPS>();
    if ((threadIdx.x & (GPU_TILE / WARPS - 1)) == 0) {
        smem.has_terms[turn][t & 7][threadIdx.x >> 5] = has_terms;
    }
    smem.term[turn][t & 7][row] = term;
    if (term != -INFINITY) {
        int32_t slot = 0;
        if constexpr (BOTH) {
            const row_place place = place_in_both<IS_V4>(a, key, block);
            from = place.row, scales = place.scales;
        } else {
            slot = key - block_of_key(a, key) * p.problem.block_size;
            from = row_at(p.k, block, slot, 0);
        }
        if ((lookup.fetches >> (row & 1) & 1) != 0) {
            fetch_row<WARPS>(from, a.row_bytes);
        }
        if (IS_V4) {
            scales = BOTH ? scales : (const char *)row_scale_at(p.k, block, slot, 0);
            fetch_line(scales);
        }
    }
    if (IS_V4) {
        scales_of_tile(smem, t)[row] = (const uint16_t *)scales;
    }
    smem.from[t & 7][row] = from;
}

/* Row i of the rows that a group of 8 threads copies: every (4 WARPS)-th row of the tile. */
template <int WARPS> GPU_INLINE int copied_row(int i)
{
    return ((threadIdx.x & (WARPS * 32 - 1)) >> 3) + i * (WARPS * 4);
}

template <int WARPS>
GPU_INLINE const char *row_of_thread(const latent_shared &smem, int32_t t, int i)
{
    return smem.from[t & 7][copied_row<WARPS>(i)];
}

#endif
