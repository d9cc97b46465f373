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
                         dim3(PREFILL_MOST_PARTS, PREFILL_ROWS / MERGE_ROWS), MERGE_THREADS, 0,
                         stream);
}

/* By head size: 64, 128, 192, 256, 512. */
struct sized_launchers {
    prefill_launcher *of[5];
};
static constexpr sized_launchers bf16_launchers = {
    {launch_prefill_bf16_64, launch_prefill_bf16_128, launch_prefill_bf16_192,
     launch_prefill_bf16_256, launch_prefill_bf16_512}};
static constexpr sized_launchers f16_launchers = {{launch_prefill_f16_64, launch_prefill_f16_128,
                                                   launch_prefill_f16_192, launch_prefill_f16_256,
                                                   launch_prefill_f16_512}};
static constexpr sized_launchers bf16_copies = {
    {launch_copies_bf16_64, launch_copies_bf16_128, nullptr, launch_copies_bf16_256, nullptr}};
static constexpr sized_launchers f16_copies = {
    {launch_copies_f16_64, launch_copies_f16_128, nullptr, launch_copies_f16_256, nullptr}};
static constexpr sized_launchers bf16_exact = {{launch_exact_bf16_64, launch_exact_bf16_128,
                                                launch_exact_bf16_192, launch_exact_bf16_256,
                                                launch_exact_bf16_512}};
static constexpr sized_launchers f16_exact = {{launch_exact_f16_64, launch_exact_f16_128,
                                               launch_exact_f16_192, launch_exact_f16_256,
                                               launch_exact_f16_512}};

template <const sized_launchers &LAUNCHERS>
static cudaError_t launch_size(const prefill_params *a, int32_t num_sms, cudaStream_t stream)
{
    if (a != nullptr) {
        return LAUNCHERS.of[a->size > 256 ? 4 : a->size / 64 - 1](a, num_sms, stream);
    }
    cudaError_t error = cudaSuccess;
    for (prefill_launcher *load : LAUNCHERS.of) {
        error = error == cudaSuccess && load != nullptr ? load(nullptr, 0, stream) : error;
    }
    return error;
}

static prefill_launcher *const launchers[] = {launch_plan,
                                              launch_merge,
                                              launch_widen,
                                              launch_size<bf16_launchers>,
                                              launch_size<f16_launchers>,
                                              launch_prefill_head64,
                                              launch_size<bf16_copies>,
                                              launch_size<f16_copies>,
                                              launch_size<bf16_exact>,
                                              launch_size<f16_exact>};

extern "C" const char *prefill_launch(const struct gpu_device *device, enum prefill_kernel kernel,
                                      const struct prefill_params *params, void *stream)
{
    device_scope inside(device);
    int32_t ctas = params != NULL && params->ctas > 0 ? params->ctas : device->num_sms;
    cudaError_t error = launchers[kernel](params, ctas, (cudaStream_t)stream);
    return cause_of(error);
}

extern "C" const char *prefill_load(const struct gpu_device *device)
{
    const char *cause = NULL;
    for (int kernel = PREFILL_PLAN; kernel < PREFILL_KERNELS && cause == NULL; kernel++) {
        cause = prefill_launch(device, (enum prefill_kernel)kernel, NULL, NULL);
    }
    return cause;
}
