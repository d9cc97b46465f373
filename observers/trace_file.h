/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_TRACE: spans of time as a file that Perfetto and Chrome open, and as ranges of the profilers
 * whose libraries the process has. The file is an array of JSON without its end, which both take:
 * each line is one write() to the end of the file, so that threads, runtimes and processes write
 * into one file without a lock, and a killed process leaves whole lines. */
#ifndef OBSERVERS_TRACE_FILE_H
#define OBSERVERS_TRACE_FILE_H

#include <attn/runtime.h>
#include <stdatomic.h>
#include <stdint.h>

#include "util/error.h"

#define TRACE_MARKERS 3

struct trace_file {
    attn_runtime *runtime; /* which logs what goes wrong */
    char *path;            /* NULL: nothing is traced */
    int32_t every;         /* one in so many steps of a plan is traced */
    int descriptor;
    atomic_bool failed; /* a write did; nothing more is written */
    int32_t num_markers;
    struct trace_marker {
        int (*push)(const char *name);
        int (*pop)(void);
    } markers[TRACE_MARKERS]; /* the profilers that this process has */
};

/* Opens trace->path. */
attn_status trace_open(struct trace_file *trace, struct attn_error *error);
void trace_close(struct trace_file *trace);

int64_t trace_clock(void); /* nanoseconds */
/* Opens a range of each profiler and says when; 0: `trace` is NULL. */
int64_t trace_begin(const struct trace_file *trace, const char *name);
/* Closes it and writes the span, unless `begin` is 0. `args` are fields of a JSON object. */
void trace_end(struct trace_file *trace, const char *name, int64_t begin, const char *args, ...)
    CORE_PRINTF(4, 5);
/* A span alone. The track is a thread of this process or, from TRACE_DEVICES on, a device. */
#define TRACE_DEVICES (1 << 24)
void trace_span(struct trace_file *trace, const char *name, int64_t begin, int64_t nanoseconds,
                int32_t track, const char *args);
void trace_name_track(struct trace_file *trace, int32_t track, const char *name);

/* A string as it may stand between quotes in JSON, cut to `size`, with ' in the place of " and \.
 * Returns `text`. */
const char *trace_quote(char *text, size_t size, const char *string);

#endif
