/* SPDX-License-Identifier: Apache-2.0 */
#include "subject.h"

#include <stdio.h>
#include <stdlib.h>

#include "support/number.h"

static attn_status run(void *user, int32_t copy, struct attn_error *error)
{
    struct subject *subject = user;
    const struct attn_api *api = subject->session->api;
    return api->run(subject->plan, api->model_layer(subject->model, copy), &subject->io[copy].io,
                    error);
}

static int32_t phase_of(const struct shape *shape)
{
    bool prefills = shape->kind == SHAPE_PREFILL || shape->kind == SHAPE_VARLEN ||
                    shape->kind == SHAPE_WRITE ||
                    (shape->kind == SHAPE_GDN && shape->value[PARAMETER_S] > 1);
    return prefills ? ATTN_PHASE_PREFILL : ATTN_PHASE_DECODE;
}

/* Before a backend is known: a layer's cache at the width of the activations or of 8-bit codes, and
 * what goes in and out next to it. */
static double guess_bytes(const struct subject *subject)
{
    const struct attn_layer_desc *desc = &subject->layer.desc;
    int32_t dv = desc->head_size_v > 0 ? desc->head_size_v : desc->head_size;
    double activation = (double)number_bytes(desc->dtype);
    double element = desc->kv_dtype <= ATTN_KV_F32 ? activation : 1;
    double keys = (double)subject->requests.num_keys;
    double tokens = (double)subject->requests.num_tokens;
    if (desc->kind == ATTN_LAYER_RECURRENT) {
        const struct attn_recurrent_desc *gdn = &subject->layer.gdn;
        double of_keys = 2.0 * gdn->num_k_heads * gdn->head_size_k;
        double of_values = (double)gdn->num_v_heads * gdn->head_size_v;
        return 4.0 * subject->requests.count * of_values * gdn->head_size_k +
               tokens * (of_keys + 2 * of_values) * activation;
    }
    bool latent = subject->layer.mla.kv_lora_rank > 0;
    return keys * desc->num_kv_heads * (desc->head_size + (latent ? 0 : dv)) * element +
           tokens * desc->num_q_heads * (desc->head_size + dv) * activation;
}

static bool stays_near(const struct subject *subject)
{
    return shape_takes(subject->shape.kind, PARAMETER_ROTATE) &&
           subject->shape.value[PARAMETER_ROTATE] == 0;
}

static bool make_layers(struct subject *subject)
{
    bool one = subject->shape.kind == SHAPE_DISPATCH || stays_near(subject);
    subject->num_layers = one ? 1 : work_copies(guess_bytes(subject));
    subject->names = calloc((size_t)subject->num_layers, sizeof *subject->names);
    subject->io = calloc((size_t)subject->num_layers, sizeof *subject->io);
    for (int32_t i = 0; subject->names != NULL && i < subject->num_layers; i++) {
        snprintf(subject->names[i], sizeof subject->names[i], "layer.%d", i);
    }
    return subject->names != NULL && subject->io != NULL;
}

attn_status subject_init(struct subject *subject, struct session *session,
                         const struct shape *shape, const char *backend, struct json *reasons,
                         struct attn_error *error)
{
    const struct attn_api *api = session->api;
    attn_status status = ATTN_OK;
    *subject = (struct subject){.session = session, .shape = *shape, .phase = phase_of(shape)};
    subject->random = (uint64_t)shape->value[PARAMETER_SEED];
    memory_init(&subject->memory, &session->device);
    if (!requests_init(&subject->requests, shape, &subject->random)) {
        status = memory_refused(error);
    }
    if (status == ATTN_OK) {
        subject_describe(subject);
        status = make_layers(subject) ? ATTN_OK : memory_refused(error);
    }
    status = status == ATTN_OK ? subject_choose(subject, backend, reasons, error) : status;
    if (status == ATTN_OK) {
        status =
            api->model_create(session->runtime, subject->assignment, NULL, &subject->model, error);
    }
    status = status == ATTN_OK ? subject_bind(subject, error) : status;
    status = status == ATTN_OK ? subject_tensors(subject, error) : status;
    status = status == ATTN_OK
                 ? subject_plan(subject, &subject->memory, &subject->batch, &subject->plan, error)
                 : status;
    if (status != ATTN_OK) {
        subject_finish(subject);
        return status;
    }
    subject->work = (struct work){.num_copies = subject->num_layers,
                                  .near = stays_near(subject),
                                  .run = run,
                                  .user = subject};
    subject_count(subject);
    return ATTN_OK;
}

void subject_finish(struct subject *subject)
{
    const struct attn_api *api = subject->session->api;
    device_wait(&subject->session->device);
    api->plan_destroy(subject->plan);
    api->model_destroy(subject->model);
    api->assignment_destroy(subject->assignment);
    memory_finish(&subject->memory);
    free((void *)(uintptr_t)subject->batch.query_start_loc_host);
    requests_finish(&subject->requests);
    free(subject->table);
    free(subject->names);
    free(subject->io);
    *subject = (struct subject){.session = subject->session};
}
