/* SPDX-License-Identifier: Apache-2.0 */
/* One libattn layer for each place where ggml keeps keys and values: caches are bound where they
 * lie, a plan is made again where a batch outgrows it. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

enum { MAX_LAYERS = 1024, MAX_REFUSALS = 64, ALIGNMENT = 256 };

/* What makes a layer: compared as bytes, so all of it is set. */
struct layer_key {
    const void *k, *v; /* where the cells begin */
    const void *sinks;
    int64_t k_slot, k_head, v_slot, v_head, cells;
    int32_t num_q_heads, num_kv_heads, head_size, head_size_v, kv_dtype, kv_dtype_v, causal,
        block_size;
    float scale, soft_cap;
};

struct layer {
    struct layer_key key;
    attn_model *model;
    attn_layer *bound;
    attn_plan *plan;
    int32_t max_rows; /* the plan's limit */
};

struct attention {
    const struct attn_api *api;
    attn_runtime *runtime;
    struct layer layers[MAX_LAYERS];
    int32_t num_layers;
    struct requests requests;
    void *workspace;
    size_t workspace_bytes;
    char refused[MAX_REFUSALS][160]; /* kinds of layers that were reported */
    int32_t num_refused;
    struct attn_error error;
};

struct attention *attention_create(int32_t num_threads)
{
    const char *name = getenv("ATTN_LIBRARY");
    void *library = dlopen(name != NULL ? name : "libattn.so.1", RTLD_NOW | RTLD_LOCAL);
    attn_get_api_fn *get = NULL;
    struct attention *a = calloc(1, sizeof *a);
    const struct attn_runtime_options options = {.struct_size = sizeof options,
                                                 .num_threads = num_threads};
    if (a == NULL || library == NULL ||
        (*(void **)&get = dlsym(library, ATTN_GET_API_SYMBOL)) == NULL) {
        fprintf(stderr, "libattn: %s (ATTN_LIBRARY names the library)\n",
                a == NULL ? "no memory" : dlerror());
        free(a);
        return NULL;
    }
    a->error = (struct attn_error)ATTN_ERROR_INIT;
    if (get(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &a->api, &a->error) != ATTN_OK ||
        a->api->runtime_create(&options, &a->runtime, &a->error) != ATTN_OK) {
        fprintf(stderr, "libattn: %s: %s\n", a->error.field, a->error.message);
        free(a);
        return NULL;
    }
    return a;
}

static void forget_layers(struct attention *a)
{
    for (int32_t i = 0; i < a->num_layers; i++) {
        a->api->plan_destroy(a->layers[i].plan);
        a->api->model_destroy(a->layers[i].model);
    }
    a->num_layers = 0;
}

void attention_destroy(struct attention *a)
{
    if (a != NULL) {
        forget_layers(a);
        a->api->runtime_destroy(a->runtime);
        requests_finish(&a->requests);
        free(a->workspace);
        free(a);
    }
}

/* -1: block formats that libattn does not know. */
static int32_t kv_dtype_of(const struct ggml_tensor *t)
{
    return t->type == GGML_TYPE_F16    ? ATTN_KV_F16
           : t->type == GGML_TYPE_BF16 ? ATTN_KV_BF16
           : t->type == GGML_TYPE_F32  ? ATTN_KV_F32
           : t->type == GGML_TYPE_Q8_0 ? ATTN_KV_Q8_0
           : t->type == GGML_TYPE_Q4_0 ? ATTN_KV_Q4_0
                                       : -1;
}

static float parameter(const struct ggml_tensor *op, int32_t index)
{
    float value;
    memcpy(&value, (const char *)op->op_params + sizeof value * (size_t)index, sizeof value);
    return value;
}

/* The operator's parameters: scale, largest ALiBi bias, soft cap (by which ggml has divided the
 * scale). */
static void describe(const struct ggml_tensor *op, struct layer_key *key)
{
    const struct ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
    *key = (struct layer_key){.num_q_heads = (int32_t)q->ne[2],
                              .num_kv_heads = (int32_t)k->ne[2],
                              .head_size = (int32_t)q->ne[0],
                              .head_size_v = (int32_t)v->ne[0],
                              .kv_dtype = kv_dtype_of(k),
                              .kv_dtype_v = kv_dtype_of(v),
                              .causal = 1,
                              .block_size = 1,
                              .scale = parameter(op, 0),
                              .soft_cap = parameter(op, 2),
                              .sinks = op->src[4] != NULL ? op->src[4]->data : NULL};
}

