/* SPDX-License-Identifier: Apache-2.0 */
/* The plain attention kernel: a CTA for each (query, head), float32 arithmetic, head sizes up to
 * 512, any element type and strides. It serves what the matrix kernels do not. Each warp processes
 * 2 keys at a time, so that both rows are in flight; the warps' results are combined at the end. 2
 * * D elements and 4 * D FLOPs for each key: bound by the instructions that decode elements. */
#include "gpu/device/rows.h"
#include "gpu/device/search.h"
#include "gpu/device/softmax.h"
#include "gpu/device/visible.h"

#define PLAIN_WARPS (GPU_THREADS_plain / GPU_LANES)
#define PLAIN_KEYS 2 /* keys of a warp's step */
#define PLAIN_CHUNK 4
#define PLAIN_MAX_SIZE (GPU_LANES * LANE_DIMS)

/* A query of a head: its lane's dims d = i * GPU_LANES + lane, and the accumulators. */
struct plain_row {
    gpu_request request;
    gpu_interval range;
    int32_t index, head, kv_head, k0, k1;
    int64_t table; /* where the list's units begin */
    float slope;
    float q[LANE_DIMS], o[LANE_DIMS], row_max, row_sum;
};

struct plain_memory {
    float row_max[PLAIN_WARPS], row_sum[PLAIN_WARPS];
    float o[PLAIN_WARPS][PLAIN_MAX_SIZE];
};

GPU_INLINE void enter_query(const gpu_params &p, int32_t token, int32_t head, plain_row &row)
{
    row.request =
        load_request(p.problem, find_last(p.problem.query_start, p.problem.num_reqs, token));
    row.index = token - row.request.query_start;
    row.range = interval_of(p.problem, row.request, row.index);
    row.head = head;
    row.kv_head = head / p.problem.group;
    row.table = 0;
    if (p.problem.units != nullptr) {
        gpu_row_tile tile = {};
        tile.request = token - p.problem.query_start[0];
        enter_list(p.problem, tile, p.problem.lists == p.problem.num_kv_heads ? row.kv_head : head);
        row.table = tile.table;
        row.request = {tile.request, token, 1, 0, tile.length, 0};
        row.index = 0;
        row.range = interval_of(p.problem, row.request, 0);
    }
    row.slope = p.problem.slopes != nullptr ? p.problem.slopes[head] : 0.0f;
    key_range(p.problem, row.request, row.index * p.problem.group, row.index * p.problem.group + 1,
              &row.k0, &row.k1);
    row.k1 = min(row.k1, row.request.length);
}

/* Hadamard-transformed keys need a transformed query: <q, k> = <H S q, H S k> / D, for levels <H q
 * / sqrt(D), levels>. */
GPU_INLINE void load_query(const gpu_params &p, int32_t token, int lane, plain_row &row)
{
    const char *from = p.q.data + token * p.q.row + row.head * p.q.head;
    float scale = query_scale(p, row.kv_head);
    bool turned = is_turned(p.k);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        int d = i * GPU_LANES + lane;
        row.q[i] = d < p.problem.head_size ? number_load(from, p.q.dtype, d) * scale : 0.0f;
        row.q[i] *= turned && d < p.problem.head_size ? turn_factor(p.k, d) : 1.0f;
        row.o[i] = 0.0f;
    }
    if (turned) {
        hadamard(row.q, p.problem.head_size, lane);
    }
    row.row_max = -INFINITY;
    row.row_sum = 0.0f;
}

/* The location of a key and the bias of its position; -inf: hidden. */
struct plain_key {
    int64_t block, slot;
    float bias;
};

