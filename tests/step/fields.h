/* SPDX-License-Identifier: Apache-2.0 */
/* LAYER(field, same, with, change): a layer l that `with` has made ready, and the change of the
 * field. `same`: the output may stay, since the field asks for an ability, promises or hints.
 * BATCH(field, same, with, change): the same of a batch b; the layer is tried with and without
 * `with`. test_fields.c includes this list several times. */

LAYER(kv_sharing_target, false, , l->kv_sharing_target = "another")
LAYER(kv_dtype, false, , l->kv_dtype = ATTN_KV_BF16)
LAYER(scale, false, , l->scale = 0.2f)
LAYER(causal, false, , l->causal = l->kind == ATTN_LAYER_DECODER ? ATTN_CAUSAL_NO : ATTN_CAUSAL_YES)
LAYER(causal_per_request, true, , l->causal_per_request = 1)
LAYER(has_window, false, , l->has_window = 1; l->window_left = 3)
LAYER(window_left, false, , l->window_left = 3)
LAYER(window_right, false, l->has_window = 1; l->window_left = 9;
      l->causal = ATTN_CAUSAL_NO, l->window_right = 2)
LAYER(chunk_size, false, , l->chunk_size = 16)
LAYER(chunk_lookback, false, l->chunk_size = 16, l->chunk_lookback = 1)
LAYER(soft_cap, false, , l->soft_cap = 2)
LAYER(alibi, false, , l->alibi = ATTN_ALIBI_SQRT)
LAYER(has_sinks, false, , l->has_sinks = 1)
LAYER(sink_len, false, , l->sink_len = 4)
LAYER(prefix_lm, true, , l->prefix_lm = 1)
LAYER(prefix_lm_window, false, , l->prefix_lm_window = 2)
LAYER(tree_mask, true, , l->tree_mask = ATTN_TREE_BITS)
LAYER(block_size, true, , l->block_size = 32)
LAYER(num_speculative_tokens, true, , l->num_speculative_tokens = 2)
LAYER(parallel_drafting, false, , l->parallel_drafting = 1)
LAYER(padded_page_bytes, true, , l->padded_page_bytes = 1 << 20)
LAYER(q_scale_form, false, , l->q_scale_form = ATTN_SCALE_PER_TENSOR)
LAYER(k_scale_form, false, , l->k_scale_form = ATTN_SCALE_PER_TENSOR)
LAYER(v_scale_form, false, l->kv_dtype = ATTN_KV_NVFP4;
      l->head_size = 64, l->v_scale_form = ATTN_SCALE_PER_HEAD)
LAYER(p_scale_form, false, , l->p_scale_form = ATTN_SCALE_PER_TENSOR)
LAYER(q_dtype, false, , l->q_dtype = ATTN_DTYPE_FP8_E4M3)
LAYER(output_form, false, , l->output_form = ATTN_OUTPUT_FP8_STATIC)
LAYER(output_scale_pow2, false, , l->output_scale_pow2 = 1)
LAYER(output_scale_column_major, false, , l->output_scale_column_major = 1)
LAYER(skip_kv_quantization, false, l->kv_dtype = ATTN_KV_FP8_E4M3, l->skip_kv_quantization = 1)
LAYER(graph_level, true, , l->graph_level = ATTN_GRAPH_ALWAYS)
LAYER(batch_invariant, true, , l->batch_invariant = 1)
LAYER(rope, true, , l->rope = 1)
LAYER(qk_norm, false, , l->qk_norm = 1)
LAYER(needs_block_table_row, true, , l->needs_block_table_row = 1)
LAYER(device_seq_lens_only, true, , l->device_seq_lens_only = 1)
LAYER(fast_prefill, true, , l->fast_prefill = 1)
LAYER(encoder, true, , l->encoder = ATTN_ENCODER_ONLY)
LAYER(kv_dtype_v, false, , l->kv_dtype_v = ATTN_KV_FP8_E5M2)
LAYER(needed_features, false, , l->needed_features = ATTN_FEATURE_FUSED_WRITE)
LAYER(needed_view_forms, true, , l->needed_view_forms = ATTN_VIEW_NHD)
LAYER(needs_page_lists, true, , l->needs_page_lists = 1)
LAYER(host_bounds, true, , l->host_bounds = 1)

BATCH(mode, false, , b->mode = ATTN_BATCH_IDLE)
BATCH(flags, true, l->host_bounds = 1, b->flags = ATTN_BATCH_HOST_BOUNDS)
BATCH(causal, false, , b->causal = kind == ATTN_LAYER_DECODER ? ATTN_CAUSAL_NO : ATTN_CAUSAL_YES)
BATCH(key_start_loc, true, , b->key_start_loc = b->key_start_loc_host = starts)
BATCH(block_table_row, true, l->needs_block_table_row = 1, b->block_table_row = rows)
BATCH(causal_per_request, false, l->causal_per_request = 1, b->causal_per_request = flags)
BATCH(logits_indices, false, l->fast_prefill = 1, b->logits_indices = last_rows;
      b->num_logits_indices = 2)
BATCH(num_logits_indices, false, l->fast_prefill = 1, b->num_logits_indices = 2)
BATCH(spans, false, l->prefix_lm = 1, b->spans = spans; b->num_spans = 2;
      b->span_start_loc = span_starts)
BATCH(num_spans, false, l->prefix_lm = 1, b->num_spans = 2)
BATCH(tree, false, l->tree_mask = ATTN_TREE_BITS, b->tree = tree; b->tree_stride_row = 1)
BATCH(attn_batch_recurrent, false, , b->next = &states.ext)
BATCH(attn_batch_context_parallel, false, , b->next = &context.ext)
BATCH(page_indices, true, l->needs_page_lists = 1, b->page_indices = rows)

#undef LAYER
#undef BATCH
