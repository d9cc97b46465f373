/* SPDX-License-Identifier: Apache-2.0 */
/* The values of each factor that a backend declares. */
#include <stdlib.h>
#include <string.h>

#include "cases/cases.h"

static const int32_t model_head_sizes[] = {24,  32,  40,  64,  72,  80,  96, 112,
                                           120, 128, 160, 192, 224, 256, 512};
static const int32_t usual_block_sizes[] = {1, 8, 16, 32, 64, 128, 256};
static const struct factor_value usual_heads[] = {{4, 4}, {8, 2}, {9, 3}, {8, 1}, {5, 1}, {16, 1}};

static bool add(struct factor *factor, int32_t a, int32_t b)
{
    struct factor_value *larger =
        realloc(factor->values, sizeof *larger * (size_t)(factor->count + 1));
    if (larger == NULL) {
        return false;
    }
    factor->values = larger;
    larger[factor->count++] = (struct factor_value){a, b};
    return true;
}

static bool in_range(const struct attn_range *range, int32_t value)
{
    int32_t multiple = range->multiple > 0 ? range->multiple : 1;
    return value >= range->min && value <= range->max && (value - range->min) % multiple == 0;
}

static bool add_head_sizes(struct factor *factor, const struct attn_backend_caps *caps)
{
    bool ok = true;
    const int32_t count = sizeof model_head_sizes / sizeof *model_head_sizes;
    for (int32_t d = 0; d < count; d++) {
        for (int32_t v = 0; v < count; v++) {
            bool declared = false;
            for (int32_t i = 0; i < caps->num_head_sizes && !declared; i++) {
                const struct attn_head_size_range *r = &caps->head_sizes[i];
                declared = in_range(&r->qk, model_head_sizes[d]) &&
                           (r->same ? d == v : in_range(&r->v, model_head_sizes[v]));
            }
            /* Of the pairs D != Dv the few that models have. */
            bool wanted = d == v || (model_head_sizes[d] == 192 && model_head_sizes[v] == 128) ||
                          (model_head_sizes[d] == 64 && model_head_sizes[v] == 128) ||
                          (model_head_sizes[d] == 128 && model_head_sizes[v] == 72);
            if (declared && wanted) {
                ok = ok && add(factor, model_head_sizes[d], model_head_sizes[v]);
            }
        }
    }
    return ok;
}

static bool add_scale_forms(struct factor *f, const struct attn_backend_caps *caps)
{
    bool ok = true;
    for (int32_t k = ATTN_SCALE_PER_TENSOR; k <= ATTN_SCALE_PER_HEAD; k++) {
        for (int32_t v = ATTN_SCALE_PER_TENSOR; v <= ATTN_SCALE_PER_HEAD; v++) {
            if ((caps->k_scale_forms >> k & 1) && (caps->v_scale_forms >> v & 1)) {
                ok = ok && add(&f[FACTOR_SCALES], k, v);
            }
        }
    }
    return ok && (f[FACTOR_SCALES].count > 0 || add(&f[FACTOR_SCALES], ATTN_SCALE_NONE, 0));
}

