/* SPDX-License-Identifier: Apache-2.0 */
/* Instructions without a C++ name. Source: PTX ISA 9.0. */
#ifndef CUDA_FLASH_PTX_CUH
#define CUDA_FLASH_PTX_CUH

#include <cuda_fp16.h>
#include <stdint.h>

#include "cuda_flash/kinds.h"
#include "gpu/device/target.h"

/* An instruction of sm_90, elsewhere nothing, and the barriers' wait. */
#if __CUDA_ARCH__ >= 900
#define PTX_SM90(...) asm volatile(__VA_ARGS__)
#define PTX_WAIT "try_wait"
#else
#define PTX_SM90(...)
#define PTX_WAIT "test_wait"
#endif

GPU_INLINE uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

GPU_INLINE void load4(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

GPU_INLINE void load4_transposed(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* Transposes 8 x 8 two-byte elements, a row in four lanes. */
GPU_INLINE uint32_t transpose(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* Transposes 4 x 4 words of four neighbouring lanes. */
GPU_INLINE void transpose_4x4(uint32_t (&x)[4])
{
    const bool odd = (threadIdx.x & 1) != 0, upper = (threadIdx.x & 2) != 0;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        uint32_t y = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
        x[i] = odd ? y : x[i];
        x[i + 1] = odd ? x[i + 1] : y;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t y = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + 2], 2);
        x[i] = upper ? y : x[i];
        x[i + 2] = upper ? x[i + 2] : y;
    }
}

/* c += a b, 16 x 16 by 16 x 8; kinds of 8 and 4 bits multiply in f16. */
template <int KIND>
GPU_INLINE void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if constexpr (KIND == KIND_BF16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                     "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                     "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

/* c += a b, 16 x 32 unsigned bytes by 32 x 8 signed bytes. */
GPU_INLINE void multiply_bytes(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* A float32 as two tf32 numbers, whose last 13 bits mma ignores; the error is 2^-22. */
struct tf32_pair {
    float high, low;
};

GPU_INLINE tf32_pair split_float(float x)
{
    float high = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
    return {high, isfinite(x) ? x - high : 0.0f};
}

GPU_INLINE void multiply_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0,
                              float b1)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
                   "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

/* high + low += a b, 16 x 8 by 8 x 8 of float32, without the product of both low parts. The tensor
 * cores truncate sums to 24 bits, so a long chain drifts. Therefore `high` must start from zero
 * after a few products and be added in float32; `low` is small and may go on, and may be `high`. */
GPU_INLINE void multiply_floats(float (&high)[4], float (&low)[4], const tf32_pair (&a)[4],
                                tf32_pair b0, tf32_pair b1)
{
    multiply_tf32(low, a[0].low, a[1].low, a[2].low, a[3].low, b0.high, b1.high);
    multiply_tf32(low, a[0].high, a[1].high, a[2].high, a[3].high, b0.low, b1.low);
    multiply_tf32(high, a[0].high, a[1].high, a[2].high, a[3].high, b0.high, b1.high);
}

GPU_INLINE void add_sums(float (&c)[4], const float (&sums)[4])
{
    c[0] += sums[0], c[1] += sums[1], c[2] += sums[2], c[3] += sums[3];
}

template <int KIND> GPU_INLINE uint32_t pack2(float a, float b)
{
    uint32_t r;
    if constexpr (KIND == KIND_BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(a), "f"(b));
    } else {
        __half2 v = __floats2half2_rn(a, b);
        r = *(uint32_t *)&v;
    }
    return r;
}

GPU_INLINE uint32_t multiply_halves(uint32_t a, uint32_t b)
{
    __half2 v = __hmul2(*(__half2 *)&a, *(__half2 *)&b);
    return *(uint32_t *)&v;
}

/* a b + c of two f16 each, rounded once. */
GPU_INLINE uint32_t multiply_add_halves(uint32_t a, uint32_t b, uint32_t c)
{
    __half2 v = __hfma2(*(__half2 *)&a, *(__half2 *)&b, *(__half2 *)&c);
    return *(uint32_t *)&v;
}

/* Converts two fp8 numbers in bits 0 .. 15 to two f16, exactly. Before sm_89, the 7 bits of an e4m3
 * in the middle of an f16 are 2^-8 times its value, and NaN becomes 0x7fff as with the instruction.
 */
