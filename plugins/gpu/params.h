/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters of the portable GPU kernels, shared by host and device: one call of each kernel,
 * passed by value. */
#ifndef GPU_PARAMS_H
#define GPU_PARAMS_H

#ifdef __OPENCL_CPP_VERSION__ /* OpenCL C++ has no pointers to functions */
#include <attn/layer.h>
#include <attn/tensor.h>
#else
#include <attn/plugin.h>
#include <stdbool.h>
#endif

#include "gpu/kernels/list.h"
#include "gpu/tensors.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GPU_TILE 64          /* keys of a tile of latent rows */
#define WRITE_VECTORS 4      /* independent 16-byte loads of a thread in write kernels */
#define GPU_INVARIANT_CUTS 4 /* parts of an item in batch-invariant plans */

enum gpu_row_form {
    GPU_ROW_NUMBERS = 0, /* elements with one scale for the tensor or head */
    GPU_ROW_SCALED = 1,  /* 8-bit elements with a float32 scale for each row */
    GPU_ROW_CHANNEL = 2, /* int8 elements with a scale for each (head, dim) */
    /* elements of a Hadamard-transformed row; the zero point is in the scale */
    GPU_ROW_INT4 = 3,
    GPU_ROW_NVFP4 = 4,  /* e2m1 with an e4m3 scale for 16 of them and one scale for the tensor */
    GPU_ROW_DS_MLA = 5, /* a latent row of fp8_ds_mla: device/latent.h */
    GPU_ROW_LEVELS = 6, /* TurboQuant's rotated keys: device/turboquant.h */
    GPU_ROW_STEPS = 7,  /* TurboQuant's values */
    GPU_ROW_DS_V4 = 8,  /* a latent row of fp8_ds_v4 */
    GPU_ROW_MXFP4 = 9   /* an indexer's key: e2m1 with a scale in e8m0 for 32 of them */
};

/* K or V of a paged cache, or contiguous rows (then `block` is the row stride). */
struct gpu_cache {
    const char *data;
    int64_t block, slot, head; /* bytes */
    int64_t pack_stride;
    int32_t pack;           /* 0: dims are contiguous */
    int32_t dtype;          /* enum attn_dtype_id of a stored element; 4-bit forms: INT8 */
    int32_t form;           /* enum gpu_row_form */
    int32_t scale_per_head; /* whether `scale` has one number for each KV head */
    const float *scale;     /* NULL: scale_host */
    float scale_host;
    int32_t head_size;
    /* SCALED, INT4: float32; NVFP4, DS_V4, MXFP4: bytes; LEVELS, STEPS: float16 */
    const char *row_scale;
    int64_t row_scale_block, row_scale_slot, row_scale_head;
    const float *channel; /* GPU_ROW_CHANNEL: [Hk, D] */
    const float *signs;   /* GPU_ROW_INT4: [D] of +-1 */
    int32_t swizzled;     /* GPU_ROW_NVFP4: block scales are ordered as V's */
    int32_t bits;         /* GPU_ROW_LEVELS, STEPS: bits of a code */
};

struct gpu_header {
    int32_t tiles, row_tiles, segments;
    int32_t taken; /* segments drawn beyond the first one of each CTA */
};

/* One row tile of a request, with everything that a walk of its keys needs in one line of memory.
 */
struct gpu_row_tile {
    int32_t start, num_tiles; /* tiles: of the first head in the stream; of each head */
    int32_t k0, k1;           /* keys that some row sees */
    int32_t query_start, query_len, key_start, length;
    int32_t first_row, num_rows;
    int32_t causal, request;
    int64_t table; /* offset of the request's row in the block table, in elements */
    int32_t seen;  /* with lists: keys that the token sees */
    int32_t reserved;
};

/* Tiles begin .. end - 1 of the stream. `index` counts segments along the stream; the array is in
 * the order in which CTAs take them. The first tile's item has parts in segments from `first` on,
 * the last tile's item in segments up to `last`. `row_tile`, number `row_tile_index`, is the first
 * tile's. */
struct gpu_segment {
    int32_t begin, end, index, first, last, row_tile_index;
    int32_t next, reserved; /* next: with by_item 2, the share's next piece; -1: none */
    struct gpu_row_tile row_tile;
};

/* A layer and its batch: the rows, and the keys that each of them sees. */
struct gpu_problem {
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
    int32_t
        topk; /* keys of a query's list in a sparse layer's schedule; 0: all keys of its request */
    /* Lists of keys (attn/draft/index_lists.h): `listed` keys of a list at most, 0: there are none;
     * `lists` of each token. Kernels read `units` in place of the block table: a token and list's
     * visible slots in the order of the list, 1 << unit_shift neighbouring ones at a time, the
     * cache's slots counted along; list_lengths [tokens, lists] are their keys. Units of a list
     * that its last key does not fill come last. Each token is a request of the schedule. */
    int32_t listed, lists, unit_shift, num_tokens;
    int64_t unit_stride; /* units of a list */
    const int32_t *units, *list_lengths;
    const int32_t *wanted_rows; /* fast prefill: the rows of out to compute; NULL: all */
    int32_t num_wanted_rows;
};

