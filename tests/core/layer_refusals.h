/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptions that make no sense: REFUSAL(name, field, what the message says, the change of layer
 * l that brings it). test_layer_check.c includes this list twice. */

REFUSAL(name_null, "name", "NULL", l->name = NULL)
REFUSAL(name_empty, "name", "empty", l->name = "")
REFUSAL(name_control, "name", "not clean", l->name = "a\nb")
REFUSAL(kind_code, "kind", "99", l->kind = 99)
REFUSAL(dtype_code, "dtype", "7", l->dtype = ATTN_DTYPE_INT8)
REFUSAL(dtype_negative, "dtype", "-1", l->dtype = -1)
REFUSAL(kv_code, "kv_dtype", "19", l->kv_dtype = ATTN_KV_DTYPE_COUNT)
REFUSAL(q_heads_zero, "num_q_heads", "0", l->num_q_heads = 0)
REFUSAL(q_heads_huge, "num_q_heads", "2147483647", l->num_q_heads = INT32_MAX)
REFUSAL(kv_heads_negative, "num_kv_heads", "-8", l->num_kv_heads = -8)
REFUSAL(heads_divide, "num_q_heads", "31 is not a multiple of num_kv_heads 8", l->num_q_heads = 31)
REFUSAL(head_size_odd, "head_size", "100", l->head_size = 100)
REFUSAL(head_size_big, "head_size", "512", l->head_size = 520)
REFUSAL(head_size_zero, "head_size", "0", l->head_size = 0)
REFUSAL(head_size_v_odd, "head_size_v", "12", l->head_size_v = 12)
REFUSAL(scale_zero, "scale", "0", l->scale = 0)
REFUSAL(scale_nan, "scale", "nan", l->scale = NAN)
REFUSAL(scale_inf, "scale", "inf", l->scale = INFINITY)
REFUSAL(cap_negative, "soft_cap", "-1", l->soft_cap = -1)
REFUSAL(cap_nan, "soft_cap", "nan", l->soft_cap = NAN)
REFUSAL(causal_code, "causal", "2", l->causal = 2)
REFUSAL(window_negative, "window_left", "(-2, 0)", l->has_window = 1; l->window_left = -2)
REFUSAL(window_open, "has_window", "open on both sides", l->has_window = 1;
        l->window_left = l->window_right = -1)
REFUSAL(chunk_negative, "chunk_size", "-1", l->chunk_size = -1)
REFUSAL(chunk_window, "chunk_size", "exclude each other", l->chunk_size = 64; l->has_window = 1;
        l->window_left = 3)
REFUSAL(chunk_per_request, "causal_per_request", "chunk_size 64", l->chunk_size = 64;
        l->causal_per_request = 1)
REFUSAL(chunk_causal, "chunk_size", "causal", l->chunk_size = 64; l->causal = 0)
REFUSAL(sink_kind, "sink_len", "4", l->kind = ATTN_LAYER_CROSS; l->causal = 0; l->sink_len = 4)
REFUSAL(encoder_code, "encoder", "3", l->kind = ATTN_LAYER_ENCODER; l->causal = 0; l->encoder = 3)
REFUSAL(encoder_of_decoder, "encoder", "1", l->encoder = ATTN_ENCODER_ONLY)
REFUSAL(encoder_causal, "causal", "encoder", l->kind = ATTN_LAYER_ENCODER)
REFUSAL(prefix_causal, "prefix_lm", "causal is 0", l->prefix_lm = 1; l->causal = 0)
REFUSAL(block_negative, "block_size", "-16", l->block_size = -16)
REFUSAL(page_negative, "padded_page_bytes", "-1", l->padded_page_bytes = -1)
REFUSAL(graph_code, "graph_level", "4", l->graph_level = 4)
REFUSAL(alibi_code, "alibi", "3", l->alibi = 3)
REFUSAL(tree_code, "tree_mask", "3", l->tree_mask = 3)
REFUSAL(output_code, "output_form", "5", l->output_form = ATTN_OUTPUT_FORM_COUNT)
REFUSAL(target_missing, "kv_sharing_target", "nobody", l->kv_sharing_target = "nobody")
REFUSAL(target_self, "kv_sharing_target", "no earlier layer", l->kv_sharing_target = "l")
REFUSAL(ext_unknown, "attn_layer_desc", "4933", l->next = &unknown_ext)
REFUSAL(mla_missing, "attn_mla_desc", "needs", l->kind = ATTN_LAYER_MLA)
REFUSAL(mla_on_decoder, "attn_mla_desc", "takes no", l->next = &mla_ext.ext)
REFUSAL(mla_heads, "head_size", "576", l->kind = ATTN_LAYER_MLA; l->next = &mla_ext.ext)
REFUSAL(gdn_missing, "attn_recurrent_desc", "needs", l->kind = ATTN_LAYER_RECURRENT)
REFUSAL(gdn_heads, "num_v_heads", "6 is not a multiple of num_k_heads 4",
        l->kind = ATTN_LAYER_RECURRENT;
        l->next = &gdn_ext.ext)
REFUSAL(cp_interleave, "interleave", "3 must divide block_size 16", l->next = &cp_ext.ext)
REFUSAL(dtype_missing, "dtype", "0", l->dtype = ATTN_DTYPE_DEFAULT)
REFUSAL(feature_unknown, "needed_features", "0x1000000000000000",
        l->needed_features = UINT64_C(1) << 60)
REFUSAL(view_form_unknown, "needed_view_forms", "0x20", l->needed_view_forms = UINT64_C(1) << 5)
REFUSAL(gdn_state, "state_dtype", "1", l->kind = ATTN_LAYER_RECURRENT; l->next = &gdn_half.ext)
REFUSAL(size_small, "struct_size", "100", l->struct_size = 100)

#undef REFUSAL
