/* SPDX-License-Identifier: Apache-2.0 */
#include "select/layer_ext.h"

#include <float.h>
#include <string.h>

#include "select/names.h"
#include "util/structs.h"

#define MAX_HISTORY 1024
#define MAX_RANKS 4096 /* times MAX_HEADS, which a spread step's heads are, far from overflow */
#define BAD(field, ...) error_set(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)

attn_status layer_ranges(const char *name, const struct ranged *ranges, size_t count,
                         struct attn_error *error)
{
    for (size_t i = 0; i < count; i++) {
        if (ranges[i].value < ranges[i].min || ranges[i].value > ranges[i].max) {
            return BAD(ranges[i].field, "layer '%s': %s is %d; allowed are %d to %d", name,
                       ranges[i].field, ranges[i].value, ranges[i].min, ranges[i].max);
        }
    }
    return ATTN_OK;
}

/* Copies an extension, cut or zero-filled to `size`; NULL if it is not there. */
static void *copy_ext(struct arena *arena, const struct attn_ext *next, uint32_t id, size_t size,
                      bool *failed)
{
    const struct attn_ext *ext = ext_find(next, id, sizeof *ext);
    struct attn_ext *copy;
    if (ext == NULL) {
        return NULL;
    }
    copy = arena_alloc(arena, size);
    if (copy == NULL) {
        *failed = true;
        return NULL;
    }
    memcpy(copy, ext, ext->struct_size < size ? ext->struct_size : size);
    copy->struct_size = size;
    copy->next = NULL;
    return copy;
}

static void chain(const struct attn_ext **next, void *ext)
{
    if (ext != NULL) {
        ((struct attn_ext *)ext)->next = *next;
        *next = ext;
    }
}

attn_status layer_copy_extensions(struct arena *arena, struct layer *layer,
                                  const struct attn_ext *next, struct attn_error *error)
{
    static const uint32_t known[] = {ATTN_EXT_MLA_DESC, ATTN_EXT_GDN_DESC,
                                     ATTN_EXT_CONTEXT_PARALLEL, ATTN_EXT_MM_ENCODER};
    bool failed = false;
    attn_status status =
        ext_check(next, known, sizeof known / sizeof *known, "attn_layer_desc", error);
    if (status != ATTN_OK) {
        return status;
    }
    layer->mla = copy_ext(arena, next, ATTN_EXT_MLA_DESC, sizeof *layer->mla, &failed);
    layer->gdn = copy_ext(arena, next, ATTN_EXT_GDN_DESC, sizeof *layer->gdn, &failed);
    layer->cp = copy_ext(arena, next, ATTN_EXT_CONTEXT_PARALLEL, sizeof *layer->cp, &failed);
    layer->mm_quant = copy_ext(arena, next, ATTN_EXT_MM_ENCODER, sizeof *layer->mm_quant, &failed);
    layer->desc.next = NULL;
    chain(&layer->desc.next, layer->mm_quant);
    chain(&layer->desc.next, layer->cp);
    chain(&layer->desc.next, layer->gdn);
    chain(&layer->desc.next, layer->mla);
    return failed ? error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "layers", "no memory for a layer")
                  : ATTN_OK;
}

/* The engine's table of collectives, which is used from every step. */
static attn_status check_ranks(const char *name, const char *field,
                               const struct attn_collectives *ranks, struct attn_error *error)
{
    if (ranks == NULL) {
        return ATTN_OK;
    }
    if (ranks->struct_size < sizeof *ranks || ranks->world_size < 1 ||
        ranks->world_size > MAX_RANKS || ranks->rank < 0 || ranks->rank >= ranks->world_size) {
        return BAD(field,
                   "layer '%s': %s has struct_size %zu, rank %d of %d; at least %zu, and a rank "
                   "from 0 below the number of ranks, which is at most %d",
                   name, field, ranks->struct_size, ranks->rank, ranks->world_size, sizeof *ranks,
                   MAX_RANKS);
    }
    if (ranks->all_gather == NULL || ranks->all_to_all == NULL ||
        ranks->reduce_scatter_f32 == NULL) {
        return BAD(field, "layer '%s': %s lacks all_gather, all_to_all or reduce_scatter_f32", name,
                   field);
    }
    return ATTN_OK;
}

static attn_status check_mla_desc(const struct layer *layer, struct attn_error *error)
{
    const struct attn_layer_desc *l = &layer->desc;
    const struct attn_mla_desc *m = layer->mla;
    const struct ranged ranges[] = {{"kv_lora_rank", m->kv_lora_rank, 8, MAX_LATENT},
                                    {"qk_nope_head_dim", m->qk_nope_head_dim, 8, MAX_HEAD_SIZE},
                                    {"qk_rope_head_dim", m->qk_rope_head_dim, 0, MAX_HEAD_SIZE},
                                    {"v_head_dim", m->v_head_dim, 8, MAX_HEAD_SIZE},
                                    {"padded_num_q_heads", m->padded_num_q_heads, 0, MAX_HEADS},
                                    {"topk", m->topk, l->kind == ATTN_LAYER_MLA_SPARSE ? 1 : 0,
                                     l->kind == ATTN_LAYER_MLA_SPARSE ? 1 << 20 : 0}};
    attn_status status = layer_ranges(l->name, ranges, sizeof ranges / sizeof *ranges, error);
    if (status == ATTN_OK && m->weight_dtype != ATTN_MLA_WEIGHT_MXFP4 &&
        (m->weight_dtype < 0 || m->weight_dtype >= ATTN_DTYPE_COUNT)) {
        status = BAD("weight_dtype", "layer '%s': weight_dtype is %d; 0 to %d, or %d (mxfp4)",
                     l->name, m->weight_dtype, ATTN_DTYPE_COUNT - 1, ATTN_MLA_WEIGHT_MXFP4);
    }
    if (status == ATTN_OK &&
        (l->num_kv_heads != 1 || l->head_size != m->kv_lora_rank + m->qk_rope_head_dim)) {
        status = BAD("head_size",
                     "layer '%s': an MLA layer has one KV head of kv_lora_rank + "
                     "qk_rope_head_dim = %d; num_kv_heads %d, head_size %d",
                     l->name, m->kv_lora_rank + m->qk_rope_head_dim, l->num_kv_heads, l->head_size);
    }
    return status;
}