static bool add_cache_factors(struct factor *f, const struct attn_backend_caps *caps)
{
    bool ok = true;
    for (int32_t i = ATTN_KV_AUTO + 1; i <= ATTN_KV_Q4_0; i++) {
        if (i != ATTN_KV_FP8_DS_MLA && caps->kv_dtypes >> i & 1) { /* rows of MLA only */
            ok = ok && add(&f[FACTOR_KV_DTYPE], i, 0);
        }
    }
    static const struct factor_value pairs[] = {{ATTN_KV_Q8_0, ATTN_KV_F16},
                                                {ATTN_KV_Q8_0, ATTN_KV_Q4_0},
                                                {ATTN_KV_Q4_0, ATTN_KV_FP8_E5M2},
                                                {ATTN_KV_FP8_E4M3, ATTN_KV_BF16},
                                                {ATTN_KV_FP8_E5M2, ATTN_KV_Q8_0},
                                                {ATTN_KV_BF16, ATTN_KV_INT8_PER_TOKEN_HEAD},
                                                {ATTN_KV_INT8_PER_TOKEN_HEAD, ATTN_KV_FP8_E4M3},
                                                {ATTN_KV_INT4_PER_TOKEN_HEAD, ATTN_KV_BF16},
                                                {ATTN_KV_FP8_PER_TOKEN_HEAD, ATTN_KV_NVFP4},
                                                {ATTN_KV_F16, ATTN_KV_INT4_PER_TOKEN_HEAD}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        const uint64_t both = 1ull << pairs[i].a | 1ull << pairs[i].b;
        if (caps->features & ATTN_FEATURE_KV_DTYPE_V && (caps->kv_dtypes & both) == both) {
            ok = ok && add(&f[FACTOR_KV_DTYPE], pairs[i].a, pairs[i].b);
        }
    }
    for (size_t i = 0; i < sizeof usual_block_sizes / sizeof *usual_block_sizes; i++) {
        for (int32_t j = 0; j < caps->num_block_sizes; j++) {
            if (in_range(&caps->block_sizes[j], usual_block_sizes[i])) {
                ok = ok && add(&f[FACTOR_BLOCK_SIZE], usual_block_sizes[i], 0);
                break;
            }
        }
    }
    for (int32_t i = 0; i <= ATTN_KV_LAYOUT_PACKED_K; i++) {
        if (caps->layouts >> i & 1) {
            ok = ok && add(&f[FACTOR_LAYOUT], i, 0);
        }
    }
    ok = ok && add_scale_forms(f, caps);
    ok = ok && add(&f[FACTOR_SCALE_PLACE], SCALES_INLINE, 0) &&
         add(&f[FACTOR_SCALE_PLACE], SCALES_APART, 0);
    return ok && add(&f[FACTOR_SCALE_SOURCE], 0, 0) && add(&f[FACTOR_SCALE_SOURCE], 1, 0) &&
           add(&f[FACTOR_SCALE_SOURCE], 2, 0);
}

/* A factor that is off, and on with value `a` if the terms are declared. */
static bool add_switch(struct factor *factor, const struct attn_backend_caps *caps, uint64_t term,
                       int32_t a, int32_t b)
{
    bool ok = factor->count > 0 || add(factor, 0, 0);
    return ok && ((caps->terms & term) != term || add(factor, a, b));
}

static bool add_causal(struct factor *factor, const struct attn_backend_caps *caps)
{
    const uint64_t both = ATTN_TERM_CAUSAL | ATTN_TERM_BIDIRECTIONAL;
    bool ok = true;
    ok = ok && (!(caps->terms & ATTN_TERM_CAUSAL) || add(factor, CAUSAL_YES, 0));
    ok = ok && (!(caps->terms & ATTN_TERM_BIDIRECTIONAL) || add(factor, CAUSAL_NO, 0));
    ok =
        ok && (!(caps->terms & ATTN_TERM_CAUSAL_PER_REQUEST) || add(factor, CAUSAL_PER_REQUEST, 0));
    return ok && ((caps->terms & both) != both || add(factor, CAUSAL_OVERRIDDEN, 0));
}

