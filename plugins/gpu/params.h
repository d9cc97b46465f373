/* SPDX-License-Identifier: Apache-2.0 */
/* What the host side and the kernels share: one call of each kernel as plain numbers, by value. */
#ifndef GPU_PARAMS_H
#define GPU_PARAMS_H

#include <attn/plugin.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLASH_TILE 64                 /* keys of one step of a CTA */
#define FLASH_NARROW_TILE 128         /* where one row tile has all rows, and keys are 8-bit */
#define FLASH_MAX_STAGES 6            /* tiles of a CTA in shared memory */
#define FLASH_FIXED_SMEM 1024         /* of an attend CTA beside queries and stages */
#define FLASH_ON_THE_WAY (128 * 1024) /* bytes of 16-bit tiles of a multiprocessor */
#define FLASH_INVARIANT_CUTS 4        /* parts of an item in batch-invariant plans */

enum flash_row_form {
    FLASH_ROW_NUMBERS = 0, /* elements, times one scale per tensor or head */
    FLASH_ROW_SCALED = 1,  /* 8-bit elements, times a float32 of their own */
    FLASH_ROW_CHANNEL = 2, /* int8 elements, times a scale per (head, dim) */
    FLASH_ROW_INT4 = 3,    /* of the row turned by a Hadamard matrix; the zero point in the scale */
    FLASH_ROW_NVFP4 = 4    /* e2m1, an e4m3 scale for 16 of them, one scale of the tensor */
};

/* K or V of a paged cache, or contiguous rows (then `block` is the row stride). */
struct flash_cache {
    const char *data;
    int64_t block, slot, head; /* bytes */
    int64_t pack_stride;
    int32_t pack;           /* 0: dims are contiguous */
    int32_t dtype;          /* enum attn_dtype_name of a stored element; 4-bit forms: INT8 */
    int32_t form;           /* enum flash_row_form */
    int32_t scale_per_head; /* of `scale` */
    const float *scale;     /* NULL: scale_host */
    float scale_host;
    int32_t head_size;
    const char *row_scale; /* FLASH_ROW_SCALED, INT4: float32; NVFP4: D / 16 bytes */
    int64_t row_scale_block, row_scale_slot, row_scale_head;
    const float *channel; /* FLASH_ROW_CHANNEL: [Hk, D] */
    const float *signs;   /* FLASH_ROW_INT4: [D] of +-1 */
    int32_t swizzled;     /* FLASH_ROW_NVFP4: block scales lie as V's do */
};

struct flash_rows {
    char *data;
    int64_t row, head; /* bytes */
    int32_t dtype;     /* enum attn_dtype_name */
};

struct flash_lse {
    float *data;
    int64_t head, row; /* elements */
};

struct flash_header {
    int32_t tiles, pairs, segments, taken; /* taken: segments beyond the first one of each CTA */
};

/* One row tile of a request: everything that a walk of its keys needs, in one line of memory. */
struct flash_pair {
    int32_t start, num_tiles; /* tiles: of the first head in the stream; of each head */
    int32_t k0, k1;           /* keys that some row sees */
    int32_t query_start, query_len, key_start, length;
    int32_t first_row, num_rows;
    int32_t causal, request;
    int64_t table; /* elements before the request's row of the block table */
    int32_t reserved[2];
};

/* Tiles begin .. end - 1 of the stream. `index` counts segments along the stream; they stand in the
 * order in which CTAs take them. The item of the first tile has parts in segments from `first` on,
 * that of the last tile up to `last`. `pair`, number `pair_index`, is that of the first tile. */
struct flash_segment {
    int32_t begin, end, index, first, last, pair_index, reserved[2];
    struct flash_pair pair;
};

/* A TMA map is a parameter of the kernel and 64-byte aligned there. */
#ifdef __cplusplus
#define FLASH_ALIGN64 alignas(64)
#else
#define FLASH_ALIGN64 _Alignas(64)
#endif
struct flash_map {
    FLASH_ALIGN64 uint64_t words[16]; /* CUtensorMap */
};

