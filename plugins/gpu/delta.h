/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters of the recurrent kernels (attn/recurrent.h), shared by host and device. */
#ifndef GPU_DELTA_H
#define GPU_DELTA_H

#include <stdint.h>

#include "gpu/tensors.h"

#define DELTA_ROWS 32 /* rows of S of a group */
#define DELTA_STEP_ROWS                                                                            \
    64 /* rows of S of a group in delta_step, for few tokens of many requests                      \
        */
#define DELTA_MAX_HEAD_SIZE 512
#define DELTA_MAX_CONV_WIDTH 64
#define DELTA_CHUNK 64 /* tokens of a chunk in a plugin's own kernels */

/* attn/draft/recurrent.h; read by the kernels rule_* alone. */
struct gpu_delta_rule {
    const float *skip; /* [Hv] or NULL */
    int32_t additive;  /* 1: S <- G S + beta v k^T */
    int32_t gate, write_gate;
    int32_t gates; /* 1 or head_size_k for each head */
    int32_t state_dtype;
    float gate_bound, dt_min, dt_max;
    uint32_t seed[2]; /* attn_recurrent_rounding's, the lower half first */
    int32_t rounds;   /* its philox_rounds; 0: states are rounded to nearest */
};

struct gpu_delta_params {
    /* [T, channels] before the convolution, or q, k, v */
    struct gpu_tensor mixed, q, k, v, out;
    struct gpu_matrix a, b;                   /* [T, Hv gates], [T, Hv] */
    struct gpu_matrix conv_weight, conv_bias; /* [channels, width], [1, channels] or NULL */
    const float *a_log, *dt_bias;             /* [Hv], [Hv gates] */
    /* seq_lens NULL: has_state says whether a request has a state */
    const int32_t *query_start, *seq_lens;
    const int32_t *state_slots, *num_accepted; /* num_accepted NULL: not speculative */
    const uint8_t *has_state;                  /* NULL: by length */
    /* NULL: states and windows are read from the slots that are written */
    const int32_t *initial_slots;
    int64_t initial_slots_stride;
    /* 1: states and windows have been copied to state_slots, and are read there; requests whose
     * initial slot is negative are left alone */
    int32_t in_place;
    const int32_t *checkpoint_slots;
    int64_t checkpoint_slots_stride;
    int64_t state_slots_stride, num_slots;
    char *state;                    /* rows [Dv, Dk] of (slot, head), float32 or as the rule says */
    int64_t state_slot, state_head; /* bytes */
    char *window;                   /* rows of (slot, channel) */
    int64_t window_slot, window_channel; /* bytes */
    int32_t window_dtype;
    int32_t num_reqs, num_tokens;
    int32_t num_k_heads, num_v_heads, head_size_k, head_size_v;
    int32_t first_q, first_k, first_v; /* channels of mixed */
    int32_t conv_width, conv_silu, l2norm, num_drafted;
    int32_t checkpoint_interval; /* tokens between checkpoints; 0: no checkpoints */
    int32_t has_ring;            /* 1: a request has one state, whatever was drafted */
    /* Requests of at least this many tokens that keep one state go in chunks, by a plugin's own
     * kernels; 0: none. */
    int32_t chunked_from;
    /* Requests of one token and, with a ring, of up to this many of which all but the first are
     * drafts use a plugin's own kernel, which also rolls their windows; 0: none. */
    int32_t steps_apart;
    int32_t chunks_roll; /* 1: the kernels of chunks also roll the windows */
    int32_t row_tiles;   /* groups for each head's rows of the state */
    int32_t invariant;   /* 1: no other request changes which kernels a request goes through */
    float scale;
    struct gpu_delta_rule rule;
};

/* A layer with a ring of inputs (ATTN_CACHE_REPLAY), whose rows are bytes apart. */
struct gpu_ring_params {
    struct gpu_delta_params delta;
    char *ring; /* (slot, row, key head): k, u of the group's heads, float32 gates */
    int64_t ring_slot, ring_row, ring_head;
    const int32_t *ring_tokens; /* [R] */
    int32_t rows;               /* in a slot */
    int32_t dtype;              /* that k and u have */
};

/* The norm and the gate of the outputs, in place (attn_recurrent_norm). */
struct gpu_delta_norm_params {
    struct gpu_delta_params delta;
    struct gpu_tensor gate;
    struct gpu_matrix weight; /* [1, Dv], or [1, Hv Dv] where it is of each head */
    int32_t per_head;
    int32_t num_heads; /* over which a mean goes */
    int32_t sigmoid, gate_first;
    float epsilon;
};

#endif
