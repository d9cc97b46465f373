/* SPDX-License-Identifier: Apache-2.0 */
/* Indexers: scores of a query's rows, and the list of the best of them. A list's candidates are
 * kept in a heap whose root is the worst, so that no scores are stored. */
#include <attn/indexer.h>
#include <math.h>

#include "common/number.h"
#include "common/tensors.h"
#include "reference.h"

#define TILE 4 /* rows that are loaded at once */
#define MAX_HEAD_SIZE 512

/* A block of rows. Forced ones are better than all scores, NaN is better than all numbers, and of
 * equals the smaller index. */
struct candidate {
    double score;
    int32_t entry;
    bool forced;
};

struct candidates {
    int32_t count, room;
    struct candidate all[REF_MAX_TOPK + REF_MAX_FORCED];
};

static bool is_better(const struct candidate *a, const struct candidate *b)
{
    if (a->forced != b->forced) {
        return a->forced;
    }
    if (!a->forced && isnan(a->score) != isnan(b->score)) {
        return isnan(a->score);
    }
    return !a->forced && !isnan(a->score) && a->score != b->score ? a->score > b->score
                                                                  : a->entry < b->entry;
}

static bool is_worse(const struct candidate *a, const struct candidate *b)
{
    return is_better(b, a);
}

static bool is_later(const struct candidate *a, const struct candidate *b)
{
    return a->entry > b->entry;
}

/* Heaps: no child goes before its parent. */
typedef bool goes_before(const struct candidate *a, const struct candidate *b);

static void heap_push(struct candidate *all, int32_t count, struct candidate new,
                      goes_before *before)
{
    for (; count > 0 && before(&new, &all[(count - 1) / 2]); count = (count - 1) / 2) {
        all[count] = all[(count - 1) / 2];
    }
    all[count] = new;
}

static void heap_replace_first(struct candidate *all, int32_t count, struct candidate new,
                               goes_before *before)
{
    int32_t at = 0;
    for (int32_t child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && before(&all[child + 1], &all[child]);
        if (!before(&all[child], &new)) {
            break;
        }
        all[at] = all[child];
    }
    all[at] = new;
}

static void consider(struct candidates *c, struct candidate new)
{
    if (c->count < c->room) {
        heap_push(c->all, c->count++, new, is_worse);
    } else if (c->room > 0 && is_better(&new, &c->all[0])) {
        heap_replace_first(c->all, c->count, new, is_worse);
    }
}

static void sort_by_entry(struct candidates *c)
{
    for (int32_t i = 1; i < c->count; i++) {
        heap_push(c->all, i, c->all[i], is_later);
    }
    for (int32_t left = c->count - 1; left > 0; left--) {
        const struct candidate last = c->all[0];
        heap_replace_first(c->all, left, c->all[left], is_later);
        c->all[left] = last;
    }
}

struct index_loop {
    const struct attn_attend_args *args;
    const struct attn_indexer_desc *desc;
    const struct attn_io_indexer *io; /* or NULL */
    int64_t first_row;
};

/* Rows first .. first + count - 1 of a request, of the heads of one list. */
static void score_rows(const struct index_loop *loop, const struct query *query, int64_t token,
                       int32_t group, int64_t first, int32_t count, double *scores)
{
    const struct attn_attend_args *args = loop->args;
    const struct attn_layer_desc *l = args->layer;
    const struct attn_kv_view *view = args->k_cache;
    const int32_t heads = l->num_q_heads / loop->desc->num_groups;
    const double q_scale =
        scale_of_head(args->params->q_scale, args->params->q_scale_host, l->q_scale_form, 0);
    double rows[TILE][MAX_HEAD_SIZE], q[MAX_HEAD_SIZE];
    for (int32_t i = 0; i < count; i++) {
        const int64_t j = first + i;
        const struct cache_place place = {
            l, args->params, view, false, query_block(query, j), j % view->block_size, 0};
        cache_load(&place, rows[i]);
        scores[i] = 0;
    }
    for (int32_t h = group * heads; h < (group + 1) * heads; h++) {
        double weight = 1;
        number_load_row(q, tensor_row(args->q, token, h), number_dtype_name(args->q->dtype),
                        l->head_size);
        if (loop->desc->has_weights) {
            number_load_row(&weight, tensor_row(loop->io->weights, token, h),
                            number_dtype_name(loop->io->weights->dtype), 1);
        }
        for (int32_t i = 0; i < count; i++) {
            double s = dot(q, rows[i], l->head_size) * q_scale * (double)l->scale;
            if (loop->desc->activation == ATTN_INDEXER_RELU && s < 0) { /* NaN stays */
                s = 0;
            }
            scores[i] += weight * s;
        }
    }
}

