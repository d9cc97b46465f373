/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of indexers. */
#include <string.h>

#include "common/tensors.h"
#include "mutants.h"

/* A copy of the layer's extension that may be changed; NULL: it is no indexer. */
static struct attn_indexer_desc *desc_of(struct mutable_args *m)
{
    const struct attn_ext *ext = ext_of(m->layer.next, ATTN_EXT_DRAFT_INDEXER_DESC);
    if (ext == NULL) {
        return &m->indexer; /* which nothing reads then */
    }
    m->indexer = *(const struct attn_indexer_desc *)ext;
    m->layer.next = &m->indexer.ext;
    return &m->indexer;
}

static void activation_swapped(struct mutable_args *m)
{
    struct attn_indexer_desc *x = desc_of(m);
    x->activation = !x->activation;
}

static void weights_ignored(struct mutable_args *m)
{
    desc_of(m)->has_weights = 0;
}

static void one_less(struct mutable_args *m)
{
    desc_of(m)->topk--;
}

static void first_not_forced(struct mutable_args *m)
{
    desc_of(m)->first_entries = 0;
}

static void last_not_forced(struct mutable_args *m)
{
    desc_of(m)->last_entries = 0;
}

static void tail_missing(struct mutable_args *m)
{
    desc_of(m)->tail = 0;
}

static void forced_inside(struct mutable_args *m)
{
    desc_of(m)->forced_on_top = 0;
}

static void lengthen(struct mutable_args *m, int32_t tokens)
{
    for (int32_t r = 0; r < m->batch.num_reqs && r < MAX_REQS; r++) {
        m->seq_lens[r] = m->batch.seq_lens[r] > 0 ? m->batch.seq_lens[r] + tokens : 0;
    }
    m->batch.seq_lens = m->seq_lens;
}

/* ceil((position + 1) / tokens_per_row) rows are seen. */
static void unfinished_row_seen(struct mutable_args *m)
{
    lengthen(m, desc_of(m)->tokens_per_row - 1);
}

static void own_token_hidden(struct mutable_args *m)
{
    lengthen(m, -1);
}

static int32_t *list_at(const struct attn_attend_args *args, int64_t t, int64_t g)
{
    return tensor_row(args->out, t, g);
}

static void for_lists(const struct attn_attend_args *args,
                      void (*change)(const struct attn_attend_args *args, int64_t t, int64_t g))
{
    for (int64_t t = args->batch->query_start_loc[0]; t < args->batch->num_actual_tokens; t++) {
        for (int64_t g = 0; g < args->out->shape[1]; g++) {
            change(args, t, g);
        }
    }
}

static void swap_first(const struct attn_attend_args *args, int64_t t, int64_t g)
{
    int32_t *list = list_at(args, t, g);
    if (args->out->shape[2] > 1 && list[1] >= 0) {
        const int32_t first = list[0];
        list[0] = list[1];
        list[1] = first;
    }
}

static void unordered(const struct attn_attend_args *args)
{
    for_lists(args, swap_first);
}

static void pad_with_zero(const struct attn_attend_args *args, int64_t t, int64_t g)
{
    for (int64_t i = 0; i < args->out->shape[2]; i++) {
        list_at(args, t, g)[i] += list_at(args, t, g)[i] < 0;
    }
}

static void padded_with_zero(const struct attn_attend_args *args)
{
    for_lists(args, pad_with_zero);
}

/* The first list for all. */
static void copy_first_list(const struct attn_attend_args *args, int64_t t, int64_t g)
{
    memmove(list_at(args, t, g), list_at(args, t, 0), (size_t)args->out->shape[2] * 4);
}

static void one_list(const struct attn_attend_args *args)
{
    for_lists(args, copy_first_list);
}

static void lengths_of_room(const struct attn_attend_args *args)
{
    const struct attn_io_indexer *io =
        (const struct attn_io_indexer *)ext_of(args->next, ATTN_EXT_DRAFT_IO_INDEXER);
    for (int64_t t = args->batch->query_start_loc[0]; t < args->batch->num_actual_tokens; t++) {
        for (int64_t g = 0; g < args->out->shape[1]; g++) {
            io->lengths[t * args->out->shape[1] + g] = (int32_t)args->out->shape[2];
        }
    }
}

/* Rows of the first of their tokens. */
static void rows_of_first_token(struct attn_write_kv_args *args)
{
    static _Thread_local int64_t slots[MAX_TOKENS];
    const struct attn_indexer_desc *x =
        (const struct attn_indexer_desc *)ext_of(args->layer->next, ATTN_EXT_DRAFT_INDEXER_DESC);
    for (int64_t i = 0; i < args->num_slots && i < MAX_TOKENS; i++) {
        const int64_t in_row = args->slot_mapping[i] % x->tokens_per_row;
        slots[i] = args->slot_mapping[i] + (x->tokens_per_row - 1) * (in_row == 0) -
                   in_row * (in_row == x->tokens_per_row - 1);
    }
    args->slot_mapping = slots;
}

static const struct mutant mutants[] = {
    {.name = "mutant_index_activation_swapped", .before = activation_swapped},
    {.name = "mutant_index_weights_ignored", .before = weights_ignored},
    {.name = "mutant_index_one_less", .before = one_less},
    {.name = "mutant_index_first_not_forced", .before = first_not_forced},
    {.name = "mutant_index_last_not_forced", .before = last_not_forced},
    {.name = "mutant_index_tail_missing", .before = tail_missing},
    {.name = "mutant_index_forced_inside", .before = forced_inside},
    {.name = "mutant_index_unfinished_row_seen", .before = unfinished_row_seen},
    {.name = "mutant_index_own_token_hidden", .before = own_token_hidden},
    {.name = "mutant_index_unordered", .after = unordered},
    {.name = "mutant_index_padded_with_zero", .after = padded_with_zero},
    {.name = "mutant_index_one_list", .after = one_list},
    {.name = "mutant_index_lengths_of_room", .after = lengths_of_room},
    {.name = "mutant_index_rows_of_first_token", .write = rows_of_first_token},
};
const struct mutant_list index_mutants = {mutants, sizeof mutants / sizeof *mutants};
