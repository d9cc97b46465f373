/* SPDX-License-Identifier: Apache-2.0 */
/* --qkv: recorded activations of a real model, replayed through the selected backend and held against the recorded
 * output and the oracle. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "tensors_file.h"

#define MAX_LAYERS 1024
#define RECORDED_BOUND 2e-5 /* of the row's RMS: the recording is a float32 computation itself */

struct recording {
    struct tensors_file file;
    const int32_t *query_start_loc;
    int32_t num_reqs;
    int32_t num_layers;
    int64_t shape[3]; /* T, heads, head size */
};

static attn_status open_recording(struct engine *engine, struct recording *recording)
{
    int64_t count;
    attn_status status = tensors_open(&recording->file, engine->settings->qkv, &engine->error);
    if (status != ATTN_OK) {
        return status;
    }
    const char *kind = tensors_metadata(&recording->file, "kind");
    const char *layers = tensors_metadata(&recording->file, "num_layers");
    recording->num_layers = layers != NULL ? atoi(layers) : 0;
    if (kind == NULL || strcmp(kind, "encoder_only") != 0) {
        return engine_fail(engine, ATTN_ERROR_UNSUPPORTED, "kind", "only encoder_only recordings are replayed");
    }
    if (recording->num_layers < 1 || recording->num_layers > MAX_LAYERS) {
        return engine_fail(engine, ATTN_ERROR_INVALID_ARGUMENT, "num_layers", "is not 1 to 1024");
    }
    recording->query_start_loc =
        tensors_find(&recording->file, "query_start_loc", "I32", 1, &count, &engine->error);
    if (recording->query_start_loc == NULL ||
        tensors_find(&recording->file, "layer.0.q", "F32", 3, recording->shape, &engine->error) == NULL) {
        return engine->error.status;
    }
    recording->num_reqs = (int32_t)count - 1;
    if (count < 2 || recording->query_start_loc[count - 1] != recording->shape[0]) {
        return engine_fail(engine, ATTN_ERROR_INVALID_ARGUMENT, "query_start_loc", "does not end at T");
    }
    return ATTN_OK;
}

static attn_status describe(struct engine *engine, const struct recording *recording)
{
    const char *scale = tensors_metadata(&recording->file, "scale");
    engine->num_layers = engine->config.num_layers = recording->num_layers;
    engine->config.layers = calloc((size_t)recording->num_layers, sizeof *engine->config.layers);
    engine->layers = calloc((size_t)recording->num_layers + 1, sizeof *engine->layers);
    if (engine->config.layers == NULL || engine->layers == NULL) {
        return engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "layers", "no memory");
    }
    for (int32_t i = 0; i < recording->num_layers; i++) {
        struct model_layer *layer = &engine->config.layers[i];
        snprintf(layer->name, sizeof layer->name, "layer.%d", i);
        layer->desc = (struct attn_layer_desc){
            .struct_size = sizeof layer->desc,
            .name = layer->name,
            .kind = ATTN_LAYER_ENCODER_ONLY,
            .dtype = ATTN_DTYPE_F32,
            .num_q_heads = (int32_t)recording->shape[1],
            .num_kv_heads = (int32_t)recording->shape[1],
            .head_size = (int32_t)recording->shape[2],
            .scale = scale != NULL ? strtof(scale, NULL) : (float)(1 / sqrt((double)recording->shape[2])),
            .window_left = -1,
            .window_right = -1};
        engine->layers[i].source = layer;
    }
    engine->longest = (int32_t)recording->shape[0];
    return ATTN_OK;
}

