/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"
#include "support/client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICE_ALIGNMENT 256

const struct device device_host = {.device = {ATTN_DEVICE_CPU, 0}};

attn_status device_init(struct device *device, const struct attn_api *api, attn_runtime *runtime,
                        struct attn_device which, struct attn_error *error)
{
    *device = (struct device){.device = which, .api = api};
    return api->device->open(runtime, which, &device->opened, error);
}

void device_finish(struct device *device)
{
    if (device->opened != NULL) {
        device->api->device->close(device->opened);
    }
    device->opened = NULL;
}

static int32_t kind_of(bool host)
{
    return host ? ATTN_MEMORY_HOST : ATTN_MEMORY_DEVICE;
}

attn_status device_take(const struct device *device, bool host, size_t bytes, void **memory,
                        struct attn_error *error)
{
    if (device->opened != NULL) {
        return device->api->device->allocate(device->opened, kind_of(host), bytes, memory, error);
    }
    *memory = aligned_alloc(DEVICE_ALIGNMENT,
                            (bytes + DEVICE_ALIGNMENT) / DEVICE_ALIGNMENT * DEVICE_ALIGNMENT);
    return *memory != NULL ? ATTN_OK : ATTN_ERROR_OUT_OF_MEMORY;
}

void device_give(const struct device *device, bool host, void *memory)
{
    if (device->opened != NULL) {
        device->api->device->free(device->opened, kind_of(host), memory);
    } else {
        free(memory);
    }
}

static attn_status wait(const struct device *device, struct attn_error *error)
{
    return device->opened != NULL ? device->api->device->synchronize(device->opened, NULL, error)
                                  : ATTN_OK;
}

/* Copies after everything on the device; done on return. */
static attn_status copy(const struct device *device, void *destination, const void *source,
                        size_t bytes, int32_t kind, struct attn_error *error)
{
    if (device->opened == NULL) {
        memcpy(destination, source, bytes);
        return ATTN_OK;
    }
    attn_status status = wait(device, error);
    if (status == ATTN_OK) {
        status =
            client_copy(device->api, device->opened, destination, source, bytes, kind, NULL, error);
    }
    return status ? status : wait(device, error);
}

attn_status device_copy_in(const struct device *device, void *destination, const void *source,
                           size_t bytes, struct attn_error *error)
{
    return copy(device, destination, source, bytes, ATTN_COPY_HOST_TO_DEVICE, error);
}

attn_status device_copy_out(const struct device *device, void *destination, const void *source,
                            size_t bytes, struct attn_error *error)
{
    return copy(device, destination, source, bytes, ATTN_COPY_DEVICE_TO_HOST, error);
}

attn_status device_set(const struct device *device, void *destination, int32_t value, size_t bytes,
                       struct attn_error *error)
{
    if (device->opened == NULL) {
        memset(destination, value, bytes);
        return ATTN_OK;
    }
    attn_status status =
        client_fill(device->api, device->opened, destination, value, bytes, NULL, error);
    return status ? status : wait(device, error);
}

void *device_alloc(const struct device *device, size_t bytes)
{
    void *memory = NULL;
    return device_take(device, false, bytes, &memory, NULL) == ATTN_OK ? memory : NULL;
}

void device_free(const struct device *device, void *memory)
{
    device_give(device, false, memory);
}

bool device_write(const struct device *device, void *destination, const void *source, size_t bytes)
{
    return device_copy_in(device, destination, source, bytes, NULL) == ATTN_OK;
}

bool device_read(const struct device *device, void *destination, const void *source, size_t bytes)
{
    return device_copy_out(device, destination, source, bytes, NULL) == ATTN_OK;
}

bool device_wait(const struct device *device)
{
    return wait(device, NULL) == ATTN_OK;
}

void *device_stream_create(const struct device *device)
{
    void *stream = NULL;
    return device->opened != NULL &&
                   device->api->device->create_stream(device->opened, &stream, NULL) == ATTN_OK
               ? stream
               : NULL;
}

void device_stream_destroy(const struct device *device, void *stream)
{
    if (stream != NULL) {
        device->api->device->destroy_stream(device->opened, stream);
    }
}

bool device_capture_begin(const struct device *device, void *stream)
{
    return device->opened != NULL &&
           device->api->device->begin_capture(device->opened, stream, NULL) == ATTN_OK;
}

void *device_capture_end(const struct device *device, void *stream)
{
    void *graph = NULL;
    device->api->device->end_capture(device->opened, stream, &graph, NULL);
    return graph;
}

bool device_graph_launch(const struct device *device, void *graph, void *stream)
{
    return device->api->device->launch_graph(device->opened, graph, stream, NULL) == ATTN_OK;
}

void device_graph_finish(const struct device *device, void *graph)
{
    if (graph != NULL) {
        device->api->device->destroy_graph(device->opened, graph);
    }
}

const char *device_name(struct attn_device device, char *text)
{
    static const struct {
        int32_t type;
        const char *name;
    } names[] = {{ATTN_DEVICE_CPU, "cpu"},
                 {ATTN_DEVICE_CUDA, "cuda"},
                 {ATTN_DEVICE_ROCM, "rocm"},
                 {ATTN_DEVICE_EXTENSION, "extension"},
                 {ATTN_DEVICE_ONEAPI, "oneapi"}};
    snprintf(text, DEVICE_NAME_SIZE, "type %d:%d", device.type, device.id);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (names[i].type == device.type) {
            snprintf(text, DEVICE_NAME_SIZE, "%s:%d", names[i].name, device.id);
        }
    }
    return text;
}

bool device_describe(const struct attn_api *api, const attn_runtime *runtime,
                     struct attn_device device, struct attn_device_info *info)
{
    bool found = false;
    for (int32_t i = 0; i < api->device_count(runtime) && !found; i++) {
        *info = (struct attn_device_info){.struct_size = sizeof *info};
        found = api->device_info(runtime, i, info) == ATTN_OK &&
                memcmp(&info->device, &device, sizeof device) == 0;
    }
    return found;
}
