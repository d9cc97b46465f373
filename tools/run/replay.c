/* SPDX-License-Identifier: Apache-2.0 */
/* --qkv: recorded activations of a real model take the place of drawn ones, and its recorded output
 * is held next to the oracle's. An encoder's sentences are one step; a decoder's requests arrive
 * one after the other and grow. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "tensors_file.h"
#include "support/client.h"

#define MAX_LAYERS 1024
#define MAX_RECORDED_ROWS (1 << 24) /* far more than a recording in memory has */
#define PREEMPTED 0                 /* this request of a decoder's recording is swapped out once */
#define PREEMPT_STEP 3

struct recording {
    struct tensors_file file;
    const int32_t *query_start_loc; /* [R + 1]: rows of each request */
    const int32_t *prompt_lens;     /* [R]; NULL: an encoder */
    int32_t num_reqs;
    int32_t num_layers;
    int64_t q_shape[3], k_shape[3];
};

#define REFUSE(field, ...)                                                                         \
    command_error(&engine->error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)

/* Rows of k and v belong to those of q; all heads are of one size. */
static attn_status check_shapes(struct run_engine *engine, const int64_t q[3], const int64_t k[3])
{
    return q[0] <= MAX_RECORDED_ROWS && k[0] == q[0] && k[2] == q[2]
               ? ATTN_OK
               : REFUSE("layer.0.k",
                        "layer.0.k is [%lld, %lld, %lld] next to q of [%lld, %lld, %lld]; as many "
                        "rows, up to %d, and the same head size are needed",
                        (long long)k[0], (long long)k[1], (long long)k[2], (long long)q[0],
                        (long long)q[1], (long long)q[2], MAX_RECORDED_ROWS);
}

static attn_status read_requests(struct run_engine *engine, struct recording *recording,
                                 bool decoder)
{
    int64_t count, prompts;
    recording->query_start_loc =
        tensors_find(&recording->file, "query_start_loc", "I32", 1, &count, &engine->error);
    if (recording->query_start_loc == NULL) {
        return engine->error.status;
    }
    recording->num_reqs = (int32_t)count - 1;
    if (count < 2 || count > MAX_REQUESTS + 1 || recording->query_start_loc[0] != 0 ||
        recording->query_start_loc[count - 1] != recording->q_shape[0]) {
        return REFUSE("query_start_loc", "is not 0 to T for 1 to 64 requests");
    }
    if (decoder) {
        recording->prompt_lens =
            tensors_find(&recording->file, "prompt_lens", "I32", 1, &prompts, &engine->error);
        if (recording->prompt_lens == NULL) {
            return engine->error.status;
        }
        if (prompts != recording->num_reqs) {
            return REFUSE("prompt_lens", "has not one length a request");
        }
    }
    for (int32_t r = 0; r < recording->num_reqs; r++) {
        int64_t rows = (int64_t)recording->query_start_loc[r + 1] - recording->query_start_loc[r];
        if (rows < 1 || recording->query_start_loc[r + 1] > recording->q_shape[0] ||
            (decoder && (recording->prompt_lens[r] < 1 || recording->prompt_lens[r] >= rows))) {
            return REFUSE(decoder ? "prompt_lens" : "query_start_loc",
                          "a request has no row, or no prompt with a token after it");
        }
    }
    return ATTN_OK;
}

static attn_status open_recording(struct run_engine *engine, struct recording *recording,
                                  bool *decoder)
{
    TRY(tensors_open(&recording->file, engine->settings->qkv, &engine->error));
    const char *kind = tensors_metadata(&recording->file, "kind");
    const char *layers = tensors_metadata(&recording->file, "num_layers");
    recording->num_layers = layers != NULL ? atoi(layers) : 0;
    *decoder = kind != NULL && strcmp(kind, "decoder") == 0;
    if (!*decoder && (kind == NULL || strcmp(kind, "encoder_only") != 0)) {
        return command_error(&engine->error, ATTN_ERROR_UNSUPPORTED, "kind",
                             "is neither encoder_only nor decoder");
    }
    if (recording->num_layers < 1 || recording->num_layers > MAX_LAYERS) {
        return REFUSE("num_layers", "is not 1 to 1024");
    }
    if (tensors_find(&recording->file, "layer.0.q", "F32", 3, recording->q_shape, &engine->error) ==
            NULL ||
        tensors_find(&recording->file, "layer.0.k", "F32", 3, recording->k_shape, &engine->error) ==
            NULL) {
        return engine->error.status;
    }
    TRY(check_shapes(engine, recording->q_shape, recording->k_shape));
    if (!*decoder && recording->q_shape[0] > MAX_ROWS) {
        return REFUSE("layer.0.q", "has %lld rows; an encoder's are one step, of up to %d",
                      (long long)recording->q_shape[0], MAX_ROWS);
    }
    return read_requests(engine, recording, *decoder);
}

