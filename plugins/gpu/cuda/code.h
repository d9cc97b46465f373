/* SPDX-License-Identifier: Apache-2.0 */
/* Which code a device runs of the kernels that are compiled for all targets. */
#ifndef GPU_CUDA_CODE_H
#define GPU_CUDA_CODE_H

#include "gpu/params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether it is for sm_90 or later: such code copies in bulk and waits for earlier kernels. Code
 * for sm_80, which newer GPUs run where their own is not compiled, has neither. The device is open.
 */
bool cuda_runs_sm90(const struct gpu_device *device);

#ifdef __cplusplus
}
#endif
#endif
