/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cuda/launch.cuh"
#include "sm90_swap_ab.cuh"

template <int KIND, int ROWS>
static cudaError_t launch(const sm90_latent_params *a, int32_t num_sms, cudaStream_t stream)
{
    static_assert(sizeof(swap_ab_shared<ROWS>) <= 227 * 1024, "shared memory of a CTA");
    if (a == nullptr) {
        cudaFuncAttributes attributes;
        cudaError_t error = cudaFuncGetAttributes(&attributes, merge_latent_swap_ab<KIND, ROWS>);
        return error ? error
                     : cudaFuncSetAttribute(attend_latent_swap_ab<KIND, ROWS>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            (int)sizeof(swap_ab_shared<ROWS>));
    }
    cudaError_t error = launch_kernel(attend_latent_swap_ab<KIND, ROWS>, *a, (unsigned)num_sms,
                                      SWAP_AB_THREADS, sizeof(swap_ab_shared<ROWS>), stream);
    return error ? error
                 : launch_kernel(merge_latent_swap_ab<KIND, ROWS>, *a, (unsigned)num_sms,
                                 MERGE_THREADS, 0, stream);
}

extern "C" int sm90_swap_ab_launch(const struct sm90_latent_params *a, int32_t num_sms,
                                   void *stream)
{
    typedef cudaError_t launcher(const sm90_latent_params *, int32_t, cudaStream_t);
    static launcher *const launchers[2][2] = {{launch<KIND_F16, 16>, launch<KIND_F16, 32>},
                                              {launch<KIND_BF16, 16>, launch<KIND_BF16, 32>}};
    cudaError_t error = cudaSuccess;
    for (int i = 0; a == nullptr && i < 4 && error == cudaSuccess; i++) {
        error = launchers[i / 2][i % 2](nullptr, 0, nullptr);
    }
    if (a != nullptr) {
        const bool bf16 = a->p.attend.q.dtype == ATTN_DTYPE_BF16;
        error =
            launchers[bf16][a->p.attend.schedule.tile_rows > 16](a, num_sms, (cudaStream_t)stream);
    }
    return (int)error;
}
