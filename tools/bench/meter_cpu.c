/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU's ceilings: all threads start at once and the last one ends the pass. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/command.h"
#include "ceilings.h"

#define ALIGNMENT 4096
#define ARITHMETIC_ROUNDS 40000 /* some milliseconds */
#define PLAIN_SUMS 64

/* A thread's share: `bytes` of memory at `from` (and `to`), or `rounds` of arithmetic. Gives what
 * was read or computed, so that nothing is left out by the compiler. */
struct share {
    const uint8_t *from;
    uint8_t *to;
    size_t bytes;   /* a multiple of 4096 */
    int64_t rounds; /* arithmetic */
};

struct cpu_kernel {
    const char *name;
    enum ceiling ceiling;
    uint64_t (*work)(const struct share *share);
    double operations; /* operations of one round; 0: memory */
};

struct cpu_meter {
    uint8_t *memory;
    size_t bytes; /* its size */
    int32_t num_threads;
    bool cpu_time;
    struct cpu_kernel kernels[METER_MAX_KERNELS];
};

static uint64_t read_plain(const struct share *share)
{
    const uint64_t *words = (const uint64_t *)(const void *)share->from;
    size_t quarter = share->bytes / 4 / sizeof *words;
    uint64_t sum[4][8] = {{0}};
    for (size_t i = 0; i < quarter; i += 8) {
        for (size_t j = 0; j < 4; j++) {
            for (size_t k = 0; k < 8; k++) {
                sum[j][k] ^= words[j * quarter + i + k];
            }
        }
    }
    for (size_t j = 1; j < 32; j++) {
        sum[0][0] ^= sum[j / 8][j % 8];
    }
    return sum[0][0];
}

static uint64_t copy_plain(const struct share *share)
{
    memcpy(share->to, share->from, share->bytes);
    return share->to[share->bytes - 1];
}

/* A multiply and an add for each of PLAIN_SUMS sums, as the compiler makes them for the baseline.
 */
static uint64_t arithmetic_plain(const struct share *share)
{
    float sum[PLAIN_SUMS] = {0}, a = 0.5f, b = 1e-3f;
    for (int64_t i = 0; i < share->rounds; i++) {
        for (int32_t j = 0; j < PLAIN_SUMS; j++) {
            sum[j] = sum[j] * a + b;
        }
    }
    for (int32_t j = 1; j < PLAIN_SUMS; j++) {
        sum[0] += sum[j];
    }
    return (uint64_t)sum[0];
}

static const struct cpu_kernel plain_kernels[] = {
    {"plain, four streams", CEILING_READ, read_plain, 0},
    {"memcpy", CEILING_COPY, copy_plain, 0},
    {"plain", CEILING_F32, arithmetic_plain, 2.0 * PLAIN_SUMS},
};

/* The vector instructions of x86-64, chosen at run time. */
#if defined(__x86_64__)

#include <immintrin.h>

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

/* Those that this CPU can run; at most METER_MAX_KERNELS with the plain ones. */
static int32_t vector_kernels(struct cpu_kernel *kernels)
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

static int32_t vector_kernels(struct cpu_kernel *kernels)
{
    return 0;
}

#endif

/* One pass over all threads. */
struct crew {
    const struct cpu_kernel *kernel;
    atomic_int waiting;
    clockid_t clock;
    struct member {
        struct crew *crew;
        struct share share;
        pthread_t thread;
        double begin, end;
        uint64_t result;
    } * members;
};

static void *work(void *argument)
{
    struct member *member = argument;
    atomic_fetch_sub(&member->crew->waiting, 1);
    while (atomic_load_explicit(&member->crew->waiting, memory_order_acquire) > 0) {
    }
    member->begin = seconds_of(member->crew->clock);
    member->result = member->crew->kernel->work(&member->share);
    member->end = seconds_of(member->crew->clock);
    return NULL;
}

static void set_shares(const struct cpu_meter *meter, struct crew *crew, size_t total)
{
    size_t each = total / (size_t)meter->num_threads / ALIGNMENT * ALIGNMENT;
    for (int32_t i = 0; i < meter->num_threads; i++) {
        struct member *member = &crew->members[i];
        *member = (struct member){.crew = crew};
        member->share.from = meter->memory + (size_t)i * each;
        member->share.to = meter->memory + meter->bytes / 2 + (size_t)i * each;
        member->share.bytes = each;
        member->share.rounds = ARITHMETIC_ROUNDS;
    }
}

