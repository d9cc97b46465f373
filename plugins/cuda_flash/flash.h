/* SPDX-License-Identifier: Apache-2.0 */
/* What the host side and the kernels share: one attend as plain numbers, passed by value. */
#ifndef CUDA_FLASH_H
#define CUDA_FLASH_H

#include <attn/plugin.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FLASH_TILE 64 /* keys of one step of a CTA: 16 for each of its 4 warps to load */

struct flash_cache {
    const char *data;
    int64_t block, slot, head; /* bytes */
    int64_t pack_stride;       /* plain kernel only */
    int32_t pack;              /* plain kernel only; 0: dims are contiguous */
    const float *scale;        /* NULL: scale_host */
    float scale_host;
    int32_t scale_per_head;
};

struct flash_rows {
    char *data;
    int64_t row, head; /* bytes */
    int32_t dtype;     /* enum attn_dtype_name */
};

struct flash_params {
    int32_t num_reqs, num_q_heads, num_kv_heads, group, head_size, head_size_v;
    int32_t causal, window_left, window_right, chunk_size, chunk_lookback;
    int32_t alibi, prefix_lm_window, tree_mask, paged, block_size, kv_dtype;
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
    float *lse;
    int64_t lse_head, lse_row; /* elements */
    /* the schedule, in the workspace */
    int32_t row_tile;     /* rows (query, head of the group) of one item: 16 or 64 */
    int32_t *header;      /* [0] tiles of all items, [1] pairs */
    int32_t *tile_start;  /* [R + 1] first row tile of each request */
    int32_t *pair_start;  /* [pairs + 1] first key tile of each (request, row tile) */
    int32_t *pair_req;    /* [pairs] */
    int32_t *arrived;     /* [pairs * Hk] parts of an item that are done */
    float *parts;         /* [2 * CTAs][row_tile * (padded D + 2)] */
};

/* Kernels and the memory of a device; every call answers NULL or the cause of its failure. */
typedef struct flash_device flash_device;
const char *flash_device_open(struct flash_device *device, int32_t id);
void flash_device_close(struct flash_device *device);
const char *flash_plan(struct flash_device *device, const struct flash_params *p, void *stream);
const char *flash_attend(struct flash_device *device, const struct flash_params *p, void *stream);
const char *flash_attend_plain(struct flash_device *device, const struct flash_params *p,
                               void *stream);
const char *flash_write(struct flash_device *device, const struct attn_write_kv_args *args,
                        void *stream);
const char *flash_merge(struct flash_device *device, const struct attn_merge_states_args *args);
const char *flash_copy(struct flash_device *device, void *to, const void *from, size_t bytes,
                       int32_t kind, void *stream);
const char *flash_fill(struct flash_device *device, void *to, int32_t value, size_t row_bytes,
                       size_t stride, int64_t rows, void *stream);

#define FLASH_MAX_CTAS_PER_SM 2
struct flash_device {
    void *context, *push, *pop; /* CUcontext, cuCtxPushCurrent, cuCtxPopCurrent */
    int32_t id, num_sms;
};

#ifdef __cplusplus
}
#endif
#endif
