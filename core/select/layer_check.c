/* SPDX-License-Identifier: Apache-2.0 */
/* The fields of a layer's description. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "select/layer.h"
#include "select/names.h"
#include "util/structs.h"

/* A field as text; false: it is zero or NULL. */
static bool value_of(const struct attn_layer_desc *layer, const struct abi_field *field, char *text,
                     size_t size)
{
    const char *at = (const char *)layer + field->at;
    int32_t number;
    float real;
    int64_t wide;
    const char *string;
    switch (field->kind) {
    case FIELD_INT:
    case FIELD_CODE:
        memcpy(&number, at, sizeof number);
        snprintf(text, size, "%d", number);
        return number != 0;
    case FIELD_FLOAT:
        memcpy(&real, at, sizeof real);
        snprintf(text, size, "%g", (double)real);
        return real != 0;
    case FIELD_TEXT:
        memcpy(&string, at, sizeof string);
        snprintf(text, size, "'%.64s'", string != NULL ? string : "");
        return string != NULL;
    default:
        memcpy(&wide, at, sizeof wide);
        snprintf(text, size, field->kind == FIELD_MASK ? "%#" PRIx64 : "%" PRId64, wide);
        return wide != 0;
    }
}

/* Scales that rows of this dtype have, as bits of enum attn_scale_form. Other dtypes keep theirs
 * next to the rows, or have none. */
static uint32_t scale_forms_of(int32_t kv_dtype, bool is_v)
{
    const uint32_t tensor = 1u << ATTN_SCALE_NONE | 1u << ATTN_SCALE_PER_TENSOR;
    switch (kv_dtype) {
    case ATTN_KV_FP8_E4M3:
    case ATTN_KV_FP8_E5M2:
    case ATTN_KV_FP8_E4M3FNUZ:
        return ~0u;
    case ATTN_KV_NVFP4:
        return tensor;
    case ATTN_KV_INT8_KV:
        return 1u << ATTN_SCALE_NONE | (is_v ? 1u << ATTN_SCALE_PER_HEAD_CHANNEL : 0);
    default:
        return kv_is_opaque(kv_dtype) ? ~0u : 1u << ATTN_SCALE_NONE;
    }
}

/* Says what K's rows and what V's rows are. */
static bool is_of_both(int32_t kv_dtype)
{
    return kv_dtype == ATTN_KV_INT8_KV || kv_dtype == ATTN_KV_INT8_K ||
           kv_dtype == ATTN_KV_FP8_DS_MLA || kv_dtype == ATTN_KV_FP8_DS_V4 ||
           kv_dtype == ATTN_KV_MXFP4 ||
           (kv_dtype >= ATTN_KV_TURBOQUANT_K8V4 && kv_dtype <= ATTN_KV_TURBOQUANT_3BIT_NC);
}

/* Requires the bytes of a row of opaque dtypes, and refuses them of all others. */
static attn_status check_row_bytes(const struct attn_layer_desc *l, bool is_v,
                                   struct attn_error *error)
{
    const int32_t kv_dtype = kv_dtype_of(l, is_v);
    const int32_t row = is_v ? l->kv_row_bytes_v : l->kv_row_bytes;
    const int32_t scale = is_v ? l->kv_scale_bytes_v : l->kv_scale_bytes;
    const char *field = is_v ? "kv_row_bytes_v" : "kv_row_bytes";
    if (kv_is_opaque(kv_dtype) ? row > 0 : row == 0 && scale == 0) {
        return ATTN_OK;
    }
    return BAD(field,
               "layer '%s': %s is %d, with scales of %d bytes, and the dtype is %s; opaque and "
               "vendors' dtypes have rows of 1 to %d bytes, of others both are 0",
               l->name, field, row, scale, code_text(ATTN_NAMES_KV_DTYPE, kv_dtype).text, MAX_ROW);
}

