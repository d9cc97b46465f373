/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptions that make no sense: REFUSAL(name, field, what the message says, the change of layer
 * l that brings it). test_layer_check.c includes this list twice. */

REFUSAL(name_null, "name", "NULL", l->name = NULL)
REFUSAL(name_empty, "name", "empty", l->name = "")
REFUSAL(name_control, "name", "not clean", l->name = "a\nb")
REFUSAL(kind_code, "kind", "99", l->kind = 99)
REFUSAL(kind_of_sharing, "kind", "105", l->kind = 105; l->kv_sharing_target = "a")
REFUSAL(dtype_code, "dtype", "7", l->dtype = ATTN_DTYPE_INT8)
REFUSAL(dtype_negative, "dtype", "-1", l->dtype = -1)
REFUSAL(kv_code, "kv_dtype", "22", l->kv_dtype = NUM_KV_DTYPES)
REFUSAL(kv_v_code, "kv_dtype_v", "22", l->kv_dtype_v = NUM_KV_DTYPES)
REFUSAL(kv_v_of_both, "kv_dtype_v", "int8_kv is of K and V together", l->kv_dtype = ATTN_KV_Q8_0;
        l->kv_dtype_v = ATTN_KV_INT8_KV)
REFUSAL(kv_k_of_both, "kv_dtype_v", "turboquant_k8v4 is of K and V together",
        l->kv_dtype = ATTN_KV_TURBOQUANT_K8V4;
        l->kv_dtype_v = ATTN_KV_Q8_0)
REFUSAL(kv_v_scale, "v_scale_form", "per_tensor with kv_dtype q8_0", l->kv_dtype = ATTN_KV_FP8_E4M3;
        l->kv_dtype_v = ATTN_KV_Q8_0; l->v_scale_form = ATTN_SCALE_PER_TENSOR)
REFUSAL(opaque_bytes, "kv_row_bytes",
        "kv_row_bytes is 0, with scales of 0 bytes, and the dtype is opaque",
        l->kv_dtype = ATTN_KV_OPAQUE)
REFUSAL(vendors_bytes_v, "kv_row_bytes_v", "the dtype is 0x10001", l->kv_dtype = 0x10001;
        l->kv_row_bytes = 80)
REFUSAL(bytes_of_others, "kv_row_bytes", "kv_row_bytes is 80", l->kv_row_bytes = 80)
REFUSAL(scales_of_others, "kv_row_bytes_v", "scales of 2 bytes, and the dtype is bf16",
        l->kv_dtype = ATTN_KV_OPAQUE;
        l->kv_row_bytes = 80; l->kv_dtype_v = ATTN_KV_BF16; l->kv_scale_bytes_v = 2)
REFUSAL(q_heads_zero, "num_q_heads", "0", l->num_q_heads = 0)
REFUSAL(q_heads_huge, "num_q_heads", "2147483647", l->num_q_heads = INT32_MAX)
REFUSAL(kv_heads_negative, "num_kv_heads", "-8", l->num_kv_heads = -8)
REFUSAL(heads_divide, "num_q_heads", "31; a multiple of num_kv_heads, 8, is", l->num_q_heads = 31)
REFUSAL(head_size_odd, "head_size", "100", l->head_size = 100)
REFUSAL(head_size_big, "head_size", "512", l->head_size = 520)
REFUSAL(head_size_zero, "head_size", "0", l->head_size = 0)
REFUSAL(head_size_v_odd, "head_size_v", "12", l->head_size_v = 12)
REFUSAL(scale_zero, "scale", "0", l->scale = 0)
REFUSAL(scale_nan, "scale", "nan", l->scale = NAN)
REFUSAL(scale_inf, "scale", "inf", l->scale = INFINITY)
REFUSAL(cap_negative, "soft_cap", "-1", l->soft_cap = -1)
REFUSAL(cap_nan, "soft_cap", "nan", l->soft_cap = NAN)
REFUSAL(causal_code, "causal", "3", l->causal = 3)
REFUSAL(window_negative, "window_left", "-2; -1 (open) to 2^30", l->has_window = 1;
        l->window_left = -2)
REFUSAL(window_open, "has_window", "open on both sides", l->has_window = 1;
        l->window_left = l->window_right = -1)
REFUSAL(chunk_negative, "chunk_size", "-1", l->chunk_size = -1)
REFUSAL(chunk_window, "chunk_size", "exclude each other", l->chunk_size = 64; l->has_window = 1;
        l->window_left = 3)
REFUSAL(chunk_per_request, "causal_per_request", "1; chunked local attention (chunk_size)",
        l->chunk_size = 64;
        l->causal_per_request = 1)
