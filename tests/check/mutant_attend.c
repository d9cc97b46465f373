/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of an attend's batch and outputs, and of plan and update_block_table. */
#include <string.h>

#include "mutants.h"

/* Rows in another order than block_table_row says: each request reads its neighbour's. Entries that
 * are garbage for the neighbour become block 0, since a crash would prove less. */
static void table_row_ignored(struct mutable_args *m)
{
    const struct attn_batch *batch = m->args.batch;
    if (batch->block_table == NULL || batch->block_table_row == NULL) {
        return;
    }
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        int64_t row = batch->block_table_row[(r + 1) % batch->num_reqs];
        for (int64_t b = 0; b < batch->block_table_stride; b++) {
            int32_t block = batch->block_table[row * batch->block_table_stride + b];
            bool valid = block >= 0 && block < m->args.k_cache->num_blocks;
            m->table[r * batch->block_table_stride + b] = valid ? block : 0;
        }
    }
    m->batch.block_table = m->table;
    m->batch.block_table_row = NULL;
}

static void write_skipped(struct mutable_args *m)
{
    m->args.flags |= ATTN_RUN_NO_WRITE;
}

static void key_start_ignored(struct mutable_args *m)
{
    m->batch.key_start_loc = NULL;
    m->batch.key_start_loc_host = NULL;
}

/* One key past the end, where its slot still lies in the last block. */
static void unmasked_tail(struct mutable_args *m)
{
    for (int32_t r = 0; m->batch.seq_lens != NULL && r < m->batch.num_reqs; r++) {
        int32_t length = m->batch.seq_lens[r];
        m->seq_lens[r] = length + (length % m->args.k_cache->block_size != 0);
    }
    if (m->batch.seq_lens != NULL && m->args.k_cache != NULL) {
        m->batch.seq_lens = m->batch.seq_lens_host = m->seq_lens;
    }
}

static void last_page_wrong(struct mutable_args *m)
{
    const struct attn_batch *batch = m->args.batch;
    if (m->args.k_cache == NULL || batch->block_table == NULL) {
        return;
    }
    memcpy(m->table, batch->block_table,
           (size_t)(batch->block_table_rows * batch->block_table_stride) * sizeof *m->table);
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        int64_t row = batch->block_table_row != NULL ? batch->block_table_row[r] : r;
        int32_t *entries = m->table + row * batch->block_table_stride;
        int32_t last = (batch->seq_lens[r] - 1) / m->args.k_cache->block_size;
        if (batch->seq_lens[r] > 0 && last > 0 && entries[last - 1] >= 0) {
            entries[last] = entries[last - 1];
        }
    }
    m->batch.block_table = m->table;
}

static void lse_base_two(const struct attn_attend_args *args)
{
    for (int64_t h = 0; args->lse != NULL && h < args->lse->shape[0]; h++) {
        for (int32_t t = 0; t < args->batch->num_actual_tokens; t++) {
            float *lse =
                (float *)args->lse->data + h * args->lse->strides[0] + t * args->lse->strides[1];
            *lse *= 1.4426950408889634f;
        }
    }
}

static void padding_cleared(const struct attn_attend_args *args)
{
    size_t row = (size_t)args->out->strides[0] * args->out->dtype.bits / 8;
    memset((uint8_t *)args->out->data + (size_t)args->batch->num_actual_tokens * row, 0, row);
}

/* The first and the last query head are taken for one another. */
static void heads_exchanged(const struct attn_attend_args *args)
{
    size_t bytes = (size_t)args->out->shape[2] * args->out->dtype.bits / 8;
    size_t head = (size_t)args->out->strides[1] * args->out->dtype.bits / 8;
    size_t row = (size_t)args->out->strides[0] * args->out->dtype.bits / 8;
    uint8_t kept[4096];
    if (args->layer->num_kv_heads < 2 || bytes > sizeof kept) {
        return;
    }
    for (int32_t t = 0; t < args->batch->num_actual_tokens; t++) {
        uint8_t *first = (uint8_t *)args->out->data + (size_t)t * row;
        uint8_t *last = first + head * (size_t)(args->layer->num_q_heads - 1);
        memcpy(kept, first, bytes);
        memcpy(first, last, bytes);
        memcpy(last, kept, bytes);
    }
}

