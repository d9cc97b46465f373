/* SPDX-License-Identifier: Apache-2.0 */
/* Prompts over lists of large blocks (README.md). An item is 16 neighbouring tokens of a request
 * and one KV head. Its CTA copies each block that some of them list once, in stages of 64 keys.
 * Each token has a warp, which multiplies the blocks of its own list: up to 16 heads are the rows
 * of mma.sync. A row's bits depend on its own list alone. A stage: 32 KiB from the L2. A token that
 * lists it: 0.5 MFLOP, 40 KiB from shared memory. */
#include "cuda_flash/kinds.h"
#include "cuda_flash/ptx/sm90_copy.cuh"
#include "cuda_flash/tensor_map.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/device/softmax.h"
#include "gpu/device/visible.h"
#include "gpu/lists.h"

#define LISTS_TOKENS 16 /* a warp each */
#define LISTS_ROWS 16   /* heads of a group, at most */
#define LISTS_DIMS 128
#define LISTS_KEYS 64 /* keys of a stage */
#define LISTS_STEP 32 /* keys of a step of the softmax */
#define LISTS_STAGES 4
#define LISTS_BLOCKS 2048 /* blocks that the tokens of an item list */
#define LISTS_BLOCKS_OF_REQUEST (1 << 16)
#define LISTS_THREADS (32 * LISTS_TOKENS)
#define LISTS_COLUMN(rows) ((rows)*128) /* bytes of 64 dims of so many rows */
#define LISTS_HALF (2 * LISTS_COLUMN(LISTS_KEYS))

struct sm90_lists_params {
    struct tensor_map k_map, v_map; /* (dim, slot, head, block) */
    gpu_list_attend list;
    int32_t box_rows, halves_shift; /* stages of a listed block: 1 << halves_shift */
    int32_t block_shift;            /* keys of a block of the cache: 1 << block_shift */
    int32_t items;                  /* at most, for each KV head */
};

struct lists_item {
    gpu_request request;
    int32_t first, tokens, head; /* first: the number of a row of q */
    int32_t end;                 /* keys that some token may see */
    int32_t stages;
};

struct lists_smem {
    alignas(1024) char stages[LISTS_STAGES][2][LISTS_HALF]; /* first: a mask of tokens per block */
    alignas(1024) char q[LISTS_TOKENS][2 * LISTS_COLUMN(LISTS_ROWS)];
    uint32_t blocks[LISTS_BLOCKS]; /* a block in the upper, its tokens in the lower half */
    uint64_t full[LISTS_STAGES];
    int32_t arrived[LISTS_STAGES]; /* warps that have used the stage, counted along */
    int32_t of_warps[LISTS_TOKENS];
    lists_item item;
};
static_assert(LISTS_BLOCKS_OF_REQUEST * 2 <= sizeof lists_smem::stages, "room for the masks");

/* Items are counted so that each request begins one: those of request r from
 * (query_start[r] - query_start[0]) / 16 + r on. */
