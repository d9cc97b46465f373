/* SPDX-License-Identifier: Apache-2.0 */
/* Layers with compressed rows: which of them a backend takes as a whole. */
#include <attn/draft/compressed.h>

#include "match_setting.h"

enum { PARTS = ATTN_COMPOSE_COMPRESSED, WHOLE = ATTN_COMPOSE_BOTH_CACHES };

TEST(test_whole)
{
    struct attn_cache_desc cache = {.role = ATTN_CACHE_COMPRESSED,
                                    .table = 1,
                                    .kv_dtype = ATTN_KV_BF16,
                                    .num_heads = 1,
                                    .head_size = 64,
                                    .block_size = 32,
                                    .tokens_per_row = 4};
    struct attn_compressed_rows rows = {
        .ext = {ATTN_EXT_DRAFT_COMPRESSED_ROWS, 0, sizeof rows, NULL}};
    struct attn_layer_caches caches = {.ext = {ATTN_EXT_LAYER_CACHES, 0, sizeof caches, &rows.ext},
                                       .caches = &cache,
                                       .num_caches = 1,
                                       .cache_stride = sizeof cache};
    struct attn_mla_desc mla = {.ext = {ATTN_EXT_MLA_DESC, 0, sizeof mla, &caches.ext},
                                .kv_lora_rank = 64,
                                .qk_nope_head_dim = 64,
                                .v_head_dim = 64};
    struct attn_compressed_caps whole = {
        .ext = {ATTN_EXT_DRAFT_COMPRESSED_CAPS, 0, sizeof whole, NULL},
        .kv_dtypes = 1u << ATTN_KV_BF16,
        .dtypes = 1u << ATTN_DTYPE_BF16};
    struct attn_mla_caps limits = {.ext = {ATTN_EXT_CAPS_MLA, 0, sizeof limits, NULL},
                                   .kv_lora_rank_max = 512};
    OWNED(setting_finish) struct setting s;
    setting_init(&s);
    s.layer.kind = ATTN_LAYER_MLA;
    s.layer.next = &mla.ext;
    s.layer.num_kv_heads = 1;
    s.layer.head_size = 64;
    s.layer.has_window = 1;
    s.layer.window_left = 31;
    s.layer.window_right = 0;
    s.caps->next = &limits.ext;
    s.caps->layer_kinds |= 1u << ATTN_LAYER_MLA;
    s.caps->kernels |= ATTN_KERNEL_ATTEND_MLA;
    s.caps->max_group = 0;
    s.caps->graph_level = ATTN_GRAPH_ALWAYS;
    s.caps->features |= ATTN_FEATURE_BLOCK_TABLE_ROW | ATTN_FEATURE_MIXED_BATCH |
                        ATTN_FEATURE_DRAFT_COMPRESSED_ROWS;
    assert_int_equal(expect_composed(&s, PARTS).graph_level, ATTN_GRAPH_NEVER);
    limits.ext.next = &whole.ext;
    assert_int_equal(expect_composed(&s, WHOLE).graph_level, ATTN_GRAPH_ALWAYS);
    whole.head_size = 64;
    whole.num_q_heads = 16; /* the layer has 32 */
    whole.kv_alignment = 128;
    expect_composed(&s, WHOLE);
    whole.kv_alignment = 8192; /* blocks of 16 and 32 rows of 128 bytes */
    expect_composed(&s, PARTS);
    s.layer.block_size = 64;
    expect_composed(&s, PARTS);
    cache.block_size = 64;
    expect_composed(&s, WHOLE);
    s.layer.block_size = 16;
    expect_composed(&s, PARTS);
    s.layer.block_size = 64;
    whole.num_q_heads = 12;
    expect_composed(&s, PARTS);
    whole.num_q_heads = 48;
    expect_composed(&s, WHOLE);
    whole.head_size = 512;
    expect_composed(&s, PARTS);
    whole.head_size = 0;
    whole.dtypes = 1u << ATTN_DTYPE_F16;
    expect_composed(&s, PARTS);
    whole.dtypes = 1u << ATTN_DTYPE_BF16;
    whole.kv_dtypes = 1u << ATTN_KV_F16;
    expect_composed(&s, PARTS);
    whole.kv_dtypes = 1u << ATTN_KV_BF16;
    s.caps->features &= ~ATTN_FEATURE_MIXED_BATCH;
    expect_composed(&s, PARTS);
    s.caps->features |= ATTN_FEATURE_MIXED_BATCH;
    expect_composed(&s, WHOLE);
    s.layer.p_scale_form = ATTN_SCALE_PER_TENSOR;
    s.caps->p_scale_forms = 3;
    expect_composed(&s, PARTS);
    s.layer.p_scale_form = ATTN_SCALE_NONE;
    s.caps->features |= ATTN_FEATURE_QUANTIZED_QUERY;
    s.caps->q_dtypes = 1u << ATTN_DTYPE_FP8_E4M3;
    s.layer.q_dtype = ATTN_DTYPE_FP8_E4M3;
    s.layer.q_scale_form = ATTN_SCALE_PER_TENSOR;
    expect_composed(&s, PARTS);
    s.layer.q_dtype = 0;
    s.layer.q_scale_form = ATTN_SCALE_NONE;
    expect_composed(&s, WHOLE);
    mla.kv_lora_rank = 48;
    mla.qk_rope_head_dim = limits.qk_rope_head_dim_max = 16;
    expect_composed(&s, PARTS);
}