static void outputs_rounded(const struct attn_attend_args *args)
{
    for (int64_t i = 0; args->out->dtype.bits == 32 && i < args->out->shape[2]; i++) {
        uint32_t *x = (uint32_t *)args->out->data + i;
        *x &= 0xffff0000u; /* as bf16 */
    }
}

/* Rows are counted from the view's first one, as if it were row 0 of q and out. */
static void first_row_ignored(struct mutable_args *m)
{
    int32_t first = m->batch.query_start_loc[0];
    for (int32_t r = 0; r <= m->batch.num_reqs && r < MAX_REQS; r++) {
        m->query_start_loc[r] = m->batch.query_start_loc[r] - first;
    }
    m->batch.query_start_loc = m->batch.query_start_loc_host = m->query_start_loc;
    m->batch.num_actual_tokens -= first;
}

/* The host's copy is taken for the truth, which it is not where it says bounds. */
static void host_rows_taken(struct mutable_args *m)
{
    m->batch.query_start_loc = m->batch.query_start_loc_host;
}

static void half_of_the_rows(struct mutable_args *m)
{
    m->batch.num_logits_indices /= 2;
}

/* A split over long keys loses the last one: no query sees it, the others' positions stay. */
static void split_drops_the_last_key(struct mutable_args *m)
{
    if (m->layer.kind == ATTN_LAYER_DECODER && m->batch.max_seq_len > 600 && !m->layer.has_window &&
        !m->layer.chunk_size && m->layer.causal == ATTN_CAUSAL_YES && !m->layer.prefix_lm &&
        m->batch.causal == ATTN_CAUSAL_DEFAULT && !m->layer.causal_per_request) {
        m->layer.has_window = 1;
        m->layer.window_left = -1;
        m->layer.window_right = -1;
        m->layer.causal = ATTN_CAUSAL_NO;
        m->layer.window_right = 0;
        for (int32_t r = 0; r < m->batch.num_reqs; r++) {
            m->seq_lens[r] = m->batch.seq_lens[r] - 1;
        }
        m->batch.seq_lens = m->batch.seq_lens_host = m->seq_lens;
    }
}

static bool is_nan_bits(const struct attn_tensor *out, const uint8_t *at)
{
    uint32_t word = 0;
    memcpy(&word, at, out->dtype.bits / 8);
    return out->dtype.bits == 32                 ? (word & 0x7fffffff) > 0x7f800000
           : out->dtype.code == ATTN_CODE_BFLOAT ? (word & 0x7fff) > 0x7f80
                                                 : (word & 0x7fff) > 0x7c00;
}

/* A visible NaN is taken for 0. */
static void nan_hidden(const struct attn_attend_args *args)
{
    size_t e = args->out->dtype.bits / 8;
    for (int32_t t = args->batch->query_start_loc[0]; t < args->batch->num_actual_tokens; t++) {
        for (int64_t i = 0; i < args->out->shape[1] * args->out->shape[2]; i++) {
            uint8_t *at = (uint8_t *)args->out->data + (size_t)(t * args->out->strides[0] + i) * e;
            if (is_nan_bits(args->out, at)) {
                memset(at, 0, e);
            }
        }
    }
}

/* A request's bits change with the number of others. */
void mutant_bits_by_batch(const struct attn_attend_args *args)
{
    if (args->batch->num_reqs == 1 && args->layer->batch_invariant) {
        uint8_t *at = (uint8_t *)args->out->data +
                      (size_t)(args->batch->query_start_loc[0] * args->out->strides[0]) *
                          (args->out->dtype.bits / 8);
        at[0] ^= 1;
    }
}

/* A query's bits are others where it comes alone, which only parts of a request show. */
static void bits_by_query(const struct attn_attend_args *args)
{
    const int32_t *start = args->batch->query_start_loc;
    if (args->batch->num_reqs == 1 && args->layer->batch_invariant == 2 &&
        start[1] == start[0] + 1) {
        ((uint8_t *)args->out
             ->data)[(size_t)(start[0] * args->out->strides[0]) * (args->out->dtype.bits / 8)] ^= 1;
    }
}

