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
GPU_INLINE uint64_t descriptor_at(uint32_t address, uint32_t column, uint32_t group)
{
    uint32_t low = __shfl_sync(0xffffffffu, (address & 0x3ffff) >> 4 | (column >> 4) << 16, 0);
    return (uint64_t)(1u << 30 | group >> 4) << 32 | low;
}

/* The same, computed at the place of use, for an address that the compiler knows to be uniform. */
GPU_INLINE uint64_t descriptor_uniform(uint32_t address, uint32_t column, uint32_t group)
{
    return (uint64_t)(1u << 30 | group >> 4) << 32 | (address & 0x3ffff) >> 4 | (column >> 4) << 16;
}

/* The descriptor of a matrix without swizzle. column: bytes between groups of 8 rows by 16 bytes of
 * the same rows, group: of the same columns. */
GPU_INLINE uint64_t descriptor_unswizzled(uint32_t address, uint32_t column, uint32_t group)
{
    return descriptor_at(address, column, group) & ~((uint64_t)1 << 62);
}

/* Hides a descriptor's origin, so that the sum with `further` is computed at the place of use. Sums
 * computed before a loop would occupy registers and be moved to uniform ones one by one. */
GPU_INLINE uint64_t descriptor_again(uint64_t matrix, uint32_t further = 0)
{
    uint32_t low = (uint32_t)matrix + further;
    asm volatile("mov.b32 %0, %0;" : "+r"(low));
    return (matrix & 0xffffffff00000000u) | low;
}

/* Keeps registers of a wgmma in place: their values are complete before it, and they are not moved
 * while it runs. */
template <int N> GPU_INLINE void pin(float (&x)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(x[i])::"memory");
    }
}

GPU_INLINE void wgmma_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

GPU_INLINE void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits for all committed groups except the last LEFT. */
template <int LEFT> GPU_INLINE void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

/* As wgmma_wait, but not before x is computed: ptxas would move the wait before the computation of
 * x, which needs no wgmma. x is never negative, so no thread sleeps. */
template <int LEFT> GPU_INLINE void wgmma_wait_after(float x)
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
    NAMES16                                                                                        \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES64                                                                                    \
    NAMES32                                                                                        \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, "      \
    "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES128                                                                                   \
    NAMES64                                                                                        \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, "      \
    "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, "   \
    "%99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, "    \
    "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

/* The forms of an instruction. P0 to P5: names of the operands after the accumulators; TAIL: which
 * operands are MN-major. Without `adds` it always adds. */
#define WGMMA_ADDS(TYPES, K, TAIL, COLUMNS, NAMES, A, B, ADDS)                                     \
    "{.reg .pred p; setp.ne.b32 p, " ADDS ", 0; wgmma.mma_async.sync.aligned.m64n" COLUMNS "k" K   \
    ".f32." TYPES " {" NAMES "}, " A ", " B ", p, 1, 1" TAIL ";}"
#define WGMMA_SS(TYPES, K, TAIL, COLUMNS, NAMES, SUMS, P0, P1, P2, P3, P4, P5)                     \
    asm volatile(WGMMA_ADDS(TYPES, K, TAIL, COLUMNS, NAMES, P0, P1, P2)                            \
                 : SUMS                                                                            \
                 : "l"(a), "l"(b), "r"(adds))
#define WGMMA_SS_ALWAYS(TYPES, K, TAIL, COLUMNS, NAMES, SUMS, P0, P1, P2, P3, P4, P5)              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" COLUMNS "k" K ".f32." TYPES " {" NAMES        \
                 "}, " P0 ", " P1 ", 1, 1, 1" TAIL ";"                                             \
                 : SUMS                                                                            \
                 : "l"(a), "l"(b))
#define WGMMA_RS(TYPES, K, TAIL, COLUMNS, NAMES, SUMS, P0, P1, P2, P3, P4, P5)                     \
    asm volatile(                                                                                  \
        WGMMA_ADDS(TYPES, K, TAIL, COLUMNS, NAMES, "{" P0 ", " P1 ", " P2 ", " P3 "}", P4, P5)     \
        : SUMS                                                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))

