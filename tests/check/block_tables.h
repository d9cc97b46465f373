/* SPDX-License-Identifier: Apache-2.0 */
/* make_block_table, which cpu_ref has not: right with MISTAKE NONE. From the last request to the
 * first, so that what is written past a row stays. Included by mutants of plugin.c. */
static attn_status make_block_table(const struct attn_block_table_args *a, struct attn_error *error)
{
    for (int32_t r = a->num_reqs - 1; r >= 0; r--) {
        const int32_t parts = a->blocks_per_entry, in_entry = a->tokens_per_entry;
        const int64_t row =
            a->block_table_row != NULL && MISTAKE != ROWS_IGNORED ? a->block_table_row[r] : r;
        const int32_t *entries = a->block_table + row * a->block_table_stride;
        int64_t count;
        if (a->page_indices != NULL) {
            const int32_t *start = a->page_start_loc;
            entries = a->page_indices + start[r] - (MISTAKE == OFFSET_FORGOTTEN ? start[0] : 0);
            count = start[r + 1] - start[r];
        } else {
            count = (a->seq_lens[r] + in_entry - 1) / in_entry;
        }
        for (int64_t i = 0; i < count * parts; i++) {
            if (i < a->num_columns || MISTAKE == PAST_COLUMNS) {
                a->out[(int64_t)r * a->num_columns + i] =
                    (int32_t)(entries[i / parts] * parts + (MISTAKE == ONE_PART ? 0 : i % parts));
            }
        }
        if (a->out_seq_lens != NULL) {
            const int64_t last = MISTAKE == WHOLE_PAGE ? in_entry : a->last_page_len[r];
            a->out_seq_lens[r] =
                count > 0 || MISTAKE == NO_PAGE ? (int32_t)((count - 1) * in_entry + last) : 0;
        }
    }
    return ATTN_OK;
}
