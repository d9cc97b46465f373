/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled once for each kind: ATTEND_KIND is the enum gpu_kind, ATTEND_LAUNCH the name of the
 * launcher. */
#include "sm80_attend.cuh"

cudaError_t ATTEND_LAUNCH(const struct sm80_params *params, cudaStream_t stream)
{
    return launch_kind<ATTEND_KIND>(params, stream);
}
