/* SPDX-License-Identifier: Apache-2.0 */
/* What all launches share: the device's context, errors, and launch attributes. */
#ifndef GPU_CUDA_LAUNCH_CUH
#define GPU_CUDA_LAUNCH_CUH

#include <cuda.h>
#include <cuda_runtime.h>

#include "gpu/params.h"

/* Makes the device's primary context current, and restores the caller's context at the end. */
struct device_scope {
    const struct gpu_device *device;
    explicit device_scope(const struct gpu_device *d) : device(d)
    {
        ((CUresult(CUDAAPI *)(CUcontext))d->push)((CUcontext)d->context);
    }
    ~device_scope()
    {
        CUcontext popped;
        ((CUresult(CUDAAPI *)(CUcontext *))device->pop)(&popped);
    }
};

/* NULL or the cause of a failure. Clears the runtime's last error, which the next launch would
 * return. */
static inline const char *cause_of(cudaError_t error)
{
    if (error == cudaSuccess) {
        return NULL;
    }
    (void)cudaGetLastError();
    return cudaGetErrorString(error);
}

/* Launches a kernel in clusters of `cluster` CTAs. `overlaps`: programmatic dependent launch. */
template <class PARAMS>
static inline cudaError_t launch_kernel(void (*kernel)(PARAMS), const PARAMS &params, dim3 ctas,
                                        int threads, size_t smem_bytes, cudaStream_t stream,
                                        bool overlaps = true, unsigned cluster = 1)
{
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    config.gridDim = ctas;
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = smem_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (overlaps) {
        cudaLaunchAttribute &attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        cudaLaunchAttribute &attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = cluster;
        attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    return cudaLaunchKernelEx(&config, kernel, params);
}

#endif
