/* SPDX-License-Identifier: Apache-2.0 */
/* Indexers: a history of index keys, drawn queries and weights, and the lists against the oracle.
 * The sparse layers after it attend to them. */
#include <math.h>
#include <stdlib.h>

#include "engine.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/oracle.h"

/* What float32 sums of rounded products may be off, by the largest score. */
#define SLACK 1e-3

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
static bool verify(const struct run_step *step, int32_t request, struct tally *tally)
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
        if (oracle_index_judge(&oracle, position, scores, list, room, SLACK * largest) != NULL) {
            tally->max_error = INFINITY;
        }
        tally->compared += room;
    }
    free(keys);
    return keys != NULL;
}

const struct run_kind run_indexer_kind = {
    .bind = attention_bind, .make_query = make_query, .verify = verify};