GPU_INLINE lists_item find_item(const sm90_lists_params &a)
{
    const gpu_problem &p = a.list.attend.problem;
    const int32_t index = a.items - 1 - (int32_t)(blockIdx.x % a.items), start = p.query_start[0];
    int32_t low = 0, high = p.num_reqs - 1;
    while (low < high) {
        const int32_t middle = (low + high + 1) >> 1;
        if ((p.query_start[middle] - start) / LISTS_TOKENS + middle <= index) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    lists_item v;
    v.request = load_request(p, low);
    v.head = (int32_t)(blockIdx.x / a.items);
    const int32_t from = start + (index - low) * LISTS_TOKENS, to = from + LISTS_TOKENS;
    v.first = max(from, v.request.query_start);
    v.tokens = max(min(to, v.request.query_start + v.request.query_len) - v.first, 0);
    v.end = 0;
    if (v.tokens > 0) {
        v.end = interval_of(p, v.request, v.first + v.tokens - 1 - v.request.query_start).last + 1;
    }
    return v;
}

/* Counts a warp that has used a stage; returns how many did before. */
GPU_INLINE int32_t arrive_and_count(int32_t *counter)
{
    int32_t before;
    asm volatile("atom.acq_rel.cta.shared.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "r"(shared_address(counter))
                 : "memory");
    return before;
}

/* Copies the rows of a token; those past the group become zero. */
GPU_INLINE void copy_token(const sm90_lists_params &a, const lists_item &item, int32_t token,
                           uint32_t to, int lane)
{
    const gpu_params &p = a.list.attend;
    const char *from =
        p.q.data + (int64_t)token * p.q.row + (int64_t)item.head * p.problem.group * p.q.head;
#pragma unroll
    for (int i = lane; i < LISTS_ROWS * 16; i += 32) {
        const int row = i >> 4, chunk = i & 15;
        const bool real = row < p.problem.group;
        copy16(to + (chunk >> 3) * LISTS_COLUMN(LISTS_ROWS) + row * 128 + ((chunk ^ row) & 7) * 16,
               from + (real ? row * p.q.head + chunk * 16 : 0), real ? 16 : 0);
    }
}

/* Writes the blocks that some token lists to smem.blocks, in order; returns how many there are.
 * All threads call, warps past the tokens with `token` -1. */
GPU_INLINE int32_t join_lists(const sm90_lists_params &a, const lists_item &item, int32_t token,
                              int32_t last, lists_smem &smem)
{
    const gpu_list_attend &l = a.list;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    uint32_t *masks = (uint32_t *)smem.stages; /* a word for two blocks */
    const int32_t shift = a.halves_shift + 6, blocks = (item.end + (1 << shift) - 1) >> shift;
    const int32_t words = (blocks + 1) >> 1;
    for (int32_t i = threadIdx.x; i < words; i += LISTS_THREADS) {
        masks[i] = 0;
    }
    __syncthreads(); /* the masks are clear */
    if (token >= 0) {
        const int32_t list = l.attend.problem.lists > 1 ? item.head : 0;
        const int32_t *entries =
            l.from.entries + token * l.from.entry_token + list * l.from.entry_list;
        const int32_t count = l.from.lengths != nullptr
                                  ? l.from.lengths[token * l.from.length_token + list]
                                  : l.from.max_entries;
        for (int32_t i = lane; i < min(count, l.from.max_entries); i += 32) {
            const int32_t entry = entries[i];
            if (entry >= 0 && entry <= last >> shift) {
                atomicOr(&masks[entry >> 1], 1u << (warp + (entry & 1) * 16));
            }
        }
    }
    __syncthreads(); /* the masks are complete */
    const int32_t share = (words + LISTS_TOKENS - 1) / LISTS_TOKENS, from = warp * share;
    const int32_t to = min(from + share, words);
    int32_t own = 0;
    for (int32_t i = from + lane; i < to; i += 32) {
        own += ((masks[i] & 0xffff) != 0) + (masks[i] >> 16 != 0);
    }
    own = __reduce_add_sync(0xffffffffu, own);
    if (lane == 0) {
        smem.of_warps[warp] = own;
    }
    __syncthreads(); /* the blocks are counted */
    int32_t before = 0, all = 0;
    for (int w = 0; w < LISTS_TOKENS; w++) {
        before += w < warp ? smem.of_warps[w] : 0;
        all += smem.of_warps[w];
    }
    for (int32_t base = from; base < to; base += 32) {
        const int32_t i = base + lane;
        const uint32_t word = i < to ? masks[i] : 0, low = word & 0xffff, high = word >> 16;
        const uint32_t lows = __ballot_sync(0xffffffffu, low != 0);
        const uint32_t highs = __ballot_sync(0xffffffffu, high != 0);
        const uint32_t earlier = (1u << lane) - 1;
        const int32_t at = before + __popc(lows & earlier) + __popc(highs & earlier);
        if (low != 0) {
            smem.blocks[at] = (uint32_t)i << 17 | low;
        }
        if (high != 0) {
            smem.blocks[at + (low != 0)] = (uint32_t)i << 17 | 1u << 16 | high;
        }
        before += __popc(lows) + __popc(highs);
    }
    fence_async_proxy(); /* the masks' memory is next written by TMA */
    __syncthreads();     /* the blocks are known */
    return all;
}

/* The block of a stage and its tokens, in a word as in smem.blocks; `first` is its first key. */
GPU_INLINE uint32_t enter_stage(const sm90_lists_params &a, const lists_smem &smem, int32_t i,
                                int32_t &first)
{
    const uint32_t block = smem.blocks[i >> a.halves_shift];
    const int32_t half = i & ((1 << a.halves_shift) - 1);
    first = (int32_t)((block >> 16 << a.halves_shift) + half) * LISTS_KEYS;
    return block;
}

/* Copies stage i: a lane of one warp for each box of 64 dims of a page's keys or values. */
GPU_INLINE void copy_stage(const sm90_lists_params &a, lists_smem &smem, int32_t i, int lane)
{
    const gpu_problem &p = a.list.attend.problem;
    const int stage = i % LISTS_STAGES, column = lane & 1, is_v = lane >> 1 & 1;
    const int32_t r = smem.item.request.r, within = (lane >> 2) * a.box_rows;
    const int64_t row = p.block_table_row != nullptr ? p.block_table_row[r] : r;
    int32_t first;
    enter_stage(a, smem, i, first);
    const int32_t key = first + within;
    const bool has_box = within < LISTS_KEYS && key < smem.item.end;
    const uint32_t full = shared_address(&smem.full[stage]);
    const int boxes = __popc(__ballot_sync(0xffffffffu, has_box));
    if (lane == 0) {
        barrier_arrive_expect(full, boxes * a.box_rows * 128);
    }
    __syncwarp(); /* the bytes are announced before any copy */
    if (has_box) {
        const int32_t block = p.block_table[row * p.block_table_stride + (key >> a.block_shift)];
        copy_box(shared_address(smem.stages[stage][is_v]) + column * LISTS_COLUMN(LISTS_KEYS) +
                     within * 128,
                 is_v ? &a.v_map : &a.k_map, column * 64, key & ((1 << a.block_shift) - 1),
                 smem.item.head, block, full);
    }
}

/* What a warp has of its token. */
struct lists_rows {
    float acc_o[LISTS_DIMS / 8][4], row_max[2], row_sum[2];
};

/* Adds the keys of a step. limit: the last of them that the token sees, where PARTIAL. */
template <int KIND, bool PARTIAL>
GPU_INLINE void add_keys(lists_rows &v, uint32_t q, uint32_t k, uint32_t values, float scale,
                         int32_t limit, int lane)
{
    constexpr int column = LISTS_COLUMN(LISTS_KEYS), sub = LISTS_COLUMN(16);
    constexpr int subs = LISTS_STEP / 16;
    float acc_s[2 * subs][4] = {};
    uint32_t a[4], b[4];
#pragma unroll
    for (int kk = 0; kk < LISTS_DIMS / 16; kk++) {
        load4(a, (q ^ (kk & 3) << 5) + (kk >> 2) * LISTS_COLUMN(LISTS_ROWS));
#pragma unroll
        for (int n = 0; n < subs; n++) {
            load4(b, (k ^ (kk & 3) << 5) + (kk >> 2) * column + n * sub);
            multiply<KIND>(acc_s[2 * n], a, b[0], b[1]);
            multiply<KIND>(acc_s[2 * n + 1], a, b[2], b[3]);
        }
    }
    const int first = (lane & 3) * 2; /* the lane's first key */
    float prev[2] = {v.row_max[0], v.row_max[1]}, largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < 2 * subs; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (PARTIAL && n * 8 + first + (e & 1) > limit) {
                acc_s[n][e] = -INFINITY;
            }
            largest[e >> 1] = fmaxf(largest[e >> 1], acc_s[n][e]);
        }
    }
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
        largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 2));
        v.row_max[i] = fmaxf(prev[i], largest[i] * scale);
        base[i] = softmax_base(v.row_max[i]);
    }
    if (__any_sync(0xffffffffu, prev[0] != v.row_max[0] || prev[1] != v.row_max[1])) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float rescale_o = fast_exp2(prev[i] - base[i]);
            v.row_sum[i] *= rescale_o;
