/* SPDX-License-Identifier: Apache-2.0 */
/* Element-wise comparison of a tensor with the reference's, and the bounds per dtype. */
#ifndef CHECK_COMPARE_H
#define CHECK_COMPARE_H

#include <attn/tensor.h>

#include "cases/cases.h"

/* |error| <= absolute * RMS of the reference's row + relative * |reference| + least. */
struct bound {
    double absolute;
    double relative;
    double least;
};

struct bound bound_of_dtype(int32_t dtype);
/* Of an attend: by its activations, its cache, and what is rounded on the way. */
struct bound bound_of_case(const struct factor_value *v);
/* Absolute, of the log-sum-exp. */
double bound_of_lse(const struct factor_value *v);

struct mismatch {
    int64_t token;
    int32_t head;
    int32_t dim;
    double expected;
    double found;
    double allowed;
};

/* Both tensors [rows, heads, dims] of one dtype and equal strides; of the first num_rows those with
 * rows[t] set (NULL: all) are compared. NaN equals NaN only. Returns the largest error / allowed;
 * above 1 the worst element is in *worst. */
double compare_rows(const void *expected, const void *found, const struct attn_tensor *tensor,
                    int32_t dtype, const uint8_t *rows, int64_t num_rows, struct bound bound,
                    struct mismatch *worst);

#endif
