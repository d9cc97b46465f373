/* SPDX-License-Identifier: Apache-2.0 */
/* What every run's tensors must be, in each dimension, dtype and stride that a kernel goes by. */
#include <math.h>

#include "step/plan_state.h"

static const struct attn_dtype float32 = {ATTN_CODE_FLOAT, 32, 1},
                               e4m3 = {ATTN_CODE_FLOAT8_E4M3FN, 8, 1},
                               uint8 = {ATTN_CODE_UINT, 8, 1};

attn_status check_rows(const char *field, const struct attn_tensor *found,
                       const struct tensor_form *wanted, int64_t rows, struct attn_error *error)
{
    CHECK_TENSOR(found, NULL, field, 3, {rows, wanted->heads, wanted->head_size}, 1,
                 tensor_of_kind(wanted->kind).dtype);
    return ATTN_OK;
}

attn_status check_input(const attn_plan *plan, const char *field, const struct attn_tensor *found,
                        const struct tensor_form *wanted, int64_t rows, struct attn_error *error)
{
    TRY(check_rows(field, found, wanted, rows, error));
    return validate_tensor(plan, found, field, error);
}

int32_t output_group(int32_t form)
{
    static const int32_t groups[NUM_OUTPUT_FORMS] = {1, 1, 64, 128, 16};
    return groups[form];
}

attn_status step_check_lse(const struct attn_tensor *lse, int64_t heads, int64_t rows,
                           struct attn_error *error)
{
    CHECK_TENSOR_IF(lse != NULL, lse, NULL, "lse", 2, {heads, rows}, 2, float32, true);
    return ATTN_OK;
}

attn_status step_check_eps(float eps, struct attn_error *error)
{
    BAD_IF(!isfinite(eps) || eps < 0, "norm_eps", "is %g; finite, 0 or above", (double)eps);
    return ATTN_OK;
}

/* Where the scales of a quantized output are read or written. */
static attn_status check_output_scales(const attn_plan *plan, const struct step *step,
                                       const struct attn_step_io *io, struct attn_error *error)
{
    const struct attn_layer_desc *layer = step->layer->desc;
    const int32_t form = layer->output_form;
    const int64_t groups = step->out.heads * step->out.head_size / output_group(form);
    const struct attn_io_output_quant *given = ext_find(io->next, ATTN_EXT_IO_OUTPUT_QUANT);
    BAD_IF(given == NULL, "attn_io_output_quant",
           "the layer's output form needs attn_io_output_quant on the run");
    BAD_IF(given->scale == NULL && (form == ATTN_OUTPUT_FP8_STATIC || form == ATTN_OUTPUT_NVFP4),
           "attn_io_output_quant", "scale, which fp8_static and nvfp4 need, is NULL");
    /* the groups of nvfp4 are bytes in one piece */
    const bool nvfp4 = form == ATTN_OUTPUT_NVFP4;
    const bool turned = !nvfp4 && layer->output_scale_column_major;
    const int64_t rows = plan->num_tokens;
    CHECK_TENSOR_IF(form != ATTN_OUTPUT_FP8_STATIC, given->block_scales, NULL, "block_scales", 2,
                    {turned ? groups : rows, turned ? rows : groups}, turned ? 2 : 1,
                    nvfp4 ? e4m3 : float32, !nvfp4);
    return plan->validate ? validate_apart(given->block_scales, "block_scales", error) : ATTN_OK;
}

/* Rows of pairs, [T, heads, size / 2] or [T, heads size / 2] bytes, each row in one piece. */
static attn_status check_pairs(const struct attn_tensor *out, const struct tensor_form *wanted,
                               int64_t rows, struct attn_error *error)
{
    const int64_t half = wanted->head_size / 2, columns = wanted->heads * half;
    const struct tensor_need flat = {"out", 2, {rows, columns}, 1, uint8};
    const struct tensor_need heads = {"out", 3, {rows, wanted->heads, half}, 1, uint8};
    TRY(tensor_check(out, out != NULL && out->ndim == 2 ? &flat : &heads, NULL, error));
    return out->ndim == 2 || tensor_stride(out, 1) == half
               ? ATTN_OK
               : BAD("out", "heads of out are %lld bytes apart; %lld, a row is in one piece",
                     (long long)tensor_stride(out, 1), (long long)half);
}

attn_status step_check_out(const attn_plan *plan, const struct step *step,
                           const struct attn_step_io *io, struct attn_error *error)
{
    const struct attn_tensor *out = io->out;
    int32_t form = step->layer->desc->output_form;
    struct tensor_form wanted = step->out;
    TRY_IF(form != ATTN_OUTPUT_PLAIN && step->program != run_idle,
           check_output_scales(plan, step, io, error));
    if (form == ATTN_OUTPUT_NVFP4) {
        return check_pairs(out, &wanted, plan->num_tokens, error);
    }
    if (form != ATTN_OUTPUT_PLAIN) {
        const struct attn_tensor fp8 = {.ndim = 3, .dtype = e4m3};
        wanted.kind = tensor_kind(&fp8);
    }
    return check_rows("out", out, &wanted, plan->num_tokens, error);
}

