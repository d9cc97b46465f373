/* SPDX-License-Identifier: Apache-2.0 */
#include "select/names.h"

#include <string.h>

#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))

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
static const char *const layouts[] = {"nhd",      "hnd",      "nhd_inner", "hnd_inner",
                                      "hnd_rows", "packed_k", "latent"};
static const char *const kinds[] = {"decoder", "encoder",    "encoder_only", "cross", "mm_encoder",
                                    "mla",     "mla_sparse", "static_sink",  "gdn"};
static const char *const phases[] = {"prefill", "decode"};
static const char *const scale_forms[] = {"none", "per_tensor", "per_head", "per_head_channel"};
static const char *const output_forms[] = {"plain", "fp8_static", "fp8_group_64", "fp8_group_128",
                                           "nvfp4"};

static const char *name_in(const char *const *names, int32_t count, int32_t code)
{
    return code >= 0 && code < count ? names[code] : "unknown";
}

static int32_t code_in(const char *const *names, int32_t count, const char *name)
{
    for (int32_t i = 0; i < count; i++) {
        if (strcmp(names[i], name) == 0) {
            return i;
        }
    }
    return -1;
}

const char *name_of_dtype(int32_t dtype)
{
    return name_in(dtypes, COUNT(dtypes), dtype);
}

const char *name_of_kv_dtype(int32_t kv_dtype)
{
    return name_in(kv_dtypes, COUNT(kv_dtypes), kv_dtype);
}

const char *name_of_layout(int32_t layout)
{
    return name_in(layouts, COUNT(layouts), layout);
}

const char *name_of_kind(int32_t kind)
{
    return name_in(kinds, COUNT(kinds), kind);
}

const char *name_of_phase(int32_t phase)
{
    return name_in(phases, COUNT(phases), phase);
}

const char *name_of_scale_form(int32_t form)
{
    return name_in(scale_forms, COUNT(scale_forms), form);
}

const char *name_of_output_form(int32_t form)
{
    return name_in(output_forms, COUNT(output_forms), form);
}

const char *name_of_layer(const struct attn_layer_desc *layer)
{
    if (layer->kind != ATTN_LAYER_DECODER) {
        return name_of_kind(layer->kind);
    }
    return layer->chunk_size > 0 ? "chunked" : layer->has_window ? "sliding" : "full";
}

int32_t kv_dtype_of_name(const char *name)
{
    return code_in(kv_dtypes, COUNT(kv_dtypes), name);
}

int32_t layout_of_name(const char *name)
{
    return code_in(layouts, COUNT(layouts), name);
}

void name_mask(struct text *text, uint64_t mask, int32_t count, const char *(*name)(int32_t))
{
    bool any = false;
    for (int32_t i = 0; i < count; i++) {
        if (mask >> i & 1) {
            text_add(text, "%s%s", any ? ", " : "", name(i));
            any = true;
        }
    }
    if (!any) {
        text_add_string(text, "none");
    }
}
