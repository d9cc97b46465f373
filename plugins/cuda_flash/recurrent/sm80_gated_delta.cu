/* SPDX-License-Identifier: Apache-2.0 */
/* The two launches of chunks: prepare, then state by mma.sync, which reads the rule at run time.
 * Without a delta (Mamba2, lightning) a chunk has no inverse, and only S goes from chunk to chunk:
 *     R = beta V;  O = e^g Q S^T + P R;  S <- e^g S + R^T (decays) K */
#include "gpu/cuda/launch.cuh"
#include "sm80_delta_prepare.cuh"
#include "sm80_delta_state.cuh"

#define LEAST_STAGES 2
#define WANTED_STAGES 3

template <int GATES>
static __global__ void __launch_bounds__(PREPARE_THREADS, 4)
    delta_prepare(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(16) char memory[];
    let_later_kernels_begin();
    prepare_items<false, GATES>(a, (int32_t)blockIdx.x, *(rule_memory *)memory);
}

template <int TEAMS> static int state_bytes(int stages)
{
    return (int)(sizeof(state_memory<TEAMS>) + (stages - 1) * sizeof(chunk_stage));
}

template <class F> static cudaError_t allow(F *kernel, int bytes)
{
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

/* The number of stages that fit, at most WANTED_STAGES; 0 if two do not fit. */
template <int TEAMS> static int stages_of(const struct gpu_device *device)
{
    int stages = WANTED_STAGES;
    while (stages >= LEAST_STAGES && state_bytes<TEAMS>(stages) > device->smem_of_cta) {
        stages--;
    }
    return stages >= LEAST_STAGES ? stages : 0;
}

template <int TEAMS>
static cudaError_t launch_state(const struct gpu_device *device, struct sm80_delta_params *a,
                                cudaStream_t stream)
{
    int stages = stages_of<TEAMS>(device);
    int bytes = state_bytes<TEAMS>(stages);
    if (a == nullptr) {
        if (stages == 0) {
            return cudaSuccess;
        }
        return allow(delta_state<TEAMS>, bytes);
    }
    a->stages = stages;
    a->slices = (a->p.head_size_v + TEAMS * GROUP_ROWS - 1) / (TEAMS * GROUP_ROWS);
    unsigned groups = (unsigned)sm80_delta_most_requests(a) * a->p.num_v_heads * a->slices;
    delta_state<TEAMS><<<groups, state_threads<TEAMS>, bytes, stream>>>(*a);
    return cudaGetLastError();
}

/* Uses 2 teams instead of 4 where 4 would leave multiprocessors idle. */
static cudaError_t launch(const struct gpu_device *device, struct sm80_delta_params *a,
                          cudaStream_t stream)
{
    constexpr int bytes = sizeof(rule_memory);
    cudaError_t error = cudaSuccess;
    if (a == nullptr) {
        error = allow(delta_prepare<GATES_USUAL>, bytes);
        error = error ? error : allow(delta_prepare<GATES_OF_HEADS>, bytes);
        error = error ? error : launch_state<2>(device, nullptr, stream);
        return error ? error : launch_state<4>(device, nullptr, stream);
    }
    unsigned groups = (unsigned)a->num_chunks * a->p.num_k_heads;
    if (groups == 0 || sm80_delta_most_requests(a) == 0) {
        return cudaSuccess;
    }
    a->first_part = 0, a->end_part = (int32_t)groups;
    auto prepare = a->usual_gates ? delta_prepare<GATES_USUAL> : delta_prepare<GATES_OF_HEADS>;
    prepare<<<groups, PREPARE_THREADS, bytes, stream>>>(*a);
    error = cudaGetLastError();
    if (error != cudaSuccess || a->state_on_sm90) {
        return error;
    }
    int64_t wide = sm80_delta_most_requests(a) * a->p.num_v_heads *
                   ((a->p.head_size_v + 4 * GROUP_ROWS - 1) / (4 * GROUP_ROWS));
    bool few = wide < device->num_sms || stages_of<4>(device) == 0;
    return few ? launch_state<2>(device, a, stream) : launch_state<4>(device, a, stream);
}

extern "C" const char *sm80_delta_launch(const struct gpu_device *device,
                                         struct sm80_delta_params *params, void *stream)
{
    device_scope inside(device);
    return cause_of(launch(device, params, (cudaStream_t)stream));
}

/* Whether two stages of the smaller kernel fit. */
extern "C" bool sm80_delta_fits(const struct gpu_device *device)
{
    return stages_of<2>(device) > 0;
}