static void hold(struct run_layer *layer, const struct recording *recording, const float *const tensors[4],
                 const float *out)
{
    const struct oracle_terms *t = &layer->terms;
    int64_t row = (int64_t)t->num_q_heads * t->head_size;
    double expected[1024];
    for (int32_t r = 0; r < recording->num_reqs; r++) {
        int64_t first = recording->query_start_loc[r], end = recording->query_start_loc[r + 1];
        for (int64_t i = 0; i < (end - first) * t->num_q_heads; i++) {
            int64_t token = first + i / t->num_q_heads, head = i % t->num_q_heads;
            double sum = 0;
            oracle_attend(t, tensors[0] + token * row, tensors[1] + first * row, tensors[2] + first * row,
                          end - first, token - first, (int32_t)head, expected);
            for (int32_t d = 0; d < t->head_size; d++) {
                sum += expected[d] * expected[d];
            }
            double rms = sqrt(sum / t->head_size);
            for (int32_t d = 0; d < t->head_size; d++) {
                int64_t at = token * row + head * t->head_size + d;
                double against_oracle = bound_ratio(ORACLE_F32, rms, expected[d], out[at]);
                double against_recording = fabs(out[at] - (double)tensors[3][at]) /
                                           (RECORDED_BOUND * rms + 1e-5 * fabs((double)tensors[3][at]));
                double worse = against_oracle > against_recording ? against_oracle : against_recording;
                layer->max_error = worse > layer->max_error || isnan(worse) ? worse : layer->max_error;
                layer->compared++;
            }
        }
    }
}

static attn_status replay_layer(struct engine *engine, struct run_layer *layer, const struct recording *recording)
{
    static const char *const names[] = {"q", "k", "v", "out"};
    const float *tensors[4];
    struct attn_tensor rows[4];
    int64_t shapes[4][3];
    for (int32_t i = 0; i < 4; i++) {
        char name[80];
        snprintf(name, sizeof name, "%s.%s", layer->source->name, names[i]);
        tensors[i] = tensors_find(&recording->file, name, "F32", 3, shapes[i], &engine->error);
        if (tensors[i] == NULL || memcmp(shapes[i], recording->shape, sizeof shapes[i]) != 0) {
            return tensors[i] == NULL ? engine->error.status
                                      : engine_fail(engine, ATTN_ERROR_INVALID_ARGUMENT, name,
                                                    "has another shape than layer.0.q");
        }
        rows[i] = (struct attn_tensor){(void *)(uintptr_t)tensors[i], {ATTN_DEVICE_CPU, 0}, 3,
                                       {ATTN_CODE_FLOAT, 32, 1}, shapes[i], NULL, 0};
    }
    size_t elements = (size_t)(shapes[3][0] * shapes[3][1] * shapes[3][2]);
    float *out = malloc(elements * sizeof *out);
    if (out == NULL) {
        return engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "out", "no memory");
    }
    memset(out, 0xff, elements * sizeof *out);
    rows[3].data = out;
    const struct attn_step_io io = {
        .struct_size = sizeof io, .q = &rows[0], .k = &rows[1], .v = &rows[2], .out = &rows[3]};
    attn_status status =
        engine->api->run(engine->groups[layer->group].plan, layer->handle, &io, &engine->error);
    if (status == ATTN_OK && engine->settings->verify) {
        hold(layer, recording, tensors, out);
    }
    free(out);
    return status;
}

attn_status engine_replay(struct engine *engine)
{
    struct recording recording = {.num_reqs = 0};
    attn_status status = open_recording(engine, &recording);
    status = status ? status : describe(engine, &recording);
    status = status ? status : engine_bind(engine);
    const struct attn_batch batch = {.struct_size = sizeof batch,
                                     .num_reqs = recording.num_reqs,
                                     .num_tokens = (int32_t)recording.shape[0],
                                     .num_actual_tokens = (int32_t)recording.shape[0],
                                     .causal = -1,
                                     .query_start_loc = recording.query_start_loc,
                                     .query_start_loc_host = recording.query_start_loc};
    for (int32_t g = 0; g < engine->num_groups && status == ATTN_OK; g++) {
        status = engine->api->plan(engine->groups[g].plan, &batch, NULL, &engine->error);
    }
    for (int32_t i = 0; i < engine->num_layers && status == ATTN_OK; i++) {
        status = replay_layer(engine, &engine->layers[i], &recording);
    }
    engine->tokens = recording.shape[0];
    tensors_close(&recording.file);
    return status;
}