GPU_INLINE plain_key find_key(const gpu_params &p, const plain_row &row, int32_t j)
{
    const gpu_request &request = row.request;
    plain_key key = {request.key_start + j, 0, -INFINITY};
    bool sees = j < row.k1 && j >= row.range.first && j <= row.range.last;
    if (j < row.k1 && (p.problem.spans != nullptr || p.problem.tree != nullptr)) {
        sees = sees_slow(p.problem, request, row.index, row.range.position, j, sees);
    }
    if (sees) {
        key.bias = bias_of(p.problem, request, row.index, row.range.position, row.slope, j);
    }
    if (p.problem.units != nullptr && key.bias != -INFINITY) {
        find_listed(p.problem, row.table, j, key.block, key.slot);
    } else if (p.problem.paged && key.bias != -INFINITY) {
        int64_t table =
            p.problem.block_table_row != nullptr ? p.problem.block_table_row[request.r] : request.r;
        key.slot = j % p.problem.block_size;
        key.block =
            p.problem.block_table[table * p.problem.block_table_stride + j / p.problem.block_size];
    }
    return key;
}

/* Locates keys j and j + 1. A hidden key gets the location of a visible one, so that reading it
 * needs no branch; false if both are hidden. */
GPU_INLINE bool find_keys(const gpu_params &p, const plain_row &row, int32_t j,
                          plain_key (&keys)[PLAIN_KEYS])
{
    plain_key seen = {0, 0, -INFINITY};
#pragma unroll
    for (int u = 0; u < PLAIN_KEYS; u++) {
        keys[u] = find_key(p, row, j + u);
        if (keys[u].bias != -INFINITY) {
            seen = keys[u];
        }
    }
#pragma unroll
    for (int u = 0; u < PLAIN_KEYS; u++) {
        if (keys[u].bias == -INFINITY) {
            keys[u].block = seen.block;
            keys[u].slot = seen.slot;
        }
    }
    return seen.bias != -INFINITY;
}

/* PLAIN_CHUNK dims of a lane starting with the i-th, of all keys: all loads before the first use.
 */
template <bool NIBBLES>
GPU_INLINE void load_chunk(const gpu_cache &c, const gpu_cache_row (&rows)[PLAIN_KEYS], int i,
                           int lane, gpu_element (&x)[PLAIN_CHUNK][PLAIN_KEYS])
{
#pragma unroll
    for (int n = 0; n < PLAIN_CHUNK; n++) {
        int32_t d = min((i + n) * GPU_LANES + lane, c.head_size - 1);
#pragma unroll
        for (int u = 0; u < PLAIN_KEYS; u++) {
            x[n][u] = load_element<NIBBLES>(c, rows[u], d);
        }
    }
}

/* Computes the scores; -inf for hidden keys. */
template <bool NIBBLES>
GPU_INLINE void score_keys(const gpu_params &p, const plain_row &row,
                           const plain_key (&keys)[PLAIN_KEYS], int lane, float (&s)[PLAIN_KEYS])
{
    gpu_cache_row rows[PLAIN_KEYS];
    float squares[PLAIN_KEYS];
    bool levels = NIBBLES && p.k.form == GPU_ROW_LEVELS;
#pragma unroll
    for (int u = 0; u < PLAIN_KEYS; u++) {
        rows[u] = enter_row<NIBBLES>(p.k, keys[u].block, keys[u].slot, row.kv_head);
        s[u] = 0.0f;
        squares[u] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i += PLAIN_CHUNK) {
        if (i * GPU_LANES >= p.problem.head_size) {
            break;
        }
        gpu_element x[PLAIN_CHUNK][PLAIN_KEYS];
        load_chunk<NIBBLES>(p.k, rows, i, lane, x);
#pragma unroll
        for (int n = 0; n < PLAIN_CHUNK; n++) {
            int32_t d = (i + n) * GPU_LANES + lane;
#pragma unroll
            for (int u = 0; u < PLAIN_KEYS; u++) {
                float k = element_number<NIBBLES>(p.k, rows[u], x[n][u], row.kv_head,
                                                  min(d, p.problem.head_size - 1));
                s[u] = d < p.problem.head_size ? s[u] + row.q[i + n] * k : s[u];
                squares[u] = levels && d < p.problem.head_size ? squares[u] + k * k : squares[u];
            }
        }
    }
#pragma unroll
    for (int u = 0; u < PLAIN_KEYS; u++) {
        float sum = warp_sum(s[u]) * p.problem.scale * row_scale<NIBBLES>(p.k, rows[u]);
        sum = levels ? sum / sqrtf(warp_sum(squares[u])) : sum;
        sum =
            p.problem.soft_cap > 0.0f ? p.problem.soft_cap * tanhf(sum / p.problem.soft_cap) : sum;
        s[u] = keys[u].bias == -INFINITY ? -INFINITY : sum + keys[u].bias;
    }
}

