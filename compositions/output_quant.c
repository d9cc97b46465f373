/* SPDX-License-Identifier: Apache-2.0 */
/* Output forms that no attend of the backend writes, or that follow a merge or a projection:
 * the step's output as it is into the workspace, then `quantize`. */
#include "compositions.h"
#include "merged.h"
#include "select/names.h"

/* A backend's own form is that of one call of its slot `attend`: what is merged of parts, projected
 * or another slot's is quantized after that. */
static void match(struct check *check, int32_t phase)
{
    const struct attn_backend_caps *caps = check->caps;
    int32_t form = check->layer->output_form;
    bool own = caps->output_forms >> form & 1 && check->whole->kernel == ATTN_KERNEL_ATTEND;
    bool merged = check->match->composed & ATTN_COMPOSE_STATIC_SINK || check->whole->out_apart;
    if (form == ATTN_OUTPUT_PLAIN || (own && !merged)) {
        return;
    }
    if (caps->kernels & ATTN_KERNEL_QUANTIZE) {
        check_compose(check, ATTN_COMPOSE_OUTPUT_QUANT, ATTN_GRAPH_ALWAYS);
    } else if (own) {
        check_need_kernel(check, ATTN_KERNEL_QUANTIZE, " (after a merge or an up-projection)");
    } else {
        check_code(check, "output_form", ATTN_NAMES_OUTPUT_FORM, form, caps->output_forms);
    }
}

static attn_status bind(attn_layer *layer, struct attn_error *error)
{
    layer->parts[PART_MAIN].output_form = ATTN_OUTPUT_PLAIN;
    return ATTN_OK;
}

/* A plan keeps the place in its workspace of plain outputs, [T, Hq, Dv]. */
static attn_status build(attn_plan *plan, struct attn_error *error)
{
    size_t *plain = plan->data[COMPOSITION_OUTPUT_QUANT];
    FOR_SERVED(step, plan, COMPOSITION_OUTPUT_QUANT) {
        step->checks_out = false;
        plan_area(plan, plain, plan->limits.max_num_tokens * step_row_bytes(step), ALWAYS);
    }
    return ATTN_OK;
}

/* The rows of a tensor from the batch's first one on: those before it are another batch's. */
static const struct attn_tensor *own_rows(const attn_plan *plan, struct own_tensor *own,
                                          const struct attn_tensor *all, int32_t dim)
{
    tensor_copy(own, all);
    own->shape[dim] -= plan->first_row;
    own->tensor.byte_offset +=
        (uint64_t)(plan->first_row * own->strides[dim] * (all->dtype.bits / 8));
    return &own->tensor;
}

attn_status output_quantized(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                             size_t place, step_program *inner, struct attn_error *error)
{
    const struct attn_io_output_quant *given = ext_find(io->next, ATTN_EXT_IO_OUTPUT_QUANT);
    const struct attn_layer_desc *layer = step->layer->desc;
    const struct instance *instance = step_instance(step);
    const struct attn_tensor like = tensor_like(plan, &step->out);
    const int32_t scale_rows = layer->output_scale_column_major ? 1 : 0;
    struct own_tensor plain, x, out, scales;
    struct attn_step_io numbers = *io;
    numbers.out =
        tensor_set_rows(&plain, &like, plan->scratch + place, plan->given.num_actual_tokens,
                        step->out.heads, step->out.head_size);
    TRY(inner(plan, step, &numbers, error));
    struct attn_quantize_args args =
        KERNEL_ARGS(instance, io->stream, .form = layer->output_form,
                    .scale_form = ATTN_SCALE_PER_TENSOR, .scale_pow2 = layer->output_scale_pow2,
                    .scale_column_major = layer->output_scale_column_major,
                    .x = own_rows(plan, &x, numbers.out, 0),
                    .out = own_rows(plan, &out, io->out, 0), .scale = given->scale);
    if (layer->output_form != ATTN_OUTPUT_FP8_STATIC) { /* else unchecked */
        args.block_scales = own_rows(plan, &scales, given->block_scales, scale_rows);
    }
    return operation("quantize", instance->kernels.quantize(&args, error), error);
}

static attn_status run(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                       struct attn_error *error)
{
    const size_t *plain = plan->data[COMPOSITION_OUTPUT_QUANT];
    return output_quantized(plan, step, io, *plain, step->inner, error);
}

static void choose(attn_plan *plan, struct step *step)
{
    step->inner = step_attends(plan, step);
    step->program = run;
}

const struct composition composition_output_quant = {
    .match = match,
    .composed = ATTN_COMPOSE_OUTPUT_QUANT,
    .bind = bind,
    .plan_bytes = sizeof(size_t),
    .build = build,
    .choose = choose,
};
