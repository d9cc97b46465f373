/* SPDX-License-Identifier: Apache-2.0 */
/* MLA layers: a history of latent rows, and queries that look for one key by its rope part. */
#include <math.h>
#include <stdlib.h>

#include "engine.h"
#include "support/client.h"
#include "support/number.h"
#include "support/oracle.h"

#define LOGIT_DEVIATION 3.0
#define NEEDLE_LOGIT 9.0

static attn_status bind(struct run_engine *engine, struct run_layer *layer)
{
    const struct attn_mla_desc *m = &layer->source->mla;
    const struct attn_layer_desc *d = &layer->source->desc;
    int64_t rows = (int64_t)d->num_q_heads * (m->qk_nope_head_dim + m->v_head_dim);
    layer->terms = (struct row_terms){.dtype = d->dtype,
                                      .num_q_heads = d->num_q_heads,
                                      .num_kv_heads = 1,
                                      .head_size = d->head_size,
                                      .head_size_v = 1, /* no history of values */
                                      .query_size = m->qk_nope_head_dim + m->qk_rope_head_dim,
                                      .num_out_heads = d->num_q_heads,
                                      .out_size = m->v_head_dim,
                                      .scale = d->scale};
    layer->roundings = 3; /* projected, attended (or merged), projected back */
    layer->weights = command_calloc((size_t)(rows * m->kv_lora_rank), element_bytes(layer));
    for (int64_t i = 0; i < rows * m->kv_lora_rank; i++) {
        number_store(layer->weights, i, layer->terms.dtype,
                     random_almost_normal(&engine->random) / sqrt(m->kv_lora_rank));
    }
    params_send(engine, layer, 0, layer->weights,
                (size_t)(rows * m->kv_lora_rank) * element_bytes(layer));
    struct shaped kv_b;
    device_tensor(engine, &kv_b, layer->device_params[0], d->dtype, 2,
                  (int64_t[]){rows, m->kv_lora_rank});
    struct attn_mla_weights weights =
        EXTENSION(attn_mla_weights, ATTN_EXT_MLA_WEIGHTS, NULL, .kv_b_proj = &kv_b.tensor);
    struct attn_layer_params params = SIZED(attn_layer_params, .next = &weights.ext);
    return params_bind(engine, layer, &params);
}

/* One query row: noise of the logits' deviation in both parts, and a pull towards key j's rope
 * part, if there is one. */
static void draw_query(struct run_engine *engine, const struct run_layer *layer, int32_t r,
                       int64_t j, uint8_t *row)
{
    const struct attn_mla_desc *m = &layer->source->mla;
    const struct row_terms *t = &layer->terms;
    int32_t size = m->qk_nope_head_dim + m->qk_rope_head_dim;
    double deviation = LOGIT_DEVIATION / (t->scale * sqrt(size)), norm = 1e-30;
    int64_t pe = j * t->head_size + m->kv_lora_rank;
    for (int32_t d = 0; d < m->qk_rope_head_dim; d++) {
        double x = number_load(layer->k_history[r], pe + d, t->dtype);
        norm += x * x;
    }
    for (int32_t h = 0; h < t->num_q_heads; h++) {
        for (int32_t d = 0; d < size; d++) {
            int32_t p = d - m->qk_nope_head_dim;
            double x = p >= 0 ? number_load(layer->k_history[r], pe + p, t->dtype) : 0;
            number_store(row, (int64_t)h * size + d, t->dtype,
                         NEEDLE_LOGIT / (t->scale * norm) * x +
                             deviation * random_almost_normal(&engine->random));
        }
    }
}

static void make_query(struct run_step *step, int32_t i, int32_t c)
{
    const struct row_terms *t = &step->layer->terms;
    const int32_t first = step->batch->query_start_loc[i];
    const int32_t own = step->batch->seq_lens[i] - (step->batch->query_start_loc[i + 1] - first);
    const int32_t j = random_below(&step->engine->random, own + c + 1);
    const size_t row = (size_t)t->num_q_heads * (size_t)t->query_size * element_bytes(step->layer);
    draw_query(step->engine, step->layer, step->batch->request[i], j,
               step->rows[STEP_Q] + (size_t)(first + c) * row);
}

/* One head of all requests. */
static void verify(const struct run_step *step, int32_t h, struct tally *tally)
{
    const struct run_layer *layer = step->layer;
    const struct attn_mla_desc *m = &layer->source->mla;
    const struct batch *batch = step->batch;
    const bool listed = step->lists.entries != NULL;
    const int32_t heads = layer->terms.num_q_heads, dtype = layer->terms.dtype;
    const int64_t size = layer->terms.query_size;
    const int64_t elements = (int64_t)(m->qk_nope_head_dim + m->v_head_dim) * m->kv_lora_rank;
    int32_t most = 0;
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        most = batch->seq_lens[i] > most ? batch->seq_lens[i] : most;
    }
    double *weights =
        command_calloc((size_t)(elements + size + most + m->v_head_dim), sizeof *weights);
    int32_t *seen = command_calloc((size_t)most, sizeof *seen);
    double *q = weights + elements, *scores = q + size, *out = scores + most;
    const struct oracle_mla head = {m->qk_nope_head_dim,
                                    m->qk_rope_head_dim,
                                    m->v_head_dim,
                                    m->kv_lora_rank,
                                    layer->terms.scale,
                                    weights,
                                    NULL};
    for (int64_t i = 0; i < elements; i++) {
        weights[i] = number_load(layer->weights, h * elements + i, dtype);
    }
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        const int32_t first = batch->query_start_loc[i], end = batch->query_start_loc[i + 1];
        for (int32_t t = first; t < end; t++) {
            const int32_t position = batch->seq_lens[i] - (end - t);
            const int64_t at = (int64_t)t * heads + h;
            for (int64_t d = 0; d < size; d++) {
                q[d] = number_load(step->rows[STEP_Q], at * size + d, dtype);
            }
            const int32_t count =
                listed ? list_keys(&step->lists, t, 0, position, seen) : position + 1;
            oracle_mla(&head, q, step->keys[i], listed ? seen : NULL, count, scores, out);
            compare_row(layer, out, 0, step->rows[STEP_OUT], at * m->v_head_dim, m->v_head_dim,
                        NULL, tally);
        }
    }
    free(weights);
    free(seen);
}

const struct run_kind run_mla_kind = {
    .bind = bind, .make_query = make_query, .verify = verify, .by_heads = true, .wants_keys = true};
