/* SPDX-License-Identifier: Apache-2.0 */
#include "command.h"
#include "model_reading.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util/safe_text.h"
#include "support/layer.h"

#define MAX_FILE (16 << 20)

#define V4_LISTED 4 /* tokens of the rows that DeepSeek-V4's indexers list */

static bool is_model(const char *model_type, const char *family)
{
    return strncmp(model_type, family, strlen(family)) == 0;
}

/* Entry i of layer_types. A type that is not known would be served wrongly, so it is refused. */
static const char *listed_type(struct reading *r, const cJSON *types, int32_t i)
{
    static const char *const known[] = {"full_attention",    "sliding_attention",
                                        "chunked_attention", "linear_attention",
                                        "indexed_attention", "minimax_m3_sparse"};
    const char *type = cJSON_GetStringValue(cJSON_GetArrayItem(types, i));
    for (size_t k = 0; type != NULL && k < sizeof known / sizeof *known; k++) {
        if (strcmp(type, known[k]) == 0) {
            return known[k];
        }
    }
    if (type == NULL) {
        reading_fail(r, "layer_types", "has %d entries of text and no type for layer %d",
                     cJSON_GetArraySize(types), i);
    } else {
        reading_fail(r, "layer_types",
                     "layer %d is '%.60s'; full_attention, sliding_attention, chunked_attention, "
                     "linear_attention, indexed_attention and minimax_m3_sparse are read",
                     i, type);
    }
    return known[0];
}

static bool lists_number(const cJSON *list, int32_t number)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, list)
    {
        if (cJSON_IsNumber(item) && item->valuedouble == number) {
            return true;
        }
    }
    return false;
}

/* Nemotron's sort of layer i: M is Mamba2, * attention, E and - have neither. */
static char pattern_at(struct reading *r, const cJSON *text, int32_t i)
{
    const char *pattern = read_text(text, "hybrid_override_pattern");
    if ((size_t)i >= strlen(pattern) || strchr("M*E-", pattern[i]) == NULL) {
        reading_fail(r, "hybrid_override_pattern", "'%.60s' has none of M, *, E and - for layer %d",
                     pattern, i);
        return '*';
    }
    return pattern[i];
}

/* "sliding_attention", "full_attention", "chunked_attention" or "linear_attention" of layer i. */
static const char *layer_type(struct reading *r, const cJSON *text, const char *model_type,
                              int32_t i, bool last)
{
    const cJSON *types = read_member(text, "layer_types");
    int32_t pattern = read_int(r, text, "sliding_window_pattern", 0, 1, 1024);
    int32_t interval = read_int(r, text, "full_attention_interval", 0, 1, 1024);
    if (cJSON_IsArray(types)) {
        return listed_type(r, types, i);
    }
    const cJSON *kda = read_member(read_member(text, "linear_attn_config"), "kda_layers");
    if (strcmp(model_type, "kimi_linear") == 0) { /* counted from 1 */
        return lists_number(kda, i + 1) ? "linear_attention" : "full_attention";
    }
    if (strcmp(model_type, "nemotron_h") == 0) {
        return pattern_at(r, text, i) == '*' ? "full_attention" : "linear_attention";
    }
    /* every fourth layer has no rotation and sees all */
    if (strcmp(model_type, "llama4_text") == 0) {
        const cJSON *no_rope = cJSON_GetArrayItem(read_member(text, "no_rope_layers"), i);
        bool full = no_rope != NULL ? no_rope->valueint == 0 : (i + 1) % 4 == 0;
        return full ? "full_attention" : "chunked_attention";
    }
    if (strcmp(model_type, "gemma2") == 0 || strcmp(model_type, "gpt_oss") == 0) {
        return i % 2 == 0 ? "sliding_attention" : "full_attention";
    }
    if (last && is_model(model_type, "gemma4")) {
        return "full_attention";
    }
    if (is_model(model_type, "gemma3") || is_model(model_type, "gemma4")) {
        return (i + 1) % (pattern > 0 ? pattern : 6) == 0 ? "full_attention" : "sliding_attention";
    }
    interval = is_model(model_type, "glm5_next") ? 4 : interval;
    if (interval > 0) {
        return (i + 1) % interval == 0 ? "full_attention" : "linear_attention";
    }
    return "full_attention";
}

