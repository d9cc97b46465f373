/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent layers: a history of mixed rows and gates, a state slot for each request, and the
 * oracle's own states. */
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "support/oracle.h"
#include "support/number.h"
#include "support/client.h"
#include "support/layer.h"

static int64_t state_size(const struct attn_recurrent_desc *g)
{
    return (int64_t)g->num_v_heads * g->head_size_v * g->head_size_k;
}

static int64_t window_size(const struct attn_recurrent_desc *g)
{
    return layer_channels(g) * (g->conv_width - 1);
}

static size_t state_bytes(const struct attn_recurrent_desc *g)
{
    return (size_t)state_size(g) * number_bytes(g->state_dtype);
}

/* Elements of a of one token; b's num_v_heads follow them. */
static int32_t num_gates(const struct model_layer *source)
{
    const struct attn_recurrent_desc *g = &source->gdn;
    return g->num_v_heads * (source->rule.gate_per_channel ? g->head_size_k : 1);
}

static attn_status bind_weights(struct run_engine *engine, struct run_layer *layer)
{
    const struct attn_recurrent_desc *g = &layer->source->gdn;
    const struct attn_recurrent_rule *rule = &layer->source->rule;
    const int32_t hv = g->num_v_heads, gates = num_gates(layer->source), count = 2 * hv + gates;
    int64_t channels = layer_channels(g), shape[] = {channels, g->conv_width};
    layer->weights = malloc((size_t)(channels * g->conv_width) * element_bytes(layer));
    layer->gates = malloc((size_t)count * sizeof *layer->gates);
    if (layer->weights == NULL || layer->gates == NULL) {
        return engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "weights",
                           "no memory for the convolution's");
    }
    const size_t bytes[] = {(size_t)(channels * g->conv_width) * element_bytes(layer),
                            (size_t)count * sizeof *layer->gates};
    for (int64_t i = 0; i < channels * g->conv_width; i++) {
        number_store(layer->weights, i, layer->terms.dtype,
                     0.5 * random_almost_normal(&engine->random));
    }
    /* a_log, skip, dt_bias: states that fade over some to many tokens */
    for (int32_t i = 0; i < count; i++) {
        layer->gates[i] = (float)(random_almost_normal(&engine->random) - (i < hv ? 2 : 0));
    }
    const void *sources[] = {layer->weights, layer->gates};
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < 2 && status == ATTN_OK; i++) {
        status = params_send(engine, layer, i, sources[i], bytes[i]);
    }
    if (status != ATTN_OK) {
        return status;
    }
    const float *sent = layer->device_params[1];
    const bool given = rule->gate == ATTN_GATE_GIVEN, constant = rule->gate == ATTN_GATE_CONSTANT;
    struct attn_tensor conv = tensor_of(engine, layer, layer->device_params[0], 2, shape, NULL);
    struct attn_recurrent_skip skip = {.ext = {ATTN_EXT_DRAFT_RECURRENT_SKIP, 0, sizeof skip, NULL},
                                       .skip = sent + hv};
    struct attn_recurrent_weights weights = {
        .ext = {ATTN_EXT_RECURRENT_WEIGHTS, 0, sizeof weights, rule->has_skip ? &skip.ext : NULL},
        .a_log = given ? NULL : sent,
        .dt_bias = given || constant ? NULL : sent + 2 * (int64_t)hv,
        .conv_weight = &conv};
    struct attn_layer_params params = {.struct_size = sizeof params, .next = &weights.ext};
    return engine->api->layer_bind_params(layer->handle, &params, &engine->error);
}

attn_status gdn_bind(struct run_engine *engine, struct run_layer *layer)
{
    const struct attn_recurrent_desc *g = &layer->source->gdn;
    layer->terms = (struct row_terms){
        .dtype = layer->source->desc.dtype,
        .num_q_heads = g->num_v_heads,
        .num_kv_heads = 1,
        .head_size = (int32_t)layer_channels(g), /* the histories' rows: mixed, gates */
        .head_size_v = num_gates(layer->source) + g->num_v_heads,
        .causal = 1};
    size_t states = state_bytes(g), windows = (size_t)window_size(g) * element_bytes(layer);
    const struct {
        void **memory;
        size_t bytes;
    } parts[] = {{&layer->cache, NUM_STATE_SLOTS * states},
                 {&layer->windows, NUM_STATE_SLOTS * windows}};
    attn_status status = engine_take(engine, true, states + windows, "swap space", &layer->swap);
    for (int32_t i = 0; i < 2 && status == ATTN_OK; i++) { /* NaN until a request writes */
        status = engine_take(engine, false, parts[i].bytes, "states", parts[i].memory);
        status = status == ATTN_OK ? device_set(&engine->device, *parts[i].memory, 0xff,
                                                parts[i].bytes, &engine->error)
                                   : status;
    }
    if (status != ATTN_OK) {
        return status;
    }
    struct attn_kv_view state, window;
    layer_state_views(g, NUM_STATE_SLOTS, number_bytes(g->state_dtype), element_bytes(layer),
                      &state, &window);
    state.data = layer->cache;
    window.data = layer->windows;
    status = client_bind(engine->api, layer->handle, &state, window.head_size > 0 ? &window : NULL,
                         &engine->error);
    return status == ATTN_OK ? bind_weights(engine, layer) : status;
}

