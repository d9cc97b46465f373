/* SPDX-License-Identifier: Apache-2.0 */
/* Calls through the vendor's table without the core, whose answers the ABI prescribes: structs of a
 * newer core and unknown extensions (version.h), no memory (host.h, plugin.h, kernels.h), unknown
 * versions. What the core enforces for every backend has no case here. */
#ifndef CHECK_CALLS_H
#define CHECK_CALLS_H

#include "cases/cases.h"
#include "kernels/kernels.h"

/* Which struct of a call is a newer core's. */
enum call_struct {
    CALL_ARGS,
    CALL_LAYER,
    CALL_PARAMS,
    CALL_CACHE, /* a gather's */
    CALL_BATCH,
    CALL_K_CACHE,
    CALL_V_CACHE,
    CALL_LIMITS,
    CALL_STRUCT_COUNT
};
extern const char *const call_struct_names[CALL_STRUCT_COUNT];

/* What the vendor is handed, and has to serve all the same. */
enum call_change {
    CALL_GROWN,    /* an unknown tail that is not zero */
    CALL_EXTENDED, /* an unknown extension in front of the chain */
    CALL_CHANGE_COUNT
};

extern const char *const call_change_names[CALL_CHANGE_COUNT];

/* A kernel whose calls can be changed. */
struct call_target {
    const char *name; /* as in attn_kernels */
    uint64_t kernel;  /* ATTN_KERNEL_* */
    size_t slot;      /* offset in attn_kernels */
    const struct call_args *args;
};

/* A target for every kernel that capabilities can declare; call_shim.c. */
enum { NUM_CALLS = 15 };
extern const struct call_target call_targets[NUM_CALLS];
/* Whether calls of the target, or of its plan, bring such a struct. */
bool call_brings(const struct call_target *target, int32_t which);

/* call_shim.c. A case run with one struct of the target's calls changed. */
enum trial_result call_run(struct trial *trial, const struct call_target *target, int32_t which,
                           int32_t change, kernel_run *run, const void *variant, uint64_t seed);
/* The struct at `from`, changed, in `to` of `size` + CALL_TAIL bytes. */
#define CALL_TAIL 32
void call_change_struct(int32_t change, const void *from, size_t size, void *to,
                        struct attn_ext *ext);

/* call_cases.c */
void call_cases(const struct kernel_sink *sink);
/* call_plugin.c: entry, create and prepare, destroy and release. */
void call_plugin_cases(const struct kernel_sink *sink);

#endif
