/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent layers: a history of mixed rows and gates, a state slot for each request, and the
 * oracle's own states. */
#include <stdlib.h>

#include "engine.h"
#include "support/oracle.h"
#include "support/number.h"
#include "support/client.h"
#include "support/layer.h"
#include "support/layer_io.h"

static int64_t state_size(const struct attn_recurrent_desc *g)
{
    return (int64_t)g->num_v_heads * g->head_size_v * g->head_size_k;
}

static int64_t window_size(const struct attn_recurrent_desc *g)
{
    return layer_channels(g) * layer_window(g);
}

static size_t state_bytes(const struct attn_recurrent_desc *g)
{
    return (size_t)state_size(g) * number_bytes(g->state_dtype);
}

static size_t ring_bytes(const struct run_layer *layer)
{
    return layer->source->cache.role == ATTN_CACHE_REPLAY
               ? (size_t)layer_ring_view(&layer->source->cache, 1).stride_block
               : 0;
}

static attn_status bind_weights(struct run_engine *engine, struct run_layer *layer)
{
    const struct attn_recurrent_desc *g = &layer->source->gdn;
    const struct attn_recurrent_rule *rule = &layer->source->rule;
    const int32_t hv = g->num_v_heads, gates = layer_gates(&layer->source->desc),
                  count = 2 * hv + gates;
    const int64_t channels = layer_channels(g);
    const size_t bytes[] = {(size_t)(channels * g->conv_width) * element_bytes(layer),
                            (size_t)count * sizeof *layer->gates};
    layer->weights = command_calloc(1, bytes[0]);
    layer->gates = command_calloc(1, bytes[1]);
    for (int64_t i = 0; i < channels * g->conv_width; i++) {
        number_store(layer->weights, i, layer->terms.dtype,
                     0.5 * random_almost_normal(&engine->random));
    }
    /* a_log, skip, dt_bias: states that fade over some to many tokens */
    for (int32_t i = 0; i < count; i++) {
        layer->gates[i] = (float)(random_almost_normal(&engine->random) - (i < hv ? 2 : 0));
    }
    params_send(engine, layer, 0, layer->weights, bytes[0]);
    params_send(engine, layer, 1, layer->gates, bytes[1]);
    const float *sent = layer->device_params[1];
    const bool given = rule->gate == ATTN_GATE_GIVEN, constant = rule->gate == ATTN_GATE_CONSTANT;
    struct shaped conv;
    device_tensor(engine, &conv, layer->device_params[0], layer->terms.dtype, 2,
                  (int64_t[]){channels, g->conv_width});
    struct attn_recurrent_skip skip =
        EXTENSION(attn_recurrent_skip, ATTN_EXT_DRAFT_RECURRENT_SKIP, NULL, .skip = sent + hv);
    struct attn_recurrent_weights weights = EXTENSION(
        attn_recurrent_weights, ATTN_EXT_RECURRENT_WEIGHTS, rule->has_skip ? &skip.ext : NULL,
        .a_log = given ? NULL : sent, .dt_bias = given || constant ? NULL : sent + 2 * (int64_t)hv,
        .conv_weight = &conv.tensor);
    struct attn_layer_params params = SIZED(attn_layer_params, .next = &weights.ext);
    return params_bind(engine, layer, &params);
}

static attn_status bind(struct run_engine *engine, struct run_layer *layer)
{
    const struct attn_recurrent_desc *g = &layer->source->gdn;
    layer->terms = (struct row_terms){
        .dtype = layer->source->desc.dtype,
        .num_q_heads = g->num_v_heads,
        .num_kv_heads = 1,
        .head_size = (int32_t)layer_channels(g), /* the histories' rows: mixed, gates */
        .head_size_v = layer_gates(&layer->source->desc) + g->num_v_heads,
        .num_out_heads = g->num_v_heads,
        .out_size = g->head_size_v};
    size_t states = state_bytes(g), windows = (size_t)window_size(g) * element_bytes(layer);
    const size_t rings = ring_bytes(layer);
    const struct {
        void **memory;
        size_t bytes;
    } parts[] = {{&layer->cache, NUM_STATE_SLOTS * states},
                 {&layer->windows, NUM_STATE_SLOTS * windows},
                 {&layer->ring, NUM_STATE_SLOTS * rings}};
    TRY(engine_take(engine, true, states + windows + rings, "swap space", &layer->swap));
    for (int32_t i = 0; i < 2 + (rings > 0); i++) {
        TRY(engine_take_unwritten(engine, parts[i].bytes, "states", parts[i].memory));
    }
    void *const memory[] = {layer->cache, layer->windows, layer->ring};
    TRY(layer_bind_states(engine->api, layer->handle, g, layer->terms.dtype, &layer->source->cache,
                          NUM_STATE_SLOTS, memory, &engine->error));
    return bind_weights(engine, layer);
}

void gdn_states(struct run_group *group, const struct batch *batch, struct state_batch *states)
{
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        const int32_t r = batch->request[i];
        const int32_t queries = batch->query_start_loc[i + 1] - batch->query_start_loc[i];
        int32_t *in_ring = &group->ring_tokens[r];
        states->slots[i] = group->slot[r];
        *in_ring = batch->seq_lens[i] > queries ? *in_ring : 0;
        states->ring_tokens[i] = *in_ring;
        const bool written =
            queries > 1 || batch->seq_lens[i] == queries || *in_ring >= group->replay - 1;
        *in_ring = written ? 0 : *in_ring + 1;
    }
    states->replay = EXTENSION(attn_batch_replay, ATTN_EXT_DRAFT_BATCH_REPLAY, NULL,
                               .ring_tokens = states->ring_tokens);
    states->ext = EXTENSION(attn_batch_recurrent, ATTN_EXT_BATCH_RECURRENT,
                            group->replay > 0 ? &states->replay.ext : NULL,
                            .state_slots = states->slots, .state_slots_stride = 1);
}

