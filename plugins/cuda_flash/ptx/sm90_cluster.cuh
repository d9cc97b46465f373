/* SPDX-License-Identifier: Apache-2.0 */
/* Writes to the shared memory of other CTAs of a cluster. Source: PTX ISA 9.0. */
#ifndef CUDA_FLASH_PTX_SM90_CLUSTER_CUH
#define CUDA_FLASH_PTX_SM90_CLUSTER_CUH

#include "sm90_copy.cuh"

/* Stores to a CTA of the cluster, whose barrier counts the bytes when they are there. */
GPU_INLINE void store_remote8(uint32_t remote, float x, float y, uint32_t remote_barrier)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 "
                 "[%0], {%1, %2}, [%3];" ::"r"(remote),
                 "f"(x), "f"(y), "r"(remote_barrier)
                 : "memory");
}

GPU_INLINE void store_remote16(uint32_t remote, float x, float y, float z, float w,
                               uint32_t remote_barrier)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
                 "f"(x), "f"(y), "f"(z), "f"(w), "r"(remote_barrier)
                 : "memory");
}

#endif
