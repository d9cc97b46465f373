/* SPDX-License-Identifier: Apache-2.0 */
/* run(): it checks the tensors, sets what changes from step to step, and calls the kernels. Nothing
 * here allocates or locks, and text is formatted for a refusal alone. */
#include <string.h>

#include "bind/address_check.h"
#include "step/plan_state.h"
#include "util/device.h"

/* Marked optional, it is passed over where the layer has none. */
static bool has_rope(const struct step *step, const struct attn_step_io *io)
{
    return io->next != NULL && step->layer->desc->rope != ATTN_ROPE_NONE &&
           ext_find(io->next, ATTN_EXT_IO_ROPE) != NULL;
}

/* Does this run write keys? A cross layer brings them once, and a shared cache is another's to
 * fill. */
static inline bool writes_now(const attn_plan *plan, const struct step *step,
                              const struct attn_step_io *io)
{
    return step->writes && !(io->flags & ATTN_RUN_NO_WRITE) && plan->given.num_slots > 0 &&
           (io->k != NULL || step->layer->desc->kind != ATTN_LAYER_CROSS);
}

static attn_status write_keys(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                              struct attn_error *error)
{
    struct attn_write_kv_args *args = &step->write;
    attn_status (*kernel)(const struct attn_write_kv_args *, struct attn_error *) = step->write_kv;
    args->next = io->next;
    args->stream = io->stream;
    args->slot_mapping = plan->given.slot_mapping;
    args->num_slots = plan->given.num_slots;
    args->k = io->k;
    args->v = io->v;
    if (has_rope(step, io)) {
        kernel = step->layer->served[ATTN_PHASE_PREFILL].instance->kernels.rope_write_kv;
        ERROR_IF(kernel == NULL, ATTN_ERROR_UNSUPPORTED, "attn_io_rope",
                 "the layer's backend has no rope_write_kv");
        TRY(step_check_rope(plan, step, io, error));
        args->q = io->q;
    }
    ERROR_IF(kernel == NULL, ATTN_ERROR_UNSUPPORTED, "write_kv",
             "the layer's backend writes keys in its attend only; this run writes alone");
    attn_status status = kernel(args, error);
    args->next = NULL;
    args->q = NULL;
    return operation("write keys", status, error);
}

static attn_status run_step(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                            struct attn_error *error)
{
    bool attends = !(io->flags & ATTN_RUN_NO_ATTEND), idle = step->program == run_idle;
    bool writes = writes_now(plan, step, io) && !idle;
    BAD_IF(!writes && has_rope(step, io) && !idle, "attn_io_rope",
           "the run writes no keys, and rope_write_kv rotates q together with the keys that it "
           "writes; bring q rotated, without attn_io_rope");
    BAD_IF(step_leaves_keys(step, io), "slot_mapping",
           "the run brings k and the batch has no slots (num_slots 0): the attend would read what "
           "the cache held before; give slot_mapping, or ATTN_RUN_NO_WRITE where the cache has the "
           "keys already");
    TRY_IF(!idle || step->check_io == step_check_plain,
           step->check_io(plan, step, io, writes, attends, error));
    /* an idle step of a composition brings no inputs, but out is filled */
    TRY_IF(idle && attends && io->out != NULL && step->check_io != step_check_plain,
           step_check_out(plan, step, io, error));
    TRY_IF(attends && step->check_more != NULL && !idle,
           step->check_more(plan, step, io, writes, attends, error));
    TRY_IF(plan->validate && attends, validate_apart(io->out, "out", error));
    TRY_IF(plan->validate && attends, validate_apart(io->lse, "lse", error));
    TRY_IF(step->bring_keys != NULL && (writes || (attends && step->keys_are_inputs)),
           step->bring_keys(plan, step, &io, error));
    /* keys that are rotated on their way have a kernel of their own */
    bool fused = step->fuses && writes && attends && !has_rope(step, io);
    TRY_IF(writes && !fused, write_keys(plan, step, io, error));
    for (int32_t i = 0; i < 2 && step->fuses && step->main[i] != NULL; i++) {
        step->main[i]->args.flags = fused ? 0 : ATTN_RUN_NO_WRITE;
    }
    if (!attends) {
        return ATTN_OK;
    }
    TRY(step->program(plan, step, io, error));
    TRY_IF(step->check_io == step_check_plain && step->checks_out,
           validate_tensor(plan, io->out, "out", error));
    return plan->validate ? validate_workers(plan, error) : ATTN_OK;
}