#pragma unroll
            for (int n = 0; n < LISTS_DIMS / 8; n++) {
                v.acc_o[n][2 * i] *= rescale_o;
                v.acc_o[n][2 * i + 1] *= rescale_o;
            }
        }
    }
    uint32_t probs[subs][4];
#pragma unroll
    for (int n = 0; n < 2 * subs; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            acc_s[n][e] = fast_exp2(fmaf(acc_s[n][e], scale, -base[e >> 1]));
            v.row_sum[e >> 1] += acc_s[n][e];
        }
        probs[n >> 1][(n & 1) * 2] = pack2<KIND>(acc_s[n][0], acc_s[n][1]);
        probs[n >> 1][(n & 1) * 2 + 1] = pack2<KIND>(acc_s[n][2], acc_s[n][3]);
    }
#pragma unroll
    for (int n = 0; n < subs; n++) {
        uint32_t seen[2]; /* halves of values that the token sees; 0 x NaN is NaN */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int key = n * 16 + first + i * 8;
            seen[i] = (key <= limit ? 0xffffu : 0) | (key + 1 <= limit ? 0xffff0000u : 0);
        }
#pragma unroll
        for (int d = 0; d < LISTS_DIMS / 16; d++) {
            load4_transposed(b, (values ^ (d & 3) << 5) + (d >> 2) * column + n * sub);
            if (PARTIAL) {
                b[0] &= seen[0], b[1] &= seen[1], b[2] &= seen[0], b[3] &= seen[1];
            }
            multiply<KIND>(v.acc_o[2 * d], probs[n], b[0], b[1]);
            multiply<KIND>(v.acc_o[2 * d + 1], probs[n], b[2], b[3]);
        }
    }
}

