/* SPDX-License-Identifier: Apache-2.0 */
/* The slots that work on tensors without a cache: merge_states, quantize, amax, batched_gemm. */
#include "gpu/host/instance.h"
#include "gpu/latent.h"

attn_status gpu_merge_states(const struct attn_merge_states_args *args, struct attn_error *error)
{
    const struct attn_io_output_quant *quant = ext_of(args->next, ATTN_EXT_IO_OUTPUT_QUANT);
    const struct gpu_merge_params p = {
        .prefix = gpu_tensor_of(args->prefix_out),
        .suffix = gpu_tensor_of(args->suffix_out),
        .out = gpu_tensor_of(args->out),
        .prefix_lse = gpu_lse_of(args->prefix_lse),
        .suffix_lse = gpu_lse_of(args->suffix_lse),
        .lse = gpu_lse_of(args->lse),
        .first_row = args->first_row,
        .num_rows = args->num_rows,
        .num_rows_with_prefix = args->num_rows_with_prefix,
        .out_scale = quant != NULL && args->out->dtype.bits == 8 ? quant->scale : NULL,
        .heads = (int32_t)args->out->shape[1],
        .dims = (int32_t)args->out->shape[2],
    };
    const int64_t items = p.num_rows * p.heads;
    return gpu_run(args->instance, GPU_KERNEL_merge_states, items,
                   gpu_warp_groups(&args->instance->device, GPU_THREADS_merge_states, items, 16),
                   &p, args->stream, "merge_states", error);
}

int32_t gpu_output_group(int32_t form)
{
    static const int32_t groups[ATTN_OUTPUT_NVFP4 + 1] = {1, 1, 64, 128, 16};
    return form > ATTN_OUTPUT_PLAIN && form <= ATTN_OUTPUT_NVFP4 ? groups[form] : 0;
}

const char *gpu_launch_quantize(const struct gpu_device *device,
                                const struct gpu_quantize_params *p, void *stream)
{
    int64_t elements = p->num_rows * p->heads * p->dims, most = (int64_t)device->num_sms * 32;
    if (elements <= 0) {
        return NULL;
    }
    if (p->form == ATTN_OUTPUT_FP8_STATIC) {
        return gpu_device_launch(device, GPU_KERNEL_quantize_static,
                                 gpu_groups(elements, GPU_THREADS_quantize_static, most), p,
                                 stream);
    }
    if (p->form == ATTN_OUTPUT_NVFP4) {
        return gpu_device_launch(device, GPU_KERNEL_quantize_nvfp4,
                                 gpu_groups(elements / 16, GPU_THREADS_quantize_nvfp4, most), p,
                                 stream);
    }
    return gpu_device_launch(
        device, GPU_KERNEL_quantize_groups,
        gpu_warp_groups(device, GPU_THREADS_quantize_groups, elements / p->group, 32), p, stream);
}

attn_status gpu_quantize(const struct attn_quantize_args *args, struct attn_error *error)
{
    struct gpu_quantize_params p = {
        .x = gpu_tensor_of(args->x),
        .out = gpu_tensor_of(args->out),
        .scale = args->scale,
        .num_rows = args->x->shape[0],
        .heads = (int32_t)args->x->shape[1],
        .dims = (int32_t)args->x->shape[2],
        .form = args->form,
        .per_head = args->scale_form == ATTN_SCALE_PER_HEAD,
        .pow2 = args->scale_pow2,
        .group = gpu_output_group(args->form),
    };
    if (args->form == ATTN_OUTPUT_NVFP4) { /* two elements to a byte, rows of bytes */
        p.out.row = tensor_stride(args->out, 0);
    }
    if (args->block_scales != NULL) {
        bool columns = args->form != ATTN_OUTPUT_NVFP4 && args->scale_column_major;
        p.block_scales = (char *)args->block_scales->data + args->block_scales->byte_offset;
        p.scale_row = tensor_stride(args->block_scales, columns ? 1 : 0);
        p.scale_column = tensor_stride(args->block_scales, columns ? 0 : 1);
    }
    return device_status(gpu_launch_quantize(&args->instance->device, &p, args->stream), "quantize",
                         error);
}

