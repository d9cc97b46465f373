/* SPDX-License-Identifier: Apache-2.0 */
/* One backend's copy of a problem, in its own device's memory, with what is prepared for it, and
 * its schedule. */
#ifndef CHECK_PROBLEM_COPY_H
#define CHECK_PROBLEM_COPY_H

#include "harness/backend.h"
#include "common/device.h"
#include "harness/planned.h"
#include "cases/problem.h"
#include "harness/trial.h"
#include "support/owned.h"

/* The host's copies of lengths that are bounds. */
struct loose_lengths {
    int32_t starts[PROBLEM_MAX_REQS + 1], lens[PROBLEM_MAX_REQS];
};

struct problem_copy {
    const struct check_problem *problem;
    struct backend *backend;
    const struct device *device;
    struct binding binding;
    uint8_t *memory; /* in the device's memory */
    struct attn_limits limits;
    struct plan_memory plan;
    void *stream;
    struct loose_lengths loose;
};

bool problem_copy_init(struct problem_copy *copy, struct backend *backend,
                       const struct device *device, const struct check_problem *problem);
void problem_copy_finish(struct problem_copy *copy);
/* For a case with LENGTHS_HOST_BOUNDS: the host's copies say more rows and keys than the device's.
 * Before problem_copy_prepare, for the tested copy; the reference stays exact. */
void problem_copy_loosen(struct problem_copy *copy);
/* prepare and schedule_size; the limits are `factor` times what the batch needs. */
attn_status problem_copy_prepare(struct problem_copy *copy, int32_t factor,
                                 struct attn_error *error);
/* `mode` is an attn_plan_mode. */
attn_status problem_copy_plan(struct problem_copy *copy, int32_t mode, struct attn_error *error);
/* How a copy's step is planned and run: by its backend's kernels alone, or through the core. */
struct copy_step {
    struct problem_copy *copy;
    attn_status (*plan)(const struct copy_step *step, int32_t mode, struct attn_error *error);
    attn_status (*run)(const struct copy_step *step, struct attn_error *error);
};
/* The copy's own kernels. */
struct copy_step problem_copy_step(struct problem_copy *copy);
/* A plan of that other batch in the same memory. */
attn_status copy_step_plan_shorter(const struct copy_step *step, int32_t mode,
                                   struct attn_error *error);
/* One step is captured with other lengths, then replayed with the batch's own. First generation: a
 * plan made for the capture, renewed before the replay. Second (`inside`): the host's part before
 * each, the device's part inside. Without graphs on the device the calls are the same. */
attn_status copy_step_captured(const struct copy_step *step, bool inside, struct attn_error *error);
/* The batch with only its request `r`, whose rows keep their places. */
struct attn_batch batch_of_request(const struct attn_batch *whole, int32_t r);
/* Makes the device's lengths of such a batch these. */
bool batch_put_lengths(const struct device *device, const struct attn_batch *one,
                       const int32_t *starts, const int32_t *length);
/* A request of a batch, or one half of its queries, as a step of its own. */
struct batch_part {
    struct attn_batch batch; /* its host arrays are these: */
    int32_t starts[2], length;
    int32_t request;
};
/* Parts are counted by requests, or, of `halves`, by these. */
void batch_part_init(struct batch_part *part, const struct attn_batch *whole, int32_t index,
                     bool halves);
/* Writes the step's keys with the backend's own kernel, unless its attend does. */
attn_status problem_copy_write(struct problem_copy *copy, struct attn_error *error);
attn_status problem_copy_attend(struct problem_copy *copy, struct attn_error *error);
/* prepare, write, plan and attend of the reference's copy. */
attn_status problem_copy_run_reference(struct problem_copy *reference, struct attn_error *error);

/* A case's problem with the copies of both backends, the reference's on the host. */
struct problem_copies {
    struct check_problem problem;
    struct problem_copy reference, tested;
};

/* TRIAL_PASSED, or with its message why there is no such problem. problem_copies_finish is due
 * either way.
 */
enum trial_result problem_copies_init(struct problem_copies *copies, struct trial *trial,
                                      const struct case_space *space, const struct attend_case *c,
                                      uint64_t seed);
void problem_copies_finish(struct problem_copies *copies);

/* What is held between the reference's copy and the tested one. */
/* attend.c. Which rows of out are compared: those of the batch's requests, and of them what fast
 * prefill was asked for. For free. */
uint8_t *wanted_rows(const struct check_problem *problem);
/* Outputs within their bounds, everything else untouched. */
enum trial_result verify_step(struct trial *trial, const struct problem_copy *reference,
                              struct problem_copy *tested);

/* verify_cache.c. Both caches after the step's keys were written: whole images in host memory.
 * Plain caches agree bit for bit; in quantized ones few codes may lie one step off, where a
 * quotient falls between two. */
enum trial_result verify_cache(struct trial *trial, const struct check_problem *problem,
                               const uint8_t *expected, const uint8_t *found);
/* The same for a copy's cache, whose bytes are then replaced by the reference's: a code one step
 * off is no error of the attend that follows. */
enum trial_result verify_written_keys(struct trial *trial, const struct problem_copy *reference,
                                      struct problem_copy *tested);

#endif
