/* SPDX-License-Identifier: Apache-2.0 */
/* The block tables that kernels get where the engine's are others: entries that are several of the
 * kernel's blocks, or page lists with offsets. They are made in the workspace by each plan, so that
 * kernels and compositions know one form. */
#include <stdio.h>

#include "step/plan_state.h"

#define MAX_TABLE 0x1p50 /* entries of a made table */

static const attn_layer *owner_of(const attn_plan *plan)
{
    return plan->steps[0].layer->owner;
}

/* Rows of a block of the caches that table `number`, from 1, addresses, and tokens of a row. */
static int32_t rows_per_block(const attn_plan *plan, int32_t number, int32_t *tokens_per_row)
{
    const attn_layer *owner = owner_of(plan);
    for (int32_t i = 0; i < owner->num_further; i++) {
        if (owner->caches[i].table == number) {
            *tokens_per_row = owner->caches[i].tokens_per_row;
            return owner->further[i].block_size;
        }
    }
    return 1;
}

/* One table's: its columns hold the longest request of the limits. */
static attn_status init_table(attn_plan *plan, int32_t number, bool lists, struct attn_error *error)
{
    const struct attn_limits *limits = &plan->limits;
    struct made_table *made = &plan->made[number];
    made->tokens_per_row = 1;
    made->parts = number == 0 ? owner_of(plan)->selected->blocks_per_entry : 1;
    made->rows_per_entry = number == 0 ? owner_of(plan)->tokens_per_block * made->parts
                                       : rows_per_block(plan, number, &made->tokens_per_row);
    if (made->parts == 1 && !lists) {
        return ATTN_OK;
    }
    const int64_t in_entry = made->rows_per_entry * made->tokens_per_row;
    const int64_t entries = limits->max_seq_len > 0
                                ? (limits->max_seq_len + in_entry - 1) / in_entry
                                : limits->max_blocks_per_req;
    ERROR_IF(entries == 0 || entries * made->parts > INT32_MAX ||
                 (double)entries * (double)made->parts * limits->max_num_reqs > MAX_TABLE,
             ATTN_ERROR_LIMIT, "max_seq_len",
             "limits of %d requests, %d keys and %d blocks of a request; a block table is made for "
             "the kernels, which needs one of the last two and at most %g entries",
             limits->max_num_reqs, limits->max_seq_len, limits->max_blocks_per_req, MAX_TABLE);
    made->columns = (int32_t)(entries * made->parts);
    made->takes_lists = lists;
    made->lens_host =
        lists ? arena_array(&plan->arena, (size_t)limits->max_num_reqs, sizeof(int32_t)) : NULL;
    return plan->arena.failed ? NO_MEMORY("plan", "the plan") : ATTN_OK;
}

attn_status block_table_init(attn_plan *plan, struct attn_error *error)
{
    bool lists = false;
    for (int32_t i = 0; i < plan->num_steps; i++) {
        lists |= plan->steps[i].layer->desc->needs_page_lists != 0;
    }
    if (!layer_has_cache(owner_of(plan)->desc) || owner_of(plan)->spec.kind == ATTN_KV_SPEC_STATE) {
        return ATTN_OK;
    }
    for (int32_t n = 0; n <= plan->num_tables; n++) {
        TRY(init_table(plan, n, lists, error));
    }
    return ATTN_OK;
}

size_t block_table_lay_out(attn_plan *plan, size_t at)
{
    const int64_t reqs = plan->limits.max_num_reqs;
    for (int32_t n = 0; n <= plan->num_tables; n++) {
        struct made_table *made = &plan->made[n];
        made->lens_at = at;
        at += made->takes_lists ? (size_t)plan_aligned(reqs * (int64_t)sizeof(int32_t)) : 0;
        made->table_at = at;
        at += (size_t)plan_aligned(reqs * made->columns * (int64_t)sizeof(int32_t));
    }
    return at;
}

