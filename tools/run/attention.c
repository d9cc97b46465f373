/* SPDX-License-Identifier: Apache-2.0 */
/* Attention layers: rows of queries, keys and values, drawn or recorded, and outputs against the
 * oracle. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/oracle.h"

#define LOGIT_DEVIATION 4.0
#define NEEDLE_LOGIT 13.0

/* A query that looks for one key that it can see, with noise of the other logits' deviation. */
static void draw_query(struct run_engine *engine, const struct run_layer *layer, int32_t r,
                       int64_t position, int64_t length, uint8_t *row)
{
    const struct row_terms *t = &layer->terms;
    const struct attn_layer_desc *w = &layer->source->desc;
    int64_t reach = position + 1 < length ? position + 1 : length;
    int64_t window =
        w->has_window && w->window_left >= 0 && w->window_left < reach ? w->window_left + 1 : reach;
    int64_t j = w->causal == ATTN_CAUSAL_YES
                    ? reach - 1 - random_below(&engine->random, (int32_t)window)
                    : random_below(&engine->random, (int32_t)length);
    for (int32_t h = 0; h < t->num_q_heads; h++) {
        int64_t key = (j * t->num_kv_heads + h / (t->num_q_heads / t->num_kv_heads)) * t->head_size;
        double norm = 0, deviation = LOGIT_DEVIATION / (t->scale * sqrt(t->head_size));
        for (int32_t d = 0; d < t->head_size; d++) {
            double x = number_load(layer->k_history[r], key + d, t->dtype);
            norm += x * x;
        }
        for (int32_t d = 0; d < t->head_size; d++) {
            double x = number_load(layer->k_history[r], key + d, t->dtype);
            number_store(row, (int64_t)h * t->head_size + d, t->dtype,
                         NEEDLE_LOGIT / (t->scale * norm) * x +
                             deviation * random_almost_normal(&engine->random));
        }
    }
}

void attention_query(struct run_step *step, int32_t i, int32_t c)
{
    const struct run_layer *layer = step->layer;
    const size_t size = (size_t)layer->terms.num_q_heads * (size_t)layer->terms.head_size;
    const int32_t r = step->batch->request[i], first = step->batch->query_start_loc[i];
    const int32_t position =
        step->batch->seq_lens[i] - (step->batch->query_start_loc[i + 1] - first) + c;
    uint8_t *row = step->rows[STEP_Q] + (size_t)(first + c) * size * element_bytes(layer);
    const float *recorded = recorded_row(step->engine, layer, 0, r, position);
    if (recorded != NULL) {
        memcpy(row, recorded, size * sizeof *recorded);
    } else {
        draw_query(step->engine, layer, r, position, step_keys(step, i), row);
    }
}

/* `count` elements of a layer's rows as doubles, after those that *at already has. */
static double *widen(double **at, const void *rows, int64_t count, int32_t dtype)
{
    double *first = *at;
    for (int64_t i = 0; i < count; i++) {
        first[i] = number_load(rows, i, dtype);
    }
    *at += count;
    return first;
}

/* The lists of a request's tokens as the oracle has them, [per_token, count, length]. */
static uint8_t *mask_of(const struct step_lists *lists, int32_t length, int32_t first,
                        int32_t count)
{
    uint8_t *mask = command_calloc((size_t)lists->per_token * (size_t)count, (size_t)length);
    int32_t *keys = command_calloc((size_t)length, sizeof *keys);
    for (int32_t n = 0; n < lists->per_token * count; n++) {
        const int32_t c = n % count, position = length - count + c;
        int32_t seen = list_keys(lists, first + c, n / count, position, keys);
        while (seen > 0) {
            mask[(int64_t)n * length + keys[--seen]] = 1;
        }
    }
    free(keys);
    return mask;
}

