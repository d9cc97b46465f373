/* SPDX-License-Identifier: Apache-2.0 */
/* Two attends over disjoint keys: the weights of their rows, and the sum of two rows. */
#ifndef CPU_SIMD_MERGE_ROWS_H
#define CPU_SIMD_MERGE_ROWS_H

#include "delta.h"

static void merge_weights(const struct merge_weights *weights, int32_t n)
{
    for (int32_t i = 0; i < n; i += VF_WIDTH) {
        const vf one = vf_set1(1.0f);
        vf a = vf_load(weights->a + i), b = vf_load(weights->b + i);
        vf small = vf_exp2(vf_mul(vf_abs(vf_sub(a, b)), vf_set1(-LOG2_E)));
        vf_store(weights->by_a + i, activated(one, vf_sub(a, b)));
        vf_store(weights->by_b + i, activated(one, vf_sub(b, a)));
        vf_store(weights->both + i, vf_add(vf_max(a, b), log_of_1_and(small)));
    }
}

#define DEFINE_BLEND(name, type, load, put, from, to)                                              \
    static void name(void *out, const void *a, const void *b, float by_a, float by_b, int64_t n)   \
    {                                                                                              \
        const type *x = a, *y = b;                                                                 \
        type *sum = out;                                                                           \
        const vf of_x = vf_set1(by_a), of_y = vf_set1(by_b);                                       \
        int64_t i = 0;                                                                             \
        for (; i + VF_WIDTH <= n; i += VF_WIDTH) {                                                 \
            put(sum + i, vf_fma(load(y + i), of_y, vf_mul(load(x + i), of_x)));                    \
        }                                                                                          \
        for (; i < n; i++) {                                                                       \
            sum[i] = to(from(x[i]) * by_a + from(y[i]) * by_b);                                    \
        }                                                                                          \
    }
DEFINE_BLEND(blend_f32, float, vf_load, vf_store, SAME, SAME)
DEFINE_BLEND(blend_f16, uint16_t, vf_load_f16, vf_store_f16, number_from_f16, f32_to_f16)
DEFINE_BLEND(blend_bf16, uint16_t, vf_load_bf16, vf_store_bf16, number_from_bf16, f32_to_bf16)

#endif
