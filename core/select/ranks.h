/* SPDX-License-Identifier: Apache-2.0 */
/* The files of the cache folder that steer selections: measurements, by host/measurement.h, and
 * records of conformance, by host/conformance.h. */
#ifndef CORE_SELECT_RANKS_H
#define CORE_SELECT_RANKS_H

#include "host/measurement.h"
#include "select/assignment.h"

struct hashed_file {
    bool read;
    uint64_t hash;
};

struct ranks {
    struct measurement *items;
    int32_t count;
    char device[MEASUREMENT_DEVICE_SIZE]; /* that lines have to be of */
    uint64_t drivers;
    struct hashed_file *files; /* [num_plugins] */
    bool reported;             /* that some are stale */
};

/* What is on file of a backend for a layer and phase. */
struct rank {
    double time; /* the product of the times of all buckets: of the same buckets, less is faster */
    int32_t buckets;
    const char *stale; /* NULL, or what the backend was measured with that is another one today */
};

/* A missing file has no measurements, nor has one that others could have written (with a warning);
 * broken lines are passed over with a warning. `device` is left empty. False without memory. */
bool ranks_read(struct ranks *ranks, const attn_runtime *runtime, struct arena *arena);
struct rank ranks_find(struct ranks *ranks, const attn_runtime *runtime,
                       const struct attn_layer_desc *layer, int32_t phase,
                       const struct backend *backend);

/* Backends that attn-check has found without a failure on this machine, by host/conformance.h. */
struct conformant {
    const char **lacks; /* [num_backends]: NULL: conformant; or the reason why not */
};

/* Hashes the plugins' files. False without memory. */
bool conformant_read(struct conformant *conformant, const attn_runtime *runtime,
                     struct arena *arena);

#endif
