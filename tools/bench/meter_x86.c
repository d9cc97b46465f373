/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU's ceilings in the vector instructions of x86-64, chosen at run time. */
#include "meter_cpu.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Independent accumulators: more than latency times units of any core so far (AVX: 16 registers).
 */
#define WIDE 24
#define NARROW 12
#define ROUND 64 /* steps inside one round */

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512bw")))
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512bf16")))
#define AMX __attribute__((target("amx-tile,amx-bf16")))

/* One stream, prefetched `ahead` bytes before it is read: the hardware's prefetchers stop at pages.
 */
#define READ_ONE(name, target, vector, load, combine, fold, ahead)                                 \
    target static uint64_t name(const struct share *share)                                         \
    {                                                                                              \
        vector sum[8] = {{0}};                                                                     \
        for (size_t i = 0; i < share->bytes; i += 8 * sizeof(vector)) {                            \
            const uint8_t *at = share->from + i;                                                   \
            for (size_t line = 0; line < 8 * sizeof(vector); line += 64) {                         \
                _mm_prefetch((const char *)at + (ahead) + line, _MM_HINT_T0);                      \
            }                                                                                      \
            for (size_t j = 0; j < 8; j++) {                                                       \
                sum[j] = combine(sum[j], load((const void *)(at + j * sizeof(vector))));           \
            }                                                                                      \
        }                                                                                          \
        return fold(sum);                                                                          \
    }

/* Four streams, a quarter of the share each: as many pages open at once. */
#define READ_FOUR(name, target, vector, load, combine, fold)                                       \
    target static uint64_t name(const struct share *share)                                         \
    {                                                                                              \
        vector sum[8] = {{0}};                                                                     \
        for (size_t i = 0; i < share->bytes / 4; i += 2 * sizeof(vector)) {                        \
            for (size_t j = 0; j < 8; j++) {                                                       \
                const uint8_t *at =                                                                \
                    share->from + j / 2 * (share->bytes / 4) + i + j % 2 * sizeof(vector);         \
                _mm_prefetch((const char *)at + 1024, _MM_HINT_T0);                                \
                sum[j] = combine(sum[j], load((const void *)at));                                  \
            }                                                                                      \
        }                                                                                          \
        return fold(sum);                                                                          \
    }

/* Stores past the cache: nothing is read that is then overwritten. */
#define COPY(name, target, vector, load, stream)                                                   \
    target static uint64_t name(const struct share *share)                                         \
    {                                                                                              \
        for (size_t i = 0; i < share->bytes; i += 4 * sizeof(vector)) {                            \
            for (size_t line = 0; line < 4 * sizeof(vector); line += 64) {                         \
                _mm_prefetch((const char *)share->from + i + 2048 + line, _MM_HINT_NTA);           \
            }                                                                                      \
            for (size_t j = 0; j < 4 * sizeof(vector); j += sizeof(vector)) {                      \
                stream((void *)(share->to + i + j), load((const void *)(share->from + i + j)));    \
            }                                                                                      \
        }                                                                                          \
        _mm_sfence();                                                                              \
        return share->to[0];                                                                       \
    }

/* Chains of a product and a sum; equal ones could be computed once. */
#define ARITHMETIC(name, target, vector, chains, splat, add, first, operands, step)                \
    target static uint64_t name(const struct share *share)                                         \
    {                                                                                              \
        operands;                                                                                  \
        vector sum[chains];                                                                        \
        for (int32_t j = 0; j < (chains); j++) {                                                   \
            sum[j] = splat((float)j);                                                              \
        }                                                                                          \
        for (int64_t i = 0; i < share->rounds * ROUND; i++) {                                      \
            _Pragma("GCC unroll 24") for (int32_t j = 0; j < (chains); j++)                        \
            {                                                                                      \
                sum[j] = step;                                                                     \
            }                                                                                      \
        }                                                                                          \
        for (int32_t j = 1; j < (chains); j++) {                                                   \
            sum[0] = add(sum[0], sum[j]);                                                          \
        }                                                                                          \
        return (uint64_t)(int64_t)first(sum[0]);                                                   \
    }

AVX2 static uint64_t fold_avx2(const __m256i *sum)
{
    uint64_t parts[4], all = 0;
    for (int32_t j = 0; j < 8; j++) {
        _mm256_storeu_si256((__m256i *)parts, sum[j]);
        all ^= parts[0] ^ parts[1] ^ parts[2] ^ parts[3];
    }
    return all;
}

AVX512 static uint64_t fold_avx512(const __m512i *sum)
{
    uint64_t all = 0;
    for (int32_t j = 0; j < 8; j++) {
        all ^= (uint64_t)_mm512_reduce_or_epi64(sum[j]);
    }
    return all;
}

