/* SPDX-License-Identifier: Apache-2.0 */
/* A configuration's values, each with its check: what the readers of families share. */
#ifndef TOOLS_COMMON_MODEL_READING_H
#define TOOLS_COMMON_MODEL_READING_H

#include "model_config.h"

struct cJSON;
struct reading {
    struct model_config *config;
    struct attn_error *error;
    attn_status status;
};

/* The first failure is reported. */
void reading_fail(struct reading *r, const char *field, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* NULL where there is no such member. */
const struct cJSON *read_member(const struct cJSON *object, const char *name);
int32_t read_int(struct reading *r, const struct cJSON *object, const char *name, int32_t otherwise,
                 int32_t min, int32_t max);
/* The same under either of two names. */
int32_t read_either(struct reading *r, const struct cJSON *object, const char *name,
                    const char *other, int32_t otherwise, int32_t max);
double read_number(struct reading *r, const struct cJSON *object, const char *name,
                   double otherwise);
const char *read_text(const struct cJSON *object, const char *name);
struct model_layer *add_layer(struct reading *r, const char *prefix, int32_t index);
/* Heads, head size, scale and dtype of a plain transformer configuration. */
void read_heads(struct reading *r, const struct cJSON *text, struct attn_layer_desc *desc);
/* Fails where the heads of a layer that takes these as they are do not fit; the names are the
 * fields that gave KV heads and head size. */
void check_heads(struct reading *r, const struct attn_layer_desc *desc, const char *kv_heads,
                 const char *size);
void read_tower(struct reading *r, const struct cJSON *root, const char *model_type);

#endif
