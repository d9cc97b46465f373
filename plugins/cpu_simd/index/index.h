/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of the best rows of index keys. */
#ifndef CPU_SIMD_INDEX_H
#define CPU_SIMD_INDEX_H

#include <attn/draft/indexer.h>

#include "cpu_simd/internal.h"

#define BEST_STEP TILE_KEYS /* candidates that are appended at once */

/* Candidates for one list, in ascending order of their entries. */
struct best {
    int32_t *scores; /* [best_capacity], as score_order has them */
    int32_t *entries;
    int32_t count;
    int32_t threshold; /* only higher scores may still be among the best */
    int32_t open;      /* the highest score so far of an entry that further rows may belong to */
};

/* A score as a number of the same order, in which NaN is the highest and 0 has no sign. */
static inline int32_t score_order(float score)
{
    int32_t bits;
    score += 0.0f;
    memcpy(&bits, &score, sizeof bits);
    bits ^= bits >> 31 & INT32_MAX;
    return score == score ? bits : INT32_MAX;
}

/* Keeps the `most` best; of equals the smaller entries. */
void best_keep(struct best *best, int32_t most);
/* Afterwards BEST_STEP more have room. */
void best_make_room(struct best *best, int32_t most);
int32_t best_capacity(int32_t most);

#endif
