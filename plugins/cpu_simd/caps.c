/* SPDX-License-Identifier: Apache-2.0 */
/* What each variant declares. */
#define _POSIX_C_SOURCE 200809L
#include <unistd.h>

#include "common/entry.h"
#include "internal.h"

static const struct attn_head_size_range head_sizes[] = {{{8, 512, 8}, {8, 512, 8}, 0}};
static const struct attn_range block_sizes[] = {{1, 65536, 1}};

static const struct attn_recurrent_caps gdn_caps = {
    .ext = {ATTN_EXT_CAPS_RECURRENT, 0, sizeof(gdn_caps), NULL},
    .head_size_k_max = 512,
    .head_size_v_max = 512,
    .conv_width_max = 64,
    .max_speculative_tokens = 1023,
};

static const struct attn_mla_caps mla_caps = {
    .ext = {ATTN_EXT_CAPS_MLA, 0, sizeof(mla_caps), &gdn_caps.ext},
    .kv_lora_rank_max = 512,
    .qk_rope_head_dim_max = 64,
    .num_q_heads_multiple = 1,
    .topk_max = 1 << 20,
    .topk_multiple = 1,
};

static const struct attn_backend_caps common_caps = {
    .struct_size = sizeof(struct attn_backend_caps),
    .next = &mla_caps.ext,
    .name = "cpu_simd",
    .version = PLUGIN_VERSION,
    .vendor = "libattn",
    .device = {ATTN_DEVICE_CPU, 0},
    .kernels = ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV | ATTN_KERNEL_MERGE_STATES |
               ATTN_KERNEL_ROPE_WRITE_KV | ATTN_KERNEL_ATTEND_MLA | ATTN_KERNEL_ATTEND_MLA_SPARSE |
               ATTN_KERNEL_GATED_DELTA | ATTN_KERNEL_GATHER_KV | ATTN_KERNEL_BATCHED_GEMM |
               ATTN_KERNEL_QUANTIZE | ATTN_KERNEL_AMAX | ATTN_KERNEL_COPY_BLOCKS |
               ATTN_KERNEL_COPY | ATTN_KERNEL_FILL,
    .layer_kinds = BIT(ATTN_LAYER_DECODER) | BIT(ATTN_LAYER_ENCODER) | BIT(ATTN_LAYER_CROSS) |
                   BIT(ATTN_LAYER_MLA) | BIT(ATTN_LAYER_RECURRENT),
    .phases = BIT(ATTN_PHASE_PREFILL) | BIT(ATTN_PHASE_DECODE),
    .dtypes = BIT(ATTN_DTYPE_F16) | BIT(ATTN_DTYPE_BF16) | BIT(ATTN_DTYPE_F32),
    .kv_dtypes = BIT(ATTN_KV_AUTO) | BIT(ATTN_KV_F16) | BIT(ATTN_KV_BF16) | BIT(ATTN_KV_F32) |
                 BIT(ATTN_KV_FP8_E4M3) | BIT(ATTN_KV_FP8_E5M2) | BIT(ATTN_KV_FP8_PER_TOKEN_HEAD) |
                 BIT(ATTN_KV_INT8_PER_TOKEN_HEAD) | BIT(ATTN_KV_INT4_PER_TOKEN_HEAD) |
                 BIT(ATTN_KV_INT8_KV) | BIT(ATTN_KV_INT8_K) | BIT(ATTN_KV_NVFP4) |
                 BIT(ATTN_KV_FP8_DS_MLA) | BIT(ATTN_KV_TURBOQUANT_K8V4) |
                 BIT(ATTN_KV_TURBOQUANT_4BIT_NC) | BIT(ATTN_KV_TURBOQUANT_K3V4_NC) |
                 BIT(ATTN_KV_TURBOQUANT_3BIT_NC) | BIT(ATTN_KV_Q8_0) | BIT(ATTN_KV_Q4_0),
    .q_dtypes = BIT(ATTN_DTYPE_FP8_E4M3) | BIT(ATTN_DTYPE_FP8_E5M2) | BIT(ATTN_DTYPE_INT8),
    .terms = ATTN_TERM_CAUSAL | ATTN_TERM_BIDIRECTIONAL | ATTN_TERM_CAUSAL_PER_REQUEST |
             ATTN_TERM_SLIDING_WINDOW | ATTN_TERM_SYMMETRIC_WINDOW | ATTN_TERM_CHUNKED_LOCAL |
             ATTN_TERM_SOFT_CAP | ATTN_TERM_ALIBI | ATTN_TERM_ALIBI_SQRT | ATTN_TERM_SINKS |
             ATTN_TERM_PREFIX_LM | ATTN_TERM_TREE_BITS | ATTN_TERM_TREE_BIAS,
    .features = ATTN_FEATURE_PAGED_KV | ATTN_FEATURE_CONTIGUOUS_KV | ATTN_FEATURE_LSE |
                ATTN_FEATURE_BLOCK_TABLE_ROW | ATTN_FEATURE_MIXED_BATCH |
                ATTN_FEATURE_UPDATE_BLOCK_TABLE | ATTN_FEATURE_FUSED_ROPE |
                ATTN_FEATURE_FUSED_ROPE_NORM | ATTN_FEATURE_BATCH_INVARIANT |
                ATTN_FEATURE_BATCH_INVARIANT_PREFIX | ATTN_FEATURE_QUANTIZED_QUERY |
                ATTN_FEATURE_DEVICE_SEQ_LENS | ATTN_FEATURE_HOST_BOUNDS |
                ATTN_FEATURE_FAST_PREFILL | ATTN_FEATURE_FP8_INPUTS | ATTN_FEATURE_MXFP4_WEIGHTS,
    .view_forms = ATTN_VIEW_NHD | ATTN_VIEW_HND | ATTN_VIEW_PACKED | ATTN_VIEW_SEPARATE_STRIDES |
                  ATTN_VIEW_LATENT,
    .layouts = BIT(ATTN_KV_LAYOUT_NHD) | BIT(ATTN_KV_LAYOUT_HND) | BIT(ATTN_KV_LAYOUT_NHD_INNER) |
               BIT(ATTN_KV_LAYOUT_HND_INNER) | BIT(ATTN_KV_LAYOUT_HND_ROWS) |
               BIT(ATTN_KV_LAYOUT_PACKED_K) | BIT(ATTN_KV_LAYOUT_LATENT),
    .k_scale_forms = BIT(ATTN_SCALE_NONE) | BIT(ATTN_SCALE_PER_TENSOR) | BIT(ATTN_SCALE_PER_HEAD),
    .v_scale_forms = BIT(ATTN_SCALE_NONE) | BIT(ATTN_SCALE_PER_TENSOR) | BIT(ATTN_SCALE_PER_HEAD),
    .p_scale_forms = BIT(ATTN_SCALE_NONE) | BIT(ATTN_SCALE_PER_TENSOR),
    .output_forms = BIT(ATTN_OUTPUT_PLAIN),
    .head_sizes = head_sizes,
    .block_sizes = block_sizes,
    .num_head_sizes = 1,
    .num_block_sizes = 1,
    .preferred_layout = ATTN_KV_LAYOUT_HND,
    .preferred_block_size = 64,
    .graph_level = ATTN_GRAPH_ALWAYS, /* plan and attend read lengths and tables as they run */
    .graph_fill_seq_len = 1,
    .reorder_threshold = 1,
    .decode_write_kv_dtypes = BIT(ATTN_KV_INT8_KV) | BIT(ATTN_KV_INT8_K),
};

