/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a device. CPU memory is malloc's; CUDA's comes from the driver, opened at run time. */
#ifndef TOOLS_DEVICE_H
#define TOOLS_DEVICE_H

#include <attn/status.h>
#include <attn/tensor.h>
#include <stdbool.h>

struct device {
    struct attn_device device;
    void *driver;  /* dlopen handle, or NULL */
    void *context; /* the primary context, retained */
    int (*alloc)(uint64_t *address, size_t bytes);
    int (*release)(uint64_t address);
    int (*to_device)(uint64_t destination, const void *source, size_t bytes);
    int (*to_host)(void *destination, uint64_t source, size_t bytes);
    int (*synchronize)(void);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*context_release)(int device);
    int (*set_current)(void *context);
    int (*capture_begin)(void *stream, int mode);
    int (*capture_end)(void *stream, void **graph);
    int (*graph_instantiate)(void **exec, void *graph, unsigned long long flags);
    int (*graph_launch)(void *exec, void *stream);
    int (*graph_destroy)(void *graph);
    int (*exec_destroy)(void *exec);
};

/* What was captured from a stream. */
struct device_graph {
    void *graph;
    void *exec;
};

/* Makes the device usable in another thread than the one that initialised it. */
bool device_enter(const struct device *device);
attn_status device_init(struct device *device, struct attn_device which, struct attn_error *error);
void device_finish(struct device *device);
void *device_alloc(const struct device *device, size_t bytes); /* NULL: no memory */
void device_free(const struct device *device, void *memory);
bool device_write(const struct device *device, void *destination, const void *source, size_t bytes);
bool device_wait(const struct device *device); /* for everything that runs on it */
/* Waits for everything on the device first. */
bool device_read(const struct device *device, void *destination, const void *source, size_t bytes);
void *device_stream_create(const struct device *device); /* NULL on a CPU */
void device_stream_destroy(const struct device *device, void *stream);
/* False where the device has no graphs: on a CPU. */
bool device_capture_begin(const struct device *device, void *stream);
bool device_capture_end(const struct device *device, void *stream, struct device_graph *graph);
bool device_graph_launch(const struct device *device, const struct device_graph *graph,
                         void *stream);
void device_graph_finish(const struct device *device, struct device_graph *graph);

#endif
