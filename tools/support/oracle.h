/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of one request and the gated delta rule, from the formulas, in float64 over unpaged
 * tensors. They share nothing with the core or any plugin, not even a header. */
#ifndef SUPPORT_ORACLE_H
#define SUPPORT_ORACLE_H

#include <stdint.h>

struct oracle_request {
    int32_t num_q_heads, num_kv_heads, head_size, head_size_v;
    int64_t num_queries, num_keys;
    const double *q; /* [num_queries, Hq, D] */
    const double *k; /* [num_keys, Hk, D] */
    const double *v; /* [num_keys, Hk, Dv] */
    double scale, soft_cap;
    int32_t causal;
    int64_t left, right; /* window; negative: open */
    int64_t chunk, lookback;
    int32_t alibi; /* 1 linear, 2 square root */
    const double *slopes;
    const double *sinks; /* NULL: none */
    int64_t num_sink_keys;
    const double *sink_k, *sink_v; /* [num_sink_keys, Hk, D or Dv] */
    int32_t num_spans;
    const int32_t *spans; /* [num_spans, 2], inclusive */
    int64_t span_window;
    /* [num_queries, num_queries] added to the score between the step's own tokens, -inf hides */
    const double *tree;
    double (*round_weight)(double); /* weights relative to the row's maximum; NULL: as they are */
    double *out;                    /* [num_queries, Hq, Dv] */
    double *lse;                    /* [num_queries, Hq] */
};

/* Whether a query of the request, counted from 0, sees key `key`. */
int32_t oracle_visible(const struct oracle_request *r, int64_t query, int64_t key);
/* Writes out and lse; the queries are the last num_queries of the keys' positions. `scores` holds
 * num_sink_keys + num_keys doubles. */
void oracle_attend(const struct oracle_request *r, double *scores);

/* The gated delta rule, token by token. */
struct oracle_gdn {
    int32_t dtype; /* enum attn_dtype_id of what is read */
    int32_t num_k_heads, num_v_heads, head_size_k, head_size_v, conv_width;
    const void *conv_weight; /* [channels, conv_width]; conv_width 0: no convolution, no SiLU */
    const float *a_log, *dt_bias;
};
/* mixed: all rows [tokens, channels] of the sequence so far; gates: rows [a : Hv | b : Hv]. Moves
 * state [Hv, Dv, Dk] on by token t and writes out [Hv, Dv]. */
void oracle_gdn(const struct oracle_gdn *layer, const void *mixed, const void *gates, int64_t t,
                double *state, double *out);

#endif
