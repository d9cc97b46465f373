/* SPDX-License-Identifier: Apache-2.0 */
/* From a configuration to bound layers with caches, tables and plans. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "engine.h"
#include "support/client.h"

#define MIN_STEP_TOKENS 512
#define MAX_STEP_TOKENS 8192

/* The best device, or the one of what ATTN_BACKEND orders. */
static attn_status open_device(struct run_engine *engine)
{
    struct attn_device device;
    memory_init(&engine->kept, &engine->device);
    memory_init(&engine->batches, &engine->device);
    memory_init(&engine->rows, &engine->device);
    TRY(engine->api->best_device(engine->runtime, NULL, &device, &engine->error));
    TRY(device_init(&engine->device, engine->api, engine->runtime, device, &engine->error));
    return engine->api->device->create_stream(engine->device.opened, &engine->stream,
                                              &engine->error);
}

static attn_status try_select(struct run_engine *engine)
{
    attn_assignment *assignment = NULL;
    engine->block_size = BLOCK_SIZE;
    for (int32_t i = 0; i < engine->num_layers; i++) {
        const int32_t tokens = engine->config.layers[i].cache.tokens_per_row;
        engine->block_size = tokens > engine->block_size ? tokens : engine->block_size;
    }
    for (int32_t i = 0; i < engine->num_layers; i++) {
        struct model_layer *layer = &engine->config.layers[i];
        struct attn_layer_desc *desc = &layer->desc;
        bool in_blocks = desc->kind != ATTN_LAYER_ENCODER && desc->kind != ATTN_LAYER_RECURRENT;
        desc->block_size = in_blocks ? engine->block_size : 0;
        if (layer->cache.tokens_per_row > 0) {
            layer->cache.block_size = engine->block_size / layer->cache.tokens_per_row;
        }
    }
    const struct attn_select_options options =
        SIZED(attn_select_options, .device = engine->device.device);
    attn_status status = model_config_select(&engine->config, engine->api, engine->runtime,
                                             &options, &assignment, &engine->error);
    if (status == ATTN_OK) {
        status = engine->api->model_create(engine->runtime, assignment, NULL, &engine->model,
                                           &engine->error);
    }
    for (int32_t i = 0; i < engine->num_layers && status == ATTN_OK; i++) {
        choice_text(engine->api, assignment, i, engine->layers[i].backend);
    }
    engine->api->assignment_destroy(assignment);
    return status;
}

static bool is_unserved(attn_status status)
{
    return status == ATTN_ERROR_NO_BACKEND || status == ATTN_ERROR_REFUSED;
}

/* Where nothing on the device serves writes that norm, rotate and transform index keys, attn-run
 * does so before it hands keys in. Other layers do not need what compressors, with rotations of
 * outputs, and indexers give: where nothing serves those, they are left out. */
static attn_status select_layers(struct run_engine *engine)
{
    static const struct {
        int32_t kind;
        const char *name;
    } optional[] = {{ATTN_LAYER_DRAFT_COMPRESSOR, "compressor, with rotations of outputs,"},
                    {ATTN_LAYER_INDEXER, "indexer"}};
    engine->config.rotates = engine->config.fuses_index_write = true;
    model_config_link(&engine->config);
    attn_status status = try_select(engine);
    if (is_unserved(status)) {
        const struct attn_error why = engine->error;
        engine->config.fuses_index_write = false;
        model_config_link(&engine->config);
        status = try_select(engine);
        if (status == ATTN_OK) {
            fprintf(stderr, "attn-run: index keys are normed and rotated before their write: %s\n",
                    why.message);
        }
    }
    for (int32_t i = 0; i < 2 && is_unserved(status); i++) {
        engine->config.rotates = false;
        const int32_t dropped = model_config_drop(&engine->config, optional[i].kind);
        if (dropped > 0) {
            fprintf(stderr, "attn-run: %d layers of kind %s are left out: %s\n", dropped,
                    optional[i].name, engine->error.message);
            engine->num_layers -= dropped;
            status = try_select(engine);
        }
    }
    return status;
}

/* The layer whose cache it reads; NULL: its own. */
static const struct run_layer *owner_of(const struct run_engine *engine,
                                        const struct run_layer *layer)
{
    const char *target = layer->source->desc.kv_sharing_target;
    while (target != NULL && layer-- > engine->layers) {
        if (strcmp(layer->source->name, target) == 0) {
            return layer;
        }
    }
    return NULL;
}

