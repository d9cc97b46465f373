/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/planned.h"

#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "harness/image.h"
#include "harness/trial.h"
#include "harness/watch.h"
#include "support/client.h"

#define PLAN_GUARD 256

uint8_t *guarded_alloc(const struct device *device, size_t bytes, const char *name,
                       attn_status *status)
{
    uint8_t *memory = device_alloc(device, bytes + PLAN_GUARD);
    buffers_add(memory, NULL, bytes, name);
    if (memory == NULL) {
        *status = ATTN_ERROR_OUT_OF_MEMORY;
    } else if (device_set(device, memory, IMAGE_POISON, bytes + PLAN_GUARD, NULL) != ATTN_OK) {
        *status = ATTN_ERROR_DEVICE;
    }
    return memory;
}

attn_status plan_memory_init(struct plan_memory *memory, const struct device *device,
                             const struct attn_schedule_size *size)
{
    attn_status status = ATTN_OK;
    memory->size = *size;
    memory->host = aligned_alloc(256, (size->host_bytes + 2 * PLAN_GUARD) / 256 * 256);
    memory->device = guarded_alloc(device, size->device_bytes, "workspace", &status);
    memory->scratch = guarded_alloc(device, size->scratch_bytes, "scratch", &status);
    if (memory->host == NULL) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    buffers_add(memory->host, NULL, size->host_bytes, "schedule_host");
    memset(memory->host, IMAGE_POISON, size->host_bytes + PLAN_GUARD);
    return status;
}

void plan_memory_finish(struct plan_memory *memory, const struct device *device)
{
    buffers_forget(memory->host);
    guarded_free(device, memory->device);
    guarded_free(device, memory->scratch);
    free(memory->host);
}

void plan_memory_bind(const struct plan_memory *memory, struct attn_attend_args *args)
{
    args->schedule_host = memory->host;
    args->schedule_host_bytes = memory->size.host_bytes;
    args->workspace = memory->device;
    args->workspace_bytes = memory->size.device_bytes;
    args->scratch = memory->scratch;
    args->scratch_bytes = memory->size.scratch_bytes;
}

void guarded_free(const struct device *device, uint8_t *memory)
{
    buffers_forget(memory);
    device_free(device, memory);
}

bool guarded_whole(const struct device *device, const uint8_t *memory, size_t bytes)
{
    uint8_t guard[PLAN_GUARD];
    bool whole = device_read(device, guard, memory + bytes, PLAN_GUARD);
    for (size_t i = 0; i < PLAN_GUARD && whole; i++) {
        whole = guard[i] == IMAGE_POISON;
    }
    return whole;
}

bool plan_memory_guards_whole(const struct plan_memory *memory, const struct device *device)
{
    if (memory->host == NULL) {
        return true; /* it has no plan of its own */
    }
    return guarded_whole(&device_host, memory->host, memory->size.host_bytes) &&
           guarded_whole(device, memory->device, memory->size.device_bytes) &&
           guarded_whole(device, memory->scratch, memory->size.scratch_bytes);
}

/* plan and the kernel: what the core calls in a step. */
static attn_status run_step(struct backend *backend, const struct device *device,
                            const struct attn_attend_args *args, planned_kernel *kernel,
                            struct attn_error *error)
{
    struct watch watch;
    attn_status status = ATTN_OK;
    watch_begin(&watch);
    stack_paint();
    if (backend->kernels.schedule != NULL) {
        struct attn_attend_args plan = *args;
        plan.q = plan.k = plan.v = plan.out = plan.lse = NULL;
        plan.next = NULL;
        status = backend->kernels.schedule(&plan, ATTN_PLAN_EAGER, error);
        if (device->device.type == ATTN_DEVICE_CPU && args->scratch_bytes > 0) {
            memset(args->scratch, IMAGE_POISON, args->scratch_bytes); /* as another plan may */
        }
    }
    if (status == ATTN_OK) {
        stopwatch_begin(backend, args->stream);
        status = kernel(args, error);
        stopwatch_end(backend, args->stream);
    }
    size_t used = stack_used();
    if (device->device.type == ATTN_DEVICE_CPU) {
        backend_stack_used(&backend->services, used);
    }
    return watch_end(&watch, backend, status, error);
}

attn_status planned_call(struct backend *backend, const struct device *device,
                         const struct attn_limits *limits, struct attn_attend_args *args,
                         planned_kernel *kernel, struct attn_error *error)
{
    const struct attn_kernels *k = &backend->kernels;
    struct attn_schedule_size size = {.struct_size = sizeof size};
    struct plan_memory memory = {0};
    args->instance = backend->instance;
    attn_status status = planned_prepare(k, args, limits, &size, error);
    status = status == ATTN_OK ? plan_memory_init(&memory, device, &size) : status;
    plan_memory_bind(&memory, args);
    args->limits = limits;
    status = status == ATTN_OK ? run_step(backend, device, args, kernel, error) : status;
    device_wait(device);
    if (status == ATTN_OK && !plan_memory_guards_whole(&memory, device)) {
        status = command_error(error, ATTN_ERROR_PLUGIN, "schedule_size",
                               "the plan's memory was written past what was asked for");
    }
    planned_release(k, args);
    plan_memory_finish(&memory, device);
    return status;
}
