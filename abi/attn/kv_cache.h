/* SPDX-License-Identifier: Apache-2.0 */
/* The KV cache: its dtypes, the strided view through which every layout is one thing, and its
 * specification. */
#ifndef ATTN_KV_CACHE_H
#define ATTN_KV_CACHE_H

#include "tensor.h"
#include "types.h"

/* What a slot of the cache holds; from ATTN_VENDOR_CODE on vendors' own. Text names: auto, f16,
 * bf16, f32, fp8_e4m3 (fp8), fp8_e5m2, … */
enum attn_kv_dtype {
    ATTN_KV_AUTO = 0, /* the activation dtype; selection replaces it by F16, BF16 or F32 */
    ATTN_KV_F16 = 1,
    ATTN_KV_BF16 = 2,
    ATTN_KV_F32 = 3,
    /* stored = saturate(x / scale), read = stored * scale. E4M3 is OCP's e4m3fn on every device;
     * E4M3FNUZ is that of gfx940 to gfx942: at most 240, one zero, 0x80 is NaN */
    ATTN_KV_FP8_E4M3 = 4,
    ATTN_KV_FP8_E5M2 = 5,
    ATTN_KV_FP8_E4M3FNUZ = 6,
    /* e4m3 with a float32 scale per slot and head, see scale views */
    ATTN_KV_FP8_PER_TOKEN_HEAD = 7,
    ATTN_KV_INT8_PER_TOKEN_HEAD = 8,
    /* Hadamard-rotated rows, zero point in the scale's low mantissa bits */
    ATTN_KV_INT4_PER_TOKEN_HEAD = 9,
    /* two-level int8, level 1: k dynamic per (token, head), v static [Hk, D] */
    ATTN_KV_INT8_KV = 10,
    ATTN_KV_INT8_K = 11, /* two-level int8, level 2: k int8, v 16-bit */
    ATTN_KV_NVFP4 = 12,
    ATTN_KV_FP8_DS_MLA = 13, /* 656-byte rows: 512 e4m3, 4 float32 scales, 64 bf16 */
    /* TurboQuant: codes of 3 or 4 bits, see attn_kv_view; K8V4's keys are e4m3 without a scale */
    ATTN_KV_TURBOQUANT_K8V4 = 14,
    ATTN_KV_TURBOQUANT_4BIT_NC = 15,
    ATTN_KV_TURBOQUANT_K3V4_NC = 16,
    ATTN_KV_TURBOQUANT_3BIT_NC = 17,
    /* ggml's rows: blocks of 32 elements, one after the other, see attn_kv_view */
    ATTN_KV_Q8_0 = 18,
    ATTN_KV_Q4_0 = 19,
    /* bytes, as many as the layer's kv_row_bytes and kv_scale_bytes say: engine and backend know
     * what they hold. A vendor's dtype is the same under a code of its own */
    ATTN_KV_OPAQUE = 20,
    ATTN_KV_FP8_DS_V4 =
        21,            /* rows of 448 e4m3 and 64 bf16, with 8 bytes of scales, see attn_kv_view */
    ATTN_KV_MXFP4 = 22 /* an indexer's keys: e2m1, a power of two for 32, see attn_kv_view */
};

/* A cache of the activations' dtype has their code. */
ATTN_STATIC_ASSERT((int)ATTN_KV_F16 == (int)ATTN_DTYPE_F16 &&
                       (int)ATTN_KV_BF16 == (int)ATTN_DTYPE_BF16 &&
                       (int)ATTN_KV_F32 == (int)ATTN_DTYPE_F32 &&
                       (int)ATTN_KV_FP8_E4M3 == (int)ATTN_DTYPE_FP8_E4M3 &&
                       (int)ATTN_KV_FP8_E5M2 == (int)ATTN_DTYPE_FP8_E5M2 &&
                       (int)ATTN_KV_FP8_E4M3FNUZ == (int)ATTN_DTYPE_FP8_E4M3FNUZ,
                   "one code for one thing");

