/* SPDX-License-Identifier: Apache-2.0 */
/* attn-run --capsule: one recorded step of one layer, run again and held to cpu_ref. */
#include "engine.h"

#include <attn/api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/bound.h"
#include "common/capsule_read.h"
#include "common/command.h"
#include "common/memory.h"
#include "common/json.h"
#include "common/find.h"
#include "support/client.h"
#include "support/kv_format.h"
#include "support/layer_io.h"
#include "support/number.h"
#include "support/random.h"

#define MOST_HEAD ((int64_t)1 << 20)

/* A capsule and its contents, recorded or drawn: q, keys, values, and out where it is recorded. */
struct contents {
    struct capsule capsule;
    char *file;
    uint8_t *drawn;
    const uint8_t *tensors[CAPSULE_TENSORS];
};

/* One run on one backend. */
struct replay {
    const struct contents *from;
    const struct attn_api *api;
    struct device device;
    struct attn_layer_desc desc;
    struct attn_mla_desc mla;
    attn_assignment *assignment;
    attn_model *model;
    attn_layer *layer;
    attn_plan *plan;
    struct memory memory;
    char backends[BACKEND_SIZE];
    uint8_t *out; /* the host's */
    struct attn_error error;
};

static int64_t tensor_bytes(const struct capsule *c, int32_t t)
{
    return capsule_rows(c, t) * capsule_heads(c, t) * capsule_dims(c, t) *
           (int64_t)number_bytes(c->dtype);
}

/* Numbers of each head's mean and deviation. */
static void draw(const struct capsule *c, int32_t tensor, uint8_t *bytes, uint64_t *random)
{
    const int64_t rows = capsule_rows(c, tensor);
    const int32_t heads = capsule_heads(c, tensor), dims = capsule_dims(c, tensor);
    for (int64_t i = 0; i < rows * heads * dims; i++) {
        const float *s = c->statistics[tensor][i / dims % heads];
        number_store(bytes, i, c->dtype, s[0] + s[1] * random_normal(random));
    }
}

static bool read_contents(struct contents *from, const char *name, uint64_t seed)
{
    char why[512];
    const char *data;
    size_t size = 0;
    struct capsule *c = &from->capsule;
    const char *unread;
    from->file = read_whole_file(name, CAPSULE_BYTES + MOST_HEAD, &size, &unread);
    if (from->file == NULL) {
        fprintf(stderr, "attn-run: %s: is no capsule: %s\n", name, unread);
        return false;
    }
    if (capsule_read(c, from->file, size, &data, why, sizeof why) != NULL) {
        fprintf(stderr, "attn-run: %s: %s\n", name, why);
        return false;
    }
    /* the head may end at any address */
    from->drawn = command_calloc(1, (size_t)capsule_bytes(c));
    if (c->real) {
        memcpy(from->drawn, data, (size_t)capsule_bytes(c));
    }
    uint8_t *at = from->drawn;
    for (int32_t t = 0; t < CAPSULE_TENSORS; at += tensor_bytes(c, t++)) {
        from->tensors[t] = at;
        if (!c->real && t < 3) {
            draw(c, t, at, &seed);
        }
    }
    return true;
}

/* A copy on the device, NULL with the error; `source` NULL: memory alone. */
static void *send(struct replay *r, const void *source, int64_t bytes)
{
    void *sent = source != NULL ? memory_upload(&r->memory, source, (size_t)bytes)
                                : memory_take(&r->memory, (size_t)bytes);
    r->error = sent != NULL ? r->error : r->memory.error;
    return sent;
}

