/* SPDX-License-Identifier: Apache-2.0 */
/* Compositions: what the core makes of a backend's kernels where a layer or a step is more than one
 * attend. Each is one file with one constant table; the rest of the core walks the tables and knows
 * none by name; compositions/compositions.h does.
 *
 * A layer keeps the bits of those that serve it (found when it is bound, after its backends are
 * chosen), a plan of those that serve any layer of its group. They are called in the order of their
 * ids: each changes what those before it have left. */
#ifndef CORE_SELECT_COMPOSITION_H
#define CORE_SELECT_COMPOSITION_H

#include <attn/api.h>
#include <stdbool.h>

#define MAX_COMPOSITIONS 16

struct check;
struct layer;
struct step;

typedef attn_status step_program(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                                 struct attn_error *error);

/* Checks a run's tensors that come in extensions; `writes`, `attends`: whether the run does so. */
typedef attn_status step_check(const attn_plan *plan, const struct step *step,
                               const struct attn_step_io *io, bool writes, bool attends,
                               struct attn_error *error);

/* Any function may be NULL. */
struct composition {
    /* Selecting: of layers with an extension: offsetof(struct layer, its pointer); 0: of every
     * layer. */
    size_t extension;
    /* Checks the extension and fills in struct layer what follows from it. */
    attn_status (*resolve)(struct layer *layer, struct attn_error *error);
    /* adds the reasons why a backend lacks parts, and ATTN_COMPOSE_* of what the core composes */
    void (*match)(struct check *check, int32_t phase);

    /* The layers that it serves, for which all that follows is called: those that either phase
     * composes in one of these ways (ATTN_COMPOSE_*); 0: all with the extension. */
    uint32_t composed;

    /* Binding a layer. */
    size_t layer_bytes; /* size of attn_layer.data[id], zeroed */
    /* Changes the layer as kernels see it: attn_layer.parts and part_params, and what parameters
     * the layer needs. Checks what attn_layer.params bring for it, if any are bound; on an error
     * it is called again with those that were bound before. */
    attn_status (*bind)(attn_layer *layer, struct attn_error *error);

    /* Making a plan. */
    size_t plan_bytes; /* size of attn_plan.data[id], zeroed */
    /* Says how the steps of the layers that it serves differ from a plain attend: step->parts, what
     * a run must bring, the calls' kernels and keys; plan->part_limits; and what the plan needs for
     * it: plan->num_host_ints, areas (plan_area), memory of plan->arena. */
    attn_status (*build)(attn_plan *plan, struct attn_error *error);

    /* plan_batch. */
    /* Changes plan->given and plan->whole, the requests that kernels see, and makes batches of its
     * parts. */
    attn_status (*view)(attn_plan *plan, struct attn_error *error);
    /* the same after leading decodes are split off: plan->decode and plan->prefill */
    attn_status (*view_split)(attn_plan *plan, struct attn_error *error);
    /* Chooses the step's program and its calls (launch_use), or stands around what is chosen.
     * step->program is NULL until one has chosen; step_attends then chooses the plain calls. */
    void (*choose)(attn_plan *plan, struct step *step);
};

/* By id, which is the order in which they are called; ends with NULL. */
extern const struct composition *const compositions[MAX_COMPOSITIONS + 1];

/* The first from `at` on that `by` has, a bit for each by id; NULL ends the list. */
static inline const struct composition *const *composed_from(uint32_t by,
                                                             const struct composition *const *at)
{
    while (*at != NULL && !(by >> (at - compositions) & 1)) {
        at++;
    }
    return at;
}
#define FOR_COMPOSED(c, by)                                                                        \
    for (const struct composition *const *c = composed_from(by, compositions); *c != NULL;         \
         c = composed_from(by, c + 1))

#endif
