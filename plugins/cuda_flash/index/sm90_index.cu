/* SPDX-License-Identifier: Apache-2.0 */
/* Scores of indexers on wgmma of sm_90a: an operand of 64 rows of the cache for each of two warp
 * groups, and one of 64 columns, each a head of one list. An item is up to INDEX_TILES tiles of
 * columns by a range of rows, which come in INDEX_STAGES stages of 128 by cp.async. Rows are in
 * registers for all tiles of a stage: from shared memory both operands of 64 by 64 would take all
 * its bandwidth. With e4m3, D 128 and 64 heads a warp group's 64 by 64 scores are 128 clocks of the
 * tensor cores, and some 90 issue slots for activations, weights and sums. */
#include "cuda_flash/kinds.h"
#include "cuda_flash/ptx/sm90_wgmma.cuh"
#include "gpu/cuda/launch.cuh"
#include "gpu/device/number.h"
#include "gpu/device/rows.h"
#include "gpu/device/scan.h"
#include "gpu/kernels/index_list.h"
#include "sm90_index_sums.cuh"

#define INDEX_TILES 4
#define INDEX_STAGES 4
#define INDEX_STAGE_ROWS 128
#define INDEX_THREADS 256
#define INDEX_CTAS 2          /* CTAs of a multiprocessor */
#define INDEX_MOST_STAGES 64  /* an item's, at most */
#define INDEX_START 2         /* stages that could be copied while an item begins */
#define KIND_MXFP4 KIND_COUNT /* rows in mxfp4, queries in bf16 */

struct sm90_index_params {
    struct gpu_index_params p;
    int32_t lists;  /* lists of an item, at most */
    int32_t stages; /* stages of rows of an item; 0 (bf16 in D 128, and scores of e4m3 and mxfp4
                     * that are not pooled): each CTA takes one share of all stages */
    int32_t block_shift; /* log2 of block_rows if it is whole, else -1 */
    int32_t together;    /* 1: the rows of a stage that a warp copies are in one block */
};

/* SPANS: columns of 128 bytes of a query. */
template <int KIND, int SPANS, bool POOLED> struct index_shape {
    static constexpr bool coded = KIND == KIND_MXFP4;
    static constexpr int query = SPANS * 128, row = coded ? query / 4 : query; /* bytes */
    static constexpr int steps = query / 32; /* k-steps of a product */
    static constexpr int chunks = row / 16;  /* 16-byte chunks of a row */
    static constexpr int stage = INDEX_STAGE_ROWS * row, tile = INDEX_COLUMNS * query;
    /* Copies begin during products, and those of rows that are together need no shuffles. */
    static constexpr bool overlaps = (KIND == KIND_E4M3 || coded) && !POOLED;
    static constexpr int smem = 1024 + INDEX_TILES * tile + INDEX_STAGES * stage;
    static constexpr int ctas = SPANS > 1 && !coded ? 1 : INDEX_CTAS;
    static_assert(ctas * (smem + 7168) <= 227 * 1024, "the CTAs fit");
};

struct index_smem {
    float weights[INDEX_TILES][INDEX_COLUMNS];
    float scales[INDEX_STAGES][INDEX_STAGE_ROWS];
    int32_t end[INDEX_TILES][INDEX_COLUMNS]; /* end of the rows that a list sees */
};

/* A span of lists of one request. */
struct index_work {
    int32_t request, first, lists;
    int32_t begin, end; /* rows begin .. end - 1, which some token sees */
    int64_t table;
};

/* The byte offset of a 16-byte chunk in rows of 128 bytes as wgmma swizzles them. */
template <int ROWS> GPU_INLINE int place_of_chunk(int row, int chunk)
{
    return (chunk >> 3) * ROWS * 128 + row * 128 + ((chunk & 7) ^ (row & 7)) * 16;
}

GPU_INLINE int32_t token_of(const gpu_index_params &p, int32_t list)
{
    return p.query_start[0] + p.first_token + list / p.groups;
}

GPU_INLINE int32_t rows_seen(const gpu_index_params &p, int32_t request, int32_t token)
{
    int32_t seen = p.seq_lens[request] - p.query_start[request + 1] + token + 1;
    return min(seen / p.tokens_per_row, p.max_rows);
}

