/* SPDX-License-Identifier: Apache-2.0 */
/* run(): the hot path. It checks the tensors, sets what changes from step to step, and calls the kernels. Nothing here
 * allocates, locks or formats text. */
#include <string.h>

#include "step/schedule.h"
#include "util/structs.h"

#define MIN_IO 72 /* size in ABI 0.1 */
#define FAIL(field, text) error_set_text(error, ATTN_ERROR_INVALID_ARGUMENT, field, text)

static inline bool is_rows(const struct attn_tensor *t, uint32_t dtype, int64_t rows, int64_t heads,
                           int64_t head_size)
{
    uint32_t word;
    memcpy(&word, &t->dtype, sizeof word);
    return t->ndim == 3 && word == dtype && t->shape[0] >= rows && t->shape[1] == heads &&
           t->shape[2] == head_size && (t->strides == NULL || t->strides[2] == 1);
}

static attn_status check_attend_io(const attn_plan *plan, const struct step *step,
                                   const struct attn_step_io *io, struct attn_error *error)
{
    if (io->q == NULL || !is_rows(io->q, step->q_dtype, plan->num_tokens, step->num_q_heads,
                                  step->head_size)) {
        return FAIL("q", "q is NULL or not [num_tokens or more, num_q_heads, head_size] of the layer's "
                         "dtype with a contiguous last dimension");
    }
    if (io->out == NULL ||
        (!step->quantizes && !is_rows(io->out, step->out_dtype, plan->num_tokens, step->num_q_heads,
                                      step->head_size_v))) {
        return FAIL("out", "out is NULL or not [num_tokens or more, num_q_heads, head_size_v] of the "
                           "layer's dtype with a contiguous last dimension");
    }
    if (io->lse != NULL && (io->lse->ndim != 2 || io->lse->shape[0] != step->num_q_heads ||
                            io->lse->shape[1] < plan->num_tokens || io->lse->dtype.bits != 32)) {
        return FAIL("lse", "lse is not [num_q_heads, num_tokens or more] float32");
    }
    return ATTN_OK;
}

static attn_status check_keys_io(const struct step *step, const struct attn_step_io *io, int64_t rows,
                                 struct attn_error *error)
{
    if (io->k == NULL || !is_rows(io->k, step->kv_dtype_in, rows, step->num_kv_heads, step->head_size)) {
        return FAIL("k", "k is NULL or not [rows, num_kv_heads, head_size] of the layer's dtype with a "
                         "contiguous last dimension and a row per slot");
    }
    if (io->v == NULL || !is_rows(io->v, step->kv_dtype_in, rows, step->num_kv_heads, step->head_size_v)) {
        return FAIL("v", "v is NULL or not [rows, num_kv_heads, head_size_v] of the layer's dtype with "
                         "a contiguous last dimension and a row per slot");
    }
    return ATTN_OK;
}

/* Does this run write keys? A cross layer brings them once, and a shared cache is another's to fill. */
static inline bool writes_now(const attn_plan *plan, const struct step *step, const struct attn_step_io *io)
{
    return step->writes && !(io->flags & ATTN_RUN_NO_WRITE) && plan->given.num_slots > 0 &&
           (io->k != NULL || step->layer->layer.desc.kind != ATTN_LAYER_CROSS);
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
    if (io->next != NULL && ext_find(io->next, ATTN_EXT_IO_ROPE, sizeof(struct attn_io_rope)) != NULL) {
        kernel = step->layer->served[ATTN_PHASE_PREFILL].instance->kernels.rope_write_kv;
        args->q = io->q;
        if (kernel == NULL) {
            return error_set_text(error, ATTN_ERROR_UNSUPPORTED, "attn_io_rope",
                                  "the layer's backend has no rope_write_kv");
        }
    }
    return kernel != NULL ? kernel(args, error) : ATTN_OK;
}

