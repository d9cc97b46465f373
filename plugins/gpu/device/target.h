/* SPDX-License-Identifier: Apache-2.0 */
/* What a target gives to the kernels, under one set of names. A kernel uses these and the names of
 * C's math.h, no vendor's; literals of a warp's size are GPU_LANES: 16, 32 or 64.
 *
 *   GPU_DEVICE, GPU_INLINE, GPU_CALL  a function; always inlined; never inlined
 *   GPU_KERNEL(name, params)          an entry kernel_<name>(const params &p) of gpu/kernels/list.h
 *   GPU_SHARED                        memory of a group, in a kernel's body
 *   thread_index, lane_index, warp_index, group_index, group_count, warp_of_grid, warps_of_grid
 *   lane_xor, lane_up, lane_down, lane_read    another lane's value; all lanes take part
 *   any_lane                          whether it holds in some lane
 *   same_in_lanes                     memory that all lanes read alike, once for the warp
 *   sync_group, sync_lanes            barriers of a group and of a warp, for memory too
 *   atomic_add, atomic_max            relaxed, of the device; the value before
 *   atomic_add_shared                 the same of a group's memory
 *   add_and_publish                   releases what its thread has written before, and acquires
 *   release_stores, acquire_loads     each warp whose data is published so: before the barrier
 *                                     that precedes add_and_publish, and after it
 *   let_later_kernels_begin           the next launch may start where the target can overlap them
 *   float_bits, bits_float ...        one type's bits as the other
 *   divide_nearest, reciprocal_nearest, float_toward_zero, exp_fast, divide_fast
 *   half_of, float_of_half_bits, bf16_of, float_of_bf16, fp8_of, float_of_fp8, fp8_pair_of
 *   load_once                         16 bytes that nothing reads again */
#ifndef GPU_DEVICE_TARGET_H
#define GPU_DEVICE_TARGET_H

#if defined(__CUDACC__)
#include "gpu/device/target_cuda.h"
#elif defined(__HIP__)
#include "gpu/device/target_amd.h"
#elif defined(__OPENCL_CPP_VERSION__)
#include "gpu/device/target_intel.h"
#else
#include "gpu/device/target_host.h"
#endif

/* What several targets have in common. */
#ifndef __CUDACC__
GPU_INLINE void let_later_kernels_begin()
{
}

GPU_INLINE float exp_fast(float x)
{
    return expf(x);
}

#include "gpu/device/conversions.h"
#endif

#if defined(__HIP__) || defined(__OPENCL_CPP_VERSION__)
template <class T> GPU_INLINE T lane_xor(T x, int32_t distance)
{
    return lane_read(x, own_lane() ^ distance);
}

/* Lanes without such a neighbour keep their own value. */
template <class T> GPU_INLINE T lane_up(T x, int32_t distance)
{
    int32_t lane = own_lane();
    return lane_read(x, lane >= distance ? lane - distance : lane);
}

template <class T> GPU_INLINE T lane_down(T x, int32_t distance)
{
    int32_t lane = own_lane();
    return lane_read(x, lane + distance < GPU_LANES ? lane + distance : lane);
}
#endif

#if !defined(__CUDACC__) && !defined(__OPENCL_CPP_VERSION__)
GPU_INLINE int32_t min(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

GPU_INLINE int32_t max(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

GPU_INLINE float divide_nearest(float a, float b)
{
    return a / b;
}

GPU_INLINE float reciprocal_nearest(float x)
{
    return 1.0f / x;
}
#endif

#if !defined(__CUDACC__) && !defined(__HIP__)
GPU_INLINE float divide_fast(float a, float b)
{
    return a / b;
}

GPU_INLINE uint4 load_once(const uint4 *at)
{
    return *at;
}
#endif

static_assert(GPU_LANES == 16 || GPU_LANES == 32 || GPU_LANES == 64, "warps of these lanes");

GPU_INLINE int32_t lane_index()
{
    return (int32_t)(thread_index() & (GPU_LANES - 1));
}

GPU_INLINE int32_t warp_index()
{
    return (int32_t)(thread_index() / GPU_LANES);
}

/* The warp's index among all of the launch, with groups of so many threads. */
GPU_INLINE uint32_t warp_of_grid(int32_t threads)
{
    return group_index() * (uint32_t)(threads / GPU_LANES) + thread_index() / GPU_LANES;
}

GPU_INLINE int64_t warps_of_grid(int32_t threads)
{
    return (int64_t)group_count() * (threads / GPU_LANES);
}

#endif
