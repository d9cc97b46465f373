/* SPDX-License-Identifier: Apache-2.0 */
/* Rows that the engines do not hold: scores so large that a product, rounded for the reference but
 * not in a fused subtraction, is another exponent; sums that overflow where the mean of the values
 * is finite. Such rows are computed once more, by the softmax below. */
#include "internal.h"

/* Up to this exponent the two roundings differ by 1/32 at most. */
#define LARGEST_REFERENCE 0x1p20f

/* A row of sums in units that the engines hold. A row without keys is. */
static bool is_sound(const struct problem *problem, const float *sums, float reference, float sum)
{
    if (reference == -INFINITY && sum == 0.0f) {
        return true;
    }
    const float largest =
        problem->instance->variant->codes->largest(sums, problem->shape.width_padded);
    return fabsf(reference) <= LARGEST_REFERENCE && sum > 0.0f && sum < INFINITY &&
           largest < INFINITY;
}

bool find_unsound_rows(const struct problem *problem, int32_t count, const struct row_block *rows,
                       int32_t *unsound)
{
    bool any = false;
    for (int32_t m = 0; m < count; m++) {
        const float *sums = rows->accumulator + (int64_t)m * problem->shape.width_padded;
        unsound[m] = !is_sound(problem, sums, rows->reference[m], rows->sum[m]);
        any |= unsound[m] != 0;
    }
    return any;
}

bool has_large_scores(const struct variant *variant, const float *scores, int32_t rows, int32_t n)
{
    bool large = false;
    for (int32_t r = 0; r < rows; r++) {
        const float largest = variant->codes->largest(scores + (int64_t)r * SCORE_STRIDE, n);
        large |= !(largest * LOG2_E <= LARGEST_REFERENCE);
    }
    return large;
}

/* Exponents of the columns that row r sees, in place, and the greatest. */
static float find_exponents(const struct softmax_args *args, int32_t r, float *row)
{
    float best = -INFINITY;
    for (int32_t j = args->begin; j < args->end; j++) {
        row[j] = j < args->low[r] || j >= args->high[r] ? -INFINITY : row[j] * args->factor;
        best = row[j] > best ? row[j] : best;
    }
    return best;
}

void careful_softmax(const struct engine *engine, const struct softmax_args *args, float lowered)
{
    for (int32_t r = 0; r < args->rows; r++) {
        float *row = args->scores + (int64_t)r * SCORE_STRIDE;
        const float best = find_exponents(args, r, row), old = args->reference[r];
        args->rescale[r] = 1.0f;
        if (best > old) {
            args->reference[r] = best;
            args->rescale[r] = old == -INFINITY ? 1.0f : exp2f(old - best);
            args->sum[r] *= args->rescale[r];
        }
        const float reference = args->reference[r] == -INFINITY ? 0.0f : args->reference[r];
        for (int32_t j = args->begin; j < args->end; j++) {
            const bool seen = j >= args->low[r] && j < args->high[r];
            const float above = row[j] - reference;
            const float p = seen ? exp2f(above - lowered) : 0.0f;
            args->sum[r] += p;
            row[j] = args->value_scale != NULL && seen ? p * args->value_scale[j] : p;
        }
        float p[TILE_KEYS];
        memcpy(p + args->begin, row + args->begin,
               (size_t)(args->end - args->begin) * sizeof(float));
        engine->unpack[ELEMENT_F32]((char *)row + args->begin * engine->element_bytes,
                                    p + args->begin, args->end - args->begin);
    }
}