/* Estimates until attn-bench --tune has measured. */
static int32_t rank_of(const char *variant)
{
    static const struct {
        const char *name;
        int32_t rank;
    } ranks[] = {{"scalar", 10}, {"neon", 40},       {"neonbf16", 60}, {"avx2", 40},
                 {"avx512", 60}, {"avx512bf16", 80}, {"amx", 100}};
    for (size_t i = 0; i < sizeof(ranks) / sizeof(ranks[0]); i++) {
        if (strcmp(ranks[i].name, variant) == 0) {
            return ranks[i].rank;
        }
    }
    return 1;
}

attn_status simd_probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                       struct attn_error *error)
{
    const struct variant *variants[8];
    char isa[128];
    int32_t count = variants_of_machine(variants, 8, isa, sizeof(isa));
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    long pages = sysconf(_SC_PHYS_PAGES);
    long page_bytes = sysconf(_SC_PAGESIZE);
    struct attn_device_info device = {
        .struct_size = sizeof(device),
        .device = {ATTN_DEVICE_CPU, 0},
        .name = "CPU",
#if defined(__aarch64__)
        .arch = "aarch64",
#else
        .arch = "x86-64",
#endif
        .isa = isa,
        .num_multiprocessors = cores > 0 ? (int32_t)cores : 1,
        .memory_bytes = pages > 0 ? (int64_t)pages * page_bytes : 0,
    };
    (void)host;
    attn_status status = sink->device(sink->user, &device);
    (void)error;
    for (int32_t i = 0; i < count; i++) {
        struct attn_backend_caps caps = common_caps;
        caps.variant = variants[i]->name;
        caps.rank[0] = caps.rank[1] = rank_of(variants[i]->name);
        attn_status taken = sink->backend(sink->user, &caps);
        status = status ? status : taken;
    }
    return status;
}
