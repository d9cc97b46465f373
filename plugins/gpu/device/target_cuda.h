/* SPDX-License-Identifier: Apache-2.0 */
/* target.h for CUDA. */
#ifndef GPU_DEVICE_TARGET_CUDA_H
#define GPU_DEVICE_TARGET_CUDA_H

#include <cuda_fp16.h>
#include <stdint.h>

#define GPU_LANES 32
#define GPU_ALL_LANES 0xffffffffu

#define GPU_DEVICE static __device__
#define GPU_INLINE static __device__ __forceinline__
#define GPU_CALL static __device__ __noinline__
#define GPU_SHARED __shared__
#define GPU_KERNEL(name, params)                                                                   \
    extern "C" __global__ void __launch_bounds__(GPU_THREADS_##name)                               \
        kernel_##name(const __grid_constant__ params p)

GPU_INLINE uint32_t thread_index()
{
    return threadIdx.x;
}

GPU_INLINE uint32_t group_index()
{
    return blockIdx.x;
}

GPU_INLINE uint32_t group_count()
{
    return gridDim.x;
}

template <class T> GPU_INLINE T lane_xor(T x, int32_t distance)
{
    return __shfl_xor_sync(GPU_ALL_LANES, x, distance);
}

template <class T> GPU_INLINE T lane_up(T x, int32_t distance)
{
    return __shfl_up_sync(GPU_ALL_LANES, x, distance);
}

template <class T> GPU_INLINE T lane_down(T x, int32_t distance)
{
    return __shfl_down_sync(GPU_ALL_LANES, x, distance);
}

template <class T> GPU_INLINE T lane_read(T x, int32_t lane)
{
    return __shfl_sync(GPU_ALL_LANES, x, lane);
}

GPU_INLINE bool any_lane(bool x)
{
    return __any_sync(GPU_ALL_LANES, x);
}

GPU_INLINE void sync_group()
{
    __syncthreads();
}

GPU_INLINE void sync_lanes()
{
    __syncwarp();
}

GPU_INLINE int32_t atomic_add(int32_t *at, int32_t x)
{
    return atomicAdd(at, x);
}

GPU_INLINE int32_t atomic_add_shared(int32_t *at, int32_t x)
{
    return atomicAdd(at, x);
}

GPU_INLINE int32_t atomic_max(int32_t *at, int32_t x)
{
    return atomicMax(at, x);
}

GPU_INLINE int32_t add_and_publish(int32_t *counter, int32_t x)
{
    int32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(x)
                 : "memory");
    return before;
}

template <class T> GPU_INLINE T same_in_lanes(const T &from)
{
    return from;
}

GPU_INLINE void release_stores()
{
    __threadfence();
}

GPU_INLINE void acquire_loads()
{
    __threadfence();
}

/* Programmatic dependent launch: lets the next kernel start, up to its own wait. */
GPU_INLINE void let_later_kernels_begin()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

GPU_INLINE uint32_t float_bits(float x)
{
    return __float_as_uint(x);
}

GPU_INLINE float bits_float(uint32_t x)
{
    return __uint_as_float(x);
}

GPU_INLINE uint64_t double_bits(double x)
{
    return (uint64_t)__double_as_longlong(x);
}

GPU_INLINE float divide_nearest(float a, float b)
{
    return __fdiv_rn(a, b);
}

GPU_INLINE float reciprocal_nearest(float x)
{
    return __frcp_rn(x);
}

GPU_INLINE float float_toward_zero(double x)
{
    return __double2float_rz(x);
}

GPU_INLINE float exp_fast(float x)
{
    return __expf(x);
}

GPU_INLINE float divide_fast(float a, float b)
{
    return __fdividef(a, b);
}

/* Passes the bits through a register that is opaque to ptxas: up to CUDA 13.0 it stores the low
 * byte of a converted half as the half's value as an integer (F2I.U8.F16). */
GPU_INLINE uint16_t half_of(float x)
{
    uint32_t bits = __half_as_ushort(__float2half_rn(x));
    asm volatile("" : "+r"(bits));
    return (uint16_t)bits;
}

GPU_INLINE float float_of_half_bits(uint16_t bits)
{
    return __half2float(__ushort_as_half(bits));
}

/* bf16 and fp8 by instructions: CUDA's headers for them take the compiler longer than most kernels.
 */
GPU_INLINE uint16_t bf16_of(float x)
{
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

GPU_INLINE float float_of_bf16(uint16_t bits)
{
    float x;
#if __CUDA_ARCH__ >= 900
    asm("cvt.f32.bf16 %0, %1;" : "=f"(x) : "h"(bits));
#else
    asm("mov.b32 %0, {0, %1};" : "=f"(x) : "h"(bits));
#endif
    return x;
}

#if __CUDA_ARCH__ >= 890
GPU_INLINE uint16_t fp8_two(bool e5m2, float low, float high)
{
    uint16_t two;
    if (e5m2) {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(two) : "f"(low), "f"(high));
    } else {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(two) : "f"(low), "f"(high));
    }
    return two;
}

GPU_INLINE uint32_t fp8_pair_of(bool e5m2, float low, float high)
{
    return fp8_two(e5m2, low, high);
}

/* Saturating; x is not NaN. */
GPU_INLINE uint8_t fp8_of(bool e5m2, float x)
{
    return (uint8_t)fp8_two(e5m2, x, 0.0f);
}

/* Two f16 from two fp8. */
GPU_INLINE uint32_t halves_of_fp8(bool e5m2, uint16_t two)
{
    uint32_t halves;
    if (e5m2) {
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(two));
    } else {
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
    }
    return halves;
}

GPU_INLINE float float_of_fp8(bool e5m2, uint8_t bits)
{
    return float_of_half_bits((uint16_t)halves_of_fp8(e5m2, bits));
}
#else
#include "gpu/device/conversions_fp8.h"
#endif

GPU_INLINE uint4 load_once(const uint4 *at)
{
    return __ldcs(at);
}

#endif