void gdn_states(const struct run_group *group, const struct batch *batch, int32_t *slots,
                struct attn_batch_recurrent *states)
{
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        slots[i] = group->slot[batch->request[i]];
    }
    *states =
        (struct attn_batch_recurrent){.ext = {ATTN_EXT_BATCH_RECURRENT, 0, sizeof *states, NULL},
                                      .state_slots = slots,
                                      .state_slots_stride = 1};
}

/* Tokens of one request against the recurrence, whose state moves on with them. */
static attn_status verify_request(struct run_engine *engine, struct run_layer *layer, int32_t r,
                                  int32_t own, int32_t first, int32_t count, const uint8_t *out)
{
    const struct attn_recurrent_desc *g = &layer->source->gdn;
    const struct attn_recurrent_rule *rule = &layer->source->rule;
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
        .rule = {.additive = rule->rule == ATTN_RULE_ADDITIVE,
                 .gate = rule->gate,
                 .write_gate = rule->write_gate,
                 .num_gates = num_gates(layer->source) / g->num_v_heads,
                 .gate_bound = rule->gate_bound,
                 .dt_min = rule->dt_min,
                 .dt_max = rule->dt_max},
        .skip = rule->has_skip ? layer->gates + g->num_v_heads : NULL,
        .scale = layer->source->desc.scale,
        .values_first = rule->values_first,
        .unit_norm = g->qk_l2norm};
    int32_t row = g->num_v_heads * g->head_size_v;
    double *expected = calloc((size_t)row, sizeof *expected);
    if (layer->oracle_states[r] == NULL) {
        layer->oracle_states[r] = calloc((size_t)state_size(g), sizeof(double));
    }
    if (expected == NULL || layer->oracle_states[r] == NULL) {
        free(expected);
        return engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "verify",
                           "no memory for the oracle's state");
    }
    for (int32_t c = 0; c < count; c++) {
        oracle_recurrent(&oracle, layer->k_history[r], layer->v_history[r], own + c,
                         layer->oracle_states[r], expected);
        for (int32_t h = 0; h < g->num_v_heads; h++) {
            int64_t at = ((int64_t)(first + c) * g->num_v_heads + h) * g->head_size_v;
            compare_row(layer, expected + (int64_t)h * g->head_size_v, out, at, g->head_size_v,
                        NULL, &layer->tally);
        }
    }
    for (int64_t i = 0; i < state_size(g); i++) { /* as the step leaves it in its slot */
        layer->oracle_states[r][i] = number_round(layer->oracle_states[r][i], g->state_dtype);
    }
    free(expected);
    return ATTN_OK;
}

