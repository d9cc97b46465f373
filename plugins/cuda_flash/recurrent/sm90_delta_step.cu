/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cuda/launch.cuh"
#include "sm90_delta_ring.cuh"

#define MOST_CLUSTER 8

static const gpu_delta_params &delta_of(const sm80_delta_params &a)
{
    return a.p;
}

static const gpu_delta_params &delta_of(const sm90_ring_params &a)
{
    return a.ring.delta;
}

template <class PARAMS>
static cudaError_t launch_step(void (*kernel)(PARAMS), int bytes, PARAMS *a, int slices,
                               cudaStream_t stream)
{
    if (a == nullptr) {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    }
    const gpu_delta_params &p = delta_of(*a);
    a->slices = slices;
    const unsigned cluster = (unsigned)(p.num_v_heads / p.num_k_heads * slices);
    const dim3 ctas(cluster, (unsigned)p.num_k_heads, (unsigned)p.num_reqs);
    return launch_kernel(kernel, *a, ctas, STEP_THREADS, bytes, stream, true, cluster);
}

template <int STATE, int ROWS>
static cudaError_t launch_rows(sm80_delta_params *a, int slices, cudaStream_t stream)
{
    constexpr int bytes = sizeof(step_memory<STATE, ROWS>);
    if constexpr (STATE != KIND_F32) {
        const bool seeded = a == nullptr || a->p.rule.rounds > 0;
        cudaError_t error =
            seeded ? launch_step(delta_one<STATE, ROWS, true>, bytes, a, slices, stream)
                   : cudaSuccess;
        if (error != cudaSuccess || (a != nullptr && seeded)) {
            return error;
        }
    }
    return launch_step(delta_one<STATE, ROWS, false>, bytes, a, slices, stream);
}

template <int STATE, int ROWS>
static cudaError_t launch_rows(sm90_ring_params *a, int slices, cudaStream_t stream)
{
    const bool few =
        a != nullptr && a->ring.delta.num_accepted == nullptr && a->ring.rows <= RING_MOST;
    cudaError_t error = cudaSuccess;
    if (a == nullptr || few) {
        error = launch_step(delta_ring<STATE, ROWS, 1>, sizeof(ring_memory<STATE, ROWS, 1>), a,
                            slices, stream);
    }
    if (error == cudaSuccess && !few) {
        error = launch_step(delta_ring<STATE, ROWS, RING_TOKENS>,
                            sizeof(ring_memory<STATE, ROWS, RING_TOKENS>), a, slices, stream);
    }
    return error;
}

/* Uses fewer rows for each CTA as long as that occupies more multiprocessors and a key head still
 * fits one cluster. */
template <int STATE, class PARAMS>
static cudaError_t launch(const struct gpu_device *device, PARAMS *a, cudaStream_t stream)
{
    if (a == nullptr) {
        cudaError_t error = launch_rows<STATE, 32>(a, 0, stream);
        error = error ? error : launch_rows<STATE, 64>(a, 0, stream);
        return error ? error : launch_rows<STATE, 128>(a, 0, stream);
    }
    const gpu_delta_params &p = delta_of(*a);
    int group = p.num_v_heads / p.num_k_heads;
    int64_t heads = (int64_t)p.num_reqs * p.num_v_heads;
    int by32 = (p.head_size_v + 31) / 32, by64 = (p.head_size_v + 63) / 64;
    if (by32 * group <= MOST_CLUSTER && heads * by64 <= 2 * device->num_sms) {
        return launch_rows<STATE, 32>(a, by32, stream);
    }
    if (by64 * group <= MOST_CLUSTER && (by64 == 1 || heads <= 2 * device->num_sms)) {
        return launch_rows<STATE, 64>(a, by64, stream);
    }
    return launch_rows<STATE, 128>(a, 1, stream);
}

template <class PARAMS>
static const char *launch_any(const struct gpu_device *device, PARAMS *params, void *stream)
{
    int32_t state = params != nullptr ? delta_of(*params).rule.state_dtype : 0;
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

extern "C" const char *sm90_delta_launch(const struct gpu_device *device,
                                         struct sm80_delta_params *params, void *stream)
{
    return launch_any(device, params, stream);
}

extern "C" const char *sm90_ring_launch(const struct gpu_device *device,
                                        struct sm90_ring_params *params, void *stream)
{
    return launch_any(device, params, stream);
}
