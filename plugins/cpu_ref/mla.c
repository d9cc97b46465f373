/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla and attend_mla_sparse: all query heads over one latent row per key, whose value is the
 * row's first kv_lora_rank elements. A layer's top k is a list for all heads of a token. Layers
 * with compressed rows come whole: the list is of these, and the window of the layer's own rows. */
#include <attn/draft/compressed.h>
#include <attn/mla.h>
#include <math.h>

#include "common/tensors.h"
#include "reference.h"

struct mla_loop {
    const struct attn_attend_args *args;
    struct latent_rows queries;
    const struct attn_io_mla *topk; /* NULL: dense, or lists in an extension of their own */
    int32_t num_topk;
    bool both; /* caches, its own and that of compressed rows */
    int64_t first_row;
    int32_t block_heads; /* most query heads of an item */
    int64_t head_blocks;
};

static void load_latent(const struct attn_attend_args *args, const struct query *query, int64_t j,
                        double *row)
{
    struct cache_place at = {args->layer,
                             args->params,
                             args->k_cache,
                             false,
                             query_block(query, j),
                             j % args->k_cache->block_size,
                             0};
    cache_load(&at, row);
}

/* One row more, as key and value. */
static void add_row(const struct attn_attend_args *args, const double *row,
                    struct softmax_rows *rows)
{
    for (int32_t h = 0; h < rows->count; h++) {
        rows_add_key(args, rows, h, rows_score(args->layer, rows->q[h], row), row);
    }
}

/* Compressed rows that the query sees: all, or those of its list. */
static void visit_compressed(const struct attn_attend_args *args, const struct query *query,
                             const struct key_list *list, struct softmax_rows *rows)
{
    double row[REF_MAX_HEAD_SIZE];
    const struct attn_layer_cache *cache = args->caches;
    const struct attn_batch_table *table =
        (const void *)((const char *)args->batch->tables +
                       (cache->table - 1) * (int64_t)args->batch->table_stride);
    const int64_t at =
        table->block_table_row != NULL ? table->block_table_row[query->request] : query->request;
    const int64_t finished =
        query->position >= 0 ? (query->position + 1) / cache->tokens_per_row : 0;
    for (int64_t i = 0; i < (list->entries != NULL ? list->count : finished); i++) {
        const int64_t c = list->entries != NULL ? list->entries[i] : i;
        if (c < 0 || c >= finished) {
            continue;
        }
        const int32_t size = cache->view->block_size;
        cache_load(
            &(struct cache_place){args->layer, args->params, cache->view, false,
                                  table->block_table[at * table->block_table_stride + c / size],
                                  c % size, 0},
            row);
        add_row(args, row, rows);
    }
}

/* With quantized probabilities the maximum comes first, as in attend. */
static void visit(const struct attn_attend_args *args, const struct query *query, bool only_maximum,
                  struct softmax_rows *rows)
{
    double row[REF_MAX_HEAD_SIZE];
    int64_t first, end;
    query_candidates(query, &first, &end);
    for (int64_t c = first; c < end; c++) {
        const int64_t j = query_key(query, c);
        if (j < 0) {
            continue;
        }
        load_latent(args, query, j, row);
        for (int32_t h = 0; h < rows->count; h++) {
            double s =
                rows_score(args->layer, rows->q[h], row) + query_bias(query, rows->slope[h], j);
            if (only_maximum) {
                rows->row_max[h] = fmax(rows->row_max[h], s);
            } else {
                rows_add_key(args, rows, h, s, row);
            }
        }
    }
}

/* Items are (token, block of query heads). */
static void attend_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct mla_loop *loop = argument;
    const struct attn_attend_args *args = loop->args;
    struct softmax_rows rows;
    for (int64_t item = begin; item < end; item++) {
        int64_t token = loop->first_row + item / loop->head_blocks;
        int32_t first = (int32_t)(item % loop->head_blocks) * loop->block_heads;
        int32_t left = args->layer->num_q_heads - first;
        int32_t count = left < loop->block_heads ? left : loop->block_heads;
        struct query query = query_of(args, token);
        query.list =
            loop->topk == NULL
                ? list_of(args, token, first)
                : (struct key_list){loop->topk->topk_indices + token * loop->topk->topk_stride,
                                    loop->num_topk, 1, false};
        const struct key_list list = query.list;
        if (loop->both) {
            query.list = (struct key_list){NULL, 0, 1, false};
        }
        for (int32_t i = 0; i < count; i++) {
            latent_load(&loop->queries, token, first + i, rows.q[i]);
        }
        rows_start(args, first, count, loop->queries.rank, &rows);
        if (args->layer->p_scale_form != ATTN_SCALE_NONE) {
            visit(args, &query, true, &rows);
        }
        visit(args, &query, false, &rows);
        if (loop->both) {
            visit_compressed(args, &query, &list, &rows);
        }
        rows_write(args, token, &rows);
    }
}

static attn_status attend(const struct attn_attend_args *args, bool sparse,
                          struct attn_error *error)
{
    const struct attn_batch *batch = args->batch;
    const struct attn_host *host = args->instance->host;
    struct mla_loop loop = {
        .args = args, .queries = latent_queries(args), .first_row = batch->query_start_loc[0]};
    if (sparse && lists_of(args->layer) == NULL) {
        loop.topk = ext_of(args->next, ATTN_EXT_IO_MLA);
        loop.num_topk = mla_of(args->layer)->topk;
    }
    loop.both = ext_of(args->layer->next, ATTN_EXT_DRAFT_BOTH_CACHES) != NULL;
    loop.block_heads = list_heads(args->layer);
    loop.head_blocks = (args->layer->num_q_heads + loop.block_heads - 1) / loop.block_heads;
    int64_t end = batch->query_start_loc[batch->num_reqs];
    end = end < batch->num_actual_tokens ? end : batch->num_actual_tokens;
    if (end > loop.first_row) {
        host->parallel_for(host->user, (end - loop.first_row) * loop.head_blocks, 1, attend_items,
                           &loop);
    }
    return ATTN_OK;
}

attn_status ref_attend_mla(const struct attn_attend_args *args, struct attn_error *error)
{
    return attend(args, false, error);
}

attn_status ref_attend_mla_sparse(const struct attn_attend_args *args, struct attn_error *error)
{
    return attend(args, true, error);
}
