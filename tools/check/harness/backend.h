/* SPDX-License-Identifier: Apache-2.0 */
/* From what was named on the command line to a plugin's file, loaded as the core would load it but
 * without the core: entry, probe, create. */
#ifndef CHECK_BACKEND_H
#define CHECK_BACKEND_H

#include <attn/draft/compressed.h>
#include <attn/draft/index_lists.h>
#include <attn/indexer.h>
#include <attn/draft/recurrent.h>
#include <attn/mla.h>
#include <attn/plugin.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "common/conduct.h"

/* Host services that see what a plugin takes. */
struct check_host {
    struct attn_host host;
    atomic_size_t deepest_stack; /* bytes that a step, or a loop's body, took of its thread's */
};

struct backend {
    struct check_host services;
    attn_plugin_entry_fn *entry;
    const struct attn_plugin *plugin;
    struct attn_backend_caps caps; /* as reported; arrays, text and known extensions copied */
    struct attn_mla_caps mla;      /* what caps.next leads to, where it was declared */
    struct attn_recurrent_caps gdn;
    struct attn_recurrent_rule_caps rule;
    struct attn_indexer_caps indexer;
    struct attn_index_lists_caps lists;
    struct attn_compressed_caps compressed;
    attn_instance *instance;
    struct attn_kernels kernels; /* zero after what the plugin knows */
    char others[256];            /* names of the plugin's other backends, ", " between them */
    struct conduct *before; /* the process before it is created; NULL: changes are not judged */
    char misconduct[256];   /* what it did all the same; empty: nothing */
    bool stepped;           /* it has run a step, which is not judged: see watch.h */
    struct stopwatch *stopwatch; /* NULL: its kernels are not timed */
};

struct resolved {
    char file[4096];      /* the plugin under test */
    char reference[4096]; /* cpu_ref's */
    const char *name;     /* the backend wanted of it; NULL: the first */
};

/* `target` is borrowed by `resolved`. A path (with a '/' or ending in .so) is taken as it is; a
 * name is looked up among the backends that the core finds. */
attn_status resolve(struct resolved *resolved, const char *target, struct attn_error *error);

/* `name` NULL or "name[@variant]": the first backend that fits. `before` is what a
 * plugin may not change of the process, read before this; NULL: changes are not judged. On failure
 * there is nothing to close. */
attn_status backend_open(struct backend *backend, const char *file, const char *name,
                         struct conduct *before, struct attn_error *error);
void backend_close(struct backend *backend);
/* Keeps what stack_used() found. */
void backend_stack_used(struct check_host *services, size_t bytes);
/* The extension of that id and at least that size, or NULL. */
const void *backend_extension(const struct attn_backend_caps *caps, uint32_t id, size_t size);

/* declared_expect.c. Whether a declaration holds a committed list, which it may exceed but not fall
 * short of. Writes the first thing of the list in `file` that is not declared (any more), or why
 * the file cannot be read, into `why`; false then. */
bool declared_holds(const struct attn_backend_caps *caps, const char *file, char *why, size_t size);

#endif
