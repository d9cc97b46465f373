/* SPDX-License-Identifier: Apache-2.0 */
/* Multimodal encoders in fp8: scales from the largest values of the last steps, q, k and v
 * quantized into the workspace (q and k padded with zeros), and one attend over them. All on the
 * device's stream; the host waits for nothing. */
#include <float.h>

#include "compositions.h"
#include "step/plan_state.h"

#define INPUTS 3 /* q, k, v */

static attn_status resolve(struct layer *layer, struct attn_error *error)
{
    const struct attn_layer_desc *l = &layer->desc;
    const struct attn_mm_encoder_quant *q = layer->mm_quant;
    BAD_IF(q->fp8 && l->encoder != ATTN_ENCODER_MULTIMODAL, "fp8",
           "layer '%s': fp8 is 1; a multimodal encoder is needed", l->name);
    BAD_IF(q->padded_head_size > 0 &&
               (q->padded_head_size < l->head_size || q->padded_head_size % 8 != 0),
           "padded_head_size",
           "layer '%s': padded_head_size %d; 0, or a multiple of 8 from head_size %d", l->name,
           q->padded_head_size, l->head_size);
    BAD_IF(!(q->scale_margin >= 0 && q->scale_margin <= FLT_MAX), "scale_margin",
           "layer '%s': scale_margin is %g; 0 or a positive factor", l->name,
           (double)q->scale_margin);
    BAD_IF(!q->fp8 &&
               (q->amax_history_len != 0 || q->scale_margin != 0 || q->padded_head_size != 0),
           "amax_history_len",
           "layer '%s': amax_history_len is %d, scale_margin %g, padded_head_size %d, which need "
           "fp8",
           l->name, q->amax_history_len, (double)q->scale_margin, q->padded_head_size);
    if (q->fp8 && q->padded_head_size > 0) {
        layer->attend_size = q->padded_head_size;
    }
    return ATTN_OK;
}

static void match(struct check *check, int32_t phase)
{
    const struct attn_backend_caps *caps = check->caps;
    if (!check->whole->mm_quant->fp8) {
        return;
    }
    CHECK_NEEDS(check, "mm_encoder_fp8",
                {caps->features & ATTN_FEATURE_FP8_INPUTS, "keys and values in e4m3, contiguous"},
                {caps->features & ATTN_FEATURE_QUANTIZED_QUERY, "a quantized query"},
                {caps->q_dtypes >> ATTN_DTYPE_FP8_E4M3 & 1, "a query in e4m3"},
                {caps->kv_dtypes >> ATTN_KV_FP8_E4M3 & 1, "kv_dtype fp8_e4m3"},
                {(caps->k_scale_forms & caps->v_scale_forms) >> ATTN_SCALE_PER_TENSOR & 1,
                 "scales per tensor"});
    check_need_kernel(check, ATTN_KERNEL_QUANTIZE, "");
    if (check->whole->mm_quant->padded_head_size > check->layer->head_size) {
        check_need_kernel(check, ATTN_KERNEL_FILL, " (padding of heads)");
    }
    if (check->whole->mm_quant->amax_history_len > 0) {
        check_need_kernel(check, ATTN_KERNEL_AMAX, "");
        check_need_feature(check, true, ATTN_FEATURE_AMAX_HISTORY, "mm_encoder_fp8",
                           "scales that follow the inputs (amax_history)");
    }
    check_compose(check, ATTN_COMPOSE_MM_ENCODER, ATTN_GRAPH_ALWAYS);
}

static const struct attn_mm_encoder_state *state_of(const struct attn_layer_params *params)
{
    return ext_find(params->next, ATTN_EXT_DRAFT_MM_ENCODER_STATE);
}

/* One attend over inputs that the core has quantized. */
static attn_status bind(attn_layer *layer, struct attn_error *error)
{
    struct attn_layer_desc *desc = &layer->parts[PART_MAIN];
    struct attn_layer_params *params = &layer->part_params[PART_MAIN];
    const struct attn_mm_encoder_state *state = state_of(params);
    const int32_t length = layer->selected->mm_quant->amax_history_len;
    int32_t padded = layer->selected->mm_quant->padded_head_size;
    desc->head_size = padded > 0 ? padded : desc->head_size;
    desc->kv_dtype = ATTN_KV_FP8_E4M3;
    desc->q_dtype = ATTN_DTYPE_FP8_E4M3;
    desc->q_scale_form = desc->k_scale_form = desc->v_scale_form = ATTN_SCALE_PER_TENSOR;
    layer->needed_params = "scales of its inputs";
    if (layer->params == NULL) {
        return ATTN_OK;
    }
    BAD_IF(state == NULL || state->scales == NULL, "attn_mm_encoder_state",
           "layer '%s' quantizes its inputs; attn_mm_encoder_state and its scales [3] are needed "
           "on the parameters",
           desc->name);
    BAD_IF((state->amax_history != NULL) != (length > 0), "amax_history",
           "layer '%s': amax_history is %p and amax_history_len %d; [3, amax_history_len], or NULL "
           "with scales that are given",
           desc->name, (const void *)state->amax_history, length);
    params->q_scale = &state->scales[0];
    params->k_scale = &state->scales[1];
    params->v_scale = &state->scales[2];
    return ATTN_OK;
}