/* Where a stage's row has its 16-byte chunk: rows of codes lie as they come. */
template <class S> GPU_INLINE int place_in_stage(int row, int chunk)
{
    return S::coded ? row * S::row + chunk * 16 : place_of_chunk<INDEX_STAGE_ROWS>(row, chunk);
}

/* Copies 16 bytes of a query for products with rows in mxfp4, to places in the order of the dims
 * that load_rows has. There lane j of four decodes the 32 dims of block j and has 4 of them in each
 * k-step: 32-bit words 16 j + 2 i and 16 j + 2 i + 1 of a query go to words j and j + 4 of k-step
 * i. */
GPU_INLINE void copy_spread(uint32_t to, const char *query, int chunk, bool real)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        copy4(to + j * 4, query + j * 64 + chunk * 4, real ? 4 : 0);
    }
}

/* Copies the queries of the span's lists; columns without one are zero. */
template <class S>
GPU_INLINE void copy_queries(const gpu_index_params &p, const index_work &w, index_smem &smem,
                             char *q)
{
    const int heads = p.heads / p.groups, columns = w.lists * heads;
    const int tiles = (columns + INDEX_COLUMNS - 1) / INDEX_COLUMNS;
    constexpr int chunks = S::query / 16;
    for (int i = threadIdx.x; i < tiles * INDEX_COLUMNS * chunks; i += INDEX_THREADS) {
        const int column = i / chunks, chunk = i % chunks, list = w.first + column / heads;
        const bool real = column < columns;
        const char *from = p.q.data;
        if (real) {
            from += (int64_t)token_of(p, list) * p.q.row +
                    (int64_t)(list % p.groups * heads + column % heads) * p.q.head;
        }
        const uint32_t to = shared_address(q + column / INDEX_COLUMNS * S::tile) +
                            place_of_chunk<INDEX_COLUMNS>(column % INDEX_COLUMNS, chunk);
        if (S::coded) {
            copy_spread(to, from, chunk, real);
        } else {
            copy16(to, from + chunk * 16, real ? 16 : 0);
        }
    }
    for (int column = threadIdx.x; column < tiles * INDEX_COLUMNS; column += INDEX_THREADS) {
        const int list = w.first + column / heads;
        float weight = column < columns ? 1.0f : 0.0f;
        if (column < columns && p.weights.data != nullptr) {
            weight = number_load(p.weights.data + (int64_t)token_of(p, list) * p.weights.row +
                                     (int64_t)(list % p.groups * heads + column % heads) *
                                         p.weights.head,
                                 p.weights.dtype, 0);
        }
        /* a thread's columns of two groups of 8 are neighbours */
        const int place = (column & ~15) | (column & 6) << 1 | (column & 8) >> 2 | (column & 1);
        (&smem.weights[0][0])[place] = weight;
    }
}

/* Where a row of the cache lies. Each warp copies the 16 rows of a stage that it multiplies; lane
 * and lane + 16 find one of them, or all lanes the first if they are together. */
struct index_row {
    int32_t block, slot; /* block -1: no row */
};

template <class S>
GPU_INLINE index_row find_row(const sm90_index_params &a, const index_work &w, int32_t stage)
{
    const gpu_index_params &p = a.p;
    const int32_t row = w.begin + stage * INDEX_STAGE_ROWS + ((int32_t)threadIdx.x >> 5) * 16 +
                        (S::overlaps && a.together ? 0 : (int32_t)(threadIdx.x & 15));
    const int32_t index = a.block_shift >= 0 ? row >> a.block_shift : row / p.block_rows;
    return {row < w.end ? p.block_table[w.table + index] : -1, row - index * p.block_rows};
}

/* Copies 16 rows of one block. Rows of it after the last one that is seen may be read, too: their
 * scores are not stored. */
