/* SPDX-License-Identifier: Apache-2.0 */
#include "layer_io.h"

#include <attn/draft/compressor.h>
#include <attn/draft/recurrent.h>
#include <stdbool.h>
#include <stddef.h>

#include "layer.h"
#include "number.h"

const void *layer_extension(const struct attn_layer_desc *layer, uint32_t id)
{
    const struct attn_ext *ext = layer->next;
    while (ext != NULL && ext->id != id) {
        ext = ext->next;
    }
    return ext;
}

static const struct attn_recurrent_rule *rule_of(const struct attn_layer_desc *layer)
{
    static const struct attn_recurrent_rule gated_delta;
    const void *rule = layer_extension(layer, ATTN_EXT_DRAFT_RECURRENT_RULE);
    return rule != NULL ? (const struct attn_recurrent_rule *)rule : &gated_delta;
}

int32_t layer_gates(const struct attn_layer_desc *layer)
{
    const struct attn_recurrent_desc *r = layer_extension(layer, ATTN_EXT_RECURRENT_DESC);
    return r->num_v_heads * (rule_of(layer)->gate_per_channel ? r->head_size_k : 1);
}

static void plain_rows(const struct attn_layer_desc *l, struct layer_rows rows[LAYER_ROLES])
{
    const int32_t size_v = l->head_size_v > 0 ? l->head_size_v : l->head_size;
    rows[ROLE_Q] = (struct layer_rows){l->num_q_heads, l->head_size};
    rows[ROLE_K] = (struct layer_rows){l->num_kv_heads, l->head_size};
    rows[ROLE_V] = (struct layer_rows){l->num_kv_heads, size_v};
    rows[ROLE_OUT] = (struct layer_rows){l->num_q_heads, size_v};
}

static void mla_rows(const struct attn_layer_desc *l, struct layer_rows rows[LAYER_ROLES])
{
    const struct attn_mla_desc *m = layer_extension(l, ATTN_EXT_MLA_DESC);
    const bool absorbs = m->absorb_in_core;
    rows[ROLE_Q_NOPE] =
        (struct layer_rows){l->num_q_heads, absorbs ? m->qk_nope_head_dim : m->kv_lora_rank};
    rows[ROLE_Q_PE] = (struct layer_rows){l->num_q_heads, m->qk_rope_head_dim};
    rows[ROLE_KV_C] = (struct layer_rows){0, m->kv_lora_rank};
    rows[ROLE_K_PE] = (struct layer_rows){0, m->qk_rope_head_dim};
    rows[ROLE_OUT] = (struct layer_rows){l->num_q_heads, absorbs ? m->v_head_dim : m->kv_lora_rank};
}

static void recurrent_rows(const struct attn_layer_desc *l, struct layer_rows rows[LAYER_ROLES])
{
    const struct attn_recurrent_desc *r = layer_extension(l, ATTN_EXT_RECURRENT_DESC);
    const struct attn_recurrent_rule *rule = rule_of(l);
    if (r->conv_width > 0) {
        rows[ROLE_MIXED_QKV] = (struct layer_rows){0, (int32_t)layer_channels(r)};
    } else {
        rows[ROLE_Q] = rows[ROLE_K] = (struct layer_rows){r->num_k_heads, r->head_size_k};
        rows[ROLE_V] = (struct layer_rows){r->num_v_heads, r->head_size_v};
    }
    rows[ROLE_A].dims = rule->gate != ATTN_GATE_CONSTANT ? layer_gates(l) : 0;
    rows[ROLE_B].dims = rule->write_gate == ATTN_WRITE_GATE_SIGMOID ? r->num_v_heads : 0;
    rows[ROLE_OUT] = (struct layer_rows){r->num_v_heads, r->head_size_v};
}

static void indexer_rows(const struct attn_layer_desc *l, struct layer_rows rows[LAYER_ROLES])
{
    const struct attn_indexer_desc *x = layer_extension(l, ATTN_EXT_INDEXER_DESC);
    rows[ROLE_Q] = (struct layer_rows){l->num_q_heads, l->head_size};
    rows[ROLE_K] = (struct layer_rows){l->num_kv_heads, l->head_size};
    rows[ROLE_WEIGHTS].dims = x->has_weights ? l->num_q_heads : 0;
    rows[ROLE_OUT] = (struct layer_rows){x->num_groups, layer_list_room(x)};
}