struct flash_params {
    struct flash_map k_map, v_map; /* (dim, slot, head, block), if `mapped` */
    int32_t mapped, box_rows;
    int32_t tile; /* keys */
    int32_t num_reqs, num_q_heads, num_kv_heads, group, head_size, head_size_v;
    int32_t causal, window_left, window_right, chunk_size, chunk_lookback;
    int32_t alibi, prefix_lm_window, tree_mask, paged, block_size;
    float scale, soft_cap;
    const int32_t *query_start, *key_start, *seq_lens, *block_table, *block_table_row;
    int64_t block_table_stride;
    const uint8_t *causal_per_request;
    const int32_t *spans, *span_start; /* NULL: none */
    const void *tree;                  /* NULL: none */
    int64_t tree_request, tree_row;
    const float *sinks, *slopes; /* NULL: none */
    struct flash_cache k, v;
    struct flash_rows q, out;
    const float *q_scale; /* quantized queries, per tensor or per KV head; NULL: q_scale_host */
    float q_scale_host;
    int32_t q_scale_per_head;
    const float *p_scale; /* quantized probabilities; NULL: p_scale_host */
    float p_scale_host;
    int32_t p_dtype;            /* enum attn_dtype_name that they are rounded to, or -1 */
    const int32_t *wanted_rows; /* fast prefill: the rows of out to compute; NULL: all */
    int32_t num_wanted_rows;
    struct flash_lse lse;
    /* The schedule, in the workspace: all (request, row tile) pairs x KV heads x key tiles are one
     * stream, cut into segments; a part is what one segment knows of one item, a (pair, head). */
    int32_t row_tile;     /* rows (query, head of the group) of one item: 16 or 64 */
    int32_t by_item;      /* 1: a segment is of one item; 0: of the stream, over several */
    int32_t invariant;    /* 1: items are cut by their own length alone */
    int32_t ctas;         /* of the attend's grid */
    int32_t overlaps;     /* 1: the launch may begin before the one before it has ended */
    int32_t stages;       /* of a CTA */
    int32_t max_segments; /* that `segments` has room for */
    struct flash_header *header;
    struct flash_pair *pairs;
    struct flash_segment *segments;
    int32_t *tile_start; /* [R + 1] first row tile of each request */
    int32_t *pair_start; /* [pairs + 1] first key tile of each pair */
    int32_t *arrived;    /* [pairs * Hk] parts of an item that are done */
    float *parts;        /* [2 * max_segments][row_tile * (padded D + 2)] */
};

struct flash_write_params {
    struct flash_rows from[2]; /* k, v */
    struct flash_cache to[2];
    const int64_t *slots;
    int64_t num_slots;
    int32_t num_heads, block_size;
    /* rope_write_kv only: q and k are turned in place first */
    struct flash_rows q, cos_sin;
    const int64_t *positions;
    const void *norm[2]; /* weights of q and k; NULL: none */
    int32_t norm_dtype[2];
    int32_t num_q_heads, rotary_dim, neox;
    float norm_eps;
};

struct flash_merge_params {
    struct flash_rows prefix, suffix, out;
    struct flash_lse prefix_lse, suffix_lse, lse;
    int64_t first_row, num_rows, num_rows_with_prefix;
    const float *out_scale; /* fp8 output; NULL: none */
    int32_t heads, dims;
};

struct flash_quantize_params {
    struct flash_rows x, out;
    const float *scale;
    void *block_scales;              /* float, or e4m3 bytes of nvfp4 */
    int64_t scale_row, scale_column; /* elements between tokens and between groups */
    int64_t num_rows;
    int32_t heads, dims, form, per_head, pow2, group;
};

struct flash_amax_params {
    struct flash_rows x;
    float *out;
    int64_t num_rows;
    int32_t heads, dims, per_head, accumulate;
};

/* 8-bit rows of the batch's queries as 16-bit ones, which hold them exactly; without their scale.
 */
struct flash_widen_params {
    struct flash_rows from, to;
    const int32_t *query_start;
    int32_t num_reqs, num_rows, heads, dims;
};

struct flash_gather_params {
    struct flash_cache from;
    struct flash_rows to;
    const int32_t *block_table, *block_table_row, *first_key, *out_start;
    int64_t block_table_stride;
    int32_t num_reqs, num_heads, block_size;
};

enum flash_kernel {
    FLASH_PLAN,
    FLASH_ATTEND_BF16,
    FLASH_ATTEND_F16,
    FLASH_ATTEND_E4M3,
    FLASH_ATTEND_E5M2,
    FLASH_ATTEND_INT8,
    FLASH_ATTEND_PLAIN,
    FLASH_WRITE,
    FLASH_ROPE_WRITE,
    FLASH_MERGE,
    FLASH_QUANTIZE,
    FLASH_AMAX,
    FLASH_GATHER,
    FLASH_WIDEN,
    FLASH_KERNEL_COUNT
};

/* Every call answers NULL or the cause of its failure, and leaves the caller's context current. */
struct flash_device {
    void *context, *push, *pop;      /* CUcontext, cuCtxPushCurrent, cuCtxPopCurrent */
    int32_t id, num_sms, major;      /* major: of the compute capability */
    int32_t smem_of_sm, smem_of_cta; /* bytes */
    void *encode_map;                /* cuTensorMapEncodeTiled; NULL: no TMA */
};

const char *flash_device_open(struct flash_device *device, int32_t id);
void flash_device_close(struct flash_device *device);
/* A map of `rows` slots of `blocks` blocks in boxes of box_rows, one row of at most 128 bytes each.
 * False: TMA cannot walk it. */
bool flash_encode_map(const struct flash_device *device, const struct flash_cache *cache,
                      int32_t heads, int64_t rows, int64_t blocks, int32_t box_rows,
                      int32_t padded_size, struct flash_map *map);
/* params: the kernel's flash_*_params */
const char *flash_launch(const struct flash_device *device, enum flash_kernel kernel,
                         const void *params, void *stream);
const char *flash_copy(const struct flash_device *device, void *to, const void *from, size_t bytes,
                       int32_t kind, void *stream);
const char *flash_fill(const struct flash_device *device, void *to, int32_t value, size_t row_bytes,
                       size_t stride, int64_t rows, void *stream);

#ifdef __cplusplus
}
#endif
#endif
