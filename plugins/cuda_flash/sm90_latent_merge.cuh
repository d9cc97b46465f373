/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of items become their output. */
#ifndef CUDA_FLASH_SM90_LATENT_MERGE_CUH
#define CUDA_FLASH_SM90_LATENT_MERGE_CUH

#include "sm90_latent_rows.cuh"

#define MERGE_THREADS 256
#define MERGE_CUTS 16 /* of an item, by rows: CTAs that merge its parts */
#define MERGE_ROWS (SM90_LATENT_ROWS / MERGE_CUTS)

/* The parts of items that were cut become their output. A CTA has MERGE_ROWS rows of the item that
 * is first cut at the beginning of segment blockIdx.x / MERGE_CUTS. */
template <int KIND>
__global__ void __launch_bounds__(MERGE_THREADS)
    merge_latent(const __grid_constant__ sm90_latent_params a)
{
    wait_for_earlier_kernels();
    let_later_kernels_begin();
    const gpu_params &p = a.p.attend;
    const gpu_schedule &plan = p.schedule;
    const int lane = threadIdx.x & 127;
    const bool shares = plan.by_item == 2;
    int32_t segments = plan.header->segments;
    for (int32_t i = blockIdx.x / MERGE_CUTS; i < segments; i += gridDim.x / MERGE_CUTS) {
        const gpu_segment &s = plan.segments[i];
        const gpu_row_tile &item = s.row_tile;
        bool ours = shares ? s.begin > item.start && s.first == i - plan.abreast
                           : s.first == s.index && s.last > s.first;
        if (!ours) {
            continue;
        }
        /* of shares' parts, the first begins inside its share; shares abreast are others' */
        int32_t apart = shares ? plan.abreast : 1, step = shares ? 2 * apart : 1;
        int32_t count = (s.last - s.first) / apart + 1;
        int64_t first = shares ? 2 * s.first + 1 : s.first,
                second = shares ? 2 * (s.first + apart) : s.first + 1;
        for (int32_t row = (blockIdx.x % MERGE_CUTS) * MERGE_ROWS + (threadIdx.x >> 7);
             row < min((blockIdx.x % MERGE_CUTS + 1) * MERGE_ROWS, (uint32_t)item.num_rows);
             row += 2) {
            auto part_of = [&](int32_t n) {
                return plan.parts +
                       (n == 0 ? first : second + (int64_t)(n - 1) * step) * LATENT_PART;
            };
            const int m_at = SM90_LATENT_ROWS * LATENT_MAX_RANK + row;
            float high = -INFINITY, sum = 0.0f;
            float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int32_t n = 0; n < count; n++) {
                high = fmaxf(high, part_of(n)[m_at]);
            }
            float base = softmax_base(high);
#pragma unroll 4
            for (int32_t n = 0; n < count; n++) {
                const float *part = part_of(n);
                float f = exp2f(part[m_at] - base);
                float4 x = ((const float4 *)(part + row * LATENT_MAX_RANK))[lane];
                sum += f * part[m_at + SM90_LATENT_ROWS];
                o.x += f * x.x, o.y += f * x.y, o.z += f * x.z, o.w += f * x.w;
            }
            int32_t at = item.first_row + row, index = at / p.problem.group;
            int64_t token = item.query_start + index, head = at - index * p.problem.group;
            float sink = p.problem.sinks != nullptr ? p.problem.sinks[head] * LOG2E : -INFINITY;
            float *lse = lane == 0 && p.lse.data != nullptr
                             ? &p.lse.data[head * p.lse.head + token * p.lse.row]
                             : nullptr;
            float factor = softmax_close_base2(sink, high, sum, lse) * value_scale(p.k);
            char *to = p.out.data + token * p.out.row + head * p.out.head;
            number_store(to, p.out.dtype, lane * 4, o.x * factor);
            number_store(to, p.out.dtype, lane * 4 + 1, o.y * factor);
            number_store(to, p.out.dtype, lane * 4 + 2, o.z * factor);
            number_store(to, p.out.dtype, lane * 4 + 3, o.w * factor);
        }
    }
}

#endif
