/* SPDX-License-Identifier: Apache-2.0 */
/* merge_states, a warp for each (row, head), and the rotation of outputs after it. The limit is
 * memory bandwidth. */
#include "gpu/device/rows.h"
#include "gpu/device/softmax.h"

#define MERGED_AT_ONCE 8 /* elements of a side that a lane loads together: `out` may be one */

/* Every GPU_LANES-th element of a side from `first` on, times its weight. */
template <class raw>
GPU_INLINE void load_side(const gpu_tensor &side, int64_t t, int64_t h, float weight, int32_t first,
                          int32_t dims, float (&x)[MERGED_AT_ONCE])
{
    const raw *row = (const raw *)(side.data + t * side.row + h * side.head);
    raw numbers[MERGED_AT_ONCE] = {};
#pragma unroll
    for (int i = 0; i < MERGED_AT_ONCE; i++) {
        if (weight != 0.0f && first + i * GPU_LANES < dims) {
            numbers[i] = row[first + i * GPU_LANES];
        }
    }
#pragma unroll
    for (int i = 0; i < MERGED_AT_ONCE; i++) {
        x[i] = weight == 0.0f ? 0.0f : weight * number_of(numbers[i], side.dtype);
    }
}

GPU_INLINE void load_numbers(const gpu_tensor &side, int64_t t, int64_t h, float weight,
                             int32_t first, int32_t dims, float (&x)[MERGED_AT_ONCE])
{
    if (side.dtype == ATTN_DTYPE_F32) {
        load_side<float>(side, t, h, weight, first, dims, x);
    } else {
        load_side<uint16_t>(side, t, h, weight, first, dims, x);
    }
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
        for (int32_t d = lane; d < p.dims; d += GPU_LANES * MERGED_AT_ONCE) {
            float x[MERGED_AT_ONCE], y[MERGED_AT_ONCE];
            load_numbers(p.prefix, t, h, wa, d, p.dims, x);
            load_numbers(p.suffix, t, h, wb, d, p.dims, y);
            for (int i = 0; i < MERGED_AT_ONCE && d + i * GPU_LANES < p.dims; i++) {
                const float merged = sum == 0.0f ? 0.0f : (x[i] + y[i]) / sum;
                number_store(p.out.data + t * p.out.row + h * p.out.head, p.out.dtype,
                             d + i * GPU_LANES,
                             p.out_scale != nullptr ? divide_odd(merged, by) : merged);
            }
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
