/* SPDX-License-Identifier: Apache-2.0 */
/* A layer of the fake backend with its cache, plan, workspace and tensors. */
#ifndef CORE_PLAN_FIXTURE_H
#define CORE_PLAN_FIXTURE_H

#include "bind/bound.h"
#include "fake_backend.h"
#include "step/plan_state.h"

#include <attn/io.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCKS 8
#define TOKENS 40

struct planned {
    struct fixture fixture;
    attn_model *model;
    attn_plan *plan;
    void *cache, *workspace;
    struct attn_tensor q, k, v, out;
    int64_t shapes[4][3];
    float data[4][TOKENS * 4 * FAKE_HEAD_SIZE];
    int32_t start[9], lens[8], table[8 * 3];
    int64_t slots[TOKENS];
    struct attn_batch batch;
    struct attn_step_io io;
    struct attn_error error;
};

extern const struct attn_layer_params *sink_params; /* the next planned layer's; NULL: none */

/* `change`, or NULL: changes the fixture's backends first. */
struct planned *planned_of(struct attn_layer_desc desc, bool validate,
                           void (*change)(struct fixture *fixture));
struct planned *planned_create(struct attn_layer_desc desc, bool validate);
void planned_destroy(struct planned *b);
static inline void planned_end(struct planned **b)
{
    planned_destroy(*b);
}
/* Requests of `queries` tokens each, all keys of them new; blocks in falling order. */
void set_batch(struct planned *b, const int32_t *queries, int32_t count);
/* Makes the plan again, over the same workspace. */
void remake_plan(struct planned *b, const struct attn_plan_options *options);
/* Plans the batch and runs the layer. */
attn_status step(struct planned *b);

#endif