attn_status check_limit(const char *field, int64_t value, int64_t most, struct attn_error *error)
{
    ERROR_IF(value < 0 || (most != 0 && value > most),
             value < 0 ? ATTN_ERROR_INVALID_ARGUMENT : ATTN_ERROR_LIMIT, field,
             "%s is %lld; 0 to %lld, the plan's limit", field, (long long)value, (long long)most);
    return ATTN_OK;
}

attn_status check_starts(const struct starts *s, const int32_t *start, int32_t count,
                         struct attn_error *error)
{
    char end[64] = "";
    for (int32_t r = 0; start != NULL && r < count; r++) {
        if (start[r] < 0 || start[r + 1] < start[r] || (s->end != NULL && start[r + 1] > s->most)) {
            if (s->end != NULL) {
                snprintf(end, sizeof end, " and ends at %s, %lld, or before", s->end,
                         (long long)s->most);
            }
            return BAD(s->field,
                       "%s%s[%d] is %d and [%d] is %d; it begins at 0 or above, never decreases%s",
                       s->where, s->field, r, start[r], r + 1, start[r + 1], end);
        }
    }
    return ATTN_OK;
}

/* The fields that a batch has of its own and of each of its tables. */
#define TABLE_FIELDS(X)                                                                            \
    X(block_table)                                                                                 \
    X(block_table_stride)                                                                          \
    X(block_table_rows)                                                                            \
    X(block_table_row)                                                                             \
    X(slot_mapping)                                                                                \
    X(num_slots)                                                                                   \
    X(seq_lens)                                                                                    \
    X(seq_lens_host)                                                                               \
    X(max_seq_len)                                                                                 \
    X(page_indices)                                                                                \
    X(page_start_loc)                                                                              \
    X(last_page_len)                                                                               \
    X(page_start_loc_host)                                                                         \
    X(last_page_len_host)                                                                          \
    X(num_pages)

struct attn_batch_table own_table(const struct attn_batch *b)
{
    struct attn_batch_table table = {.block_table = NULL};
#define GET(field) table.field = b->field;
    TABLE_FIELDS(GET)
    return table;
}

void own_table_put(struct attn_batch *b, const struct attn_batch_table *t)
{
#define PUT(field) b->field = t->field;
    TABLE_FIELDS(PUT)
}

void table_cut(struct attn_batch_table *t, int32_t first)
{
    t->seq_lens = MOVED(t->seq_lens, first);
    t->seq_lens_host = MOVED(t->seq_lens_host, first);
    if (t->block_table_row != NULL) {
        t->block_table_row += first;
    } else if (t->block_table != NULL) {
        t->block_table += first * t->block_table_stride;
        t->block_table_rows -= first;
    }
}

/* Lengths of the last pages, on the host, as lengths of the requests. */
static attn_status take_last_pages(attn_plan *plan, int32_t number, int32_t num_reqs,
                                   const int32_t *start, const int32_t *last,
                                   struct attn_error *error)
{
    const int64_t in_entry = plan->made[number].rows_per_entry;
    for (int32_t r = 0; r < num_reqs; r++) {
        const int64_t pages = (int64_t)start[r + 1] - start[r];
        const int64_t rows = pages > 0 ? (pages - 1) * in_entry + last[r] : 0;
        BAD_IF(pages > 0 && (last[r] < 1 || last[r] > in_entry || rows > INT32_MAX),
               "last_page_len",
               "table %d, request %d: %d keys in the last of %lld pages; 1 to %lld", number, r,
               last[r], (long long)pages, (long long)in_entry);
        plan->made[number].lens_host[r] = (int32_t)rows;
    }
    return ATTN_OK;
}

/* Do the pages hold the keys? Both as far as the host knows them. */
static attn_status check_pages(const attn_plan *plan, int32_t number,
                               const struct attn_batch_table *t, const int32_t *start,
                               struct attn_error *error)
{
    const int64_t in_entry = plan->made[number].rows_per_entry;
    for (int32_t r = 0; t->seq_lens_host != NULL && r < plan->given.num_reqs; r++) {
        const int64_t pages = (int64_t)start[r + 1] - start[r];
        BAD_IF(pages * in_entry < t->seq_lens_host[r], "page_start_loc",
               "table %d, request %d has %d keys and %lld pages of %lld", number, r,
               t->seq_lens_host[r], (long long)pages, (long long)in_entry);
    }
    return ATTN_OK;
}

