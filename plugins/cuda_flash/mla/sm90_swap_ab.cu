/* SPDX-License-Identifier: Apache-2.0 */
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
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)num_sms);
    config.blockDim = dim3(SWAP_AB_THREADS);
    config.dynamicSmemBytes = sizeof(swap_ab_shared<ROWS>);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaError_t error = cudaLaunchKernelEx(&config, attend_latent_swap_ab<KIND, ROWS>, *a);
    config.blockDim = dim3(MERGE_THREADS);
    config.dynamicSmemBytes = 0;
    return error ? error : cudaLaunchKernelEx(&config, merge_latent_swap_ab<KIND, ROWS>, *a);
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
