/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of attends over lists of keys. */
#include <math.h>
#include <string.h>

#include "mutants.h"

/* Copies of both extensions stand in the arguments, and of all tokens' lists where they fit:
 * `m->table` then has [rows, G, k], `m->lengths` [rows, G], of which rows before the batch's first
 * are left out. False where the attend has no lists. */
static bool take_lists(struct mutable_args *m)
{
    if (m->layer.next == NULL || m->layer.next->id != ATTN_EXT_DRAFT_INDEX_LISTS) {
        return false;
    }
    m->lists = *(const struct attn_index_lists *)m->layer.next;
    m->io_lists = *(const struct attn_io_index_lists *)m->args.next;
    m->layer.next = &m->lists.ext;
    m->args.next = &m->io_lists.ext;
    return true;
}

static int32_t groups_of(const struct mutable_args *m)
{
    return m->lists.groups == ATTN_LISTS_SHARED        ? 1
           : m->lists.groups == ATTN_LISTS_PER_KV_HEAD ? m->layer.num_kv_heads
                                                       : m->layer.num_q_heads;
}

/* One list, its entries in m->table. */
struct own_list {
    int32_t *entries;
    int32_t *length;
    int32_t request, seq_len;
};
typedef void change_list(const struct mutable_args *m, const struct own_list *list);

/* The lists of a batch that fits are copied and changed one by one. */
static void change_lists(struct mutable_args *m, change_list *change)
{
    if (!take_lists(m)) {
        return;
    }
    const struct attn_batch *batch = m->args.batch;
    const int64_t groups = groups_of(m), k = m->lists.max_entries;
    const int64_t first = batch->query_start_loc[0], end = batch->query_start_loc[batch->num_reqs];
    if ((end - first) * groups * k > MAX_TABLE) {
        return;
    }
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        for (int64_t t = batch->query_start_loc[r]; t < batch->query_start_loc[r + 1]; t++) {
            for (int64_t g = 0; g < groups; g++) {
                const int64_t at = (t - first) * groups + g;
                const struct own_list list = {m->table + at * k, m->lengths + at, r,
                                              batch->seq_lens[r]};
                memcpy(list.entries,
                       m->io_lists.indices + t * m->io_lists.token_stride +
                           g * m->io_lists.group_stride,
                       (size_t)k * sizeof *list.entries);
                *list.length = m->lists.has_lengths
                                   ? m->io_lists.lengths[t * m->io_lists.length_stride + g]
                                   : (int32_t)k;
                change(m, &list);
            }
        }
    }
    m->lists.has_lengths = 1;
    m->io_lists.indices = m->table - first * groups * k;
    m->io_lists.lengths = m->lengths - first * groups;
    m->io_lists.group_stride = k;
    m->io_lists.token_stride = groups * k;
    m->io_lists.length_stride = groups;
}

static void ignored(struct mutable_args *m)
{
    if (take_lists(m)) {
        m->layer.next = m->args.next = NULL;
    }
}

static void first_key_of_entries(const struct mutable_args *m, const struct own_list *list)
{
    for (int32_t i = 0; i < *list->length && !m->lists.physical_slots; i++) {
        list->entries[i] *= list->entries[i] > 0 ? m->lists.granularity : 1;
    }
}

/* An entry's keys but the first are not read. */
static void granularity_ignored(struct mutable_args *m)
{
    change_lists(m, first_key_of_entries);
    if (m->layer.next == &m->lists.ext && !m->lists.physical_slots) {
        m->lists.granularity = 1;
    }
}

static void none_to_first(const struct mutable_args *m, const struct own_list *list)
{
    bool there = false;
    for (int32_t i = 0; i < *list->length; i++) {
        there |= list->entries[i] == 0;
    }
    for (int32_t i = 0; i < *list->length && !there; i++) {
        there = list->entries[i] < 0;
        list->entries[i] = there ? 0 : list->entries[i];
    }
}

/* -1 means no key, not the first one. */
static void none_is_first(struct mutable_args *m)
{
    change_lists(m, none_to_first);
}

static void end_at_none(const struct mutable_args *m, const struct own_list *list)
{
    for (int32_t i = 0; i < *list->length; i++) {
        *list->length = list->entries[i] < 0 ? i : *list->length;
    }
}

/* -1 in the middle does not end a list. */
static void none_is_end(struct mutable_args *m)
{
    change_lists(m, end_at_none);
}

static void to_last_entry(const struct mutable_args *m, const struct own_list *list)
{
    const int32_t last = (list->seq_len - 1) / m->lists.granularity;
    bool there = list->seq_len == 0 || m->lists.physical_slots;
    for (int32_t i = 0; i < *list->length; i++) {
        there |= list->entries[i] == last;
    }
    for (int32_t i = 0; i < *list->length && !there; i++) {
        there = list->entries[i] > last;
        list->entries[i] = there ? last : list->entries[i];
    }
}

