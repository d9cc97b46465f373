/* SPDX-License-Identifier: Apache-2.0 */
/* The gated delta rule (Gated DeltaNet; Qwen3-Next) with its causal convolution.
 * State per value head: float32 S [Dv, Dk]; S <- e^g S; r = beta (v - S k); S <- S + r k^T; o = S
 * q. */
#ifndef ATTN_RECURRENT_H
#define ATTN_RECURRENT_H

#include "tensor.h"

struct attn_recurrent_desc { /* on attn_layer_desc; num_q_heads and num_kv_heads are then Hk, scale
                          is 1/sqrt(Dk) */
    struct attn_ext ext;     /* id ATTN_EXT_RECURRENT_DESC */
    int32_t num_k_heads;     /* Hk; key head of value head h: h / (Hv / Hk) */
    int32_t num_v_heads;     /* Hv, a multiple of Hk */
    int32_t head_size_k;     /* Dk */
    int32_t head_size_v;     /* Dv */
    int32_t conv_width;      /* 4; 0: the engine runs the convolution itself */
    int32_t conv_silu;       /* 1: SiLU after it */
    int32_t qk_l2norm;       /* 1: q, k <- x / sqrt(sum x^2 + 1e-6) */
    int32_t chunk_size;      /* of the prefill's WY form; 0 reads as 64 */
    int32_t num_speculative_tokens; /* states of so many drafted tokens are kept */
    int32_t state_dtype;            /* enum attn_dtype_name: 0 or F32 */
};

struct attn_recurrent_weights { /* on attn_layer_params */
    struct attn_ext ext;        /* id ATTN_EXT_RECURRENT_WEIGHTS */
    const float *a_log;         /* device [Hv] */
    const float *dt_bias;       /* device [Hv] */
    /* [2 Hk Dk + Hv Dv, conv_width], activation dtype; channels in the order q, k, v */
    const struct attn_tensor *conv_weight;
    const struct attn_tensor *conv_bias; /* [channels] or NULL */
};

/* State memory of one layer, handed over with layer_bind_state and borrowed like a KV cache. The
 * gated_delta kernel gets it as two views: args->k_cache with block = state slot, one slot, head =
 * value head, row of Dv Dk float32; args->v_cache (NULL without a convolution) with block = state
 * slot, head = channel, row of the rolling window. */
struct attn_recurrent_state {
    size_t struct_size;
    const struct attn_ext *next;
    void *state;               /* float32 [slots, Hv, Dv, Dk] */
    int64_t state_stride_slot; /* elements */
    void *conv_state;          /* activation dtype [slots, channels, conv_width - 1 (+ drafted)] */
    int64_t conv_stride_slot;  /* elements */
    int64_t conv_stride_channel; /* elements */
    int64_t num_slots;
    struct attn_device device; /* of both memories; type 0: not stated */
};

/* A request whose first slot is negative, or that has no tokens, is left alone, its rows of out
 * too. Speculative, a request of up to 1 + n tokens leaves the state after its token i in slot i
 * of its row (a negative slot: that one is not kept), and the convolution's window, in slot 0, as
 * the conv_width - 2 inputs before the step and the step's own, so that the window after token i
 * begins at entry i. Longer requests leave one state, in slot 0, and the next step accepts 1. */
struct attn_batch_recurrent {         /* on attn_batch */
    struct attn_ext ext;              /* id ATTN_EXT_BATCH_RECURRENT */
    const int32_t *state_slots;       /* device [R] or, speculative, [R, 1 + n]; negative: skip */
    int64_t state_slots_stride;       /* elements between requests; 0: 1 */
    const uint8_t *has_initial_state; /* device [R]; NULL: by seq_len > query_len */
    /* device [R], speculative: the next step starts from state number accepted - 1 of the request's
     * row; NULL: not speculative */
    const int32_t *num_accepted_tokens;
};

struct attn_io_recurrent { /* on attn_step_io; out is [T, Hv, Dv] */
    struct attn_ext ext;   /* id ATTN_EXT_IO_RECURRENT */
    /* [T, 2 Hk Dk + Hv Dv] before the convolution; else q, k, v of the step */
    const struct attn_tensor *mixed_qkv;
    const struct attn_tensor *a; /* [T, Hv] */
    const struct attn_tensor *b; /* [T, Hv] */
};

struct attn_recurrent_caps { /* on attn_backend_caps */
    struct attn_ext ext;     /* id ATTN_EXT_CAPS_RECURRENT */
    int32_t head_size_k_max;
    int32_t head_size_v_max;
    int32_t conv_width_max;
    int32_t max_speculative_tokens;
};

ATTN_STATIC_ASSERT(sizeof(struct attn_recurrent_state) == 72, "attn_recurrent_state of ABI 0.2");

#endif
