/* SPDX-License-Identifier: Apache-2.0 */
/* A device's memory, streams and graphs for an engine that has none of its own: a backend's on that
 * device, or the host's. Errors of a plugin are relayed as clean text. */
#include "bind/bound.h"
#include "util/device.h"

static attn_status need_slot(const attn_open_device *opened, bool there, const char *slot,
                             struct attn_error *error)
{
    ERROR_IF(!there, ATTN_ERROR_UNSUPPORTED, slot, "%s has no %s",
             opened->instance.caps == NULL ? "a CPU" : opened->instance.caps->name, slot);
    return ATTN_OK;
}

/* The first backend on the device that hands out memory; else why none does. */
static attn_status find_instance(attn_open_device *opened, const struct attn_device_info *info,
                                 struct attn_error *error)
{
    static const struct attn_model_options none = {.struct_size = sizeof none};
    attn_runtime *runtime = opened->runtime;
    char name[DEVICE_TEXT_SIZE];
    attn_status status =
        error_set(error, ATTN_ERROR_UNSUPPORTED, "device", "no backend on %s hands out its memory",
                  device_text(opened->device, name));
    for (int32_t b = 0; b < runtime->num_backends; b++) {
        if (!backend_is_on(&runtime->backends[b], info)) {
            continue;
        }
        attn_status made = instance_create(runtime, b, &none, &opened->instance, error);
        if (made != ATTN_OK) {
            status = made;
            continue;
        }
        if (opened->instance.kernels.allocate_memory != NULL) {
            return ATTN_OK;
        }
        status = error_set(error, ATTN_ERROR_UNSUPPORTED, "allocate_memory",
                           "%s hands out no memory of %s", opened->instance.caps->name,
                           device_text(opened->device, name));
        instance_finish(&opened->instance);
    }
    return status;
}

attn_status device_open(attn_runtime *runtime, struct attn_device device, attn_open_device **out,
                        struct attn_error *error)
{
    BAD_IF(out == NULL || runtime == NULL, "opened", "runtime %p, opened %p; neither may be NULL",
           (void *)runtime, (void *)out);
    *out = NULL;
    device = device.type == 0 ? (struct attn_device){ATTN_DEVICE_CPU, 0} : device;
    bool host = device_same(device, (struct attn_device){ATTN_DEVICE_CPU, 0});
    const struct attn_device_info *info = NULL;
    TRY_IF(!host, runtime_find_device(runtime, device, NULL, &info, error));
    attn_open_device *opened = runtime_alloc(runtime, sizeof *opened);
    NO_MEMORY_IF(opened == NULL, "opened", "the device");
    opened->runtime = runtime;
    opened->device = device;
    opened->instance.kernels = host_kernels;
    attn_status status = host ? ATTN_OK : find_instance(opened, info, error);
    if (status != ATTN_OK) {
        device_close(opened);
        return status;
    }
    *out = opened;
    return ATTN_OK;
}

void device_close(attn_open_device *opened)
{
    if (opened != NULL) {
        attn_runtime *runtime = opened->runtime;
        instance_finish(&opened->instance);
        runtime_free(runtime, opened, sizeof *opened);
    }
}

attn_status device_allocate(attn_open_device *opened, int32_t kind, size_t bytes, void **memory,
                            struct attn_error *error)
{
    struct attn_error why = ATTN_ERROR_INIT;
    BAD_IF(memory == NULL || opened == NULL ||
               (kind != ATTN_MEMORY_DEVICE && kind != ATTN_MEMORY_HOST),
           "kind", "device %p, kind %d, memory %p; a device, kind 1 or 2 and a pointer",
           (void *)opened, kind, (void *)memory);
    *memory = NULL;
    const struct attn_memory_args args =
        ABI_ARGS(.instance = opened->instance.handle, .kind = kind, .bytes = bytes > 0 ? bytes : 1);
    attn_status status = opened->instance.kernels.allocate_memory(&args, memory, &why);
    ERROR_IF(status == ATTN_OK && *memory == NULL, ATTN_ERROR_PLUGIN, "allocate_memory",
             "%s answered ATTN_OK without memory", opened->instance.caps->name);
    *memory = status == ATTN_OK ? *memory : NULL;
    return error_relay(error, status, &why);
}

void device_free(attn_open_device *opened, int32_t kind, void *memory)
{
    if (opened == NULL || memory == NULL) {
        return;
    }
    const struct attn_memory_args args =
        ABI_ARGS(.instance = opened->instance.handle, .kind = kind, .memory = memory);
    opened->instance.kernels.free_memory(&args, NULL);
}

attn_status device_copy(attn_open_device *opened, const struct attn_copy_args *copy,
                        struct attn_error *error)
{
    struct attn_error why = ATTN_ERROR_INIT;
    struct attn_copy_args args;
    TRY(struct_read(&args, ABI_COPY_ARGS, copy, error));
    BAD_IF(opened == NULL || args.instance != NULL, "instance",
           "device %p, instance %p; a device, and NULL from an engine", (void *)opened,
           (void *)args.instance);
    if (args.bytes == 0) {
        return ATTN_OK;
    }
    BAD_IF(args.destination == NULL || args.source == NULL, "source",
           "%zu bytes from %p to %p; neither may be NULL", args.bytes, args.source,
           args.destination);
    TRY(need_slot(opened, opened->instance.kernels.copy != NULL, "copy", error));
    args.instance = opened->instance.handle;
    return error_relay(error, opened->instance.kernels.copy(&args, &why), &why);
}

