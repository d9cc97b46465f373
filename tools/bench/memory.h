/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory of one measurement, given back all at once. */
#ifndef BENCH_MEMORY_H
#define BENCH_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/device.h"

struct memory {
    const struct device *device;
    void **items;
    int32_t count;
    bool failed; /* an allocation or a copy failed; what was asked for since is NULL */
};

void memory_init(struct memory *memory, const struct device *device);
void memory_finish(struct memory *memory);
void *memory_take(struct memory *memory, size_t bytes);
void *memory_upload(struct memory *memory, const void *source, size_t bytes);
/* Normal numbers times `deviation`, in an enum attn_dtype_id; they repeat after some ten
 * thousands. */
void *memory_normal(struct memory *memory, int32_t dtype, int64_t elements, double deviation,
                    uint64_t *random);

/* Says that there was not enough of it, for the shape that was asked for. */
attn_status memory_refused(struct attn_error *error);

#endif
