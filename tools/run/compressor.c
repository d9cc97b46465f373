/* SPDX-License-Identifier: Apache-2.0 */
/* Compressors: a history of states, and the rows that tokens finish against the oracle. Indexers
 * and layers of compressed rows after them take these rows. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "support/client.h"
#include "support/number.h"
#include "support/oracle.h"

#define NORM_EPS 0.125

const struct run_layer *compressor_of(const struct run_engine *engine,
                                      const struct run_layer *layer)
{
    const struct model_layer *of = layer->source;
    const int32_t tokens =
        of->desc.kind == ATTN_LAYER_INDEXER ? of->indexer.tokens_per_row : of->cache.tokens_per_row;
    while (tokens > 0 && layer-- > engine->layers) {
        if (layer->source->compressor.tokens_per_row == tokens &&
            layer->source->desc.head_size == of->desc.head_size) {
            return layer;
        }
    }
    return NULL;
}

const struct attn_tensor *angles(struct run_engine *engine, int32_t rotary, struct shaped *to)
{
    if (engine->angles == NULL || engine->angles_dims != rotary) {
        const size_t bytes = (size_t)engine->longest * (size_t)rotary * sizeof(float);
        float *table = command_calloc(1, bytes);
        oracle_angles(table, engine->longest, rotary);
        engine->angles = memory_upload(&engine->kept, table, bytes);
        engine->angles_dims = rotary;
        free(table);
    }
    return device_tensor(engine, to, engine->angles, ATTN_DTYPE_F32, 2,
                         (int64_t[]){engine->longest, rotary});
}

/* Histories are of states [2 (1 + overlaps), D] and, as values in as many parts, of rows [D]. */
static attn_status bind(struct run_engine *engine, struct run_layer *layer)
{
    const struct attn_layer_desc *d = &layer->source->desc;
    const int64_t size = d->head_size;
    const int64_t biases = layer->source->compressor.tokens_per_row * size * d->num_kv_heads / 2;
    layer->terms = (struct row_terms){.dtype = d->dtype,
                                      .num_q_heads = d->num_q_heads,
                                      .num_kv_heads = d->num_kv_heads,
                                      .head_size = d->head_size,
                                      .head_size_v = d->head_size / d->num_kv_heads,
                                      .num_out_heads = 1,
                                      .out_size = d->head_size};
    layer->weights = command_calloc((size_t)size, element_bytes(layer));
    layer->gates = command_calloc((size_t)biases, sizeof *layer->gates);
    number_fill_normal(layer->weights, 0, size, d->dtype, 1, &engine->random);
    number_fill_normal(layer->gates, 0, biases, ATTN_DTYPE_F32, 1, &engine->random);
    params_send(engine, layer, 0, layer->weights, (size_t)size * element_bytes(layer));
    params_send(engine, layer, 1, layer->gates, (size_t)biases * sizeof *layer->gates);
    return engine_sent(engine, &engine->kept, "parameters");
}

static void bring(struct run_engine *engine, const struct run_layer *layer,
                  const struct batch *batch, int64_t tokens, void *rows, struct layer_io *io,
                  struct more_io *more)
{
    const struct attn_compressor_desc *x = &layer->source->compressor;
    const int64_t size = layer->terms.head_size;
    more->pooling = EXTENSION(
        attn_io_compressor, ATTN_EXT_DRAFT_IO_COMPRESSOR, NULL,
        .position_bias = device_tensor(engine, &more->bias, layer->device_params[1], ATTN_DTYPE_F32,
                                       2, (int64_t[]){x->tokens_per_row, (1 + x->overlaps) * size}),
        .norm_weight = device_tensor(engine, &more->norm, layer->device_params[0],
                                     layer->terms.dtype, 1, &size),
        .cos_sin = angles(engine, x->rotary_dim, &more->cos_sin), .norm_eps = NORM_EPS);
    io->io.next = &more->pooling.ext;
}

static bool finishes(const struct run_layer *layer, int64_t position)
{
    return (position + 1) % layer->source->compressor.tokens_per_row == 0;
}

static void keep(const struct run_step *step)
{
    const struct batch *batch = step->batch;
    const size_t bytes = (size_t)step->layer->terms.out_size * element_bytes(step->layer);
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        const int32_t end = batch->query_start_loc[i + 1];
        for (int32_t t = batch->query_start_loc[i]; t < end; t++) {
            if (finishes(step->layer, batch->positions[t])) {
                memcpy(step->layer->v_history[batch->request[i]] +
                           (size_t)batch->positions[t] * bytes,
                       step->rows[STEP_OUT] + (size_t)t * bytes, bytes);
            }
        }
    }
}

/* Tokens of one request: the rows of those that finish none are as they were. */
static void verify(const struct run_step *step, int32_t i, struct tally *tally)
{
    const struct run_layer *layer = step->layer;
    const struct attn_compressor_desc *x = &layer->source->compressor;
    const struct oracle_compressor oracle = {.dtype = layer->terms.dtype,
                                             .tokens_per_row = x->tokens_per_row,
                                             .overlaps = x->overlaps,
                                             .size = layer->terms.head_size,
                                             .rotary = x->rotary_dim,
                                             .neox = x->rope == ATTN_ROPE_NEOX,
                                             .bias = layer->gates,
                                             .norm = layer->weights,
                                             .norm_eps = NORM_EPS};
    const int32_t size = oracle.size, end = step->batch->query_start_loc[i + 1];
    const size_t bytes = (size_t)size * element_bytes(layer);
    double *expected = command_calloc((size_t)size, sizeof *expected);
    for (int32_t t = step->batch->query_start_loc[i]; t < end; t++) {
        const int64_t position = step->batch->positions[t];
        const uint8_t *out = step->rows[STEP_OUT] + (size_t)t * bytes;
        if (finishes(layer, position)) {
            oracle_compressor(&oracle, layer->k_history[step->batch->request[i]], NULL,
                              (int32_t)position, expected);
            compare_row(layer, expected, 0, out, 0, size, NULL, tally);
            continue;
        }
        for (size_t b = 0; b < bytes; b++) {
            tally->max_error = out[b] != POISON ? INFINITY : tally->max_error;
        }
        tally->compared += size;
    }
    free(expected);
}

const struct run_kind run_compressor_kind = {
    .bind = bind, .verify = verify, .bring = bring, .keep = keep, .is_run = true};
