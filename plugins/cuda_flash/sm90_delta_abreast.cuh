/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks of few walks are prepared next to them: CTAs of a whole multiprocessor each prepare, all
 * heads of a chunk before the next one's, and let the walk's kernel begin at once on the others. It
 * waits for each chunk's flag. */
#ifndef CUDA_FLASH_SM90_DELTA_ABREAST_CUH
#define CUDA_FLASH_SM90_DELTA_ABREAST_CUH

#include "sm80_delta_prepare.cuh"
#include "sm90_delta_walk.cuh"

#define PREPARE_GROUPS (WIDE_THREADS / PREPARE_THREADS)
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

/* Each group of warps has every so-manieth of the chunks' key heads. */
static __global__ void __launch_bounds__(WIDE_THREADS, 1)
    delta_prepare_abreast(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(16) char prepare_bytes[];
    prepare_memory &m = ((prepare_memory *)prepare_bytes)[warp_index() / PREPARE_WARPS];
    wait_for_earlier_kernels(); /* flags are cleared */
    let_later_kernels_begin();
    int32_t number = warp_index() / PREPARE_WARPS * a.preparers + (int32_t)blockIdx.x;
#pragma unroll 1
    while (number < a.num_chunks * a.p.num_k_heads) {
        if (enter_item(a, number, m)) {
            prepare_chunk(a, m);
            asm volatile("fence.proxy.async;" ::: "memory"); /* bulk copies read it */
            sync_preparers();
            if (prepare_warp() == 0 && lane_index() == 0) {
                __threadfence();
                asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(
                                 flag_of(a, m.item.index, m.item.key_head))
                             : "memory");
            }
        }
        number = m.item.index * a.p.num_k_heads + m.item.key_head + a.preparers * PREPARE_GROUPS;
        sync_preparers(); /* all have read it */
    }
}

#endif
