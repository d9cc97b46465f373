/* SPDX-License-Identifier: Apache-2.0 */
/* What a layer is (attn_layer_desc: known at selection) and what it is given at bind
 * (attn_layer_params). Engines fill them; the core hands rewritten copies to kernels, so that a
 * composed step (cascade, static sink, cross attention) reaches a vendor as one plain attend. */
#ifndef ATTN_LAYER_H
#define ATTN_LAYER_H

#include "kv_cache.h"

/* One attention layer. Everything that changes its meaning is here; what its kind does not read, or
 * whose switch is off, is refused by name. Text is copied. All fields 0 unless said otherwise. */
struct attn_layer_desc {
    size_t struct_size;
    /* attn_mla_desc, attn_recurrent_desc, attn_layer_caches, attn_context_parallel,
     * drafts' (draft/) */
    const struct attn_ext *next;
    const char *name; /* unique in the model, not empty */
    /* NULL, or the name of an earlier layer whose cache this one reads */
    const char *kv_sharing_target;
    int32_t kind;         /* enum attn_layer_kind */
    int32_t dtype;        /* activations: ATTN_DTYPE_F16, BF16 or F32; required */
    int32_t kv_dtype;     /* enum attn_kv_dtype; of K alone where kv_dtype_v is not 0 */
    int32_t num_q_heads;  /* Hq, a multiple of num_kv_heads */
    int32_t num_kv_heads; /* Hk */
    int32_t head_size;    /* D of q and k, a multiple of 8 */
    int32_t head_size_v;  /* Dv of v and out; 0: as head_size */
    float scale;          /* factor on q k^T, > 0 */
    /* enum attn_causal; 0: decoders, MLA and recurrent layers are, encoders and cross layers, which
     * cannot be, are not. Kernels get YES or NO */
    int32_t causal;
    int32_t causal_per_request; /* 1: batches carry a flag per request */
    /* 1: key j is visible if p - window_left <= j <= p + window_right */
    int32_t has_window;
    /* a decoder's window of w tokens, its own included, is (w - 1, 0); -1: open */
    int32_t window_left;
    int32_t window_right;
    /* c > 0: chunked local attention; excludes a window and causal_per_request */
    int32_t chunk_size;
    int32_t chunk_lookback;   /* visible if p/c - j/c <= chunk_lookback (0: the same chunk) */
    float soft_cap;           /* c > 0: s = c tanh(s / c) */
    int32_t alibi;            /* enum attn_alibi */
    int32_t has_sinks;        /* 1: attn_layer_params.sinks enters the denominator */
    int32_t sink_len;         /* static sink: fixed keys before every request's keys */
    int32_t prefix_lm;        /* 1: batches may carry bidirectional spans */
    int32_t prefix_lm_window; /* w > 0: inside spans too, p - j < w */
    /* enum attn_tree_mask that batches may carry. It only hides: on a causal layer what lies above
     * the diagonal stays hidden, whatever the tree says */
    int32_t tree_mask;
    /* slots in a block of the engine's block table; 0: as the backend, or kv_sharing_target, has
     * them. It may be several of the backend's blocks, see attn_cache_spec.kernel_block_size;
     * kernels get the size of theirs */
    int32_t block_size;
    /* n: decode requests have up to 1 + n queries (1 + 2n in parallel drafting) */
    int32_t num_speculative_tokens;
    int32_t parallel_drafting;
    /* enum attn_kv_dtype of V's cache where it is not K's, of a decoder or cross layer: both are
     * then dtypes that say the same of K as of V (not int8_kv, int8_k, fp8_ds_mla, fp8_ds_v4,
     * mxfp4, TurboQuant's).
     * 0: as kv_dtype, and kernels get 0 wherever both are alike */
    int32_t kv_dtype_v;
    int64_t padded_page_bytes; /* 0, or a page size to pad to */
    /* enum attn_scale_form; not NONE: q arrives quantized (dtype q_dtype) */
    int32_t q_scale_form;
    /* fp8: PER_TENSOR or PER_HEAD; nvfp4: PER_TENSOR; OPAQUE and vendors' dtypes: any */
    int32_t k_scale_form;
    int32_t v_scale_form;
    int32_t p_scale_form; /* probabilities: NONE or PER_TENSOR */
    /* enum attn_dtype_id of q where q_scale_form is not NONE; a vendor's comes as uint8 */
    int32_t q_dtype;
    int32_t output_form;       /* enum attn_output_form */
    int32_t output_scale_pow2; /* group fp8: scales rounded up to powers of two */
    /* group fp8: 1 = scales [groups, T], aligned for TMA */
    int32_t output_scale_column_major;
    /* 1: this layer keeps kv_dtype AUTO; its kv_dtype and scale forms are the other layers' */
    int32_t skip_kv_quantization;
    int32_t needs_lse;   /* 1: runs may ask for the log-sum-exp */
    int32_t graph_level; /* enum attn_graph_level that the engine needs */
    /* 1: same bits for a request whatever else is in the batch; 2: and however much of it came from
     * the cache, while its keys and values are finite. An MLA layer then needs decodes first, and
     * with 2 goes the latent way alone */
    int32_t batch_invariant;
    int32_t rope;                  /* enum attn_rope that rope_write runs need; see io.h */
    int32_t qk_norm;               /* 1: together with q/k RMS norm */
    int32_t needs_block_table_row; /* 1: batches carry block_table_row */
    int32_t device_seq_lens_only;  /* 1: batches come without seq_lens_host */
    int32_t fast_prefill;          /* 1: batches may carry logits_indices */
    int32_t max_seq_len;  /* longest request that will be run, to rank backends by; 0: unknown */
    int32_t max_num_reqs; /* most requests of a batch; 0: unknown */
    int32_t encoder;      /* enum attn_encoder that an encoder is */
    /* ATTN_FEATURE_* that runs of this layer need beyond what its other fields say: a backend
     * that does not declare them is refused at selection */
    uint64_t needed_features;
    /* ATTN_VIEW_* that the views of its cache will need, where the engine's layout is given:
     * whoever does not read them is refused at selection. 0: not said, and bind refuses */
    uint64_t needed_view_forms;
    int32_t needs_page_lists; /* 1: batches may bring page lists in place of a block table */
    int32_t host_bounds;      /* 1: batches may say ATTN_BATCH_HOST_BOUNDS */
    /* bytes of a head's row in one slot of K's and of V's cache, where its dtype is OPAQUE or a
     * vendor's; MLA's latent row is K's */
    int32_t kv_row_bytes;
    int32_t kv_row_bytes_v;
    int32_t kv_scale_bytes; /* bytes of a row's scales, where they stand apart from it */
    int32_t kv_scale_bytes_v;
};

