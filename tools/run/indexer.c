/* SPDX-License-Identifier: Apache-2.0 */
/* Indexers: a history of index keys, drawn queries and weights, and the lists against the oracle.
 * The sparse layers after it attend to them. Keys are drawn as a projection or a pool gives them,
 * which is the values' history, and normed, rotated and transformed where the model does so: by
 * their write, or before it. */
#include <math.h>
#include <stdlib.h>

#include "engine.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/oracle.h"

/* What float32 sums of rounded products may be off, by the largest score; four times as much where
 * a key that the write computes in float32 may be rounded to another neighbour. */
#define SLACK 1e-3
#define NORM_EPS 0.125

/* Does the write of keys change them? */
static bool is_fused(const struct run_engine *engine, const struct run_layer *layer)
{
    return engine->config.fuses_index_write && layer->source->index_write.ext.id != 0;
}

static attn_status bind(struct run_engine *engine, struct run_layer *layer)
{
    const int64_t size = layer->source->desc.head_size;
    TRY(attention_bind(engine, layer));
    const size_t bytes = (size_t)size * element_bytes(layer);
    layer->weights = command_calloc(2, bytes);
    number_fill_normal(layer->weights, 0, 2 * size, layer->terms.dtype, 1, &engine->random);
    params_send(engine, layer, 0, layer->weights, bytes);
    params_send(engine, layer, 1, layer->weights + bytes, bytes);
    return engine_sent(engine, &engine->kept, "parameters");
}

/* A row of several tokens has its first one's position. */
static int64_t row_position(const struct run_layer *layer, int64_t position)
{
    return position - position % layer->source->indexer.tokens_per_row;
}

static void make_keys(struct run_engine *engine, struct run_layer *layer, int32_t r, int32_t first,
                      int32_t end)
{
    const struct attn_index_write *w = &layer->source->index_write;
    const int32_t size = layer->terms.head_size, dtype = layer->terms.dtype;
    double row[ORACLE_MAX_KEY], weight[ORACLE_MAX_KEY], bias[ORACLE_MAX_KEY];
    (void)engine;
    for (int32_t d = 0; d < size; d++) {
        weight[d] = number_load(layer->weights, d, dtype);
        bias[d] = number_load(layer->weights, size + d, dtype);
    }
    for (int64_t t = first; t < end && w->ext.id != 0; t++) {
        for (int32_t d = 0; d < size; d++) {
            row[d] = number_load(layer->v_history[r], t * size + d, dtype);
        }
        oracle_norm(row, size, w->norm == ATTN_KEY_NORM_LAYER, NORM_EPS, weight,
                    w->norm == ATTN_KEY_NORM_LAYER ? bias : NULL);
        oracle_rotate(row, w->rotary_dim, w->rotary_dim, w->rope == ATTN_ROPE_NEOX,
                      (int32_t)row_position(layer, t), 1);
        if (w->hadamard) {
            oracle_hadamard(row, size);
        }
        for (int32_t d = 0; d < size; d++) {
            number_store(layer->k_history[r], t * size + d, dtype, row[d]);
        }
    }
}

/* What a write needs that changes keys, and the keys as they were drawn. */
static void bring(struct run_engine *engine, const struct run_layer *layer,
                  const struct batch *batch, int64_t tokens, void *rows, struct layer_io *io,
                  struct more_io *more)
{
    const struct attn_index_write *w = &layer->source->index_write;
    const int64_t size = layer->terms.head_size;
    const int32_t dtype = layer->terms.dtype;
    const bool biased = w->norm == ATTN_KEY_NORM_LAYER;
    if (!is_fused(engine, layer)) {
        return;
    }
    more->index_write = EXTENSION(
        attn_io_index_write, ATTN_EXT_DRAFT_IO_INDEX_WRITE, io->io.next,
        .norm_weight = device_tensor(engine, &more->norm, layer->device_params[0], dtype, 1, &size),
        .norm_bias =
            biased ? device_tensor(engine, &more->bias, layer->device_params[1], dtype, 1, &size)
                   : NULL,
        .norm_eps = (float)NORM_EPS);
    if (w->rope != ATTN_ROPE_NONE) {
        int64_t *positions = command_calloc((size_t)tokens, sizeof *positions);
        for (int64_t t = 0; t < tokens; t++) {
            positions[t] = row_position(layer, batch->positions[t]);
        }
        more->index_write.positions =
            memory_upload(&engine->rows, positions, (size_t)tokens * sizeof *positions);
        more->index_write.cos_sin = angles(engine, w->rotary_dim, &more->cos_sin);
        free(positions);
    }
    io->io.next = &more->index_write.ext;
    io->tensors[ROLE_K].data = rows;
}