template <class S>
GPU_INLINE void copy_rows_together(const gpu_index_params &p, const index_row &at, index_smem &smem,
                                   char *stages, int stage)
{
    constexpr int rows = 32 / S::chunks; /* copied by one instruction */
    const int lane = threadIdx.x & 31, first = ((int)threadIdx.x >> 5) * 16;
    const int own = lane / S::chunks, chunk = lane % S::chunks;
    const uint32_t to = shared_address(stages + stage * S::stage);
    const int64_t block = max(at.block, 0);
    const bool real = at.block >= 0;
    const char *from =
        p.k.data + block * p.k.block + (int64_t)(at.slot + own) * p.k.slot + chunk * 16;
#pragma unroll
    for (int i = 0; i < 16 / rows; i++) {
        copy16(to + place_in_stage<S>(first + i * rows + own, chunk), from + i * rows * p.k.slot,
               real ? 16 : 0);
    }
    if ((S::coded || p.k.form == GPU_ROW_SCALED) && lane < 16) {
        copy4(shared_address(&smem.scales[stage][first + lane]),
              p.k.row_scale + block * p.k.row_scale_block +
                  (int64_t)(at.slot + lane) * p.k.row_scale_slot,
              real ? 4 : 0);
    }
}

template <class S>
GPU_INLINE void copy_rows(const sm90_index_params &a, const index_row &at, index_smem &smem,
                          char *stages, int stage)
{
    constexpr int rows = 32 / S::chunks; /* copied by one instruction */
    const gpu_index_params &p = a.p;
    if (S::overlaps && a.together) {
        copy_rows_together<S>(p, at, smem, stages, stage);
        return;
    }
    const int lane = threadIdx.x & 31, first = ((int)threadIdx.x >> 5) * 16;
    const int own = lane / S::chunks, chunk = lane % S::chunks;
    const uint32_t to = shared_address(stages + stage * S::stage);
    const bool real = at.block >= 0;
    const uint64_t from =
        real ? (uint64_t)(uintptr_t)(p.k.data + at.block * p.k.block + at.slot * p.k.slot) : 0;
#pragma unroll
    for (int i = 0; i < 16 / rows; i++) {
        const uint64_t found = __shfl_sync(0xffffffffu, from, i * rows + own);
        const char *source = found != 0 ? (const char *)(uintptr_t)found : p.k.data;
        copy16(to + place_in_stage<S>(first + i * rows + own, chunk), source + chunk * 16,
               found != 0 ? 16 : 0);
    }
    if ((S::coded || p.k.form == GPU_ROW_SCALED) && lane < 16) {
        const int64_t offset =
            real ? at.block * p.k.row_scale_block + at.slot * p.k.row_scale_slot : 0;
        copy4(shared_address(&smem.scales[stage][first + lane]), p.k.row_scale + offset,
              real ? 4 : 0);
    }
}

GPU_INLINE uint32_t multiply_bf16(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

/* Two e2m1 of a byte as bf16, times a power of two. With its bits in the lowest ones of a bf16's
 * exponent and the highest of the mantissa an e2m1 is 2^-126 times its value. */
GPU_INLINE uint32_t decode_e2m1(uint32_t byte, uint32_t scale)
{
    const uint32_t size = byte * (1u << 6 | 1u << 18) & 0x01c001c0u;
    const uint32_t sign = byte * (1u << 12 | 1u << 24) & 0x80008000u;
    return multiply_bf16(multiply_bf16(size | sign, 0x7e807e80u), scale);
}

/* Loads a warp group's 64 rows of a stage as operands of wgmma. From rows in mxfp4 a lane decodes
 * 32 dims of each of two rows; copy_spread puts the queries' dims into the same order. */
template <class S>
GPU_INLINE void load_rows(const char *stage, const float *scales, uint32_t (&rows)[S::steps][4])
{
    const int lane = threadIdx.x & 31, first = ((int)threadIdx.x >> 5) * 16;
    if constexpr (S::coded) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = first + (lane >> 2) + r * 8;
            const uint32_t code = ((const uint8_t *)&scales[row])[lane & 3];
            const uint32_t scale = code == 255 ? 0x7fffu : code == 0 ? 0x40u : code << 7;
            const uint4 loaded = *(const uint4 *)(stage + place_in_stage<S>(row, lane & 3));
            const uint32_t codes[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
            for (int i = 0; i < 16; i++) {
                rows[i / 2][r + i % 2 * 2] =
                    decode_e2m1(codes[i / 4] >> i % 4 * 8 & 0xff, scale | scale << 16);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < S::steps; i++) {
            load4(rows[i], shared_address(stage) +
                               place_in_stage<S>(first + (lane & 15), 2 * i + (lane >> 4)));
        }
    }
}

/* Starts acc = rows x columns of a tile. */
template <int KIND, int STEPS>
GPU_INLINE void start_tile(const uint32_t (&rows)[STEPS][4], uint64_t q, float (&acc)[32])
{
    pin(acc);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const uint64_t b = q + (i >> 2) * (INDEX_COLUMNS * 8) + (i & 3) * 2;
        if constexpr (KIND == KIND_E4M3) {
            wgmma_rs_fp8<INDEX_COLUMNS>(acc, rows[i], b, i > 0);
        } else {
            wgmma_rs_bk<KIND == KIND_MXFP4 ? KIND_BF16 : KIND, INDEX_COLUMNS>(acc, rows[i], b,
                                                                              i > 0);
        }
    }
    wgmma_commit();
}