/* The division of the work among groups; it lies in the workspace. All (request, row tile) x KV
 * heads x key tiles form one stream, which is cut into segments. An item is a (row tile, head); a
 * part is the result of one segment for one item. */
struct gpu_schedule {
    int32_t tile;      /* keys of a tile */
    int32_t tile_rows; /* rows (query, head of the group) of one item */
    /* only requests with least_rows .. most_rows rows are scheduled; most_rows 0: all */
    int32_t least_rows, most_rows;
    /* 0: a segment may span several items; 1: it belongs to one item; 2: it belongs to one item and
     * is a piece of a group's share: segment i begins share i, and the others are linked. One KV
     * head. */
    int32_t by_item;
    /* by_item 2: row tiles of a query. As many neighbouring groups walk their keys at the same
     * time, so that one of them reads memory and the others the L2. */
    int32_t concurrent;
    /* 1: cuts of an item depend only on its own length; 2: items are not cut, so that a row's bits
     * depend on its keys alone */
    int32_t invariant;
    int32_t ctas;         /* groups of the attention kernel's grid */
    int32_t max_segments; /* capacity of `segments` */
    int32_t least_share;  /* by_item 2: tiles of a share, at least */
    struct gpu_header *header;
    struct gpu_row_tile *row_tiles;
    struct gpu_segment *segments;
    int32_t *row_tile_start; /* [R + 1] first row tile of each request */
    int32_t *key_tile_start; /* [row_tiles + 1] first key tile of each row tile */
    int32_t *arrived;        /* [row_tiles * Hk] finished parts of each item */
    float *parts;            /* [2 * max_segments][tile_rows * (padded D + 2)] */
};

struct gpu_plan_params {
    struct gpu_problem problem;
    struct gpu_schedule schedule;
};

struct gpu_params {
    struct gpu_problem problem;
    struct gpu_schedule schedule; /* not used by the plain kernels */
    struct gpu_cache k, v;
    struct gpu_tensor q, out;
    const float *q_scale; /* quantized queries, per tensor or per KV head; NULL: q_scale_host */
    float q_scale_host;
    int32_t q_scale_per_head;
    const float *p_scale; /* quantized probabilities; NULL: p_scale_host */
    float p_scale_host;
    int32_t p_dtype; /* enum attn_dtype_id to which probabilities are rounded, or -1 */
    struct gpu_lse lse;
};

struct gpu_write_params {
    struct gpu_tensor from[2]; /* k, v */
    struct gpu_cache to[2];
    const int64_t *slots;
    int64_t num_slots;
    int32_t num_heads, block_size;
    int32_t sides; /* write_rows only: 1: k alone */
    /* rope_write_kv only: q and k are rotated in place first */
    struct gpu_tensor q, cos_sin;
    const int64_t *positions;
    const void *norm[2]; /* weights of q and k; NULL: none */
    int32_t norm_dtype[2];
    int32_t num_q_heads, rotary_dim, neox;
    float norm_eps;
    int32_t vectors[2]; /* 16-byte vectors written for a head's row: write_copy, write_fp8 */
};

/* The lists of a batch. */
struct gpu_list_entries {
    const int32_t *entries, *lengths; /* lengths: NULL: all lists are max_entries long */
    int64_t entry_token, entry_list, length_token; /* elements */
    int32_t max_entries, granularity;
};

/* Makes units and lengths of the problem, whose terms are those of the layer. */
struct gpu_list_params {
    struct gpu_problem problem;
    struct gpu_list_entries from;
    int32_t *units, *list_lengths;
};

/* Pools the rows that tokens finish. `states` are float32: of each token its values and then its
 * gates, in 1 + overlaps heads each. */
struct gpu_compressor_params {
    struct gpu_cache states;
    struct gpu_tensor out, bias, cos_sin; /* bias: data NULL: none */
    const void *norm;                     /* NULL: none */
    const int32_t *query_start, *seq_lens, *block_table, *block_table_row;
    int64_t block_table_stride;
    int32_t num_reqs, num_tokens, block_size;
    int32_t tokens_per_row, overlaps, rotary_dim, neox, norm_dtype;
    float norm_eps;
};

struct gpu_table_params {
    const int32_t *block_table, *block_table_row;
    const int32_t *page_indices, *page_start; /* NULL: the block table */
    const int32_t *seq_lens, *last_page_len;
    int32_t *out, *out_seq_lens; /* the latter may be NULL */
    int64_t block_table_stride;
    int32_t num_reqs, num_columns, blocks_per_entry, tokens_per_entry;
};

#define GPU_COPY_RUNS 16

/* Rows `from_stride` bytes apart, copied to places `to_stride` bytes apart. */
struct gpu_copy_run {
    const char *from;
    char *to;
    int64_t from_stride, to_stride, bytes, rows; /* bytes of a row */
};

