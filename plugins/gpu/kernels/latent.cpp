/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla and attend_mla_sparse in float32, for any head count, dtype and layout of rows. A
 * group has an item's LATENT_ROWS rows (query, head); a tile of LATENT_KEYS keys is converted to
 * float32 in shared memory once for all of them. For Q K^T a warp has whole rows, with its query in
 * registers; for P V a thread has one dim of all rows. 2 * (576 + 512) FLOPs for each row and key
 * on FMA units: bound by their rate, or with few heads by reading keys. */
#include "gpu/device/latent.h"
#include "gpu/device/search.h"
#include "gpu/device/softmax.h"
#include "gpu/device/visible.h"

#define LATENT_KEYS 16
#define LATENT_THREADS GPU_THREADS_latent
#define LATENT_WARP_ROWS (LATENT_ROWS * GPU_LANES / LATENT_THREADS)
#define LATENT_DIMS (LATENT_MAX_SIZE / GPU_LANES) /* elements of a query in a lane */

static_assert(LATENT_THREADS >= LATENT_MAX_RANK, "a thread for each dim of the values");

/* The query and head of row `row` of an item; -1: out of range. */
struct latent_row {
    int32_t token, index, head;
};

struct latent_memory {
    float key[LATENT_KEYS][LATENT_MAX_SIZE];
    float weight[LATENT_KEYS][LATENT_ROWS];
    float scores_scale[LATENT_ROWS], factor[LATENT_ROWS];
    uint32_t seen[LATENT_ROWS]; /* bit j: the row sees key j of the tile */
    int32_t position[LATENT_KEYS];
    latent_row rows[LATENT_ROWS];
    int32_t taken, last_one;
};

/* A warp's state of its rows: queries, row_max and row_sum so far. */
struct latent_queries {
    float q[LATENT_WARP_ROWS][LATENT_DIMS];
    gpu_interval range[LATENT_WARP_ROWS];
    float row_max[LATENT_WARP_ROWS], row_sum[LATENT_WARP_ROWS];
    float slope[LATENT_WARP_ROWS];
};

/* A thread's dim of the values. */
struct latent_values {
    float o[LATENT_ROWS];
};

/* Loads the warp's rows; memory.rows must be written. */
GPU_INLINE void enter_rows(const gpu_latent_params &p, const gpu_request &request,
                           const latent_memory &memory, latent_queries &w)
{
    int32_t lane = lane_index();
    float scale = query_scale(p.attend, 0) * p.attend.problem.scale;
#pragma unroll
    for (int i = 0; i < LATENT_WARP_ROWS; i++) {
        latent_row row = memory.rows[warp_index() * LATENT_WARP_ROWS + i];
        const char *latent = p.attend.q.data + (int64_t)row.token * p.attend.q.row +
                             (int64_t)row.head * p.attend.q.head;
        const char *rope =
            p.q_rope.data + (int64_t)row.token * p.q_rope.row + (int64_t)row.head * p.q_rope.head;
        w.row_max[i] = -INFINITY;
        w.row_sum[i] = w.slope[i] = 0.0f;
#pragma unroll
        for (int n = 0; n < LATENT_DIMS; n++) {
            int32_t d = n * GPU_LANES + lane;
            w.q[i][n] = 0.0f;
            if (row.token >= 0 && d < p.rank) {
                w.q[i][n] = number_load(latent, p.attend.q.dtype, d) * scale;
            } else if (row.token >= 0 && d < p.rank + p.rope) {
                w.q[i][n] = number_load(rope, p.q_rope.dtype, d - p.rank) * scale;
            }
        }
        w.range[i] = interval_of(p.attend.problem, request, row.token >= 0 ? row.index : 0);
        if (row.token >= 0 && p.attend.problem.slopes != nullptr) {
            w.slope[i] = p.attend.problem.slopes[row.head];
        }
    }
}