#define WGMMA_COLUMNS(FORM, TYPES, K, TAIL)                                                        \
    if constexpr (COLUMNS == 16) {                                                                 \
        FORM(TYPES, K, TAIL, "16", NAMES8, SUMS8, "%8", "%9", "%10", "%11", "%12", "%13");         \
    } else if constexpr (COLUMNS == 32) {                                                          \
        FORM(TYPES, K, TAIL, "32", NAMES16, SUMS16(0), "%16", "%17", "%18", "%19", "%20", "%21");  \
    } else if constexpr (COLUMNS == 64) {                                                          \
        FORM(TYPES, K, TAIL, "64", NAMES32, SUMS32, "%32", "%33", "%34", "%35", "%36", "%37");     \
    } else if constexpr (COLUMNS == 128) {                                                         \
        FORM(TYPES, K, TAIL, "128", NAMES64, SUMS64, "%64", "%65", "%66", "%67", "%68", "%69");    \
    } else {                                                                                       \
        static_assert(COLUMNS == 256, "columns of a product");                                     \
        FORM(TYPES, K, TAIL, "256", NAMES128, SUMS128, "%128", "%129", "%130", "%131", "%132",     \
             "%133");                                                                              \
    }
#define WGMMA_KINDS(FORM, TAIL)                                                                    \
    if constexpr (KIND == KIND_BF16) {                                                             \
        WGMMA_COLUMNS(FORM, "bf16.bf16", "16", TAIL)                                               \
    } else {                                                                                       \
        WGMMA_COLUMNS(FORM, "f16.f16", "16", TAIL)                                                 \
    }

/* d = a b, or d += a b with `adds`; both operands are K-major. */
template <int KIND, int COLUMNS>
GPU_INLINE void wgmma_ss(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, int adds)
{
    WGMMA_KINDS(WGMMA_SS, ", 0, 0")
}

/* The same; with TRANSPOSED a is MN-major. */
template <int KIND, int COLUMNS, bool TRANSPOSED>
GPU_INLINE void wgmma_ss_small_n(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, int adds)
{
    if constexpr (TRANSPOSED) {
        WGMMA_KINDS(WGMMA_SS, ", 1, 0")
    } else {
        wgmma_ss<KIND, COLUMNS>(d, a, b, adds);
    }
}

/* As wgmma_ss in e4m3, with k = 32. */
template <int COLUMNS>
GPU_INLINE void wgmma_ss_fp8(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, int adds)
{
    WGMMA_COLUMNS(WGMMA_SS, "e4m3.e4m3", "32", "")
}

/* d = a b, or d += a b with `adds`; a is in registers, packed from accumulators of 16 columns; b is
 * MN-major. */
template <int KIND, int COLUMNS>
GPU_INLINE void wgmma_rs(float (&d)[COLUMNS / 2], const uint32_t (&a)[4], uint64_t b, int adds = 1)
{
    WGMMA_KINDS(WGMMA_RS, ", 1")
}

/* As wgmma_rs, but b is K-major. */
template <int KIND, int COLUMNS>
GPU_INLINE void wgmma_rs_bk(float (&d)[COLUMNS / 2], const uint32_t (&a)[4], uint64_t b,
                            int adds = 1)
{
    WGMMA_KINDS(WGMMA_RS, ", 0")
}

/* As wgmma_rs_bk in e4m3, with k = 32. */
template <int COLUMNS>
GPU_INLINE void wgmma_rs_fp8(float (&d)[COLUMNS / 2], const uint32_t (&a)[4], uint64_t b, int adds)
{
    WGMMA_COLUMNS(WGMMA_RS, "e4m3.e4m3", "32", "")
}

/* d += a b; a as in wgmma_ss, b MN-major. */
template <int KIND, int COLUMNS>
GPU_INLINE void wgmma_ss_bmn(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b)
{
    WGMMA_KINDS(WGMMA_SS_ALWAYS, ", 0, 1")
}

#undef WGMMA_ADDS
#undef WGMMA_SS
#undef WGMMA_SS_ALWAYS
#undef WGMMA_RS
#undef WGMMA_COLUMNS
#undef WGMMA_KINDS

#endif
