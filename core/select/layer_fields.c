/* SPDX-License-Identifier: Apache-2.0 */
#include "select/layer_fields.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "select/layer_ext.h"
#include "select/names.h"
#include "util/counts.h"
#include "util/structs.h"

/* A field as text; false: it says nothing. */
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

/* A value that nothing reads, since what it belongs to is off. */
static attn_status check_switches(const struct attn_layer_desc *l, struct attn_error *error)
{
    const bool groups =
        l->output_form == ATTN_OUTPUT_FP8_GROUP_64 || l->output_form == ATTN_OUTPUT_FP8_GROUP_128;
    const struct {
        const char *field;
        bool is_on;
        int32_t value;
        const char *needed;
    } switches[] = {
        /* -1, open, is no window either */
        {"window_left", l->has_window, l->window_left == -1 ? 0 : l->window_left, "has_window"},
        {"window_right", l->has_window, l->window_right == -1 ? 0 : l->window_right, "has_window"},
        {"chunk_lookback", l->chunk_size != 0, l->chunk_lookback, "a chunk_size"},
        {"prefix_lm_window", l->prefix_lm, l->prefix_lm_window, "prefix_lm"},
        {"parallel_drafting", l->num_speculative_tokens != 0, l->parallel_drafting,
         "num_speculative_tokens"},
        {"q_dtype", l->q_scale_form != ATTN_SCALE_NONE, l->q_dtype, "a q_scale_form"},
        {"output_scale_pow2", groups, l->output_scale_pow2, "an output_form of fp8 in groups"},
        {"output_scale_column_major", groups, l->output_scale_column_major,
         "an output_form of fp8 in groups"},
        {"qk_norm", l->rope != 0, l->qk_norm, "rope"},
    };
    for (size_t i = 0; i < sizeof switches / sizeof *switches; i++) {
        if (switches[i].value != 0 && !switches[i].is_on) {
            return BAD(switches[i].field, "layer '%s': %s is %d, which needs %s", l->name,
                       switches[i].field, switches[i].value, switches[i].needed);
        }
    }
    return ATTN_OK;
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
           kv_dtype == ATTN_KV_FP8_DS_MLA ||
           (kv_dtype >= ATTN_KV_TURBOQUANT_K8V4 && kv_dtype <= ATTN_KV_TURBOQUANT_3BIT_NC);
}

/* Bytes of rows are said of dtypes that do not say them, and of no others. */
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
    if (!has_rows && l->kv_dtype != ATTN_KV_AUTO && l->kv_dtype != l->dtype) {
        return BAD("kv_dtype",
                   "layer '%s': kv_dtype is %s; a layer of kind %s has no KV cache: auto", l->name,
                   code_text(ATTN_NAMES_KV_DTYPE, l->kv_dtype).text, name_of_kind(l->kind));
    }
    /* skip_kv_quantization: all of it is of the model's other layers */
    for (int32_t is_v = 0; is_v < 2 && !l->skip_kv_quantization; is_v++) {
        const int32_t form = is_v ? l->v_scale_form : l->k_scale_form;
        const int32_t kv_dtype = kv_dtype_of(l, is_v);
        if (l->kv_dtype_v != 0 && l->kv_dtype_v != l->kv_dtype && is_of_both(kv_dtype)) {
            return BAD("kv_dtype_v",
                       "layer '%s': kv_dtype %s with kv_dtype_v %s; %s is of K and V together",
                       l->name, code_text(ATTN_NAMES_KV_DTYPE, l->kv_dtype).text,
                       code_text(ATTN_NAMES_KV_DTYPE, l->kv_dtype_v).text,
                       code_text(ATTN_NAMES_KV_DTYPE, kv_dtype).text);
        }
        if (has_rows && !(is_v && l->kind == ATTN_LAYER_MLA)) {
            TRY(check_row_bytes(l, is_v, error));
        }
        if (!(scale_forms_of(kv_dtype, is_v) >> form & 1)) {
            const char *field = is_v ? "v_scale_form" : "k_scale_form";
            return BAD(field,
                       "layer '%s': %s is %s with kv_dtype %s; fp8_e4m3, fp8_e5m2, fp8_e4m3fnuz "
                       "and opaque ones have scales of any form, nvfp4 one per tensor, v of "
                       "int8_kv one per head "
                       "and channel, the others none",
                       l->name, field, name_of_scale_form(form),
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
        if (value_of(layer, f, value, sizeof value) && !(f->layer_kinds >> layer->kind & 1)) {
            return BAD(f->name, "layer '%s': %s is %s; a layer of kind %s takes none", layer->name,
                       f->name, value, name_of_kind(layer->kind));
        }
    }
    TRY(check_switches(layer, error));
    return check_cache_dtype(layer, error);
}