REFUSAL(chunk_causal, "chunk_size", "causal", l->chunk_size = 64; l->causal = ATTN_CAUSAL_NO)
REFUSAL(sink_kind, "sink_len", "4", l->kind = ATTN_LAYER_CROSS; l->causal = 0; l->sink_len = 4)
REFUSAL(encoder_code, "encoder", "3", l->kind = ATTN_LAYER_ENCODER; l->causal = 0;
        l->block_size = 0; l->encoder = 3)
REFUSAL(encoder_of_decoder, "encoder", "1", l->encoder = ATTN_ENCODER_ONLY)
REFUSAL(encoder_causal, "causal", "encoder", l->kind = ATTN_LAYER_ENCODER; l->block_size = 0)
REFUSAL(cross_causal, "causal", "cross", l->kind = ATTN_LAYER_CROSS)
REFUSAL(prefix_causal, "prefix_lm", "causal is no", l->prefix_lm = 1; l->causal = ATTN_CAUSAL_NO)
REFUSAL(block_negative, "block_size", "-16", l->block_size = -16)
REFUSAL(page_negative, "padded_page_bytes", "-1", l->padded_page_bytes = -1)
REFUSAL(graph_code, "graph_level", "40; it is not known here, 32 is: uniform_batch",
        l->graph_level = 40)
REFUSAL(graph_range, "graph_level", "65", l->graph_level = 65)
REFUSAL(alibi_code, "alibi", "3", l->alibi = 3)
REFUSAL(tree_code, "tree_mask", "3", l->tree_mask = 3)
REFUSAL(output_code, "output_form", "5", l->output_form = NUM_OUTPUT_FORMS)
REFUSAL(target_missing, "kv_sharing_target", "nobody", l->kv_sharing_target = "nobody")
REFUSAL(target_self, "kv_sharing_target", "no earlier layer", l->kv_sharing_target = "l")
REFUSAL(ext_unknown, "attn_layer_desc", "4933", l->next = &unknown_ext)
REFUSAL(ext_before_drafts, "attn_layer_desc", "extension", l->next = &core_ext)
REFUSAL(mla_missing, "attn_mla_desc", "needs", l->kind = ATTN_LAYER_MLA)
REFUSAL(mla_on_decoder, "attn_mla_desc", "takes no", l->next = &mla_ext.ext)
REFUSAL(mla_heads, "head_size", "576", l->kind = ATTN_LAYER_MLA; l->next = &mla_ext.ext)
REFUSAL(gdn_missing, "attn_recurrent_desc", "needs", l->kind = ATTN_LAYER_RECURRENT;
        l->block_size = 0)
REFUSAL(gdn_heads, "num_v_heads", "6 is not a multiple of num_k_heads 4",
        set_recurrent(l, &gdn_ext))
REFUSAL(cp_reserved_field, "reserved", "1; allowed are 0 to 0", l->next = &cp_reserved.ext)
REFUSAL(cp_interleave, "interleave", "3 must divide block_size 16", l->next = &cp_ext.ext)
REFUSAL(dtype_missing, "dtype", "0", l->dtype = ATTN_DTYPE_DEFAULT)
REFUSAL(feature_unknown, "needed_features", "0x1000000000000000",
        l->needed_features = UINT64_C(1) << 60)
REFUSAL(view_form_unknown, "needed_view_forms", "0x20", l->needed_view_forms = UINT64_C(1) << 5)
REFUSAL(gdn_state, "state_dtype", "4; allowed are 0 to 3", set_recurrent(l, &gdn_fp8))
REFUSAL(rule_on_decoder, "attn_recurrent_rule", "takes no", SET_RULE(.rule = 0);
        l->next = &rule.ext; l->kind = ATTN_LAYER_DECODER; l->block_size = 16)
REFUSAL(rule_unknown, "rule", "2; allowed are 0 to 1", SET_RULE(.rule = 2))
REFUSAL(rule_gate, "gate", "4; allowed are 0 to 3", SET_RULE(.gate = 4))
REFUSAL(rule_constant_channels, "gate_per_channel", "0 with a constant gate",
        SET_RULE(.gate = ATTN_GATE_CONSTANT, .gate_per_channel = 1))
REFUSAL(rule_step, "write_gate", "gate is 2, gate_per_channel 0",
        SET_RULE(.gate = ATTN_GATE_GIVEN, .write_gate = ATTN_WRITE_GATE_STEP))
REFUSAL(rule_step_channels, "write_gate", "gate is 0, gate_per_channel 1",
        SET_RULE(.gate_per_channel = 1, .write_gate = ATTN_WRITE_GATE_STEP))
