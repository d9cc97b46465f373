/* SPDX-License-Identifier: Apache-2.0 */
/* From judged candidates to a layer's choices: backends, block size and layout. */
#ifndef CORE_SELECT_SETTLE_H
#define CORE_SELECT_SETTLE_H

#include "select/candidates.h"
#include "util/counts.h"

/* A layer that reads another's cache has to read what that one was given: candidates that cannot
 * are no longer eligible, and their verdicts say why. */
void settle_sharing(struct selection *selection, const struct layer *layer,
                    struct verdict *verdicts, struct candidate *candidates);

/* Chooses for both phases of the layer and fills its choices. */
void settle_layer(struct selection *selection, struct assignment_layer *out,
                  const struct rule *const *rules, struct candidate *const candidates[NUM_PHASES],
                  struct verdict *const verdicts[NUM_PHASES]);

#endif