static attn_status check_cache_dtype(const struct attn_layer_desc *l, struct attn_error *error)
{
    const bool has_rows = l->kind != ATTN_LAYER_ENCODER && l->kind != ATTN_LAYER_RECURRENT;
    BAD_IF(!has_rows && l->kv_dtype != ATTN_KV_AUTO && l->kv_dtype != l->dtype, "kv_dtype",
           "layer '%s': kv_dtype is %s; a layer of kind %s has no KV cache: auto", l->name,
           code_text(ATTN_NAMES_KV_DTYPE, l->kv_dtype).text,
           name_of(ATTN_NAMES_LAYER_KIND, l->kind));
    /* skip_kv_quantization: all of it is of the model's other layers */
    for (int32_t is_v = 0; is_v < 2 && !l->skip_kv_quantization; is_v++) {
        const int32_t form = is_v ? l->v_scale_form : l->k_scale_form;
        const int32_t kv_dtype = kv_dtype_of(l, is_v);
        BAD_IF(l->kv_dtype_v != 0 && l->kv_dtype_v != l->kv_dtype && is_of_both(kv_dtype),
               "kv_dtype_v",
               "layer '%s': kv_dtype %s with kv_dtype_v %s; %s is of K and V together", l->name,
               code_text(ATTN_NAMES_KV_DTYPE, l->kv_dtype).text,
               code_text(ATTN_NAMES_KV_DTYPE, l->kv_dtype_v).text,
               code_text(ATTN_NAMES_KV_DTYPE, kv_dtype).text);
        TRY_IF(has_rows && !(is_v && l->kind == ATTN_LAYER_MLA), check_row_bytes(l, is_v, error));
        if (!(scale_forms_of(kv_dtype, is_v) >> form & 1)) {
            const char *field = is_v ? "v_scale_form" : "k_scale_form";
            return BAD(field,
                       "layer '%s': %s is %s with kv_dtype %s; fp8_e4m3, fp8_e5m2, fp8_e4m3fnuz "
                       "and opaque ones have scales of any form, nvfp4 one per tensor, v of "
                       "int8_kv one per head and channel, the others none",
                       l->name, field, name_of(ATTN_NAMES_SCALE_FORM, form),
                       code_text(ATTN_NAMES_KV_DTYPE, kv_dtype).text);
        }
    }
    return ATTN_OK;
}

attn_status layer_check_fields(const struct attn_layer_desc *layer, struct attn_error *error)
{
    char value[80];
    if (layer->kind < 0 || layer->kind >= NUM_LAYER_KINDS) { /* by which all are checked */
        return BAD("kind", "layer '%s': kind is %d; allowed are 0 to %d", layer->name, layer->kind,
                   NUM_LAYER_KINDS - 1);
    }
    TRY(struct_check(layer, ABI_LAYER_DESC, layer->name, error));
    for (const struct abi_field *f = abi_structs[ABI_LAYER_DESC].fields; f->name != NULL; f++) {
        BAD_IF(value_of(layer, f, value, sizeof value) && !(f->layer_kinds >> layer->kind & 1),
               f->name, "layer '%s': %s is %s; a layer of kind %s takes none", layer->name, f->name,
               value, name_of(ATTN_NAMES_LAYER_KIND, layer->kind));
    }
    return check_cache_dtype(layer, error);
}

#define MAX_NAME 1023
#define MAX_WINDOW (1 << 30)

/* YES or NO in place of what the kind says. */
static attn_status set_causal(struct attn_layer_desc *l, struct attn_error *error)
{
    const bool can = l->kind != ATTN_LAYER_ENCODER && l->kind != ATTN_LAYER_CROSS;
    const bool can_not = l->kind != ATTN_LAYER_RECURRENT && l->kind != ATTN_LAYER_INDEXER &&
                         l->kind != ATTN_LAYER_DRAFT_COMPRESSOR;
    if (l->causal == ATTN_CAUSAL_DEFAULT) {
        l->causal = can ? ATTN_CAUSAL_YES : ATTN_CAUSAL_NO;
    }
    return (l->causal == ATTN_CAUSAL_YES ? can : can_not)
               ? ATTN_OK
               : BAD("causal", "layer '%s': causal is %d; a layer of kind %s is %s", l->name,
                     l->causal, name_of(ATTN_NAMES_LAYER_KIND, l->kind),
                     can ? "causal" : "not causal");
}

