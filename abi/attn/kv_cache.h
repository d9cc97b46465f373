/* SPDX-License-Identifier: Apache-2.0 */
/* The KV cache: its dtypes, the strided view through which every layout is one thing, and its
 * specification. */
#ifndef ATTN_KV_CACHE_H
#define ATTN_KV_CACHE_H

#include "tensor.h"
#include "types.h"

/* What a slot of the cache holds. Text names: auto, f16, bf16, f32, fp8_e4m3 (fp8), fp8_e5m2, … */
enum attn_kv_dtype {
    ATTN_KV_AUTO = 0, /* the activation dtype; selection replaces it by F16, BF16 or F32 */
    ATTN_KV_F16 = 1,
    ATTN_KV_BF16 = 2,
    ATTN_KV_F32 = 3,
    /* stored = saturate(x / scale), read = stored * scale; e4m3fnuz on gfx940-942 */
    ATTN_KV_FP8_E4M3 = 4,
    ATTN_KV_FP8_E5M2 = 5,
    /* e4m3 with a float32 scale per slot and head, see scale views */
    ATTN_KV_FP8_PER_TOKEN_HEAD = 6,
    ATTN_KV_INT8_PER_TOKEN_HEAD = 7,
    /* Hadamard-rotated rows, zero point in the scale's low mantissa bits */
    ATTN_KV_INT4_PER_TOKEN_HEAD = 8,
    /* two-level int8, level 1: k dynamic per (token, head), v static [Hk, D] */
    ATTN_KV_INT8_KV = 9,
    ATTN_KV_INT8_K = 10, /* two-level int8, level 2: k int8, v 16-bit */
    ATTN_KV_NVFP4 = 11,
    ATTN_KV_FP8_DS_MLA = 12, /* 656-byte rows: 512 e4m3, 4 float32 scales, 64 bf16 */
    /* TurboQuant: codes of 3 or 4 bits, see attn_kv_view; K8V4's keys are e4m3 without a scale */
    ATTN_KV_TURBOQUANT_K8V4 = 13,
    ATTN_KV_TURBOQUANT_4BIT_NC = 14,
    ATTN_KV_TURBOQUANT_K3V4_NC = 15,
    ATTN_KV_TURBOQUANT_3BIT_NC = 16,
    ATTN_KV_DTYPE_COUNT = 17
};

/* A cache of the activations' dtype has their code. */
ATTN_STATIC_ASSERT((int)ATTN_KV_F16 == (int)ATTN_DTYPE_F16 &&
                       (int)ATTN_KV_BF16 == (int)ATTN_DTYPE_BF16 &&
                       (int)ATTN_KV_F32 == (int)ATTN_DTYPE_F32 &&
                       (int)ATTN_KV_FP8_E4M3 == (int)ATTN_DTYPE_FP8_E4M3 &&
                       (int)ATTN_KV_FP8_E5M2 == (int)ATTN_DTYPE_FP8_E5M2,
                   "one code for one thing");

/* One of K or V as a strided view (block, slot, head, dim) with an inner pack:
 *
 *     address(b, s, h, d) = data + b stride_block + s stride_slot + h stride_head
 *                                + (d / pack) stride_pack + (d mod pack) * element bytes
 *
 * All strides are in bytes, so that sub-byte rows and rows with inline scales are the same thing; a
 * 4-bit element d lies in byte (d mod pack) / 2, even d in the low nibble. `pack` 0 means
 * head_size: dims are contiguous. Examples, element size e: `[2,N,B,Hk,D]` stride_slot = Hk D e,
 * stride_head = D e (NHD); `[2,N,Hk,B,D]` stride_head = B D e, stride_slot = D e (HND);
 * `[N,Hk,D/x,B,x]` pack x, stride_slot = x e, stride_pack = B x e. Scale (per-token-head dtypes,
 * INT8_KV's and INT8_K's keys): float32 at scale + b scale_stride_block + s scale_stride_slot + h
 * scale_stride_head; it may lie inline after the row. NVFP4: the block scales are e4m3 bytes at
 * `scale` with the same strides, D/16 of them contiguous. TurboQuant: code d is bits d b to d b + b
 * - 1 of the row, the lowest of its first byte first, in one piece (pack 0); at `scale`, which may
 * be odd, stand the key's norm, or the value's step and zero, as float16. */
