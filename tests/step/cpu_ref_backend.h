/* SPDX-License-Identifier: Apache-2.0 */
/* A plugin around cpu_ref: the file that includes this one has declare_backends, which is called in
 * a probe with the declaration of cpu_ref, and change_kernels, and ends with CPU_REF_BACKEND. */
#ifndef STEP_CPU_REF_BACKEND_H
#define STEP_CPU_REF_BACKEND_H

#include <attn/plugin.h>
#include <string.h>

#include "support/client.h"

static const struct attn_plugin *real;
static struct attn_kernels real_kernels; /* cpu_ref's, after the first create */

static attn_status declare_backends(const struct attn_probe_sink *sink,
                                    const struct attn_backend_caps *caps, struct attn_error *error);
/* `kernels` begins as cpu_ref's. */
static void change_kernels(struct attn_kernels *kernels);

/* The extension of a chain with that id, or NULL. */
__attribute__((unused)) static const void *ext_of(const struct attn_ext *next, uint32_t id)
{
    while (next != NULL && next->id != id) {
        next = next->next;
    }
    return next;
}

static const struct attn_probe_sink *outer_sink; /* while a probe runs */

static attn_status take_caps(void *user, const struct attn_backend_caps *caps,
                             struct attn_error *error)
{
    return declare_backends(outer_sink, caps, error);
}

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct attn_probe_sink inner = *sink;
    outer_sink = sink;
    inner.backend = take_caps;
    return real->probe(host, &inner, error);
}

static attn_status create(const struct attn_create_args *args, attn_instance **instance,
                          const struct attn_kernels **table, struct attn_error *error)
{
    static struct attn_kernels kernels;
    struct attn_create_args of_real = *args;
    of_real.backend = "cpu_ref";
    attn_status status = real->create(&of_real, instance, table, error);
    if (status == ATTN_OK) {
        real_kernels = kernels = **table;
        change_kernels(&kernels);
        *table = &kernels;
    }
    return status;
}

/* The plugin's entry. MAKE is its create: the one above, or one that calls it; PAGE_BYTES may be
 * NULL. */
#define CPU_REF_BACKEND(NAME, MAKE, PAGE_BYTES)                                                    \
    attn_status attn_plugin_entry(uint32_t min, uint32_t max, const struct attn_plugin **out,      \
                                  struct attn_error *error)                                        \
    {                                                                                              \
        static struct attn_plugin plugin;                                                          \
        attn_status status = client_plugin(CPU_REF_FILE, min, max, &real, error);                  \
        *out = NULL;                                                                               \
        if (status == ATTN_OK) {                                                                   \
            plugin = *real;                                                                        \
            plugin.name = (NAME);                                                                  \
            plugin.probe = probe;                                                                  \
            plugin.create = (MAKE);                                                                \
            plugin.page_bytes = (PAGE_BYTES);                                                      \
            *out = &plugin;                                                                        \
        }                                                                                          \
        return status;                                                                             \
    }

#endif
