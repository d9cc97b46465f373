/* SPDX-License-Identifier: Apache-2.0 */
/* What a layer is given before it runs: parameters, and a cache that the backend's own write fills.
 */
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "support/client.h"
#include "support/kv_format.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/random.h"
#include "support/tensor.h"
#include "measured.h"

#define FILL_TOKENS 2048 /* written at a time */
#define INT8_RANGE 127.0f

/* Parameters that all layers share. */
struct parameters {
    struct attn_layer_params params;
    struct attn_kv_quant_params quant;
    struct attn_mla_weights mla;
    struct attn_recurrent_weights gdn;
    struct shaped weight; /* kv_b_proj or the convolution's, in the activations' dtype */
};

static const float *upload_floats(struct measured *measured, int64_t count, float first,
                                  float factor)
{
    float *host = command_calloc((size_t)count, sizeof *host);
    for (int64_t i = 0; i < count; i++) {
        host[i] = first;
        first *= factor;
    }
    const float *floats = memory_upload(&measured->memory, host, (size_t)count * sizeof *host);
    free(host);
    return floats;
}

static void quant_parameters(struct measured *measured, struct parameters *p)
{
    const struct attn_layer_desc *desc = &measured->layer.desc;
    int64_t dv = desc->head_size_v > 0 ? desc->head_size_v : desc->head_size;
    const int32_t kv = measured->choice.kv_dtype;
    if (kv == ATTN_KV_INT4_PER_TOKEN_HEAD) {
        p->quant.hadamard_signs_k = upload_floats(measured, desc->head_size, 1, -1);
        p->quant.hadamard_signs_v = upload_floats(measured, dv, 1, -1);
    } else if (kv == ATTN_KV_INT8_KV) {
        p->quant.v_channel_scale =
            upload_floats(measured, desc->num_kv_heads * dv, 4 / INT8_RANGE, 1);
    } else {
        return;
    }
    p->quant.ext = (struct attn_ext){ATTN_EXT_KV_QUANT_PARAMS, 0, sizeof p->quant, p->params.next};
    p->params.next = &p->quant.ext;
}

static const struct attn_tensor *weight_of(struct measured *measured, struct parameters *p,
                                           int64_t rows, int64_t columns, double deviation)
{
    const int32_t dtype = measured->layer.desc.dtype;
    void *data =
        memory_normal(&measured->memory, dtype, rows * columns, deviation, &measured->random);
    struct attn_tensor *tensor =
        shaped_set(&p->weight, data, dtype, 2, (int64_t[]){rows, columns}, NULL);
    tensor->device = measured->session->device.device;
    return tensor;
}

static void mla_parameters(struct measured *measured, struct parameters *p)
{
    const struct attn_mla_desc *mla = &measured->layer.mla;
    int64_t rows =
        (int64_t)measured->layer.desc.num_q_heads * (mla->qk_nope_head_dim + mla->v_head_dim);
    p->mla = EXTENSION(attn_mla_weights, ATTN_EXT_MLA_WEIGHTS, NULL,
                       .kv_b_proj = weight_of(measured, p, rows, mla->kv_lora_rank, 0.05));
    p->params.next = &p->mla.ext;
}

static void gdn_parameters(struct measured *measured, struct parameters *p)
{
    const struct attn_recurrent_desc *gdn = &measured->layer.gdn;
    p->gdn = EXTENSION(attn_recurrent_weights, ATTN_EXT_RECURRENT_WEIGHTS, NULL,
                       .a_log = upload_floats(measured, gdn->num_v_heads, -1, 1));
    if (measured->layer.rule.gate != ATTN_GATE_CONSTANT) {
        p->gdn.dt_bias = upload_floats(measured, layer_gates(&measured->layer.desc), 0.5f, 1);
    }
    if (gdn->conv_width > 0) {
        p->gdn.conv_weight = weight_of(measured, p, layer_channels(gdn), gdn->conv_width, 0.5);
    }
    p->params.next = &p->gdn.ext;
}

