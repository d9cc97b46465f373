/* SPDX-License-Identifier: Apache-2.0 */
/* Indexers: a history of index keys, drawn queries and weights, and the lists against the oracle.
 * The sparse layers after it attend to them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/oracle.h"

/* What float32 sums of rounded products may be off, by the largest score. */
#define SLACK 1e-3

/* Tensors of one step; `out` is read back. */
struct index_step {
    struct row_tensor q, k;
    float *weights; /* [T, H] */
    int32_t *out;   /* [T, G, room] */
};

static attn_status fill_step(struct run_engine *engine, struct run_layer *layer,
                             const struct batch *batch, struct index_step *s)
{
    const struct row_terms *t = &layer->terms;
    const size_t row = (size_t)t->head_size * element_bytes(layer);
    const int64_t tokens = batch->query_start_loc[batch->num_reqs];
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        const int32_t r = batch->request[i], first = batch->query_start_loc[i];
        const int32_t count = batch->query_start_loc[i + 1] - first;
        const int32_t own = batch->seq_lens[i] - count;
        attn_status status = add_keys(engine, layer, r, own, own + count, 0);
        if (status != ATTN_OK) {
            return status;
        }
        memcpy(s->k.host + (size_t)first * row, layer->k_history[r] + (size_t)own * row,
               (size_t)count * row);
    }
    for (int64_t i = 0; i < tokens * t->num_q_heads * t->head_size; i++) {
        number_store(s->q.host, i, t->dtype, random_almost_normal(&engine->random));
    }
    for (int64_t i = 0; i < tokens * t->num_q_heads; i++) {
        s->weights[i] = (float)random_almost_normal(&engine->random);
    }
    return ATTN_OK;
}

static attn_status run_step(struct run_engine *engine, struct run_layer *layer, int64_t tokens,
                            struct index_step *s)
{
    const struct attn_indexer_desc *x = &layer->source->indexer;
    int64_t out_shape[] = {tokens, x->num_groups, layer_list_room(x)};
    int64_t weight_shape[] = {tokens, layer->terms.num_q_heads};
    const size_t bytes = (size_t)(tokens * out_shape[1] * out_shape[2]) * sizeof *s->out;
    void *out = pool_send(engine, &engine->rows, s->out, bytes);
    void *weights = pool_send(engine, &engine->rows, s->weights,
                              (size_t)(tokens * weight_shape[1]) * sizeof *s->weights);
    attn_status status = rows_send(engine, layer, &s->q);
    status = status == ATTN_OK ? rows_send(engine, layer, &s->k) : status;
    if (status != ATTN_OK || out == NULL || weights == NULL) {
        return engine->error.status;
    }
    struct attn_tensor lists = tensor_of(engine, layer, out, 3, out_shape, NULL);
    struct attn_tensor w = tensor_of(engine, layer, weights, 2, weight_shape, NULL);
    lists.dtype = (struct attn_dtype){ATTN_CODE_INT, 32, 1};
    w.dtype = number_dtype(ATTN_DTYPE_F32);
    struct attn_io_indexer more = {.ext = {ATTN_EXT_DRAFT_IO_INDEXER, 0, sizeof more, NULL},
                                   .weights = x->has_weights ? &w : NULL};
    struct attn_step_io io = {.struct_size = sizeof io,
                              .next = &more.ext,
                              .stream = engine->stream,
                              .q = &s->q.tensor,
                              .k = &s->k.tensor,
                              .out = &lists};
    status =
        engine->api->run(engine->groups[layer->group].plan, layer->handle, &io, &engine->error);
    return status == ATTN_OK ? device_copy_out(&engine->device, s->out, out, bytes, &engine->error)
                             : status;
}

