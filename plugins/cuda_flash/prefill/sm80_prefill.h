/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill of sm_80 and later: shapes of its kernels, and their launch. */
#ifndef CUDA_FLASH_SM80_PREFILL_H
#define CUDA_FLASH_SM80_PREFILL_H

#include "gpu/output.h"
#include "gpu/params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows (query, head of the group) of an item; FEW: over keys of 16 bits with up to 128 dims, if
 * items are not cut and all rows of the batch fill no more than there are multiprocessors; not of
 * batch-invariant layers. */
#define SM80_PREFILL_ROWS 128
#define SM80_PREFILL_FEW_ROWS 64
#define SM80_PREFILL_FIXED 512  /* bytes of shared memory besides queries and tiles */
#define SM80_PREFILL_STRETCH 16 /* keys that are copied with a constant stride */

/* The tiles of a CTA. PAIRS: two tiles of 64 keys (of 128 keys with 64 dims), each with K and V;
 * NARROW_PAIRS: half as many keys; NARROW: one tile of 32 keys, whose K and V are two stages. E4M3
 * and E5M2: a tile of 64 keys, and the codes of the next one. */
enum sm80_prefill_tiles {
    SM80_PREFILL_PAIRS,
    SM80_PREFILL_NARROW_PAIRS,
    SM80_PREFILL_NARROW,
    SM80_PREFILL_E4M3,
    SM80_PREFILL_E5M2
};

#define SM80_PREFILL_KEYS(size, tiles)                                                             \
    (((tiles) == SM80_PREFILL_NARROW_PAIRS || (tiles) == SM80_PREFILL_NARROW ? 32 : 64)            \
     << ((size) == 64 && (tiles) < SM80_PREFILL_E4M3))
/* The distance, in rows of a stretch, between those that a lane copies. */
#define SM80_PREFILL_STEP(size, tiles)                                                             \
    (((tiles) >= SM80_PREFILL_E4M3 ? 512 : 256) / (size) /                                         \
     ((size) == 64 && (tiles) == SM80_PREFILL_PAIRS ? 2 : 1))
/* Bytes of shared memory for heads of `size` dims. */
#define SM80_PREFILL_SMEM(size, tiles, rows)                                                       \
    (SM80_PREFILL_FIXED + (rows) * (size)*2 +                                                      \
     ((tiles) == SM80_PREFILL_NARROW ? 2                                                           \
      : (tiles) >= SM80_PREFILL_E4M3 ? 3                                                           \
                                     : 4) *                                                        \
         SM80_PREFILL_KEYS(size, tiles) * (size)*2)

struct sm80_prefill_strides {
    int32_t page, slot; /* in 16 bytes */
    int32_t step;       /* bytes between the rows that a lane copies, if there are stretches */
};

struct sm80_prefill_params {
    struct gpu_params p;      /* schedule.tile_rows: one of both numbers of rows */
    struct gpu_output output; /* plain */
    int32_t tiles;            /* enum sm80_prefill_tiles */
    int32_t ctas;             /* CTAs of the grid; the schedule counts on fewer */
    int32_t has_stretches;    /* 1: 16 keys, the first a multiple of 16, have a constant stride */
    /* keys of a page (INT32_MAX: all lie next to each other), and how many pages and further keys a
     * tile has */
    int32_t page_keys, tile_pages, tile_slots;
    struct sm80_prefill_strides strides[2]; /* K, V */
    int32_t cuts;     /* 1: items may have parts, which a second launch merges */
    int32_t overlaps; /* 1: the device may begin a launch before the previous one has ended */
};

/* Launches the kernel for a kind (KIND_BF16 to KIND_E5M2). With params NULL, only loads the
 * kernels. Returns NULL or the cause of a failure. */
const char *sm80_prefill_launch(const struct gpu_device *device, int32_t kind,
                                const struct sm80_prefill_params *params, void *stream);

#ifdef __cplusplus
}
#endif
#endif
