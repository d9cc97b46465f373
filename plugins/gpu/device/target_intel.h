/* SPDX-License-Identifier: Apache-2.0 */
/* target.h by C++ for OpenCL, for Intel's GPUs: SPIR-V without fp16, whose conversions are
 * built-ins that every device has. Warps are subgroups of 32, which all of them can run. Pointers
 * are generic where nothing else is said. Sources: "The C++ for OpenCL Programming Language" 2021,
 * the extensions cl_intel_subgroups and cl_intel_required_subgroup_size. */
#ifndef GPU_DEVICE_TARGET_INTEL_H
#define GPU_DEVICE_TARGET_INTEL_H

#include <stdint.h>

#ifndef GPU_LANES
#define GPU_LANES 32 /* attends on matrix units have 16 */
#endif

#define GPU_DEVICE static
#define GPU_INLINE static __attribute__((always_inline)) inline
#define GPU_CALL static
#define GPU_SHARED __local
/* The compiler refuses pointers in a kernel's parameters, but looks at a struct's own members only:
 * these are its base's. The host lets kernels reach all memory of the context. */
#define GPU_KERNEL(name, params)                                                                   \
    struct arguments_of_##name : params {                                                          \
    };                                                                                             \
    __kernel __attribute__((                                                                       \
        reqd_work_group_size(GPU_THREADS_##name, 1, 1),                                            \
        intel_reqd_sub_group_size(GPU_LANES))) void kernel_##name(const arguments_of_##name p)

/* Some GPUs have no double. Kernels for them are built with float instead. Where that would change
 * results they are not declared: quantize, and caches whose codes are found in double (IN_DOUBLE in
 * level_zero/plugin.c; keys of indexers in mxfp4 are not among them). */
#ifdef GPU_WITHOUT_DOUBLE
#define double float
#endif

int32_t __attribute__((overloadable)) intel_sub_group_shuffle(int32_t x, uint32_t lane);

GPU_INLINE uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return (uint4)(x, y, z, w);
}

GPU_INLINE uint2 make_uint2(uint32_t x, uint32_t y)
{
    return (uint2)(x, y);
}

GPU_INLINE uint32_t thread_index()
{
    return (uint32_t)get_local_id(0);
}

GPU_INLINE uint32_t group_index()
{
    return (uint32_t)get_group_id(0);
}

GPU_INLINE uint32_t group_count()
{
    return (uint32_t)get_num_groups(0);
}

template <class T> GPU_INLINE T lane_read(T x, int32_t lane)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "registers of 32 bits");
    union {
        T value;
        int32_t words[sizeof(T) / 4];
    } u;
    u.value = x;
    for (uint32_t i = 0; i < sizeof(T) / 4; i++) {
        u.words[i] = intel_sub_group_shuffle(u.words[i], (uint32_t)lane);
    }
    return u.value;
}

GPU_INLINE int32_t own_lane()
{
    return (int32_t)(get_local_id(0) & (GPU_LANES - 1));
}

GPU_INLINE bool any_lane(bool x)
{
    return sub_group_any(x) != 0;
}

GPU_INLINE void sync_group()
{
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
}

GPU_INLINE void sync_lanes()
{
    sub_group_barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
}

GPU_INLINE int32_t atomic_add(int32_t *at, int32_t x)
{
    return atomic_fetch_add_explicit((volatile __global atomic_int *)at, x, memory_order_relaxed,
                                     memory_scope_device);
}

GPU_INLINE int32_t atomic_add_shared(int32_t *at, int32_t x)
{
    return atomic_fetch_add_explicit((volatile __local atomic_int *)at, x, memory_order_relaxed,
                                     memory_scope_work_group);
}

GPU_INLINE int32_t atomic_max(int32_t *at, int32_t x)
{
    return atomic_fetch_max_explicit((volatile __global atomic_int *)at, x, memory_order_relaxed,
                                     memory_scope_device);
}

