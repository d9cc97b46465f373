/* SPDX-License-Identifier: Apache-2.0 */
/* Calls straight through the vendor's table, next to the core, of which the ABI says what the
 * vendor answers: structs of a newer core and unknown extensions (version.h), no memory (host.h,
 * plugin.h, kernels.h), versions that it does not speak. What the core holds for every backend is
 * no case here. */
#ifndef CHECK_CALLS_H
#define CHECK_CALLS_H

#include "kernels/kernels.h"

/* Which struct of a call is a newer core's. */
enum call_struct {
    CALL_ARGS,
    CALL_LAYER,
    CALL_PARAMS,
    CALL_BATCH,
    CALL_K_CACHE, /* or the cache of a gather */
    CALL_V_CACHE,
    CALL_LIMITS
};

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
    const struct call_place *places;
    int32_t num_places;
};

/* A struct that the calls of a target bring. */
struct call_place {
    const char *name;
    int32_t which; /* enum call_struct */
    size_t offset; /* of the pointer to it in the arguments; CALL_SELF, CALL_NOT_THERE */
    size_t size;
};
#define CALL_SELF SIZE_MAX
#define CALL_NOT_THERE (SIZE_MAX - 1)

/* Of every kernel that capabilities can declare; call_shim.c. */
enum { NUM_CALLS = 15 };
extern const struct call_target call_targets[NUM_CALLS];

/* call_shim.c. A case run with one struct of the target's calls changed. */
enum trial_result call_run(struct trial *trial, const struct call_target *target,
                           const struct call_place *place, int32_t change, kernel_run *run,
                           const void *variant, uint64_t seed);
/* The struct at `from`, changed, in `to` of `size` + CALL_TAIL bytes. */
#define CALL_TAIL 32
void call_change_struct(int32_t change, const void *from, size_t size, void *to,
                        struct attn_ext *ext);

/* call_cases.c */
void call_cases(const struct kernel_sink *sink);
/* call_plugin.c: entry, create and prepare, destroy and release. */
void call_plugin_cases(const struct kernel_sink *sink);

#endif
