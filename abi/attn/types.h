/* SPDX-License-Identifier: Apache-2.0 */
/* The enumerations of both tables. All are stored as int32_t, masks as uint64_t with bit 1 << code.
 */
#ifndef ATTN_TYPES_H
#define ATTN_TYPES_H

#include "version.h"

/* Codes of element types, cache dtypes, cache roles and layouts from here on are vendors'
 * (abi/VENDORS.md). A backend lists those that it takes (attn_backend_caps.vendor_codes), and a
 * layer that has any other is refused at selection. */
#define ATTN_VENDOR_CODE 0x10000

/* Lists of names (attn_api.code_name), and of codes that vendors may have. */
enum attn_name_list {
    ATTN_NAMES_KERNEL = 0,     /* bits, ATTN_KERNEL_* */
    ATTN_NAMES_LAYER_KIND = 1, /* enum attn_layer_kind */
    ATTN_NAMES_PHASE = 2,
    ATTN_NAMES_DTYPE = 3, /* enum attn_dtype_id */
    ATTN_NAMES_KV_DTYPE = 4,
    ATTN_NAMES_TERM = 5,      /* bits, ATTN_TERM_* */
    ATTN_NAMES_FEATURE = 6,   /* bits, ATTN_FEATURE_* */
    ATTN_NAMES_VIEW_FORM = 7, /* bits, ATTN_VIEW_* */
    ATTN_NAMES_KV_LAYOUT = 8,
    ATTN_NAMES_SCALE_FORM = 9,
    ATTN_NAMES_OUTPUT_FORM = 10,
    ATTN_NAMES_CACHE_ROLE = 11
};

/* What a layer is. What is a parameter is no kind: sparse MLA is MLA with a topk, a static sink a
 * decoder with a sink_len. */
enum attn_layer_kind {
    ATTN_LAYER_DECODER = 0, /* causal self-attention over a KV cache */
    /* bidirectional self-attention without a cache, query_start_loc on both sides */
    ATTN_LAYER_ENCODER = 1,
    ATTN_LAYER_CROSS = 2, /* keys of the encoder, written once */
    ATTN_LAYER_MLA = 3,
    ATTN_LAYER_RECURRENT = 4, /* a state instead of keys, see recurrent.h */
    ATTN_LAYER_INDEXER = 5    /* chooses the keys of another layer, see indexer.h */
};

/* Does a key after a query's position stay hidden? */
enum attn_causal {
    ATTN_CAUSAL_DEFAULT = 0, /* in a layer: as its kind says; in a batch: as the layer says */
    ATTN_CAUSAL_YES = 1,
    ATTN_CAUSAL_NO = 2
};

/* Names of layers in text (ATTN_BACKEND, JSON): full, sliding, chunked (decoders by their terms),
 * static_sink (with a sink_len), encoder, encoder_only, mm_encoder (by this enumeration), cross,
 * mla, mla_sparse (with a topk), gdn, indexer. Kernels see no difference between encoders. */
enum attn_encoder {
    ATTN_ENCODER_OF_DECODER = 0, /* it belongs to an encoder-decoder model */
    ATTN_ENCODER_ONLY = 1,
    ATTN_ENCODER_MULTIMODAL = 2 /* vision or audio tower */
};

enum attn_phase { ATTN_PHASE_PREFILL = 0, ATTN_PHASE_DECODE = 1 };
#define ATTN_MAX_PHASES 4 /* room in arrays by phase */

/* Terms of one attention (docs/semantics.md, section 1), as bits: what a layer needs, what a
 * backend can do. */
#define ATTN_TERM_CAUSAL (1ull << 0)
#define ATTN_TERM_BIDIRECTIONAL (1ull << 1)
#define ATTN_TERM_CAUSAL_PER_REQUEST (1ull << 2)
#define ATTN_TERM_SLIDING_WINDOW (1ull << 3) /* (w-1, 0) */
/* right side >= 0 of a bidirectional layer */
#define ATTN_TERM_SYMMETRIC_WINDOW (1ull << 4)
#define ATTN_TERM_CHUNKED_LOCAL (1ull << 5)
#define ATTN_TERM_SOFT_CAP (1ull << 6)
#define ATTN_TERM_ALIBI (1ull << 7)
#define ATTN_TERM_ALIBI_SQRT (1ull << 8)
#define ATTN_TERM_SINKS (1ull << 9)
#define ATTN_TERM_STATIC_SINK (1ull << 10) /* fused; without it the core composes it */
#define ATTN_TERM_PREFIX_LM (1ull << 11)
#define ATTN_TERM_TREE_BITS (1ull << 12)
#define ATTN_TERM_TREE_BIAS (1ull << 13)