REFUSAL(rule_unbounded, "gate_bound", "is 0; below 0", SET_RULE(.gate = ATTN_GATE_BOUNDED))
REFUSAL(rule_bound_alone, "gate_bound", "is -5; below 0", SET_RULE(.gate_bound = -5))
REFUSAL(rule_limits, "dt_min", "is 2, dt_max 1", SET_RULE(.dt_min = 2, .dt_max = 1))
REFUSAL(rule_limits_alone, "dt_min", "is 0, dt_max 1",
        SET_RULE(.gate = ATTN_GATE_GIVEN, .dt_max = 1))
REFUSAL(rule_reserved, "reserved", "1; allowed are 0 to 0", SET_RULE(.reserved = 1))
REFUSAL(norm_on_decoder, "attn_recurrent_norm", "takes no", SET_NORM(.epsilon = 1);
        l->next = &norm.ext; l->kind = ATTN_LAYER_DECODER; l->block_size = 16)
REFUSAL(norm_activation, "gate_activation", "2; allowed are 0 to 1", SET_NORM(.gate_activation = 2))
REFUSAL(norm_groups, "num_groups", "num_groups 3 does not divide num_v_heads 8",
        SET_NORM(.num_groups = 3, .epsilon = 1))
REFUSAL(norm_epsilon, "epsilon", "is 0; above 0", SET_NORM(.num_groups = 2))
REFUSAL(rounding_on_decoder, "attn_recurrent_rounding", "takes no", SET_ROUNDING(.seed = 1);
        l->next = &rounding.ext; l->kind = ATTN_LAYER_DECODER; l->block_size = 16)
REFUSAL(rounding_of_f32, "attn_recurrent_rounding", "state_dtype is f32", SET_ROUNDING(.seed = 1))
REFUSAL(rounding_rounds, "philox_rounds", "17; allowed are 0 to 16",
        SET_ROUNDING(.philox_rounds = 17))
REFUSAL(rounding_reserved, "reserved", "1; allowed are 0 to 0", SET_ROUNDING(.reserved = 1))
REFUSAL(ring_on_decoder, "role", "caches[0] has role replay; replay (11) is of recurrent layers",
        SET_RING(ring.block_size = 8);
        l->next = &caches.ext; l->kind = ATTN_LAYER_DECODER; l->block_size = 16)
REFUSAL(ring_role, "role", "caches[0] has role extra; replay (11) alone",
        SET_RING(ring.role = ATTN_CACHE_EXTRA))
REFUSAL(ring_rows, "caches", "block_size 4, tokens_per_row 1; a ring for replay",
        SET_RING(ring.block_size = 4);
        gdn.num_speculative_tokens = 2)
REFUSAL(ring_invariant, "batch_invariant", "batch_invariant is 2 with a ring",
        SET_RING(ring.table = 0);
        l->batch_invariant = 2)
REFUSAL(lists_on_encoder, "attn_index_lists", "takes no", SET_LISTS(.max_entries = 8);
        l->kind = ATTN_LAYER_ENCODER; l->causal = l->block_size = 0)
REFUSAL(lists_entries, "max_entries", "0; allowed are 1 to 1048576", SET_LISTS(.max_entries = 0))
REFUSAL(lists_granularity, "granularity", "is 32; allowed are 1, 4, 16, 64, 128",
        SET_LISTS(.max_entries = 8, .granularity = 32))
REFUSAL(lists_granularities, "granularity", "is 5; allowed are 1, 4, 16, 64, 128",
        SET_LISTS(.max_entries = 8, .granularity = 5))
REFUSAL(lists_groups, "groups", "3; allowed are 0 to 2", SET_LISTS(.max_entries = 8, .groups = 3))
REFUSAL(lists_slots, "physical_slots", "2; allowed are 0 to 1",
        SET_LISTS(.max_entries = 8, .physical_slots = 2))
REFUSAL(lists_lengths, "has_lengths", "-1; allowed are 0 to 1",
        SET_LISTS(.max_entries = 8, .has_lengths = -1))
REFUSAL(lists_reserved, "reserved", "1; allowed are 0 to 0",
        SET_LISTS(.max_entries = 8, .reserved = 1))
REFUSAL(lists_twice, "topk", "is 8 next to attn_index_lists; 0", SET_LISTS(.max_entries = 8);
        lists.ext.next = &mla_topk.ext; l->kind = ATTN_LAYER_MLA; l->num_kv_heads = 1;
        l->head_size = 576)
