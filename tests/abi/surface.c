/* SPDX-License-Identifier: Apache-2.0 */
/* Every public type, reachable from the exported functions: what abidiff compares with the stored
 * baseline. It is never run. */
#include <attn/api.h>
#include <attn/plugin.h>

static const struct attn_api engine_table;
static const struct attn_plugin vendor_table;

attn_status attn_get_api(uint32_t abi_version_min, uint32_t abi_version_max,
                         const struct attn_api **api, struct attn_error *error)
{
    (void)abi_version_min, (void)abi_version_max, (void)error;
    *api = &engine_table;
    return ATTN_OK;
}

attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,
                              const struct attn_plugin **plugin, struct attn_error *error)
{
    (void)abi_version_min, (void)abi_version_max, (void)error;
    *plugin = &vendor_table;
    return ATTN_OK;
}

/* Extensions hang on untyped chains: each is named here. */
#define EXTENSION(type)                                                                            \
    ATTN_EXPORT void surface_##type(const struct type *extension);                                 \
    void surface_##type(const struct type *extension)                                              \
    {                                                                                              \
        (void)extension;                                                                           \
    }
EXTENSION(attn_mla_desc)
EXTENSION(attn_mla_weights)
EXTENSION(attn_mla_caps)
EXTENSION(attn_io_mla)
EXTENSION(attn_gdn_desc)
EXTENSION(attn_gdn_weights)
EXTENSION(attn_gdn_caps)
EXTENSION(attn_io_gdn)
EXTENSION(attn_batch_gdn)
EXTENSION(attn_context_parallel)
EXTENSION(attn_batch_context_parallel)
EXTENSION(attn_io_output_quant)
EXTENSION(attn_io_rope)
EXTENSION(attn_kv_quant_params)
EXTENSION(attn_mm_encoder_quant)
