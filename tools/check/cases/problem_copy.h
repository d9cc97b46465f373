/* SPDX-License-Identifier: Apache-2.0 */
/* One backend's copy of a problem, in its own device's memory, with what is prepared for it, and
 * its schedule. */
#ifndef CHECK_SIDE_H
#define CHECK_SIDE_H

#include "harness/backend.h"
#include "common/device.h"
#include "harness/planned.h"
#include "cases/problem.h"
#include "harness/trial.h"

/* The host's copies of lengths that are bounds. */
struct loose_lengths {
    int32_t starts[PROBLEM_MAX_REQS + 1], lens[PROBLEM_MAX_REQS];
};

struct side {
    struct backend *backend;
    const struct device *device;
    struct binding binding;
    uint8_t *memory; /* in the device's memory */
    attn_prepared *prepared;
    attn_plan_state *plan_state;
    struct attn_limits limits;
    struct plan_memory plan;
    void *stream;
    struct loose_lengths loose;
};

bool side_init(struct side *side, struct backend *backend, const struct device *device,
               const struct problem *problem);
void side_finish(struct side *side);
/* Of a case with LENGTHS_HOST_BOUNDS: the host's copies say more rows and keys than the device's.
 * Before side_prepare, of the side that is tested; the reference stays exact. */
void side_loosen(struct side *side, const struct problem *problem);
/* prepare and schedule_size; the limits are `factor` times what the batch needs. */
attn_status side_prepare(struct side *side, const struct problem *problem, int32_t factor,
                         struct attn_error *error);
/* `mode` is an attn_plan_mode. */
attn_status side_plan(struct side *side, int32_t mode, struct attn_error *error);
/* Another batch of the same requests: each one key shorter where it has a context. `lengths` holds
 * the host's copy until side_restore, which waits for what was enqueued in between. */
attn_status side_shorten(struct side *side, const struct problem *problem, int32_t *lengths);
attn_status side_restore(struct side *side, const struct problem *problem);
/* A plan of that other batch in the same memory. */
attn_status side_plan_shorter(struct side *side, const struct problem *problem, int32_t mode,
                              struct attn_error *error);
/* Writes the step's keys with the backend's own kernel, unless its attend does. */
attn_status side_write(struct side *side, const struct problem *problem, struct attn_error *error);
attn_status side_attend(struct side *side, struct attn_error *error);
/* prepare, write, plan and attend of the reference's side. */
attn_status side_run_reference(struct side *reference, const struct problem *problem,
                               struct attn_error *error);
bool side_guards_whole(struct side *side);

/* A case's problem with the copies of both backends, the reference's on the host. */
struct sides {
    struct problem problem;
    struct side reference, tested;
};

/* TRIAL_PASSED, or with its message why there is no such problem. sides_finish is due either way.
 */
enum trial_result sides_init(struct sides *sides, struct trial *trial,
                             const struct case_space *space, const struct attend_case *c,
                             uint64_t seed);
void sides_finish(struct sides *sides);

#endif
