/* SPDX-License-Identifier: Apache-2.0 */
/* Online softmax: sums of exponentials relative to row_max, the largest score so far. A row without
 * keys has row_max -inf and row_sum 0; its output is 0 and its log-sum-exp -inf. */
#ifndef GPU_DEVICE_SOFTMAX_H
#define GPU_DEVICE_SOFTMAX_H

#include "gpu/device/target.h"

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

/* The reference that scores are taken relative to; finite, so that -inf - base is -inf. */
GPU_INLINE float softmax_base(float largest)
{
    return largest == -INFINITY ? 0.0f : largest;
}

/* The factor that takes sums relative to `from` to sums relative to `to`; 1 if both are -inf. */
GPU_INLINE float softmax_rescale(float from, float to)
{
    return from == to ? 1.0f : expf(from - to);
}

GPU_INLINE float softmax_lse(float base, float sum)
{
    return sum == 0.0f ? -INFINITY : base + logf(sum);
}

/* The final factor of a row's accumulated values. The sink (-inf: none) joins the denominator, and
 * the log-sum-exp is written to *lse unless that is NULL. */
GPU_INLINE float softmax_close(float sink, float row_max, float row_sum, float *lse)
{
    float base = softmax_base(fmaxf(row_max, sink));
    float scores_scale = expf(row_max - base), sum = row_sum * scores_scale + expf(sink - base);
    if (lse != nullptr) {
        *lse = softmax_lse(base, sum);
    }
    return sum == 0.0f ? 0.0f : scores_scale / sum;
}

/* As softmax_close, with sink and row_max in base 2: scores times LOG2E. */
GPU_INLINE float softmax_close_base2(float sink, float row_max, float row_sum, float *lse)
{
    float base = softmax_base(fmaxf(row_max, sink));
    float scores_scale = exp2f(row_max - base),
          sum = fmaf(row_sum, scores_scale, exp2f(sink - base));
    if (lse != nullptr) {
        *lse = sum == 0.0f ? -INFINITY : fmaf(base, LN2, logf(sum));
    }
    return sum == 0.0f ? 0.0f : scores_scale / sum;
}

#endif
