/* SPDX-License-Identifier: Apache-2.0 */
/* Steps with a common prefix whose outputs are codes: the core attends the prefix apart where that
 * pays, here always, and quantizes what it merges. */
#include <stdio.h>

#include "cases/output.h"
#include "common/names.h"
#include "core/core_cases.h"
#include "core/engine.h"

struct output_case {
    struct core *core;
    const struct case_space *space;
    struct attend_case attend_case;
};

static enum trial_result run_output(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct output_case *c = variant;
    return engine_trial(trial, c->core, c->space, &c->attend_case, seed, ENGINE_PLAIN);
}

void engine_output_cases(const struct core_sink *sink)
{
    const uint64_t kernels = ATTN_KERNEL_QUANTIZE | ATTN_KERNEL_MERGE_STATES;
    const struct attn_backend_caps *caps = sink->cases->caps;
    if ((caps->kernels & kernels) != kernels || !(caps->features & ATTN_FEATURE_LSE)) {
        return; /* the core composes neither of the backend */
    }
    for (int32_t i = 0; i < CASE_OUTPUTS; i++) {
        struct output_case c = {sink->core, sink->space, {{0}}};
        const int32_t dtype = ATTN_DTYPE_F16 + i % 3;
        char name[160], form[64];
        if (!case_of_cache(sink->space, dtype, dtype, &c.attend_case) ||
            !case_set(sink->space, &c.attend_case, FACTOR_SHAPE, SHAPE_SHARED) ||
            case_value(sink->space, &c.attend_case, FACTOR_CAUSAL).a != CAUSAL_YES ||
            case_refused(sink->space, &c.attend_case)) {
            continue;
        }
        c.attend_case.output = case_outputs[i];
        case_output_name(&case_outputs[i], form, sizeof form);
        snprintf(name, sizeof name, "engine_output.%s.shared.%s", form, dtype_name(dtype));
        sink->cases->try(sink->cases->user, name, run_output, &c);
    }
}
