/* SPDX-License-Identifier: Apache-2.0 */
/* quantize and amax over rows [T, heads, D], read as [T, heads * D], each element once. */
#include "gpu/device/output.h"
#include "gpu/params.h"

#define GROUP_DIMS (128 / GPU_LANES) /* columns of a lane */

GPU_INLINE float column_number(const gpu_tensor &x, int64_t token, int32_t dims, int64_t column)
{
    int64_t head = column / dims;
    return number_load(x.data + token * x.row + head * x.head, x.dtype,
                       (int32_t)(column - head * dims));
}

struct row_range {
    int64_t first, count;
};

/* The rows of x that are quantized. */
GPU_INLINE row_range wanted_rows(const gpu_quantize_params &p)
{
    if (p.query_start == nullptr) {
        return {0, p.num_rows};
    }
    int64_t first = p.query_start[0];
    return {first, p.query_start[p.num_reqs] - first};
}

/* One scale for the tensor or for each head. */
GPU_KERNEL(quantize_static, gpu_quantize_params)
{
    const row_range rows = wanted_rows(p);
    int64_t columns = (int64_t)p.heads * p.dims, items = rows.count * columns;
    for (int64_t i = (int64_t)group_index() * GPU_THREADS_quantize_static + thread_index();
         i < items; i += (int64_t)group_count() * GPU_THREADS_quantize_static) {
        int64_t row = i / columns, column = i - row * columns, head = column / p.dims;
        int64_t token = rows.first + row;
        float x = column_number(p.x, token, p.dims, column);
        x = divide_odd(x, divisor_of(p.scale[p.per_head ? head : 0]));
        number_store(p.out.data + token * p.out.row + head * p.out.head, p.out.dtype,
                     (int32_t)(column - head * p.dims), x);
    }
}

/* A warp for each (token, group of 64 or 128 columns). */
GPU_KERNEL(quantize_groups, gpu_quantize_params)
{
    const row_range rows = wanted_rows(p);
    int64_t groups = (int64_t)p.heads * p.dims / p.group, items = rows.count * groups;
    int lane = lane_index();
    for (int64_t i = warp_of_grid(GPU_THREADS_quantize_groups); i < items;
         i += warps_of_grid(GPU_THREADS_quantize_groups)) {
        int64_t row = i / groups, group = i - row * groups, token = rows.first + row;
        float x[GROUP_DIMS], largest = 0.0f;
#pragma unroll
        for (int e = 0; e < GROUP_DIMS; e++) {
            int32_t c = e * GPU_LANES + lane;
            x[e] = c < p.group ? column_number(p.x, token, p.dims, group * p.group + c) : 0.0f;
            largest = fmaxf(largest, fabsf(x[e])); /* ignores NaN */
        }
        float scale = group_scale(warp_largest(largest, false), p.pow2);
        number_divisor by = divisor_of(scale);
        if (lane == 0) {
            ((float *)p.block_scales)[token * p.scale_row + group * p.scale_column] = scale;
        }
#pragma unroll
        for (int e = 0; e < GROUP_DIMS; e++) {
            int64_t column = group * p.group + e * GPU_LANES + lane, head = column / p.dims;
            if (e * GPU_LANES + lane < p.group) {
                number_store(p.out.data + token * p.out.row + head * p.out.head, p.out.dtype,
                             (int32_t)(column - head * p.dims), divide_odd(x[e], by));
            }
        }
    }
}

/* A thread for each (token, 16 columns): block scale = e4m3(g amax / 6), element = e2m1(x g /
 * scale). */
GPU_KERNEL(quantize_nvfp4, gpu_quantize_params)
{
    const row_range rows = wanted_rows(p);
    int64_t blocks = (int64_t)p.heads * p.dims / 16, items = rows.count * blocks;
    float inverse = p.scale != nullptr ? *p.scale : 1.0f;
    for (int64_t i = (int64_t)group_index() * GPU_THREADS_quantize_nvfp4 + thread_index();
         i < items; i += (int64_t)group_count() * GPU_THREADS_quantize_nvfp4) {
        int64_t row = i / blocks, block = i - row * blocks, token = rows.first + row;
        float x[16], largest = 0.0f;
#pragma unroll
        for (int e = 0; e < 16; e++) {
            x[e] = column_number(p.x, token, p.dims, block * 16 + e);
            largest = fmaxf(largest, fabsf(x[e]));
        }
        uint8_t code = block_scale_code(inverse, largest);
        float scale = number_load((const char *)&code, ATTN_DTYPE_FP8_E4M3, 0);
        float by_scale = scale == 0.0f ? 0.0f : reciprocal_nearest(scale);
        ((uint8_t *)p.block_scales)[token * p.scale_row + block] = code;
        uint8_t *out = (uint8_t *)p.out.data + token * p.out.row + block * 8;
#pragma unroll
        for (int e = 0; e < 16; e += 2) {
            out[e / 2] = (uint8_t)(e2m1_of_ratio(x[e], inverse, scale, by_scale) |
                                   e2m1_of_ratio(x[e + 1], inverse, scale, by_scale) << 4);
        }
    }
}

/* A warp for each (row, head). Magnitudes order like their bits, so integer maxima combine them. */
GPU_KERNEL(amax, gpu_amax_params)
{
    int64_t items = p.num_rows * p.heads;
    int lane = lane_index();
    for (int64_t i = warp_of_grid(GPU_THREADS_amax); i < items;
         i += warps_of_grid(GPU_THREADS_amax)) {
        int64_t row = i / p.heads, head = i - row * p.heads;
        const char *from = p.x.data + row * p.x.row + head * p.x.head;
        float largest = 0.0f;
        for (int32_t d = lane; d < p.dims; d += GPU_LANES) {
            largest = fmaxf(largest, fabsf(number_load(from, p.x.dtype, d)));
        }
        largest = warp_largest(largest, false);
        if (lane == 0) {
            atomic_max((int32_t *)&p.out[p.per_head ? head : 0], (int32_t)float_bits(largest));
        }
    }
}

#define LARGEST_E4M3 448.0f

/* One group: the history moves by one place, and its largest makes the scale. Maxima are compared
 * by their bits, where a NaN is above all numbers. */
GPU_KERNEL(amax_keep, gpu_amax_params)
{
    int32_t largest = 0, lane = lane_index();
    for (int32_t first = 0; first < p.history_len; first += GPU_LANES) {
        const int32_t i = first + lane;
        const float x = i + 1 < p.history_len ? p.history[i + 1] : p.out[0];
        sync_group(); /* all have read their places */
        if (i < p.history_len && warp_index() == 0) {
            p.history[i] = x;
            largest = max(largest, (int32_t)float_bits(x));
        }
        sync_group(); /* the next ones are read */
    }
    const float most = warp_largest(bits_float((uint32_t)largest), true);
    if (lane == 0 && warp_index() == 0) {
        *p.scale = most == 0.0f ? 1.0f : divide_nearest(most, LARGEST_E4M3);
    }
}