/* One of K or V as a strided view (block, slot, head, dim) with an inner pack:
 *
 *     address(b, s, h, d) = data + b stride_block + s stride_slot + h stride_head
 *                                + (d / pack) stride_pack + (d mod pack) * element bytes
 *
 * All strides are in bytes, so that sub-byte rows and rows with inline scales are the same thing; a
 * 4-bit element d lies in byte (d mod pack) / 2, even d in the low nibble. `pack` 0 means
 * head_size: dims are contiguous. Examples, with elements of e bytes:
 *
 *     [2,N,B,Hk,D]     stride_slot Hk D e, stride_head D e (NHD)
 *     [2,N,Hk,B,D]     stride_slot D e, stride_head B D e (HND)
 *     [N,Hk,D/x,B,x]   pack x, stride_slot x e, stride_pack B x e
 *
 * Scales lie at scale + b scale_stride_block + s scale_stride_slot + h scale_stride_head, maybe
 * inline after the row. What they are, and what a row holds that is no array of numbers:
 * - per-token-head dtypes, keys of INT8_KV and INT8_K: one float32.
 * - NVFP4: D/16 bytes of e4m3, one for 16 elements, contiguous.
 * - TurboQuant: code d of b bits is bits d b to d b + b - 1 of the row, the lowest of its first
 * byte first, in one piece (pack 0). At the scale's address, which may be odd: the key's norm, or
 * the value's step and zero, in float16.
 * - Q8_0: no scale; D/32 blocks of 34 bytes in one piece (pack 0), at any address: a step d in
 *   float16 and 32 int8 c, x = c d.
 * - Q4_0: as Q8_0 with blocks of 18 bytes: a step d and 16 bytes, elements i and i + 16 in the low
 *   and high half of byte i, x = (c - 8) d.
 * - FP8_DS_V4, latent rows of 512: 448 bytes of e4m3, then 64 bf16, in one piece (pack 0). At the
 *   scale's address: 7 bytes of e8m0, a power of two for 64 e4m3 each, and one of padding.
 * - MXFP4, keys of indexers: D/2 bytes of e2m1. At the scale's address: D/32 bytes of e8m0, a power
 *   of two for 32 elements each.
 * - OPAQUE and vendors': attn_layer_desc.kv_row_bytes in one piece (pack 0), at any address, and
 *   kv_scale_bytes at the scale's.
 *
 * In a vendor's layout a block is stride_block bytes at data + b stride_block, of which the views
 * of K and of V both name all: they are alike but for head_size, and their other strides are 0. */
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
    struct attn_device device; /* where data and scale lie; type 0: not stated */
};

/* Physical orders, as a preference and, as bits, as what a backend can read; from ATTN_VENDOR_CODE
 * on vendors' own, of which the plugin says the bytes of a block (attn_plugin.page_bytes). A view
 * is NHD if stride_slot >= stride_head, else HND; PACKED if 0 < pack < head_size. */
enum attn_kv_layout {
    ATTN_KV_LAYOUT_NHD = 0,       /* [2, N, B, Hk, D] */
    ATTN_KV_LAYOUT_HND = 1,       /* [2, N, Hk, B, D] */
    ATTN_KV_LAYOUT_NHD_INNER = 2, /* [N, 2, B, Hk, D] */
    ATTN_KV_LAYOUT_HND_INNER = 3, /* [N, 2, Hk, B, D] */
    /* [N, Hk, B, D + Dv]: a key's row and its value's side by side */
    ATTN_KV_LAYOUT_HND_ROWS = 4,
    /* K [N, Hk, D/x, B, x], V [N, Hk, Dv, B] or rows, as the view says */
    ATTN_KV_LAYOUT_PACKED_K = 5,
    ATTN_KV_LAYOUT_LATENT = 6 /* MLA: [N, B, row] */
};

/* Forms of the views that a backend can read: bits for attn_backend_caps.view_forms. */
#define ATTN_VIEW_NHD (1ull << 0)
#define ATTN_VIEW_HND (1ull << 1)
#define ATTN_VIEW_PACKED (1ull << 2) /* 0 < pack < head_size */
#define ATTN_VIEW_LATENT (1ull << 3)
#define ATTN_VIEW_SEPARATE_STRIDES (1ull << 4) /* K and V of different strides */

/* What a cache of a layer holds; from ATTN_VENDOR_CODE on vendors' own. */
enum attn_cache_role {
    ATTN_CACHE_K = 1,
    ATTN_CACHE_V = 2,
    ATTN_CACHE_LATENT = 3,  /* rows that are both, see mla.h */
    ATTN_CACHE_STATE = 4,   /* a recurrent layer's states, by slot */
    ATTN_CACHE_CONV = 5,    /* its convolution's window, by slot */
    ATTN_CACHE_INDEX_K = 6, /* an indexer's keys, by which the keys to attend are chosen */
    /* scales of another cache, `of`, that its own view cannot say (per channel and group) */
    ATTN_CACHE_SCALE = 7,
    ATTN_CACHE_ZERO = 8,       /* its zero points */
    ATTN_CACHE_COMPRESSED = 9, /* rows that stand for several tokens each */
    ATTN_CACHE_EXTRA = 10,     /* what no other role says */
    ATTN_CACHE_REPLAY = 11     /* a recurrent layer's ring of inputs, see draft/recurrent.h */
};

#define ATTN_MAX_CACHES 16 /* most caches of one layer */
#define ATTN_MAX_TABLES 8  /* most tables of one batch, next to its own fields */

/* One cache that a layer has beyond those of its kind (a decoder's K and V, MLA's latent rows, a
 * recurrent layer's state). An element of an array, whose owner says the element's size; all zero
 * by default. Caches of one table have one block_size and one tokens_per_row. */
