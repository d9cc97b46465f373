/* SPDX-License-Identifier: Apache-2.0 */
/* The plugin whose backends are mutants of cpu_ref. */
#include "mutants.h"

#include <string.h>

#include "../step/cpu_ref_plugin.h"

static const struct mutant *mutant_at(int32_t index)
{
    static const struct mutant_list *const lists[] = {
        &attend_mutants, &term_mutants,   &quantized_mutants, &kernel_mutants,
        &mla_mutants,    &gdn_mutants,    &index_mutants,     &list_mutants,
        &output_mutants, &shared_mutants, &call_mutants,      &block_mutants};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        if (index < lists[i]->count) {
            return &lists[i]->mutants[index];
        }
        index -= lists[i]->count;
    }
    return NULL;
}

static const struct mutant *mutant_named(const char *name)
{
    const struct mutant *mutant;
    for (int32_t i = 0; (mutant = mutant_at(i)) != NULL; i++) {
        if (strcmp(mutant->name, name) == 0) {
            return mutant;
        }
    }
    return NULL;
}

static const struct attn_plugin *real_plugin(struct attn_error *error)
{
    const struct attn_plugin *plugin = NULL;
    return cpu_ref_plugin(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &plugin, error) == ATTN_OK
               ? plugin
               : NULL;
}

struct forward {
    const struct attn_probe_sink *sink;
};

static attn_status forward_device(void *user, const struct attn_device_info *device,
                                  struct attn_error *why)
{
    const struct forward *forward = user;
    return forward->sink->device(forward->sink->user, device, why);
}

static attn_status forward_backend(void *user, const struct attn_backend_caps *caps,
                                   struct attn_error *why)
{
    const struct forward *forward = user;
    attn_status status = ATTN_OK;
    const struct mutant *mutant;
    for (int32_t i = 0; (mutant = mutant_at(i)) != NULL && status == ATTN_OK; i++) {
        struct attn_backend_caps mine = *caps;
        struct attn_mla_caps latent;
        mine.name = mutant->name;
        if (mutant->latent != NULL) {
            latent = *mutant->latent;
            latent.ext.next = caps->next->next; /* behind cpu_ref's own */
            mine.next = &latent.ext;
        }
        mine.kernels &= ~ATTN_KERNEL_COPY;
        mine.kernels |= mutant->table != NULL ? ATTN_KERNEL_MAKE_BLOCK_TABLE : 0;
        mine.layer_kinds &=
            ~((UINT64_C(1) << ATTN_LAYER_MLA) | (UINT64_C(1) << ATTN_LAYER_RECURRENT));
        mine.features |= mutant->features;
        mine.output_forms |= mutant->codes != NULL ? (1u << (ATTN_OUTPUT_NVFP4 + 1)) - 1 : 0;
        mine.rank[0] = mine.rank[1] = -1;
        status = forward->sink->backend(forward->sink->user, &mine, why);
    }
    return status;
}

static attn_status mutants_probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                                 struct attn_error *error)
{
    struct forward forward = {sink};
    struct attn_probe_sink mine = {sizeof mine, NULL, &forward, forward_device, forward_backend};
    const struct attn_plugin *plugin = real_plugin(error);
    return plugin != NULL ? plugin->probe(host, &mine, error) : ATTN_ERROR_PLUGIN;
}

static attn_status mutants_supports(const struct attn_supports_args *args,
                                    const struct attn_reason_sink *reasons,
                                    struct attn_error *error)
{
    const struct attn_plugin *plugin = real_plugin(error);
    return plugin != NULL ? plugin->supports(args, reasons, error) : ATTN_ERROR_PLUGIN;
}

static void mutants_destroy(attn_instance *instance)
{
    if (instance != NULL) {
        instance->plugin->destroy(instance->real);
        instance->host->release(instance->host->user, instance, sizeof *instance);
    }
}

static attn_status mutants_create(const struct attn_create_args *args, attn_instance **instance,
                                  const struct attn_kernels **kernels, struct attn_error *error)
{
    const struct mutant *mutant = mutant_named(args->backend);
    if (mutant == NULL) {
        *instance = NULL;
        *kernels = NULL;
        return ATTN_ERROR_NOT_FOUND;
    }
    if (!mutant->leaves_outputs) {
        *instance = NULL;
        *kernels = NULL;
    }
    attn_instance *me = args->host->allocate(args->host->user, sizeof *me, 16);
    if (me == NULL) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    *me =
        (struct attn_instance){NULL, real_plugin(error), NULL, args->host, mutant, mutant_kernels};
    me->table.make_block_table = mutant->table != NULL ? mutant_kernels.make_block_table : NULL;
    struct attn_create_args of_real = *args;
    of_real.backend = "cpu_ref";
    attn_status status = me->plugin == NULL
                             ? ATTN_ERROR_PLUGIN
                             : me->plugin->create(&of_real, &me->real, &me->kernels, error);
    if (status != ATTN_OK) {
        args->host->release(args->host->user, me, sizeof *me);
        return status;
    }
    *instance = me;
    *kernels = &me->table;
    return ATTN_OK;
}

static const struct attn_plugin mutants_plugin = {
    .struct_size = sizeof mutants_plugin,
    .abi_version = ATTN_ABI_VERSION,
    .name = "mutants",
    .version = "0.1.0",
    .vendor = "libattn tests",
    .probe = mutants_probe,
    .supports = mutants_supports,
    .create = mutants_create,
    .destroy = mutants_destroy,
};

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
    if (!ATTN_VERSION_SERVES(abi_version_min, abi_version_max)) {
        return ATTN_ERROR_ABI_VERSION;
    }
    *plugin = &mutants_plugin;
    return ATTN_OK;
}
