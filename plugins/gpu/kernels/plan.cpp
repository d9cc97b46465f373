/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule, made on the device from the lengths as they are there. One CTA. */
#include "gpu/kernels/cut.h"

GPU_KERNEL(plan, gpu_plan_params)
{
    GPU_SHARED plan_memory memory;
    make_schedule(p.problem, p.schedule, memory);
}
