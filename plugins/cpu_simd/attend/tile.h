/* SPDX-License-Identifier: Apache-2.0 */
/* A tile of the packed path: tile.c, and flash.c for the engines that take it in one call. */
#ifndef CPU_SIMD_TILE_H
#define CPU_SIMD_TILE_H

#include "internal.h"

struct tile {
    const struct attend_run *run;
    const struct work_item *item;
    char *q;
    float *accumulator;
    float *scores;
    char *keys;
    char *values;
    float *row;
    float *reference;
    float *sum;
    float *rescale;
    int32_t *low; /* of the current tile, by row of the item */
    int32_t *high;
    int32_t *token_low; /* absolute, by token of the item */
    int32_t *token_high;
    int32_t *seen;              /* [row block]: its accumulator has been written */
    struct flash_block *blocks; /* [blocks of rows] */
    const void **key_rows;
    const void **value_rows;
    const void **scale_rows;
    float *key_scale;
    float *value_scale;
    char *zero_row;
    int32_t first; /* key of column 0: a multiple of TILE_KEYS */
    int32_t skip;  /* columns before the item's first key: never read */
    int32_t n;
    bool flash;       /* by the engine's flash; tiles with values that are not finite go without */
    bool only_maxima; /* of rows' scores are wanted: values are not packed */
    bool careful;     /* by careful_softmax */
    bool non_finite;  /* a value of the tile is NaN or infinite */
    struct ahead ahead;
};

/* flash.c */
bool flash_takes(const struct problem *problem, int32_t rows);
/* of all rows to the tile, which is packed for flash */
void flash_attend(struct tile *tile, int32_t rows);

#endif