#define WRONG_IF(broken, field, allowed)                                                           \
    BAD_IF(broken, #field, "layer '%s': %s is %lld; %s", l->name, #field, (long long)l->field,     \
           allowed)

/* Values next to others that do not allow them, as what they belong to is off. */
static attn_status check_values(const struct attn_layer_desc *l, struct attn_error *error)
{
    const bool groups =
        l->output_form == ATTN_OUTPUT_FP8_GROUP_64 || l->output_form == ATTN_OUTPUT_FP8_GROUP_128;
    const bool chunked = l->chunk_size > 0, causal = l->causal == ATTN_CAUSAL_YES;
    const bool left = l->window_left != -1, right = l->window_right != -1; /* -1: open */
    const int32_t largest = l->kind == ATTN_LAYER_MLA ? MAX_LATENT : MAX_HEAD_SIZE;
    const int32_t level = graph_level_known(l->graph_level);
    WRONG_IF(!l->has_window && left && l->window_left != 0, window_left, "it needs has_window");
    WRONG_IF(!l->has_window && right && l->window_right != 0, window_right, "it needs has_window");
    WRONG_IF(l->chunk_lookback != 0 && !chunked, chunk_lookback, "it needs a chunk_size");
    WRONG_IF(l->prefix_lm_window != 0 && !l->prefix_lm, prefix_lm_window, "it needs prefix_lm");
    WRONG_IF(l->parallel_drafting && l->num_speculative_tokens == 0, parallel_drafting,
             "it needs num_speculative_tokens");
    WRONG_IF(l->q_dtype != 0 && l->q_scale_form == ATTN_SCALE_NONE, q_dtype,
             "it needs a q_scale_form");
    WRONG_IF(l->output_scale_pow2 && !groups, output_scale_pow2,
             "it needs an output_form of fp8 in groups");
    WRONG_IF(l->output_scale_column_major && !groups, output_scale_column_major,
             "it needs an output_form of fp8 in groups");
    WRONG_IF(l->qk_norm && l->rope == 0, qk_norm, "it needs rope");
    BAD_IF(l->num_q_heads % l->num_kv_heads != 0, "num_q_heads",
           "layer '%s': num_q_heads is %d; a multiple of num_kv_heads, %d, is needed", l->name,
           l->num_q_heads, l->num_kv_heads);
    BAD_IF(l->head_size % 8 != 0 || l->head_size > largest, "head_size",
           "layer '%s': head_size is %d; multiples of 8 up to %d are allowed", l->name,
           l->head_size, largest);
    BAD_IF(l->head_size_v % 8 != 0 || l->head_size_v > MAX_HEAD_SIZE, "head_size_v",
           "layer '%s': head_size_v is %d; 0 (as head_size) and multiples of 8 up to %d are",
           l->name, l->head_size_v, MAX_HEAD_SIZE);
    BAD_IF(level != l->graph_level, "graph_level",
           "layer '%s': graph_level is %d; it is not known here, %d is: %s", l->name,
           l->graph_level, level, name_of_graph_level(level));
    WRONG_IF(l->padded_page_bytes < 0 || l->padded_page_bytes > (int64_t)1 << 48, padded_page_bytes,
             "0 to 2^48");
    WRONG_IF(l->has_window && (l->window_left < -1 || l->window_left > MAX_WINDOW), window_left,
             "-1 (open) to 2^30");
    WRONG_IF(l->has_window && (l->window_right < -1 || l->window_right > MAX_WINDOW), window_right,
             "-1 (open) to 2^30");
    WRONG_IF(l->has_window && !left && !right, has_window, "the window is open on both sides: 0");
    WRONG_IF(chunked && l->has_window, chunk_size, "it and a sliding window exclude each other");
    WRONG_IF(chunked && !causal, chunk_size, "chunked local attention is causal; causal is no (2)");
    WRONG_IF(l->causal_per_request && chunked, causal_per_request,
             "chunked local attention (chunk_size) is causal for every request: 0");
    WRONG_IF(l->prefix_lm && !causal, prefix_lm,
             "its spans are bidirectional islands of a causal layer; causal is no (2)");
    BAD_IF(!(isfinite(l->scale) && l->scale > 0), "scale",
           "layer '%s': scale is %g; it must be finite and above 0", l->name, (double)l->scale);
    BAD_IF(!(isfinite(l->soft_cap) && l->soft_cap >= 0), "soft_cap",
           "layer '%s': soft_cap is %g; it must be finite and 0 (none) or above", l->name,
           (double)l->soft_cap);
    return ATTN_OK;
}

