/* SPDX-License-Identifier: Apache-2.0 */
/* Every backend judged for one layer and phase, and the pair of backends that serves both phases
 * best. */
#ifndef CORE_SELECT_CANDIDATES_H
#define CORE_SELECT_CANDIDATES_H

#include "select/match.h"
#include "select/steering.h"

/* What all layers of one selection share. */
struct selection {
    attn_runtime *runtime;
    const struct attn_select_options *options;
    struct attn_assignment *assignment;
    struct arena *arena; /* the assignment's */
    struct rules rules;
    struct known *known; /* the steering's */
    bool stale_reported; /* that measured times are stale */
    bool failed;         /* out of memory */
};

/* One backend's standing for a layer and phase. */
struct candidate {
    struct match match;
    bool eligible;
    bool measured;
    int32_t wanted;   /* place in the rule's list, from 0; num_wanted where it is not named */
    struct rank rank; /* if measured, its time decides */
};

/* Judges all backends: writes `verdicts` and `candidates`, [num_backends] each. */
void candidates_judge(struct selection *selection, const struct layer *layer,
                      const struct rule *rule, int32_t phase, struct verdict *verdicts,
                      struct candidate *candidates);

/* Chooses for both phases of the layer and fills its choices. */
void choose_for_layer(struct selection *selection, struct assignment_layer *out,
                      const struct rule *const *rules,
                      struct candidate *const candidates[NUM_PHASES],
                      struct verdict *const verdicts[NUM_PHASES]);

#endif
