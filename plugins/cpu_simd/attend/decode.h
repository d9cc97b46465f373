/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files of the decode path. */
#ifndef CPU_SIMD_DECODE_H
#define CPU_SIMD_DECODE_H

#include "cpu_simd/internal.h"

/* Rows of keys, or of values. */
struct decode_rows {
    const struct row_source *source;
    const void **rows;   /* the tile's */
    const void **next;   /* the next tile's */
    const void **scales; /* those of the item's first head, where they are next to rows */
    const void **next_scales;
    float *scale;   /* scales of the current head */
    int32_t *zero;  /* zero points of the current head's int4 rows that are read in place */
    char *staged;   /* memory of staged rows */
    int32_t padded; /* elements of a row, padded as the kernels take it */
};

struct decode {
    const struct attend_run *run;
    const struct work_item *item;
    const struct attend_scratch *at;
    struct decode_rows keys;
    struct decode_rows values;
    const void **staged_rows;
    int32_t rows_padded;   /* rows of a head in q, scores and the acc_o */
    int32_t heads_at_once; /* heads whose scores are computed before their values */
    bool heads_contiguous; /* a token's heads are contiguous: their rows are read together */
};

/* One kernel call: keys from .. from + keys - 1 of a tile of n keys, for one of the heads
 * first_head .. end_head - 1. Heads count within the item. */
struct decode_step {
    int32_t first;      /* key of the tile */
    int32_t first_head; /* first of the heads whose scores are computed together */
    int32_t end_head;
    int32_t head;
    int32_t n;
    int32_t next_n; /* keys of the next tile */
    int32_t from;
    int32_t keys;
};

/* decode_prefetch.c: what is prefetched during scores and values */
int32_t keys_together(const struct decode *decode, const struct row_source *source, int32_t n);
void prefetch_during_scores(const struct decode *decode, const struct decode_step *step,
                            struct decode_args *args);
void prefetch_during_values(const struct decode *decode, const struct decode_step *step,
                            struct decode_args *args);
void prefetch_scales(const struct decode *decode, const struct decode_step *step,
                     const struct decode_rows *rows);

#endif