/* A request without queries is taken for one of a query: the row behind it is written. */
static void idle_takes_a_row(const struct attn_attend_args *args)
{
    const struct attn_batch *batch = args->batch;
    size_t row = (size_t)args->out->strides[0] * args->out->dtype.bits / 8;
    for (int32_t r = 0; args->k_cache != NULL && r < batch->num_reqs; r++) {
        const int32_t *start = &batch->query_start_loc[r];
        if (start[0] == start[1] && batch->seq_lens[r] > 0 && start[0] < args->out->shape[0]) {
            memset((uint8_t *)args->out->data + (size_t)start[0] * row, 0,
                   args->out->dtype.bits / 8);
        }
    }
}

static void query_scribbled(const struct attn_attend_args *args)
{
    ((uint8_t *)args->q->data)[0] ^= 1;
}

static void keep_table(const struct attn_attend_args *args, int32_t mode, struct kept *kept)
{
    kept->block_table = args->batch->block_table;
}

static void use_kept_table(struct mutable_args *m, const struct kept *kept)
{
    m->batch.block_table = kept->block_table;
}

/* Lengths of the capture are not renewed by a replay. */
static void keep_lengths(const struct attn_attend_args *args, int32_t mode, struct kept *kept)
{
    if (mode == ATTN_PLAN_REPLAY || args->batch->seq_lens == NULL) {
        return;
    }
    kept->num_reqs = args->batch->num_reqs;
    memcpy(kept->seq_lens, args->batch->seq_lens,
           (size_t)args->batch->num_reqs * sizeof *kept->seq_lens);
}

static void use_kept_lengths(struct mutable_args *m, const struct kept *kept)
{
    if (m->batch.seq_lens != NULL && kept->num_reqs == m->batch.num_reqs) {
        memcpy(m->seq_lens, kept->seq_lens, sizeof m->seq_lens);
        m->batch.seq_lens = m->seq_lens;
    }
}

static const struct mutant mutants[] = {
    {.name = "mutant_decode_write_missing", .before = write_skipped},
    {.name = "mutant_table_row_ignored", .before = table_row_ignored},
    {.name = "mutant_key_start_ignored", .before = key_start_ignored},
    {.name = "mutant_unmasked_tail", .before = unmasked_tail},
    {.name = "mutant_last_page_wrong", .before = last_page_wrong},
    {.name = "mutant_lse_base_two", .after = lse_base_two},
    {.name = "mutant_padding_cleared", .after = padding_cleared},
    {.name = "mutant_heads_exchanged", .after = heads_exchanged},
    {.name = "mutant_outputs_rounded", .after = outputs_rounded},
    {.name = "mutant_first_row_ignored", .before = first_row_ignored},
    {.name = "mutant_host_rows_taken", .before = host_rows_taken},
    {.name = "mutant_half_of_the_rows", .before = half_of_the_rows},
    {.name = "mutant_split_drops_the_last_key", .before = split_drops_the_last_key},
    {.name = "mutant_nan_hidden", .after = nan_hidden},
    {.name = "mutant_bits_by_batch", .after = mutant_bits_by_batch},
    {.name = "mutant_bits_by_query", .after = bits_by_query},
    {.name = "mutant_idle_takes_a_row", .after = idle_takes_a_row},
    {.name = "mutant_query_scribbled", .after = query_scribbled},
    {.name = "mutant_table_stale",
     .plan = keep_table,
     .planned = use_kept_table,
     .ignores_updates = true},
    {.name = "mutant_lengths_stale", .plan = keep_lengths, .planned = use_kept_lengths},
    {.name = "mutant_plan_overrun", .overruns_plan = true},
    {.name = "mutant_step_allocates", .allocates = true},
    {.name = "mutant_step_deep", .deep = true},
    {.name = "mutant_fused_write_missing", .features = ATTN_FEATURE_FUSED_WRITE},
    /* the controls: they have to pass */
    {.name = "control_plain"},
    {.name = "control_fused", .features = ATTN_FEATURE_FUSED_WRITE, .fused = true},
    {.name = "control_planned", .plan = keep_table, .planned = use_kept_table},
};
const struct mutant_list attend_mutants = {mutants, sizeof mutants / sizeof *mutants};
