/* SPDX-License-Identifier: Apache-2.0 */
#include "attend.cuh"
#include "launch.h"

cudaError_t launch_f16(const struct flash_params *p, int32_t num_sms, cudaStream_t stream)
{
    return launch_kind<KIND_F16>(p, num_sms, stream);
}
