/* SPDX-License-Identifier: Apache-2.0 */
/* Rows that the kernels cannot hold are recomputed with the softmax below: scores so large that a
 * product rounded for row_max and one inside a fused subtraction give different exponents, and sums
 * that overflow although the mean of the values is finite. */
#include "cpu_simd/internal.h"

/* Up to this exponent the two roundings differ by 1/32 at most. */
#define LARGEST_ROW_MAX 0x1p20f

/* Whether the kernels hold a row's result. They hold a row that sees no keys. */
static bool is_in_range(const struct attend_problem *problem, const float *sums, float row_max,
                        float row_sum)
{
    if (row_max == -INFINITY && row_sum == 0.0f) {
        return true;
    }
    const float largest =
        problem->instance->variant->codes->largest(sums, problem->shape.width_padded);
    return fabsf(row_max) <= LARGEST_ROW_MAX && row_sum > 0.0f && row_sum < INFINITY &&
           largest < INFINITY;
}

bool find_rows_out_of_range(const struct attend_problem *problem, int32_t count,
                            const struct row_block *rows, int32_t *out_of_range)
{
    bool any = false;
    for (int32_t m = 0; m < count; m++) {
        const float *sums = rows->acc_o + (int64_t)m * problem->shape.width_padded;
        out_of_range[m] = !is_in_range(problem, sums, rows->row_max[m], rows->row_sum[m]);
        any |= out_of_range[m] != 0;
    }
    return any;
}

bool has_large_scores(const struct variant *variant, const float *scores, int32_t rows, int32_t n)
{
    bool large = false;
    for (int32_t r = 0; r < rows; r++) {
        const float largest = variant->codes->largest(scores + (int64_t)r * SCORE_STRIDE, n);
        large |= !(largest * LOG2_E <= LARGEST_ROW_MAX);
    }
    return large;
}

/* Replaces the scores that row r sees by exponents of 2; returns the largest. */
static float find_exponents(const struct softmax_args *args, int32_t r, float *row)
{
    float best = -INFINITY;
    for (int32_t j = args->begin; j < args->end; j++) {
        row[j] =
            j < args->low[r] || j >= args->high[r] ? -INFINITY : row[j] * args->softmax_scale_log2;
        best = row[j] > best ? row[j] : best;
    }
    return best;
}

void recompute_softmax(const struct tile_kernels *kernels, const struct softmax_args *args,
                       float exponent_shift)
{
    for (int32_t r = 0; r < args->rows; r++) {
        float *row = args->scores + (int64_t)r * SCORE_STRIDE;
        const float best = find_exponents(args, r, row), old = args->row_max[r];
        args->scores_scale[r] = 1.0f;
        if (best > old) {
            args->row_max[r] = best < INFINITY ? best : NAN; /* INFINITY is ROW_IS_DONE */
            args->scores_scale[r] = old == -INFINITY ? 1.0f : exp2f(old - best);
            args->row_sum[r] *= args->scores_scale[r];
        }
        const float row_max = args->row_max[r] == -INFINITY ? 0.0f : args->row_max[r];
        for (int32_t j = args->begin; j < args->end; j++) {
            const bool seen = j >= args->low[r] && j < args->high[r];
            const float above = row[j] - row_max;
            const float p = seen ? exp2f(above - exponent_shift) : 0.0f;
            args->row_sum[r] += p;
            row[j] = args->value_scale != NULL && seen ? p * args->value_scale[j] : p;
        }
        float p[TILE_KEYS];
        memcpy(p + args->begin, row + args->begin,
               (size_t)(args->end - args->begin) * sizeof(float));
        kernels->unpack[ELEMENT_F32]((char *)row + args->begin * kernels->element_bytes,
                                     p + args->begin, args->end - args->begin);
    }
}