attn_status device_fill(attn_open_device *opened, const struct attn_fill_args *fill,
                        struct attn_error *error)
{
    struct attn_error why = ATTN_ERROR_INIT;
    struct attn_fill_args args;
    TRY(struct_read(&args, ABI_FILL_ARGS, fill, error));
    BAD_IF(opened == NULL || args.rows < 0 ||
               (args.destination == NULL && args.rows > 0 && args.row_bytes > 0),
           "destination",
           "device %p, %lld rows of %zu bytes at %p; a device, rows from 0 and an address",
           (void *)opened, (long long)args.rows, args.row_bytes, args.destination);
    BAD_IF(args.instance != NULL, "instance", "instance %p; NULL from an engine",
           (void *)args.instance);
    BAD_IF(args.rows > 1 && args.stride < args.row_bytes, "stride",
           "rows of %zu bytes, %zu bytes apart; they would overlap", args.row_bytes, args.stride);
    if (args.rows == 0 || args.row_bytes == 0) {
        return ATTN_OK;
    }
    TRY(need_slot(opened, opened->instance.kernels.fill != NULL, "fill", error));
    args.instance = opened->instance.handle;
    return error_relay(error, opened->instance.kernels.fill(&args, &why), &why);
}

attn_status device_of_address(attn_open_device *opened, const void *address,
                              struct attn_device *device, struct attn_error *error)
{
    struct attn_error why = ATTN_ERROR_INIT;
    BAD_IF(opened == NULL || device == NULL, "device", "device %p, answer %p; neither may be NULL",
           (void *)opened, (void *)device);
    *device = (struct attn_device){ATTN_DEVICE_CPU, 0};
    TRY(need_slot(opened, opened->instance.kernels.memory_device != NULL, "memory_device", error));
    const struct attn_memory_args args =
        ABI_ARGS(.instance = opened->instance.handle, .memory = (void *)(uintptr_t)address);
    return error_relay(error, opened->instance.kernels.memory_device(&args, device, &why), &why);
}

typedef attn_status stream_call(const struct attn_stream_args *args, struct attn_error *error);
typedef attn_status stream_maker(const struct attn_stream_args *args, void **made,
                                 struct attn_error *error);

/* A slot of streams and graphs, which are there in groups. */
static attn_status call_stream(attn_open_device *opened, size_t slot, const char *name,
                               void *stream, void *graph, struct attn_error *error)
{
    struct attn_error why = ATTN_ERROR_INIT;
    stream_call *call;
    BAD_IF(opened == NULL, "opened", "the device is NULL");
    memcpy(&call, (const char *)&opened->instance.kernels + slot, sizeof call);
    TRY(need_slot(opened, call != NULL, name, error));
    const struct attn_stream_args args = KERNEL_ARGS(&opened->instance, stream, .graph = graph);
    return error_relay(error, call(&args, &why), &why);
}
#define STREAM_SLOT(name) offsetof(struct attn_kernels, name), #name

/* One that makes a handle, which `what` names. */
static attn_status call_maker(attn_open_device *opened, size_t slot, const char *name,
                              const char *what, void *stream, void **made, struct attn_error *error)
{
    struct attn_error why = ATTN_ERROR_INIT;
    stream_maker *make;
    BAD_IF(opened == NULL || made == NULL, what, "device %p, %s %p; neither may be NULL",
           (void *)opened, what, (void *)made);
    *made = NULL;
    memcpy(&make, (const char *)&opened->instance.kernels + slot, sizeof make);
    TRY(need_slot(opened, make != NULL, name, error));
    const struct attn_stream_args args = KERNEL_ARGS(&opened->instance, stream, .graph = NULL);
    attn_status status = make(&args, made, &why);
    *made = status == ATTN_OK ? *made : NULL;
    return error_relay(error, status, &why);
}

attn_status device_create_stream(attn_open_device *opened, void **stream, struct attn_error *error)
{
    return call_maker(opened, STREAM_SLOT(create_stream), "stream", NULL, stream, error);
}

void device_destroy_stream(attn_open_device *opened, void *stream)
{
    if (stream != NULL) {
        call_stream(opened, STREAM_SLOT(destroy_stream), stream, NULL, NULL);
    }
}

attn_status device_synchronize(attn_open_device *opened, void *stream, struct attn_error *error)
{
    return call_stream(opened, STREAM_SLOT(synchronize), stream, NULL, error);
}

attn_status device_begin_capture(attn_open_device *opened, void *stream, struct attn_error *error)
{
    return call_stream(opened, STREAM_SLOT(begin_capture), stream, NULL, error);
}

attn_status device_end_capture(attn_open_device *opened, void *stream, void **graph,
                               struct attn_error *error)
{
    return call_maker(opened, STREAM_SLOT(end_capture), "graph", stream, graph, error);
}

attn_status device_launch_graph(attn_open_device *opened, void *graph, void *stream,
                                struct attn_error *error)
{
    return call_stream(opened, STREAM_SLOT(launch_graph), stream, graph, error);
}

void device_destroy_graph(attn_open_device *opened, void *graph)
{
    if (graph != NULL) {
        call_stream(opened, STREAM_SLOT(destroy_graph), NULL, graph, NULL);
    }
}
