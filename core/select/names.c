/* SPDX-License-Identifier: Apache-2.0 */
#include "select/names.h"

#include <stdio.h>

#include "util/structs.h"
#include "util/counts.h"

#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))
/* `count` names in the order of their codes. */
#define NAMES(list, count, ...)                                                                    \
    static const char *const list[] = {__VA_ARGS__};                                               \
    _Static_assert(COUNT(list) == (count), "a name for each code")

NAMES(kernels, NUM_KERNELS, "attend", "write_kv", "merge_states", "rope_write_kv", "attend_mla",
      "attend_mla_sparse", "gather_kv", "recurrent", "batched_gemm", "quantize", "amax",
      "copy_blocks", "copy", "fill", "make_block_table");
NAMES(terms, NUM_TERMS, "causal", "bidirectional", "causal_per_request", "sliding_window",
      "symmetric_window", "chunked_local", "soft_cap", "alibi", "alibi_sqrt", "sinks",
      "static_sink", "prefix_lm", "tree_bits", "tree_bias");
NAMES(features, NUM_FEATURES, "paged_kv", "contiguous_kv", "lse", "block_table_row", "mixed_batch",
      "update_block_table", "fused_write", "fused_rope", "fused_rope_norm", "batch_invariant",
      "batch_invariant_prefix", "quantized_query", "device_seq_lens", "fast_prefill", "fp8_inputs",
      "mxfp4_weights", "host_bounds", "step_allocates", "kv_dtype_v", "amax_history",
      "compressed_rows", "output_rope", "index_write");
NAMES(view_forms, NUM_VIEW_FORMS, "nhd", "hnd", "packed", "latent", "separate_strides");
NAMES(dtypes, ATTN_DTYPE_MXFP4 + 1, "default", "f16", "bf16", "f32", "fp8_e4m3", "fp8_e5m2",
      "fp8_e4m3fnuz", "int8", [ATTN_DTYPE_MXFP4] = "mxfp4");
NAMES(kv_dtypes, NUM_KV_DTYPES, "auto", "f16", "bf16", "f32", "fp8_e4m3", "fp8_e5m2",
      "fp8_e4m3fnuz", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "int8_kv",
      "int8_k", "nvfp4", "fp8_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc",
      "turboquant_k3v4_nc", "turboquant_3bit_nc", "q8_0", "q4_0", "opaque", "fp8_ds_v4", "mxfp4");
NAMES(layouts, NUM_KV_LAYOUTS, "nhd", "hnd", "nhd_inner", "hnd_inner", "hnd_rows", "packed_k",
      "latent");
NAMES(kinds, NUM_LAYER_KINDS, "decoder", "encoder", "cross", "mla", "gdn", "indexer", "compressor");
NAMES(cache_roles, NUM_CACHE_ROLES, "unknown", "k", "v", "latent", "state", "conv", "index_k",
      "scale", "zero", "compressed", "extra", "replay");
NAMES(phases, NUM_PHASES, "prefill", "decode");
NAMES(scale_forms, NUM_SCALE_FORMS, "none", "per_tensor", "per_head", "per_head_channel");
NAMES(output_forms, NUM_OUTPUT_FORMS, "plain", "fp8_static", "fp8_group_64", "fp8_group_128",
      "nvfp4");

#define LIST(names)                                                                                \
    {                                                                                              \
        names, COUNT(names)                                                                        \
    }
static const struct {
    const char *const *names;
    int32_t count;
} lists[] = {
    [ATTN_NAMES_KERNEL] = LIST(kernels),
    [ATTN_NAMES_LAYER_KIND] = LIST(kinds),
    [ATTN_NAMES_PHASE] = LIST(phases),
    [ATTN_NAMES_DTYPE] = LIST(dtypes),
    [ATTN_NAMES_KV_DTYPE] = LIST(kv_dtypes),
    [ATTN_NAMES_TERM] = LIST(terms),
    [ATTN_NAMES_FEATURE] = LIST(features),
    [ATTN_NAMES_VIEW_FORM] = LIST(view_forms),
    [ATTN_NAMES_KV_LAYOUT] = LIST(layouts),
    [ATTN_NAMES_SCALE_FORM] = LIST(scale_forms),
    [ATTN_NAMES_OUTPUT_FORM] = LIST(output_forms),
    [ATTN_NAMES_CACHE_ROLE] = LIST(cache_roles),
};

