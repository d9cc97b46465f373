/* SPDX-License-Identifier: Apache-2.0 */
/* The attend kernels by the type they multiply in. p NULL loads them. */
#ifndef CUDA_FLASH_LAUNCH_H
#define CUDA_FLASH_LAUNCH_H

#include <cuda_runtime.h>

#include "flash.h"

cudaError_t launch_bf16(const struct flash_params *p, int32_t num_sms, cudaStream_t stream);
cudaError_t launch_f16(const struct flash_params *p, int32_t num_sms, cudaStream_t stream);
cudaError_t launch_fp8(const struct flash_params *p, int32_t num_sms, cudaStream_t stream);

#endif
