/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/planned.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/places.h"
#include "harness/stack.h"
#include "harness/watch.h"

#define PLAN_GUARD 256

attn_status plan_memory_init(struct plan_memory *memory, const struct device *device,
                             const struct attn_schedule_size *size)
{
    size_t device_bytes = size->device_bytes + PLAN_GUARD;
    memory->host_bytes = size->host_bytes;
    memory->device_bytes = size->device_bytes;
    memory->host = aligned_alloc(256, (size->host_bytes + 2 * PLAN_GUARD) / 256 * 256);
    memory->device = device_alloc(device, device_bytes);
    uint8_t *poison = malloc(device_bytes);
    if (memory->host == NULL || memory->device == NULL || poison == NULL) {
        free(poison);
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    place_buffer(memory->host, size->host_bytes, "schedule_host");
    place_buffer(memory->device, size->device_bytes, "workspace");
    memset(memory->host, IMAGE_POISON, size->host_bytes + PLAN_GUARD);
    memset(poison, IMAGE_POISON, device_bytes);
    bool written = device_write(device, memory->device, poison, device_bytes);
    free(poison);
    return written ? ATTN_OK : ATTN_ERROR_DEVICE;
}

void plan_memory_finish(struct plan_memory *memory, const struct device *device)
{
    place_forget(memory->host);
    place_forget(memory->device);
    device_free(device, memory->device);
    free(memory->host);
}

bool plan_memory_guards_whole(const struct plan_memory *memory, const struct device *device)
{
    uint8_t guard[PLAN_GUARD];
    if (memory->host == NULL) {
        return true; /* it has no plan of its own */
    }
    if (!device_read(device, guard, memory->device + memory->device_bytes, PLAN_GUARD)) {
        return false;
    }
    for (size_t i = 0; i < PLAN_GUARD; i++) {
        if (guard[i] != IMAGE_POISON || memory->host[memory->host_bytes + i] != IMAGE_POISON) {
            return false;
        }
    }
    return true;
}

static attn_status broken(struct attn_error *error, const char *field, const char *message)
{
    error->status = ATTN_ERROR_PLUGIN;
    snprintf(error->field, sizeof error->field, "%s", field);
    snprintf(error->message, sizeof error->message, "%s", message);
    return ATTN_ERROR_PLUGIN;
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
    }
    status = status == ATTN_OK ? kernel(args, error) : status;
    size_t used = stack_used();
    if (device->device.type == ATTN_DEVICE_CPU) {
        backend_stack_used(&backend->services, used);
    }
    return watch_end(&watch, backend, status, error);
}

attn_status planned_prepare(const struct attn_kernels *kernels, struct attn_attend_args *call,
                            const struct attn_limits *limits, struct attn_schedule_size *size,
                            struct attn_error *error)
{
    const struct attn_prepare_args prepare_args = {.struct_size = sizeof prepare_args,
                                                   .instance = call->instance,
                                                   .layer = call->layer,
                                                   .params = call->params,
                                                   .k_cache = call->k_cache,
                                                   .v_cache = call->v_cache,
                                                   .phase = call->phase};
    struct attn_schedule_size_args sized = {
        .struct_size = sizeof sized, .instance = call->instance, .limits = limits};
    attn_status status = ATTN_OK;
    if (kernels->prepare != NULL) {
        status = kernels->prepare(&prepare_args, &call->prepared, error);
    }
    sized.prepared = call->prepared;
    if (status == ATTN_OK && kernels->schedule_size != NULL) {
        status = kernels->schedule_size(&sized, size, error);
    }
    return status;
}

attn_status planned_call(struct backend *backend, const struct device *device,
                         const struct attn_limits *limits, struct attn_attend_args *args,
                         planned_kernel *kernel, struct attn_error *error)
{
    const struct attn_kernels *k = &backend->kernels;
    struct attn_schedule_size size = {sizeof size, NULL, 0, 0};
    struct plan_memory memory = {0, 0, NULL, NULL};
    args->instance = backend->instance;
    attn_status status = planned_prepare(k, args, limits, &size, error);
    status = status == ATTN_OK ? plan_memory_init(&memory, device, &size) : status;
    args->schedule_host = memory.host;
    args->workspace = memory.device;
    args->limits = limits;
    args->schedule_host_bytes = size.host_bytes;
    args->workspace_bytes = size.device_bytes;
    status = status == ATTN_OK ? run_step(backend, device, args, kernel, error) : status;
    device_wait(device);
    if (status == ATTN_OK && !plan_memory_guards_whole(&memory, device)) {
        status =
            broken(error, "schedule_size", "the plan's memory was written past what was asked for");
    }
    if (args->prepared != NULL && k->release != NULL) {
        k->release(backend->instance, args->prepared);
    }
    plan_memory_finish(&memory, device);
    return status;
}