/* The list of a query; its length. */
static int32_t choose(const struct index_loop *loop, const struct query *query, int64_t token,
                      int32_t group, struct candidates *chosen, int32_t *list, int64_t list_room)
{
    const struct attn_indexer_desc *x = loop->desc;
    const int64_t seen = query->position < 0 ? 0 : query->position + 1;
    const int64_t rows = seen / x->tokens_per_row;
    const int64_t entries = (rows + x->rows_per_entry - 1) / x->rows_per_entry;
    const int32_t forced = x->first_entries + x->last_entries;
    const bool tail = x->tail && seen % x->tokens_per_row != 0;
    const int32_t on_top = forced < entries ? forced : (int32_t)entries;
    double scores[TILE];
    struct candidate entry = {0, 0, false};
    chosen->count = 0;
    chosen->room = x->topk + (x->forced_on_top ? on_top : -(int32_t)tail);
    for (int64_t j = 0; j < rows; j++) {
        if (j % TILE == 0) {
            score_rows(loop, query, token, group, j, (int32_t)(rows - j < TILE ? rows - j : TILE),
                       scores);
        }
        const double s = scores[j % TILE];
        const bool first = j % x->rows_per_entry == 0;
        entry.score = first || isnan(s) || s > entry.score ? s : entry.score;
        if (j + 1 == rows || (j + 1) % x->rows_per_entry == 0) {
            entry.entry = (int32_t)(j / x->rows_per_entry);
            entry.forced =
                entry.entry < x->first_entries || entry.entry >= entries - x->last_entries;
            consider(chosen, entry);
        }
    }
    sort_by_entry(chosen);
    for (int32_t i = 0; i < chosen->count; i++) {
        list[i] = chosen->all[i].entry;
    }
    if (tail) {
        list[chosen->count++] = (int32_t)rows;
    }
    for (int64_t i = chosen->count; i < list_room; i++) {
        list[i] = -1;
    }
    return chosen->count;
}

/* Items are (token, list). */
static void index_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct index_loop *loop = argument;
    const struct attn_attend_args *args = loop->args;
    const int32_t groups = loop->desc->num_groups;
    struct candidates chosen;
    for (int64_t item = begin; item < end; item++) {
        const int64_t token = loop->first_row + item / groups;
        const int32_t group = (int32_t)(item % groups);
        const struct query query = query_of(args, token);
        const int32_t count = choose(loop, &query, token, group, &chosen,
                                     tensor_row(args->out, token, group), args->out->shape[2]);
        if (loop->io != NULL && loop->io->lengths != NULL) {
            loop->io->lengths[token * groups + group] = count;
        }
    }
}

attn_status ref_index(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_batch *batch = args->batch;
    const struct attn_host *host = args->instance->host;
    struct index_loop loop = {args, ext_of(args->layer->next, ATTN_EXT_INDEXER_DESC),
                              ext_of(args->next, ATTN_EXT_IO_INDEXER), batch->query_start_loc[0]};
    int64_t end = batch->query_start_loc[batch->num_reqs];
    end = end < batch->num_actual_tokens ? end : batch->num_actual_tokens;
    if (end > loop.first_row) {
        host->parallel_for(host->user, (end - loop.first_row) * loop.desc->num_groups, 1,
                           index_items, &loop);
    }
    return ATTN_OK;
}
