/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill on sm_90a: one call of its kernels as plain numbers. An item is a row tile of a request
 * (a gpu_row_tile) and a KV head; rows are (query, head of the group), whole queries only. */
#ifndef CUDA_FLASH_SM90_PREFILL_H
#define CUDA_FLASH_SM90_PREFILL_H

#include "cuda_flash/tensor_map.h"
#include "gpu/output.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PREFILL_ROWS 128       /* of an item, at most */
#define PREFILL_WIDE_ROWS 192  /* the same where three warp groups compute */
#define PREFILL_STAGES 2       /* tiles of K and of V in shared memory */
#define PREFILL_SLOTS 4        /* items that a CTA knows: one ends, two run, one is copied */
#define PREFILL_AHEAD 3        /* tiles that are to be copied when a CTA takes its next item */
#define PREFILL_SECTIONS 32    /* parts of the schedule whose keys stay in the L2 */
#define PREFILL_COPY_ROWS 128  /* rows of copies are whole multiples of this for each request */
#define PREFILL_MOST_PARTS 144 /* items of a schedule some of which are parts */
#define PREFILL_RAMP_UNIT 256  /* of the first part of a slope in f16, which may be 2^24 */
#define PREFILL_BUCKETS 128    /* lengths that are told apart where the longest item comes first */

/* How TMA brings tiles of K or V: a box of some rows at a time. */
enum prefill_walk_form {
    PREFILL_ROW_BOX,     /* contiguous rows; all columns of 64 dims in one box */
    PREFILL_ROW_COLUMNS, /* contiguous rows; a box for each column: head sizes with a rest */
    PREFILL_PAGE_BOX,    /* rows of one page, in groups of 8, all columns */
    PREFILL_PAGE_COLUMNS /* rows of one page, a box for each column */
};

struct prefill_walk {
    struct tensor_map map;
    int32_t form;
    int32_t box_rows;
    int32_t boxes;     /* of a tile: rows / box_rows x columns that have one each */
    int32_t columns;   /* boxes of the same rows */
    int32_t head_step; /* columns between heads, where a box has all columns */
    int32_t box_bytes;
    int32_t group_bytes;           /* between groups of 8 rows of a tile in shared memory */
    int32_t column_bytes;          /* between its columns of 64 dims */
    int32_t row_step, column_step; /* of boxes in shared memory, bytes */
};

/* What makes a score beside the product and the unit that it counts in. */
enum prefill_terms {
    PREFILL_MULTIPLIED = 1, /* products are multiplied by `into` */
    PREFILL_CAPPED = 2,     /* tanh of that */
    PREFILL_LINEAR = 4,     /* ALiBi in the distance */
    PREFILL_ROOT = 8,       /* ALiBi in its square root */
    PREFILL_TREE = 16,
    PREFILL_SPANS = 32,
    PREFILL_MIXED = 64 /* no loop of its own: each tile goes the general way */
};
#define PREFILL_ANY (-1) /* of a kernel: terms are looked up */

/* What products are multiplied by where keys are copies of narrow ones, without their scales. */
enum prefill_scales {
    PREFILL_UNSCALED,
    PREFILL_BY_HEAD, /* by one number of the head */
    PREFILL_BY_KEY,  /* by one of each key */
    PREFILL_IN_FP8   /* queries and keys are multiplied in e4m3, then as PREFILL_BY_HEAD */
};

/* One item. */
struct prefill_item {
    int32_t tiles; /* of keys; < 0: there are no more items */
    int32_t head;
    int32_t first_query; /* of the request, of the row tile's first row */
    /* Tiles whose keys every row sees, and to which nothing of a tree's belongs. */
    int32_t inner_first, inner_end;
    float scale; /* of a head: products are multiplied by it */
    /* An item that is cut has parts next to each other in the schedule. `part`: one more than this
     * one's place there; 0: it is whole. `parts`: how many there are, of the first; 0 of others. */
    int32_t part, parts;
    struct gpu_row_tile row_tile;
};

struct prefill_header {
    int32_t items, taken;
};

struct prefill_params {
    struct tensor_map q_map;
    struct tensor_map out_map; /* boxes of 16 rows of an item, where boxes_rows */
    struct prefill_walk k, v;
    struct gpu_params p;   /* tile_rows, tile, row_tiles and their starts are of this way */
    int32_t queries;       /* of a row tile */
    int32_t query_bytes;   /* that TMA brings of one */
    int32_t group_inverse; /* 2^16 / group, rounded up: exact for rows of a tile */
    int32_t terms;         /* of enum prefill_terms, by bits */
    /* What a product is multiplied by before a soft cap, what a score's unit is in base 2, and what
     * takes a bias to that unit. */
    float into, unit, of_bias;
    int32_t grouped;      /* 1: K and V are walked as PREFILL_PAGE_BOX */
    int32_t wide_rows;    /* 1: rows of out can be written 16 bytes at a time */
    int32_t boxes_rows;   /* 1: a warp's rows of an item are a box of out_map */
    int32_t size, size_v; /* padded head sizes */
    int64_t section_keys; /* keys of (request, KV head) units in one section, at least */
    struct prefill_header *header;
    struct prefill_item *items; /* in the order in which CTAs take them */
    int32_t part_tiles;         /* of items that are not cut, at most; 0: none is cut */
    char *parts;     /* [PREFILL_MOST_PARTS][PREFILL_ROWS][size_v] in the output's type, by place */
    float *part_lse; /* likewise, without sinks */
    int32_t room;    /* for so many */
    int32_t *key_sum; /* [R + 1] keys of the requests before each */
    int32_t kernel;   /* terms of the kernel: 0, PREFILL_CAPPED, PREFILL_LINEAR, PREFILL_ANY */
    int32_t ctas;     /* 0: one for each multiprocessor */
    /* Keys and values of 8 and 4 bits are copied to 16 bits first: those of some KV heads, request
     * by request in whole tiles, [head][row][size]. */
    int32_t scales;               /* enum prefill_scales */
    int32_t first_head, end_head; /* of this launch; all of them where nothing is copied */
    int32_t copies;               /* 1: rows of a request's copies begin at its key_sum */
    int64_t copied_rows;          /* that there is room for, of a head */
    char *copied[2];              /* keys, values */
    float *key_scale;             /* [head][row], PREFILL_BY_KEY */
    struct gpu_cache narrow[2];   /* what is copied */
    struct gpu_output output;
};

/* Makes the kernels ready on the current device, which runs sm_90a. */
const char *prefill_load(const struct gpu_device *device);
enum prefill_kernel {
    PREFILL_ORDER,
    PREFILL_MERGE, /* the parts of items */
    PREFILL_WIDEN,
    PREFILL_BF16,
    PREFILL_F16,
    PREFILL_WIDE,        /* items of PREFILL_WIDE_ROWS */
    PREFILL_COPIES_BF16, /* over copies of narrow keys and values */
    PREFILL_COPIES_F16,
    PREFILL_KERNELS
};
/* NULL or the cause of a failure. */
const char *prefill_launch(const struct gpu_device *device, enum prefill_kernel kernel,
                           const struct prefill_params *params, void *stream);

#ifdef __cplusplus
}
#endif
#endif
