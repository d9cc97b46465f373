/* SPDX-License-Identifier: Apache-2.0 */
#include "sm90_head64.cuh"

template <int KIND>
static cudaError_t launch_head64(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    using shape = prefill_shape<KIND, 64, 64, 128, 2, false, 0, PREFILL_UNSCALED, 3>;
    static_assert(shape::rows == PREFILL_HEAD64_ROWS, "rows of three warp groups");
    return launch_prefill_shape<shape>(a, num_sms, stream);
}

cudaError_t launch_prefill_head64(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    if (a == nullptr) {
        cudaError_t error = launch_head64<KIND_BF16>(a, 0, stream);
        return error ? error : launch_head64<KIND_F16>(a, 0, stream);
    }
    return a->p.out.dtype == ATTN_DTYPE_BF16 ? launch_head64<KIND_BF16>(a, num_sms, stream)
                                             : launch_head64<KIND_F16>(a, num_sms, stream);
}
