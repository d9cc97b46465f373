/* SPDX-License-Identifier: Apache-2.0 */
/* A device in a context, with its kernels, which instances share: what `context` of a gpu_device
 * points to. */
#ifndef LEVEL_ZERO_LOADED_H
#define LEVEL_ZERO_LOADED_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "attend_list.h"
#include "gpu/params.h"
#include "loader.h"

#define MAX_MODULES 24
#define MAX_STREAMS 64
#define MAX_EVENTS 64

#define LEVEL_ZERO_NUMBER(kind, KIND, size, rows) LEVEL_ZERO_ATTEND_##kind##_##size##_##rows,
/* Numbers of the attends on matrix units, after those of gpu/kernels. */
enum level_zero_kernel {
    LEVEL_ZERO_FIRST_ATTEND = GPU_KERNEL_COUNT - 1,
    LEVEL_ZERO_ATTENDS(LEVEL_ZERO_NUMBER) LEVEL_ZERO_KERNEL_COUNT
};
#undef LEVEL_ZERO_NUMBER

/* Commands that a capture keeps. The stream signals `begin` for them and waits for `end`. */
struct graph {
    ze_command_list_handle_t list;
    int32_t begin, end; /* numbers of events */
};

/* A stream that records: what is meant for it goes to the graph's list. */
struct capture {
    _Atomic(void *) stream; /* NULL: free */
    struct graph *graph;
};

struct loaded {
    const struct ze_functions *ze;
    ze_device_handle_t device;
    ze_context_handle_t context;
    int32_t users;               /* instances; 0: free, or kept for the process's next instance */
    bool has_double, has_matrix; /* as declared of it */
    bool is_native;              /* the engine's context, in which nothing stays */
    ze_module_handle_t modules[MAX_MODULES];
    ze_kernel_handle_t kernels[LEVEL_ZERO_KERNEL_COUNT]; /* attends: NULL without matrix units */
    /* a kernel's arguments and its launch belong together: set while a thread has it */
    atomic_flag in_use[LEVEL_ZERO_KERNEL_COUNT];
    uint32_t compute_ordinal;
    ze_command_list_handle_t default_stream;
    ze_command_queue_handle_t queue; /* runs graphs */
    ze_event_pool_handle_t pool;
    pthread_mutex_t lock; /* guards what follows; no step takes it */
    uint64_t taken_events;
    ze_event_handle_t events[MAX_EVENTS];
    ze_command_list_handle_t streams[MAX_STREAMS];
    struct capture captures[MAX_STREAMS];
    atomic_int num_captures;
    uint64_t memory_bytes;
    double tick_ns;          /* a tick of the clock */
    uint32_t tick_bits;      /* those of the clock until it wraps */
    atomic_size_t allocated; /* bytes of the device */
    char cause[256];         /* why it could not be loaded */
};

static inline struct loaded *loaded_of(const struct gpu_device *device)
{
    return device->context;
}

extern const struct gpu_matrix_kernels level_zero_matrix;
/* The number of an attend on matrix units, by the dtype of the cache, the padded head size and the
 * rows of an item; -1: no attend. */
int32_t level_zero_attend(int32_t dtype, int32_t size, int32_t rows);
/* Launches a kernel by its number, with gpu_params or what gpu/kernels/list.h names. */
const char *level_zero_launch(const struct gpu_device *device, int32_t kernel, int64_t groups,
                              const void *params, void *stream);

/* Where the commands of a stream go: to itself, to the default one's list for NULL, or to the list
 * that a capture fills. */
ze_command_list_handle_t target_of(struct loaded *d, void *stream);
/* Commands of a list may overlap: each waits here for those before it. */
ze_result_t order(const struct loaded *d, ze_command_list_handle_t list);
/* Makes and ends the streams, events and queue of d. */
ze_result_t streams_open(struct loaded *d);
void streams_close(struct loaded *d);

#endif
