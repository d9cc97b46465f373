/* SPDX-License-Identifier: Apache-2.0 */
#include "util/abi_table.h"

#include <attn/draft/compressed.h>
#include <attn/draft/mm_encoder.h>
#include <attn/draft/index_write.h>
#include <attn/draft/output_rope.h>
#include <attn/plugin.h>

#include "util/counts.h"

#define DECODER (1u << ATTN_LAYER_DECODER)
#define ENCODER (1u << ATTN_LAYER_ENCODER)
#define CROSS (1u << ATTN_LAYER_CROSS)
#define MLA (1u << ATTN_LAYER_MLA)
#define RECURRENT (1u << ATTN_LAYER_RECURRENT)
#define INDEXER (1u << ATTN_LAYER_INDEXER)
#define CACHED (DECODER | CROSS | MLA) /* keys in blocks */
#define COMPRESSOR (1u << ATTN_LAYER_DRAFT_COMPRESSOR)
#define BLOCKS (CACHED | INDEXER | COMPRESSOR)
#define ATTENDS (CACHED | ENCODER) /* scores, and a softmax over them */
#define ALL (ATTENDS | RECURRENT | INDEXER | COMPRESSOR)
#define MAX_ENTRIES (1 << 20)
#define MAX_GATHERED 4096 /* tokens of a row, rows of an entry */
#define MAX_BLOCK 65536

#define FIELD(kind, type, name, min, max, kinds)                                                   \
    {                                                                                              \
#name, offsetof(struct attn_##type, name), FIELD_##kind, min, max, kinds                   \
    }
