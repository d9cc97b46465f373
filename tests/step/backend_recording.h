/* SPDX-License-Identifier: Apache-2.0 */
#ifndef STEP_BACKEND_RECORDING_H
#define STEP_BACKEND_RECORDING_H

#include <attn/version.h>
#include <dlfcn.h>

/* Calls of kernels; `fused`: attends that had to write, `coded`: whose output was codes. */
struct recorded {
    int32_t attends, coded, fused, fused_prefills, writes, rope_writes, prepares;
    int32_t schedules, table_updates;
    int32_t block_size;    /* block size of the last attend's cache and of its layer */
    int32_t failing;       /* n > 0: the n-th attend from now writes out and fails */
    int32_t other_streams; /* calls on another stream than the one below */
    void *stream;
    int32_t of_layer, of_run, of_batch, planned,
        planned_batch;  /* values of recorded_extension; 0: none came */
    int32_t unread;     /* attends whose batch has arrays that their layer does not say */
    int32_t strange;    /* extensions of other ids, on layers, batches and runs */
    int32_t states;     /* states of plans that are there */
    int32_t no_state;   /* n > 0: the n-th from now is not made */
    char folder[64];    /* folder of the last instance */
    uint32_t extension; /* whose values count; 0: RECORDED_EXTENSION */
    int32_t prepared;   /* the value on the layer that prepare got */
};

#if defined(RECORDING_FILE)
/* For tests: the counts of the file that the core has opened. */
static inline struct recorded *recorded_by_core(void)
{
    return dlsym(dlopen(RECORDING_FILE, RTLD_NOW | RTLD_LOCAL), "recorded");
}
#endif

/* An extension that it declares: of a layer, and of runs. */
#define RECORDED_EXTENSION (ATTN_EXT_VENDOR + 0x5b1)
#define RECORDED_DRAFTS 16 /* ids from ATTN_EXT_DRAFT_KERNELS on that it declares as well */
struct recorded_extension {
    struct attn_ext ext;
    int32_t value;
    int32_t reserved;
};

#endif
