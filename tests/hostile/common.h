/* SPDX-License-Identifier: Apache-2.0 */
/* A sound little plugin that reports one CPU device and one backend; each defect changes one thing.
 */
#ifndef HOSTILE_COMMON_H
#define HOSTILE_COMMON_H

#include <attn/plugin.h>

static inline attn_status sound_create(const struct attn_create_args *args,
                                       attn_instance **instance,
                                       const struct attn_kernels **kernels,
                                       struct attn_error *error)
{
    *instance = NULL;
    *kernels = NULL;
    return ATTN_ERROR_UNSUPPORTED;
}

static inline void sound_destroy(attn_instance *instance)
{
}

static const struct attn_range sound_blocks[] = {{16, 256, 16}};
static const struct attn_head_size_range sound_heads[] = {{{64, 256, 64}, {64, 256, 64}, 1}};

static inline struct attn_device_info sound_device(void)
{
    const struct attn_device_info device = {.struct_size = sizeof device,
                                            .device = {ATTN_DEVICE_CPU, 0},
                                            .name = "test CPU",
                                            .arch = "any",
                                            .isa = ""};
    return device;
}

static inline struct attn_backend_caps sound_caps(const char *name)
{
    const struct attn_backend_caps caps = {
        .struct_size = sizeof caps,
        .name = name,
        .variant = "",
        .version = "1.0",
        .vendor = "tests",
        .device = {ATTN_DEVICE_CPU, 0},
        .kernels = ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV,
        .layer_kinds = UINT64_C(1) << ATTN_LAYER_DECODER,
        .phases = 3,
        .dtypes = UINT64_C(1) << ATTN_DTYPE_F32,
        .kv_dtypes = UINT64_C(1) << ATTN_KV_F32,
        .terms = ATTN_TERM_CAUSAL,
        .features = ATTN_FEATURE_PAGED_KV,
        .view_forms = ATTN_VIEW_NHD,
        .layouts = UINT64_C(1) << ATTN_KV_LAYOUT_NHD,
        .head_sizes = sound_heads,
        .num_head_sizes = 1,
        .block_sizes = sound_blocks,
        .num_block_sizes = 1,
        .preferred_block_size = 16,
    };
    return caps;
}

static inline attn_status sound_report(const struct attn_probe_sink *sink,
                                       const struct attn_backend_caps *caps)
{
    const struct attn_device_info device = sound_device();
    const attn_status status = sink->device(sink->user, &device, NULL);
    return status != ATTN_OK ? status : sink->backend(sink->user, caps, NULL);
}

#define SOUND_TABLE(plugin_name, probe_function)                                                   \
    {                                                                                              \
        .struct_size = sizeof(struct attn_plugin), .abi_version = ATTN_ABI_VERSION,                \
        .name = plugin_name, .version = "1.0", .vendor = "tests", .probe = probe_function,         \
        .create = sound_create, .destroy = sound_destroy                                           \
    }

#define SOUND_ENTRY(table)                                                                         \
    attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,              \
                                  const struct attn_plugin **plugin, struct attn_error *error)     \
    {                                                                                              \
        (void)abi_version_min, (void)abi_version_max, (void)error;                                 \
        *plugin = &(table);                                                                        \
        return ATTN_OK;                                                                            \
    }

/* A probe of one backend, sound but for what the rest does to its capabilities. */
#define SOUND_PROBE_BUT(backend_name, ...)                                                         \
    static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,     \
                             struct attn_error *error)                                             \
    {                                                                                              \
        struct attn_backend_caps caps = sound_caps(backend_name);                                  \
        (void)host, (void)error;                                                                   \
        __VA_ARGS__;                                                                               \
        return sound_report(sink, &caps);                                                          \
    }

#define SOUND_BUT(plugin_name, backend_name, ...)                                                  \
    SOUND_PROBE_BUT(backend_name, __VA_ARGS__)                                                     \
    static const struct attn_plugin table = SOUND_TABLE(plugin_name, probe);                       \
    SOUND_ENTRY(table)

/* The same of its table. */
#define SOUND_ENTRY_BUT(plugin_name, ...)                                                          \
    attn_status attn_plugin_entry(uint32_t abi_version_min, uint32_t abi_version_max,              \
                                  const struct attn_plugin **plugin, struct attn_error *error)     \
    {                                                                                              \
        static struct attn_plugin table = SOUND_TABLE(plugin_name, probe);                         \
        (void)abi_version_min, (void)abi_version_max, (void)error;                                 \
        *plugin = &table;                                                                          \
        __VA_ARGS__;                                                                               \
        return ATTN_OK;                                                                            \
    }

#define SOUND_TABLE_BUT(plugin_name, ...)                                                          \
    SOUND_PROBE_BUT(plugin_name, (void)0)                                                          \
    SOUND_ENTRY_BUT(plugin_name, __VA_ARGS__)

#endif
