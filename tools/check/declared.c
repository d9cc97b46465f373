/* SPDX-License-Identifier: Apache-2.0 */
#include "declared.h"

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
static const char *const dtypes[] = {"f16",      "bf16",         "f32", "fp8_e4m3",
                                     "fp8_e5m2", "fp8_e4m3fnuz", "int8"};
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
                                        "fp8_ds_mla"};
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

/* Numbers of which more is better; limits where 0 means none. */
static const struct number {
    const char *name;
    size_t offset;
    bool limit;
} numbers[] = {
    {"graph_level", offsetof(struct attn_backend_caps, graph_level), false},
    {"reorder_threshold", offsetof(struct attn_backend_caps, reorder_threshold), false},
    {"max_group", offsetof(struct attn_backend_caps, max_group), true},
    {"max_num_q_heads", offsetof(struct attn_backend_caps, max_num_q_heads), true},
    {"max_speculative_tokens", offsetof(struct attn_backend_caps, max_speculative_tokens), true},
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

static cJSON *range_json(const struct attn_range *range)
{
    const int values[] = {range->min, range->max, range->multiple};
    return cJSON_CreateIntArray(values, 3);
}

cJSON *declared_json(const struct attn_backend_caps *caps)
{
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "name", caps->name);
    for (int32_t i = 0; i < COUNT(masks); i++) {
        cJSON *names = cJSON_AddArrayToObject(root, masks[i].name);
        for (int32_t bit = 0; bit < masks[i].num_bits; bit++) {
            if (mask_of(caps, &masks[i]) >> bit & 1) {
                cJSON_AddItemToArray(names, cJSON_CreateString(masks[i].bits[bit]));
            }
        }
    }
    cJSON *head_sizes = cJSON_AddArrayToObject(root, "head_sizes");
    for (int32_t i = 0; i < caps->num_head_sizes; i++) {
        cJSON *pair = cJSON_CreateObject();
        cJSON_AddItemToObject(pair, "qk", range_json(&caps->head_sizes[i].qk));
        if (!caps->head_sizes[i].same) {
            cJSON_AddItemToObject(pair, "v", range_json(&caps->head_sizes[i].v));
        }
        cJSON_AddItemToArray(head_sizes, pair);
    }
    cJSON *block_sizes = cJSON_AddArrayToObject(root, "block_sizes");
    for (int32_t i = 0; i < caps->num_block_sizes; i++) {
        cJSON_AddItemToArray(block_sizes, range_json(&caps->block_sizes[i]));
    }
    cJSON *refused = cJSON_AddArrayToObject(root, "refused");
    for (int32_t i = 0; i < caps->num_refused; i++) {
        const char *why = caps->refused[i].why;
        cJSON_AddItemToArray(refused, cJSON_CreateString(why != NULL ? why : ""));
    }
    for (int32_t i = 0; i < COUNT(numbers); i++) {
        cJSON_AddNumberToObject(root, numbers[i].name, number_of(caps, &numbers[i]));
    }
    return root;
}

/* Every value of `want` [min, max, multiple] lies in `have`. */
static bool range_within(const cJSON *want, const struct attn_range *have)
{
    int32_t min = cJSON_GetArrayItem(want, 0) ? cJSON_GetArrayItem(want, 0)->valueint : 0;
    int32_t max = cJSON_GetArrayItem(want, 1) ? cJSON_GetArrayItem(want, 1)->valueint : 0;
    int32_t step = cJSON_GetArrayItem(want, 2) ? cJSON_GetArrayItem(want, 2)->valueint : 1;
    int32_t ours = have->multiple > 0 ? have->multiple : 1;
    return min >= have->min && max <= have->max && (min - have->min) % ours == 0 &&
           (min == max || step % ours == 0);
}

static bool masks_hold(const struct attn_backend_caps *caps, const cJSON *list, char *why,
                       size_t size)
{
    const cJSON *name;
    for (int32_t i = 0; i < COUNT(masks); i++) {
        cJSON_ArrayForEach(name, cJSON_GetObjectItemCaseSensitive(list, masks[i].name))
        {
            bool there = false;
            for (int32_t bit = 0; bit < masks[i].num_bits && cJSON_IsString(name); bit++) {
                there = there || (strcmp(masks[i].bits[bit], name->valuestring) == 0 &&
                                  (mask_of(caps, &masks[i]) >> bit & 1));
            }
            if (!there) {
                snprintf(why, size, "%s: '%s' is expected and not declared", masks[i].name,
                         cJSON_IsString(name) ? name->valuestring : "?");
                return false;
            }
        }
    }
    return true;
}

