/* SPDX-License-Identifier: Apache-2.0 */
/* Attends of cpu_ref that write codes: its numbers, quantized by it after CHANGE. Included by
 * mutants of plugin.c. */
#define MAX_NUMBERS (1 << 22)

static double numbers[MAX_NUMBERS]; /* outputs of one attend, in the layer's type */

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

static attn_status coded_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    if (args->layer->output_form == ATTN_OUTPUT_PLAIN) {
        return ref_attend(args, error);
    }
    struct attn_layer_desc layer = *args->layer;
    struct attn_attend_args numeric = *args;
    numeric.layer = &layer;
    const struct attn_io_output_quant *given = (const struct attn_io_output_quant *)args->next;
    const int64_t first = args->batch->query_start_loc[0],
                  count = args->batch->query_start_loc[args->batch->num_reqs] - first;
    const int32_t form = layer.output_form;
    int64_t shapes[3][3], strides[3][3];
    int64_t whole[3] = {first + count, layer.num_q_heads, layer.head_size_v};
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
                                          .scale_pow2 = layer.output_scale_pow2,
                                          .scale_column_major = layer.output_scale_column_major,
                                          .x = &x,
                                          .out = &out,
                                          .scale = given->scale};
    if (given->block_scales != NULL) {
        scales = rows_from(given->block_scales, first, count,
                           form != ATTN_OUTPUT_NVFP4 && quantize.scale_column_major, shapes[2],
                           strides[2]);
        quantize.block_scales = &scales;
    }
    layer.output_form = ATTN_OUTPUT_PLAIN;
    numeric.out = &all;
    attn_status status = ref_attend(&numeric, error);
    CHANGE
    return status == ATTN_OK ? ref_quantize(&quantize, error) : status;
}
