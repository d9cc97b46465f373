/* SPDX-License-Identifier: Apache-2.0 */
/* Services that an engine may lend (to the core) and that the core lends (to each plugin instance).
 */
#ifndef ATTN_HOST_H
#define ATTN_HOST_H

#include "status.h"

enum attn_log_level {
    ATTN_LOG_ERROR = 0,
    ATTN_LOG_WARN = 1,
    ATTN_LOG_INFO = 2,
    ATTN_LOG_DEBUG = 3,
    ATTN_LOG_TRACE = 4
};

/* A kernel on a CPU, the bodies of its loops included, takes at most so much of the stack of the
 * thread that runs it: engines have small ones. */
#define ATTN_STEP_STACK_BYTES 65536

/* One slice of a parallel loop: the items begin .. end-1. `worker` is in 0 .. num_threads-1 and no
 * two slices of one loop that run at the same time carry the same one, so it may index scratch
 * memory of that loop's call. Loops of several callers run at once, each with the same numbers. */
typedef void attn_parallel_body(void *argument, int64_t begin, int64_t end, int32_t worker);

/* Passed per instance and never kept in a plugin's global, since two cores may share one loaded
 * plugin. The table and `user` outlive every handle created with them.
 *
 * An engine may leave any slot NULL: the core then logs to stderr at the level of ATTN_LOG,
 * allocates with aligned_alloc, and runs loops on a pool of ATTN_NUM_THREADS threads, started at
 * first use and again after a fork. Towards a plugin the core fills every slot. All slots may be
 * called from any thread. */
struct attn_host {
    size_t struct_size;
    const struct attn_ext *next;
    void *user;
    /* One line without a newline, without control characters; borrowed until return. What it calls
     * of this library may be refused with ATTN_ERROR_ORDER: a plugin is loading. */
    void (*log)(void *user, int32_t level, const char *who, const char *message);
    /* `alignment` is a power of two, at least 8. NULL when there is no memory. Never called in a
     * step. */
    void *(*allocate)(void *user, size_t size, size_t alignment);
    void (*release)(void *user, void *memory, size_t size); /* accepts NULL */
    /* Runs body over 0 .. count-1 in slices of at least `grain` items and returns when all are
     * done. A body must not fail, block on another slice or call parallel_for. With one thread it
     * runs in the caller's. */
    void (*parallel_for)(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                         void *argument);
    /* upper bound of `worker` + 1; 0 from an engine: as many as the pool would have */
    int32_t num_threads;
    uint32_t abi_version; /* towards a plugin: what the core was built for; 0 from an engine */
};

ATTN_STATIC_ASSERT(sizeof(struct attn_host) == 64, "attn_host of ABI 0.3");

#endif
