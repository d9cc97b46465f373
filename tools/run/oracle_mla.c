/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stddef.h>

#include "oracle.h"

#define MAX_RANK 1024

/* q k_j = (W_UK^T q_nope) c_j + q_pe k_pe_j; out = W_UV sum_j p_j c_j. */
void oracle_mla(const struct oracle_mla *head, const double *q, const double *keys,
                const int32_t *listed, int32_t count, double *scores, double *out)
{
    double query[MAX_RANK] = {0}, sum[MAX_RANK] = {0}, m = -INFINITY, total = 0;
    int32_t rank = head->rank, row = rank + head->rope;
    for (int32_t n = 0; n < head->nope; n++) {
        for (int32_t d = 0; d < rank; d++) {
            query[d] += q[n] * head->weights[n * rank + d];
        }
    }
    for (int32_t i = 0; i < count; i++) {
        const double *key = keys + (int64_t)(listed != NULL ? listed[i] : i) * row;
        double s = 0;
        for (int32_t d = 0; d < rank; d++) {
            s += query[d] * key[d];
        }
        for (int32_t d = 0; d < head->rope; d++) {
            s += q[head->nope + d] * key[rank + d];
        }
        scores[i] = head->scale * s;
        m = fmax(m, scores[i]);
    }
    for (int32_t i = 0; i < count; i++) {
        const double *key = keys + (int64_t)(listed != NULL ? listed[i] : i) * row;
        double weight = exp(scores[i] - m);
        total += weight;
        for (int32_t d = 0; d < rank; d++) {
            sum[d] += weight * key[d];
        }
    }
    for (int32_t n = 0; n < head->v; n++) {
        const double *w = head->weights + (int64_t)(head->nope + n) * rank;
        out[n] = 0;
        for (int32_t d = 0; d < rank && total > 0; d++) {
            out[n] += w[d] * sum[d] / total;
        }
    }
}