/* What YaRN puts on queries and keys where a rotary embedding's own factor leaves it to the scale
 * (DeepSeek's yarn_get_mscale): 0.1 mscale_all_dim ln(factor) + 1. */
static double yarn_scale(struct reading *r, const cJSON *text)
{
    const cJSON *scaling = read_member(text, "rope_scaling");
    double all_dims = read_number(r, scaling, "mscale_all_dim", 0),
           factor = read_number(r, scaling, "factor", 1);
    return all_dims > 0 && factor > 1 ? 0.1 * all_dims * log(factor) + 1 : 1;
}

static void make_mla(struct reading *r, const cJSON *text, struct model_layer *layer)
{
    struct attn_mla_desc *mla = &layer->mla;
    struct attn_layer_desc *desc = &layer->desc;
    *mla = (struct attn_mla_desc){
        .kv_lora_rank = read_int(r, text, "kv_lora_rank", 512, 8, 1024),
        .qk_nope_head_dim = read_int(r, text, "qk_nope_head_dim", 128, 8, 512),
        .qk_rope_head_dim = read_int(r, text, "qk_rope_head_dim", 64, 0, 512),
        .v_head_dim = read_int(r, text, "v_head_dim", 128, 8, 512),
        .absorb_in_core = 1,
        .weight_dtype = desc->dtype};
    layer_set_mla(desc, mla);
    double yarn = yarn_scale(r, text);
    desc->scale = (float)(yarn * yarn / sqrt(mla->qk_nope_head_dim + mla->qk_rope_head_dim));
}

/* DeepSeek-V4's rows, which are key and value: of its own tokens in a window, and in layers with a
 * ratio of so many tokens each, of which an indexer lists some where these are few. */
static int32_t compress_ratio(struct reading *r, const cJSON *text, int32_t i)
{
    const cJSON *ratios = read_member(text, "compress_ratios");
    const cJSON *ratio = cJSON_GetArrayItem(ratios, i);
    if (!cJSON_IsNumber(ratio) || ratio->valuedouble < 0 || ratio->valuedouble > 1024) {
        reading_fail(r, "compress_ratios", "has no number from 0 to 1024 for layer %d", i);
        return 0;
    }
    return (int32_t)ratio->valuedouble;
}

/* What pools the rows of layer i, or of its index keys: those of 4 tokens overlap. */
static void add_compressor(struct reading *r, const cJSON *text, int32_t i, bool of_index)
{
    struct model_layer *layer = add_layer(r, of_index ? "index_compressor" : "compressor", i);
    const int32_t ratio = compress_ratio(r, text, i), overlaps = ratio == V4_LISTED;
    read_heads(r, text, &layer->desc);
    layer->desc.kind = ATTN_LAYER_DRAFT_COMPRESSOR;
    layer->desc.num_q_heads = layer->desc.num_kv_heads = 2 * (1 + overlaps);
    layer->desc.head_size =
        of_index ? read_int(r, text, "index_head_dim", 128, 8, 512) : layer->desc.head_size;
    layer->compressor =
        EXTENSION(attn_compressor_desc, ATTN_EXT_DRAFT_COMPRESSOR_DESC, NULL, ratio, overlaps,
                  ATTN_ROPE_GPTJ, read_int(r, text, "qk_rope_head_dim", 64, 2, 512));
}

static void make_v4(struct reading *r, const cJSON *text, int32_t ratio, struct model_layer *layer)
{
    struct attn_layer_desc *desc = &layer->desc;
    model_layer_compress(layer, read_int(r, text, "head_dim", 512, 8, 512), 0,
                         ratio > 1 ? ratio : 0, 0);
    layer_set_window(desc, read_int(r, text, "sliding_window", 128, 1, INT32_MAX));
    desc->has_sinks = 1;
    layer->output_rope =
        EXTENSION(attn_output_rope, ATTN_EXT_DRAFT_OUTPUT_ROPE, NULL, ATTN_ROPE_GPTJ,
                  read_int(r, text, "qk_rope_head_dim", 64, 2, 512));
}

static bool is_v4(const char *model_type)
{
    return strcmp(model_type, "deepseek_v4") == 0;
}

static bool has_mla(const char *model_type)
{
    return is_model(model_type, "deepseek_v") || is_model(model_type, "glm_moe_dsa") ||
           is_model(model_type, "glm5_next") || is_model(model_type, "kimi_linear");
}

