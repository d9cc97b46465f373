/* SPDX-License-Identifier: Apache-2.0 */
/* Preparation that overlaps the state kernel, for few requests. All multiprocessors prepare the
 * first FIRST_GROUPS parts each, which takes least time; then CTAs that fill a multiprocessor
 * prepare the rest, chunk by chunk with all heads, and let the state kernel start on the other
 * multiprocessors. It waits for each chunk's flag. */
#ifndef CUDA_FLASH_SM90_DELTA_OVERLAP_CUH
#define CUDA_FLASH_SM90_DELTA_OVERLAP_CUH

#include "sm80_delta_prepare.cuh"
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

/* Prepares parts a.first_part .. a.end_part - 1, (chunk, key head) pairs, distributed over the
 * groups of warps. */
static __global__ void __launch_bounds__(STATE64_THREADS, 1)
    delta_prepare_overlapped(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(16) char prepare_bytes[];
    int32_t group = warp_index() / PREPARE_WARPS;
    wait_for_earlier_kernels(); /* the flags are cleared */
    let_later_kernels_begin();
    prepare_items<true>(a, group * (int32_t)gridDim.x + (int32_t)blockIdx.x,
                        ((prepare_memory *)prepare_bytes)[group]);
}

#endif