static struct attn_layer_desc layer_of(const struct layer_key *key, bool has_sinks)
{
    return (struct attn_layer_desc){.struct_size = sizeof(struct attn_layer_desc),
                                    .name = "ggml",
                                    .kind = ATTN_LAYER_DECODER,
                                    .dtype = ATTN_DTYPE_F32,
                                    .kv_dtype = key->kv_dtype,
                                    .kv_dtype_v = key->kv_dtype_v,
                                    .num_q_heads = key->num_q_heads,
                                    .num_kv_heads = key->num_kv_heads,
                                    .head_size = key->head_size,
                                    .head_size_v = key->head_size_v,
                                    .scale = key->scale,
                                    .causal = key->causal ? ATTN_CAUSAL_YES : ATTN_CAUSAL_NO,
                                    .soft_cap = key->soft_cap,
                                    .has_sinks = has_sinks,
                                    .block_size = key->block_size};
}

static attn_status select_layer(struct attention *a, const struct attn_layer_desc *layer,
                                attn_assignment **assignment)
{
    const struct attn_select_options options = {.struct_size = sizeof options,
                                                .device = {ATTN_DEVICE_CPU, 0}};
    return a->api->select(a->runtime, &options, &layer, 1, assignment, &a->error);
}

/* What is not served is ggml's own to compute, never without a word: once for each kind of layer.
 */
static bool refuse(struct attention *a, const struct layer_key *key, const struct ggml_tensor *op,
                   const char *why)
{
    char kind[sizeof a->refused[0]];
    snprintf(kind, sizeof kind,
             "%d/%d heads of %d and %d, cache types %s and %s, scale %g, soft cap %g",
             key->num_q_heads, key->num_kv_heads, key->head_size, key->head_size_v,
             ggml_type_name(op->src[1]->type), ggml_type_name(op->src[2]->type), (double)key->scale,
             (double)key->soft_cap);
    for (int32_t i = 0; i < a->num_refused; i++) {
        if (strcmp(a->refused[i], kind) == 0) {
            return false;
        }
    }
    if (a->num_refused < MAX_REFUSALS) {
        memcpy(a->refused[a->num_refused++], kind, sizeof kind);
    }
    fprintf(stderr, "libattn: attention of %s stays ggml's: %s\n", kind, why);
    return false;
}

/* Keys one head after the other: what a cast of a cache leaves. Else one token after the other, as
 * caches lie. */
static bool by_heads(const struct ggml_tensor *t)
{
    return t->ne[2] > 1 && t->nb[2] > t->nb[1];
}

/* The reference is many times slower than ggml: it is taken where it was asked for. */
static bool by_reference_alone(struct attention *a, const attn_assignment *assignment)
{
    for (int32_t phase = 0; phase <= ATTN_PHASE_DECODE; phase++) {
        struct attn_choice choice = {.struct_size = sizeof choice};
        if (a->api->assignment_choice(assignment, 0, phase, &choice) == ATTN_OK && !choice.forced &&
            strcmp(choice.name, "cpu_ref") == 0) {
            return true;
        }
    }
    return false;
}

bool attention_serves(struct attention *a, const struct ggml_tensor *op)
{
    const struct ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
    struct layer_key key;
    attn_assignment *assignment;
    describe(op, &key);
    if (key.kv_dtype < 0 || key.kv_dtype_v < 0) {
        return refuse(a, &key, op, "f16, bf16, f32, q8_0 and q4_0 are served");
    }
    if (parameter(op, 1) != 0) {
        return refuse(a, &key, op, "ALiBi comes as a mask of biases per head");
    }
    if (q->type != GGML_TYPE_F32 || op->type != GGML_TYPE_F32 || q->nb[0] != 4 ||
        q->nb[3] != q->nb[1] * (size_t)q->ne[1] || k->nb[0] != ggml_type_size(k->type) ||
        v->nb[0] != ggml_type_size(v->type) ||
        (op->src[3] != NULL && (op->src[3]->type != GGML_TYPE_F16 || op->src[3]->ne[2] != 1))) {
        return refuse(a, &key, op, "q, k, v or the mask lie otherwise than llama.cpp has them");
    }
    const struct attn_layer_desc layer = layer_of(&key, op->src[4] != NULL);
    if (select_layer(a, &layer, &assignment) != ATTN_OK) {
        return refuse(a, &key, op, a->error.message);
    }
    bool slow = by_reference_alone(a, assignment);
    a->api->assignment_destroy(assignment);
    if (slow) {
        return refuse(a, &key, op,
                      "cpu_ref alone serves it, which is slow: taken under ATTN_BACKEND=cpu_ref");
    }
    return true;
}

