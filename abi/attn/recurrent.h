/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent layers: a state per value head, S [Dv, Dk], that each token changes and reads, after
 * an optional causal convolution. The rule is the gated delta rule (Gated DeltaNet; Qwen3-Next):
 *
 *     S <- e^g S; r = beta (v - S k); S <- S + r k^T; o = scale S q
 *     g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b), of each value head
 *
 * Others are a draft (draft/recurrent.h). What no backend declares (attn_recurrent_caps) is refused
 * at selection. */
#ifndef ATTN_RECURRENT_H
#define ATTN_RECURRENT_H

#include "tensor.h"

/* On attn_layer_desc, whose num_q_heads and num_kv_heads are then Hk and whose scale, of q, is
 * 1 / sqrt(Dk) in most models. */
struct attn_recurrent_desc {
    struct attn_ext ext;            /* id ATTN_EXT_RECURRENT_DESC */
    int32_t num_k_heads;            /* Hk; key head of value head h: h / (Hv / Hk) */
    int32_t num_v_heads;            /* Hv, a multiple of Hk */
    int32_t head_size_k;            /* Dk */
    int32_t head_size_v;            /* Dv */
    int32_t conv_width;             /* 4; 0: the engine runs the convolution itself */
    int32_t conv_silu;              /* 1: SiLU after it */
    int32_t qk_l2norm;              /* 1: q, k <- x / sqrt(sum x^2 + 1e-6) */
    int32_t chunk_size;             /* tokens of a chunk in the prefill's WY form; 0 reads as 64 */
    int32_t num_speculative_tokens; /* states of so many drafted tokens are kept */
    /* enum attn_dtype_id, of the cache: F32 (0 reads as it), BF16 or F16. A state is rounded, to
     * nearest even or as draft/recurrent.h says, where it is written to a slot, and nowhere else;
     * the walk over the step's tokens goes on from what was written */
    int32_t state_dtype;
    int32_t has_initial_slots; /* 1: batches bring initial_slots */
    /* n > 0: batches bring checkpoint_slots, for the states after n, 2 n, ... tokens of a request,
     * counted from its first */
    int32_t checkpoint_interval;
};

struct attn_recurrent_weights { /* on attn_layer_params */
    struct attn_ext ext;        /* id ATTN_EXT_RECURRENT_WEIGHTS */
    const float *a_log;         /* device [Hv] */
    const float *dt_bias;       /* device [Hv] */
    /* [2 Hk Dk + Hv Dv, conv_width], activation dtype; channels in the order q, k, v */
    const struct attn_tensor *conv_weight;
    const struct attn_tensor *conv_bias; /* [channels] or NULL */
};

/* The layer's caches: the state, block = state slot, one slot, head = value head, row of Dv Dk
 * elements of state_dtype, heads one after the other; and, with a convolution, the window, block =
 * state slot, head = channel, row of conv_width - 1 (+ drafted) inputs. The kernel `recurrent` gets
 * their views as args->k_cache and args->v_cache (NULL without a convolution). */

/* A request whose first slot is negative, of either row, or that has no tokens, is left alone, its
 * rows of out too (where an output form is composed, they get codes that mean nothing).
 * Speculative, a request of up to 1 + n tokens leaves the state after its token i in slot i of its
 * row (a negative slot: that one is not kept), and the convolution's window, in slot 0, as the
 * conv_width - 2 inputs before the step and the step's own, so that the window after token i begins
 * at entry i. Longer requests leave one state, in slot 0, and the next step accepts 1.
 *
 * Requests of a batch run at once. Several may read one slot (initial_slots: forks of one request),
 * and a request's state goes to where it came from or elsewhere; but a slot that a request of the
 * batch writes, as a state or as a checkpoint, no other of its requests reads or writes, and none
 * writes twice: a fork of a request that goes on in the same batch starts from a checkpoint of an
 * earlier one. On a CPU ATTN_VALIDATE=1 holds batches to that. */
struct attn_batch_recurrent {         /* on attn_batch */
    struct attn_ext ext;              /* id ATTN_EXT_BATCH_RECURRENT */
    const int32_t *state_slots;       /* device [R] or, speculative, [R, 1 + n]; negative: skip */
    int64_t state_slots_stride;       /* elements between requests; 0: 1 */
    const uint8_t *has_initial_state; /* device [R]; NULL: by seq_len > query_len */
    /* device [R], speculative: the next step starts from state number accepted - 1 of the request's
     * row; NULL: not speculative */
    const int32_t *num_accepted_tokens;
    /* device [R] or, speculative, [R, 1 + n]: the rows in which earlier steps have left states and
     * windows, read as state_slots would be; state_slots is then only written. NULL: they are read
     * where they go */
    const int32_t *initial_slots;
    int64_t initial_slots_stride; /* elements between requests; 0: 1 */
    /* device [R, stride]: entry i takes the state and the window after the i-th multiple of
     * checkpoint_interval in (seq_len - query_len, seq_len], i from 0; negative: not written. Needs
     * seq_lens. Drafted tokens count: where they are rejected, the step that gets there again
     * writes it again */
    const int32_t *checkpoint_slots;
    int64_t checkpoint_slots_stride;
};

struct attn_io_recurrent { /* on attn_step_io; out is [T, Hv, Dv] */
    struct attn_ext ext;   /* id ATTN_EXT_IO_RECURRENT */
    /* [T, 2 Hk Dk + Hv Dv] before the convolution, and q, k, v of the step are NULL; with
     * conv_width 0 it is NULL and they are needed. With batch_invariant 2 and conv_width > 1 its
     * dtype is the layer's, as the window's is. */
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
    uint32_t state_dtypes; /* mask of 1 << enum attn_dtype_id; 0 reads as F32 alone */
    int32_t initial_slots; /* 1: takes has_initial_slots */
    int32_t checkpoints;   /* 1: takes checkpoint_interval */
};

#endif
