/* SPDX-License-Identifier: Apache-2.0 */
/* A request's arrival: what it shares with another, and the keys of its prompt written without
 * being attended. */
#include <string.h>

#include "engine.h"
#include "support/client.h"

#define WRITE_CHUNK 512

void fill_batch(const struct run_group *group, struct batch *batch, struct attn_batch *out)
{
    *out = client_batch(batch->num_reqs, batch->query_start_loc, batch->seq_lens);
    out->encoder_seq_lens = out->encoder_seq_lens_host = batch->encoder_lens;
    client_blocks(out, group->table, group->stride, batch->slots);
    out->block_table_rows = MAX_REQUESTS;
    out->block_table_row = batch->request;
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        const int32_t end = batch->query_start_loc[i + 1];
        for (int32_t t = batch->query_start_loc[i]; t < end; t++) {
            batch->positions[t] = batch->seq_lens[i] - (end - t);
        }
    }
}

/* The batch's arrays as they are now, in the device's memory until the next plan. */
attn_status plan_batch(struct run_engine *engine, struct run_group *group, struct attn_batch *batch,
                       struct state_batch *states)
{
    const size_t reqs = (size_t)batch->num_reqs, word = sizeof(int32_t);
    const size_t blocks = reqs * (size_t)group->stride * word;
    struct latent_table rows = {.table = {.block_table = NULL}};
    OWNED(memory_end) int32_t *second = NULL;
    if (group->tokens_per_row > 0) {
        second = command_calloc(1, blocks);
        latent_table(group, batch, second, &rows);
    }
    struct state_batch none = {.ext = {.state_slots = NULL}};
    const struct {
        const void **array;
        size_t bytes;
    } arrays[] = {
        {(const void **)&batch->query_start_loc, (reqs + 1) * word},
        {(const void **)&batch->seq_lens, reqs * word},
        {(const void **)&batch->encoder_seq_lens, reqs * word},
        {(const void **)&batch->block_table, (size_t)(MAX_REQUESTS * group->stride) * word},
        {(const void **)&batch->block_table_row, reqs * word},
        {(const void **)&batch->slot_mapping, (size_t)batch->num_slots * sizeof(int64_t)},
        {(const void **)&rows.table.block_table, blocks},
        {(const void **)&rows.table.seq_lens, reqs * word},
        {(const void **)&rows.table.slot_mapping, (size_t)batch->num_slots * sizeof(int64_t)},
        {(const void **)&(states != NULL ? states : &none)->ext.state_slots, reqs * word},
        {(const void **)&(states != NULL ? states : &none)->replay.ring_tokens, reqs * word}};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        if (*arrays[i].array != NULL) {
            *arrays[i].array = memory_upload(&engine->batches, *arrays[i].array, arrays[i].bytes);
        }
    }
    TRY(engine_sent(engine, &engine->batches, "a step's tensors"));
    return engine->api->plan_batch(group->plan, batch, engine->stream, &engine->error);
}

/* Keys in the leading blocks that all requests of the batch have in common: what a scheduler knows
 * of its prefix cache. */
static int32_t common_prefix(const struct run_group *group, const struct batch *batch)
{
    const int32_t *first = group->table + (size_t)batch->request[0] * (size_t)group->stride;
    int32_t blocks = group->held[batch->request[0]];
    for (int32_t i = 1; i < batch->num_reqs; i++) {
        int32_t r = batch->request[i], same = 0;
        while (same < blocks && same < group->held[r] &&
               group->table[r * group->stride + same] == first[same]) {
            same++;
        }
        blocks = same;
    }
    return batch->num_reqs > 1 && !group->cross ? blocks * group->block_size : 0;
}

/* Slots of keys first .. end-1 of request r. */
static void slots_of(const struct run_group *group, int32_t r, int32_t first, int32_t end,
                     int64_t *slots)
{
    for (int32_t j = first; j < end; j++) {
        int64_t block = group->table[r * group->stride + j / group->block_size];
        *slots++ = block * group->block_size + j % group->block_size;
    }
}

attn_status plan_group(struct run_engine *engine, struct run_group *group, struct batch *batch,
                       bool writes)
{
    struct state_batch states;
    struct attn_batch view;
    int64_t *slots = batch->slots;
    for (int32_t i = 0; i < batch->num_reqs && writes; i++) {
        int32_t count = batch->query_start_loc[i + 1] - batch->query_start_loc[i];
        TRY(blocks_reserve(engine, group, batch->request[i], batch->seq_lens[i]));
        slots_of(group, batch->request[i], batch->seq_lens[i] - count, batch->seq_lens[i], slots);
        slots += count;
    }
    fill_batch(group, batch, &view);
    view.num_slots = writes ? view.num_slots : 0;
    if (group->recurrent) {
        gdn_states(group, batch, &states);
        view.next = &states.ext.ext;
    }
    view.common_prefix_len = common_prefix(group, batch);
    return plan_batch(engine, group, &view, group->recurrent ? &states : NULL);
}

