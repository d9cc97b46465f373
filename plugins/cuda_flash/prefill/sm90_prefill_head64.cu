/* SPDX-License-Identifier: Apache-2.0 */
#include "sm90_head64.cuh"

template <int KIND>
static cudaError_t launch_head64(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    using columns = prefill_shape<KIND, 64, 64, 128, 2, false, 0, PREFILL_UNSCALED, 3>;
    using groups = prefill_shape<KIND, 64, 64, 128, 2, true, 0, PREFILL_UNSCALED, 3>;
    static_assert(columns::rows == PREFILL_HEAD64_ROWS, "rows of three warp groups");
    if (a == nullptr) {
        cudaError_t error = launch_prefill_shape<columns>(a, 0, stream);
        return error ? error : launch_prefill_shape<groups>(a, 0, stream);
    }
    return a->grouped ? launch_prefill_shape<groups>(a, num_sms, stream)
                      : launch_prefill_shape<columns>(a, num_sms, stream);
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