static bool add_terms(struct factor *f, const struct attn_backend_caps *caps)
{
    bool ok = add_causal(&f[FACTOR_CAUSAL], caps);
    ok = ok && add_switch(&f[FACTOR_WINDOW], caps, ATTN_TERM_SLIDING_WINDOW, 20, 0);
    ok = ok && add_switch(&f[FACTOR_WINDOW], caps, ATTN_TERM_SLIDING_WINDOW, 1, 0);
    ok = ok && add_switch(&f[FACTOR_WINDOW], caps, ATTN_TERM_SYMMETRIC_WINDOW, 12, 1);
    ok = ok && add_switch(&f[FACTOR_CHUNK], caps, ATTN_TERM_CHUNKED_LOCAL, 16, 0);
    ok = ok && add_switch(&f[FACTOR_CHUNK], caps, ATTN_TERM_CHUNKED_LOCAL, 24, 1);
    ok = ok && add_switch(&f[FACTOR_CHUNK], caps, ATTN_TERM_CHUNKED_LOCAL, 40, INT32_MAX);
    ok = ok && add_switch(&f[FACTOR_SOFT_CAP], caps, ATTN_TERM_SOFT_CAP, 8, 0);
    ok = ok && add_switch(&f[FACTOR_ALIBI], caps, ATTN_TERM_ALIBI, ATTN_ALIBI_LINEAR, 0);
    ok = ok && add_switch(&f[FACTOR_ALIBI], caps, ATTN_TERM_ALIBI_SQRT, ATTN_ALIBI_SQRT, 0);
    ok = ok && add_switch(&f[FACTOR_SINKS], caps, ATTN_TERM_SINKS, 1, 0);
    ok = ok && add_switch(&f[FACTOR_STATIC_SINK], caps, ATTN_TERM_STATIC_SINK, 5, 0);
    ok = ok && add_switch(&f[FACTOR_SPANS], caps, ATTN_TERM_PREFIX_LM, 1, 0);
    ok = ok && add_switch(&f[FACTOR_SPANS], caps, ATTN_TERM_PREFIX_LM, 1, 7);
    ok = ok && add_switch(&f[FACTOR_TREE], caps, ATTN_TERM_TREE_BITS, ATTN_TREE_BITS, 0);
    ok = ok && add_switch(&f[FACTOR_TREE], caps, ATTN_TERM_TREE_BITS, ATTN_TREE_BITS, 1);
    return ok && add_switch(&f[FACTOR_TREE], caps, ATTN_TERM_TREE_BIAS, ATTN_TREE_BIAS, 0);
}

/* Quantized queries of every declared dtype, with one scale and with one per KV head. */
static bool add_queries(struct factor *factor, const struct attn_backend_caps *caps)
{
    bool ok = add(factor, 0, 0);
    for (int32_t i = ATTN_DTYPE_FP8_E4M3; i <= ATTN_DTYPE_INT8; i++) {
        bool declared =
            (caps->features & ATTN_FEATURE_QUANTIZED_QUERY) && (caps->q_dtypes >> i & 1);
        ok = ok && (!declared ||
                    (add(factor, i, ATTN_SCALE_PER_TENSOR) && add(factor, i, ATTN_SCALE_PER_HEAD)));
    }
    return ok;
}

/* Off, and on if the feature is declared. */
static bool add_feature(struct factor *factor, const struct attn_backend_caps *caps,
                        uint64_t feature, int32_t on)
{
    bool ok = factor->count > 0 || add(factor, 0, 0);
    return ok && (!(caps->features & feature) || add(factor, on, 0));
}

static bool add_features(struct factor *f, const struct attn_backend_caps *caps)
{
    bool writes = caps->features & ATTN_FEATURE_FUSED_WRITE || caps->decode_write_kv_dtypes != 0;
    bool p_scale = caps->p_scale_forms >> ATTN_SCALE_PER_TENSOR & 1;
    bool ok = add_queries(&f[FACTOR_QUERY], caps) && add(&f[FACTOR_P_SCALE], 0, 0);
    ok = ok && (!p_scale || add(&f[FACTOR_P_SCALE], ATTN_SCALE_PER_TENSOR, 0));
    ok = ok && add(&f[FACTOR_NAN], 0, 0) && add(&f[FACTOR_NAN], 1, 0);
    ok = ok && add(&f[FACTOR_HUGE], HUGE_NONE, 0);
    if (caps->device.type == ATTN_DEVICE_CPU) {
        ok = ok && add(&f[FACTOR_HUGE], HUGE_SCORES, 0) && add(&f[FACTOR_HUGE], HUGE_VALUES, 0);
    }
    ok = ok && add_feature(&f[FACTOR_FAST_PREFILL], caps, ATTN_FEATURE_FAST_PREFILL, 1);
    ok = ok && add(&f[FACTOR_LENGTHS], LENGTHS_EXACT, 0) &&
         add(&f[FACTOR_LENGTHS], LENGTHS_BOUNDS, 0);
    ok = ok && add_feature(&f[FACTOR_LENGTHS], caps, ATTN_FEATURE_DEVICE_SEQ_LENS, LENGTHS_DEVICE);
    ok = ok && add_feature(&f[FACTOR_LENGTHS], caps, ATTN_FEATURE_HOST_BOUNDS, LENGTHS_HOST_BOUNDS);
    ok = ok && add(&f[FACTOR_FIRST_ROW], 0, 0) && add(&f[FACTOR_FIRST_ROW], 5, 0);
    ok = ok && add_feature(&f[FACTOR_TABLE_ROW], caps, ATTN_FEATURE_BLOCK_TABLE_ROW, 1);
    ok = ok && add(&f[FACTOR_WRITE], 0, 0) && (!writes || add(&f[FACTOR_WRITE], 1, 0));
    ok = ok && add_feature(&f[FACTOR_LSE], caps, ATTN_FEATURE_LSE, 1);
    ok = ok && add_feature(&f[FACTOR_LSE], caps, ATTN_FEATURE_LSE, 2);
    return ok && add(&f[FACTOR_STRIDES], 0, 0) && add(&f[FACTOR_STRIDES], 1, 0);
}

