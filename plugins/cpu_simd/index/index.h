/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of the best rows of index keys. */
#ifndef CPU_SIMD_INDEX_H
#define CPU_SIMD_INDEX_H

#include <attn/indexer.h>

#include "cpu_simd/internal.h"

#define BEST_STEP TILE_KEYS /* candidates that are appended at once */

/* Candidates for one list, in ascending order of their entries. */
struct best {
    int32_t *scores; /* [best_capacity], of head_sum_args.out */
    int32_t *entries;
    int32_t count;
    int32_t threshold; /* only higher scores may still be among the best */
    int32_t open;      /* the highest score so far of an entry that further rows may belong to */
};

/* Keeps the `most` best; of equals the smaller entries. */
void best_keep(const struct variant *variant, struct best *best, int32_t most);
/* Afterwards BEST_STEP more have room. */
void best_make_room(const struct variant *variant, struct best *best, int32_t most);
int32_t best_capacity(int32_t most);
/* Candidates of a part of the rows, a count and then `topk` places each for scores and entries,
 * after those of the parts before it. */
void best_add_part(const struct variant *variant, const int32_t *partial, int32_t topk,
                   int32_t most, struct best *best);

#endif