/* Sinks and slopes, for whatever its kind makes of them. */
static attn_status make_params(struct run_engine *engine, struct run_layer *layer)
{
    const struct attn_layer_desc *d = &layer->source->desc;
    layer->kind = d->kind == ATTN_LAYER_RECURRENT ? &run_recurrent_kind
                  : d->kind == ATTN_LAYER_MLA
                      ? (layer->source->mla.absorb_in_core ? &run_mla_kind : &run_latent_kind)
                  : d->kind == ATTN_LAYER_INDEXER          ? &run_indexer_kind
                  : d->kind == ATTN_LAYER_DRAFT_COMPRESSOR ? &run_compressor_kind
                                                           : &run_attention_kind;
    layer->compressor = compressor_of(engine, layer);
    layer->owner = owner_of(engine, layer);
    layer->sinks = command_calloc((size_t)d->num_q_heads, sizeof *layer->sinks);
    layer->slopes = command_calloc((size_t)d->num_q_heads, sizeof *layer->slopes);
    for (int32_t h = 0; h < d->num_q_heads; h++) {
        layer->sinks[h] = (float)(6 + 2 * random_almost_normal(&engine->random));
    }
    model_alibi_slopes(layer->slopes, d->num_q_heads);
    return layer->kind->bind(engine, layer);
}

static attn_status make_cache(struct run_engine *engine, struct run_layer *layer)
{
    struct run_group *group = &engine->groups[layer->group];
    size_t bytes = (size_t)group->num_blocks * (size_t)layer->spec.padded_page_bytes;
    TRY(engine_take_unwritten(engine, bytes, "cache", &layer->cache));
    struct attn_cache_memory memory =
        SIZED(attn_cache_memory, .base = layer->cache, .num_blocks = group->num_blocks);
    if (group->tokens_per_row > 0) {
        struct attn_cache_spec rows = {.struct_size = sizeof rows};
        TRY(engine->api->layer_cache_spec(layer->handle, 1, &rows, &engine->error));
        layer->row_page = rows.page_bytes;
        bytes = (size_t)group->num_blocks * (size_t)layer->row_page;
        TRY(engine_take_unwritten(engine, bytes, "cache", &layer->row_cache));
        memory.further = &layer->row_cache;
        memory.further_num_blocks = &group->num_blocks;
        memory.num_further = 1;
    }
    return engine->api->layer_bind_memory(layer->handle, &memory, &engine->error);
}

static void make_group(struct run_engine *engine, struct run_group *group,
                       const struct run_layer *layer)
{
    int64_t tokens = 0;
    group->has_cache = layer->spec.kind != ATTN_KV_SPEC_NONE;
    group->cross = layer->spec.kind == ATTN_KV_SPEC_CROSS;
    group->recurrent = layer->spec.kind == ATTN_KV_SPEC_STATE;
    group->tokens_per_row = layer->source->cache.tokens_per_row;
    group->replay = group->recurrent ? layer->source->cache.block_size : 0;
    /* counts tokens: a row may stand for several */
    group->block_size =
        layer->spec.block_size > 0 ? layer->spec.block_size * layer->spec.tokens_per_row : 1;
    for (int32_t r = 0; r < engine->num_requests; r++) {
        const struct request *request = &engine->requests[r];
        int32_t keys = group->cross ? request->encoder : request->prompt + request->output;
        int32_t blocks = (keys + group->block_size - 1) / group->block_size + 1;
        tokens += (int64_t)blocks;
        group->stride = blocks > group->stride ? blocks : group->stride;
        group->slot[r] = (r * 5 + 2) % NUM_STATE_SLOTS;
    }
    group->num_blocks = tokens + 8;
    group->free_blocks = command_calloc((size_t)group->num_blocks, sizeof *group->free_blocks);
    group->references = command_calloc((size_t)group->num_blocks, sizeof *group->references);
    group->table = command_calloc((size_t)(MAX_REQUESTS * group->stride), sizeof *group->table);
    for (int32_t i = 0; i < MAX_REQUESTS * group->stride; i++) {
        group->table[i] = INT32_MIN; /* entries past the end are undefined, and so is this */
    }
    random_order(&engine->random, group->free_blocks, (int32_t)group->num_blocks, 0);
    group->num_free = (int32_t)group->num_blocks;
}

/* The most tokens of a step: no request brings more than its prompt, no write more than
 * MIN_STEP_TOKENS. */
static int32_t most_tokens(const struct run_engine *engine)
{
    int64_t tokens = 0;
    for (int32_t r = 0; r < engine->num_requests; r++) {
        tokens += engine->requests[r].prompt;
    }
    tokens = tokens > MIN_STEP_TOKENS ? tokens : MIN_STEP_TOKENS;
    return tokens < MAX_STEP_TOKENS ? (int32_t)tokens : MAX_STEP_TOKENS;
}