static attn_status select_layer(struct replay *r, attn_runtime *runtime, const char *backend)
{
    const struct capsule *c = &r->from->capsule;
    r->mla = EXTENSION(attn_mla_desc, ATTN_EXT_MLA_DESC, NULL, .kv_lora_rank = c->kv_lora_rank,
                       .qk_nope_head_dim = c->qk_nope_head_dim,
                       .qk_rope_head_dim = c->head_size - c->kv_lora_rank,
                       .v_head_dim = c->head_size_v, .absorb_in_core = 1);
    r->desc = SIZED(
        attn_layer_desc, .name = c->layer, .next = c->kv_lora_rank > 0 ? &r->mla.ext : NULL,
        .kind = c->kv_lora_rank ? ATTN_LAYER_MLA : ATTN_LAYER_DECODER, .dtype = c->dtype,
        .num_q_heads = c->num_q_heads, .num_kv_heads = c->num_kv_heads, .head_size = c->head_size,
        .head_size_v = c->head_size_v, .scale = c->scale, .causal = c->causal,
        .has_window = c->has_window, .window_left = c->window_left, .window_right = c->window_right,
        .chunk_size = c->chunk_size, .chunk_lookback = c->chunk_lookback, .soft_cap = c->soft_cap,
        .alibi = c->alibi, .has_sinks = c->has_sinks, .block_size = c->block_size);
    const struct attn_layer_desc *layers[] = {&r->desc};
    const struct attn_select_options options =
        SIZED(attn_select_options, .device = r->device.device, .backend = backend);
    attn_status status = r->api->select(runtime, &options, layers, 1, &r->assignment, &r->error);
    if (status != ATTN_OK) { /* a backend may have other blocks */
        r->desc.block_size = 0;
        status = r->api->select(runtime, &options, layers, 1, &r->assignment, &r->error);
    }
    TRY(status);
    choice_text(r->api, r->assignment, 0, r->backends);
    TRY(r->api->model_create(runtime, r->assignment, NULL, &r->model, &r->error));
    r->layer = r->api->model_layer(r->model, 0);
    return ATTN_OK;
}

static attn_status bind_params(struct replay *r)
{
    const struct capsule *c = &r->from->capsule;
    const int64_t bytes = 4 * (int64_t)c->num_q_heads;
    struct attn_layer_params params = {.struct_size = sizeof params};
    params.sinks = c->has_sinks ? send(r, c->sinks, bytes) : NULL;
    params.alibi_slopes = c->alibi != ATTN_ALIBI_NONE ? send(r, c->slopes, bytes) : NULL;
    int64_t shape[] = {capsule_rows(c, 2), c->kv_lora_rank};
    struct attn_tensor kv_b_proj = {
        .device = r->device.device, .ndim = 2, .dtype = number_dtype(c->dtype), .shape = shape};
    const struct attn_mla_weights weights =
        EXTENSION(attn_mla_weights, ATTN_EXT_MLA_WEIGHTS, NULL, .kv_b_proj = &kv_b_proj);
    if (c->kv_lora_rank > 0) {
        params.next = &weights.ext;
        kv_b_proj.data = send(r, r->from->tensors[2], tensor_bytes(c, 2));
    }
    return r->memory.failed ? r->error.status
                            : r->api->layer_bind_params(r->layer, &params, &r->error);
}

/* An MLA layer has one, of latent rows. */
static int32_t num_caches(const struct capsule *c)
{
    return c->kv_lora_rank > 0 ? 1 : 2;
}

/* The blocks of a request lie last to first, the requests one after the other. */
static int64_t blocks_of(const struct capsule *c, int32_t request, int32_t block_size)
{
    return ((int64_t)c->seq_lens[request] + block_size - 1) / block_size;
}

static void fill_plane(const struct capsule *c, int32_t tensor, const struct attn_kv_view *view,
                       const uint8_t *source, uint8_t *memory, const uint8_t *base)
{
    const int64_t bytes = capsule_dims(c, tensor) * (int64_t)number_bytes(c->dtype);
    const int64_t element = (int64_t)number_bytes(c->dtype);
    const int64_t pack = view->pack > 0 && view->pack < view->head_size ? view->pack : 0;
    int64_t first = 0;
    for (int32_t r = 0; r < c->num_reqs; r++) {
        const int64_t count = blocks_of(c, r, view->block_size);
        for (int64_t t = 0; t < c->seq_lens[r]; t++) {
            const int64_t block = first + count - 1 - t / view->block_size;
            uint8_t *row = memory + ((const uint8_t *)view->data - base) +
                           block * view->stride_block + t % view->block_size * view->stride_slot;
            for (int32_t h = 0; h < view->num_heads; h++, source += bytes) {
                uint8_t *to = row + h * view->stride_head;
                for (int64_t at = 0; at<bytes; at += pack> 0 ? pack * element : bytes) {
                    const int64_t part = pack > 0 ? pack * element : bytes;
                    memcpy(to + (pack > 0 ? at / part * view->stride_pack : 0), source + at,
                           (size_t)part);
                }
            }
        }
        first += count;
    }
}

