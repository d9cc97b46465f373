/* SPDX-License-Identifier: Apache-2.0 */
/* Continuous batching: what each request gets in a step, the batch of every group, and the layers
 * over it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

#define CHUNK 24 /* prompt tokens that one request attends in a step */
#define WRITE_CHUNK 512
#define LOGIT_DEVIATION 4.0
#define NEEDLE_LOGIT 13.0

size_t element_bytes(const struct run_layer *layer)
{
    return layer->terms.number == ORACLE_F32 ? 4 : 2;
}

static struct attn_dtype tensor_dtype(const struct run_layer *layer)
{
    static const struct attn_dtype dtypes[] = {
        {ATTN_CODE_FLOAT, 16, 1}, {ATTN_CODE_BFLOAT, 16, 1}, {ATTN_CODE_FLOAT, 32, 1}};
    return dtypes[layer->terms.number];
}

struct attn_tensor tensor_of(const struct run_layer *layer, void *data, int32_t ndim,
                             int64_t *shape, int64_t *strides)
{
    return (struct attn_tensor){
        data, {ATTN_DEVICE_CPU, 0}, ndim, tensor_dtype(layer), shape, strides, 0};
}

/* A compact tensor [rows, heads, dims] with memory of its own; NULL data without memory. */
struct rows {
    struct attn_tensor tensor;
    int64_t shape[3];
};

static void rows_init(struct rows *rows, const struct run_layer *layer, int64_t count,
                      int32_t heads, int32_t dims, bool poison)
{
    size_t bytes = (size_t)count * (size_t)heads * (size_t)dims * element_bytes(layer);
    *rows = (struct rows){.shape = {count, heads, dims}};
    rows->tensor = (struct attn_tensor){
        malloc(bytes + 64), {ATTN_DEVICE_CPU, 0}, 3, tensor_dtype(layer), rows->shape, NULL, 0};
    if (rows->tensor.data != NULL && poison) {
        memset(rows->tensor.data, 0xff, bytes + 64);
    }
}

/* Row `row` of request r in a recording of q, k, v or out. */
static const float *recorded_row(const struct engine *engine, const struct run_layer *layer,
                                 int32_t which, int32_t r, int64_t row)
{
    const struct oracle_terms *t = &layer->terms;
    int64_t width = which == 0 || which == 3 ? (int64_t)t->num_q_heads * t->head_size
                                             : (int64_t)t->num_kv_heads * t->head_size;
    return layer->recorded[which] != NULL
               ? layer->recorded[which] + (engine->requests[r].first_row + row) * width
               : NULL;
}

attn_status add_keys(struct engine *engine, struct run_layer *layer, int32_t r, int32_t first,
                     int32_t end, int32_t capacity)
{
    const struct oracle_terms *t = &layer->terms;
    uint8_t **histories[2] = {&layer->k_history[r], &layer->v_history[r]};
    int64_t widths[2] = {(int64_t)t->num_kv_heads * t->head_size,
                         (int64_t)t->num_kv_heads * t->head_size_v};
    for (int32_t i = 0; i < 2; i++) {
        if (*histories[i] == NULL) {
            *histories[i] = malloc((size_t)(capacity * widths[i]) * element_bytes(layer));
        }
        if (*histories[i] == NULL) {
            return engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "history",
                               "no memory; try --scale");
        }
        const float *recorded = recorded_row(engine, layer, 1 + i, r, first);
        for (int64_t at = first * widths[i]; at < end * widths[i]; at++) {
            oracle_write(*histories[i], at, t->number,
                         recorded != NULL ? (double)*recorded++ : random_normal(&engine->random));
        }
    }
    return ATTN_OK;
}

