/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of make_block_table, which cpu_ref has not: the right one, and each wrong in one place.
 */
#include "mutants.h"

enum mistake { NONE, OFFSET_FORGOTTEN, ROWS_IGNORED, PAST_COLUMNS, ONE_PART, WHOLE_PAGE, NO_PAGE };

/* From the last request to the first, so that what is written past a row stays. */
static void make_table(const struct attn_block_table_args *a, enum mistake mistake)
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

#define TABLE(name, mistake)                                                                       \
    static attn_status name(const struct attn_kernels *kernels,                                    \
                            const struct attn_block_table_args *args, struct attn_error *error)    \
    {                                                                                              \
        (void)kernels, (void)error;                                                                \
        make_table(args, mistake);                                                                 \
        return ATTN_OK;                                                                            \
    }

TABLE(right, NONE)
TABLE(offset_forgotten, OFFSET_FORGOTTEN)
TABLE(rows_ignored, ROWS_IGNORED)
TABLE(past_columns, PAST_COLUMNS)
TABLE(one_part, ONE_PART)
TABLE(whole_page, WHOLE_PAGE)
TABLE(no_page, NO_PAGE)

static const struct mutant mutants[] = {
    {.name = "mutant_tables_offset_forgotten", .table = offset_forgotten},
    {.name = "mutant_tables_rows_ignored", .table = rows_ignored},
    {.name = "mutant_tables_past_columns", .table = past_columns},
    {.name = "mutant_tables_one_part", .table = one_part},
    {.name = "mutant_tables_whole_page", .table = whole_page},
    {.name = "mutant_tables_no_page", .table = no_page},
    {.name = "control_tables", .table = right},
};
const struct mutant_list block_mutants = {mutants, sizeof mutants / sizeof *mutants};
