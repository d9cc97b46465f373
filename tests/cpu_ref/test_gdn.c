/* SPDX-License-Identifier: Apache-2.0 */
/* gated_delta against the recurrence in float64, token by token, over sequences that the kernel
 * sees in steps. Usage: test_gdn FILE.so */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <attn/gdn.h>

#include <cmocka.h>

#include "formats.h"
#include "harness.h"
#include "problem.h"

#define SEED 53
#define MAX_REQS 6
#define MAX_SEQUENCE 512
#define NUM_SLOTS 40
#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))

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

static const struct gdn_case cases[] = {
    {"one token",
     ATTN_DTYPE_F32,
     2,
     4,
     16,
     24,
     4,
     1,
     0,
     1,
     0,
     0,
     3,
     {{1, 1, 1}, {1, 1, 1}, {1, 0, 1}}},
    {"chunk edges",
     ATTN_DTYPE_F32,
     2,
     4,
     16,
     40,
     4,
     1,
     1,
     1,
     0,
     0,
     6,
     {{1, 63, 64, 65, 128, 130}, {64, 1, 2, 1, 70, 1}},
     .first_row = 2},
    {"Qwen3-Next",
     ATTN_DTYPE_BF16,
     2,
     4,
     128,
     128,
     4,
     1,
     0,
     1,
     64,
     0,
     3,
     {{40, 70, 5}, {1, 1, 30}}},
    {"Dk larger, f16",
     ATTN_DTYPE_F16,
     1,
     3,
     64,
     8,
     4,
     1,
     1,
     1,
     16,
     0,
     3,
     {{33, 16, 17}, {1, 2, 3}},
     .by_length = 1},
    {"no convolution", ATTN_DTYPE_F32, 2, 2, 16, 24, 0, 0, 0, 1, 7, 0, 3, {{20, 1, 8}, {3, 1, 1}}},
    {"width 2, no SiLU, no norm",
     ATTN_DTYPE_F32,
     1,
     2,
     16,
     8,
     2,
     0,
     0,
     0,
     5,
     0,
     2,
     {{11, 1}, {1, 12}}},
    {"width 1", ATTN_DTYPE_F32, 1, 2, 16, 8, 1, 1, 0, 1, 0, 0, 2, {{11, 1}, {1, 12}}},
    {"skipped and empty",
     ATTN_DTYPE_F32,
     2,
     4,
     16,
     24,
     4,
     1,
     0,
     1,
     0,
     0,
     5,
     {{5, -1, 0, 70, -1}, {1, -1, 1, 1, 3}},
     .first_row = 1},
    {"drafts",
     ATTN_DTYPE_F32,
     2,
     4,
     16,
     24,
     4,
     1,
     0,
     1,
     0,
     3,
     4,
     {{4, 1, 9, 2}, {4, 4, 1, 3}, {1, 2, 4, 4}},
     {{1, 1, 1, 1}, {3, 1, 1, 2}, {4, 2, 1, 1}}},
    {"one draft, bf16",
     ATTN_DTYPE_BF16,
     1,
     2,
     32,
     16,
     4,
     1,
     0,
     1,
     0,
     1,
     3,
     {{2, 70, 2}, {2, 2, 1}, {1, 2, 2}},
     {{1, 1, 1}, {2, 1, 1}, {1, 2, 1}}},
    {"decays of 0",
     ATTN_DTYPE_F32,
     2,
     4,
     16,
     24,
     4,
     1,
     0,
     1,
     0,
     0,
     2,
     {{70, 20}, {5, 1}},
     .strong = 1},
    {"largest", ATTN_DTYPE_F32, 1, 1, 512, 512, 4, 1, 0, 1, 0, 0, 1, {{9}, {1}}},
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

static double decode_round(const struct gdn_case *c, double x)
{
    return format_round(c->dtype, x);
}

/* k of layers without a norm stays short, or the recurrence grows without bound. */
static double draw_mixed(const struct gdn_case *c, int32_t channel)
{
    bool value = channel >= 2 * c->hk * c->dk;
    return decode_round(c, random_normal() * (c->l2norm || value ? 1 : 0.15));
}

static struct delta *delta_create(const struct gdn_case *c)
{
    struct delta *p = problem_memory(1, sizeof *p, 0);
    int64_t heads = (int64_t)c->hv * c->dv * c->dk;
    p->c = c;
    p->channels = 2 * c->hk * c->dk + c->hv * c->dv;
    p->window = c->conv_width > 0 ? c->conv_width - 1 + c->drafted : 0;
    p->mixed = problem_memory((int64_t)c->num_reqs * MAX_SEQUENCE * p->channels, 8, 0);
    p->a = problem_memory((int64_t)c->num_reqs * MAX_SEQUENCE * c->hv, 8, 0);
    p->b = problem_memory((int64_t)c->num_reqs * MAX_SEQUENCE * c->hv, 8, 0);
    for (int64_t i = 0; i < (int64_t)c->num_reqs * MAX_SEQUENCE * p->channels; i++) {
        p->mixed[i] = draw_mixed(c, (int32_t)(i % p->channels));
    }
    for (int64_t i = 0; i < (int64_t)c->num_reqs * MAX_SEQUENCE * c->hv; i++) {
        p->a[i] = decode_round(c, c->strong && i % 29 == 0 ? 5000 : random_normal());
        p->b[i] = decode_round(c, 2 * random_normal());
    }
    p->conv_weight = problem_memory((int64_t)p->channels * (c->conv_width + 1), 8, 0);
    p->conv_bias = problem_memory(p->channels, 8, 0);
    p->weight_rows = problem_memory((int64_t)p->channels * (c->conv_width + 1), 4, 0);
    p->bias_rows = problem_memory(p->channels, 4, 0);
    for (int32_t i = 0; i < p->channels * c->conv_width; i++) {
        p->conv_weight[i] = decode_round(c, 0.5 * random_normal());
        format_store(p->weight_rows, i, c->dtype, p->conv_weight[i]);
    }
    for (int32_t i = 0; i < p->channels; i++) {
        p->conv_bias[i] = c->bias ? decode_round(c, 0.3 * random_normal()) : 0;
        format_store(p->bias_rows, i, c->dtype, p->conv_bias[i]);
    }
    p->a_log = problem_memory(c->hv, 4, 0);
    p->dt_bias = problem_memory(c->hv, 4, 0);
    for (int32_t h = 0; h < c->hv; h++) {
        p->a_log[h] = (float)(random_normal() - 1);
        p->dt_bias[h] = (float)random_normal();
    }
    p->state = problem_memory(c->num_reqs * heads, 8, 0);
    p->out = problem_memory((int64_t)c->num_reqs * 160 * c->hv * c->dv, 8, 0);
    p->states = problem_memory(NUM_SLOTS * heads, 4, POISON);
    p->windows = problem_memory((int64_t)NUM_SLOTS * p->channels * (p->window + 1), 4, POISON);
    int32_t order[NUM_SLOTS];
    random_permutation(order, NUM_SLOTS);
    for (int32_t i = 0; i < MAX_REQS * 4; i++) {
        p->slots[i / 4][i % 4] = order[i];
    }
    return p;
}

static void delta_destroy(struct delta *p)
{
    void *memory[] = {p->mixed,   p->a,           p->b,        p->conv_weight, p->conv_bias,
                      p->a_log,   p->dt_bias,     p->state,    p->out,         p->states,
                      p->windows, p->weight_rows, p->bias_rows};
    for (int32_t i = 0; i < COUNT(memory); i++) {
        free(memory[i]);
    }
    free(p);
}

/* ---- the oracle */

static double convolved(const struct delta *p, int32_t r, int32_t t, int32_t channel)
{
    const struct gdn_case *c = p->c;
    const double *x = p->mixed + (int64_t)r * MAX_SEQUENCE * p->channels + channel;
    double y = p->conv_bias[channel];
    if (c->conv_width == 0) {
        return x[(int64_t)t * p->channels];
    }
    for (int32_t i = 0; i < c->conv_width; i++) {
        int32_t at = t - c->conv_width + 1 + i;
        y +=
            at < 0 ? 0 : p->conv_weight[channel * c->conv_width + i] * x[(int64_t)at * p->channels];
    }
    return c->silu ? y * 0.5 * (1 + tanh(y / 2)) : y; /* y sigmoid(y) */
}

static void key_row(const struct delta *p, int32_t r, int32_t t, int32_t first, double *row)
{
    double sum = 0;
    for (int32_t i = 0; i < p->c->dk; i++) {
        row[i] = convolved(p, r, t, first + i);
        sum += row[i] * row[i];
    }
    for (int32_t i = 0; i < p->c->dk && p->c->l2norm; i++) {
        row[i] /= sqrt(sum + 1e-6);
    }
}

/* One token of one head: S [Dv, Dk] moves on, o is written. */
static void recur(const struct delta *p, int32_t r, int32_t t, int32_t h, double *s, double *o)
{
    const struct gdn_case *c = p->c;
    double q[512], k[512];
    int32_t key_head = h * c->hk / c->hv;
    int64_t at = ((int64_t)r * MAX_SEQUENCE + t) * c->hv + h;
    double x = p->a[at] + p->dt_bias[h];
    double g = -exp(p->a_log[h]) * (x > 20 ? x : log(1 + exp(x)));
    double beta = 0.5 * (1 + tanh(p->b[at] / 2));
    key_row(p, r, t, key_head * c->dk, q);
    key_row(p, r, t, c->hk * c->dk + key_head * c->dk, k);
    for (int32_t d = 0; d < c->dv; d++) {
        double v = convolved(p, r, t, 2 * c->hk * c->dk + h * c->dv + d), sk = 0;
        for (int32_t i = 0; i < c->dk; i++) {
            s[d * c->dk + i] *= exp(g);
            sk += s[d * c->dk + i] * k[i];
        }
        o[d] = 0;
        for (int32_t i = 0; i < c->dk; i++) {
            s[d * c->dk + i] += beta * (v - sk) * k[i];
            o[d] += s[d * c->dk + i] * q[i] / sqrt(c->dk);
        }
    }
}

/* ---- one step */

struct step {
    struct attn_layer_desc layer;
    struct attn_gdn_desc desc;
    struct attn_layer_params params;
    struct attn_gdn_weights weights;
    struct attn_batch batch;
    struct attn_batch_gdn states;
    struct attn_io_gdn io;
    struct attn_kv_view state_view, window_view;
    int32_t query_start[MAX_REQS + 1], seq_lens[MAX_REQS], slots[MAX_REQS][4];
    uint8_t has_state[MAX_REQS];
    struct test_tensor mixed, a, b, q, k, v, out, weight, bias;
    struct attn_attend_args args;
    int32_t rows;
};

static int32_t tokens_of(const struct gdn_case *c, int32_t step, int32_t r)
{
    int32_t count = c->steps[step][r];
    return count < 0 ? 2 : count; /* a skipped request has rows, too */
}

static void describe(const struct delta *p, struct step *s, int32_t step)
{
    const struct gdn_case *c = p->c;
    int64_t head = (int64_t)c->dv * c->dk, element = format_bytes(c->dtype);
    s->desc = (struct attn_gdn_desc){.ext = {ATTN_EXT_GDN_DESC, 0, sizeof s->desc, NULL},
                                     .num_k_heads = c->hk,
                                     .num_v_heads = c->hv,
                                     .head_size_k = c->dk,
                                     .head_size_v = c->dv,
                                     .conv_width = c->conv_width,
                                     .conv_silu = c->silu,
                                     .qk_l2norm = c->l2norm,
                                     .chunk_size = c->chunk_size,
                                     .num_speculative_tokens = c->drafted,
                                     .state_dtype = ATTN_DTYPE_F32};
    s->layer = (struct attn_layer_desc){.struct_size = sizeof s->layer,
                                        .next = &s->desc.ext,
                                        .kind = ATTN_LAYER_GDN,
                                        .dtype = c->dtype,
                                        .num_q_heads = c->hk,
                                        .num_kv_heads = c->hk,
                                        .head_size = c->dk,
                                        .head_size_v = c->dv,
                                        .scale = (float)(1 / sqrt(c->dk)),
                                        .causal = 1};
    s->weights = (struct attn_gdn_weights){
        .ext = {ATTN_EXT_GDN_WEIGHTS, 0, sizeof s->weights, NULL},
        .a_log = p->a_log,
        .dt_bias = p->dt_bias,
        .conv_weight = tensor_set(&s->weight, p->weight_rows, c->dtype, 2,
                                  (int64_t[]){p->channels, c->conv_width}, NULL),
        .conv_bias = c->bias ? tensor_set(&s->bias, p->bias_rows, c->dtype, 1,
                                          (int64_t[]){p->channels}, NULL)
                             : NULL};
    s->params =
        (struct attn_layer_params){.struct_size = sizeof s->params, .next = &s->weights.ext};
    s->states =
        (struct attn_batch_gdn){.ext = {ATTN_EXT_BATCH_GDN, 0, sizeof s->states, NULL},
                                .state_slots = &s->slots[0][0],
                                .state_slots_stride = 4,
                                .has_initial_state = c->by_length ? NULL : s->has_state,
                                .num_accepted_tokens = c->drafted > 0 ? c->accepted[step] : NULL};
    s->batch = (struct attn_batch){.struct_size = sizeof s->batch,
                                   .next = &s->states.ext,
                                   .num_reqs = c->num_reqs,
                                   .num_tokens = s->rows + 2,
                                   .num_actual_tokens = s->rows,
                                   .causal = -1,
                                   .query_start_loc = s->query_start,
                                   .query_start_loc_host = s->query_start,
                                   .seq_lens = s->seq_lens,
                                   .seq_lens_host = s->seq_lens};
    s->state_view = (struct attn_kv_view){.struct_size = sizeof s->state_view,
                                          .data = p->states,
                                          .num_blocks = NUM_SLOTS,
                                          .block_size = 1,
                                          .num_heads = c->hv,
                                          .head_size = (int32_t)head,
                                          .stride_block = 4 * head * c->hv,
                                          .stride_slot = 4 * head * c->hv,
                                          .stride_head = 4 * head};
    s->window_view = (struct attn_kv_view){.struct_size = sizeof s->window_view,
                                           .data = p->windows,
                                           .num_blocks = NUM_SLOTS,
                                           .block_size = 1,
                                           .num_heads = p->channels,
                                           .head_size = p->window,
                                           .stride_block = p->channels * (p->window + 1) * element,
                                           .stride_slot = p->channels * (p->window + 1) * element,
                                           .stride_head = (p->window + 1) * element};
}

/* Rows of q, k and v where the engine has run the convolution itself: slices of the mixed row. */
static void set_tensors(struct delta *p, struct step *s)
{
    const struct gdn_case *c = p->c;
    int64_t rows = s->rows + 2, n = p->channels;
    int32_t element = format_bytes(c->dtype);
    p->mixed_rows = problem_memory(rows * n, 4, POISON);
    p->a_rows = problem_memory(rows * c->hv, 4, POISON);
    p->b_rows = problem_memory(rows * c->hv, 4, POISON);
    p->out_rows = problem_memory(rows * c->hv * c->dv, 4, POISON);
    s->io = (struct attn_io_gdn){
        .ext = {ATTN_EXT_IO_GDN, 0, sizeof s->io, NULL},
        .mixed_qkv = c->conv_width > 0 ? tensor_set(&s->mixed, p->mixed_rows, c->dtype, 2,
                                                    (int64_t[]){rows, n}, NULL)
                                       : NULL,
        .a = tensor_set(&s->a, p->a_rows, c->dtype, 2, (int64_t[]){rows, c->hv}, NULL),
        .b = tensor_set(&s->b, p->b_rows, c->dtype, 2, (int64_t[]){rows, c->hv}, NULL)};
    const int64_t strides[] = {n, c->dk, 1}, v_strides[] = {n, c->dv, 1};
    tensor_set(&s->q, p->mixed_rows, c->dtype, 3, (int64_t[]){rows, c->hk, c->dk}, strides);
    tensor_set(&s->k, p->mixed_rows + (int64_t)c->hk * c->dk * element, c->dtype, 3,
               (int64_t[]){rows, c->hk, c->dk}, strides);
    tensor_set(&s->v, p->mixed_rows + 2 * (int64_t)c->hk * c->dk * element, c->dtype, 3,
               (int64_t[]){rows, c->hv, c->dv}, v_strides);
    tensor_set(&s->out, p->out_rows, c->dtype, 3, (int64_t[]){rows, c->hv, c->dv}, NULL);
    bool plain = c->conv_width == 0;
    s->args = (struct attn_attend_args){.struct_size = sizeof s->args,
                                        .next = &s->io.ext,
                                        .instance = threaded.instance,
                                        .layer = &s->layer,
                                        .params = &s->params,
                                        .batch = &s->batch,
                                        .k_cache = &s->state_view,
                                        .v_cache = c->conv_width > 0 ? &s->window_view : NULL,
                                        .q = plain ? &s->q.tensor : NULL,
                                        .k = plain ? &s->k.tensor : NULL,
                                        .v = plain ? &s->v.tensor : NULL,
                                        .out = &s->out.tensor};
}

static void step_create(struct delta *p, struct step *s, int32_t step)
{
    const struct gdn_case *c = p->c;
    memset(s, 0, sizeof *s);
    s->query_start[0] = c->first_row;
    for (int32_t r = 0; r < c->num_reqs; r++) {
        s->query_start[r + 1] = s->query_start[r] + tokens_of(c, step, r);
        s->has_state[r] = p->length[r] > 0;
        s->seq_lens[r] = p->length[r] + tokens_of(c, step, r);
        for (int32_t i = 0; i < 4; i++) {
            s->slots[r][i] = c->steps[step][r] < 0 ? -7 : p->slots[r][i];
        }
    }
    s->rows = s->query_start[c->num_reqs];
    describe(p, s, step);
    set_tensors(p, s);
    for (int32_t r = 0; r < c->num_reqs; r++) {
        for (int32_t t = 0; t < tokens_of(c, step, r); t++) {
            int64_t from = (int64_t)r * MAX_SEQUENCE + p->length[r] + t;
            int64_t row = s->query_start[r] + t;
            for (int32_t i = 0; i < p->channels; i++) {
                format_store(p->mixed_rows, row * p->channels + i, c->dtype,
                             p->mixed[from * p->channels + i]);
            }
            for (int32_t h = 0; h < c->hv; h++) {
                format_store(p->a_rows, row * c->hv + h, c->dtype, p->a[from * c->hv + h]);
                format_store(p->b_rows, row * c->hv + h, c->dtype, p->b[from * c->hv + h]);
            }
        }
    }
}

static void step_destroy(struct delta *p)
{
    free(p->mixed_rows);
    free(p->a_rows);
    free(p->b_rows);
    free(p->out_rows);
}

static void expect(const struct gdn_case *c, double got, double want, double bound, double rms,
                   const char *what, int64_t at)
{
    if (!(fabs(got - want) <= bound * (fabs(want) + rms))) {
        fail_msg("%s: %s, element %lld: %.9g, not %.9g", c->name, what, (long long)at, got, want);
    }
}

static double rms_of(const double *row, int32_t count)
{
    double sum = 0;
    for (int32_t i = 0; i < count; i++) {
        sum += row[i] * row[i];
    }
    return sqrt(sum / count);
}

static void compare_state(const struct delta *p, int32_t slot, int32_t h, const double *want)
{
    int32_t count = p->c->dv * p->c->dk;
    const float *got = p->states + ((int64_t)slot * p->c->hv + h) * count;
    double rms = rms_of(want, count);
    for (int32_t i = 0; i < count; i++) {
        expect(p->c, got[i], want[i], 2e-6, rms, "state", i);
    }
}

/* One request: outputs, and the states that have to be left, against the recurrence. */
static void compare_request(struct delta *p, const struct step *s, int32_t step, int32_t r)
{
    const struct gdn_case *c = p->c;
    int32_t tokens = c->steps[step][r], size = c->dv * c->dk;
    bool all = c->drafted > 0 && tokens <= 1 + c->drafted;
    double bound = 1.01 * format_half_step(c->dtype) + 2e-6, o[512];
    /* how many of them the next step accepts; the oracle's own state goes no further */
    int32_t kept =
        all && step < 2 && c->accepted[step + 1][r] > 0 ? c->accepted[step + 1][r] : tokens;
    double *ahead = problem_memory(size, sizeof *ahead, 0);
    for (int32_t h = 0; h < c->hv; h++) {
        double *state = p->state + ((int64_t)r * c->hv + h) * size;
        memcpy(ahead, state, (size_t)size * sizeof *ahead);
        for (int32_t t = 0; t < tokens; t++) {
            recur(p, r, p->length[r] + t, h, ahead, o);
            int64_t at = ((int64_t)(s->query_start[r] + t) * c->hv + h) * c->dv;
            double rms = rms_of(o, c->dv);
            for (int32_t d = 0; d < c->dv; d++) {
                expect(c, format_load(p->out_rows, at + d, c->dtype), o[d], bound, rms, "out",
                       at + d);
            }
            if (all) {
                compare_state(p, p->slots[r][t], h, ahead);
            }
            if (t + 1 == kept) {
                memcpy(state, ahead, (size_t)size * sizeof *ahead);
            }
        }
        if (!all) {
            compare_state(p, p->slots[r][0], h, ahead);
        }
    }
    free(ahead);
    p->length[r] += kept;
}

/* The window begins at the tokens before the accepted ones. */
static void compare_window(const struct delta *p, int32_t step, int32_t r, int32_t before)
{
    const struct gdn_case *c = p->c;
    int32_t tokens = c->steps[step][r];
    bool all = c->drafted > 0 && tokens <= 1 + c->drafted;
    int32_t first = before + (all ? 1 : tokens) - (c->conv_width - 1);
    for (int32_t channel = 0; channel < p->channels; channel++) {
        int64_t at = ((int64_t)p->slots[r][0] * p->channels + channel) * (p->window + 1);
        for (int32_t i = 0; i < c->conv_width - 1 + (all ? tokens - 1 : 0); i++) {
            double want =
                first + i < 0
                    ? 0
                    : p->mixed[((int64_t)r * MAX_SEQUENCE + first + i) * p->channels + channel];
            expect(c, format_load(p->windows, at + i, c->dtype), want, 0, 0, "window", at + i);
        }
    }
}

static bool slot_used(const struct delta *p, int32_t step, int32_t slot)
{
    for (int32_t i = 0; i < p->c->num_reqs * 4; i++) {
        int32_t tokens = p->c->steps[step][i / 4];
        bool all = p->c->drafted > 0 && tokens <= 1 + p->c->drafted;
        if (p->slots[i / 4][i % 4] == slot && i % 4 < (all ? tokens : tokens > 0)) {
            return true;
        }
    }
    return false;
}

static void run_step(struct delta *p, int32_t step)
{
    const struct gdn_case *c = p->c;
    struct attn_error error = ATTN_ERROR_INIT;
    struct step s;
    step_create(p, &s, step);
    int64_t head = (int64_t)c->hv * c->dv * c->dk,
            row = (int64_t)c->hv * c->dv * format_bytes(c->dtype);
    float *before = problem_memory(NUM_SLOTS * head, sizeof *before, 0);
    memcpy(before, p->states, (size_t)(NUM_SLOTS * head) * sizeof *before);
    if (threaded.kernels->gated_delta(&s.args, &error) != ATTN_OK) {
        fail_msg("%s: %s: %s", c->name, error.field, error.message);
    }
    for (int32_t slot = 0; slot < NUM_SLOTS; slot++) {
        if (!slot_used(p, step, slot)) {
            assert_memory_equal(before + slot * head, p->states + slot * head, (size_t)head * 4);
        }
    }
    for (int64_t t = 0; t < s.rows + 2; t++) {
        bool written = false;
        for (int32_t r = 0; r < c->num_reqs; r++) {
            written |= c->steps[step][r] > 0 && t >= s.query_start[r] && t < s.query_start[r + 1];
        }
        for (int64_t i = 0; i < row && !written; i++) {
            assert_int_equal(p->out_rows[t * row + i], POISON);
        }
    }
    for (int32_t r = 0; r < c->num_reqs; r++) {
        if (c->steps[step][r] > 0) {
            int32_t length = p->length[r];
            compare_request(p, &s, step, r);
            compare_window(p, step, r, length);
        }
    }
    free(before);
    step_destroy(p);
}

static void test_cases(void **state)
{
    (void)state;
    for (int32_t i = 0; i < COUNT(cases); i++) {
        struct delta *p = delta_create(&cases[i]);
        for (int32_t step = 0; step < 3; step++) {
            int32_t tokens = 0;
            for (int32_t r = 0; r < cases[i].num_reqs; r++) {
                tokens += cases[i].steps[step][r] > 0;
            }
            if (tokens > 0) {
                run_step(p, step);
            }
        }
        delta_destroy(p);
    }
}

/* A prompt in one call, in chunks of any size, is what its tokens give one by one: 1e-5 of the
 * outputs' RMS, states being float32 between calls. */
static void test_chunks_are_steps(void **state)
{
    enum { LENGTH = 150 };
    static const struct gdn_case whole = {"whole", ATTN_DTYPE_F32, 2, 4, 32, 48, 4, 1, 0, 1, 0, 0,
                                          1,       {{LENGTH}}};
    (void)state;
    for (int32_t chunk = 0; chunk < 4; chunk++) {
        static const int32_t sizes[] = {0, 1, 17, 4096};
        struct gdn_case chunked = whole, single = whole;
        chunked.chunk_size = sizes[chunk];
        single.steps[0][0] = 1;
        random_seed(SEED);
        struct delta *p = delta_create(&chunked);
        random_seed(SEED);
        struct delta *one = delta_create(&single);
        struct step s;
        double sum = 0, largest = 0;
        step_create(p, &s, 0);
        assert_int_equal(threaded.kernels->gated_delta(&s.args, NULL), ATTN_OK);
        float *out = problem_memory(LENGTH * 4 * 48, 4, 0);
        memcpy(out, p->out_rows, LENGTH * 4 * 48 * 4);
        step_destroy(p);
        for (int32_t t = 0; t < LENGTH; t++) {
            step_create(one, &s, 0);
            assert_int_equal(threaded.kernels->gated_delta(&s.args, NULL), ATTN_OK);
            for (int32_t i = 0; i < 4 * 48; i++) {
                double got = ((float *)one->out_rows)[i], want = out[t * 4 * 48 + i];
                sum += want * want;
                largest = fmax(largest, fabs(got - want));
            }
            one->length[0]++;
            step_destroy(one);
        }
        print_message("chunk_size %d: %.2g of the RMS\n", sizes[chunk],
                      largest / sqrt(sum / (LENGTH * 4 * 48)));
        assert_true(largest <= 1e-5 * sqrt(sum / (LENGTH * 4 * 48)));
        free(out);
        delta_destroy(p);
        delta_destroy(one);
    }
}

/* One defect each, with the field that the answer names; nothing is written. */
struct defect {
    const char *field;
    void (*apply)(struct step *s);
};
#define DEFECT(name, statement)                                                                    \
    static void name(struct step *s)                                                               \
    {                                                                                              \
        statement;                                                                                 \
    }
static const int32_t five[] = {1, 5}, none[] = {0, 1};
DEFECT(no_instance, s->args.instance = NULL)
DEFECT(no_layer, s->args.layer = NULL)
DEFECT(no_desc, s->layer.next = NULL)
DEFECT(odd_heads, s->desc.num_v_heads = 3)
DEFECT(large_head, s->desc.head_size_k = 4096)
DEFECT(wide, s->desc.conv_width = 65)
DEFECT(many_drafts, s->desc.num_speculative_tokens = 5000)
DEFECT(odd_dtype, s->layer.dtype = ATTN_DTYPE_INT8)
DEFECT(no_params, s->args.params = NULL)
DEFECT(no_weights, s->params.next = NULL)
DEFECT(no_a_log, s->weights.a_log = NULL)
DEFECT(no_conv_weight, s->weights.conv_weight = NULL)
DEFECT(odd_conv_weight, s->weight.shape[1] = 3)
DEFECT(odd_bias, s->bias.shape[0] = 3)
DEFECT(no_batch, s->args.batch = NULL)
DEFECT(no_starts, s->batch.query_start_loc = NULL)
DEFECT(no_io, s->args.next = NULL)
DEFECT(no_mixed, s->io.mixed_qkv = NULL)
DEFECT(narrow_mixed, s->mixed.shape[1] -= 1)
DEFECT(short_mixed, s->mixed.shape[0] = 1)
DEFECT(no_a, s->io.a = NULL)
DEFECT(odd_b, s->b.shape[1] = 2)
DEFECT(odd_out, s->out.shape[2] = 16)
DEFECT(fp8_out, s->out.tensor.dtype = format_dtype(ATTN_DTYPE_FP8_E4M3))
DEFECT(no_state, s->args.k_cache = NULL)
DEFECT(odd_state, s->state_view.head_size = 16)
DEFECT(no_window, s->args.v_cache = NULL)
DEFECT(short_window, s->window_view.head_size = 5)
DEFECT(no_slots, s->batch.next = NULL)
DEFECT(narrow_slots, s->states.state_slots_stride = 1)
DEFECT(high_slot, s->slots[1][2] = NUM_SLOTS)
DEFECT(no_lengths, s->states.has_initial_state = NULL; s->batch.seq_lens = NULL)
DEFECT(too_many_accepted, s->states.num_accepted_tokens = five)
DEFECT(none_accepted, s->states.num_accepted_tokens = none)

static const struct defect defects[] = {
    {"instance", no_instance},
    {"attn_gdn_desc", no_layer},
    {"attn_gdn_desc", no_desc},
    {"num_v_heads", odd_heads},
    {"head_size_k", large_head},
    {"conv_width", wide},
    {"num_speculative_tokens", many_drafts},
    {"dtype", odd_dtype},
    {"params", no_params},
    {"attn_gdn_weights", no_weights},
    {"attn_gdn_weights", no_a_log},
    {"conv_weight", no_conv_weight},
    {"conv_weight", odd_conv_weight},
    {"conv_bias", odd_bias},
    {"batch", no_batch},
    {"batch", no_starts},
    {"attn_io_gdn", no_io},
    {"mixed_qkv", no_mixed},
    {"mixed_qkv", narrow_mixed},
    {"mixed_qkv", short_mixed},
    {"a", no_a},
    {"b", odd_b},
    {"out", odd_out},
    {"out", fp8_out},
    {"k_cache", no_state},
    {"k_cache", odd_state},
    {"v_cache", no_window},
    {"v_cache", short_window},
    {"state_slots", no_slots},
    {"state_slots_stride", narrow_slots},
    {"state_slots", high_slot},
    {"has_initial_state", no_lengths},
    {"num_accepted_tokens", too_many_accepted},
    {"num_accepted_tokens", none_accepted},
};

static void test_defects(void **state)
{
    static const struct gdn_case drafts = {
        "defects", ATTN_DTYPE_F32, 2, 4, 16, 24, 4, 1, 1, 1, 0, 3, 2, {{4, 3}}, {{1, 1}}};
    (void)state;
    for (int32_t i = 0; i < COUNT(defects); i++) {
        struct attn_error error = ATTN_ERROR_INIT;
        struct delta *p = delta_create(&drafts);
        struct step s;
        step_create(p, &s, 0);
        defects[i].apply(&s);
        attn_status status = serial.kernels->gated_delta(&s.args, &error);
        if (status == ATTN_OK || strcmp(error.field, defects[i].field) != 0 ||
            error.status != status || error.message[0] == '\0') {
            fail_msg("defect %d: status %d, field %s, not %s: %s", (int)i, status, error.field,
                     defects[i].field, error.message);
        }
        assert_int_equal(serial.kernels->gated_delta(&s.args, NULL), status);
        for (int32_t j = 0; j < 7 * 4 * 24 * 4; j++) {
            assert_int_equal(p->out_rows[j], POISON);
        }
        step_destroy(p);
        delta_destroy(p);
    }
}

static int close_plugin(void **state)
{
    (void)state;
    harness_close();
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_chunks_are_steps),
        cmocka_unit_test(test_defects),
    };
    if (argc != 2 || !harness_open(argv[1])) {
        fprintf(stderr, "usage: test_gdn attn_cpu_ref.so\n");
        return 2;
    }
    random_seed(SEED);
    printf("seed %d\n", SEED);
    return cmocka_run_group_tests(tests, NULL, close_plugin);
}
