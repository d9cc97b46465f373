/* SPDX-License-Identifier: Apache-2.0 */
/* The plugin whose backends are mutants of cpu_ref. */
#include "mutants.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define PLAN_BYTES sizeof(struct kept)

struct attn_instance {
    attn_instance *real;
    const struct attn_plugin *plugin;
    const struct attn_kernels *kernels;
    const struct attn_host *host;
    const struct mutant *mutant;
};

static attn_status mutant_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_instance *me = args->instance;
    const struct mutant *mutant = me->mutant;
    static _Thread_local struct mutable_args m;
    m.args = *args;
    m.args.instance = me->real;
    m.layer = *args->layer;
    m.params = *args->params;
    m.batch = *args->batch;
    if (mutant->before != NULL) {
        mutant->before(&m);
    }
    if (mutant->planned != NULL) {
        mutant->planned(&m, args->plan_host);
    }
    if (mutant->allocates) {
        me->host->release(me->host->user, me->host->allocate(me->host->user, 64, 64), 64);
    }
    m.args.layer = &m.layer;
    m.args.params = &m.params;
    m.args.batch = &m.batch;
    /* cpu_ref's attend writes in decodes of few caches only */
    m.args.flags |= mutant->features & ATTN_FEATURE_FUSED_WRITE ? ATTN_RUN_NO_WRITE : 0;
    bool writes = mutant->fused && !(args->flags & ATTN_RUN_NO_WRITE) && args->k != NULL;
    if (writes && args->k_cache != NULL) { /* a cross layer brings its keys once */
        const struct attn_write_kv_args write = {.struct_size = sizeof write,
                                                 .instance = me->real,
                                                 .layer = args->layer,
                                                 .params = args->params,
                                                 .k_cache = args->k_cache,
                                                 .v_cache = args->v_cache,
                                                 .slot_mapping = args->batch->slot_mapping,
                                                 .num_slots = args->batch->num_slots,
                                                 .stream = args->stream,
                                                 .k = args->k,
                                                 .v = args->v};
        attn_status status = me->kernels->write_kv(&write, error);
        if (status != ATTN_OK) {
            return status;
        }
    }
    attn_status status = me->kernels->attend(&m.args, error);
    if (status == ATTN_OK && mutant->after != NULL) {
        mutant->after(args);
    }
    return status;
}

static attn_status mutant_mla(const struct attn_attend_args *args, bool sparse,
                              struct attn_error *error)
{
    const struct attn_instance *me = args->instance;
    static _Thread_local struct mutable_args m;
    if (me->mutant->mla_takes != NULL && me->mutant->mla_takes(args) != ATTN_OK) {
        return me->mutant->mla_takes(args);
    }
    m.args = *args;
    m.args.instance = me->real;
    m.layer = *args->layer;
    m.params = *args->params;
    m.batch = *args->batch;
    if (me->mutant->mla != NULL) {
        me->mutant->mla(&m);
    }
    m.args.layer = &m.layer;
    m.args.params = &m.params;
    m.args.batch = &m.batch;
    attn_status status = sparse ? me->kernels->attend_mla_sparse(&m.args, error)
                                : me->kernels->attend_mla(&m.args, error);
    if (status == ATTN_OK && me->mutant->mla_after != NULL) {
        me->mutant->mla_after(args);
    }
    return status;
}

static attn_status mutant_mla_dense(const struct attn_attend_args *args, struct attn_error *error)
{
    return mutant_mla(args, false, error);
}

static attn_status mutant_mla_sparse(const struct attn_attend_args *args, struct attn_error *error)
{
    return mutant_mla(args, true, error);
}

static attn_status mutant_plan_size(attn_instance *me, attn_state *state,
                                    const struct attn_limits *limits, struct attn_plan_size *size,
                                    struct attn_error *error)
{
    (void)me;
    (void)state;
    (void)limits;
    (void)error;
    size->host_bytes = PLAN_BYTES;
    size->device_bytes = 64;
    return ATTN_OK;
}

static attn_status mutant_plan(const struct attn_attend_args *args, int32_t mode,
                               struct attn_error *error)
{
    const struct mutant *mutant = args->instance->mutant;
    (void)error;
    if (mutant->plan != NULL) {
        mutant->plan(args, mode, args->plan_host);
    }
    if (mutant->overruns_plan) {
        memset(args->workspace, 0, 64 + 1);
    }
    return ATTN_OK;
}

static attn_status mutant_update(const struct attn_attend_args *args, struct attn_error *error)
{
    return args->instance->mutant->ignores_updates ? ATTN_OK
                                                   : mutant_plan(args, ATTN_PLAN_EAGER, error);
}

/* Every kernel: the mutant's own, or cpu_ref's, with the instance behind. */
#define FORWARD(function, kernel, slot, type)                                                      \
    static attn_status function(const struct type *args, struct attn_error *error)                 \
    {                                                                                              \
        const struct attn_instance *me = args->instance;                                           \
        struct type changed = *args;                                                               \
        changed.instance = me->real;                                                               \
        return me->mutant->slot != NULL ? me->mutant->slot(me->kernels, &changed, error)           \
                                        : me->kernels->kernel(&changed, error);                    \
    }