static void make_query(struct run_step *step, int32_t i, int32_t c)
{
    const struct row_terms *t = &step->layer->terms;
    const int64_t token = step->batch->query_start_loc[i] + c;
    const int64_t size = (int64_t)t->num_q_heads * t->head_size;
    float *weights = (float *)(void *)step->rows[STEP_WEIGHTS];
    for (int64_t e = 0; e < size; e++) {
        number_store(step->rows[STEP_Q], token * size + e, t->dtype,
                     random_almost_normal(&step->engine->random));
    }
    for (int64_t h = 0; h < t->num_q_heads; h++) {
        weights[token * t->num_q_heads + h] = (float)random_almost_normal(&step->engine->random);
    }
}

/* All lists of the tokens of one request. */
static void verify(const struct run_step *step, int32_t request, struct tally *tally)
{
    const struct run_layer *layer = step->layer;
    const int32_t r = step->batch->request[request], length = step->batch->seq_lens[request];
    const int32_t first = step->batch->query_start_loc[request];
    const int32_t count = step->batch->query_start_loc[request + 1] - first;
    const float *factors = (const float *)(const void *)step->rows[STEP_WEIGHTS];
    const int32_t *out = (const int32_t *)(const void *)step->rows[STEP_OUT];
    const struct attn_indexer_desc *x = &layer->source->indexer;
    const struct row_terms *t = &layer->terms;
    const int32_t heads = t->num_q_heads / x->num_groups, d = t->head_size;
    const int32_t rows = length / x->tokens_per_row, room = layer_list_room(x);
    const struct oracle_indexer oracle = layer_index_oracle(x, t->num_q_heads, d, t->scale);
    const double slack = is_fused(step->engine, layer) ? 4 * SLACK : SLACK;
    double *keys = command_calloc((size_t)(rows + heads) * (size_t)(d + 1) + 1, sizeof *keys);
    double *scores = keys + (int64_t)rows * d, *q = scores + rows,
           *weights = q + (int64_t)heads * d;
    for (int64_t i = 0; i < (int64_t)rows * d; i++) {
        const int64_t token = (i / d + 1) * x->tokens_per_row - 1;
        keys[i] = number_load(layer->k_history[r], token * d + i % d, t->dtype);
    }
    for (int64_t i = 0; i < (int64_t)count * x->num_groups; i++) {
        const int64_t token = first + i / x->num_groups, head = i % x->num_groups * heads;
        const int64_t position = length - count + i / x->num_groups;
        double largest = 0;
        for (int64_t e = 0; e < (int64_t)heads * d; e++) {
            q[e] =
                number_load(step->rows[STEP_Q], (token * t->num_q_heads + head) * d + e, t->dtype);
        }
        for (int32_t h = 0; h < heads; h++) {
            weights[h] = (double)factors[token * t->num_q_heads + head + h];
        }
        oracle_index_scores(&oracle, position, q, x->has_weights ? weights : NULL, keys, scores);
        for (int64_t e = 0; e < oracle_index_entries(&oracle, position); e++) {
            largest = fmax(largest, fabs(scores[e]));
        }
        const int32_t *list = out + (token * x->num_groups + i % x->num_groups) * room;
        if (oracle_index_judge(&oracle, position, scores, list, room, slack * largest) != NULL) {
            tally->max_error = INFINITY;
        }
        tally->compared += room;
    }
    free(keys);
}

const struct run_kind run_indexer_kind = {.bind = bind,
                                          .make_query = make_query,
                                          .make_keys = make_keys,
                                          .verify = verify,
                                          .bring = bring};