static void make_parameters(struct measured *measured, struct parameters *p)
{
    const struct attn_layer_desc *desc = &measured->layer.desc;
    p->params.struct_size = sizeof p->params;
    if (desc->has_sinks) {
        p->params.sinks = upload_floats(measured, desc->num_q_heads, 1, 1);
    }
    if (desc->alibi != ATTN_ALIBI_NONE) {
        p->params.alibi_slopes = upload_floats(measured, desc->num_q_heads, 0.5f, 0.84f);
    }
    if (desc->kind == ATTN_LAYER_RECURRENT) {
        gdn_parameters(measured, p);
    } else if (measured->layer.mla.kv_lora_rank > 0) {
        mla_parameters(measured, p);
    }
    quant_parameters(measured, p);
}

/* Views in a named layout over memory of the spec's size: rows without scales only. */
static bool explicit_views(const struct measured *measured, void *base, struct attn_kv_view *k,
                           struct attn_kv_view *v)
{
    const struct attn_cache_spec *spec = &measured->spec;
    const struct attn_layer_desc *desc = &measured->layer.desc;
    const int32_t layout = shape_int(&measured->shape, PARAMETER_LAYOUT);
    const int32_t size_v = desc->head_size_v > 0 ? desc->head_size_v : desc->head_size;
    const int64_t dims = spec->head_size + size_v;
    const int64_t element = spec->page_bytes / (spec->block_size * spec->num_heads * dims);
    const struct kv_rows rows = {measured->num_blocks,
                                 spec->block_size,
                                 spec->num_heads,
                                 {spec->head_size, size_v},
                                 {spec->head_size * element, size_v * element}};
    *k = kv_view(layout, false, &rows, base);
    *v = kv_view(layout, true, &rows, base);
    return spec->kv_dtype >= ATTN_KV_F16 && spec->kv_dtype <= ATTN_KV_FP8_E5M2;
}

static attn_status bind_cache(struct measured *measured, attn_layer *layer, struct measured_io *io,
                              struct attn_error *error)
{
    const struct attn_api *api = measured->session->api;
    struct attn_kv_view *k = &io->k_view, *v = &io->v_view;
    size_t bytes = (size_t)measured->num_blocks * (size_t)measured->spec.padded_page_bytes;
    bool latent = measured->layer.mla.kv_lora_rank > 0 || measured->layer.indexer.topk > 0;
    void *base = memory_take(&measured->memory, bytes);
    if (base == NULL) {
        return memory_refused(error);
    }
    k->struct_size = sizeof *k;
    v->struct_size = sizeof *v;
    if (measured->layer.cache.tokens_per_row > 0) {
        const struct attn_cache_memory memory =
            SIZED(attn_cache_memory, .base = base, .num_blocks = measured->num_blocks,
                  .further = &base, .further_num_blocks = &measured->num_blocks, .num_further = 1);
        return api->layer_bind_memory(layer, &memory, error);
    }
    if (latent || shape_int(&measured->shape, PARAMETER_LAYOUT) < 0) {
        return client_views(api, layer, base, measured->num_blocks, k, latent ? NULL : v, error);
    }
    if (!explicit_views(measured, base, k, v)) {
        return command_error(error, ATTN_ERROR_INVALID_ARGUMENT, "layout",
                             "a cache with scales is laid out as its backend asks: layout=own");
    }
    return client_bind(api, layer, k, v, error);
}

