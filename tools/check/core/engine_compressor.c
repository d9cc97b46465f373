/* SPDX-License-Identifier: Apache-2.0 */
/* Compressors, as an engine runs them: steps whose tokens finish rows, held to the formula in
 * float64. Each step comes twice, at first with states that are NaN, as of drafts that are
 * rejected. */
#include <attn/draft/compressor.h>

#include "common/names.h"
#include "core/engine.h"
#include "core/steps.h"
#include "support/client.h"
#include "support/number.h"
#include "support/oracle.h"

enum { MAX_SIZE = 512, ROTARY = 64 };

struct compressor_variant {
    int32_t ratio, overlaps, size, dtype, rope; /* without rope, nor a norm nor a bias */
};

enum { STATES = STEPS_OPERANDS, REJECTED, CACHE, OUT, BIAS, NORM, COS_SIN, NUM_OPERANDS };

struct compressor_case {
    const struct compressor_variant *v;
    struct steps steps;
};

struct described {
    struct attn_layer_desc layer;
    struct attn_compressor_desc compressor;
};

static void describe(const struct compressor_variant *v, struct described *x)
{
    const bool rotates = v->rope != ATTN_ROPE_NONE;
    x->compressor = EXTENSION(attn_compressor_desc, ATTN_EXT_DRAFT_COMPRESSOR_DESC, NULL,
                              .tokens_per_row = v->ratio, .overlaps = v->overlaps, .rope = v->rope,
                              .rotary_dim = rotates ? ROTARY : 0);
    x->layer =
        SIZED(attn_layer_desc, .next = &x->compressor.ext, .name = "compressor",
              .kind = ATTN_LAYER_DRAFT_COMPRESSOR, .dtype = v->dtype, .kv_dtype = ATTN_KV_F32,
              .num_q_heads = 2 * (1 + v->overlaps), .num_kv_heads = 2 * (1 + v->overlaps),
              .head_size = v->size, .scale = 1, .block_size = STEPS_BLOCK);
}

static attn_status run_states(struct check_engine *e, const struct compressor_case *c,
                              struct kernel_call *call, int32_t s, int32_t states,
                              struct attn_error *error)
{
    const bool plain = c->v->rope == ATTN_ROPE_NONE;
    struct kernel_call now;
    const struct attn_batch batch = steps_batch(&c->steps, call, s);
    call_bind(&now, call->test, call->backend, call->device, call->base);
    call_narrow(&now, states, 0, c->steps.first[s], batch.num_tokens);
    call_narrow(&now, OUT, 0, c->steps.first[s], batch.num_tokens);
    const struct attn_io_compressor compressor =
        EXTENSION(attn_io_compressor, ATTN_EXT_DRAFT_IO_COMPRESSOR, NULL,
                  .position_bias = plain ? NULL : &now.tensors[BIAS],
                  .norm_weight = plain ? NULL : &now.tensors[NORM],
                  .cos_sin = plain ? NULL : &now.tensors[COS_SIN], .norm_eps = 0.125f);
    const struct attn_step_io io =
        SIZED(attn_step_io, .next = &compressor.ext, .stream = call->stream,
              .k = &now.tensors[states], .out = &now.tensors[OUT]);
    return steps_run(e, call, s, &batch, &io, error);
}

static attn_status run_step(struct check_engine *e, const void *context, struct kernel_call *call,
                            int32_t s, struct attn_error *error)
{
    attn_status status = run_states(e, context, call, s, REJECTED, error);
    return status ? status : run_states(e, context, call, s, STATES, error);
}

static attn_status run_steps(struct kernel_call *call, const void *context,
                             struct attn_error *error)
{
    const struct compressor_case *c = context;
    struct described x;
    describe(c->v, &x);
    const struct attn_cache_memory memory =
        SIZED(attn_cache_memory, .base = call_array(call, CACHE), .num_blocks = STEPS_BLOCKS);
    const struct steps_layer layer = {&c->steps, &x.layer, NULL, &memory, run_step};
    return steps_call(&layer, call, context, error);
}

