/* SPDX-License-Identifier: Apache-2.0 */
/* The text names of codes, as they stand in reasons, in exported assignments and in ATTN_BACKEND.
 */
#ifndef CORE_SELECT_NAMES_H
#define CORE_SELECT_NAMES_H

#include <attn/api.h>

#include "util/text.h"

/* attn_api.code_name. */
const char *code_name(int32_t list, int32_t code);

/* Constant text; "unknown" for codes that are none. */
const char *name_of_dtype(int32_t dtype);
const char *name_of_kv_dtype(int32_t kv_dtype);
const char *name_of_layout(int32_t layout);
const char *name_of_kind(int32_t kind);
const char *name_of_cache_role(int32_t role);
const char *name_of_phase(int32_t phase);
const char *name_of_scale_form(int32_t form);
const char *name_of_view_form(int32_t bit);
const char *name_of_output_form(int32_t form);
const char *name_of_graph_level(int32_t level);
/* The highest known level that is not above this one; a negative one stays. */
int32_t graph_level_known(int32_t level);
/* By its kind and what it says next to it; of a complete description. */
const char *name_of_layer(const struct attn_layer_desc *layer);

/* The code of a name, or -1. */
int32_t kv_dtype_of_name(const char *name);
int32_t layout_of_name(const char *name);

/* "f16, bf16": the names of a mask's bits; "none" if there are none. */
void name_mask(struct text *text, uint64_t mask, int32_t count, const char *(*name)(int32_t));

#endif
