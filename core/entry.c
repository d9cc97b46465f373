/* SPDX-License-Identifier: Apache-2.0 */
/* The one exported symbol and the one table. */
#include <attn/api.h>

#include "bind/device.h"
#include "bind/model.h"
#include "runtime/observers.h"
#include "runtime/runtime.h"
#include "select/names.h"
#include "select/select.h"
#include "select/steering.h"
#include "step/plan.h"
#include "util/error.h"

#if !defined(ATTN_LIBRARY_VERSION)
#error "the build has to define ATTN_LIBRARY_VERSION"
#endif

static const struct attn_device_services device_services = {
    .struct_size = sizeof(struct attn_device_services),
    .open = device_open,
    .close = device_close,
    .allocate = device_allocate,
    .free = device_free,
    .copy = device_copy,
    .fill = device_fill,
    .of_address = device_of_address,
    .create_stream = device_stream_create,
    .destroy_stream = device_stream_destroy,
    .synchronize = device_synchronize,
    .begin_capture = device_capture_begin,
    .end_capture = device_capture_end,
    .launch_graph = observed_graph_launch,
    .destroy_graph = device_graph_destroy,
};

static const struct attn_api api_table = {
    .struct_size = sizeof(struct attn_api),
    .abi_version = ATTN_ABI_VERSION,
    .version = ATTN_LIBRARY_VERSION,
    .status_text = status_text,
    .runtime_create = observed_runtime_create,
    .runtime_destroy = observed_runtime_destroy,
    .plugin_count = plugin_count,
    .plugin_info = plugin_info,
    .device_count = device_count,
    .device_info = device_info,
    .backend_count = backend_count,
    .backend_info = backend_info,
    .select = observed_select,
    .assignment_destroy = assignment_destroy,
    .assignment_num_layers = assignment_num_layers,
    .assignment_choice = assignment_choice,
    .assignment_verdict = assignment_verdict,
    .assignment_reason = assignment_reason,
    .assignment_export = assignment_export,
    .model_create = observed_model_create,
    .model_destroy = observed_model_destroy,
    .model_layer = model_layer,
    .model_num_groups = model_num_groups,
    .model_group = model_group,
    .layer_group = layer_group,
    .layer_num_caches = layer_num_caches,
    .layer_cache_spec = layer_cache_spec,
    .layer_bind_caches = layer_bind_caches,
    .layer_bind_memory = layer_bind_memory,
    .layer_cache_view = layer_cache_view,
    .layer_bind_params = layer_bind_params,
    .layer_amax = layer_amax,
    .copy_blocks = copy_blocks,
    .plan_create = observed_plan_create,
    .plan_destroy = plan_destroy,
    .plan_workspace = plan_workspace,
    .plan_bind_workspace = plan_bind_workspace,
    .plan_graph_level = plan_graph_level,
    .plan_graph_fill = plan_graph_fill,
    .plan_batch = observed_plan_batch,
    .plan_graph = observed_plan_graph,
    .plan_update_block_table = observed_plan_update_block_table,
    .plan_split = plan_split,
    .run = plan_run,
    .batch_order = batch_order,
    .context_parallel_length = context_parallel_length,
    .context_parallel_slots = context_parallel_slots,
    .best_device = best_device,
    .device = &device_services,
    .code_name = code_name,
};

attn_status attn_get_api(uint32_t abi_version_min, uint32_t abi_version_max,
                         const struct attn_api **api, struct attn_error *error)
{
    BAD_IF(api == NULL, "api", "api is NULL");
    *api = NULL;
    ERROR_IF(!ATTN_VERSION_SERVES(abi_version_min, abi_version_max), ATTN_ERROR_ABI_VERSION,
             "abi_version_min", "asked for ABI %u.%u to %u.%u; libattn %s speaks %u.%u to %u.%u",
             ATTN_VERSION_MAJOR(abi_version_min), ATTN_VERSION_MINOR(abi_version_min),
             ATTN_VERSION_MAJOR(abi_version_max), ATTN_VERSION_MINOR(abi_version_max),
             ATTN_LIBRARY_VERSION, ATTN_VERSION_MAJOR(ATTN_ABI_VERSION_MIN),
             ATTN_VERSION_MINOR(ATTN_ABI_VERSION_MIN), ATTN_VERSION_MAJOR(ATTN_ABI_VERSION),
             ATTN_VERSION_MINOR(ATTN_ABI_VERSION));
    *api = &api_table;
    return ATTN_OK;
}