/* Rounds a probability as an fp8 kernel does; the denominator uses it unrounded. */
GPU_INLINE float round_probability(const gpu_params &p, float w)
{
    float scale = p.p_scale != nullptr ? *p.p_scale : p.p_scale_host;
    uint8_t code = number_to_fp8(p.p_dtype, divide_odd(w, divisor_of(scale)));
    return number_load((const char *)&code, p.p_dtype, 0) * scale;
}

template <bool NIBBLES>
GPU_INLINE void add_keys(const gpu_params &p, const plain_key (&keys)[PLAIN_KEYS],
                         const float (&s)[PLAIN_KEYS], int lane, plain_row &row)
{
    gpu_cache_row rows[PLAIN_KEYS];
    float w[PLAIN_KEYS], high = row.row_max;
#pragma unroll
    for (int u = 0; u < PLAIN_KEYS; u++) {
        rows[u] = enter_row<NIBBLES>(p.v, keys[u].block, keys[u].slot, row.kv_head);
        high = s[u] > high ? s[u] : high; /* a NaN is caught by the probability */
    }
    float scores_scale = softmax_rescale(row.row_max, high);
    row.row_max = high;
    row.row_sum *= scores_scale;
#pragma unroll
    for (int u = 0; u < PLAIN_KEYS; u++) {
        w[u] = s[u] == -INFINITY ? 0.0f : softmax_rescale(s[u], high);
        row.row_sum += w[u];
        w[u] = p.p_dtype >= 0 ? round_probability(p, w[u]) : w[u];
        w[u] *= row_scale<NIBBLES>(p.v, rows[u]);
    }
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i += PLAIN_CHUNK) {
        if (i * GPU_LANES >= p.problem.head_size_v) {
            break;
        }
        gpu_element x[PLAIN_CHUNK][PLAIN_KEYS];
        load_chunk<NIBBLES>(p.v, rows, i, lane, x);
#pragma unroll
        for (int n = 0; n < PLAIN_CHUNK; n++) {
            int32_t d = min((i + n) * GPU_LANES + lane, p.problem.head_size_v - 1);
            row.o[i + n] *= scores_scale;
#pragma unroll
            for (int u = 0; u < PLAIN_KEYS; u++) {
                float v = element_number<NIBBLES>(p.v, rows[u], x[n][u], row.kv_head, d);
                row.o[i + n] = s[u] == -INFINITY ? row.o[i + n] : row.o[i + n] + w[u] * v;
            }
        }
    }
}

GPU_INLINE float largest_of_warps(const float *row_max)
{
    float high = row_max[0];
    for (int w = 1; w < PLAIN_WARPS; w++) {
        high = row_max[w] > high ? row_max[w] : high;
    }
    return high;
}

/* Rounded probabilities are relative to row_max, which must therefore be known before the first. */
template <bool NIBBLES>
GPU_INLINE void visit_keys(const gpu_params &p, int warp, int lane, plain_memory &memory,
                           plain_row &row)
{
    for (int pass = p.p_dtype >= 0 ? 0 : 1; pass < 2; pass++) {
        for (int32_t j = row.k0 + warp * PLAIN_KEYS; j < row.k1; j += PLAIN_WARPS * PLAIN_KEYS) {
            plain_key keys[PLAIN_KEYS];
            float s[PLAIN_KEYS];
            if (!find_keys(p, row, j, keys)) {
                continue;
            }
            score_keys<NIBBLES>(p, row, keys, lane, s);
            if (pass == 0) {
#pragma unroll
                for (int u = 0; u < PLAIN_KEYS; u++) {
                    row.row_max = s[u] > row.row_max ? s[u] : row.row_max;
                }
            } else {
                add_keys<NIBBLES>(p, keys, s, lane, row);
            }
        }
        if (pass == 0) {
            memory.row_max[warp] = row.row_max;
            sync_group(); /* all maxima are written */
            row.row_max = largest_of_warps(memory.row_max);
            sync_group(); /* the memory is reused */
        }
    }
}

