/* SPDX-License-Identifier: Apache-2.0 */
#include "common/bound.h"

#include <math.h>

#include "support/number.h"

double bound_rms(const void *row, int64_t at, int32_t dtype, int64_t dims)
{
    double sum = 0;
    for (int64_t i = 0; i < dims; i++) {
        double x = number_load(row, at + i, dtype);
        sum += isfinite(x) ? x * x : 0;
    }
    return sqrt(sum / (double)dims);
}

double bound_allows(struct bound bound, double rms, int32_t dtype, double want)
{
    /* A row may lie in the format's subnormals, where half a unit is no small part of a value. */
    double least = bound.least + (dtype == ATTN_DTYPE_F16 ? 0x1p-24 : 1e-30);
    return bound.absolute * rms + bound.relative * fabs(want) + least;
}

double bound_ratio(double want, double have, double allowed)
{
    if (want == have || (isnan(want) && isnan(have))) {
        return 0;
    }
    return isfinite(want) && isfinite(have) ? fabs(have - want) / allowed : INFINITY;
}
