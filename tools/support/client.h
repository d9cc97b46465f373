/* SPDX-License-Identifier: Apache-2.0 */
/* What an engine does before its first step, a call each: the core, a runtime, a model, caches,
 * plans. For tools and tests; everything goes through the public table. */
#ifndef SUPPORT_CLIENT_H
#define SUPPORT_CLIENT_H

#include <attn/api.h>
#include <attn/plugin.h>

/* A struct of the ABI with these fields and its struct_size. */
#define SIZED(type, ...) ((struct type){.struct_size = sizeof(struct type), __VA_ARGS__})
/* An extension with these fields, its id and size, followed by `next` (NULL: it is the last). */
#define EXTENSION(type, id, next, ...)                                                             \
    ((struct type){.ext = {(id), 0, sizeof(struct type), (next)}, __VA_ARGS__})

/* The table of the core in the file `path`; it lives as long as the process. */
attn_status client_load(const char *path, const struct attn_api **api, struct attn_error *error);
/* The plugin in a file, which stays open, for a caller of ABI versions min to max; NULL on failure.
 */
attn_status client_plugin(const char *path, uint32_t min, uint32_t max,
                          const struct attn_plugin **plugin, struct attn_error *error);

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

/* How many reasons of the given field, asked and supported (NULL: any of the last two) refuse
 * `backend` for a layer, in a phase; negative if the selection fails. */
int32_t client_refuses(const struct attn_api *api, attn_runtime *runtime,
                       const struct attn_layer_desc *layer, int32_t phase, const char *backend,
                       const struct attn_reason *wanted);

/* Bytes of host memory, aligned to 256 and filled with 0xff: NaN in every dtype of a cache. The
 * caller frees it. */
void *client_memory(size_t bytes);
/* The view of compact rows of blocks, all heads of a token side by side. */
static inline struct attn_kv_view client_view(void *data, int64_t num_blocks, int64_t block_size,
                                              int32_t num_heads, int64_t head_size, size_t element)
{
    const int64_t row = head_size * (int64_t)element, slot = num_heads * row;
    return SIZED(attn_kv_view, .data = data, .num_blocks = num_blocks,
                 .block_size = (int32_t)block_size, .num_heads = num_heads,
                 .head_size = (int32_t)head_size, .stride_block = block_size * slot,
                 .stride_slot = slot, .stride_head = row);
}
/* Binds K and V; latent rows, or a state without a window, where v is NULL. */
static inline attn_status client_bind(const struct attn_api *api, attn_layer *layer,
                                      const struct attn_kv_view *k, const struct attn_kv_view *v,
                                      struct attn_error *error)
{
    const struct attn_kv_view *views[] = {k, v};
    return api->layer_bind_caches(layer, views, v != NULL ? 2 : 1, error);
}
/* The spec of a layer's first cache; all 0 if the layer has no cache of its own. */
attn_status client_spec(const struct attn_api *api, const attn_layer *layer,
                        struct attn_cache_spec *spec, struct attn_error *error);
/* Binds memory of `num_blocks` blocks, unless a plan holds the layer, and gives the views of it. */
attn_status client_views(const struct attn_api *api, attn_layer *layer, void *base,
                         int64_t num_blocks, struct attn_kv_view *k, struct attn_kv_view *v,
                         struct attn_error *error);
/* A layer's cache of `num_blocks` blocks in host memory, filled with 0xff and bound; NULL where the
 * layer has none of its own. `spec`, if not NULL, gets the cache's. The caller frees it after the
 * model. */
attn_status client_cache(const struct attn_api *api, attn_layer *layer, int64_t num_blocks,
                         struct attn_cache_spec *spec, void **cache, struct attn_error *error);

/* Limits of a plan: requests, tokens of a step, queries, keys and blocks of a request (0: unknown).
 */
