/* SPDX-License-Identifier: Apache-2.0 */
/* Compiled once for each kind: PREFILL_KIND is the enum gpu_kind, PREFILL_LAUNCH the name of the
 * launcher. */
#include "sm80_prefill.cuh"

cudaError_t PREFILL_LAUNCH(const struct sm80_prefill_params *params, cudaStream_t stream)
{
    return launch_prefill_kind<PREFILL_KIND>(params, stream);
}
