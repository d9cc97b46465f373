/* SPDX-License-Identifier: Apache-2.0 */
#include "common/declared.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))

/* Names of bits, in their order. */
static const char *const kernels[] = {
    "attend",    "write_kv",    "merge_states", "rope_write_kv", "attend_mla", "attend_mla_sparse",
    "gather_kv", "gated_delta", "batched_gemm", "quantize",      "amax",       "copy_blocks",
    "copy",      "fill"};
static const char *const layer_kinds[] = {"decoder",    "encoder",     "encoder_only",
                                          "cross",      "mm_encoder",  "mla",
                                          "mla_sparse", "static_sink", "gdn"};
static const char *const phases[] = {"prefill", "decode"};
static const char *const dtypes[] = {"default",  "f16",      "bf16",         "f32",
                                     "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "int8"};
static const char *const kv_dtypes[] = {"auto",
                                        "f16",
                                        "bf16",
                                        "f32",
                                        "fp8_e4m3",
                                        "fp8_e5m2",
                                        "fp8_per_token_head",
                                        "int8_per_token_head",
                                        "int4_per_token_head",
                                        "int8_kv",
                                        "int8_k",
                                        "nvfp4",
                                        "fp8_ds_mla",
                                        "turboquant_k8v4",
                                        "turboquant_4bit_nc",
                                        "turboquant_k3v4_nc",
                                        "turboquant_3bit_nc"};
static const char *const terms[] = {
    "causal",           "bidirectional", "causal_per_request", "sliding_window",
    "symmetric_window", "chunked_local", "soft_cap",           "alibi",
    "alibi_sqrt",       "sinks",         "static_sink",        "prefix_lm",
    "tree_bits",        "tree_bias"};
static const char *const features[] = {"paged_kv",
                                       "contiguous_kv",
                                       "lse",
                                       "block_table_row",
                                       "mixed_batch",
                                       "update_block_table",
                                       "fused_write",
                                       "fused_rope",
                                       "fused_rope_norm",
                                       "global_key_positions",
                                       "context_parallel",
                                       "interleave",
                                       "batch_invariant",
                                       "batch_invariant_prefix",
                                       "quantized_query",
                                       "device_seq_lens",
                                       "fast_prefill",
                                       "cascade",
                                       "fp8_inputs",
                                       "mxfp4_weights"};
static const char *const walks[] = {"nhd", "hnd", "packed", "latent", "separate_strides"};
static const char *const layouts[] = {"nhd",      "hnd",      "nhd_inner", "hnd_inner",
                                      "hnd_rows", "packed_k", "latent"};
static const char *const scale_forms[] = {"none", "per_tensor", "per_head", "per_head_channel"};
static const char *const output_forms[] = {"plain", "fp8_static", "fp8_group_64", "fp8_group_128",
                                           "nvfp4"};
_Static_assert(COUNT(kernels) == ATTN_KERNEL_COUNT, "a name for every kernel");
_Static_assert(COUNT(layer_kinds) == ATTN_LAYER_KIND_COUNT, "a name for every kind");
_Static_assert(COUNT(terms) == ATTN_TERM_COUNT, "a name for every term");
_Static_assert(COUNT(features) == ATTN_FEATURE_COUNT, "a name for every feature");

const char *declared_kernel_name(int32_t bit)
{
    return kernels[bit];
}

struct mask {
    const char *name;
    size_t offset;
    const char *const *bits;
    int32_t num_bits;
};
#define MASK(field, names)                                                                         \
    {                                                                                              \
#field, offsetof(struct attn_backend_caps, field), names, COUNT(names)                     \
    }

static const struct mask masks[] = {
    MASK(kernels, kernels),
    MASK(layer_kinds, layer_kinds),
    MASK(phases, phases),
    MASK(dtypes, dtypes),
    MASK(kv_dtypes, kv_dtypes),
    MASK(q_dtypes, dtypes),
    MASK(terms, terms),
    MASK(features, features),
    MASK(walks, walks),
    MASK(layouts, layouts),
    MASK(k_scale_forms, scale_forms),
    MASK(v_scale_forms, scale_forms),
    MASK(p_scale_forms, scale_forms),
    MASK(output_forms, output_forms),
    MASK(decode_write_kv_dtypes, kv_dtypes),
};

/* Numbers of which more is better; of a limit (max_) 0 means none. */
static const struct number {
    const char *name;
    size_t offset;
} numbers[] = {
    {"graph_level", offsetof(struct attn_backend_caps, graph_level)},
    {"reorder_threshold", offsetof(struct attn_backend_caps, reorder_threshold)},
    {"max_group", offsetof(struct attn_backend_caps, max_group)},
    {"max_num_q_heads", offsetof(struct attn_backend_caps, max_num_q_heads)},
    {"max_speculative_tokens", offsetof(struct attn_backend_caps, max_speculative_tokens)},
};

static uint64_t mask_of(const struct attn_backend_caps *caps, const struct mask *mask)
{
    uint64_t bits;
    memcpy(&bits, (const uint8_t *)caps + mask->offset, sizeof bits);
    return bits;
}

static int32_t number_of(const struct attn_backend_caps *caps, const struct number *number)
{
    int32_t value;
    memcpy(&value, (const uint8_t *)caps + number->offset, sizeof value);
    return value;
}

static struct json *range_json(const struct attn_range *range)
{
    struct json *values = json_array();
    json_push(values, json_number(range->min));
    json_push(values, json_number(range->max));
    json_push(values, json_number(range->multiple));
    return values;
}

struct json *declared_json(const struct attn_backend_caps *caps)
{
    struct json *root = json_object();
    json_add(root, "name", json_string(caps->name));
    for (int32_t i = 0; i < COUNT(masks); i++) {
        struct json *names = json_add(root, masks[i].name, json_array());
        for (int32_t bit = 0; bit < masks[i].num_bits; bit++) {
            if (mask_of(caps, &masks[i]) >> bit & 1) {
                json_push(names, json_string(masks[i].bits[bit]));
            }
        }
    }
    struct json *head_sizes = json_add(root, "head_sizes", json_array());
    for (int32_t i = 0; i < caps->num_head_sizes; i++) {
        struct json *pair = json_object();
        json_add(pair, "qk", range_json(&caps->head_sizes[i].qk));
        if (!caps->head_sizes[i].same) {
            json_add(pair, "v", range_json(&caps->head_sizes[i].v));
        }
        json_push(head_sizes, pair);
    }
    struct json *block_sizes = json_add(root, "block_sizes", json_array());
    for (int32_t i = 0; i < caps->num_block_sizes; i++) {
        json_push(block_sizes, range_json(&caps->block_sizes[i]));
    }
    struct json *refused = json_add(root, "refused", json_array());
    for (int32_t i = 0; i < caps->num_refused; i++) {
        const char *why = caps->refused[i].why;
        json_push(refused, json_string(why != NULL ? why : ""));
    }
    for (int32_t i = 0; i < COUNT(numbers); i++) {
        json_add(root, numbers[i].name, json_number(number_of(caps, &numbers[i])));
    }
    return root;
}
