/* SPDX-License-Identifier: Apache-2.0 */
/* run(): it checks the tensors, sets what changes from step to step, and calls the kernels. Nothing
 * here allocates or locks, and text is formatted for a refusal alone. */
#include <string.h>

#include "select/layer_ext.h"
#include "step/plan.h"
#include "step/plan_state.h"
#include "util/structs.h"

#define MIN_IO 72 /* size in ABI 0.2 */
#define FAIL(field, text) error_set_text(error, ATTN_ERROR_INVALID_ARGUMENT, field, text)

/* Where the scales of a quantized output are read or written. */
static attn_status check_output_scales(int32_t form, const struct attn_step_io *io,
                                       struct attn_error *error)
{
    const struct attn_io_output_quant *given =
        (const struct attn_io_output_quant *)ext_find(io->next, ATTN_EXT_IO_OUTPUT_QUANT);
    if (given == NULL) {
        return error_set_text(error, ATTN_ERROR_INVALID_ARGUMENT, "attn_io_output_quant",
                              "the layer's output form needs attn_io_output_quant on the run");
    }
    const struct attn_tensor *scales = given->block_scales;
    const bool one = form == ATTN_OUTPUT_FP8_STATIC || form == ATTN_OUTPUT_NVFP4;
    if ((one && given->scale == NULL) ||
        (form != ATTN_OUTPUT_FP8_STATIC &&
         (scales == NULL || scales->data == NULL || scales->shape == NULL || scales->ndim != 2))) {
        return error_set_text(error, ATTN_ERROR_INVALID_ARGUMENT, "attn_io_output_quant",
                              "scale (of fp8_static and nvfp4) is NULL, or block_scales (of all "
                              "but fp8_static) is or has not 2 dimensions");
    }
    return ATTN_OK;
}

/* Rows of pairs, [T, heads, size / 2] or [T, heads size / 2] bytes. */
static bool is_nvfp4_rows(const struct attn_tensor *out, const struct tensor_form *wanted,
                          int64_t rows)
{
    if (out == NULL || out->data == NULL || out->shape == NULL || out->ndim < 2 || out->ndim > 3) {
        return false;
    }
    const int64_t last = out->ndim == 3 ? out->shape[2] : 1;
    return out->dtype.bits == 8 && out->shape[0] >= rows &&
           out->shape[1] * last == (int64_t)wanted->heads * wanted->head_size / 2 &&
           (out->strides == NULL || out->strides[out->ndim - 1] == 1);
}

attn_status step_check_out(const attn_plan *plan, const struct step *step,
                           const struct attn_step_io *io, struct attn_error *error)
{
    const struct attn_tensor *out = io->out;
    int32_t form = step->layer->desc->output_form;
    struct tensor_form wanted = step->out;
    if (form != ATTN_OUTPUT_PLAIN && step->program != run_idle) {
        attn_status status = check_output_scales(form, io, error);
        if (status != ATTN_OK) {
            return status;
        }
    }
    if (form == ATTN_OUTPUT_NVFP4) {
        return is_nvfp4_rows(out, &wanted, plan->num_tokens)
                   ? ATTN_OK
                   : FAIL("out", "out is NULL, or not of rows with two values a byte for each of "
                                 "the batch's tokens");
    }
    if (form != ATTN_OUTPUT_PLAIN) {
        const struct attn_tensor fp8 = {.ndim = 3, .dtype = {ATTN_CODE_FLOAT8_E4M3FN, 8, 1}};
        wanted.kind = tensor_kind(&fp8);
    }
    if (out == NULL || !tensor_is_rows(out, &wanted, plan->num_tokens)) {
        return refuse_rows("out", out, &wanted, plan->num_tokens, error);
    }
    return ATTN_OK;
}

