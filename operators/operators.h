/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.c has the files of the cache folder that steer selections (measurements, by
 * host/measurement.h, and records of conformance, by host/conformance.h), lock.c has ATTN_LOCK. */
#ifndef OPERATORS_OPERATORS_H
#define OPERATORS_OPERATORS_H

#include "host/measurement.h"
#include "select/steering.h"

struct known {
    const attn_runtime *runtime;
    struct measurement *items;
    int32_t count;
    char device[MEASUREMENT_DEVICE_SIZE]; /* that lines have to be of */
    uint64_t drivers;
    struct hashed_file {
        bool read;
        uint64_t hash;  /* 0: it cannot be read */
    } * files;          /* [num_plugins] */
    const char **lacks; /* [num_backends], NULL: conformant; if that was asked for */
};

struct known *known_read(const attn_runtime *runtime, const struct attn_device_info *device,
                         bool conformance, struct arena *arena);
struct rank known_rank(struct known *known, const struct attn_layer_desc *layer, int32_t phase,
                       const struct backend *backend);
const char *known_lacks(const struct known *known, const struct backend *backend);

attn_status lock_choice(const attn_runtime *runtime, const struct attn_layer_desc *const *layers,
                        int32_t num_layers, struct arena *arena, const char **text,
                        struct attn_error *error);
attn_status lock_hold(const attn_assignment *assignment, struct attn_error *error);

#endif
