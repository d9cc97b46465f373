/* SPDX-License-Identifier: Apache-2.0 */
/* Layers with compressed rows: which of them a backend takes as a whole. */
#include <attn/draft/compressed.h>

#include "match_setting.h"

enum { PARTS = ATTN_COMPOSE_COMPRESSED, WHOLE = ATTN_COMPOSE_BOTH_CACHES };

/* A layer with compressed rows, and a backend that attends to it in parts until `whole` is linked.
 */
struct setting_compressed {
    struct attn_cache_desc cache;
    struct attn_compressed_rows rows;
    struct attn_layer_caches caches;
    struct attn_mla_desc mla;
    struct attn_compressed_caps whole;
    struct attn_mla_caps limits;
    struct setting s;
};

static void compressed_init(struct setting_compressed *c, int32_t kv_dtype, int32_t size,
                            int32_t block_size)
{
    *c = (struct setting_compressed){
        .cache = {.role = ATTN_CACHE_COMPRESSED,
                  .table = 1,
                  .kv_dtype = kv_dtype,
                  .num_heads = 1,
                  .head_size = size,
                  .block_size = block_size,
                  .tokens_per_row = 4},
        .rows = {.ext = {ATTN_EXT_DRAFT_COMPRESSED_ROWS, 0, sizeof c->rows, NULL}},
        .caches = {.ext = {ATTN_EXT_LAYER_CACHES, 0, sizeof c->caches, &c->rows.ext},
                   .caches = &c->cache,
                   .num_caches = 1,
                   .cache_stride = sizeof c->cache},
        .mla = {.ext = {ATTN_EXT_MLA_DESC, 0, sizeof c->mla, &c->caches.ext},
                .kv_lora_rank = size,
                .qk_nope_head_dim = size,
                .v_head_dim = size},
        .whole = {.ext = {ATTN_EXT_DRAFT_COMPRESSED_CAPS, 0, sizeof c->whole, NULL},
                  .kv_dtypes = 1u << kv_dtype,
                  .dtypes = 1u << ATTN_DTYPE_BF16},
        .limits = {.ext = {ATTN_EXT_CAPS_MLA, 0, sizeof c->limits, NULL}, .kv_lora_rank_max = 512}};
    struct setting *s = &c->s;
    setting_init(s);
    s->layer.kind = ATTN_LAYER_MLA;
    s->layer.next = &c->mla.ext;
    s->layer.num_kv_heads = 1;
    s->layer.head_size = size;
    s->layer.kv_dtype = kv_dtype;
    s->layer.has_window = 1;
    s->layer.window_left = 31;
    s->layer.window_right = 0;
    s->caps->next = &c->limits.ext;
    s->caps->layer_kinds |= 1u << ATTN_LAYER_MLA;
    s->caps->kernels |= ATTN_KERNEL_ATTEND_MLA;
    s->caps->kv_dtypes |= 1u << kv_dtype;
    s->caps->max_group = 0;
    s->caps->graph_level = ATTN_GRAPH_ALWAYS;
    s->caps->features |= ATTN_FEATURE_BLOCK_TABLE_ROW | ATTN_FEATURE_MIXED_BATCH |
                         ATTN_FEATURE_DRAFT_COMPRESSED_ROWS;
}

static void compressed_finish(struct setting_compressed *c)
{
    setting_finish(&c->s);
}

TEST(test_whole)
{
    OWNED(compressed_finish) struct setting_compressed c;
    compressed_init(&c, ATTN_KV_BF16, 64, 32);
    assert_int_equal(expect_composed(&c.s, PARTS).graph_level, ATTN_GRAPH_NEVER);
    c.limits.ext.next = &c.whole.ext;
    assert_int_equal(expect_composed(&c.s, WHOLE).graph_level, ATTN_GRAPH_ALWAYS);
    c.whole.head_size = 64;
    c.whole.num_q_heads = 16; /* the layer has 32 */
    c.whole.kv_alignment = 128;
    expect_composed(&c.s, WHOLE);
    c.whole.kv_alignment = 8192; /* blocks of 16 and 32 rows of 128 bytes */
    expect_composed(&c.s, PARTS);
    c.s.layer.block_size = 64;
    expect_composed(&c.s, PARTS);
    c.cache.block_size = 64;
    expect_composed(&c.s, WHOLE);
    c.s.layer.block_size = 16;
    expect_composed(&c.s, PARTS);
    c.s.layer.block_size = 64;
    c.whole.num_q_heads = 12;
    expect_composed(&c.s, PARTS);
    c.whole.num_q_heads = 48;
    expect_composed(&c.s, WHOLE);
    c.whole.head_size = 512;
    expect_composed(&c.s, PARTS);
    c.whole.head_size = 0;
    c.whole.dtypes = 1u << ATTN_DTYPE_F16;
    expect_composed(&c.s, PARTS);
    c.whole.dtypes = 1u << ATTN_DTYPE_BF16;
    c.whole.kv_dtypes = 1u << ATTN_KV_F16;
    expect_composed(&c.s, PARTS);
    c.whole.kv_dtypes = 1u << ATTN_KV_BF16;
    c.s.caps->features &= ~ATTN_FEATURE_MIXED_BATCH;
    expect_composed(&c.s, PARTS);
    c.s.caps->features |= ATTN_FEATURE_MIXED_BATCH;
    expect_composed(&c.s, WHOLE);
    c.s.layer.p_scale_form = ATTN_SCALE_PER_TENSOR;
    c.s.caps->p_scale_forms = 3;
    expect_composed(&c.s, PARTS);
    c.s.layer.p_scale_form = ATTN_SCALE_NONE;
    c.s.caps->features |= ATTN_FEATURE_QUANTIZED_QUERY;
    c.s.caps->q_dtypes = 1u << ATTN_DTYPE_FP8_E4M3;
    c.s.layer.q_dtype = ATTN_DTYPE_FP8_E4M3;
    c.s.layer.q_scale_form = ATTN_SCALE_PER_TENSOR;
    expect_composed(&c.s, PARTS);
    c.s.layer.q_dtype = 0;
    c.s.layer.q_scale_form = ATTN_SCALE_NONE;
    expect_composed(&c.s, WHOLE);
    c.mla.kv_lora_rank = 48;
    c.mla.qk_rope_head_dim = c.limits.qk_rope_head_dim_max = 16;
    expect_composed(&c.s, PARTS);
}

/* Rows whose scales stand apart are 584 bytes each. */
TEST(test_scales_apart)
{
    OWNED(compressed_finish) struct setting_compressed c;
    compressed_init(&c, ATTN_KV_FP8_DS_V4, 512, 16);
    c.limits.ext.next = &c.whole.ext;
    c.whole.kv_alignment = 256;
    c.s.layer.block_size = 16;
    expect_composed(&c.s, PARTS); /* 16 rows are 256 x 36.5 bytes */
    c.s.layer.block_size = c.cache.block_size = 32;
    expect_composed(&c.s, WHOLE);
}