/* Does an indexer choose the keys of layer i, of that type? */
static bool is_indexed(struct reading *r, const cJSON *text, const char *model_type,
                       const char *type, int32_t i)
{
    if (strcmp(type, "linear_attention") == 0) {
        return false;
    }
    if (is_model(model_type, "minimax_m3")) {
        const cJSON *sparse = read_member(text, "sparse_attention_config");
        const cJSON *flag = cJSON_GetArrayItem(read_member(sparse, "sparse_attention_freq"), i);
        return strcmp(type, "minimax_m3_sparse") == 0 || (flag != NULL && flag->valueint != 0);
    }
    return is_v4(model_type) ? compress_ratio(r, text, i) == V4_LISTED
           : is_model(model_type, "qwen4_exp")
               ? read_int(r, text, "indexer_n_heads", 0, 1, 1024) > 0
               : has_mla(model_type) && read_int(r, text, "index_topk", 0, 1, 1 << 20) > 0;
}

/* Does an indexed layer i choose keys itself, or take those of an earlier layer? GLM's
 * index_topk_freq. */
static bool has_indexer(struct reading *r, const cJSON *text, int32_t i)
{
    const int32_t every = read_int(r, text, "index_topk_freq", 1, 1, MAX_LAYERS);
    const int32_t after = i + 1 - read_int(r, text, "index_skip_topk_offset", 2, 0, MAX_LAYERS);
    return (after > 0 ? after : 0) % every == 0;
}

/* MiniMax-M3's: a list of blocks for each KV head, its own block in it. */
static struct attn_indexer_desc read_msa(struct reading *r, const cJSON *text,
                                         struct attn_layer_desc *desc)
{
    const cJSON *sparse = read_member(text, "sparse_attention_config");
    const int32_t heads = read_int(r, sparse, "sparse_num_index_heads", 4, 1, 1024);
    if (heads != desc->num_kv_heads) {
        reading_fail(r, "sparse_num_index_heads", "%d; num_key_value_heads, %d, are allowed", heads,
                     desc->num_kv_heads);
    }
    desc->num_q_heads = heads;
    desc->head_size = read_int(r, sparse, "sparse_index_dim", 128, 8, 512);
    return (struct attn_indexer_desc){
        .topk = read_int(r, sparse, "sparse_topk_blocks", 16, 1, 1 << 20),
        .num_groups = heads,
        .rows_per_entry = read_int(r, sparse, "sparse_block_size", 128, 1, 128),
        .first_entries = read_int(r, sparse, "sparse_init_block", 0, 0, 1 << 20),
        .last_entries = read_int(r, sparse, "sparse_local_block", 1, 0, 1 << 20)};
}

/* Qwen4-Exp's: means of some keys, of whole rows as many as the budget has, and the rest. */
static struct attn_indexer_desc read_qsa(struct reading *r, const cJSON *text,
                                         struct attn_layer_desc *desc)
{
    const int32_t tokens = read_int(r, text, "indexer_compress_ratio", 4, 1, 128);
    desc->num_q_heads = read_int(r, text, "indexer_n_heads", 4, 1, 1024);
    desc->head_size = read_int(r, text, "indexer_head_dim", 128, 8, 512);
    return (struct attn_indexer_desc){
        .topk = read_int(r, text, "indexer_budget", 2048, tokens, 1 << 20) / tokens,
        .activation = ATTN_INDEXER_RELU,
        .tokens_per_row = tokens,
        .tail = tokens > 1,
        .forced_on_top = 1};
}

/* DeepSeek's and GLM's. */
static struct attn_indexer_desc read_dsa(struct reading *r, const cJSON *text,
                                         const char *model_type, struct attn_layer_desc *desc)
{
    const bool v4 = is_v4(model_type), pools = is_model(model_type, "glm5_next");
    const int32_t tokens = pools ? read_int(r, text, "index_kpool", 16, 1, 128) : 1;
    desc->num_q_heads = read_int(r, text, "index_n_heads", pools ? 32 : 64, 1, 1024);
    desc->head_size = read_int(r, text, "index_head_dim", 128, 8, 512);
    return (struct attn_indexer_desc){
        .topk = read_int(r, text, "index_topk", v4 ? 512 : 2048, tokens, 1 << 20) / tokens,
        .activation = ATTN_INDEXER_RELU,
        .has_weights = 1,
        .tokens_per_row = v4 ? V4_LISTED : tokens,
        .tail = tokens > 1 && !cJSON_IsFalse(read_member(text, "index_kpool_always_select_tail")),
        .forced_on_top = tokens > 1};
}

