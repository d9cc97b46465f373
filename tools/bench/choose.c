/* SPDX-License-Identifier: Apache-2.0 */
/* Which backend serves a shape, or everything that stands against it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/find.h"
#include "subject.h"

static const char *const phase_names[] = {"prefill", "decode"};

/* The measured phase is an order, the other one a wish: a backend may serve one phase alone. */
static void order_text(const struct subject *subject, const char *backend, char *text, size_t size)
{
    int32_t other = 1 - subject->phase;
    if (subject->shape.kind == SHAPE_MIXED || subject->shape.kind == SHAPE_WRITE) {
        snprintf(text, size, "%s", backend);
    } else {
        snprintf(text, size, "%s=%s?;%s=%s", phase_names[other], backend,
                 phase_names[subject->phase], backend);
    }
}

static void add_reason(struct json *reasons, const char *backend, const char *phase,
                       const struct attn_reason *reason)
{
    struct json *item = reasons != NULL ? json_object() : NULL;
    if (item != NULL) {
        json_add(item, "backend", json_string(backend));
        json_add(item, "phase", json_string(phase));
        json_add(item, "field", json_string(reason->field));
        json_add(item, "asked", json_string(reason->asked));
        json_add(item, "supported", json_string(reason->supported));
        json_push(reasons, item);
    }
}

/* Every reason of every backend that was asked for goes to the array, and as many as fit to the
 * text. */
static attn_status tell_reasons(const struct subject *subject, const char *backend, int32_t phase,
                                struct json *reasons, struct attn_error *error)
{
    const struct attn_api *api = subject->session->api;
    const attn_runtime *runtime = subject->session->runtime;
    size_t used = 0, size = sizeof error->message;
    for (int32_t b = 0; b < api->backend_count(runtime); b++) {
        struct attn_backend_info info = {.struct_size = sizeof info};
        int32_t verdict, count = 0;
        char name[160];
        api->backend_info(runtime, b, &info);
        if (backend != NULL && !backend_is_named(info.caps, backend)) {
            continue;
        }
        snprintf(name, sizeof name, "%s%s%s", info.caps->name,
                 info.caps->variant[0] != '\0' ? "@" : "", info.caps->variant);
        api->assignment_verdict(subject->assignment, 0, phase, b, &verdict, &count);
        for (int32_t i = 0; i < count; i++) {
            struct attn_reason reason = {.struct_size = sizeof reason};
            api->assignment_reason(subject->assignment, 0, phase, b, i, &reason);
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

static attn_status take_choice(struct subject *subject, const char *backend, struct json *reasons,
                               struct attn_error *error)
{
    const struct attn_api *api = subject->session->api;
    struct attn_choice choices[ATTN_PHASE_DECODE + 1];
    for (int32_t i = 0; i <= ATTN_PHASE_DECODE; i++) { /* the measured phase's reasons first */
        int32_t phase = i == 0 ? subject->phase : 1 - subject->phase;
        choices[phase] = (struct attn_choice){.struct_size = sizeof choices[phase]};
        api->assignment_choice(subject->assignment, 0, phase, &choices[phase]);
        if (choices[phase].status != ATTN_OK) {
            return tell_reasons(subject, backend, phase, reasons, error);
        }
    }
    const char *prefill = choices[ATTN_PHASE_PREFILL].name;
    const char *decode = choices[ATTN_PHASE_DECODE].name;
    subject->choice = choices[subject->phase];
    bool both = subject->shape.kind == SHAPE_MIXED && strcmp(prefill, decode) != 0;
    snprintf(subject->backend, sizeof subject->backend, "%.70s%s%.70s",
             both ? prefill : subject->choice.name, both ? "/" : "", both ? decode : "");
    return ATTN_OK;
}

attn_status subject_choose(struct subject *subject, const char *backend, struct json *reasons,
                           struct attn_error *error)
{
    const struct session *session = subject->session;
    struct attn_layer_desc *layers = calloc((size_t)subject->num_layers, sizeof *layers);
    const struct attn_layer_desc **pointers = calloc((size_t)subject->num_layers, sizeof *pointers);
    struct attn_select_options options = {.struct_size = sizeof options,
                                          .device = session->device.device,
                                          .flags = ATTN_SELECT_KEEP_UNSERVED};
    char order[512];
    attn_status status = ATTN_ERROR_OUT_OF_MEMORY;
    if (backend != NULL) {
        order_text(subject, backend, order, sizeof order);
        options.backend = order;
    }
    if (layers != NULL && pointers != NULL) {
        for (int32_t i = 0; i < subject->num_layers; i++) {
            layers[i] = subject->layer.desc;
            layers[i].name = subject->names[i];
            pointers[i] = &layers[i];
        }
        status = session->api->select(session->runtime, &options, pointers, subject->num_layers,
                                      &subject->assignment, error);
        status = status == ATTN_OK ? take_choice(subject, backend, reasons, error) : status;
    } else {
        memory_refused(error);
    }
    free(pointers);
    free(layers);
    return status;
}
