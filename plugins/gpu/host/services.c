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

attn_status gpu_free_memory(const struct attn_memory_args *args, struct attn_error *error)
{
    return args->memory == NULL
               ? ATTN_OK
               : device_status(gpu_device_free(&args->instance->device, args->kind, args->memory),
                               "free_memory", error);
}

attn_status gpu_memory_device(const struct attn_memory_args *args, struct attn_device *device,
                              struct attn_error *error)
{
    return device_status(gpu_device_of_memory(&args->instance->device, args->memory, device),
                         "memory_device", error);
}

attn_status gpu_create_stream(const struct attn_stream_args *args, void **stream,
                              struct attn_error *error)
{
    *stream = NULL;
    return device_status(gpu_device_stream_create(&args->instance->device, stream), "create_stream",
                         error);
}

attn_status gpu_destroy_stream(const struct attn_stream_args *args, struct attn_error *error)
{
    return args->stream == NULL
               ? ATTN_OK
               : device_status(gpu_device_stream_destroy(&args->instance->device, args->stream),
                               "destroy_stream", error);
}

attn_status gpu_synchronize(const struct attn_stream_args *args, struct attn_error *error)
{
    return device_status(gpu_device_synchronize(&args->instance->device, args->stream),
                         "synchronize", error);
}

attn_status gpu_begin_capture(const struct attn_stream_args *args, struct attn_error *error)
{
    return device_status(gpu_device_capture_begin(&args->instance->device, args->stream),
                         "begin_capture", error);
}

attn_status gpu_end_capture(const struct attn_stream_args *args, void **graph,
                            struct attn_error *error)
{
    *graph = NULL;
    return device_status(gpu_device_capture_end(&args->instance->device, args->stream, graph),
                         "end_capture", error);
}

attn_status gpu_launch_graph(const struct attn_stream_args *args, struct attn_error *error)
{
    return device_status(
        gpu_device_graph_launch(&args->instance->device, args->graph, args->stream), "launch_graph",
        error);
}

attn_status gpu_destroy_graph(const struct attn_stream_args *args, struct attn_error *error)
{
    return args->graph == NULL
               ? ATTN_OK
               : device_status(gpu_device_graph_destroy(&args->instance->device, args->graph),
                               "destroy_graph", error);
}

attn_status gpu_create_event(const struct attn_event_args *args, void **event,
                             struct attn_error *error)
{
    *event = NULL;
    return device_status(gpu_device_event_create(&args->instance->device, event), "create_event",
                         error);
}

attn_status gpu_record_event(const struct attn_event_args *args, struct attn_error *error)
{
    return device_status(
        gpu_device_event_record(&args->instance->device, args->event, args->stream), "record_event",
        error);
}

attn_status gpu_elapsed(const struct attn_event_args *args, int64_t *nanoseconds,
                        struct attn_error *error)
{
    return device_status(
        gpu_device_event_elapsed(&args->instance->device, args->since, args->event, nanoseconds),
        "elapsed", error);
}

attn_status gpu_destroy_event(const struct attn_event_args *args, struct attn_error *error)
{
    return device_status(gpu_device_event_destroy(&args->instance->device, args->event),
                         "destroy_event", error);
}