GPU_INLINE int32_t add_and_publish(int32_t *counter, int32_t x)
{
    return atomic_fetch_add_explicit((volatile __global atomic_int *)counter, x,
                                     memory_order_acq_rel, memory_scope_device);
}

template <class T> GPU_INLINE T same_in_lanes(const T &from)
{
    return from;
}

GPU_INLINE void release_stores()
{
    atomic_work_item_fence(CLK_GLOBAL_MEM_FENCE, memory_order_release, memory_scope_device);
}

GPU_INLINE void acquire_loads()
{
    atomic_work_item_fence(CLK_GLOBAL_MEM_FENCE, memory_order_acquire, memory_scope_device);
}

GPU_INLINE uint32_t float_bits(float x)
{
    return as_uint(x);
}

GPU_INLINE float bits_float(uint32_t x)
{
    return as_float(x);
}

#ifdef GPU_WITHOUT_DOUBLE
GPU_INLINE uint64_t double_bits(float x)
{
    return as_uint(x);
}

#else
GPU_INLINE uint64_t double_bits(double x)
{
    return as_ulong(x);
}

#endif

/* math.h, where OpenCL's names differ */
#define GPU_MATH1(name)                                                                            \
    GPU_INLINE float name##f(float x)                                                              \
    {                                                                                              \
        return name(x);                                                                            \
    }
#define GPU_MATH2(name)                                                                            \
    GPU_INLINE float name##f(float x, float y)                                                     \
    {                                                                                              \
        return name(x, y);                                                                         \
    }
GPU_MATH1(fabs)
GPU_MATH1(rint)
GPU_MATH1(round)
GPU_MATH1(sqrt)
GPU_MATH1(exp)
GPU_MATH1(exp2)
GPU_MATH1(log)
GPU_MATH1(tanh)
GPU_MATH2(fmax)
GPU_MATH2(fmin)
#undef GPU_MATH1
#undef GPU_MATH2

GPU_INLINE float fmaf(float a, float b, float c)
{
    return fma(a, b, c);
}

/* The power of two 2^exponent times x, both steps in float32's normal range. */
GPU_INLINE float scale_by(float x, int32_t exponent)
{
    int32_t half_way = exponent / 2;
    return x * bits_float((uint32_t)(half_way + 127) << 23) *
           bits_float((uint32_t)(exponent - half_way + 127) << 23);
}

/* Division and its like are off by 2.5 units in OpenCL. Mantissas of 1 .. 2 are divided, and
 * Markstein's two corrections make the quotient the nearest. */
GPU_INLINE float divide_nearest(float a, float b)
{
    uint32_t a_bits = float_bits(a) & 0x7fffffffu, b_bits = float_bits(b) & 0x7fffffffu;
    if (a_bits - 0x800000u >= 0x7f000000u || b_bits - 0x800000u >= 0x7f000000u) {
        return a / b; /* zeros, subnormal and no finite numbers */
    }
    float x = bits_float((a_bits & 0x7fffffu) | 0x3f800000u);
    float y = bits_float((b_bits & 0x7fffffu) | 0x3f800000u);
    float inverse = 1.0f / y;
    inverse = fma(fma(-y, inverse, 1.0f), inverse, inverse);
    float q = x * inverse;
    q = fma(fma(-y, q, x), inverse, q);
    q = fma(fma(-y, q, x), inverse, q);
    q = scale_by(q, (int32_t)(a_bits >> 23) - (int32_t)(b_bits >> 23));
    return bits_float(float_bits(q) | ((float_bits(a) ^ float_bits(b)) & 0x80000000u));
}

GPU_INLINE float reciprocal_nearest(float x)
{
    return divide_nearest(1.0f, x);
}

GPU_INLINE uint16_t half_of(float x)
{
    uint16_t bits;
    vstore_half_rte(x, 0, (half *)&bits);
    return bits;
}

GPU_INLINE float float_of_half_bits(uint16_t bits)
{
    return vload_half(0, (const half *)&bits);
}

#endif