/* What a write of index keys does to each. None for DeepSeek-V4, whose compressors norm and rotate,
 * and GLM-5.3-Flash, which pools keys after their norm. */
static void set_index_write(struct reading *r, const cJSON *text, const char *model_type,
                            struct model_layer *layer)
{
    const int32_t size = layer->desc.head_size;
    double rotary = read_int(r, text, "qk_rope_head_dim", 64, 0, 512);
    struct attn_index_write write = EXTENSION(attn_index_write, ATTN_EXT_DRAFT_INDEX_WRITE, NULL,
                                              .norm = ATTN_KEY_NORM_RMS, .rope = ATTN_ROPE_NEOX);
    if (is_v4(model_type) || is_model(model_type, "glm5_next")) {
        return;
    }
    if (is_model(model_type, "minimax_m3")) {
        rotary = read_int(r, text, "rotary_dim", 64, 2, 512);
    } else if (is_model(model_type, "qwen4_exp")) {
        const cJSON *rope = read_member(text, "rope_parameters");
        rotary = read_number(r, rope, "partial_rotary_factor", 0.25) *
                 read_int(r, text, "head_dim", 256, 8, 512);
    } else {
        const bool deepseek = is_model(model_type, "deepseek_v");
        write.norm = ATTN_KEY_NORM_LAYER;
        write.rope = deepseek ? ATTN_ROPE_NEOX : ATTN_ROPE_GPTJ;
        write.hadamard = deepseek && (size & (size - 1)) == 0;
    }
    write.rotary_dim = (int32_t)fmin(rotary, size) / 2 * 2;
    write.rope = write.rotary_dim > 0 ? write.rope : ATTN_ROPE_NONE;
    layer->index_write = write;
}

static void make_indexer(struct reading *r, const cJSON *text, const char *model_type,
                         struct model_layer *layer)
{
    read_heads(r, text, &layer->desc);
    layer->indexer = is_model(model_type, "minimax_m3") ? read_msa(r, text, &layer->desc)
                     : is_model(model_type, "qwen4_exp")
                         ? read_qsa(r, text, &layer->desc)
                         : read_dsa(r, text, model_type, &layer->desc);
    layer_set_indexer(&layer->desc, &layer->indexer);
    set_index_write(r, text, model_type, layer);
}

/* The keys that an indexer's lists give. */
static void attend_by_lists(struct model_layer *layer, const struct attn_indexer_desc *x)
{
    layer->lists = EXTENSION(
        attn_index_lists, ATTN_EXT_DRAFT_INDEX_LISTS, NULL, .max_entries = layer_list_room(x),
        .granularity = x->tokens_per_row * x->rows_per_entry,
        .groups = x->num_groups > 1 ? ATTN_LISTS_PER_KV_HEAD : ATTN_LISTS_SHARED);
}

/* What follows from the sizes of the recurrent layer, which are set. */
static void make_recurrent(struct model_layer *layer, double scale)
{
    layer->gdn.conv_silu = 1;
    layer_set_recurrent(&layer->desc, &layer->gdn);
    layer->desc.scale = (float)scale;
    layer->desc.soft_cap = 0;
}

static void make_gdn(struct reading *r, const cJSON *text, struct model_layer *layer)
{
    layer->gdn = (struct attn_recurrent_desc){
        .num_k_heads = read_int(r, text, "linear_num_key_heads", 16, 1, 1024),
        .num_v_heads = read_int(r, text, "linear_num_value_heads", 32, 1, 1024),
        .head_size_k = read_int(r, text, "linear_key_head_dim", 128, 8, 512),
        .head_size_v = read_int(r, text, "linear_value_head_dim", 128, 8, 512),
        .conv_width = read_int(r, text, "linear_conv_kernel_dim", 4, 1, 64),
        .qk_l2norm = 1};
    make_recurrent(layer, 1 / sqrt(layer->gdn.head_size_k));
}