template <int KIND, int SPANS, bool POOLED>
GPU_INLINE void score_work(const sm90_index_params &a, const index_work &w, index_smem &smem,
                           char *q, char *stages)
{
    using S = index_shape<KIND, SPANS, POOLED>;
    const gpu_index_params &p = a.p;
    const int own = ((int)threadIdx.x >> 5) * 16 + ((threadIdx.x & 31) >> 2);
    const int heads = p.heads / p.groups;
    const int tiles = (w.lists * heads + INDEX_COLUMNS - 1) / INDEX_COLUMNS;
    const int count = (w.end - w.begin + INDEX_STAGE_ROWS - 1) / INDEX_STAGE_ROWS;
    const float factor = p.scale * (p.q_scale != nullptr ? *p.q_scale : p.q_scale_host) *
                         (p.k.form == GPU_ROW_SCALED ? 1.0f : cache_scale(p.k, 0));
    __syncthreads(); /* the memory is used again */
    for (int i = threadIdx.x; i < tiles * INDEX_COLUMNS / heads; i += INDEX_THREADS) {
        const int32_t seen = rows_seen(p, w.request, token_of(p, w.first + i));
        (&smem.end[0][0])[i] = i < w.lists ? min(seen, w.end) : 0;
    }
    copy_queries<S>(p, w, smem, q);
    index_row next = find_row<S>(a, w, 0);
#pragma unroll
    for (int s = 0; s < INDEX_STAGES - 1; s++) {
        if (s < count) {
            copy_rows<S>(a, next, smem, stages, s);
        }
        commit_copies(); /* the first has the queries, too */
        next = find_row<S>(a, w, s + 1);
    }
    constexpr int pool = POOLED ? INDEX_POOL : 1;
    const int which = own + (POOLED ? 0 : (threadIdx.x & 1) * 8);
    index_store to = {};
    to.end = &smem.end[0][0];
    to.scores = p.scores + w.first * p.score_stride + (w.begin + which) / pool;
    to.stride = p.score_stride;
    to.lists = w.lists;
    const float least = p.relu ? 0.0f : -INFINITY;
    for (int t = 0; t < count; t++) {
        const int stage = t % INDEX_STAGES;
        wait_for_copies_but<INDEX_STAGES - 2>();
        if (t == 0) {
            fence_async_proxy(); /* wgmma reads the queries */
            __syncthreads();     /* which all threads have copied */
        }
        __syncwarp(); /* the stage is there, and the one before it has been read */
        uint32_t rows[S::steps][4];
        load_rows<S>(stages + stage * S::stage, smem.scales[stage], rows);
        const bool scaled = p.k.form == GPU_ROW_SCALED;
        to.row = POOLED || heads <= 4 || (threadIdx.x & 2) == 0
                     ? w.begin + t * INDEX_STAGE_ROWS + which
                     : INT32_MAX;
        to.scale = to.scales[0] = factor * (scaled ? smem.scales[stage][which] : 1.0f);
        to.scales[1] = factor * (POOLED && scaled ? smem.scales[stage][own + 8] : 1.0f);
        auto copy_ahead = [&] {
            if (t + INDEX_STAGES - 1 < count) {
                copy_rows<S>(a, next, smem, stages, (t + INDEX_STAGES - 1) % INDEX_STAGES);
            }
            commit_copies();
            next = find_row<S>(a, w, t + INDEX_STAGES);
        };
        if (!S::overlaps) {
            copy_ahead();
        }
        const uint64_t columns = descriptor_at(shared_address(q), 16, 1024);
#pragma unroll
        for (int c = 0; c < INDEX_TILES; c++) { /* other warp groups multiply while this one sums */
            if (c < tiles) {
                float acc[32];
                start_tile<KIND>(rows, columns + c * (S::tile / 16), acc);
                if (S::overlaps && c == 0) {
                    copy_ahead();
                }
                wgmma_wait<0>();
                pin(acc);
                if (heads == 64) {
                    store_scores<64, POOLED>(to, smem.weights[c], c, least, acc);
                } else if (heads == 32) {
                    store_scores<32, POOLED>(to, smem.weights[c], c, least, acc);
                } else if (heads == 16) {
                    store_scores<16, POOLED>(to, smem.weights[c], c, least, acc);
                } else if (heads == 8) {
                    store_scores<8, POOLED>(to, smem.weights[c], c, least, acc);
                } else if (heads == 4) {
                    store_scores<4, POOLED>(to, smem.weights[c], c, least, acc);
                } else if (heads == 2) {
                    store_scores<2, POOLED>(to, smem.weights[c], c, least, acc);
                } else {
                    store_scores<1, POOLED>(to, smem.weights[c], c, least, acc);
                }
            }
        }
        to.scores += INDEX_STAGE_ROWS / pool;
    }
    wait_for_copies();
}

