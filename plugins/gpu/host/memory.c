/* SPDX-License-Identifier: Apache-2.0 */
/* The slots that write and gather the cache, copy, fill, and make block tables. */
#include <attn/draft/compressor.h>
#include <attn/draft/output_rope.h>

#include "gpu/host/instance.h"

static struct gpu_write_params write_params(const struct attn_write_kv_args *args)
{
    return (struct gpu_write_params){
        .from = {gpu_tensor_of(args->k), gpu_tensor_of(args->v)},
        .to = {gpu_cache_of(args->layer, args->params, args->k_cache, false),
               gpu_cache_of(args->layer, args->params, args->v_cache, true)},
        .slots = args->slot_mapping,
        .num_slots = args->num_slots,
        .num_heads = args->layer->num_kv_heads,
        .sides = 2,
        .block_size = args->k_cache->block_size,
    };
}

static bool is_fp8(const struct gpu_cache *c)
{
    return c->dtype == ATTN_DTYPE_FP8_E4M3 || c->dtype == ATTN_DTYPE_FP8_E5M2;
}

/* The number of 16-byte vectors of a row for write_copy or, with is_fp8, write_fp8; 0 if they do
 * not serve it. */
static int32_t vectors_of_row(const struct gpu_tensor *from, const struct gpu_cache *to)
{
    int32_t bytes = number_bytes(to->dtype);
    bool fits = is_fp8(to) ? number_bytes(from->dtype) == 2 : bytes > 1 && from->dtype == to->dtype;
    if (!fits || to->pack != 0 || to->form != GPU_ROW_NUMBERS ||
        to->head_size % (16 / bytes) != 0 ||
        (gpu_tensor_bits(from) | gpu_cache_bits(to)) % 16 != 0) {
        return 0;
    }
    return to->head_size * bytes / 16;
}

/* Lanes for each row in write_scaled, which read 16 bytes each; 0 if it does not serve the rows. */
static int32_t lanes_of_row(const struct gpu_tensor *from, const struct gpu_cache *to)
{
    if (to->form != GPU_ROW_SCALED || to->pack != 0 || number_bytes(from->dtype) != 2 ||
        to->head_size % 8 != 0 || to->head_size > 256 || gpu_tensor_bits(from) % 16 != 0 ||
        gpu_cache_bits(to) % 4 != 0) {
        return 0;
    }
    return to->head_size <= 64 ? 8 : to->head_size <= 128 ? 16 : 32;
}

/* Writes rows of plain numbers 16 bytes at a time; sets p->vectors. Returns false, without a
 * launch, if the kernels do not serve the rows. */
static bool write_vectors(const struct gpu_device *device, struct gpu_write_params *p, void *stream,
                          const char **cause)
{
    static const enum gpu_kernel kernels[2][2] = {
        {GPU_KERNEL_write_copy, GPU_KERNEL_write_copy_far},
        {GPU_KERNEL_write_fp8, GPU_KERNEL_write_fp8_far}};
    for (int32_t i = 0; i < 2; i++) {
        p->vectors[i] = vectors_of_row(&p->from[i], &p->to[i]);
    }
    if (p->vectors[0] == 0 || p->vectors[1] == 0 || is_fp8(&p->to[0]) != is_fp8(&p->to[1])) {
        return false;
    }
    int64_t all = p->num_slots * p->num_heads * (p->vectors[0] + p->vectors[1]);
    bool far = all >= INT32_MAX; /* prefix sums of a few steps still fit into 32 bits */
    bool few = p->num_slots <= 4 * (int64_t)device->num_sms; /* then a group has a row */
    int64_t per = (int64_t)GPU_THREADS_write_copy * WRITE_VECTORS;
    *cause = gpu_device_launch(device, kernels[is_fp8(&p->to[0])][far],
                               few ? p->num_slots : gpu_groups(all, per, 1 << 20), p, stream);
    return true;
}

