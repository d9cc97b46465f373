/* SPDX-License-Identifier: Apache-2.0 */
#include "sm80_attend.cuh"

cudaError_t launch_k8v4(const struct sm80_params *params, cudaStream_t stream)
{
    return launch_kind<KIND_K8V4>(params, stream);
}