/* Writes a token's rows by way of its queries' memory, in which they are whole. */
template <int KIND>
GPU_INLINE void write_token(const sm90_lists_params &a, const lists_item &item, int32_t token,
                            lists_rows &v, char *memory, int lane)
{
    const gpu_params &p = a.list.attend;
    const int64_t heads = (int64_t)item.head * p.problem.group;
    __syncwarp(); /* the queries are read */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = (lane >> 2) + i * 8;
        const int64_t head = heads + row;
        const bool real = row < p.problem.group, has_lse = real && (lane & 3) == 0;
        v.row_sum[i] += __shfl_xor_sync(0xffffffffu, v.row_sum[i], 1);
        v.row_sum[i] += __shfl_xor_sync(0xffffffffu, v.row_sum[i], 2);
        const float sink =
            p.problem.sinks != nullptr && real ? p.problem.sinks[head] * LOG2E : -INFINITY;
        const float factor = softmax_close_base2(
            sink, v.row_max[i], v.row_sum[i],
            p.lse.data != nullptr && has_lse ? p.lse.data + head * p.lse.head + token * p.lse.row
                                             : nullptr);
#pragma unroll
        for (int n = 0; n < LISTS_DIMS / 8; n++) {
            *(uint32_t *)(memory + row * 256 + ((n ^ row) & 15) * 16 + (lane & 3) * 4) =
                pack2<KIND>(v.acc_o[n][2 * i] * factor, v.acc_o[n][2 * i + 1] * factor);
        }
    }
    __syncwarp(); /* the rows are written */
    for (int i = lane; i < p.problem.group * 16; i += 32) {
        const int row = i >> 4, chunk = i & 15;
        *(uint4 *)(p.out.data + (int64_t)token * p.out.row + (heads + row) * p.out.head +
                   chunk * 16) = *(const uint4 *)(memory + row * 256 + ((chunk ^ row) & 15) * 16);
    }
}