attn_status gpu_amax(const struct attn_amax_args *args, struct attn_error *error)
{
    struct gpu_amax_params p = {
        .x = gpu_tensor_of(args->x),
        .out = args->out,
        .num_rows = args->x->shape[0],
        .heads = (int32_t)args->x->shape[1],
        .dims = (int32_t)args->x->shape[2],
        .per_head = args->per_head,
        .accumulate = args->accumulate,
    };
    const struct gpu_device *device = &args->instance->device;
    const char *cause = NULL;
    int64_t items = p.num_rows * p.heads;
    if (!p.accumulate) {
        size_t bytes = (p.per_head ? (size_t)p.heads : 1) * sizeof(float);
        cause = gpu_device_fill(device, p.out, 0, bytes, bytes, 1, args->stream);
    }
    if (cause == NULL && items > 0) {
        cause = gpu_device_launch(device, GPU_KERNEL_amax,
                                  gpu_warp_groups(device, GPU_THREADS_amax, items, 32), &p,
                                  args->stream);
    }
    if (cause == NULL && args->struct_size >= sizeof *args && args->history_len > 0) {
        p.history = args->history;
        p.scale = args->scale;
        p.history_len = args->history_len;
        cause = gpu_device_launch(device, GPU_KERNEL_amax_keep, 1, &p, args->stream);
    }
    return device_status(cause, "amax", error);
}

static struct gpu_batch_matrix batch_matrix_of(const struct attn_tensor *tensor)
{
    return (struct gpu_batch_matrix){(char *)tensor->data + tensor->byte_offset,
                                     tensor_stride(tensor, 0), tensor_stride(tensor, 1),
                                     tensor_stride(tensor, 2), number_dtype_name(tensor->dtype)};
}

/* Whether gemm_few serves the call: few rows, and 16-bit weights contiguous in one direction. */
static bool streams_weights(const struct gpu_gemm_params *p)
{
    const struct gpu_batch_matrix *w = &p->w;
    if (p->m > GEMM_FEW || p->block_scale.data != NULL ||
        (w->dtype != ATTN_DTYPE_F16 && w->dtype != ATTN_DTYPE_BF16)) {
        return false;
    }
    if (w->row == 1) { /* columns are contiguous: 8 elements in a load */
        return p->k % 8 == 0 && w->batch % 8 == 0 && w->column % 8 == 0 &&
               (uintptr_t)w->data % 16 == 0;
    }
    return w->column == 1 && p->n % 2 == 0 && w->batch % 2 == 0 && w->row % 2 == 0 &&
           (uintptr_t)w->data % 4 == 0;
}

attn_status gpu_batched_gemm(const struct attn_batched_gemm_args *args, struct attn_error *error)
{
    struct gpu_gemm_params p = {
        .a = batch_matrix_of(args->a),
        .w = batch_matrix_of(args->w),
        .out = batch_matrix_of(args->out),
        .scale = args->w_scale,
        .scale_per_batch = args->w_scale_count > 1,
        .count = (int32_t)args->a->shape[0],
        .m = (int32_t)args->a->shape[1],
        .n = (int32_t)args->w->shape[2],
        .k = (int32_t)args->a->shape[2],
    };
    if (args->w_block_scale != NULL) {
        p.block_scale = batch_matrix_of(args->w_block_scale);
        p.scale_rows = (int32_t)(args->w->shape[1] / args->w_block_scale->shape[1]);
        p.scale_columns = (int32_t)(args->w->shape[2] / args->w_block_scale->shape[2]);
    }
    int64_t tiles = (int64_t)p.count * ((p.m + GEMM_ROWS - 1) / GEMM_ROWS) *
                    ((p.n + GEMM_COLUMNS - 1) / GEMM_COLUMNS);
    if (tiles <= 0) {
        return ATTN_OK;
    }
    const struct gpu_gemm *faster = args->instance->gemm;
    if (faster != NULL && faster->takes(&p)) {
        return device_status(faster->run(&args->instance->device, &p, args->stream), "batched_gemm",
                             error);
    }
    const bool few = streams_weights(&p);
    if (few) {
        const int32_t columns = GPU_THREADS_gemm_few * (p.w.row == 1 ? 1 : 2);
        tiles = (int64_t)p.count * ((p.n + columns - 1) / columns);
    }
    return gpu_run(args->instance, few ? GPU_KERNEL_gemm_few : GPU_KERNEL_gemm, tiles,
                   gpu_groups(tiles, 1, 1 << 20), &p, args->stream, "batched_gemm", error);
}
