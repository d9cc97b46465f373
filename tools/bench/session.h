/* SPDX-License-Identifier: Apache-2.0 */
/* What all measurements of one process share: the options, the runtime, the device, its stream, and
 * the ceilings. */
#ifndef BENCH_SESSION_H
#define BENCH_SESSION_H

#include <attn/api.h>

#include "ceilings.h"
#include "shapes.h"

#define MAX_BACKENDS 8

struct options {
    const char *backends[MAX_BACKENDS]; /* the first NULL: what the selection takes */
    int32_t num_backends;
    struct shape_list shapes;
    int32_t dtype;        /* enum attn_dtype_id */
    int32_t kv_dtype;     /* enum attn_kv_dtype */
    int32_t threads;      /* 0: as the core does */
    double budget;        /* seconds of samples for a shape and backend */
    bool cpu_time;        /* the threads' time, not the wall's */
    const char *plot;     /* NULL: none */
    const char *against;  /* a build folder or a plugin; NULL: none */
    const char *baseline; /* what an earlier run wrote with --csv; NULL: none */
    const char *peer;     /* a file with the functions of peer.h; NULL: none */
    bool json, csv, tune;
    const char *model;  /* whose layers are tuned; NULL: those of the shapes */
    double seconds;     /* that --tune --model takes in all */
    int32_t max_spread; /* percent; --tune --model keeps no time above it */
    const char *child;  /* what a process started by `dispatch` calls; NULL: a user's process */
};

/* options.c: -1: go on; else the exit status. The shapes are due to shapes_finish. */
int options_parse(int argc, char **argv, struct options *options);

struct session {
    const struct options *options;
    const struct attn_api *api;
    attn_runtime *runtime;
    struct device device;
    const char *device_name; /* the runtime's */
    bool against;            /* device and stream are another session's */
    void *stream;
    int32_t num_threads; /* a CPU's; 0 on other devices */
    int32_t num_units;   /* multiprocessors of another device */
    struct ceilings *ceilings;
};

/* `cached` false: plugins are probed here and now, by no other process and from no file: under
 * valgrind this processor is another. Due to session_finish even after a failure. */
attn_status session_init(struct session *session, const struct options *options, bool cached,
                         struct attn_error *error);
/* The same device for what --against names: the core and plugins of a build folder, or the core of
 * `first` and one plugin. Finish it before `first`. */
attn_status session_init_against(struct session *session, const struct session *first,
                                 struct attn_error *error);
void session_finish(struct session *session);
/* Measured at the first call, which takes some seconds. */
attn_status session_ceilings(struct session *session, struct attn_error *error);

#endif
