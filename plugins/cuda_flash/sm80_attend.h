/* SPDX-License-Identifier: Apache-2.0 */
/* The attend of sm_80 and later: one call of its kernels as plain numbers, and its launches. */
#ifndef CUDA_FLASH_SM80_ATTEND_H
#define CUDA_FLASH_SM80_ATTEND_H

#include "gpu/output.h"
#include "tensor_map.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SM80_MAX_SIZE 512    /* of a head */
#define SM80_TILE 64         /* keys of one step of a CTA */
#define SM80_NARROW_TILE 128 /* where one row tile has all rows, and keys are narrow */
#define SM80_WIDE_TILE 32    /* of 16-bit heads over 256 */
#define SM80_MAX_STAGES 6    /* tiles of a CTA in shared memory */
#define SM80_FIXED_SMEM 1024 /* of a CTA, in addition to queries and stages */
#define SM80_TERMS_SMEM 1024 /* more for the query's terms of 8 and 4-bit kinds */
#define SM80_SCORES_SMEM(tile)                                                                     \
    (2 * 16 * ((tile) + 8) * 4) /* more for two tiles of heads over 256 */
/* More for a key and its value of KIND_LEVELS and KIND_K8V4: what rows have besides codes, and
 * pieces before and behind them. */
#define SM80_LEVELS_ROOM 32
#define SM80_K8V4_ROOM 16
#define SM80_ON_THE_WAY (128 * 1024) /* bytes of 16-bit tiles of a multiprocessor */

/* Rows of an item that a warp has all of: up to 16, or where sums stand in another order up to 8,
 * of narrow kinds and float32, and up to 4, of 4-bit kinds of up to 128 dims. */
enum sm80_few { SM80_MANY, SM80_FEW, SM80_FOUR };

/* Bytes in a stage: rows of 4-bit codes from `at` on, their scales from `scale_at` on. */
struct sm80_plane {
    int32_t at, pitch, scale_at, scale_pitch;
};

struct sm80_params {
    struct tensor_map k_map, v_map; /* (dim, slot, head, block), if `mapped` */
    /* 1: boxes of whole blocks, box_rows rows each; of 4-bit codes they are spans of memory */
    int32_t mapped, box_rows;
    int32_t scale_spans; /* scales of their own planes come in spans, too */
    int32_t together;    /* spans and rows of keys bring the values along */
    /* TurboQuant's rows that make no spans come in pieces of 16, 8 or 4 bytes from the one on that
     * a row begins in; 1: spans */
    int32_t unit;
    struct sm80_plane planes[2]; /* K and V, of 4-bit kinds */
    int32_t few;                 /* enum sm80_few of the items' rows */
    int32_t stages;              /* of a CTA */
    int32_t overlaps;            /* 1: the launch may begin before the one before it has ended */
    struct gpu_params p;
    /* CTAs beyond p.schedule.ctas: they begin when the launch before this one ends, which is the
     * prefill of other requests of the same attend and waited for all that came before it. This one
     * runs next to it and ends after it. 0: there is no such launch. */
    int32_t late;
    struct gpu_output output; /* codes by rows of 16 of kinds before INT4 only */
};

/* By the kind of the cache (enum gpu_kind). NULL or the cause of a failure. */
const char *sm80_launch(const struct gpu_device *device, int32_t kind,
                        const struct sm80_params *params, void *stream);

#ifdef __cplusplus
}
#endif
#endif