static attn_status check_attend_io(const attn_plan *plan, const struct step *step,
                                   const struct attn_step_io *io, struct attn_error *error)
{
    if (io->q == NULL || !tensor_is_rows(io->q, &step->q, plan->num_tokens)) {
        return refuse_rows("q", io->q, &step->q, plan->num_tokens, error);
    }
    if (io->lse != NULL &&
        (io->lse->ndim != 2 || io->lse->shape == NULL || io->lse->shape[0] != step->q.heads ||
         io->lse->shape[1] < plan->num_tokens || io->lse->dtype.bits != 32 ||
         io->lse->dtype.code != ATTN_CODE_FLOAT)) {
        return refuse_lse(io->lse, step->q.heads, plan->num_tokens, error);
    }
    return step_check_out(plan, step, io, error);
}

static attn_status check_keys_io(const struct step *step, const struct attn_step_io *io,
                                 int64_t rows, struct attn_error *error)
{
    if (io->k == NULL || !tensor_is_rows(io->k, &step->k, rows)) {
        return refuse_rows("k", io->k, &step->k, rows, error);
    }
    if (io->v == NULL || !tensor_is_rows(io->v, &step->v, rows)) {
        return refuse_rows("v", io->v, &step->v, rows, error);
    }
    return ATTN_OK;
}

static bool has_rope(const struct attn_step_io *io)
{
    return io->next != NULL && ext_find(io->next, ATTN_EXT_IO_ROPE) != NULL;
}

/* Does this run write keys? A cross layer brings them once, and a shared cache is another's to
 * fill. */
static inline bool writes_now(const attn_plan *plan, const struct step *step,
                              const struct attn_step_io *io)
{
    return step->writes && !(io->flags & ATTN_RUN_NO_WRITE) && plan->given.num_slots > 0 &&
           (io->k != NULL || step->layer->desc->kind != ATTN_LAYER_CROSS);
}

static attn_status check_rope(const attn_plan *plan, const struct step *step,
                              const struct attn_step_io *io, struct attn_error *error)
{
    const struct attn_io_rope *rope =
        (const struct attn_io_rope *)ext_find(io->next, ATTN_EXT_IO_ROPE);
    const bool known = rope->form == ATTN_ROPE_NEOX || rope->form == ATTN_ROPE_GPTJ;
    const struct attn_tensor *const norms[] = {rope->q_norm_weight, rope->k_norm_weight};
    if (!known || !tensor_is_numbers(rope->cos_sin, 2) || rope->positions == NULL) {
        return error_set_text(error, ATTN_ERROR_INVALID_ARGUMENT, "attn_io_rope",
                              "form is neither NeoX nor GPT-J, positions is NULL, or cos_sin is "
                              "no table of 2 dimensions");
    }
    for (int32_t i = 0; i < 2; i++) {
        if (norms[i] != NULL && !tensor_is_numbers(norms[i], 1)) {
            return error_set_text(error, ATTN_ERROR_INVALID_ARGUMENT, "attn_io_rope",
                                  "q_norm_weight or k_norm_weight has not 1 dimension of numbers");
        }
    }
    if (rope->rotary_dim < 0 || rope->rotary_dim % 2 != 0 ||
        rope->rotary_dim > step->layer->desc->head_size) {
        return error_set_text(error, ATTN_ERROR_INVALID_ARGUMENT, "rotary_dim",
                              "is not an even number from 0 to the layer's head_size");
    }
    if (io->q == NULL || !tensor_is_rows(io->q, &step->q, plan->given.num_slots)) {
        return refuse_rows("q", io->q, &step->q, plan->given.num_slots, error);
    }
    return ATTN_OK;
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
    if (has_rope(io)) {
        kernel = step->layer->served[ATTN_PHASE_PREFILL].instance->kernels.rope_write_kv;
        args->q = io->q;
        if (kernel == NULL) {
            return error_set_text(error, ATTN_ERROR_UNSUPPORTED, "attn_io_rope",
                                  "the layer's backend has no rope_write_kv");
        }
        attn_status status = check_rope(plan, step, io, error);
        if (status != ATTN_OK) {
            return status;
        }
    }
    if (kernel == NULL) {
        return error_set_text(
            error, ATTN_ERROR_UNSUPPORTED, "write_kv",
            "the layer's backend writes keys in its attend only; this run writes alone");
    }
    attn_status status = kernel(args, error);
    args->next = NULL;
    args->q = NULL;
    return status;
}

