/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule, made on the device from the lengths as they are there. One CTA. */
#include "gpu/kernels/cut.h"
#include "cuda_flash/launch.h"

static __global__ void __launch_bounds__(PLAN_THREADS) plan(const __grid_constant__ gpu_params p)
{
    __shared__ plan_memory memory;
    make_schedule(p, memory);
}

cudaError_t launch_plan(const void *params, int32_t num_sms, cudaStream_t stream)
{
    if (params == nullptr) {
        return load_kernel(plan);
    }
    plan<<<1, PLAN_THREADS, 0, stream>>>(*(const gpu_params *)params);
    return cudaGetLastError();
}
