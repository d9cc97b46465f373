/* SPDX-License-Identifier: Apache-2.0 */
/* The values of each factor that a backend declares, and the layer that they make. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cases/cases.h"
#include "common/command.h"
#include "support/client.h"

static const int32_t model_head_sizes[] = {24,  32,  40,  64,  72,  80,  96, 112,
                                           120, 128, 160, 192, 224, 256, 512};
static const int32_t usual_block_sizes[] = {1, 8, 16, 32, 64, 128, 256};
static const struct factor_value usual_heads[] = {{4, 4}, {8, 2}, {9, 3}, {8, 1}, {5, 1}, {16, 1}};

static void add(struct case_space *space, int32_t which, int32_t a, int32_t b)
{
    struct factor *factor = &space->factors[which];
    factor->values =
        command_realloc(factor->values, (size_t)factor->count + 1, sizeof *factor->values);
    factor->values[factor->count++] = (struct factor_value){a, b};
}

static void add_head_sizes(struct case_space *space)
{
    /* Only those pairs D != Dv that models have. */
    static const struct factor_value pairs[] = {{192, 128}, {64, 128}, {128, 72}};
    const struct attn_backend_caps *caps = &space->caps;
    const int32_t count = sizeof model_head_sizes / sizeof *model_head_sizes;
    for (int32_t d = 0; d < count; d++) {
        for (int32_t v = 0; v < count; v++) {
            const struct factor_value size = {model_head_sizes[d], model_head_sizes[v]};
            bool declared = false, wanted = d == v;
            for (int32_t i = 0; i < caps->num_head_sizes && !declared; i++) {
                const struct attn_head_size_range *r = &caps->head_sizes[i];
                declared =
                    range_has(&r->qk, size.a) && (r->same ? d == v : range_has(&r->v, size.b));
            }
            for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
                wanted = wanted || (pairs[i].a == size.a && pairs[i].b == size.b);
            }
            if (declared && wanted) {
                add(space, FACTOR_HEAD_SIZE, size.a, size.b);
            }
        }
    }
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

static void add_declared_values(struct case_space *space)
{
    const struct attn_backend_caps *caps = &space->caps;
    for (int32_t i = 0; i < NUM_DECLARED_VALUES; i++) {
        const struct declared_value *d = &declared_values[i];
        if ((caps->terms & d->terms) == d->terms && (caps->features & d->features) == d->features) {
            add(space, d->factor, d->value.a, d->value.b);
        }
    }
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

/* A value for each bit from `first` to `last` that a mask has. */
static void add_bits(struct case_space *space, int32_t factor, uint64_t mask, int32_t first,
                     int32_t last)
{
    for (int32_t i = first; i <= last; i++) {
        if (mask >> i & 1) {
            add(space, factor, i, 0);
        }
    }
}

static void add_cache_factors(struct case_space *space)
{
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
    const struct attn_backend_caps *caps = &space->caps;
    add_bits(space, FACTOR_KV_DTYPE, caps->kv_dtypes & ~(UINT64_C(1) << ATTN_KV_FP8_DS_MLA),
             ATTN_KV_AUTO + 1, ATTN_KV_Q4_0); /* DS_MLA: rows of MLA only */
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        const uint64_t both = 1ull << pairs[i].a | 1ull << pairs[i].b;
        if (caps->features & ATTN_FEATURE_KV_DTYPE_V && (caps->kv_dtypes & both) == both) {
            add(space, FACTOR_KV_DTYPE, pairs[i].a, pairs[i].b);
        }
    }
    for (size_t i = 0; i < sizeof usual_block_sizes / sizeof *usual_block_sizes; i++) {
        if (ranges_have(caps->block_sizes, caps->num_block_sizes, usual_block_sizes[i])) {
            add(space, FACTOR_BLOCK_SIZE, usual_block_sizes[i], 0);
        }
    }
    add_bits(space, FACTOR_LAYOUT, caps->layouts, 0, ATTN_KV_LAYOUT_PACKED_K);
    for (int32_t k = ATTN_SCALE_PER_TENSOR; k <= ATTN_SCALE_PER_HEAD; k++) {
        for (int32_t v = ATTN_SCALE_PER_TENSOR; v <= ATTN_SCALE_PER_HEAD; v++) {
            if ((caps->k_scale_forms >> k & 1) && (caps->v_scale_forms >> v & 1)) {
                add(space, FACTOR_SCALES, k, v);
            }
        }
    }
    if (space->factors[FACTOR_SCALES].count == 0) {
        add(space, FACTOR_SCALES, ATTN_SCALE_NONE, 0);
    }
}