static attn_status validate_inputs(const attn_plan *plan, const struct step *step,
                                   const struct attn_step_io *io, struct attn_error *error)
{
    const char *layer = step->layer->desc->name;
    attn_status status = validate_tensor(plan, io->q, "q", layer, error);
    if (status == ATTN_OK && writes_now(plan, step, io)) {
        status = validate_tensor(plan, io->k, "k", layer, error);
        status = status == ATTN_OK ? validate_tensor(plan, io->v, "v", layer, error) : status;
    }
    return status;
}

static attn_status run_step(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                            struct attn_error *error)
{
    attn_status status = ATTN_OK;
    bool attends = !(io->flags & ATTN_RUN_NO_ATTEND);
    bool writes = writes_now(plan, step, io) && step->program != run_idle;
    if (step->plain_checks) {
        if (step_leaves_keys(step, io)) {
            return refuse_unwritten(error);
        }
        if (attends) {
            status = check_attend_io(plan, step, io, error);
        }
        if (status == ATTN_OK &&
            (writes || (attends && step->keys_are_inputs && step->program != run_idle))) {
            status = check_keys_io(step, io,
                                   writes && step->bring_keys == NULL ? plan->given.num_slots
                                                                      : plan->num_key_rows,
                                   error);
        }
        if (status == ATTN_OK && plan->validate) {
            status = validate_inputs(plan, step, io, error);
        }
        if (status != ATTN_OK) {
            return status;
        }
    }
    if (step->check_io != NULL && step->program != run_idle) {
        status = step->check_io(plan, step, io, writes, attends, error);
    }
    if (status == ATTN_OK && step->bring_keys != NULL &&
        (writes || (attends && step->keys_are_inputs && step->program != run_idle))) {
        status = step->bring_keys(plan, step, &io, error);
    }
    /* keys that are rotated on their way have a kernel of their own */
    bool fused = step->fuses && writes && attends && !has_rope(io);
    if (status == ATTN_OK && writes && !fused) {
        status = write_keys(plan, step, io, error);
    }
    for (int32_t i = 0; i < 2 && step->fuses && step->main[i] != NULL; i++) {
        step->main[i]->args.flags = fused ? 0 : ATTN_RUN_NO_WRITE;
    }
    if (status != ATTN_OK || !attends) {
        return status;
    }
    status = step->program(plan, step, io, error);
    if (status == ATTN_OK && plan->validate && step->plain_checks && step->checks_out) {
        status = validate_tensor(plan, io->out, "out", step->layer->desc->name, error);
    }
    return status == ATTN_OK && plan->validate ? validate_workers(plan, error) : status;
}

/* Those of the ABI, and of vendors' those that the layer has, too. */
static attn_status check_extensions(const struct step *step, const struct attn_step_io *io,
                                    struct attn_error *error)
{
    uint32_t known[5 + MAX_VENDOR_EXTENSIONS] = {ATTN_EXT_IO_MLA, ATTN_EXT_IO_RECURRENT,
                                                 ATTN_EXT_IO_OUTPUT_QUANT, ATTN_EXT_IO_ROPE,
                                                 ATTN_EXT_IO_CACHES};
    const int32_t count = layer_vendor_ids(step->layer->desc->next, known, 5);
    return ext_check(io->next, known, count, "attn_step_io", error);
}

/* Everything that a run can be. */
static attn_status run_anything(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                                struct attn_error *error)
{
    const struct attn_model_options *hooks = &plan->model->options;
    int32_t layer = step->layer->index;
    attn_status status = io->next != NULL ? check_extensions(step, io, error) : ATTN_OK;
    if (status == ATTN_OK && io->next != NULL && step->program != run_idle) {
        status = tables_check_rows(plan, step, io->next, error);
    }
    status = status == ATTN_OK ? places_check_run(plan, io, error) : status;
    if (status != ATTN_OK) {
        return status;
    }
    if ((io->flags & ~(ATTN_RUN_NO_WRITE | ATTN_RUN_NO_ATTEND | ATTN_FLAG_HINTS)) != 0) {
        return error_set_text(
            error, ATTN_ERROR_INVALID_ARGUMENT, "flags",
            "a bit of the run's flags is not known; allowed are ATTN_RUN_NO_WRITE, "
            "ATTN_RUN_NO_ATTEND and hints (the upper half)");
    }
    if (hooks->before_layer != NULL) {
        hooks->before_layer(hooks->user, layer, io->stream);
    }
    status = run_step(plan, step, io, error);
    status = plan->validate ? places_settle(plan, io->stream, status, error) : status;
    if (hooks->after_layer != NULL) {
        hooks->after_layer(hooks->user, layer, io->stream);
    }
    return status;
}

