/* SPDX-License-Identifier: Apache-2.0 */
#include "cases/compare.h"

#include <math.h>

#include "support/number.h"

/* float32: sums of float32 products and an exponential good to a few units in the last place.
 * 16-bit: probabilities and outputs rounded to the format, 2^-11 and 2^-8 of a value, and half of
 * that again for the running maximum's rescaling. */
static const struct bound dtype_bounds[] = {[ATTN_DTYPE_F16] = {3e-3, 2e-3},
                                            [ATTN_DTYPE_BF16] = {2e-2, 1.2e-2},
                                            [ATTN_DTYPE_F32] = {4e-5, 2e-5}};
static const double lse_bounds[] = {
    [ATTN_DTYPE_F16] = 0x1p-10, [ATTN_DTYPE_BF16] = 0x1p-7, [ATTN_DTYPE_F32] = 0x1p-12};

/* A query that the backend quantizes to int8 per (token, head) is off by half of amax / 127 in each
 * element: of logits of deviation 4 some hundredths, and as much of each probability. */
#define INT8_QUERY_BOUND 6e-2
/* Probabilities in e4m3 are off by up to 2^-4 of themselves, in e5m2 by 2^-3, and two backends may
 * round to different sides; a weighted mean of many is off by less. */
#define E4M3_PROBABILITY_BOUND 1.5e-1
#define E5M2_PROBABILITY_BOUND 3.0e-1

/* Queries and keys in e4m3 may be multiplied as they come, which Hopper's matrix units do in steps
 * of 32 dims that lose what lies below 2^-13 of the largest number of a step, the sum so far among
 * them (DeepSeek-V3's technical report, 3.5.2; an H200 agrees with it to all digits that were
 * printed). Where a score s grows evenly, as a needle's does, step i of n adds 32 numbers to
 * s i / n and loses at most half of that unit of each in the mean: 32 2^-14 s (1 + ... + n - 1) / n
 * = (D - 32) 2^-15 s in all. Other scores lose less, since their products differ in sign. A
 * log-sum-exp is off by no more than the scores that matter to it. Only of bf16: float16 layers
 * want more than such sums have. */
#define LARGE_LSE 1000.0 /* of a needle of huge scores */

static double lost_of_score(const struct factor_value *v)
{
    const int32_t d = v[FACTOR_HEAD_SIZE].a;
    bool e4m3 =
        v[FACTOR_QUERY].a == ATTN_DTYPE_FP8_E4M3 && v[FACTOR_KV_DTYPE].a == ATTN_KV_FP8_E4M3;
    return e4m3 && v[FACTOR_DTYPE].a == ATTN_DTYPE_BF16 && d > 32 ? (d - 32) * 0x1p-15 : 0;
}

static bool quantizes_queries(int32_t kv_dtype)
{
    return kv_dtype == ATTN_KV_INT8_KV || kv_dtype == ATTN_KV_INT8_K;
}

/* A quantized cache or query adds nothing by itself, since both sides read the same bytes; but a
 * backend may multiply in 16 bits what is stored in 8. */
static int32_t least_precise(const struct factor_value *v)
{
    bool small = v[FACTOR_KV_DTYPE].a > ATTN_KV_F32 || v[FACTOR_QUERY].a != 0;
    return small && v[FACTOR_DTYPE].a == ATTN_DTYPE_F32 ? ATTN_DTYPE_F16 : v[FACTOR_DTYPE].a;
}

struct bound bound_of_dtype(int32_t dtype)
{
    return dtype_bounds[dtype];
}

struct bound bound_of_case(const struct factor_value *v)
{
    struct bound bound = dtype_bounds[least_precise(v)];
    if (quantizes_queries(v[FACTOR_KV_DTYPE].a)) {
        bound.absolute += INT8_QUERY_BOUND;
    }
    if (v[FACTOR_P_SCALE].a) {
        bool e5m2 = case_kv(v, true) == ATTN_KV_FP8_E5M2;
        bound.absolute += e5m2 ? E5M2_PROBABILITY_BOUND : E4M3_PROBABILITY_BOUND;
    }
    /* where scores of keys differ by x more or less, weights move by x / 2 in all at most */
    bound.absolute += lost_of_score(v) * CASE_LARGEST_SCORE / 2;
    return bound;
}

/* The logarithm of a sum of probabilities that are good to half a unit of the format. */
struct bound bound_of_lse(const struct factor_value *v)
{
    double least = lse_bounds[least_precise(v)];
    least += quantizes_queries(v[FACTOR_KV_DTYPE].a) ? INT8_QUERY_BOUND : 0;
    /* sums of products of both signs are good to their size, whatever is left of them */
    return (struct bound){.relative = lost_of_score(v),
                          .least = least,
                          .absolute = case_score_times(v) * CASE_LARGEST_SCORE * 0x1p-20};
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
