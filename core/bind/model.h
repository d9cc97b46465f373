/* SPDX-License-Identifier: Apache-2.0 */
/* The bind room's slots of struct attn_api; naming rule in select/select.h. Meanings stand in
 * attn/api.h. */
#ifndef CORE_BIND_MODEL_H
#define CORE_BIND_MODEL_H

#include <attn/api.h>

#include "select/assignment.h"

attn_status model_create(attn_runtime *runtime, const attn_assignment *assignment,
                         const struct attn_model_options *options, attn_model **model,
                         struct attn_error *error);
void model_destroy(attn_model *model);
attn_layer *model_layer(attn_model *model, int32_t index);
int32_t model_num_groups(const attn_model *model, int32_t kind);
attn_status model_group(const attn_model *model, int32_t kind, int32_t group, int32_t *layers,
                        int32_t capacity, int32_t *count);
int32_t layer_group(const attn_layer *layer, int32_t kind, int32_t phase);
attn_status layer_bind_params(attn_layer *layer, const struct attn_layer_params *params,
                              struct attn_error *error);
attn_status layer_amax(attn_layer *layer, const struct attn_amax_args *args,
                       struct attn_error *error);
int32_t layer_num_caches(const attn_layer *layer);
attn_status layer_cache_spec(const attn_layer *layer, int32_t index, struct attn_cache_spec *spec,
                             struct attn_error *error);
attn_status layer_cache_view(const attn_layer *layer, int32_t index, struct attn_kv_view *view,
                             struct attn_error *error);
attn_status layer_bind_caches(attn_layer *layer, const struct attn_kv_view *const *views,
                              int32_t num_views, struct attn_error *error);
attn_status layer_bind_memory(attn_layer *layer, const struct attn_cache_memory *memory,
                              struct attn_error *error);
attn_status copy_blocks(attn_model *model, const struct attn_block_transfer *transfer,
                        struct attn_error *error);

#endif
