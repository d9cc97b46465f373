/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled once for each launcher: PREFILL_KIND (KIND_BF16, KIND_F16), PREFILL_SIZE (head size),
 * PREFILL_FORM (launch_prefill, launch_copies), PREFILL_LAUNCH (its name). */
#include "sm90_by_item.cuh"

cudaError_t PREFILL_LAUNCH(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    return PREFILL_FORM<PREFILL_KIND, PREFILL_SIZE>(a, num_sms, stream);
}
