/* SPDX-License-Identifier: Apache-2.0 */
#include "layer.h"
#include "client.h"
#include "number.h"

#include <math.h>

void layer_set_mla(struct attn_layer_desc *layer, struct attn_mla_desc *mla)
{
    mla->ext.id = ATTN_EXT_MLA_DESC;
    mla->ext.struct_size = sizeof *mla;
    layer->next = &mla->ext;
    layer->kind = ATTN_LAYER_MLA;
    layer->causal = ATTN_CAUSAL_YES;
    layer->num_kv_heads = 1;
    layer->head_size = mla->kv_lora_rank + mla->qk_rope_head_dim;
    layer->head_size_v = mla->v_head_dim;
    layer->scale = (float)(1 / sqrt(mla->qk_nope_head_dim + mla->qk_rope_head_dim));
}

void layer_set_compressed(struct attn_layer_desc *layer, struct attn_mla_desc *mla,
                          struct layer_compressed *compressed, int32_t size, int32_t topk,
                          int32_t ratio, int32_t rows_in_block)
{
    *mla = (struct attn_mla_desc){
        .kv_lora_rank = size, .qk_nope_head_dim = size, .v_head_dim = size, .topk = topk};
    layer_set_mla(layer, mla);
    compressed->cache = (struct attn_cache_desc){
        .role = ATTN_CACHE_COMPRESSED,
        .table = 1,
        .kv_dtype = layer->kv_dtype != ATTN_KV_AUTO ? layer->kv_dtype : layer->dtype,
        .num_heads = 1,
        .head_size = size,
        .block_size = rows_in_block,
        .tokens_per_row = ratio};
    compressed->rows = EXTENSION(attn_compressed_rows, ATTN_EXT_DRAFT_COMPRESSED_ROWS, NULL, );
    compressed->caches = layer_caches(&compressed->cache, 1, &compressed->rows.ext);
    mla->ext.next = &compressed->caches.ext;
}

void layer_set_recurrent(struct attn_layer_desc *layer, struct attn_recurrent_desc *recurrent)
{
    recurrent->ext.id = ATTN_EXT_RECURRENT_DESC;
    recurrent->ext.struct_size = sizeof *recurrent;
    recurrent->state_dtype = recurrent->state_dtype != 0 ? recurrent->state_dtype : ATTN_DTYPE_F32;
    layer->next = &recurrent->ext;
    layer->kind = ATTN_LAYER_RECURRENT;
    layer->causal = ATTN_CAUSAL_YES;
    layer->num_q_heads = layer->num_kv_heads = recurrent->num_k_heads;
    layer->head_size = recurrent->head_size_k;
    layer->head_size_v = recurrent->head_size_v;
    layer->scale = (float)(1 / sqrt(recurrent->head_size_k));
}

int32_t layer_ring_gates(const struct attn_recurrent_desc *recurrent)
{
    const int32_t group = recurrent->num_v_heads / recurrent->num_k_heads;
    return (recurrent->head_size_k + group * recurrent->head_size_v + 1) / 2 * 2;
}

struct attn_cache_desc layer_ring(const struct attn_recurrent_desc *recurrent, int32_t dtype,
                                  int32_t gates, int32_t replay)
{
    const int32_t in_floats = dtype == ATTN_DTYPE_F32 ? 1 : 2;
    const int32_t row = layer_ring_gates(recurrent) + gates / recurrent->num_k_heads * in_floats;
    return (struct attn_cache_desc){.role = ATTN_CACHE_REPLAY,
                                    .kv_dtype = dtype,
                                    .num_heads = recurrent->num_k_heads,
                                    .head_size = (row + 7) / 8 * 8,
                                    .block_size = replay + 2 * recurrent->num_speculative_tokens,
                                    .tokens_per_row = 1};
}

struct attn_kv_view layer_ring_view(const struct attn_cache_desc *ring, int64_t num_slots)
{
    return client_view(NULL, num_slots, ring->block_size, ring->num_heads, ring->head_size,
                       ring->kv_dtype == ATTN_DTYPE_F32 ? 4 : 2);
}

