/* SPDX-License-Identifier: Apache-2.0 */
/* The attend of sm_80 and later: parameters of its kernels, and its launch. */
#ifndef CUDA_FLASH_SM80_ATTEND_H
#define CUDA_FLASH_SM80_ATTEND_H

#include "cuda_flash/tensor_map.h"
#include "gpu/output.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SM80_MAX_SIZE 512       /* the largest head size */
#define SM80_ROWS 16            /* rows (query, head of the group) of an item */
#define SM80_TILE 64            /* keys of a tile */
#define SM80_NARROW_TILE 128    /* keys of a tile of 8 bits up to 128 dims, and of 4 bits */
#define SM80_LARGE_HEAD_TILE 32 /* keys of a tile of 16-bit heads over 256 */
#define SM80_MAX_STAGES 6       /* stages of a CTA, at most */
/* Bytes of shared memory besides queries and stages: always; for the query terms of 8 and 4-bit
 * kinds; for two tiles' scores of heads over 256. */
#define SM80_FIXED_SMEM 1024
#define SM80_TERMS_SMEM 1024
/* KIND_LEVELS with 128 dims: the table of levels (sm80_turboquant.cuh), `bytes` or more after the
 * beginning of shared memory, before which the system keeps 1024, at a multiple of its size. */
#define SM80_LEVELS_TABLE 16384
#define SM80_LEVELS_AT(bytes)                                                                      \
    (((bytes) + 1024 + SM80_LEVELS_TABLE - 1) / SM80_LEVELS_TABLE * SM80_LEVELS_TABLE - 1024)
#define SM80_SCORES_SMEM(tile) (2 * 16 * ((tile) + 8) * 4)
/* Bytes that a key and a value of KIND_LEVELS and KIND_K8V4 need in a stage besides their codes:
 * norms, steps, and the neighbouring bytes that copies in whole pieces include. */
#define SM80_LEVELS_ROOM 32
#define SM80_K8V4_ROOM 16
#define SM80_LIST_UNITS 512 /* units of a list that an attend makes itself */
#define SM80_SHORT_LIST 128 /* units that an attend makes whatever the batch */
#define SM80_LISTS_SMEM (2 * SM80_LIST_UNITS * 4) /* two producer warps */
#define SM80_ON_THE_WAY (128 * 1024) /* bytes of 16-bit tiles in flight on a multiprocessor */

/* The operands of Q K^T. SM80_NO_SWAP: 16 rows of queries are the left operand. SM80_SWAP8: keys
 * are the left operand and up to 8 rows the right (8 and 4-bit kinds, float32). SM80_SWAP4: the
 * same with up to 4 rows (4-bit kinds of up to 128 dims). */
enum sm80_swap { SM80_NO_SWAP, SM80_SWAP8, SM80_SWAP4 };

/* The layout of rows of 4-bit codes and their scales in a stage, in bytes. */
struct sm80_plane {
    int32_t at, pitch, scale_at, scale_pitch;
};

struct sm80_params {
    struct tensor_map k_map, v_map; /* (dim, slot, head, block), if `mapped` */
    /* 1: tiles come as TMA boxes of box_rows rows of a block, 4-bit codes as spans of memory; 0:
     * row by row */
    int32_t mapped, box_rows;
    int32_t scale_spans; /* 1: scales in planes of their own come as spans as well */
    int32_t together;    /* 1: a slot's value follows its key and is copied with it */
    /* TurboQuant. 1: rows come as spans; 16, 8, 4: they come in aligned pieces of so many bytes */
    int32_t unit;
    struct sm80_plane planes[2]; /* K and V of 4-bit kinds */
    int32_t swap;                /* enum sm80_swap */
    int32_t stages;              /* stages of a CTA */
    int32_t overlaps;            /* 1: the launch may begin before the previous one has ended */
    struct gpu_params p;
    /* CTAs beyond p.schedule.ctas that start when a concurrent prefill of the same batch ends,
     * which was launched before; 0: no such prefill. */
    int32_t late;
    /* quantized outputs need a kind before KIND_INT4 */
    struct gpu_output output;
    /* Lists without units in memory: each producer warp makes them, at most SM80_LIST_UNITS, after
     * the stages. entries NULL: there are none. */
    struct gpu_list_entries lists;
};

/* Loads the kernels that a layer may launch, over its cache and over keys of its own type. Returns
 * NULL or the cause of a failure. */
const char *sm80_load(const struct gpu_device *device, const struct attn_layer_desc *layer);
/* Launches the kernel for a kind (enum gpu_kind); with params NULL, only loads it. Returns NULL or
 * the cause of a failure. */
const char *sm80_launch(const struct gpu_device *device, int32_t kind,
                        const struct sm80_params *params, void *stream);

#ifdef __cplusplus
}
#endif
#endif