/* The requests' first lists among these tokens, and all stages before each request. */
struct index_shares {
    int32_t list[INDEX_THREADS + 1], before[INDEX_THREADS], warps[32];
};

GPU_INLINE int32_t stages_seen(const gpu_index_params &p, int32_t request, int32_t last_list)
{
    const int32_t rows = max(rows_seen(p, request, token_of(p, last_list)), 0); /* < 0: padding */
    return (rows + INDEX_STAGE_ROWS - 1) / INDEX_STAGE_ROWS;
}

/* Counts the stages of every request, those of each span of a.lists lists. Returns the total. */
GPU_INLINE int32_t count_stages(const sm90_index_params &a, int32_t lists, index_shares &shares)
{
    const gpu_index_params &p = a.p;
    const int32_t own = (int32_t)threadIdx.x, base = p.query_start[0] + p.first_token;
    int32_t first = lists, stages = 0, total = 0;
    if (own < p.num_reqs) {
        first = min(max((p.query_start[own] - base) * p.groups, 0), lists);
        const int32_t end = min(max((p.query_start[own + 1] - base) * p.groups, 0), lists);
        for (int32_t l = first; l < end; l += a.lists) {
            stages += stages_seen(p, own, min(l + a.lists, end) - 1);
        }
    }
    shares.list[own] = first;
    shares.list[INDEX_THREADS] = lists;
    shares.before[own] = running_sum<INDEX_THREADS>(stages, &total, shares.warps);
    __syncthreads();
    return total;
}

/* The stages from `at` on, up to `last`, that are of one span. Moves `at` on. */
GPU_INLINE index_work next_of_share(const sm90_index_params &a, const index_shares &shares,
                                    int32_t last, int32_t &at)
{
    index_work w;
    w.request = find_last(shares.before, a.p.num_reqs, at);
    w.first = shares.list[w.request];
    int32_t stage = at - shares.before[w.request], stages;
    for (;; w.first += a.lists) {
        w.lists = min(a.lists, shares.list[w.request + 1] - w.first);
        stages = stages_seen(a.p, w.request, w.first + w.lists - 1);
        if (stage < stages) {
            break;
        }
        stage -= stages;
    }
    const int32_t count = min(stages - stage, last - at);
    w.begin = stage * INDEX_STAGE_ROWS;
    w.end = w.begin + count * INDEX_STAGE_ROWS;
    at += count;
    return w;
}

/* The lists of item `at` from `first` on that are of one request. Moves both on. */
GPU_INLINE index_work next_of_item(const sm90_index_params &a, int32_t lists, int32_t columns,
                                   int32_t &first, int32_t &at)
{
    const gpu_index_params &p = a.p;
    const int32_t begin = at % columns * a.lists; /* neighbours read the same rows */
    const int32_t end = min(begin + a.lists, lists);
    index_work w;
    w.first = begin + first;
    w.begin = at / columns * (a.stages * INDEX_STAGE_ROWS);
    w.end = w.begin + a.stages * INDEX_STAGE_ROWS;
    w.request = find_last(p.query_start, p.num_reqs, token_of(p, w.first));
    const int32_t next = p.query_start[w.request + 1] - p.query_start[0] - p.first_token;
    w.lists = min(next * p.groups, end) - w.first;
    first += w.lists;
    if (w.first + w.lists == end) {
        first = 0;
        at += (int32_t)gridDim.x;
    }
    return w;
}