static attn_status bind_state(struct measured *measured, attn_layer *layer,
                              struct attn_error *error)
{
    const struct attn_recurrent_desc *gdn = &measured->layer.gdn;
    const struct attn_cache_desc *ring = &measured->layer.cache;
    const int32_t dtype = measured->layer.desc.dtype;
    const int32_t slots = measured->requests.count * measured_states(measured);
    const int64_t ring_bytes = layer_ring_view(ring, slots).stride_block; /* 0: no ring */
    const struct {
        int32_t dtype;
        int64_t elements;
        double deviation;
    } parts[] = {
        {gdn->state_dtype, (int64_t)gdn->num_v_heads * gdn->head_size_v * gdn->head_size_k, 0.1},
        {dtype, layer_channels(gdn) * layer_window(gdn), 1},
        {dtype, ring_bytes / (int64_t)number_bytes(dtype), 0.1}};
    void *parts_memory[3] = {NULL};
    for (int32_t i = 0; i < 3; i++) {
        if (parts[i].elements > 0) {
            parts_memory[i] =
                memory_normal(&measured->memory, parts[i].dtype, slots * parts[i].elements,
                              parts[i].deviation, &measured->random);
        }
    }
    return measured->memory.failed ? memory_refused(error)
                                   : layer_bind_states(measured->session->api, layer, gdn, dtype,
                                                       ring, slots, parts_memory, error);
}

/* Each request's blocks, in order or shuffled over the whole cache. */
static bool make_table(struct measured *measured)
{
    const struct requests *requests = &measured->requests;
    int64_t size = measured_block(measured), next = 0;
    measured->table_stride = (requests->max_seq_len + size - 1) / size;
    measured->num_blocks = 0;
    for (int32_t r = 0; r < requests->count; r++) {
        measured->num_blocks += (requests->seq_lens[r] + size - 1) / size;
    }
    size_t entries = (size_t)(requests->count * measured->table_stride);
    int32_t *order = malloc((size_t)measured->num_blocks * sizeof *order);
    measured->table = calloc(entries, sizeof *measured->table);
    if (order == NULL || measured->table == NULL) {
        free(order);
        return false;
    }
    for (int32_t i = 0; i < (int32_t)measured->num_blocks; i++) {
        order[i] = i;
    }
    if (measured->shape.value[PARAMETER_SHUFFLE] != 0) {
        random_order(&measured->random, order, (int32_t)measured->num_blocks, 0);
    }
    for (int32_t r = 0; r < requests->count; r++) {
        int64_t blocks = (requests->seq_lens[r] + size - 1) / size;
        memcpy(measured->table + r * measured->table_stride, order + next,
               (size_t)blocks * sizeof *order);
        next += blocks;
    }
    free(order);
    return true;
}

/* One step of `tokens` new rows from slot `first` on, of all layers, with nothing attended. */
struct fill {
    struct memory memory;
    struct layer_io io;
    struct attn_batch batch;
    int32_t starts[2], length;
    int64_t tokens;
    attn_plan *plan;
};

static void fill_batch(struct measured *measured, struct fill *fill)
{
    int64_t size = measured_block(measured);
    int64_t slots = measured->num_blocks * size, blocks = (fill->tokens + size - 1) / size;
    int64_t *all = malloc((size_t)slots * sizeof *all);
    int32_t *table = malloc((size_t)blocks * sizeof *table);
    for (int64_t i = 0; all != NULL && i < slots; i++) {
        all[i] = i;
    }
    for (int64_t i = 0; table != NULL && i < blocks; i++) {
        table[i] = (int32_t)i;
    }
    fill->starts[1] = fill->length = (int32_t)fill->tokens;
    fill->batch = client_batch(1, fill->starts, &fill->length);
    fill->batch.max_query_len = fill->batch.max_seq_len = fill->length;
    fill->batch.query_start_loc = memory_upload(&fill->memory, fill->starts, sizeof fill->starts);
    fill->batch.seq_lens = memory_upload(&fill->memory, &fill->length, sizeof fill->length);
    const int32_t *sent = memory_upload(&fill->memory, table, (size_t)blocks * sizeof *table);
    client_blocks(&fill->batch, sent, blocks,
                  memory_upload(&fill->memory, all, (size_t)slots * sizeof *all));
    measured_rows_table(measured, &fill->batch);
    free(all);
    free(table);
}

