/* SPDX-License-Identifier: Apache-2.0 */
/* Preparation that overlaps the state kernel, for few requests. All multiprocessors prepare the
 * first FIRST_GROUPS parts each (with gates per channel most of them), which takes least time; then
 * CTAs that fill a multiprocessor prepare the rest, chunk by chunk with all heads, and let the
 * state kernel start on the other multiprocessors. It waits for each chunk's flag. */
#ifndef CUDA_FLASH_SM90_DELTA_OVERLAP_CUH
#define CUDA_FLASH_SM90_DELTA_OVERLAP_CUH

#include "sm90_delta_channels.cuh"
#include "sm90_delta_state64.cuh"

#define PREPARE_GROUPS (STATE64_THREADS / PREPARE_THREADS)
#define FIRST_GROUPS 1 /* two take as long, four 12 % longer at 2048 tokens */
#define CLEAR_THREADS 256

static __global__ void __launch_bounds__(CLEAR_THREADS)
    delta_clear(const __grid_constant__ sm80_delta_params a)
{
    int32_t width = a.p.num_k_heads, i = blockIdx.x * CLEAR_THREADS + threadIdx.x;
    let_later_kernels_begin();
    if (i < width * a.num_chunks) {
        *flag_of(a, i / width, i % width) = 0;
    }
}

template <int GATES> struct memory_of;
template <> struct memory_of<GATES_USUAL> {
    typedef prepare_memory type;
};
template <> struct memory_of<GATES_OF_HEADS> {
    typedef rule_memory type;
};
template <> struct memory_of<GATES_OF_CHANNELS> {
    typedef channel_memory type;
};
template <int GATES> constexpr int prepare_size = (int)sizeof(typename memory_of<GATES>::type);

/* Prepares parts a.first_part .. a.end_part - 1, (chunk, key head) pairs, distributed over the
 * groups of warps. */
template <int GATES>
static __global__ void __launch_bounds__(STATE64_THREADS, 1)
    delta_prepare_overlapped(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(256) char prepare_bytes[];
    int32_t group = warp_index() / PREPARE_WARPS;
    wait_for_earlier_kernels(); /* the flags are cleared */
    let_later_kernels_begin();
    prepare_items<true, GATES>(a, group * (int32_t)gridDim.x + (int32_t)blockIdx.x,
                               ((typename memory_of<GATES>::type *)prepare_bytes)[group]);
}

/* Launches it with `groups` groups a CTA; without parameters, makes it ready. */
template <int GATES>
static cudaError_t launch_prepare(const sm80_delta_params *a, unsigned num_ctas, int groups,
                                  cudaStream_t stream)
{
    constexpr int most = PREPARE_GROUPS * prepare_size<GATES>;
    static_assert(most <= 227 * 1024, "shared memory of a CTA");
    static_assert(most > 114 * 1024, "two CTAs that prepare would share a multiprocessor");
    if (a == nullptr) {
        return cudaFuncSetAttribute(delta_prepare_overlapped<GATES>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    }
    return launch_kernel(delta_prepare_overlapped<GATES>, *a, num_ctas, groups * PREPARE_THREADS,
                         groups * prepare_size<GATES>, stream);
}

static cudaError_t launch_prepare(const sm80_delta_params &a, unsigned num_ctas, int groups,
                                  cudaStream_t stream)
{
    return a.p.rule.gates > 1 ? launch_prepare<GATES_OF_CHANNELS>(&a, num_ctas, groups, stream)
           : a.usual_gates    ? launch_prepare<GATES_USUAL>(&a, num_ctas, groups, stream)
                              : launch_prepare<GATES_OF_HEADS>(&a, num_ctas, groups, stream);
}

#endif
