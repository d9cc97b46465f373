/* SPDX-License-Identifier: Apache-2.0 */
/* Writes to the shared memory of other CTAs of a cluster. Source: PTX ISA 9.0. */
#ifndef CUDA_FLASH_PTX_SM90_CLUSTER_CUH
#define CUDA_FLASH_PTX_SM90_CLUSTER_CUH

#include "sm90_copy.cuh"

GPU_INLINE void store_remote8(uint32_t remote, float x, float y)
{
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(x), "f"(y)
                 : "memory");
}

GPU_INLINE void store_remote16(uint32_t remote, float x, float y, float z, float w)
{
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "f"(x), "f"(y),
                 "f"(z), "f"(w)
                 : "memory");
}

/* Arrives at the same barrier of each CTA of the cluster, for the warp's writes so far; all lanes
 * call. */
GPU_INLINE void arrive_warp_at_all(uint64_t &barrier)
{
    __syncwarp();
    if ((threadIdx.x & 31) < cluster_size()) {
        const uint32_t remote = remote_address(shared_address(&barrier), threadIdx.x & 31);
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote)
                     : "memory");
    }
}

#endif
