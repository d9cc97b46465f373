/* SPDX-License-Identifier: Apache-2.0 */
#include "layer.h"

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
