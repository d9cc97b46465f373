/* SPDX-License-Identifier: Apache-2.0 */
/* An assignment bound: a model with its instances, layers and groups. */
#include <string.h>

#include "bind/bound.h"
#include "select/steering.h"

static attn_status find_compositions(attn_layer *layer, struct attn_error *error)
{
    const uint32_t composed = layer->served[0].composed | layer->served[1].composed;
    for (int32_t i = 0; compositions[i] != NULL; i++) {
        const struct composition *c = compositions[i];
        if (c->composed != 0 ? composed & c->composed : layer->selected->read_by >> i & 1) {
            layer->composed_by |= 1u << i;
            layer->data[i] = arena_alloc(&layer->model->arena, c->layer_bytes);
        }
    }
    return layer->model->arena.failed ? NO_MEMORY("model", "layer '%s'", layer->desc->name)
                                      : ATTN_OK;
}

static attn_status bind_layer(attn_model *model, int32_t index,
                              const struct assignment_layer *source, struct attn_error *error)
{
    attn_layer *layer = &model->layers[index];
    layer->model = model;
    layer->index = index;
    layer->selected = &source->layer;
    layer->desc = &source->layer.desc;
    layer->owner =
        source->layer.sharing_target >= 0 ? &model->layers[source->layer.sharing_target] : layer;
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        const struct attn_choice *choice = &source->phases[phase].choice;
        struct served *served = &layer->served[phase];
        served->composed = choice->composed;
        served->graph_level = choice->graph_level;
        TRY(model_make_instance(model, choice->backend, &served->instance, error));
    }
    TRY(find_compositions(layer, error));
    TRY(layer_make_spec(layer, source->phases[ATTN_PHASE_DECODE].choice.layout, error));
    TRY(layer_make_caches(layer, error));
    return layer_make_parts(layer, error);
}

static attn_status fill_model(attn_model *model, const attn_assignment *assignment,
                              struct attn_error *error)
{
    size_t layers = (size_t)assignment->num_layers, backends = (size_t)assignment->num_backends;
    model->layers = arena_array(&model->arena, layers, sizeof *model->layers);
    model->instances = arena_array(&model->arena, backends, sizeof *model->instances);
    NO_MEMORY_IF(model->layers == NULL || model->instances == NULL, "model", "%zu layers", layers);
    for (int32_t i = 0; i < assignment->num_layers; i++) {
        TRY(bind_layer(model, i, &assignment->layers[i], error));
        model->num_layers++;
    }
    for (int32_t i = model->num_instances - 1; i >= 0; i--) {
        const struct instance *instance = &model->instances[i];
        model->asked = instance->kernels.memory_device != NULL ? instance : model->asked;
    }
    model_make_groups(model);
    return ATTN_OK;
}

/* Each option is of a backend that the runtime has: a name of no backend is an error. */
static attn_status check_options(const attn_runtime *runtime, const struct attn_model_options *o,
                                 struct attn_error *error)
{
    BAD_IF(o->num_backend_options < 0 || (o->num_backend_options > 0 && o->backend_options == NULL),
           "backend_options", "%d options at %p; a count from 0 with an array is needed",
           o->num_backend_options, (const void *)o->backend_options);
    for (int32_t i = 0; i < o->num_backend_options; i++) {
        const char *option = o->backend_options[i];
        const char *dot = option != NULL ? strchr(option, '.') : NULL;
        bool known = false;
        for (int32_t b = 0; dot != NULL && strchr(dot, '=') != NULL && b < runtime->num_backends;
             b++) {
            const char *name = runtime->backends[b].caps.name;
            known |= strlen(name) == (size_t)(dot - option) &&
                     strncmp(name, option, (size_t)(dot - option)) == 0;
        }
        BAD_IF(!known, "backend_options",
               "option %d is '%s'; \"backend.key=value\" of a backend that is there", i,
               option != NULL ? option : "(NULL)");
    }
    return ATTN_OK;
}

attn_status model_create(attn_runtime *runtime, const attn_assignment *assignment,
                         const struct attn_model_options *options, attn_model **out,
                         struct attn_error *error)
{
    struct attn_model_options read = {.struct_size = sizeof read};
    BAD_IF(out == NULL, "model", "model is NULL");
    *out = NULL;
    BAD_IF(runtime == NULL || assignment == NULL || assignment->runtime != runtime, "assignment",
           "runtime %p, assignment %p; both are needed, and the assignment has to be this "
           "runtime's",
           (void *)runtime, (const void *)assignment);
    ERROR_IF(!assignment->complete, ATTN_ERROR_ORDER, "assignment",
             "a layer of the assignment has no backend; it can be read, not bound");
    if (options != NULL) {
        TRY(struct_read(&read, ABI_MODEL_OPTIONS, options, error));
        TRY(check_options(runtime, &read, error));
    }
    attn_model *model = runtime_alloc(runtime, sizeof *model);
    NO_MEMORY_IF(model == NULL, "model", "the model");
    model->runtime = runtime;
    model->assignment = assignment_keep(assignment);
    model->device = assignment->device != NULL ? assignment->device->device
                                               : (struct attn_device){ATTN_DEVICE_CPU, 0};
    model->options = read;
    arena_init(&model->arena, &runtime->host);
    lock_init(&model->lock);
    attn_status status = steering.hold(assignment, error);
    status = status == ATTN_OK ? fill_model(model, assignment, error) : status;
    if (status != ATTN_OK) {
        model_destroy(model);
        return status;
    }
    *out = model;
    return ATTN_OK;
}

void model_destroy(attn_model *model)
{
    if (model == NULL) {
        return;
    }
    for (int32_t i = 0; i < model->num_layers; i++) {
        layer_release_states(&model->layers[i]);
    }
    for (int32_t i = 0; i < model->num_instances; i++) {
        instance_finish(&model->instances[i]);
    }
    attn_runtime *runtime = model->runtime;
    lock_finish(&model->lock);
    arena_finish(&model->arena);
    assignment_destroy(model->assignment);
    runtime_free(runtime, model, sizeof *model);
}

attn_layer *model_layer(attn_model *model, int32_t index)
{
    return model != NULL && index >= 0 && index < model->num_layers ? &model->layers[index] : NULL;
}
