/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the direct (decode) path know of each other. */
#ifndef CPU_SIMD_DIRECT_H
#define CPU_SIMD_DIRECT_H

#include "internal.h"

struct direct {
    const struct attend_run *run;
    const struct work_item *item;
    char *scratch;
    const void **key_rows;
    const void **value_rows;
    const void **next_keys; /* of the tile to come */
    const void **next_values;
    const void **staged_rows;
    const void **key_scales; /* of the item's first head, where they are kept next to rows */
    const void **value_scales;
    const void **next_key_scales;
    const void **next_value_scales;
    float *key_scale; /* of the head at hand */
    float *value_scale;
    int32_t *key_zero; /* likewise, of int4 rows read in place */
    int32_t *value_zero;
    int32_t rows_padded; /* rows of a head in q, scores and the accumulator */
    int32_t bunch;       /* heads whose scores are taken before their values */
    bool side_by_side;   /* a token's heads are one run of memory: its rows are read together */
};

/* One engine call: keys from .. from + keys - 1 of a tile of n, of one of a bunch of heads. Heads
 * count within the item. */
struct direct_step {
    int32_t first;      /* key of the tile */
    int32_t first_head; /* of the bunch */
    int32_t end_head;
    int32_t head;
    int32_t n;
    int32_t next_n; /* keys of the tile to come */
    int32_t from;
    int32_t keys;
};

/* direct_ahead.c: what is prefetched meanwhile */
int32_t keys_together(const struct direct *direct, const struct row_source *source, int32_t n);
void ahead_of_scores(const struct direct *direct, const struct direct_step *step,
                     struct direct_args *args);
void ahead_of_values(const struct direct *direct, const struct direct_step *step,
                     struct direct_args *args);
void prefetch_scales(const struct direct *direct, const struct row_source *source,
                     const void **scales, const void **next_scales, int32_t h, int32_t n,
                     int32_t next_n);

#endif
