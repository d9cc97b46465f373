/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of make_block_table, which cpu_ref has not: the right one, and each wrong in one place.
 */
#include "mutants.h"

enum mistake { NONE, OFFSET_FORGOTTEN, ROWS_IGNORED, PAST_COLUMNS, ONE_PART, WHOLE_PAGE, NO_PAGE };

/* From the last request to the first, so that what is written past a row stays. */
static void make_table(const struct attn_block_table_args *a, int32_t mistake)
{
    for (int32_t r = a->num_reqs - 1; r >= 0; r--) {
        const int32_t parts = a->blocks_per_entry, in_entry = a->tokens_per_entry;
        const int64_t row =
            a->block_table_row != NULL && mistake != ROWS_IGNORED ? a->block_table_row[r] : r;
        const int32_t *entries = a->block_table + row * a->block_table_stride;
        int64_t count;
        if (a->page_indices != NULL) {
            const int32_t *start = a->page_start_loc;
            entries = a->page_indices + start[r] - (mistake == OFFSET_FORGOTTEN ? start[0] : 0);
            count = start[r + 1] - start[r];
        } else {
            count = (a->seq_lens[r] + in_entry - 1) / in_entry;
        }
        for (int64_t i = 0; i < count * parts; i++) {
            if (i < a->num_columns || mistake == PAST_COLUMNS) {
                a->out[(int64_t)r * a->num_columns + i] =
                    (int32_t)(entries[i / parts] * parts + (mistake == ONE_PART ? 0 : i % parts));
            }
        }
        if (a->out_seq_lens != NULL) {
            const int64_t last = mistake == WHOLE_PAGE ? in_entry : a->last_page_len[r];
            a->out_seq_lens[r] =
                count > 0 || mistake == NO_PAGE ? (int32_t)((count - 1) * in_entry + last) : 0;
        }
    }
}

static const struct mutant mutants[] = {
    {.name = "mutant_tables_offset_forgotten", .table = make_table, .mistake = OFFSET_FORGOTTEN},
    {.name = "mutant_tables_rows_ignored", .table = make_table, .mistake = ROWS_IGNORED},
    {.name = "mutant_tables_past_columns", .table = make_table, .mistake = PAST_COLUMNS},
    {.name = "mutant_tables_one_part", .table = make_table, .mistake = ONE_PART},
    {.name = "mutant_tables_whole_page", .table = make_table, .mistake = WHOLE_PAGE},
    {.name = "mutant_tables_no_page", .table = make_table, .mistake = NO_PAGE},
    {.name = "control_tables", .table = make_table},
};
const struct mutant_list block_mutants = {mutants, sizeof mutants / sizeof *mutants};
