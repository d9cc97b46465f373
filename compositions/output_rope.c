/* SPDX-License-Identifier: Apache-2.0 */
/* Outputs that are rotated back: the step's output as it is, then a rotation of the last dims of
 * each row by the negative angle of its query's position. On CPUs the core does it itself. */
#include <attn/draft/output_rope.h>
#include <math.h>

#include "compositions.h"
#include "step/plan_state.h"

static attn_status resolve(struct layer *layer, struct attn_error *error)
{
    const struct attn_output_rope *rope = layer->output_rope;
    const struct attn_layer_desc *l = &layer->desc;
    const bool latent = layer->mla != NULL && !layer->mla->absorb_in_core;
    const int32_t size = latent               ? layer->mla->kv_lora_rank
                         : l->head_size_v > 0 ? l->head_size_v
                                              : l->head_size;
    BAD_IF(rope->rotary_dim % 2 != 0 || rope->rotary_dim > size, "rotary_dim",
           "layer '%s': attn_output_rope has rotary_dim %d; an even number up to the %d dims of an "
           "output row",
           l->name, rope->rotary_dim, size);
    return ATTN_OK;
}

static void match(struct check *check, int32_t phase)
{
    check_compose(check, ATTN_COMPOSE_OUTPUT_ROPE, ATTN_GRAPH_ALWAYS);
    CHECK_NEEDS(check, "attn_output_rope",
                {check->caps->device.type == ATTN_DEVICE_CPU ||
                     check->caps->features & ATTN_FEATURE_DRAFT_OUTPUT_ROPE,
                 "on this device", "CPUs, or output_rope"},
                {check->layer->output_form == ATTN_OUTPUT_PLAIN, "with a quantized output_form"},
                {!check->layer->fast_prefill, "with fast_prefill"});
}

static float load_half(uint16_t code)
{
    const int32_t exponent = code >> 10 & 31, mantissa = code & 1023;
    const float value = exponent == 31  ? (mantissa != 0 ? NAN : INFINITY)
                        : exponent == 0 ? ldexpf((float)mantissa, -24)
                                        : ldexpf((float)(mantissa + 1024), exponent - 25);
    return code & 0x8000 ? -value : value;
}

/* To nearest, ties to even; a mantissa that rounds up to the next power carries. */
static uint16_t store_half(float value)
{
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const float size = fabsf(value);
    if (isnan(value) || size >= 65520) {
        return sign | (isnan(value) ? 0x7e00 : 0x7c00);
    }
    const int32_t exponent = size >= 0x1p-14f ? ilogbf(size) : -14;
    const int32_t mantissa = (int32_t)lrintf(ldexpf(size, 10 - exponent));
    return (uint16_t)(sign | ((exponent + 14) * 1024 + mantissa));
}

static float load_number(const void *at, int32_t dtype)
{
    uint16_t code;
    uint32_t bits;
    float value;
    if (dtype == ATTN_DTYPE_F32) {
        memcpy(&value, at, sizeof value);
        return value;
    }
    memcpy(&code, at, sizeof code);
    bits = (uint32_t)code << 16;
    memcpy(&value, &bits, sizeof value);
    return dtype == ATTN_DTYPE_BF16 ? value : load_half(code);
}

