/* SPDX-License-Identifier: Apache-2.0 */
#include "names.h"

#include <string.h>

#include "library.h"
#include "support/number.h"

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
    for (int32_t i = ATTN_DTYPE_F16; i < ATTN_DTYPE_COUNT; i++) {
        if (strcmp(number_name(i), name) == 0) {
            return i;
        }
    }
    return -1;
}