static void add_features(struct case_space *space)
{
    const struct attn_backend_caps *caps = &space->caps;
    const bool queries = caps->features & ATTN_FEATURE_QUANTIZED_QUERY;
    add(space, FACTOR_QUERY, 0, 0);
    for (int32_t i = ATTN_DTYPE_FP8_E4M3; i <= ATTN_DTYPE_INT8; i++) {
        if (queries && caps->q_dtypes >> i & 1) {
            add(space, FACTOR_QUERY, i, ATTN_SCALE_PER_TENSOR);
            add(space, FACTOR_QUERY, i, ATTN_SCALE_PER_HEAD);
        }
    }
    add(space, FACTOR_P_SCALE, 0, 0);
    add_bits(space, FACTOR_P_SCALE, caps->p_scale_forms, ATTN_SCALE_PER_TENSOR,
             ATTN_SCALE_PER_TENSOR);
    add(space, FACTOR_HUGE, HUGE_NONE, 0);
    if (caps->device.type == ATTN_DEVICE_CPU) {
        add(space, FACTOR_HUGE, HUGE_SCORES, 0);
        add(space, FACTOR_HUGE, HUGE_VALUES, 0);
    }
    add(space, FACTOR_WRITE, 0, 0);
    if (caps->features & ATTN_FEATURE_FUSED_WRITE || caps->decode_write_kv_dtypes != 0) {
        add(space, FACTOR_WRITE, 1, 0);
    }
}

/* Shapes of batches, and layers without a cache, which the core composes of contiguous keys where
 * no backend has them. */
static void add_shapes(struct case_space *space)
{
    const struct attn_backend_caps *caps = &space->caps;
    for (int32_t shape = 0; shape < SHAPE_COUNT; shape++) {
        int32_t phase = shape_is_decode(shape) ? ATTN_PHASE_DECODE : ATTN_PHASE_PREFILL;
        uint64_t keys = shape_is_paged(shape) ? ATTN_FEATURE_PAGED_KV : ATTN_FEATURE_CONTIGUOUS_KV;
        if ((caps->phases >> phase & 1) && (caps->features & keys)) {
            add(space, FACTOR_SHAPE, shape, 0);
        }
    }
    add(space, FACTOR_ENCODER, ATTN_ENCODER_ONLY, 0);
    if (caps->layer_kinds >> ATTN_LAYER_ENCODER & 1) {
        add(space, FACTOR_ENCODER, ATTN_ENCODER_OF_DECODER, 0);
        add(space, FACTOR_ENCODER, ATTN_ENCODER_MULTIMODAL, 0);
    }
}

bool case_space_init(struct case_space *space, const struct attn_backend_caps *caps)
{
    memset(space, 0, sizeof *space);
    space->caps = *caps;
    add_shapes(space);
    add_bits(space, FACTOR_DTYPE, caps->dtypes, ATTN_DTYPE_F16, ATTN_DTYPE_F32);
    for (size_t i = 0; i < sizeof usual_heads / sizeof *usual_heads; i++) {
        int32_t group = usual_heads[i].a / usual_heads[i].b;
        if ((caps->max_group == 0 || group <= caps->max_group) &&
            (caps->max_num_q_heads == 0 || usual_heads[i].a <= caps->max_num_q_heads)) {
            add(space, FACTOR_HEADS, usual_heads[i].a, usual_heads[i].b);
        }
    }
    add_head_sizes(space);
    add_cache_factors(space);
    add_declared_values(space);
    add_features(space);
    bool whole = true;
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        whole = whole && space->factors[i].count > 0;
    }
    return whole;
}

