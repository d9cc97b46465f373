/* SPDX-License-Identifier: Apache-2.0 */
/* Comparison of tensors, and the bounds of cases. */
#include "cases/kernel_test.h"

#include <math.h>

#include "support/number.h"

#define LARGE_LSE 1000.0 /* a needle of huge scores has more */

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

enum trial_result compare_rows(struct trial *trial, const struct compared *rows,
                               const void *expected, const void *found, struct bound bound)
{
    const int32_t dtype = rows->dtype;
    double largest = 1;
    for (int64_t t = 0; t < rows->num_rows; t++) {
        for (int64_t h = 0; h < rows->heads && (rows->wanted == NULL || rows->wanted[t]); h++) {
            int64_t at = t * rows->stride_row + h * rows->stride_head;
            double rms = bound_rms(expected, at, dtype, rows->dims);
            for (int64_t i = 0; i < rows->dims; i++) {
                double want = number_load(expected, at + i, dtype);
                double have = number_load(found, at + i, dtype);
                double allowed = bound_allows(bound, rms, dtype, want);
                double ratio = bound_ratio(want, have, allowed);
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
            if (bound_ratio(want, have, allowed) > 1 && (rows->wanted == NULL || rows->wanted[t])) {
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
