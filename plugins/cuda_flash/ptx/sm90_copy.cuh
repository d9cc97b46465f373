/* SPDX-License-Identifier: Apache-2.0 */
/* TMA boxes of five dimensions, barriers that count bytes, clusters, and register reallocation.
 * Source: PTX ISA 9.0. */
#ifndef CUDA_FLASH_PTX_SM90_COPY_CUH
#define CUDA_FLASH_PTX_SM90_COPY_CUH

#include "ptx.cuh"

/* Prefetches a box of a TMA map to the L2. */
GPU_INLINE void fetch_box(const void *map, int dim, int slot, int head, int block)
{
    asm volatile(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
        "r"(dim), "r"(slot), "r"(head), "r"(block)
        : "memory");
}

/* Prefetches bytes to the L2; address and count are multiples of 16. */
GPU_INLINE void fetch_bytes(const void *from, int bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

GPU_INLINE void fetch_line(const void *from)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

/* Makes initialized barriers visible to TMA. */
GPU_INLINE void fence_barriers()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* True in one thread of the warp; all of them call. */
GPU_INLINE bool elected()
{
    uint32_t is;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(is));
    return is != 0;
}

struct box_place {
    int32_t x[5];
};

GPU_INLINE void copy_box5(uint32_t to, const void *map, const box_place &at, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
                 "l"(map), "r"(at.x[0]), "r"(at.x[1]), "r"(at.x[2]), "r"(at.x[3]), "r"(at.x[4]),
                 "r"(barrier)
                 : "memory");
}

/* Starts a store of a box from shared memory; the same thread waits for it. */
GPU_INLINE void store_box4(const void *map, int x0, int x1, int x2, int x3, uint32_t from)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
                 "[%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
                 "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(from)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Waits until this thread's stores have read shared memory. */
GPU_INLINE void wait_for_stored_boxes()
{
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/* Stores four 8 x 8 matrices of 16-bit elements, two elements of each in a lane. Lane i gives the
 * address of row i & 7 of matrix i >> 3. */
GPU_INLINE void store4(uint32_t address, const uint32_t (&r)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* As store4, transposed: lane i gives the address of column i & 7. */
GPU_INLINE void store4_transposed(uint32_t address, const uint32_t (&r)[4])
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

/* This CTA's rank in its cluster, and the cluster's size. */
GPU_INLINE uint32_t cluster_rank()
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

GPU_INLINE uint32_t cluster_size()
{
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

/* Waits for all threads of all CTAs of the cluster. */
GPU_INLINE void sync_cluster()
{
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

/* The address in another CTA of the cluster that corresponds to `address` here. */
GPU_INLINE uint32_t remote_address(uint32_t address, uint32_t rank)
{
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

/* Arrives at another CTA's barrier. This orders only this thread's reads, not its writes. */
GPU_INLINE void barrier_arrive_remote(uint32_t remote)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

/* Whether a wait for the barrier's phase would return at once. */
GPU_INLINE bool barrier_has_passed(uint32_t barrier, int phase)
{
    uint32_t done;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; "
                 "selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
    return done != 0;
}

/* As barrier_wait, for arrivals of other CTAs as well. */
GPU_INLINE void barrier_wait_cluster(uint32_t barrier, int phase)
{
    uint32_t done = 0;
    while (done == 0) {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, "
                     "[%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "r"(phase)
                     : "memory");
    }
}

/* As copy_span, to the same address in all CTAs of the cluster whose bit in `ranks` is set, and to
 * their barriers. */
GPU_INLINE void copy_span_to_all(uint32_t to, const void *from, int bytes, uint32_t barrier,
                                 uint32_t ranks)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "h"((uint16_t)ranks)
                 : "memory");
}

/* Set the registers of each thread of this warp group. */
template <int COUNT> GPU_INLINE void dealloc_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> GPU_INLINE void alloc_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* The named barrier of one warp group. */
GPU_INLINE void barrier_group(int id)
{
    asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

/* As barrier_group; returns whether any of its threads passed true. */
GPU_INLINE bool barrier_group_any(int id, bool here)
{
    uint32_t any;
    asm volatile("{.reg .pred p, q; setp.ne.u32 q, %2, 0; bar.red.or.pred p, %1, 128, q; "
                 "selp.u32 %0, 1, 0, p;}"
                 : "=r"(any)
                 : "r"(id), "r"((uint32_t)here)
                 : "memory");
    return any != 0;
}

GPU_INLINE float fast_tanh(float x)
{
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

GPU_INLINE float fast_sqrt(float x)
{
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