static void complete(struct layer *layer)
{
    struct attn_layer_desc *l = &layer->desc;
    l->head_size_v = l->head_size_v > 0 ? l->head_size_v : l->head_size;
    if (l->skip_kv_quantization) {
        l->kv_dtype = l->kv_dtype_v = ATTN_KV_AUTO;
        l->k_scale_form = l->v_scale_form = ATTN_SCALE_NONE;
        l->kv_row_bytes = l->kv_row_bytes_v = l->kv_scale_bytes = l->kv_scale_bytes_v = 0;
    }
    l->kv_dtype = l->kv_dtype != ATTN_KV_AUTO ? l->kv_dtype : l->dtype;
    l->kv_dtype_v = l->kv_dtype_v != l->kv_dtype ? l->kv_dtype_v : 0;
    for (int32_t is_v = 0; is_v < 2; is_v++) {
        /* No form stated: the host float, which is one per tensor. */
        int32_t *form = is_v ? &l->v_scale_form : &l->k_scale_form;
        if (kv_is_fp8(kv_dtype_of(l, is_v)) && *form == ATTN_SCALE_NONE) {
            *form = ATTN_SCALE_PER_TENSOR;
        }
    }
    if (!l->has_window) {
        l->window_left = l->window_right = -1;
    }
}

/* Rows of one dtype, heads and sizes. */
static bool same_rows(const struct attn_layer_desc *x, const struct attn_layer_desc *y)
{
    return x->kv_dtype == y->kv_dtype && x->kv_dtype_v == y->kv_dtype_v &&
           x->kv_row_bytes == y->kv_row_bytes && x->kv_row_bytes_v == y->kv_row_bytes_v &&
           x->kv_scale_bytes == y->kv_scale_bytes && x->kv_scale_bytes_v == y->kv_scale_bytes_v &&
           x->num_kv_heads == y->num_kv_heads && x->head_size == y->head_size &&
           x->head_size_v == y->head_size_v;
}

/* Equal further caches, as plain layers have. */
static bool same_further(const struct attn_layer_caches *x, const struct attn_layer_caches *y)
{
    if (x == NULL || y == NULL) {
        return x == y;
    }
    return x->num_caches == y->num_caches &&
           memcmp(x->caches, y->caches, (size_t)x->num_caches * sizeof *x->caches) == 0;
}

bool layer_same_cache(const struct layer *a, const struct layer *b)
{
    const struct attn_layer_desc *x = &a->desc, *y = &b->desc;
    return (x->kind == ATTN_LAYER_CROSS) == (y->kind == ATTN_LAYER_CROSS) &&
           a->has_states == b->has_states && same_rows(x, y) && x->block_size == y->block_size &&
           a->blocks_per_entry == b->blocks_per_entry && x->has_window == y->has_window &&
           x->window_left == y->window_left && x->chunk_size == y->chunk_size &&
           x->sink_len == y->sink_len && x->padded_page_bytes == y->padded_page_bytes &&
           same_further(a->caches, b->caches);
}

