/* SPDX-License-Identifier: Apache-2.0 */
/* A batch's tables beyond its own fields, and the rows that a run brings for the caches that they
 * address. */

#include "bind/address_check.h"
#include "step/plan_state.h"
#include "util/structs.h"

attn_status tables_init(attn_plan *plan, struct attn_error *error)
{
    const size_t count = (size_t)plan->steps[0].layer->owner->num_tables;
    if (count == 0) {
        return ATTN_OK;
    }
    for (int32_t i = 0; i < 3; i++) {
        plan->tables[i] = arena_array(&plan->arena, count, sizeof *plan->tables[i]);
    }
    plan->num_tables = (int32_t)count;
    return plan->arena.failed ? NO_MEMORY("plan", "the plan") : ATTN_OK;
}

static attn_status check_table(attn_plan *plan, const struct attn_batch *b, int32_t number,
                               struct attn_batch_table *t, struct attn_error *error)
{
    int32_t tokens, longest = 0;
    const int32_t in_block = table_rows_per_block(plan, number, &tokens);
    TRY(page_lists_read(plan, number, b->num_reqs, t, error));
    if (b->num_reqs > 0 && (t->block_table == NULL || t->seq_lens == NULL)) {
        return BAD("tables", "table %d: block_table %p, seq_lens %p; both are needed", number,
                   (const void *)t->block_table, (const void *)t->seq_lens);
    }
    for (int32_t r = 0; t->seq_lens_host != NULL && r < b->num_reqs; r++) {
        if (t->seq_lens_host[r] < 0) {
            return BAD("tables", "table %d: request %d has %d rows; 0 or above", number, r,
                       t->seq_lens_host[r]);
        }
        longest = t->seq_lens_host[r] > longest ? t->seq_lens_host[r] : longest;
    }
    if (t->max_seq_len < longest && t->max_seq_len != 0) {
        return BAD("tables", "table %d: max_seq_len is %d and a request has %d rows", number,
                   t->max_seq_len, longest);
    }
    if (t->max_seq_len == 0) {
        t->max_seq_len =
            t->seq_lens_host != NULL ? longest : (plan->limits.max_seq_len + tokens - 1) / tokens;
    }
    t->block_table_rows = t->block_table_rows > 0 ? t->block_table_rows : b->num_reqs;
    if (t->block_table_row == NULL && t->block_table_rows < b->num_reqs) {
        return BAD("tables",
                   "table %d: %lld rows and %d requests; each has a row of its own without "
                   "block_table_row",
                   number, (long long)t->block_table_rows, b->num_reqs);
    }
    if (t->seq_lens_host != NULL && b->num_reqs > 0 &&
        t->block_table_stride < (longest + in_block - 1) / in_block) {
        return BAD("tables",
                   "table %d: rows of %lld entries; a request has %d rows, in blocks of %d", number,
                   (long long)t->block_table_stride, longest, in_block);
    }
    return t->num_slots < 0 || (t->num_slots > 0 && t->slot_mapping == NULL)
               ? BAD("tables", "table %d: %lld slots at %p", number, (long long)t->num_slots,
                     (const void *)t->slot_mapping)
               : ATTN_OK;
}

attn_status tables_read(attn_plan *plan, struct attn_batch *batch, struct attn_error *error)
{
    if (batch->num_tables < plan->num_tables ||
        (batch->num_tables > 0 &&
         (batch->tables == NULL ||
          !element_stride_is_good(ABI_BATCH_TABLE, batch->table_stride)))) {
        return BAD(
            "tables",
            "%d tables of %d bytes at %p; the plan's layers need %d, each of %zu to %d bytes",
            batch->num_tables, batch->table_stride, (const void *)batch->tables, plan->num_tables,
            abi_structs[ABI_BATCH_TABLE].minimum, MAX_ELEMENT);
    }
    for (int32_t i = 0; i < plan->num_tables; i++) {
        struct attn_batch_table *table = &plan->tables[0][i];
        TRY(element_read(table, ABI_BATCH_TABLE, batch->tables, batch->table_stride, i, error));
        TRY(struct_check(table, ABI_BATCH_TABLE, NULL, error));
        TRY(address_check_table(plan, table, error));
        TRY(check_table(plan, batch, i + 1, table, error));
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
        struct attn_batch_table *t = &plan->tables[part][i];
        *t = plan->tables[0][i];
        t->seq_lens += t->seq_lens != NULL ? first : 0;
        t->seq_lens_host += t->seq_lens_host != NULL ? first : 0;
        if (t->block_table_row != NULL) {
            t->block_table_row += first;
        } else if (t->block_table != NULL) {
            t->block_table += first * t->block_table_stride;
            t->block_table_rows -= first;
        }
    }
    batch->tables = plan->tables[part];
}