static bool sizes_hold(const struct attn_backend_caps *caps, const cJSON *list, char *why,
                       size_t size)
{
    const cJSON *want;
    cJSON_ArrayForEach(want, cJSON_GetObjectItemCaseSensitive(list, "head_sizes"))
    {
        const cJSON *qk = cJSON_GetObjectItemCaseSensitive(want, "qk");
        const cJSON *v = cJSON_GetObjectItemCaseSensitive(want, "v");
        bool there = false;
        for (int32_t i = 0; i < caps->num_head_sizes; i++) {
            const struct attn_head_size_range *have = &caps->head_sizes[i];
            bool values = v != NULL ? !have->same && range_within(v, &have->v) : true;
            there = there || (range_within(qk, &have->qk) && values);
        }
        if (!there) {
            snprintf(why, size, "head_sizes: a range that is expected is not declared");
            return false;
        }
    }
    cJSON_ArrayForEach(want, cJSON_GetObjectItemCaseSensitive(list, "block_sizes"))
    {
        bool there = false;
        for (int32_t i = 0; i < caps->num_block_sizes; i++) {
            there = there || range_within(want, &caps->block_sizes[i]);
        }
        if (!there) {
            snprintf(why, size, "block_sizes: a range that is expected is not declared");
            return false;
        }
    }
    return true;
}

/* A new refusal is a lost combination; limits may only widen. */
static bool rest_holds(const struct attn_backend_caps *caps, const cJSON *list, char *why,
                       size_t size)
{
    const cJSON *refused = cJSON_GetObjectItemCaseSensitive(list, "refused");
    for (int32_t i = 0; i < caps->num_refused; i++) {
        const cJSON *known;
        bool expected = false;
        cJSON_ArrayForEach(known, refused)
        {
            expected = expected || (cJSON_IsString(known) && caps->refused[i].why != NULL &&
                                    strcmp(known->valuestring, caps->refused[i].why) == 0);
        }
        if (!expected) {
            snprintf(why, size, "refused: '%s' is declared and not expected",
                     caps->refused[i].why != NULL ? caps->refused[i].why : "");
            return false;
        }
    }
    for (int32_t i = 0; i < COUNT(numbers); i++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(list, numbers[i].name);
        int32_t have = number_of(caps, &numbers[i]);
        int32_t want = cJSON_IsNumber(item) ? item->valueint : 0;
        bool wide = numbers[i].limit && have == 0;
        if (!wide && (have < want || (numbers[i].limit && want == 0))) {
            snprintf(why, size, "%s: %d is declared, %d expected", numbers[i].name, have, want);
            return false;
        }
    }
    return true;
}

static char *read_file(const char *file)
{
    FILE *in = fopen(file, "rb");
    char *text = NULL;
    long bytes = -1;
    if (in != NULL && fseek(in, 0, SEEK_END) == 0 && (bytes = ftell(in)) >= 0 &&
        fseek(in, 0, SEEK_SET) == 0) {
        text = malloc((size_t)bytes + 1);
    }
    if (text != NULL) {
        text[fread(text, 1, (size_t)bytes, in)] = '\0';
    }
    if (in != NULL) {
        fclose(in);
    }
    return text;
}

bool declared_holds(const struct attn_backend_caps *caps, const char *file, char *why, size_t size)
{
    char *text = read_file(file);
    cJSON *list = text != NULL ? cJSON_Parse(text) : NULL;
    bool holds = false;
    if (!cJSON_IsObject(list)) {
        snprintf(why, size, "%s: %s", file, text == NULL ? "cannot be read" : "is no JSON object");
    } else {
        holds = masks_hold(caps, list, why, size) && sizes_hold(caps, list, why, size) &&
                rest_holds(caps, list, why, size);
    }
    cJSON_Delete(list);
    free(text);
    return holds;
}
