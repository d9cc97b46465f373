/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of an attend over quantized caches, and of quantized queries and probabilities. */
#include <string.h>

#include "common/number.h"
#include "common/tensors.h"
#include "mutants.h"

static void k_scale_ignored(struct mutable_args *m)
{
    m->params.k_scale = NULL;
}

static void head_scales_as_tensor(struct mutable_args *m)
{
    for (int32_t h = 0; m->params.v_scale != NULL && h < m->layer.num_kv_heads; h++) {
        m->v_scale[h] = m->params.v_scale[0];
    }
    m->params.v_scale = m->params.v_scale != NULL ? m->v_scale : NULL;
}

static void v_scale_twice(struct mutable_args *m)
{
    int32_t count = m->layer.v_scale_form == ATTN_SCALE_PER_HEAD ? m->layer.num_kv_heads : 1;
    for (int32_t h = 0; m->params.v_scale != NULL && h < count; h++) {
        m->v_scale[h] = m->params.v_scale[h] * m->params.v_scale[h];
    }
    m->params.v_scale = m->params.v_scale != NULL ? m->v_scale : NULL;
}

/* The scale of a whole tensor where each head has its own. */
static void q_scale_of_first_head(struct mutable_args *m)
{
    for (int32_t h = 0; m->params.q_scale != NULL && h < m->layer.num_kv_heads; h++) {
        m->q_scale[h] = m->params.q_scale[0];
    }
    m->params.q_scale = m->params.q_scale != NULL ? m->q_scale : NULL;
}

static void q_scale_ignored(struct mutable_args *m)
{
    m->layer.q_scale_form = ATTN_SCALE_NONE;
}

static void host_scales_ignored(struct mutable_args *m)
{
    m->params.k_scale_host = m->params.v_scale_host = m->params.q_scale_host = 0;
}

static void p_scale_far_off(struct mutable_args *m)
{
    m->params.p_scale = NULL;
    m->params.p_scale_host = 0.3f;
}

/* Rows' own scales of the keys: all of them 1. */
static void row_scales_ignored(struct mutable_args *m)
{
    int32_t kv = m->layer.kv_dtype;
    if (m->args.k_cache != NULL && m->args.k_cache->scale != NULL && kv != ATTN_KV_NVFP4 &&
        kv != ATTN_KV_INT4_PER_TOKEN_HEAD) {
        m->one = 1;
        m->k_cache = *m->args.k_cache;
        m->k_cache.scale = &m->one;
        m->k_cache.scale_stride_block = m->k_cache.scale_stride_slot = 0;
        m->k_cache.scale_stride_head = 0;
        m->args.k_cache = &m->k_cache;
    }
}

static void signs_missing(struct mutable_args *m)
{
    if (m->layer.kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD && m->params.next != NULL) {
        m->quant = *(const struct attn_kv_quant_params *)m->params.next;
        for (int32_t d = 0; d < m->layer.head_size && d < MAX_DIMS; d++) {
            m->floats[d] = 1;
        }
        m->quant.hadamard_signs_k = m->floats;
        m->params.next = &m->quant.ext;
    }
}

/* Values of a head take the channel scales of the first one. */
static void channel_scales_of_first_head(struct mutable_args *m)
{
    if (m->layer.kv_dtype == ATTN_KV_INT8_KV && m->params.next != NULL &&
        m->layer.num_kv_heads * m->layer.head_size_v <= MAX_DIMS) {
        m->quant = *(const struct attn_kv_quant_params *)m->params.next;
        for (int32_t i = 0; i < m->layer.num_kv_heads * m->layer.head_size_v; i++) {
            m->floats[i] = m->quant.v_channel_scale[i % m->layer.head_size_v];
        }
        m->quant.v_channel_scale = m->floats;
        m->params.next = &m->quant.ext;
    }
}

/* nvfp4's swizzle of V's block scales is not undone. */
static void swizzle_ignored(struct mutable_args *m)
{
    if (m->layer.kv_dtype == ATTN_KV_NVFP4 && m->args.v_cache != NULL) {
        m->v_cache = *m->args.v_cache;
        m->v_cache.scale = (uint8_t *)m->v_cache.scale + 1;
        m->args.v_cache = &m->v_cache;
    }
}

#define STEP_DIMS 32

/* The sum of products as matrix units of Hopper make it: 32 at a time, of which each, and the sum
 * so far, is cut below 2^-bits of the power of two in the largest of them. */
