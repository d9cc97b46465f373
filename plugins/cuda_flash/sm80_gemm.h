/* SPDX-License-Identifier: Apache-2.0 */
/* batched_gemm on tensor cores: what the launch and the kernel share. */
#ifndef CUDA_FLASH_SM80_GEMM_H
#define CUDA_FLASH_SM80_GEMM_H

#include "gpu/latent.h"

struct sm80_gemm_params {
    struct gpu_gemm_params p;
    int32_t wide_a, wide_w, wide_out; /* 1: 16 bytes at a time */
};

#endif
