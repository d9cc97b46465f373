/* SPDX-License-Identifier: Apache-2.0 */
#include "common/declared.h"

#include <attn/draft/index_lists.h>
#include <attn/draft/recurrent.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "common/names.h"

#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))

static const struct mask {
    const char *name;
    size_t offset;
    int32_t list; /* enum attn_name_list */
} masks[] = {
#define MASK(field, list)                                                                          \
    {                                                                                              \
#field, offsetof(struct attn_backend_caps, field), list                                    \
    }
    MASK(kernels, ATTN_NAMES_KERNEL),
    MASK(layer_kinds, ATTN_NAMES_LAYER_KIND),
    MASK(phases, ATTN_NAMES_PHASE),
    MASK(dtypes, ATTN_NAMES_DTYPE),
    MASK(kv_dtypes, ATTN_NAMES_KV_DTYPE),
    MASK(q_dtypes, ATTN_NAMES_DTYPE),
    MASK(terms, ATTN_NAMES_TERM),
    MASK(features, ATTN_NAMES_FEATURE),
    MASK(view_forms, ATTN_NAMES_VIEW_FORM),
    MASK(layouts, ATTN_NAMES_KV_LAYOUT),
    MASK(k_scale_forms, ATTN_NAMES_SCALE_FORM),
    MASK(v_scale_forms, ATTN_NAMES_SCALE_FORM),
    MASK(p_scale_forms, ATTN_NAMES_SCALE_FORM),
    MASK(output_forms, ATTN_NAMES_OUTPUT_FORM),
    MASK(decode_write_kv_dtypes, ATTN_NAMES_KV_DTYPE),
#undef MASK
};

/* Numbers that are better if larger. A limit (max_) of 0 means that there is no limit. */
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

/* "kv_dtype 0x10001 (acme_q6)": by the names of their lists, which have none of their own. */
static struct json *vendor_codes_json(const struct attn_backend_caps *caps)
{
    static const char *const lists[] = {[ATTN_NAMES_DTYPE] = "dtype",
                                        [ATTN_NAMES_KV_DTYPE] = "kv_dtype",
                                        [ATTN_NAMES_KV_LAYOUT] = "layout",
                                        [ATTN_NAMES_CACHE_ROLE] = "cache_role"};
    struct json *codes = json_array();
    for (int32_t i = 0; i < caps->num_vendor_codes; i++) {
        const struct attn_vendor_code *code =
            (const void *)((const char *)caps->vendor_codes +
                           (size_t)i * (size_t)caps->vendor_code_stride);
        const bool known = code->list >= 0 && code->list < COUNT(lists);
        const char *list = known && lists[code->list] != NULL ? lists[code->list] : "other";
        char text[128];
        snprintf(text, sizeof text, "%s %#x (%s)", list, (unsigned)code->code, code->name);
        json_push(codes, json_string(text));
    }
    return codes;
}

static const void *extension_of(const struct attn_backend_caps *caps, uint32_t id)
{
    const struct attn_ext *ext = caps->next;
    while (ext != NULL && ext->id != id) {
        ext = ext->next;
    }
    return ext;
}

/* Something that a backend takes where `declared` is not 0. */
struct named {
    const char *name;
    uint32_t declared;
};

static struct json *names_json(const struct named *all, int32_t count)
{
    struct json *names = json_array();
    for (int32_t i = 0; i < count; i++) {
        if (all[i].declared) {
            json_push(names, json_string(all[i].name));
        }
    }
    return names;
}