/* Kimi's and GLM-5.3-Flash's: a gate per channel, which Kimi K3 and GLM bound. */
static void make_kda(struct reading *r, const cJSON *text, const char *model_type,
                     struct model_layer *layer)
{
    const cJSON *linear = read_member(text, "linear_attn_config");
    linear = linear != NULL ? linear : text;
    const cJSON *bound = read_member(linear, "gate_lower_bound");
    bound = bound != NULL ? bound : read_member(text, "linear_lower_bound");
    const bool bounded = cJSON_IsNumber(bound) || is_model(model_type, "glm5_next");
    const int32_t heads = read_either(r, linear, "num_heads", "linear_num_heads", 32, 1024);
    const int32_t size = read_either(r, linear, "head_dim", "linear_head_dim", 128, 512);
    layer->gdn =
        (struct attn_recurrent_desc){.num_k_heads = heads,
                                     .num_v_heads = heads,
                                     .head_size_k = size,
                                     .head_size_v = size,
                                     .conv_width = read_either(r, linear, "short_conv_kernel_size",
                                                               "linear_conv_kernel_dim", 4, 64),
                                     .qk_l2norm = 1};
    layer->rule =
        EXTENSION(attn_recurrent_rule, ATTN_EXT_DRAFT_RECURRENT_RULE, NULL,
                  .gate = bounded ? ATTN_GATE_BOUNDED : ATTN_GATE_SOFTPLUS, .gate_per_channel = 1,
                  .gate_bound = !bounded                ? 0
                                : cJSON_IsNumber(bound) ? (float)bound->valuedouble
                                                        : -5);
    make_recurrent(layer, 1 / sqrt(size));
}

/* Nemotron's and Falcon's, each by its own names. */
static void make_mamba2(struct reading *r, const cJSON *text, struct model_layer *layer)
{
    const char *state = read_text(text, "mamba_ssm_cache_dtype");
    const cJSON *limits = read_member(text, "time_step_limit");
    const cJSON *least = cJSON_GetArrayItem(limits, 0), *most = cJSON_GetArrayItem(limits, 1);
    layer->gdn = (struct attn_recurrent_desc){
        .num_k_heads = read_either(r, text, "n_groups", "mamba_n_groups", 1, 1024),
        .num_v_heads = read_either(r, text, "mamba_num_heads", "mamba_n_heads", 128, 1024),
        .head_size_k = read_either(r, text, "ssm_state_size", "mamba_d_state", 128, 512),
        .head_size_v = read_either(r, text, "mamba_head_dim", "mamba_d_head", 64, 512),
        .conv_width = read_either(r, text, "conv_kernel", "mamba_d_conv", 4, 64),
        .state_dtype = strcmp(state, "bfloat16") == 0  ? ATTN_DTYPE_BF16
                       : strcmp(state, "float16") == 0 ? ATTN_DTYPE_F16
                                                       : ATTN_DTYPE_F32};
    layer->rule =
        EXTENSION(attn_recurrent_rule, ATTN_EXT_DRAFT_RECURRENT_RULE, NULL,
                  .rule = ATTN_RULE_ADDITIVE, .write_gate = ATTN_WRITE_GATE_STEP, .values_first = 1,
                  .has_skip = 1, .dt_min = cJSON_IsNumber(least) ? (float)least->valuedouble : 0,
                  .dt_max = cJSON_IsNumber(most) ? (float)most->valuedouble : 0);
    make_recurrent(layer, 1);
}

/* Gemma 4 norms queries and keys in place of a scale. Its full layers have larger heads, and fewer
 * KV heads where one projection gives keys and values. Keys are then normed and rotated and values
 * normed alone, so that a cache holds both. */
static void make_gemma4(struct reading *r, const cJSON *text, const char *type,
                        struct attn_layer_desc *desc)
{
    const cJSON *own = read_member(text, "per_layer_config");
    desc->scale = 1;
    if (own != NULL && !cJSON_IsNull(own) && !(cJSON_IsObject(own) && own->child == NULL)) {
        reading_fail(r, "per_layer_config",
                     "is not read; global_head_dim and num_global_key_value_heads are");
    }
    if (strcmp(type, "full_attention") != 0) {
        return;
    }
    const int32_t otherwise =
        cJSON_IsNull(read_member(text, "global_head_dim")) ? desc->head_size : 512;
    desc->head_size = read_int(r, text, "global_head_dim", otherwise, 8, 512);
    if (cJSON_IsTrue(read_member(text, "attention_k_eq_v"))) {
        desc->num_kv_heads =
            read_int(r, text, "num_global_key_value_heads", desc->num_kv_heads, 1, 4096);
    }
    check_heads(r, desc, "num_global_key_value_heads", "global_head_dim");
}

