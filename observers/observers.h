/* SPDX-License-Identifier: Apache-2.0 */
/* What a runtime's observers have of it: ATTN_TRACE writes spans of time, ATTN_RECORD one run of
 * one layer, ATTN_LOG=info who serves what. */
#ifndef OBSERVERS_OBSERVERS_H
#define OBSERVERS_OBSERVERS_H

#include "runtime/runtime.h"
#include "trace_file.h"

/* ATTN_RECORD: which run is kept as a capsule, and where. */
struct recording {
    char *folder; /* NULL: none */
    int32_t layer, step;
    bool real;           /* with the tensors' contents */
    atomic_int num_runs; /* that attended, of that layer */
};

/* attn_runtime.observers, which is NULL where neither is set. */
struct observers {
    struct trace_file trace;
    struct recording record;
};

/* The trace of a runtime, which may be NULL; NULL: it has no trace. */
static inline struct trace_file *trace_of(const attn_runtime *runtime)
{
    const bool traces = runtime != NULL && runtime->observers != NULL;
    return traces && runtime->observers->trace.path != NULL ? &runtime->observers->trace : NULL;
}

/* selection_log.c */
void selection_log(const attn_assignment *assignment);

/* trace.c */
/* Around the life of a model whose runtime has a trace. */
void trace_model_begin(attn_model *model);
void trace_model_end(attn_model *model);
/* Around the making of a plan, `captured` as a part of a graph. 0: it is not traced, nor are its
 * runs. */
int64_t trace_plan_begin(attn_plan *plan, const char *name, bool captured);
/* `brought`: by a batch of its own, whose host copies are still there. */
void trace_plan_end(attn_plan *plan, const char *name, int64_t begin, bool brought,
                    attn_status status);

/* capsule.c: runs of the layer that ATTN_RECORD names are entered there. */
void capsule_watch(attn_plan *plan);

#endif
