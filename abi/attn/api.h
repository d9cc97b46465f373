/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's table, got from the one symbol of libattn.so.1.
 *
 *     once        runtime_create, select, model_create
 *     per layer   layer_cache_spec, layer_bind_memory, layer_bind_params
 *     per group   plan_create, plan_workspace, plan_bind_workspace
 *     per step    plan_batch for each block-table group, then run for each layer
 *
 * Handles of one runtime may be used from many threads; a plan from one at a time. Destroy in the
 * reverse order; every destroy accepts NULL. On failure an output handle is NULL and nothing has
 * changed. Functions that take `error` accept NULL there. Indices start at 0; info calls set
 * struct_size bytes of the caller's struct, whose struct_size the caller has set, and give
 * ATTN_ERROR_NOT_FOUND past the end. */
#ifndef ATTN_API_H
#define ATTN_API_H

#include "device_services.h"
#include "kernels.h"
#include "model.h"

struct attn_api {
    size_t struct_size;
    const struct attn_ext *next;
    uint32_t abi_version; /* what the core was built for: may exceed the caller's */
    uint32_t reserved;
    const char *version; /* the library's version: "0.1.0" */
    /* constant; "unknown status" for others */
    const char *(*status_text)(attn_status status);
    /* The name of a code, or of bit number `code` of a mask, in a list (enum attn_name_list), as
     * reasons and ATTN_BACKEND have it: "fp8_e4m3", "prefix_lm". Constant text; NULL: there is
     * no such code. */
    const char *(*code_name)(int32_t list, int32_t code);

    /* Runtime. Bad plugins never fail the creation: see plugin_info. */
    attn_status (*runtime_create)(const struct attn_runtime_options *options,
                                  attn_runtime **runtime, struct attn_error *error);
    void (*runtime_destroy)(attn_runtime *runtime);
    int32_t (*plugin_count)(const attn_runtime *runtime);
    attn_status (*plugin_info)(const attn_runtime *runtime, int32_t index,
                               struct attn_plugin_info *info);
    int32_t (*device_count)(const attn_runtime *runtime);
    attn_status (*device_info)(const attn_runtime *runtime, int32_t index,
                               struct attn_device_info *info);
    int32_t (*backend_count)(const attn_runtime *runtime);
    attn_status (*backend_info)(const attn_runtime *runtime, int32_t index,
                                struct attn_backend_info *info);

    /* The best device that any backend has: accelerators before the CPU, then the lowest type and
     * id; where `backend` (NULL: the runtime's selection text) orders backends, theirs. To be
     * stated in select's options. */
    attn_status (*best_device)(const attn_runtime *runtime, const char *backend,
                               struct attn_device *device, struct attn_error *error);
    /* The table of devices, for engines without memory and streams of their own. */
    const struct attn_device_services *device;

    /* Selection. `layers` holds num_layers pointers; everything is copied. Fails with
     * ATTN_ERROR_NO_BACKEND or ATTN_ERROR_REFUSED naming layer, backend and reasons, unless
     * KEEP_UNSERVED; ATTN_ERROR_SYNTAX shows the position in the selection text. options may be
     * NULL. */
    attn_status (*select)(attn_runtime *runtime, const struct attn_select_options *options,
                          const struct attn_layer_desc *const *layers, int32_t num_layers,
                          attn_assignment **assignment, struct attn_error *error);
    void (*assignment_destroy)(attn_assignment *assignment);
    int32_t (*assignment_num_layers)(const attn_assignment *assignment);
    attn_status (*assignment_choice)(const attn_assignment *assignment, int32_t layer,
                                     int32_t phase, struct attn_choice *choice);
    attn_status (*assignment_verdict)(const attn_assignment *assignment, int32_t layer,
                                      int32_t phase, int32_t backend, int32_t *verdict,
                                      int32_t *num_reasons);
    attn_status (*assignment_reason)(const attn_assignment *assignment, int32_t layer,
                                     int32_t phase, int32_t backend, int32_t index,
                                     struct attn_reason *reason);
    /* Writes at most `size` bytes, NUL included, and always sets *needed. Text is the same on every
     * machine. */
    attn_status (*assignment_export)(const attn_assignment *assignment, char *text, size_t size,
                                     size_t *needed, struct attn_error *error);