/* Tokens of one request against the recurrence, whose state moves on with them. A row S q may
 * cancel, where k and q are nearly orthogonal: a kernel that multiplies in 16 bits is held to this
 * part of the request's usual outputs, as attn-check's cases are. */
#define CANCELLED 0.25
static void verify(const struct run_step *step, int32_t i, struct tally *tally)
{
    struct run_layer *layer = step->layer;
    const int32_t r = step->batch->request[i], first = step->batch->query_start_loc[i];
    const int32_t count = step->batch->query_start_loc[i + 1] - first;
    const int32_t own = step->batch->seq_lens[i] - count;
    const struct attn_recurrent_desc *g = &layer->source->gdn;
    const struct attn_recurrent_rule *rule = &layer->source->rule;
    const struct run_group *group = &step->engine->groups[layer->group];
    const bool written = group->replay == 0 || group->ring_tokens[r] == 0;
    const struct oracle_recurrent oracle = {
        layer->terms.dtype,
        g->num_k_heads,
        g->num_v_heads,
        g->head_size_k,
        g->head_size_v,
        g->conv_width,
        layer->weights,
        layer->gates,
        layer->gates + 2 * (int64_t)g->num_v_heads,
        .rule = layer_rule_oracle(rule, layer_gates(&layer->source->desc) / g->num_v_heads),
        .skip = rule->has_skip ? layer->gates + g->num_v_heads : NULL,
        .scale = layer->source->desc.scale,
        .values_first = rule->values_first,
        .unit_norm = g->qk_l2norm,
        .ring_dtype = written ? 0 : layer->terms.dtype};
    const int64_t row = (int64_t)g->num_v_heads * g->head_size_v, size = g->head_size_v;
    double *expected = command_calloc((size_t)(count * row), sizeof *expected);
    if (layer->oracle_states[r] == NULL) {
        layer->oracle_states[r] = command_calloc((size_t)state_size(g), sizeof(double));
    }
    for (int32_t c = 0; c < count; c++) {
        oracle_recurrent(&oracle, layer->k_history[r], layer->v_history[r], own + c,
                         layer->oracle_states[r], expected + c * row);
    }
    for (int64_t e = 0; e < count * row; e++) {
        layer->out_squares[r] += expected[e] * expected[e];
    }
    layer->num_outs[r] += count * row;
    const double least = CANCELLED * sqrt(layer->out_squares[r] / (double)layer->num_outs[r]);
    for (int64_t at = 0; at < count * row; at += size) {
        compare_row(layer, expected + at, least, step->rows[STEP_OUT], first * row + at,
                    g->head_size_v, NULL, tally);
    }
    for (int64_t e = 0; e < state_size(g) && written; e++) { /* as the step leaves it in its slot */
        layer->oracle_states[r][e] = number_round(layer->oracle_states[r][e], g->state_dtype);
    }
    free(expected);
}

const struct run_kind run_recurrent_kind = {.bind = bind, .verify = verify, .is_run = true};

/* Its memory is the engine's own: out to the swap space, the slot poisoned, and in to another slot.
 */
attn_status gdn_swap(struct run_engine *engine, int32_t g, int32_t r, bool out)
{
    const struct device *device = &engine->device;
    struct run_group *group = &engine->groups[g];
    group->slot[r] = out ? group->slot[r] : NUM_STATE_SLOTS - 1 - group->slot[r];
    for (int32_t other = 0; other < engine->num_requests && !out; other++) {
        if (other != r && group->slot[other] == group->slot[r]) { /* taken: back to where it was */
            group->slot[r] = NUM_STATE_SLOTS - 1 - group->slot[r];
            break;
        }
    }
    for (int32_t i = 0; i < engine->num_layers; i++) {
        struct run_layer *layer = &engine->layers[i];
        const struct attn_recurrent_desc *desc = &layer->source->gdn;
        if (layer->group != g) {
            continue;
        }
        size_t state = state_bytes(desc);
        size_t window = (size_t)window_size(desc) * element_bytes(layer);
        uint8_t *parts[] = {(uint8_t *)layer->cache + (size_t)group->slot[r] * state,
                            (uint8_t *)layer->windows + (size_t)group->slot[r] * window,
                            (uint8_t *)layer->ring + (size_t)group->slot[r] * ring_bytes(layer)};
        uint8_t *saved[] = {layer->swap, (uint8_t *)layer->swap + state,
                            (uint8_t *)layer->swap + state + window};
        size_t sizes[] = {state, window, ring_bytes(layer)};
        for (int32_t p = 0; p < 2 + (sizes[2] > 0); p++) {
            TRY(out ? device_copy_out(device, saved[p], parts[p], sizes[p], &engine->error)
                    : device_copy_in(device, parts[p], saved[p], sizes[p], &engine->error));
            if (out) {
                TRY(device_set(device, parts[p], 0xff, sizes[p], &engine->error));
            }
        }
    }
    return ATTN_OK;
}
