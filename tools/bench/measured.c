/* SPDX-License-Identifier: Apache-2.0 */
#include "measured.h"

#include <stdio.h>
#include <stdlib.h>

#include "common/command.h"
#include "common/find.h"
#include "support/number.h"

static attn_status run(void *user, int32_t copy, struct attn_error *error)
{
    struct measured *measured = user;
    const struct measured_io *io = &measured->io[copy];
    return measured->session->api->run(measured->plan, io->layer, &io->step.io, error);
}

static int32_t phase_of(const struct bench_shape *shape)
{
    const double drafts = shape->kind == SHAPE_GDN ? shape->value[PARAMETER_DRAFTS] : 0;
    bool prefills = shape->kind == SHAPE_PREFILL || shape->kind == SHAPE_VARLEN ||
                    shape->kind == SHAPE_WRITE ||
                    ((shape->kind == SHAPE_GDN || shape->kind == SHAPE_SPARSE ||
                      shape->kind == SHAPE_INDEX || shape->kind == SHAPE_TOP_K) &&
                     shape->value[PARAMETER_S] > 1 + drafts);
    return prefills ? ATTN_PHASE_PREFILL : ATTN_PHASE_DECODE;
}

/* An estimate before a backend is chosen: bytes of a layer's cache, in activations or in 8-bit
 * codes, and of its inputs and outputs. */
static double guess_bytes(const struct measured *measured)
{
    const struct attn_layer_desc *desc = &measured->layer.desc;
    int32_t dv = desc->head_size_v > 0 ? desc->head_size_v : desc->head_size;
    double activation = (double)number_bytes(desc->dtype);
    double element = desc->kv_dtype <= ATTN_KV_F32 ? activation : 1;
    double keys = (double)measured->requests.num_keys;
    double tokens = (double)measured->requests.num_tokens;
    if (desc->kind == ATTN_LAYER_RECURRENT) {
        const struct attn_recurrent_desc *gdn = &measured->layer.gdn;
        double of_keys = 2.0 * gdn->num_k_heads * gdn->head_size_k;
        double of_values = (double)gdn->num_v_heads * gdn->head_size_v;
        const double states = (double)measured->requests.count * measured_states(measured);
        return (double)number_bytes(gdn->state_dtype) * states * of_values * gdn->head_size_k +
               tokens * (of_keys + 2 * of_values) * activation;
    }
    bool latent = measured->layer.mla.kv_lora_rank > 0 || measured->layer.indexer.topk > 0;
    return keys * desc->num_kv_heads * (desc->head_size + (latent ? 0 : dv)) * element +
           tokens * desc->num_q_heads * (desc->head_size + dv) * activation;
}

static bool stays_near(const struct measured *measured)
{
    return shape_takes(measured->shape.kind, PARAMETER_ROTATE) &&
           measured->shape.value[PARAMETER_ROTATE] == 0;
}

static void make_layers(struct measured *measured)
{
    bool one = measured->shape.kind == SHAPE_DISPATCH || stays_near(measured);
    measured->num_layers = one ? 1 : work_copies(guess_bytes(measured));
    measured->names = command_calloc((size_t)measured->num_layers, sizeof *measured->names);
    measured->io = command_calloc((size_t)measured->num_layers, sizeof *measured->io);
    for (int32_t i = 0; i < measured->num_layers; i++) {
        snprintf(measured->names[i], sizeof measured->names[i], "layer.%d", i);
    }
}

/* The measured phase is an order, the other one a wish: a backend may serve one phase alone. */
static void order_text(const struct measured *measured, const char *backend, char *text,
                       size_t size)
{
    int32_t other = 1 - measured->phase;
    if (measured->shape.kind == SHAPE_MIXED || measured->shape.kind == SHAPE_WRITE) {
        snprintf(text, size, "%s", backend);
    } else {
        snprintf(text, size, "%s=%s?;%s=%s", phase_names[other], backend,
                 phase_names[measured->phase], backend);
    }
}

static void add_reason(struct json *reasons, const char *backend, const char *phase,
                       const struct attn_reason *reason)
{
    struct json *item = json_object();
    json_add(item, "backend", json_string(backend));
    json_add(item, "phase", json_string(phase));
    json_add(item, "field", json_string(reason->field));
    json_add(item, "asked", json_string(reason->asked));
    json_add(item, "supported", json_string(reason->supported));
    json_push(reasons, item); /* NULL: destroyed */
}

/* Every reason of every backend that was asked for goes to the array, and as many as fit to the
 * text. */
static attn_status tell_reasons(const struct measured *measured, const char *backend, int32_t phase,
                                struct json *reasons, struct attn_error *error)
{
    const struct attn_api *api = measured->session->api;
    const attn_runtime *runtime = measured->session->runtime;
    size_t used = 0, size = sizeof error->message;
    for (int32_t b = 0; b < api->backend_count(runtime); b++) {
        const struct attn_backend_caps *caps = backend_caps(api, runtime, b);
        int32_t verdict, count = 0;
        char name[BACKEND_SIZE];
        if (backend != NULL && !backend_is_named(caps, backend)) {
            continue;
        }
        backend_text(caps, name, sizeof name);
        api->assignment_verdict(measured->assignment, 0, phase, b, &verdict, &count);
        for (int32_t i = 0; i < count; i++) {
            struct attn_reason reason = {.struct_size = sizeof reason};
            api->assignment_reason(measured->assignment, 0, phase, b, i, &reason);
            add_reason(reasons, name, phase_names[phase], &reason);
            if (used < size) {
                used += (size_t)snprintf(error->message + used, size - used,
                                         "%s%s for %s: %s %s (supported: %s)", used ? "; " : "",
                                         name, phase_names[phase], reason.field, reason.asked,
                                         reason.supported);
            }
        }
    }
    if (used == 0) {
        snprintf(error->message, size, "no backend serves the layer for %s", phase_names[phase]);
    }
    snprintf(error->field, sizeof error->field, "not served");
    return error->status = ATTN_ERROR_NO_BACKEND;
}

