/* SPDX-License-Identifier: Apache-2.0 */
/* merge_states, a warp for each (row, head), and the rotation of outputs after it. The limit is
 * memory bandwidth. */
#include "gpu/device/rows.h"
#include "gpu/device/softmax.h"

GPU_INLINE float side_number(const gpu_tensor &side, int64_t t, int64_t h, float weight, int32_t d)
{
    return weight == 0.0f
               ? 0.0f
               : weight * number_load(side.data + t * side.row + h * side.head, side.dtype, d);
}

GPU_KERNEL(merge_states, gpu_merge_params)
{
    int64_t items = p.num_rows * p.heads;
    int lane = lane_index();
    float scale = p.out_scale != nullptr ? *p.out_scale : 1.0f;
    number_divisor by = divisor_of(scale);
    for (int64_t i = warp_of_grid(GPU_THREADS_merge_states); i < items;
         i += warps_of_grid(GPU_THREADS_merge_states)) {
        int64_t t = p.first_row + i / p.heads, h = i % p.heads;
        /* the prefix may have no memory for later rows */
        float a = t - p.first_row < p.num_rows_with_prefix
                      ? p.prefix_lse.data[h * p.prefix_lse.head + t * p.prefix_lse.row]
                      : -INFINITY;
        float b = p.suffix_lse.data[h * p.suffix_lse.head + t * p.suffix_lse.row];
        a = isinf(a) ? -INFINITY : a;
        b = isinf(b) ? -INFINITY : b;
        float base = softmax_base(fmaxf(a, b));
        float wa = expf(a - base), wb = expf(b - base), sum = wa + wb;
        sync_lanes(); /* lse may be one of the inputs, which all lanes have now read */
        for (int32_t d = lane; d < p.dims; d += GPU_LANES) {
            float x = side_number(p.prefix, t, h, wa, d) + side_number(p.suffix, t, h, wb, d);
            x = sum == 0.0f ? 0.0f : x / sum;
            number_store(p.out.data + t * p.out.row + h * p.out.head, p.out.dtype, d,
                         p.out_scale != nullptr ? divide_odd(x, by) : x);
        }
        if (lane == 0 && p.lse.data != nullptr) {
            p.lse.data[h * p.lse.head + t * p.lse.row] = softmax_lse(base, sum);
        }
    }
}

/* A thread for each (row, head, pair). */
GPU_KERNEL(rotate_output, gpu_rotate_params)
{
    const int32_t pairs = p.rotary_dim / 2, first = p.query_start[0];
    const int64_t items = (int64_t)(p.query_start[p.num_reqs] - first) * p.heads * pairs;
    for (int64_t i = (int64_t)group_index() * GPU_THREADS_rotate_output + thread_index(); i < items;
         i += (int64_t)group_count() * GPU_THREADS_rotate_output) {
        const int64_t row = i / pairs, t = first + row / p.heads;
        const int32_t pair = (int32_t)(i - row * pairs);
        const int32_t x = p.neox ? pair : 2 * pair, y = p.neox ? pair + pairs : 2 * pair + 1;
        char *out = p.last.data + t * p.last.row + row % p.heads * p.last.head;
        const char *table = p.cos_sin.data + p.positions[t] * p.cos_sin.row;
        const float c = number_load(table, p.cos_sin.dtype, pair);
        const float s = number_load(table, p.cos_sin.dtype, pairs + pair);
        const float a = number_load(out, p.last.dtype, x), b = number_load(out, p.last.dtype, y);
        number_store(out, p.last.dtype, x, a * c + b * s);
        number_store(out, p.last.dtype, y, b * c - a * s);
    }
}
