/* SPDX-License-Identifier: Apache-2.0 */
/* All caches of a layer, those beyond its kind's included. */
#ifndef CORE_BIND_CACHES_H
#define CORE_BIND_CACHES_H

#include "bind/bound.h"

/* What a view must be: rows of one cache. */
struct wanted_view {
    const char *which; /* "k", "cache 3", in errors */
    int32_t num_heads;
    int32_t head_size;
    int32_t block_size;
    int64_t row_bytes; /* of one head, scales not counted */
};

/* cache.c: an address, the sizes, and strides under which no two rows share bytes. */
attn_status check_view_shape(const attn_layer *layer, const struct wanted_view *wanted,
                             const struct attn_kv_view *view, struct attn_error *error);
/* cache.c: a view of the engine's blocks, of kernel x parts rows, as one of the kernel's: parts of
 * a block lie one behind the other where its slots do. Other views stay. */
attn_status view_cut(const attn_layer *layer, const char *which, int32_t kernel, int32_t parts,
                     struct attn_kv_view *view, struct attn_error *error);
/* cache.c: K and V, or the latent rows, checked and kept; the layer may have more caches. */
attn_status layer_bind_own(attn_layer *layer, const struct attn_kv_view *k,
                           const struct attn_kv_view *v, struct attn_error *error);

/* kv_spec.c: views of num_blocks blocks at base, in the layout of the layer's page. Of latent rows
 * v is NULL. */
attn_status layer_kv_views(const attn_layer *layer, void *base, int64_t num_blocks,
                           struct attn_kv_view *k, struct attn_kv_view *v,
                           struct attn_error *error);

/* Makes room for the caches beyond the kind's, none of them bound. */
attn_status layer_make_caches(attn_layer *layer, struct attn_error *error);

#endif
