/* SPDX-License-Identifier: Apache-2.0 */
/* target.h by clang's built-ins for AMD's GPUs: freestanding, without HIP's headers and device
 * library. Warps are waves: 64 lanes on gfx9 (CDNA), 32 on gfx10 and later (RDNA). */
#ifndef GPU_DEVICE_TARGET_AMD_H
#define GPU_DEVICE_TARGET_AMD_H

#include <stdint.h>

/* The host's pass of the compiler parses device code, too, as that of a wave of 64. */
#if defined(__AMDGCN__) && !defined(__GFX9__)
#define GPU_LANES 32
#else
#define GPU_LANES 64
#endif

#define GPU_DEVICE static __attribute__((device))
#define GPU_INLINE static __attribute__((device, always_inline)) inline
#define GPU_CALL GPU_INLINE /* a call would have its stack in scratch memory */
#define GPU_SHARED static __attribute__((shared))
/* Parameters are read where the launch has put them: a copy would stand in scratch memory as soon
 * as a call takes its address. */
#define GPU_KERNEL(name, params)                                                                   \
    GPU_INLINE void body_##name(const params &p);                                                  \
    extern "C" __attribute__((                                                                     \
        global, amdgpu_flat_work_group_size(GPU_THREADS_##name,                                    \
                                            GPU_THREADS_##name))) void kernel_##name(const params) \
    {                                                                                              \
        body_##name(*(const params *)__builtin_amdgcn_kernarg_segment_ptr());                      \
    }                                                                                              \
    GPU_INLINE void body_##name(const params &p)

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

struct alignas(8) uint2 {
    uint32_t x, y;
};

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

GPU_INLINE uint2 make_uint2(uint32_t x, uint32_t y)
{
    return {x, y};
}

GPU_INLINE uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

GPU_INLINE uint32_t thread_index()
{
    return __builtin_amdgcn_workitem_id_x();
}

GPU_INLINE uint32_t group_index()
{
    return __builtin_amdgcn_workgroup_id_x();
}

/* Hidden arguments follow the explicit ones in code object 4: work items of the grid and of the
 * group stand in the dispatch packet. */
GPU_INLINE uint32_t group_count()
{
    typedef const __attribute__((address_space(4))) uint32_t *packet_words;
    typedef const __attribute__((address_space(4))) uint16_t *packet_halves;
    packet_words packet = (packet_words)__builtin_amdgcn_dispatch_ptr();
    return packet[3] / ((packet_halves)packet)[2]; /* grid_size_x / workgroup_size_x */
}

template <class T> GPU_INLINE T lane_read(T x, int32_t lane)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "registers of 32 bits");
    int32_t words[sizeof(T) / 4];
    __builtin_memcpy(words, &x, sizeof(T));
    for (uint32_t i = 0; i < sizeof(T) / 4; i++) {
        words[i] = __builtin_amdgcn_ds_bpermute(lane << 2, words[i]);
    }
    __builtin_memcpy(&x, words, sizeof(T));
    return x;
}

GPU_INLINE int32_t own_lane()
{
    int32_t low = __builtin_amdgcn_mbcnt_lo(~0u, 0);
    return GPU_LANES == 64 ? __builtin_amdgcn_mbcnt_hi(~0u, low) : low;
}

GPU_INLINE bool any_lane(bool x)
{
    return GPU_LANES == 64 ? __builtin_amdgcn_uicmpl(x, 0, 33) != 0
                           : __builtin_amdgcn_uicmp(x, 0, 33) != 0;
}

GPU_INLINE void sync_group()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

GPU_INLINE void sync_lanes()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

GPU_INLINE int32_t atomic_add(int32_t *at, int32_t x)
{
    return __hip_atomic_fetch_add(at, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

GPU_INLINE int32_t atomic_add_shared(int32_t *at, int32_t x)
{
    return __hip_atomic_fetch_add(at, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

GPU_INLINE int32_t atomic_max(int32_t *at, int32_t x)
{
    return __hip_atomic_fetch_max(at, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

GPU_INLINE int32_t add_and_publish(int32_t *counter, int32_t x)
{
    return __hip_atomic_fetch_add(counter, x, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT);
}

/* Loads into scalar registers, which the compiler does not do from memory that the kernel writes.
 */
template <class T> GPU_INLINE T same_in_lanes(const T &from)
{
    constexpr int words = sizeof(T) / 4;
    static_assert(sizeof(T) % 4 == 0, "whole registers");
    uint32_t x[words];
    __builtin_memcpy(x, &from, sizeof(T));
#pragma unroll
    for (int i = 0; i < words; i++) {
        x[i] = __builtin_amdgcn_readfirstlane(x[i]);
    }
    T to;
    __builtin_memcpy(&to, x, sizeof(T));
    return to;
}

GPU_INLINE void release_stores()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
}

GPU_INLINE void acquire_loads()
{
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
}

GPU_INLINE uint32_t float_bits(float x)
{
    return __builtin_bit_cast(uint32_t, x);
}

GPU_INLINE float bits_float(uint32_t x)
{
    return __builtin_bit_cast(float, x);
}

GPU_INLINE uint64_t double_bits(double x)
{
    return __builtin_bit_cast(uint64_t, x);
}

/* math.h */
#define GPU_MATH1(type, name)                                                                      \
    GPU_INLINE type name(type x)                                                                   \
    {                                                                                              \
        return __builtin_##name(x);                                                                \
    }
#define GPU_MATH2(type, name)                                                                      \
    GPU_INLINE type name(type x, type y)                                                           \
    {                                                                                              \
        return __builtin_##name(x, y);                                                             \
    }
GPU_MATH1(float, fabsf)
GPU_MATH1(float, rintf)
GPU_MATH1(float, roundf)
GPU_MATH1(float, sqrtf)
GPU_MATH1(float, expf)
GPU_MATH1(float, exp2f)
GPU_MATH1(float, logf)
GPU_MATH1(double, fabs)
GPU_MATH1(double, floor)
GPU_MATH1(double, round)
GPU_MATH1(double, sqrt)
GPU_MATH2(float, fmaxf)
GPU_MATH2(float, fminf)
GPU_MATH2(double, fmax)
GPU_MATH2(double, fmin)
#undef GPU_MATH1
#undef GPU_MATH2

GPU_INLINE float fmaf(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}

/* Cephes' polynomial where 1 - 2 / (e^2x + 1) would cancel. */
GPU_INLINE float tanhf(float x)
{
    float size = fabsf(x), z = x * x;
    if (size < 0.625f) {
        float p =
            fmaf(fmaf(fmaf(fmaf(-5.70498872745e-3f, z, 2.06390887954e-2f), z, -5.37397155531e-2f),
                      z, 1.33314422036e-1f),
                 z, -3.33332819422e-1f);
        return fmaf(p * z, x, x);
    }
    return __builtin_copysignf(1.0f - 2.0f / (expf(2.0f * size) + 1.0f), x);
}

template <class T> GPU_INLINE bool isnan(T x)
{
    return __builtin_isnan(x);
}

template <class T> GPU_INLINE bool isinf(T x)
{
    return __builtin_isinf(x);
}

template <class T> GPU_INLINE bool isfinite(T x)
{
    return __builtin_isfinite(x);
}

GPU_INLINE bool signbit(double x)
{
    return (double_bits(x) >> 63) != 0;
}

GPU_INLINE int32_t abs(int32_t x)
{
    return x < 0 ? -x : x;
}

GPU_INLINE float divide_fast(float a, float b)
{
    return a * __builtin_amdgcn_rcpf(b);
}

GPU_INLINE uint16_t half_of(float x)
{
    return __builtin_bit_cast(uint16_t, (_Float16)x);
}

GPU_INLINE float float_of_half_bits(uint16_t bits)
{
    return (float)__builtin_bit_cast(_Float16, bits);
}

GPU_INLINE uint4 load_once(const uint4 *at)
{
    typedef uint32_t words __attribute__((ext_vector_type(4)));
    words x = __builtin_nontemporal_load((const words *)at);
    return {x.x, x.y, x.z, x.w};
}

#endif
