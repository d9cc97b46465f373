/* SPDX-License-Identifier: Apache-2.0 */
/* quantize and amax over rows [T, heads, D] taken as [T, heads * D]: each element read once. */
#include "cuda_flash/launch.h"
#include "gpu/device/number.h"

#define LEAST_AMAX 1e-10 /* of a group */

static __device__ __forceinline__ float column_number(const gpu_tensor &x, int64_t token,
                                                      int32_t dims, int64_t column)
{
    int64_t head = column / dims;
    return number_load(x.data + token * x.row + head * x.head, x.dtype,
                       (int32_t)(column - head * dims));
}

/* Each element by one scale of the tensor or of its head. */
static __global__ void __launch_bounds__(256)
    quantize_static(const __grid_constant__ gpu_quantize_params p)
{
    int64_t columns = (int64_t)p.heads * p.dims, items = p.num_rows * columns;
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < items;
         i += (int64_t)gridDim.x * 256) {
        int64_t token = i / columns, column = i - token * columns, head = column / p.dims;
        float x = column_number(p.x, token, p.dims, column);
        x = divide_odd(x, divisor_of(p.scale[p.per_head ? head : 0]));
        number_store(p.out.data + token * p.out.row + head * p.out.head, p.out.dtype,
                     (int32_t)(column - head * p.dims), x);
    }
}

/* The scale of a group: in double, since 1e-10 is no float; powers of two round up. */
static __device__ __forceinline__ float group_scale(float largest, int32_t pow2)
{
    double scale = fmax((double)largest, LEAST_AMAX) / (double)FP8_LARGEST;
    if (pow2) {
        int exponent;
        double mantissa = frexp(scale, &exponent);
        scale = ldexp(1.0, mantissa == 0.5 ? exponent - 1 : exponent);
    }
    return (float)scale;
}

/* A warp per (token, group of 64 or 128 columns). */
static __global__ void __launch_bounds__(128)
    quantize_groups(const __grid_constant__ gpu_quantize_params p)
{
    int64_t groups = (int64_t)p.heads * p.dims / p.group, items = p.num_rows * groups;
    int lane = threadIdx.x & 31;
    for (int64_t i = blockIdx.x * 4 + (threadIdx.x >> 5); i < items; i += (int64_t)gridDim.x * 4) {
        int64_t token = i / groups, group = i - token * groups;
        float x[4], largest = 0.0f;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int32_t c = e * 32 + lane;
            x[e] = c < p.group ? column_number(p.x, token, p.dims, group * p.group + c) : 0.0f;
            largest = fmaxf(largest, fabsf(x[e])); /* NaN is left out */
        }
        float scale = group_scale(warp_largest(largest, false), p.pow2);
        number_divisor by = divisor_of(scale);
        if (lane == 0) {
            ((float *)p.block_scales)[token * p.scale_row + group * p.scale_column] = scale;
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int64_t column = group * p.group + e * 32 + lane, head = column / p.dims;
            if (e * 32 + lane < p.group) {
                number_store(p.out.data + token * p.out.row + head * p.out.head, p.out.dtype,
                             (int32_t)(column - head * p.dims), divide_odd(x[e], by));
            }
        }
    }
}

