/* SPDX-License-Identifier: Apache-2.0 */
#include "sm90_widen.cuh"

#include "cuda_flash/prefill/sm90_launch.h"

#define GROUPS_OF_SM 8

typedef void widen_kernel(const prefill_params a);

#define KERNELS_OF(kind, plane)                                                                    \
    {                                                                                              \
        widen_rows<kind, WIDEN_E4M3, plane>, widen_rows<kind, WIDEN_E5M2, plane>,                  \
            widen_rows<kind, WIDEN_INT8, plane>, widen_rows<kind, WIDEN_CHANNEL, plane>,           \
            widen_rows<kind, WIDEN_INT4, plane>, widen_rows<kind, WIDEN_NVFP4, plane>,             \
            widen_rows<kind, WIDEN_NUMBERS, plane>, widen_rows<kind, WIDEN_NOTHING, plane>         \
    }

/* [f16, bf16][plane][enum widen_form] */
static widen_kernel *const kernels[2][2][WIDEN_NOTHING + 1] = {
    {KERNELS_OF(KIND_F16, 0), KERNELS_OF(KIND_F16, 1)},
    {KERNELS_OF(KIND_BF16, 0), KERNELS_OF(KIND_BF16, 1)},
};

static widen_form form_of(const gpu_cache &c)
{
    return c.form == GPU_ROW_INT4           ? WIDEN_INT4
           : c.form == GPU_ROW_NVFP4        ? WIDEN_NVFP4
           : c.form == GPU_ROW_CHANNEL      ? WIDEN_CHANNEL
           : c.dtype == ATTN_DTYPE_INT8     ? WIDEN_INT8
           : c.dtype == ATTN_DTYPE_FP8_E4M3 ? WIDEN_E4M3
           : c.dtype == ATTN_DTYPE_FP8_E5M2 ? WIDEN_E5M2
                                            : WIDEN_NUMBERS;
}

cudaError_t launch_widen(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    for (int plane = 0; plane < 2; plane++) {
        for (int kind = 0; kind < 2 && a == nullptr; kind++) {
            for (int form = 0; form <= WIDEN_NOTHING; form++) {
                cudaFuncAttributes attributes;
                cudaError_t error = cudaFuncGetAttributes(&attributes, kernels[kind][plane][form]);
                if (error != cudaSuccess) {
                    return error;
                }
            }
        }
        if (a != nullptr) {
            bool bf16 = a->p.out.dtype == ATTN_DTYPE_BF16;
            bool stays = plane == 0 && a->scales == PREFILL_IN_FP8;
            kernels[bf16][plane][stays ? WIDEN_NOTHING : form_of(a->narrow[plane])]<<<
                (unsigned)(num_sms * GROUPS_OF_SM), WIDEN_THREADS, 0, stream>>>(*a);
        }
    }
    return a != nullptr ? cudaGetLastError() : cudaSuccess;
}
