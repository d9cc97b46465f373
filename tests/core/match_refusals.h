/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend is refused for: REFUSAL(name, field, asked, supported, the change of layer l or
 * capabilities c that brings it). test_match.c includes this list twice. */

REFUSAL(kind, "layer_kind", "decoder", "encoder", c->layer_kinds = 1u << ATTN_LAYER_ENCODER)
REFUSAL(phase, "phase", "decode", "prefill", c->phases = 1u << ATTN_PHASE_PREFILL)
REFUSAL(dtype, "dtype", "f32", "f16, bf16", l->dtype = ATTN_DTYPE_F32; l->kv_dtype = ATTN_KV_F16)
REFUSAL(kv_dtype, "kv_dtype", "nvfp4", "f16, bf16", l->kv_dtype = ATTN_KV_NVFP4)
REFUSAL(head_size, "head_size", "72", "64, 128..256 in steps of 8, 192 with head_size_v 128",
        l->head_size = 72)
REFUSAL(head_size_v, "head_size_v", "64 with head_size 192",
        "64, 128..256 in steps of 8, 192 with head_size_v 128", l->head_size = 192;
        l->head_size_v = 64)
REFUSAL(block_size, "block_size", "24", "16..128 in steps of 16", l->block_size = 24)
REFUSAL(causal, "causal", "yes", "no", c->terms &= ~(uint64_t)ATTN_TERM_CAUSAL)
REFUSAL(bidirectional, "causal", "no (bidirectional)", "no", l->causal = ATTN_CAUSAL_NO;
        c->terms &= ~(uint64_t)ATTN_TERM_BIDIRECTIONAL)
REFUSAL(per_request, "causal_per_request", "yes", "no", l->causal_per_request = 1)
REFUSAL(window, "sliding_window", "(99, 0)", "no", l->has_window = 1; l->window_left = 99;
        c->terms &= ~(uint64_t)ATTN_TERM_SLIDING_WINDOW)
REFUSAL(symmetric, "symmetric_window", "(9, 9)", "no", l->has_window = 1;
        l->causal = ATTN_CAUSAL_NO; l->window_left = l->window_right = 9)
REFUSAL(chunk, "chunk_size", "100", "as virtual requests: multiples of block_size",
        l->chunk_size = 100;
        c->features |= ATTN_FEATURE_BLOCK_TABLE_ROW)
REFUSAL(chunk_row, "chunk_size", "as virtual requests: block_table_row", "no", l->chunk_size = 64)
REFUSAL(chunk_lens, "chunk_size", "with lengths on the device only",
        "as virtual requests: host lengths", l->chunk_size = 64;
        l->device_seq_lens_only = 1;
        c->features |= ATTN_FEATURE_BLOCK_TABLE_ROW | ATTN_FEATURE_DEVICE_SEQ_LENS)
REFUSAL(chunk_bounds, "chunk_size", "with lengths on the device only",
        "as virtual requests: host lengths", l->chunk_size = 64;
        l->host_bounds = 1; c->features |= ATTN_FEATURE_BLOCK_TABLE_ROW | ATTN_FEATURE_HOST_BOUNDS)
REFUSAL(chunk_spans, "chunk_size", "with spans, trees or causal flags per request",
        "as virtual requests: none of them", l->chunk_size = 64;
        l->prefix_lm = 1; c->terms |= ATTN_TERM_PREFIX_LM;
        c->features |= ATTN_FEATURE_BLOCK_TABLE_ROW)
REFUSAL(soft_cap, "soft_cap", "50", "no", l->soft_cap = 50)
REFUSAL(alibi, "alibi", "linear", "no", l->alibi = ATTN_ALIBI_LINEAR)
REFUSAL(alibi_sqrt, "alibi_sqrt", "yes", "no", l->alibi = ATTN_ALIBI_SQRT)
REFUSAL(sinks, "sinks", "yes", "no", l->has_sinks = 1)
REFUSAL(static_lse, "static_sink", "attend(sink) + attend(rest) + merge: log-sum-exp", "no",
        l->sink_len = 4;
        c->features &= ~(uint64_t)ATTN_FEATURE_LSE)
REFUSAL(static_contiguous, "static_sink", "attend(sink) + attend(rest) + merge: contiguous keys",
        "no", l->sink_len = 4;
        c->features &= ~(uint64_t)ATTN_FEATURE_CONTIGUOUS_KV)