static void compressor_rows(const struct attn_layer_desc *l, struct layer_rows rows[LAYER_ROLES])
{
    rows[ROLE_K] = (struct layer_rows){l->num_kv_heads, l->head_size};
    rows[ROLE_OUT] = (struct layer_rows){1, l->head_size};
}

struct layer_rows layer_rows(const struct attn_layer_desc *layer, enum layer_role role)
{
    struct layer_rows rows[LAYER_ROLES] = {{0}};
    const bool indexer = layer->kind == ATTN_LAYER_INDEXER;
    const bool scaled = role == ROLE_Q && layer->q_scale_form != ATTN_SCALE_NONE;
    (layer->kind == ATTN_LAYER_MLA                ? mla_rows
     : layer->kind == ATTN_LAYER_RECURRENT        ? recurrent_rows
     : layer->kind == ATTN_LAYER_DRAFT_COMPRESSOR ? compressor_rows
     : indexer                                    ? indexer_rows
                                                  : plain_rows)(layer, rows);
    rows[role].dtype = indexer && role == ROLE_OUT ? ATTN_DTYPE_F32
                       : scaled                    ? layer->q_dtype
                                                   : layer->dtype;
    return rows[role];
}

void layer_io_init(struct layer_io *io, const struct attn_layer_desc *layer, void *stream)
{
    *io =
        (struct layer_io){.io = {.struct_size = sizeof io->io, .stream = stream},
                          .layer = layer,
                          .mla.ext = {ATTN_EXT_IO_MLA, 0, sizeof io->mla, NULL},
                          .recurrent.ext = {ATTN_EXT_IO_RECURRENT, 0, sizeof io->recurrent, NULL},
                          .indexer.ext = {ATTN_EXT_IO_INDEXER, 0, sizeof io->indexer, NULL},
                          .lists.ext = {ATTN_EXT_DRAFT_IO_INDEX_LISTS, 0, sizeof io->lists, NULL}};
    io->io.next = layer->kind == ATTN_LAYER_MLA         ? &io->mla.ext
                  : layer->kind == ATTN_LAYER_RECURRENT ? &io->recurrent.ext
                  : layer->kind == ATTN_LAYER_INDEXER   ? &io->indexer.ext
                                                        : NULL;
}

void layer_io_set(struct layer_io *io, enum layer_role role, struct layer_rows rows, int64_t tokens,
                  struct attn_device device, void *data, int64_t head_stride)
{
    const struct attn_tensor **places[LAYER_ROLES] = {&io->io.q,
                                                      &io->io.k,
                                                      &io->io.v,
                                                      &io->mla.q_nope,
                                                      &io->mla.q_pe,
                                                      &io->mla.kv_c,
                                                      &io->mla.k_pe,
                                                      &io->recurrent.mixed_qkv,
                                                      &io->recurrent.a,
                                                      &io->recurrent.b,
                                                      &io->indexer.weights,
                                                      &io->io.out};
    struct attn_tensor *tensor = &io->tensors[role];
    int64_t *shape = io->shapes[role], *strides = io->strides[role];
    const bool lists = role == ROLE_OUT && io->layer->kind == ATTN_LAYER_INDEXER;
    shape[0] = tokens;
    shape[1] = rows.heads > 0 ? rows.heads : rows.dims;
    shape[2] = rows.dims;
    strides[0] = rows.heads > 0 ? rows.heads * head_stride : head_stride;
    strides[1] = rows.heads > 0 ? head_stride : 1;
    strides[2] = 1;
    *tensor = (struct attn_tensor){.data = data,
                                   .device = device,
                                   .ndim = rows.heads > 0 ? 3 : 2,
                                   .dtype = lists ? (struct attn_dtype){ATTN_CODE_INT, 32, 1}
                                                  : number_dtype(rows.dtype),
                                   .shape = shape,
                                   .strides = head_stride > 0 ? strides : NULL};
    *places[role] = tensor;
}

void layer_io_lists(struct layer_io *io, const int32_t *indices, int32_t per_token, int32_t entries)
{
    io->lists.indices = indices;
    io->lists.token_stride = (int64_t)per_token * entries;
    io->lists.group_stride = entries;
    io->lists.ext.next = io->io.next;
    io->io.next = &io->lists.ext;
}
