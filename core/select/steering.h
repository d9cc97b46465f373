/* SPDX-License-Identifier: Apache-2.0 */
/* What operators' files say of selections: measured times, records of conformance, locks, and
 * assignments as text. The room operators/ is the table; the core knows no more of it. */
#ifndef CORE_SELECT_STEERING_H
#define CORE_SELECT_STEERING_H

#include "select/assignment.h"
#include "select/grammar.h"

/* What is on file of a backend for a layer and phase. */
struct rank {
    double time; /* the product of the times of all buckets: of the same buckets, less is faster */
    int32_t buckets;
    const char *stale; /* NULL, or what the backend was measured with that is another one today */
};

struct known; /* the steering's own, of one selection */

struct steering {
    /* Before the backends of a selection for `device` are judged; `conformance`: a rule asks for
     * it. Ignores a missing file and, with a warning, broken lines and a file that others could
     * have written. NULL without memory. */
    struct known *(*read)(const attn_runtime *runtime, const struct attn_device_info *device,
                          bool conformance, struct arena *arena);
    struct rank (*rank)(struct known *known, const struct attn_layer_desc *layer, int32_t phase,
                        const struct backend *backend);
    /* NULL: attn-check found the backend without a failure here; or the reason why not. */
    const char *(*lacks)(const struct known *known, const struct backend *backend);

    /* Before a selection: *text, the engine's import_text or NULL, becomes the text of another
     * choice where ATTN_LOCK=take:FILE has one of these layers, and such a text replaces the rules
     * by one order per layer and phase. */
    attn_status (*choice)(const attn_runtime *runtime, const struct attn_layer_desc *const *layers,
                          int32_t num_layers, struct arena *arena, struct rules *rules,
                          const char **text, struct attn_error *error);
    /* Refuses an assignment whose text differs from such a text. */
    attn_status (*came_out)(const attn_assignment *assignment, const char *text,
                            struct attn_error *error);
    /* Before an assignment is bound. ATTN_LOCK=FILE refuses an assignment that is no record of the
     * file; the error names the differences from the nearest record. ATTN_LOCK=write:FILE adds its
     * record to the file if it is missing. */
    attn_status (*hold)(const attn_assignment *assignment, struct attn_error *error);
};
extern const struct steering steering;

#endif