/* A query that looks for one key that it can see, with noise of the other logits' deviation. */
static void draw_query(struct engine *engine, const struct run_layer *layer, int32_t r,
                       int64_t position, int64_t length, uint8_t *row)
{
    const struct oracle_terms *t = &layer->terms;
    int64_t reach = position + 1 < length ? position + 1 : length;
    int64_t window =
        t->has_window && t->window_left >= 0 && t->window_left < reach ? t->window_left + 1 : reach;
    int64_t j = t->causal ? reach - 1 - random_below(&engine->random, (int32_t)window)
                          : random_below(&engine->random, (int32_t)length);
    for (int32_t h = 0; h < t->num_q_heads; h++) {
        int64_t key = (j * t->num_kv_heads + h / (t->num_q_heads / t->num_kv_heads)) * t->head_size;
        double norm = 0, deviation = LOGIT_DEVIATION / (t->scale * sqrt(t->head_size));
        for (int32_t d = 0; d < t->head_size; d++) {
            double x = oracle_read(layer->k_history[r], key + d, t->number);
            norm += x * x;
        }
        for (int32_t d = 0; d < t->head_size; d++) {
            double x = oracle_read(layer->k_history[r], key + d, t->number);
            oracle_write(row, (int64_t)h * t->head_size + d, t->number,
                         NEEDLE_LOGIT / (t->scale * norm) * x +
                             deviation * random_normal(&engine->random));
        }
    }
}

static void make_query(struct engine *engine, const struct run_layer *layer, int32_t r,
                       int64_t position, int64_t length, uint8_t *row)
{
    const float *recorded = recorded_row(engine, layer, 0, r, position);
    if (recorded != NULL) {
        memcpy(row, recorded,
               (size_t)(layer->terms.num_q_heads * layer->terms.head_size) * sizeof *recorded);
    } else {
        draw_query(engine, layer, r, position, length, row);
    }
}

static double bound_ratio(int32_t number, double rms, double expected, double found)
{
    /* |error| <= a RMS of the row + b |expected|: probabilities and outputs rounded to the format.
     */
    static const double a[] = {3e-3, 2e-2, 4e-5}, b[] = {2e-3, 1.2e-2, 2e-5};
    double ratio = fabs(found - expected) / (a[number] * rms + b[number] * fabs(expected) + 1e-30);
    return isnan(ratio) ? INFINITY : ratio;
}

/* The recording is a float32 computation itself. */
static double recording_ratio(double rms, double expected, double found)
{
    double ratio = fabs(found - expected) / (2e-5 * rms + 1e-5 * fabs(expected) + 1e-30);
    return isnan(ratio) ? INFINITY : ratio;
}

void compare_row(const struct run_layer *layer, const double *expected, const void *out, int64_t at,
                 int32_t count, struct tally *tally)
{
    double sum = 0;
    for (int32_t d = 0; d < count; d++) {
        sum += expected[d] * expected[d];
    }
    for (int32_t d = 0; d < count; d++) {
        double ratio = bound_ratio(layer->terms.number, sqrt(sum / count), expected[d],
                                   oracle_read(out, at + d, layer->terms.number));
        ratio /= layer->roundings > 0 ? layer->roundings : 1;
        tally->max_error = ratio > tally->max_error ? ratio : tally->max_error;
        tally->compared++;
    }
}

/* `recorded` is the row's recorded output, or NULL. */
static void verify_row(struct run_layer *layer, const void *q, int32_t r, int64_t length,
                       int64_t position, const uint8_t *out, const float *recorded)
{
    const struct oracle_terms *t = &layer->terms;
    double expected[1024];
    for (int32_t h = 0; h < t->num_q_heads; h++) {
        double sum = 0;
        oracle_attend(t, q, layer->k_history[r], layer->v_history[r], length, position, h,
                      expected);
        for (int32_t d = 0; d < t->head_size_v; d++) {
            sum += expected[d] * expected[d];
        }
        for (int32_t d = 0; d < t->head_size_v; d++) {
            int64_t at = (int64_t)h * t->head_size_v + d;
            double found = oracle_read(out, at, t->number), rms = sqrt(sum / t->head_size_v);
            double ratio = bound_ratio(t->number, rms, expected[d], found);
            if (recorded != NULL) {
                ratio = fmax(ratio, recording_ratio(rms, (double)recorded[at], found));
            }
            layer->max_error = ratio > layer->max_error ? ratio : layer->max_error;
            layer->compared++;
        }
    }
}

