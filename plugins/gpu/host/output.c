/* SPDX-License-Identifier: Apache-2.0 */
/* Quantized outputs of attention: written by the kernels themselves, or quantized afterwards from
 * numbers in the scratch. */
#include "gpu/host/schedule.h"

static const struct attn_io_output_quant *given_output(const struct attn_attend_args *args)
{
    return ext_of(args->next, ATTN_EXT_IO_OUTPUT_QUANT);
}

struct gpu_tensor gpu_output_rows(const struct attn_attend_args *args)
{
    const struct attn_layer_desc *layer = args->layer;
    if (layer->output_form == ATTN_OUTPUT_PLAIN) {
        return gpu_tensor_of(args->out);
    }
    struct gpu_tensor rows = {(char *)args->out->data + args->out->byte_offset,
                              tensor_stride(args->out, 0), 0, layer->dtype};
    /* two elements to a byte, rows of bytes */
    rows.head = layer->output_form == ATTN_OUTPUT_NVFP4 ? layer->head_size_v / 2
                                                        : tensor_stride(args->out, 1);
    return rows;
}

struct gpu_output gpu_output_of(const struct attn_attend_args *args)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_io_output_quant *given = given_output(args);
    struct gpu_output out = {.form = layer->output_form};
    if (out.form == ATTN_OUTPUT_PLAIN) {
        return out;
    }
    out.group = gpu_output_group(out.form);
    while (1 << out.shift < out.group) {
        out.shift++;
    }
    out.pow2 = layer->output_scale_pow2;
    out.dims = layer->head_size_v;
    out.scale = given->scale;
    if (out.form != ATTN_OUTPUT_FP8_STATIC) {
        const struct attn_tensor *scales = given->block_scales;
        bool columns = out.form != ATTN_OUTPUT_NVFP4 && layer->output_scale_column_major;
        out.block_scales = (char *)scales->data + scales->byte_offset;
        out.scale_row = tensor_stride(scales, columns ? 1 : 0);
        out.scale_column = tensor_stride(scales, columns ? 0 : 1);
    }
    return out;
}

bool gpu_output_is_near(const struct attn_attend_args *args)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct gpu_tensor rows = gpu_output_rows(args);
    int32_t group = gpu_output_group(layer->output_form);
    return gpu_tensor_bits(&rows) % 4 == 0 && layer->head_size_v % (group > 16 ? group : 16) == 0;
}

struct gpu_tensor gpu_output_numbers(const struct attn_attend_args *args)
{
    const struct attn_layer_desc *layer = args->layer;
    return (struct gpu_tensor){(char *)args->scratch + layout_of_plan(args).out,
                               args->prepared->out_bytes,
                               args->prepared->out_bytes / layer->num_q_heads, layer->dtype};
}

const char *gpu_quantize_output(const struct attn_attend_args *args)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct schedule_host *plan = args->schedule_host;
    const struct gpu_output out = gpu_output_of(args);
    struct gpu_quantize_params p = {
        .x = gpu_output_numbers(args),
        .out = gpu_output_rows(args),
        .scale = out.scale,
        .block_scales = out.block_scales,
        .scale_row = out.scale_row,
        .scale_column = out.scale_column,
        .num_rows = plan->num_rows,
        .heads = layer->num_q_heads,
        .dims = layer->head_size_v,
        .form = out.form,
        .pow2 = out.pow2,
        .group = out.group,
        .query_start = args->batch->query_start_loc,
        .num_reqs = args->batch->num_reqs,
    };
    p.out.dtype = ATTN_DTYPE_FP8_E4M3;
    return gpu_launch_quantize(&args->instance->device, &p, args->stream);
}