static double short_dot(const double *a, const double *b, int32_t count, int32_t bits)
{
    double sum = 0;
    for (int32_t first = 0; first < count; first += STEP_DIMS) {
        double x[STEP_DIMS], largest = fabs(sum), total = 0;
        for (int32_t i = 0; i < STEP_DIMS; i++) {
            x[i] = first + i < count ? a[first + i] * b[first + i] : 0;
            largest = fmax(largest, fabs(x[i]));
        }
        const double unit = largest > 0 ? ldexp(1, ilogb(largest) - bits) : 1;
        for (int32_t i = 0; i < STEP_DIMS; i++) {
            total += trunc(x[i] / unit);
        }
        sum = (trunc(sum / unit) + total) * unit;
    }
    return sum;
}

/* Of a row and head without terms: scores by such sums, over all keys. */
static void attend_by_short_sums(const struct attn_attend_args *args, int32_t r, int64_t token,
                                 int32_t h, int32_t bits)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_layer_params *params = args->params;
    const struct attn_batch *batch = args->batch;
    const int32_t head = h / (layer->num_q_heads / layer->num_kv_heads);
    const double unit =
        layer->scale *
        scale_of_head(params->q_scale, params->q_scale_host, layer->q_scale_form, head) *
        scale_of_head(params->k_scale, params->k_scale_host, layer->k_scale_form, head);
    const double of_values =
        scale_of_head(params->v_scale, params->v_scale_host, layer->v_scale_form, head);
    double q[MAX_DIMS], k[MAX_DIMS], out[MAX_DIMS] = {0}, sum = 0;
    number_load_row(q, tensor_row(args->q, token, h), ATTN_DTYPE_FP8_E4M3, layer->head_size);
    for (int32_t j = 0; j < batch->seq_lens[r]; j++) {
        const int32_t size = args->k_cache->block_size;
        const int64_t block = batch->block_table[r * batch->block_table_stride + j / size];
        number_load_row(k, view_row(args->k_cache, block, j % size, head), ATTN_DTYPE_FP8_E4M3,
                        layer->head_size);
        const double w = exp(unit * short_dot(q, k, layer->head_size, bits));
        number_load_row(k, view_row(args->v_cache, block, j % size, head), ATTN_DTYPE_FP8_E4M3,
                        layer->head_size_v);
        sum += w;
        for (int32_t d = 0; d < layer->head_size_v; d++) {
            out[d] += w * of_values * k[d];
        }
    }
    for (int32_t d = 0; d < layer->head_size_v; d++) {
        out[d] /= sum;
    }
    number_store_row(tensor_row(args->out, token, h), out, layer->dtype, layer->head_size_v);
    *(float *)tensor_row(args->lse, h, token) = (float)log(sum);
}

/* For the one case of cases_of in mutants.sh. */
static void attend_all_by_short_sums(const struct attn_attend_args *args, int32_t bits)
{
    const struct attn_batch *batch = args->batch;
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        for (int64_t t = batch->query_start_loc[r]; t < batch->query_start_loc[r + 1]; t++) {
            for (int32_t h = 0; h < args->layer->num_q_heads; h++) {
                attend_by_short_sums(args, r, t, h, bits);
            }
        }
    }
}

/* As an H200 does it, to the digits that attn-check prints. */
static void sums_of_14_bits(const struct attn_attend_args *args)
{
    attend_all_by_short_sums(args, 13);
}

static void sums_of_11_bits(const struct attn_attend_args *args)
{
    attend_all_by_short_sums(args, 10);
}

static const struct mutant mutants[] = {
    {.name = "mutant_k_scale_ignored", .before = k_scale_ignored},
    {.name = "mutant_v_scale_twice", .before = v_scale_twice},
    {.name = "mutant_head_scales_as_tensor", .before = head_scales_as_tensor},
    {.name = "mutant_q_scale_of_first_head", .before = q_scale_of_first_head},
    {.name = "mutant_q_scale_ignored", .before = q_scale_ignored},
    {.name = "mutant_host_scales_ignored", .before = host_scales_ignored},
    {.name = "mutant_p_scale_far_off", .before = p_scale_far_off},
    {.name = "mutant_row_scales_ignored", .before = row_scales_ignored},
    {.name = "mutant_signs_missing", .before = signs_missing},
    {.name = "mutant_channel_scales_of_first_head", .before = channel_scales_of_first_head},
    {.name = "mutant_swizzle_ignored", .before = swizzle_ignored},
    {.name = "control_short_sums", .after = sums_of_14_bits},
    {.name = "mutant_shorter_sums", .after = sums_of_11_bits},
};
const struct mutant_list quantized_mutants = {mutants, sizeof mutants / sizeof *mutants};
