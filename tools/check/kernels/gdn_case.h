/* SPDX-License-Identifier: Apache-2.0 */
/* One step of a recurrent layer: its variants, its place in an image, and the arguments that lead
 * there. */
#ifndef CHECK_GDN_CASE_H
#define CHECK_GDN_CASE_H

#include <attn/draft/recurrent.h>

#include "cases/kernel_test.h"

enum { GDN_REQS = 6, GDN_FIRST_ROW = 2, GDN_PADDING = 3, GDN_MAX_STATES = 8 };
#define GDN_MAX_KEPT 6      /* checkpoints of a request */
#define GDN_MAX_TOKENS 8300 /* in a batch */
#define GDN_PLANTED 3
#define GDN_MAX_SLOTS (GDN_REQS * (2 * GDN_MAX_STATES + GDN_MAX_KEPT) + 3)

enum gdn_shape {
    GDN_STEPS,  /* one token each; one request of no length */
    GDN_CHUNKS, /* lengths around the edges of a chunk */
    GDN_MIXED,
    GDN_DRAFTS, /* up to 1 + n tokens, and one request of more */
    GDN_LONG,   /* one request of many chunks next to short ones */
    GDN_SHAPE_COUNT
};

extern const char *const gdn_shape_names[GDN_SHAPE_COUNT];

/* What one input of each of three requests is. */
enum gdn_odd {
    GDN_USUAL,
    GDN_NAN,
    GDN_INFINITE,
    GDN_HUGE, /* its square is no float32 */
    GDN_ODD_COUNT
};

/* A rule, and what its cases are named by. */
struct gdn_rule {
    const char *name;
    struct attn_recurrent_rule rule;
};
enum gdn_rule_code {
    GDN_GATED_DELTA,
    GDN_KDA,
    GDN_BOUNDED,
    GDN_KDA_BOUNDED,
    GDN_KDA_GIVEN,
    GDN_MAMBA2,
    GDN_MAMBA2_LIMITS,
    GDN_LIGHTNING,
    GDN_DELTA_SKIP,
    GDN_DELTA_STEP,
    GDN_ADDITIVE_CHANNELS,
    GDN_RULE_COUNT
};
extern const struct gdn_rule gdn_rules[GDN_RULE_COUNT];

struct gdn_variant {
    int32_t shape;
    int32_t dtype;
    int32_t num_k_heads, num_v_heads, head_size_k, head_size_v;
    int32_t conv_width, chunk_size, drafted;
    bool silu, bias, l2norm;
    bool by_length;      /* has_initial_state NULL */
    bool strong;         /* decays that underflow to 0 */
    bool strided;        /* rows, slots and channels apart from each other */
    bool initial;        /* states are read from slots of their own */
    int32_t kept;        /* tokens from one checkpoint to the next; 0: none */
    int32_t odd;         /* enum gdn_odd, inputs of three requests (struct gdn_planted) */
    int32_t invariant;   /* batch_invariant of the layer */
    int32_t rule;        /* enum gdn_rule_code */
    int32_t state_dtype; /* 0: F32 */
    int32_t norm;        /* the row of gdn_norms for the output; 0: none */
    int32_t replay;      /* tokens from one write of the state to the next, by a ring; 0: no ring */
    int32_t philox;      /* philox_rounds of states that are rounded by a seed; 0: to nearest */
};

#define GDN_NUM_NORMS 4

enum gdn_operand {
    GDN_ROWS, /* or q, k and v as slices of it */
    GDN_Q,
    GDN_K,
    GDN_V,
    GDN_A, /* all gates, of which b are the last ones */
    GDN_B,
    GDN_OUT,
    GDN_CONV_WEIGHT,
    GDN_CONV_BIAS,
    GDN_A_LOG,
    GDN_DT_BIAS,
    GDN_SKIP,
    GDN_NORM_WEIGHT,
    GDN_OUTPUT_GATE,
    GDN_STATE,
    GDN_WINDOW,
    GDN_RING,
    GDN_STARTS,
    GDN_LENGTHS,
    GDN_SLOTS,
    GDN_HAS_STATE,
    GDN_ACCEPTED,
    GDN_INITIAL,
    GDN_KEPT,
    GDN_RING_TOKENS,
    GDN_OPERANDS
};

