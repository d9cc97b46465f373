/* SPDX-License-Identifier: Apache-2.0 */
/* What the CPU backends and those on gpu/kernels declare alike, and the layers that they refuse
 * alike where a mask cannot say it. */
#ifndef PLUGINS_COMMON_DECLARED_H
#define PLUGINS_COMMON_DECLARED_H

#include <attn/draft/compressed.h>
#include <attn/draft/index_lists.h>
#include <attn/draft/index_write.h>
#include <attn/indexer.h>

#include "common/entry.h"
#include "common/recurrent.h"
#include "common/number.h"
#include "common/turboquant.h"

#define COMMON_KERNELS                                                                             \
    (ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV | ATTN_KERNEL_MERGE_STATES |                        \
     ATTN_KERNEL_ROPE_WRITE_KV | ATTN_KERNEL_ATTEND_MLA | ATTN_KERNEL_ATTEND_MLA_SPARSE |          \
     ATTN_KERNEL_RECURRENT | ATTN_KERNEL_GATHER_KV | ATTN_KERNEL_BATCHED_GEMM |                    \
     ATTN_KERNEL_QUANTIZE | ATTN_KERNEL_AMAX | ATTN_KERNEL_COPY_BLOCKS | ATTN_KERNEL_COPY |        \
     ATTN_KERNEL_FILL)
/* A latent row may be of these or fp8_ds_mla. */
#define COMMON_PLAIN_KV_DTYPES                                                                     \
    (BIT(ATTN_KV_F16) | BIT(ATTN_KV_BF16) | BIT(ATTN_KV_F32) | BIT(ATTN_KV_FP8_E4M3) |             \
     BIT(ATTN_KV_FP8_E5M2))
#define COMMON_KV_DTYPES                                                                           \
    (COMMON_PLAIN_KV_DTYPES | BIT(ATTN_KV_AUTO) | BIT(ATTN_KV_FP8_PER_TOKEN_HEAD) |                \
     BIT(ATTN_KV_INT8_PER_TOKEN_HEAD) | BIT(ATTN_KV_INT4_PER_TOKEN_HEAD) | BIT(ATTN_KV_INT8_KV) |  \
     BIT(ATTN_KV_INT8_K) | BIT(ATTN_KV_NVFP4) | BIT(ATTN_KV_FP8_DS_MLA) |                          \
     BIT(ATTN_KV_TURBOQUANT_K8V4) | BIT(ATTN_KV_TURBOQUANT_4BIT_NC) |                              \
     BIT(ATTN_KV_TURBOQUANT_K3V4_NC) | BIT(ATTN_KV_TURBOQUANT_3BIT_NC))
#define COMMON_TERMS                                                                               \
    (ATTN_TERM_CAUSAL | ATTN_TERM_BIDIRECTIONAL | ATTN_TERM_CAUSAL_PER_REQUEST |                   \
     ATTN_TERM_SLIDING_WINDOW | ATTN_TERM_SYMMETRIC_WINDOW | ATTN_TERM_CHUNKED_LOCAL |             \
     ATTN_TERM_SOFT_CAP | ATTN_TERM_ALIBI | ATTN_TERM_ALIBI_SQRT | ATTN_TERM_SINKS |               \
     ATTN_TERM_PREFIX_LM | ATTN_TERM_TREE_BITS | ATTN_TERM_TREE_BIAS)
#define COMMON_FEATURES                                                                            \
    (ATTN_FEATURE_PAGED_KV | ATTN_FEATURE_CONTIGUOUS_KV | ATTN_FEATURE_LSE |                       \
     ATTN_FEATURE_BLOCK_TABLE_ROW | ATTN_FEATURE_MIXED_BATCH | ATTN_FEATURE_UPDATE_BLOCK_TABLE |   \
     ATTN_FEATURE_DEVICE_SEQ_LENS | ATTN_FEATURE_HOST_BOUNDS | ATTN_FEATURE_FUSED_ROPE |           \
     ATTN_FEATURE_FUSED_ROPE_NORM | ATTN_FEATURE_BATCH_INVARIANT | ATTN_FEATURE_QUANTIZED_QUERY |  \
     ATTN_FEATURE_FAST_PREFILL | ATTN_FEATURE_MXFP4_WEIGHTS | ATTN_FEATURE_FP8_INPUTS |            \
     ATTN_FEATURE_AMAX_HISTORY | ATTN_FEATURE_BATCH_INVARIANT_PREFIX |                             \
     ATTN_FEATURE_DRAFT_COMPRESSED_ROWS | ATTN_FEATURE_DRAFT_INDEX_WRITE)

