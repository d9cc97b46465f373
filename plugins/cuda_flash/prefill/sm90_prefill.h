/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters and launches of prefill on sm_90a. An item is a row tile of a request
 * (gpu_row_tile) and a KV head. Rows are (query, head of the group), whole queries only. */
#ifndef CUDA_FLASH_SM90_PREFILL_H
#define CUDA_FLASH_SM90_PREFILL_H

#include "cuda_flash/tensor_map.h"
#include "gpu/output.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PREFILL_ROWS 128        /* rows of an item, at most */
#define PREFILL_HEAD64_ROWS 192 /* with three consumer warp groups */
#define PREFILL_STAGES 2        /* stages of K and of V in shared memory */
/* items in flight in a CTA: one in its epilogue, two computed, one copied */
#define PREFILL_SLOTS 4
#define PREFILL_AHEAD 3        /* tiles still to copy when a CTA draws its next item */
#define PREFILL_SECTIONS 32    /* sections of the schedule; the keys of one stay in the L2 */
#define PREFILL_COPY_ROWS 128  /* copies of a request are padded to a multiple of this */
#define PREFILL_MOST_PARTS 144 /* items of a schedule with cut items */
#define PREFILL_RAMP_UNIT 256  /* f16: the unit of a slope's first part, since slopes reach 2^24 */
#define PREFILL_BUCKETS 128    /* buckets of lengths in a section */

/* How TMA copies tiles of K or V. */
enum prefill_walk_form {
    PREFILL_ROW_BOX,     /* contiguous rows, all columns of 64 dims in one box */
    PREFILL_ROW_COLUMNS, /* contiguous rows, a box for each column: padded head sizes */
    PREFILL_PAGE_BOX,    /* rows of one page in groups of 8, all columns in one box */
    PREFILL_PAGE_COLUMNS /* rows of one page, a box for each column */
};

struct prefill_walk {
    struct tensor_map map;
    int32_t form;
    int32_t box_rows;
    int32_t boxes;     /* boxes of a tile: rows / box_rows x columns */
    int32_t columns;   /* boxes of the same rows */
    int32_t head_step; /* columns from one head to the next, if a box has all columns */
    int32_t box_bytes;
    int32_t group_bytes;           /* between groups of 8 rows of a tile in shared memory */
    int32_t column_bytes;          /* between its columns of 64 dims */
    int32_t row_step, column_step; /* between boxes in shared memory, bytes */
};

/* The terms of a score besides the scaled product. */
enum prefill_terms {
    PREFILL_MULTIPLIED = 1, /* the product is multiplied by `pre_scale` first */
    PREFILL_CAPPED = 2,     /* tanh of the multiplied product */
    PREFILL_LINEAR = 4,     /* ALiBi, linear in the distance */
    PREFILL_ROOT = 8,       /* ALiBi, in the distance's square root */
    PREFILL_TREE = 16,
    PREFILL_SPANS = 32,
    PREFILL_GENERAL = 64 /* no inner loop: all tiles take the general path */
};
#define PREFILL_ANY (-1) /* a kernel that tests for terms at run time */

/* The scales of copied keys. */
enum prefill_scales {
    PREFILL_UNSCALED,
    PREFILL_BY_HEAD, /* one scale for the head */
    PREFILL_BY_KEY,  /* one scale for each key */
    PREFILL_IN_FP8   /* Q K^T in e4m3; scales as PREFILL_BY_HEAD */
};

struct prefill_item {
    int32_t tiles; /* tiles of keys; < 0 after the last item */
    int32_t head;
    /* the query of the row tile's first row, counted from the request's first */
    int32_t first_query;
    /* The tiles that need no mask. */
    int32_t inner_first, inner_end;
    float scale; /* factor of Q K^T, for PREFILL_BY_HEAD */
    /* The first key that the rows see by their chunk; -1: each row has its own. */
    int32_t chunk_first;
    /* The parts of a cut item are consecutive in the schedule. `part` is 0 for a whole item, else
     * one more than the part's index in the schedule. `parts` has their number in its lower half
     * and the part's, from 0 on, in its upper half. Kernels for heads over 256 cut no items; there
     * `part` is the half of the values. */
    int32_t part, parts;
    struct gpu_row_tile row_tile;
};