/* Writes keys first .. end-1 of one request in every layer of a group. */
static attn_status write_only(struct run_engine *engine, int32_t g, int32_t r, int32_t first,
                              int32_t end)
{
    struct run_group *group = &engine->groups[g];
    OWNED(memory_end) struct batch *batch = command_calloc(1, sizeof *batch);
    batch->num_reqs = 1;
    batch->query_start_loc[1] = end - first;
    batch->seq_lens[0] = end;
    batch->encoder_lens[0] = end;
    batch->request[0] = r;
    memory_finish(&engine->batches);
    TRY(plan_group(engine, group, batch, !group->recurrent));
    for (int32_t i = 0; i < engine->num_layers; i++) {
        if (engine->layers[i].group == g && engine->layers[i].owner == NULL) {
            TRY(engine->layers[i].kind->is_run ? layer_run(engine, &engine->layers[i], batch)
                                               : layer_write(engine, &engine->layers[i], batch));
            TRY(engine_wait(engine));
            memory_finish(&engine->rows);
        }
    }
    return ATTN_OK;
}

/* The common beginning with another request that is here with it, in whole blocks: its keys are not
 * written again. */
static int32_t share(struct run_engine *engine, int32_t r)
{
    const struct request *request = &engine->requests[r];
    const struct request *other = request->shares >= 0 ? &engine->requests[request->shares] : NULL;
    if (other == NULL || !other->running || other->length < request->shared) {
        return 0;
    }
    const int32_t block = engine->block_size, shared = request->shared / block * block;
    for (int32_t g = 0; g < engine->num_groups; g++) {
        if (engine->groups[g].has_cache && !engine->groups[g].cross &&
            !engine->groups[g].recurrent) {
            blocks_share(&engine->groups[g], r, request->shares, shared / block);
        }
    }
    return shared;
}

static void fill_history(struct run_engine *engine, struct run_layer *layer, int32_t r,
                         int32_t shared, int32_t written)
{
    const struct request *request = &engine->requests[r];
    const struct row_terms *t = &layer->terms;
    if (layer->owner != NULL) {
        layer->k_history[r] = layer->owner->k_history[r];
        layer->v_history[r] = layer->owner->v_history[r];
        return;
    }
    if (layer->source->desc.kind == ATTN_LAYER_CROSS) {
        add_keys(engine, layer, r, 0, request->encoder, request->encoder);
        return;
    }
    if (layer->source->desc.causal != ATTN_CAUSAL_YES) {
        return; /* encoders get theirs with their step */
    }
    add_keys(engine, layer, r, 0, 0, request->prompt + request->output);
    if (shared > 0) {
        size_t row = (size_t)shared * (size_t)t->num_kv_heads * element_bytes(layer);
        memcpy(layer->k_history[r], layer->k_history[request->shares], row * (size_t)t->head_size);
        memcpy(layer->v_history[r], layer->v_history[request->shares],
               row * (size_t)t->head_size_v);
    }
    add_keys(engine, layer, r, shared, written, 0);
}

/* A request comes: its encoder keys are written, and of its prompt all but the last tokens. */
attn_status admit(struct run_engine *engine, int32_t r)
{
    struct request *request = &engine->requests[r];
    int32_t shared = share(engine, r), written = shared;
    written = request->prompt - 2 * CHUNK > written ? request->prompt - 2 * CHUNK : written;
    for (int32_t i = 0; i < engine->num_layers; i++) {
        fill_history(engine, &engine->layers[i], r, shared, written);
    }
    request->drawn = written;
    for (int32_t g = 0; g < engine->num_groups; g++) {
        const struct run_group *group = &engine->groups[g];
        int32_t first = group->cross || group->recurrent ? 0 : shared;
        int32_t end = !group->has_cache ? 0 : group->cross ? request->encoder : written;
        for (int32_t at = first; at < end; at += WRITE_CHUNK) {
            TRY(write_only(engine, g, r, at, at + WRITE_CHUNK < end ? at + WRITE_CHUNK : end));
        }
    }
    request->length = written;
    request->arrived = request->running = true;
    return ATTN_OK;
}
