/* SPDX-License-Identifier: Apache-2.0 */
/* One problem run by the reference and by the backend under test, and what is held between them. */
#ifndef CHECK_TRIAL_H
#define CHECK_TRIAL_H

#include "backend.h"
#include "device.h"
#include "problem.h"

/* Ways of running one attend; all have to give what the reference gives. */
enum trial_way {
    TRIAL_PLAIN,
    TRIAL_REPLANNED,    /* the plan's memory has served another batch before */
    TRIAL_TWO_PLANS,    /* two plans alive: both planned, then both run */
    TRIAL_TABLE_UPDATE, /* planned with another block table, then update_block_table */
    TRIAL_REPLAY,       /* ATTN_PLAN_CAPTURE at larger limits, then ATTN_PLAN_REPLAY in place */
    TRIAL_ALONE,        /* each request by itself: the same bits as in the batch */
    TRIAL_WAY_COUNT
};

extern const char *const trial_way_names[TRIAL_WAY_COUNT];

/* Whether what the backend declares makes the way a promise of its. */
bool trial_way_declared(const struct attn_backend_caps *caps, int32_t way);

enum trial_result { TRIAL_PASSED, TRIAL_FAILED, TRIAL_SKIPPED };

struct trial {
    struct backend *reference;
    struct backend *tested;
    const struct device *device;
    char message[ATTN_ERROR_MESSAGE_SIZE + 80]; /* why it failed or was skipped */
    double max_error; /* largest error over its bound seen so far */
    bool concurrent;  /* another thread runs beside: its allocations cannot be told apart */
};

enum trial_result trial_attend(struct trial *trial, const struct case_space *space,
                               const struct attend_case *attend_case, uint64_t seed, int32_t way);

#endif