/* Views in the recorded order of rows, over one memory; false if the strides are neither NHD nor
 * HND. */
static bool recorded_views(const struct capsule *c, int64_t num_blocks, uint8_t *base,
                           struct attn_kv_view views[2])
{
    const int64_t strides[2][2] = {{c->k_stride_slot, c->k_stride_head},
                                   {c->v_stride_slot, c->v_stride_head}};
    const int64_t element = (int64_t)number_bytes(c->dtype);
    const struct kv_rows rows = {num_blocks,
                                 c->block_size,
                                 c->num_kv_heads,
                                 {capsule_dims(c, 1), capsule_dims(c, 2)},
                                 {capsule_dims(c, 1) * element, capsule_dims(c, 2) * element}};
    for (int32_t i = 0; i < num_caches(c); i++) {
        const bool nhd = strides[i][0] >= strides[i][1];
        views[i] = kv_view(nhd ? ATTN_KV_LAYOUT_NHD : ATTN_KV_LAYOUT_HND, i == 1, &rows, base);
        if (strides[i][nhd] != rows.bytes[i]) {
            return false;
        }
    }
    return true;
}

/* In the recorded layout if the backend reads it, else in its own. */
static attn_status bind_cache(struct replay *r, int32_t *block_size, int64_t *num_blocks)
{
    const struct capsule *c = &r->from->capsule;
    struct attn_cache_spec spec;
    struct attn_kv_view views[2] = {{.struct_size = sizeof *views}, {.struct_size = sizeof *views}};
    TRY(client_spec(r->api, r->layer, &spec, &r->error));
    *block_size = spec.block_size;
    *num_blocks = 0;
    for (int32_t i = 0; i < c->num_reqs; i++) {
        *num_blocks += blocks_of(c, i, spec.block_size);
    }
    const int64_t bytes = *num_blocks * spec.padded_page_bytes;
    OWNED(memory_end) uint8_t *host = command_calloc(1, (size_t)bytes);
    uint8_t *memory = send(r, NULL, bytes);
    if (memory == NULL) {
        return r->error.status;
    }
    const struct attn_kv_view *given[] = {&views[0], &views[1]};
    attn_status status = ATTN_ERROR_UNSUPPORTED;
    if (spec.block_size == c->block_size && recorded_views(c, *num_blocks, memory, views)) {
        status = r->api->layer_bind_caches(r->layer, given, num_caches(c), &r->error);
    }
    if (status != ATTN_OK) {
        TRY(client_views(r->api, r->layer, memory, *num_blocks, &views[0],
                         num_caches(c) > 1 ? &views[1] : NULL, &r->error));
    }
    if (spec.block_size > spec.kernel_block_size) { /* rows of a block go on in the next one */
        snprintf(r->error.message, sizeof r->error.message,
                 "%s has blocks of %d; a capsule is run in blocks of its kernels", r->backends,
                 spec.kernel_block_size);
        return ATTN_ERROR_UNSUPPORTED;
    }
    for (int32_t i = 0; i < num_caches(c); i++) {
        TRY(r->api->layer_cache_view(r->layer, i, &views[i], &r->error));
        fill_plane(c, 1 + i, &views[i], r->from->tensors[1 + i], host, memory);
    }
    return device_copy_in(&r->device, memory, host, (size_t)bytes, &r->error);
}

