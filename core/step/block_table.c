/* SPDX-License-Identifier: Apache-2.0 */
/* The block table that kernels get where the engine's is another: entries that are several of the
 * kernel's blocks, or page lists with offsets. It is made in the workspace by each plan, so that
 * kernels and compositions know one form. */
#include "select/layer_check.h"
#include "step/plan_state.h"

#define BAD(field, ...) error_set(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)
#define MAX_TABLE 0x1p50 /* entries of a made table */

static const attn_layer *owner_of(const attn_plan *plan)
{
    return plan->steps[0].layer->owner;
}

int64_t plan_tokens_per_entry(const attn_plan *plan)
{
    const attn_layer *owner = owner_of(plan);
    return owner->tokens_per_block * owner->selected->blocks_per_entry;
}

attn_status block_table_init(attn_plan *plan, struct attn_error *error)
{
    const attn_layer *owner = owner_of(plan);
    const int64_t parts = owner->selected->blocks_per_entry;
    bool lists = false;
    for (int32_t i = 0; i < plan->num_steps; i++) {
        lists |= plan->steps[i].layer->desc->needs_page_lists != 0;
    }
    if (!layer_has_cache(owner->desc) || owner->spec.kind == ATTN_KV_SPEC_STATE ||
        (parts == 1 && !lists)) {
        return ATTN_OK;
    }
    const struct attn_limits *limits = &plan->limits;
    const int64_t in_entry = plan_tokens_per_entry(plan);
    const int64_t entries = limits->max_seq_len > 0
                                ? (limits->max_seq_len + in_entry - 1) / in_entry
                                : limits->max_blocks_per_req;
    if (entries == 0 || entries * parts > INT32_MAX ||
        (double)entries * (double)parts * limits->max_num_reqs > MAX_TABLE) {
        return error_set(error, ATTN_ERROR_LIMIT, "max_seq_len",
                         "limits of %d requests, %d keys and %d blocks of a request; a block table "
                         "is made for the kernels, which needs one of the last two and at most %g "
                         "entries",
                         limits->max_num_reqs, limits->max_seq_len, limits->max_blocks_per_req,
                         MAX_TABLE);
    }
    plan->made.columns = (int32_t)(entries * parts);
    plan->made.takes_lists = lists;
    plan->made.lens_host =
        lists ? arena_array(&plan->arena, (size_t)limits->max_num_reqs, sizeof(int32_t)) : NULL;
    return plan->arena.failed
               ? error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "plan", "no memory for the plan")
               : ATTN_OK;
}

size_t block_table_lay_out(attn_plan *plan, size_t at)
{
    struct made_table *made = &plan->made;
    const int64_t reqs = plan->limits.max_num_reqs;
    if (made->columns == 0) {
        return at;
    }
    made->lens_at = at;
    at += made->takes_lists ? (size_t)plan_aligned(reqs * (int64_t)sizeof(int32_t)) : 0;
    made->table_at = at;
    return at + (size_t)plan_aligned(reqs * made->columns * (int64_t)sizeof(int32_t));
}

/* Keys of a request with page lists, the last of which is filled up to `last`. */
static int64_t keys_of_pages(int64_t pages, int64_t in_entry, int32_t last)
{
    return pages > 0 ? (pages - 1) * in_entry + last : 0;
}

/* Lengths of the last pages, on the host, as lengths of the requests. */
static attn_status take_last_pages(attn_plan *plan, struct attn_batch *b, const int32_t *start,
                                   const int32_t *last, struct attn_error *error)
{
    const int64_t in_entry = plan_tokens_per_entry(plan);
    for (int32_t r = 0; r < b->num_reqs; r++) {
        const int64_t pages = (int64_t)start[r + 1] - start[r];
        const int64_t keys = keys_of_pages(pages, in_entry, last[r]);
        if (pages > 0 && (last[r] < 1 || last[r] > in_entry || keys > INT32_MAX)) {
            return BAD("last_page_len", "request %d: %d keys in the last of %lld pages; 1 to %lld",
                       r, last[r], (long long)pages, (long long)in_entry);
        }
        plan->made.lens_host[r] = (int32_t)keys;
    }
    b->seq_lens_host = plan->made.lens_host;
    return ATTN_OK;
}

