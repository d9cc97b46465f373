/* SPDX-License-Identifier: Apache-2.0 */
/* Slots of struct attn_api for engines without device memory of their own; meanings stand in
 * attn/api.h. */
#ifndef CORE_BIND_DEVICE_H
#define CORE_BIND_DEVICE_H

#include "bind/bound.h"

struct attn_open_device {
    attn_runtime *runtime;
    struct attn_device device;
    struct instance instance; /* the host's: host_kernels, without a handle */
};

attn_status device_open(attn_runtime *runtime, struct attn_device device, attn_open_device **opened,
                        struct attn_error *error);
void device_close(attn_open_device *opened);
attn_status device_allocate(attn_open_device *opened, int32_t kind, size_t bytes, void **memory,
                            struct attn_error *error);
void device_free(attn_open_device *opened, int32_t kind, void *memory);
attn_status device_copy(attn_open_device *opened, const struct attn_copy_args *copy,
                        struct attn_error *error);
attn_status device_fill(attn_open_device *opened, const struct attn_fill_args *fill,
                        struct attn_error *error);
attn_status device_of_address(attn_open_device *opened, const void *address,
                              struct attn_device *device, struct attn_error *error);
attn_status device_stream_create(attn_open_device *opened, void **stream, struct attn_error *error);
void device_stream_destroy(attn_open_device *opened, void *stream);
attn_status device_synchronize(attn_open_device *opened, void *stream, struct attn_error *error);
attn_status device_capture_begin(attn_open_device *opened, void *stream, struct attn_error *error);
attn_status device_capture_end(attn_open_device *opened, void *stream, void **graph,
                               struct attn_error *error);
attn_status device_graph_launch(attn_open_device *opened, void *graph, void *stream,
                                struct attn_error *error);
void device_graph_destroy(attn_open_device *opened, void *graph);

#endif
