/* SPDX-License-Identifier: Apache-2.0 */
#include <cuda.h>

#include "sm90_delta_walk.cuh"

static cudaError_t launch(struct sm80_delta_params *a, cudaStream_t stream)
{
    constexpr int bytes = sizeof(wide_memory) + (WIDE_STAGES - 1) * sizeof(chunk_stage);
    static_assert(bytes <= 227 * 1024, "shared memory of a CTA");
    if (a == nullptr) {
        return cudaFuncSetAttribute(delta_walk_wide, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    bytes);
    }
    int32_t rows = WIDE_TEAMS * GROUP_ROWS;
    a->stages = WIDE_STAGES;
    a->slices = (a->p.head_size_v + rows - 1) / rows;
    unsigned groups = (unsigned)sm80_delta_most_requests(a) * a->p.num_v_heads * a->slices;
    cudaLaunchAttribute attribute; /* begins behind the first kernel's last groups */
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(groups);
    config.blockDim = dim3(WIDE_THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, delta_walk_wide, *a);
}

typedef CUresult CUDAAPI push_fn(CUcontext);
typedef CUresult CUDAAPI pop_fn(CUcontext *);

extern "C" const char *sm90_delta_walk(const struct gpu_device *device,
                                       struct sm80_delta_params *params, void *stream)
{
    CUcontext popped;
    ((push_fn *)device->push)((CUcontext)device->context);
    cudaError_t error = launch(params, (cudaStream_t)stream);
    if (error != cudaSuccess) { /* the runtime would keep it for the next launch */
        (void)cudaGetLastError();
    }
    ((pop_fn *)device->pop)(&popped);
    return error == cudaSuccess ? NULL : cudaGetErrorString(error);
}