static const char *launch_write(const struct gpu_device *device, struct gpu_write_params *p,
                                void *stream)
{
    int64_t rows = p->num_slots * p->num_heads;
    const char *cause;
    if (write_vectors(device, p, stream, &cause)) {
        return cause;
    }
    int32_t k_lanes = lanes_of_row(&p->from[0], &p->to[0]);
    int32_t v_lanes = lanes_of_row(&p->from[1], &p->to[1]);
    if (k_lanes > 0 && v_lanes > 0) {
        int32_t lanes = k_lanes > v_lanes ? k_lanes : v_lanes;
        int64_t per = (int64_t)GPU_THREADS_write_scaled_8 / lanes * WRITE_VECTORS;
        return gpu_device_launch(device,
                                 lanes == 8    ? GPU_KERNEL_write_scaled_8
                                 : lanes == 16 ? GPU_KERNEL_write_scaled_16
                                               : GPU_KERNEL_write_scaled_32,
                                 gpu_groups(rows * 2, per, 1 << 20), p, stream);
    }
    return gpu_device_launch(device, GPU_KERNEL_write_rows,
                             gpu_warp_groups(device, GPU_THREADS_write_rows, rows * 2, 32), p,
                             stream);
}

/* A compressor's states. */
static attn_status write_states(const struct attn_write_kv_args *args, struct attn_error *error)
{
    const struct gpu_write_params p = {
        .from = {gpu_tensor_of(args->k)},
        .to = {gpu_cache_of(args->layer, args->params, args->k_cache, false)},
        .slots = args->slot_mapping,
        .num_slots = args->num_slots,
        .num_heads = args->k_cache->num_heads,
        .sides = 1,
        .block_size = args->k_cache->block_size,
    };
    const int64_t items = p.num_slots * p.num_heads;
    return gpu_run(args->instance, GPU_KERNEL_write_rows, items,
                   gpu_warp_groups(&args->instance->device, GPU_THREADS_write_rows, items, 32), &p,
                   args->stream, "write_kv", error);
}

static attn_status write_latent(const struct attn_write_kv_args *args, struct attn_error *error)
{
    struct gpu_write_params p;
    const char *cause;
    attn_status status = gpu_latent_parts(args, &p, error);
    if (status != ATTN_OK || args->num_slots <= 0) {
        return status;
    }
    return write_vectors(&args->instance->device, &p, args->stream, &cause)
               ? device_status(cause, "write_kv", error)
               : gpu_write_latent(args, error);
}

attn_status gpu_write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    if (args->layer->kind == ATTN_LAYER_INDEXER) {
        return gpu_write_index(args, error);
    }
    if (args->layer->kind == ATTN_LAYER_DRAFT_COMPRESSOR) {
        return write_states(args, error);
    }
    if (layer_is_latent(args->layer)) {
        return write_latent(args, error);
    }
    struct gpu_write_params p = write_params(args);
    return device_status(p.num_slots > 0 ? launch_write(&args->instance->device, &p, args->stream)
                                         : NULL,
                         "write_kv", error);
}

/* Rotates q, which is an attend's output, back. */
static attn_status rotate_output(const struct attn_write_kv_args *args,
                                 const struct attn_output_rope *rope, struct attn_error *error)
{
    const struct attn_io_output_rope *io = ext_of(args->next, ATTN_EXT_DRAFT_IO_OUTPUT_ROPE);
    struct gpu_rotate_params p = {
        .last = gpu_tensor_of(args->q),
        .cos_sin = gpu_tensor_of(io->cos_sin),
        .positions = io->positions,
        .query_start = args->batch->query_start_loc,
        .num_reqs = args->batch->num_reqs,
        .heads = (int32_t)args->q->shape[1],
        .rotary_dim = rope->rotary_dim,
        .neox = rope->form == ATTN_ROPE_NEOX,
    };
    p.last.data += (args->q->shape[2] - rope->rotary_dim) * number_bytes(p.last.dtype);
    const int64_t items = args->q->shape[0] * p.heads * (p.rotary_dim / 2);
    return gpu_run(
        args->instance, GPU_KERNEL_rotate_output, 1,
        gpu_groups(items, GPU_THREADS_rotate_output, (int64_t)args->instance->device.num_sms * 32),
        &p, args->stream, "rope_write_kv", error);
}