attn_status measured_plan(struct measured *measured, struct memory *memory,
                          const struct attn_batch *batch, attn_plan **plan,
                          struct attn_error *error)
{
    const struct attn_api *api = measured->session->api;
    const struct attn_limits limits = client_limits(batch->num_reqs, batch->num_tokens,
                                                    batch->max_query_len, batch->max_seq_len, 0);
    const struct attn_plan_options options = SIZED(attn_plan_options, .limits = &limits);
    TRY(memory_plan(memory, api, measured->model, 0, &options, plan, error));
    return api->plan_batch(*plan, batch, measured->session->stream, error);
}

/* Chunk after chunk of the same rows into all slots of all layers. */
static attn_status fill_slots(struct measured *measured, struct fill *fill,
                              struct attn_error *error)
{
    const struct attn_api *api = measured->session->api;
    int64_t slots = measured->num_blocks * measured_block(measured);
    const int64_t *first = fill->batch.slot_mapping;
    attn_status status = ATTN_OK;
    for (int64_t at = 0; at < slots && status == ATTN_OK; at += fill->tokens) {
        /* The last chunk ends with the cache and writes some slots again. */
        fill->batch.slot_mapping = first + (at + fill->tokens <= slots ? at : slots - fill->tokens);
        status = api->plan_batch(fill->plan, &fill->batch, measured->session->stream, error);
        for (int32_t i = 0; i < measured->num_layers && status == ATTN_OK; i++) {
            status = api->run(fill->plan, measured->io[i].layer, &fill->io.io, error);
        }
    }
    return device_wait(&measured->session->device) ? status : ATTN_ERROR_DEVICE;
}

static attn_status fill_caches(struct measured *measured, struct attn_error *error)
{
    struct fill fill = {.plan = NULL};
    int64_t slots = measured->num_blocks * measured_block(measured);
    fill.tokens = slots < FILL_TOKENS ? slots : FILL_TOKENS;
    memory_init(&fill.memory, measured->memory.device);
    layer_io_init(&fill.io, &measured->layer.desc, measured->session->stream);
    fill.io.io.flags = ATTN_RUN_NO_ATTEND;
    for (enum layer_role role = ROLE_K; role <= ROLE_K_PE; role++) {
        if (role != ROLE_Q_NOPE && role != ROLE_Q_PE) {
            measured_rows(measured, &fill.memory, &fill.io, role, fill.tokens);
        }
    }
    fill_batch(measured, &fill);
    attn_status status =
        fill.memory.failed ? memory_refused(error)
                           : measured_plan(measured, &fill.memory, &fill.batch, &fill.plan, error);
    status = status ? status : fill_slots(measured, &fill, error);
    measured->session->api->plan_destroy(fill.plan);
    memory_finish(&fill.memory);
    return status;
}

attn_status measured_bind(struct measured *measured, struct attn_error *error)
{
    const struct attn_api *api = measured->session->api;
    struct parameters *parameters = command_calloc(1, sizeof *parameters);
    measured->params = &parameters->params; /* the first member: measured_finish frees it */
    make_parameters(measured, parameters);
    measured->spec = (struct attn_cache_spec){.struct_size = sizeof measured->spec};
    if (measured->has_cache) {
        TRY(client_spec(api, api->model_layer(measured->model, 0), &measured->spec, error));
        if (!make_table(measured)) {
            return memory_refused(error);
        }
    }
    if (measured->memory.failed) {
        return memory_refused(error);
    }
    for (int32_t i = 0; i < measured->num_layers; i++) {
        attn_layer *layer = measured->io[i].layer = api->model_layer(measured->model, i);
        TRY(api->layer_bind_params(layer, measured->params, error));
        TRY(measured->has_cache ? bind_cache(measured, layer, &measured->io[i], error)
                                : bind_state(measured, layer, error));
    }
    return measured->has_cache ? fill_caches(measured, error) : ATTN_OK;
}
