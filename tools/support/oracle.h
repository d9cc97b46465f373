/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of one request, MLA of one query, recurrent layers, indexers and compressors, from the
 * formulas, in float64 over unpaged tensors. They share nothing with the core or any plugin, not
 * even a header. */
#ifndef SUPPORT_ORACLE_H
#define SUPPORT_ORACLE_H

#include <stdbool.h>
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
    /* [num_lists, num_queries, num_keys]: 0 hides the key from the query's heads of that list;
     * NULL: nothing is hidden so. num_lists 0 reads as 1. */
    const uint8_t *listed;
    int32_t num_lists;
    double (*round_weight)(double); /* weights relative to the row's maximum; NULL: as they are */
    double *out;                    /* [num_queries, Hq, Dv] */
    double *lse;                    /* [num_queries, Hq] */
};

double oracle_dot(const double *a, const double *b, int32_t count);

/* Whether a query of the request, counted from 0, sees key `key`, by the first of its lists. */
int32_t oracle_visible(const struct oracle_request *r, int64_t query, int64_t key);
/* Writes out and lse; the queries are the last num_queries of the keys' positions. `scores` holds
 * num_sink_keys + num_keys doubles. */
void oracle_attend(const struct oracle_request *r, double *scores);

/* One head of MLA in latent space; a key is [c : rank | k_pe : rope]. */
struct oracle_mla {
    int32_t nope, rope, v, rank;
    double scale;
    const double *weights; /* [nope + v, rank], the head's rows of kv_b_proj: W_UK, then W_UV; NULL:
                            * q is [rank + rope] and out is [rank] */
    const double *sink;    /* NULL: none */
    double soft_cap;       /* 0: none */
};
/* One query: q is [nope + rope]; keys [any, rank + rope], of which the `count` listed ones are
 * attended (NULL: 0 .. count-1). Writes out [v] and returns the log-sum-exp. `scores` holds count
 * doubles. */
double oracle_mla(const struct oracle_mla *head, const double *q, const double *keys,
                  const int32_t *listed, int32_t count, double *scores, double *out);

/* How a recurrent layer's token changes the state; all zeros, with one gate, the gated delta rule.
 */
enum { ORACLE_GATE_SOFTPLUS, ORACLE_GATE_BOUNDED, ORACLE_GATE_GIVEN, ORACLE_GATE_CONSTANT };
enum { ORACLE_WRITE_SIGMOID, ORACLE_WRITE_NONE, ORACLE_WRITE_STEP };
struct oracle_rule {
    bool additive; /* r = beta v, not beta (v - S k) */
    int32_t gate, write_gate;
    int32_t num_gates;                 /* gates of a head: 1, or head_size_k */
    double gate_bound, dt_min, dt_max; /* dt_max 0: no limit */
};
/* Makes the decays e^g and beta of one head's token from a and dt_bias [num_gates]. */
void oracle_gates(const struct oracle_rule *rule, double a_log, const double *a,
                  const double *dt_bias, double b, double *decay, double *beta);

struct oracle_token {
    int32_t head_size_k, head_size_v;
    const double *q, *k, *v, *decay;
    double beta, scale, skip;
    int32_t ring_dtype; /* if a ring takes it, and the state its k and u; else 0 */
};
/* S <- decay S; S <- S + r k^T; out = scale S q + skip v, with state S [Dv, Dk]. */
void oracle_token(const struct oracle_rule *rule, const struct oracle_token *token, double *state,
                  double *out);

/* A recurrent layer, token by token. */
struct oracle_recurrent {
    int32_t dtype; /* enum attn_dtype_id of what is read */
    int32_t num_k_heads, num_v_heads, head_size_k, head_size_v, conv_width;
    const void *conv_weight; /* [channels, conv_width]; conv_width 0: no convolution, no SiLU */
    const float *a_log, *dt_bias; /* [Hv], [Hv num_gates] */
    struct oracle_rule rule;
    const float *skip; /* [Hv] or NULL */
    double scale;
    bool values_first;  /* channels v, k, q; else q, k, v */
    bool unit_norm;     /* q and k have it */
    int32_t ring_dtype; /* as the token's */
};
/* mixed: all rows [tokens, channels] of the sequence so far; gates: rows [a : Hv num_gates | b :
 * Hv]. Moves state [Hv, Dv, Dk] on by token t and writes out [Hv, Dv]. */
void oracle_recurrent(const struct oracle_recurrent *layer, const void *mixed, const void *gates,
                      int64_t t, double *state, double *out);

/* An indexer's lists of one group of heads. */
struct oracle_indexer {
    int32_t num_heads; /* in the group */
    int32_t head_size, topk, tokens_per_row, rows_per_entry, first_entries, last_entries;
    bool relu, tail, forced_on_top;
    double scale;
};
/* How many entries a query sees, by its position. */
int64_t oracle_index_entries(const struct oracle_indexer *x, int64_t position);
/* Their scores: q [num_heads, D], weights [num_heads] or NULL, keys [rows, D]. */
void oracle_index_scores(const struct oracle_indexer *x, int64_t position, const double *q,
                         const double *weights, const double *keys, double *scores);
/* What is wrong with a list, of `room` places, of these scores; NULL: nothing. Scores no further
 * apart than `slack` may be taken for one another; of equals the smaller index, if it is 0. */
const char *oracle_index_judge(const struct oracle_indexer *x, int64_t position,
                               const double *scores, const int32_t *list, int32_t room,
                               double slack);

/* What an index key is before it is stored: row <- (row - m) / sqrt(mean (row - m)^2 + eps) weight
 * + bias (NULL: none), m the mean if it is `centered`, else 0; and the row times Sylvester's matrix
 * of that size over sqrt(size). */
enum { ORACLE_MAX_KEY = 512 };
void oracle_norm(double *row, int32_t size, bool centered, double eps, const double *weight,
                 const double *bias);
void oracle_hadamard(double *row, int32_t size);

/* A compressor. */
struct oracle_compressor {
    int32_t dtype; /* enum attn_dtype_id of states and norm */
    int32_t tokens_per_row, overlaps, size;
    int32_t rotary; /* 0: rows are not rotated */
    bool neox;
    const float *bias; /* [tokens_per_row, (1 + overlaps) size], or NULL */
    const void *norm;  /* [size]; NULL: rows have no norm */
    double norm_eps;
};
/* The row that the token at `position` finishes, by the states [2 (1 + overlaps), size] of each
 * token: that of position p is number tokens[p] (NULL: p). */
void oracle_compressor(const struct oracle_compressor *x, const void *states, const int32_t *tokens,
                       int32_t position, double *row);
/* cos half, sin half of [positions, rotary]. */
void oracle_angles(float *cos_sin, int32_t positions, int32_t rotary);
/* Pairs of the last `rotary` dims turn by the angle of the position times `sign`. */
void oracle_rotate(double *row, int32_t size, int32_t rotary, bool neox, int32_t position,
                   double sign);

#endif