struct attn_kv_view {
    size_t struct_size;
    const struct attn_ext *next;
    void *data;
    int64_t num_blocks;
    int32_t block_size; /* slots in a block of this view */
    int32_t num_heads;
    int32_t head_size;
    int32_t pack;
    int64_t stride_block;
    int64_t stride_slot;
    int64_t stride_head;
    int64_t stride_pack;
    void *scale;
    int64_t scale_stride_block;
    int64_t scale_stride_slot;
    int64_t scale_stride_head;
    struct attn_device device; /* of data and scale; type 0: not stated */
};

/* Physical orders, as a preference and, as bits, as what a backend can walk. A view is NHD if
 * stride_slot >= stride_head, else HND; PACKED if 0 < pack < head_size. */
enum attn_kv_layout {
    ATTN_KV_LAYOUT_NHD = 0,       /* [2, N, B, Hk, D] */
    ATTN_KV_LAYOUT_HND = 1,       /* [2, N, Hk, B, D] */
    ATTN_KV_LAYOUT_NHD_INNER = 2, /* [N, 2, B, Hk, D] */
    ATTN_KV_LAYOUT_HND_INNER = 3, /* [N, 2, Hk, B, D] */
    /* [N, Hk, B, D + Dv]: a key's row and its value's side by side */
    ATTN_KV_LAYOUT_HND_ROWS = 4,
    /* K [N, Hk, D/x, B, x], V [N, Hk, Dv, B] or rows, as the view says */
    ATTN_KV_LAYOUT_PACKED_K = 5,
    ATTN_KV_LAYOUT_LATENT = 6, /* MLA: [N, B, row] */
    ATTN_KV_LAYOUT_COUNT = 7
};

/* What a backend can walk: bits for attn_backend_caps.walks. */
#define ATTN_WALK_NHD (1ull << 0)
#define ATTN_WALK_HND (1ull << 1)
#define ATTN_WALK_PACKED (1ull << 2) /* 0 < pack < head_size */
#define ATTN_WALK_LATENT (1ull << 3)
#define ATTN_WALK_SEPARATE_STRIDES (1ull << 4) /* K and V of different strides */

enum attn_kv_spec_kind {
    /* encoder-only, multimodal encoder, or a layer that shares an earlier cache */
    ATTN_KV_SPEC_NONE = 0,
    ATTN_KV_SPEC_FULL = 1,
    ATTN_KV_SPEC_SLIDING_WINDOW = 2,
    ATTN_KV_SPEC_CHUNKED_LOCAL = 3,
    ATTN_KV_SPEC_MLA = 4,
    ATTN_KV_SPEC_SLIDING_WINDOW_MLA = 5,
    ATTN_KV_SPEC_CROSS = 6,
    ATTN_KV_SPEC_SINK_FULL = 7,
    ATTN_KV_SPEC_STATE = 8,
    ATTN_KV_SPEC_MLA_INDEXER =
        9 /* the engine's own indexer keys: block_size (D fp8 + float32 scale) */
};

#define ATTN_KV_SPEC_MAX_DIMS 8

/* What an engine has to allocate for one layer, in the layout that the backend would like best. Any
 * other layout that the backend walks may be handed in instead. Layers of equal specs form one
 * block-table group. */
struct attn_kv_spec {
    size_t struct_size;
    const struct attn_ext *next;
    int32_t kind;     /* enum attn_kv_spec_kind */
    int32_t kv_dtype; /* enum attn_kv_dtype, never AUTO */
    int32_t layout;   /* enum attn_kv_layout: the preferred one */
    int32_t block_size;
    int32_t num_kv_heads;
    int32_t head_size;
    int32_t head_size_v;
    int32_t sliding_window; /* tokens, the query's own included; 0: none */
    int32_t chunk_size;     /* 0: none */
    /* 0: none; else the reserved blocks are ceil(sink_len / block_size) */
    int32_t sink_len;
    /* bytes of one block of this layer, K and V, scales included, without padding */
    int64_t page_bytes;
    /* >= page_bytes: the distance between blocks that was asked for */
    int64_t padded_page_bytes;
    int32_t ndim;      /* logical shape, with -1 where the number of blocks stands */
    int32_t alignment; /* bytes at which the base address must lie */
    int64_t shape[ATTN_KV_SPEC_MAX_DIMS];
    /* physical position of each logical dimension */
    int32_t stride_order[ATTN_KV_SPEC_MAX_DIMS];
};

ATTN_STATIC_ASSERT(sizeof(struct attn_kv_view) == 120, "attn_kv_view of ABI 0.2");
ATTN_STATIC_ASSERT(sizeof(struct attn_kv_spec) == 176, "attn_kv_spec of ABI 0.2");

#endif