#define LAYER(name, kind, kinds, min, max) FIELD(kind, layer_desc, name, min, max, kinds)
#define INT(type, name, min, max) FIELD(INT, type, name, min, max, 0)
#define COUNT(type, name) INT(type, name, 0, INT32_MAX)
#define SWITCH(type, name) INT(type, name, 0, 1)
#define ZERO(type, name) INT(type, name, 0, 0)
#define CODE(type, name, min, max) FIELD(CODE, type, name, min, max, 0)
#define MASK(name, count) FIELD(MASK, backend_caps, name, 0, count, 0)
#define TEXT(type, name) FIELD(TEXT, type, name, 0, 0, 0)
#define ARRAY(name, element)                                                                       \
    FIELD(ARRAY, backend_caps, name, offsetof(struct attn_backend_caps, num_##name), element, 0)
#define TENSOR(type, name) FIELD(TENSOR, type, name, 0, 0, 0)
#define DEVICE(type, name) FIELD(DEVICE, type, name, 0, 0, 0)
#define HOST(type, name) FIELD(HOST, type, name, 0, 0, 0)
#define FIELDS(type, ...)                                                                          \
    static const struct abi_field fields_##type[] = {__VA_ARGS__, {.name = NULL}}

static const struct abi_field fields_none[] = {{.name = NULL}};

FIELDS(layer_desc, LAYER(name, TEXT, ALL, 0, 0), LAYER(kv_sharing_target, TEXT, CACHED, 0, 0),
       LAYER(kind, INT, ALL, 0, NUM_LAYER_KINDS - 1),
       LAYER(dtype, INT, ALL, ATTN_DTYPE_F16, ATTN_DTYPE_F32),
       LAYER(kv_dtype, CODE, ALL, 0, NUM_KV_DTYPES - 1), LAYER(num_q_heads, INT, ALL, 1, MAX_HEADS),
       LAYER(num_kv_heads, INT, ALL, 1, MAX_HEADS), LAYER(head_size, INT, ALL, 1, MAX_LATENT),
       LAYER(head_size_v, INT, ALL, 0, MAX_LATENT), LAYER(scale, FLOAT, ALL, 0, 0),
       LAYER(causal, INT, ALL, 0, ATTN_CAUSAL_NO),
       LAYER(causal_per_request, INT, DECODER | MLA | ENCODER, 0, 1),
       LAYER(has_window, INT, ATTENDS, 0, 1), LAYER(window_left, INT, ALL, INT32_MIN, INT32_MAX),
       LAYER(window_right, INT, ALL, INT32_MIN, INT32_MAX),
       LAYER(chunk_size, INT, DECODER | MLA, 0, INT32_MAX),
       LAYER(chunk_lookback, INT, DECODER | MLA, 0, INT32_MAX),
       LAYER(soft_cap, FLOAT, ATTENDS, 0, 0), LAYER(alibi, INT, ATTENDS, 0, ATTN_ALIBI_SQRT),
       LAYER(has_sinks, INT, ATTENDS, 0, 1), LAYER(sink_len, INT, DECODER, 0, 1 << 20),
       LAYER(prefix_lm, INT, DECODER | MLA, 0, 1),
       LAYER(prefix_lm_window, INT, DECODER | MLA, 0, INT32_MAX),
       LAYER(tree_mask, INT, DECODER | MLA | ENCODER, 0, ATTN_TREE_BIAS),
       LAYER(block_size, INT, BLOCKS, 0, MAX_BLOCK),
       LAYER(num_speculative_tokens, INT, BLOCKS | RECURRENT, 0, 1024),
       LAYER(parallel_drafting, INT, BLOCKS | RECURRENT, 0, 1),
       LAYER(kv_dtype_v, CODE, DECODER | CROSS, 0, NUM_KV_DTYPES - 1),
       LAYER(padded_page_bytes, LONG, BLOCKS | RECURRENT, 0, 0),
       LAYER(q_scale_form, INT, ATTENDS | INDEXER, 0, ATTN_SCALE_PER_HEAD),
       LAYER(k_scale_form, INT, BLOCKS, 0, ATTN_SCALE_PER_HEAD),
       LAYER(v_scale_form, INT, DECODER | CROSS, 0, ATTN_SCALE_PER_HEAD_CHANNEL),
       LAYER(p_scale_form, INT, ATTENDS, 0, ATTN_SCALE_PER_TENSOR),
       LAYER(q_dtype, CODE, ATTENDS | INDEXER, 0, NUM_DTYPES - 1),
       LAYER(output_form, INT, ATTENDS | RECURRENT, 0, NUM_OUTPUT_FORMS - 1),
       LAYER(output_scale_pow2, INT, ATTENDS | RECURRENT, 0, 1),
       LAYER(output_scale_column_major, INT, ATTENDS | RECURRENT, 0, 1),
       LAYER(skip_kv_quantization, INT, CACHED | INDEXER, 0, 1),
       LAYER(needs_lse, INT, ATTENDS, 0, 1), LAYER(graph_level, INT, ALL, 0, ATTN_GRAPH_ALWAYS),
       LAYER(batch_invariant, INT, ALL, 0, 2), LAYER(rope, INT, DECODER, 0, 2),
       LAYER(qk_norm, INT, DECODER, 0, 1), LAYER(needs_block_table_row, INT, BLOCKS, 0, 1),
       LAYER(device_seq_lens_only, INT, ALL, 0, 1),
       LAYER(fast_prefill, INT, DECODER | CROSS | ENCODER, 0, 1),
       LAYER(max_seq_len, INT, ALL, 0, INT32_MAX), LAYER(max_num_reqs, INT, ALL, 0, INT32_MAX),
       LAYER(encoder, INT, ENCODER, 0, ATTN_ENCODER_MULTIMODAL),
       LAYER(needed_features, MASK, ALL, 0, NUM_FEATURES),
       LAYER(needed_view_forms, MASK, BLOCKS, 0, NUM_VIEW_FORMS),
       LAYER(needs_page_lists, INT, BLOCKS, 0, 1), LAYER(host_bounds, INT, ALL, 0, 1),
       LAYER(kv_row_bytes, INT, CACHED, 0, MAX_ROW),
       LAYER(kv_row_bytes_v, INT, DECODER | CROSS, 0, MAX_ROW),
       LAYER(kv_scale_bytes, INT, DECODER | CROSS, 0, MAX_ROW),
       LAYER(kv_scale_bytes_v, INT, DECODER | CROSS, 0, MAX_ROW));
FIELDS(mla_desc, INT(mla_desc, kv_lora_rank, 8, MAX_LATENT),
       INT(mla_desc, qk_nope_head_dim, 8, MAX_HEAD_SIZE),
       INT(mla_desc, qk_rope_head_dim, 0, MAX_HEAD_SIZE),
       INT(mla_desc, v_head_dim, 8, MAX_HEAD_SIZE), INT(mla_desc, topk, 0, 1 << 20),
       SWITCH(mla_desc, absorb_in_core), INT(mla_desc, padded_num_q_heads, 0, MAX_HEADS));
FIELDS(recurrent_desc, INT(recurrent_desc, num_k_heads, 1, MAX_HEADS),
       INT(recurrent_desc, num_v_heads, 1, MAX_HEADS),
       INT(recurrent_desc, head_size_k, 8, MAX_HEAD_SIZE),
       INT(recurrent_desc, head_size_v, 8, MAX_HEAD_SIZE), INT(recurrent_desc, conv_width, 0, 64),
       SWITCH(recurrent_desc, conv_silu), SWITCH(recurrent_desc, qk_l2norm),
       INT(recurrent_desc, chunk_size, 0, 4096),
       INT(recurrent_desc, num_speculative_tokens, 0, 1024),
       INT(recurrent_desc, state_dtype, 0, ATTN_DTYPE_F32),
       SWITCH(recurrent_desc, has_initial_slots),
       INT(recurrent_desc, checkpoint_interval, 0, 1 << 30));
FIELDS(recurrent_rule, INT(recurrent_rule, rule, 0, NUM_RULES - 1),
       INT(recurrent_rule, gate, 0, NUM_GATES - 1), SWITCH(recurrent_rule, gate_per_channel),
       INT(recurrent_rule, write_gate, 0, NUM_WRITE_GATES - 1),
       SWITCH(recurrent_rule, values_first), SWITCH(recurrent_rule, has_skip),
       ZERO(recurrent_rule, reserved));
FIELDS(recurrent_norm, INT(recurrent_norm, gate_activation, 0, ATTN_OUTPUT_GATE_SIGMOID),
       SWITCH(recurrent_norm, gate_first), INT(recurrent_norm, num_groups, 0, MAX_HEADS));
FIELDS(recurrent_rounding, INT(recurrent_rounding, philox_rounds, 0, 16),
       ZERO(recurrent_rounding, reserved));
FIELDS(indexer_desc, INT(indexer_desc, topk, 1, MAX_ENTRIES),
       INT(indexer_desc, num_groups, 0, MAX_HEADS),
       INT(indexer_desc, activation, 0, NUM_ACTIVATIONS - 1), SWITCH(indexer_desc, has_weights),
       INT(indexer_desc, tokens_per_row, 0, MAX_GATHERED),
       INT(indexer_desc, rows_per_entry, 0, MAX_GATHERED),
       INT(indexer_desc, first_entries, 0, MAX_ENTRIES),
       INT(indexer_desc, last_entries, 0, MAX_ENTRIES), SWITCH(indexer_desc, tail),
       SWITCH(indexer_desc, forced_on_top));
FIELDS(index_lists, INT(index_lists, max_entries, 1, 1 << 20),
       INT(index_lists, groups, 0, NUM_LIST_GROUPS - 1), SWITCH(index_lists, physical_slots),
       SWITCH(index_lists, has_lengths), ZERO(index_lists, reserved));
FIELDS(compressed_rows, ZERO(compressed_rows, reserved));
FIELDS(compressor_desc, INT(compressor_desc, tokens_per_row, 1, MAX_GATHERED),
       SWITCH(compressor_desc, overlaps), INT(compressor_desc, rope, 0, ATTN_ROPE_GPTJ),
       INT(compressor_desc, rotary_dim, 0, MAX_HEAD_SIZE));
FIELDS(output_rope, INT(output_rope, form, ATTN_ROPE_NEOX, ATTN_ROPE_GPTJ),
       INT(output_rope, rotary_dim, 2, MAX_HEAD_SIZE));
FIELDS(index_write, INT(index_write, norm, 0, ATTN_KEY_NORM_LAYER),
       INT(index_write, rope, 0, ATTN_ROPE_GPTJ), INT(index_write, rotary_dim, 0, MAX_HEAD_SIZE),
       INT(index_write, rotary_first, 0, MAX_HEAD_SIZE), SWITCH(index_write, hadamard),
       ZERO(index_write, reserved));
FIELDS(context_parallel,
       INT(context_parallel, reduce, ATTN_CP_ALL_GATHER_REDUCE_SCATTER, ATTN_CP_ALL_TO_ALL),
       INT(context_parallel, order, ATTN_CP_CONTIGUOUS, ATTN_CP_ZIGZAG),
       ZERO(context_parallel, reserved));
FIELDS(mm_encoder_quant, SWITCH(mm_encoder_quant, fp8),
       INT(mm_encoder_quant, amax_history_len, 0, 1024),
       INT(mm_encoder_quant, padded_head_size, 0, MAX_HEAD_SIZE));
FIELDS(cache_desc, CODE(cache_desc, role, ATTN_CACHE_INDEX_K, NUM_CACHE_ROLES - 1),
       INT(cache_desc, table, 0, ATTN_MAX_TABLES), CODE(cache_desc, kv_dtype, 1, NUM_KV_DTYPES - 1),
       INT(cache_desc, num_heads, 1, MAX_HEADS), INT(cache_desc, head_size, 1, MAX_ROW),
       INT(cache_desc, block_size, 0, MAX_ROW), INT(cache_desc, tokens_per_row, 0, MAX_ROW));

FIELDS(layer_params, DEVICE(layer_params, sinks), DEVICE(layer_params, alibi_slopes),
       TENSOR(layer_params, sink_k), TENSOR(layer_params, sink_v), DEVICE(layer_params, q_scale),
       DEVICE(layer_params, k_scale), DEVICE(layer_params, v_scale), DEVICE(layer_params, p_scale));
FIELDS(mla_weights, TENSOR(mla_weights, kv_b_proj), TENSOR(mla_weights, w_uk),
       TENSOR(mla_weights, w_uv), TENSOR(mla_weights, w_uk_scale), TENSOR(mla_weights, w_uv_scale));
FIELDS(recurrent_weights, DEVICE(recurrent_weights, a_log), DEVICE(recurrent_weights, dt_bias),
       TENSOR(recurrent_weights, conv_weight), TENSOR(recurrent_weights, conv_bias));
FIELDS(kv_quant_params, DEVICE(kv_quant_params, hadamard_signs_k),
       DEVICE(kv_quant_params, hadamard_signs_v), DEVICE(kv_quant_params, v_channel_scale));
FIELDS(mm_encoder_state, DEVICE(mm_encoder_state, amax_history), DEVICE(mm_encoder_state, scales));
FIELDS(recurrent_skip, DEVICE(recurrent_skip, skip));
FIELDS(recurrent_norm_weight, TENSOR(recurrent_norm_weight, weight));

FIELDS(batch, INT(batch, mode, 0, ATTN_BATCH_PROFILE), INT(batch, causal, 0, ATTN_CAUSAL_NO),
       COUNT(batch, common_prefix_len), DEVICE(batch, query_start_loc),
       HOST(batch, query_start_loc_host), DEVICE(batch, seq_lens), HOST(batch, seq_lens_host),
       DEVICE(batch, key_start_loc), HOST(batch, key_start_loc_host), DEVICE(batch, block_table),
       DEVICE(batch, block_table_row), DEVICE(batch, slot_mapping),
       DEVICE(batch, causal_per_request), DEVICE(batch, encoder_seq_lens),
       HOST(batch, encoder_seq_lens_host), DEVICE(batch, logits_indices), DEVICE(batch, spans),
       DEVICE(batch, span_start_loc), DEVICE(batch, tree), DEVICE(batch, page_indices),
       DEVICE(batch, page_start_loc), DEVICE(batch, last_page_len),
       HOST(batch, page_start_loc_host), HOST(batch, last_page_len_host));
FIELDS(batch_table, DEVICE(batch_table, block_table), DEVICE(batch_table, block_table_row),
       DEVICE(batch_table, slot_mapping), DEVICE(batch_table, seq_lens),
       HOST(batch_table, seq_lens_host), ZERO(batch_table, reserved),
       DEVICE(batch_table, page_indices), DEVICE(batch_table, page_start_loc),
       DEVICE(batch_table, last_page_len), HOST(batch_table, page_start_loc_host),
       HOST(batch_table, last_page_len_host));
FIELDS(batch_recurrent, DEVICE(batch_recurrent, state_slots),
       DEVICE(batch_recurrent, has_initial_state), DEVICE(batch_recurrent, num_accepted_tokens),
       DEVICE(batch_recurrent, initial_slots), DEVICE(batch_recurrent, checkpoint_slots));
FIELDS(batch_replay, DEVICE(batch_replay, ring_tokens));
FIELDS(batch_context_parallel, DEVICE(batch_context_parallel, local_seq_lens),
       HOST(batch_context_parallel, local_seq_lens_host), ZERO(batch_context_parallel, reserved),
       HOST(batch_context_parallel, query_lens_host));

FIELDS(step_io, TENSOR(step_io, q), TENSOR(step_io, k), TENSOR(step_io, v), TENSOR(step_io, out),
       TENSOR(step_io, lse));
FIELDS(io_mla, TENSOR(io_mla, q_nope), TENSOR(io_mla, q_pe), TENSOR(io_mla, kv_c),
       TENSOR(io_mla, k_pe), DEVICE(io_mla, topk_indices));
FIELDS(io_index_lists, DEVICE(io_index_lists, indices), DEVICE(io_index_lists, lengths));
FIELDS(io_recurrent, TENSOR(io_recurrent, mixed_qkv), TENSOR(io_recurrent, a),
       TENSOR(io_recurrent, b));
FIELDS(io_recurrent_gate, TENSOR(io_recurrent_gate, gate));
FIELDS(io_indexer, TENSOR(io_indexer, weights), DEVICE(io_indexer, lengths));
FIELDS(io_output_quant, DEVICE(io_output_quant, scale), TENSOR(io_output_quant, block_scales));
FIELDS(io_rope, DEVICE(io_rope, positions), TENSOR(io_rope, cos_sin),
       TENSOR(io_rope, q_norm_weight), TENSOR(io_rope, k_norm_weight), ZERO(io_rope, reserved));
FIELDS(io_compressor, TENSOR(io_compressor, position_bias), TENSOR(io_compressor, norm_weight),
       TENSOR(io_compressor, cos_sin), ZERO(io_compressor, reserved));
FIELDS(io_output_rope, DEVICE(io_output_rope, positions), TENSOR(io_output_rope, cos_sin));
FIELDS(io_index_write, DEVICE(io_index_write, positions), TENSOR(io_index_write, cos_sin),
       TENSOR(io_index_write, norm_weight), TENSOR(io_index_write, norm_bias),
       ZERO(io_index_write, reserved));
FIELDS(io_caches, ZERO(io_caches, reserved));

FIELDS(runtime_options, INT(runtime_options, isolation, -1, 1),
       INT(runtime_options, probe_deadline_ms, 0, 600000), ZERO(runtime_options, reserved));
FIELDS(model_options, ZERO(model_options, reserved));
FIELDS(kv_view, DEVICE(kv_view, data), DEVICE(kv_view, scale));
FIELDS(cache_memory, ZERO(cache_memory, reserved));
FIELDS(block_transfer,
       INT(block_transfer, kind, ATTN_COPY_HOST_TO_DEVICE, ATTN_COPY_DEVICE_TO_DEVICE),
       COUNT(block_transfer, table));
FIELDS(amax_args, SWITCH(amax_args, per_head), SWITCH(amax_args, accumulate));
FIELDS(copy_args, INT(copy_args, kind, ATTN_COPY_HOST_TO_DEVICE, ATTN_COPY_DEVICE_TO_DEVICE),
       ZERO(copy_args, reserved));
FIELDS(fill_args, ZERO(fill_args, reserved));
FIELDS(plan_options, SWITCH(plan_options, graph), ZERO(plan_options, reserved));
FIELDS(limits, INT(limits, max_num_reqs, 1, INT32_MAX), INT(limits, max_num_tokens, 1, INT32_MAX),
       COUNT(limits, max_query_len), COUNT(limits, max_seq_len), COUNT(limits, max_blocks_per_req),
       ZERO(limits, reserved));
FIELDS(workspace, ZERO(workspace, reserved));
FIELDS(batch_order, COUNT(batch_order, num_reqs), COUNT(batch_order, threshold),
       ZERO(batch_order, reserved));

FIELDS(device_info, TEXT(device_info, name), TEXT(device_info, arch), TEXT(device_info, isa),
       COUNT(device_info, compute_capability_major), COUNT(device_info, compute_capability_minor),
       COUNT(device_info, num_multiprocessors), ZERO(device_info, reserved),
       TEXT(device_info, device_namespace), TEXT(device_info, uuid));
FIELDS(backend_caps, TEXT(backend_caps, name), TEXT(backend_caps, variant),
       TEXT(backend_caps, version), TEXT(backend_caps, vendor), MASK(kernels, NUM_KERNELS),
       MASK(layer_kinds, NUM_LAYER_KINDS), MASK(phases, NUM_PHASES), MASK(dtypes, NUM_DTYPES),
       MASK(kv_dtypes, NUM_KV_DTYPES), MASK(q_dtypes, NUM_DTYPES), MASK(terms, NUM_TERMS),
       MASK(features, NUM_FEATURES), MASK(view_forms, NUM_VIEW_FORMS),
       MASK(layouts, NUM_KV_LAYOUTS), MASK(k_scale_forms, NUM_SCALE_FORMS),
       MASK(v_scale_forms, NUM_SCALE_FORMS), MASK(p_scale_forms, NUM_SCALE_FORMS),
       MASK(output_forms, NUM_OUTPUT_FORMS), ARRAY(head_sizes, ABI_HEAD_SIZE_RANGE),
       ARRAY(block_sizes, ABI_RANGE), ARRAY(refused, ABI_REFUSED_COMBINATION),
       COUNT(backend_caps, preferred_block_size), COUNT(backend_caps, graph_level),
       COUNT(backend_caps, graph_fill_seq_len), COUNT(backend_caps, reorder_threshold),
       COUNT(backend_caps, kv_alignment), COUNT(backend_caps, io_alignment),
       COUNT(backend_caps, max_group), COUNT(backend_caps, max_num_q_heads),
       COUNT(backend_caps, max_speculative_tokens), ZERO(backend_caps, reserved),
       MASK(decode_write_kv_dtypes, NUM_KV_DTYPES), MASK(cache_roles, NUM_CACHE_ROLES),
       COUNT(backend_caps, max_tables), ARRAY(extensions, ABI_EXTENSION_ID),
       COUNT(backend_caps, graph_max_query_len), ARRAY(vendor_codes, ABI_VENDOR_CODE));
FIELDS(refused_combination, TEXT(refused_combination, why));
FIELDS(vendor_code, TEXT(vendor_code, name));

#define STRUCT(id, type, minimum, class, fields)                                                   \
    [ABI_##id] = {#type, sizeof(struct type), minimum, class, fields_##fields, 0, 0, NULL},
#define EXTENSION(id, type, minimum, on, fields, reader)                                           \
    [ABI_##id] = {#type,           sizeof(struct type), minimum,  ABI_INPUT,                       \
                  fields_##fields, ATTN_EXT_##id,       ABI_##on, reader},

const struct abi_struct abi_structs[NUM_ABI] = {
    ABI_STRUCTS(STRUCT) ABI_EXTENSIONS(EXTENSION)[ABI_EXTENSION_ID] = {
        "extension", sizeof(uint32_t), sizeof(uint32_t), ABI_ELEMENT, fields_none, 0, 0, NULL}};

/* Where an id stands in a list of all: drafts' come after the others. */
#define PLACE(id) ((id) < ATTN_EXT_DRAFT ? (id) : (id)-ATTN_EXT_DRAFT + 32)
#define BY_PLACE(id, ...) [PLACE(ATTN_EXT_##id)] = ABI_##id,

const struct abi_struct *abi_find(uint32_t ext_id, enum abi_id on)
{
    static const uint8_t rows[] = {ABI_EXTENSIONS(BY_PLACE)};
    const uint32_t place = PLACE(ext_id);
    const struct abi_struct *row = &abi_structs[place < sizeof rows ? rows[place] : 0];
    return row->ext_id == ext_id && ext_id != 0 && row->on == on ? row : NULL;
}
