/* SPDX-License-Identifier: Apache-2.0 */
#include "sm90_prefill.cuh"

cudaError_t launch_prefill_copies_bf16(const prefill_params *a, int32_t num_sms,
                                       cudaStream_t stream)
{
    return launch_copies<KIND_BF16>(a, num_sms, stream);
}