static void verify(const struct run_step *step, int32_t i, struct tally *tally)
{
    const struct run_layer *layer = step->layer;
    const struct row_terms *t = &layer->terms;
    const struct attn_layer_desc *d = &layer->source->desc;
    const struct step_lists *lists = &step->lists;
    const int32_t r = step->batch->request[i], first = step->batch->query_start_loc[i];
    const int32_t count = step->batch->query_start_loc[i + 1] - first, length = step_keys(step, i);
    const int64_t heads = t->num_q_heads, rows = count * heads;
    double *memory = command_calloc(
        (size_t)(rows * (t->head_size + t->head_size_v + 1) +
                 length * (t->num_kv_heads * (int64_t)t->head_size_v + 1) + 2 * heads),
        sizeof *memory);
    double *at = memory;
    uint8_t *mask = lists->entries != NULL ? mask_of(lists, length, first, count) : NULL;
    const uint8_t *q =
        step->rows[STEP_Q] + (size_t)(first * heads * t->head_size) * element_bytes(layer);
    const float *recorded =
        recorded_row(step->engine, layer, 3, r, step->batch->seq_lens[i] - count);
    struct oracle_request o = {
        .num_q_heads = t->num_q_heads,
        .num_kv_heads = t->num_kv_heads,
        .head_size = t->head_size,
        .head_size_v = t->head_size_v,
        .num_queries = count,
        .num_keys = length,
        .q = widen(&at, q, rows * t->head_size, t->dtype),
        .k = step->keys[i],
        .v = widen(&at, layer->v_history[r], (int64_t)length * t->num_kv_heads * t->head_size_v,
                   t->dtype),
        .scale = t->scale,
        .soft_cap = d->soft_cap,
        .causal = d->causal == ATTN_CAUSAL_YES,
        .left = d->has_window ? d->window_left : -1,
        .right = d->has_window ? d->window_right : -1,
        .chunk = d->chunk_size,
        .lookback = d->chunk_lookback,
        .alibi = d->alibi != ATTN_ALIBI_NONE,
        .slopes = d->alibi ? widen(&at, layer->slopes, heads, ATTN_DTYPE_F32) : NULL,
        .sinks = d->has_sinks ? widen(&at, layer->sinks, heads, ATTN_DTYPE_F32) : NULL,
        .listed = mask,
        .num_lists = lists->per_token};
    o.out = at;
    o.lse = at + rows * t->head_size_v;
    oracle_attend(&o, o.lse + rows);
    const uint8_t *out =
        step->rows[STEP_OUT] + (size_t)(first * heads * t->head_size_v) * element_bytes(layer);
    for (int64_t row = 0; row < rows; row++) {
        compare_row(layer, o.out + row * t->head_size_v, 0, out, row * t->head_size_v,
                    t->head_size_v, recorded, tally);
    }
    free(memory);
    free(mask);
}

attn_status attention_bind(struct run_engine *engine, struct run_layer *layer)
{
    const struct attn_layer_desc *d = &layer->source->desc;
    struct attn_layer_params params = {.struct_size = sizeof params};
    const size_t bytes = (size_t)d->num_q_heads * sizeof(float);
    const int32_t size_v = d->head_size_v > 0 ? d->head_size_v : d->head_size;
    params_send(engine, layer, 0, layer->sinks, bytes);
    params_send(engine, layer, 1, layer->slopes, bytes);
    params.sinks = d->has_sinks ? layer->device_params[0] : NULL;
    params.alibi_slopes = d->alibi ? layer->device_params[1] : NULL;
    layer->terms = (struct row_terms){.dtype = d->dtype,
                                      .num_q_heads = d->num_q_heads,
                                      .num_kv_heads = d->num_kv_heads,
                                      .head_size = d->head_size,
                                      .head_size_v = size_v,
                                      .query_size = d->head_size,
                                      .num_out_heads = d->num_q_heads,
                                      .out_size = size_v,
                                      .scale = d->scale};
    if (d->kind == ATTN_LAYER_INDEXER) {
        layer->terms.num_out_heads = layer->source->indexer.num_groups;
        layer->terms.out_size = layer_list_room(&layer->source->indexer);
    }
    return params_bind(engine, layer, &params);
}

const struct run_kind run_attention_kind = {
    .bind = attention_bind, .make_query = attention_query, .verify = verify, .wants_keys = true};
