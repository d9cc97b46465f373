/* SPDX-License-Identifier: Apache-2.0 */
/* The plain attend: a warp per (query, head), float32 arithmetic, any head size to 512, any element
 * type and any strides. For what the matrix kernels cannot walk. */
#include "launch.h"
#include "rows.cuh"
#include "visible.cuh"

#define PLAIN_DIMS 16 /* dims of a lane: head sizes to 512 */

static __device__ void attend_row(const flash_params &p, int32_t token, int32_t head, int lane)
{
    flash_request q = load_request(p, find_start(p.query_start, p.num_reqs, token));
    int32_t index = token - q.query_start, hk = head / p.group, k0, k1;
    flash_interval range = interval_of(p, q, index);
    key_range(p, q, index * p.group, index * p.group + 1, &k0, &k1);
    k1 = min(k1, q.length);
    float qd[PLAIN_DIMS], o[PLAIN_DIMS], m = -INFINITY, l = 0.0f;
    float q_scale = p.q_scale != nullptr ? p.q_scale[p.q_scale_per_head ? hk : 0] : p.q_scale_host;
    const char *q_row = p.q.data + token * p.q.row + head * p.q.head;
#pragma unroll
    for (int i = 0; i < PLAIN_DIMS; i++) {
        int d = i * 32 + lane;
        qd[i] = d < p.head_size ? number_load(q_row, p.q.dtype, d) * q_scale : 0.0f;
        o[i] = 0.0f;
    }
    float slope = p.slopes != nullptr ? p.slopes[head] : 0.0f;
    for (int32_t j = k0; j < k1; j++) {
        if (!sees_slow(p, q, index, range.position, j, j >= range.first && j <= range.last)) {
            continue;
        }
        float bias = bias_of(p, q, index, range.position, slope, j);
        if (bias == -INFINITY) {
            continue;
        }
        int64_t block = q.key_start + j, slot = 0;
        if (p.paged) {
            int64_t row = p.block_table_row != nullptr ? p.block_table_row[q.r] : q.r;
            slot = j % p.block_size;
            block = p.block_table[row * p.block_table_stride + j / p.block_size];
        }
        const char *k_row = row_at(p.k, block, slot, hk), *v_row = row_at(p.v, block, slot, hk);
        float s = 0.0f;
#pragma unroll
        for (int i = 0; i < PLAIN_DIMS; i++) {
            int d = i * 32 + lane;
            s += d < p.head_size ? qd[i] * row_element(p.k, k_row, hk, d) : 0.0f;
        }
        s = warp_sum(s) * p.scale * row_scale_of(p.k, block, slot, hk);
        s = (p.soft_cap > 0.0f ? p.soft_cap * tanhf(s / p.soft_cap) : s) + bias;
        float high = s > m ? s : m, shrink = m == high ? 1.0f : expf(m - high);
        float w = s == high ? 1.0f : expf(s - high);
        m = high;
        l = l * shrink + w;
        w *= row_scale_of(p.v, block, slot, hk);
#pragma unroll
        for (int i = 0; i < PLAIN_DIMS; i++) {
            int d = i * 32 + lane;
            float v = d < p.head_size_v ? row_element(p.v, v_row, hk, d) : 0.0f;
            o[i] = o[i] * shrink + w * v;
        }
    }
    float sink = p.sinks != nullptr ? p.sinks[head] : -INFINITY;
    float high = fmaxf(m, sink), base = high == -INFINITY ? 0.0f : high;
    float sum = l * expf(m - base) + expf(sink - base);
    float factor = sum == 0.0f ? 0.0f : expf(m - base) / sum;
#pragma unroll
    for (int i = 0; i < PLAIN_DIMS; i++) {
        int d = i * 32 + lane;
        if (d < p.head_size_v) {
            number_store(p.out.data + token * p.out.row + head * p.out.head, p.out.dtype, d,
                         o[i] * factor);
        }
    }
    if (lane == 0 && p.lse.data != nullptr) {
        p.lse.data[head * p.lse.head + token * p.lse.row] =
            sum == 0.0f ? -INFINITY : base + logf(sum);
    }
}

static __global__ void __launch_bounds__(128) attend_plain(const __grid_constant__ flash_params p)
{
    int32_t first = p.query_start[0], rows = p.query_start[p.num_reqs] - first;
    int64_t items = (int64_t)rows * p.num_q_heads;
    for (int64_t i = blockIdx.x * 4 + (threadIdx.x >> 5); i < items; i += (int64_t)gridDim.x * 4) {
        attend_row(p, first + (int32_t)(i / p.num_q_heads), (int32_t)(i % p.num_q_heads),
                   threadIdx.x & 31);
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