/* Loads the keys at memory.position as float32; zero for position -1. */
GPU_INLINE void load_keys(const gpu_latent_params &p, int64_t table, latent_memory &memory)
{
    const gpu_cache &cache = p.attend.k;
    float scale = cache.form == GPU_ROW_NUMBERS ? cache_scale(cache, 0) : 1.0f;
    int32_t size = p.rank + p.rope;
    for (int32_t j = warp_index(); j < LATENT_KEYS; j += LATENT_THREADS / GPU_LANES) {
        int32_t position = memory.position[j], index = position / p.attend.problem.block_size;
        const char *row = nullptr;
        const uint8_t *scales = nullptr;
        if (position >= 0) {
            const int64_t block = p.attend.problem.block_table[table + index];
            const int32_t slot = position - index * p.attend.problem.block_size;
            row = row_at(cache, block, slot, 0);
            scales = latent_scales(cache, block, slot);
        }
        for (int32_t d = lane_index(); d < size; d += GPU_LANES) {
            memory.key[j][d] = position >= 0 ? latent_number(cache, row, scales, scale, d) : 0.0f;
        }
    }
}

/* Computes scores and P of the tile's keys for the warp's rows, and updates row_max and row_sum. */
GPU_INLINE void score_keys(const gpu_latent_params &p, const gpu_request &request,
                           latent_memory &memory, latent_queries &w)
{
    const gpu_params &a = p.attend;
    int32_t lane = lane_index(), size = p.rank + p.rope;
#pragma unroll
    for (int i = 0; i < LATENT_WARP_ROWS; i++) {
        int32_t r = warp_index() * LATENT_WARP_ROWS + i;
        latent_row row = memory.rows[r];
        float own = 0.0f; /* lane j has the score of key j */
#pragma unroll 4
        for (int j = 0; j < LATENT_KEYS; j++) {
            float s = 0.0f;
#pragma unroll
            for (int n = 0; n < LATENT_DIMS; n++) {
                int32_t d = n * GPU_LANES + lane;
                s += d < size ? w.q[i][n] * memory.key[j][d] : 0.0f;
            }
            s = warp_sum(s);
            own = lane == j ? s : own;
        }
        int32_t position = lane < LATENT_KEYS ? memory.position[lane] : -1;
        bool sees = row.token >= 0 && position >= 0 && position >= w.range[i].first &&
                    position <= w.range[i].last;
        if (row.token >= 0 && position >= 0 &&
            (a.problem.spans != nullptr || a.problem.tree != nullptr)) {
            sees = sees_slow(a.problem, request, row.index, w.range[i].position, position, sees);
        }
        own =
            a.problem.soft_cap > 0.0f ? a.problem.soft_cap * tanhf(own / a.problem.soft_cap) : own;
        if (sees) {
            own +=
                bias_of(a.problem, request, row.index, w.range[i].position, w.slope[i], position);
        }
        sees = sees && own != -INFINITY;
        own = sees ? own : -INFINITY;
        float high = fmaxf(w.row_max[i], warp_largest(own, false));
        float base = softmax_base(high);
        float weight = sees ? expf(own - base) : 0.0f, scores_scale = expf(w.row_max[i] - base);
        uint32_t bits = sees ? 1u << lane : 0u;
        for (int d = GPU_LANES / 2; d > 0; d >>= 1) {
            bits |= lane_xor(bits, d);
        }
        w.row_sum[i] = w.row_sum[i] * scores_scale + warp_sum(weight);
        w.row_max[i] = high;
        if (lane < LATENT_KEYS) {
            memory.weight[lane][r] = weight;
        }
        if (lane == 0) {
            memory.scores_scale[r] = scores_scale;
            memory.seen[r] = bits;
        }
    }
}

/* acc_o += P V in this thread's dim. Hidden keys are skipped, since they may be non-finite. */
GPU_INLINE void add_values(const gpu_latent_params &p, const latent_memory &memory,
                           latent_values &v)
{
    int32_t d = (int32_t)thread_index();
    if (d >= p.rank) {
        return;
    }
#pragma unroll
    for (int r = 0; r < LATENT_ROWS; r++) {
        v.o[r] *= memory.scores_scale[r];
    }
#pragma unroll 2
    for (int j = 0; j < LATENT_KEYS; j++) {
        float x = memory.key[j][d];
        if (isfinite(x)) {
#pragma unroll
            for (int r = 0; r < LATENT_ROWS; r++) {
                v.o[r] += memory.weight[j][r] * x;
            }
        } else {
#pragma unroll
            for (int r = 0; r < LATENT_ROWS; r++) {
                v.o[r] += (memory.seen[r] >> j & 1) != 0 ? memory.weight[j][r] * x : 0.0f;
            }
        }
    }
}

