/* SPDX-License-Identifier: Apache-2.0 */
#include "names.h"

#include <attn/kv_cache.h>
#include <string.h>

#include "number.h"

#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))

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

static int32_t code_in(const char *const *names, int32_t count, const char *name)
{
    for (int32_t i = 0; i < count; i++) {
        if (strcmp(names[i], name) == 0) {
            return i;
        }
    }
    return -1;
}

const char *kv_dtype_name(int32_t kv_dtype)
{
    return kv_dtype >= 0 && kv_dtype < COUNT(kv_dtypes) ? kv_dtypes[kv_dtype] : "unknown";
}

const char *layout_name(int32_t layout)
{
    return layout >= 0 && layout < COUNT(layouts) ? layouts[layout] : "unknown";
}

int32_t kv_dtype_of_name(const char *name)
{
    return strcmp(name, "fp8") == 0 ? ATTN_KV_FP8_E4M3 : code_in(kv_dtypes, COUNT(kv_dtypes), name);
}

int32_t layout_of_name(const char *name)
{
    return code_in(layouts, COUNT(layouts), name);
}

int32_t dtype_of_name(const char *name)
{
    for (int32_t i = ATTN_DTYPE_F16; i < ATTN_DTYPE_COUNT; i++) {
        if (strcmp(number_name(i), name) == 0) {
            return i;
        }
    }
    return -1;
}
