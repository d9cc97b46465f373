/* SPDX-License-Identifier: Apache-2.0 */
/* A batch's tables beyond its own fields, and the rows that a run brings for the caches that they
 * address. */
#include <stdio.h>

#include "bind/address_check.h"
#include "step/plan_state.h"

attn_status tables_init(attn_plan *plan, struct attn_error *error)
{
    plan->num_tables = layer_num_tables(plan->steps[0].layer->owner->selected);
    for (int32_t i = 0; i < 3; i++) {
        plan->tables[i] =
            arena_array(&plan->arena, (size_t)plan->num_tables, sizeof *plan->tables[i]);
    }
    return plan->arena.failed ? NO_MEMORY("plan", "the plan") : ATTN_OK;
}

attn_status table_check(attn_plan *plan, const struct attn_batch *b, int32_t number,
                        struct attn_batch_table *t, struct attn_error *error)
{
    const struct made_table *made = &plan->made[number];
    const bool own = number == 0;
    const bool cross = own && plan->steps[0].layer->owner->desc->kind == ATTN_LAYER_CROSS;
    const bool exact = own && !cross && !(b->flags & ATTN_BATCH_HOST_BOUNDS);
    const char *lens_field = cross ? "encoder_seq_lens" : "seq_lens";
    const char *most_field = cross ? "max_encoder_seq_len" : "max_seq_len";
    const int32_t most = plan->limits.max_seq_len, *start = b->query_start_loc_host;
    int32_t longest = 0;
    char where[24] = "";
#define FIELD(own_name) (own ? (own_name) : "tables")
    if (!own) {
        snprintf(where, sizeof where, "table %d: ", number);
    }
    TRY(page_lists_read(plan, number, b->num_reqs, t, error));
    for (int32_t r = 0; t->seq_lens_host != NULL && r < b->num_reqs; r++) {
        const int32_t length = t->seq_lens_host[r], queries = start[r + 1] - start[r];
        BAD_IF(length < 0 || (exact && length != 0 && length < queries), FIELD(lens_field),
               "%s%s[%d] is %d and the request has %d queries; %s", where, lens_field, r, length,
               queries, exact ? "the lengths count the step's own tokens" : "0 or above");
        longest = length > longest ? length : longest;
    }
    ERROR_IF(own && !cross && most > 0 && longest > most, ATTN_ERROR_LIMIT, "seq_lens_host",
             "a request has %d keys in seq_lens_host; 0 to %d, the plan's max_seq_len", longest,
             most);
    BAD_IF(t->max_seq_len != 0 && t->max_seq_len < longest, FIELD(most_field),
           "%s%s is %d and a request has %d keys", where, most_field, t->max_seq_len, longest);
    if (t->max_seq_len == 0) {
        t->max_seq_len = t->seq_lens_host != NULL
                             ? longest
                             : most / made->tokens_per_row + (most % made->tokens_per_row != 0);
    }
    TRY_IF(own, check_limit(most_field, t->max_seq_len, most, error));
    BAD_IF(b->num_reqs > 0 && (t->seq_lens == NULL || t->block_table == NULL), FIELD("block_table"),
           "%sseq_lens %p, block_table %p; a layer with a cache needs both", where,
           (const void *)t->seq_lens, (const void *)t->block_table);
    t->block_table_rows = t->block_table_rows != 0 ? t->block_table_rows : b->num_reqs;
    BAD_IF(t->block_table_rows < (t->block_table_row == NULL ? b->num_reqs : 0),
           FIELD("block_table_rows"),
           "%s%lld rows and %d requests; each has a row of its own without block_table_row", where,
           (long long)t->block_table_rows, b->num_reqs);
    const int64_t keys = own ? t->max_seq_len : longest, in_block = made->rows_per_entry;
    const int64_t blocks = (keys + in_block - 1) / in_block;
    BAD_IF((t->seq_lens_host != NULL || t->block_table_stride < 0) && b->num_reqs > 0 &&
               t->block_table_stride < blocks,
           FIELD("block_table_stride"),
           "%srows of %lld entries; a request has %lld keys, %lld blocks of %lld", where,
           (long long)t->block_table_stride, (long long)keys, (long long)blocks,
           (long long)in_block);
    return t->num_slots < 0 || t->num_slots > INT32_MAX ||
                   (t->num_slots > 0 && t->slot_mapping == NULL)
               ? BAD(FIELD("slot_mapping"), "%s%lld slots at %p", where, (long long)t->num_slots,
                     (const void *)t->slot_mapping)
               : ATTN_OK;
}

attn_status tables_read(attn_plan *plan, struct attn_batch *batch, struct attn_error *error)
{
    BAD_IF(batch->num_tables < plan->num_tables ||
               (batch->num_tables > 0 &&
                (batch->tables == NULL ||
                 !element_stride_is_good(ABI_BATCH_TABLE, batch->table_stride))),
           "tables",
           "%d tables of %d bytes at %p; the plan's layers need %d, each of %zu to %d bytes",
           batch->num_tables, batch->table_stride, (const void *)batch->tables, plan->num_tables,
           abi_structs[ABI_BATCH_TABLE].minimum, MAX_ELEMENT);
    for (int32_t i = 0; i < plan->num_tables; i++) {
        struct attn_batch_table *table = &plan->tables[0][i];
        TRY(element_read(table, ABI_BATCH_TABLE, batch->tables, batch->table_stride, i, error));
        TRY(struct_check(table, ABI_BATCH_TABLE, NULL, error));
        TRY_IF(plan->model->asked != NULL && (!plan->asked_tables || plan->validate),
               address_check_all(plan->model, table, ABI_BATCH_TABLE, NULL, "tables", true, error));
        TRY(table_check(plan, batch, i + 1, table, error));
    }
    plan->asked_tables |= plan->num_tables > 0;
    batch->tables = plan->tables[0]; /* kernels see those that their layers need */
    batch->num_tables = plan->num_tables;
    batch->table_stride = plan->num_tables > 0 ? (int32_t)sizeof *plan->tables[0] : 0;
    return ATTN_OK;
}

void tables_cut(const attn_plan *plan, int32_t part, int32_t first, struct attn_batch *batch)
{
    for (int32_t i = 0; i < plan->num_tables; i++) {
        plan->tables[part][i] = plan->tables[0][i];
        table_cut(&plan->tables[part][i], first);
    }
    batch->tables = plan->tables[part];
}

attn_status tables_check_rows(const attn_plan *plan, const struct step *step,
                              const struct attn_ext *next, struct attn_error *error)
{
    const attn_layer *layer = step->layer;
    const struct attn_io_caches *io = ext_find(next, ATTN_EXT_IO_CACHES);
    if (io == NULL || layer->num_further == 0) { /* then it is marked optional */
        return ATTN_OK;
    }
    BAD_IF(io->rows == NULL || io->num_rows != layer->num_further, "attn_io_caches",
           "rows is NULL, or num_rows is not the number of caches that the layer has beyond those "
           "of its kind");
    for (int32_t i = 0; i < io->num_rows; i++) {
        const struct attn_tensor *t = io->rows[i];
        const int32_t table = layer->caches[i].table;
        const int64_t slots =
            table == 0 ? plan->given.num_slots : plan->tables[0][table - 1].num_slots;
        const struct attn_kv_view *view = &layer->further[i];
        CHECK_TENSOR_IF(t != NULL, t, NULL, "attn_io_caches", 3,
                        {slots, view->num_heads, view->head_size}, 1, TENSOR_NUMBERS);
        TRY(address_check_tensor(plan->model, t, "attn_io_caches", plan->validate, error));
    }
    return ATTN_OK;
}
