/* SPDX-License-Identifier: Apache-2.0 */
/* Every field of a layer's description: which kinds take it, and the numbers that it may be. */
#ifndef CORE_SELECT_LAYER_FIELDS_H
#define CORE_SELECT_LAYER_FIELDS_H

#include "select/assignment.h"

enum field_type { FIELD_INT, FIELD_CODE, FIELD_FLOAT, FIELD_LONG, FIELD_BITS, FIELD_TEXT };

struct layer_field {
    const char *name;
    size_t at; /* offset in struct attn_layer_desc */
    enum field_type type;
    uint32_t kinds;   /* bits 1 << enum attn_layer_kind: for the others it is 0 */
    int32_t min, max; /* of FIELD_INT and FIELD_CODE, which may be a vendor's as well */
};

/* In the order of the struct; ends with a field without a name. */
extern const struct layer_field layer_fields[];

/* A description whose kind takes its fields, each in its range, and no value without the switch
 * that it belongs to. An error names the layer, the first bad field, its value and what is allowed.
 */
attn_status layer_check_fields(const struct attn_layer_desc *layer, struct attn_error *error);

#endif