    /* Binding. Loads modules and kernels, so that nothing loads lazily in a step. The model keeps
     * what it needs of the assignment, which may be destroyed; the runtime must outlive it. options
     * may be NULL. */
    attn_status (*model_create)(attn_runtime *runtime, const attn_assignment *assignment,
                                const struct attn_model_options *options, attn_model **model,
                                struct attn_error *error);
    void (*model_destroy)(attn_model *model);
    attn_layer *(*model_layer)(attn_model *model, int32_t index); /* NULL past the end */
    int32_t (*model_num_groups)(const attn_model *model, int32_t kind);
    /* Layer indices of a group, ascending; at most `capacity` are written, *count is always set. */
    attn_status (*model_group)(const attn_model *model, int32_t kind, int32_t group,
                               int32_t *layers, int32_t capacity, int32_t *count);
    /* `phase` counts for ATTN_GROUP_SCHEDULE alone. */
    int32_t (*layer_group)(const attn_layer *layer, int32_t kind, int32_t phase);
    /* Caches. A layer's list: K and V, MLA's latent rows, or a recurrent layer's state and, if it
     * has one, convolution's window; then those of attn_layer_caches. None: a layer that shares an
     * earlier one's, or has no cache. */
    int32_t (*layer_num_caches)(const attn_layer *layer);
    attn_status (*layer_cache_spec)(const attn_layer *layer, int32_t index,
                                    struct attn_cache_spec *spec, struct attn_error *error);
    /* Memory for all of them in the layout of their specs; layers that have none take none. Not
     * while a plan holds the layer, or one that reads its caches. */
    attn_status (*layer_bind_memory)(attn_layer *layer, const struct attn_cache_memory *memory,
                                     struct attn_error *error);
    /* Binds memory in the engine's own layout, which is refused where the backend cannot read it:
     * views[i] is that of cache i. Not while a plan holds the layer, or one that reads its caches.
     */
    attn_status (*layer_bind_caches)(attn_layer *layer, const struct attn_kv_view *const *views,
                                     int32_t num_views, struct attn_error *error);
    /* The view of a cache that is bound, in blocks of kernel_block_size. */
    attn_status (*layer_cache_view)(const attn_layer *layer, int32_t index,
                                    struct attn_kv_view *view, struct attn_error *error);
    /* Not while a plan holds the layer: change then what the parameters point at. */
    attn_status (*layer_bind_params)(attn_layer *layer, const struct attn_layer_params *params,
                                     struct attn_error *error);
    /* The largest magnitude of a tensor, for an engine that calculates scales from its first
     * batches: scale = amax / range, the ranges being the engine's (200 for q and k and 100 for v
     * are usual). Enqueued on args->stream, whose instance is NULL; x and out lie on the layer's
     * device. v's scales per (KV head, channel): v as [T, Hk Dv, 1], per_head. Over several tensors
     * (batches, the two parts of MLA's q) with accumulate. */
    attn_status (*layer_amax)(attn_layer *layer, const struct attn_amax_args *args,
                              struct attn_error *error);

