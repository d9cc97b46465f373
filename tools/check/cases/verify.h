/* SPDX-License-Identifier: Apache-2.0 */
/* What is held between the reference's copy of a problem and the one of the backend under test. */
#ifndef CHECK_VERIFY_H
#define CHECK_VERIFY_H

#include "cases/problem_copy.h"
#include "harness/trial.h"

/* verify.c. Which rows of out are compared: those of the batch's requests, and of them what fast
 * prefill was asked for. NULL: no memory; else for free. */
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
