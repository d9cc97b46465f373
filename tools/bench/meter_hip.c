/* SPDX-License-Identifier: Apache-2.0 */
/* Ceilings of AMD GPUs: kernels of meter_hip_kernels.cpp through the HIP runtime, which is opened
 * as the plugin does. Without clang at build time there are none. */
#include "meter_hip.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "meter.h"

#define MOST_BYTES (INT64_C(4) << 30) /* 16 times the last cache of MI300X */
#define MEMORY_PART 8                 /* of the free memory, where there is less */
#define GROUPS_OF_UNIT 8
#define ROUNDS 2000

enum { KERNEL_READ, KERNEL_COPY, KERNEL_FMA, KERNEL_MATRIX, NUM_KERNELS };
static const char *const entries[NUM_KERNELS] = {"read_all", "copy_all", "fma_all", "matrix_all"};

extern const char *const __start_hip_bundles[] __attribute__((weak, visibility("hidden")));

struct hip_meter {
    struct memory memory;
    char *buffer;
    size_t bytes; /* of it */
    int32_t groups;
    void *module, *begin, *end;
    void *functions[NUM_KERNELS]; /* NULL: the target has no such instructions */
    int (*set_device)(int);
    int (*memory_info)(size_t *, size_t *);
    int (*module_load)(void **, const void *);
    int (*module_unload)(void *);
    int (*get_function)(void **, void *, const char *);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  void *, void **, void **);
    int (*event_create)(void **);
    int (*event_destroy)(void *);
    int (*event_record)(void *, void *);
    int (*event_wait)(void *);
    int (*event_time)(float *, void *, void *);
};