/* Shape alone: a sliding layer may read the cache of a full one. */
static bool readable_cache(const struct layer *reader, const struct layer *owner)
{
    const struct attn_layer_desc *x = &reader->desc, *y = &owner->desc;
    return layer_has_cache(y) && owner->caches == NULL && same_rows(x, y) &&
           x->block_size == y->block_size * owner->blocks_per_entry && x->kind == y->kind;
}

static attn_status check_names(struct layer *layer, int32_t index,
                               const struct assignment_layer *layers, struct attn_error *error)
{
    const char *name = layer->desc.name, *target = layer->desc.kv_sharing_target;
    layer->sharing_target = -1;
    for (int32_t i = 0; i < index; i++) {
        BAD_IF(strcmp(layers[i].layer.desc.name, name) == 0, "name",
               "layers %d and %d are both named '%s'; names are unique", i, index, name);
        if (target != NULL && strcmp(layers[i].layer.desc.name, target) == 0) {
            layer->sharing_target = i;
        }
    }
    if (target == NULL) {
        return ATTN_OK;
    }
    BAD_IF(layer->sharing_target < 0, "kv_sharing_target",
           "layer '%s' reads the cache of '%s', which is no earlier layer", name, target);
    const struct layer *owner = &layers[layer->sharing_target].layer;
    BAD_IF(owner->sharing_target >= 0, "kv_sharing_target",
           "layer '%s' reads the cache of '%s', which itself reads that of '%s'", name, target,
           owner->desc.kv_sharing_target);
    if (layer->desc.block_size == 0) {
        layer->desc.block_size = owner->desc.block_size * owner->blocks_per_entry;
    }
    BAD_IF(!readable_cache(layer, owner), "kv_sharing_target",
           "layer '%s' (%d KV heads of %d and %d, %s, blocks of %d) cannot read the cache of '%s' "
           "(%d KV heads of %d and %d, %s, blocks of %d)",
           name, layer->desc.num_kv_heads, layer->desc.head_size, layer->desc.head_size_v,
           kv_dtypes_text(layer->desc.kv_dtype, layer->desc.kv_dtype_v).text,
           layer->desc.block_size, target, owner->desc.num_kv_heads, owner->desc.head_size,
           owner->desc.head_size_v,
           kv_dtypes_text(owner->desc.kv_dtype, owner->desc.kv_dtype_v).text,
           owner->desc.block_size * owner->blocks_per_entry);
    return ATTN_OK;
}

attn_status layer_resolve(struct arena *arena, const struct attn_layer_desc *desc, int32_t index,
                          const struct assignment_layer *layers, struct layer *layer,
                          struct attn_error *error)
{
    struct attn_layer_desc *l = &layer->desc;
    TRY(struct_read(l, ABI_LAYER_DESC, desc, error));
    BAD_IF(l->name == NULL || l->name[0] == '\0' || !text_is_clean(l->name, MAX_NAME), "name",
           "the name of layer %d is %s; 1 to %d bytes of UTF-8 text are needed", index,
           l->name == NULL      ? "NULL"
           : l->name[0] == '\0' ? "empty"
                                : "not clean text",
           MAX_NAME);
    BAD_IF(l->kv_sharing_target != NULL && !text_is_clean(l->kv_sharing_target, MAX_NAME),
           "kv_sharing_target", "layer '%s': kv_sharing_target is not clean UTF-8 text", l->name);
    l->name = arena_string(arena, l->name);
    bool shares = l->kv_sharing_target != NULL;
    l->kv_sharing_target = shares ? arena_string(arena, l->kv_sharing_target) : NULL;
    NO_MEMORY_IF(l->name == NULL || (shares && l->kv_sharing_target == NULL), "layers", "a layer");
    TRY(layer_check_fields(l, error));
    TRY(set_causal(l, error));
    TRY(check_values(l, error));
    TRY(layer_copy_extensions(arena, layer, l->next, error));
    TRY(layer_check_extensions(layer, error));
    complete(layer);
    layer->blocks_per_entry = 1;
    return check_names(layer, index, layers, error);
}
