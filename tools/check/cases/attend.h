/* SPDX-License-Identifier: Apache-2.0 */
/* One problem run by the reference and by the backend under test, and what is held between them. */
#ifndef CHECK_ATTEND_H
#define CHECK_ATTEND_H

#include "cases/problem.h"
#include "harness/trial.h"

/* Ways of running one attend; all have to give what the reference gives. */
enum trial_way {
    TRIAL_PLAIN,
    TRIAL_REPLANNED,    /* the plan's memory has served another batch before */
    TRIAL_TWO_PLANS,    /* two plans alive: both planned, then both run */
    TRIAL_TABLE_UPDATE, /* planned with another block table, then update_block_table */
    TRIAL_REPLAY,       /* ATTN_PLAN_CAPTURE at larger limits, then ATTN_PLAN_REPLAY in place */
    TRIAL_IN_GRAPH,     /* ATTN_PLAN_OUT_OF_GRAPH on the host, ATTN_PLAN_IN_GRAPH in the graph */
    TRIAL_ALONE,        /* each request by itself: the same bits as in the batch */
    TRIAL_PARTS,        /* each request in two steps: the same bits as in one */
    TRIAL_WAY_COUNT
};

extern const char *const trial_way_names[TRIAL_WAY_COUNT];

/* The least graph level at which batches of a shape can be captured. */
int32_t trial_graph_level(int32_t shape);
/* Whether what the backend declares makes the way a promise of its for batches of this shape. */
bool trial_way_declared(const struct attn_backend_caps *caps, int32_t shape, int32_t way);

/* Whether the tested backend and the reference support a case's layer; `user` is the trial. */
bool trial_serves(void *user, const struct factor_value *v);
enum trial_result trial_attend(struct trial *trial, const struct case_space *space,
                               const struct attend_case *attend_case, uint64_t seed, int32_t way);

/* Two threads attend at once, each with cases of its own; `variant` is an attend_cases. */
enum trial_result trial_two_threads(struct trial *trial, const void *variant, uint64_t seed);

#endif
