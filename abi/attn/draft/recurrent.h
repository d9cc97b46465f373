/* SPDX-License-Identifier: Apache-2.0 */
/* A draft (abi/README.md, Drafts): recurrent layers whose rule is not the gated delta rule with a
 * gate per head. The state, its slots, drafts, checkpoints and the convolution are recurrent.h's;
 * an extension of the layer says how a token changes the state. All zeros are the gated delta rule.
 *
 *     KDA (Kimi Linear)          gate_per_channel; gate SOFTPLUS, BOUNDED or GIVEN
 *     Mamba2, SSD (q = C, k = B, v = x, Hk groups, the layer's scale 1)
 *                                rule ADDITIVE, write_gate STEP, values_first, has_skip
 *     lightning (a decay per head, constant)
 *                                rule ADDITIVE, gate CONSTANT, write_gate NONE
 *
 * A norm and a gate of the output (attn_recurrent_norm), states rounded by a seed
 * (attn_recurrent_rounding) and a ring of inputs (ATTN_CACHE_REPLAY) go with any rule, gated delta
 * included.
 *
 * A backend declares what it takes (attn_recurrent_rule_caps; a ring: cache_roles), and the rest is
 * refused by name. */
#ifndef ATTN_DRAFT_RECURRENT_H
#define ATTN_DRAFT_RECURRENT_H

#include "../recurrent.h"

#define ATTN_EXT_DRAFT_RECURRENT_RULE 0x803u /* struct attn_recurrent_rule, of a layer */
#define ATTN_EXT_DRAFT_RECURRENT_SKIP 0x804u /* struct attn_recurrent_skip, of parameters */
#define ATTN_EXT_DRAFT_RECURRENT_CAPS 0x805u /* struct attn_recurrent_rule_caps, of a backend */
#define ATTN_EXT_DRAFT_RECURRENT_NORM 0x809u /* struct attn_recurrent_norm, of a layer */
#define ATTN_EXT_DRAFT_RECURRENT_NORM_WEIGHT 0x80au /* struct attn_recurrent_norm_weight */
#define ATTN_EXT_DRAFT_IO_RECURRENT_GATE 0x80bu     /* struct attn_io_recurrent_gate */
#define ATTN_EXT_DRAFT_BATCH_REPLAY 0x814u          /* struct attn_batch_replay, of a batch */
#define ATTN_EXT_DRAFT_RECURRENT_ROUNDING 0x819u    /* struct attn_recurrent_rounding, of a layer */

enum attn_recurrent_update {
    ATTN_RULE_GATED_DELTA = 0, /* S <- G S; r = beta (v - S k); S <- S + r k^T */
    ATTN_RULE_ADDITIVE = 1     /* S <- G S + beta v k^T */
};

/* g <= 0, whose e^g is G: one of each head or, with gate_per_channel, one of each of its Dk
 * columns. dt = softplus(a + dt_bias), within [dt_min, dt_max]. */
enum attn_recurrent_gate {
    ATTN_GATE_SOFTPLUS = 0, /* g = -exp(a_log) dt */
    ATTN_GATE_BOUNDED = 1,  /* g = gate_bound sigmoid(exp(a_log) (a + dt_bias)) */
    ATTN_GATE_GIVEN = 2,    /* g = a; a_log and dt_bias are NULL */
    ATTN_GATE_CONSTANT = 3  /* g = -exp(a_log), per head; a and dt_bias are NULL */
};

enum attn_recurrent_write_gate {
    ATTN_WRITE_GATE_SIGMOID = 0, /* beta = sigmoid(b) */
    ATTN_WRITE_GATE_NONE = 1,    /* beta = 1; b is NULL */
    ATTN_WRITE_GATE_STEP = 2     /* beta = dt, of gate SOFTPLUS per head; b is NULL */
};

/* On attn_layer_desc, next to attn_recurrent_desc. Shapes that differ from recurrent.h's: with
 * gate_per_channel attn_io_recurrent.a is [T, Hv Dk] and attn_recurrent_weights.dt_bias [Hv Dk]. */
struct attn_recurrent_rule {
    struct attn_ext ext;      /* id ATTN_EXT_DRAFT_RECURRENT_RULE */
    int32_t rule;             /* enum attn_recurrent_update */
    int32_t gate;             /* enum attn_recurrent_gate */
    int32_t gate_per_channel; /* 1: a gate per column of S */
    int32_t write_gate;       /* enum attn_recurrent_write_gate */
    int32_t values_first;     /* 1: channels of mixed_qkv in the order v, k, q (Mamba2's x, B, C) */
    int32_t has_skip;         /* 1: o <- o + skip[h] v; the parameters bring attn_recurrent_skip */
    float gate_bound;         /* below 0 with gate BOUNDED (-5); else 0 */
    float dt_min;             /* 0 or above */
    float dt_max;             /* dt_min or above; 0: no limit */
    int32_t reserved;         /* 0 */
};

struct attn_recurrent_skip { /* on attn_layer_params */
    struct attn_ext ext;     /* id ATTN_EXT_DRAFT_RECURRENT_SKIP */
    const float *skip;       /* device [Hv] */
};

enum attn_recurrent_gate_activation { ATTN_OUTPUT_GATE_SILU = 0, ATTN_OUTPUT_GATE_SIGMOID = 1 };

