/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill's schedule, the maps of what it reads, and its launches. */
#include <cuda.h>

#include "sm90_launch.h"
#include "sm90_order.cuh"

static __global__ void __launch_bounds__(PLAN_THREADS)
    order(const __grid_constant__ prefill_params a)
{
    __shared__ order_memory memory;
    order_items(a, memory);
}

static cudaError_t launch_order(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    if (a == nullptr) {
        cudaFuncAttributes attributes;
        return cudaFuncGetAttributes(&attributes, order);
    }
    order<<<1, PLAN_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}

typedef CUresult CUDAAPI push_fn(CUcontext);
typedef CUresult CUDAAPI pop_fn(CUcontext *);
typedef CUresult CUDAAPI encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                   const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                   const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                   CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static prefill_launcher *const launchers[] = {launch_order, launch_prefill_bf16,
                                              launch_prefill_f16};

extern "C" const char *prefill_launch(const struct gpu_device *device, enum prefill_kernel kernel,
                                      const struct prefill_params *params, void *stream)
{
    CUcontext popped;
    ((push_fn *)device->push)((CUcontext)device->context);
    cudaError_t error = launchers[kernel](params, device->num_sms, (cudaStream_t)stream);
    if (error != cudaSuccess) { /* the runtime would keep it for the next launch */
        (void)cudaGetLastError();
    }
    ((pop_fn *)device->pop)(&popped);
    return error == cudaSuccess ? NULL : cudaGetErrorString(error);
}

extern "C" const char *prefill_load(const struct gpu_device *device)
{
    const char *cause = NULL;
    for (int kernel = PREFILL_ORDER; kernel <= PREFILL_F16 && cause == NULL; kernel++) {
        cause = prefill_launch(device, (enum prefill_kernel)kernel, NULL, NULL);
    }
    return cause;
}

extern "C" bool prefill_encode_map(const struct gpu_device *device, const void *data,
                                   const uint64_t sizes[5], const uint64_t strides[4],
                                   const uint32_t box[5], struct gpu_map *map)
{
    const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    return ((encode_fn *)device->encode_map)(
               (CUtensorMap *)map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, (void *)data,
               (const cuuint64_t *)sizes, (const cuuint64_t *)strides, box, ones,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