/* Processes the tile at memory.position, which all threads have written. */
GPU_INLINE void visit_tile(const gpu_latent_params &p, const gpu_request &request, int64_t table,
                           latent_memory &memory, latent_queries &w, latent_values &v)
{
    sync_group(); /* positions are written; the previous tile has been read */
    load_keys(p, table, memory);
    sync_group(); /* keys are written */
    score_keys(p, request, memory, w);
    sync_group(); /* P is written */
    add_values(p, memory, v);
}

GPU_INLINE void clear_values(latent_values &v)
{
#pragma unroll
    for (int r = 0; r < LATENT_ROWS; r++) {
        v.o[r] = 0.0f;
    }
}

/* Computes a row's final factor and log-sum-exp. */
GPU_INLINE float finish_row(const gpu_latent_params &p, latent_row row, float row_max,
                            float row_sum, bool writes)
{
    const gpu_params &a = p.attend;
    if (row.token < 0) {
        return 0.0f;
    }
    float sink = a.problem.sinks != nullptr ? a.problem.sinks[row.head] : -INFINITY;
    bool wanted = writes && a.lse.data != nullptr;
    return softmax_close(sink, row_max, row_sum,
                         wanted ? &a.lse.data[row.head * a.lse.head + row.token * a.lse.row]
                                : nullptr);
}

GPU_INLINE void write_values(const gpu_latent_params &p, const latent_memory &memory,
                             const latent_values &v)
{
    int32_t d = (int32_t)thread_index();
    if (d >= p.rank) {
        return;
    }
#pragma unroll
    for (int r = 0; r < LATENT_ROWS; r++) {
        latent_row row = memory.rows[r];
        if (row.token >= 0) {
            char *to = p.attend.out.data + (int64_t)row.token * p.attend.out.row +
                       (int64_t)row.head * p.attend.out.head;
            number_store(to, p.attend.out.dtype, d, v.o[r] * memory.factor[r]);
        }
    }
}

GPU_INLINE void write_rows(const gpu_latent_params &p, latent_memory &memory,
                           const latent_queries &w, const latent_values &v)
{
    if (lane_index() == 0) {
#pragma unroll
        for (int i = 0; i < LATENT_WARP_ROWS; i++) {
            int32_t r = warp_index() * LATENT_WARP_ROWS + i;
            memory.factor[r] = finish_row(p, memory.rows[r], w.row_max[i], w.row_sum[i], true);
        }
    }
    sync_group(); /* factors are written */
    write_values(p, memory, v);
}

/* Writes a part: [LATENT_ROWS][LATENT_MAX_RANK] of acc_o, then row_max and row_sum of each row. */
#define LATENT_PART (LATENT_ROWS * (LATENT_MAX_RANK + 2))

/* Merges parts first .. last of an item, always in this order, so that the bits are reproducible.
 */
GPU_INLINE void merge_parts(const gpu_latent_params &p, const float *parts, int32_t count,
                            latent_memory &memory)
{
    int32_t t = (int32_t)thread_index(), d = min(t, LATENT_MAX_RANK - 1);
    const float *row_max = parts + LATENT_ROWS * LATENT_MAX_RANK, *row_sum = row_max + LATENT_ROWS;
    latent_values v;
    clear_values(v);
    for (int r = 0; r < LATENT_ROWS; r++) {
        float high = -INFINITY, sum = 0.0f, o = 0.0f;
        for (int32_t i = 0; i < count; i++) {
            high = fmaxf(high, row_max[(int64_t)i * LATENT_PART + r]);
        }
        float base = softmax_base(high);
        for (int32_t i = 0; i < count; i++) {
            float scores_scale = expf(row_max[(int64_t)i * LATENT_PART + r] - base);
            sum += scores_scale * row_sum[(int64_t)i * LATENT_PART + r];
            o += scores_scale * parts[(int64_t)i * LATENT_PART + r * LATENT_MAX_RANK + d];
        }
#pragma unroll
        for (int k = 0; k < LATENT_ROWS; k++) { /* indexing by r would put v into local memory */
            v.o[k] = k == r ? o : v.o[k];
        }
        if (t == 0) {
            memory.factor[r] = finish_row(p, memory.rows[r], high, sum, true);
        }
    }
    sync_group(); /* factors are written */
    write_values(p, memory, v);
}

