/* SPDX-License-Identifier: Apache-2.0 */
#include "compare.h"

#include <math.h>

#include "number.h"

struct bound bound_for(int32_t dtype, bool fp8_cache)
{
    /* float32: sums of float32 products and an exponential good to a few units in the last place.
     * 16-bit: probabilities and outputs rounded to the format, 2^-11 and 2^-8 of a value, and half of that again for
     * the running maximum's rescaling. An fp8 cache adds nothing: both sides read the same bytes. */
    static const struct bound bounds[] = {
        [ATTN_DTYPE_F16] = {3e-3, 2e-3}, [ATTN_DTYPE_BF16] = {2e-2, 1.2e-2}, [ATTN_DTYPE_F32] = {4e-5, 2e-5}};
    struct bound bound = bounds[dtype];
    if (fp8_cache && dtype == ATTN_DTYPE_F32) { /* a backend may multiply in 16 bits what is stored in 8 */
        bound = bounds[ATTN_DTYPE_F16];
    }
    return bound;
}

static double row_rms(const void *row, int64_t at, int32_t dtype, int64_t dims)
{
    double sum = 0;
    for (int64_t i = 0; i < dims; i++) {
        double x = number_load(row, at + i, dtype);
        sum += isfinite(x) ? x * x : 0;
    }
    return sqrt(sum / (double)dims);
}

double compare_rows(const void *expected, const void *found, const struct attn_tensor *tensor,
                    int32_t dtype, int64_t num_rows, struct bound bound, struct mismatch *worst)
{
    /* A row may lie in the format's subnormals, where half a unit is no small part of a value. */
    double least = dtype == ATTN_DTYPE_F16 ? 0x1p-24 : 1e-30;
    double largest = 0;
    for (int64_t t = 0; t < num_rows; t++) {
        for (int64_t h = 0; h < tensor->shape[1]; h++) {
            int64_t at = t * tensor->strides[0] + h * tensor->strides[1];
            double rms = row_rms(expected, at, dtype, tensor->shape[2]);
            for (int64_t i = 0; i < tensor->shape[2]; i++) {
                double want = number_load(expected, at + i, dtype);
                double have = number_load(found, at + i, dtype);
                double allowed = bound.absolute * rms + bound.relative * fabs(want) + least;
                double ratio = fabs(have - want) / allowed;
                if (isnan(want) || isnan(have)) {
                    ratio = isnan(want) && isnan(have) ? 0 : INFINITY;
                }
                if (ratio > largest) {
                    largest = ratio;
                    *worst = (struct mismatch){t, (int32_t)h, (int32_t)i, want, have, allowed};
                }
            }
        }
    }
    return largest;
}
