/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.c has the files of the cache folder that steer selections (measurements, by
 * host/measurement.h, and records of conformance, by host/conformance.h), lock.c has ATTN_LOCK,
 * export.c assignments as text. */
#ifndef OPERATORS_OPERATORS_H
#define OPERATORS_OPERATORS_H

#include "host/measurement.h"
#include "select/steering.h"
#include "util/text.h"

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

attn_status lock_hold(const attn_assignment *assignment, struct attn_error *error);
/* With ATTN_LOCK=take:FILE *text becomes the choice of the first record that has layers of these
 * names (and block sizes, where they are asked for), as import_rules takes it, and is left as it is
 * without one: then lock_hold refuses the choice. */
attn_status lock_choice(const attn_runtime *runtime, const struct attn_layer_desc *const *layers,
                        int32_t num_layers, struct arena *arena, const char **text,
                        struct attn_error *error);

/* An assignment as text, the same on every machine. A head line, then one line a layer:
 *
 *     attn-assignment 1
 *     layer 0 prefill=cpu_ref decode=cpu_ref kv_dtype=bf16 block_size=16 layout=nhd name=layers.0
 *
 * kv_dtype is K's/V's where they differ, and a vendor's code is its number, 0x10001. The name
 * stands last since it may hold spaces. */
#define EXPORT_HEAD "attn-assignment 1"

/* The lines of the layers. */
void assignment_add_layers(struct text *out, const attn_assignment *assignment);
/* Replaces the rules by one order per layer and phase. */
attn_status import_rules(struct rules *rules, const char *text, int32_t num_layers,
                         struct arena *arena, struct attn_error *error);
/* Refuses an assignment that came out otherwise than the text says, word for word. */
attn_status import_hold(const attn_assignment *assignment, const char *text,
                        struct attn_error *error);
/* "`whose` holds another choice:" and how lines of layers, or whole records of a lock, differ. */
attn_status refuse_choice(const attn_runtime *runtime, const char *field, const char *whose,
                          const char *record, const char *own, const char *in_record,
                          struct attn_error *error);

#endif
