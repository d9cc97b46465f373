/* SPDX-License-Identifier: Apache-2.0 */
#include "meter_gpu.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"

/* 16 times the last cache of MI300X; a gibibyte takes a quarter of a millisecond on an H200, too
 * little next to a launch */
#define MOST_BYTES ((size_t)4 << 30)
#define MEMORY_PART 8          /* 1 / MEMORY_PART of the free memory, where that is less */
#define PART ((size_t)1 << 22) /* bytes that are drawn; the buffer repeats them */

bool gpu_find(void *library, const char *symbol, void *function)
{
    void *address = dlsym(library, symbol);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

/* The library that the backend has opened, too. It cannot be closed again. */
static bool find_calls(struct gpu_meter *m)
{
    const char *const *name = m->driver->libraries;
    for (; *name != NULL && m->library == NULL; name++) {
        m->library = dlopen(*name, RTLD_NOW | RTLD_LOCAL);
    }
    bool found = m->library != NULL;
    for (size_t i = 0; i < GPU_CALLS && found; i++) {
        found = gpu_find(m->library, m->driver->calls[i], (char *)&m->calls + i * sizeof(void *));
    }
    return found;
}

static bool find_kernels(struct gpu_meter *m)
{
    for (int32_t i = 0; i < GPU_KERNELS; i++) {
        if (m->calls.get_function(&m->functions[i], m->module, m->driver->entries[i]) != 0) {
            m->functions[i] = NULL;
        }
    }
    return m->functions[KERNEL_FMA] != NULL;
}

/* Random bfloat16 numbers everywhere: products of zeros draw less power and run faster, and memory
 * that is all alike may be compressed. */
static bool fill(struct gpu_meter *m)
{
    uint64_t random = 1;
    size_t available = 0, total = 0;
    if (m->calls.memory_info(&available, &total) != 0) {
        return false;
    }
    m->bytes = available / MEMORY_PART < MOST_BYTES ? available / MEMORY_PART : MOST_BYTES;
    m->bytes -= m->bytes % (2 * PART);
    void *source = memory_normal(&m->memory, ATTN_DTYPE_BF16, (int64_t)PART / 2, 1, &random);
    void *host = command_calloc(1, PART);
    m->buffer = m->bytes > 0 ? memory_take(&m->memory, m->bytes) : NULL;
    bool ok = source != NULL && m->buffer != NULL && device_read(m->device, host, source, PART);
    for (size_t at = 0; ok && at < m->bytes; at += PART) {
        ok = device_write(m->device, m->buffer + at, host, PART);
    }
    free(host);
    return ok;
}

double gpu_meter_run(void *state, const struct meter_kernel *kernel)
{
    struct gpu_meter *m = state;
    const struct gpu_calls *calls = &m->calls;
    double amount = 0;
    float milliseconds = 0;
    bool ok = device_wait(m->device) && calls->event_record(m->begin, NULL) == 0 &&
              m->driver->launch(m, kernel->code, &amount) &&
              calls->event_record(m->end, NULL) == 0 && calls->event_wait(m->end) == 0 &&
              calls->event_time(&milliseconds, m->begin, m->end) == 0;
    return ok && milliseconds > 0 ? 1e3 * amount / milliseconds : 0;
}

void gpu_meter_destroy(void *state)
{
    struct gpu_meter *m = state;
    if (m->begin != NULL) {
        m->calls.event_destroy(m->begin);
    }
    if (m->end != NULL) {
        m->calls.event_destroy(m->end);
    }
    if (m->module != NULL) {
        m->calls.module_unload(m->module);
    }
    m->driver->close(m);
    memory_finish(&m->memory);
    free(m);
}

attn_status gpu_meter_create(const struct gpu_driver *driver, void **state,
                             struct meter_kernel *kernels, int32_t *num_kernels,
                             const struct device *device, int32_t num_units,
                             struct attn_error *error)
{
    const struct meter_kernel all[GPU_KERNELS] = {
        {"eight words a thread", CEILING_READ, KERNEL_READ},
        {"four words a thread", CEILING_COPY, KERNEL_COPY},
        {"fma in registers", CEILING_F32, KERNEL_FMA},
        {driver->matrix, CEILING_BF16, KERNEL_MATRIX}};
    struct gpu_meter *m = *state = command_calloc(1, driver->size);
    m->driver = driver;
    m->device = device;
    m->num_units = num_units > 0 ? num_units : 1;
    memory_init(&m->memory, device);
    if (!find_calls(m) || !driver->open(m) || !find_kernels(m) || !fill(m)) {
        gpu_meter_destroy(m);
        return command_error(error, ATTN_ERROR_DEVICE, "",
                             "the ceilings' kernels cannot be loaded, or there is no free memory");
    }
    *num_kernels = 0;
    for (int32_t i = 0; i < GPU_KERNELS; i++) {
        if (m->functions[i] != NULL) {
            kernels[(*num_kernels)++] = all[i];
        }
    }
    return ATTN_OK;
}
