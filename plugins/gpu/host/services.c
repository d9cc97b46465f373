/* SPDX-License-Identifier: Apache-2.0 */
/* The slots for engines without device memory of their own: memory, streams, graphs; events of
 * traces. */
#include "gpu/host/instance.h"

attn_status gpu_allocate_memory(const struct attn_memory_args *args, void **memory,
                                struct attn_error *error)
{
    size_t room[2] = {0, 0};
    *memory = NULL;
    if (args->bytes == 0 || args->kind < ATTN_MEMORY_DEVICE || args->kind > ATTN_MEMORY_HOST) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "kind",
                            "%zu bytes of kind %d; 1 or more of kind 1 or 2", args->bytes,
                            args->kind);
    }
    const char *cause =
        gpu_device_allocate(&args->instance->device, args->kind, args->bytes, memory, room);
    if (cause != NULL && room[1] > 0) {
        return plugin_error(error, ATTN_ERROR_OUT_OF_MEMORY, "bytes",
                            "%zu bytes of the memory of device %d; %zu of its %zu are free",
                            args->bytes, args->instance->device.id, room[0], room[1]);
    }
    return device_status(cause, "allocate_memory", error);
}

/* A slot is a call of the device: plain, one that makes something, one that destroys what may be
 * NULL. */
#define DEVICE &args->instance->device
#define SLOT(name, type, call)                                                                     \
    attn_status gpu_##name(const struct type *args, struct attn_error *error)                      \
    {                                                                                              \
        return device_status(call, #name, error);                                                  \
    }
#define MAKES(name, type, call)                                                                    \
    attn_status gpu_##name(const struct type *args, void **made, struct attn_error *error)         \
    {                                                                                              \
        *made = NULL;                                                                              \
        return device_status(call, #name, error);                                                  \
    }
#define DESTROYS(name, type, what, call) SLOT(name, type, args->what != NULL ? call : NULL)

DESTROYS(free_memory, attn_memory_args, memory, gpu_device_free(DEVICE, args->kind, args->memory))
MAKES(create_stream, attn_stream_args, gpu_device_stream_create(DEVICE, made))
DESTROYS(destroy_stream, attn_stream_args, stream, gpu_device_stream_destroy(DEVICE, args->stream))
SLOT(synchronize, attn_stream_args, gpu_device_synchronize(DEVICE, args->stream))
SLOT(begin_capture, attn_stream_args, gpu_device_capture_begin(DEVICE, args->stream))
MAKES(end_capture, attn_stream_args, gpu_device_capture_end(DEVICE, args->stream, made))
SLOT(launch_graph, attn_stream_args, gpu_device_graph_launch(DEVICE, args->graph, args->stream))
DESTROYS(destroy_graph, attn_stream_args, graph, gpu_device_graph_destroy(DEVICE, args->graph))
MAKES(create_event, attn_event_args, gpu_device_event_create(DEVICE, made))
SLOT(record_event, attn_event_args, gpu_device_event_record(DEVICE, args->event, args->stream))
SLOT(destroy_event, attn_event_args, gpu_device_event_destroy(DEVICE, args->event))

attn_status gpu_memory_device(const struct attn_memory_args *args, struct attn_device *device,
                              struct attn_error *error)
{
    return device_status(gpu_device_of_memory(DEVICE, args->memory, device), "memory_device",
                         error);
}

attn_status gpu_elapsed(const struct attn_event_args *args, int64_t *nanoseconds,
                        struct attn_error *error)
{
    return device_status(gpu_device_event_elapsed(DEVICE, args->since, args->event, nanoseconds),
                         "elapsed", error);
}