static void store_number(void *at, int32_t dtype, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t brain =
        (uint16_t)(isnan(value) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    const uint16_t code = dtype == ATTN_DTYPE_BF16 ? brain : store_half(value);
    memcpy(at, dtype == ATTN_DTYPE_F32 ? (const void *)&value : (const void *)&code,
           dtype == ATTN_DTYPE_F32 ? sizeof value : sizeof code);
}

struct rotation {
    const struct attn_output_rope *rope;
    const int64_t *positions;
    const struct attn_tensor *table, *out;
    int64_t first_row, num_rows; /* 0 where a device rotates */
};

/* Items are rows of all heads. */
static void rotate_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct rotation *r = argument;
    const int32_t dtype = dtype_id_of(r->out->dtype), of_table = dtype_id_of(r->table->dtype);
    const int32_t half = r->rope->rotary_dim / 2, first = (int32_t)r->out->shape[2] - 2 * half;
    const bool neox = r->rope->form == ATTN_ROPE_NEOX;
    for (int64_t row = begin + r->first_row; row < end + r->first_row; row++) {
        for (int32_t d = 0; d < half; d++) {
            const int64_t position = r->positions[row];
            const float c = load_number(tensor_element(r->table, position, 0, d), of_table);
            const float s = load_number(tensor_element(r->table, position, 0, half + d), of_table);
            for (int64_t h = 0; h < r->out->shape[1]; h++) {
                uint8_t *x = tensor_element(r->out, row, h, first + (neox ? d : 2 * d));
                uint8_t *y = tensor_element(r->out, row, h, first + (neox ? half + d : 2 * d + 1));
                const float a = load_number(x, dtype), b = load_number(y, dtype);
                store_number(x, dtype, a * c + b * s);
                store_number(y, dtype, b * c - a * s);
            }
        }
    }
}

static attn_status check_io(const struct rotation *r, struct attn_error *error)
{
    CHECK_TENSOR(r->table, NULL, "cos_sin", 2, {TENSOR_ANY, r->rope->rotary_dim});
    for (int64_t row = r->first_row; row < r->first_row + r->num_rows; row++) {
        BAD_IF(r->positions[row] < 0 || r->positions[row] >= r->table->shape[0], "positions",
               "positions[%lld] is %lld; 0 to %lld, the rows of cos_sin", (long long)row,
               (long long)r->positions[row], (long long)r->table->shape[0] - 1);
    }
    return ATTN_OK;
}

static attn_status rotate_there(const attn_plan *plan, const struct step *step,
                                const struct rotation *r, void *stream, struct attn_error *error)
{
    const struct instance *on = step_instance(step);
    const struct attn_io_output_rope io = {
        {ATTN_EXT_DRAFT_IO_OUTPUT_ROPE, 0, sizeof io, NULL}, r->positions, r->table};
    struct attn_output_rope rope = *r->rope;
    rope.ext.next = &io.ext;
    const struct attn_write_kv_args args =
        KERNEL_ARGS(on, stream, .next = &rope.ext, .layer = step->layer->desc, .q = r->out,
                    .batch = &plan->given);
    return operation("rotate the output", on->kernels.rope_write_kv(&args, error), error);
}

static attn_status run(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                       struct attn_error *error)
{
    const struct attn_io_output_rope *given = ext_find(io->next, ATTN_EXT_DRAFT_IO_OUTPUT_ROPE);
    BAD_IF(given == NULL || given->positions == NULL, "attn_io_output_rope",
           "is missing, or its positions are NULL; the layer has attn_output_rope");
    struct rotation r = {step->layer->selected->output_rope, given->positions, given->cos_sin,
                         io->out};
    const struct attn_host *host = plan->arena.host;
    const bool here = plan->model->device.type == ATTN_DEVICE_CPU;
    if (here) {
        r.first_row = plan->given.query_start_loc[0]; /* the host's may be bounds */
        r.num_rows = plan->given.query_start_loc[plan->given.num_reqs] - r.first_row;
    }
    TRY(check_io(&r, error));
    TRY(step->inner(plan, step, io, error));
    if (r.num_rows > 0) {
        host->parallel_for(host->user, r.num_rows, 1, rotate_rows, (void *)(uintptr_t)&r);
    }
    return here || plan->given.num_actual_tokens == 0
               ? ATTN_OK
               : rotate_there(plan, step, &r, io->stream, error);
}

static void choose(attn_plan *plan, struct step *step)
{
    step->inner = step_attends(plan, step);
    step->program = run;
}

const struct composition composition_output_rope = {
    .extension = offsetof(struct layer, output_rope),
    .resolve = resolve,
    .match = match,
    .composed = ATTN_COMPOSE_OUTPUT_ROPE,
    .choose = choose,
};
