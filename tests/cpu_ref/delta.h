/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences for gated_delta that a kernel sees in steps, and the recurrence over them in float64.
 */
#ifndef TESTS_CPU_REF_DELTA_H
#define TESTS_CPU_REF_DELTA_H

#include <attn/recurrent.h>

#include "harness.h"

#define MAX_REQS 6
#define MAX_SEQUENCE 512
#define NUM_SLOTS 40

struct gdn_case {
    const char *name;
    int32_t dtype, hk, hv, dk, dv;
    int32_t conv_width, silu, bias, l2norm, chunk_size, drafted;
    int32_t num_reqs;
    int32_t steps[3][MAX_REQS];    /* query lengths of up to three steps; -1: a negative slot */
    int32_t accepted[3][MAX_REQS]; /* of the step before, where tokens are drafted */
    int32_t first_row;
    int32_t by_length; /* has_initial_state NULL */
    int32_t strong;    /* some decays underflow to 0 */
};

/* All of a case: sequences drawn ahead, what the oracle has seen of them, the kernel's memory. */
struct delta {
    const struct gdn_case *c;
    int32_t channels, window;
    double *mixed, *a, *b; /* [request, MAX_SEQUENCE, channels or Hv], as stored */
    double *conv_weight, *conv_bias;
    float *a_log, *dt_bias;
    int32_t length[MAX_REQS]; /* accepted tokens so far */
    double *state;            /* [request, Hv, Dv, Dk] behind them */
    double *out;              /* of the step, [token, Hv, Dv] */
    float *states;            /* [slots, Hv, Dv, Dk] */
    uint8_t *windows;         /* [slots, channels, window] */
    uint8_t *mixed_rows, *a_rows, *b_rows, *weight_rows, *bias_rows, *out_rows;
    int32_t slots[MAX_REQS][4];
};

struct delta *delta_create(const struct gdn_case *c);
void delta_destroy(struct delta *p);
/* One token of one head by the recurrence: S [Dv, Dk] moves on, o is written. */
void delta_recur(const struct delta *p, int32_t r, int32_t t, int32_t h, double *s, double *o);

/* One call of the kernel. */
struct step {
    struct attn_layer_desc layer;
    struct attn_recurrent_desc desc;
    struct attn_layer_params params;
    struct attn_recurrent_weights weights;
    struct attn_batch batch;
    struct attn_batch_recurrent states;
    struct attn_io_recurrent io;
    struct attn_kv_view state_view, window_view;
    int32_t query_start[MAX_REQS + 1], seq_lens[MAX_REQS], slots[MAX_REQS][4];
    uint8_t has_state[MAX_REQS];
    struct test_tensor mixed, a, b, q, k, v, out, weight, bias;
    struct attn_attend_args args;
    int32_t rows;
};

int32_t step_tokens(const struct gdn_case *c, int32_t step, int32_t r);
void step_create(struct delta *p, struct step *s, int32_t step);
/* Frees what step_create put into p. */
void step_destroy(struct delta *p);

#endif
