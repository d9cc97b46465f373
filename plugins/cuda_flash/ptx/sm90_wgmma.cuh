/* SPDX-License-Identifier: Apache-2.0 */
/* wgmma of sm_90a: 64 rows of a warp group x N columns, 16-bit operands with k = 16, float32
 * accumulators. Element i of a lane's accumulator: row (lane >> 2) + 8 * ((i >> 1) & 1) of its
 * warp's 16, column (i >> 2) * 8 + (lane & 3) * 2 + (i & 1). In names, s and r say whether a is in
 * shared memory or registers; b is always in shared memory, K-major or, with bmn and in wgmma_rs,
 * MN-major. Source: PTX ISA 9.0. */
#ifndef CUDA_FLASH_PTX_SM90_WGMMA_CUH
#define CUDA_FLASH_PTX_SM90_WGMMA_CUH

#include "ptx.cuh"

/* The descriptor of a matrix in shared memory with the 128-byte swizzle. group: bytes between
 * groups of 8 rows; column: bytes between columns of 128 bytes, for MN-major operands. The address
 * is uniform; it is read from one lane, so that the compiler knows this and keeps it in uniform
 * registers. */
static __device__ __forceinline__ uint64_t descriptor_at(uint32_t address, uint32_t column,
                                                         uint32_t group)
{
    uint32_t low = __shfl_sync(0xffffffffu, (address & 0x3ffff) >> 4 | (column >> 4) << 16, 0);
    return (uint64_t)(1u << 30 | group >> 4) << 32 | low;
}

/* The same, computed at the place of use, for an address that the compiler knows to be uniform. */
static __device__ __forceinline__ uint64_t descriptor_uniform(uint32_t address, uint32_t column,
                                                              uint32_t group)
{
    return (uint64_t)(1u << 30 | group >> 4) << 32 | (address & 0x3ffff) >> 4 | (column >> 4) << 16;
}

/* The descriptor of a matrix without swizzle. column: bytes between groups of 8 rows by 16 bytes of
 * the same rows, group: of the same columns. */
static __device__ __forceinline__ uint64_t descriptor_unswizzled(uint32_t address, uint32_t column,
                                                                 uint32_t group)
{
    return descriptor_at(address, column, group) & ~((uint64_t)1 << 62);
}

/* Hides a descriptor's origin, so that the sum with `further` is computed at the place of use. Sums
 * computed before a loop would occupy registers and be moved to uniform ones one by one. */
static __device__ __forceinline__ uint64_t descriptor_again(uint64_t matrix, uint32_t further = 0)
{
    uint32_t low = (uint32_t)matrix + further;
    asm volatile("mov.b32 %0, %0;" : "+r"(low));
    return (matrix & 0xffffffff00000000u) | low;
}

/* Keeps registers of a wgmma in place: their values are complete before it, and they are not moved
 * while it runs. */
template <int N> static __device__ __forceinline__ void pin(float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(x[i])::"memory");
    }
}

static __device__ __forceinline__ void wgmma_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits for all committed groups except the last LEFT. */
template <int LEFT> static __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

/* As wgmma_wait, but not before x is computed: ptxas would move the wait before the computation of
 * x, which needs no wgmma. x is never negative, so no thread sleeps. */
template <int LEFT> static __device__ __forceinline__ void wgmma_wait_after(float x)
{
    if (x < 0.0f) {
        asm volatile("nanosleep.u32 1;" ::: "memory");
    }
    wgmma_wait<LEFT>();
}

#define SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS16(i) SUMS4(i), SUMS4(i + 4), SUMS4(i + 8), SUMS4(i + 12)
#define SUMS8 SUMS4(0), SUMS4(4)
#define SUMS32 SUMS16(0), SUMS16(16)
#define SUMS64 SUMS32, SUMS16(32), SUMS16(48)
#define SUMS128 SUMS64, SUMS16(64), SUMS16(80), SUMS16(96), SUMS16(112)
#define NAMES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES16 NAMES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES32                                                                                    \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "             \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES64                                                                                    \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "             \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "             \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "             \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES128                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "             \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "             \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "             \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "             \
    "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "             \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "             \
    "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "           \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "         \
    "%126, %127"

/* A, B and ADDS are operand numbers after the accumulators. */
#define WGMMA_SS(TYPE, COLUMNS, NAMES, SUMS, A, B, ADDS)                                           \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADDS ", 0; "                                     \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" NAMES   \
                 "}, " A ", " B ", p, 1, 1, 0, 0;}"                                                \
                 : SUMS                                                                            \
                 : "l"(a), "l"(b), "r"(adds))