/* The first warp adds the other warps' results to its own and writes the row. */
GPU_INLINE void write_row(const gpu_params &p, int32_t token, int lane, const plain_memory &memory,
                          plain_row &row)
{
    float sink = p.problem.sinks != nullptr ? p.problem.sinks[row.head] : -INFINITY;
    float base = softmax_base(fmaxf(largest_of_warps(memory.row_max), sink));
    float sum = expf(sink - base), scores_scale[PLAIN_WARPS];
    for (int w = 0; w < PLAIN_WARPS; w++) {
        scores_scale[w] = softmax_rescale(memory.row_max[w], base);
        sum += memory.row_sum[w] * scores_scale[w];
    }
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        int d = i * GPU_LANES + lane;
        row.o[i] = 0.0f;
        for (int w = 0; w < PLAIN_WARPS && d < p.problem.head_size_v; w++) {
            row.o[i] += memory.o[w][d] * scores_scale[w];
        }
    }
    if (is_turned(p.v)) {
        turn_back(p.v, row.o, lane);
    }
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        int d = i * GPU_LANES + lane;
        if (d < p.problem.head_size_v) {
            number_store(p.out.data + token * p.out.row + row.head * p.out.head, p.out.dtype, d,
                         sum == 0.0f ? 0.0f : row.o[i] / sum);
        }
    }
    if (lane == 0 && p.lse.data != nullptr) {
        p.lse.data[row.head * p.lse.head + token * p.lse.row] = softmax_lse(base, sum);
    }
}

template <bool NIBBLES>
GPU_INLINE void attend_row(const gpu_params &p, int32_t token, int32_t head, plain_memory &memory)
{
    int warp = warp_index(), lane = lane_index();
    plain_row row;
    enter_query(p, token, head, row);
    load_query(p, token, lane, row);
    visit_keys<NIBBLES>(p, warp, lane, memory, row);
    if (lane == 0) {
        memory.row_max[warp] = row.row_max;
        memory.row_sum[warp] = row.row_sum;
    }
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        if (i * GPU_LANES + lane < p.problem.head_size_v) {
            memory.o[warp][i * GPU_LANES + lane] = row.o[i];
        }
    }
    sync_group(); /* all results are written */
    if (warp == 0) {
        write_row(p, token, lane, memory, row);
    }
    sync_group(); /* the memory is reused */
}

template <bool NIBBLES> GPU_INLINE void attend_rows(const gpu_params &p, plain_memory &memory)
{
    int32_t first = p.problem.query_start[0], end = p.problem.query_start[p.problem.num_reqs];
    int32_t rows = p.problem.wanted_rows != nullptr ? p.problem.num_wanted_rows : end - first;
    int64_t items = (int64_t)rows * p.problem.num_q_heads;
    for (int64_t i = group_index(); i < items; i += group_count()) {
        int32_t at = (int32_t)(i / p.problem.num_q_heads), token = first + at;
        if (p.problem.wanted_rows !=
            nullptr) { /* padded with duplicates; other entries may belong to another view */
            token = p.problem.wanted_rows[at];
            if (token < first || token >= end ||
                (at > 0 && token == p.problem.wanted_rows[at - 1])) {
                continue;
            }
        }
        attend_row<NIBBLES>(p, token, (int32_t)(i % p.problem.num_q_heads), memory);
    }
}

GPU_KERNEL(plain, gpu_params)
{
    GPU_SHARED plain_memory memory;
    attend_rows<false>(p, memory);
}

GPU_KERNEL(plain_nibbles, gpu_params)
{
    GPU_SHARED plain_memory memory;
    attend_rows<true>(p, memory);
}
