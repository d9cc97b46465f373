/* SPDX-License-Identifier: Apache-2.0 */
/* Counts what a step may not do, and the stack that it takes: allocations by any allocator of the
 * process, and locks. It replaces functions of the C library, so it does not see a library's own
 * system calls. A sanitizer replaces them, too: then only the host's allocator is counted. */
#ifndef CHECK_WATCH_H
#define CHECK_WATCH_H

#include "harness/backend.h"

struct watch {
    long allocations; /* the process's */
    long locks;       /* the calling thread's: pools wake theirs by locks */
};

/* device_type is the tested backend's. If its driver has threads of its own, no allocation is
 * judged, not even the reference's: nothing tells whose it was. */
void watch_init(int32_t device_type);
/* The host's allocator was asked by the function that holds `caller`. */
void watch_allocation(size_t size, const void *caller);
void watch_begin(struct watch *watch);
/* True if there were allocations since that count as failures; `why` lists them. */
bool watch_allocated(const struct watch *watch, const struct backend *backend, char *why,
                     size_t size);
/* `status`, or why a call of a CPU backend that went well broke a step's promise. A backend's
 * first call is not judged. */
attn_status watch_end(const struct watch *watch, struct backend *backend, attn_status status,
                      struct attn_error *error);

/* How much of its thread's stack a call takes: the memory below the caller is filled with a
 * pattern, and what of it has changed afterwards was used. Both are called from one function.
 * Nothing is measured where the build's instrumentation makes frames larger than they are. */
void stack_paint(void);
/* Bytes of the deepest use since; at most 256 KiB are seen. */
size_t stack_used(void);

#endif