static attn_status quantize_out(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                                struct attn_error *error)
{
    const struct attn_ext *ext =
        ext_find(io->next, ATTN_EXT_IO_OUTPUT_QUANT, sizeof(struct attn_io_output_quant));
    const struct attn_layer_desc *layer = &step->layer->layer.desc;
    const struct instance *instance = step->layer->served[ATTN_PHASE_PREFILL].instance;
    int64_t shape[3] = {plan->given.num_actual_tokens, step->num_q_heads, step->head_size_v};
    int64_t strides[3] = {(int64_t)step->num_q_heads * step->head_size_v, step->head_size_v, 1};
    struct attn_tensor plain = {plan->workspace + plan->scratch.plain, plan->model->device, 3, {0, 0, 0},
                                shape, strides, 0};
    struct attn_step_io inner = *io;
    if (ext == NULL) {
        return error_set_text(error, ATTN_ERROR_INVALID_ARGUMENT, "attn_io_output_quant",
                              "the layer's output form needs attn_io_output_quant on the run");
    }
    const struct attn_io_output_quant *quant = (const struct attn_io_output_quant *)ext;
    memcpy(&plain.dtype, &step->out_dtype, sizeof plain.dtype);
    inner.out = &plain;
    attn_status status = step->program(plan, step, &inner, error);
    struct attn_quantize_args args = {.struct_size = sizeof args,
                                      .instance = instance->handle,
                                      .stream = io->stream,
                                      .form = layer->output_form,
                                      .scale_form = ATTN_SCALE_PER_TENSOR,
                                      .scale_pow2 = layer->output_scale_pow2,
                                      .scale_column_major = layer->output_scale_column_major,
                                      .x = &plain,
                                      .out = io->out,
                                      .scale = quant->scale,
                                      .block_scales = quant->block_scales};
    return status == ATTN_OK ? instance->kernels.quantize(&args, error) : status;
}

static attn_status validate_inputs(const attn_plan *plan, const struct step *step,
                                   const struct attn_step_io *io, struct attn_error *error)
{
    const char *layer = step->layer->layer.desc.name;
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
        if (attends) {
            status = check_attend_io(plan, step, io, error);
        }
        if (status == ATTN_OK && (writes || (attends && step->keys_are_inputs && step->program != run_idle))) {
            status = check_keys_io(step, io, writes ? plan->given.num_slots : plan->num_key_rows, error);
        }
        if (status == ATTN_OK && plan->validate) {
            status = validate_inputs(plan, step, io, error);
        }
        if (status != ATTN_OK) {
            return status;
        }
    }
    if (writes) {
        status = write_keys(plan, step, io, error);
    }
    if (status != ATTN_OK || !attends) {
        return status;
    }
    status = step->quantizes && step->program != run_idle ? quantize_out(plan, step, io, error)
                                                          : step->program(plan, step, io, error);
    if (status == ATTN_OK && plan->validate && step->plain_checks && !step->quantizes) {
        status = validate_tensor(plan, io->out, "out", step->layer->layer.desc.name, error);
    }
    return status;
}

attn_status plan_run(attn_plan *plan, attn_layer *layer, const struct attn_step_io *io,
                     struct attn_error *error)
{
    struct attn_step_io read;
    attn_status status;
    if (plan == NULL || layer == NULL || io == NULL) {
        return FAIL("io", "plan, layer or io is NULL");
    }
    if (io->struct_size != sizeof *io) {
        status = struct_read(&read, sizeof read, MIN_IO, io, "attn_step_io", error);
        if (status != ATTN_OK) {
            return status;
        }
        io = &read;
    }
    if (layer->model != plan->model || layer->group != plan->group) {
        return FAIL("layer", "the layer is not of the plan's block-table group");
    }
    if (!plan->planned) {
        return error_set_text(error, ATTN_ERROR_ORDER, "plan", "plan() has not succeeded for this step");
    }
    const struct attn_model_options *hooks = &plan->model->options;
    if (hooks->before_layer != NULL) {
        hooks->before_layer(hooks->user, layer->index, io->stream);
    }
    status = run_step(plan, &plan->steps[layer->slot], io, error);
    if (hooks->after_layer != NULL) {
        hooks->after_layer(hooks->user, layer->index, io->stream);
    }
    return status;
}