#define WGMMA_FP8(COLUMNS, NAMES, SUMS, A, B, ADDS)                                                \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADDS ", 0; "                                     \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k32.f32.e4m3.e4m3 {" NAMES "}, " A   \
                 ", " B ", p, 1, 1;}"                                                              \
                 : SUMS                                                                            \
                 : "l"(a), "l"(b), "r"(adds))
/* TRANSPOSED: 1 where b is MN-major */
#define WGMMA_RS(TYPE, COLUMNS, NAMES, SUMS, A, B, ADDS, TRANSPOSED)                               \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADDS ", 0; "                                     \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" NAMES   \
                 "}, {" A "}, " B ", p, 1, 1, " TRANSPOSED ";}"                                    \
                 : SUMS                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))

#define WGMMA_SS_SMALL_N(TYPE, COLUMNS, NAMES, SUMS, A, B, ADDS, TRANSPOSED)                       \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ADDS ", 0; "                                     \
                 "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" NAMES   \
                 "}, " A ", " B ", p, 1, 1, " TRANSPOSED ", 0;}"                                   \
                 : SUMS                                                                            \
                 : "l"(a), "l"(b), "r"(adds))

/* d = a b, or d += a b with `adds`, for 16 or 32 columns. b is K-major; a is K-major or, with
 * TRANSPOSED, MN-major. */
template <int KIND, int COLUMNS, bool TRANSPOSED>
static __device__ __forceinline__ void wgmma_ss_small_n(float (&d)[COLUMNS / 2], uint64_t a,
                                                        uint64_t b, int adds)
{
    static_assert(COLUMNS == 16 || COLUMNS == 32, "rows of an item");
    if constexpr (KIND == KIND_BF16 && COLUMNS == 16 && TRANSPOSED) {
        WGMMA_SS_SMALL_N("bf16", "16", NAMES8, SUMS8, "%8", "%9", "%10", "1");
    } else if constexpr (KIND == KIND_BF16 && COLUMNS == 16) {
        WGMMA_SS_SMALL_N("bf16", "16", NAMES8, SUMS8, "%8", "%9", "%10", "0");
    } else if constexpr (KIND == KIND_BF16 && TRANSPOSED) {
        WGMMA_SS_SMALL_N("bf16", "32", NAMES16, SUMS16(0), "%16", "%17", "%18", "1");
    } else if constexpr (KIND == KIND_BF16) {
        WGMMA_SS_SMALL_N("bf16", "32", NAMES16, SUMS16(0), "%16", "%17", "%18", "0");
    } else if constexpr (COLUMNS == 16 && TRANSPOSED) {
        WGMMA_SS_SMALL_N("f16", "16", NAMES8, SUMS8, "%8", "%9", "%10", "1");
    } else if constexpr (COLUMNS == 16) {
        WGMMA_SS_SMALL_N("f16", "16", NAMES8, SUMS8, "%8", "%9", "%10", "0");
    } else if constexpr (TRANSPOSED) {
        WGMMA_SS_SMALL_N("f16", "32", NAMES16, SUMS16(0), "%16", "%17", "%18", "1");
    } else {
        WGMMA_SS_SMALL_N("f16", "32", NAMES16, SUMS16(0), "%16", "%17", "%18", "0");
    }
}

/* d = a b, or d += a b with `adds`; both operands are K-major. */
template <int KIND, int COLUMNS>
static __device__ __forceinline__ void wgmma_ss(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b,
                                                int adds)
{
    static_assert(COLUMNS == 64 || COLUMNS == 128, "keys of a tile");
    if constexpr (KIND == KIND_BF16 && COLUMNS == 64) {
        WGMMA_SS("bf16", "64", NAMES32, SUMS32, "%32", "%33", "%34");
    } else if constexpr (KIND == KIND_BF16) {
        WGMMA_SS("bf16", "128", NAMES64, SUMS64, "%64", "%65", "%66");
    } else if constexpr (COLUMNS == 64) {
        WGMMA_SS("f16", "64", NAMES32, SUMS32, "%32", "%33", "%34");
    } else {
        WGMMA_SS("f16", "128", NAMES64, SUMS64, "%64", "%65", "%66");
    }
}

/* As wgmma_ss in e4m3, with k = 32. */
template <int COLUMNS>
static __device__ __forceinline__ void wgmma_ss_fp8(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b,
                                                    int adds)
{
    static_assert(COLUMNS == 64 || COLUMNS == 128, "keys of a tile");
    if constexpr (COLUMNS == 64) {
        WGMMA_FP8("64", NAMES32, SUMS32, "%32", "%33", "%34");
    } else {
        WGMMA_FP8("128", NAMES64, SUMS64, "%64", "%65", "%66");
    }
}