static attn_status check_gdn_desc(const struct layer *layer, struct attn_error *error)
{
    const struct attn_layer_desc *l = &layer->desc;
    const struct attn_gdn_desc *g = layer->gdn;
    const struct ranged ranges[] = {{"num_k_heads", g->num_k_heads, 1, MAX_HEADS},
                                    {"num_v_heads", g->num_v_heads, 1, MAX_HEADS},
                                    {"head_size_k", g->head_size_k, 8, MAX_HEAD_SIZE},
                                    {"head_size_v", g->head_size_v, 8, MAX_HEAD_SIZE},
                                    {"conv_width", g->conv_width, 0, 64},
                                    {"chunk_size", g->chunk_size, 0, 4096},
                                    {"num_speculative_tokens", g->num_speculative_tokens, 0, 1024}};
    attn_status status = layer_ranges(l->name, ranges, sizeof ranges / sizeof *ranges, error);
    if (status == ATTN_OK && g->num_v_heads % g->num_k_heads != 0) {
        status =
            BAD("num_v_heads", "layer '%s': num_v_heads %d is not a multiple of num_k_heads %d",
                l->name, g->num_v_heads, g->num_k_heads);
    }
    return status;
}

static attn_status check_encoder_quant(const struct layer *layer, struct attn_error *error)
{
    const struct attn_layer_desc *l = &layer->desc;
    const struct attn_mm_encoder_quant *q = layer->mm_quant;
    const struct ranged ranges[] = {{"fp8", q->fp8, 0, l->kind == ATTN_LAYER_MM_ENCODER ? 1 : 0},
                                    {"amax_history_len", q->amax_history_len, 0, MAX_HISTORY},
                                    {"padded_head_size", q->padded_head_size, 0, MAX_HEAD_SIZE}};
    attn_status status = layer_ranges(l->name, ranges, sizeof ranges / sizeof *ranges, error);
    if (status == ATTN_OK && q->padded_head_size > 0 &&
        (q->padded_head_size < l->head_size || q->padded_head_size % 8 != 0)) {
        status = BAD("padded_head_size",
                     "layer '%s': padded_head_size %d; 0, or a multiple of 8 from head_size %d",
                     l->name, q->padded_head_size, l->head_size);
    }
    if (status == ATTN_OK && !(q->scale_margin >= 0 && q->scale_margin <= FLT_MAX)) {
        status = BAD("scale_margin", "layer '%s': scale_margin is %g; 0 or a positive factor",
                     l->name, (double)q->scale_margin);
    }
    return status;
}

static attn_status check_context_parallel(const struct layer *layer, struct attn_error *error)
{
    const struct attn_layer_desc *l = &layer->desc;
    int32_t interleave = layer->cp->interleave > 0 ? layer->cp->interleave : 1;
    attn_status status = check_ranks(l->name, "decode", layer->cp->decode, error);
    status =
        status == ATTN_OK ? check_ranks(l->name, "prefill", layer->cp->prefill, error) : status;
    if (status != ATTN_OK) {
        return status;
    }
    const struct ranged ranges[] = {
        {"reduce", layer->cp->reduce, ATTN_CP_ALL_GATHER_REDUCE_SCATTER, ATTN_CP_ALL_TO_ALL},
        {"order", layer->cp->order, ATTN_CP_CONTIGUOUS, ATTN_CP_ZIGZAG}};
    status = layer_ranges(l->name, ranges, 2, error);
    if (status != ATTN_OK) {
        return status;
    }
    if (layer->cp->interleave < 0 || (l->block_size > 0 && l->block_size % interleave != 0)) {
        return BAD("interleave", "layer '%s': interleave %d must divide block_size %d", l->name,
                   layer->cp->interleave, l->block_size);
    }
    return ATTN_OK;
}

attn_status layer_check_extensions(const struct layer *layer, struct attn_error *error)
{
    const struct attn_layer_desc *l = &layer->desc;
    bool mla = l->kind == ATTN_LAYER_MLA || l->kind == ATTN_LAYER_MLA_SPARSE;
    if (mla != (layer->mla != NULL)) {
        return BAD("attn_mla_desc", "layer '%s' of kind %s %s attn_mla_desc", l->name,
                   name_of_kind(l->kind), mla ? "needs" : "takes no");
    }
    if ((l->kind == ATTN_LAYER_GDN) != (layer->gdn != NULL)) {
        return BAD("attn_gdn_desc", "layer '%s' of kind %s %s attn_gdn_desc", l->name,
                   name_of_kind(l->kind), l->kind == ATTN_LAYER_GDN ? "needs" : "takes no");
    }
    attn_status status = mla ? check_mla_desc(layer, error) : ATTN_OK;
    if (status == ATTN_OK && layer->gdn != NULL) {
        status = check_gdn_desc(layer, error);
    }
    if (status == ATTN_OK && layer->mm_quant != NULL) {
        status = check_encoder_quant(layer, error);
    }
    return status == ATTN_OK && layer->cp != NULL ? check_context_parallel(layer, error) : status;
}