static enum trial_result verify(const struct compressor_case *c, struct kernel_test *test)
{
    const struct compressor_variant *v = c->v;
    const bool plain = v->rope == ATTN_ROPE_NONE;
    const struct oracle_compressor x = {.dtype = v->dtype,
                                        .tokens_per_row = v->ratio,
                                        .overlaps = v->overlaps,
                                        .size = v->size,
                                        .rotary = plain ? 0 : ROTARY,
                                        .neox = v->rope == ATTN_ROPE_NEOX,
                                        .bias = plain ? NULL : test_input(test, BIAS),
                                        .norm = plain ? NULL : test_input(test, NORM),
                                        .norm_eps = 0.125};
    struct factor_value factors[FACTOR_COUNT] = {{0, 0}};
    uint8_t finishes[STEPS_TOKENS];
    int32_t tokens[STEPS_LONGEST];
    double row[MAX_SIZE];
    for (int32_t t = 0; t < STEPS_TOKENS; t++) {
        const int32_t p = c->steps.position[t];
        finishes[t] = (p + 1) % v->ratio == 0;
        if (!finishes[t]) {
            continue;
        }
        for (int32_t i = 0; i <= p; i++) {
            tokens[i] = steps_token(&c->steps, c->steps.request[t], i);
        }
        oracle_compressor(&x, test_input(test, STATES), tokens, p, row);
        for (int32_t d = 0; d < v->size; d++) {
            number_store(test_expected(test, OUT), (int64_t)t * v->size + d, v->dtype, row[d]);
        }
    }
    factors[FACTOR_DTYPE].a = v->dtype;
    factors[FACTOR_KV_DTYPE].a = v->dtype;
    return kernel_test_compare(test, OUT, finishes, bound_of_case(factors));
}

static enum trial_result run_compressor(struct trial *trial, const void *variant, uint64_t seed)
{
    struct compressor_case c = {.v = variant};
    const struct compressor_variant *v = c.v;
    const int64_t heads = 2 * (1 + v->overlaps), size = v->size;
    const size_t bytes = (size_t)(STEPS_BLOCKS * STEPS_BLOCK * heads * size) * sizeof(float);
    struct operand operands[NUM_OPERANDS] = {
        [STATES] = {"k", v->dtype, 3, {STEPS_TOKENS, heads, size}, .deviation = 2},
        [REJECTED] = {"k of drafts", v->dtype, 3, {STEPS_TOKENS, heads, size}},
        [CACHE] = {"k_cache", .bytes = bytes, .written = true},
        [OUT] = {"out", v->dtype, 3, {STEPS_TOKENS, 1, size}, .written = true},
        [BIAS] = {"position_bias", ATTN_DTYPE_F32, 2, {v->ratio, heads / 2 * size}, .deviation = 1},
        [NORM] = {"norm_weight", v->dtype, 1, {size}, .deviation = 1},
        [COS_SIN] = {"cos_sin", ATTN_DTYPE_F32, 2, {STEPS_LONGEST, ROTARY}}};
    OWNED(kernel_test_finish) struct kernel_test test;
    steps_init(&c.steps);
    steps_operands(&c.steps, operands);
    kernel_test_init(&test, trial, operands, NUM_OPERANDS, &seed);
    steps_fill(&c.steps, &test, &seed);
    oracle_angles(test_input(&test, COS_SIN), STEPS_LONGEST, ROTARY);
    TRIAL_TRY(kernel_test_run_tested(&test, run_steps, &c));
    return verify(&c, &test);
}

void compressor_cases(const struct kernel_sink *sink)
{
    static const struct {
        int32_t ratio, overlaps, size, rope;
        const char *name;
    } forms[] = {{4, 1, MAX_SIZE, ATTN_ROPE_GPTJ, "4_overlapping"},
                 {128, 0, 128, ATTN_ROPE_NEOX, "128"},
                 {3, 1, 72, ATTN_ROPE_NONE, "3_overlapping"}};
    for (int32_t i = 0; i < 3 * 3; i++) {
        const struct compressor_variant v = {.ratio = forms[i / 3].ratio,
                                             .overlaps = forms[i / 3].overlaps,
                                             .size = forms[i / 3].size,
                                             .rope = forms[i / 3].rope,
                                             .dtype = ATTN_DTYPE_F16 + i % 3};
        if (sink->caps->layer_kinds >> ATTN_LAYER_DRAFT_COMPRESSOR & 1 &&
            sink->caps->dtypes >> v.dtype & 1) {
            kernel_try(sink, run_compressor, &v, "compressor.%s.%s", forms[i / 3].name,
                       dtype_name(v.dtype));
        }
    }
}
