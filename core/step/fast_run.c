/* SPDX-License-Identifier: Apache-2.0 */
/* The hot path of run(): one attend of a plain run, with or without a write. plan_batch chooses,
 * and whatever else a run can be goes the general way. */
#include <string.h>

#include "step/plan_state.h"
#include "util/error.h"

/* q, k, v and out stand side by side in both structs: two vector moves. A plain run has neither
 * extensions nor an lse, and launch_run leaves none behind. */
static inline void set_io(struct attn_attend_args *args, const struct attn_step_io *io)
{
    const size_t bytes = 4 * sizeof args->q;
    ATTN_STATIC_ASSERT(offsetof(struct attn_attend_args, out) -
                               offsetof(struct attn_attend_args, q) ==
                           offsetof(struct attn_step_io, out) - offsetof(struct attn_step_io, q),
                       "q, k, v, out in one order");
    args->stream = io->stream;
    memcpy(&args->q, &io->q, bytes);
}

/* Flags that change a plain run, extensions and the lse, and keys that no slot takes, in one test.
 */
static inline bool is_special(const struct attn_step_io *io, uint32_t flags, uintptr_t no_slots)
{
    return ((uintptr_t)io->next | (uintptr_t)io->lse | (io->flags & flags) |
            ((uintptr_t)io->k & no_slots)) != 0;
}

/* One attend over a cache that has its keys: what most runs of an engine with its own write are.
 * Whatever is not plain goes the general way, which also finds the words for a refusal. */
static attn_status run_attend(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                              struct attn_error *error)
{
    const struct attn_tensor *q = io->q, *out = io->out;
    int64_t rows = plan->num_tokens;
    if (is_special(io, ~ATTN_RUN_NO_WRITE, step->no_slots) || q == NULL || out == NULL ||
        !tensor_is_rows_here(q, &step->q, rows) || !tensor_is_rows_here(out, &step->out, rows)) {
        return run_general(plan, step, io, error);
    }
    struct launch *launch = step->main[0];
    set_io(&launch->args, io);
    return launch->kernel(&launch->args, error);
}

/* A plain run that brings the step's keys. */
static inline bool is_plain_write(const attn_plan *plan, const struct step *step,
                                  const struct attn_step_io *io)
{
    const struct attn_tensor *q = io->q, *k = io->k, *v = io->v, *out = io->out;
    int64_t rows = plan->num_tokens, slots = plan->given.num_slots;
    return !is_special(io, UINT32_MAX, 0) && q != NULL && k != NULL && v != NULL && out != NULL &&
           tensor_is_rows_here(q, &step->q, rows) && tensor_is_rows_here(k, &step->k, slots) &&
           tensor_is_rows_here(v, &step->v, slots) && tensor_is_rows_here(out, &step->out, rows);
}

/* Likewise with the step's keys written first. */
static attn_status run_write_attend(attn_plan *plan, struct step *step,
                                    const struct attn_step_io *io, struct attn_error *error)
{
    if (!is_plain_write(plan, step, io)) {
        return run_general(plan, step, io, error);
    }
    step->write.stream = io->stream;
    step->write.k = io->k;
    step->write.v = io->v;
    attn_status status = step->write_kv(&step->write, error);
    if (status != ATTN_OK) {
        return status;
    }
    struct launch *launch = step->main[0];
    set_io(&launch->args, io);
    return launch->kernel(&launch->args, error);
}

/* Likewise, with the keys written by the attend. */
static attn_status run_fused(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                             struct attn_error *error)
{
    if (!is_plain_write(plan, step, io)) {
        return run_general(plan, step, io, error);
    }
    struct launch *launch = step->main[0];
    launch->args.flags = 0;
    set_io(&launch->args, io);
    return launch->kernel(&launch->args, error);
}

void step_choose_entry(attn_plan *plan, struct step *step)
{
    const struct attn_model_options *hooks = &plan->model->options;
    bool one_call = step->program == run_attends && step->main[0] != NULL && step->main[1] == NULL;
    bool writes = step->writes && plan->given.num_slots > 0;
    /* keys come with the first step only */
    bool cross = step->layer->desc->kind == ATTN_LAYER_CROSS;
    bool decodes =
        step->main[0] == &step->launches[ATTN_PHASE_DECODE][PART_MAIN] && step->main[1] == NULL;
    step->fuses = step->fused_write || (step->fused_decode && decodes);
    for (int32_t i = 0; i < 2 && step->main[i] != NULL; i++) { /* what the vendors' plans see */
        step->main[i]->args.flags = step->fuses && writes ? 0 : ATTN_RUN_NO_WRITE;
    }
    step->no_slots = step->writes && !writes && plan->given.num_actual_tokens > 0 ? UINTPTR_MAX : 0;
    step->enter = run_general;
    bool plain_out = step->layer->desc->output_form == ATTN_OUTPUT_PLAIN;
    if (!one_call || step->bring_keys != NULL || !step->plain_checks || !plain_out ||
        step->keys_are_inputs || cross || plan->validate || hooks->before_layer != NULL ||
        hooks->after_layer != NULL) {
        return;
    }
    if (!writes) {
        step->enter = run_attend;
    } else if (step->fuses) {
        step->enter = run_fused;
    } else if (step->write_kv != NULL) {
        step->write.slot_mapping = plan->given.slot_mapping;
        step->write.num_slots = plan->given.num_slots;
        step->enter = run_write_attend;
    }
}
