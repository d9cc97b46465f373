/* SPDX-License-Identifier: Apache-2.0 */
/* Which backend serves a shape, or everything that stands against it. */
#include <stdio.h>
#include <stdlib.h>

#include "common/command.h"
#include "common/find.h"
#include "measured.h"

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

attn_status measured_choose(struct measured *measured, const char *backend, struct json *reasons,
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
