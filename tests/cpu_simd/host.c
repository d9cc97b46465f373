/* SPDX-License-Identifier: Apache-2.0 */
/* The host lent to both plugins, opening them, and random numbers. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

static void host_log(void *user, int32_t level, const char *who, const char *message)
{
    (void)user, (void)level, (void)who, (void)message;
}

static void *host_allocate(void *user, size_t size, size_t alignment)
{
    (void)user;
    alignment = alignment < 64 ? 64 : alignment;
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void host_release(void *user, void *memory, size_t size)
{
    (void)user, (void)size;
    free(memory);
}

struct slice {
    attn_parallel_body *body;
    void *argument;
    int64_t begin, end;
    int32_t worker;
};

static void *slice_main(void *argument)
{
    struct slice *slice = argument;
    slice->body(slice->argument, slice->begin, slice->end, slice->worker);
    return NULL;
}

static void host_parallel_for(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                              void *argument)
{
    struct slice slices[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    bool started[MAX_THREADS] = {false};
    (void)user, (void)grain;
    for (int32_t i = 0; i < MAX_THREADS; i++) {
        slices[i] = (struct slice){body, argument, count * i / MAX_THREADS,
                                   count * (i + 1) / MAX_THREADS, i};
        if (slices[i].begin < slices[i].end) {
            started[i] = pthread_create(&threads[i], NULL, slice_main, &slices[i]) == 0;
            if (!started[i]) {
                slice_main(&slices[i]);
            }
        }
    }
    for (int32_t i = 0; i < MAX_THREADS; i++) {
        if (started[i]) {
            pthread_join(threads[i], NULL);
        }
    }
}

const struct attn_host test_host = {
    .struct_size = sizeof(struct attn_host),
    .log = host_log,
    .allocate = host_allocate,
    .release = host_release,
    .parallel_for = host_parallel_for,
    .num_threads = MAX_THREADS,
};

static const struct attn_plugin *plugin_open(const char *file)
{
    const struct attn_plugin *plugin = NULL;
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return NULL;
    }
    attn_plugin_entry_fn *entry;
    *(void **)&entry = dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL);
    if (entry == NULL || entry(ATTN_ABI_VERSION, ATTN_ABI_VERSION, &plugin, NULL) != ATTN_OK) {
        return NULL;
    }
    return plugin;
}

bool backend_open(const char *file, const char *name, const char *variant, struct backend *backend)
{
    struct attn_device device = {ATTN_DEVICE_CPU, 0};
    memset(backend, 0, sizeof(*backend));
    backend->plugin = plugin_open(file);
    if (backend->plugin == NULL) {
        return false;
    }
    snprintf(backend->name, sizeof(backend->name), "%s", name);
    snprintf(backend->variant, sizeof(backend->variant), "%s", variant);
    return backend->plugin->create(&test_host, name, variant, device, &backend->instance,
                                   &backend->kernels, NULL) == ATTN_OK;
}

void backend_close(struct backend *backend)
{
    if (backend->plugin != NULL) {
        backend->plugin->destroy(backend->instance);
    }
    backend->instance = NULL;
}

struct variant_list {
    int count;
    char (*names)[64];
};

static attn_status on_device(void *user, const struct attn_device_info *device)
{
    (void)user, (void)device;
    return ATTN_OK;
}

static attn_status on_backend(void *user, const struct attn_backend_caps *caps)
{
    struct variant_list *list = user;
    if (list->count < MAX_VARIANTS) {
        snprintf(list->names[list->count++], 64, "%s", caps->variant);
    }
    return ATTN_OK;
}

int list_variants(const char *file, char names[MAX_VARIANTS][64])
{
    struct variant_list list = {0, names};
    struct attn_probe_sink sink = {
        .struct_size = sizeof(sink), .user = &list, .device = on_device, .backend = on_backend};
    const struct attn_plugin *plugin = plugin_open(file);
    if (plugin == NULL || plugin->probe(&test_host, &sink, NULL) != ATTN_OK) {
        return 0;
    }
    return list.count;
}

static uint64_t random_state;

void random_seed(uint64_t seed)
{
    random_state = seed;
}

/* splitmix64 */
uint64_t random_bits(void)
{
    uint64_t z = (random_state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

int32_t random_int(int32_t low, int32_t high)
{
    return low + (int32_t)(random_bits() % (uint64_t)(high - low + 1));
}

float random_normal(void)
{
    double u = (double)((random_bits() >> 11) + 1) / 9007199254740993.0;
    double v = (double)(random_bits() >> 11) / 9007199254740992.0;
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}