/* Abilities other than the terms. */
#define ATTN_FEATURE_PAGED_KV (1ull << 0)      /* keys through a block table */
#define ATTN_FEATURE_CONTIGUOUS_KV (1ull << 1) /* keys [Tk, Hk, D] with key_start_loc */
#define ATTN_FEATURE_LSE (1ull << 2)
#define ATTN_FEATURE_BLOCK_TABLE_ROW (1ull << 3)
#define ATTN_FEATURE_MIXED_BATCH (1ull << 4) /* decode and prefill in one attend */
#define ATTN_FEATURE_UPDATE_BLOCK_TABLE (1ull << 5)
#define ATTN_FEATURE_FUSED_WRITE (1ull << 6) /* attend writes k and v itself */
#define ATTN_FEATURE_FUSED_ROPE (1ull << 7)  /* rope_write_kv */
#define ATTN_FEATURE_FUSED_ROPE_NORM (1ull << 8)
#define ATTN_FEATURE_BATCH_INVARIANT (1ull << 9)
#define ATTN_FEATURE_BATCH_INVARIANT_PREFIX (1ull << 10) /* also with prefix caching */
#define ATTN_FEATURE_QUANTIZED_QUERY (1ull << 11)
#define ATTN_FEATURE_DEVICE_SEQ_LENS (1ull << 12) /* plans without seq_lens_host */
#define ATTN_FEATURE_FAST_PREFILL (1ull << 13)
/* k and v of a step without a cache, and q, may be e4m3 with per-tensor scales (kv_dtype, k_scale
 * and v_scale of the layer that the kernel gets): what a quantized multimodal encoder is composed
 * of */
#define ATTN_FEATURE_FP8_INPUTS (1ull << 14)
/* batched_gemm takes w in mxfp4, see attn_batched_gemm_args */
#define ATTN_FEATURE_MXFP4_WEIGHTS (1ull << 15)
/* schedule and attend go by the device's query_start_loc and seq_lens: their host copies, and all
 * counts of the batch, may be upper bounds (ATTN_BATCH_HOST_BOUNDS) */
#define ATTN_FEATURE_HOST_BOUNDS (1ull << 16)
/* a hint: its steps may take memory, and the locks of what they take it from, as those of many
 * libraries do. An engine that must not wait there refuses it (ATTN_SELECT_NO_STEP_ALLOCATION) */
#define ATTN_FEATURE_STEP_ALLOCATES (1ull << 17)
/* K and V of different dtypes, each of kv_dtypes (attn_layer_desc.kv_dtype_v) */
#define ATTN_FEATURE_KV_DTYPE_V (1ull << 18)
/* amax also keeps a history of what it finds, and the scale that follows from it */
#define ATTN_FEATURE_AMAX_HISTORY (1ull << 19)

enum attn_alibi { ATTN_ALIBI_NONE = 0, ATTN_ALIBI_LINEAR = 1, ATTN_ALIBI_SQRT = 2 };

enum attn_tree_mask { ATTN_TREE_NONE = 0, ATTN_TREE_BITS = 1, ATTN_TREE_BIAS = 2 };

/* How float32 scales are given: one per tensor `[1]`, or one per KV head `[Hk]`. */
enum attn_scale_form {
    ATTN_SCALE_NONE = 0,
    ATTN_SCALE_PER_TENSOR = 1,
    ATTN_SCALE_PER_HEAD = 2,
    ATTN_SCALE_PER_HEAD_CHANNEL = 3 /* `[Hk, D]`, int8 v */
};

enum attn_output_form {
    ATTN_OUTPUT_PLAIN = 0,        /* the activation dtype */
    ATTN_OUTPUT_FP8_STATIC = 1,   /* e4m3, one scale per tensor */
    ATTN_OUTPUT_FP8_GROUP_64 = 2, /* e4m3, scale max(amax, 1e-10) / 448 per 64 */
    ATTN_OUTPUT_FP8_GROUP_128 = 3,
    ATTN_OUTPUT_NVFP4 = 4
};

/* Each captures what those below it do. Numbers between are left for later levels: in a declaration
 * one that is not known reads as the known one below it. */
enum attn_graph_level {
    ATTN_GRAPH_NEVER = 0,
    ATTN_GRAPH_SINGLE_TOKEN_DECODE = 16, /* decodes of one query */
    ATTN_GRAPH_UNIFORM_BATCH = 32,       /* decodes of equally many */
    ATTN_GRAPH_ALWAYS = 64
};

#endif
