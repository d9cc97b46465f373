/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that measure AMD's ceilings, freestanding, for all targets of the hip plugin. Memory
 * is walked in 16-byte words, eight (copies: four) a thread in flight, a grid apart; arithmetic
 * stays in registers, in independent chains. What is written under a condition that never holds
 * keeps the work alive. */
#include "meter_hip.h"

#define KERNEL                                                                                     \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(METER_THREADS, METER_THREADS)))

typedef unsigned int words __attribute__((ext_vector_type(4)));
typedef float pair __attribute__((ext_vector_type(2)));

static __attribute__((device, always_inline)) inline uint64_t index_of_thread()
{
    return (uint64_t)__builtin_amdgcn_workgroup_id_x() * METER_THREADS +
           __builtin_amdgcn_workitem_id_x();
}

KERNEL void read_all(const meter_hip_args args)
{
    const words *from = (const words *)args.from;
    const uint64_t count = args.bytes / sizeof(words), step = (uint64_t)args.groups * METER_THREADS;
    uint64_t i = index_of_thread();
    words sum = 0;
    for (; i + 7 * step < count; i += 8 * step) {
        words x[8];
#pragma unroll
        for (int n = 0; n < 8; n++) {
            x[n] = __builtin_nontemporal_load(from + i + n * step);
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            sum ^= x[n];
        }
    }
    for (; i < count; i += step) {
        sum ^= from[i];
    }
    if (args.rounds < 0) {
        ((words *)args.to)[index_of_thread()] = sum;
    }
}

KERNEL void copy_all(const meter_hip_args args)
{
    const words *from = (const words *)args.from;
    words *to = (words *)args.to;
    const uint64_t count = args.bytes / sizeof(words), step = (uint64_t)args.groups * METER_THREADS;
    uint64_t i = index_of_thread();
    for (; i + 3 * step < count; i += 4 * step) {
        words x[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            x[n] = __builtin_nontemporal_load(from + i + n * step);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            __builtin_nontemporal_store(x[n], to + i + n * step);
        }
    }
    for (; i < count; i += step) {
        to[i] = from[i];
    }
}

/* METER_FMA operations of a thread's round: 32 sums, two a register pair. */
KERNEL void fma_all(const meter_hip_args args)
{
    pair sums[16];
    const pair factor = {0.5f + (float)__builtin_amdgcn_workitem_id_x(), 0.25f};
    const pair term = {1e-4f * (float)args.groups, factor.x * 1e-6f};
#pragma unroll
    for (int n = 0; n < 16; n++) {
        sums[n] = (float)(index_of_thread() + n);
    }
#pragma unroll 1
    for (int32_t round = 0; round < args.rounds; round++) {
#pragma unroll
        for (int n = 0; n < 16; n++) {
            sums[n] = __builtin_elementwise_fma(factor, term, sums[n]);
        }
    }
    pair all = 0.0f;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        all += sums[n];
    }
    if (args.rounds < 0) {
        ((pair *)args.to)[index_of_thread()] = all;
    }
}

/* 16 x 16 x 16 products of bfloat16, METER_MATRIX operations of a thread's round. */
#if defined(__gfx90a__) || defined(__gfx942__)
#define CHAINS 8
typedef short part __attribute__((ext_vector_type(4)));
typedef float sum __attribute__((ext_vector_type(4)));
#define MULTIPLY(a, b, c) __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0)
#elif defined(__GFX11__)
#define CHAINS 4
typedef short part __attribute__((ext_vector_type(16)));
typedef float sum __attribute__((ext_vector_type(8)));
#define MULTIPLY(a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c)
#elif defined(__GFX12__)
#define CHAINS 4
typedef short part __attribute__((ext_vector_type(8)));
typedef float sum __attribute__((ext_vector_type(8)));
#define MULTIPLY(a, b, c) __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(a, b, c)
#endif

#if defined(CHAINS)
KERNEL void matrix_all(const meter_hip_args args)
{
    sum sums[CHAINS];
    /* random bits: products of zeros draw less power and run faster */
    part a = (short)(0x3f80 ^ (__builtin_amdgcn_workitem_id_x() * 40503u & 0x80ff));
    part b = (short)(0x3e80 ^ (__builtin_amdgcn_workitem_id_x() * 30011u & 0x80ff));
#pragma unroll
    for (int n = 0; n < CHAINS; n++) {
        sums[n] = (float)n;
    }
#pragma unroll 1
    for (int32_t round = 0; round < args.rounds; round++) {
#pragma unroll
        for (int n = 0; n < CHAINS; n++) {
            sums[n] = MULTIPLY(a, b, sums[n]);
        }
    }
    sum all = 0.0f;
#pragma unroll
    for (int n = 0; n < CHAINS; n++) {
        all += sums[n];
    }
    if (args.rounds < 0) {
        ((sum *)args.to)[index_of_thread()] = all;
    }
}
#endif