template <int KIND, int SPANS, bool POOLED>
__global__ void __launch_bounds__(INDEX_THREADS, index_shape<KIND, SPANS, POOLED>::ctas)
    index_scores(const __grid_constant__ sm90_index_params a)
{
    using S = index_shape<KIND, SPANS, POOLED>;
    extern __shared__ __align__(1024) char memory[];
    __shared__ index_smem smem;
    __shared__ index_shares shares;
    char *q = memory + (1024 - (shared_address(memory) & 1023)) % 1024;
    const gpu_index_params &p = a.p;
    wait_for_earlier_kernels();
    clear_arrived<INDEX_THREADS>(p);
    let_later_kernels_begin();
    const int32_t tokens = p.query_start[p.num_reqs] - p.query_start[0] - p.first_token;
    const int32_t lists = max(min(tokens, p.num_tokens), 0) * p.groups;
    const int32_t columns = (lists + a.lists - 1) / a.lists;
    int32_t at = (int32_t)blockIdx.x, last, first = 0;
    const bool is_shared = (SPANS > 1 || S::overlaps) && a.stages == 0;
    if (is_shared) {
        const int64_t total = count_stages(a, lists, shares);
        at = (int32_t)(total * blockIdx.x / gridDim.x);
        last = (int32_t)(total * (blockIdx.x + 1) / gridDim.x);
    } else {
        const int32_t rows_of_item = a.stages * INDEX_STAGE_ROWS;
        last = columns * ((p.max_rows + rows_of_item - 1) / rows_of_item);
    }
    while (at < last) {
        index_work w = is_shared ? next_of_share(a, shares, last, at)
                                 : next_of_item(a, lists, columns, first, at);
        w.end = min(w.end, rows_seen(p, w.request, token_of(p, w.first + w.lists - 1)));
        w.table =
            (int64_t)(p.block_table_row != nullptr ? p.block_table_row[w.request] : w.request) *
            p.block_table_stride;
        if (w.begin < w.end) {
            score_work<KIND, SPANS, POOLED>(a, w, smem, q, q + INDEX_TILES * S::tile);
        }
    }
}

/* With a NULL, only loads the kernels. */
template <int KIND, int SPANS>
static cudaError_t launch_shape(const struct gpu_device *device, const sm90_index_params *a,
                                void *stream)
{
    using S = index_shape<KIND, SPANS, false>;
    constexpr int smem = S::smem;
    void (*const kernels[2])(sm90_index_params) = {index_scores<KIND, SPANS, false>,
                                                   index_scores<KIND, SPANS, true>};
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < 2 && a == nullptr && error == cudaSuccess; i++) {
        error = cudaFuncSetAttribute(kernels[i], cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
    }
    return a == nullptr ? error
                        : launch_kernel(kernels[a->p.rows_per_score > 1], *a,
                                        (unsigned)(device->num_sms * S::ctas), INDEX_THREADS, smem,
                                        (cudaStream_t)stream);
}

static const char *launch(const struct gpu_device *device, const sm90_index_params *a, void *stream)
{
    device_scope inside(device);
    cudaError_t error = cudaSuccess;
    const bool all = a == nullptr, e4m3 = !all && a->p.k.dtype == ATTN_DTYPE_FP8_E4M3;
    const bool mxfp4 = !all && a->p.k.form == GPU_ROW_MXFP4, bf16 = !all && !e4m3 && !mxfp4;
    if (all || e4m3) {
        error = launch_shape<KIND_E4M3, 1>(device, a, stream);
    }
    if (error == cudaSuccess && (all || mxfp4)) {
        error = launch_shape<KIND_MXFP4, 2>(device, a, stream);
    }
    if (error == cudaSuccess && (all || (bf16 && a->p.k.head_size == 64))) {
        error = launch_shape<KIND_BF16, 1>(device, a, stream);
    }
    if (error == cudaSuccess && (all || (bf16 && a->p.k.head_size == 128))) {
        error = launch_shape<KIND_BF16, 2>(device, a, stream);
    }
    return cause_of(error);
}

