/* SPDX-License-Identifier: Apache-2.0 */
/* attend over q, k and v that arrive in e4m3, contiguous, with a scale each: what the core composes
 * a quantized multimodal encoder of. */
#include <stdio.h>
#include <string.h>

#include "common/names.h"
#include "support/number.h"
#include "support/random.h"
#include "cases/compare.h"
#include "kernels/kernels.h"
#include "cases/kernel_test.h"
#include "harness/planned.h"

#define REQS 3
#define TOKENS 29
#define HEADS 4
#define KV_HEADS 2

struct fp8_variant {
    int32_t dtype; /* of out */
    int32_t head_size;
};

enum { F_Q, F_K, F_V, F_OUT, F_SCALES, F_START, F_COUNT };

struct fp8_case {
    struct fp8_variant v;
    size_t at[F_COUNT];
    int32_t start[REQS + 1]; /* the host's */
};

static struct attn_layer_desc layer_of(const struct fp8_variant *v)
{
    return (struct attn_layer_desc){.struct_size = sizeof(struct attn_layer_desc),
                                    .name = "encoder",
                                    .kind = ATTN_LAYER_ENCODER,
                                    .encoder = ATTN_ENCODER_MULTIMODAL,
                                    .dtype = v->dtype,
                                    .kv_dtype = ATTN_KV_FP8_E4M3,
                                    .num_q_heads = HEADS,
                                    .num_kv_heads = KV_HEADS,
                                    .head_size = v->head_size,
                                    .head_size_v = v->head_size,
                                    .scale = 0.3f,
                                    .window_left = -1,
                                    .window_right = -1,
                                    .q_scale_form = ATTN_SCALE_PER_TENSOR,
                                    .k_scale_form = ATTN_SCALE_PER_TENSOR,
                                    .v_scale_form = ATTN_SCALE_PER_TENSOR,
                                    .q_dtype = ATTN_DTYPE_FP8_E4M3};
}

static attn_status call_attend(struct backend *backend, uint8_t *base, const struct device *device,
                               void *stream, const void *context, struct attn_error *error)
{
    const struct fp8_case *c = context;
    const struct attn_layer_desc layer = layer_of(&c->v);
    struct case_tensor t[F_SCALES];
    for (int32_t i = 0; i < F_SCALES; i++) {
        t[i] = case_rows(TOKENS, i == F_Q || i == F_OUT ? HEADS : KV_HEADS, c->v.head_size);
        case_bind(&t[i], base + c->at[i], device, i == F_OUT ? c->v.dtype : ATTN_DTYPE_FP8_E4M3, 3);
    }
    const float *scales = (const float *)(base + c->at[F_SCALES]);
    const struct attn_layer_params params = {.struct_size = sizeof params,
                                             .q_scale = scales,
                                             .k_scale = scales + 1,
                                             .v_scale = scales + 2};
    const struct attn_batch batch = {.struct_size = sizeof batch,
                                     .num_reqs = REQS,
                                     .num_tokens = TOKENS,
                                     .num_actual_tokens = TOKENS,
                                     .max_query_len = TOKENS,
                                     .query_start_loc = (const int32_t *)(base + c->at[F_START]),
                                     .query_start_loc_host = c->start};
    const struct attn_limits limits = {.struct_size = sizeof limits,
                                       .max_num_reqs = REQS,
                                       .max_num_tokens = TOKENS,
                                       .max_query_len = TOKENS,
                                       .max_seq_len = TOKENS};
    struct attn_attend_args args = {.struct_size = sizeof args,
                                    .instance = backend->instance,
                                    .flags = ATTN_RUN_NO_WRITE,
                                    .layer = &layer,
                                    .params = &params,
                                    .batch = &batch,
                                    .stream = stream,
                                    .q = &t[F_Q].tensor,
                                    .k = &t[F_K].tensor,
                                    .v = &t[F_V].tensor,
                                    .out = &t[F_OUT].tensor};
    return planned_call(backend, device, &limits, &args, backend->kernels.attend, error);
}

static enum trial_result run_inputs(struct trial *trial, const void *variant, uint64_t seed)
{
    static const char *const names[] = {"q", "k", "v"};
    struct fp8_case c = {.v = *(const struct fp8_variant *)variant, .start = {0, 11, 12, TOKENS}};
    const size_t rows = (size_t)TOKENS * (size_t)c.v.head_size;
    struct kernel_test test;
    kernel_test_init(&test, trial);
    for (int32_t i = F_Q; i <= F_V; i++) {
        c.at[i] = kernel_test_add(&test, names[i], rows * (i == F_Q ? HEADS : KV_HEADS), false);
    }
    c.at[F_OUT] = kernel_test_add(&test, "out", rows * HEADS * number_bytes(c.v.dtype), true);
    c.at[F_SCALES] =
        kernel_test_add(&test, "q_scale, k_scale or v_scale", 3 * sizeof(float), false);
    c.at[F_START] = kernel_test_add(&test, "query_start_loc", sizeof c.start, false);
    if (!test.image.failed) {
        static const float scales[] = {0.05f, 0.02f, 0.01f};
        for (int32_t i = F_Q; i <= F_V; i++) {
            int64_t count = (int64_t)rows * (i == F_Q ? HEADS : KV_HEADS);
            number_fill_normal(test.image.bytes + c.at[i], 0, count, ATTN_DTYPE_FP8_E4M3, 30,
                               &seed);
        }
        memcpy(test.image.bytes + c.at[F_SCALES], scales, sizeof scales);
        memcpy(test.image.bytes + c.at[F_START], c.start, sizeof c.start);
    }
    enum trial_result result = kernel_test_run(&test, call_attend, &c);
    if (result == TRIAL_PASSED) {
        result = kernel_test_compare(&test, "out", c.at[F_OUT], TOKENS, HEADS, c.v.head_size,
                                     c.v.dtype, bound_of_dtype(c.v.dtype));
    }
    kernel_test_finish(&test);
    return result;
}

void fp8_inputs_cases(const struct kernel_sink *sink)
{
    static const int32_t sizes[] = {64, 80};
    char name[96];
    for (int32_t dtype = ATTN_DTYPE_F16;
         dtype <= ATTN_DTYPE_F32 && sink->caps->features & ATTN_FEATURE_FP8_INPUTS; dtype++) {
        for (int32_t i = 0; i < 2 && sink->caps->dtypes >> dtype & 1; i++) {
            const struct fp8_variant v = {dtype, sizes[i]};
            snprintf(name, sizeof name, "attend.fp8_inputs.%s.d%d", dtype_name(dtype), sizes[i]);
            sink->try(sink->user, name, run_inputs, &v);
        }
    }
}