static attn_status make_plan(struct run_engine *engine, int32_t index)
{
    struct run_group *group = &engine->groups[index];
    attn_status status =
        memory_plan(&engine->kept, engine->api, engine->model, index,
                    CLIENT_LIMITS(MAX_REQUESTS, most_tokens(engine), engine->longest), &group->plan,
                    &engine->error);
    TRY(engine_sent(engine, &engine->kept, "workspace"));
    return status;
}

static attn_status bind_layers(struct run_engine *engine)
{
    engine->num_groups = engine->api->model_num_groups(engine->model, ATTN_GROUP_BLOCK_TABLE);
    engine->groups = command_calloc((size_t)engine->num_groups, sizeof *engine->groups);
    for (int32_t i = 0; i < engine->num_layers; i++) {
        struct run_layer *layer = &engine->layers[i];
        layer->handle = engine->api->model_layer(engine->model, i);
        layer->spec.struct_size = sizeof layer->spec;
        layer->group = engine->api->layer_group(layer->handle, ATTN_GROUP_BLOCK_TABLE, 0);
        TRY(client_spec(engine->api, layer->handle, &layer->spec, &engine->error));
        if (engine->groups[layer->group].table == NULL) {
            make_group(engine, &engine->groups[layer->group], layer);
        }
        if (layer->spec.kind != ATTN_KV_SPEC_NONE && layer->spec.kind != ATTN_KV_SPEC_STATE) {
            TRY(make_cache(engine, layer));
        }
        TRY(make_params(engine, layer));
    }
    for (int32_t g = 0; g < engine->num_groups; g++) {
        TRY(make_plan(engine, g));
    }
    return ATTN_OK;
}

attn_status engine_setup(struct run_engine *engine)
{
    TRY(model_config_read(&engine->config, engine->settings->model, &engine->error));
    model_config_warn(&engine->config, "attn-run", engine->settings->model);
    if (engine->settings->layers > 0) {
        model_config_keep(&engine->config, engine->settings->layers);
    }
    if (engine->settings->replay > 0 &&
        model_config_replay(&engine->config, engine->settings->replay) == 0) {
        return command_error(&engine->error, ATTN_ERROR_INVALID_ARGUMENT, "replay",
                             "is %d; the model has no recurrent layer", engine->settings->replay);
    }
    engine->steps = engine->settings->steps;
    engine->num_layers = engine->config.num_layers;
    engine->layers = command_calloc((size_t)engine->num_layers, sizeof *engine->layers);
    for (int32_t i = 0; i < engine->num_layers; i++) {
        engine->layers[i].source = &engine->config.layers[i];
    }
    TRY(requests_read(engine));
    return engine_bind(engine);
}

attn_status engine_bind(struct run_engine *engine)
{
    TRY(open_device(engine));
    TRY(select_layers(engine));
    return bind_layers(engine);
}

void engine_finish(struct run_engine *engine)
{
    device_wait(&engine->device); /* after a failure, for what is still running */
    for (int32_t g = 0; engine->groups != NULL && g < engine->num_groups; g++) {
        engine->api->plan_destroy(engine->groups[g].plan);
        free(engine->groups[g].free_blocks);
        free(engine->groups[g].references);
        free(engine->groups[g].table);
    }
    if (engine->model != NULL) {
        engine->api->model_destroy(engine->model);
    }
    for (int32_t i = 0; engine->layers != NULL && i < engine->num_layers; i++) {
        struct run_layer *layer = &engine->layers[i];
        for (int32_t r = 0; r < MAX_REQUESTS && layer->owner == NULL; r++) {
            const bool has_rows = layer->compressor == NULL,
                       latent = layer->source->desc.kind == ATTN_LAYER_MLA;
            free(has_rows || latent ? layer->k_history[r] : NULL);
            free(has_rows || !latent ? layer->v_history[r] : NULL);
            free(layer->oracle_states[r]);
        }
        free(layer->sinks);
        free(layer->slopes);
        free(layer->weights);
        free(layer->gates);
        free(layer->lists);
    }
    memory_finish(&engine->kept);
    memory_finish(&engine->batches);
    memory_finish(&engine->rows);
    device_stream_destroy(&engine->device, engine->stream);
    device_finish(&engine->device);
    free(engine->groups);
    free(engine->layers);
    model_config_finish(&engine->config);
}