/* Everything that a run can be, whose extensions are checked. */
static attn_status run_checked(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                               struct attn_error *error)
{
    TRY(address_check_all(plan->model, io, ABI_STEP_IO, io->next, NULL, plan->validate, error));
    BAD_IF(plan->validate && io->stream != plan->stream, "stream",
           "is not the stream that plan_batch was given");
    BAD_IF(io->reserved != 0, "reserved", "reserved of attn_step_io is not 0");
    BAD_IF((io->flags & ~(ATTN_RUN_NO_WRITE | ATTN_RUN_NO_ATTEND | ATTN_FLAG_HINTS)) != 0, "flags",
           "a bit of the run's flags is not known; allowed are ATTN_RUN_NO_WRITE, "
           "ATTN_RUN_NO_ATTEND and hints (the upper half)");
    attn_status status = run_step(plan, step, io, error);
    return plan->validate ? wait_for_device_errors(plan, io->stream, status, error) : status;
}

/* Leaves in the copy the extensions of the ABI that the layer reads and the vendors' that it has.
 * Apart, since other runs need no room on the stack. */
__attribute__((noinline)) static attn_status run_extended(attn_plan *plan, struct step *step,
                                                          const struct attn_step_io *io,
                                                          struct attn_error *error)
{
    struct ext_room room;
    struct attn_step_io read = *io;
    uint32_t vendors[MAX_VENDOR_EXTENSIONS];
    const int32_t count = layer_vendor_ids(step->layer->desc->next, vendors);
    TRY(ext_narrow(&read.next, ABI_STEP_IO, vendors, count, &room, error));
    TRY(ext_check_readers(read.next, ABI_STEP_IO, step->layer->selected->reads, NULL, error));
    TRY_IF(step->program != run_idle, tables_check_rows(plan, step, read.next, error));
    return run_checked(plan, step, &read, error);
}

attn_status run_general(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                        struct attn_error *error)
{
    attn_status status =
        io->next != NULL ? run_extended(plan, step, io, error) : run_checked(plan, step, io, error);
    return status == ATTN_OK ? status : step_fail(step, status, error);
}

/* Kept out of plan_run, which so needs no stack. */
__attribute__((noinline)) static attn_status run_foreign(attn_plan *plan, struct step *step,
                                                         const struct attn_step_io *io,
                                                         struct attn_error *error)
{
    struct attn_step_io read;
    attn_status status = struct_read(&read, ABI_STEP_IO, io, error);
    return status == ATTN_OK ? step->enter(plan, step, &read, error)
                             : step_fail(step, status, error);
}

__attribute__((noinline)) static attn_status refuse_run(const attn_plan *plan,
                                                        const attn_layer *layer,
                                                        const struct attn_step_io *io,
                                                        struct attn_error *error)
{
    BAD_IF(plan == NULL, "plan", "plan is NULL");
    BAD_IF(layer == NULL, "layer", "layer is NULL");
    BAD_IF(io == NULL, "io", "io is NULL");
    BAD_IF(layer->table != plan->table, "layer",
           "the layer is not of the plan's block-table group");
    return error_set(error, ATTN_ERROR_ORDER, "plan", "plan_batch has not succeeded for this step");
}

attn_status plan_run(attn_plan *plan, attn_layer *layer, const struct attn_step_io *io,
                     struct attn_error *error)
{
    if (plan == NULL || layer == NULL || io == NULL || layer->table != plan->ready) {
        return refuse_run(plan, layer, io, error);
    }
    struct step *step = plan->step_of_slot[layer->slot];
    return io->struct_size == sizeof *io ? step->enter(plan, step, io, error)
                                         : run_foreign(plan, step, io, error);
}

/* The hot path of run(): one attend of a plain run, with or without a write. plan_batch chooses it,
 * and whatever else a run can be goes the general way, which also finds the words for a refusal. */
static inline bool is_rows_here(const attn_plan *plan, const struct attn_tensor *t,
                                const struct tensor_form *wanted, int64_t rows)
{
    return t != NULL && tensor_kind(t) == wanted->kind && t->shape != NULL && t->shape[0] >= rows &&
           t->shape[1] == wanted->heads && t->shape[2] == wanted->head_size &&
           (t->strides == NULL || t->strides[2] == 1) && (t->data != NULL || rows == 0) &&
           device_same(t->device, plan->model->device);
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

attn_status run_plain(attn_plan *plan, struct step *step, const struct attn_step_io *io,
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