/* `text` behind what `to` holds, as far as it goes. */
static size_t append(char *to, size_t at, const char *text)
{
    size_t length = strnlen(text, ATTN_ERROR_MESSAGE_SIZE - at);
    memcpy(to + at, text, length);
    return at + length;
}

/* A failed run: whatever a kernel has left becomes clean text behind the layer's name and its
 * backends'. Copies, and formats nothing. */
attn_status step_fail(const struct step *step, attn_status status, struct attn_error *error)
{
    const attn_layer *layer = step->layer;
    const struct instance *last = NULL;
    char field[ATTN_ERROR_FIELD_SIZE], message[ATTN_ERROR_MESSAGE_SIZE + 1];
    status = error_relay(error, status, error);
    if (error == NULL || error->struct_size < sizeof *error) {
        return status;
    }
    size_t at = append(message, 0, "layer '");
    at = append(message, at, layer->desc->name);
    at = append(message, at, "'");
    for (int32_t phase = 0; phase < ATTN_PHASE_COUNT; phase++) {
        const struct instance *instance = layer->served[phase].instance;
        if (instance != NULL && instance != last) {
            at = append(message, at, last != NULL ? " and " : ", ");
            at = append(message, at, instance->caps->name);
            last = instance;
        }
    }
    at = append(message, at, ": ");
    at = append(message, at, error->message);
    message[at] = '\0';
    memcpy(field, error->field, sizeof field);
    return error_set_text(error, status, field, message);
}

attn_status run_general(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                        struct attn_error *error)
{
    attn_status status = run_anything(plan, step, io, error);
    return status == ATTN_OK ? status : step_fail(step, status, error);
}

/* Kept out of plan_run, which so needs no stack. */
__attribute__((noinline)) static attn_status run_foreign(attn_plan *plan, struct step *step,
                                                         const struct attn_step_io *io,
                                                         struct attn_error *error)
{
    struct attn_step_io read;
    attn_status status = struct_read(&read, sizeof read, MIN_IO, io, "attn_step_io", error);
    return status == ATTN_OK ? step->enter(plan, step, &read, error)
                             : step_fail(step, status, error);
}

__attribute__((noinline)) static attn_status refuse_run(const attn_plan *plan,
                                                        const attn_layer *layer,
                                                        const struct attn_step_io *io,
                                                        struct attn_error *error)
{
    if (plan == NULL) {
        return FAIL("plan", "plan is NULL");
    }
    if (layer == NULL) {
        return FAIL("layer", "layer is NULL");
    }
    if (io == NULL) {
        return FAIL("io", "io is NULL");
    }
    if (layer->table != plan->table) {
        return FAIL("layer", "the layer is not of the plan's block-table group");
    }
    return error_set_text(error, ATTN_ERROR_ORDER, "plan",
                          "plan_batch has not succeeded for this step");
}

attn_status plan_run(attn_plan *plan, attn_layer *layer, const struct attn_step_io *io,
                     struct attn_error *error)
{
    if (layer == NULL) {
        return refuse_run(plan, layer, io, error);
    }
    const attn_layer *table = layer->table; /* each load stands between two tests: branches alone */
    if (plan == NULL) {
        return refuse_run(plan, layer, io, error);
    }
    const attn_layer *ready = plan->ready;
    if (io == NULL) {
        return refuse_run(plan, layer, io, error);
    }
    const size_t size = io->struct_size;
    if (table != ready) {
        return refuse_run(plan, layer, io, error);
    }
    struct step *step = plan->step_of_slot[layer->slot];
    return size == sizeof *io ? step->enter(plan, step, io, error)
                              : run_foreign(plan, step, io, error);
}
