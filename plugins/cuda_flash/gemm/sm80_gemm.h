/* SPDX-License-Identifier: Apache-2.0 */
/* batched_gemm on tensor cores: parameters shared by the launch and the kernel. */
#ifndef CUDA_FLASH_SM80_GEMM_H
#define CUDA_FLASH_SM80_GEMM_H

#include "gpu/latent.h"

/* How eight adjacent weights are read: one by one, as 16 bytes, or as 8 or 4 bytes of codes, with
 * one block scale for all eight or one for each. */
enum sm80_gemm_weights {
    GEMM_WEIGHTS_ANY,
    GEMM_WEIGHTS_WIDE,
    GEMM_WEIGHTS_FP8,
    GEMM_WEIGHTS_MXFP4_SHARED,
    GEMM_WEIGHTS_MXFP4_OWN
};

struct sm80_gemm_params {
    struct gpu_gemm_params p;
    int32_t weights;          /* enum sm80_gemm_weights */
    int32_t wide_a, wide_out; /* 1: can be copied 16 bytes at a time */
};

#endif