/* Per-layer memory, given at bind and borrowed until the layer is destroyed or bound again; the
 * struct, its extensions, and shapes and strides of tensors are copied. Device
 * pointers belong to the selected backend's device. A host float next to a scale is used where the
 * device pointer is NULL. What no term of the layer reads is refused; scales of the cache are taken
 * where skip_kv_quantization leaves them unread. */
struct attn_layer_params {
    size_t struct_size;
    /* attn_mla_weights, attn_recurrent_weights, attn_kv_quant_params, drafts' */
    const struct attn_ext *next;
    const float *sinks;        /* device [Hq], float32 logits; needed iff has_sinks */
    const float *alibi_slopes; /* device [Hq]; needed iff alibi is not NONE */
    /* static sink keys [sink_len, Hk, D], activation dtype, unquantized */
    const struct attn_tensor *sink_k;
    const struct attn_tensor *sink_v; /* [sink_len, Hk, Dv] */
    const float *q_scale;             /* device [1] or [Hk] by q_scale_form */
    const float *k_scale;             /* device [1] or [Hk] by k_scale_form */
    const float *v_scale;             /* device [1], [Hk] or [Hk, Dv] by v_scale_form */
    const float *p_scale;             /* device [1] */
    float q_scale_host;               /* per-tensor scales known to the host; 0 reads as 1 */
    float k_scale_host;
    float v_scale_host;
    float p_scale_host;
    struct attn_device device; /* where pointers here and in extensions lie; type 0: not stated */
};

/* Extra parameters of quantized caches (on attn_layer_params). */
struct attn_kv_quant_params {
    struct attn_ext ext;           /* id ATTN_EXT_KV_QUANT_PARAMS */
    const float *hadamard_signs_k; /* device [D] of +-1: int4 */
    const float *hadamard_signs_v; /* device [Dv] */
    const float *v_channel_scale;  /* device [Hk, Dv]: INT8_KV */
};

ATTN_STATIC_ASSERT(sizeof(struct attn_layer_desc) == 264, "attn_layer_desc of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_layer_params) == 104, "attn_layer_params of ABI 0.3");

#endif
