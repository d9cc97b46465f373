/* SPDX-License-Identifier: Apache-2.0 */
/* Compressors: layers whose output are rows for others' caches. A step writes its tokens' states
 * and is one call of `attend`, which pools the rows that they finish. */
#include <attn/draft/compressor.h>
#include <string.h>

#include "compositions.h"
#include "select/names.h"
#include "step/plan_state.h"

static attn_status resolve(struct layer *layer, struct attn_error *error)
{
    const struct attn_compressor_desc *x = layer->compressor;
    struct attn_layer_desc *l = &layer->desc;
    const int32_t heads = 2 * (1 + x->overlaps);
    BAD_IF(l->num_kv_heads != heads || l->num_q_heads != heads ||
               (l->head_size_v != 0 && l->head_size_v != l->head_size),
           "num_kv_heads",
           "layer '%s': num_q_heads %d, num_kv_heads %d, head_size_v %d; a compressor with "
           "overlaps %d has %d, %d, and 0 or head_size",
           l->name, l->num_q_heads, l->num_kv_heads, l->head_size_v, x->overlaps, heads, heads);
    l->kv_dtype = l->kv_dtype == ATTN_KV_AUTO ? ATTN_KV_F32 : l->kv_dtype;
    BAD_IF(l->kv_dtype != ATTN_KV_F32, "kv_dtype",
           "layer '%s': kv_dtype is %s; a compressor's states are f32 (auto: the same)", l->name,
           code_text(ATTN_NAMES_KV_DTYPE, l->kv_dtype).text);
    BAD_IF((x->rope == ATTN_ROPE_NONE) != (x->rotary_dim == 0) || x->rotary_dim % 2 != 0 ||
               x->rotary_dim > l->head_size,
           "rotary_dim",
           "layer '%s': rotary_dim is %d with rope %d; 0 without rope, with it an even number from "
           "2 to head_size %d",
           l->name, x->rotary_dim, x->rope, l->head_size);
    layer->is_latent = layer->writes_apart = true;
    l->has_window = 1; /* later rows are pooled of no older states */
    l->window_left = x->tokens_per_row * (1 + x->overlaps) - 1;
    l->window_right = 0;
    const int32_t key[] = {ATTN_LAYER_DRAFT_COMPRESSOR, x->tokens_per_row, x->overlaps};
    memcpy(layer->batch_key, key, sizeof key);
    return ATTN_OK;
}

static attn_status check_io(const attn_plan *plan, const struct step *step,
                            const struct attn_step_io *io, bool writes, bool attends,
                            struct attn_error *error)
{
    const struct attn_io_compressor *given = ext_find(io->next, ATTN_EXT_DRAFT_IO_COMPRESSOR);
    const struct attn_compressor_desc *x = step->layer->selected->compressor;
    const int64_t size = step->layer->desc->head_size;
    BAD_IF(io->q != NULL || io->v != NULL || io->lse != NULL,
           io->q != NULL   ? "q"
           : io->v != NULL ? "v"
                           : "lse",
           "is given; a compressor has neither q nor v nor lse");
    TRY_IF(writes, check_rows("k", io->k, &step->k, plan->given.num_slots, error));
    TRY_IF(writes, validate_written(plan, io->k, "k", error));
    if (!attends) {
        return ATTN_OK;
    }
    TRY(check_rows("out", io->out, &step->out, plan->num_tokens, error));
    BAD_IF(given == NULL, "attn_io_compressor", "is missing, and the run attends");
    TRY(step_check_eps(given->norm_eps, error));
    int64_t longest = plan->given.max_seq_len > 0 ? plan->given.max_seq_len : 1;
    const bool on_cpu = plan->model->device.type == ATTN_DEVICE_CPU && plan->given.seq_lens != NULL;
    for (int32_t r = 0; on_cpu && r < plan->given.num_reqs; r++) {
        longest = plan->given.seq_lens[r] > longest ? plan->given.seq_lens[r] : longest;
    }
    CHECK_TENSOR_IF(given->norm_weight != NULL, given->norm_weight, NULL, "norm_weight", 1, {size});
    CHECK_TENSOR_IF(given->position_bias != NULL, given->position_bias, NULL, "position_bias", 2,
                    {x->tokens_per_row, (1 + x->overlaps) * size}, .more = 1);
    CHECK_TENSOR_IF(x->rope != ATTN_ROPE_NONE, given->cos_sin, NULL, "cos_sin", 2,
                    {longest, x->rotary_dim}, .more = 1);
    return ATTN_OK;
}

static attn_status build(attn_plan *plan, struct attn_error *error)
{
    FOR_SERVED(step, plan, COMPOSITION_COMPRESSOR) {
        step->check_io = check_io;
        step->out.heads = 1;
    }
    return ATTN_OK;
}

const struct composition composition_compressor = {
    .extension = offsetof(struct layer, compressor),
    .resolve = resolve,
    .build = build,
};