#define COMMON_LAYER_KINDS                                                                         \
    (BIT(ATTN_LAYER_DECODER) | BIT(ATTN_LAYER_ENCODER) | BIT(ATTN_LAYER_CROSS) |                   \
     BIT(ATTN_LAYER_MLA) | BIT(ATTN_LAYER_RECURRENT))

/* Members of struct attn_backend_caps. Lengths, tables and slots are read when a step runs. */
#define COMMON_CAPS                                                                                \
    .struct_size = sizeof(struct attn_backend_caps), .version = PLUGIN_VERSION,                    \
    .vendor = "libattn", .phases = BIT(ATTN_PHASE_PREFILL) | BIT(ATTN_PHASE_DECODE),               \
    .dtypes = BIT(ATTN_DTYPE_F16) | BIT(ATTN_DTYPE_BF16) | BIT(ATTN_DTYPE_F32),                    \
    .q_dtypes = BIT(ATTN_DTYPE_FP8_E4M3) | BIT(ATTN_DTYPE_FP8_E5M2) | BIT(ATTN_DTYPE_INT8),        \
    .view_forms = ATTN_VIEW_NHD | ATTN_VIEW_HND | ATTN_VIEW_PACKED | ATTN_VIEW_SEPARATE_STRIDES |  \
                  ATTN_VIEW_LATENT,                                                                \
    .layouts = BIT(ATTN_KV_LAYOUT_NHD) | BIT(ATTN_KV_LAYOUT_HND) | BIT(ATTN_KV_LAYOUT_NHD_INNER) | \
               BIT(ATTN_KV_LAYOUT_HND_INNER) | BIT(ATTN_KV_LAYOUT_HND_ROWS) |                      \
               BIT(ATTN_KV_LAYOUT_PACKED_K) | BIT(ATTN_KV_LAYOUT_LATENT),                          \
    .k_scale_forms = BIT(ATTN_SCALE_NONE) | BIT(ATTN_SCALE_PER_TENSOR) | BIT(ATTN_SCALE_PER_HEAD), \
    .v_scale_forms = BIT(ATTN_SCALE_NONE) | BIT(ATTN_SCALE_PER_TENSOR) | BIT(ATTN_SCALE_PER_HEAD), \
    .p_scale_forms = BIT(ATTN_SCALE_NONE) | BIT(ATTN_SCALE_PER_TENSOR),                            \
    .output_forms = BIT(ATTN_OUTPUT_PLAIN),                                                        \
    .head_sizes = &(const struct attn_head_size_range){{8, 512, 8}, {8, 512, 8}, 0},               \
    .num_head_sizes = 1, .num_block_sizes = 1, .graph_level = ATTN_GRAPH_ALWAYS,                   \
    .graph_fill_seq_len = 1, .reorder_threshold = 1

/* Members of struct attn_recurrent_caps and of struct attn_recurrent_rule_caps, which has every
 * rule; `further` is the next extension or NULL. */
#define COMMON_RECURRENT_CAPS(further)                                                             \
    .ext = {ATTN_EXT_CAPS_RECURRENT, 0, sizeof(struct attn_recurrent_caps), further},              \
    .head_size_k_max = GDN_MAX_HEAD_SIZE, .head_size_v_max = GDN_MAX_HEAD_SIZE,                    \
    .conv_width_max = GDN_MAX_CONV_WIDTH, .max_speculative_tokens = GDN_MAX_DRAFTED - 1,           \
    .initial_slots = 1, .checkpoints = 1,                                                          \
    .state_dtypes = BIT(ATTN_DTYPE_F16) | BIT(ATTN_DTYPE_BF16) | BIT(ATTN_DTYPE_F32)
