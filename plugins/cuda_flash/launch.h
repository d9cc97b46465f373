/* SPDX-License-Identifier: Apache-2.0 */
/* One launcher per kernel: params is its gpu_*_params; NULL only loads the kernel, so that no
 * step does. */
#ifndef CUDA_FLASH_LAUNCH_H
#define CUDA_FLASH_LAUNCH_H

#include <cuda_runtime.h>

#include "gpu/params.h"

typedef cudaError_t gpu_launcher(const void *params, int32_t num_sms, cudaStream_t stream);

gpu_launcher launch_plan, launch_bf16, launch_f16, launch_e4m3, launch_e5m2, launch_int8,
    launch_plain, launch_write, launch_rope_write, launch_merge, launch_quantize, launch_amax,
    launch_gather, launch_widen;

template <class Kernel> static inline cudaError_t load_kernel(Kernel *kernel)
{
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, kernel);
}

/* CTAs of `per` items each, at most `most`. */
static inline unsigned grid_for(int64_t items, int64_t per, int64_t most)
{
    int64_t ctas = (items + per - 1) / per;
    return (unsigned)(ctas < 1 ? 1 : ctas < most ? ctas : most);
}

#endif
