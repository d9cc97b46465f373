/* SPDX-License-Identifier: Apache-2.0 */
/* Element-wise comparison of a tensor with the reference's. */
#ifndef CHECK_COMPARE_H
#define CHECK_COMPARE_H

#include <attn/tensor.h>
#include <stdbool.h>
#include <stddef.h>

/* |error| <= absolute * RMS of the reference's row + relative * |reference|. */
struct bound {
    double absolute;
    double relative;
};

struct bound bound_for(int32_t dtype, bool fp8_cache);

struct mismatch {
    int64_t token;
    int32_t head;
    int32_t dim;
    double expected;
    double found;
    double allowed;
};

/* Both tensors [rows, heads, dims] of one dtype and equal strides; the first num_rows are compared. NaN equals NaN only.
 * Returns the largest error / allowed; above 1 the worst element is in *worst. */
double compare_rows(const void *expected, const void *found, const struct attn_tensor *tensor,
                    int32_t dtype, int64_t num_rows, struct bound bound, struct mismatch *worst);

#endif