/* Entries past the end are not the last keys. */
static void past_the_end_is_last(struct mutable_args *m)
{
    change_lists(m, to_last_entry);
}

static void drop_part(const struct mutable_args *m, const struct own_list *list)
{
    for (int32_t i = 0; i < *list->length && !m->lists.physical_slots; i++) {
        const int64_t end = (list->entries[i] + (int64_t)1) * m->lists.granularity;
        list->entries[i] = end > list->seq_len ? -1 : list->entries[i];
    }
}

/* A request's last entry counts if it is only partly filled. */
static void last_part_dropped(struct mutable_args *m)
{
    change_lists(m, drop_part);
}

static void drop_last(const struct mutable_args *m, const struct own_list *list)
{
    *list->length -= *list->length > 0;
}

static void last_entry_dropped(struct mutable_args *m)
{
    change_lists(m, drop_last);
}

static void fill_empty(const struct mutable_args *m, const struct own_list *list)
{
    bool empty = true;
    for (int32_t i = 0; i < *list->length; i++) {
        empty &= list->entries[i] < 0;
    }
    for (int32_t i = 0; i < m->lists.max_entries && empty; i++) {
        list->entries[i] = i;
    }
    *list->length = empty ? m->lists.max_entries : *list->length;
}

/* An empty list is a row without keys, not one with all of them. */
static void empty_sees_all(struct mutable_args *m)
{
    change_lists(m, fill_empty);
}

static void lengths_ignored(struct mutable_args *m)
{
    m->lists.has_lengths = take_lists(m) ? 0 : m->lists.has_lengths;
}

static void one_for_all_heads(struct mutable_args *m)
{
    m->lists.groups = take_lists(m) ? ATTN_LISTS_SHARED : m->lists.groups;
}

static void one_per_kv_head(struct mutable_args *m)
{
    if (take_lists(m) && m->lists.groups == ATTN_LISTS_PER_Q_HEAD) {
        m->lists.groups = ATTN_LISTS_PER_KV_HEAD;
    }
}

static void slots_as_positions(struct mutable_args *m)
{
    m->lists.physical_slots = take_lists(m) ? 0 : m->lists.physical_slots;
}

/* Drafts have lists of their own. */
static void drafts_share(struct mutable_args *m)
{
    if (take_lists(m) && m->args.batch->max_query_len == 4) {
        const int64_t first = m->args.batch->query_start_loc[0];
        m->io_lists.indices += first * m->io_lists.token_stride;
        m->io_lists.token_stride = 0;
    }
}

/* A listed key is seen all the same if a term hides it. */
static void terms_ignored(struct mutable_args *m)
{
    if (take_lists(m)) {
        m->layer.causal = ATTN_CAUSAL_NO;
        m->layer.causal_per_request = m->layer.prefix_lm = 0;
    }
}

static void window_ignored(struct mutable_args *m)
{
    m->layer.has_window = take_lists(m) ? 0 : m->layer.has_window;
}

static void sink_of_empty_dropped(const struct attn_attend_args *args)
{
    const struct attn_tensor *lse = args->lse;
    const float *sinks = args->params->sinks;
    for (int64_t h = 0; lse != NULL && args->layer->has_sinks && h < lse->shape[0]; h++) {
        for (int32_t t = 0; t < args->batch->num_actual_tokens; t++) {
            float *at = (float *)lse->data + h * lse->strides[0] + t * lse->strides[1];
            *at = *at == sinks[h] ? -INFINITY : *at;
        }
    }
}

static const struct mutant mutants[] = {
    {.name = "mutant_list_ignored", .before = ignored},
    {.name = "mutant_list_granularity_ignored", .before = granularity_ignored},
    {.name = "mutant_list_none_is_first", .before = none_is_first},
    {.name = "mutant_list_none_is_end", .before = none_is_end},
    {.name = "mutant_list_past_the_end_is_last", .before = past_the_end_is_last},
    {.name = "mutant_list_last_part_dropped", .before = last_part_dropped},
    {.name = "mutant_list_last_entry_dropped", .before = last_entry_dropped},
    {.name = "mutant_list_empty_sees_all", .before = empty_sees_all},
    {.name = "mutant_list_lengths_ignored", .before = lengths_ignored},
    {.name = "mutant_list_one_for_all_heads", .before = one_for_all_heads},
    {.name = "mutant_list_one_per_kv_head", .before = one_per_kv_head},
    {.name = "mutant_list_slots_as_positions", .before = slots_as_positions},
    {.name = "mutant_list_drafts_share", .before = drafts_share},
    {.name = "mutant_list_terms_ignored", .before = terms_ignored},
    {.name = "mutant_list_window_ignored", .before = window_ignored},
    {.name = "mutant_list_sink_of_empty_dropped", .after = sink_of_empty_dropped},
};
const struct mutant_list list_mutants = {mutants, sizeof mutants / sizeof *mutants};
