/* SPDX-License-Identifier: Apache-2.0 */
#include "oracle.h"

#include <math.h>
#include <stddef.h>

int32_t oracle_visible(const struct oracle_request *r, int64_t query, int64_t key)
{
    int64_t p = r->num_keys - r->num_queries + query;
    int64_t own = key - (r->num_keys - r->num_queries);
    int32_t visible = 1;
    if (r->causal && key > p) {
        visible = 0;
    }
    if (r->left >= 0 && p - key > r->left) {
        visible = 0;
    }
    if (r->right >= 0 && key - p > r->right) {
        visible = 0;
    }
    if (r->chunk > 0 && p / r->chunk - key / r->chunk > r->lookback) {
        visible = 0;
    }
    for (int32_t s = 0; s < r->num_spans; s++) {
        int64_t first = r->spans[2 * s], last = r->spans[2 * s + 1];
        int32_t inside = first <= p && p <= last && first <= key && key <= last;
        if (inside && (r->span_window == 0 || p - key < r->span_window)) {
            visible = 1;
        }
    }
    if (r->tree && own >= 0 && r->tree[query * r->num_queries + own] == -INFINITY) {
        visible = 0;
    }
    if (r->listed && !r->listed[query * r->num_keys + key]) {
        visible = 0;
    }
    return visible;
}

static double position_bias(const struct oracle_request *r, int64_t head, int64_t p, int64_t key)
{
    if (r->alibi == 1) {
        return -r->slopes[head] * (double)(p > key ? p - key : key - p);
    }
    return r->alibi == 2 && key <= p ? -r->slopes[head] * sqrt((double)(p - key)) : 0;
}

double oracle_dot(const double *a, const double *b, int32_t count)
{
    double sum[4] = {0}; /* one alone would wait for each addition */
    int32_t d = 0;
    for (; d + 4 <= count; d += 4) {
        for (int32_t i = 0; i < 4; i++) {
            sum[i] += a[d + i] * b[d + i];
        }
    }
    for (; d < count; d++) {
        sum[0] += a[d] * b[d];
    }
    return sum[0] + sum[1] + (sum[2] + sum[3]);
}

static double product(const struct oracle_request *r, const double *q, const double *k)
{
    double s = oracle_dot(q, k, r->head_size) * r->scale;
    return r->soft_cap > 0 ? r->soft_cap * tanh(s / r->soft_cap) : s;
}

/* Hidden keys get -inf without being read. Sink keys stand first, at positions before 0. */
static void row_scores(const struct oracle_request *r, int64_t query, int64_t head, double *scores)
{
    int64_t kv = head / (r->num_q_heads / r->num_kv_heads);
    int64_t p = r->num_keys - r->num_queries + query;
    const double *q = r->q + (query * r->num_q_heads + head) * r->head_size;
    int64_t sinks = r->num_sink_keys;
    for (int64_t s = 0; s < sinks; s++) {
        const double *k = r->sink_k + (s * r->num_kv_heads + kv) * r->head_size;
        scores[s] = product(r, q, k) + position_bias(r, head, p, s - sinks);
    }
    for (int64_t j = 0; j < r->num_keys; j++) {
        const double *k = r->k + (j * r->num_kv_heads + kv) * r->head_size;
        int64_t own = j - (r->num_keys - r->num_queries);
        scores[sinks + j] = -INFINITY;
        if (oracle_visible(r, query, j)) {
            scores[sinks + j] = product(r, q, k) + position_bias(r, head, p, j) +
                                (r->tree && own >= 0 ? r->tree[query * r->num_queries + own] : 0);
        }
    }
}

