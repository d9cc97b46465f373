/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of attend_mla and attend_mla_sparse. */
#include <attn/draft/index_lists.h>
#include <math.h>
#include <string.h>

#include "mutants.h"

/* The width of a latent row is not the width of a key. */
static void mla_scale_of_the_row(struct mutable_args *m)
{
    m->layer.scale = (float)(1 / sqrt(m->layer.head_size));
}

/* -1 and positions past the end mean no key, not the first one. */
static void mla_none_is_first(struct mutable_args *m)
{
    const struct attn_mla_desc *mla = (const struct attn_mla_desc *)m->args.layer->next;
    int32_t count = m->batch.num_actual_tokens * mla->topk;
    if (mla->topk > 0 && m->args.next != NULL && count <= MAX_TABLE) {
        m->io_mla = *(const struct attn_io_mla *)m->args.next;
        for (int32_t i = 0; i < count; i++) {
            int32_t position = m->io_mla.topk_indices[i];
            m->table[i] = position < 0 ? 0 : position;
        }
        m->io_mla.topk_indices = m->table;
        m->args.next = &m->io_mla.ext;
    }
}

static void mla_drafts_see_all(struct mutable_args *m)
{
    m->layer.causal = ATTN_CAUSAL_NO;
}

static void mla_scale_ignored(struct mutable_args *m)
{
    m->params.k_scale_host = 1;
}

/* A position that is listed twice counts once. */
static void mla_duplicates_once(struct mutable_args *m)
{
    const struct attn_mla_desc *mla = (const struct attn_mla_desc *)m->args.layer->next;
    int32_t count = m->batch.num_actual_tokens * mla->topk;
    if (mla->topk == 0 || m->args.next == NULL || count > MAX_TABLE) {
        return;
    }
    m->io_mla = *(const struct attn_io_mla *)m->args.next;
    memcpy(m->table, m->io_mla.topk_indices, (size_t)count * sizeof *m->table);
    for (int32_t i = 0; i < count; i++) {
        for (int32_t j = i / mla->topk * mla->topk; j < i; j++) {
            m->table[i] = m->table[j] == m->table[i] ? -1 : m->table[i];
        }
    }
    m->io_mla.topk_indices = m->table;
    m->args.next = &m->io_mla.ext;
}

/* The last of the listed positions is not read. */
static void mla_last_position_dropped(struct mutable_args *m)
{
    const struct attn_mla_desc *mla = (const struct attn_mla_desc *)m->args.layer->next;
    int32_t count = m->batch.num_actual_tokens * mla->topk;
    if (mla->topk > 0 && m->args.next != NULL && count <= MAX_TABLE) {
        m->io_mla = *(const struct attn_io_mla *)m->args.next;
        memcpy(m->table, m->io_mla.topk_indices, (size_t)count * sizeof *m->table);
        for (int32_t i = mla->topk - 1; i < count; i += mla->topk) {
            m->table[i] = -1;
        }
        m->io_mla.topk_indices = m->table;
        m->args.next = &m->io_mla.ext;
    }
}

static void mla_last_key_dropped(struct mutable_args *m)
{
    for (int32_t r = 0; r < m->batch.num_reqs; r++) {
        m->seq_lens[r] = m->batch.seq_lens[r] - (m->batch.seq_lens[r] > m->batch.max_query_len);
    }
    m->batch.seq_lens = m->batch.seq_lens_host = m->seq_lens;
}

static void mla_window_ignored(struct mutable_args *m)
{
    m->layer.has_window = 0;
    m->layer.window_left = m->layer.window_right = -1;
}

static void mla_sinks_ignored(struct mutable_args *m)
{
    m->layer.has_sinks = 0;
}

static void mla_always_causal(struct mutable_args *m)
{
    m->layer.causal = 1;
}

static void mla_lse_base_two(const struct attn_attend_args *args)
{
    for (int64_t h = 0; args->lse != NULL && h < args->lse->shape[0]; h++) {
        for (int32_t t = 0; t < args->batch->num_actual_tokens; t++) {
            ((float *)args->lse->data)[h * args->lse->strides[0] + t * args->lse->strides[1]] *=
                1.4426950408889634f;
        }
    }
}