attn_status gpu_rope_write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    const struct attn_output_rope *back = ext_of(args->next, ATTN_EXT_DRAFT_OUTPUT_ROPE);
    if (back != NULL) {
        return rotate_output(args, back, error);
    }
    const struct attn_io_rope *rope = ext_of(args->next, ATTN_EXT_IO_ROPE);
    struct gpu_write_params p = write_params(args);
    const struct attn_tensor *norm[2] = {rope->q_norm_weight, rope->k_norm_weight};
    p.q = gpu_tensor_of(args->q);
    p.cos_sin = gpu_tensor_of(rope->cos_sin);
    p.positions = rope->positions;
    p.num_q_heads = args->layer->num_q_heads;
    p.rotary_dim = rope->rotary_dim > 0 ? rope->rotary_dim : args->layer->head_size;
    p.neox = rope->form == ATTN_ROPE_NEOX;
    p.norm_eps = rope->norm_eps;
    for (int32_t i = 0; i < 2; i++) {
        if (norm[i] != NULL) {
            p.norm[i] = (const char *)norm[i]->data + norm[i]->byte_offset;
            p.norm_dtype[i] = number_dtype_name(norm[i]->dtype);
        }
    }
    const int64_t items = p.num_slots * (p.num_q_heads + 2 * p.num_heads);
    return gpu_run(args->instance, GPU_KERNEL_rope_write, items,
                   gpu_warp_groups(&args->instance->device, GPU_THREADS_rope_write, items, 64), &p,
                   args->stream, "rope_write_kv", error);
}

attn_status gpu_gather_kv(const struct attn_gather_kv_args *args, struct attn_error *error)
{
    struct gpu_gather_params p = {
        .to = gpu_tensor_of(args->out),
        .block_table = args->batch->block_table,
        .block_table_row = args->batch->block_table_row,
        .first_key = args->first_key,
        .out_start = args->out_start_loc,
        .block_table_stride = args->batch->block_table_stride,
        .num_reqs = args->batch->num_reqs,
        .num_heads = args->cache->num_heads,
        .block_size = args->cache->block_size,
    };
    if (layer_is_latent(args->layer)) {
        return gpu_gather_latent(args, &p, error);
    }
    p.from = gpu_cache_of(args->layer, args->params, args->cache, false);
    return gpu_run(args->instance,
                   p.from.form >= GPU_ROW_INT4 ? GPU_KERNEL_gather_nibbles : GPU_KERNEL_gather,
                   p.num_reqs, (int64_t)args->instance->device.num_sms * 16, &p, args->stream,
                   "gather_kv", error);
}

attn_status gpu_copy(const struct attn_copy_args *a, struct attn_error *error)
{
    return device_status(gpu_device_copy(&a->instance->device, a->destination, a->source, a->bytes,
                                         a->kind, a->stream),
                         "copy", error);
}

attn_status gpu_fill(const struct attn_fill_args *a, struct attn_error *error)
{
    return device_status(gpu_device_fill(&a->instance->device, a->destination, a->value,
                                         a->row_bytes, a->stride, a->rows, a->stream),
                         "fill", error);
}

/* Copies by the driver, in one piece if rows are contiguous. */
static attn_status copy_run(const struct attn_copy_blocks_args *args,
                            const struct gpu_copy_run *run, struct attn_error *error)
{
    const bool whole = run->from_stride == run->bytes && run->to_stride == run->bytes;
    const int64_t rows = whole ? 1 : run->rows;
    struct attn_copy_args copy = {.struct_size = sizeof copy,
                                  .instance = args->instance,
                                  .stream = args->stream,
                                  .kind = args->kind,
                                  .bytes = (size_t)(whole ? run->rows * run->bytes : run->bytes)};
    attn_status status = ATTN_OK;
    for (int64_t i = 0; i < rows && status == ATTN_OK; i++) {
        copy.destination = run->to + i * run->to_stride;
        copy.source = run->from + i * run->from_stride;
        status = gpu_copy(&copy, error);
    }
    return status;
}

static attn_status launch_runs(const struct attn_copy_blocks_args *args, struct gpu_copy_params *p,
                               struct attn_error *error)
{
    const struct gpu_device *device = &args->instance->device;
    const char *cause = NULL;
    if (p->count > 0) {
        cause = gpu_device_launch(device, GPU_KERNEL_copy_runs, (int64_t)device->num_sms * 8, p,
                                  args->stream);
    }
    p->count = 0;
    return device_status(cause, "copy_blocks", error);
}