static void make_decoder(struct reading *r, const cJSON *text, const char *model_type,
                         const char *type, int32_t index, struct model_layer *layer)
{
    struct attn_layer_desc *desc = &layer->desc;
    const cJSON *use_window = read_member(text, "use_sliding_window");
    int32_t window = read_int(r, text, "sliding_window", 0, 1, INT32_MAX);
    desc->kind = ATTN_LAYER_DECODER;
    read_heads(r, text, desc);
    if (strcmp(type, "linear_attention") == 0) {
        if (has_mla(model_type)) {
            make_kda(r, text, model_type, layer);
        } else if (strcmp(model_type, "nemotron_h") == 0) {
            make_mamba2(r, text, layer);
        } else {
            make_gdn(r, text, layer);
        }
        return;
    }
    if (has_mla(model_type) && !is_v4(model_type)) {
        make_mla(r, text, layer);
        return;
    }
    check_heads(r, desc, "num_key_value_heads", "head_dim");
    if (is_v4(model_type)) {
        make_v4(r, text, compress_ratio(r, text, index), layer);
        return;
    }
    if (is_model(model_type, "gemma4")) {
        make_gemma4(r, text, type, desc);
    }
    bool all_slide = strcmp(model_type, "mistral") == 0 || strcmp(model_type, "mixtral") == 0;
    if (window > 0 && !cJSON_IsFalse(use_window) &&
        (all_slide || strcmp(type, "sliding_attention") == 0)) {
        layer_set_window(desc, window);
    }
    if (strcmp(type, "chunked_attention") == 0) {
        desc->chunk_size = read_int(r, text, "attention_chunk_size", 8192, 1, INT32_MAX);
    }
    desc->has_sinks = strcmp(model_type, "gpt_oss") == 0;
    desc->alibi = strcmp(model_type, "bloom") == 0 ? ATTN_ALIBI_LINEAR : ATTN_ALIBI_NONE;
}

static void read_decoder(struct reading *r, const cJSON *text, const char *model_type)
{
    int32_t layers = read_either(r, text, "num_hidden_layers", "n_layer", 0, MAX_LAYERS);
    if (layers <= 0) {
        reading_fail(r, "num_hidden_layers", "is missing; 1 to %d are allowed", MAX_LAYERS);
    }
    const int32_t sharing = read_int(r, text, "num_kv_shared_layers", 0, 0, layers);
    for (int32_t i = 0; i < layers && r->status == ATTN_OK; i++) {
        if (strcmp(model_type, "falcon_h1") == 0) { /* both in each layer */
            struct model_layer *mamba = add_layer(r, "mamba", i);
            read_heads(r, text, &mamba->desc);
            make_mamba2(r, text, mamba);
        }
        if (strcmp(model_type, "nemotron_h") == 0 && strchr("E-", pattern_at(r, text, i)) != NULL) {
            continue;
        }
        const char *type = layer_type(r, text, model_type, i, i + 1 == layers);
        const bool indexed = is_indexed(r, text, model_type, type, i);
        struct model_layer earlier = {.tower = 0}, *indexer = &earlier;
        const bool pools = is_v4(model_type) && compress_ratio(r, text, i) > 1;
        if (indexed) {
            if (pools) {
                add_compressor(r, text, i, true);
            }
            indexer = has_indexer(r, text, i) ? add_layer(r, "indexer", i) : indexer;
            make_indexer(r, text, model_type, indexer);
        }
        if (pools) {
            add_compressor(r, text, i, false);
        }
        struct model_layer *layer = add_layer(r, "layers", i);
        make_decoder(r, text, model_type, type, i, layer);
        if (indexed) {
            attend_by_lists(layer, &indexer->indexer);
            layer->mla.topk = layer->cache.tokens_per_row > 0 ? layer->lists.max_entries : 0;
        }
        layer->shares_cache = i >= layers - sharing;
        if (r->status == ATTN_OK && layer->shares_cache &&
            model_cache_owner(r->config, r->config->num_layers - 1) == NULL) {
            reading_fail(r, "num_kv_shared_layers",
                         "%d; no layer before %s has a cache that it could read", sharing,
                         layer->name);
        }
    }
}

