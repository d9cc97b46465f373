/* SPDX-License-Identifier: Apache-2.0 */
/* What a step may not do: take memory, from whatever allocator of the process, or a lock. The
 * functions of the C library are counted on their way; what a library does by system calls of its
 * own is not seen. Under a sanitizer, which stands in those places, only the host's allocator is.
 */
#ifndef CHECK_WATCH_H
#define CHECK_WATCH_H

#include "harness/backend.h"

struct watch {
    long allocations; /* the process's */
    long locks;       /* the calling thread's: pools wake theirs by locks */
};

/* device_type is the tested backend's. Where a driver has threads of its own nothing is judged, the
 * reference neither: whose allocation it was cannot be known. */
void watch_init(int32_t device_type);
/* The host's allocator was asked by the function that holds `caller`. */
void watch_allocation(size_t size, const void *caller);
void watch_begin(struct watch *watch);
/* True if there were allocations since that are judged; which ones is said in `why`. */
bool watch_allocated(const struct watch *watch, const struct backend *backend, char *why,
                     size_t size);
/* `status`, or why a call of a CPU backend that went well broke a step's promise. A backend's
 * first call is not judged. */
attn_status watch_end(const struct watch *watch, struct backend *backend, attn_status status,
                      struct attn_error *error);

#endif