/* Whether `rows` rows of `bytes` at one place may overlap rows at another. */
static bool meet(const char *a, int64_t a_stride, int64_t a_rows, const char *b, int64_t b_stride,
                 int64_t b_rows, int64_t bytes)
{
    const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x < y + (uintptr_t)((b_rows - 1) * b_stride + bytes) &&
           y < x + (uintptr_t)((a_rows - 1) * a_stride + bytes);
}

/* Whether the order of two runs of one copy matters. */
static bool follows(const struct gpu_copy_run *a, const struct gpu_copy_run *b)
{
    return meet(a->to, a->to_stride, a->rows, b->from, b->from_stride, b->rows, a->bytes) ||
           meet(a->from, a->from_stride, a->rows, b->to, b->to_stride, b->rows, a->bytes) ||
           meet(a->to, a->to_stride, a->rows, b->to, b->to_stride, b->rows, a->bytes);
}

/* Adds a run to the next launch. Launches the pending runs first if there is no room, or if the run
 * must follow a run of its own copy, which begin at *first. */
static attn_status add_run(const struct attn_copy_blocks_args *args, struct gpu_copy_params *p,
                           const struct gpu_copy_run *run, int32_t *first, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    bool full = p->count == GPU_COPY_RUNS;
    for (int32_t i = *first; i < p->count && !full; i++) {
        full = follows(&p->runs[i], run);
    }
    if (full) {
        status = launch_runs(args, p, error);
        *first = 0;
    }
    p->runs[p->count++] = *run;
    return status;
}

/* The run that begins at pair j: as many adjacent rows as possible, as long as none reads what
 * another writes. */
static void find_run(const struct attn_copy_blocks_args *args, const struct attn_block_copy *copy,
                     int64_t j, struct gpu_copy_run *run)
{
    const int64_t *pair = &args->pairs[2 * j];
    run->from = (const char *)copy->source + pair[0] * copy->source_stride;
    run->to = (char *)copy->destination + pair[1] * copy->destination_stride;
    run->rows = 1;
    while (j + run->rows < args->num_pairs && pair[2 * run->rows] == pair[0] + run->rows &&
           pair[2 * run->rows + 1] == pair[1] + run->rows) {
        run->rows++;
    }
    if (meet(run->from, run->from_stride, run->rows, run->to, run->to_stride, run->rows,
             run->bytes)) {
        run->rows = 1;
    }
}

attn_status gpu_copy_blocks(const struct attn_copy_blocks_args *args, struct attn_error *error)
{
    struct gpu_copy_params p = {.count = 0};
    attn_status status = ATTN_OK;
    for (int32_t i = 0; status == ATTN_OK && i < args->num_copies; i++) {
        const struct attn_block_copy *copy =
            (const void *)((const char *)args->copies + (int64_t)i * args->copy_stride);
        struct gpu_copy_run run = {.from_stride = copy->source_stride,
                                   .to_stride = copy->destination_stride,
                                   .bytes = copy->bytes};
        int32_t first = p.count;
        for (int64_t j = 0; status == ATTN_OK && j < args->num_pairs; j += run.rows) {
            find_run(args, copy, j, &run);
            status = args->kind == ATTN_COPY_DEVICE_TO_DEVICE
                         ? add_run(args, &p, &run, &first, error)
                         : copy_run(args, &run, error);
        }
    }
    return status == ATTN_OK ? launch_runs(args, &p, error) : status;
}

attn_status gpu_make_block_table(const struct attn_block_table_args *args, struct attn_error *error)
{
    struct gpu_table_params p = {
        .block_table = args->block_table,
        .block_table_row = args->block_table_row,
        .page_indices = args->page_indices,
        .page_start = args->page_start_loc,
        .seq_lens = args->seq_lens,
        .last_page_len = args->last_page_len,
        .out = args->out,
        .out_seq_lens = args->out_seq_lens,
        .block_table_stride = args->block_table_stride,
        .num_reqs = args->num_reqs,
        .num_columns = args->num_columns,
        .blocks_per_entry = args->blocks_per_entry,
        .tokens_per_entry = args->tokens_per_entry,
    };
    return gpu_run(args->instance, GPU_KERNEL_make_table, p.num_reqs,
                   (int64_t)args->instance->device.num_sms * 16, &p, args->stream,
                   "make_block_table", error);
}
