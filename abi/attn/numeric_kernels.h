/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments of the kernels around an attend: merge_states, batched_gemm, quantize, amax. */
#ifndef ATTN_NUMERIC_KERNELS_H
#define ATTN_NUMERIC_KERNELS_H

#include "attend.h"

/* m = max(lse1, lse2), w = exp(lse - m); o = (w1 o1 + w2 o2) / (w1 + w2); lse = m + log(w1 + w2).
 * +inf and -inf both mean empty; both empty: 0 and -inf; an empty side's output is ignored even if
 * NaN. A NaN lse gives a NaN output. out and lse may be one side's own. Rows first_row .. first_row
 * + num_rows - 1; rows from first_row + num_rows_with_prefix on take the suffix as is. */
struct attn_merge_states_args {
    size_t struct_size;
    const struct attn_ext *next; /* attn_io_output_quant: fp8 output */
    attn_instance *instance;
    void *stream;
    const struct attn_tensor *prefix_out; /* [T, H, Dv] */
    const struct attn_tensor *prefix_lse; /* [H, T] */
    const struct attn_tensor *suffix_out;
    const struct attn_tensor *suffix_lse;
    const struct attn_tensor *out;
    const struct attn_tensor *lse; /* NULL: not asked for */
    int64_t first_row;
    int64_t num_rows;
    int64_t num_rows_with_prefix;
};

/* out[b] = a[b] op(w[b]), a [batch, M, K], w [batch, K, N], strided; float32 accumulation. MXFP4
 * (OCP Microscaling Formats 1.0): w is e2m1, two elements a byte, the one of even offset in the low
 * nibble, and w_block_scale e8m0, 2^(code - 127) or NaN (255), of w's shape with K or N divided by
 * 32: one for each 32 elements along that dimension. */
struct attn_batched_gemm_args {
    size_t struct_size;
    const struct attn_ext *next;
    attn_instance *instance;
    void *stream;
    const struct attn_tensor *a;
    const struct attn_tensor *w;
    const float *w_scale; /* device [1] or [batch], NULL: none */
    int64_t w_scale_count;
    const struct attn_tensor *out;
    const struct attn_tensor *w_block_scale; /* mxfp4; else NULL */
};

/* x -> out in an attn_output_form, or a query to fp8 / int8. Rows [T, heads, D]. */
struct attn_quantize_args {
    size_t struct_size;
    const struct attn_ext *next;
    attn_instance *instance;
    void *stream;
    int32_t form;       /* enum attn_output_form */
    int32_t scale_form; /* static scale: PER_TENSOR or PER_HEAD */
    int32_t scale_pow2;
    int32_t scale_column_major;
    const struct attn_tensor *x;
    const struct attn_tensor *out;
    const float *scale;                     /* static and global scales */
    const struct attn_tensor *block_scales; /* written by group and nvfp4 forms */
};

/* Largest absolute value of x [T, heads, D]: per tensor out [1] or per head out [heads]. With
 * `accumulate` out becomes the larger of that and what it holds already; NULL or 0 else. */
struct attn_amax_args {
    size_t struct_size;
    const struct attn_ext *next;
    attn_instance *instance;
    void *stream;
    const struct attn_tensor *x;
    float *out;
    int32_t per_head;
    int32_t accumulate;
    /* ATTN_FEATURE_AMAX_HISTORY, of a whole tensor: history [history_len], the latest last, moves
     * by one place and takes out[0]; scale [1] is its largest / 448, or 1 where that is 0, and NaN
     * where it has one. All on the device; NULL and 0: none */
    float *history;
    float *scale;
    int32_t history_len;
    int32_t reserved;
};

ATTN_STATIC_ASSERT(sizeof(struct attn_merge_states_args) == 104,
                   "attn_merge_states_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_batched_gemm_args) == 80,
                   "attn_batched_gemm_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_quantize_args) == 80, "attn_quantize_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_amax_args) == 80, "attn_amax_args of ABI 0.3");

#endif
