/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICE_ALIGNMENT 256

static attn_status fail(struct attn_error *error, attn_status status, const char *what)
{
    if (error != NULL) {
        error->status = status;
        snprintf(error->field, sizeof error->field, "device");
        snprintf(error->message, sizeof error->message, "%s", what);
    }
    return status;
}

/* dlsym gives a data pointer; POSIX says that it may be read as a function's. */
static bool find(void *library, const char *symbol, void *function)
{
    void *address = dlsym(library, symbol);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

static attn_status init_cuda(struct device *device, struct attn_error *error)
{
    int (*init)(unsigned);
    int (*get)(int *, int);
    int (*retain)(void **, int);
    int ordinal;
    device->driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (device->driver == NULL) {
        return fail(error, ATTN_ERROR_ABSENT, "libcuda.so.1 is not there");
    }
    bool found = find(device->driver, "cuInit", &init) &&
                 find(device->driver, "cuDeviceGet", &get) &&
                 find(device->driver, "cuDevicePrimaryCtxRetain", &retain) &&
                 find(device->driver, "cuDevicePrimaryCtxRelease_v2", &device->context_release) &&
                 find(device->driver, "cuCtxSetCurrent", &device->set_current) &&
                 find(device->driver, "cuMemAlloc_v2", &device->alloc) &&
                 find(device->driver, "cuMemFree_v2", &device->release) &&
                 find(device->driver, "cuMemcpyHtoD_v2", &device->to_device) &&
                 find(device->driver, "cuMemcpyDtoH_v2", &device->to_host) &&
                 find(device->driver, "cuCtxSynchronize", &device->synchronize) &&
                 find(device->driver, "cuStreamCreate", &device->stream_create) &&
                 find(device->driver, "cuStreamDestroy_v2", &device->stream_destroy) &&
                 find(device->driver, "cuStreamBeginCapture_v2", &device->capture_begin) &&
                 find(device->driver, "cuStreamEndCapture", &device->capture_end) &&
                 find(device->driver, "cuGraphInstantiateWithFlags", &device->graph_instantiate) &&
                 find(device->driver, "cuGraphLaunch", &device->graph_launch) &&
                 find(device->driver, "cuGraphDestroy", &device->graph_destroy) &&
                 find(device->driver, "cuGraphExecDestroy", &device->exec_destroy);
    if (!found) {
        return fail(error, ATTN_ERROR_ABSENT, "libcuda.so.1 lacks a function of the driver API");
    }
    if (init(0) != 0 || get(&ordinal, device->device.id) != 0 ||
        retain(&device->context, ordinal) != 0 || device->set_current(device->context) != 0) {
        return fail(error, ATTN_ERROR_ABSENT, "no CUDA device answers");
    }
    return ATTN_OK;
}

attn_status device_init(struct device *device, struct attn_device which, struct attn_error *error)
{
    memset(device, 0, sizeof *device);
    device->device = which;
    if (which.type == ATTN_DEVICE_CPU) {
        return ATTN_OK;
    }
    if (which.type == ATTN_DEVICE_CUDA) {
        attn_status status = init_cuda(device, error);
        if (status != ATTN_OK) {
            device_finish(device);
        }
        return status;
    }
    return fail(error, ATTN_ERROR_UNSUPPORTED, "memory of this device type cannot be allocated");
}

bool device_enter(const struct device *device)
{
    return device->context == NULL || device->set_current(device->context) == 0;
}

void device_finish(struct device *device)
{
    if (device->context != NULL) {
        device->context_release(device->device.id);
    }
    device->context = NULL; /* the driver itself stays loaded: it does not support dlclose */
}

void *device_alloc(const struct device *device, size_t bytes)
{
    if (device->context == NULL) {
        size_t rounded = (bytes + DEVICE_ALIGNMENT) / DEVICE_ALIGNMENT * DEVICE_ALIGNMENT;
        return aligned_alloc(DEVICE_ALIGNMENT, rounded);
    }
    uint64_t address;
    return device->alloc(&address, bytes ? bytes : 1) == 0 ? (void *)(uintptr_t)address : NULL;
}

void device_free(const struct device *device, void *memory)
{
    if (device->context == NULL) {
        free(memory);
    } else if (memory != NULL) {
        device->release((uint64_t)(uintptr_t)memory);
    }
}

bool device_wait(const struct device *device)
{
    return device->context == NULL || device->synchronize() == 0;
}

bool device_write(const struct device *device, void *destination, const void *source, size_t bytes)
{
    if (device->context == NULL) {
        memcpy(destination, source, bytes);
        return true;
    }
    /* what comes from pageable memory may still be on its way when the copy returns, and streams
     * that do not wait for the default one would not wait for it */
    return device->to_device((uint64_t)(uintptr_t)destination, source, bytes) == 0 &&
           device_wait(device);
}

bool device_read(const struct device *device, void *destination, const void *source, size_t bytes)
{
    if (device->context == NULL) {
        memcpy(destination, source, bytes);
        return true;
    }
    return device_wait(device) &&
           device->to_host(destination, (uint64_t)(uintptr_t)source, bytes) == 0;
}

void *device_stream_create(const struct device *device)
{
    void *stream = NULL;
    if (device->context != NULL && device->stream_create(&stream, 1) != 0) {
        return NULL;
    }
    return stream;
}

void device_stream_destroy(const struct device *device, void *stream)
{
    if (stream != NULL) {
        device->stream_destroy(stream);
    }
}

#define CAPTURE_THREAD_LOCAL 1 /* CU_STREAM_CAPTURE_MODE_THREAD_LOCAL */

bool device_capture_begin(const struct device *device, void *stream)
{
    return device->context != NULL && device->capture_begin(stream, CAPTURE_THREAD_LOCAL) == 0;
}

bool device_capture_end(const struct device *device, void *stream, struct device_graph *graph)
{
    return device->capture_end(stream, &graph->graph) == 0 &&
           device->graph_instantiate(&graph->exec, graph->graph, 0) == 0;
}

bool device_graph_launch(const struct device *device, const struct device_graph *graph,
                         void *stream)
{
    return device->graph_launch(graph->exec, stream) == 0;
}

void device_graph_finish(const struct device *device, struct device_graph *graph)
{
    if (graph->exec != NULL) {
        device->exec_destroy(graph->exec);
    }
    if (graph->graph != NULL) {
        device->graph_destroy(graph->graph);
    }
    *graph = (struct device_graph){NULL, NULL};
}