/* Where the cells begin and how many there are: of the whole cache that k is a view of, if that is
 * made of cells. */
static int64_t cells_of(const struct ggml_tensor *t, const void **base, int64_t *first)
{
    const struct ggml_tensor *root = t->view_src != NULL ? t->view_src : t;
    int64_t offset = (const char *)t->data - (const char *)root->data, slot = (int64_t)t->nb[1];
    if (!by_heads(t) && offset % slot == 0) {
        *base = root->data;
        *first = offset / slot;
        return (int64_t)ggml_nbytes(root) / slot;
    }
    *base = t->data;
    *first = 0;
    return t->ne[1] + (t->ne[3] - 1) * ((int64_t)t->nb[3] / slot);
}

static struct attn_kv_view view_of(const struct layer_key *key, bool value)
{
    int64_t slot = value ? key->v_slot : key->k_slot;
    return (struct attn_kv_view){.struct_size = sizeof(struct attn_kv_view),
                                 .data = (void *)(uintptr_t)(value ? key->v : key->k),
                                 .num_blocks = key->cells / key->block_size,
                                 .block_size = key->block_size,
                                 .num_heads = key->num_kv_heads,
                                 .head_size = value ? key->head_size_v : key->head_size,
                                 .stride_block = slot * key->block_size,
                                 .stride_slot = slot,
                                 .stride_head = value ? key->v_head : key->k_head};
}

static attn_status bind_layer(struct attention *a, struct layer *layer)
{
    const struct attn_layer_desc desc = layer_of(&layer->key, layer->key.sinks != NULL);
    const struct attn_kv_view k = view_of(&layer->key, false), v = view_of(&layer->key, true);
    const struct attn_layer_params params = {.struct_size = sizeof params,
                                             .sinks = layer->key.sinks};
    attn_assignment *assignment;
    attn_status status = select_layer(a, &desc, &assignment);
    if (status != ATTN_OK) {
        return status;
    }
    status = a->api->model_create(a->runtime, assignment, NULL, &layer->model, &a->error);
    a->api->assignment_destroy(assignment);
    if (status != ATTN_OK) {
        return status;
    }
    layer->bound = a->api->model_layer(layer->model, 0);
    status = a->api->layer_bind_caches(layer->bound, (const struct attn_kv_view *const[]){&k, &v},
                                       2, &a->error);
    return status ? status : a->api->layer_bind_params(layer->bound, &params, &a->error);
}

/* The layer of this operator; NULL, with the cause in a->error. */
static struct layer *find_layer(struct attention *a, const struct layer_key *key)
{
    for (int32_t i = 0; i < a->num_layers; i++) {
        if (memcmp(&a->layers[i].key, key, sizeof *key) == 0) {
            return &a->layers[i];
        }
    }
    if (a->num_layers == MAX_LAYERS) { /* graphs whose keys are no cache come at new addresses */
        forget_layers(a);
    }
    struct layer *layer = &a->layers[a->num_layers];
    *layer = (struct layer){.key = *key};
    if (bind_layer(a, layer) != ATTN_OK) {
        a->api->model_destroy(layer->model);
        return NULL;
    }
    a->num_layers++;
    return layer;
}