/* Seconds from the first start to the last end, or a thread's own in the mean; 0 if a thread could
 * not be started. */
static double run_crew(const struct cpu_meter *meter, struct crew *crew)
{
    int32_t started = 1;
    atomic_init(&crew->waiting, meter->num_threads);
    while (started < meter->num_threads && pthread_create(&crew->members[started].thread, NULL,
                                                          work, &crew->members[started]) == 0) {
        started++;
    }
    atomic_fetch_sub(&crew->waiting, meter->num_threads - started);
    work(&crew->members[0]);
    double begin = crew->members[0].begin, end = crew->members[0].end, own = end - begin;
    for (int32_t i = 1; i < started; i++) {
        pthread_join(crew->members[i].thread, NULL);
        begin = crew->members[i].begin < begin ? crew->members[i].begin : begin;
        end = crew->members[i].end > end ? crew->members[i].end : end;
        own += crew->members[i].end - crew->members[i].begin;
    }
    double elapsed = meter->cpu_time ? own / meter->num_threads : end - begin;
    return started == meter->num_threads ? elapsed : 0;
}

static double cpu_run(void *state, const struct meter_kernel *kernel)
{
    const struct cpu_meter *meter = state;
    struct crew crew = {.kernel = &meter->kernels[kernel->code],
                        .clock = meter->cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC};
    bool copies = kernel->ceiling == CEILING_COPY;
    size_t total = copies ? meter->bytes / 2 : meter->bytes;
    crew.members = command_calloc((size_t)meter->num_threads, sizeof *crew.members);
    set_shares(meter, &crew, total);
    double amount =
        crew.kernel->operations > 0
            ? crew.kernel->operations * ARITHMETIC_ROUNDS * meter->num_threads
            : (double)crew.members[0].share.bytes * meter->num_threads * (copies ? 2 : 1);
    double elapsed = run_crew(meter, &crew);
    free(crew.members);
    return elapsed > 0 ? amount / elapsed : 0;
}

static void cpu_count_cpu_time(void *state)
{
    struct cpu_meter *meter = state;
    meter->cpu_time = true;
}

static void cpu_destroy(void *state)
{
    struct cpu_meter *meter = state;
    free(meter->memory);
    free(meter);
}

/* Tests that judge no time read less than METER_BYTES. */
static size_t memory_size(void)
{
    const char *text = getenv("ATTN_TEST_CEILING_MIB");
    const long mib = text != NULL ? strtol(text, NULL, 10) : 0;
    return mib > 0 && mib < METER_BYTES >> 20 ? (size_t)mib << 20 : (size_t)METER_BYTES;
}

static attn_status cpu_create(void **state, struct meter_kernel *kernels, int32_t *num_kernels,
                              const struct device *device, int32_t num_threads,
                              struct attn_error *error)
{
    struct cpu_meter *meter = *state = command_calloc(1, sizeof *meter);
    int32_t count = 0;
    meter->bytes = memory_size();
    /* A prefetch may point past the end; a page after it keeps that in the same allocation. */
    meter->memory = aligned_alloc(ALIGNMENT, meter->bytes + 4 * ALIGNMENT);
    if (meter->memory == NULL) {
        command_error(error, ATTN_ERROR_OUT_OF_MEMORY, "", "no memory: ceilings read %zu MiB",
                      meter->bytes >> 20);
        cpu_destroy(meter);
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    meter->num_threads = num_threads;
    for (size_t i = 0; i < sizeof plain_kernels / sizeof *plain_kernels; i++) {
        meter->kernels[count++] = plain_kernels[i];
    }
    count += vector_kernels(meter->kernels + count);
    /* Touched, with what is no denormal number in any type. */
    memset(meter->memory, 0x3c, meter->bytes + 4 * ALIGNMENT);
    for (int32_t i = 0; i < count; i++) {
        kernels[i] = (struct meter_kernel){meter->kernels[i].name, meter->kernels[i].ceiling, i};
    }
    *num_kernels = count;
    return ATTN_OK;
}

const struct meter_type meter_cpu = {
    .device_type = ATTN_DEVICE_CPU,
    .create = cpu_create,
    .destroy = cpu_destroy,
    .count_cpu_time = cpu_count_cpu_time,
    .run = cpu_run,
};