/* Heads in tiles of 16: those behind the last whole tile are not computed. */
static void mla_heads_in_sixteens(const struct attn_attend_args *args)
{
    const struct attn_tensor *out = args->out;
    size_t e = out->dtype.bits / 8;
    for (int32_t t = 0; t < args->batch->num_actual_tokens; t++) {
        for (int64_t h = out->shape[1] / 16 * 16; h < out->shape[1]; h++) {
            memset((uint8_t *)out->data + (size_t)(t * out->strides[0] + h * out->strides[1]) * e,
                   0, (size_t)out->shape[2] * e);
        }
    }
}

/* Positions in tiles of 16, likewise. */
static void mla_topk_in_sixteens(struct mutable_args *m)
{
    const struct attn_mla_desc *mla = (const struct attn_mla_desc *)m->args.layer->next;
    int32_t count = m->batch.num_actual_tokens * mla->topk;
    if (mla->topk > 0 && m->args.next != NULL && count <= MAX_TABLE) {
        m->io_mla = *(const struct attn_io_mla *)m->args.next;
        for (int32_t i = 0; i < count; i++) {
            bool whole = i % mla->topk < mla->topk / 16 * 16;
            m->table[i] = whole ? m->io_mla.topk_indices[i] : -1;
        }
        m->io_mla.topk_indices = m->table;
        m->args.next = &m->io_mla.ext;
    }
}

/* A backend of few sizes, which takes no others: it is asked for none. */
static const struct attn_mla_caps few_sizes = {
    .ext = {ATTN_EXT_CAPS_MLA, 0, sizeof few_sizes, NULL},
    .kv_lora_rank_max = 256,
    .qk_rope_head_dim_max = 32,
    .num_q_heads_multiple = 24,
    .max_query_len = 1,
    .topk_max = 100,
    .topk_multiple = 40,
};

static attn_status few_sizes_only(const struct attn_attend_args *args)
{
    const struct attn_mla_desc *mla = NULL;
    bool lists = false; /* whose entries are of several keys */
    for (const struct attn_ext *ext = args->layer->next; ext != NULL; ext = ext->next) {
        mla = ext->id == ATTN_EXT_MLA_DESC ? (const struct attn_mla_desc *)ext : mla;
        lists |= ext->id == ATTN_EXT_DRAFT_INDEX_LISTS;
    }
    bool declared =
        mla->kv_lora_rank <= few_sizes.kv_lora_rank_max &&
        mla->qk_rope_head_dim <= few_sizes.qk_rope_head_dim_max &&
        args->layer->num_q_heads % few_sizes.num_q_heads_multiple == 0 &&
        args->batch->max_query_len <= few_sizes.max_query_len &&
        (lists || (mla->topk <= few_sizes.topk_max && mla->topk % few_sizes.topk_multiple == 0));
    return declared ? ATTN_OK : ATTN_ERROR_INVALID_ARGUMENT;
}

static const struct mutant mutants[] = {
    {.name = "mutant_mla_scale_of_the_row", .mla = mla_scale_of_the_row},
    {.name = "mutant_mla_none_is_first", .mla = mla_none_is_first},
    {.name = "mutant_mla_drafts_see_all", .mla = mla_drafts_see_all},
    {.name = "mutant_mla_scale_ignored", .mla = mla_scale_ignored},
    {.name = "mutant_mla_duplicates_once", .mla = mla_duplicates_once},
    {.name = "mutant_mla_last_position_dropped", .mla = mla_last_position_dropped},
    {.name = "mutant_mla_last_key_dropped", .mla = mla_last_key_dropped},
    {.name = "mutant_mla_window_ignored", .mla = mla_window_ignored},
    {.name = "mutant_mla_sinks_ignored", .mla = mla_sinks_ignored},
    {.name = "mutant_mla_always_causal", .mla = mla_always_causal},
    {.name = "mutant_mla_bits_by_batch", .mla_after = mutant_bits_by_batch},
    {.name = "mutant_mla_lse_base_two", .mla_after = mla_lse_base_two},
    {.name = "mutant_mla_heads_in_sixteens", .mla_after = mla_heads_in_sixteens},
    {.name = "mutant_mla_topk_in_sixteens", .mla = mla_topk_in_sixteens},
    {.name = "control_mla_few_sizes", .latent = &few_sizes, .mla_takes = few_sizes_only},
};
const struct mutant_list mla_mutants = {mutants, sizeof mutants / sizeof *mutants};