/* A plan that takes the requests, over the workspace that all layers share: one runs at a time. */
static attn_status fit_plan(struct attention *a, struct layer *layer, const struct requests *r)
{
    if (layer->plan == NULL || r->num_rows > layer->max_rows) {
        int32_t rows = 64;
        while (rows < r->num_rows) {
            rows *= 2;
        }
        const struct attn_limits limits = {.struct_size = sizeof limits,
                                           .max_num_reqs = rows,
                                           .max_num_tokens = rows,
                                           .max_seq_len = (int32_t)layer->key.cells};
        const struct attn_plan_options options = {.struct_size = sizeof options, .limits = &limits};
        a->api->plan_destroy(layer->plan);
        layer->max_rows = 0;
        attn_status status =
            a->api->plan_create(layer->model, 0, &options, &layer->plan, &a->error);
        if (status != ATTN_OK) {
            return status;
        }
        layer->max_rows = rows;
    }
    struct attn_workspace workspace = {.struct_size = sizeof workspace};
    attn_status status = a->api->plan_workspace(layer->plan, &workspace, &a->error);
    if (status == ATTN_OK && workspace.bytes > a->workspace_bytes) {
        free(a->workspace);
        a->workspace_bytes = (workspace.bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        a->workspace = aligned_alloc(ALIGNMENT, a->workspace_bytes);
    }
    workspace.memory = a->workspace;
    workspace.bytes = a->workspace_bytes;
    return status == ATTN_OK ? a->api->plan_bind_workspace(layer->plan, &workspace, &a->error)
                             : status;
}

static attn_status run(struct attention *a, struct layer *layer, const struct ggml_tensor *op)
{
    const struct ggml_tensor *q = op->src[0];
    const struct requests *r = &a->requests;
    const struct attn_device cpu = {ATTN_DEVICE_CPU, 0};
    const struct attn_dtype f32 = {ATTN_CODE_FLOAT, 32, 1};
    int64_t q_shape[] = {r->num_rows, q->ne[2], q->ne[0]},
            q_strides[] = {(int64_t)q->nb[1] / 4, (int64_t)q->nb[2] / 4, 1};
    int64_t out_shape[] = {r->num_rows, q->ne[2], op->ne[0]};
    const struct attn_tensor tq = {q->data, cpu, 3, f32, q_shape, q_strides, 0};
    const struct attn_tensor to = {op->data, cpu, 3, f32, out_shape, NULL, 0};
    const struct attn_batch batch = {.struct_size = sizeof batch,
                                     .num_reqs = r->count,
                                     .num_tokens = r->num_rows,
                                     .num_actual_tokens = r->num_rows,
                                     .max_seq_len = r->max_seq_len,
                                     .query_start_loc = r->query_start_loc,
                                     .query_start_loc_host = r->query_start_loc,
                                     .seq_lens = r->seq_lens,
                                     .seq_lens_host = r->seq_lens,
                                     .block_table = r->cells,
                                     .block_table_stride = r->stride};
    const struct attn_step_io io = {
        .struct_size = sizeof io, .flags = ATTN_RUN_NO_WRITE, .q = &tq, .out = &to};
    attn_status status = fit_plan(a, layer, r);
    status = status ? status : a->api->plan_batch(layer->plan, &batch, NULL, &a->error);
    return status ? status : a->api->run(layer->plan, layer->bound, &io, &a->error);
}

bool attention_run(struct attention *a, const struct ggml_tensor *op)
{
    const struct ggml_tensor *k = op->src[1], *v = op->src[2];
    struct layer_key key;
    int64_t first, first_v;
    const char *why;
    describe(op, &key);
    key.k_slot = (int64_t)k->nb[1], key.v_slot = (int64_t)v->nb[1];
    key.k_head = k->ne[2] > 1 ? (int64_t)k->nb[2] : (int64_t)(k->nb[0] * (size_t)k->ne[0]);
    key.v_head = v->ne[2] > 1 ? (int64_t)v->nb[2] : (int64_t)(v->nb[0] * (size_t)v->ne[0]);
    key.cells = cells_of(k, &key.k, &first);
    int64_t cells_v = cells_of(v, &key.v, &first_v);
    if (first_v != first || cells_v != key.cells) { /* k and v have to have the same numbers */
        key.k = k->data, key.v = v->data, first = 0;
        key.cells = k->ne[1] + (k->ne[3] - 1) * (int64_t)(k->nb[3] / k->nb[1]);
    }
    if (!requests_read(&a->requests, op, key.cells, first, (int64_t)(k->nb[3] / k->nb[1]), &why)) {
        fprintf(stderr, "libattn: %s: %s\n", op->name, why);
        return false;
    }
    key.block_size = a->requests.block_size;
    key.causal = a->requests.causal;
    struct layer *layer = find_layer(a, &key);
    if (layer == NULL || run(a, layer, op) != ATTN_OK) {
        fprintf(stderr, "libattn: %s: %s: %s\n", op->name, a->error.field, a->error.message);
        return false;
    }
    return true;
}
