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

/* Flags that change a plain run, the reserved field behind them, extensions and the lse, and keys
 * that no slot takes, in one test. */
static inline bool is_special(const struct attn_step_io *io, uint64_t flags, uintptr_t no_slots)
{
    uint64_t given;
    ATTN_STATIC_ASSERT(offsetof(struct attn_step_io, reserved) ==
                           offsetof(struct attn_step_io, flags) + sizeof io->flags,
                       "one word");
    memcpy(&given, &io->flags, sizeof given);
    return ((uintptr_t)io->next | (uintptr_t)io->lse | (given & flags) |
            ((uintptr_t)io->k & no_slots)) != 0;
}

/* Both without strides, in one test, or each with a last one of 1. */
static inline bool are_dense(const struct attn_tensor *a, const struct attn_tensor *b)
{
    return ((uintptr_t)a->strides | (uintptr_t)b->strides) == 0 ||
           ((a->strides == NULL || a->strides[2] == 1) &&
            (b->strides == NULL || b->strides[2] == 1));
}

/* tensor_is_rows_here of two tensors with rows of one kind, more than 0, field by field: few values
 * are alive at a time. */
static inline bool are_rows(const struct attn_tensor *a, const struct attn_tensor *b,
                            const struct tensor_form *wanted, int64_t rows)
{
    const uint64_t kind = tensor_kind(a), device = device_code(&a->device);
    const int64_t *x, *y;
    if (kind != wanted->kind || kind != tensor_kind(b) || device != wanted->device ||
        device != device_code(&b->device) || !are_dense(a, b) || a->data == NULL ||
        b->data == NULL) {
        return false;
    }
    x = a->shape, y = b->shape;
    return x != NULL && y != NULL && x[0] >= rows && y[0] >= rows && x[1] == wanted->heads &&
           x[1] == y[1] && x[2] == wanted->head_size && x[2] == y[2];
}

/* In the functions below `alike` is a constant: both have rows of one kind. */
static inline bool both(const struct attn_tensor *a, const struct tensor_form *of_a,
                        const struct attn_tensor *b, const struct tensor_form *of_b, int64_t rows,
                        bool alike)
{
    return alike ? are_rows(a, b, of_a, rows)
                 : tensor_is_rows_here(a, of_a, rows) && tensor_is_rows_here(b, of_b, rows);
}

static inline attn_status call(struct step *step, const struct attn_step_io *io,
                               struct attn_error *error)
{
    struct launch *launch = step->main[0];
    step->error = error; /* one value is kept over the call */
    set_io(&launch->args, io);
    attn_status status = launch->kernel(&launch->args, error);
    return status == ATTN_OK ? status : step_fail(step, status, step->error);
}

/* One attend over a cache that has its keys: what most runs of an engine with its own write are.
 * Whatever is not plain goes the general way, which also finds the words for a refusal. */
static inline attn_status attend(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                                 struct attn_error *error, uintptr_t no_slots, bool alike)
{
    const struct attn_tensor *q = io->q, *out = io->out;
    const int64_t rows = plan->num_tokens;
    if (is_special(io, ~(uint64_t)ATTN_RUN_NO_WRITE, no_slots) || q == NULL || out == NULL ||
        !both(q, &step->q, out, &step->out, rows, alike)) {
        return run_general(plan, step, io, error);
    }
    return call(step, io, error);
}

static attn_status fast_attend(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                               struct attn_error *error)
{
    return attend(plan, step, io, error, step->no_slots, false);
}

/* Where keys would be lost, and q and out are alike. */
static attn_status fast_attend_alike(attn_plan *plan, struct step *step,
                                     const struct attn_step_io *io, struct attn_error *error)
{
    return attend(plan, step, io, error, UINTPTR_MAX, true);
}

/* A plain run that brings the step's keys. */
static inline bool is_plain_write(const attn_plan *plan, const struct step *step,
                                  const struct attn_step_io *io, bool alike)
{
    const struct attn_tensor *q = io->q, *k = io->k, *v = io->v, *out = io->out;
    const int64_t rows = plan->num_tokens, slots = plan->given.num_slots;
    return !is_special(io, UINT64_MAX, 0) && q != NULL && k != NULL && v != NULL && out != NULL &&
           both(q, &step->q, out, &step->out, rows, alike) &&
           both(k, &step->k, v, &step->v, slots, alike);
}

/* Likewise with the step's keys written first. */
static inline attn_status write_attend(attn_plan *plan, struct step *step,
                                       const struct attn_step_io *io, struct attn_error *error,
                                       bool alike)
{
    if (!is_plain_write(plan, step, io, alike)) {
        return run_general(plan, step, io, error);
    }
    step->write.stream = io->stream;
    step->write.k = io->k;
    step->write.v = io->v;
    attn_status status = step->write_kv(&step->write, error);
    return status == ATTN_OK ? call(step, io, error) : step_fail(step, status, error);
}

static attn_status run_write_attend(attn_plan *plan, struct step *step,
                                    const struct attn_step_io *io, struct attn_error *error)
{
    return write_attend(plan, step, io, error, false);
}

static attn_status run_write_attend_alike(attn_plan *plan, struct step *step,
                                          const struct attn_step_io *io, struct attn_error *error)
{
    return write_attend(plan, step, io, error, true);
}

/* Likewise, with the keys written by the attend. */
static attn_status run_fused(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                             struct attn_error *error)
{
    if (!is_plain_write(plan, step, io, false)) {
        return run_general(plan, step, io, error);
    }
    step->main[0]->args.flags = 0;
    return call(step, io, error);
}

static bool same_rows(const struct tensor_form *a, const struct tensor_form *b)
{
    return a->kind == b->kind && a->heads == b->heads && a->head_size == b->head_size &&
           a->device == b->device;
}

void step_choose_entry(attn_plan *plan, struct step *step)
{
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
        step->keys_are_inputs || cross || plan->validate) {
        return;
    }
    const bool out_alike = same_rows(&step->q, &step->out), v_alike = same_rows(&step->k, &step->v);
    if (!writes) {
        step->enter = out_alike && step->no_slots != 0 ? fast_attend_alike : fast_attend;
    } else if (step->fuses) {
        step->enter = run_fused;
    } else if (step->write_kv != NULL) {
        step->write.slot_mapping = plan->given.slot_mapping;
        step->write.num_slots = plan->given.num_slots;
        step->enter = out_alike && v_alike ? run_write_attend_alike : run_write_attend;
    }
}