int32_t layer_window(const struct attn_recurrent_desc *recurrent)
{
    return recurrent->conv_width > 0 ? recurrent->conv_width - 1 + recurrent->num_speculative_tokens
                                     : 0;
}

void layer_state_views(const struct attn_recurrent_desc *recurrent, int64_t num_slots,
                       size_t state_element, size_t window_element, struct attn_kv_view *states,
                       struct attn_kv_view *windows)
{
    const int32_t width = layer_window(recurrent);
    const int64_t size = (int64_t)recurrent->head_size_v * recurrent->head_size_k;
    *states = client_view(NULL, num_slots, 1, recurrent->num_v_heads, size, state_element);
    *windows =
        client_view(NULL, num_slots, 1, (int32_t)layer_channels(recurrent), width, window_element);
}

static int32_t at_least_one(int32_t number)
{
    return number > 0 ? number : 1;
}

void layer_set_indexer(struct attn_layer_desc *layer, struct attn_indexer_desc *indexer)
{
    indexer->ext.id = ATTN_EXT_INDEXER_DESC;
    indexer->ext.struct_size = sizeof *indexer;
    indexer->num_groups = at_least_one(indexer->num_groups);
    indexer->tokens_per_row = at_least_one(indexer->tokens_per_row);
    indexer->rows_per_entry = at_least_one(indexer->rows_per_entry);
    layer->next = &indexer->ext;
    layer->kind = ATTN_LAYER_INDEXER;
    layer->causal = ATTN_CAUSAL_YES;
    layer->num_kv_heads = 1;
    layer->head_size_v = layer->head_size;
    layer->scale = (float)(1 / sqrt(layer->head_size));
}

int32_t layer_list_room(const struct attn_indexer_desc *indexer)
{
    return indexer->topk + (indexer->forced_on_top
                                ? indexer->first_entries + indexer->last_entries + indexer->tail
                                : 0);
}

struct oracle_indexer layer_index_oracle(const struct attn_indexer_desc *x, int32_t num_q_heads,
                                         int32_t head_size, double scale)
{
    return (struct oracle_indexer){num_q_heads / x->num_groups,
                                   head_size,
                                   x->topk,
                                   x->tokens_per_row,
                                   x->rows_per_entry,
                                   x->first_entries,
                                   x->last_entries,
                                   x->activation == ATTN_INDEXER_RELU,
                                   x->tail,
                                   x->forced_on_top,
                                   scale};
}

struct oracle_rule layer_rule_oracle(const struct attn_recurrent_rule *rule, int32_t num_gates)
{
    static const struct attn_recurrent_rule gated_delta;
    rule = rule != NULL ? rule : &gated_delta;
    return (struct oracle_rule){rule->rule == ATTN_RULE_ADDITIVE,
                                rule->gate,
                                rule->write_gate,
                                num_gates,
                                rule->gate_bound,
                                rule->dt_min,
                                rule->dt_max};
}

attn_status layer_bind_states(const struct attn_api *api, attn_layer *layer,
                              const struct attn_recurrent_desc *recurrent, int32_t dtype,
                              const struct attn_cache_desc *ring, int64_t num_slots,
                              void *const memory[3], struct attn_error *error)
{
    struct attn_kv_view views[3] = {[2] = layer_ring_view(ring, num_slots)};
    const struct attn_kv_view *bound[3];
    int32_t count = 0;
    layer_state_views(recurrent, num_slots, number_bytes(recurrent->state_dtype),
                      number_bytes(dtype), &views[0], &views[1]);
    for (int32_t i = 0; i < 3; i++) {
        views[i].data = memory[i];
        if (memory[i] != NULL && views[i].head_size > 0) {
            bound[count++] = &views[i];
        }
    }
    return api->layer_bind_caches(layer, bound, count, error);
}
