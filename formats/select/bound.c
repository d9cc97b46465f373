/* SPDX-License-Identifier: Apache-2.0 */
#include "select/bound.h"

#include <attn/draft/compressor.h>
#include <attn/indexer.h>
#include <attn/mla.h>

/* float32: sums of float32 products and an exponential good to a few units in the last place.
 * 16-bit: probabilities and outputs rounded to the format, 2^-11 and 2^-8 of a value, and half of
 * that again for the running maximum's rescaling. */
static const struct bound dtype_bounds[] = {[ATTN_DTYPE_F16] = {3e-3, 2e-3},
                                            [ATTN_DTYPE_BF16] = {2e-2, 1.2e-2},
                                            [ATTN_DTYPE_F32] = {4e-5, 2e-5}};
static const double lse_bounds[] = {
    [ATTN_DTYPE_F16] = 0x1p-10, [ATTN_DTYPE_BF16] = 0x1p-7, [ATTN_DTYPE_F32] = 0x1p-12};

/* A query that the backend quantizes to int8 per (token, head) is off by half of amax / 127 in each
 * element: of logits of deviation 4 some hundredths, and as much of each probability. */
#define INT8_QUERY_BOUND 6e-2
/* Probabilities in e4m3 are off by up to 1/17 of themselves, in e5m2 by 1/9, and two backends,
 * whose running maxima differ, may round to different sides: an element is off by up to twice that
 * of the sum of its products' sizes. Where a few keys decide, that sum is the element's own size.
 * Products of both signs add to an error but not to the element: for that the bound has 0.2 and
 * 0.35 of the row's root mean square more, of which simulated rows of 2 to 33 keys with logits of
 * deviation 4 need 0.19 and 0.34. */
static const struct bound e4m3_probabilities = {2e-1, 2.0 / 17},
                          e5m2_probabilities = {3.5e-1, 2.0 / 9};

/* A quantized cache or query adds nothing by itself, since both sides read the same bytes; but a
 * backend may multiply in 16 bits what is stored in 8. */
static int32_t least_precise(const struct attend_form *f)
{
    const bool small = f->kv_dtype > ATTN_KV_F32 || f->q_dtype != 0;
    return small && f->dtype == ATTN_DTYPE_F32 ? ATTN_DTYPE_F16 : f->dtype;
}

/* What a score may lose of itself. Levels of TurboQuant that are rounded to f16 are off by up to
 * 2^-11 of themselves, a key's score by up to half of that where few of them decide it.
 *
 * Queries and keys in e4m3 may be multiplied as they come, which Hopper's matrix units do in steps
 * of 32 dims that lose what lies below 2^-13 of the largest number of a step, the sum so far among
 * them (DeepSeek-V3's technical report, 3.5.2; an H200 agrees with it to all digits that were
 * printed). Where a score s grows evenly, as a needle's does, step i of n adds 32 numbers to
 * s i / n and loses at most half of that unit of each in the mean: 32 2^-14 s (1 + ... + n - 1) / n
 * = (D - 32) 2^-15 s in all. Other scores lose less, since their products differ in sign. A
 * log-sum-exp is off by no more than the scores that matter to it. Only of bf16: float16 layers
 * want more than such sums have. */
static double lost_of_score(const struct attend_form *f)
{
    const int32_t d = f->head_size;
    const bool e4m3 = f->q_dtype == ATTN_DTYPE_FP8_E4M3 && f->kv_dtype == ATTN_KV_FP8_E4M3;
    const bool levels =
        f->kv_dtype >= ATTN_KV_TURBOQUANT_4BIT_NC && f->kv_dtype <= ATTN_KV_TURBOQUANT_3BIT_NC;
    const double lost = e4m3 && f->dtype == ATTN_DTYPE_BF16 && d > 32 ? (d - 32) * 0x1p-15 : 0;
    return levels && least_precise(f) == ATTN_DTYPE_F16 ? 0x1p-12 : lost;
}

static bool quantizes_queries(int32_t kv_dtype)
{
    return kv_dtype == ATTN_KV_INT8_KV || kv_dtype == ATTN_KV_INT8_K;
}

struct bound bound_of_dtype(int32_t dtype)
{
    return dtype_bounds[dtype];
}

struct bound bound_of_attend(const struct attend_form *f)
{
    struct bound bound = dtype_bounds[least_precise(f)];
    if (quantizes_queries(f->kv_dtype)) {
        bound.absolute += INT8_QUERY_BOUND;
    }
    if (f->scales_p) {
        const bool e5m2 = f->kv_dtype_v == ATTN_KV_FP8_E5M2;
        const struct bound more = e5m2 ? e5m2_probabilities : e4m3_probabilities;
        bound.absolute += more.absolute;
        bound.relative += more.relative;
    }
    /* where scores of keys differ by x more or less, weights move by x / 2 in all at most */
    bound.absolute += lost_of_score(f) * LARGEST_SCORE / 2;
    return bound;
}

/* The logarithm of a sum of probabilities that are good to half a unit of the format. */
struct bound bound_of_attend_lse(const struct attend_form *f)
{
    double least = lse_bounds[least_precise(f)];
    least += quantizes_queries(f->kv_dtype) ? INT8_QUERY_BOUND : 0;
    return (struct bound){.relative = lost_of_score(f), .least = least};
}

/* MLA's projections in the core round to the activations' dtype: queries in latent space, or keys
 * and values of each head; what is attended, or each part of it; what is projected back. That adds
 * to the bound of one attend, whatever else that has, so many bounds of the dtype: simulated steps
 * of 16 bits with scores up to 14 need 2.2 times an attend's bound for an output, 3.9 times for a
 * log-sum-exp, which grows with the scores. float32 is rounded by far less than its bound. */
#define PROJECTED_OUTPUTS 2
#define PROJECTED_LSES 7
static bool projects(const struct attn_layer_desc *layer)
{
    const struct attn_ext *ext = layer->next;
    while (ext != NULL && ext->id != ATTN_EXT_MLA_DESC) {
        ext = ext->next;
    }
    const struct attn_mla_desc *mla = (const struct attn_mla_desc *)(const void *)ext;
    return mla != NULL && mla->absorb_in_core && layer->dtype != ATTN_DTYPE_F32;
}

void bound_set(struct attn_choice *choice, const struct attn_layer_desc *layer)
{
    const struct attend_form form = {
        .dtype = layer->dtype,
        .kv_dtype = choice->kv_dtype,
        .kv_dtype_v = choice->kv_dtype_v,
        .q_dtype = layer->q_scale_form != ATTN_SCALE_NONE ? layer->q_dtype : 0,
        .scales_p = layer->p_scale_form != ATTN_SCALE_NONE,
        .head_size = layer->head_size};
    const bool recurrent =
        layer->kind == ATTN_LAYER_RECURRENT || layer->kind == ATTN_LAYER_DRAFT_COMPRESSOR;
    if (layer->kind == ATTN_LAYER_INDEXER) {
        return; /* its output is lists */
    }
    struct bound out = recurrent ? bound_of_dtype(layer->dtype) : bound_of_attend(&form);
    double lse = recurrent ? 0 : bound_of_attend_lse(&form).least;
    if (projects(layer)) {
        out.absolute += PROJECTED_OUTPUTS * dtype_bounds[layer->dtype].absolute;
        out.relative += PROJECTED_OUTPUTS * dtype_bounds[layer->dtype].relative;
        lse += PROJECTED_LSES * lse_bounds[layer->dtype];
    }
    choice->bound_of_row_rms = out.absolute;
    choice->bound_of_element = out.relative;
    choice->bound_of_lse = lse;
}
