/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the schedule on the device from the actual lengths, in one CTA. */
#include "gpu/kernels/cut.h"

GPU_KERNEL(plan, gpu_plan_params)
{
    GPU_SHARED plan_memory memory;
    make_schedule(p.problem, p.schedule, memory);
}