static attn_status check_page_lists(const attn_plan *plan, int32_t number,
                                    const struct attn_batch_table *t, struct attn_error *error)
{
    const attn_layer *owner = owner_of(plan);
    BAD_IF(!plan->made[number].takes_lists, "page_indices",
           "table %d: page lists, and no layer of group %d says needs_page_lists", number,
           plan->group);
    BAD_IF(t->block_table != NULL || t->page_start_loc == NULL || t->num_pages < 0, "page_indices",
           "table %d: %lld pages, block_table %p, page_start_loc %p; page lists need their starts "
           "and take the place of the block table",
           number, (long long)t->num_pages, (const void *)t->block_table,
           (const void *)t->page_start_loc);
    BAD_IF(t->last_page_len != NULL &&
               (t->seq_lens != NULL ||
                (number == 0 && (owner->desc->kind == ATTN_LAYER_CROSS ||
                                 owner->tokens_per_block != owner->desc->block_size))),
           "last_page_len",
           "table %d: last_page_len next to seq_lens %p, or for cross layers or caches that ranks "
           "share; these say seq_lens alone",
           number, (const void *)t->seq_lens);
    return ATTN_OK;
}

attn_status page_lists_read(attn_plan *plan, int32_t number, int32_t num_reqs,
                            struct attn_batch_table *t, struct attn_error *error)
{
    const struct made_table *made = &plan->made[number];
    const bool on_cpu = plan->model->device.type == ATTN_DEVICE_CPU;
    if (t->page_indices == NULL) {
        return ATTN_OK;
    }
    const int32_t *start = on_cpu ? t->page_start_loc : t->page_start_loc_host;
    const int32_t *last = on_cpu ? t->last_page_len : t->last_page_len_host;
    TRY(check_page_lists(plan, number, t, error));
    char where[24];
    snprintf(where, sizeof where, "table %d: ", number);
    const struct starts pages = {where, "page_start_loc", "num_pages", t->num_pages};
    TRY(check_starts(&pages, start, num_reqs, error));
    if (t->last_page_len != NULL) {
        int32_t *lens = (int32_t *)(plan->workspace + made->lens_at);
        t->seq_lens = lens;
        t->seq_lens_host = NULL;
        if (start != NULL && last != NULL) {
            TRY(take_last_pages(plan, number, num_reqs, start, last, error));
            t->seq_lens_host = made->lens_host;
        }
        if (on_cpu) {
            memcpy(lens, made->lens_host, (size_t)num_reqs * sizeof *lens);
        }
    }
    /* what is known of the table that will be made */
    t->block_table = (const int32_t *)(plan->workspace + made->table_at);
    t->block_table_stride = made->columns / made->parts;
    t->block_table_rows = num_reqs;
    t->block_table_row = NULL;
    return ATTN_OK;
}

const int32_t *table_entries(const attn_plan *plan, int32_t number,
                             const struct attn_batch_table *t, int32_t r, int64_t *count)
{
    const int64_t row = t->block_table_row != NULL ? t->block_table_row[r] : r;
    const int64_t in_entry = plan->made[number].rows_per_entry;
    if (t->page_indices != NULL) {
        *count = t->page_start_loc[r + 1] - t->page_start_loc[r];
        return t->page_indices + t->page_start_loc[r];
    }
    *count = (t->seq_lens[r] + in_entry - 1) / in_entry;
    return t->block_table + row * t->block_table_stride;
}