/* A NaN or another odd number of one token. A NaN reaches what the recurrence makes of it, and on a
 * CPU nothing else; on a GPU a kernel that works in chunks may take it to earlier tokens of its
 * chunk, too, and to all channels of its heads. So does an infinity, of which kernels may make NaN
 * or another infinity where the reference has one of them. */
struct gdn_planted {
    int32_t request, token;
    int32_t first_head, num_heads; /* value heads that it reaches */
    bool in_state;
};

struct gdn_case {
    struct gdn_variant v;
    int32_t channels;                  /* 2 Hk Dk + Hv Dv */
    int64_t first_q, first_k, first_v; /* first channels of q, k and v */
    int32_t gates;                     /* a token's elements of a; b follows them */
    int32_t window;                    /* entries of a channel's window */
    int32_t num_states;                /* states of a request */
    int32_t num_slots;
    int32_t num_rows, num_actual_rows;
    int64_t row_stride, gate_stride, state_stride, channel_stride, ring_stride; /* elements */
    struct attn_cache_desc ring;
    int32_t ring_gates; /* element of its row */
    int32_t ring_tokens[GDN_REQS];
    int32_t tokens[GDN_REQS], starts[GDN_REQS + 1], lengths[GDN_REQS], accepted[GDN_REQS];
    int32_t slots[GDN_REQS][GDN_MAX_STATES];
    int32_t initial[GDN_REQS][GDN_MAX_STATES], kept[GDN_REQS][GDN_MAX_KEPT]; /* slots */
    uint8_t has_state[GDN_REQS];
    struct gdn_planted planted[GDN_PLANTED]; /* in a value, a query (of layers with a norm the
                                                output's gate), and a key or a gate; huge ones in a
                                                value, a query and a key */
    bool spreads;                            /* they may do so through a chunk: not on a CPU */
    struct operand operands[GDN_OPERANDS];
};

/* Everything that the kernel takes, over one copy of the image. */
struct gdn_step {
    struct attn_recurrent_desc desc;
    struct attn_recurrent_rule rule;
    struct attn_layer_desc layer;
    struct attn_recurrent_weights weights;
    struct attn_recurrent_skip skip;
    struct attn_recurrent_norm norm;
    struct attn_recurrent_rounding rounding;
    struct attn_recurrent_norm_weight norm_weight;
    struct attn_io_recurrent_gate output_gate;
    struct attn_layer_params params;
    struct attn_batch_recurrent states;
    struct attn_batch batch;
    struct attn_kv_view state, window, ring;
    struct attn_layer_caches caches;
    struct attn_layer_cache cache;
    struct attn_batch_replay replay;
    struct attn_io_recurrent io;
    struct attn_attend_args attend;
};

/* Draws the batch. */
void gdn_case_init(struct gdn_case *c, const struct gdn_variant *v, uint64_t *random);
/* Makes the case's test and fills what a kernel reads; states without a past, rows around the batch
 * and everything between rows stay poison. */
void gdn_case_place(struct gdn_case *c, struct kernel_test *test, struct trial *trial,
                    uint64_t *random);
void gdn_case_bind(const struct gdn_case *c, struct gdn_step *step, struct kernel_call *call);
/* What the step does to a request: false, it is left alone. */
bool gdn_case_active(const struct gdn_case *c, int32_t request);
/* The slots of checkpoints that the step writes; their number. */
int32_t gdn_case_checkpoints(const struct gdn_case *c, int32_t request, int32_t *slots);
/* Tokens of the request in the state that the step leaves in its slot, where the layer has a ring;
 * 0: that state stays as it is. */
int32_t gdn_case_written(const struct gdn_case *c, int32_t request);
/* Element of the ring with the row of a key head, of token t of the step; negative: before it. */
int64_t gdn_case_ring_row(const struct gdn_case *c, int32_t slot, int32_t request, int32_t t,
                          int32_t head);
/* The part of the numbers of 16 bits in these slots that two images of the states have alike. */
double gdn_case_equal(const struct gdn_case *c, const uint8_t *a, const uint8_t *b,
                      const uint8_t *slots);
/* At least so many of the numbers that a seed rounds are the reference's: a kernel's own error
 * takes few past their random bits, other bits would take a third. */
#define ROUNDED_ALIKE(c) ((c)->v.shape == GDN_STEPS && (c)->v.replay == 0 ? 0.99 : 0.85)
/* Whether a state after every token is kept, or, with a ring, a window. */
bool gdn_case_keeps_all(const struct gdn_case *c, int32_t request);

#endif
