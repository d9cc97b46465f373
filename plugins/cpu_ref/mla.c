/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla and attend_mla_sparse: all query heads over one latent row per key, whose value is the
 * row's first kv_lora_rank elements. */
#include <attn/mla.h>
#include <math.h>

#include "common/tensors.h"
#include "reference.h"

struct mla_loop {
    const struct attn_attend_args *args;
    struct latent_rows queries;
    const struct attn_io_mla *topk; /* NULL: dense */
    int32_t num_topk;
    int64_t first_row;
    int64_t head_blocks; /* of REF_MAX_LOOP_ROWS query heads */
};

static void load_latent(const struct attn_attend_args *args, int32_t request, int64_t j,
                        double *row)
{
    const struct attn_batch *batch = args->batch;
    int64_t table_row = batch->block_table_row != NULL ? batch->block_table_row[request] : request;
    int64_t block_size = args->k_cache->block_size;
    int64_t block = batch->block_table[table_row * batch->block_table_stride + j / block_size];
    struct cache_place at = {
        args->layer, args->params, args->k_cache, false, block, j % block_size, 0};
    cache_load(&at, row);
}

/* The i-th key that a query may see: position i, or the i-th of its list; -1: none. */
static int64_t key_of(const struct mla_loop *loop, const struct query *query, int64_t token,
                      int64_t i)
{
    int64_t j = i;
    if (loop->topk != NULL) {
        j = loop->topk->topk_indices[token * loop->topk->topk_stride + i];
    }
    return j >= 0 && j < query->length && query_sees(query, j) ? j : -1;
}

/* With quantized probabilities the maximum comes first, as in attend. */
static void visit(const struct mla_loop *loop, const struct query *query, int64_t token,
                  bool only_maximum, struct softmax_rows *rows)
{
    const struct attn_attend_args *args = loop->args;
    double row[REF_MAX_HEAD_SIZE];
    int64_t first = 0, end = loop->num_topk;
    if (loop->topk == NULL) {
        query_key_range(query, &first, &end);
    }
    for (int64_t i = first; i < end; i++) {
        int64_t j = key_of(loop, query, token, i);
        if (j < 0) {
            continue;
        }
        load_latent(args, query->request, j, row);
        for (int32_t h = 0; h < rows->count; h++) {
            double s =
                rows_score(args->layer, rows->q[h], row) + query_bias(query, rows->slope[h], j);
            if (only_maximum) {
                rows->m[h] = fmax(rows->m[h], s);
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
        int32_t first = (int32_t)(item % loop->head_blocks) * REF_MAX_LOOP_ROWS;
        int32_t left = args->layer->num_q_heads - first;
        int32_t count = left < REF_MAX_LOOP_ROWS ? left : REF_MAX_LOOP_ROWS;
        struct query query = query_of(args, token);
        for (int32_t i = 0; i < count; i++) {
            latent_load(&loop->queries, token, first + i, rows.q[i]);
        }
        rows_start(args, first, count, loop->queries.rank, &rows);
        if (args->layer->p_scale_form != ATTN_SCALE_NONE) {
            visit(loop, &query, token, true, &rows);
        }
        visit(loop, &query, token, false, &rows);
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
    if (sparse) {
        const struct attn_mla_desc *mla =
            (const struct attn_mla_desc *)ext_of(args->layer->next, ATTN_EXT_MLA_DESC);
        loop.topk = (const struct attn_io_mla *)ext_of(args->next, ATTN_EXT_IO_MLA);
        loop.num_topk = mla->topk;
    }
    loop.head_blocks = (args->layer->num_q_heads + REF_MAX_LOOP_ROWS - 1) / REF_MAX_LOOP_ROWS;
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