/* Blocks of one table that a kernel will follow, and slots that it will write. */
static attn_status validate_table(const attn_plan *plan, int32_t number, int64_t num_blocks,
                                  struct attn_error *error)
{
    const struct attn_batch_table *t = &plan->tables[0][number - 1];
    int32_t tokens;
    const int64_t in_block = table_rows_per_block(plan, number, &tokens);
    for (int32_t r = 0; r < plan->given.num_reqs; r++) {
        int64_t row = t->block_table_row != NULL ? t->block_table_row[r] : r;
        int64_t last = (t->seq_lens[r] + in_block - 1) / in_block;
        if (row < 0 || row >= t->block_table_rows || t->seq_lens[r] < 0 ||
            last > t->block_table_stride) {
            return BAD("tables",
                       "table %d, request %d: row %lld of %d entries; there are %lld rows of %lld",
                       number, r, (long long)row, t->seq_lens[r], (long long)t->block_table_rows,
                       (long long)t->block_table_stride);
        }
        int64_t count;
        const int32_t *entries = table_entries(plan, number, t, r, &count);
        if (last > count) {
            return BAD("page_start_loc", "table %d, request %d has %d rows and %lld pages of %lld",
                       number, r, t->seq_lens[r], (long long)count, (long long)in_block);
        }
        for (int64_t i = 0; i < last; i++) {
            int32_t block = entries[i];
            if (block < 0 || block >= num_blocks) {
                return BAD("tables",
                           "table %d, request %d, entry %lld: block %d; its caches have blocks 0 "
                           "to %lld",
                           number, r, (long long)i, block, (long long)num_blocks - 1);
            }
        }
    }
    const int64_t slots = num_blocks * in_block;
    return validate_slot_list(t->slot_mapping, t->num_slots, slots + plan->limits.max_num_tokens,
                              slots, NULL, error);
}

attn_status tables_validate(const attn_plan *plan, struct attn_error *error)
{
    const attn_layer *first = plan->steps[0].layer->owner;
    for (int32_t i = 0; i < first->num_further; i++) {
        int64_t fewest = first->further[i].num_blocks;
        for (int32_t s = 1; s < plan->num_steps; s++) {
            const int64_t blocks = plan->steps[s].layer->owner->further[i].num_blocks;
            fewest = blocks < fewest ? blocks : fewest;
        }
        if (first->caches[i].table > 0) {
            TRY(validate_table(plan, first->caches[i].table, fewest, error));
        }
    }
    return ATTN_OK;
}

attn_status tables_check_rows(const attn_plan *plan, const struct step *step,
                              const struct attn_ext *next, struct attn_error *error)
{
    const attn_layer *layer = step->layer;
    const struct attn_io_caches *io = ext_find(next, ATTN_EXT_IO_CACHES);
    if (io == NULL || layer->num_further == 0) { /* then it is marked optional */
        return ATTN_OK;
    }
    if (io->rows == NULL || io->num_rows != layer->num_further) {
        return FAIL("attn_io_caches", "rows is NULL, or num_rows is not the number of caches that "
                                      "the layer has beyond those of its kind");
    }
    for (int32_t i = 0; i < io->num_rows; i++) {
        const struct attn_tensor *t = io->rows[i];
        const int32_t table = layer->caches[i].table;
        const int64_t slots =
            table == 0 ? plan->given.num_slots : plan->tables[0][table - 1].num_slots;
        if (t != NULL && (!tensor_is_numbers(t, 3) || t->shape[0] < slots ||
                          t->shape[1] != layer->further[i].num_heads ||
                          t->shape[2] != layer->further[i].head_size)) {
            return FAIL("attn_io_caches",
                        "rows of a cache are not [num_slots of its table or more, num_heads, "
                        "head_size] of a dtype of enum attn_dtype_id with a contiguous last "
                        "dimension");
        }
        TRY(address_check_tensor(plan->model, t, "attn_io_caches", plan->validate, error));
    }
    return ATTN_OK;
}