static void fill_batch(struct engine *engine, const struct run_group *group, struct batch *batch,
                       struct attn_batch *out)
{
    const int32_t tokens = batch->query_start_loc[batch->num_reqs];
    (void)engine;
    *out = (struct attn_batch){.struct_size = sizeof *out,
                               .num_reqs = batch->num_reqs,
                               .num_tokens = tokens,
                               .num_actual_tokens = tokens,
                               .causal = -1,
                               .query_start_loc = batch->query_start_loc,
                               .query_start_loc_host = batch->query_start_loc,
                               .seq_lens = batch->seq_lens,
                               .seq_lens_host = batch->seq_lens,
                               .encoder_seq_lens = batch->encoder_lens,
                               .encoder_seq_lens_host = batch->encoder_lens,
                               .block_table = group->table,
                               .block_table_stride = group->stride,
                               .block_table_rows = MAX_REQUESTS,
                               .block_table_row = batch->rows,
                               .slot_mapping = batch->slots,
                               .num_slots = tokens};
}

static void slots_of(const struct run_group *group, int32_t r, int32_t first, int32_t end,
                     int64_t *slots)
{
    for (int32_t j = first; j < end; j++) {
        int64_t block = group->table[r * group->stride + j / group->block_size];
        *slots++ = block * group->block_size + j % group->block_size;
    }
}

/* Writes keys first .. end-1 of one request in one layer, attending nothing. A recurrent layer has
 * no keys: there the tokens are run. */
static attn_status write_layer(struct engine *engine, struct run_layer *layer,
                               const struct batch *batch, int32_t r, int32_t first, int32_t end)
{
    const struct oracle_terms *t = &layer->terms;
    int64_t shapes[2][3] = {{end - first, t->num_kv_heads, t->head_size},
                            {end - first, t->num_kv_heads, t->head_size_v}};
    struct attn_tensor k = tensor_of(layer, layer->k_history[r], 3, shapes[0], NULL);
    struct attn_tensor v = tensor_of(layer, layer->v_history[r], 3, shapes[1], NULL);
    k.byte_offset = (uint64_t)(first * shapes[0][1] * shapes[0][2]) * element_bytes(layer);
    v.byte_offset = (uint64_t)(first * shapes[1][1] * shapes[1][2]) * element_bytes(layer);
    struct attn_step_io io = {
        .struct_size = sizeof io, .flags = ATTN_RUN_NO_ATTEND, .k = &k, .v = &v};
    if (layer->spec.kind == ATTN_KV_SPEC_GDN_STATE) {
        return gdn_run(engine, layer, batch);
    }
    if (layer->spec.kind == ATTN_KV_SPEC_MLA) {
        return mla_write(engine, layer, r, first, end);
    }
    return engine->api->run(engine->groups[layer->group].plan, layer->handle, &io, &engine->error);
}

/* Writes keys first .. end-1 of one request in every layer of a group. */
static attn_status write_only(struct engine *engine, int32_t g, int32_t r, int32_t first,
                              int32_t end)
{
    struct run_group *group = &engine->groups[g];
    struct batch *batch = calloc(1, sizeof *batch);
    struct attn_batch_gdn states;
    struct attn_batch view;
    int32_t slots[MAX_REQUESTS];
    attn_status status = group->recurrent ? ATTN_OK : blocks_reserve(engine, group, r, end);
    if (batch == NULL || status != ATTN_OK) {
        free(batch);
        return status != ATTN_OK
                   ? status
                   : engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "batch", "no memory");
    }
    batch->num_reqs = 1;
    batch->query_start_loc[1] = end - first;
    batch->seq_lens[0] = end;
    batch->encoder_lens[0] = end;
    batch->rows[0] = r;
    batch->request[0] = r;
    fill_batch(engine, group, batch, &view);
    if (group->recurrent) {
        gdn_states(group, batch, slots, &states);
        view.next = &states.ext;
        view.num_slots = 0;
    } else {
        slots_of(group, r, first, end, batch->slots);
    }
    status = engine->api->plan(group->plan, &view, NULL, &engine->error);
    for (int32_t i = 0; i < engine->num_layers && status == ATTN_OK; i++) {
        if (engine->layers[i].group == g) {
            status = write_layer(engine, &engine->layers[i], batch, r, first, end);
        }
    }
    free(batch);
    return status;
}

/* The common beginning with another request that is here with it, in whole blocks: its keys are not
 * written again. */
