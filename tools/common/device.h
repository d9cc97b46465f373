/* SPDX-License-Identifier: Apache-2.0 */
/* Memory, streams and graphs of the device that a tool works on, through the core's table. */
#ifndef TOOLS_DEVICE_H
#define TOOLS_DEVICE_H

#include <attn/api.h>
#include <stdbool.h>

/* `opened` NULL: the host's memory, for which {.device = {ATTN_DEVICE_CPU, 0}} is enough. */
struct device {
    struct attn_device device;
    const struct attn_api *api;
    attn_open_device *opened;
};

extern const struct device device_host; /* the host's memory */
attn_status device_init(struct device *device, const struct attn_api *api, attn_runtime *runtime,
                        struct attn_device which, struct attn_error *error);
void device_finish(struct device *device);
/* Page-locked, `host` true: what copies need not wait for. *memory NULL on failure. */
attn_status device_take(const struct device *device, bool host, size_t bytes, void **memory,
                        struct attn_error *error);
void device_give(const struct device *device, bool host, void *memory);
/* Copies and fills that are done on return. */
attn_status device_copy_in(const struct device *device, void *destination, const void *source,
                           size_t bytes, struct attn_error *error);
/* Waits for everything on the device first. */
attn_status device_copy_out(const struct device *device, void *destination, const void *source,
                            size_t bytes, struct attn_error *error);
attn_status device_set(const struct device *device, void *destination, int32_t value, size_t bytes,
                       struct attn_error *error);

/* The same without words. */
void *device_alloc(const struct device *device, size_t bytes); /* NULL: no memory */
void device_free(const struct device *device, void *memory);
bool device_write(const struct device *device, void *destination, const void *source, size_t bytes);
bool device_read(const struct device *device, void *destination, const void *source, size_t bytes);
bool device_wait(const struct device *device);           /* for everything that runs on it */
void *device_stream_create(const struct device *device); /* NULL on a CPU */
void device_stream_destroy(const struct device *device, void *stream);
/* False where the device has no graphs: on a CPU. */
bool device_capture_begin(const struct device *device, void *stream);
/* NULL: the capture failed. */
void *device_capture_end(const struct device *device, void *stream);
bool device_graph_launch(const struct device *device, void *graph, void *stream);
void device_graph_finish(const struct device *device, void *graph); /* accepts NULL */

/* What the runtime knows of a device; false: nothing. */
bool device_describe(const struct attn_api *api, const attn_runtime *runtime,
                     struct attn_device device, struct attn_device_info *info);
/* "cuda:0" into text of DEVICE_NAME_SIZE bytes, which it returns. */
#define DEVICE_NAME_SIZE 40
const char *device_name(struct attn_device device, char *text);

#endif