static attn_status take_choice(struct measured *measured, const char *backend, struct json *reasons,
                               struct attn_error *error)
{
    const struct attn_api *api = measured->session->api;
    for (int32_t i = 0; i <= ATTN_PHASE_DECODE; i++) { /* the measured phase's reasons first */
        const int32_t phase = i == 0 ? measured->phase : 1 - measured->phase;
        const struct attn_choice choice = choice_of(api, measured->assignment, 0, phase);
        if (choice.status != ATTN_OK) {
            return tell_reasons(measured, backend, phase, reasons, error);
        }
        measured->choice = i == 0 ? choice : measured->choice;
    }
    snprintf(measured->backend, sizeof measured->backend, "%s", measured->choice.name);
    if (measured->shape.kind == SHAPE_MIXED) {
        choice_text(api, measured->assignment, 0, measured->backend);
    }
    return ATTN_OK;
}

/* The assignment and the backend's name, or all reasons against it. */
static attn_status choose(struct measured *measured, const char *backend, struct json *reasons,
                          struct attn_error *error)
{
    const struct session *session = measured->session;
    const size_t count = (size_t)measured->num_layers;
    struct attn_layer_desc *layers = command_calloc(count, sizeof *layers);
    const struct attn_layer_desc **pointers = command_calloc(count, sizeof *pointers);
    struct attn_select_options options = SIZED(
        attn_select_options, .device = session->device.device, .flags = ATTN_SELECT_KEEP_UNSERVED);
    char order[512];
    if (backend != NULL) {
        order_text(measured, backend, order, sizeof order);
        options.backend = order;
    }
    for (int32_t i = 0; i < measured->num_layers; i++) {
        layers[i] = measured->layer.desc;
        layers[i].name = measured->names[i];
        pointers[i] = &layers[i];
    }
    attn_status status = session->api->select(session->runtime, &options, pointers,
                                              measured->num_layers, &measured->assignment, error);
    free(pointers);
    free(layers);
    return status ? status : take_choice(measured, backend, reasons, error);
}

static attn_status make(struct measured *measured, const char *backend, struct json *reasons,
                        struct attn_error *error)
{
    const struct session *session = measured->session;
    memory_init(&measured->memory, &session->device);
    if (!requests_init(&measured->requests, &measured->shape, &measured->random)) {
        return memory_refused(error);
    }
    measured_describe(measured);
    make_layers(measured);
    TRY(choose(measured, backend, reasons, error));
    TRY(session->api->model_create(session->runtime, measured->assignment, NULL, &measured->model,
                                   error));
    TRY(measured_bind(measured, error));
    TRY(measured_tensors(measured, error));
    return measured_plan(measured, &measured->memory, &measured->batch, &measured->plan, error);
}

attn_status measured_init(struct measured *measured, struct session *session,
                          const struct bench_shape *shape, const char *backend,
                          struct json *reasons, struct attn_error *error)
{
    *measured = (struct measured){.session = session,
                                  .shape = *shape,
                                  .phase = phase_of(shape),
                                  .random = (uint64_t)shape->value[PARAMETER_SEED]};
    attn_status status = make(measured, backend, reasons, error);
    if (status != ATTN_OK) {
        measured_finish(measured);
        return status;
    }
    measured->work = (struct work){.num_copies = measured->num_layers,
                                   .near = stays_near(measured),
                                   .host_only = shape->kind == SHAPE_DISPATCH,
                                   .run = run,
                                   .user = measured};
    if (!measured->work.host_only) {
        measured_count(measured);
    }
    return ATTN_OK;
}

void measured_finish(struct measured *measured)
{
    const struct attn_api *api = measured->session->api;
    device_wait(&measured->session->device);
    api->plan_destroy(measured->plan);
    api->model_destroy(measured->model);
    api->assignment_destroy(measured->assignment);
    memory_finish(&measured->memory);
    free((void *)(uintptr_t)measured->batch.query_start_loc_host);
    requests_finish(&measured->requests);
    free(measured->table);
    free((void *)(uintptr_t)measured->params);
    free(measured->names);
    free(measured->io);
    *measured = (struct measured){.session = measured->session};
}

double *measured_output(const struct measured *measured, const struct work *work, int64_t *count)
{
    const struct device *device = &measured->session->device;
    const struct attn_tensor *out = measured->io[0].step.io.out;
    int32_t dtype = measured->layer.desc.dtype;
    if (out == NULL || work->run(work->user, 0, NULL) != ATTN_OK || !device_wait(device)) {
        return NULL;
    }
    *count = out->shape[0] * out->shape[1] * out->shape[2];
    const bool lists = measured->layer.indexer.topk > 0; /* int32 is as wide as a float */
    dtype = lists ? ATTN_DTYPE_F32 : dtype;
    size_t bytes = (size_t)*count * number_bytes(dtype);
    void *host = malloc(bytes);
    double *values = malloc((size_t)*count * sizeof *values);
    bool good = host != NULL && values != NULL && device_read(device, host, out->data, bytes);
    for (int64_t i = 0; i < *count && good; i++) {
        values[i] = lists ? ((const int32_t *)host)[i] : number_load(host, i, dtype);
    }
    free(host);
    if (!good) {
        free(values);
    }
    return good ? values : NULL;
}
