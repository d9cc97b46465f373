/* SPDX-License-Identifier: Apache-2.0 */
/* Attends that write codes: cpu_ref's numbers, quantized by cpu_ref, with one mistake. */
#include <stdlib.h>
#include <string.h>

#include "mutants.h"

#define MAX_NUMBERS (1 << 22)

static double numbers[MAX_NUMBERS]; /* of one attend, in the layer's type */

/* Rows from `first` on of a tensor of rows. */
static struct attn_tensor rows_from(const struct attn_tensor *tensor, int64_t first, int64_t count,
                                    int32_t dim, int64_t *shape, int64_t *strides)
{
    struct attn_tensor rows = *tensor;
    int64_t stride = 1;
    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
        shape[i] = i == dim ? count : tensor->shape[i];
        strides[i] = tensor->strides != NULL ? tensor->strides[i] : stride;
        stride *= tensor->shape[i];
    }
    rows.shape = shape;
    rows.strides = strides;
    rows.byte_offset += (uint64_t)(first * strides[dim] * (tensor->dtype.bits / 8));
    return rows;
}

attn_status mutant_attend_codes(const struct attn_kernels *kernels, const struct mutant *mutant,
                                struct mutable_args *m, struct attn_error *error)
{
    const struct attn_attend_args *args = &m->args;
    const struct attn_io_output_quant *given = (const struct attn_io_output_quant *)args->next;
    const int64_t first = args->batch->query_start_loc[0],
                  count = args->batch->query_start_loc[args->batch->num_reqs] - first;
    const int32_t form = m->layer.output_form;
    int64_t shapes[3][3], strides[3][3];
    int64_t whole[3] = {first + count, m->layer.num_q_heads, m->layer.head_size_v};
    struct attn_tensor all = {numbers, args->q->device, 3, args->k->dtype, whole, NULL, 0};
    if (whole[0] * whole[1] * whole[2] > MAX_NUMBERS) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    struct attn_tensor x = rows_from(&all, first, count, 0, shapes[0], strides[0]), scales;
    struct attn_tensor out = rows_from(args->out, first, count, 0, shapes[1], strides[1]);
    struct attn_quantize_args quantize = {.struct_size = sizeof quantize,
                                          .instance = args->instance,
                                          .form = form,
                                          .scale_form = ATTN_SCALE_PER_TENSOR,
                                          .scale_pow2 = m->layer.output_scale_pow2,
                                          .scale_column_major = m->layer.output_scale_column_major,
                                          .x = &x,
                                          .out = &out,
                                          .scale = given->scale};
    if (given->block_scales != NULL) {
        scales = rows_from(given->block_scales, first, count,
                           form != ATTN_OUTPUT_NVFP4 && quantize.scale_column_major, shapes[2],
                           strides[2]);
        quantize.block_scales = &scales;
    }
    m->layer.output_form = ATTN_OUTPUT_PLAIN;
    m->args.out = &all;
    attn_status status = kernels->attend(&m->args, error);
    if (status == ATTN_OK) {
        mutant->codes(&quantize);
        status = kernels->quantize(&quantize, error);
    }
    return status;
}

static void as_asked(struct attn_quantize_args *args)
{
}

static void scaled_twice(struct attn_quantize_args *args)
{
    static float scale;
    if (args->scale != NULL) {
        scale = *args->scale * 1.25f;
        args->scale = &scale;
    }
}

static void any_scale(struct attn_quantize_args *args)
{
    args->scale_pow2 = 0;
}

/* Two groups of 64 share a scale, which stands in the first one's place. */
static void wider_groups(struct attn_quantize_args *args)
{
    int64_t columns = args->x->shape[1] * args->x->shape[2];
    args->form = args->form == ATTN_OUTPUT_FP8_GROUP_64 && columns % 128 == 0
                     ? ATTN_OUTPUT_FP8_GROUP_128
                     : args->form;
}

/* Codes of a row's first head for all of them. */
static void first_head(struct attn_quantize_args *args)
{
    ((int64_t *)args->x->strides)[1] = 0;
}

static const struct mutant mutants[] = {
    {.name = "control_codes", .codes = as_asked},
    {.name = "mutant_codes_scaled_twice", .codes = scaled_twice},
    {.name = "mutant_codes_any_scale", .codes = any_scale},
    {.name = "mutant_codes_wider_groups", .codes = wider_groups},
    {.name = "mutant_codes_of_first_head", .codes = first_head},
};
const struct mutant_list output_mutants = {mutants, sizeof mutants / sizeof *mutants};
