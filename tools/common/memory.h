/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of a device that is given back all at once: what a tool uploads, draws and plans in. */
#ifndef TOOLS_COMMON_MEMORY_H
#define TOOLS_COMMON_MEMORY_H

#include "common/device.h"

struct memory {
    const struct device *device;
    struct memory_item *items;
    int32_t count;
    bool failed;             /* an allocation or a copy failed; what was asked for since is NULL */
    struct attn_error error; /* why */
    size_t asked;            /* bytes of the last allocation */
};

void memory_init(struct memory *memory, const struct device *device);
/* Gives everything back; more may be taken. */
void memory_finish(struct memory *memory);
/* `host` true: page-locked. */
void *memory_get(struct memory *memory, bool host, size_t bytes);
/* Takes memory of the device, which a CPU has touched. */
void *memory_take(struct memory *memory, size_t bytes);
void *memory_upload(struct memory *memory, const void *source, size_t bytes);
/* Normal numbers times `deviation`, in an enum attn_dtype_id; they repeat after some ten
 * thousands. */
void *memory_normal(struct memory *memory, int32_t dtype, int64_t elements, double deviation,
                    uint64_t *random);
/* A plan of a model's group with its workspace in `memory`; *plan is due to plan_destroy even after
 * a failure. */
attn_status memory_plan(struct memory *memory, const struct attn_api *api, attn_model *model,
                        int32_t group, const struct attn_plan_options *options, attn_plan **plan,
                        struct attn_error *error);

/* The error of too little memory for the shape that was asked for. */
attn_status memory_refused(struct attn_error *error);

#endif
