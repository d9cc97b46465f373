/* SPDX-License-Identifier: Apache-2.0 */
/* What all vec_*.h have in common, included at their ends: arithmetic as the compiler has it for
 * vectors, and 2^x. */
#ifndef CPU_SIMD_VEC_COMMON_H
#define CPU_SIMD_VEC_COMMON_H

#include <stdbool.h>

#define INLINE static inline __attribute__((always_inline))

#define vf_add(a, b) ((vf)((a) + (b)))
#define vf_sub(a, b) ((vf)((a) - (b)))
#define vf_mul(a, b) ((vf)((a) * (b)))
#define vf_div(a, b) ((vf)((a) / (b)))
#ifndef vf_quotient /* vf_div but for the last two bits, of a divisor >= 2^-126 */
#define vf_quotient vf_div
#endif

/* Vectors whose 32-bit lanes are pairs of bf16, of levels that have them; kernels of others never
 * ask for them. */
#ifndef vf_dot_pairs
#define vf_dot_pairs(a, b, c) (c)
#define vf_store_pairs(p, low, high) ((void)(p))
#endif
#ifndef vf_load_pairs
#define vf_load_pairs(value, even, odd, vectors) ((void)(even), (void)(odd))
#endif

/* c + a b; `pairs`, a constant: c + the products of both elements of each pair */
INLINE vf vf_dot(vf a, vf b, vf c, const bool pairs)
{
    return pairs ? vf_dot_pairs(a, b, c) : vf_fma(a, b, c);
}

/* A float, or a pair, in all lanes. */
INLINE vf vf_broadcast(const void *memory)
{
    float x;
    memcpy(&x, memory, sizeof x);
    return vf_set1(x);
}

/* 2^x to 7.5e-8: a polynomial of degree 5 of x - floor(x), times 2^floor(x) */
INLINE vf vf_exp2(vf x)
{
    static const float coefficients[] = {0.00898934025f, 0.0558263179f, 0.240153617f, 0.693153073f,
                                         0.999999925f};
    vf whole, f = vf_fraction(x, &whole), p = vf_set1(0.00187757661f);
#pragma GCC unroll 5
    for (int i = 0; i < 5; i++) {
        p = vf_fma(p, f, vf_set1(coefficients[i]));
    }
    return vf_times_power(p, whole);
}

/* vf_exp2 to 7.5e-5, less than the rounding of a bf16 */
INLINE vf vf_exp2_short(vf x)
{
    static const float coefficients[] = {0.226067155f, 0.695833541f, 0.999925219f};
    vf whole, f = vf_fraction(x, &whole), p = vf_set1(0.0780245227f);
#pragma GCC unroll 3
    for (int i = 0; i < 3; i++) {
        p = vf_fma(p, f, vf_set1(coefficients[i]));
    }
    return vf_times_power(p, whole);
}

#endif
