/* SPDX-License-Identifier: Apache-2.0 */
/* The example as a vendor of the next version would ship it (NEXT), or as it is. */
#define attn_plugin_entry example_entry
#include "../../examples/plugin.c"
#undef attn_plugin_entry

#if defined(NEXT)
#define UNKNOWN (UINT64_C(1) << 62)

static const struct attn_plugin *example;

/* Adds what the next version may say to a report, and hands it to the core's own sink. */
static attn_status report_backend(void *user, const struct attn_backend_caps *caps,
                                  struct attn_error *why)
{
    const struct attn_probe_sink *sink = user;
    const struct attn_refused_combination refused[] = {
        {UNKNOWN | ATTN_TERM_CAUSAL, 0, 0, "causal with a term to come"},
        {ATTN_TERM_CAUSAL, UNKNOWN, 0, "causal with a feature to come"},
        {ATTN_TERM_CAUSAL, 0, UNKNOWN, "causal over a cache to come"},
        {ATTN_TERM_CAUSAL, 0, 0, "causal in a phase to come", 0, 0, UNKNOWN}};
    struct attn_backend_caps next = *caps, elsewhere = *caps;
    uint64_t *const masks[] = {&next.kernels,       &next.layer_kinds,   &next.phases,
                               &next.dtypes,        &next.kv_dtypes,     &next.q_dtypes,
                               &next.terms,         &next.features,      &next.view_forms,
                               &next.layouts,       &next.k_scale_forms, &next.v_scale_forms,
                               &next.p_scale_forms, &next.output_forms};
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        *masks[i] |= UNKNOWN;
    }
    next.refused = refused;
    next.num_refused = 4;
    next.refused_stride = sizeof *refused;
    next.preferred_layout = 40; /* codes of the next version */
    next.graph_level += 1;
    memset(next.grown_tail, 0xff, sizeof next.grown_tail);
    elsewhere.device.type = 99;
    (void)sink->backend(sink->user, &elsewhere, why);
    /* taken without what it does not know of the rows, which it says */
    struct attn_error said = ATTN_ERROR_INIT;
    const attn_status status = sink->backend(sink->user, &next, &said);
    return status == ATTN_OK && strstr(said.message, "refused[0]") == NULL ? ATTN_ERROR_PLUGIN
                                                                           : status;
}

static attn_status report_device(void *user, const struct attn_device_info *device,
                                 struct attn_error *why)
{
    const struct attn_probe_sink *sink = user;
    struct attn_device_info next = *device, elsewhere = *device;
    memset(next.grown_tail, 0xff, sizeof next.grown_tail);
    elsewhere.device.type = 99;
    (void)sink->device(sink->user, &elsewhere, why);
    return sink->device(sink->user, &next, why);
}

static attn_status next_probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                              struct attn_error *error)
{
    const struct attn_probe_sink between = {.struct_size = sizeof between,
                                            .user = (void *)(uintptr_t)sink,
                                            .device = report_device,
                                            .backend = report_backend};
    return example->probe(host, &between, error);
}

static attn_status next_create(const struct attn_create_args *args, attn_instance **instance,
                               const struct attn_kernels **table, struct attn_error *error)
{
    static struct attn_kernels next;
    attn_status status = example->create(args, instance, table, error);
    if (status == ATTN_OK) {
        next = **table;
        memset(next.grown_tail, 0xff, sizeof next.grown_tail); /* slots of the next version */
        *table = &next;
    }
    /* what the core was built for is said, whichever it is */
    return args->host->abi_version >= ATTN_ABI_VERSION_MIN ? status : ATTN_ERROR_ABI_VERSION;
}
#endif

ATTN_EXPORT attn_status attn_plugin_entry(uint32_t min, uint32_t max,
                                          const struct attn_plugin **out, struct attn_error *error)
{
#if defined(NEXT)
    static struct attn_plugin next;
    attn_status status = example_entry(min, max, &example, error);
    *out = NULL;
    if (status == ATTN_OK) {
        next = *example;
        next.probe = next_probe;
        next.create = next_create;
        memset(next.grown_tail, 0xff, sizeof next.grown_tail);
        *out = &next;
    }
    return status;
#else
    return example_entry(min, max, out, error);
#endif
}