template <int KIND>
__global__ void __launch_bounds__(LISTS_THREADS, 1)
    attend_lists(const __grid_constant__ sm90_lists_params a)
{
    extern __shared__ __align__(1024) char memory[];
    lists_smem &smem = *(lists_smem *)memory;
    const gpu_problem &p = a.list.attend.problem;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    wait_for_earlier_kernels();
    let_later_kernels_begin();
    int32_t last = -1; /* the last key that the token sees */
    {
        lists_item item = find_item(a);
        if (item.tokens == 0) {
            return;
        }
        if (threadIdx.x < LISTS_STAGES) {
            barrier_init(shared_address(&smem.full[threadIdx.x]), 1);
            smem.arrived[threadIdx.x] = 0;
            fence_barriers();
        }
        const int32_t token = warp < item.tokens ? item.first + warp : -1;
        if (token >= 0) {
            last = interval_of(p, item.request, token - item.request.query_start).last;
            copy_token(a, item, token, shared_address(smem.q[warp]), lane);
        }
        item.stages = join_lists(a, item, token, last, smem) << a.halves_shift;
        if (threadIdx.x == 0) {
            smem.item = item;
        }
    }
    __syncthreads(); /* the item is known */
    if (warp < min(LISTS_STAGES, smem.item.stages)) {
        copy_stage(a, smem, warp, lane);
    }
    wait_for_copies();
    __syncwarp(); /* the queries of the warp have arrived */
    lists_rows v = {};
    v.row_max[0] = v.row_max[1] = -INFINITY;
    /* rows of ldmatrix, whose chunks are swizzled */
    const int row = lane & 7, upper = lane >> 3 & 1, right = lane >> 4;
    const uint32_t by_rows = (lane & 15) * 128 + (right ^ row) * 16; /* queries, values */
    const uint32_t of_keys = (right * 8 + row) * 128 + (upper ^ row) * 16;
    const uint32_t q = shared_address(smem.q[warp]) + by_rows;
    for (int32_t i = 0; i < smem.item.stages; i++) {
        int32_t first;
        const uint32_t block = enter_stage(a, smem, i, first);
        barrier_wait(shared_address(&smem.full[i % LISTS_STAGES]), i / LISTS_STAGES & 1);
        if ((block >> warp & 1) != 0) {
            const uint32_t keys = shared_address(smem.stages[i % LISTS_STAGES][0]);
#pragma unroll 1
            for (int32_t at = 0; at < LISTS_KEYS && first + at <= last; at += LISTS_STEP) {
                const uint32_t k = keys + at * 128 + of_keys;
                const uint32_t values = keys + at * 128 + by_rows + LISTS_HALF;
                if (first + at + LISTS_STEP - 1 <= last) {
                    add_keys<KIND, false>(v, q, k, values, p.scale * LOG2E, 0, lane);
                } else {
                    add_keys<KIND, true>(v, q, k, values, p.scale * LOG2E, last - first - at, lane);
                }
            }
        }
        __syncwarp(); /* all lanes have read the stage */
        int32_t arrived = 0;
        if (lane == 0) {
            arrived = arrive_and_count(&smem.arrived[i % LISTS_STAGES]);
        }
        /* the last warp that leaves a stage fills it again */
        if (__shfl_sync(0xffffffffu, arrived, 0) % LISTS_TOKENS == LISTS_TOKENS - 1 &&
            i + LISTS_STAGES < smem.item.stages) {
            copy_stage(a, smem, i + LISTS_STAGES, lane);
        }
    }
    if (warp < smem.item.tokens) {
        write_token<KIND>(a, smem.item, smem.item.first + warp, v, smem.q[warp], lane);
    }
}

/* With a NULL, only loads the kernel. */
template <int KIND> static cudaError_t launch_kind(const sm90_lists_params *a, cudaStream_t stream)
{
    constexpr int smem = sizeof(lists_smem);
    if (a == nullptr) {
        return cudaFuncSetAttribute(attend_lists<KIND>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    smem);
    }
    return launch_kernel(attend_lists<KIND>, *a,
                         (unsigned)(a->items * a->list.attend.problem.num_kv_heads), LISTS_THREADS,
                         smem, stream);
}

static const char *load(const struct gpu_device *device)
{
    device_scope inside(device);
    const cudaError_t error = launch_kind<KIND_BF16>(nullptr, nullptr);
    return cause_of(error ? error : launch_kind<KIND_F16>(nullptr, nullptr));
}

