/* SPDX-License-Identifier: Apache-2.0 */
/* Memory, streams and captured graphs of a device, for engines that have none of their own (the
 * tools, the examples): the table attn_api.device. What it does on a device is the work of the
 * first backend there that has the slots of device_memory.h; on a CPU it is the core's. None of it
 * is called in a step. */
#ifndef ATTN_DEVICE_SERVICES_H
#define ATTN_DEVICE_SERVICES_H

#include "cache_kernels.h"
#include "device_memory.h"
#include "runtime.h"

struct attn_device_services {
    size_t struct_size;
    const struct attn_ext *next;
    /* Opens a device that device_info lists. ATTN_ERROR_NOT_FOUND: there is no such device;
     * ATTN_ERROR_UNSUPPORTED: no backend on it hands out its memory. The CPU's is the host's, and
     * its stream is NULL. Close it before the runtime is destroyed. */
    attn_status (*open)(attn_runtime *runtime, struct attn_device device, attn_open_device **opened,
                        struct attn_error *error);
    void (*close)(attn_open_device *opened);
    /* `kind` is an enum attn_memory_kind. Aligned to 256 bytes; 0 bytes are taken as 1. */
    attn_status (*allocate)(attn_open_device *opened, int32_t kind, size_t bytes, void **memory,
                            struct attn_error *error);
    void (*free)(attn_open_device *opened, int32_t kind, void *memory);
    /* `instance` is NULL, here and in fill: the device's. The source is read, or the
     * destination written, after what the stream holds already: host memory stays as it is until
     * the stream is done. */
    attn_status (*copy)(attn_open_device *opened, const struct attn_copy_args *copy,
                        struct attn_error *error);
    attn_status (*fill)(attn_open_device *opened, const struct attn_fill_args *fill,
                        struct attn_error *error);
    /* Whose memory lies at an address, see memory_device in kernels.h. */
    attn_status (*of_address)(attn_open_device *opened, const void *address,
                              struct attn_device *device, struct attn_error *error);
    attn_status (*create_stream)(attn_open_device *opened, void **stream, struct attn_error *error);
    void (*destroy_stream)(attn_open_device *opened, void *stream);
    /* NULL: everything on the device. Gives the error that the work has met. */
    attn_status (*synchronize)(attn_open_device *opened, void *stream, struct attn_error *error);
    /* ATTN_ERROR_UNSUPPORTED where the device has no graphs: on a CPU. */
    attn_status (*begin_capture)(attn_open_device *opened, void *stream, struct attn_error *error);
    attn_status (*end_capture)(attn_open_device *opened, void *stream, void **graph,
                               struct attn_error *error);
    attn_status (*launch_graph)(attn_open_device *opened, void *graph, void *stream,
                                struct attn_error *error);
    void (*destroy_graph)(attn_open_device *opened, void *graph);
};

ATTN_STATIC_ASSERT(sizeof(struct attn_device_services) == 128, "attn_device_services of ABI 0.3");

#endif