/* Where all memory is the host's no kernel is needed. */
static void make_on_cpu(const attn_plan *plan, int32_t number, const struct attn_batch_table *t,
                        int32_t *out)
{
    const uint32_t parts = (uint32_t)plan->made[number].parts;
    const int64_t columns = plan->made[number].columns;
    for (int32_t r = 0; r < plan->given.num_reqs; r++) {
        int64_t count;
        const int32_t *entries = table_entries(plan, number, t, r, &count);
        count = count * parts < columns ? count : columns / parts;
        for (int64_t i = 0; i < count * parts; i++) {
            out[r * columns + i] =
                (int32_t)((uint32_t)entries[i / parts] * parts + (uint32_t)(i % parts));
        }
    }
}

static attn_status make_on_device(const attn_plan *plan, int32_t number,
                                  const struct attn_batch_table *t, int32_t *out, void *stream,
                                  struct attn_error *error)
{
    const struct instance *instance = plan->steps[0].layer->served[ATTN_PHASE_DECODE].instance;
    const struct made_table *made = &plan->made[number];
    const bool lists = t->page_indices != NULL;
    const struct attn_block_table_args args = KERNEL_ARGS(
        instance, stream, .num_reqs = plan->given.num_reqs, .blocks_per_entry = made->parts,
        .tokens_per_entry = (int32_t)made->rows_per_entry, .num_columns = made->columns,
        .block_table = lists ? NULL : t->block_table, .block_table_stride = t->block_table_stride,
        .block_table_row = t->block_table_row, .page_indices = t->page_indices,
        .page_start_loc = t->page_start_loc, .last_page_len = t->last_page_len,
        .seq_lens = lists ? NULL : t->seq_lens, .out = out,
        .out_seq_lens =
            t->last_page_len != NULL ? (int32_t *)(plan->workspace + made->lens_at) : NULL);
    struct attn_error why = ATTN_ERROR_INIT;
    return error_relay(error, instance->kernels.make_block_table(&args, &why), &why);
}

static attn_status make_table(const attn_plan *plan, int32_t number, struct attn_batch_table *t,
                              void *stream, struct attn_error *error)
{
    const struct made_table *made = &plan->made[number];
    const bool on_cpu = plan->model->device.type == ATTN_DEVICE_CPU;
    if (made->columns == 0 || (made->parts == 1 && t->page_indices == NULL)) {
        return ATTN_OK;
    }
    BAD_IF(t->max_seq_len == 0 && t->seq_lens_host == NULL, "max_seq_len",
           "table %d: no bound of the lengths, for which a block table is made", number);
    const int64_t most = made->columns / made->parts * made->rows_per_entry;
    ERROR_IF(t->max_seq_len > most, ATTN_ERROR_LIMIT, "max_seq_len",
             "table %d: max_seq_len is %d; the plan's limits leave room for %lld", number,
             t->max_seq_len, (long long)most);
    int32_t *out = (int32_t *)(plan->workspace + made->table_at);
    const int32_t *start = on_cpu ? t->page_start_loc : t->page_start_loc_host;
    TRY_IF(t->page_indices != NULL && start != NULL, check_pages(plan, number, t, start, error));
    if (on_cpu) {
        make_on_cpu(plan, number, t, out);
    } else {
        TRY(make_on_device(plan, number, t, out, stream, error));
    }
    t->block_table = out;
    t->block_table_stride = made->columns;
    t->block_table_rows = plan->given.num_reqs;
    t->block_table_row = NULL;
    t->page_indices = t->page_start_loc = t->page_start_loc_host = NULL;
    t->last_page_len = t->last_page_len_host = NULL;
    t->num_pages = 0;
    return ATTN_OK;
}

attn_status block_tables_make(attn_plan *plan, void *stream, struct attn_error *error)
{
    struct attn_batch_table own = own_table(&plan->given);
    TRY(make_table(plan, 0, &own, stream, error));
    own_table_put(&plan->given, &own);
    for (int32_t n = 1; n <= plan->num_tables; n++) {
        TRY(make_table(plan, n, &plan->tables[0][n - 1], stream, error));
    }
    return ATTN_OK;
}