/* The batch's arrays, one after the other in `ints`: R + 1 starts, R lengths, R rows of table. */
static attn_status plan_step(struct replay *r, int32_t block_size)
{
    const struct capsule *c = &r->from->capsule;
    int32_t longest = 0, most_queries = 0;
    for (int32_t i = 0; i < c->num_reqs; i++) {
        longest = c->seq_lens[i] > longest ? c->seq_lens[i] : longest;
        most_queries = c->query_lens[i] > most_queries ? c->query_lens[i] : most_queries;
    }
    const int64_t stride = ((int64_t)longest + block_size - 1) / block_size;
    const int64_t table_at = 2 * (int64_t)c->num_reqs + 1;
    const int64_t count = table_at + c->num_reqs * stride;
    OWNED(memory_end) int32_t *ints = command_calloc((size_t)count, sizeof *ints);
    int32_t first = 0;
    for (int32_t i = 0; i < c->num_reqs; i++) {
        const int32_t blocks = (int32_t)blocks_of(c, i, block_size);
        ints[i + 1] = ints[i] + c->query_lens[i];
        ints[c->num_reqs + 1 + i] = c->seq_lens[i];
        for (int32_t b = 0; b < blocks; b++) {
            ints[table_at + i * stride + b] = first + blocks - 1 - b;
        }
        first += blocks;
    }
    TRY(memory_plan(&r->memory, r->api, r->model, 0,
                    CLIENT_LIMITS(c->num_reqs, ints[c->num_reqs], longest), &r->plan, &r->error));
    const int32_t *sent = send(r, ints, 4 * count);
    if (sent == NULL) {
        return r->error.status;
    }
    struct attn_batch batch = client_batch(c->num_reqs, ints, ints + c->num_reqs + 1);
    batch.max_query_len = most_queries;
    batch.max_seq_len = longest;
    batch.query_start_loc = sent;
    batch.seq_lens = sent + c->num_reqs + 1;
    batch.block_table = sent + table_at;
    batch.block_table_stride = stride;
    return r->api->plan_batch(r->plan, &batch, NULL, &r->error);
}

/* The latent rows of the step's own tokens, which prefill attends to as they come. */
static void *send_new_rows(struct replay *r)
{
    const struct capsule *c = &r->from->capsule;
    const int64_t row = c->head_size * (int64_t)number_bytes(c->dtype);
    const uint8_t *from = r->from->tensors[1];
    OWNED(memory_end) uint8_t *rows = command_calloc((size_t)capsule_rows(c, 0), (size_t)row);
    uint8_t *to = rows;
    for (int32_t i = 0; i < c->num_reqs; i++) {
        from += c->seq_lens[i] * row;
        memcpy(to, from - c->query_lens[i] * row, (size_t)(c->query_lens[i] * row));
        to += c->query_lens[i] * row;
    }
    return send(r, rows, to - rows);
}

static attn_status run_layer(struct replay *r)
{
    const struct capsule *c = &r->from->capsule;
    const int64_t tokens = capsule_rows(c, 0), bytes = tensor_bytes(c, 3);
    const int32_t width = capsule_dims(c, 0);
    uint8_t *q = send(r, r->from->tensors[0], tensor_bytes(c, 0)), *out = send(r, NULL, bytes);
    uint8_t *rows = c->kv_lora_rank > 0 ? send_new_rows(r) : NULL;
    if (r->memory.failed) {
        return r->error.status;
    }
    const size_t element = number_bytes(c->dtype);
    const struct {
        enum layer_role role;
        uint8_t *data;
        int32_t stride; /* rows are latent and rope, queries both of their parts */
    } tensors[] = {{ROLE_Q, q, 0},
                   {ROLE_Q_NOPE, q, width},
                   {ROLE_Q_PE, q + (size_t)c->qk_nope_head_dim * element, width},
                   {ROLE_KV_C, rows, c->head_size},
                   {ROLE_K_PE, rows + (size_t)c->kv_lora_rank * element, c->head_size},
                   {ROLE_OUT, out, 0}};
    struct layer_io io;
    layer_io_init(&io, &r->desc, NULL);
    io.io.flags = ATTN_RUN_NO_WRITE;
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        const struct layer_rows sizes = layer_rows(&r->desc, tensors[i].role);
        if (sizes.dims > 0) {
            layer_io_set(&io, tensors[i].role, sizes, tokens, r->device.device, tensors[i].data,
                         tensors[i].stride);
        }
    }
    TRY(device_set(&r->device, out, 0xff, (size_t)bytes, &r->error));
    TRY(r->api->run(r->plan, r->layer, &io.io, &r->error));
    r->out = command_calloc(1, (size_t)bytes);
    return device_copy_out(&r->device, r->out, out, (size_t)bytes, &r->error);
}