/* What a backend takes of recurrent layers next to the gated delta rule with float32 states. */
static struct json *recurrent_json(const struct attn_backend_caps *caps)
{
    static const struct attn_recurrent_caps no_states;
    static const struct attn_recurrent_rule_caps no_rules;
    const struct attn_recurrent_caps *states = extension_of(caps, ATTN_EXT_CAPS_RECURRENT);
    const struct attn_recurrent_rule_caps *r = extension_of(caps, ATTN_EXT_DRAFT_RECURRENT_CAPS);
    states = states != NULL ? states : &no_states;
    r = r != NULL ? r : &no_rules;
    const struct named all[] = {{"additive", r->rules >> ATTN_RULE_ADDITIVE & 1},
                                {"gate_bounded", r->gates >> ATTN_GATE_BOUNDED & 1},
                                {"gate_given", r->gates >> ATTN_GATE_GIVEN & 1},
                                {"gate_constant", r->gates >> ATTN_GATE_CONSTANT & 1},
                                {"gate_per_channel", (uint32_t)r->gate_per_channel},
                                {"write_gate_none", r->write_gates >> ATTN_WRITE_GATE_NONE & 1},
                                {"write_gate_step", r->write_gates >> ATTN_WRITE_GATE_STEP & 1},
                                {"values_first", (uint32_t)r->values_first},
                                {"skip", (uint32_t)r->skip},
                                {"output_norm", (uint32_t)r->norm},
                                {"stochastic_rounding", (uint32_t)r->stochastic_rounding},
                                {"replay", caps->cache_roles >> ATTN_CACHE_REPLAY & 1},
                                {"state_f16", states->state_dtypes >> ATTN_DTYPE_F16 & 1},
                                {"state_bf16", states->state_dtypes >> ATTN_DTYPE_BF16 & 1}};
    return names_json(all, COUNT(all));
}

/* What a backend takes of lists of keys; `attend` and `attend_mla_sparse` say where. */
static struct json *lists_json(const struct attn_backend_caps *caps)
{
    static const struct attn_index_lists_caps no_lists;
    const struct attn_index_lists_caps *l = extension_of(caps, ATTN_EXT_DRAFT_INDEX_LISTS_CAPS);
    l = l != NULL ? l : &no_lists;
    const struct named all[] = {{"attend", (uint32_t)l->attend},
                                {"attend_mla_sparse", (uint32_t)l->attend_mla_sparse},
                                {"granularity_1", l->granularities & 1},
                                {"granularity_4", l->granularities & 4},
                                {"granularity_16", l->granularities & 16},
                                {"granularity_64", l->granularities & 64},
                                {"granularity_128", l->granularities & 128},
                                {"shared", l->groups >> ATTN_LISTS_SHARED & 1},
                                {"per_kv_head", l->groups >> ATTN_LISTS_PER_KV_HEAD & 1},
                                {"per_q_head", l->groups >> ATTN_LISTS_PER_Q_HEAD & 1},
                                {"physical_slots", (uint32_t)l->physical_slots}};
    return names_json(all, COUNT(all));
}

struct json *declared_json(const struct attn_backend_caps *caps)
{
    struct json *root = json_object();
    json_add(root, "name", json_string(caps->name));
    for (int32_t i = 0; i < COUNT(masks); i++) {
        struct json *names = json_add(root, masks[i].name, json_array());
        const char *bit_name;
        for (int32_t bit = 0; (bit_name = code_name(masks[i].list, bit)) != NULL; bit++) {
            if (mask_of(caps, &masks[i]) >> bit & 1) {
                json_push(names, json_string(bit_name));
            }
        }
    }
    json_add(root, "recurrent", recurrent_json(caps));
    json_add(root, "index_lists", lists_json(caps));
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
        const struct attn_refused_combination *row =
            (const void *)((const char *)caps->refused + (size_t)i * (size_t)caps->refused_stride);
        json_push(refused, json_string(row->why != NULL ? row->why : ""));
    }
    if (caps->num_vendor_codes > 0) {
        json_add(root, "vendor_codes", vendor_codes_json(caps));
    }
    for (int32_t i = 0; i < COUNT(numbers); i++) {
        json_add(root, numbers[i].name, json_number(number_of(caps, &numbers[i])));
    }
    return root;
}