REFUSAL(static_merge, "static_sink", "attend(sink) + attend(rest) + merge: merge_states", "no",
        l->sink_len = 4;
        c->kernels &= ~(uint64_t)ATTN_KERNEL_MERGE_STATES)
REFUSAL(static_alibi, "static_sink", "with ALiBi", "only fused", l->sink_len = 4;
        l->alibi = ATTN_ALIBI_LINEAR; c->terms |= ATTN_TERM_ALIBI)
REFUSAL(static_bounds, "static_sink", "with bounds in place of host lengths", "only fused",
        l->sink_len = 4;
        l->host_bounds = 1; c->features |= ATTN_FEATURE_HOST_BOUNDS)
REFUSAL(prefix_lm, "prefix_lm", "yes", "no", l->prefix_lm = 1)
REFUSAL(tree_bits, "tree_mask", "bits", "no", l->tree_mask = ATTN_TREE_BITS)
REFUSAL(tree_bias, "tree_mask", "bias", "no", l->tree_mask = ATTN_TREE_BIAS)
REFUSAL(lse, "lse", "yes", "no", l->needs_lse = 1; c->features &= ~(uint64_t)ATTN_FEATURE_LSE)
REFUSAL(graph_queries, "graph_max_query_len", "5", "at most 4",
        l->graph_level = ATTN_GRAPH_UNIFORM_BATCH;
        l->num_speculative_tokens = 4; c->graph_max_query_len = 4)
REFUSAL(graph, "graph_level", "always", "uniform_batch", l->graph_level = ATTN_GRAPH_ALWAYS;
        c->graph_level = ATTN_GRAPH_UNIFORM_BATCH)
REFUSAL(k_scale, "k_scale_form", "per_head", "per_tensor", l->kv_dtype = ATTN_KV_FP8_E4M3;
        l->k_scale_form = ATTN_SCALE_PER_HEAD; c->kv_dtypes |= 1u << ATTN_KV_FP8_E4M3;
        c->k_scale_forms = c->v_scale_forms = 1u << ATTN_SCALE_PER_TENSOR)
REFUSAL(v_scale, "v_scale_form", "per_head", "per_tensor", l->kv_dtype = ATTN_KV_FP8_E4M3;
        l->v_scale_form = ATTN_SCALE_PER_HEAD; c->kv_dtypes |= 1u << ATTN_KV_FP8_E4M3;
        c->k_scale_forms = c->v_scale_forms = 1u << ATTN_SCALE_PER_TENSOR)
REFUSAL(p_scale, "p_scale_form", "per_tensor", "none", l->p_scale_form = ATTN_SCALE_PER_TENSOR)
REFUSAL(q_scale, "q_scale_form", "per_tensor", "no", l->q_scale_form = ATTN_SCALE_PER_TENSOR;
        l->q_dtype = ATTN_DTYPE_INT8; c->q_dtypes = 1u << ATTN_DTYPE_INT8)
REFUSAL(q_dtype, "q_dtype", "int8", "none", l->q_scale_form = ATTN_SCALE_PER_TENSOR;
        l->q_dtype = ATTN_DTYPE_INT8; c->features |= ATTN_FEATURE_QUANTIZED_QUERY)
REFUSAL(output, "output_form", "nvfp4", "plain", l->output_form = ATTN_OUTPUT_NVFP4)
REFUSAL(invariant, "batch_invariant", "yes", "no", l->batch_invariant = 1)
REFUSAL(invariant_prefix, "batch_invariant", "with prefix caching", "no", l->batch_invariant = 2;
        c->features |= ATTN_FEATURE_BATCH_INVARIANT)
REFUSAL(rope, "rope", "yes", "no", l->rope = 1)
REFUSAL(qk_norm, "qk_norm", "yes", "no", l->rope = l->qk_norm = 1;
        c->features |= ATTN_FEATURE_FUSED_ROPE)
REFUSAL(table_row, "block_table_row", "yes", "no", l->needs_block_table_row = 1)
REFUSAL(bounds, "host_bounds", "yes", "no", l->host_bounds = 1)
REFUSAL(device_lens, "device_seq_lens_only", "yes", "no", l->device_seq_lens_only = 1)
REFUSAL(fast_prefill, "fast_prefill", "yes", "no", l->fast_prefill = 1)
REFUSAL(q_heads, "num_q_heads", "32", "at most 16", c->max_num_q_heads = 16)
REFUSAL(group, "group (num_q_heads / num_kv_heads)", "4", "at most 2", c->max_group = 2)
REFUSAL(speculative, "num_speculative_tokens", "5", "at most 4", l->num_speculative_tokens = 5;
        c->max_speculative_tokens = 4)
