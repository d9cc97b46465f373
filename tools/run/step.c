/* SPDX-License-Identifier: Apache-2.0 */
/* Continuous batching: what each request gets in a step, the batch of every group, and the layers
 * over it. */
#include <string.h>

#include "engine.h"
#include "support/client.h"

static int32_t tokens_now(const struct request *request)
{
    int32_t left = request->prompt - request->length;
    return left <= 0 ? 1 : left < CHUNK ? left : CHUNK;
}

static void compose(struct run_engine *engine, struct batch *batch)
{
    int32_t query_lens[MAX_REQUESTS] = {0}, seq_lens[MAX_REQUESTS] = {0};
    int32_t ids[MAX_REQUESTS], order[MAX_REQUESTS], moved;
    int32_t count = 0;
    for (int32_t r = 0; r < engine->num_requests; r++) {
        if (engine->requests[r].running) {
            ids[count] = r;
            query_lens[count] = tokens_now(&engine->requests[r]);
            seq_lens[count] = engine->requests[r].length + query_lens[count];
            count++;
        }
    }
    const struct attn_batch_order requests =
        SIZED(attn_batch_order, .query_lens = query_lens, .seq_lens = seq_lens, .num_reqs = count,
              .threshold = 1, .short_extend = CHUNK);
    engine->api->batch_order(&requests, order, &moved, &engine->error);
    memset(batch, 0, sizeof *batch);
    batch->num_reqs = count;
    for (int32_t i = 0; i < count; i++) {
        batch->request[i] = ids[order[i]];
        batch->seq_lens[i] = seq_lens[order[i]];
        batch->encoder_lens[i] = engine->requests[ids[order[i]]].encoder;
        batch->query_start_loc[i + 1] = batch->query_start_loc[i] + query_lens[order[i]];
    }
}

/* Plans every group with a cache, then runs their layers in the model's order: an indexer comes
 * before the layers that attend by its lists. */
static attn_status run_groups(struct run_engine *engine, struct batch *batch)
{
    memory_finish(&engine->batches);
    for (int32_t g = 0; g < engine->num_groups; g++) {
        struct run_group *group = &engine->groups[g];
        if (group->has_cache) {
            TRY(plan_group(engine, group, batch, !group->cross && !group->recurrent));
        }
    }
    for (int32_t i = 0; i < engine->num_layers; i++) {
        if (engine->groups[engine->layers[i].group].has_cache) {
            TRY(layer_run(engine, &engine->layers[i], batch));
        }
    }
    return ATTN_OK;
}

/* Towers without a cache see whole sequences, once: a recording's, or some. */
static attn_status run_encoders(struct run_engine *engine, struct batch *batch)
{
    static const int32_t some[] = {37, 8, 1, 64};
    int32_t lengths[MAX_REQUESTS], count = sizeof some / sizeof *some;
    bool recorded = engine->settings->qkv != NULL;
    count = recorded ? engine->num_requests : count;
    for (int32_t i = 0; i < count; i++) {
        lengths[i] = recorded ? engine->requests[i].prompt : some[i];
    }
    for (int32_t g = 0; g < engine->num_groups; g++) {
        struct run_group *group = &engine->groups[g];
        struct attn_batch view;
        if (group->has_cache) {
            continue;
        }
        batch->num_reqs = count;
        for (int32_t i = 0; i < batch->num_reqs; i++) {
            batch->request[i] = i;
            batch->seq_lens[i] = lengths[i];
            batch->query_start_loc[i + 1] = batch->query_start_loc[i] + lengths[i];
        }
        fill_batch(group, batch, &view);
        view.seq_lens = view.seq_lens_host = view.block_table = view.block_table_row = NULL;
        view.num_slots = 0;
        view.encoder_seq_lens = NULL;
        memory_finish(&engine->batches);
        TRY(plan_batch(engine, group, &view, NULL));
        for (int32_t i = 0; i < engine->num_layers; i++) {
            struct run_layer *layer = &engine->layers[i];
            for (int32_t r = 0; layer->group == g && r < batch->num_reqs; r++) {
                add_keys(engine, layer, r, 0, 0, lengths[r]);
            }
            if (layer->group == g) {
                TRY(layer_run(engine, layer, batch));
            }
        }
        engine->tokens += batch->query_start_loc[batch->num_reqs];
    }
    return ATTN_OK;
}

static attn_status advance(struct run_engine *engine, const struct batch *batch, int32_t step)
{
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        struct request *request = &engine->requests[batch->request[i]];
        request->length = batch->seq_lens[i];
        request->produced += request->length > request->prompt;
        if (request->produced >= request->output ||
            request->length >= request->prompt + request->output) {
            request->running = false;
            for (int32_t g = 0; g < engine->num_groups; g++) {
                blocks_free(&engine->groups[g], batch->request[i]);
            }
        }
    }
    for (int32_t r = 0; r < engine->num_requests; r++) {
        struct request *request = &engine->requests[r];
        if (request->swapped) {
            TRY(blocks_swap(engine, r, false));
            request->swapped = false;
            request->running = true;
        } else if (request->running && request->preempt_at == step) {
            TRY(blocks_swap(engine, r, true));
            request->swapped = true;
            request->running = false;
        }
    }
    return ATTN_OK;
}

attn_status engine_run(struct run_engine *engine)
{
    OWNED(memory_end) struct batch *batch = command_calloc(1, sizeof *batch);
    TRY(run_encoders(engine, batch));
    for (int32_t step = 0; step < engine->steps; step++) {
        for (int32_t r = 0; r < engine->num_requests; r++) {
            if (!engine->requests[r].arrived && engine->requests[r].arrival <= step) {
                TRY(admit(engine, r));
            }
        }
        compose(engine, batch);
        if (batch->num_reqs > 0) {
            TRY(run_groups(engine, batch));
            engine->tokens += batch->query_start_loc[batch->num_reqs];
        }
        TRY(advance(engine, batch, step));
    }
    return ATTN_OK;
}