/* d = a b, or d += a b with `adds`; a is in registers, packed from accumulators of 16 columns; b is
 * MN-major. */
template <int KIND, int COLUMNS>
static __device__ __forceinline__ void wgmma_rs(float (&d)[COLUMNS / 2], const uint32_t (&a)[4],
                                                uint64_t b, int adds = 1)
{
    static_assert(COLUMNS == 64 || COLUMNS == 128 || COLUMNS == 256, "dims of a value");
    if constexpr (KIND == KIND_BF16 && COLUMNS == 64) {
        WGMMA_RS("bf16", "64", NAMES32, SUMS32, "%32, %33, %34, %35", "%36", "%37", "1");
    } else if constexpr (KIND == KIND_BF16 && COLUMNS == 128) {
        WGMMA_RS("bf16", "128", NAMES64, SUMS64, "%64, %65, %66, %67", "%68", "%69", "1");
    } else if constexpr (KIND == KIND_BF16) {
        WGMMA_RS("bf16", "256", NAMES128, SUMS128, "%128, %129, %130, %131", "%132", "%133", "1");
    } else if constexpr (COLUMNS == 64) {
        WGMMA_RS("f16", "64", NAMES32, SUMS32, "%32, %33, %34, %35", "%36", "%37", "1");
    } else if constexpr (COLUMNS == 128) {
        WGMMA_RS("f16", "128", NAMES64, SUMS64, "%64, %65, %66, %67", "%68", "%69", "1");
    } else {
        WGMMA_RS("f16", "256", NAMES128, SUMS128, "%128, %129, %130, %131", "%132", "%133", "1");
    }
}

/* As wgmma_rs, but b is K-major. */
template <int KIND, int COLUMNS>
static __device__ __forceinline__ void wgmma_rs_bk(float (&d)[COLUMNS / 2], const uint32_t (&a)[4],
                                                   uint64_t b, int adds = 1)
{
    static_assert(COLUMNS == 64 || COLUMNS == 128, "keys of a tile");
    if constexpr (KIND == KIND_BF16 && COLUMNS == 64) {
        WGMMA_RS("bf16", "64", NAMES32, SUMS32, "%32, %33, %34, %35", "%36", "%37", "0");
    } else if constexpr (KIND == KIND_BF16) {
        WGMMA_RS("bf16", "128", NAMES64, SUMS64, "%64, %65, %66, %67", "%68", "%69", "0");
    } else if constexpr (COLUMNS == 64) {
        WGMMA_RS("f16", "64", NAMES32, SUMS32, "%32, %33, %34, %35", "%36", "%37", "0");
    } else {
        WGMMA_RS("f16", "128", NAMES64, SUMS64, "%64, %65, %66, %67", "%68", "%69", "0");
    }
}

/* As wgmma_rs_bk in e4m3, with 64 columns and k = 32. */
static __device__ __forceinline__ void wgmma_rs_fp8(float (&d)[32], const uint32_t (&a)[4],
                                                    uint64_t b, int adds)
{
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" NAMES32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1;}"
                 : SUMS32
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

/* d += a b; a as in wgmma_ss, b MN-major. */
#define WGMMA_SS_BMN(TYPE, COLUMNS, NAMES, SUMS, A, B)                                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" NAMES   \
                 "}, " A ", " B ", 1, 1, 1, 0, 1;"                                                 \
                 : SUMS                                                                            \
                 : "l"(a), "l"(b))
template <int KIND, int COLUMNS>
static __device__ __forceinline__ void wgmma_ss_bmn(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b)
{
    static_assert(COLUMNS == 128 || COLUMNS == 256, "dims of a value");
    if constexpr (KIND == KIND_BF16 && COLUMNS == 128) {
        WGMMA_SS_BMN("bf16", "128", NAMES64, SUMS64, "%64", "%65");
    } else if constexpr (KIND == KIND_BF16) {
        WGMMA_SS_BMN("bf16", "256", NAMES128, SUMS128, "%128", "%129");
    } else if constexpr (COLUMNS == 128) {
        WGMMA_SS_BMN("f16", "128", NAMES64, SUMS64, "%64", "%65");
    } else {
        WGMMA_SS_BMN("f16", "256", NAMES128, SUMS128, "%128", "%129");
    }
}

#undef WGMMA_SS
#undef WGMMA_SS_SMALL_N
#undef WGMMA_RS
#undef WGMMA_FP8
#undef WGMMA_SS_BMN

#endif
