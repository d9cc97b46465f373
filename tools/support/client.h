/* SPDX-License-Identifier: Apache-2.0 */
/* What an engine does before its first step, a call each: the core, a runtime, a model, caches,
 * plans. For tools and tests; everything goes through the public table. */
#ifndef SUPPORT_CLIENT_H
#define SUPPORT_CLIENT_H

#include <attn/api.h>

/* The table of the core in the file `path`; it lives as long as the process. */
attn_status client_load(const char *path, const struct attn_api **api, struct attn_error *error);

/* A runtime of the plugins in `plugins` alone, on one thread: without the environment, without
 * default plugins, without a cache on disk. Fields may be changed before runtime_create. */
struct attn_runtime_options client_options(const char *plugins);
/* client_load, and a runtime. On failure *runtime is NULL. */
attn_status client_open(const char *path, const struct attn_runtime_options *options,
                        const struct attn_api **api, attn_runtime **runtime,
                        struct attn_error *error);

/* Options of a selection that `backend` orders ("": the best that can). */
#define CLIENT_ORDER(order)                                                                        \
    (&(const struct attn_select_options){.struct_size = sizeof(struct attn_select_options),        \
                                         .backend = (order)})
/* Selects for `num_layers` layers and makes the model; NULL on failure. */
attn_status client_model(const struct attn_api *api, attn_runtime *runtime,
                         const struct attn_select_options *options,
                         const struct attn_layer_desc *const *layers, int32_t num_layers,
                         attn_model **model, struct attn_error *error);

/* Bytes of host memory, aligned to 256 and filled with 0xff: NaN in every dtype of a cache. The
 * caller frees it. */
void *client_memory(size_t bytes);
/* A layer's cache of `num_blocks` blocks in host memory, filled with 0xff and bound; NULL where the
 * layer has none of its own. `spec`, if not NULL, gets the cache's. The caller frees it after the
 * model. */
attn_status client_cache(const struct attn_api *api, attn_layer *layer, int64_t num_blocks,
                         struct attn_kv_spec *spec, void **cache, struct attn_error *error);

/* Limits of a plan: requests, tokens of a step, keys of a request. */
#define CLIENT_LIMITS(reqs, tokens, keys)                                                          \
    (&(const struct attn_plan_options){.struct_size = sizeof(struct attn_plan_options),            \
                                       .limits = {.struct_size = sizeof(struct attn_limits),       \
                                                  .max_num_reqs = (reqs),                          \
                                                  .max_num_tokens = (tokens),                      \
                                                  .max_seq_len = (keys)}})
/* A plan of a group with its workspace, filled with 0xff and bound. The caller destroys the one and
 * frees the other. */
attn_status client_plan(const struct attn_api *api, attn_model *model, int32_t group,
                        const struct attn_plan_options *options, attn_plan **plan, void **workspace,
                        struct attn_error *error);

#endif
