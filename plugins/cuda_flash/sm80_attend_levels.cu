/* SPDX-License-Identifier: Apache-2.0 */
#include "sm80_attend.cuh"

cudaError_t launch_levels(const struct sm80_params *params, cudaStream_t stream)
{
    return launch_kind<KIND_LEVELS>(params, stream);
}
