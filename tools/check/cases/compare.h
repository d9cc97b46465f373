/* SPDX-License-Identifier: Apache-2.0 */
/* Element-wise comparison of a tensor with the reference's, and the bounds of cases. */
#ifndef CHECK_COMPARE_H
#define CHECK_COMPARE_H

#include "cases/cases.h"
#include "common/bound.h"
#include "harness/trial.h"

/* The bounds of an attend, and of its log-sum-exp. */
struct bound bound_of_case(const struct factor_value *v);
struct bound bound_of_lse(const struct factor_value *v);

/* Rows [heads, dims] of one dtype and equal strides, and which of them count: the first num_rows,
 * of these, unless `wanted` is NULL, those that it sets. */
struct compared {
    const char *what; /* for the message */
    int32_t dtype;
    int64_t heads, dims, stride_row, stride_head; /* elements */
    int64_t num_rows;
    const uint8_t *wanted;
};

/* NaN equals NaN only. The message names the element that is farthest out of its bound. */
enum trial_result compare_rows(struct trial *trial, const struct compared *rows,
                               const void *expected, const void *found, struct bound bound);

/* A log-sum-exp [heads, rows] with these strides; rows count as in compare_rows. NaN and infinities
 * equal themselves only. */
struct compared_lse {
    int64_t heads, stride_head, stride_row;
    int64_t first_row, num_rows;
    const uint8_t *wanted;
};
enum trial_result compare_lse(struct trial *trial, const struct compared_lse *rows,
                              const void *expected, const void *found, struct bound bound);

#endif
