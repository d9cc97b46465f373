/* SPDX-License-Identifier: Apache-2.0 */
/* Every kernel's first case with each struct of its calls changed in every way. */
#include <string.h>

#include "kernels/kernels.h"
#include "cases/attend.h"

const struct kernel_file kernel_files[NUM_KERNEL_FILES] = {
    {ATTN_KERNEL_MERGE_STATES, merge_cases},
    {ATTN_KERNEL_QUANTIZE | ATTN_KERNEL_AMAX, quantize_cases},
    {ATTN_KERNEL_BATCHED_GEMM, gemm_cases},
    {ATTN_KERNEL_COPY_BLOCKS | ATTN_KERNEL_COPY | ATTN_KERNEL_FILL, copy_cases},
    {ATTN_KERNEL_MAKE_BLOCK_TABLE, table_cases},
    {ATTN_KERNEL_ROPE_WRITE_KV, rope_cases},
    {ATTN_KERNEL_GATHER_KV, gather_cases},
    {0, fp8_inputs_cases}, /* attends, whose calls attend's own cases have */
    {ATTN_KERNEL_ATTEND_MLA | ATTN_KERNEL_ATTEND_MLA_SPARSE, mla_cases},
    {ATTN_KERNEL_RECURRENT, gdn_cases},
    {0, index_cases},
    {0, index_write_cases},
};

struct call_case {
    const struct call_target *target;
    int32_t which; /* enum call_struct */
    kernel_run *run;
    const void *variant;
};

static enum trial_result run_changes(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct call_case *c = variant;
    enum trial_result result = TRIAL_PASSED;
    if (c->which == CALL_LIMITS && trial->tested->kernels.schedule_size == NULL) {
        return trial_say(trial, TRIAL_SKIPPED,
                         "the backend has no schedule_size, which takes them");
    }
    for (int32_t change = 0; change < CALL_CHANGE_COUNT && result == TRIAL_PASSED; change++) {
        result = call_run(trial, c->target, c->which, change, c->run, c->variant, seed);
    }
    return result;
}

static void try_case(const struct kernel_sink *sink, const struct call_case *c)
{
    kernel_try(sink, run_changes, c, "calls.%s.%s", c->target->name, call_struct_names[c->which]);
}

/* The first case of a kernel, out of a file's. */
struct first {
    const struct kernel_sink *sink;
    struct call_case of;
    bool found;
};

static void try_first(void *user, const char *name, kernel_run *run, const void *variant)
{
    struct first *first = user;
    size_t length = strlen(first->of.target->name);
    if (!first->found && strncmp(name, first->of.target->name, length) == 0 &&
        (name[length] == '.' || name[length] == '\0')) {
        first->found = true;
        first->of.run = run;
        first->of.variant = variant;
        try_case(first->sink, &first->of);
    }
}

static void try_kernel(const struct kernel_sink *sink, const struct call_target *target,
                       int32_t which)
{
    for (int32_t i = 0; i < NUM_KERNEL_FILES; i++) {
        if (kernel_files[i].kernels & target->kernel) {
            struct first first = {sink, {target, which, NULL, NULL}, false};
            const struct kernel_sink its = {&first, sink->caps, sink->space, try_first};
            kernel_files[i].cases(&its);
        }
    }
}

static enum trial_result run_attend(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct attend_variant *v = variant;
    return trial_attend(trial, v->space, &v->attend_case, seed, TRIAL_PLAIN);
}

/* attend and write_kv come in one case. */
static void try_attend(const struct kernel_sink *sink, const struct call_target *target,
                       int32_t which)
{
    struct attend_variant v = {.space = sink->space};
    const struct call_case c = {target, which, run_attend, &v};
    if (case_of_any_cache(sink->space, &v.attend_case)) {
        try_case(sink, &c);
    }
}

void call_cases(const struct kernel_sink *sink)
{
    for (int32_t i = 0; i < NUM_CALLS; i++) {
        const struct call_target *target = &call_targets[i];
        bool attends = target->kernel & (ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV);
        for (int32_t which = 0; which < CALL_STRUCT_COUNT; which++) {
            if (sink->caps->kernels & target->kernel && call_brings(target, which)) {
                (attends ? try_attend : try_kernel)(sink, target, which);
            }
        }
    }
    call_plugin_cases(sink);
}