static bool find(void *library, const char *symbol, void *function)
{
    void *address = dlsym(library, symbol);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

/* The one that the backend has opened, too. */
static bool find_runtime(struct hip_meter *m, int32_t device)
{
    static const char *const names[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"};
    void *library = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && library == NULL; i++) {
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    }
    return library != NULL && find(library, "hipSetDevice", &m->set_device) &&
           find(library, "hipMemGetInfo", &m->memory_info) &&
           find(library, "hipModuleLoadData", &m->module_load) &&
           find(library, "hipModuleUnload", &m->module_unload) &&
           find(library, "hipModuleGetFunction", &m->get_function) &&
           find(library, "hipModuleLaunchKernel", &m->launch) &&
           find(library, "hipEventCreate", &m->event_create) &&
           find(library, "hipEventDestroy", &m->event_destroy) &&
           find(library, "hipEventRecord", &m->event_record) &&
           find(library, "hipEventSynchronize", &m->event_wait) &&
           find(library, "hipEventElapsedTime", &m->event_time) && m->set_device(device) == 0;
}

static bool load_kernels(struct hip_meter *m)
{
    if (__start_hip_bundles == NULL || m->module_load(&m->module, __start_hip_bundles[0]) != 0) {
        m->module = NULL;
        return false;
    }
    for (int32_t i = 0; i < NUM_KERNELS; i++) {
        if (m->get_function(&m->functions[i], m->module, entries[i]) != 0) {
            m->functions[i] = NULL;
        }
    }
    return m->functions[KERNEL_FMA] != NULL && m->event_create(&m->begin) == 0 &&
           m->event_create(&m->end) == 0;
}

/* Random numbers everywhere: memory that is all alike may be told apart by compression. */
static bool fill(struct hip_meter *m)
{
    const size_t part = (size_t)1 << 22;
    uint64_t random = 1;
    size_t available = 0, total = 0;
    if (m->memory_info(&available, &total) != 0) {
        return false;
    }
    m->bytes = available / MEMORY_PART < MOST_BYTES ? available / MEMORY_PART : MOST_BYTES;
    m->bytes -= m->bytes % (2 * part);
    void *source = memory_normal(&m->memory, ATTN_DTYPE_BF16, (int64_t)part / 2, 1, &random);
    void *host = source != NULL ? malloc(part) : NULL;
    m->buffer = m->bytes > 0 ? memory_take(&m->memory, m->bytes) : NULL;
    bool ok =
        host != NULL && m->buffer != NULL && device_read(m->memory.device, host, source, part);
    for (size_t at = 0; ok && at < m->bytes; at += part) {
        ok = device_write(m->memory.device, m->buffer + at, host, part);
    }
    free(host);
    return ok;
}

static double hip_run(void *state, const struct meter_kernel *kernel)
{
    struct hip_meter *m = state;
    const bool memory = kernel->code == KERNEL_READ || kernel->code == KERNEL_COPY;
    struct meter_hip_args args = {.from = m->buffer,
                                  .to = m->buffer + m->bytes / 2,
                                  .bytes = kernel->code == KERNEL_COPY ? m->bytes / 2 : m->bytes,
                                  .rounds = ROUNDS,
                                  .groups = m->groups};
    size_t bytes = sizeof args;
    void *extra[] = {(void *)1, &args, (void *)2, &bytes, (void *)3}; /* args, their size, end */
    double threads = (double)m->groups * METER_THREADS;
    double amount =
        memory ? (double)m->bytes /* a copy of one half reads and writes as much */
               : threads * ROUNDS * (kernel->code == KERNEL_FMA ? METER_FMA : METER_MATRIX);
    float milliseconds = 0;
    bool ok = device_wait(m->memory.device) && m->event_record(m->begin, NULL) == 0 &&
              m->launch(m->functions[kernel->code], (unsigned)m->groups, 1, 1, METER_THREADS, 1, 1,
                        0, NULL, NULL, extra) == 0 &&
              m->event_record(m->end, NULL) == 0 && m->event_wait(m->end) == 0 &&
              m->event_time(&milliseconds, m->begin, m->end) == 0;
    return ok && milliseconds > 0 ? 1e3 * amount / milliseconds : 0;
}

static void hip_destroy(void *state)
{
    struct hip_meter *m = state;
    if (m == NULL) {
        return;
    }
    if (m->begin != NULL) {
        m->event_destroy(m->begin);
    }
    if (m->end != NULL) {
        m->event_destroy(m->end);
    }
    if (m->module != NULL) {
        m->module_unload(m->module);
    }
    memory_finish(&m->memory);
    free(m);
}

static attn_status hip_create(void **state, struct meter_kernel *kernels, int32_t *num_kernels,
                              const struct device *device, int32_t num_units,
                              struct attn_error *error)
{
    static const struct meter_kernel all[NUM_KERNELS] = {
        {"eight words a thread", CEILING_READ, KERNEL_READ},
        {"four words a thread", CEILING_COPY, KERNEL_COPY},
        {"fma in registers", CEILING_F32, KERNEL_FMA},
        {"matrix products in registers", CEILING_BF16, KERNEL_MATRIX}};
    struct hip_meter *m = calloc(1, sizeof *m);
    *state = NULL;
    if (m == NULL) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    memory_init(&m->memory, device);
    m->groups = (num_units > 0 ? num_units : 1) * GROUPS_OF_UNIT;
    if (!find_runtime(m, device->device.id) || !load_kernels(m) || !fill(m)) {
        snprintf(error->message, sizeof error->message, "%s",
                 __start_hip_bundles == NULL
                     ? "attn-bench was built without clang's compiler for AMD GPUs"
                     : "the ceilings' kernels cannot be loaded, or there is no free memory");
        hip_destroy(m);
        return error->status = ATTN_ERROR_DEVICE;
    }
    *num_kernels = 0;
    for (int32_t i = 0; i < NUM_KERNELS; i++) {
        if (m->functions[i] != NULL) {
            kernels[(*num_kernels)++] = all[i];
        }
    }
    *state = m;
    return ATTN_OK;
}

const struct meter_type meter_hip = {
    .device_type = ATTN_DEVICE_ROCM,
    .create = hip_create,
    .destroy = hip_destroy,
    .run = hip_run,
};
