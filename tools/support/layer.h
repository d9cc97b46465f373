/* SPDX-License-Identifier: Apache-2.0 */
/* Layers with an extension, as engines describe them. */
#ifndef SUPPORT_LAYER_H
#define SUPPORT_LAYER_H

#include <attn/api.h>
#include <attn/draft/compressed.h>
#include <attn/indexer.h>
#include <attn/draft/recurrent.h>
#include <attn/kv_cache.h>
#include <attn/layer.h>
#include <attn/mla.h>
#include <attn/recurrent.h>

#include "client.h"
#include "oracle.h"

/* A causal decoder in float32, its scale 1/8. */
static inline struct attn_layer_desc layer_decoder(const char *name, int32_t q_heads,
                                                   int32_t kv_heads, int32_t head_size,
                                                   int32_t block_size)
{
    return SIZED(attn_layer_desc, .name = name, .kind = ATTN_LAYER_DECODER, .dtype = ATTN_DTYPE_F32,
                 .num_q_heads = q_heads, .num_kv_heads = kv_heads, .head_size = head_size,
                 .scale = 0.125f, .causal = 1, .block_size = block_size);
}
/* Makes `layer` causal MLA, or a gated delta layer, of the extension's sizes: kind, heads, head
 * sizes and the usual scale. Sets the id and size of the extension,
 * float32 for a state dtype of 0, and links it, with what it links; `layer` has its dtype and,
 * for MLA, its query heads. */
void layer_set_mla(struct attn_layer_desc *layer, struct attn_mla_desc *mla);
void layer_set_recurrent(struct attn_layer_desc *layer, struct attn_recurrent_desc *recurrent);
/* The further caches of a layer: linked to the layer's extension, and followed by `next`. */
static inline struct attn_layer_caches layer_caches(const struct attn_cache_desc *caches,
                                                    int32_t count, const struct attn_ext *next)
{
    return (struct attn_layer_caches){
        {ATTN_EXT_LAYER_CACHES, 0, sizeof(struct attn_layer_caches), next},
        .caches = caches,
        .num_caches = count,
        .cache_stride = sizeof *caches};
}
/* A window of that many keys, the query's own included; 0: none. */
static inline void layer_set_window(struct attn_layer_desc *layer, int32_t window)
{
    layer->has_window = window > 0;
    layer->window_left = window - 1;
    layer->window_right = window > 0 ? 0 : -1;
}
/* What MLA with compressed rows has more than MLA. */
struct layer_compressed {
    struct attn_cache_desc cache;
    struct attn_layer_caches caches;
    struct attn_compressed_rows rows;
};
/* Makes `layer` MLA over own rows and compressed ones, all of `size` elements without a rope part,
 * in blocks of `rows_in_block` compressed rows of `ratio` tokens each; lists of `topk` choose among
 * them (0: all are seen). */
void layer_set_compressed(struct attn_layer_desc *layer, struct attn_mla_desc *mla,
                          struct layer_compressed *compressed, int32_t size, int32_t topk,
                          int32_t ratio, int32_t rows_in_block);
/* Makes `layer` an indexer in the same way; `layer` has its dtype, query heads and
 * head_size, and zeros in the extension that are read as 1 become 1. */
void layer_set_indexer(struct attn_layer_desc *layer, struct attn_indexer_desc *indexer);
/* Places in a list. */
int32_t layer_list_room(const struct attn_indexer_desc *indexer);
/* What the oracle takes of an indexer that has so many query heads, and of a recurrent rule (NULL:
 * the gated delta rule). */
struct oracle_indexer layer_index_oracle(const struct attn_indexer_desc *indexer,
                                         int32_t num_q_heads, int32_t head_size, double scale);
struct oracle_rule layer_rule_oracle(const struct attn_recurrent_rule *rule, int32_t num_gates);

/* Channels of the convolution: q, k and v of all heads. */
static inline int64_t layer_channels(const struct attn_recurrent_desc *recurrent)
{
    return 2 * (int64_t)recurrent->num_k_heads * recurrent->head_size_k +
           (int64_t)recurrent->num_v_heads * recurrent->head_size_v;
}
/* The ring of `replay` tokens, and of drafts, that a layer of `dtype` with so many gates in all has
 * as its further cache, and the element of a row from which its gates lie. */
struct attn_cache_desc layer_ring(const struct attn_recurrent_desc *recurrent, int32_t dtype,
                                  int32_t gates, int32_t replay);
int32_t layer_ring_gates(const struct attn_recurrent_desc *recurrent);
/* The view of compact rows of such a cache in so many slots; without data. */
struct attn_kv_view layer_ring_view(const struct attn_cache_desc *ring, int64_t num_slots);
/* Inputs of a channel in a window, drafts' included; 0 without a convolution. */
int32_t layer_window(const struct attn_recurrent_desc *recurrent);
/* Views of compact states in `num_slots` slots and of their windows, of elements of those bytes;
 * without data. A layer without a convolution has windows of no width. */
void layer_state_views(const struct attn_recurrent_desc *recurrent, int64_t num_slots,
                       size_t state_element, size_t window_element, struct attn_kv_view *states,
                       struct attn_kv_view *windows);
/* Binds states, windows and ring, each in its memory (NULL: the layer has none), of compact rows in
 * `num_slots` slots.
 */
attn_status layer_bind_states(const struct attn_api *api, attn_layer *layer,
                              const struct attn_recurrent_desc *recurrent, int32_t dtype,
                              const struct attn_cache_desc *ring, int64_t num_slots,
                              void *const memory[3], struct attn_error *error);

#endif
