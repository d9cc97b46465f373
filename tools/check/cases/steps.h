/* SPDX-License-Identifier: Apache-2.0 */
/* Promises about steps as such: threads next to each other, and the same bits whatever else is in
 * the batch. */
#ifndef CHECK_STEPS_H
#define CHECK_STEPS_H

#include "harness/trial.h"

/* The cases to draw from; borrowed. */
struct steps_variant {
    const struct case_space *space;
    const struct attend_case *cases;
    int32_t num_cases;
};

/* Two threads attend at once, each with its own case; `variant` is a steps_variant. */
enum trial_result steps_two_threads(struct trial *trial, const void *variant, uint64_t seed);

#endif
