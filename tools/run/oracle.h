/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of one query row, written from the formulas in float64 over unpaged keys. It shares nothing with the core or
 * any plugin, not even a header. */
#ifndef RUN_ORACLE_H
#define RUN_ORACLE_H

#include <stdint.h>

enum oracle_number { ORACLE_F16, ORACLE_BF16, ORACLE_F32 };

struct oracle_terms {
    int32_t number; /* enum oracle_number of q, k and v */
    int32_t num_q_heads, num_kv_heads, head_size, head_size_v;
    double scale;
    int32_t causal;
    int32_t has_window, window_left, window_right; /* -1: open */
    int32_t chunk_size, chunk_lookback;
    double soft_cap;
    const float *alibi_slopes; /* [num_q_heads] or NULL */
    const float *sinks;        /* [num_q_heads] or NULL */
};

/* q: one row [num_q_heads, head_size]; k, v: [length, num_kv_heads, head size] compact; position: of the query among the
 * keys. Writes head `head` to out [head_size_v]. */
void oracle_attend(const struct oracle_terms *terms, const void *q, const void *k, const void *v,
                   int64_t length, int64_t position, int32_t head, double *out);

double oracle_read(const void *memory, int64_t at, int32_t number);
/* Rounds to nearest even; values are finite and in range. */
void oracle_write(void *memory, int64_t at, int32_t number, double value);

#endif
