/* SPDX-License-Identifier: Apache-2.0 */
/* One problem run by the reference and by the backend under test, and what is held between them. */
#ifndef CHECK_TRIAL_H
#define CHECK_TRIAL_H

#include "backend.h"
#include "common/device.h"
#include "problem.h"

/* Ways of running one attend; all have to give what the reference gives. */
enum trial_way {
    TRIAL_PLAIN,
    TRIAL_REPLANNED,    /* the plan's memory has served another batch before */
    TRIAL_TWO_PLANS,    /* two plans alive: both planned, then both run */
    TRIAL_TABLE_UPDATE, /* planned with another block table, then update_block_table */
    TRIAL_REPLAY,       /* ATTN_PLAN_CAPTURE at larger limits, then ATTN_PLAN_REPLAY in place */
    TRIAL_IN_GRAPH,     /* ATTN_PLAN_OUT_OF_GRAPH on the host, ATTN_PLAN_IN_GRAPH in the graph */
    TRIAL_ALONE,        /* each request by itself: the same bits as in the batch */
    TRIAL_WAY_COUNT
};

extern const char *const trial_way_names[TRIAL_WAY_COUNT];

/* Whether what the backend declares makes the way a promise of its for batches of this shape. */
bool trial_way_declared(const struct attn_backend_caps *caps, int32_t shape, int32_t way);

enum trial_result { TRIAL_PASSED, TRIAL_FAILED, TRIAL_SKIPPED };

struct trial {
    struct backend *reference;
    struct backend *tested;
    const struct device *device;
    char message[ATTN_ERROR_MESSAGE_SIZE + 80]; /* why it failed or was skipped */
    double max_error;                           /* largest error over its bound seen so far */
    bool concurrent; /* another thread runs at the same time: its allocations cannot be
                        distinguished */
};

/* Keeps the message and gives `result`. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
enum trial_result
trial_say(struct trial *trial, enum trial_result result, const char *format, ...);
/* A call of the backend gave `status`; names it and the backend's own text. */
enum trial_result trial_call_failed(struct trial *trial, const char *what, attn_status status,
                                    const struct attn_error *error);

/* A call of the backend was refused as unsupported: the case is skipped, with its text if there is
 * any. */
enum trial_result trial_call_refused(struct trial *trial, const struct attn_error *error);

/* What the backend's own `supports` says; its last reason is kept. */
bool trial_supports(struct trial *trial, const struct backend *backend,
                    const struct attn_layer_desc *layer, int32_t phase);
/* Whether the tested backend and the reference support a case's layer; `user` is the trial. */
bool trial_serves(void *user, const struct factor_value *v);
enum trial_result trial_attend(struct trial *trial, const struct case_space *space,
                               const struct attend_case *attend_case, uint64_t seed, int32_t way);

#endif
