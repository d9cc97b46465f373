/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that plan prefill and merge cut items, and all launches of prefill. */
#include "gpu/cuda/launch.cuh"
#include "sm90_launch.h"
#include "sm90_merge.cuh"
#include "sm90_schedule.cuh"

static __global__ void __launch_bounds__(PLAN_THREADS)
    plan_items(const __grid_constant__ prefill_params a)
{
    __shared__ schedule_memory memory;
    schedule_items(a, memory);
    release_stores(); /* prefill reads its first item before it waits for this kernel's end */
}

static cudaError_t launch_plan(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    if (a == nullptr) {
        cudaFuncAttributes attributes;
        return cudaFuncGetAttributes(&attributes, plan_items);
    }
    plan_items<<<1, PLAN_THREADS, 0, stream>>>(*a);
    return cudaGetLastError();
}

static cudaError_t launch_merge(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    if (a == nullptr) {
        cudaFuncAttributes attributes;
        cudaError_t error = cudaFuncGetAttributes(&attributes, merge_parts<KIND_BF16>);
        return error ? error : cudaFuncGetAttributes(&attributes, merge_parts<KIND_F16>);
    }
    const bool bf16 = a->p.out.dtype == ATTN_DTYPE_BF16;
    return launch_kernel(bf16 ? merge_parts<KIND_BF16> : merge_parts<KIND_F16>, *a,
                         PREFILL_MOST_PARTS, MERGE_THREADS, 0, stream);
}

#define ANY_SIZE(launch)                                                                           \
    {                                                                                              \
        launch, launch, launch, launch, launch                                                     \
    }
/* By enum prefill_kernel, then head size: 64, 128, 192, 256, 512. */
static prefill_launcher *const launchers[PREFILL_KERNELS][5] = {
    ANY_SIZE(launch_plan),
    ANY_SIZE(launch_merge),
    ANY_SIZE(launch_widen),
    {launch_prefill_bf16_64, launch_prefill_bf16_128, launch_prefill_bf16_192,
     launch_prefill_bf16_256, launch_prefill_bf16_512},
    {F16_LAUNCHER(launch_prefill_f16_64), F16_LAUNCHER(launch_prefill_f16_128),
     F16_LAUNCHER(launch_prefill_f16_192), F16_LAUNCHER(launch_prefill_f16_256),
     F16_LAUNCHER(launch_prefill_f16_512)},
    ANY_SIZE(launch_prefill_head64),
    {launch_copies_bf16_64, launch_copies_bf16_128, nullptr, launch_copies_bf16_256, nullptr},
    {F16_LAUNCHER(launch_copies_f16_64), F16_LAUNCHER(launch_copies_f16_128), nullptr,
     F16_LAUNCHER(launch_copies_f16_256), nullptr},
    ANY_SIZE(launch_exact_bf16),
    ANY_SIZE(F16_LAUNCHER(launch_exact_f16))};

extern "C" const char *prefill_launch(const struct gpu_device *device, enum prefill_kernel kernel,
                                      const struct prefill_params *params, void *stream)
{
    device_scope inside(device);
    int32_t ctas = params->ctas > 0 ? params->ctas : device->num_sms;
    prefill_launcher *const launch = launchers[kernel][prefill_size_index(params->size)];
    return cause_of(launch(params, ctas, (cudaStream_t)stream));
}

extern "C" const char *prefill_load(const struct gpu_device *device, uint32_t kernels, int32_t size)
{
    device_scope inside(device);
    cudaError_t error = cudaSuccess;
    for (int kernel = PREFILL_PLAN; kernel < PREFILL_KERNELS; kernel++) {
        prefill_launcher *const load = launchers[kernel][prefill_size_index(size)];
        if ((kernels >> kernel & 1) != 0 && error == cudaSuccess) {
            error = load(nullptr, 0, nullptr);
        }
    }
    return cause_of(error);
}
