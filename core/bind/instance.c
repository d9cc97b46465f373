/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "bind/bound.h"

/* Slots that are there together or not at all. */
static attn_status check_groups(const struct attn_kernels *k, const char *name,
                                struct attn_error *error)
{
    const struct {
        const char *slots;
        int32_t count, there;
    } groups[] = {
        {"allocate_memory, free_memory", 2, !!k->allocate_memory + !!k->free_memory},
        {"create_stream, destroy_stream, synchronize", 3,
         !!k->create_stream + !!k->destroy_stream + !!k->synchronize},
        {"create_event, record_event, elapsed, destroy_event", 4,
         !!k->create_event + !!k->record_event + !!k->elapsed + !!k->destroy_event},
        {"create_plan_state, destroy_plan_state", 2,
         !!k->create_plan_state + !!k->destroy_plan_state},
        {"begin_capture, end_capture, launch_graph, destroy_graph", 4,
         !!k->begin_capture + !!k->end_capture + !!k->launch_graph + !!k->destroy_graph},
    };
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        ERROR_IF(groups[i].there != 0 && groups[i].there != groups[i].count, ATTN_ERROR_PLUGIN,
                 "attn_kernels", "%s has some of the slots %s; all are there or none", name,
                 groups[i].slots);
    }
    return ATTN_OK;
}

/* The declared mask against the slots that are there. */
static attn_status check_slots(const struct instance *instance, const char *name,
                               struct attn_error *error)
{
    const struct attn_kernels *k = &instance->kernels;
    const bool there[NUM_KERNELS] = {
        k->attend != NULL,        k->write_kv != NULL,   k->merge_states != NULL,
        k->rope_write_kv != NULL, k->attend_mla != NULL, k->attend_mla_sparse != NULL,
        k->gather_kv != NULL,     k->recurrent != NULL,  k->batched_gemm != NULL,
        k->quantize != NULL,      k->amax != NULL,       k->copy_blocks != NULL,
        k->copy != NULL,          k->fill != NULL,       k->make_block_table != NULL};
    for (int32_t i = 0; i < NUM_KERNELS; i++) {
        if ((instance->caps->kernels >> i & 1) && !there[i]) {
            const char *kernel = code_name(ATTN_NAMES_KERNEL, i);
            return error_set(error, ATTN_ERROR_PLUGIN, kernel,
                             "%s declares the kernel %s and has NULL in its place", name, kernel);
        }
    }
    ERROR_IF(k->prepare != NULL && k->release == NULL, ATTN_ERROR_PLUGIN, "release",
             "%s has prepare without release", name);
    return check_groups(k, name, error);
}

/* The engine's options that are this backend's, without its name. */
static attn_status take_options(attn_runtime *runtime, const struct attn_model_options *from,
                                struct attn_create_args *args, const char ***list,
                                struct attn_error *error)
{
    const size_t length = strlen(args->backend);
    *list = NULL;
    if (from->num_backend_options == 0) {
        return ATTN_OK;
    }
    *list = runtime_alloc(runtime, (size_t)from->num_backend_options * sizeof **list);
    NO_MEMORY_IF(*list == NULL, "backend_options", "them");
    for (int32_t i = 0; i < from->num_backend_options; i++) {
        const char *option = from->backend_options[i];
        if (strncmp(option, args->backend, length) == 0 && option[length] == '.') {
            (*list)[args->num_options++] = option + length + 1;
        }
    }
    args->options = *list;
    return ATTN_OK;
}

static attn_status create(attn_runtime *runtime, struct instance *instance, const char *name,
                          const struct attn_model_options *options, struct attn_error *error)
{
    const struct attn_kernels *kernels = NULL;
    const struct attn_backend_caps *caps = instance->caps;
    struct attn_error why = ATTN_ERROR_INIT;
    struct attn_create_args args =
        ABI_ARGS(.host = &runtime->host, .backend = caps->name, .variant = caps->variant,
                 .device = caps->device, .native_device = options->native_device,
                 .native_context = options->native_context);
    char folder[4096 + 128];
    if (runtime->settings.cache_dir[0] != '\0') {
        snprintf(folder, sizeof folder, "%s/kernels/%s", runtime->settings.cache_dir, caps->name);
        args.cache_dir = folder;
    }
    const char **list;
    TRY(take_options(runtime, options, &args, &list, error));
    const attn_status status = instance->plugin->create(&args, &instance->handle, &kernels, &why);
    runtime_free(runtime, list, (size_t)options->num_backend_options * sizeof *list);
    if (status != ATTN_OK) {
        instance->handle = NULL;
        return error_relay(error, status, &why);
    }
    ERROR_IF(instance->handle == NULL || kernels == NULL, ATTN_ERROR_PLUGIN, "create",
             "%s answered ATTN_OK without %s", name,
             instance->handle == NULL ? "an instance" : "kernels");
    TRY(struct_read(&instance->kernels, ABI_KERNELS, kernels, error));
    TRY(check_slots(instance, name, error));
    if (caps->device.type == ATTN_DEVICE_CPU) {
        struct attn_kernels *k = &instance->kernels;
        k->copy = k->copy != NULL ? k->copy : host_kernels.copy;
        k->fill = k->fill != NULL ? k->fill : host_kernels.fill;
        k->copy_blocks = k->copy_blocks != NULL ? k->copy_blocks : host_kernels.copy_blocks;
    }
    return ATTN_OK;
}

attn_status instance_create(attn_runtime *runtime, int32_t backend,
                            const struct attn_model_options *options, struct instance *instance,
                            struct attn_error *error)
{
    const struct backend *found = &runtime->backends[backend];
    *instance = (struct instance){.backend = backend, .caps = &found->caps};
    attn_status status = runtime_plugin_table(runtime, found->plugin, &instance->plugin, error);
    if (status == ATTN_OK) {
        status = create(runtime, instance, found->full_name, options, error);
    }
    if (status != ATTN_OK) {
        instance_finish(instance);
    }
    return status;
}

attn_status model_make_instance(attn_model *model, int32_t backend, struct instance **out,
                                struct attn_error *error)
{
    for (int32_t i = 0; i < model->num_instances; i++) {
        if (model->instances[i].backend == backend) {
            *out = &model->instances[i];
            return ATTN_OK;
        }
    }
    struct instance *instance = &model->instances[model->num_instances];
    attn_status status = instance_create(model->runtime, backend, &model->options, instance, error);
    if (status == ATTN_OK) {
        model->num_instances++;
        *out = instance;
    }
    return status;
}

void instance_finish(struct instance *instance)
{
    if (instance->handle != NULL && instance->plugin->destroy != NULL) {
        instance->plugin->destroy(instance->handle);
    }
    memset(instance, 0, sizeof *instance);
}