REFUSAL(gdn_causal, "causal", "gdn is causal", set_recurrent(l, &gdn_whole); l->causal = 2)
REFUSAL(gdn_sizes, "head_size", "num_kv_heads 8", set_recurrent(l, &gdn_whole); l->num_q_heads = 8;
        l->num_kv_heads = 8)
REFUSAL(gdn_values, "head_size", "head_size_v 32", set_recurrent(l, &gdn_whole);
        l->head_size_v = 32)
REFUSAL(gdn_silu, "conv_silu", "needs a conv_width", set_recurrent(l, &gdn_silu_alone))
REFUSAL(gdn_cache, "kv_dtype", "fp8_e4m3", set_recurrent(l, &gdn_whole);
        l->kv_dtype = ATTN_KV_FP8_E4M3)
REFUSAL(mla_absorbs_twice, "absorb_in_core", "2; allowed are 0 to 1", l->kind = ATTN_LAYER_MLA;
        l->next = &mla_two_ext.ext; l->num_kv_heads = 1; l->head_size = 576)
REFUSAL(mla_workspace, "context_workspace_tokens", "-1; 0 (what fits) or above",
        l->kind = ATTN_LAYER_MLA;
        l->next = &mla_rows_ext.ext; l->num_kv_heads = 1; l->head_size = 576)
REFUSAL(mla_values, "head_size_v", "64; 0, or v_head_dim, 128", l->kind = ATTN_LAYER_MLA;
        l->next = &mla_ext.ext; l->num_kv_heads = 1; l->head_size = 576; l->head_size_v = 64)
REFUSAL(encoder_cache, "kv_dtype", "fp8_e4m3", l->kind = ATTN_LAYER_ENCODER;
        l->causal = l->block_size = 0; l->kv_dtype = ATTN_KV_FP8_E4M3)
REFUSAL(encoder_history, "amax_history_len", "16", l->kind = ATTN_LAYER_ENCODER;
        l->causal = l->block_size = 0; l->next = &history_alone.ext)
REFUSAL(window_alone, "window_left", "63; it needs has_window", l->window_left = 63)
REFUSAL(window_right_alone, "window_right", "1; it needs has_window", l->window_right = 1)
REFUSAL(lookback_alone, "chunk_lookback", "needs a chunk_size", l->chunk_lookback = 1)
REFUSAL(span_window_alone, "prefix_lm_window", "needs prefix_lm", l->prefix_lm_window = 9)
REFUSAL(drafting_alone, "parallel_drafting", "needs num_speculative_tokens",
        l->parallel_drafting = 1)
REFUSAL(q_dtype_alone, "q_dtype", "needs a q_scale_form", l->q_dtype = ATTN_DTYPE_INT8)
REFUSAL(pow2_alone, "output_scale_pow2", "fp8 in groups", l->output_form = ATTN_OUTPUT_FP8_STATIC;
        l->output_scale_pow2 = 1)
REFUSAL(column_alone, "output_scale_column_major", "fp8 in groups",
        l->output_scale_column_major = 1)
REFUSAL(norm_alone, "qk_norm", "needs rope", l->qk_norm = 1)
REFUSAL(nvfp4_heads, "k_scale_form", "per_head with kv_dtype nvfp4", l->kv_dtype = ATTN_KV_NVFP4;
        l->k_scale_form = ATTN_SCALE_PER_HEAD)
REFUSAL(half_scale, "k_scale_form", "per_tensor with kv_dtype f16", l->dtype = ATTN_DTYPE_F16;
        l->kv_dtype = ATTN_KV_F16; l->k_scale_form = ATTN_SCALE_PER_TENSOR)
REFUSAL(auto_scale, "v_scale_form", "per_tensor with kv_dtype auto",
        l->v_scale_form = ATTN_SCALE_PER_TENSOR)
REFUSAL(q8_scale, "v_scale_form", "per_head with kv_dtype q8_0", l->kv_dtype = ATTN_KV_Q8_0;
        l->v_scale_form = ATTN_SCALE_PER_HEAD)
REFUSAL(token_scale, "k_scale_form", "int8_per_token_head",
        l->kv_dtype = ATTN_KV_INT8_PER_TOKEN_HEAD;
        l->k_scale_form = ATTN_SCALE_PER_TENSOR)
REFUSAL(channel_scale, "v_scale_form", "per_tensor with kv_dtype int8_kv",
        l->kv_dtype = ATTN_KV_INT8_KV;
        l->v_scale_form = ATTN_SCALE_PER_TENSOR)
REFUSAL(size_small, "struct_size", "100", l->struct_size = 100)

#undef REFUSAL