/* q and out are shaped as layer 0's q, k and v as its k. */
static attn_status find_rows(struct run_engine *engine, struct run_layer *layer,
                             const struct recording *recording)
{
    static const char *const names[] = {"q", "k", "v", "out"};
    for (int32_t i = 0; i < 4; i++) {
        char name[80];
        int64_t shape[3];
        const int64_t *wanted = i == 0 || i == 3 ? recording->q_shape : recording->k_shape;
        snprintf(name, sizeof name, "%s.%s", layer->source->name, names[i]);
        layer->recorded[i] = tensors_find(&recording->file, name, "F32", 3, shape, &engine->error);
        if (layer->recorded[i] == NULL) {
            return engine->error.status;
        }
        if (memcmp(shape, wanted, sizeof shape) != 0) {
            return REFUSE(name, "has another shape than layer.0's");
        }
    }
    return ATTN_OK;
}

static attn_status describe(struct run_engine *engine, const struct recording *recording,
                            bool decoder)
{
    const char *scale = tensors_metadata(&recording->file, "scale");
    engine->num_layers = engine->config.num_layers = recording->num_layers;
    engine->config.layers =
        command_calloc((size_t)recording->num_layers, sizeof *engine->config.layers);
    engine->layers = command_calloc((size_t)recording->num_layers, sizeof *engine->layers);
    for (int32_t i = 0; i < recording->num_layers; i++) {
        struct model_layer *layer = &engine->config.layers[i];
        snprintf(layer->name, sizeof layer->name, "layer.%d", i);
        layer->desc =
            SIZED(attn_layer_desc, .name = layer->name,
                  .kind = decoder ? ATTN_LAYER_DECODER : ATTN_LAYER_ENCODER,
                  .encoder = decoder ? 0 : ATTN_ENCODER_ONLY, .dtype = ATTN_DTYPE_F32,
                  .num_q_heads = (int32_t)recording->q_shape[1],
                  .num_kv_heads = (int32_t)recording->k_shape[1],
                  .head_size = (int32_t)recording->q_shape[2], .causal = decoder,
                  .scale = scale != NULL ? strtof(scale, NULL)
                                         : (float)(1 / sqrt((double)recording->q_shape[2])),
                  .window_left = -1, .window_right = -1);
        engine->layers[i].source = layer;
        TRY(find_rows(engine, &engine->layers[i], recording));
    }
    return ATTN_OK;
}

static void make_requests(struct run_engine *engine, const struct recording *recording)
{
    engine->num_requests = recording->num_reqs;
    for (int32_t r = 0; r < recording->num_reqs; r++) {
        int32_t first = recording->query_start_loc[r];
        int32_t rows = recording->query_start_loc[r + 1] - first;
        int32_t prompt = recording->prompt_lens != NULL ? recording->prompt_lens[r] : rows;
        engine->requests[r] = (struct request){.arrival = r,
                                               .prompt = prompt,
                                               .output = rows - prompt,
                                               .shares = -1,
                                               .preempt_at = r == PREEMPTED ? PREEMPT_STEP : -1,
                                               .first_row = first};
        engine->longest = rows > engine->longest ? rows : engine->longest;
    }
    engine->steps = 2 * (int32_t)recording->q_shape[0]; /* the last request has left long before */
}

/* Every recorded row has to have been compared: none may be passed over unseen. */
static attn_status check_coverage(struct run_engine *engine, const struct recording *recording)
{
    int64_t elements = recording->q_shape[0] * recording->q_shape[1] * recording->q_shape[2];
    for (int32_t i = 0; i < engine->num_layers && engine->settings->verify; i++) {
        if (engine->layers[i].tally.compared != elements) {
            return command_error(&engine->error, ATTN_ERROR_INTERNAL, "compared",
                                 "not every recorded row was compared");
        }
    }
    return ATTN_OK;
}

attn_status engine_replay(struct run_engine *engine)
{
    struct recording recording = {.num_reqs = 0};
    bool decoder = false;
    engine->random = engine->settings->seed;
    attn_status status = open_recording(engine, &recording, &decoder);
    status = status ? status : describe(engine, &recording, decoder);
    if (status == ATTN_OK) {
        make_requests(engine, &recording);
        status = engine_bind(engine);
    }
    status = status ? status : engine_run(engine);
    status = status ? status : check_coverage(engine, &recording);
    tensors_close(&recording.file);
    return status;
}