REFUSAL(drafting, "num_speculative_tokens", "6", "at most 4", l->num_speculative_tokens = 3;
        l->parallel_drafting = 1; c->max_speculative_tokens = 4)
REFUSAL(no_attend, "kernel", "attend", "not in the backend's table",
        c->kernels &= ~(uint64_t)ATTN_KERNEL_ATTEND)
REFUSAL(no_write, "kernel", "write_kv", "not in the backend's table",
        c->kernels &= ~(uint64_t)ATTN_KERNEL_WRITE_KV)
REFUSAL(no_pages, "paged_kv", "yes", "no", c->features &= ~(uint64_t)ATTN_FEATURE_PAGED_KV)
REFUSAL(view_forms, "needed_view_forms", "packed", "nhd, latent",
        l->needed_view_forms = ATTN_VIEW_NHD | ATTN_VIEW_PACKED;
        c->view_forms |= ATTN_VIEW_LATENT)
REFUSAL(kv_dtype_v, "kv_dtype_v", "bf16", "no", l->kv_dtype = ATTN_KV_F16;
        l->kv_dtype_v = ATTN_KV_BF16)
REFUSAL(kv_dtype_v_code, "kv_dtype_v", "q8_0", "f16, bf16", l->kv_dtype_v = ATTN_KV_Q8_0;
        c->features |= ATTN_FEATURE_KV_DTYPE_V)
REFUSAL(opaque, "kv_dtype", "opaque", "f16, bf16", l->kv_dtype = ATTN_KV_OPAQUE;
        l->kv_row_bytes = l->kv_row_bytes_v = 80)
REFUSAL(vendors_dtype, "kv_dtype", "0x10001", "f16, bf16", l->kv_dtype = 0x10001;
        l->kv_row_bytes = l->kv_row_bytes_v = 80)
REFUSAL(other_vendors, "kv_dtype", "0x10002", "f16, bf16, 0x10001 (acme_q6)", l->kv_dtype = 0x10002;
        l->kv_row_bytes = l->kv_row_bytes_v = 80; c->vendor_codes = codes; c->num_vendor_codes = 3)
REFUSAL(vendors_scales, "k_scale_form", "per_head", "none", l->kv_dtype = 0x10001;
        l->kv_row_bytes = l->kv_row_bytes_v = 80; l->k_scale_form = ATTN_SCALE_PER_HEAD;
        c->k_scale_forms = 1; c->vendor_codes = codes; c->num_vendor_codes = 3)
REFUSAL(vendors_query, "q_dtype", "0x10001", "fp8_e4m3, 0x10002 (acme_q)",
        l->q_scale_form = ATTN_SCALE_PER_TENSOR;
        l->q_dtype = 0x10001; c->features |= ATTN_FEATURE_QUANTIZED_QUERY;
        c->q_dtypes = 1u << ATTN_DTYPE_FP8_E4M3; c->vendor_codes = codes; c->num_vendor_codes = 3)
REFUSAL(vendors_role, "caches", "0x10004", "0x10003 (acme_sums)", l->next = &strange_role.ext;
        c->vendor_codes = codes; c->num_vendor_codes = 3)
REFUSAL(vendors_rows, "caches", "0x10005", "f16, bf16, 0x10001 (acme_q6)",
        l->next = &strange_rows.ext;
        c->vendor_codes = codes; c->num_vendor_codes = 3)
REFUSAL(auto_only, "kv_dtype", "f16", "auto", l->kv_dtype = ATTN_KV_F16;
        c->kv_dtypes = 1u << ATTN_KV_AUTO)
REFUSAL(features, "needed_features", "13", "bits of the backend's features",
        l->needed_features = ATTN_FEATURE_FAST_PREFILL)
REFUSAL(extension, "extension", "0x10000", "0x10001", l->next = &vendors; c->extensions = &declared;
        c->num_extensions = 1)
REFUSAL(combination, "combination", "windows have no lse", "not together", l->has_window = 1;
        l->needs_lse = 1; c->refused = &together; c->num_refused = 1;
        c->refused_stride = sizeof together)
REFUSAL(sized_combination, "combination", "128 in a decode", "not together", c->refused = &sized;
        c->num_refused = 1; c->refused_stride = sizeof sized)

#undef REFUSAL