static int32_t share(struct engine *engine, int32_t r)
{
    const struct request *request = &engine->requests[r];
    const struct request *other = request->shares >= 0 ? &engine->requests[request->shares] : NULL;
    if (other == NULL || !other->running || other->length < request->shared) {
        return 0;
    }
    int32_t shared = request->shared / BLOCK_SIZE * BLOCK_SIZE;
    for (int32_t g = 0; g < engine->num_groups; g++) {
        if (engine->groups[g].has_cache && !engine->groups[g].cross &&
            !engine->groups[g].recurrent) {
            blocks_share(&engine->groups[g], r, request->shares, shared / BLOCK_SIZE);
        }
    }
    return shared;
}

static attn_status fill_history(struct engine *engine, struct run_layer *layer, int32_t r,
                                int32_t shared, int32_t written)
{
    const struct request *request = &engine->requests[r];
    const struct oracle_terms *t = &layer->terms;
    if (layer->source->desc.kind == ATTN_LAYER_CROSS) {
        return add_keys(engine, layer, r, 0, request->encoder, request->encoder);
    }
    if (!layer->source->desc.causal) {
        return ATTN_OK; /* encoders get theirs with their step */
    }
    attn_status status = add_keys(engine, layer, r, 0, 0, request->prompt + request->output);
    if (status == ATTN_OK && shared > 0) {
        size_t row = (size_t)shared * (size_t)t->num_kv_heads * element_bytes(layer);
        memcpy(layer->k_history[r], layer->k_history[request->shares], row * (size_t)t->head_size);
        memcpy(layer->v_history[r], layer->v_history[request->shares],
               row * (size_t)t->head_size_v);
    }
    return status == ATTN_OK ? add_keys(engine, layer, r, shared, written, 0) : status;
}

/* A request comes: its encoder keys are written, and of its prompt all but the last tokens. */
static attn_status admit(struct engine *engine, int32_t r)
{
    struct request *request = &engine->requests[r];
    int32_t shared = share(engine, r), written = shared;
    attn_status status = ATTN_OK;
    written = request->prompt - 2 * CHUNK > written ? request->prompt - 2 * CHUNK : written;
    for (int32_t i = 0; i < engine->num_layers && status == ATTN_OK; i++) {
        status = fill_history(engine, &engine->layers[i], r, shared, written);
    }
    request->drawn = written;
    for (int32_t g = 0; g < engine->num_groups && status == ATTN_OK; g++) {
        const struct run_group *group = &engine->groups[g];
        int32_t first = group->cross || group->recurrent ? 0 : shared;
        int32_t end = !group->has_cache ? 0 : group->cross ? request->encoder : written;
        for (int32_t at = first; at < end && status == ATTN_OK; at += WRITE_CHUNK) {
            status = write_only(engine, g, r, at, at + WRITE_CHUNK < end ? at + WRITE_CHUNK : end);
        }
    }
    request->length = written;
    request->arrived = request->running = status == ATTN_OK;
    return status;
}

static int32_t tokens_now(const struct request *request)
{
    int32_t left = request->prompt - request->length;
    return left <= 0 ? 1 : left < CHUNK ? left : CHUNK;
}

static void compose(struct engine *engine, struct batch *batch)
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
    engine->api->batch_order(query_lens, seq_lens, count, 1, CHUNK, order, &moved, &engine->error);
    memset(batch, 0, sizeof *batch);
    batch->num_reqs = count;
    for (int32_t i = 0; i < count; i++) {
        batch->request[i] = ids[order[i]];
        batch->rows[i] = ids[order[i]];
        batch->seq_lens[i] = seq_lens[order[i]];
        batch->encoder_lens[i] = engine->requests[ids[order[i]]].encoder;
        batch->query_start_loc[i + 1] = batch->query_start_loc[i] + query_lens[order[i]];
    }
}