struct attn_cache_desc {
    int32_t role;  /* enum attn_cache_role: INDEX_K or above, or a vendor's; REPLAY has rules */
    int32_t of;    /* SCALE, ZERO: the cache in the layer's list that they belong to; else 0 */
    int32_t table; /* which of the batch's: 0, its own fields, or n, tables[n - 1] */
    /* enum attn_kv_dtype of its rows: F16, BF16, F32, FP8_* or, bytes, INT8_*, OPAQUE, a vendor's
     */
    int32_t kv_dtype;
    int32_t num_heads;
    int32_t head_size;      /* elements of one head's row */
    int32_t block_size;     /* rows in a block; 0: the layer's */
    int32_t tokens_per_row; /* n: row i stands for tokens n i to n i + n - 1; 0 reads as 1 */
};

/* On attn_layer_desc. The layer's list of caches is that of its kind and then these. Whoever does
 * not declare their roles (attn_backend_caps.cache_roles) is refused at selection. */
struct attn_layer_caches {
    struct attn_ext ext; /* id ATTN_EXT_LAYER_CACHES */
    const struct attn_cache_desc *caches;
    int32_t num_caches;
    int32_t cache_stride; /* sizeof(struct attn_cache_desc) of the writer */
};

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
    ATTN_KV_SPEC_STATE = 8
};

#define ATTN_KV_SPEC_MAX_DIMS 8

/* One cache of a bound layer, and what an engine has to allocate for it, in the layout that the
 * backend would like best; any other layout that the backend reads may be bound instead. The caches
 * of a layer's kind (K and V, a state and its window) lie together in one memory
 * (attn_cache_memory.base), of which each of their specs says the same from page_bytes on; a
 * further cache has its own. Layers of equal specs form one block-table group. */
struct attn_cache_spec {
    size_t struct_size;
    const struct attn_ext *next;
    int32_t kind;     /* enum attn_kv_spec_kind: the layer's */
    int32_t role;     /* enum attn_cache_role */
    int32_t of;       /* as described */
    int32_t table;    /* as described; states are addressed by attn_batch_recurrent */
    int32_t kv_dtype; /* enum attn_kv_dtype, never AUTO */
    int32_t num_heads;
    int32_t head_size;
    int32_t tokens_per_row;
    int32_t block_size;
    /* rows in a block as the kernels take it: of table 0 block_size, or a divisor of it. A block b
     * of the engine is then blocks b m to b m + m - 1 of theirs, m = block_size /
     * kernel_block_size: `shape` is in their blocks, and views may be of either size. Block tables,
     * slots and copies stay in the engine's */
    int32_t kernel_block_size;
    int32_t sliding_window; /* tokens, the query's own included; 0: none */
    int32_t chunk_size;     /* 0: none */
    /* 0: none; else the reserved blocks are ceil(sink_len / block_size) */
    int32_t sink_len;
    int32_t layout; /* enum attn_kv_layout: the preferred one */
    /* bytes of one block of this cache, scales included, where it lies in memory of its own */
    int64_t page_bytes_alone;
    /* bytes of one block, scales included, without padding */
    int64_t page_bytes;
    /* >= page_bytes: the distance between blocks that was asked for */
    int64_t padded_page_bytes;
    int32_t alignment; /* bytes at which the base address must lie */
    int32_t ndim; /* logical shape, with -1 where the number of kernel blocks stands; 0: bytes */
    int64_t shape[ATTN_KV_SPEC_MAX_DIMS];
    /* physical position of each logical dimension */
    int32_t stride_order[ATTN_KV_SPEC_MAX_DIMS];
};

/* Memory for all caches of a layer, see layer_bind_memory. */
struct attn_cache_memory {
    size_t struct_size;
    const struct attn_ext *next;
    void *base; /* memory of the kind's caches, as their specs say: padded_page_bytes a block */
    int64_t num_blocks; /* there, or state slots */
    /* [num_further], of the caches that attn_layer_caches describes, in their order: page_bytes a
     * block, rows in the order of (the kernels') block, row, head */
    void *const *further;
    const int64_t *further_num_blocks;
    int32_t num_further;
    int32_t reserved;
    struct attn_device device; /* where all of it lies; type 0: not stated */
};

/* A cache as kernels get it: an element of attn_attend_args.caches. */
struct attn_layer_cache {
    int32_t role; /* enum attn_cache_role */
    int32_t of;
    int32_t table;
    int32_t tokens_per_row;
    const struct attn_kv_view *view;
};

ATTN_STATIC_ASSERT(sizeof(struct attn_kv_view) == 120, "attn_kv_view of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_cache_desc) == 32, "attn_cache_desc of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_cache_spec) == 200, "attn_cache_spec of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_cache_memory) == 64, "attn_cache_memory of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_layer_cache) == 24, "attn_layer_cache of ABI 0.3");

#endif
