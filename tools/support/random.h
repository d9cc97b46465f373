/* SPDX-License-Identifier: Apache-2.0 */
/* A small seeded generator (SplitMix64, Steele, Lea, Flood 2014): the same inputs on every machine.
 */
#ifndef SUPPORT_RANDOM_H
#define SUPPORT_RANDOM_H

#include <math.h>
#include <stdint.h>

static inline uint64_t random_bits(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static inline int32_t random_below(uint64_t *state, int32_t count)
{
    return (int32_t)(random_bits(state) % (uint64_t)count);
}

/* The numbers from `first` on in random order. */
static inline void random_order(uint64_t *state, int32_t *order, int32_t count, int32_t first)
{
    for (int32_t i = 0; i < count; i++) {
        int32_t other = random_below(state, i + 1);
        order[i] = order[other];
        order[other] = first + i;
    }
}

static inline double random_unit(uint64_t *state)
{
    return (double)((random_bits(state) >> 11) + 1) * 0x1p-53;
}

static inline double random_normal(uint64_t *state)
{
    double radius = sqrt(-2 * log(random_unit(state)));
    return radius * cos(6.283185307179586 * random_unit(state));
}

/* Sum of eight 8-bit uniforms, brought to variance 1: fast, and near enough to normal for inputs.
 */
static inline double random_almost_normal(uint64_t *state)
{
    uint64_t bits = random_bits(state);
    int sum = 0;
    for (int i = 0; i < 8; i++) {
        sum += (int)(bits >> (8 * i) & 0xff);
    }
    return (sum - 1020) / 209.01;
}

/* Uniform between -radius and radius. */
static inline double random_within(uint64_t *state, double radius)
{
    return radius * (2 * random_unit(state) - 1);
}

static inline void random_floats(uint64_t *state, float *values, int64_t count, double radius)
{
    for (int64_t i = 0; i < count; i++) {
        values[i] = (float)random_within(state, radius);
    }
}

#endif
