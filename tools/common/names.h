/* SPDX-License-Identifier: Apache-2.0 */
/* The text names of codes, which the core has: its api.code_name; and of layers. */
#ifndef TOOLS_COMMON_NAMES_H
#define TOOLS_COMMON_NAMES_H

#include <attn/api.h>

/* The name of a code in a list of enum attn_name_list; NULL past its last, or if no core is found.
 */
const char *code_name(int32_t list, int32_t code);
/* "unknown" for a code past the known ones. */
const char *dtype_name(int32_t dtype); /* enum attn_dtype_id */
const char *kv_dtype_name(int32_t kv_dtype);
const char *layout_name(int32_t layout);
/* -1: no such name. */
int32_t kv_dtype_of_name(const char *name);
int32_t layout_of_name(const char *name);
int32_t dtype_of_name(const char *name);

/* "full", "sliding", "chunked" for decoders, else the kind's own name: as ATTN_BACKEND has them. */
const char *layer_kind_name(const struct attn_layer_desc *layer);
/* Writes the increasing indices of equal layers as "0-11", "0, 2 ... 40" or "0-4, 6-10"; what does
 * not fit is left out, and "..." stands for it. Size: at least 32. */
void layer_list(const int32_t *indices, int32_t count, char *text, size_t size);

#endif
