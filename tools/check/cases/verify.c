/* SPDX-License-Identifier: Apache-2.0 */
#include "cases/problem_copy.h"

#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "support/number.h"
#include "cases/problem.h"
#include "cases/kernel_test.h"

uint8_t *wanted_rows(const struct check_problem *problem)
{
    uint8_t *rows = command_calloc((size_t)problem->num_tokens, 1);
    const int32_t *listed = PROBLEM_AT(problem, int32_t, logits_indices);
    for (int32_t t = problem->first_row; t < problem->num_actual_tokens; t++) {
        rows[t] = problem->v[FACTOR_FAST_PREFILL].a == 0;
    }
    for (int32_t i = 0; i < problem->num_logits; i++) {
        rows[listed[i]] = 1;
    }
    return rows;
}

/* Whether rows of `row` bytes at `at` of the image that belong to others, before the batch's first
 * and after its last, are as they were. */
static bool other_rows_untouched(const struct check_problem *problem, size_t at, size_t row,
                                 const uint8_t *found)
{
    const size_t first = (size_t)problem->first_row * row, all = (size_t)problem->num_tokens * row;
    const size_t end = (size_t)problem->num_actual_tokens * row;
    const uint8_t *was = problem->image.bytes + at, *is = found + at;
    return memcmp(was, is, first) == 0 && memcmp(was + end, is + end, all - end) == 0;
}

static enum trial_result verify_out(struct trial *trial, const struct problem_copy *tested,
                                    const uint8_t *rows, const uint8_t *expected,
                                    const uint8_t *found)
{
    const struct check_problem *problem = tested->problem;
    const struct attn_tensor *out = &tested->binding.out;
    const struct compared compared = {"out",
                                      problem->dtype,
                                      out->shape[1],
                                      out->shape[2],
                                      out->strides[0],
                                      out->strides[1],
                                      problem->num_actual_tokens,
                                      rows};
    return compare_rows(trial, &compared, expected + problem->at.out, found + problem->at.out,
                        bound_of_case(problem->v));
}

enum trial_result verify_step(struct trial *trial, const struct problem_copy *reference,
                              struct problem_copy *tested)
{
    const struct check_problem *problem = tested->problem;
    const uint8_t *expected = reference->memory;
    OWNED(memory_end)
    uint8_t *found = trial_read(trial, tested->device, tested->memory, problem->image.size);
    OWNED(memory_end) uint8_t *rows = wanted_rows(problem);
    if (found == NULL) {
        return TRIAL_FAILED;
    }
    TRIAL_TRY(problem->output.form == ATTN_OUTPUT_PLAIN
                  ? verify_out(trial, tested, rows, expected, found)
                  : verify_codes(trial, problem, &reference->binding.out, rows, expected, found));
    TRIAL_TRY(verify_image(trial, &problem->image, found));
    TRIAL_FAIL_IF(trial, !plan_memory_guards_whole(&tested->plan, tested->device),
                  "the plan's memory was written past its size");
    const bool codes = problem->output.form != ATTN_OUTPUT_PLAIN;
    const size_t row = (size_t)tested->binding.out.strides[0] * number_bytes(problem->dtype);
    const size_t code_row = codes ? (size_t)output_row_bytes(problem) : 0;
    TRIAL_FAIL_IF(trial,
                  !other_rows_untouched(problem, problem->at.out, row, found) ||
                      !other_rows_untouched(problem, problem->at.codes, code_row, found),
                  "rows of out next to the batch's were written");
    TRIAL_TRY(verify_cache(trial, problem, expected, found));
    if (tested->binding.attend.lse == NULL) {
        return TRIAL_PASSED;
    }
    const int64_t *strides = tested->binding.lse.strides;
    const struct compared_lse lse = {tested->binding.lse.shape[0], strides[0], strides[1], 0,
                                     problem->num_actual_tokens,   rows};
    return compare_lse(trial, &lse, expected + problem->at.lse, found + problem->at.lse,
                       bound_of_lse(problem->v));
}
