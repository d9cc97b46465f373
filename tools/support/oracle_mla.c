/* SPDX-License-Identifier: Apache-2.0 */
#include "oracle.h"

#include <math.h>
#include <stddef.h>

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