static attn_status run_rows(struct run_engine *engine, struct run_layer *layer,
                            const struct batch *batch, uint8_t *mixed, uint8_t *gates, uint8_t *out)
{
    const struct attn_recurrent_desc *g = &layer->source->gdn;
    const struct attn_recurrent_rule *rule = &layer->source->rule;
    int64_t tokens = batch->query_start_loc[batch->num_reqs], hv = g->num_v_heads;
    int64_t gates_of = num_gates(layer->source), b_shape[] = {tokens, hv};
    int64_t mixed_shape[] = {tokens, layer_channels(g)}, gate_shape[] = {tokens, gates_of},
            gate_strides[] = {gates_of + hv, 1};
    int64_t out_shape[] = {tokens, hv, g->head_size_v};
    const size_t e = element_bytes(layer), bytes[] = {(size_t)(tokens * mixed_shape[1]) * e,
                                                      (size_t)(tokens * (gates_of + hv)) * e,
                                                      (size_t)(tokens * hv * g->head_size_v) * e};
    uint8_t *sources[] = {mixed, gates, out}, *sent[3];
    for (int32_t i = 0; i < 3; i++) {
        sent[i] = pool_send(engine, &engine->rows, sources[i], bytes[i]);
        if (sent[i] == NULL) {
            return engine->error.status;
        }
    }
    struct attn_tensor rows = tensor_of(engine, layer, sent[0], 2, mixed_shape, NULL);
    struct attn_tensor a = tensor_of(engine, layer, sent[1], 2, gate_shape, gate_strides);
    struct attn_tensor b =
        tensor_of(engine, layer, sent[1] + (size_t)gates_of * e, 2, b_shape, gate_strides);
    struct attn_tensor outs = tensor_of(engine, layer, sent[2], 3, out_shape, NULL);
    struct attn_io_recurrent gdn = {.ext = {ATTN_EXT_IO_RECURRENT, 0, sizeof gdn, NULL},
                                    .mixed_qkv = &rows,
                                    .a = rule->gate != ATTN_GATE_CONSTANT ? &a : NULL,
                                    .b = rule->write_gate == ATTN_WRITE_GATE_SIGMOID ? &b : NULL};
    struct attn_step_io io = {
        .struct_size = sizeof io, .next = &gdn.ext, .stream = engine->stream, .out = &outs};
    attn_status status =
        engine->api->run(engine->groups[layer->group].plan, layer->handle, &io, &engine->error);
    return status == ATTN_OK
               ? device_copy_out(&engine->device, out, sent[2], bytes[2], &engine->error)
               : status;
}

attn_status gdn_run(struct run_engine *engine, struct run_layer *layer, const struct batch *batch)
{
    const struct attn_recurrent_desc *g = &layer->source->gdn;
    size_t tokens = (size_t)batch->query_start_loc[batch->num_reqs], e = element_bytes(layer);
    size_t mixed_row = (size_t)layer_channels(g) * e,
           gate_row = (size_t)layer->terms.head_size_v * e;
    size_t out_row = (size_t)g->num_v_heads * (size_t)g->head_size_v * e;
    uint8_t *mixed = malloc(tokens * mixed_row), *gates = malloc(tokens * gate_row),
            *out = malloc(tokens * out_row);
    attn_status status = ATTN_OK;
    if (mixed == NULL || gates == NULL || out == NULL) {
        status = engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "rows", "no memory; try --scale");
    }
    for (int32_t i = 0; i < batch->num_reqs && status == ATTN_OK; i++) {
        int32_t r = batch->request[i], first = batch->query_start_loc[i];
        int32_t count = batch->query_start_loc[i + 1] - first, own = batch->seq_lens[i] - count;
        /* what was admitted is drawn already */
        if (own >= engine->requests[r].drawn) {
            status = add_keys(engine, layer, r, own, own + count, 0);
        }
        memcpy(mixed + (size_t)first * mixed_row, layer->k_history[r] + (size_t)own * mixed_row,
               (size_t)count * mixed_row);
        memcpy(gates + (size_t)first * gate_row, layer->v_history[r] + (size_t)own * gate_row,
               (size_t)count * gate_row);
    }
    if (status == ATTN_OK) {
        memset(out, 0xff, tokens * out_row);
        status = run_rows(engine, layer, batch, mixed, gates, out);
    }
    for (int32_t i = 0; i < batch->num_reqs && status == ATTN_OK && engine->settings->verify; i++) {
        int32_t first = batch->query_start_loc[i], count = batch->query_start_loc[i + 1] - first;
        status = verify_request(engine, layer, batch->request[i], batch->seq_lens[i] - count, first,
                                count, out);
    }
    pool_reset(engine, &engine->rows);
    free(mixed);
    free(gates);
    free(out);
    return status;
}

/* Its memory is the engine's own: out to the swap space, the slot poisoned, and in to another slot.
 */
attn_status gdn_swap(struct run_engine *engine, int32_t g, int32_t r, bool out)
{
    const struct device *device = &engine->device;
    struct run_group *group = &engine->groups[g];
    attn_status status = ATTN_OK;
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
                            (uint8_t *)layer->windows + (size_t)group->slot[r] * window};
        uint8_t *saved[] = {layer->swap, (uint8_t *)layer->swap + state};
        size_t sizes[] = {state, window};
        for (int32_t p = 0; p < 2 && status == ATTN_OK; p++) {
            status = out ? device_copy_out(device, saved[p], parts[p], sizes[p], &engine->error)
                         : device_copy_in(device, parts[p], saved[p], sizes[p], &engine->error);
            if (out && status == ATTN_OK) {
                status = device_set(device, parts[p], 0xff, sizes[p], &engine->error);
            }
        }
    }
    return status;
}