static attn_status run_layer(struct engine *engine, struct run_layer *layer,
                             const struct batch *batch)
{
    const struct oracle_terms *t = &layer->terms;
    struct run_group *group = &engine->groups[layer->group];
    int32_t tokens = batch->query_start_loc[batch->num_reqs];
    if (layer->spec.kind == ATTN_KV_SPEC_MLA) {
        return mla_run(engine, layer, batch);
    }
    if (group->recurrent) {
        return gdn_run(engine, layer, batch);
    }
    bool cross = layer->source->desc.kind == ATTN_LAYER_CROSS;
    struct rows q, k, v, out;
    attn_status status = ATTN_OK;
    rows_init(&q, layer, tokens, t->num_q_heads, t->head_size, false);
    rows_init(&k, layer, tokens, t->num_kv_heads, t->head_size, false);
    rows_init(&v, layer, tokens, t->num_kv_heads, t->head_size_v, false);
    rows_init(&out, layer, tokens, t->num_q_heads, t->head_size_v, true);
    size_t e = element_bytes(layer), q_row = (size_t)(t->num_q_heads * t->head_size) * e;
    size_t k_row = (size_t)(t->num_kv_heads * t->head_size) * e,
           v_row = (size_t)(t->num_kv_heads * t->head_size_v) * e;
    size_t out_row = (size_t)(t->num_q_heads * t->head_size_v) * e;
    if (!q.tensor.data || !k.tensor.data || !v.tensor.data || !out.tensor.data) {
        status = engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "rows", "no memory; try --scale");
    }
    for (int32_t i = 0; i < batch->num_reqs && status == ATTN_OK; i++) {
        int32_t r = batch->request[i], first = batch->query_start_loc[i];
        int32_t count = batch->query_start_loc[i + 1] - first, own = batch->seq_lens[i] - count;
        if (!cross) {
            status = add_keys(engine, layer, r, own, own + count, 0);
            memcpy((uint8_t *)k.tensor.data + (size_t)first * k_row,
                   layer->k_history[r] + (size_t)own * k_row, (size_t)count * k_row);
            memcpy((uint8_t *)v.tensor.data + (size_t)first * v_row,
                   layer->v_history[r] + (size_t)own * v_row, (size_t)count * v_row);
        }
        for (int32_t c = 0; c < count; c++) {
            make_query(engine, layer, r, own + c,
                       cross ? batch->encoder_lens[i] : batch->seq_lens[i],
                       (uint8_t *)q.tensor.data + (size_t)(first + c) * q_row);
        }
    }
    struct attn_step_io io = {.struct_size = sizeof io,
                              .q = &q.tensor,
                              .k = cross ? NULL : &k.tensor,
                              .v = cross ? NULL : &v.tensor,
                              .out = &out.tensor};
    if (status == ATTN_OK) {
        status = engine->api->run(group->plan, layer->handle, &io, &engine->error);
    }
    for (int32_t i = 0; i < batch->num_reqs && status == ATTN_OK && engine->settings->verify; i++) {
        int32_t first = batch->query_start_loc[i], count = batch->query_start_loc[i + 1] - first;
        int32_t length = cross ? batch->encoder_lens[i] : batch->seq_lens[i], r = batch->request[i];
        for (int32_t c = 0; c < count; c++) {
            int32_t position = batch->seq_lens[i] - count + c;
            verify_row(layer, (uint8_t *)q.tensor.data + (size_t)(first + c) * q_row, r, length,
                       position, (uint8_t *)out.tensor.data + (size_t)(first + c) * out_row,
                       recorded_row(engine, layer, 3, r, position));
        }
    }
    free(q.tensor.data);
    free(k.tensor.data);
    free(v.tensor.data);
    free(out.tensor.data);
    return status;
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

/* Plans every group with a cache over its own table, then runs its layers. */
static attn_status run_groups(struct engine *engine, struct batch *batch)
{
    attn_status status = ATTN_OK;
    for (int32_t g = 0; g < engine->num_groups && status == ATTN_OK; g++) {
        struct run_group *group = &engine->groups[g];
        struct attn_batch_gdn states;
        struct attn_batch view;
        int64_t *slots = batch->slots;
        int32_t state_slots[MAX_REQUESTS];
        if (!group->has_cache) {
            continue;
        }
        bool blocks = !group->cross && !group->recurrent;
        for (int32_t i = 0; i < batch->num_reqs && status == ATTN_OK && blocks; i++) {
            int32_t count = batch->query_start_loc[i + 1] - batch->query_start_loc[i];
            status = blocks_reserve(engine, group, batch->request[i], batch->seq_lens[i]);
            if (status == ATTN_OK) {
                slots_of(group, batch->request[i], batch->seq_lens[i] - count, batch->seq_lens[i],
                         slots);
                slots += count;
            }
        }
        fill_batch(engine, group, batch, &view);
        view.num_slots = blocks ? view.num_slots : 0;
        if (group->recurrent) {
            gdn_states(group, batch, state_slots, &states);
            view.next = &states.ext;
        }
        view.common_prefix_len = common_prefix(group, batch);
        status = status == ATTN_OK ? engine->api->plan(group->plan, &view, NULL, &engine->error)
                                   : status;
        for (int32_t i = 0; i < engine->num_layers && status == ATTN_OK; i++) {
            if (engine->layers[i].group == g) {
                status = run_layer(engine, &engine->layers[i], batch);
            }
        }
    }
    return status;
}

