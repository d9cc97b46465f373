/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L
#include "harness.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats.h"
#include "support/test.h"

#define NUM_THREADS 3

struct reference serial, threaded;
static uint64_t state = 1;

static void host_log(void *user, int32_t level, const char *who, const char *message)
{
    (void)user, (void)level, (void)who, (void)message;
}

static void *host_allocate(void *user, size_t size, size_t alignment)
{
    (void)user;
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void host_release(void *user, void *memory, size_t size)
{
    (void)user, (void)size;
    free(memory);
}

static void serial_for(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                       void *argument)
{
    (void)user, (void)grain;
    if (count > 0) {
        body(argument, 0, count, 0);
    }
}

struct slice {
    attn_parallel_body *body;
    void *argument;
    int64_t begin, end;
    int32_t worker;
};

static void *slice_run(void *argument)
{
    const struct slice *slice = argument;
    slice->body(slice->argument, slice->begin, slice->end, slice->worker);
    return NULL;
}

static void threaded_for(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                         void *argument)
{
    struct slice slices[NUM_THREADS];
    pthread_t threads[NUM_THREADS];
    int32_t started[NUM_THREADS] = {0};
    (void)user, (void)grain;
    for (int32_t i = 0; i < NUM_THREADS; i++) {
        slices[i] = (struct slice){body, argument, count * i / NUM_THREADS,
                                   count * (i + 1) / NUM_THREADS, i};
        if (slices[i].begin < slices[i].end) {
            started[i] = pthread_create(&threads[i], NULL, slice_run, &slices[i]) == 0;
            if (!started[i]) {
                slice_run(&slices[i]);
            }
        }
    }
    for (int32_t i = 0; i < NUM_THREADS; i++) {
        if (started[i]) {
            pthread_join(threads[i], NULL);
        }
    }
}

#define HOST(loop, threads)                                                                        \
    {                                                                                              \
        .struct_size = sizeof(struct attn_host), .log = host_log, .allocate = host_allocate,       \
        .release = host_release, .parallel_for = loop, .num_threads = threads,                     \
    }
static const struct attn_host serial_host = HOST(serial_for, 1);
static const struct attn_host threaded_host = HOST(threaded_for, NUM_THREADS);

static int32_t reference_open(struct reference *reference, attn_plugin_entry_fn *entry,
                              const struct attn_host *host)
{
    struct attn_device device = {ATTN_DEVICE_CPU, 0};
    return entry(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &reference->plugin, NULL) == ATTN_OK &&
           reference->plugin->create(
               &(struct attn_create_args){.struct_size = sizeof(struct attn_create_args),
                                          .host = host,
                                          .backend = "cpu_ref",
                                          .variant = "",
                                          .device = device},
               &reference->instance, &reference->kernels, NULL) == ATTN_OK;
}

static bool open_plugin(const char *file)
{
    attn_plugin_entry_fn *entry;
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return false;
    }
    *(void **)&entry = dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL);
    return entry != NULL && reference_open(&serial, entry, &serial_host) &&
           reference_open(&threaded, entry, &threaded_host);
}

static int close_plugin(void **unused)
{
    (void)unused;
    serial.plugin->destroy(serial.instance);
    threaded.plugin->destroy(threaded.instance);
    threaded.plugin->destroy(NULL);
    return 0;
}

int harness_main(int argc, char **argv, uint64_t seed, const struct CMUnitTest *tests, size_t count)
{
    if (argc != 2 || !open_plugin(argv[1])) {
        fprintf(stderr, "usage: %s attn_cpu_ref.so\n", argv[0]);
        return 2;
    }
    random_seed(seed);
    printf("seed %llu\n", (unsigned long long)seed);
    return _cmocka_run_group_tests("tests", tests, count, NULL, close_plugin);
}

void expect_near(double got, double want, double bound, const char *what, int64_t at)
{
    int32_t same = isnan(want)   ? isnan(got)
                   : isinf(want) ? got == want
                                 : fabs(got - want) <= bound * (1 + fabs(want));
    if (!same) {
        fail_msg("%s, element %d: %.9g, not %.9g", what, (int)at, got, want);
    }
}

void *filled_memory(int64_t count, size_t size, int32_t byte)
{
    void *memory = malloc((size_t)(count > 0 ? count : 1) * size);
    if (memory == NULL) {
        abort();
    }
    memset(memory, byte, (size_t)(count > 0 ? count : 1) * size);
    return memory;
}

void random_seed(uint64_t seed)
{
    state = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
}

uint64_t random_bits(void) /* splitmix64 */
{
    uint64_t z = state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

int32_t random_below(int32_t bound)
{
    return (int32_t)(random_bits() % (uint64_t)bound);
}

double random_normal(void)
{
    double a = ((double)(random_bits() >> 11) + 0.5) * 0x1p-53;
    double b = (double)(random_bits() >> 11) * 0x1p-53;
    return sqrt(-2 * log(a)) * cos(6.283185307179586 * b);
}

void random_permutation(int32_t *items, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        int32_t j = random_below(i + 1);
        items[i] = items[j];
        items[j] = i;
    }
}

struct attn_tensor *tensor_set(struct test_tensor *tensor, void *data, int32_t dtype, int32_t ndim,
                               const int64_t *shape, const int64_t *strides)
{
    memcpy(tensor->shape, shape, (size_t)ndim * sizeof(int64_t));
    tensor->tensor = (struct attn_tensor){.data = data,
                                          .device = {ATTN_DEVICE_CPU, 0},
                                          .ndim = ndim,
                                          .dtype = format_dtype(dtype),
                                          .shape = tensor->shape};
    if (strides != NULL) {
        memcpy(tensor->strides, strides, (size_t)ndim * sizeof(int64_t));
        tensor->tensor.strides = tensor->strides;
    }
    return &tensor->tensor;
}
