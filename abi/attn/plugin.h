/* SPDX-License-Identifier: Apache-2.0 */
/* A vendor's entry. Copy abi/attn, write one .so that exports attn_plugin_entry and nothing else,
 * and put it into the plugin directory. examples/plugin.c is the smallest useful one.
 *
 * Order of calls: entry, then probe (any number of times, possibly in another process), supports,
 * create, kernels, destroy. The .so is never unloaded once its entry has answered. */
#ifndef ATTN_PLUGIN_H
#define ATTN_PLUGIN_H

#include "capability.h"
#include "host.h"
#include "kernels.h"

/* What an instance is made with. */
struct attn_create_args {
    size_t struct_size;
    const struct attn_ext *next;
    const struct attn_host *host; /* outlives the instance */
    const char *backend;          /* as the probe reported it */
    const char *variant;
    struct attn_device device;
    /* the engine's own, where it wants to share them; NULL: the plugin's. CUDA and ROCm: unused,
     * CUcontext (hipCtx_t); oneAPI: ze_device_handle_t, ze_context_handle_t */
    void *native_device;
    void *native_context;
    /* "key=value" each, of this backend's own; one that is not known is refused with
     * ATTN_ERROR_NOT_FOUND. Borrowed until create returns */
    const char *const *options;
    int32_t num_options;
    int32_t reserved;
    /* absolute: the backend's own folder, of kernels that it compiles, in the engine's cache
     * folder; it may not be there yet. What else lies in it is trusted no more than any file of
     * this user. NULL: no folder, and nothing is kept. Borrowed until create returns */
    const char *cache_dir;
};

/* What a backend is asked about. */
struct attn_supports_args {
    size_t struct_size;
    const struct attn_ext *next;
    const struct attn_backend_caps *caps; /* one of those that probe reported */
    /* complete: its kv_dtype and block_size are not 0 */
    const struct attn_layer_desc *layer;
    int32_t phase;  /* enum attn_phase */
    int32_t layout; /* in page_bytes, the vendor's layout; in supports, 0 */
};

/* Constant data of the plugin; lives as long as the process. */
struct attn_plugin {
    size_t struct_size;
    const struct attn_ext *next;
    uint32_t abi_version; /* what the plugin was built for: may exceed the caller's */
    uint32_t reserved;
    const char *name; /* the plugin's name: "cpu_ref" */
    const char *version;
    const char *vendor;
    /* Reports devices and backends to the sink. Baseline ISA, no GPU runtime is initialised. No
     * hardware: ATTN_ERROR_ABSENT, with the cause as text; that is not a defect. */
    attn_status (*probe)(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error);
    /* NULL, or asked after the declared data has agreed: may name further reasons against the
     * layer. */
    attn_status (*supports)(const struct attn_supports_args *args,
                            const struct attn_reason_sink *reasons, struct attn_error *error);
    /* An instance of a backend on a device. *kernels is constant data of the plugin. Several may
     * live side by side. On failure both outputs are NULL. */
    attn_status (*create)(const struct attn_create_args *args, attn_instance **instance,
                          const struct attn_kernels **kernels, struct attn_error *error);
    void (*destroy)(attn_instance *instance); /* accepts NULL */
    /* Needed where a backend's vendor_codes list a layout: *bytes of one block of K and V of the
     * layer in it, above 0; block_size is the kernels'. Engines move such a block as bytes. */
    attn_status (*page_bytes)(const struct attn_supports_args *args, int64_t *bytes,
                              struct attn_error *error);
};

/* The one symbol. Answers with its plugin if ATTN_VERSION_SERVES(min, max), else with
 * ATTN_ERROR_ABI_VERSION and the versions that it speaks as text. Must not do anything else. */
typedef attn_status attn_plugin_entry_fn(uint32_t abi_version_min, uint32_t abi_version_max,
                                         const struct attn_plugin **plugin,
                                         struct attn_error *error);
#define ATTN_PLUGIN_ENTRY_SYMBOL "attn_plugin_entry"
ATTN_EXPORT attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                                          const struct attn_plugin **plugin,
                                          struct attn_error *error);

ATTN_STATIC_ASSERT(sizeof(struct attn_create_args) == 88, "attn_create_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_supports_args) == 40, "attn_supports_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_plugin) == 88, "attn_plugin of ABI 0.3");

#endif
