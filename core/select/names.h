/* SPDX-License-Identifier: Apache-2.0 */
/* The text names of codes, as in reasons, in exported assignments and in ATTN_BACKEND. */
#ifndef CORE_SELECT_NAMES_H
#define CORE_SELECT_NAMES_H

#include <stdbool.h>

#include "util/text.h"
#include "util/slots.h"

/* Constant text of a list (enum attn_name_list); "unknown" for codes that the list lacks. */
const char *name_of(int32_t list, int32_t code);
const char *name_of_graph_level(int32_t level);
/* The highest known level that is not above this one; a negative one stays. */
int32_t graph_level_known(int32_t level);
/* A layer's kind and what sets it apart, as one name. The description is complete. */
const char *name_of_layer(const struct attn_layer_desc *layer);

/* A code of a list (enum attn_name_list) as text: its name, a vendor's as "0x10001", "unknown" for
 * what is neither. */
struct code_text {
    char text[24];
};
struct code_text code_text(int32_t list, int32_t code);
/* "q8_0", or "q8_0/q4_0" where V's dtype is another one than K's. */
struct kv_dtypes_text {
    char text[48];
};
struct kv_dtypes_text kv_dtypes_text(int32_t kv_dtype, int32_t kv_dtype_v);

/* Does a mask have the code, or, of a vendor's, the list of the backend's codes? */
bool declares_code(const struct attn_backend_caps *caps, int32_t list, uint64_t mask, int32_t code);
/* "f16, bf16, 0x10001 (acme_q6)": the names of a mask's bits and of the backend's
 * vendor_codes, into an empty text. */
void name_codes(struct text *text, const struct attn_backend_caps *caps, int32_t list,
                uint64_t mask);

#endif