void case_space_finish(struct case_space *space)
{
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        free(space->factors[i].values);
        space->factors[i] = (struct factor){NULL, 0};
    }
}

int32_t case_phase(const struct factor_value *v)
{
    return shape_is_decode(v[FACTOR_SHAPE].a) ? ATTN_PHASE_DECODE : ATTN_PHASE_PREFILL;
}

void case_layer(const struct factor_value *v, struct attn_layer_desc *layer)
{
    bool paged = shape_is_paged(v[FACTOR_SHAPE].a);
    bool global = v[FACTOR_KV_DTYPE].a == ATTN_KV_NVFP4;
    *layer = SIZED(attn_layer_desc, .name = "case",
                   .kind = !paged                             ? ATTN_LAYER_ENCODER
                           : v[FACTOR_SHAPE].a == SHAPE_CROSS ? ATTN_LAYER_CROSS
                                                              : ATTN_LAYER_DECODER,
                   .encoder = paged ? 0 : v[FACTOR_ENCODER].a, .dtype = v[FACTOR_DTYPE].a,
                   .kv_dtype = v[FACTOR_KV_DTYPE].a, .kv_dtype_v = v[FACTOR_KV_DTYPE].b,
                   .num_q_heads = v[FACTOR_HEADS].a, .num_kv_heads = v[FACTOR_HEADS].b,
                   .head_size = v[FACTOR_HEAD_SIZE].a, .head_size_v = v[FACTOR_HEAD_SIZE].b,
                   .scale = (float)(1 / sqrt(v[FACTOR_HEAD_SIZE].a)),
                   .causal = v[FACTOR_CAUSAL].a != CAUSAL_NO ? ATTN_CAUSAL_YES : ATTN_CAUSAL_NO,
                   .causal_per_request = v[FACTOR_CAUSAL].a == CAUSAL_PER_REQUEST,
                   .has_window = v[FACTOR_WINDOW].a > 0, .window_left = v[FACTOR_WINDOW].a - 1,
                   .window_right = v[FACTOR_WINDOW].b ? v[FACTOR_WINDOW].a - 1 : 0,
                   .chunk_size = v[FACTOR_CHUNK].a, .chunk_lookback = v[FACTOR_CHUNK].b,
                   .soft_cap = (float)v[FACTOR_SOFT_CAP].a, .alibi = v[FACTOR_ALIBI].a,
                   .has_sinks = v[FACTOR_SINKS].a, .sink_len = v[FACTOR_STATIC_SINK].a,
                   .prefix_lm = v[FACTOR_SPANS].a, .prefix_lm_window = v[FACTOR_SPANS].b,
                   .tree_mask = v[FACTOR_TREE].a, .block_size = paged ? v[FACTOR_BLOCK_SIZE].a : 0,
                   .num_speculative_tokens = v[FACTOR_SHAPE].a == SHAPE_SPECULATIVE ? 3 : 0,
                   .q_scale_form = v[FACTOR_QUERY].a ? v[FACTOR_QUERY].b : ATTN_SCALE_NONE,
                   .q_dtype = v[FACTOR_QUERY].a,
                   .k_scale_form = kv_is_fp8(case_kv(v, false)) ? v[FACTOR_SCALES].a
                                   : global                     ? ATTN_SCALE_PER_TENSOR
                                                                : 0,
                   .v_scale_form = kv_is_fp8(case_kv(v, true)) ? v[FACTOR_SCALES].b
                                   : global                    ? ATTN_SCALE_PER_TENSOR
                                                               : 0,
                   .p_scale_form = v[FACTOR_P_SCALE].a, .needs_lse = v[FACTOR_LSE].a != 0,
                   .needs_block_table_row = v[FACTOR_TABLE_ROW].a,
                   .device_seq_lens_only = v[FACTOR_LENGTHS].a == LENGTHS_DEVICE,
                   .host_bounds = v[FACTOR_LENGTHS].a == LENGTHS_HOST_BOUNDS,
                   .fast_prefill = v[FACTOR_FAST_PREFILL].a);
    if (!layer->has_window) {
        layer->window_left = layer->window_right = -1;
    }
}