static void row_attend(const struct oracle_request *r, int64_t query, int64_t head, double *scores)
{
    int64_t kv = head / (r->num_q_heads / r->num_kv_heads);
    int64_t count = r->num_sink_keys + r->num_keys;
    double *out = r->out + (query * r->num_q_heads + head) * r->head_size_v;
    double largest = -INFINITY, sum = 0;
    row_scores(r, query, head, scores);
    for (int64_t j = 0; j < count; j++) {
        largest = scores[j] > largest ? scores[j] : largest;
    }
    double top = r->sinks && r->sinks[head] > largest ? r->sinks[head] : largest;
    for (int32_t d = 0; d < r->head_size_v; d++) {
        out[d] = 0;
    }
    for (int64_t j = 0; j < count; j++) {
        const double *v =
            j < r->num_sink_keys
                ? r->sink_v + (j * r->num_kv_heads + kv) * r->head_size_v
                : r->v + ((j - r->num_sink_keys) * r->num_kv_heads + kv) * r->head_size_v;
        if (scores[j] == -INFINITY) {
            continue;
        }
        double w = exp(scores[j] - largest);
        sum += w * exp(largest - top);
        w = (r->round_weight ? r->round_weight(w) : w) * exp(largest - top);
        for (int32_t d = 0; d < r->head_size_v; d++) {
            out[d] += w * v[d];
        }
    }
    sum += r->sinks ? exp(r->sinks[head] - top) : 0;
    for (int32_t d = 0; d < r->head_size_v; d++) {
        out[d] = sum > 0 || isnan(sum) ? out[d] / sum : 0;
    }
    r->lse[query * r->num_q_heads + head] = sum == 0 ? -INFINITY : top + log(sum);
}

void oracle_attend(const struct oracle_request *r, double *scores)
{
    struct oracle_request own = *r;
    const int64_t heads = r->num_lists > 1 ? r->num_q_heads / r->num_lists : r->num_q_heads;
    for (int64_t h = 0; h < r->num_q_heads; h++) {
        own.listed =
            r->listed != NULL ? r->listed + h / heads * r->num_queries * r->num_keys : NULL;
        for (int64_t i = 0; i < r->num_queries; i++) {
            row_attend(&own, i, h, scores);
        }
    }
}

#define MAX_RANK 1024

/* q k_j = (W_UK^T q_nope) c_j + q_pe k_pe_j; out = W_UV sum_j p_j c_j. */
double oracle_mla(const struct oracle_mla *head, const double *q, const double *keys,
                  const int32_t *listed, int32_t count, double *scores, double *out)
{
    double query[MAX_RANK] = {0}, acc_o[MAX_RANK] = {0}, row_max = -INFINITY, row_sum = 0;
    int32_t rank = head->rank, row = rank + head->rope;
    const double *q_pe = q + (head->weights != NULL ? head->nope : rank);
    for (int32_t d = 0; d < rank; d++) {
        query[d] = head->weights != NULL ? 0 : q[d];
    }
    for (int32_t n = 0; n < head->nope && head->weights != NULL; n++) {
        for (int32_t d = 0; d < rank; d++) {
            query[d] += q[n] * head->weights[n * rank + d];
        }
    }
    for (int32_t i = 0; i < count; i++) {
        const double *key = keys + (int64_t)(listed != NULL ? listed[i] : i) * row;
        double s = oracle_dot(query, key, rank) + oracle_dot(q_pe, key + rank, head->rope);
        s *= head->scale;
        scores[i] = head->soft_cap > 0 ? head->soft_cap * tanh(s / head->soft_cap) : s;
        row_max = fmax(row_max, scores[i]);
    }
    row_max = head->sink != NULL ? fmax(row_max, *head->sink) : row_max;
    for (int32_t i = 0; i < count; i++) {
        const double *key = keys + (int64_t)(listed != NULL ? listed[i] : i) * row;
        double p = exp(scores[i] - row_max);
        row_sum += p;
        for (int32_t d = 0; d < rank; d++) {
            acc_o[d] += p * key[d];
        }
    }
    row_sum += head->sink != NULL ? exp(*head->sink - row_max) : 0;
    for (int32_t d = 0; d < rank; d++) {
        acc_o[d] = row_sum > 0 ? acc_o[d] / row_sum : 0;
    }
    for (int32_t n = 0; n < (head->weights != NULL ? head->v : rank); n++) {
        out[n] = head->weights == NULL
                     ? acc_o[n]
                     : oracle_dot(head->weights + (int64_t)(head->nope + n) * rank, acc_o, rank);
    }
    return row_sum > 0 ? row_max + log(row_sum) : -INFINITY;
}
