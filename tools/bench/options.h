/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_OPTIONS_H
#define BENCH_OPTIONS_H

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

/* -1: go on; else the exit status. */
int options_parse(int argc, char **argv, struct options *options);
void options_finish(struct options *options);

#endif
