/* SPDX-License-Identifier: Apache-2.0 */
/* The hot path of run(): one attend of a plain run, with or without a write. plan_batch chooses it,
 * and whatever else a run can be goes the general way, which also finds the words for a refusal. */
#include "step/plan_state.h"
#include "util/device.h"
#include "util/error.h"

static inline bool is_rows_here(const attn_plan *plan, const struct attn_tensor *tensor,
                                const struct tensor_form *wanted, int64_t rows)
{
    return tensor != NULL && tensor_is_rows(tensor, wanted, rows) &&
           device_same(tensor->device, plan->model->device);
}

static inline bool is_plain(const attn_plan *plan, const struct step *step,
                            const struct attn_step_io *io)
{
    const int64_t rows = plan->num_tokens, slots = plan->given.num_slots;
    const uint32_t flags = step->plain_writes ? 0 : ATTN_RUN_NO_WRITE;
    if (io->next != NULL || io->lse != NULL || (io->flags & ~flags) != 0 || io->reserved != 0 ||
        step_leaves_keys(step, io) || !is_rows_here(plan, io->q, &step->q, rows) ||
        !is_rows_here(plan, io->out, &step->out, rows)) {
        return false;
    }
    return !step->plain_writes || (is_rows_here(plan, io->k, &step->k, slots) &&
                                   is_rows_here(plan, io->v, &step->v, slots));
}

static attn_status run_plain(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                             struct attn_error *error)
{
    struct launch *launch = step->main[0];
    struct attn_attend_args *args = &launch->args;
    attn_status status = ATTN_OK;
    if (!is_plain(plan, step, io)) {
        return run_general(plan, step, io, error);
    }
    if (step->plain_writes && !step->fuses) {
        step->write.stream = io->stream;
        step->write.k = io->k;
        step->write.v = io->v;
        status = operation("write keys", step->write_kv(&step->write, error), error);
    }
    if (status == ATTN_OK) {
        args->flags = step->plain_writes && step->fuses ? 0 : ATTN_RUN_NO_WRITE;
        args->stream = io->stream;
        args->q = io->q;
        args->k = io->k;
        args->v = io->v;
        args->out = io->out;
        status = operation("attend", launch->kernel(args, error), error);
    }
    return status == ATTN_OK ? status : step_fail(step, status, error);
}

void step_choose_entry(attn_plan *plan, struct step *step)
{
    const struct attn_layer_desc *layer = step->layer->desc;
    bool one_call = step->program == run_attends && step->main[0] != NULL && step->main[1] == NULL;
    bool writes = step->writes && plan->given.num_slots > 0;
    bool decodes =
        step->main[0] == &step->launches[ATTN_PHASE_DECODE][PART_MAIN] && step->main[1] == NULL;
    step->fuses = step->fused_write || (step->fused_decode && decodes);
    for (int32_t i = 0; i < 2 && step->main[i] != NULL; i++) { /* what the vendors' plans see */
        step->main[i]->args.flags = step->fuses && writes ? 0 : ATTN_RUN_NO_WRITE;
    }
    step->no_slots = step->writes && !writes && plan->given.num_actual_tokens > 0;
    step->plain_writes = writes;
    step->write.slot_mapping = plan->given.slot_mapping;
    step->write.num_slots = plan->given.num_slots;
    /* a cross layer's keys come with the first step only */
    bool plain = one_call && step->bring_keys == NULL && step->plain_checks &&
                 layer->output_form == ATTN_OUTPUT_PLAIN && !step->keys_are_inputs &&
                 step->layer->selected->lists == NULL && layer->kind != ATTN_LAYER_CROSS &&
                 !plan->validate && (!writes || step->fuses || step->write_kv != NULL);
    step->enter = plain ? run_plain : run_general;
    if (plan->model->runtime->settings.record.folder != NULL) {
        capsule_watch(plan, step);
    }
}
