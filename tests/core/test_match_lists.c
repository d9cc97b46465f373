/* SPDX-License-Identifier: Apache-2.0 */
/* Reasons against a backend that has not declared what a layer's lists of keys need. */
#include <attn/draft/index_lists.h>

#include "support/client.h"
#include "match_setting.h"

/* Lists of keys: declared part by part, and in no step that the core composes of others. */
TEST(test_lists)
{
    struct attn_index_lists lists =
        EXTENSION(attn_index_lists, ATTN_EXT_DRAFT_INDEX_LISTS, NULL, .max_entries = 48,
                  .granularity = 64, .groups = ATTN_LISTS_PER_KV_HEAD, .physical_slots = 1);
    struct attn_index_lists_caps caps =
        EXTENSION(attn_index_lists_caps, ATTN_EXT_DRAFT_INDEX_LISTS_CAPS, NULL, );
    OWNED(setting_finish) struct setting s;
    setting_init(&s);
    s.layer.next = &lists.ext;
    s.caps->features |= ATTN_FEATURE_BLOCK_TABLE_ROW;
    expect_fields(&s, 1, "attn_index_lists");
    s.caps->next = &caps.ext;
    caps.max_entries = 40;
    caps.entries_multiple = 32;
    expect_fields(&s, 6, "granularity", "groups", "physical_slots", "max_entries");
    caps = (struct attn_index_lists_caps){.ext = caps.ext,
                                          .attend = 1,
                                          .granularities = 1 + 64,
                                          .groups = 1u << ATTN_LISTS_PER_KV_HEAD,
                                          .physical_slots = 1,
                                          .max_entries = 48,
                                          .entries_multiple = 16};
    expect_composed(&s, 0); /* and no cascade */
    lists.groups = ATTN_LISTS_PER_Q_HEAD;
    expect_reasons(&s, 1);
    s.layer.num_kv_heads = s.layer.num_q_heads; /* one for each KV head, then */
    expect_reasons(&s, 0);
    s.layer.num_kv_heads = 8;
    lists.groups = ATTN_LISTS_PER_KV_HEAD;
    s.layer.chunk_size = 64;
    expect_fields(&s, 1, "attn_index_lists");
}

/* MLA's plain lists are its top k. */
TEST(test_latent_lists)
{
    struct attn_index_lists lists =
        EXTENSION(attn_index_lists, ATTN_EXT_DRAFT_INDEX_LISTS, NULL, .max_entries = 64,
                  .groups = ATTN_LISTS_PER_KV_HEAD); /* there is one */
    struct attn_mla_desc mla =
        EXTENSION(attn_mla_desc, ATTN_EXT_MLA_DESC, &lists.ext, .kv_lora_rank = 512,
                  .qk_nope_head_dim = 128, .qk_rope_head_dim = 64, .v_head_dim = 128);
    struct attn_mla_caps limits =
        EXTENSION(attn_mla_caps, ATTN_EXT_CAPS_MLA, NULL, .kv_lora_rank_max = 512,
                  .qk_rope_head_dim_max = 64, .topk_max = 64);
    struct attn_index_lists_caps caps =
        EXTENSION(attn_index_lists_caps, ATTN_EXT_DRAFT_INDEX_LISTS_CAPS, NULL, .attend = 1,
                  .granularities = 1, .groups = 1);
    OWNED(setting_finish) struct setting s;
    setting_init(&s);
    s.layer.kind = ATTN_LAYER_MLA;
    s.layer.next = &mla.ext;
    s.layer.num_kv_heads = 1;
    s.layer.head_size = 576;
    s.caps->next = &limits.ext;
    s.caps->layer_kinds |= 1u << ATTN_LAYER_MLA;
    s.caps->kernels |= ATTN_KERNEL_ATTEND_MLA_SPARSE;
    s.caps->max_group = 0;
    expect_reasons(&s, 0);
    lists.max_entries = 65;
    expect_fields(&s, 1, "max_entries");
    lists.max_entries = 64;
    lists.has_lengths = 1;
    expect_fields(&s, 1, "attn_index_lists");
    limits.ext.next = &caps.ext;
    expect_fields(&s, 1, "attn_index_lists");
    caps.attend_mla_sparse = 1;
    expect_reasons(&s, 0);
}