/* Decoders whose layers are read as their own models define them. */
static bool is_known(const char *model_type)
{
    static const char known[] =
        " llama llama4_text gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text gemma4_unified"
        " gemma4_unified_text gpt_oss mistral mixtral bloom"
        " deepseek_v3 deepseek_v32 deepseek_v4 glm_moe_dsa qwen2 qwen3 qwen3_next"
        " qwen2_5_vl qwen2_5_vl_text qwen3_5_text qwen3_5_moe_text kimi_linear nemotron_h"
        " falcon_h1 minimax_m3 minimax_m3_vl_text glm5_next glm5_next_text qwen4_exp"
        " qwen4_exp_text ";
    char word[80];
    snprintf(word, sizeof word, " %s ", model_type);
    return strchr(model_type, ' ') == NULL && strstr(known, word) != NULL;
}

/* The decoder's type. A text_config without one takes the whole model's. */
static const char *decoder_type(const cJSON *text, const char *model_type)
{
    const char *own = read_text(text, "model_type");
    const char *type = own[0] != '\0' ? own : model_type;
    return strcmp(type, "llama4") == 0    ? "llama4_text"
           : strcmp(type, "kimi_k3") == 0 ? "kimi_linear"
                                          : type;
}

/* DeepSeek-V4.1's layers, by the field that sets an index of two levels. */
static void refuse_v41(struct reading *r, const cJSON *text, const char *model_type)
{
    const int32_t layer = read_int(r, text, "candidate_source_layer_id", -1, -1, MAX_LAYERS);
    const int32_t blocks = read_int(r, text, "candidate_topk_blocks", 0, 0, 1 << 20);
    const int32_t rows = read_int(r, text, "candidate_block_size", 0, 0, 1 << 20);
    if (layer < 0) {
        reading_fail(r, "model_type",
                     "%.60s: indexes of two levels and rows in fp4, which no layer kind describes",
                     model_type);
        return;
    }
    reading_fail(r, "candidate_source_layer_id",
                 "%d; layers.%d lists %d blocks of %d rows, in which later indexers choose (an "
                 "index of two levels), and later layers attend its rows, which no layer kind "
                 "describes",
                 layer, layer, blocks, rows);
}

static void read_root(struct reading *r, const cJSON *root)
{
    const char *model_type = read_text(root, "model_type");
    const cJSON *text = read_member(root, "text_config");
    snprintf(r->config->model_type, sizeof r->config->model_type, "%s", model_type);
    text_make_safe(r->config->model_type, false);
    if (strcmp(model_type, "whisper") == 0 || strcmp(model_type, "bert") == 0) {
        read_tower(r, root, model_type);
        return;
    }
    text = cJSON_IsObject(text) ? text : root;
    const char *text_type = decoder_type(text, model_type);
    if (is_model(text_type, "deepseek_v4") && !is_v4(text_type)) {
        refuse_v41(r, text, text_type);
        return;
    }
    r->config->guessed = !is_known(text_type) && !is_known(model_type);
    read_decoder(r, text, text_type);
    if (cJSON_IsObject(read_member(root, "vision_config"))) {
        read_tower(r, root, model_type);
    }
}

attn_status model_config_read(struct model_config *config, const char *file,
                              struct attn_error *error)
{
    struct reading r = {config, error, ATTN_OK};
    *config = (struct model_config){.guessed = false};
    const char *why;
    size_t size;
    char *text = read_whole_file(file, MAX_FILE, &size, &why);
    if (text == NULL) {
        reading_fail(&r, "file", "cannot be opened: %s", why);
    }
    cJSON *root = text != NULL ? cJSON_Parse(text) : NULL;
    config->layers = command_calloc(MAX_LAYERS, sizeof *config->layers);
    if (text != NULL && !cJSON_IsObject(root)) {
        const char *at = cJSON_GetErrorPtr();
        reading_fail(&r, "file", "is not a JSON object (byte %lld)",
                     root == NULL && at >= text ? (long long)(at - text) : 0);
    } else if (r.status == ATTN_OK) {
        read_root(&r, root);
    }
    cJSON_Delete(root);
    free(text);
    if (r.status != ATTN_OK) {
        model_config_finish(config);
        return r.status;
    }
    model_config_link(config);
    return ATTN_OK;
}
