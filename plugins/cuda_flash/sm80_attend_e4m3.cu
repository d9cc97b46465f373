/* SPDX-License-Identifier: Apache-2.0 */
#include "sm80_attend.cuh"

cudaError_t launch_e4m3(const struct sm80_params *params, cudaStream_t stream)
{
    return launch_kind<KIND_E4M3>(params, stream);
}