FORWARD(mutant_write, write_kv, write, attn_write_kv_args)
FORWARD(mutant_rope, rope_write_kv, rope, attn_write_kv_args)
FORWARD(mutant_merge, merge_states, merge, attn_merge_states_args)
FORWARD(mutant_gather, gather_kv, gather, attn_gather_kv_args)
FORWARD(mutant_gemm, batched_gemm, gemm, attn_batched_gemm_args)
FORWARD(mutant_quantize, quantize, quantize, attn_quantize_args)
FORWARD(mutant_amax, amax, amax, attn_amax_args)
FORWARD(mutant_gdn, gated_delta, gdn, attn_attend_args)
FORWARD(mutant_copy_blocks, copy_blocks, copy_blocks, attn_copy_blocks_args)

static attn_status mutant_fill(attn_instance *me, void *destination, int32_t value,
                               size_t row_bytes, size_t stride, int64_t rows, void *stream,
                               struct attn_error *error)
{
    fill_kernel *fill = me->mutant->fill;
    return fill != NULL
               ? fill(me->kernels, me->real, destination, value, row_bytes, stride, rows, error)
               : me->kernels->fill(me->real, destination, value, row_bytes, stride, rows, stream,
                                   error);
}

static const struct attn_kernels mutant_kernels = {
    .struct_size = sizeof mutant_kernels,
    .attend = mutant_attend,
    .attend_mla = mutant_mla_dense,
    .attend_mla_sparse = mutant_mla_sparse,
    .write_kv = mutant_write,
    .merge_states = mutant_merge,
    .rope_write_kv = mutant_rope,
    .gather_kv = mutant_gather,
    .gated_delta = mutant_gdn,
    .batched_gemm = mutant_gemm,
    .quantize = mutant_quantize,
    .amax = mutant_amax,
    .copy_blocks = mutant_copy_blocks,
    .plan_size = mutant_plan_size,
    .plan = mutant_plan,
    .update_block_table = mutant_update,
    .fill = mutant_fill,
};

static const struct mutant *mutant_at(int32_t index)
{
    static const struct mutant_list *const lists[] = {
        &attend_mutants, &term_mutants, &quantized_mutants, &kernel_mutants,
        &mla_mutants,    &gdn_mutants,  &shared_mutants};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        if (index < lists[i]->count) {
            return &lists[i]->mutants[index];
        }
        index -= lists[i]->count;
    }
    return NULL;
}

static const struct attn_plugin *real_plugin(struct attn_error *error)
{
    const struct attn_plugin *plugin = NULL;
    attn_plugin_entry_fn *entry;
    void *library = dlopen(CPU_REF_FILE, RTLD_NOW | RTLD_LOCAL);
    void *symbol = library != NULL ? dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL) : NULL;
    if (symbol == NULL) {
        return NULL;
    }
    memcpy(&entry, &symbol, sizeof entry);
    return entry(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &plugin, error) == ATTN_OK ? plugin : NULL;
}

struct forward {
    const struct attn_probe_sink *sink;
};

static attn_status forward_device(void *user, const struct attn_device_info *device)
{
    const struct forward *forward = user;
    return forward->sink->device(forward->sink->user, device);
}

static attn_status forward_backend(void *user, const struct attn_backend_caps *caps)
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
        mine.layer_kinds &= ~((UINT64_C(1) << ATTN_LAYER_MLA) | (UINT64_C(1) << ATTN_LAYER_GDN) |
                              (UINT64_C(1) << ATTN_LAYER_MLA_SPARSE));
        mine.features |= mutant->features;
        mine.rank[0] = mine.rank[1] = -1;
        status = forward->sink->backend(forward->sink->user, &mine);
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

static attn_status mutants_supports(const struct attn_backend_caps *caps,
                                    const struct attn_layer_desc *layer, int32_t phase,
                                    const struct attn_reason_sink *reasons,
                                    struct attn_error *error)
{
    const struct attn_plugin *plugin = real_plugin(error);
    return plugin != NULL ? plugin->supports(caps, layer, phase, reasons, error)
                          : ATTN_ERROR_PLUGIN;
}

static void mutants_destroy(attn_instance *instance)
{
    if (instance != NULL) {
        instance->plugin->destroy(instance->real);
        instance->host->release(instance->host->user, instance, sizeof *instance);
    }
}

static attn_status mutants_create(const struct attn_host *host, const char *backend,
                                  const char *variant, struct attn_device device,
                                  attn_instance **instance, const struct attn_kernels **kernels,
                                  struct attn_error *error)
{
    attn_instance *me = host->allocate(host->user, sizeof *me, 16);
    attn_status status = me != NULL ? ATTN_ERROR_NOT_FOUND : ATTN_ERROR_OUT_OF_MEMORY;
    *instance = NULL;
    *kernels = NULL;
    const struct mutant *mutant;
    for (int32_t i = 0; me != NULL && (mutant = mutant_at(i)) != NULL; i++) {
        if (strcmp(mutant->name, backend) == 0) {
            *me = (struct attn_instance){NULL, real_plugin(error), NULL, host, mutant};
            status = me->plugin == NULL ? ATTN_ERROR_PLUGIN
                                        : me->plugin->create(host, "cpu_ref", variant, device,
                                                             &me->real, &me->kernels, error);
        }
    }
    if (status != ATTN_OK) {
        if (me != NULL) {
            host->release(host->user, me, sizeof *me);
        }
        return status;
    }
    *instance = me;
    *kernels = &mutant_kernels;
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
    (void)error;
    if (abi_version_min > ATTN_ABI_VERSION || abi_version_max < ATTN_ABI_VERSION) {
        return ATTN_ERROR_ABI_VERSION;
    }
    *plugin = &mutants_plugin;
    return ATTN_OK;
}
