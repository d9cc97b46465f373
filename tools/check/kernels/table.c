/* SPDX-License-Identifier: Apache-2.0 */
/* make_block_table: entries of several blocks, by rows and by page lists, lengths of last pages. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
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

/* Every array of the call, once on the device. */
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

static enum trial_result run(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct form *form = variant;
    struct attn_error error = ATTN_ERROR_INIT;
    struct arrays *expected = malloc(sizeof *expected), *found = malloc(sizeof *found);
    struct arrays *d = (struct arrays *)device_alloc(trial->device, sizeof *d);
    enum trial_result result = trial_say(trial, TRIAL_FAILED, "no memory for the case");
    if (expected != NULL && found != NULL && d != NULL) {
        fill(expected, &seed);
        bool there =
            device_write(trial->device, (uint8_t *)d, (const uint8_t *)expected, sizeof *d);
        const struct attn_block_table_args args = {.struct_size = sizeof args,
                                                   .instance = trial->tested->instance,
                                                   .num_reqs = REQS,
                                                   .blocks_per_entry = form->parts,
                                                   .tokens_per_entry = IN_ENTRY,
                                                   .num_columns = COLUMNS,
                                                   .block_table = form->lists ? NULL : d->table,
                                                   .block_table_stride = STRIDE,
                                                   .block_table_row = form->rows ? d->row : NULL,
                                                   .page_indices = form->lists ? d->indices : NULL,
                                                   .page_start_loc = form->lists ? d->start : NULL,
                                                   .last_page_len = form->lengths ? d->last : NULL,
                                                   .seq_lens = form->lists ? NULL : d->lens,
                                                   .out = d->out[0],
                                                   .out_seq_lens =
                                                       form->lengths ? d->out_lens : NULL};
        expect(form, expected);
        attn_status status =
            there ? trial->tested->kernels.make_block_table(&args, &error) : ATTN_ERROR_DEVICE;
        if (status != ATTN_OK ||
            !device_read(trial->device, (uint8_t *)found, (const uint8_t *)d, sizeof *d)) {
            result = trial_call_failed(trial, "make_block_table", status, &error);
        } else {
            result = memcmp(expected, found, sizeof *found) == 0
                         ? TRIAL_PASSED
                         : trial_say(trial, TRIAL_FAILED,
                                     "an entry is wrong, or another place was written");
        }
    }
    device_free(trial->device, (uint8_t *)d);
    free(expected);
    free(found);
    return result;
}

void table_cases(const struct kernel_sink *sink)
{
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        char name[64];
        snprintf(name, sizeof name, "make_block_table.%s", forms[i].name);
        if (sink->caps->kernels & ATTN_KERNEL_MAKE_BLOCK_TABLE) {
            sink->try(sink->user, name, run, &forms[i]);
        }
    }
}