/* Towers without a cache see whole sequences, once: a recording's, or some. */
static attn_status run_encoders(struct engine *engine)
{
    static const int32_t some[] = {37, 8, 1, 64};
    int32_t lengths[MAX_REQUESTS], count = sizeof some / sizeof *some;
    bool recorded = engine->settings->qkv != NULL;
    count = recorded ? engine->num_requests : count;
    for (int32_t i = 0; i < count; i++) {
        lengths[i] = recorded ? engine->requests[i].prompt : some[i];
    }
    struct batch *batch = calloc(1, sizeof *batch);
    attn_status status = batch != NULL
                             ? ATTN_OK
                             : engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "batch", "no memory");
    for (int32_t g = 0; g < engine->num_groups && status == ATTN_OK; g++) {
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
        fill_batch(engine, group, batch, &view);
        view.seq_lens = view.seq_lens_host = view.block_table = view.block_table_row = NULL;
        view.num_slots = 0;
        status = engine->api->plan(group->plan, &view, NULL, &engine->error);
        for (int32_t i = 0; i < engine->num_layers && status == ATTN_OK; i++) {
            struct run_layer *layer = &engine->layers[i];
            for (int32_t r = 0; layer->group == g && r < batch->num_reqs && status == ATTN_OK;
                 r++) {
                status = add_keys(engine, layer, r, 0, 0, lengths[r]);
            }
            if (layer->group == g && status == ATTN_OK) {
                status = run_layer(engine, layer, batch);
            }
        }
        engine->tokens += status == ATTN_OK ? batch->query_start_loc[batch->num_reqs] : 0;
    }
    free(batch);
    return status;
}

static attn_status advance(struct engine *engine, const struct batch *batch, int32_t step)
{
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        struct request *request = &engine->requests[batch->request[i]];
        request->length = batch->seq_lens[i];
        request->produced += request->length > request->prompt;
        if (request->produced >= request->output ||
            request->length >= request->prompt + request->output) {
            request->running = false;
            request->left = true;
            for (int32_t g = 0; g < engine->num_groups; g++) {
                blocks_free(&engine->groups[g], batch->request[i]);
            }
        }
    }
    for (int32_t r = 0; r < engine->num_requests && status == ATTN_OK; r++) {
        struct request *request = &engine->requests[r];
        if (request->swapped) {
            status = blocks_swap(engine, r, false);
            request->swapped = false;
            request->running = true;
        } else if (request->running && request->preempt_at == step) {
            status = blocks_swap(engine, r, true);
            request->swapped = true;
            request->running = false;
        }
    }
    return status;
}

attn_status engine_run(struct engine *engine)
{
    struct batch *batch = calloc(1, sizeof *batch);
    attn_status status = batch != NULL
                             ? run_encoders(engine)
                             : engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "batch", "no memory");
    for (int32_t step = 0; step < engine->steps && status == ATTN_OK; step++) {
        for (int32_t r = 0; r < engine->num_requests && status == ATTN_OK; r++) {
            if (!engine->requests[r].arrived && engine->requests[r].arrival <= step) {
                status = admit(engine, r);
            }
        }
        compose(engine, batch);
        if (status == ATTN_OK && batch->num_reqs > 0) {
            status = run_groups(engine, batch);
            engine->tokens += batch->query_start_loc[batch->num_reqs];
        }
        status = status == ATTN_OK ? advance(engine, batch, step) : status;
    }
    free(batch);
    return status;
}
