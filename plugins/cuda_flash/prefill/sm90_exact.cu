/* SPDX-License-Identifier: Apache-2.0 */
/* The exact kernels: the bits of a row do not depend on the rows that share its item. */
#include "sm90_by_item.cuh"

template <int KIND>
static cudaError_t launch_sizes(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    prefill_launcher *const launchers[] = {launch_exact<KIND, 64>, launch_exact<KIND, 128>,
                                           launch_exact<KIND, 192>, launch_exact<KIND, 256>,
                                           launch_exact<KIND, 512>};
    if (a != nullptr) {
        return launchers[prefill_size_index(a->size)](a, num_sms, stream);
    }
    cudaError_t error = cudaSuccess;
    for (prefill_launcher *load : launchers) {
        error = error ? error : load(nullptr, 0, stream);
    }
    return error;
}

cudaError_t launch_exact_bf16(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    return launch_sizes<KIND_BF16>(a, num_sms, stream);
}

#ifndef CUDA_FLASH_BF16_ALONE
cudaError_t launch_exact_f16(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    return launch_sizes<KIND_F16>(a, num_sms, stream);
}
#endif
