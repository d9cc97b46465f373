/* SPDX-License-Identifier: Apache-2.0 */
/* The caches of a bound layer, as the core describes them. */
#ifndef LAYOUT_CACHES_H
#define LAYOUT_CACHES_H

#include <attn/draft/layout.h>

/* A layer's caches: its kind's two at most, and further ones. */
#define MAX_LAYER_CACHES (2 + ATTN_MAX_CACHES)

struct caches {
    int32_t count;
    struct attn_cache_spec specs[MAX_LAYER_CACHES];
    struct attn_kv_view views[MAX_LAYER_CACHES];
};

attn_status caches_read(const struct attn_api *api, const struct attn_layout_side *side,
                        struct caches *caches, struct attn_error *error);

/* Writes an error and returns its status. */
attn_status layout_refuse(struct attn_error *error, attn_status status, const char *field,
                          const char *format, ...) __attribute__((format(printf, 4, 5)));

#endif