/* Here a segment belongs to one item: row tiles of one KV head, cut by keys (schedule.by_item). */
GPU_INLINE void attend_segment(const gpu_latent_params &p, const gpu_segment &segment,
                               latent_memory &memory)
{
    const gpu_params &a = p.attend;
    const gpu_row_tile &item = segment.row_tile;
    gpu_request request = request_of_row_tile(item);
    int32_t t = (int32_t)thread_index();
    int32_t tile = segment.begin - item.start, count = segment.end - segment.begin;
    sync_group(); /* the previous segment is finished */
    if (t < LATENT_ROWS) {
        int32_t at = item.first_row + t, index = at / a.problem.group;
        bool real = t < item.num_rows;
        memory.rows[t] = {real ? item.query_start + index : -1, index,
                          at - index * a.problem.group};
    }
    sync_group(); /* rows are written */
    latent_queries w;
    latent_values v;
    enter_rows(p, request, memory, w);
    clear_values(v);
    int32_t base = (item.k0 & ~(a.schedule.tile - 1)) + tile * a.schedule.tile;
    int32_t first = max(base, item.k0), end = min(base + count * a.schedule.tile, item.k1);
    /* Tiles lie at fixed positions, so that a row's bits do not depend on the rows of its item. */
    for (int32_t j = first & ~(LATENT_KEYS - 1); j < end; j += LATENT_KEYS) {
        if (t < LATENT_KEYS) {
            int32_t key = j + t;
            memory.position[t] = key >= first && key < end && key < item.length ? key : -1;
        }
        visit_tile(p, request, item.table, memory, w, v);
    }
    if (count == item.num_tiles) {
        write_rows(p, memory, w, v);
        return;
    }
    float *part = a.schedule.parts + (int64_t)segment.index * LATENT_PART;
#pragma unroll
    for (int r = 0; r < LATENT_ROWS; r++) {
        if (t < LATENT_MAX_RANK) {
            part[r * LATENT_MAX_RANK + t] = t < p.rank ? v.o[r] : 0.0f;
        }
    }
    if (lane_index() == 0) {
#pragma unroll
        for (int i = 0; i < LATENT_WARP_ROWS; i++) {
            int32_t r = warp_index() * LATENT_WARP_ROWS + i;
            part[LATENT_ROWS * LATENT_MAX_RANK + r] = w.row_max[i];
            part[LATENT_ROWS * (LATENT_MAX_RANK + 1) + r] = w.row_sum[i];
        }
    }
    release_stores(); /* each warp's own */
    sync_group();     /* the part is written, and thread 0 publishes it */
    if (t == 0) {
        int32_t *arrived = &a.schedule.arrived[segment.row_tile_index];
        bool last = add_and_publish(arrived, 1) == segment.last - segment.first;
        if (last) {
            *arrived = 0; /* ready for the next launch of this plan */
        }
        memory.last_one = last;
    }
    sync_group();
    if (memory.last_one) {
        acquire_loads(); /* each warp's own */
        merge_parts(p, a.schedule.parts + (int64_t)segment.first * LATENT_PART,
                    segment.last - segment.first + 1, memory);
    }
}

/* The first segment is the group's own; it draws further ones. The group that draws the last number
 * resets the counter. */
GPU_KERNEL(latent, gpu_latent_params)
{
    GPU_SHARED latent_memory memory;
    const gpu_params &a = p.attend;
    int32_t segments = a.schedule.header->segments, index = (int32_t)group_index();
    while (index < segments) {
        attend_segment(p, a.schedule.segments[index], memory);
        if (segments <= (int32_t)group_count()) {
            break;
        }
        sync_group(); /* memory.taken has been read */
        if (thread_index() == 0) {
            memory.taken = atomic_add(&a.schedule.header->taken, 1);
            if (memory.taken == segments - 1) {
                a.schedule.header->taken = 0;
            }
        }
        sync_group(); /* the number is written */
        index = (int32_t)group_count() + memory.taken;
    }
}