/* No run reads what another run writes. */
struct gpu_copy_params {
    struct gpu_copy_run runs[GPU_COPY_RUNS];
    int32_t count;
};

struct gpu_merge_params {
    struct gpu_tensor prefix, suffix, out;
    struct gpu_lse prefix_lse, suffix_lse, lse;
    int64_t first_row, num_rows, num_rows_with_prefix;
    const float *out_scale; /* fp8 output; NULL: none */
    int32_t heads, dims;
};

/* Rotates the last rotary_dim dims of rows query_start[0] .. query_start[num_reqs] - 1 back; `last`
 * begins with these dims. */
struct gpu_rotate_params {
    struct gpu_tensor last, cos_sin;
    const int64_t *positions;
    const int32_t *query_start;
    int32_t num_reqs, heads, rotary_dim, neox;
};

struct gpu_quantize_params {
    struct gpu_tensor x, out;
    const float *scale;
    void *block_scales;              /* float, or e4m3 bytes of nvfp4 */
    int64_t scale_row, scale_column; /* elements between tokens and between groups */
    int64_t num_rows;
    int32_t heads, dims, form, per_head, pow2, group;
    const int32_t
        *query_start; /* only rows query_start[0] .. query_start[num_reqs] - 1; NULL: all */
    int32_t num_reqs;
};

struct gpu_amax_params {
    struct gpu_tensor x;
    float *out;
    int64_t num_rows;
    int32_t heads, dims, per_head, accumulate;
    float *history, *scale; /* amax_keep only */
    int32_t history_len;
};

/* Converts 8-bit rows of the batch's queries to 16 bits, exactly and without their scale. */
struct gpu_widen_params {
    struct gpu_tensor from, to;
    const int32_t *query_start;
    int32_t num_reqs, num_rows, heads, dims;
};

struct gpu_gather_params {
    struct gpu_cache from;
    struct gpu_tensor to;
    const int32_t *block_table, *block_table_row, *first_key, *out_start;
    int64_t block_table_stride;
    int32_t num_reqs, num_heads, block_size;
};

#ifndef __OPENCL_CPP_VERSION__
/* Each function returns NULL or the cause of its failure, and leaves the caller's context current.
 */
struct gpu_device {
    void *context, *push, *pop;      /* CUcontext, cuCtxPushCurrent, cuCtxPopCurrent */
    int32_t id, num_sms, major;      /* major: of the compute capability */
    int32_t lanes;                   /* lanes of a warp: GPU_LANES of its kernels */
    int32_t smem_of_sm, smem_of_cta; /* bytes */
    void *encode_map;                /* cuTensorMapEncodeTiled; NULL: no TMA */
    /* The engine's own, from attn_create_args; NULL: the plugin's. Set before gpu_device_open. */
    void *native_device, *native_context;
};

const char *gpu_device_open(struct gpu_device *device, int32_t id);
void gpu_device_close(struct gpu_device *device);
/* Launches a kernel of gpu/kernels with `groups` groups; params are those that list.h names. */
const char *gpu_device_launch(const struct gpu_device *device, enum gpu_kernel kernel,
                              int64_t groups, const void *params, void *stream);
const char *gpu_device_copy(const struct gpu_device *device, void *to, const void *from,
                            size_t bytes, int32_t kind, void *stream);
const char *gpu_device_fill(const struct gpu_device *device, void *to, int32_t value,
                            size_t row_bytes, size_t stride, int64_t rows, void *stream);

/* For engines without memory and streams of their own. If memory is exhausted, *memory is NULL and
 * `room` gets the free and total bytes; other failures leave `room` unchanged. */
const char *gpu_device_allocate(const struct gpu_device *device, int32_t kind, size_t bytes,
                                void **memory, size_t room[2]);
const char *gpu_device_free(const struct gpu_device *device, int32_t kind, void *memory);
const char *gpu_device_of_memory(const struct gpu_device *device, const void *address,
                                 struct attn_device *owner);
const char *gpu_device_stream_create(const struct gpu_device *device, void **stream);
const char *gpu_device_stream_destroy(const struct gpu_device *device, void *stream);
const char *gpu_device_synchronize(const struct gpu_device *device, void *stream); /* NULL: all */
const char *gpu_device_event_create(const struct gpu_device *device, void **event);
const char *gpu_device_event_record(const struct gpu_device *device, void *event, void *stream);
/* Waits for `event`. */
const char *gpu_device_event_elapsed(const struct gpu_device *device, void *since, void *event,
                                     int64_t *nanoseconds);
const char *gpu_device_event_destroy(const struct gpu_device *device, void *event);
const char *gpu_device_capture_begin(const struct gpu_device *device, void *stream);
const char *gpu_device_capture_end(const struct gpu_device *device, void *stream, void **graph);
const char *gpu_device_graph_launch(const struct gpu_device *device, void *graph, void *stream);
const char *gpu_device_graph_destroy(const struct gpu_device *device, void *graph);
#endif

#ifdef __cplusplus
}
#endif
#endif
