/* SPDX-License-Identifier: Apache-2.0 */
#include "names.h"

#include <attn/draft/index_lists.h>
#include <attn/draft/recurrent.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "find.h"
#include "support/layer_io.h"

#define LEAST_STEPS 4 /* indices with one distance that are shortened */

const char *code_name(int32_t list, int32_t code)
{
    static const struct attn_api *api;
    struct attn_error error = ATTN_ERROR_INIT;
    if (api == NULL && library_open(&api, &error) != ATTN_OK) {
        return NULL;
    }
    return ATTN_HAS_SLOT(api, code_name) ? api->code_name(list, code) : NULL;
}

static const char *known_name(int32_t list, int32_t code)
{
    const char *name = code_name(list, code);
    return name != NULL ? name : "unknown";
}

static int32_t code_in(int32_t list, const char *name)
{
    const char *other;
    for (int32_t i = 0; (other = code_name(list, i)) != NULL; i++) {
        if (strcmp(other, name) == 0) {
            return i;
        }
    }
    return -1;
}

const char *dtype_name(int32_t dtype)
{
    return known_name(ATTN_NAMES_DTYPE, dtype);
}

const char *kv_dtype_name(int32_t kv_dtype)
{
    return known_name(ATTN_NAMES_KV_DTYPE, kv_dtype);
}

const char *layout_name(int32_t layout)
{
    return known_name(ATTN_NAMES_KV_LAYOUT, layout);
}

int32_t kv_dtype_of_name(const char *name)
{
    return strcmp(name, "fp8") == 0 ? ATTN_KV_FP8_E4M3 : code_in(ATTN_NAMES_KV_DTYPE, name);
}

int32_t layout_of_name(const char *name)
{
    return code_in(ATTN_NAMES_KV_LAYOUT, name);
}

int32_t dtype_of_name(const char *name)
{
    const int32_t dtype = code_in(ATTN_NAMES_DTYPE, name);
    return dtype == ATTN_DTYPE_DEFAULT ? -1 : dtype;
}

const char *layer_kind_name(const struct attn_layer_desc *layer)
{
    static const char *const encoders[] = {"encoder", "encoder_only", "mm_encoder"};
    if (layer->kind == ATTN_LAYER_MLA) { /* it, and lists or caches, are its extensions here */
        const struct attn_mla_desc *mla = (const struct attn_mla_desc *)layer->next;
        const struct attn_ext *next = mla->ext.next;
        return next != NULL && next->id == ATTN_EXT_LAYER_CACHES ? "mla_compressed"
               : mla->topk > 0 || (next != NULL && next->id == ATTN_EXT_DRAFT_INDEX_LISTS)
                   ? "mla_sparse"
                   : "mla";
    }
    if (layer->kind == ATTN_LAYER_ENCODER) {
        return encoders[layer->encoder];
    }
    const void *extension = layer_extension(layer, ATTN_EXT_DRAFT_RECURRENT_RULE);
    if (layer->kind == ATTN_LAYER_RECURRENT && extension != NULL) {
        const struct attn_recurrent_rule *rule = extension;
        return rule->gate_per_channel                     ? "gdn (kda)"
               : rule->write_gate == ATTN_WRITE_GATE_STEP ? "gdn (mamba2)"
               : rule->rule == ATTN_RULE_ADDITIVE         ? "gdn (lightning)"
                                                          : "gdn";
    }
    if (layer->kind != ATTN_LAYER_DECODER) {
        return code_name(ATTN_NAMES_LAYER_KIND, layer->kind);
    }
    return layer->sink_len > 0     ? "static_sink"
           : layer->chunk_size > 0 ? "chunked"
           : layer->has_window     ? "sliding"
                                   : "full";
}

void layer_list(const int32_t *indices, int32_t count, char *text, size_t size)
{
    size_t used = 0;
    bool even = count >= LEAST_STEPS && indices[1] > indices[0] + 1;
    for (int32_t i = 2; i < count; i++) {
        even = even && indices[i] - indices[i - 1] == indices[1] - indices[0];
    }
    text[0] = '\0';
    if (even) {
        snprintf(text, size, "%d, %d ... %d", indices[0], indices[1], indices[count - 1]);
        return;
    }
    for (int32_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && indices[end] == indices[end - 1] + 1; end++) {
        }
        char range[32];
        if (end - i > 1) {
            snprintf(range, sizeof range, "%s%d-%d", i > 0 ? ", " : "", indices[i],
                     indices[end - 1]);
        } else {
            snprintf(range, sizeof range, "%s%d", i > 0 ? ", " : "", indices[i]);
        }
        bool fits = used + sizeof range + sizeof ", ..." < size;
        used += (size_t)snprintf(text + used, size - used, "%s", fits ? range : ", ...");
        if (!fits) {
            return;
        }
    }
}
