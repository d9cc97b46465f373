/* SPDX-License-Identifier: Apache-2.0 */
/* What the direct path prefetches: memory in the order in which it is read, about 16 KiB ahead. A
 * prefetch for which no buffer is free is dropped, and then the load waits for all of memory's
 * latency; so lines are asked for evenly, and near enough to be still in the nearest cache. Of the
 * tile to come a line of each page is asked for: between two steps of a model other layers have
 * displaced the page tables, whose entries come from memory, too. */
#include "direct.h"

#define LINE_BYTES 64
#define PAGE_BYTES 4096
#define AHEAD_BYTES 16384

/* `keys` rows of `source` at rows[] + offset, `bytes` of each. */
static void prefetch_rows(struct direct_args *args, const struct row_source *source,
                          const void **rows, int64_t offset, int32_t keys, int64_t bytes)
{
    args->next_rows = (const char *const *)rows;
    args->next_offset = offset;
    args->next_keys = source->pack == 0 ? keys : 0;
    args->next_lines = (int32_t)((bytes + LINE_BYTES - 1) / LINE_BYTES);
}

/* Keys of one step where tokens' heads lie side by side: their rows, of all heads of the bunch,
 * stay in the nearest cache next to those of the step to come. What is staged, or has its zero
 * points next to it, is taken head by head. */
int32_t keys_together(const struct direct *direct, const struct row_source *source, int32_t n)
{
    bool staged = source->stage && !source->direct_codes;
    if (!direct->side_by_side || staged || source->nibbles) {
        return at_least(1, n);
    }
    int64_t keys = AHEAD_BYTES / (direct->bunch * source->stride_head);
    return at_most(DIRECT_MOST_KEYS, at_least(8, (int32_t)keys / 8 * 8));
}

/* This head's share of a step to come: tokens from .. from + keys - 1, `heads` heads of each from
 * `first_head` on. With many heads a share is a part of a token. */
static void prefetch_share(const struct direct_step *step, struct direct_args *args,
                           const struct row_source *source, const void **rows, int32_t from,
                           int32_t keys, int32_t first_head, int32_t heads)
{
    int32_t count = step->end_head - step->first_head;
    int32_t index = step->head - step->first_head;
    int64_t offset = first_head * source->stride_head;
    int64_t bytes = heads * source->stride_head;
    int32_t parts = keys > 0 ? count / keys : 0;
    if (parts < 2) {
        int32_t first = keys * index / count;
        int32_t end = keys * (index + 1) / count;
        prefetch_rows(args, source, rows + from + first, offset, end - first, bytes);
        return;
    }
    int32_t token = index / parts;
    int64_t part = bytes * (index % parts) / parts / LINE_BYTES * LINE_BYTES;
    int64_t end = bytes * (index % parts + 1) / parts / LINE_BYTES * LINE_BYTES;
    prefetch_rows(args, source, rows + from + token, offset + part, token < keys ? 1 : 0,
                  end - part);
}

static void touch_pages(const struct row_source *source, const void **rows, int64_t offset,
                        int32_t n, int64_t bytes)
{
    int64_t step = source->stride_slot > 0 ? PAGE_BYTES / source->stride_slot : 1;
    step = step > 1 ? step : 1;
    for (int64_t i = 0; i < n && source->pack == 0; i += step) {
        for (int64_t at = 0; at < bytes; at += PAGE_BYTES) {
            __builtin_prefetch((const char *)rows[i] + offset + at, 0, 3);
        }
    }
}

/* This step's share of the pages of the tile to come. */
static void ahead_of_tile(const struct direct *direct, const struct direct_step *step,
                          const struct row_source *source, const void **next_rows)
{
    if (!direct->side_by_side) {
        touch_pages(source, next_rows, step->head * source->stride_head, step->next_n,
                    source->row_bytes);
    } else if (step->head == step->first_head) {
        touch_pages(source, next_rows + step->from, step->first_head * source->stride_head,
                    at_most(step->keys, step->next_n - step->from),
                    (step->end_head - step->first_head) * source->stride_head);
    }
}

static int32_t bunch_heads(const struct direct *direct, int32_t first_head)
{
    return at_most(direct->bunch, direct->item->num_heads - first_head);
}