const char *code_name(int32_t list, int32_t code)
{
    bool known = list >= 0 && list < COUNT(lists) && code >= 0 && code < lists[list].count;
    return known ? lists[list].names[code] : NULL;
}

const char *name_of(int32_t list, int32_t code)
{
    const char *name = code_name(list, code);
    return name != NULL ? name : "unknown";
}

struct code_text code_text(int32_t list, int32_t code)
{
    struct code_text text;
    if (code >= ATTN_VENDOR_CODE) {
        snprintf(text.text, sizeof text.text, "%#x", (unsigned)code);
    } else {
        snprintf(text.text, sizeof text.text, "%s", name_of(list, code));
    }
    return text;
}

struct kv_dtypes_text kv_dtypes_text(int32_t kv_dtype, int32_t kv_dtype_v)
{
    struct kv_dtypes_text text;
    const bool two = kv_dtype_v != 0 && kv_dtype_v != kv_dtype;
    snprintf(text.text, sizeof text.text, "%s%s%s", code_text(ATTN_NAMES_KV_DTYPE, kv_dtype).text,
             two ? "/" : "", two ? code_text(ATTN_NAMES_KV_DTYPE, kv_dtype_v).text : "");
    return text;
}

bool declares_code(const struct attn_backend_caps *caps, int32_t list, uint64_t mask, int32_t code)
{
    if (code < ATTN_VENDOR_CODE) {
        return mask >> code & 1;
    }
    for (int32_t i = 0; i < caps->num_vendor_codes; i++) {
        if (caps->vendor_codes[i].list == list && caps->vendor_codes[i].code == code) {
            return true;
        }
    }
    return false;
}

static const struct {
    int32_t level;
    const char *name;
} graph_levels[] = {{ATTN_GRAPH_ALWAYS, "always"},
                    {ATTN_GRAPH_UNIFORM_BATCH, "uniform_batch"},
                    {ATTN_GRAPH_SINGLE_TOKEN_DECODE, "single_token_decode"},
                    {ATTN_GRAPH_NEVER, "never"}};

int32_t graph_level_known(int32_t level)
{
    for (int32_t i = 0; i < COUNT(graph_levels); i++) {
        if (graph_levels[i].level <= level) {
            return graph_levels[i].level;
        }
    }
    return level;
}

const char *name_of_graph_level(int32_t level)
{
    for (int32_t i = 0; i < COUNT(graph_levels); i++) {
        if (graph_levels[i].level == level) {
            return graph_levels[i].name;
        }
    }
    return "unknown";
}

const char *name_of_layer(const struct attn_layer_desc *layer)
{
    static const char *const encoders[] = {"encoder", "encoder_only", "mm_encoder"};
    if (layer->kind == ATTN_LAYER_ENCODER) {
        return encoders[layer->encoder];
    }
    if (layer->kind == ATTN_LAYER_MLA) {
        const struct attn_mla_desc *mla = ext_find(layer->next, ATTN_EXT_MLA_DESC);
        return mla != NULL && mla->topk > 0 ? "mla_sparse" : "mla";
    }
    if (layer->kind != ATTN_LAYER_DECODER) {
        return name_of(ATTN_NAMES_LAYER_KIND, layer->kind);
    }
    return layer->sink_len > 0     ? "static_sink"
           : layer->chunk_size > 0 ? "chunked"
           : layer->has_window     ? "sliding"
                                   : "full";
}

void name_codes(struct text *text, const struct attn_backend_caps *caps, int32_t list,
                uint64_t mask)
{
    for (int32_t i = 0; i < lists[list].count; i++) {
        if (mask >> i & 1) {
            text_add(text, "%s%s", text->length > 0 ? ", " : "", name_of(list, i));
        }
    }
    for (int32_t i = 0; i < caps->num_vendor_codes; i++) {
        const struct attn_vendor_code *code = &caps->vendor_codes[i];
        if (code->list == list) {
            text_add(text, "%s%#x (%s)", text->length > 0 ? ", " : "", (unsigned)code->code,
                     code->name);
        }
    }
}
