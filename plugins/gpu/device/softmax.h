/* SPDX-License-Identifier: Apache-2.0 */
/* Online softmax: sums of weights relative to the largest score so far. A row without keys has the
 * largest score -inf and the sum 0; its output is 0 and its log-sum-exp -inf. */
#ifndef GPU_DEVICE_SOFTMAX_H
#define GPU_DEVICE_SOFTMAX_H

#include "gpu/device/target.h"

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

/* What scores are taken relative to; finite, so that -inf - base is -inf. */
GPU_INLINE float softmax_base(float largest)
{
    return largest == -INFINITY ? 0.0f : largest;
}

/* Factor from sums relative to `from` to sums relative to `to`; 1 where both are -inf. */
GPU_INLINE float softmax_shrink(float from, float to)
{
    return from == to ? 1.0f : expf(from - to);
}

GPU_INLINE float softmax_lse(float base, float sum)
{
    return sum == 0.0f ? -INFINITY : base + logf(sum);
}

/* Closes a row whose sum l is relative to m: the sink (-inf: none) joins the denominator, *lse
 * (NULL: not wanted) is written, and what its weighted values are multiplied by is returned. */
GPU_INLINE float softmax_close(float sink, float m, float l, float *lse)
{
    float base = softmax_base(fmaxf(m, sink));
    float shrink = expf(m - base), sum = l * shrink + expf(sink - base);
    if (lse != nullptr) {
        *lse = softmax_lse(base, sum);
    }
    return sum == 0.0f ? 0.0f : shrink / sum;
}

/* The same where sink and m are in base 2: scores times LOG2E. */
GPU_INLINE float softmax_close_base2(float sink, float m, float l, float *lse)
{
    float base = softmax_base(fmaxf(m, sink));
    float shrink = exp2f(m - base), sum = fmaf(l, shrink, exp2f(sink - base));
    if (lse != nullptr) {
        *lse = sum == 0.0f ? -INFINITY : fmaf(base, LN2, logf(sum));
    }
    return sum == 0.0f ? 0.0f : shrink / sum;
}

#endif
