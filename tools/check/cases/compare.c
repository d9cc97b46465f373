/* SPDX-License-Identifier: Apache-2.0 */
#include "cases/compare.h"

#include <math.h>

#include "support/number.h"

#define LARGE_LSE 1000.0 /* of a needle of huge scores */

static struct attend_form form_of_case(const struct factor_value *v)
{
    return (struct attend_form){.dtype = v[FACTOR_DTYPE].a,
                                .kv_dtype = v[FACTOR_KV_DTYPE].a,
                                .kv_dtype_v = case_kv(v, true),
                                .q_dtype = v[FACTOR_QUERY].a,
                                .scales_p = v[FACTOR_P_SCALE].a != 0,
                                .head_size = v[FACTOR_HEAD_SIZE].a};
}

struct bound bound_of_case(const struct factor_value *v)
{
    const struct attend_form form = form_of_case(v);
    return bound_of_attend(&form);
}

struct bound bound_of_lse(const struct factor_value *v)
{
    const struct attend_form form = form_of_case(v);
    struct bound bound = bound_of_attend_lse(&form);
    /* sums of products of both signs are good to their size, whatever is left of them */
    bound.absolute = case_score_times(v) * LARGEST_SCORE * 0x1p-20;
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

/* Of an element of a row whose root mean square is `rms`. */
static double allowed_in_row(struct bound bound, double rms, int32_t dtype, double want)
{
    /* A row may lie in the format's subnormals, where half a unit is no small part of a value. */
    double least = bound.least + (dtype == ATTN_DTYPE_F16 ? 0x1p-24 : 1e-30);
    return bound.absolute * rms + bound.relative * fabs(want) + least;
}

double allowed_error(const void *expected, int64_t at, int32_t dtype, int64_t dims, double want,
                     struct bound bound)
{
    return allowed_in_row(bound, row_rms(expected, at, dtype, dims), dtype, want);
}

/* Over 1 where `have` is further from `want` than allowed; numbers that are not finite are the same
 * or not. */
static double ratio_to_allowed(double want, double have, double allowed)
{
    if (want == have || (isnan(want) && isnan(have))) {
        return 0;
    }
    return isfinite(want) && isfinite(have) ? fabs(have - want) / allowed : INFINITY;
}

enum trial_result compare_rows(struct trial *trial, const struct compared *rows,
                               const void *expected, const void *found, struct bound bound)
{
    const int32_t dtype = rows->dtype;
    double largest = 1;
    for (int64_t t = 0; t < rows->num_rows; t++) {
        for (int64_t h = 0; h < rows->heads && (rows->wanted == NULL || rows->wanted[t]); h++) {
            int64_t at = t * rows->stride_row + h * rows->stride_head;
            double rms = row_rms(expected, at, dtype, rows->dims);
            for (int64_t i = 0; i < rows->dims; i++) {
                double want = number_load(expected, at + i, dtype);
                double have = number_load(found, at + i, dtype);
                double allowed = allowed_in_row(bound, rms, dtype, want);
                double ratio = ratio_to_allowed(want, have, allowed);
                if (ratio > largest) {
                    largest = ratio;
                    trial_say(trial, TRIAL_FAILED,
                              "%s[row %lld, head %d, dim %d] is %g, not %g; allowed error %g",
                              rows->what, (long long)t, (int)h, (int)i, have, want, allowed);
                }
            }
        }
    }
    return largest > 1 ? TRIAL_FAILED : TRIAL_PASSED;
}

enum trial_result compare_lse(struct trial *trial, const struct compared_lse *rows,
                              const void *expected, const void *found, struct bound bound)
{
    for (int64_t h = 0; h < rows->heads; h++) {
        for (int64_t t = rows->first_row; t < rows->first_row + rows->num_rows; t++) {
            const int64_t at = h * rows->stride_head + t * rows->stride_row;
            const double want = ((const float *)expected)[at], have = ((const float *)found)[at];
            const double allowed = bound.least + bound.relative * fabs(want) +
                                   (fabs(want) > LARGE_LSE ? bound.absolute : 0);
            if (ratio_to_allowed(want, have, allowed) > 1 &&
                (rows->wanted == NULL || rows->wanted[t])) {
                const double base_2 = want * 1.4426950408889634;
                const bool binary = fabs(want) > 1 && fabs(have - base_2) <= 1.5 * allowed;
                return trial_say(trial, TRIAL_FAILED, "lse of head %d, token %d is %g, not %g%s",
                                 (int)h, (int)t, have, want,
                                 binary ? ": 1.4427 times that, so in base 2; a natural "
                                          "log-sum-exp is 0.693147 times as large"
                                        : "");
            }
        }
    }
    return TRIAL_PASSED;
}
