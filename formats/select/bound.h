/* SPDX-License-Identifier: Apache-2.0 */
/* How far from the reference an attend's results may be: what assignment_choice answers, attn-check
 * enforces and attn-info shows; docs/semantics.md, 7. It needs the public headers alone. */
#ifndef CORE_SELECT_BOUND_H
#define CORE_SELECT_BOUND_H

#include <attn/layer.h>
#include <attn/selection.h>
#include <stdbool.h>

/* |error| <= absolute * RMS of the reference's row + relative * |reference| + least. */
struct bound {
    double absolute;
    double relative;
    double least;
};

/* On what the bound of an attend depends. */
struct attend_form {
    int32_t dtype;                /* enum attn_dtype_id: f16, bf16 or f32 */
    int32_t kv_dtype, kv_dtype_v; /* enum attn_kv_dtype of keys and values, never AUTO */
    int32_t q_dtype;              /* enum attn_dtype_id of queries that come quantized, else 0 */
    bool scales_p;                /* probabilities are quantized */
    int32_t head_size;
};

/* The largest score that attn-check's inputs have, of a needle; hardly another key has more. */
#define LARGEST_SCORE 14.0

/* The bound of any kernel with outputs of that dtype. */
struct bound bound_of_dtype(int32_t dtype);
/* The bound of an attend, by its activations, its cache, and what is rounded on the way. */
struct bound bound_of_attend(const struct attend_form *form);
/* The bound of its log-sum-exp: relative and least. */
struct bound bound_of_attend_lse(const struct attend_form *form);

/* Writes the bound of a layer that the choice serves, whose kv_dtype and kv_dtype_v are set. */
void bound_set(struct attn_choice *choice, const struct attn_layer_desc *layer);

#endif
