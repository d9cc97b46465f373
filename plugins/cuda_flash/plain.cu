/* SPDX-License-Identifier: Apache-2.0 */
/* The plain attend: a warp per (query, head), float32 arithmetic, any head size to 512, any element
 * type and any strides. For what the matrix kernels cannot walk. */
#include "launch.h"
#include "rows.cuh"
#include "visible.cuh"

/* A query of a head, its lane's dims d = i * 32 + lane, and what its keys add up to. */
struct plain_row {
    flash_request request;
    flash_interval range;
    int32_t index, head, kv_head;
    float slope;
    float q[LANE_DIMS], o[LANE_DIMS], m, l;
};

/* Turned rows of keys meet a query that is turned likewise: <q, k> = <H S q, H S k> / D. */
static __device__ void load_query(const flash_params &p, int32_t token, int lane, plain_row &row)
{
    const char *from = p.q.data + token * p.q.row + row.head * p.q.head;
    float scale =
        p.q_scale != nullptr ? p.q_scale[p.q_scale_per_head ? row.kv_head : 0] : p.q_scale_host;
    bool turned = p.k.form == FLASH_ROW_INT4;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        int d = i * 32 + lane;
        row.q[i] = d < p.head_size ? number_load(from, p.q.dtype, d) * scale : 0.0f;
        row.q[i] *= turned && d < p.head_size ? p.k.signs[d] / (float)p.head_size : 1.0f;
        row.o[i] = 0.0f;
    }
    if (turned) {
        hadamard(row.q, p.head_size, lane);
    }
    row.m = -INFINITY;
    row.l = 0.0f;
}

/* The score of key j, in block and slot; false: nobody sees it. */
static __device__ __forceinline__ bool score_key(const flash_params &p, const plain_row &row,
                                                 int32_t j, int lane, int64_t *block, int64_t *slot,
                                                 float *score)
{
    const flash_request &request = row.request;
    bool inside = j >= row.range.first && j <= row.range.last;
    if (!sees_slow(p, request, row.index, row.range.position, j, inside)) {
        return false;
    }
    float bias = bias_of(p, request, row.index, row.range.position, row.slope, j);
    if (bias == -INFINITY) {
        return false;
    }
    *block = request.key_start + j;
    *slot = 0;
    if (p.paged) {
        int64_t table = p.block_table_row != nullptr ? p.block_table_row[request.r] : request.r;
        *slot = j % p.block_size;
        *block = p.block_table[table * p.block_table_stride + j / p.block_size];
    }
    flash_row k = enter_row(p.k, *block, *slot, row.kv_head);
    float s = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        int d = i * 32 + lane;
        s += d < p.head_size ? row.q[i] * row_element(p.k, k, row.kv_head, d) : 0.0f;
    }
    s = warp_sum(s) * p.scale * k.scale;
    *score = (p.soft_cap > 0.0f ? p.soft_cap * tanhf(s / p.soft_cap) : s) + bias;
    return true;
}

/* A probability as an fp8 kernel holds it; the denominator keeps it as it is. */
static __device__ __forceinline__ float round_probability(const flash_params &p, float w)
{
    float scale = p.p_scale != nullptr ? *p.p_scale : p.p_scale_host;
    uint8_t code = number_to_fp8(p.p_dtype, divide_odd(w, divisor_of(scale)));
    return number_load((const char *)&code, p.p_dtype, 0) * scale;
}

static __device__ __forceinline__ void add_key(const flash_params &p, int64_t block, int64_t slot,
                                               float s, int lane, plain_row &row)
{
    float high = s > row.m ? s : row.m, shrink = row.m == high ? 1.0f : expf(row.m - high);
    float w = s == high ? 1.0f : expf(s - high);
    flash_row v = enter_row(p.v, block, slot, row.kv_head);
    row.m = high;
    row.l = row.l * shrink + w;
    w = (p.p_dtype >= 0 ? round_probability(p, w) : w) * v.scale;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        int d = i * 32 + lane;
        float x = d < p.head_size_v ? row_element(p.v, v, row.kv_head, d) : 0.0f;
        row.o[i] = row.o[i] * shrink + w * x;
    }
}

/* Rounded probabilities are relative to the largest, which so must be known before the first. */
static __device__ __forceinline__ void visit_keys(const flash_params &p, int lane, plain_row &row)
{
    int32_t k0, k1;
    key_range(p, row.request, row.index * p.group, row.index * p.group + 1, &k0, &k1);
    k1 = min(k1, row.request.length);
    for (int pass = p.p_dtype >= 0 ? 0 : 1; pass < 2; pass++) {
        for (int32_t j = k0; j < k1; j++) {
            int64_t block, slot;
            float s;
            if (!score_key(p, row, j, lane, &block, &slot, &s)) {
                continue;
            }
            if (pass == 0) {
                row.m = s > row.m ? s : row.m;
            } else {
                add_key(p, block, slot, s, lane, row);
            }
        }
    }
}

static __device__ __forceinline__ void write_row(const flash_params &p, int32_t token, int lane,
                                                 plain_row &row)
{
    float sink = p.sinks != nullptr ? p.sinks[row.head] : -INFINITY;
    float high = fmaxf(row.m, sink), base = high == -INFINITY ? 0.0f : high;
    float sum = row.l * expf(row.m - base) + expf(sink - base);
    float factor = sum == 0.0f ? 0.0f : expf(row.m - base) / sum;
    if (p.v.form == FLASH_ROW_INT4) {
        turn_back(p.v, row.o, lane);
    }
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        int d = i * 32 + lane;
        if (d < p.head_size_v) {
            number_store(p.out.data + token * p.out.row + row.head * p.out.head, p.out.dtype, d,
                         row.o[i] * factor);
        }
    }
    if (lane == 0 && p.lse.data != nullptr) {
        p.lse.data[row.head * p.lse.head + token * p.lse.row] =
            sum == 0.0f ? -INFINITY : base + logf(sum);
    }
}

static __global__ void __launch_bounds__(128) attend_plain(const __grid_constant__ flash_params p)
{
    int32_t first = p.query_start[0], end = p.query_start[p.num_reqs], lane = threadIdx.x & 31;
    int32_t rows = p.wanted_rows != nullptr ? p.num_wanted_rows : end - first;
    int64_t items = (int64_t)rows * p.num_q_heads;
    for (int64_t i = blockIdx.x * 4 + (threadIdx.x >> 5); i < items; i += (int64_t)gridDim.x * 4) {
        int32_t at = (int32_t)(i / p.num_q_heads), token = first + at;
        if (p.wanted_rows != nullptr) { /* padded with repetitions; others may be another view's */
            token = p.wanted_rows[at];
            if (token < first || token >= end || (at > 0 && token == p.wanted_rows[at - 1])) {
                continue;
            }
        }
        plain_row row;
        row.request = load_request(p, find_start(p.query_start, p.num_reqs, token));
        row.index = token - row.request.query_start;
        row.range = interval_of(p, row.request, row.index);
        row.head = (int32_t)(i % p.num_q_heads);
        row.kv_head = row.head / p.group;
        row.slope = p.slopes != nullptr ? p.slopes[row.head] : 0.0f;
        load_query(p, token, lane, row);
        visit_keys(p, lane, row);
        write_row(p, token, lane, row);
    }
}

cudaError_t launch_plain(const void *params, int32_t num_sms, cudaStream_t stream)
{
    if (params == nullptr) {
        return load_kernel(attend_plain);
    }
    attend_plain<<<num_sms * 8, 128, 0, stream>>>(*(const flash_params *)params);
    return cudaGetLastError();
}
