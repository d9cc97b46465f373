/* SPDX-License-Identifier: Apache-2.0 */
/* Latent attention, written from the formula in float64 over unpaged rows; the other oracles are
 * support/oracle.h's. */
#ifndef RUN_ORACLE_H
#define RUN_ORACLE_H

#include <stdint.h>

/* What a layer of attention says of its rows and scores. */
struct oracle_terms {
    int32_t dtype; /* enum attn_dtype_id of q, k and v */
    int32_t num_q_heads, num_kv_heads, head_size, head_size_v;
    double scale;
    int32_t causal;
    int32_t has_window, window_left, window_right; /* -1: open */
    int32_t chunk_size, chunk_lookback;
    double soft_cap;
    const float *alibi_slopes; /* [num_q_heads] or NULL */
    const float *sinks;        /* [num_q_heads] or NULL */
};

/* One MLA head in latent space: W_UK and W_UV are kv_b_proj's rows of the head, [nope + v, rank]; a
 * key is [c : rank | k_pe : rope]. */
struct oracle_mla {
    int32_t nope, rope, v, rank;
    double scale;
    const double *weights;
};
/* q [nope + rope]; keys [any, rank + rope]; the `count` listed ones are attended (NULL: 0 ..
 * count-1). Writes out [v]. scores holds count doubles. */
void oracle_mla(const struct oracle_mla *head, const double *q, const double *keys,
                const int32_t *listed, int32_t count, double *scores, double *out);

#endif
