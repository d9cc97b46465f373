/* SPDX-License-Identifier: Apache-2.0 */
/* A tile of the packed path: tile.c, and flash.c for kernels that take it in one call. */
#ifndef CPU_SIMD_TILE_H
#define CPU_SIMD_TILE_H

#include "cpu_simd/internal.h"

struct tile {
    const struct attend_run *run;
    const struct work_item *item;
    struct attend_scratch at;
    int32_t first; /* key of column 0: a multiple of TILE_KEYS */
    int32_t skip;  /* columns before the item's first key: never read */
    int32_t n;
    bool flash;       /* with the flash kernels, which do not take tiles with non-finite values */
    bool only_maxima; /* first pass: only row_max is computed, values are not packed */
    bool recompute;   /* with recompute_softmax */
    bool non_finite;  /* a value of the tile is NaN or infinite */
    struct tile_prefetch prefetch;
};

/* flash.c: finds the columns that each of some rows of the item sees, into at.low and at.high;
 * returns those that any row sees, and in `common`, unless NULL, those that all see. */
struct interval find_columns(struct tile *tile, int32_t first_row, int32_t rows,
                             struct interval *common);

bool flash_takes(const struct attend_problem *problem, int32_t rows);
/* attends all rows to the tile, which is packed for flash */
void flash_attend(struct tile *tile, int32_t rows);

#endif
