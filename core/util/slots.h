/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of struct attn_api and of its table of devices: X(slot, function), OBSERVED where
 * the table has an observer before the function (observers/: what watches calls and has no part in
 * them), named observed_SLOT. Both are declared by the types of their slots, whose meanings stand
 * in attn/api.h and attn/device_services.h; entry.c fills the tables from the same rows. */
#ifndef CORE_UTIL_SLOTS_H
#define CORE_UTIL_SLOTS_H

#include <attn/api.h>

#define API_SLOTS(X, OBSERVED)                                                                     \
    X(status_text, status_text)                                                                    \
    OBSERVED(runtime_create, runtime_create)                                                       \
    OBSERVED(runtime_destroy, runtime_destroy)                                                     \
    X(plugin_count, plugin_count)                                                                  \
    X(plugin_info, plugin_info)                                                                    \
    X(device_count, device_count)                                                                  \
    X(device_info, device_info)                                                                    \
    X(backend_count, backend_count)                                                                \
    X(backend_info, backend_info)                                                                  \
    OBSERVED(select, select_layers)                                                                \
    X(best_device, best_device)                                                                    \
    X(assignment_destroy, assignment_destroy)                                                      \
    X(assignment_num_layers, assignment_num_layers)                                                \
    X(assignment_choice, assignment_choice)                                                        \
    X(assignment_verdict, assignment_verdict)                                                      \
    X(assignment_reason, assignment_reason)                                                        \
    X(assignment_export, assignment_export)                                                        \
    OBSERVED(model_create, model_create)                                                           \
    OBSERVED(model_destroy, model_destroy)                                                         \
    X(model_layer, model_layer)                                                                    \
    X(model_num_groups, model_num_groups)                                                          \
    X(model_group, model_group)                                                                    \
    X(layer_group, layer_group)                                                                    \
    X(layer_num_caches, layer_num_caches)                                                          \
    X(layer_cache_spec, layer_cache_spec)                                                          \
    X(layer_cache_view, layer_cache_view)                                                          \
    X(layer_bind_caches, layer_bind_caches)                                                        \
    X(layer_bind_memory, layer_bind_memory)                                                        \
    X(layer_bind_params, layer_bind_params)                                                        \
    X(layer_amax, layer_amax)                                                                      \
    X(copy_blocks, copy_blocks)                                                                    \
    OBSERVED(plan_create, plan_create)                                                             \
    X(plan_destroy, plan_destroy)                                                                  \
    X(plan_workspace, plan_workspace)                                                              \
    X(plan_bind_workspace, plan_bind_workspace)                                                    \
    X(plan_graph_level, plan_graph_level)                                                          \
    X(plan_graph_fill, plan_graph_fill)                                                            \
    OBSERVED(plan_batch, plan_batch)                                                               \
    OBSERVED(plan_graph, plan_graph)                                                               \
    OBSERVED(plan_update_block_table, plan_update_block_table)                                     \
    X(plan_split, plan_split)                                                                      \
    X(run, plan_run)                                                                               \
    X(batch_order, batch_order)                                                                    \
    X(context_parallel_length, context_parallel_length)                                            \
    X(context_parallel_slots, context_parallel_slots)                                              \
    X(code_name, code_name)

#define DEVICE_SLOTS(X, OBSERVED)                                                                  \
    X(open, device_open)                                                                           \
    X(close, device_close)                                                                         \
    X(allocate, device_allocate)                                                                   \
    X(free, device_free)                                                                           \
    X(copy, device_copy)                                                                           \
    X(fill, device_fill)                                                                           \
    X(of_address, device_of_address)                                                               \
    X(create_stream, device_create_stream)                                                         \
    X(destroy_stream, device_destroy_stream)                                                       \
    X(synchronize, device_synchronize)                                                             \
    X(begin_capture, device_begin_capture)                                                         \
    X(end_capture, device_end_capture)                                                             \
    OBSERVED(launch_graph, device_launch_graph)                                                    \
    X(destroy_graph, device_destroy_graph)

#define SLOT(table, slot, function) __typeof__(*((const struct table *)0)->slot) function;
#define API_SLOT(slot, function) SLOT(attn_api, slot, function)
#define API_OBSERVED(slot, function)                                                               \
    SLOT(attn_api, slot, function) SLOT(attn_api, slot, observed_##slot)
#define DEVICE_SLOT(slot, function) SLOT(attn_device_services, slot, function)
#define DEVICE_OBSERVED(slot, function)                                                            \
    SLOT(attn_device_services, slot, function) SLOT(attn_device_services, slot, observed_##slot)
API_SLOTS(API_SLOT, API_OBSERVED)
DEVICE_SLOTS(DEVICE_SLOT, DEVICE_OBSERVED)

#endif