static bool map_cache(const struct gpu_device *device, const gpu_problem &p,
                      const struct gpu_cache &cache, int64_t blocks, int32_t box_rows,
                      struct tensor_map *map)
{
    const struct map_shape shape = {
        4,
        2,
        128,
        {LISTS_DIMS, (uint64_t)p.block_size, (uint64_t)p.num_kv_heads, (uint64_t)blocks},
        {(uint64_t)cache.slot, (uint64_t)cache.head, (uint64_t)cache.block},
        {64, (uint32_t)box_rows, 1, 1}};
    return tensor_map_encode(device, cache.data, &shape, map);
}

/* Neighbouring tokens share copies of a block, so each request needs many; and items are not cut,
 * so they have to be as many as multiprocessors. */
static bool takes(const struct gpu_device *device, const struct gpu_list_attend *l)
{
    const gpu_params &p = l->attend;
    const gpu_problem &problem = p.problem;
    const uint64_t bits = (uint64_t)(uintptr_t)p.q.data | (uint64_t)p.q.row | (uint64_t)p.q.head |
                          (uint64_t)(uintptr_t)p.out.data | (uint64_t)p.out.row |
                          (uint64_t)p.out.head;
    const int32_t size = problem.block_size;
    const bool is_short = p.q.dtype == ATTN_DTYPE_BF16 || p.q.dtype == ATTN_DTYPE_F16;
    const bool plain = problem.window_left < 0 && problem.window_right < 0 &&
                       problem.chunk_size == 0 && problem.alibi == 0 && problem.soft_cap <= 0.0f &&
                       problem.spans == NULL && problem.tree == NULL && problem.scale > 0.0f &&
                       p.p_dtype < 0;
    const int64_t items = (int64_t)l->tokens * problem.num_kv_heads / LISTS_TOKENS;
    return plain && is_short && p.k.dtype == p.q.dtype && p.v.dtype == p.q.dtype &&
           p.out.dtype == p.q.dtype && p.k.form == GPU_ROW_NUMBERS && p.v.form == GPU_ROW_NUMBERS &&
           p.k.pack == 0 && p.v.pack == 0 && p.k.scale == NULL && p.v.scale == NULL &&
           p.k.scale_host == 1.0f && p.v.scale_host == 1.0f && problem.paged &&
           problem.head_size == LISTS_DIMS && problem.head_size_v == LISTS_DIMS &&
           problem.group <= LISTS_ROWS && bits % 16 == 0 && size >= 8 && (size & (size - 1)) == 0 &&
           (l->from.granularity == LISTS_KEYS || l->from.granularity == 2 * LISTS_KEYS) &&
           l->from.max_entries * LISTS_TOKENS <= LISTS_BLOCKS &&
           problem.block_table_stride > 0 && /* else it does not say how long a request may be */
           problem.block_table_stride * size / l->from.granularity < LISTS_BLOCKS_OF_REQUEST &&
           problem.lists <= problem.num_kv_heads && items >= device->num_sms &&
           l->tokens >= problem.num_reqs * LISTS_TOKENS;
}

static bool attend(const struct gpu_device *device, const struct gpu_list_attend *l, void *stream,
                   const char **cause)
{
    sm90_lists_params a = {};
    const gpu_problem &p = l->attend.problem;
    a.list = *l;
    if (!takes(device, l)) {
        return false;
    }
    a.box_rows = p.block_size < LISTS_KEYS ? p.block_size : LISTS_KEYS;
    a.halves_shift = l->from.granularity > LISTS_KEYS ? 1 : 0;
    a.block_shift = __builtin_ctz((unsigned)p.block_size);
    a.items = p.num_tokens / LISTS_TOKENS + p.num_reqs;
    if (!map_cache(device, p, l->attend.k, l->blocks, a.box_rows, &a.k_map) ||
        !map_cache(device, p, l->attend.v, l->blocks, a.box_rows, &a.v_map)) {
        return false;
    }
    device_scope inside(device);
    *cause = cause_of(l->attend.q.dtype == ATTN_DTYPE_BF16
                          ? launch_kind<KIND_BF16>(&a, (cudaStream_t)stream)
                          : launch_kind<KIND_F16>(&a, (cudaStream_t)stream));
    return true;
}

extern "C" const struct gpu_list_kernel sm90_lists;
const struct gpu_list_kernel sm90_lists = {load, attend};