static const char *load(const struct gpu_device *device)
{
    return launch(device, NULL, NULL);
}

/* Rows and queries in e4m3 of D 128, or in bf16 of D 64 and 128, or rows in mxfp4 and queries in
 * bf16 of D 128; 1, 2, 4 .. 64 heads for each list. Scales of rows are taken to be positive: they
 * are applied after the activation. */
static bool takes(const struct gpu_index_params *p)
{
    const int32_t heads = p->heads / p->groups;
    const bool e4m3 = p->k.dtype == ATTN_DTYPE_FP8_E4M3 && p->k.head_size == 128;
    const bool bf16 = p->k.dtype == ATTN_DTYPE_BF16 && p->k.form == GPU_ROW_NUMBERS &&
                      (p->k.head_size == 64 || p->k.head_size == 128);
    const bool mxfp4 =
        p->k.form == GPU_ROW_MXFP4 && p->k.head_size == 128 && p->q.dtype == ATTN_DTYPE_BF16;
    const uint64_t bits = (uint64_t)(uintptr_t)p->q.data | (uint64_t)p->q.row |
                          (uint64_t)p->q.head | (uint64_t)(uintptr_t)p->k.data |
                          (uint64_t)p->k.block | (uint64_t)p->k.slot;
    const uint64_t scales = (uint64_t)(uintptr_t)p->k.row_scale | (uint64_t)p->k.row_scale_block |
                            (uint64_t)p->k.row_scale_slot;
    return ((mxfp4 && scales % 4 == 0) || ((e4m3 || bf16) && p->q.dtype == p->k.dtype)) &&
           p->k.pack == 0 && bits % 16 == 0 && INDEX_COLUMNS % heads == 0 && p->scale >= 0.0f;
}

/* Stages of an item, so that all CTAs end at about the same time; 0 where shares, which may be of
 * two requests, take less. columns: items with the same rows, or requests. */
static int32_t stages_of(const struct gpu_index_params *p, int64_t columns, int64_t ctas,
                         bool may_share)
{
    const int64_t stages = (p->max_rows + INDEX_STAGE_ROWS - 1) / INDEX_STAGE_ROWS;
    int64_t best = 4, least = INT64_MAX;
    for (int64_t n = 4; n <= INDEX_MOST_STAGES; n += 4) {
        const int64_t items = columns * ((stages + n - 1) / n);
        const int64_t time = (items + ctas - 1) / ctas * (n + INDEX_START);
        best = time <= least ? n : best;
        least = time <= least ? time : least;
    }
    return may_share && columns * stages / ctas + 1 + 2 * INDEX_START < least ? 0 : (int32_t)best;
}

static const char *run(const struct gpu_device *device, const struct gpu_index_params *p,
                       void *stream)
{
    const int64_t lists = (int64_t)p->num_tokens * p->groups;
    const int64_t of_request = (lists + p->num_reqs - 1) / p->num_reqs;
    const int64_t most = INDEX_TILES * INDEX_COLUMNS * p->groups / p->heads;
    const bool even = (p->block_rows & (p->block_rows - 1)) == 0;
    const bool wide = p->k.dtype == ATTN_DTYPE_BF16 && p->k.head_size == 128;
    const bool shares = wide || (p->k.dtype != ATTN_DTYPE_BF16 && p->rows_per_score == 1);
    sm90_index_params a = {*p, (int32_t)(of_request < most ? of_request : most), 0,
                           even ? __builtin_ctz((unsigned)p->block_rows) : -1,
                           p->block_rows % 16 == 0};
    a.stages = stages_of(p, (lists + a.lists - 1) / a.lists,
                         (int64_t)device->num_sms * (wide ? 1 : INDEX_CTAS),
                         shares && p->num_reqs <= INDEX_THREADS && of_request <= most);
    return launch(device, &a, stream);
}

extern "C" const struct gpu_index_scores sm90_index_scores;
const struct gpu_index_scores sm90_index_scores = {load, takes, run};