#define OF_AVX2 AVX2, __m256i, _mm256_load_si256
#define OF_AVX512 AVX512, __m512i, _mm512_load_si512
#define EXPAND(macro, ...) macro(__VA_ARGS__)
EXPAND(READ_ONE, read_one_avx2, OF_AVX2, _mm256_xor_si256, fold_avx2, 2048)
EXPAND(READ_FOUR, read_four_avx2, OF_AVX2, _mm256_xor_si256, fold_avx2)
EXPAND(COPY, copy_stream_avx2, OF_AVX2, _mm256_stream_si256)
EXPAND(READ_ONE, read_near_avx512, OF_AVX512, _mm512_xor_si512, fold_avx512, 1024)
EXPAND(READ_ONE, read_far_avx512, OF_AVX512, _mm512_xor_si512, fold_avx512, 8192)
EXPAND(READ_FOUR, read_four_avx512, OF_AVX512, _mm512_xor_si512, fold_avx512)
EXPAND(COPY, copy_stream_avx512, OF_AVX512, _mm512_stream_si512)
ARITHMETIC(fma_avx2, AVX2, __m256, NARROW, _mm256_set1_ps, _mm256_add_ps, _mm256_cvtss_f32,
           const __m256 a = _mm256_set1_ps(0.5f), _mm256_fmadd_ps(sum[j], a, a))
ARITHMETIC(fma_avx512, AVX512, __m512, WIDE, _mm512_set1_ps, _mm512_add_ps, _mm512_cvtss_f32,
           const __m512 a = _mm512_set1_ps(0.5f), _mm512_fmadd_ps(sum[j], a, a))
ARITHMETIC(dot_avx512bf16, AVX512_BF16, __m512, WIDE, _mm512_set1_ps, _mm512_add_ps,
           _mm512_cvtss_f32,
           const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(-0.25f)),
           _mm512_dpbf16_ps(sum[j], a, a))

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
};

/* Two by two tiles of 16 x 16 sums; the operands stay in tiles, too. */
AMX static uint64_t dot_amx(const struct share *share)
{
    struct tile_config config = {.palette = 1};
    uint8_t operands[1024];
    float sums[256];
    for (int32_t i = 0; i < 8; i++) {
        config.column_bytes[i] = 64;
        config.rows[i] = 16;
    }
    memset(operands, 0x3c, sizeof operands);
    /* gcc 12's tile intrinsics do not say that they read this. */
    __asm__ volatile("" : : "r"(&config), "r"(operands) : "memory");
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, operands, 64);
    _tile_loadd(5, operands, 64);
    _tile_loadd(6, operands, 64);
    _tile_loadd(7, operands, 64);
    for (int64_t i = 0; i < share->rounds * ROUND; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_release();
    return (uint64_t)(sums[0] * 1e-20f);
}

/* The kernel lets a process use tiles once it has asked: arch_prctl(ARCH_REQ_XCOMP_PERM,
 * XTILEDATA). */
static int may_use_tiles(void)
{
    return __builtin_cpu_supports("avx512bf16") && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

int32_t cpu_kernels_x86(struct cpu_kernel *kernels)
{
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    const struct {
        bool there;
        struct cpu_kernel kernel;
    } all[] = {{avx2, {"avx2, one stream", CEILING_READ, read_one_avx2, 0}},
               {avx2, {"avx2, four streams", CEILING_READ, read_four_avx2, 0}},
               {avx2, {"avx2, streaming stores", CEILING_COPY, copy_stream_avx2, 0}},
               {avx2, {"avx2 fma", CEILING_F32, fma_avx2, ROUND * NARROW * 16.0}},
               {avx512, {"avx512, one stream, near", CEILING_READ, read_near_avx512, 0}},
               {avx512, {"avx512, one stream, far", CEILING_READ, read_far_avx512, 0}},
               {avx512, {"avx512, four streams", CEILING_READ, read_four_avx512, 0}},
               {avx512, {"avx512, streaming stores", CEILING_COPY, copy_stream_avx512, 0}},
               {avx512, {"avx512 fma", CEILING_F32, fma_avx512, ROUND * WIDE * 32.0}},
               {__builtin_cpu_supports("avx512bf16"),
                {"vdpbf16ps", CEILING_BF16, dot_avx512bf16, ROUND * WIDE * 64.0}},
               /* 16 x 16 sums of 32 products */
               {may_use_tiles(), {"tdpbf16ps", CEILING_BF16, dot_amx, ROUND * 4 * 16384.0}}};
    int32_t count = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (all[i].there) {
            kernels[count++] = all[i].kernel;
        }
    }
    return count;
}

#else

int32_t cpu_kernels_x86(struct cpu_kernel *kernels)
{
    return 0;
}

#endif
