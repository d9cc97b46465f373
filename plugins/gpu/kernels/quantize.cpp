/* SPDX-License-Identifier: Apache-2.0 */
/* quantize and amax over rows [T, heads, D] taken as [T, heads * D]: each element read once. */
#include "gpu/device/number.h"
#include "gpu/params.h"

#define LEAST_AMAX 1e-10             /* of a group */
#define GROUP_DIMS (128 / GPU_LANES) /* columns of a lane */

GPU_INLINE float column_number(const gpu_tensor &x, int64_t token, int32_t dims, int64_t column)
{
    int64_t head = column / dims;
    return number_load(x.data + token * x.row + head * x.head, x.dtype,
                       (int32_t)(column - head * dims));
}

/* Each element by one scale of the tensor or of its head. */
GPU_KERNEL(quantize_static, gpu_quantize_params)
{
    int64_t columns = (int64_t)p.heads * p.dims, items = p.num_rows * columns;
    for (int64_t i = (int64_t)group_index() * GPU_THREADS_quantize_static + thread_index();
         i < items; i += (int64_t)group_count() * GPU_THREADS_quantize_static) {
        int64_t token = i / columns, column = i - token * columns, head = column / p.dims;
        float x = column_number(p.x, token, p.dims, column);
        x = divide_odd(x, divisor_of(p.scale[p.per_head ? head : 0]));
        number_store(p.out.data + token * p.out.row + head * p.out.head, p.out.dtype,
                     (int32_t)(column - head * p.dims), x);
    }
}

/* The scale of a group: in double, since 1e-10 is no float; powers of two round up. */
GPU_INLINE float group_scale(float largest, int32_t pow2)
{
    double scale = fmax((double)largest, LEAST_AMAX) / (double)FP8_LARGEST;
    if (pow2) {
        const uint64_t mantissa = ((uint64_t)1 << 52) - 1;
        scale = bits_double((double_bits(scale) + mantissa) & ~mantissa);
    }
    return (float)scale;
}

/* A warp per (token, group of 64 or 128 columns). */
GPU_KERNEL(quantize_groups, gpu_quantize_params)
{
    int64_t groups = (int64_t)p.heads * p.dims / p.group, items = p.num_rows * groups;
    int lane = lane_index();
    for (int64_t i = warp_of_grid(GPU_THREADS_quantize_groups); i < items;
         i += warps_of_grid(GPU_THREADS_quantize_groups)) {
        int64_t token = i / groups, group = i - token * groups;
        float x[GROUP_DIMS], largest = 0.0f;
#pragma unroll
        for (int e = 0; e < GROUP_DIMS; e++) {
            int32_t c = e * GPU_LANES + lane;
            x[e] = c < p.group ? column_number(p.x, token, p.dims, group * p.group + c) : 0.0f;
            largest = fmaxf(largest, fabsf(x[e])); /* NaN is left out */
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

/* A thread per (token, 16 columns): block scale = e4m3(g amax / 6), element = e2m1(x g / scale). */
GPU_KERNEL(quantize_nvfp4, gpu_quantize_params)
{
    int64_t blocks = (int64_t)p.heads * p.dims / 16, items = p.num_rows * blocks;
    double inverse = p.scale != nullptr ? (double)*p.scale : 1.0;
    for (int64_t i = (int64_t)group_index() * GPU_THREADS_quantize_nvfp4 + thread_index();
         i < items; i += (int64_t)group_count() * GPU_THREADS_quantize_nvfp4) {
        int64_t token = i / blocks, block = i - token * blocks;
        float x[16], largest = 0.0f;
#pragma unroll
        for (int e = 0; e < 16; e++) {
            x[e] = column_number(p.x, token, p.dims, block * 16 + e);
            largest = fmaxf(largest, fabsf(x[e]));
        }
        uint8_t code = number_to_fp8(ATTN_DTYPE_FP8_E4M3, odd_float(inverse * largest / 6.0));
        double scale = (double)number_load((const char *)&code, ATTN_DTYPE_FP8_E4M3, 0);
        ((uint8_t *)p.block_scales)[token * p.scale_row + block] = code;
        uint8_t *out = (uint8_t *)p.out.data + token * p.out.row + block * 8;
#pragma unroll
        for (int e = 0; e < 16; e += 2) {
            double low = scale == 0.0 ? 0.0 : (double)x[e] * inverse / scale;
            double high = scale == 0.0 ? 0.0 : (double)x[e + 1] * inverse / scale;
            out[e / 2] = (uint8_t)(e2m1_of(low) | e2m1_of(high) << 4);
        }
    }
}

/* A warp per (row, head). Magnitudes order as their bits do, so an integer maximum joins them. */
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