#define COMMON_RULE_CAPS(further)                                                                  \
    .ext = {ATTN_EXT_DRAFT_RECURRENT_CAPS, 0, sizeof(struct attn_recurrent_rule_caps), further},   \
    .rules = BIT(ATTN_RULE_GATED_DELTA) | BIT(ATTN_RULE_ADDITIVE),                                 \
    .gates = BIT(ATTN_GATE_SOFTPLUS) | BIT(ATTN_GATE_BOUNDED) | BIT(ATTN_GATE_GIVEN) |             \
             BIT(ATTN_GATE_CONSTANT),                                                              \
    .write_gates =                                                                                 \
        BIT(ATTN_WRITE_GATE_SIGMOID) | BIT(ATTN_WRITE_GATE_NONE) | BIT(ATTN_WRITE_GATE_STEP),      \
    .gate_per_channel = 1, .values_first = 1, .skip = 1, .norm = 1, .stochastic_rounding = 1
/* Members of struct attn_mla_caps, after which those of recurrent layers come. */
#define COMMON_MLA_CAPS(recurrent)                                                                 \
    .ext = {ATTN_EXT_CAPS_MLA, 0, sizeof(struct attn_mla_caps), &(recurrent).ext},                 \
    .kv_lora_rank_max = 512, .qk_rope_head_dim_max = 64, .num_q_heads_multiple = 1,                \
    .topk_max = 1 << 20, .topk_multiple = 1

/* Members of struct attn_indexer_caps and of struct attn_index_lists_caps. */
#define COMMON_INDEXER_CAPS(topk, forced)                                                          \
    .ext = {ATTN_EXT_CAPS_INDEXER, 0, sizeof(struct attn_indexer_caps), NULL},                     \
    .activations = BIT(ATTN_INDEXER_IDENTITY) | BIT(ATTN_INDEXER_RELU), .head_size_max = 512,      \
    .topk_max = (topk), .num_groups_max = 1024, .tokens_per_row_max = 4096,                        \
    .rows_per_entry_max = 4096, .forced_max = (forced)
#define COMMON_LISTS_CAPS(further)                                                                 \
    .ext = {ATTN_EXT_DRAFT_INDEX_LISTS_CAPS, 0, sizeof(struct attn_index_lists_caps), further},    \
    .attend = 1, .attend_mla_sparse = 1, .granularities = 1 + 4 + 16 + 64 + 128

static inline bool is_power_of_two(int32_t size)
{
    return (size & (size - 1)) == 0;
}

/* ggml's rows. */
static inline bool kv_is_blocks(int32_t kv_dtype)
{
    return kv_dtype == ATTN_KV_Q8_0 || kv_dtype == ATTN_KV_Q4_0;
}

/* Rows of codes split at certain sizes only; latent rows are plain numbers or DeepSeek's formats,
 * and no other rows are. */
