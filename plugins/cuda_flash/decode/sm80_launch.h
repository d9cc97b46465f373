/* SPDX-License-Identifier: Apache-2.0 */
/* Launchers of the attend kernels by kind. With params NULL they only load their kernels, so that
 * no step does. */
#ifndef CUDA_FLASH_SM80_LAUNCH_H
#define CUDA_FLASH_SM80_LAUNCH_H

#include <cuda_runtime.h>

#include "cuda_flash/prefill/sm80_prefill.h"
#include "sm80_attend.h"

typedef cudaError_t gpu_attend_launcher(const struct sm80_params *params, cudaStream_t stream);

gpu_attend_launcher launch_f32, launch_bf16, launch_f16, launch_e4m3, launch_e5m2, launch_int8,
    launch_int4, launch_nvfp4, launch_levels, launch_k8v4;

typedef cudaError_t gpu_prefill_launcher(const struct sm80_prefill_params *params,
                                         cudaStream_t stream);

gpu_prefill_launcher launch_sm80_prefill_bf16, launch_sm80_prefill_f16, launch_sm80_prefill_e4m3,
    launch_sm80_prefill_e5m2;

#endif
