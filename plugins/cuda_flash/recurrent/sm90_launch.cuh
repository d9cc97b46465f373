/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CUDA_FLASH_SM90_LAUNCH_CUH
#define CUDA_FLASH_SM90_LAUNCH_CUH

#include "sm80_gated_delta.h"

/* Launches a kernel with programmatic dependent launch, in clusters of `cluster` CTAs. */
static inline cudaError_t launch_dependent(void (*kernel)(sm80_delta_params),
                                           const sm80_delta_params &a, unsigned groups, int threads,
                                           int bytes, cudaStream_t stream, unsigned cluster = 1)
{
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(groups);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, a);
}

#endif