static inline struct attn_limits client_limits(int32_t reqs, int32_t tokens, int32_t queries,
                                               int32_t keys, int32_t blocks)
{
    return (struct attn_limits){
        sizeof(struct attn_limits), NULL, reqs, tokens, queries, keys, blocks, 0};
}
/* A plan's options with limits of requests, tokens of a step and keys of a request. */
#define CLIENT_LIMITS(reqs, tokens, keys) CLIENT_PLAN(0, reqs, tokens, keys)
/* The same of a plan that may be captured where `captured` is 1. */
#define CLIENT_PLAN(captured, reqs, tokens, keys)                                                  \
    (&(const struct attn_plan_options){                                                            \
        .struct_size = sizeof(struct attn_plan_options),                                           \
        .limits = &(const struct attn_limits){sizeof(struct attn_limits), NULL, (reqs), (tokens),  \
                                              0, (keys), 0, 0},                                    \
        .graph = (captured)})
/* Requests whose rows begin at `starts`, with so many keys each (NULL: keys are inputs), which the
 * host knows. */
static inline struct attn_batch client_batch(int32_t num_reqs, const int32_t *starts,
                                             const int32_t *lens)
{
    return SIZED(attn_batch, .num_reqs = num_reqs, .num_tokens = starts[num_reqs],
                 .num_actual_tokens = starts[num_reqs], .query_start_loc = starts,
                 .query_start_loc_host = starts, .seq_lens = lens, .seq_lens_host = lens);
}

/* Where their keys lie, and where a slot for each token is. */
static inline void client_blocks(struct attn_batch *batch, const int32_t *table, int64_t stride,
                                 const int64_t *slots)
{
    batch->block_table = table;
    batch->block_table_stride = stride;
    batch->slot_mapping = slots;
    batch->num_slots = batch->num_tokens;
}

/* Bytes of a plan's workspace; 0 without a plan. */
static inline size_t client_workspace_bytes(const struct attn_api *api, const attn_plan *plan)
{
    struct attn_workspace workspace = {.struct_size = sizeof workspace};
    return plan != NULL && api->plan_workspace(plan, &workspace, NULL) == ATTN_OK ? workspace.bytes
                                                                                  : 0;
}

static inline attn_status client_bind_workspace(const struct attn_api *api, attn_plan *plan,
                                                void *memory, size_t bytes,
                                                struct attn_error *error)
{
    const struct attn_workspace workspace = {
        .struct_size = sizeof workspace, .memory = memory, .bytes = bytes};
    return api->plan_bind_workspace(plan, &workspace, error);
}

/* The device's copy and fill of `bytes` on a stream. */
static inline attn_status client_copy(const struct attn_api *api, attn_open_device *opened,
                                      void *destination, const void *source, size_t bytes,
                                      int32_t kind, void *stream, struct attn_error *error)
{
    const struct attn_copy_args copy =
        SIZED(attn_copy_args, .stream = stream, .destination = destination, .source = source,
              .bytes = bytes, .kind = kind);
    return api->device->copy(opened, &copy, error);
}

static inline attn_status client_fill(const struct attn_api *api, attn_open_device *opened,
                                      void *destination, int32_t value, size_t bytes, void *stream,
                                      struct attn_error *error)
{
    const struct attn_fill_args fill =
        SIZED(attn_fill_args, .stream = stream, .destination = destination, .row_bytes = bytes,
              .stride = bytes, .rows = 1, .value = value);
    return api->device->fill(opened, &fill, error);
}

/* A plan of a group with its workspace, filled with 0xff and bound. The caller destroys the one and
 * frees the other. */
attn_status client_plan(const struct attn_api *api, attn_model *model, int32_t group,
                        const struct attn_plan_options *options, attn_plan **plan, void **workspace,
                        struct attn_error *error);

/* What precedes a call of a backend's kernels without the core: prepare, into call->prepared,
 * create_plan_state, into call->plan_state, and schedule_size as the core asks them for such an
 * attend; what the backend leaves out is left as it is. planned_release drops what they made. */
attn_status planned_prepare(const struct attn_kernels *kernels, struct attn_attend_args *call,
                            const struct attn_limits *limits, struct attn_schedule_size *size,
                            struct attn_error *error);

void planned_release(const struct attn_kernels *kernels, const struct attn_attend_args *call);

#endif