/* Items are (token, LATENT_ROWS heads or fewer) with the keys of their list. */
GPU_KERNEL(latent_sparse, gpu_latent_params)
{
    GPU_SHARED latent_memory memory;
    const gpu_params &a = p.attend;
    int32_t first = a.problem.query_start[0], end = a.problem.query_start[a.problem.num_reqs];
    int32_t heads = min(p.list_heads, LATENT_ROWS), keys = p.entry_keys;
    int32_t blocks = (a.problem.num_q_heads + heads - 1) / heads;
    int32_t t = (int32_t)thread_index();
    for (int64_t i = group_index(); i < (int64_t)(end - first) * blocks; i += group_count()) {
        int32_t token = first + (int32_t)(i / blocks);
        int32_t first_head = (int32_t)(i % blocks) * heads, list = first_head / p.list_heads;
        gpu_request request =
            load_request(a.problem, find_last(a.problem.query_start, a.problem.num_reqs, token));
        int64_t table =
            (int64_t)(a.problem.block_table_row != nullptr ? a.problem.block_table_row[request.r]
                                                           : request.r) *
            a.problem.block_table_stride;
        sync_group(); /* the previous item is finished */
        if (t < LATENT_ROWS) {
            bool real = t < heads && first_head + t < a.problem.num_q_heads;
            memory.rows[t] = {real ? token : -1, token - request.query_start, first_head + t};
        }
        sync_group(); /* rows are written */
        latent_queries w;
        latent_values v;
        enter_rows(p, request, memory, w);
        clear_values(v);
        const int32_t *entries = p.topk + token * p.topk_stride + list * p.list_stride;
        int32_t end_key = p.num_topk * keys;
        if (p.list_lengths != nullptr) {
            end_key = min(end_key, p.list_lengths[token * p.length_stride + list] * keys);
        }
        for (int32_t n = 0; n < end_key; n += LATENT_KEYS) {
            if (t < LATENT_KEYS) {
                int32_t entry = n + t < end_key ? entries[(n + t) / keys] : -1;
                bool has = entry >= 0 && entry <= request.length / keys;
                int32_t j = has ? entry * keys + (n + t) % keys : -1;
                memory.position[t] = j < request.length ? j : -1;
            }
            visit_tile(p, request, table, memory, w, v);
        }
        write_rows(p, memory, w, v);
    }
}

/* A warp for each row. */
GPU_KERNEL(latent_write, gpu_latent_write_params)
{
    let_later_kernels_begin();
    for (int64_t i = warp_of_grid(GPU_THREADS_latent_write); i < p.num_slots;
         i += warps_of_grid(GPU_THREADS_latent_write)) {
        int64_t slot = p.slots[i];
        if (slot >= 0) {
            const int64_t block = slot / p.block_size, at = slot - block * p.block_size;
            store_latent_row(p, (char *)row_at(p.to, block, at, 0), latent_scales(p.to, block, at),
                             p.latent.data + i * p.latent.row, p.rope.data + i * p.rope.row);
        }
    }
}

/* As gather_rows in gather.cpp, for whole latent rows. */
GPU_KERNEL(latent_gather, gpu_latent_gather_params)
{
    const gpu_gather_params &g = p.gather;
    float scale = g.from.form == GPU_ROW_NUMBERS ? cache_scale(g.from, 0) : 1.0f;
    int32_t begin = g.out_start[0], end = g.out_start[g.num_reqs];
    for (int64_t i = warp_of_grid(GPU_THREADS_latent_gather); i < end - begin;
         i += warps_of_grid(GPU_THREADS_latent_gather)) {
        int32_t row = begin + (int32_t)i, r = find_last(g.out_start, g.num_reqs, row);
        int32_t j = (g.first_key != nullptr ? g.first_key[r] : 0) + row - g.out_start[r];
        int64_t table = g.block_table_row != nullptr ? g.block_table_row[r] : r;
        int32_t index = j / g.block_size, slot = j - index * g.block_size;
        const int64_t block = g.block_table[table * g.block_table_stride + index];
        const char *from = row_at(g.from, block, slot, 0);
        const uint8_t *scales = latent_scales(g.from, block, slot);
        for (int32_t d = lane_index(); d < g.from.head_size; d += GPU_LANES) {
            number_store(g.to.data + row * g.to.row, g.to.dtype, d,
                         latent_number(g.from, from, scales, scale, d));
        }
    }
}
