/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the float32 CPU backends of these tests, which have no state of their own.
 * A file that includes this one has its `kernels` and `probe`, and ends with FLOAT_BACKEND_ENTRY.
 */
#ifndef TESTS_STEP_FLOAT_BACKEND_H
#define TESTS_STEP_FLOAT_BACKEND_H

#include <attn/plugin.h>

static const struct attn_device_info float_backend_cpu = {.struct_size = sizeof float_backend_cpu,
                                                          .device = {ATTN_DEVICE_CPU, 0},
                                                          .name = "CPU",
                                                          .arch = "generic",
                                                          .isa = ""};

/* The extension of a chain with that id, or NULL. */
static inline const struct attn_ext *ext_of(const struct attn_ext *next, uint32_t id)
{
    while (next != NULL && next->id != id) {
        next = next->next;
    }
    return next;
}

/* Any address tells an instance. */
static inline attn_instance *float_backend_instance(void)
{
    static int32_t one;
    return (attn_instance *)(void *)&one;
}

static inline void float_backend_destroy(attn_instance *instance)
{
}

#define FLOAT_BACKEND_ENTRY(NAME)                                                                  \
    static attn_status create(const struct attn_create_args *args, attn_instance **instance,       \
                              const struct attn_kernels **table, struct attn_error *error)         \
    {                                                                                              \
        (void)args, (void)error;                                                                   \
        *table = &kernels;                                                                         \
        *instance = float_backend_instance();                                                      \
        return ATTN_OK;                                                                            \
    }                                                                                              \
    static const struct attn_plugin plugin = {.struct_size = sizeof plugin,                        \
                                              .abi_version = ATTN_ABI_VERSION,                     \
                                              .name = NAME,                                        \
                                              .version = "0.1.0",                                  \
                                              .vendor = "you",                                     \
                                              .probe = probe,                                      \
                                              .create = create,                                    \
                                              .destroy = float_backend_destroy};                   \
    attn_status attn_plugin_entry(uint32_t min, uint32_t max, const struct attn_plugin **out,      \
                                  struct attn_error *error)                                        \
    {                                                                                              \
        (void)error;                                                                               \
        *out = ATTN_VERSION_SERVES(min, max) ? &plugin : NULL;                                     \
        return *out != NULL ? ATTN_OK : ATTN_ERROR_ABI_VERSION;                                    \
    }

#endif