/* Do the pages hold the keys? Both as far as the host knows them. */
static attn_status check_pages(const attn_plan *plan, const struct attn_batch *b,
                               const int32_t *start, struct attn_error *error)
{
    const int64_t in_entry = plan_tokens_per_entry(plan);
    for (int32_t r = 0; b->seq_lens_host != NULL && r < b->num_reqs; r++) {
        const int64_t pages = (int64_t)start[r + 1] - start[r];
        if (pages * in_entry < b->seq_lens_host[r]) {
            return BAD("page_start_loc", "request %d has %d keys and %lld pages of %lld", r,
                       b->seq_lens_host[r], (long long)pages, (long long)in_entry);
        }
    }
    return ATTN_OK;
}

static attn_status check_page_starts(const struct attn_batch *b, const int32_t *start,
                                     struct attn_error *error)
{
    for (int32_t r = 0; r < b->num_reqs; r++) {
        if (start[r] < 0 || start[r + 1] < start[r] || start[r + 1] > b->num_pages) {
            return BAD("page_start_loc",
                       "page_start_loc[%d] is %d and [%d] is %d; it begins at 0 or above, never "
                       "decreases and ends at num_pages, %lld, or before",
                       r, start[r], r + 1, start[r + 1], (long long)b->num_pages);
        }
    }
    return ATTN_OK;
}

attn_status page_lists_read(attn_plan *plan, struct attn_batch *b, struct attn_error *error)
{
    const bool on_cpu = plan->model->device.type == ATTN_DEVICE_CPU;
    if (b->page_indices == NULL) {
        return ATTN_OK;
    }
    if (!plan->made.takes_lists) {
        return BAD("page_indices", "page lists, and no layer of group %d says needs_page_lists",
                   plan->group);
    }
    if (b->block_table != NULL || b->page_start_loc == NULL || b->num_pages < 0) {
        return BAD(
            "page_indices",
            "%lld pages, block_table %p, page_start_loc %p; page lists need their starts and "
            "take the place of the block table",
            (long long)b->num_pages, (const void *)b->block_table, (const void *)b->page_start_loc);
    }
    if (b->last_page_len != NULL &&
        (b->seq_lens != NULL || owner_of(plan)->desc->kind == ATTN_LAYER_CROSS ||
         owner_of(plan)->tokens_per_block != owner_of(plan)->desc->block_size)) {
        return BAD("last_page_len",
                   "last_page_len beside seq_lens %p, or for cross layers or caches that ranks "
                   "share; these say seq_lens alone",
                   (const void *)b->seq_lens);
    }
    const int32_t *start = on_cpu ? b->page_start_loc : b->page_start_loc_host;
    const int32_t *last = on_cpu ? b->last_page_len : b->last_page_len_host;
    attn_status status = start != NULL ? check_page_starts(b, start, error) : ATTN_OK;
    if (status == ATTN_OK && b->last_page_len != NULL) {
        int32_t *lens = (int32_t *)(plan->workspace + plan->made.lens_at);
        b->seq_lens = lens;
        b->seq_lens_host = NULL;
        if (start != NULL && last != NULL) {
            status = take_last_pages(plan, b, start, last, error);
        }
        if (status == ATTN_OK && on_cpu) {
            memcpy(lens, plan->made.lens_host, (size_t)b->num_reqs * sizeof *lens);
        }
    }
    /* what is known of the table that will be made */
    b->block_table = (const int32_t *)(plan->workspace + plan->made.table_at);
    b->block_table_stride = plan->made.columns / owner_of(plan)->selected->blocks_per_entry;
    b->block_table_rows = b->num_reqs;
    b->block_table_row = NULL;
    return status;
}

const int32_t *batch_entries(const attn_plan *plan, const struct attn_batch *b, int32_t r,
                             int64_t *count)
{
    const int64_t row = b->block_table_row != NULL ? b->block_table_row[r] : r;
    const int64_t in_entry = plan_tokens_per_entry(plan);
    if (b->page_indices != NULL) {
        *count = b->page_start_loc[r + 1] - b->page_start_loc[r];
        return b->page_indices + b->page_start_loc[r];
    }
    *count = (b->seq_lens[r] + in_entry - 1) / in_entry;
    return b->block_table + row * b->block_table_stride;
}