template <int KIND> GPU_INLINE uint32_t widen(uint32_t two)
{
    if constexpr (KIND == KIND_E5M2) {
        return __byte_perm(two, 0, 0x1404);
    } else {
#if __CUDA_ARCH__ >= 890
        return halves_of_fp8(false, (uint16_t)two);
#else
        const uint32_t codes = __byte_perm(two, 0, 0x1404), sizes = codes & 0x7f007f00u;
        const uint32_t nan = (sizes + 0x01000100u) & 0x80008000u; /* 0x7f is NaN */
        const uint32_t halves = sizes >> 1 | (codes & 0x80008000u & ~nan);
        return multiply_halves(halves, 0x5c005c00u) | (nan - (nan >> 15));
#endif
    }
}

/* Starts a copy of 16 bytes, of which `bytes` (0 or 16) are read and the rest become zero. */
GPU_INLINE void copy16(uint32_t to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(bytes)
                 : "memory");
}

/* As copy16, for 8 and 4 bytes. */
GPU_INLINE void copy8(uint32_t to, const void *from, int bytes)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

GPU_INLINE void copy4(uint32_t to, const void *from, int bytes)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

/* Waits for this thread's copies. */
GPU_INLINE void wait_for_copies()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Commits a group of this thread's copies. */
GPU_INLINE void commit_copies()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits for this thread's groups of copies except the last N. */
template <int N> GPU_INLINE void wait_for_copies_but()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

GPU_INLINE void barrier_init(uint32_t barrier, int count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

GPU_INLINE void barrier_arrive(uint32_t barrier)
{
    asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(barrier) : "memory");
}

/* Arrives when this thread's copies so far have completed. */
GPU_INLINE void barrier_arrive_copies(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

GPU_INLINE void barrier_expect(uint32_t barrier, int bytes)
{
    PTX_SM90("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
             : "memory");
}

GPU_INLINE void fetch_map(const void *map)
{
    PTX_SM90("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Starts a copy of a box of a TMA map to shared memory; the barrier counts its bytes. */
GPU_INLINE void copy_box(uint32_t to, const void *map, int dim, int slot, int head, int block,
                         uint32_t barrier)
{
    PTX_SM90("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
             "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
             "l"(map), "r"(dim), "r"(slot), "r"(head), "r"(block), "r"(barrier)
             : "memory");
}

/* Starts a copy of `bytes` contiguous bytes, a multiple of 16 and aligned to 16; the barrier counts
 * them. */
GPU_INLINE void copy_span(uint32_t to, const void *from, int bytes, uint32_t barrier)
{
    PTX_SM90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
             "[%0], [%1], %2, [%3];" ::"r"(to),
             "l"(from), "r"(bytes), "r"(barrier)
             : "memory");
}

/* Arrives, and announces `bytes` of copies. */
GPU_INLINE void barrier_arrive_expect(uint32_t barrier, int bytes)
{
    PTX_SM90("{.reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1;}" ::"r"(barrier),
             "r"(bytes)
             : "memory");
}

/* Orders earlier ordinary accesses to shared memory before later ones by TMA and wgmma. */
GPU_INLINE void fence_async_proxy()
{
    PTX_SM90("fence.proxy.async.shared::cta;" ::: "memory");
}

GPU_INLINE bool barrier_test(uint32_t barrier, int phase)
{
    uint32_t done;
    asm volatile("{.reg .pred p; mbarrier." PTX_WAIT ".parity.shared.b64 p, [%1], %2; "
                 "selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(phase)
                 : "memory");
    return done != 0;
}

/* Waits until the barrier has completed the phase of this parity. */
GPU_INLINE void barrier_wait(uint32_t barrier, int phase)
{
    while (!barrier_test(barrier, phase)) {
    }
}

/* The named barrier of the 128 consumer threads. */
GPU_INLINE void barrier_consumers()
{
    asm volatile("bar.sync 1, 128;" ::: "memory");
}

/* The named barrier of the 64 producer threads. */
GPU_INLINE void barrier_producers()
{
    asm volatile("bar.sync 2, 64;" ::: "memory");
}

/* The compiler does not move loads across this. */
GPU_INLINE void keep_order_of_loads()
{
    asm volatile("" ::: "memory");
}

/* 1 / x, accurate to one unit in the last place. */
GPU_INLINE float fast_reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 2^x; results below 2^-126 are 0. */
GPU_INLINE float fast_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Programmatic dependent launch: waits for the writes of earlier kernels. */
GPU_INLINE void wait_for_earlier_kernels()
{
    PTX_SM90("griddepcontrol.wait;" ::: "memory");
}

#endif
