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

/* 16 bytes as above, or a store to this CTA's own memory, whose bytes no barrier counts. */
GPU_INLINE void store_near_or_remote16(bool near, uint32_t own, uint32_t remote, const float *x,
                                       uint32_t remote_barrier)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %7, 0; "
                 "@p st.shared.v4.f32 [%0], {%2, %3, %4, %5}; "
                 "@!p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%1], {%2, %3, %4, %5}, [%6];}" ::"r"(own),
                 "r"(remote), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(remote_barrier),
                 "r"((int)near)
                 : "memory");
}

#endif
