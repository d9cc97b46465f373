/* SPDX-License-Identifier: Apache-2.0 */
#include "sm90_latent.cuh"

extern "C" const char *sm90_latent_launch(const struct gpu_device *device,
                                          const struct sm90_latent_params *params, void *stream)
{
    /* 8-bit rows are converted to f16, which is exact, and bf16 queries with them */
    bool bf16 = params == nullptr ||
                (params->form == LATENT_FORM_OWN && params->p.attend.q.dtype == ATTN_DTYPE_BF16);
    bool f16 = params == nullptr || !bf16;
    bool swap_ab = params == nullptr || params->swap_ab;
    cudaError_t error = cudaSuccess;
    device_scope inside(device);
    if (swap_ab) {
        error = (cudaError_t)sm90_swap_ab_launch(params, device->num_sms, stream);
    }
    if (params != nullptr && swap_ab) {
        bf16 = f16 = false;
    }
    if (bf16 && error == cudaSuccess) {
        error = launch_latent<KIND_BF16>(params, device->num_sms, (cudaStream_t)stream);
    }
    if (f16 && error == cudaSuccess) {
        error = launch_latent<KIND_F16>(params, device->num_sms, (cudaStream_t)stream);
    }
    return cause_of(error);
}