/* All lists of a request's `count` tokens from row `first` on. */
static bool verify_request(struct run_layer *layer, const struct index_step *s, int32_t r,
                           int32_t length, int32_t first, int32_t count)
{
    const struct attn_indexer_desc *x = &layer->source->indexer;
    const struct row_terms *t = &layer->terms;
    const int32_t heads = t->num_q_heads / x->num_groups, d = t->head_size;
    const int32_t rows = length / x->tokens_per_row, room = layer_list_room(x);
    const struct oracle_indexer oracle = {heads,
                                          d,
                                          x->topk,
                                          x->tokens_per_row,
                                          x->rows_per_entry,
                                          x->first_entries,
                                          x->last_entries,
                                          x->activation == ATTN_INDEXER_RELU,
                                          x->tail,
                                          x->forced_on_top,
                                          t->scale};
    double *keys = malloc((size_t)(rows * (d + 1) + heads * (d + 1) + 1) * sizeof *keys);
    double *scores = keys + (int64_t)rows * d, *q = scores + rows,
           *weights = q + (int64_t)heads * d;
    for (int64_t i = 0; keys != NULL && i < (int64_t)rows * d; i++) {
        const int64_t token = (i / d + 1) * x->tokens_per_row - 1;
        keys[i] = number_load(layer->k_history[r], token * d + i % d, t->dtype);
    }
    for (int64_t i = 0; keys != NULL && i < (int64_t)count * x->num_groups; i++) {
        const int64_t token = first + i / x->num_groups, head = i % x->num_groups * heads;
        const int64_t position = length - count + i / x->num_groups;
        double largest = 0;
        for (int64_t e = 0; e < (int64_t)heads * d; e++) {
            q[e] = number_load(s->q.host, (token * t->num_q_heads + head) * d + e, t->dtype);
        }
        for (int32_t h = 0; h < heads; h++) {
            weights[h] = (double)s->weights[token * t->num_q_heads + head + h];
        }
        oracle_index_scores(&oracle, position, q, x->has_weights ? weights : NULL, keys, scores);
        for (int64_t e = 0; e < oracle_index_entries(&oracle, position); e++) {
            largest = fmax(largest, fabs(scores[e]));
        }
        const int32_t *list = s->out + (token * x->num_groups + i % x->num_groups) * room;
        if (oracle_index_judge(&oracle, position, scores, list, room, SLACK * largest) != NULL) {
            layer->tally.max_error = INFINITY;
        }
        layer->tally.compared += room;
    }
    free(keys);
    return keys != NULL;
}

attn_status indexer_run(struct run_engine *engine, struct run_layer *layer,
                        const struct batch *batch)
{
    const struct row_terms *t = &layer->terms;
    const struct attn_indexer_desc *x = &layer->source->indexer;
    const int64_t tokens = batch->query_start_loc[batch->num_reqs];
    const size_t lists = (size_t)tokens * (size_t)x->num_groups * (size_t)layer_list_room(x);
    struct index_step s;
    rows_init(&s.q, layer, tokens, t->num_q_heads, t->head_size, false);
    rows_init(&s.k, layer, tokens, 1, t->head_size, false);
    s.weights = malloc((size_t)(tokens * t->num_q_heads) * sizeof *s.weights);
    s.out = calloc(lists, sizeof *s.out);
    bool ready = s.q.host != NULL && s.k.host != NULL && s.weights != NULL && s.out != NULL;
    attn_status status = ready ? fill_step(engine, layer, batch, &s) : ATTN_OK;
    status = ready && status == ATTN_OK ? run_step(engine, layer, tokens, &s) : status;
    for (int32_t i = 0; i < batch->num_reqs && ready && status == ATTN_OK; i++) {
        const int32_t first = batch->query_start_loc[i], end = batch->query_start_loc[i + 1];
        ready = !engine->settings->verify || verify_request(layer, &s, batch->request[i],
                                                            batch->seq_lens[i], first, end - first);
    }
    pool_reset(engine, &engine->rows);
    free(s.q.host);
    free(s.k.host);
    free(s.weights);
    free(layer->lists);
    layer->lists = s.out;
    return ready ? status
                 : engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "rows", "no memory; try --scale");
}
