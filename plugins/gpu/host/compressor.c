/* SPDX-License-Identifier: Apache-2.0 */
/* Compressors (attn/draft/compressor.h): the launch that pools the rows which a step finishes.
 * Their states are rows of a cache: memory.c. */
#include <attn/draft/compressor.h>

#include "gpu/host/instance.h"

attn_status gpu_compress(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_compressor_desc *x =
        ext_of(args->layer->next, ATTN_EXT_DRAFT_COMPRESSOR_DESC);
    const struct attn_io_compressor *io = ext_of(args->next, ATTN_EXT_DRAFT_IO_COMPRESSOR);
    const struct attn_batch *batch = args->batch;
    struct gpu_compressor_params p = {
        .states = gpu_cache_of(args->layer, args->params, args->k_cache, false),
        .out = gpu_tensor_of(args->out),
        .query_start = batch->query_start_loc,
        .seq_lens = batch->seq_lens,
        .block_table = batch->block_table,
        .block_table_row = batch->block_table_row,
        .block_table_stride = batch->block_table_stride,
        .num_reqs = batch->num_reqs,
        .num_tokens = batch->num_actual_tokens,
        .block_size = args->k_cache->block_size,
        .tokens_per_row = x->tokens_per_row,
        .overlaps = x->overlaps,
        .norm_eps = io->norm_eps,
    };
    if (io->position_bias != NULL) {
        p.bias = gpu_tensor_of(io->position_bias);
    }
    if (io->norm_weight != NULL) {
        p.norm = (const char *)io->norm_weight->data + io->norm_weight->byte_offset;
        p.norm_dtype = number_dtype_name(io->norm_weight->dtype);
    }
    if (x->rope != ATTN_ROPE_NONE) {
        p.cos_sin = gpu_tensor_of(io->cos_sin);
        p.rotary_dim = x->rotary_dim;
        p.neox = x->rope == ATTN_ROPE_NEOX;
    }
    return gpu_run(args->instance, GPU_KERNEL_compress, p.num_reqs > 0 ? p.num_tokens : 0,
                   gpu_groups(p.num_tokens, 1, 1 << 20), &p, args->stream, "attend", error);
}