/* Rows whose scales stand apart are 584 bytes each. */
TEST(test_scales_apart)
{
    struct attn_cache_desc cache = {.role = ATTN_CACHE_COMPRESSED,
                                    .table = 1,
                                    .kv_dtype = ATTN_KV_FP8_DS_V4,
                                    .num_heads = 1,
                                    .head_size = 512,
                                    .block_size = 16,
                                    .tokens_per_row = 4};
    struct attn_compressed_rows rows = {
        .ext = {ATTN_EXT_DRAFT_COMPRESSED_ROWS, 0, sizeof rows, NULL}};
    struct attn_layer_caches caches = {.ext = {ATTN_EXT_LAYER_CACHES, 0, sizeof caches, &rows.ext},
                                       .caches = &cache,
                                       .num_caches = 1,
                                       .cache_stride = sizeof cache};
    struct attn_mla_desc mla = {.ext = {ATTN_EXT_MLA_DESC, 0, sizeof mla, &caches.ext},
                                .kv_lora_rank = 512,
                                .qk_nope_head_dim = 512,
                                .v_head_dim = 512};
    struct attn_compressed_caps whole = {
        .ext = {ATTN_EXT_DRAFT_COMPRESSED_CAPS, 0, sizeof whole, NULL},
        .kv_dtypes = 1u << ATTN_KV_FP8_DS_V4,
        .dtypes = 1u << ATTN_DTYPE_BF16,
        .kv_alignment = 256};
    struct attn_mla_caps limits = {.ext = {ATTN_EXT_CAPS_MLA, 0, sizeof limits, &whole.ext},
                                   .kv_lora_rank_max = 512};
    OWNED(setting_finish) struct setting s;
    setting_init(&s);
    s.layer.kind = ATTN_LAYER_MLA;
    s.layer.next = &mla.ext;
    s.layer.num_kv_heads = 1;
    s.layer.head_size = 512;
    s.layer.kv_dtype = ATTN_KV_FP8_DS_V4;
    s.layer.has_window = 1;
    s.layer.window_left = 31;
    s.layer.window_right = 0;
    s.layer.block_size = 16;
    s.caps->next = &limits.ext;
    s.caps->layer_kinds |= 1u << ATTN_LAYER_MLA;
    s.caps->kernels |= ATTN_KERNEL_ATTEND_MLA;
    s.caps->kv_dtypes |= 1u << ATTN_KV_FP8_DS_V4;
    s.caps->max_group = 0;
    s.caps->features |= ATTN_FEATURE_BLOCK_TABLE_ROW | ATTN_FEATURE_MIXED_BATCH |
                        ATTN_FEATURE_DRAFT_COMPRESSED_ROWS;
    expect_composed(&s, PARTS); /* 16 rows are 256 x 36.5 bytes */
    s.layer.block_size = cache.block_size = 32;
    expect_composed(&s, WHOLE);
}