/* A thread per (token, 16 columns): block scale = e4m3(g amax / 6), element = e2m1(x g / scale). */
static __global__ void __launch_bounds__(128)
    quantize_nvfp4(const __grid_constant__ gpu_quantize_params p)
{
    int64_t blocks = (int64_t)p.heads * p.dims / 16, items = p.num_rows * blocks;
    double global = p.scale != nullptr ? (double)*p.scale : 1.0;
    for (int64_t i = (int64_t)blockIdx.x * 128 + threadIdx.x; i < items;
         i += (int64_t)gridDim.x * 128) {
        int64_t token = i / blocks, block = i - token * blocks;
        float x[16], largest = 0.0f;
#pragma unroll
        for (int e = 0; e < 16; e++) {
            x[e] = column_number(p.x, token, p.dims, block * 16 + e);
            largest = fmaxf(largest, fabsf(x[e]));
        }
        uint8_t code = number_to_fp8(ATTN_DTYPE_FP8_E4M3, odd_float(global * largest / 6.0));
        double scale = (double)number_load((const char *)&code, ATTN_DTYPE_FP8_E4M3, 0);
        ((uint8_t *)p.block_scales)[token * p.scale_row + block] = code;
        uint8_t *out = (uint8_t *)p.out.data + token * p.out.row + block * 8;
#pragma unroll
        for (int e = 0; e < 16; e += 2) {
            double low = scale == 0.0 ? 0.0 : (double)x[e] * global / scale;
            double high = scale == 0.0 ? 0.0 : (double)x[e + 1] * global / scale;
            out[e / 2] = (uint8_t)(e2m1_of(low) | e2m1_of(high) << 4);
        }
    }
}

cudaError_t launch_quantize(const void *params, int32_t num_sms, cudaStream_t stream)
{
    if (params == nullptr) {
        cudaError_t error = load_kernel(quantize_static);
        error = error ? error : load_kernel(quantize_groups);
        return error ? error : load_kernel(quantize_nvfp4);
    }
    const gpu_quantize_params &p = *(const gpu_quantize_params *)params;
    int64_t columns = (int64_t)p.heads * p.dims, most = (int64_t)num_sms * 32;
    if (p.num_rows <= 0 || columns <= 0) {
        return cudaSuccess;
    }
    if (p.form == ATTN_OUTPUT_FP8_STATIC) {
        quantize_static<<<grid_for(p.num_rows * columns, 256, most), 256, 0, stream>>>(p);
    } else if (p.form == ATTN_OUTPUT_NVFP4) {
        quantize_nvfp4<<<grid_for(p.num_rows * columns / 16, 128, most), 128, 0, stream>>>(p);
    } else {
        quantize_groups<<<grid_for(p.num_rows * columns / p.group, 4, most), 128, 0, stream>>>(p);
    }
    return cudaGetLastError();
}

/* A warp per (row, head). Magnitudes order as their bits do, so an integer maximum joins them. */
static __global__ void __launch_bounds__(128) amax(const __grid_constant__ gpu_amax_params p)
{
    int64_t items = p.num_rows * p.heads;
    int lane = threadIdx.x & 31;
    for (int64_t i = blockIdx.x * 4 + (threadIdx.x >> 5); i < items; i += (int64_t)gridDim.x * 4) {
        int64_t row = i / p.heads, head = i - row * p.heads;
        const char *from = p.x.data + row * p.x.row + head * p.x.head;
        float largest = 0.0f;
        for (int32_t d = lane; d < p.dims; d += 32) {
            largest = fmaxf(largest, fabsf(number_load(from, p.x.dtype, d)));
        }
        largest = warp_largest(largest, false);
        if (lane == 0) {
            atomicMax((int32_t *)&p.out[p.per_head ? head : 0], __float_as_int(largest));
        }
    }
}

cudaError_t launch_amax(const void *params, int32_t num_sms, cudaStream_t stream)
{
    if (params == nullptr) {
        return load_kernel(amax);
    }
    const gpu_amax_params &p = *(const gpu_amax_params *)params;
    if (!p.accumulate) {
        size_t bytes = (p.per_head ? (size_t)p.heads : 1) * sizeof(float);
        cudaError_t error = cudaMemsetAsync(p.out, 0, bytes, stream);
        if (error != cudaSuccess) {
            return error;
        }
    }
    if (p.num_rows > 0 && p.heads > 0) {
        amax<<<grid_for(p.num_rows * p.heads, 4, (int64_t)num_sms * 32), 128, 0, stream>>>(p);
    }
    return cudaGetLastError();
}