static attn_status replay_on(struct replay *r, attn_runtime *runtime, struct attn_device device,
                             const char *backend)
{
    int32_t block_size = 0;
    int64_t num_blocks = 0;
    r->error = (struct attn_error)ATTN_ERROR_INIT;
    memory_init(&r->memory, &r->device);
    TRY(device_init(&r->device, r->api, runtime, device, &r->error));
    TRY(select_layer(r, runtime, backend));
    TRY(bind_params(r));
    TRY(bind_cache(r, &block_size, &num_blocks));
    TRY(plan_step(r, block_size));
    return run_layer(r);
}

static void replay_finish(struct replay *r)
{
    if (r->api == NULL) {
        return;
    }
    r->api->plan_destroy(r->plan);
    r->api->model_destroy(r->model);
    r->api->assignment_destroy(r->assignment);
    memory_finish(&r->memory);
    device_finish(&r->device);
    free(r->out);
}

/* Each element of `found` against the reference; says where the worst one is. */
static void compare(struct json *results, const struct capsule *c, const char *what,
                    struct bound bound, const uint8_t *found, const uint8_t *reference)
{
    const int64_t rows = capsule_rows(c, 3) * c->num_q_heads, dims = c->head_size_v;
    int64_t off = 0, worst_at = 0;
    double worst = 0;
    for (int64_t row = 0; row < rows; row++) {
        const double rms = bound_rms(reference, row * dims, c->dtype, dims);
        for (int64_t d = 0; d < dims; d++) {
            const double want = number_load(reference, row * dims + d, c->dtype);
            const double have = number_load(found, row * dims + d, c->dtype);
            const double allowed = bound_allows(bound, rms, c->dtype, want);
            const double ratio = bound_ratio(want, have, allowed);
            off += ratio > 1;
            if (ratio > worst) {
                worst = ratio;
                worst_at = row * dims + d;
            }
        }
    }
    struct json *item = json_push(results, json_object());
    int64_t row = worst_at / dims / c->num_q_heads;
    int32_t request = 0;
    while (row >= c->query_lens[request]) {
        row -= c->query_lens[request++];
    }
    json_add(item, "what", json_string(what));
    json_add(item, "max_error", json_number(isfinite(worst) ? worst : 1e30));
    json_add(item, "elements_off", json_number((double)off));
    struct json *place = json_add(item, "worst", json_object());
    json_add(place, "request", json_number(request));
    json_add(place, "query", json_number((double)row));
    json_add(place, "head", json_number((double)(worst_at / dims % c->num_q_heads)));
    json_add(place, "dim", json_number((double)(worst_at % dims)));
    json_add(place, "found", json_number(number_load(found, worst_at, c->dtype)));
    json_add(place, "expected", json_number(number_load(reference, worst_at, c->dtype)));
}

static struct json *describe(const struct capsule *c)
{
    struct json *item = json_object();
    json_add(item, "library", json_string(c->library));
    json_add(item, "layer", json_string(c->layer));
    json_add(item, "step", json_number(c->step));
    json_add(item, "prefill", json_string(c->prefill));
    json_add(item, "decode", json_string(c->decode));
    json_add(item, "contents", json_string(c->real ? "real" : "random"));
    json_add(item, "requests", json_number(c->num_reqs));
    json_add(item, "queries", json_number((double)capsule_rows(c, 0)));
    json_add(item, "keys", json_number((double)capsule_rows(c, 1)));
    json_add(item, "not_finite",
             json_number((double)c->not_finite[0] + c->not_finite[1] + c->not_finite[2]));
    json_add(item, "not_finite_out", json_number(c->not_finite[3]));
    return item;
}

