/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "support/client.h"
#include "cases/cases.h"

int32_t case_phase(const struct factor_value *v)
{
    return shape_is_decode(v[FACTOR_SHAPE].a) ? ATTN_PHASE_DECODE : ATTN_PHASE_PREFILL;
}

void case_layer(const struct factor_value *v, struct attn_layer_desc *layer)
{
    bool paged = shape_is_paged(v[FACTOR_SHAPE].a);
    bool global = v[FACTOR_KV_DTYPE].a == ATTN_KV_NVFP4;
    *layer = SIZED(attn_layer_desc, .name = "case",
                   .kind = !paged                             ? ATTN_LAYER_ENCODER
                           : v[FACTOR_SHAPE].a == SHAPE_CROSS ? ATTN_LAYER_CROSS
                                                              : ATTN_LAYER_DECODER,
                   .encoder = paged ? 0 : v[FACTOR_ENCODER].a, .dtype = v[FACTOR_DTYPE].a,
                   .kv_dtype = v[FACTOR_KV_DTYPE].a, .kv_dtype_v = v[FACTOR_KV_DTYPE].b,
                   .num_q_heads = v[FACTOR_HEADS].a, .num_kv_heads = v[FACTOR_HEADS].b,
                   .head_size = v[FACTOR_HEAD_SIZE].a, .head_size_v = v[FACTOR_HEAD_SIZE].b,
                   .scale = (float)(1 / sqrt(v[FACTOR_HEAD_SIZE].a)),
                   .causal = v[FACTOR_CAUSAL].a != CAUSAL_NO ? ATTN_CAUSAL_YES : ATTN_CAUSAL_NO,
                   .causal_per_request = v[FACTOR_CAUSAL].a == CAUSAL_PER_REQUEST,
                   .has_window = v[FACTOR_WINDOW].a > 0, .window_left = v[FACTOR_WINDOW].a - 1,
                   .window_right = v[FACTOR_WINDOW].b ? v[FACTOR_WINDOW].a - 1 : 0,
                   .chunk_size = v[FACTOR_CHUNK].a, .chunk_lookback = v[FACTOR_CHUNK].b,
                   .soft_cap = (float)v[FACTOR_SOFT_CAP].a, .alibi = v[FACTOR_ALIBI].a,
                   .has_sinks = v[FACTOR_SINKS].a, .sink_len = v[FACTOR_STATIC_SINK].a,
                   .prefix_lm = v[FACTOR_SPANS].a, .prefix_lm_window = v[FACTOR_SPANS].b,
                   .tree_mask = v[FACTOR_TREE].a, .block_size = paged ? v[FACTOR_BLOCK_SIZE].a : 0,
                   .num_speculative_tokens = v[FACTOR_SHAPE].a == SHAPE_SPECULATIVE ? 3 : 0,
                   .q_scale_form = v[FACTOR_QUERY].a ? v[FACTOR_QUERY].b : ATTN_SCALE_NONE,
                   .q_dtype = v[FACTOR_QUERY].a,
                   .k_scale_form = kv_is_fp8(case_kv(v, false)) ? v[FACTOR_SCALES].a
                                   : global                     ? ATTN_SCALE_PER_TENSOR
                                                                : 0,
                   .v_scale_form = kv_is_fp8(case_kv(v, true)) ? v[FACTOR_SCALES].b
                                   : global                    ? ATTN_SCALE_PER_TENSOR
                                                               : 0,
                   .p_scale_form = v[FACTOR_P_SCALE].a, .needs_lse = v[FACTOR_LSE].a != 0,
                   .needs_block_table_row = v[FACTOR_TABLE_ROW].a,
                   .device_seq_lens_only = v[FACTOR_LENGTHS].a == LENGTHS_DEVICE,
                   .host_bounds = v[FACTOR_LENGTHS].a == LENGTHS_HOST_BOUNDS,
                   .fast_prefill = v[FACTOR_FAST_PREFILL].a);
    if (!layer->has_window) {
        layer->window_left = layer->window_right = -1;
    }
}
