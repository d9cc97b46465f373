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

static bool add_head_sizes(struct factor *factor, const struct attn_backend_caps *caps)
{
    bool ok = true;
    const int32_t count = sizeof model_head_sizes / sizeof *model_head_sizes;
    for (int32_t d = 0; d < count; d++) {
        for (int32_t v = 0; v < count; v++) {
            bool declared = false;
            for (int32_t i = 0; i < caps->num_head_sizes && !declared; i++) {
                const struct attn_head_size_range *r = &caps->head_sizes[i];
                declared = range_has(&r->qk, model_head_sizes[d]) &&
                           (r->same ? d == v : range_has(&r->v, model_head_sizes[v]));
            }
            /* Only those pairs D != Dv that models have. */
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

/* Values that stand for terms and features, in their factor's order. */
static const struct declared_value {
    int32_t factor;
    struct factor_value value;
    uint64_t terms, features; /* all of which a backend has to declare for it */
} declared_values[] = {
    {FACTOR_CAUSAL, {CAUSAL_YES}, ATTN_TERM_CAUSAL},
    {FACTOR_CAUSAL, {CAUSAL_NO}, ATTN_TERM_BIDIRECTIONAL},
    {FACTOR_CAUSAL, {CAUSAL_PER_REQUEST}, ATTN_TERM_CAUSAL_PER_REQUEST},
    {FACTOR_CAUSAL, {CAUSAL_OVERRIDDEN}, ATTN_TERM_CAUSAL | ATTN_TERM_BIDIRECTIONAL},
    {FACTOR_WINDOW, {0}},
    {FACTOR_WINDOW, {20}, ATTN_TERM_SLIDING_WINDOW},
    {FACTOR_WINDOW, {1}, ATTN_TERM_SLIDING_WINDOW},
    {FACTOR_WINDOW, {12, 1}, ATTN_TERM_SYMMETRIC_WINDOW},
    {FACTOR_CHUNK, {0}},
    {FACTOR_CHUNK, {16}, ATTN_TERM_CHUNKED_LOCAL},
    {FACTOR_CHUNK, {24, 1}, ATTN_TERM_CHUNKED_LOCAL},
    {FACTOR_CHUNK, {40, INT32_MAX}, ATTN_TERM_CHUNKED_LOCAL},
    {FACTOR_SOFT_CAP, {0}},
    {FACTOR_SOFT_CAP, {8}, ATTN_TERM_SOFT_CAP},
    {FACTOR_ALIBI, {0}},
    {FACTOR_ALIBI, {ATTN_ALIBI_LINEAR}, ATTN_TERM_ALIBI},
    {FACTOR_ALIBI, {ATTN_ALIBI_SQRT}, ATTN_TERM_ALIBI_SQRT},
    {FACTOR_SINKS, {0}},
    {FACTOR_SINKS, {1}, ATTN_TERM_SINKS},
    {FACTOR_STATIC_SINK, {0}},
    {FACTOR_STATIC_SINK, {5}, ATTN_TERM_STATIC_SINK},
    {FACTOR_SPANS, {0}},
    {FACTOR_SPANS, {1}, ATTN_TERM_PREFIX_LM},
    {FACTOR_SPANS, {1, 7}, ATTN_TERM_PREFIX_LM},
    {FACTOR_TREE, {0}},
    {FACTOR_TREE, {ATTN_TREE_BITS}, ATTN_TERM_TREE_BITS},
    {FACTOR_TREE, {ATTN_TREE_BITS, 1}, ATTN_TERM_TREE_BITS},
    {FACTOR_TREE, {ATTN_TREE_BIAS}, ATTN_TERM_TREE_BIAS},
    {FACTOR_NAN, {0}},
    {FACTOR_NAN, {1}},
    {FACTOR_FAST_PREFILL, {0}},
    {FACTOR_FAST_PREFILL, {1}, 0, ATTN_FEATURE_FAST_PREFILL},
    {FACTOR_LENGTHS, {LENGTHS_EXACT}},
    {FACTOR_LENGTHS, {LENGTHS_BOUNDS}},
    {FACTOR_LENGTHS, {LENGTHS_DEVICE}, 0, ATTN_FEATURE_DEVICE_SEQ_LENS},
    {FACTOR_LENGTHS, {LENGTHS_HOST_BOUNDS}, 0, ATTN_FEATURE_HOST_BOUNDS},
    {FACTOR_FIRST_ROW, {0}},
    {FACTOR_FIRST_ROW, {5}},
    {FACTOR_TABLE_ROW, {0}},
    {FACTOR_TABLE_ROW, {1}, 0, ATTN_FEATURE_BLOCK_TABLE_ROW},
    {FACTOR_LSE, {0}},
    {FACTOR_LSE, {1}, 0, ATTN_FEATURE_LSE},
    {FACTOR_LSE, {2}, 0, ATTN_FEATURE_LSE},
    {FACTOR_STRIDES, {0}},
    {FACTOR_STRIDES, {1}},
    {FACTOR_SCALE_PLACE, {SCALES_INLINE}},
    {FACTOR_SCALE_PLACE, {SCALES_APART}},
    {FACTOR_SCALE_SOURCE, {0}},
    {FACTOR_SCALE_SOURCE, {1}},
    {FACTOR_SCALE_SOURCE, {2}},
};
enum { NUM_DECLARED_VALUES = sizeof declared_values / sizeof *declared_values };

static bool add_declared_values(struct factor *f, const struct attn_backend_caps *caps)
{
    bool ok = true;
    for (int32_t i = 0; i < NUM_DECLARED_VALUES; i++) {
        const struct declared_value *d = &declared_values[i];
        const bool declared =
            (caps->terms & d->terms) == d->terms && (caps->features & d->features) == d->features;
        ok = ok && (!declared || add(&f[d->factor], d->value.a, d->value.b));
    }
    return ok;
}

void case_needs(const struct factor_value *v, uint64_t *terms, uint64_t *features)
{
    *terms = 0;
    *features =
        shape_is_paged(v[FACTOR_SHAPE].a) ? ATTN_FEATURE_PAGED_KV : ATTN_FEATURE_CONTIGUOUS_KV;
    *features |= v[FACTOR_QUERY].a ? ATTN_FEATURE_QUANTIZED_QUERY : 0;
    for (int32_t i = 0; i < NUM_DECLARED_VALUES; i++) {
        const struct declared_value *d = &declared_values[i];
        if (v[d->factor].a == d->value.a && v[d->factor].b == d->value.b) {
            *terms |= d->terms;
            *features |= d->features;
        }
    }
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
            if (range_has(&caps->block_sizes[j], usual_block_sizes[i])) {
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
    return ok && add_scale_forms(f, caps);
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

static bool add_features(struct factor *f, const struct attn_backend_caps *caps)
{
    bool writes = caps->features & ATTN_FEATURE_FUSED_WRITE || caps->decode_write_kv_dtypes != 0;
    bool p_scale = caps->p_scale_forms >> ATTN_SCALE_PER_TENSOR & 1;
    bool ok = add_queries(&f[FACTOR_QUERY], caps) && add(&f[FACTOR_P_SCALE], 0, 0);
    ok = ok && (!p_scale || add(&f[FACTOR_P_SCALE], ATTN_SCALE_PER_TENSOR, 0));
    ok = ok && add(&f[FACTOR_HUGE], HUGE_NONE, 0);
    if (caps->device.type == ATTN_DEVICE_CPU) {
        ok = ok && add(&f[FACTOR_HUGE], HUGE_SCORES, 0) && add(&f[FACTOR_HUGE], HUGE_VALUES, 0);
    }
    return ok && add(&f[FACTOR_WRITE], 0, 0) && (!writes || add(&f[FACTOR_WRITE], 1, 0));
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

/* Layers without a cache, which the core composes of contiguous keys where no backend has them.
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
    ok = ok && add_declared_values(f, caps) && add_features(f, caps);
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
