/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cuda/launch.cuh"
#include "sm90_delta_step.cuh"

#define MOST_CLUSTER 8

template <int STATE, int ROWS>
static cudaError_t launch_rows(struct sm80_delta_params *a, int slices, cudaStream_t stream)
{
    constexpr int bytes = sizeof(step_memory<STATE, ROWS>);
    if (a == nullptr) {
        return cudaFuncSetAttribute(delta_one<STATE, ROWS>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    }
    a->slices = slices;
    return launch_kernel(delta_one<STATE, ROWS>, *a,
                         (unsigned)(a->p.num_reqs * a->p.num_v_heads * slices), STEP_THREADS, bytes,
                         stream, true, (unsigned)(a->p.num_v_heads / a->p.num_k_heads * slices));
}

/* Uses fewer rows for each CTA as long as that occupies more multiprocessors and a key head still
 * fits one cluster. */
template <int STATE>
static cudaError_t launch(const struct gpu_device *device, struct sm80_delta_params *a,
                          cudaStream_t stream)
{
    if (a == nullptr) {
        cudaError_t error = launch_rows<STATE, 32>(nullptr, 0, stream);
        error = error ? error : launch_rows<STATE, 64>(nullptr, 0, stream);
        return error ? error : launch_rows<STATE, 128>(nullptr, 0, stream);
    }
    int group = a->p.num_v_heads / a->p.num_k_heads;
    int64_t heads = (int64_t)a->p.num_reqs * a->p.num_v_heads;
    int by32 = (a->p.head_size_v + 31) / 32, by64 = (a->p.head_size_v + 63) / 64;
    if (by32 * group <= MOST_CLUSTER && heads * by64 <= 2 * device->num_sms) {
        return launch_rows<STATE, 32>(a, by32, stream);
    }
    if (by64 * group <= MOST_CLUSTER && (by64 == 1 || heads <= 2 * device->num_sms)) {
        return launch_rows<STATE, 64>(a, by64, stream);
    }
    return launch_rows<STATE, 128>(a, 1, stream);
}

extern "C" const char *sm90_delta_launch(const struct gpu_device *device,
                                         struct sm80_delta_params *params, void *stream)
{
    int32_t state = params != nullptr ? params->p.rule.state_dtype : 0;
    cudaError_t error = cudaSuccess;
    device_scope inside(device);
    if (params == nullptr || state == ATTN_DTYPE_F32) {
        error = launch<KIND_F32>(device, params, (cudaStream_t)stream);
    }
    if (error == cudaSuccess && (params == nullptr || state == ATTN_DTYPE_BF16)) {
        error = launch<KIND_BF16>(device, params, (cudaStream_t)stream);
    }
    if (error == cudaSuccess && (params == nullptr || state == ATTN_DTYPE_F16)) {
        error = launch<KIND_F16>(device, params, (cudaStream_t)stream);
    }
    return cause_of(error);
}
