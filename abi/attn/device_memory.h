/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments of the vendor's optional slots for memory, streams and captured graphs of a device. The
 * core hands them on to engines that have none of their own, see device_services.h. None of them is
 * called in a step.
 *
 * What one instance gives serves every instance of the plugin on that device in this process. None
 * of these calls changes the caller's current device or context. */
#ifndef ATTN_DEVICE_MEMORY_H
#define ATTN_DEVICE_MEMORY_H

#include "attend.h"

enum attn_memory_kind {
    ATTN_MEMORY_DEVICE = 1, /* kernels read and write it; the host may be unable to */
    ATTN_MEMORY_HOST = 2    /* the host's, page-locked: copies to and from it do not wait */
};

/* Arguments of allocate_memory, free_memory and memory_device. */
struct attn_memory_args {
    size_t struct_size;
    const struct attn_ext *next;
    attn_instance *instance;
    void *memory; /* free_memory: what was allocated, or NULL; memory_device: any address */
    size_t bytes; /* allocate_memory: above 0 */
    int32_t kind; /* enum attn_memory_kind; free_memory: as allocated */
    int32_t reserved;
};

/* Arguments of the slots for streams and graphs. */
struct attn_stream_args {
    size_t struct_size;
    const struct attn_ext *next;
    attn_instance *instance;
    void *stream; /* synchronize: NULL waits for everything on the device */
    void *graph;  /* launch_graph, destroy_graph: from end_capture */
};

/* Arguments of the slots for events. */
struct attn_event_args {
    size_t struct_size;
    const struct attn_ext *next;
    attn_instance *instance;
    void *stream; /* record_event */
    void *event;  /* NULL: create_event */
    void *since;  /* elapsed */
};

ATTN_STATIC_ASSERT(sizeof(struct attn_memory_args) == 48, "attn_memory_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_stream_args) == 40, "attn_stream_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_event_args) == 48, "attn_event_args of ABI 0.3");

#endif
