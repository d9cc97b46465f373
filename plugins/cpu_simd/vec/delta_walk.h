/* SPDX-License-Identifier: Apache-2.0 */
/* Groups of tokens that pass over a state in place, for ISAs with 32 vectors of 64 bytes. A pass
 * adds the update of the group before to a row of the state and multiplies the row with k and q of
 * its own group: 24 FMAs for 2 loads, 2 stores and 12 broadcasts, so the FMA units are the limit.
 */
#ifndef CPU_SIMD_DELTA_WALK_H
#define CPU_SIMD_DELTA_WALK_H

#include <stdbool.h>

#include "f32_tile.h"

#define WALK_VECTORS (WALK_COLUMNS / VF_WIDTH)
#define WALK_ROWS 2 /* whose chains of FMAs are next to each other */

/* Products of a group, by token. */
struct walk_sums {
    vf k[WALK_TOKENS][WALK_VECTORS];    /* S k */
    vf q[WALK_TOKENS][WALK_VECTORS];    /* S q */
    vf left[WALK_TOKENS][WALK_VECTORS]; /* the update of memory by r */
};

/* before: k of the group before, read where `adds`; k and q are read where `looks`. */
INLINE void walk_pass(const struct walk_args *args, struct walk_sums *sums, const float *before,
                      const float *k, const float *q, float keep, const bool adds,
                      const bool shrinks, const bool looks)
{
    const int64_t depth = args->depth;
    vf by_k[WALK_TOKENS][WALK_VECTORS], by_q[WALK_TOKENS][WALK_VECTORS];
    vf left[WALK_TOKENS][WALK_VECTORS], kept = vf_set1(keep);
#pragma GCC unroll 4
    for (int t = 0; t < WALK_TOKENS; t++) {
#pragma GCC unroll 2
        for (int j = 0; j < WALK_VECTORS; j++) {
            by_k[t][j] = by_q[t][j] = vf_set1(0.0f);
            left[t][j] = adds ? sums->left[t][j] : vf_set1(0.0f);
        }
    }
    float *row = args->state, *end = row + depth * WALK_COLUMNS;
    for (; row < end; row += WALK_ROWS * WALK_COLUMNS) {
        vf s[WALK_ROWS][WALK_VECTORS];
#pragma GCC unroll 4
        for (int i = 0; i < WALK_ROWS * WALK_VECTORS; i++) {
            vf x = vf_load(row + i * VF_WIDTH);
            s[i / WALK_VECTORS][i % WALK_VECTORS] = shrinks ? vf_mul(x, kept) : x;
        }
#pragma GCC unroll 8
        for (int i = 0; adds && i < WALK_TOKENS * WALK_ROWS; i++) {
            const int t = i / WALK_ROWS, r = i % WALK_ROWS;
            vf by = vf_set1(before[t * depth + r]);
#pragma GCC unroll 2
            for (int j = 0; j < WALK_VECTORS; j++) {
                s[r][j] = vf_fma(by, left[t][j], s[r][j]);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; adds && i < WALK_ROWS * WALK_VECTORS; i++) {
            vf_store(row + i * VF_WIDTH, s[i / WALK_VECTORS][i % WALK_VECTORS]);
        }
#pragma GCC unroll 8
        for (int i = 0; looks && i < WALK_TOKENS * WALK_ROWS; i++) {
            const int t = i % WALK_TOKENS, r = i / WALK_TOKENS;
            vf of_k = vf_set1(k[t * depth + r]), of_q = vf_set1(q[t * depth + r]);
#pragma GCC unroll 2
            for (int j = 0; j < WALK_VECTORS; j++) {
                by_k[t][j] = vf_fma(of_k, s[r][j], by_k[t][j]);
                by_q[t][j] = vf_fma(of_q, s[r][j], by_q[t][j]);
            }
        }
        before += WALK_ROWS;
        k += WALK_ROWS;
        q += WALK_ROWS;
    }
#pragma GCC unroll 4
    for (int t = 0; looks && t < WALK_TOKENS; t++) {
#pragma GCC unroll 2
        for (int j = 0; j < WALK_VECTORS; j++) {
            sums->k[t][j] = by_k[t][j];
            sums->q[t][j] = by_q[t][j];
        }
    }
}

INLINE void walk_store(void *row, int32_t element, const vf *out)
{
#pragma GCC unroll 2
    for (int j = 0; j < WALK_VECTORS; j++) {
        if (element == ELEMENT_BF16) {
            vf_store_bf16((uint16_t *)row + j * VF_WIDTH, out[j]);
        } else if (element == ELEMENT_F16) {
            vf_store_f16((uint16_t *)row + j * VF_WIDTH, out[j]);
        } else {
            vf_store((float *)row + j * VF_WIDTH, out[j]);
        }
    }
}

/* Computes r and the outputs of a group from its sums. Outputs are written at once: their lines
 * come from memory while the next group passes over the state. */
INLINE void walk_solve(const struct walk_args *args, const struct walk_group *group,
                       struct walk_sums *sums, const float *v, char *o)
{
    const bool additive = args->additive;
    vf r[WALK_TOKENS][WALK_VECTORS];
#pragma GCC unroll 4
    for (int t = 0; t < WALK_TOKENS; t++) {
        vf out[WALK_VECTORS];
#pragma GCC unroll 2
        for (int j = 0; j < WALK_VECTORS; j++) {
            vf x = vf_mul(vf_load(v + t * args->stride + j * VF_WIDTH), vf_set1(group->beta[t]));
            out[j] = vf_mul(sums->q[t][j], vf_set1(group->e[t]));
            x = additive ? x : vf_fma(sums->k[t][j], vf_set1(group->by_state[t]), x);
#pragma GCC unroll 4
            for (int i = 0; i < t; i++) {
                x = additive ? x : vf_fma(r[i][j], vf_set1(group->by_r[t][i]), x);
                out[j] = vf_fma(r[i][j], vf_set1(group->by_q[t][i]), out[j]);
            }
            r[t][j] = t < group->tokens ? x : vf_set1(0.0f);
            out[j] = vf_fma(r[t][j], vf_set1(group->by_q[t][t]), out[j]);
            sums->left[t][j] = vf_mul(r[t][j], vf_set1(group->left[t]));
        }
        if (t < group->tokens) {
            walk_store(o + t * args->o_bytes, args->element, out);
        }
    }
}

static void delta_walk(const struct walk_args *args)
{
    struct walk_sums sums;
    const int64_t keys = (int64_t)WALK_TOKENS * args->depth;
    for (int32_t i = 0; i <= args->count; i++) {
        const float *k = args->k + i * keys, *q = args->q + i * keys;
        const float *before = i > 0 ? k - keys : k;
        for (int t = 0; t < WALK_TOKENS; t++) { /* stores of the state wait for those of outputs */
            __builtin_prefetch((char *)args->o + (i * WALK_TOKENS + t) * args->o_bytes, 1);
        }
        const float keep = i > 0 ? args->groups[i - 1].keep : 1.0f;
        if (i == 0) {
            walk_pass(args, &sums, before, k, q, keep, false, false, true);
        } else if (i == args->count) {
            walk_pass(args, &sums, before, k, q, keep, true, true, false);
            break;
        } else if (keep == 1.0f) {
            walk_pass(args, &sums, before, k, q, keep, true, false, true);
        } else {
            walk_pass(args, &sums, before, k, q, keep, true, true, true);
        }
        walk_solve(args, &args->groups[i], &sums, args->v + i * WALK_TOKENS * args->stride,
                   (char *)args->o + i * WALK_TOKENS * args->o_bytes);
    }
}

static void delta_group_products(float (*out)[WALK_TOKENS], const float *a, const float *b,
                                 int32_t n)
{
    vf sum[WALK_TOKENS][WALK_TOKENS];
#pragma GCC unroll 4
    for (int t = 0; t < WALK_TOKENS; t++) {
#pragma GCC unroll 4
        for (int j = 0; j < WALK_TOKENS; j++) {
            sum[t][j] = vf_set1(0.0f);
        }
    }
    for (int32_t i = 0; i < n; i += VF_WIDTH) {
        vf right[WALK_TOKENS];
#pragma GCC unroll 4
        for (int j = 0; j < WALK_TOKENS; j++) {
            right[j] = vf_load(b + j * (int64_t)n + i);
        }
#pragma GCC unroll 4
        for (int t = 0; t < WALK_TOKENS; t++) {
            vf left = vf_load(a + t * (int64_t)n + i);
#pragma GCC unroll 4
            for (int j = 0; j < WALK_TOKENS; j++) {
                sum[t][j] = vf_fma(left, right[j], sum[t][j]);
            }
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < WALK_TOKENS; t++) {
        vf_sum_four(out[t], sum[t][0], sum[t][1], sum[t][2], sum[t][3]);
    }
}

#endif
