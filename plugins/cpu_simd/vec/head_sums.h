/* SPDX-License-Identifier: Apache-2.0 */
/* An indexer's scores: products of a tile of keys, summed over the heads of a list. */
#ifndef CPU_SIMD_HEAD_SUMS_H
#define CPU_SIMD_HEAD_SUMS_H

#include <limits.h>
#include <string.h>

/* Four vectors of columns at once: their sums and factors stay in registers. */
static void sum_heads(const struct head_sum_args *args)
{
    /* a NaN stays: vf_max gives its second operand */
    const vf least = vf_set1(args->relu ? 0.0f : -INFINITY);
    float out[TILE_KEYS];
    for (int32_t j = 0; j < TILE_KEYS; j += 4 * VF_WIDTH) {
        vf sums[4], factors[4];
        for (int32_t v = 0; v < 4; v++) {
            sums[v] = vf_set1(0.0f);
            factors[v] = vf_load(args->factors + j + v * VF_WIDTH);
        }
        for (int32_t h = 0; h < args->heads; h++) {
            const float *scores = args->scores + (int64_t)h * TILE_KEYS + j;
            const vf weight = vf_set1(args->weights[h]);
            for (int32_t v = 0; v < 4; v++) {
                const vf score = vf_mul(vf_load(scores + v * VF_WIDTH), factors[v]);
                sums[v] = vf_fma(vf_max(least, score), weight, sums[v]);
            }
        }
        for (int32_t v = 0; v < 4; v++) {
            vf_store(out + j + v * VF_WIDTH, sums[v]);
        }
    }
    for (int32_t j = 0; j < TILE_KEYS; j++) {
        const float sum = out[j] + 0.0f;
        int32_t bits;
        memcpy(&bits, &sum, sizeof bits);
        bits ^= (bits >> 31) & INT32_MAX;
        args->out[j] = sum == sum ? bits : INT32_MAX;
    }
}

static int32_t highest(const int32_t *x, int32_t n)
{
    int32_t most = x[0];
    for (int32_t i = 1; i < n; i++) {
        most = x[i] > most ? x[i] : most;
    }
    return most;
}

static int32_t count_above(const int32_t *x, int32_t n, int32_t least)
{
    int32_t count = 0;
    for (int32_t i = 0; i < n; i++) {
        count += x[i] > least;
    }
    return count;
}

#endif