    /* Plans. One plan per block-table group and batch in flight. Layers must be bound before
     * plan_create. */
    attn_status (*plan_create)(attn_model *model, int32_t group,
                               const struct attn_plan_options *options, attn_plan **plan,
                               struct attn_error *error);
    void (*plan_destroy)(attn_plan *plan);
    /* What the engine has to allocate, never nothing. Plans of which one is done before the next
     * is planned may share all of it, others of one stream the scratch. */
    attn_status (*plan_workspace)(const attn_plan *plan, struct attn_workspace *workspace,
                                  struct attn_error *error);
    attn_status (*plan_bind_workspace)(attn_plan *plan, const struct attn_workspace *workspace,
                                       struct attn_error *error);
    int32_t (*plan_graph_level)(const attn_plan *plan); /* the least level of its layers */
    int32_t (*plan_graph_fill)(const attn_plan *plan);  /* for padded seq_lens in a replay */

    /* Helpers. Order of requests for a batch: order[i] = the request that goes to place i: decodes,
     * short extends, long extends, prefills (no key before the step); stable. order [num_reqs];
     * *moved = 1 if anything moves. With prompt_lens and short_extend = threshold these are vLLM's
     * classes. */
    attn_status (*batch_order)(const struct attn_batch_order *requests, int32_t *order,
                               int32_t *moved, struct attn_error *error);
    /* *local = local(length) of struct attn_context_parallel. */
    attn_status (*context_parallel_length)(const struct attn_rank_keys *keys, int32_t length,
                                           int32_t *local, struct attn_error *error);
    /* slots [num_positions] of one request under context parallelism; -1 where the token is another
     * rank's. */
    attn_status (*context_parallel_slots)(const struct attn_rank_keys *keys, int64_t *slots,
                                          struct attn_error *error);

    /* A step: allocates nothing, takes no lock, formats no string (unless it fails in
     * plan_batch). */
    attn_status (*plan_batch)(attn_plan *plan, const struct attn_batch *batch, void *stream,
                              struct attn_error *error);
    /* Graph generations: CAPTURE then REPLAY (lengths, tables and sums at fixed addresses), or
     * OUT_OF_GRAPH on the host and IN_GRAPH while capturing. A REPLAY has the captured numbers of
     * requests, decodes and tokens, the captured query_start_loc[0], and no more actual tokens.
     * `mode` is an enum attn_plan_mode. */
    attn_status (*plan_graph)(attn_plan *plan, int32_t mode, const struct attn_batch *batch,
                              void *stream, struct attn_error *error);
    /* The plan of another block-table group for the same step: everything but block_table,
     * block_table_row and slot_mapping is taken from `source`, whose batch's host copies are read
     * once more. */
    attn_status (*plan_update_block_table)(attn_plan *plan, const attn_plan *source,
                                           const struct attn_batch *tables, void *stream,
                                           struct attn_error *error);
    attn_status (*plan_split)(const attn_plan *plan, struct attn_batch_split *split);
    /* ATTN_OK means enqueued on io->stream (on a CPU: done); a later error of the device is met by
     * a later call. io->stream is the stream of the plan's last plan_batch, plan_graph or
     * plan_update_block_table (ATTN_VALIDATE=1 holds runs to it), which may name another once the
     * runs before are done. After a failed run out
     * and lse hold anything and the cache what was written so far; the plan stays ready, and the
     * same run may be tried again. */
    attn_status (*run)(attn_plan *plan, attn_layer *layer, const struct attn_step_io *io,
                       struct attn_error *error);

    /* Between steps. Copies blocks of all layers of a group in one call. */
    attn_status (*copy_blocks)(attn_model *model, const struct attn_block_transfer *transfer,
                               struct attn_error *error);
};

/* The one symbol. Answers with the table if ATTN_VERSION_SERVES(min, max), else with
 * ATTN_ERROR_ABI_VERSION. The table lives as long as the library is loaded. */
typedef attn_status attn_get_api_fn(uint32_t abi_version_min, uint32_t abi_version_max,
                                    const struct attn_api **api, struct attn_error *error);
#define ATTN_GET_API_SYMBOL "attn_get_api"
ATTN_EXPORT attn_status attn_get_api(uint32_t abi_version_min, uint32_t abi_version_max,
                                     const struct attn_api **api, struct attn_error *error);

#endif