/* Where all memory is the host's no kernel is needed. */
static void make_on_cpu(const attn_plan *plan, const struct attn_batch *b, int32_t *out)
{
    const uint32_t parts = (uint32_t)owner_of(plan)->selected->blocks_per_entry;
    const int64_t columns = plan->made.columns;
    for (int32_t r = 0; r < b->num_reqs; r++) {
        int64_t count;
        const int32_t *entries = batch_entries(plan, b, r, &count);
        count = count * parts < columns ? count : columns / parts;
        for (int64_t i = 0; i < count * parts; i++) {
            out[r * columns + i] =
                (int32_t)((uint32_t)entries[i / parts] * parts + (uint32_t)(i % parts));
        }
    }
}

static attn_status make_on_device(const attn_plan *plan, const struct attn_batch *b, int32_t *out,
                                  void *stream, struct attn_error *error)
{
    const struct instance *instance = plan->steps[0].layer->served[ATTN_PHASE_DECODE].instance;
    const bool lists = b->page_indices != NULL;
    const struct attn_block_table_args args = {
        .struct_size = sizeof args,
        .instance = instance->handle,
        .stream = stream,
        .num_reqs = b->num_reqs,
        .blocks_per_entry = owner_of(plan)->selected->blocks_per_entry,
        .tokens_per_entry = (int32_t)plan_tokens_per_entry(plan),
        .num_columns = plan->made.columns,
        .block_table = lists ? NULL : b->block_table,
        .block_table_stride = b->block_table_stride,
        .block_table_row = b->block_table_row,
        .page_indices = b->page_indices,
        .page_start_loc = b->page_start_loc,
        .last_page_len = b->last_page_len,
        .seq_lens = lists ? NULL : b->seq_lens,
        .out = out,
        .out_seq_lens =
            b->last_page_len != NULL ? (int32_t *)(plan->workspace + plan->made.lens_at) : NULL};
    struct attn_error why = ATTN_ERROR_INIT;
    attn_status status = instance->kernels.make_block_table(&args, &why);
    return status == ATTN_OK ? status : error_relay(error, status, &why);
}

attn_status block_table_make(attn_plan *plan, void *stream, struct attn_error *error)
{
    struct attn_batch *b = &plan->given;
    const int64_t parts = owner_of(plan)->selected->blocks_per_entry;
    if (plan->made.columns == 0 || (parts == 1 && b->page_indices == NULL)) {
        return ATTN_OK;
    }
    if (b->max_seq_len == 0 && b->seq_lens_host == NULL) {
        return BAD("max_seq_len", "no bound of the lengths, for which a block table is made");
    }
    const int64_t most = plan->made.columns * owner_of(plan)->tokens_per_block;
    if (b->max_seq_len > most) {
        return error_set(error, ATTN_ERROR_LIMIT, "max_seq_len",
                         "max_seq_len is %d; the plan's limits leave room for %lld", b->max_seq_len,
                         (long long)most);
    }
    int32_t *out = (int32_t *)(plan->workspace + plan->made.table_at);
    const bool on_cpu = plan->model->device.type == ATTN_DEVICE_CPU;
    const int32_t *start = on_cpu ? b->page_start_loc : b->page_start_loc_host;
    attn_status status =
        b->page_indices != NULL && start != NULL ? check_pages(plan, b, start, error) : ATTN_OK;
    if (status == ATTN_OK && on_cpu) {
        make_on_cpu(plan, b, out);
    } else if (status == ATTN_OK) {
        status = make_on_device(plan, b, out, stream, error);
    }
    b->block_table = out;
    b->block_table_stride = plan->made.columns;
    b->block_table_rows = b->num_reqs;
    b->block_table_row = NULL;
    b->page_indices = b->page_start_loc = b->page_start_loc_host = NULL;
    b->last_page_len = b->last_page_len_host = NULL;
    b->num_pages = 0;
    return status;
}
