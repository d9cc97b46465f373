/* SPDX-License-Identifier: Apache-2.0 */
/* The rule for structs that cross the ABI (attn/version.h), as a plugin of ABI 0.1 keeps it: none
 * is smaller than it was there; an unknown tail is zero; an unknown extension is optional. A struct
 * of this size without extensions costs two comparisons. */
#ifndef PLUGINS_COMMON_STRUCTS_H
#define PLUGINS_COMMON_STRUCTS_H

#include <attn/host.h>
#include <attn/kernels.h>

#include "common/tensors.h"

#define STRUCT_LARGEST 65536 /* a larger struct_size is garbage, and its tail may not be read */
#define STRUCT_MOST_EXTENSIONS 64

/* What every struct begins with. */
struct struct_header {
    size_t struct_size;
    const struct attn_ext *next;
};

static inline attn_status struct_examine(const struct struct_header *given, size_t least,
                                         size_t size, const char *name, struct attn_error *error)
{
    const unsigned char *bytes = (const unsigned char *)given;
    int32_t length = 0;
    if (given->struct_size < least || given->struct_size > STRUCT_LARGEST) {
        return plugin_error(error, ATTN_ERROR_STRUCT_SIZE, name,
                            "struct_size is %zu; %zu to %d are allowed", given->struct_size, least,
                            STRUCT_LARGEST);
    }
    for (size_t at = size; at < given->struct_size; at++) {
        if (bytes[at] != 0) {
            return plugin_error(error, ATTN_ERROR_STRUCT_SIZE, name,
                                "struct_size is %zu and byte %zu is not 0; %zu bytes are known, "
                                "and an unknown tail has to be all zero",
                                given->struct_size, at, size);
        }
    }
    for (const struct attn_ext *ext = given->next; ext != NULL; ext = ext->next) {
        bool known = ext->id >= ATTN_EXT_MLA_DESC && ext->id <= ATTN_EXT_MM_ENCODER_STATE;
        if (++length > STRUCT_MOST_EXTENSIONS || (!known && !(ext->flags & ATTN_EXT_OPTIONAL))) {
            return plugin_error(error, ATTN_ERROR_EXTENSION, name,
                                "extension %u, number %d of the chain; known are %d to %d, others "
                                "have to be optional, and %d are the most",
                                ext->id, length, ATTN_EXT_MLA_DESC, ATTN_EXT_MM_ENCODER_STATE,
                                STRUCT_MOST_EXTENSIONS);
        }
    }
    return ATTN_OK;
}

/* NULL passes: whether a struct has to be there is another question. */
static inline attn_status struct_known(const void *given, size_t least, size_t size,
                                       const char *name, struct attn_error *error)
{
    const struct struct_header *header = given;
    return header == NULL || (header->struct_size == size && header->next == NULL)
               ? ATTN_OK
               : struct_examine(header, least, size, name, error);
}

/* `least`: the struct's size in ABI 0.1. Whoever lets in less than its own size reads what is
 * missing as 0. */
#define STRUCT_KNOWN_FROM(type, least, given, error)                                               \
    struct_known(given, least, sizeof(struct type), #type, error)
#define STRUCT_KNOWN(type, given, error) STRUCT_KNOWN_FROM(type, sizeof(struct type), given, error)
/* These are as they were there. */
ATTN_STATIC_ASSERT(sizeof(struct attn_host) == 64 && sizeof(struct attn_limits) == 40 &&
                       sizeof(struct attn_layer_desc) == 224 &&
                       sizeof(struct attn_layer_params) == 96 && sizeof(struct attn_batch) == 232 &&
                       sizeof(struct attn_kv_view) == 112 && sizeof(struct attn_attend_args) == 144,
                   "structs of ABI 0.1: none that is smaller is taken");

/* All structs of one layer's call. */
static inline attn_status struct_layer_known(const struct attn_layer_desc *layer,
                                             const struct attn_layer_params *params,
                                             const struct attn_kv_view *k,
                                             const struct attn_kv_view *v, struct attn_error *error)
{
    attn_status status = STRUCT_KNOWN(attn_layer_desc, layer, error);
    status = status ? status : STRUCT_KNOWN(attn_layer_params, params, error);
    status = status ? status : STRUCT_KNOWN(attn_kv_view, k, error);
    return status ? status : STRUCT_KNOWN(attn_kv_view, v, error);
}

static inline attn_status struct_attend_known(const struct attn_attend_args *args,
                                              struct attn_error *error)
{
    attn_status status = STRUCT_KNOWN(attn_attend_args, args, error);
    if (status != ATTN_OK || args == NULL) {
        return status;
    }
    status = STRUCT_KNOWN(attn_batch, args->batch, error);
    return status
               ? status
               : struct_layer_known(args->layer, args->params, args->k_cache, args->v_cache, error);
}

static inline attn_status struct_write_known(const struct attn_write_kv_args *args,
                                             struct attn_error *error)
{
    attn_status status = STRUCT_KNOWN(attn_write_kv_args, args, error);
    return status != ATTN_OK || args == NULL
               ? status
               : struct_layer_known(args->layer, args->params, args->k_cache, args->v_cache, error);
}

static inline attn_status struct_gather_known(const struct attn_gather_kv_args *args,
                                              struct attn_error *error)
{
    attn_status status = STRUCT_KNOWN(attn_gather_kv_args, args, error);
    if (status != ATTN_OK || args == NULL) {
        return status;
    }
    status = STRUCT_KNOWN(attn_batch, args->batch, error);
    return status ? status
                  : struct_layer_known(args->layer, args->params, args->cache, NULL, error);
}

#endif
