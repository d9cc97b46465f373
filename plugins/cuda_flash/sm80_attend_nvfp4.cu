/* SPDX-License-Identifier: Apache-2.0 */
#include "sm80_attend.cuh"

cudaError_t launch_nvfp4(const struct sm80_params *params, cudaStream_t stream)
{
    return launch_kind<KIND_NVFP4>(params, stream);
}