/* On attn_layer_desc, next to attn_recurrent_desc: what is done to the rule's outputs o, which
 * count as rounded to out's dtype, before they are left in out:
 *
 *     gate_first 0 (Qwen3-Next, Kimi Linear, MiniMax)   w o / rms(o) act(z)
 *     gate_first 1 (Mamba2)                             w x / rms(x), x = o act(z)
 *     rms(x) = sqrt(mean x^2 + epsilon), the mean over a head or over num_v_heads / num_groups
 *
 * Needs attn_recurrent_norm_weight of the parameters and attn_io_recurrent_gate of a run. */
struct attn_recurrent_norm {
    struct attn_ext ext;     /* id ATTN_EXT_DRAFT_RECURRENT_NORM */
    int32_t gate_activation; /* enum attn_recurrent_gate_activation */
    int32_t gate_first;      /* 1: the norm is of gated outputs */
    int32_t num_groups; /* heads share a mean in so many groups, which divide num_v_heads; 0: each
                           has its own */
    float epsilon;      /* above 0 */
};

struct attn_recurrent_norm_weight { /* on attn_layer_params */
    struct attn_ext ext;            /* id ATTN_EXT_DRAFT_RECURRENT_NORM_WEIGHT */
    /* w, of floats: [Dv], of every head alike, or [Hv Dv] where num_groups is above 0 */
    const struct attn_tensor *weight;
};

struct attn_io_recurrent_gate {     /* on attn_step_io */
    struct attn_ext ext;            /* id ATTN_EXT_DRAFT_IO_RECURRENT_GATE */
    const struct attn_tensor *gate; /* z, [T, Hv, Dv] of floats, the last dimension contiguous */
};

/* On attn_layer_desc, next to attn_recurrent_desc whose state_dtype has 16 bits: states are rounded
 * stochastically where they are written to slots. A number x between two neighbours of state_dtype
 * of sizes |a| < |b| becomes b if floor(2^16 (|x| - |a|) / (|b| - |a|)) + r >= 2^16, else a; beyond
 * the largest finite number x is rounded to nearest, and NaN stays NaN. r, of 16 bits, follows from
 * the seed, from the place in the state, row i and column j of value head h, and from the number of
 * the request's tokens in the state, n:
 *
 *     x = Philox4x32-R of counter (j / 8, h Dv + i, n, 0) and key (seed mod 2^32, seed / 2^32)
 *     r = x[j % 8 / 2] / 2^(16 (j % 2)) mod 2^16
 *
 * with R = philox_rounds, so that neither slots, other requests of a batch nor the cut of a prompt
 * into kernels' tiles change it. Layers that shall not have the same r have seeds of their own.
 * Needs seq_lens of batches. */
struct attn_recurrent_rounding {
    struct attn_ext ext; /* id ATTN_EXT_DRAFT_RECURRENT_ROUNDING */
    uint64_t seed;
    int32_t philox_rounds; /* 1 to 16; 0: 10 */
    int32_t reserved;      /* 0 */
};

/* Replay: next to each state a ring of the inputs of the tokens since, so that a step reads state
 * and ring and writes its tokens' inputs in place of the state. Any rule. The layer has the ring as
 * its one further cache (attn_layer_caches): role ATTN_CACHE_REPLAY, table 0, whose blocks are the
 * state's slots; kv_dtype the layer's dtype, of e bytes; num_heads Hk; block_size n +
 * 2 num_speculative_tokens, n the tokens from one write of the state to the next. With G = Hv / Hk
 * and gates 1 or, with gate_per_channel, Dk, the row of a key head is, in elements,
 *
 *     k [Dk], u [G, Dv], then, from an even element on, float32 g [G, gates]
 *
 * in head_size = that count rounded up to 8: S <- e^g S + u k^T is what the token did, k after the
 * norm, u the rule's r (additive rules: beta v). The token at position p is row p % block_size.
 *
 * state_slots and initial_slots have one slot for each request, whatever was drafted. A request of
 * up to 1 + num_speculative_tokens tokens (of one without num_accepted_tokens) leaves its state and
 * adds all of its tokens to the ring unless it starts from zeros or from another slot than
 * state_slots', or has n - 1 or more in the ring: then the slot gets the state after its first
 * token, and the ring the tokens after that. A longer request leaves the state after all of its
 * tokens, and nothing in the ring. Checkpoints are whole states, to be started from with an empty
 * ring.
 *
 * The slots are the engine's and are copied whole, ring included; so is the cursor ring_tokens,
 * which goes where the request goes. After a step that accepted a tokens of the request it is
 * ring_tokens + a if the state was left, a - 1 if it was written after the first token, else 0. */
struct attn_batch_replay {      /* on attn_batch, which has seq_lens */
    struct attn_ext ext;        /* id ATTN_EXT_DRAFT_BATCH_REPLAY */
    const int32_t *ring_tokens; /* device [R]: of the initial slot; of no matter without a state */
};

struct attn_recurrent_rule_caps { /* on attn_backend_caps, next to attn_recurrent_caps */
    struct attn_ext ext;          /* id ATTN_EXT_DRAFT_RECURRENT_CAPS */
    /* masks of 1 << code; 0 reads as code 0 alone */
    uint32_t rules;           /* enum attn_recurrent_update */
    uint32_t gates;           /* enum attn_recurrent_gate */
    uint32_t write_gates;     /* enum attn_recurrent_write_gate */
    int32_t gate_per_channel; /* 1: takes it; so the next two */
    int32_t values_first;
    int32_t skip;
    int32_t norm;                /* 1: takes attn_recurrent_norm */
    int32_t stochastic_rounding; /* 1: takes attn_recurrent_rounding */
};

#endif