/* The first keys of what follows the bunch: the next one's, or the next tile's. */
static void ahead_of_bunch(const struct direct *direct, const struct direct_step *step,
                           struct direct_args *args)
{
    const struct row_source *source = &direct->run->problem.keys;
    bool last = step->end_head == direct->item->num_heads;
    const void **rows = last ? direct->next_keys : direct->key_rows;
    int32_t head = last ? 0 : step->end_head;
    int32_t n = last ? step->next_n : step->n;
    if (direct->side_by_side) {
        prefetch_share(step, args, source, rows, 0, at_most(n, keys_together(direct, source, n)),
                       head, bunch_heads(direct, head));
    } else {
        prefetch_rows(args, source, rows, head * source->stride_head, n, source->row_bytes);
    }
}

void ahead_of_scores(const struct direct *direct, const struct direct_step *step,
                     struct direct_args *args)
{
    const struct row_source *keys = &direct->run->problem.keys;
    const struct row_source *values = &direct->run->problem.values;
    int32_t heads = step->end_head - step->first_head;
    int32_t next = step->from + step->keys;
    if (direct->run->problem.latent != NULL) { /* its values are its keys */
        prefetch_rows(args, keys, direct->next_keys, 0, step->next_n / 2, keys->row_bytes);
        return;
    }
    ahead_of_tile(direct, step, keys, direct->next_keys);
    if (direct->side_by_side && next < step->n) {
        prefetch_share(step, args, keys, direct->key_rows, next,
                       at_most(step->keys, step->n - next), step->first_head, heads);
    } else if (direct->side_by_side) {
        int32_t together = at_most(step->n, keys_together(direct, values, step->n));
        prefetch_share(step, args, values, direct->value_rows, 0, together, step->first_head,
                       heads);
    } else if (step->head + 1 < step->end_head) {
        prefetch_rows(args, keys, direct->key_rows, (step->head + 1) * keys->stride_head, step->n,
                      keys->row_bytes);
    } else {
        prefetch_rows(args, values, direct->value_rows, step->first_head * values->stride_head,
                      step->n, values->row_bytes);
    }
}

void ahead_of_values(const struct direct *direct, const struct direct_step *step,
                     struct direct_args *args)
{
    const struct row_source *keys = &direct->run->problem.keys;
    const struct row_source *values = &direct->run->problem.values;
    int32_t next = step->from + step->keys;
    if (direct->run->problem.latent != NULL) {
        prefetch_rows(args, keys, direct->next_keys + step->next_n / 2, 0,
                      step->next_n - step->next_n / 2, keys->row_bytes);
        return;
    }
    ahead_of_tile(direct, step, values, direct->next_values);
    if (direct->side_by_side && next < step->n) {
        prefetch_share(step, args, values, direct->value_rows, next,
                       at_most(step->keys, step->n - next), step->first_head,
                       step->end_head - step->first_head);
    } else if (!direct->side_by_side && step->head + 1 < step->end_head) {
        prefetch_rows(args, values, direct->value_rows, (step->head + 1) * values->stride_head,
                      step->n, values->row_bytes);
    } else {
        ahead_of_bunch(direct, step, args);
    }
}

/* Scales that come next: with heads side by side this head's share of the next tile's slots, all
 * heads of each; with heads apart the next head's, behind the last one the next tile's first. */
void prefetch_scales(const struct direct *direct, const struct row_source *source,
                     const void **scales, const void **next_scales, int32_t h, int32_t n,
                     int32_t next_n)
{
    int32_t heads = direct->item->num_heads;
    bool apart = source->scale_stride_head > source->scale_stride_slot;
    bool here = apart && h + 1 < heads;
    int64_t offset = here ? (h + 1) * source->scale_stride_head : 0;
    int32_t from = apart ? 0 : next_n * h / heads;
    int32_t to = here ? n : apart ? next_n : next_n * (h + 1) / heads;
    int64_t step = source->scale_stride_slot > 0 && source->scale_stride_slot < LINE_BYTES
                       ? LINE_BYTES / source->scale_stride_slot
                       : 1;
    for (int64_t i = from; i < to; i += step) {
        __builtin_prefetch((const char *)(here ? scales : next_scales)[i] + offset, 0, 3);
    }
}
