/* SPDX-License-Identifier: Apache-2.0 */
/* make_block_table: entries of several blocks, by rows and by page lists, lengths of last pages. */
#include "cases/kernel_test.h"
#include "kernels/kernels.h"
#include "support/client.h"
#include "support/random.h"

enum { REQS = 5, ROWS = 7, STRIDE = 700, COLUMNS = 2099, PAGES = REQS * STRIDE, IN_ENTRY = 24 };

static const struct form {
    const char *name;
    int32_t parts;
    bool lists, rows, lengths;
} forms[] = {{"entries", 3, false, false, false},
             {"rows", 3, false, true, false},
             {"page_lists", 1, true, false, false},
             {"page_lists_of_entries", 3, true, false, true}};

/* Every array of the call: the one operand. */
struct arrays {
    int32_t table[ROWS * STRIDE], row[REQS], indices[PAGES], start[REQS + 1];
    int32_t last[REQS], lens[REQS], out[REQS][COLUMNS], out_lens[REQS];
};

/* Few keys, none, a full row, of whose 3 x 700 blocks the last has no place. */
static const int32_t keys[REQS] = {1, 0, STRIDE *IN_ENTRY, 25, 2 * IN_ENTRY};

static void fill(struct arrays *a, uint64_t *random)
{
    for (size_t i = 0; i < sizeof *a / sizeof(int32_t); i++) {
        ((int32_t *)a)[i] = (int32_t)(random_bits(random) % 100000);
    }
    a->start[0] = 3;
    for (int32_t r = 0; r < REQS; r++) {
        a->row[r] = (3 * r + 1) % ROWS;
        a->lens[r] = keys[r];
        a->start[r + 1] = a->start[r] + (keys[r] + IN_ENTRY - 1) / IN_ENTRY;
        a->last[r] = 1 + a->last[r] % IN_ENTRY;
    }
}

/* The call's outputs into `a` itself. */
static void expect(const struct form *form, struct arrays *a)
{
    for (int32_t r = 0; r < REQS; r++) {
        const int32_t count = a->start[r + 1] - a->start[r];
        for (int32_t i = 0; i < count * form->parts && i < COLUMNS; i++) {
            const int32_t entry = i / form->parts;
            const int32_t block = form->lists
                                      ? a->indices[a->start[r] + entry]
                                      : a->table[(form->rows ? a->row[r] : r) * STRIDE + entry];
            a->out[r][i] = block * form->parts + i % form->parts;
        }
        if (form->lengths) {
            a->out_lens[r] = count > 0 ? (count - 1) * IN_ENTRY + a->last[r] : 0;
        }
    }
}

static attn_status call_table(struct kernel_call *call, const void *context,
                              struct attn_error *error)
{
    const struct form *form = context;
    struct arrays *d = call_array(call, 0);
    const struct attn_block_table_args args = SIZED(
        attn_block_table_args, .instance = call->backend->instance, .stream = call->stream,
        .num_reqs = REQS, .blocks_per_entry = form->parts, .tokens_per_entry = IN_ENTRY,
        .num_columns = COLUMNS, .block_table = form->lists ? NULL : d->table,
        .block_table_stride = STRIDE, .block_table_row = form->rows ? d->row : NULL,
        .page_indices = form->lists ? d->indices : NULL,
        .page_start_loc = form->lists ? d->start : NULL,
        .last_page_len = form->lengths ? d->last : NULL, .seq_lens = form->lists ? NULL : d->lens,
        .out = d->out[0], .out_seq_lens = form->lengths ? d->out_lens : NULL);
    return KERNEL_CALL(call, make_block_table, &args, error);
}

static enum trial_result run(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct operand arrays = {"an array", .bytes = sizeof(struct arrays), .written = true};
    OWNED(kernel_test_finish) struct kernel_test test;
    kernel_test_init(&test, trial, &arrays, 1, NULL);
    fill(test_input(&test, 0), &seed);
    enum trial_result result = kernel_test_run_tested(&test, call_table, variant);
    if (result == TRIAL_PASSED) {
        expect(variant, test_expected(&test, 0));
        result =
            test_same(&test, 0, sizeof(struct arrays))
                ? TRIAL_PASSED
                : trial_say(trial, TRIAL_FAILED, "an entry is wrong, or another place was written");
    }
    return result;
}

void table_cases(const struct kernel_sink *sink)
{
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        kernel_try(sink, run, &forms[i], "make_block_table.%s", forms[i].name);
    }
}
