/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU's ceilings: all threads start at once and the last one ends the pass. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "common/seconds.h"
#include "meter_cpu.h"

#define ALIGNMENT 4096
#define ARITHMETIC_ROUNDS 40000 /* some milliseconds */
#define PLAIN_SUMS 64

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
    crew.members = calloc((size_t)meter->num_threads, sizeof *crew.members);
    if (crew.members == NULL) {
        return 0;
    }
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
    if (meter != NULL) {
        free(meter->memory);
        free(meter);
    }
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
    struct cpu_meter *meter = calloc(1, sizeof *meter);
    const size_t bytes = memory_size();
    int32_t count = 0;
    *state = NULL;
    if (meter != NULL) {
        meter->bytes = bytes;
        /* A prefetch may point past the end; a page after it keeps that in the same allocation. */
        meter->memory = aligned_alloc(ALIGNMENT, meter->bytes + 4 * ALIGNMENT);
    }
    if (meter == NULL || meter->memory == NULL) {
        cpu_destroy(meter);
        return command_error(error, ATTN_ERROR_OUT_OF_MEMORY, "",
                             "no memory: ceilings read %zu MiB", bytes >> 20);
    }
    meter->num_threads = num_threads;
    for (size_t i = 0; i < sizeof plain_kernels / sizeof *plain_kernels; i++) {
        meter->kernels[count++] = plain_kernels[i];
    }
    count += cpu_kernels_x86(meter->kernels + count);
    /* Touched, with what is no denormal number in any type. */
    memset(meter->memory, 0x3c, meter->bytes + 4 * ALIGNMENT);
    for (int32_t i = 0; i < count; i++) {
        kernels[i] = (struct meter_kernel){meter->kernels[i].name, meter->kernels[i].ceiling, i};
    }
    *num_kernels = count;
    *state = meter;
    return ATTN_OK;
}

const struct meter_type meter_cpu = {
    .device_type = ATTN_DEVICE_CPU,
    .create = cpu_create,
    .destroy = cpu_destroy,
    .count_cpu_time = cpu_count_cpu_time,
    .run = cpu_run,
};