static inline void refuse_rows(const struct attn_supports_args *args,
                               const struct attn_reason_sink *reasons)
{
    const struct attn_layer_desc *layer = args->layer;
    const int32_t kv = layer->kv_dtype, kv_v = layer_kv_dtype(layer, true), k = layer->head_size;
    const int32_t v = layer->head_size_v > 0 ? layer->head_size_v : k;
    const bool latent = layer_is_latent(layer), ds_mla = kv == ATTN_KV_FP8_DS_MLA;
    const bool ds_v4 = kv == ATTN_KV_FP8_DS_V4;
    char sizes[32], dtype[16], block[16];
    snprintf(sizes, sizeof sizes, latent ? "%d" : "%d, %d", k, v);
    snprintf(dtype, sizeof dtype, "%d", kv);
    snprintf(block, sizeof block, "%d", layer->block_size);
    const struct {
        bool refused;
        const char *field, *asked, *supported;
    } rows[] = {
        {(kv == ATTN_KV_INT4_PER_TOKEN_HEAD && !is_power_of_two(k)) ||
             (kv_v == ATTN_KV_INT4_PER_TOKEN_HEAD && !is_power_of_two(v)),
         "head_size", sizes, "powers of two with kv_dtype int4_per_token_head"},
        {(kv_is_blocks(kv) && k % 32 != 0) || (kv_is_blocks(kv_v) && v % 32 != 0), "head_size",
         sizes, "multiples of 32 with kv_dtype q8_0 and q4_0"},
        {(kv == ATTN_KV_NVFP4 && k % 16 != 0) || (kv_v == ATTN_KV_NVFP4 && v % 64 != 0),
         "head_size", sizes, "multiples of 16, of 64 for v, with kv_dtype nvfp4"},
        {(kv == ATTN_KV_NVFP4 || kv_v == ATTN_KV_NVFP4) && layer->block_size % 4 != 0, "block_size",
         block, "multiples of 4 with kv_dtype nvfp4"},
        {turboquant_bits(kv, false) > 0 && !is_power_of_two(k), "head_size", sizes,
         "powers of two for rotated keys of TurboQuant"},
        {latent && !ds_mla && !ds_v4 && number_of_kv(kv) < 0, "kv_dtype", dtype,
         args->caps->kv_dtypes & BIT(ATTN_KV_FP8_DS_V4)
             ? "f16, bf16, f32, fp8_e4m3, fp8_e5m2, fp8_ds_mla, fp8_ds_v4 in MLA layers"
             : "f16, bf16, f32, fp8_e4m3, fp8_e5m2, fp8_ds_mla in MLA layers"},
        {!latent && ds_mla, "kv_dtype", "fp8_ds_mla", "in MLA layers only"},
        {latent && ds_mla && k != 576, "head_size", sizes, "512 + 64 with kv_dtype fp8_ds_mla"},
        {!latent && ds_v4, "kv_dtype", "fp8_ds_v4", "in MLA layers only"},
        {latent && ds_v4 && k != 512, "head_size", sizes, "512 with kv_dtype fp8_ds_v4"},
        {kv == ATTN_KV_MXFP4 && layer->kind != ATTN_LAYER_INDEXER, "kv_dtype", "mxfp4",
         "in indexers only"},
        {kv == ATTN_KV_MXFP4 && k % 32 != 0, "head_size", sizes,
         "multiples of 32 with kv_dtype mxfp4"},
        {kv == ATTN_KV_INT8_K && layer->dtype == ATTN_DTYPE_F32, "dtype", "f32",
         "f16, bf16 with kv_dtype int8_k"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (rows[i].refused) {
            reasons->refuse(reasons->user, rows[i].field, rows[i].asked, rows[i].supported);
        }
    }
}

/* Entries of a list have no places in a row of scores, and keys next to each other need not be in
 * one block. */
static inline void refuse_beside_lists(const struct attn_layer_desc *layer,
                                       const struct attn_reason_sink *reasons)
{
    const struct {
        bool refused;
        const char *field, *asked;
    } rows[] = {{layer->alibi != ATTN_ALIBI_NONE, "alibi", "set"},
                {layer->tree_mask != ATTN_TREE_NONE, "tree_mask", "set"},
                {layer->prefix_lm != 0, "prefix_lm", "yes"},
                {layer->kv_dtype == ATTN_KV_NVFP4, "kv_dtype", "nvfp4"},
                {layer->kv_dtype_v == ATTN_KV_NVFP4, "kv_dtype_v", "nvfp4"}};
    const bool lists = lists_of(layer) != NULL;
    for (size_t i = 0; lists && i < sizeof rows / sizeof *rows; i++) {
        if (rows[i].refused) {
            reasons->refuse(reasons->user, rows[i].field, rows[i].asked, "not with lists of keys");
        }
    }
}

#endif
