/* SPDX-License-Identifier: Apache-2.0 */
/* The launchers of prefill by element type; params NULL: only loads their kernels. */
#ifndef CUDA_FLASH_SM90_LAUNCH_H
#define CUDA_FLASH_SM90_LAUNCH_H

#include <cuda_runtime.h>

#include "sm90_prefill.h"

typedef cudaError_t prefill_launcher(const struct prefill_params *params, int32_t num_sms,
                                     cudaStream_t stream);

prefill_launcher launch_prefill_bf16, launch_prefill_f16, launch_prefill_wide;
prefill_launcher launch_prefill_copies_bf16, launch_prefill_copies_f16, launch_widen;

#endif