static void print_text(const struct json *root)
{
    const struct json *c = json_get(root, "capsule"), *item;
    printf("layer %s, run %d, by %s in prefill and %s in decode, libattn %s\n"
           "%d requests, %d queries, %d keys, %s contents; %d numbers of q, k and v and %d of out "
           "were not finite\n",
           json_text(c, "layer"), (int)json_value(c, "step"), json_text(c, "prefill"),
           json_text(c, "decode"), json_text(c, "library"), (int)json_value(c, "requests"),
           (int)json_value(c, "queries"), (int)json_value(c, "keys"), json_text(c, "contents"),
           (int)json_value(c, "not_finite"), (int)json_value(c, "not_finite_out"));
    JSON_EACH(item, json_get(root, "results"))
    {
        const struct json *place = json_get(item, "worst");
        const bool off = json_value(item, "elements_off") > 0;
        printf("%s: largest error %.3g of the bound", json_text(item, "what"),
               json_value(item, "max_error"));
        if (off) {
            printf("; OFF in %.0f elements, most in request %d, query %d, head %d, dim %d: %g, not "
                   "%g",
                   json_value(item, "elements_off"), (int)json_value(place, "request"),
                   (int)json_value(place, "query"), (int)json_value(place, "head"),
                   (int)json_value(place, "dim"), json_value(place, "found"),
                   json_value(place, "expected"));
        }
        putchar('\n');
    }
}

static int tell(const struct contents *from, const struct replay *tested,
                const struct replay *reference, bool as_json)
{
    struct json *root = json_object();
    const struct json *item;
    int code = EXIT_SUCCESS;
    json_add(root, "capsule", describe(&from->capsule));
    struct json *results = json_add(root, "results", json_array());
    const struct attn_choice choice =
        choice_of(reference->api, reference->assignment, 0, ATTN_PHASE_DECODE);
    const struct bound bound = {choice.bound_of_row_rms, choice.bound_of_element, 0};
    compare(results, &from->capsule, tested->backends, bound, tested->out, reference->out);
    if (from->capsule.real) {
        compare(results, &from->capsule, "the recorded output", bound, from->tensors[3],
                reference->out);
    }
    JSON_EACH(item, results)
    {
        code = json_value(item, "elements_off") > 0 ? EXIT_FAILURE : code;
    }
    if (as_json) {
        json_print(root);
    } else {
        print_text(root);
    }
    json_destroy(root);
    return code;
}

int capsule_replay(const char *file, const char *backend, uint64_t seed, bool as_json)
{
    struct contents *from = command_calloc(1, sizeof *from);
    struct replay tested = {.from = from}, reference = {.from = from};
    struct attn_error error = ATTN_ERROR_INIT;
    const struct attn_api *api = NULL;
    attn_runtime *runtime = NULL;
    struct attn_device device;
    int code = EXIT_FAILURE;
    if (!read_contents(from, file, seed)) {
        goto done;
    }
    attn_status status = library_open(&api, &error);
    status = status ? status : api->runtime_create(NULL, &runtime, &error);
    status = status ? status : api->best_device(runtime, backend, &device, &error);
    if (status != ATTN_OK) {
        code = command_failed("attn-run", file, &error);
        goto done;
    }
    tested.api = reference.api = api;
    if (replay_on(&reference, runtime, (struct attn_device){ATTN_DEVICE_CPU, 0}, "cpu_ref") !=
        ATTN_OK) {
        code = command_failed("attn-run", file, &reference.error);
    } else if (replay_on(&tested, runtime, device, backend) != ATTN_OK) {
        code = command_failed("attn-run", file, &tested.error);
    } else {
        code = tell(from, &tested, &reference, as_json);
    }
done:
    replay_finish(&tested);
    replay_finish(&reference);
    if (api != NULL) {
        api->runtime_destroy(runtime);
    }
    free(from->file);
    free(from->drawn);
    free(from);
    return code;
}