static bool add_shapes(struct factor *factor, const struct attn_backend_caps *caps)
{
    bool ok = true;
    for (int32_t shape = 0; shape < SHAPE_COUNT; shape++) {
        int32_t phase = shape_is_decode(shape) ? ATTN_PHASE_DECODE : ATTN_PHASE_PREFILL;
        uint64_t keys = shape_is_paged(shape) ? ATTN_FEATURE_PAGED_KV : ATTN_FEATURE_CONTIGUOUS_KV;
        if ((caps->phases >> phase & 1) && (caps->features & keys)) {
            ok = ok && add(factor, shape, 0);
        }
    }
    return ok;
}

/* Of layers without a cache, which the core composes of contiguous keys where no backend has them.
 */
static bool add_encoders(struct factor *factor, const struct attn_backend_caps *caps)
{
    bool ok = add(factor, ATTN_ENCODER_ONLY, 0);
    if (caps->layer_kinds >> ATTN_LAYER_ENCODER & 1) {
        ok = ok && add(factor, ATTN_ENCODER_OF_DECODER, 0) &&
             add(factor, ATTN_ENCODER_MULTIMODAL, 0);
    }
    return ok;
}

bool case_space_init(struct case_space *space, const struct attn_backend_caps *caps)
{
    struct factor *f = space->factors;
    memset(space, 0, sizeof *space);
    space->caps = *caps;
    bool ok = add_shapes(&f[FACTOR_SHAPE], caps) && add_encoders(&f[FACTOR_ENCODER], caps);
    for (int32_t i = ATTN_DTYPE_F16; i <= ATTN_DTYPE_F32; i++) {
        ok = ok && (!(caps->dtypes >> i & 1) || add(&f[FACTOR_DTYPE], i, 0));
    }
    for (size_t i = 0; i < sizeof usual_heads / sizeof *usual_heads; i++) {
        int32_t group = usual_heads[i].a / usual_heads[i].b;
        bool fits = (caps->max_group == 0 || group <= caps->max_group) &&
                    (caps->max_num_q_heads == 0 || usual_heads[i].a <= caps->max_num_q_heads);
        ok = ok && (!fits || add(&f[FACTOR_HEADS], usual_heads[i].a, usual_heads[i].b));
    }
    ok = ok && add_head_sizes(&f[FACTOR_HEAD_SIZE], caps) && add_cache_factors(f, caps);
    ok = ok && add_terms(f, caps) && add_features(f, caps);
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        ok = ok && f[i].count > 0;
    }
    if (!ok) {
        case_space_finish(space);
    }
    return ok;
}

void case_space_finish(struct case_space *space)
{
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        free(space->factors[i].values);
        space->factors[i] = (struct factor){NULL, 0};
    }
}
