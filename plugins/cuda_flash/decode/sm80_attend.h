/* SPDX-License-Identifier: Apache-2.0 */
/* The attend of sm_80 and later: one call of its kernels as plain numbers, and its launches. */
#ifndef CUDA_FLASH_SM80_ATTEND_H
#define CUDA_FLASH_SM80_ATTEND_H

#include "cuda_flash/tensor_map.h"
#include "gpu/output.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SM80_MAX_SIZE 512    /* the largest head size */
#define SM80_TILE 64         /* keys of a tile */
#define SM80_NARROW_TILE 128 /* keys of a tile of 8 and 4 bits, where one row tile has all rows */
#define SM80_WIDE_TILE 32    /* keys of a tile of 16-bit heads over 256 */
#define SM80_MAX_STAGES 6    /* tiles that a CTA has in shared memory */
/* Bytes of a CTA's shared memory next to queries and stages; then the query's terms of 8 and 4-bit
 * kinds, and two tiles' scores of heads over 256. */
#define SM80_FIXED_SMEM 1024
#define SM80_TERMS_SMEM 1024
#define SM80_SCORES_SMEM(tile) (2 * 16 * ((tile) + 8) * 4)
/* Bytes that a key and its value of KIND_LEVELS and KIND_K8V4 take in a stage beyond their codes:
 * norms, steps, and what copies in whole pieces bring along before and behind a row. */
#define SM80_LEVELS_ROOM 32
#define SM80_K8V4_ROOM 16
#define SM80_ON_THE_WAY (128 * 1024) /* bytes of 16-bit tiles in flight on a multiprocessor */

/* How many rows of an item a warp's products have: 16; 8, whose sums stand in another order (8 and
 * 4-bit kinds, float32); 4 (4-bit kinds of up to 128 dims). */
enum sm80_few { SM80_MANY, SM80_FEW, SM80_FOUR };

/* Where a stage has rows of 4-bit codes (from `at` on) and their scales, in bytes. */
struct sm80_plane {
    int32_t at, pitch, scale_at, scale_pitch;
};

struct sm80_params {
    struct tensor_map k_map, v_map; /* (dim, slot, head, block), if `mapped` */
    /* 1: tiles come as boxes of box_rows rows of a block, 4-bit codes as spans of memory; 0: row by
     * row */
    int32_t mapped, box_rows;
    int32_t scale_spans; /* 1: scales in planes of their own come as spans, too */
    int32_t together;    /* 1: a slot's value lies behind its key and comes with it */
    /* TurboQuant: 1: rows come as spans; 16, 8, 4: in pieces of so many bytes, from the piece on
     * that a row begins in */
    int32_t unit;
    struct sm80_plane planes[2]; /* K and V, of 4-bit kinds */
    int32_t few;                 /* enum sm80_few */
    int32_t stages;              /* how many each CTA has */
    int32_t overlaps;            /* 1: the launch may begin before the one before it has ended */
    struct gpu_params p;
    /* Where a prefill of the same attend's other requests was launched before this one, which runs
     * next to it and ends after it: how many CTAs beyond p.schedule.ctas begin when it ends. */
    int32_t late;
    struct gpu_output output; /* quantized outputs: items of 16 rows of kinds before INT4 only */
};

/* By the kind of the cache (enum gpu_kind). NULL or the cause of a failure. */
const char *sm80_launch(const struct gpu_device *device, int32_t kind,
                        const struct sm80_params *params, void *stream);

#ifdef __cplusplus
}
#endif
#endif
