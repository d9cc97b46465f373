/* SPDX-License-Identifier: Apache-2.0 */
/* Prefetches of the decode path: memory in the order in which it is read, about 16 KiB ahead. The
 * hardware drops a prefetch for which no line buffer is free, and the load then waits for the full
 * latency of memory; so prefetches are spread evenly, and near enough that their lines are still in
 * the nearest cache. One line of each page of the next tile is requested early: between two steps
 * of a model other layers evict the page tables, whose entries come from memory, too. */
#include "decode.h"

#define LINE_BYTES 64
#define PAGE_BYTES 4096
#define AHEAD_BYTES 16384

/* `keys` rows of `source` at rows[] + offset, `bytes` of each. */
static void prefetch_rows(struct decode_args *args, const struct row_source *source,
                          const void **rows, int64_t offset, int32_t keys, int64_t bytes)
{
    args->next_rows = (const char *const *)rows;
    args->next_offset = offset;
    args->next_keys = source->pack == 0 ? keys : 0;
    args->next_lines = (int32_t)((bytes + LINE_BYTES - 1) / LINE_BYTES);
}

/* Keys of one step where tokens' heads are contiguous: their rows, for all heads of the step, stay
 * in the nearest cache together with those of the next step. Rows that are staged or have zero
 * points next to them are read head by head. */
int32_t keys_together(const struct decode *decode, const struct row_source *source, int32_t n)
{
    bool staged = source->stage && !source->decode_codes;
    if (!decode->heads_contiguous || staged || source->nibbles) {
        return max_i32(1, n);
    }
    int64_t keys = AHEAD_BYTES / (decode->heads_at_once * source->stride_head);
    return min_i32(DECODE_MAX_KEYS, max_i32(8, (int32_t)keys / 8 * 8));
}

/* Prefetches this head's share of the next step: tokens from .. from + keys - 1, `heads` heads of
 * each from `first_head` on. With many heads a share is a part of a token. */
static void prefetch_share(const struct decode_step *step, struct decode_args *args,
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

/* Touches this step's share of the next tile's pages. */
static void touch_next_tile(const struct decode *decode, const struct decode_step *step,
                            const struct row_source *source, const void **next_rows)
{
    if (!decode->heads_contiguous) {
        touch_pages(source, next_rows, step->head * source->stride_head, step->next_n,
                    source->row_bytes);
    } else if (step->head == step->first_head) {
        touch_pages(source, next_rows + step->from, step->first_head * source->stride_head,
                    min_i32(step->keys, step->next_n - step->from),
                    (step->end_head - step->first_head) * source->stride_head);
    }
}

static int32_t heads_from(const struct decode *decode, int32_t first_head)
{
    return min_i32(decode->heads_at_once, decode->item->num_heads - first_head);
}

/* Prefetches the first keys of the next heads, or after the last heads those of the next tile. */
static void prefetch_next_heads(const struct decode *decode, const struct decode_step *step,
                                struct decode_args *args)
{
    const struct row_source *source = &decode->run->problem.keys;
    bool last = step->end_head == decode->item->num_heads;
    const void **rows = last ? decode->keys.next : decode->keys.rows;
    int32_t head = last ? 0 : step->end_head;
    int32_t n = last ? step->next_n : step->n;
    if (decode->heads_contiguous) {
        prefetch_share(step, args, source, rows, 0, min_i32(n, keys_together(decode, source, n)),
                       head, heads_from(decode, head));
    } else {
        prefetch_rows(args, source, rows, head * source->stride_head, n, source->row_bytes);
    }
}

void prefetch_during_scores(const struct decode *decode, const struct decode_step *step,
                            struct decode_args *args)
{
    const struct row_source *keys = &decode->run->problem.keys;
    const struct row_source *values = &decode->run->problem.values;
    int32_t heads = step->end_head - step->first_head;
    int32_t next = step->from + step->keys;
    if (decode->run->problem.latent != NULL) { /* MLA: values are the front of keys */
        prefetch_rows(args, keys, decode->keys.next, 0, step->next_n / 2, keys->row_bytes);
        return;
    }
    touch_next_tile(decode, step, keys, decode->keys.next);
    if (decode->heads_contiguous && next < step->n) {
        prefetch_share(step, args, keys, decode->keys.rows, next,
                       min_i32(step->keys, step->n - next), step->first_head, heads);
    } else if (decode->heads_contiguous) {
        int32_t together = min_i32(step->n, keys_together(decode, values, step->n));
        prefetch_share(step, args, values, decode->values.rows, 0, together, step->first_head,
                       heads);
    } else if (step->head + 1 < step->end_head) {
        prefetch_rows(args, keys, decode->keys.rows, (step->head + 1) * keys->stride_head, step->n,
                      keys->row_bytes);
    } else {
        prefetch_rows(args, values, decode->values.rows, step->first_head * values->stride_head,
                      step->n, values->row_bytes);
    }
}

void prefetch_during_values(const struct decode *decode, const struct decode_step *step,
                            struct decode_args *args)
{
    const struct row_source *keys = &decode->run->problem.keys;
    const struct row_source *values = &decode->run->problem.values;
    int32_t next = step->from + step->keys;
    if (decode->run->problem.latent != NULL) {
        prefetch_rows(args, keys, decode->keys.next + step->next_n / 2, 0,
                      step->next_n - step->next_n / 2, keys->row_bytes);
        return;
    }
    touch_next_tile(decode, step, values, decode->values.next);
    if (decode->heads_contiguous && next < step->n) {
        prefetch_share(step, args, values, decode->values.rows, next,
                       min_i32(step->keys, step->n - next), step->first_head,
                       step->end_head - step->first_head);
    } else if (!decode->heads_contiguous && step->head + 1 < step->end_head) {
        prefetch_rows(args, values, decode->values.rows, (step->head + 1) * values->stride_head,
                      step->n, values->row_bytes);
    } else {
        prefetch_next_heads(decode, step, args);
    }
}

/* Prefetches the next scales: where heads are contiguous, this head's share of the next tile's
 * slots (all heads of each); else the next head's, and after the last head the next tile's first.
 */
void prefetch_scales(const struct decode *decode, const struct decode_step *step,
                     const struct decode_rows *rows)
{
    const struct row_source *source = rows->source;
    const int32_t heads = decode->item->num_heads, h = step->head, next_n = step->next_n;
    bool apart = source->scale_stride_head > source->scale_stride_slot;
    bool here = apart && h + 1 < heads;
    int64_t offset = here ? (h + 1) * source->scale_stride_head : 0;
    int32_t from = apart ? 0 : next_n * h / heads;
    int32_t to = here ? step->n : apart ? next_n : next_n * (h + 1) / heads;
    int64_t slots = source->scale_stride_slot > 0 && source->scale_stride_slot < LINE_BYTES
                        ? LINE_BYTES / source->scale_stride_slot
                        : 1;
    for (int64_t i = from; i < to; i += slots) {
        __builtin_prefetch((const char *)(here ? rows->scales : rows->next_scales)[i] + offset, 0,
                           3);
    }
}