struct prefill_header {
    int32_t items, taken;
};

struct prefill_params {
    struct tensor_map q_map;
    struct tensor_map out_map; /* boxes of 16 rows of an item, if boxes_rows */
    struct prefill_walk k, v;
    /* its schedule has prefill's own tile_rows, tile, row_tiles and starts */
    struct gpu_params p;
    int32_t queries;       /* queries of a row tile */
    int32_t query_bytes;   /* bytes of a box of queries, a row tile's or a warp group's */
    int32_t group_inverse; /* 2^16 / group, rounded up: exact for the rows of a tile */
    int32_t terms;         /* bits of enum prefill_terms */
    /* The factor of a product before a soft cap, the factor of a score in base 2, and the factor
     * that takes a bias to the unit of scores. */
    float pre_scale, scale_log2, bias_scale;
    int32_t grouped;      /* 1: K and V come as PREFILL_PAGE_BOX */
    int32_t wide_rows;    /* 1: rows of out can be written 16 bytes at a time */
    int32_t boxes_rows;   /* 1: a warp's rows of an item are a box of out_map */
    int32_t size, size_v; /* padded head sizes */
    int64_t section_keys; /* keys of a section over all KV heads, at least */
    struct prefill_header *header;
    struct prefill_item *items; /* in the order in which CTAs take them */
    int32_t part_tiles;         /* tiles of a part, at most; 0: no item is cut */
    char *parts;      /* [PREFILL_MOST_PARTS][PREFILL_ROWS][size_v] in the output's type */
    float *part_lse;  /* [PREFILL_MOST_PARTS][PREFILL_ROWS], without sinks */
    int32_t room;     /* capacity of `items` */
    int32_t *key_sum; /* [R + 1] prefix sums of the requests' keys */
    int32_t kernel;   /* terms of the kernel: 0, PREFILL_CAPPED, PREFILL_LINEAR, PREFILL_ANY */
    int32_t ctas;     /* 0: one for each multiprocessor */
    /* Keys and values of 8 and 4 bits are first copied to 16 bits: some KV heads at a time, request
     * by request in whole tiles, [head][row][size]. */
    int32_t scales;               /* enum prefill_scales */
    int32_t first_head, end_head; /* heads of this launch; all if nothing is copied */
    int32_t copies;               /* 1: a request's copies begin at row key_sum[request] */
    int64_t copied_rows;          /* rows of a head that fit */
    char *copied[2];              /* keys, values */
    float *key_scale;             /* [head][row], PREFILL_BY_KEY */
    struct gpu_cache narrow[2];   /* the caches to copy */
    struct gpu_output output;
};

enum prefill_kernel {
    PREFILL_PLAN,
    PREFILL_MERGE, /* parts of cut items */
    PREFILL_WIDEN,
    PREFILL_BF16,
    PREFILL_F16,
    PREFILL_HEAD64,      /* items of PREFILL_HEAD64_ROWS rows */
    PREFILL_COPIES_BF16, /* over copies of narrow keys and values */
    PREFILL_COPIES_F16,
    PREFILL_EXACT_BF16, /* the bits of a row do not depend on the rows that share its item */
    PREFILL_EXACT_F16,
    PREFILL_KERNELS
};
/* Returns NULL or the cause of a failure. */
const char *prefill_launch(const struct gpu_device *device, enum prefill_kernel kernel,
                           const struct prefill_params *params, void *stream);
/* Loads kernels (1 << enum prefill_kernel) of a padded head size. */
const char *prefill_load(const struct gpu_device *device, uint32_t kernels, int32_t size);

#ifdef __cplusplus
}
#endif
#endif
