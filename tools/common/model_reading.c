/* SPDX-License-Identifier: Apache-2.0 */
#include "model_reading.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "util/safe_text.h"

void reading_fail(struct reading *r, const char *field, const char *format, ...)
{
    va_list arguments;
    if (r->status != ATTN_OK) {
        return; /* the first failure is reported */
    }
    r->status = r->error->status = ATTN_ERROR_INVALID_ARGUMENT;
    snprintf(r->error->field, sizeof r->error->field, "%s", field);
    va_start(arguments, format);
    vsnprintf(r->error->message, sizeof r->error->message, format, arguments);
    va_end(arguments);
    text_make_safe(r->error->message, false); /* it may quote the file */
}

const cJSON *read_member(const cJSON *object, const char *name)
{
    return cJSON_GetObjectItemCaseSensitive(object, name);
}

int32_t read_int(struct reading *r, const cJSON *object, const char *name, int32_t otherwise,
                 int32_t min, int32_t max)
{
    const cJSON *item = read_member(object, name);
    if (item == NULL || cJSON_IsNull(item) || cJSON_IsFalse(item)) {
        return otherwise;
    }
    if (!cJSON_IsNumber(item) || item->valuedouble != floor(item->valuedouble) ||
        item->valuedouble < min || item->valuedouble > max) {
        reading_fail(r, name, "%g; a whole number from %d to %d is allowed",
                     cJSON_IsNumber(item) ? item->valuedouble : (double)NAN, min, max);
        return otherwise > 0 ? otherwise : min;
    }
    return (int32_t)item->valuedouble;
}

int32_t read_either(struct reading *r, const cJSON *object, const char *name, const char *other,
                    int32_t otherwise, int32_t max)
{
    return read_int(r, object, name, read_int(r, object, other, otherwise, 1, max), 1, max);
}

double read_number(struct reading *r, const cJSON *object, const char *name, double otherwise)
{
    const cJSON *item = read_member(object, name);
    if (item == NULL || cJSON_IsNull(item)) {
        return otherwise;
    }
    if (!cJSON_IsNumber(item) || !isfinite(item->valuedouble) || item->valuedouble < 0 ||
        item->valuedouble > 1e9) {
        reading_fail(r, name, "%g; a number from 0 to 1e9 is allowed",
                     cJSON_IsNumber(item) ? item->valuedouble : (double)NAN);
        return otherwise;
    }
    return item->valuedouble;
}

const char *read_text(const cJSON *object, const char *name)
{
    const char *text = cJSON_GetStringValue(read_member(object, name));
    return text != NULL ? text : "";
}

struct model_layer *add_layer(struct reading *r, const char *prefix, int32_t index)
{
    static struct model_layer spill; /* where a failed reading writes what is not read */
    struct model_config *config = r->config;
    if (r->status != ATTN_OK || config->num_layers >= MAX_LAYERS) {
        reading_fail(r, "num_hidden_layers", "more than %d layers", MAX_LAYERS);
        return &spill;
    }
    struct model_layer *layer = &config->layers[config->num_layers++];
    memset(layer, 0, sizeof *layer);
    snprintf(layer->name, sizeof layer->name, "%s.%d", prefix, index);
    layer->desc.struct_size = sizeof layer->desc;
    return layer;
}

static int32_t read_dtype(const cJSON *text)
{
    const char *name = read_text(text, "torch_dtype");
    name = name[0] != '\0' ? name : read_text(text, "dtype");
    return strcmp(name, "float16") == 0 ? ATTN_DTYPE_F16
           : strcmp(name, "bfloat16") == 0
               ? ATTN_DTYPE_BF16
               : ATTN_DTYPE_F32; /* what Transformers takes where none is named */
}

void read_heads(struct reading *r, const cJSON *text, struct attn_layer_desc *desc)
{
    int32_t heads = read_either(r, text, "num_attention_heads", "n_head", 0, 4096);
    int32_t hidden = read_either(r, text, "hidden_size", "n_embed", 0, 1 << 20);
    if (heads <= 0) {
        reading_fail(r, "num_attention_heads", "is missing; 1 to 4096 are allowed");
        heads = 1;
    }
    desc->num_q_heads = heads;
    desc->num_kv_heads = read_int(r, text, "num_key_value_heads", heads, 1, 4096);
    desc->head_size = read_int(r, text, "head_dim", hidden / heads, 8, 512);
    double scalar = read_number(r, text, "query_pre_attn_scalar", desc->head_size);
    desc->scale = (float)(1 / sqrt(scalar > 0 ? scalar : 1));
    desc->soft_cap = (float)read_number(r, text, "attn_logit_softcapping", 0);
    desc->dtype = read_dtype(text);
    desc->causal = 1;
    desc->window_left = desc->window_right = -1;
}

void check_heads(struct reading *r, const struct attn_layer_desc *desc, const char *kv_heads,
                 const char *size)
{
    if (desc->num_q_heads % desc->num_kv_heads != 0) {
        reading_fail(r, kv_heads, "%d does not divide num_attention_heads %d", desc->num_kv_heads,
                     desc->num_q_heads);
    }
    if (desc->head_size < 8 || desc->head_size % 8 != 0) {
        reading_fail(r, size, "%d; multiples of 8 up to 512 are allowed", desc->head_size);
    }
}