static attn_status check_attend(const attn_plan *plan, const struct step *step,
                                const struct attn_step_io *io, struct attn_error *error)
{
    TRY(check_input(plan, "q", io->q, &step->q, plan->num_tokens, error));
    TRY(step_check_lse(io->lse, step->q.heads, plan->num_tokens, error));
    return step_check_out(plan, step, io, error);
}

attn_status step_check_keys(const attn_plan *plan, const struct step *step,
                            const struct attn_step_io *io, int64_t rows, struct attn_error *error)
{
    const bool own = plan->given.key_start_loc != NULL; /* exact, where queries may have bounds */
    const int64_t end = own || !plan->looks ? plan->num_key_rows : validate_end_row(plan);
    TRY(check_rows("k", io->k, &step->k, rows, error));
    TRY(check_rows("v", io->v, &step->v, rows, error));
    TRY(validate_rows(plan, io->k, plan->first_key_row, end, "k", error));
    return validate_rows(plan, io->v, plan->first_key_row, end, "v", error);
}

/* Rows of padding are not read by a write. */
static attn_status check_written(const attn_plan *plan, const struct step *step,
                                 const struct attn_step_io *io, int64_t rows,
                                 struct attn_error *error)
{
    TRY(check_rows("k", io->k, &step->k, rows, error));
    TRY(check_rows("v", io->v, &step->v, rows, error));
    TRY(validate_written(plan, io->k, "k", error));
    return validate_written(plan, io->v, "v", error);
}

attn_status step_check_plain(const attn_plan *plan, const struct step *step,
                             const struct attn_step_io *io, bool writes, bool attends,
                             struct attn_error *error)
{
    const bool idle = step->program == run_idle, own = writes && step->bring_keys == NULL;
    const bool reads = attends && step->keys_are_inputs && !idle, brings = writes && !own;
    const int64_t slots = own ? plan->given.num_slots : 0;
    const int64_t tokens = reads || brings ? plan->num_key_rows : 0;
    TRY_IF(attends, check_attend(plan, step, io, error));
    TRY_IF(own, check_written(plan, step, io, slots > tokens ? slots : tokens, error));
    return reads || brings ? step_check_keys(plan, step, io, tokens, error) : ATTN_OK;
}

/* On a CPU, under validation: each position is a row of the table. */
static attn_status check_positions(const attn_plan *plan, const struct attn_io_rope *rope,
                                   struct attn_error *error)
{
    const int64_t rows = rope->cos_sin->shape[0];
    for (int64_t t = 0; t < plan->given.num_slots; t++) {
        BAD_IF(rope->positions[t] < 0 || rope->positions[t] >= rows, "positions",
               "positions[%lld] is %lld; cos_sin has positions 0 to %lld", (long long)t,
               (long long)rope->positions[t], (long long)rows - 1);
    }
    return ATTN_OK;
}

attn_status step_check_rope(const attn_plan *plan, const struct step *step,
                            const struct attn_step_io *io, struct attn_error *error)
{
    const struct attn_io_rope *rope = ext_find(io->next, ATTN_EXT_IO_ROPE);
    const struct attn_layer_desc *layer = step->layer->desc;
    const struct {
        const char *field;
        const struct attn_tensor *weight;
    } norms[] = {{"q_norm_weight", rope->q_norm_weight}, {"k_norm_weight", rope->k_norm_weight}};
    const int64_t rotary = rope->rotary_dim != 0 ? rope->rotary_dim : layer->head_size;
    const int64_t slots = plan->given.num_slots;
    BAD_IF(rope->form != layer->rope || rope->positions == NULL, "attn_io_rope",
           "form is not the layer's rope, or positions is NULL");
    BAD_IF(rotary < 0 || rotary % 2 != 0 || rotary > layer->head_size, "rotary_dim",
           "is not an even number from 0 to the layer's head_size");
    CHECK_TENSOR(rope->cos_sin, NULL, "cos_sin", 2, {TENSOR_ANY, rotary});
    for (int32_t i = 0; i < 2; i++) {
        BAD_IF(norms[i].weight != NULL && !layer->qk_norm, norms[i].field,
               "is given, and the layer does not say qk_norm");
        CHECK_TENSOR_IF(norms[i].weight != NULL, norms[i].weight, NULL, norms[i].field, 1,
                        {layer->head_size});
    }
    TRY(step_check_eps(rope->norm_eps, error));
    BAD_IF(slots < plan->given.num_actual_tokens || slots > plan->num_tokens, "num_slots",
           "%lld slots, and attn_io_rope rotates the queries of as many tokens; the batch has %d "
           "to %d",
           (long long)slots, plan->given.num_actual_tokens, plan->num_tokens);
    TRY(check_rows("q", io->q, &step->q, plan->num_tokens, error));
    return plan->looks ? check_positions(plan, rope, error) : ATTN_OK;
}