/* Places in the workspace of q, k, v quantized: [T, heads, head size] e4m3; and of one number. */
struct encoder_areas {
    size_t inputs[INPUTS], largest;
};

static attn_status build(attn_plan *plan, struct attn_error *error)
{
    struct encoder_areas *areas = plan->data[COMPOSITION_ENCODER];
    FOR_SERVED(step, plan, COMPOSITION_ENCODER) {
        plan_area(plan, &areas->largest, sizeof(float), ALWAYS);
        const struct attn_layer_desc *part = &step->layer->parts[PART_MAIN];
        for (int32_t i = 0; i < INPUTS; i++) {
            int64_t row = (int64_t)(i == 0 ? part->num_q_heads : part->num_kv_heads) *
                          (i == 2 ? part->head_size_v : part->head_size);
            plan_area(plan, &areas->inputs[i], plan->limits.max_num_tokens * row, ALWAYS);
        }
    }
    return ATTN_OK;
}

/* One of q, k and v: its largest, and with it the history and the scale, on the device; then rows
 * first .. end-1 of it quantized, to those of `padded`. */
static attn_status quantize(const attn_plan *plan, const struct step *step, int32_t i,
                            const struct attn_tensor *given, void *stream,
                            struct own_tensor *padded, struct attn_error *error)
{
    const struct attn_layer_desc *part = &step->layer->parts[PART_MAIN];
    const struct attn_mm_encoder_state *state = state_of(&step->layer->part_params[PART_MAIN]);
    const struct encoder_areas *areas = plan->data[COMPOSITION_ENCODER];
    const struct instance *instance = step_instance(step);
    const int32_t length = step->layer->selected->mm_quant->amax_history_len;
    const struct attn_tensor e4m3 = {.device = plan->model->device,
                                     .dtype = {ATTN_CODE_FLOAT8_E4M3FN, 8, 1}};
    int64_t first = i > 0 ? plan->first_key_row : plan->first_row;
    int64_t end = i > 0 ? plan->num_key_rows : plan->given.num_actual_tokens;
    int64_t heads = given->shape[1], size = given->shape[2], row = tensor_stride(given, 0);
    int64_t width = i == 2 ? part->head_size_v : part->head_size;
    uint8_t *from = tensor_data(given), *to = plan->scratch + areas->inputs[i];
    struct own_tensor x, out;
    tensor_set(&x, given, from + first * row * (given->dtype.bits / 8), end - first, heads, size,
               row, tensor_stride(given, 1), tensor_stride(given, 2));
    tensor_set_rows(padded, &e4m3, to, end, heads, width);
    to += first * heads * width;
    tensor_set(&out, &e4m3, to, end - first, heads, size, heads * width, width, 1);
    if (length > 0) {
        const struct attn_amax_args args =
            KERNEL_ARGS(instance, stream, .x = &x.tensor,
                        .out = (float *)(void *)(plan->scratch + areas->largest),
                        .history = state->amax_history + (size_t)i * (size_t)length,
                        .scale = &state->scales[i], .history_len = length);
        TRY(operation("amax", instance->kernels.amax(&args, error), error));
    }
    if (size < width) {
        const struct attn_fill_args args = KERNEL_ARGS(
            instance, stream, .destination = to + size, .row_bytes = (size_t)(width - size),
            .stride = (size_t)width, .rows = (end - first) * heads);
        TRY(operation("fill", instance->kernels.fill(&args, error), error));
    }
    const struct attn_quantize_args args = KERNEL_ARGS(
        instance, stream, .form = ATTN_OUTPUT_FP8_STATIC, .scale_form = ATTN_SCALE_PER_TENSOR,
        .x = &x.tensor, .out = &out.tensor, .scale = &state->scales[i]);
    return operation("quantize", instance->kernels.quantize(&args, error), error);
}

static attn_status run(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                       struct attn_error *error)
{
    const struct attn_tensor *given[INPUTS] = {io->q, io->k, io->v};
    struct own_tensor inputs[INPUTS];
    struct attn_step_io quantized = *io;
    ERROR_IF(plan->num_key_rows > plan->limits.max_num_tokens, ATTN_ERROR_LIMIT, "key_start_loc",
             "%d rows of keys; a quantized encoder's plan has room for %d, its limit of tokens",
             plan->num_key_rows, plan->limits.max_num_tokens);
    for (int32_t i = 0; i < INPUTS; i++) {
        TRY(quantize(plan, step, i, given[i], io->stream, &inputs[i], error));
    }
    quantized.q = &inputs[0].tensor;
    quantized.k = &inputs[1].tensor;
    quantized.v = &inputs[2].tensor;
    return run_attends(plan, step, &quantized, error);
}

static void choose(attn_plan *plan, struct step *step)
{
    step->program = step_attends(plan, step) == run_attends ? run : step->program;
}

const struct composition composition_encoder = {
    .extension = offsetof(struct layer, mm_quant),
    .resolve = resolve,
    .match = match,
    .composed = ATTN_COMPOSE_MM_ENCODER,
    .bind = bind,
    .plan_bytes = sizeof(struct encoder_areas),
    .build = build,
    .choose = choose,
};
