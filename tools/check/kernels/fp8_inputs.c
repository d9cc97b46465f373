/* SPDX-License-Identifier: Apache-2.0 */
/* attend over q, k and v that arrive in e4m3, contiguous, with a scale each: what the core composes
 * a quantized multimodal encoder of. */
#include "cases/kernel_test.h"
#include "common/names.h"
#include "harness/planned.h"
#include "kernels/kernels.h"
#include "support/client.h"

enum { REQS = 3, TOKENS = 29, HEADS = 4, KV_HEADS = 2 };
static const int32_t starts[REQS + 1] = {0, 11, 12, TOKENS};

struct fp8_variant {
    int32_t dtype; /* out's */
    int32_t head_size;
};

enum { Q, K, V, OUT, SCALES, STARTS, NUM_OPERANDS };

static struct attn_layer_desc layer_of(const struct fp8_variant *v)
{
    return SIZED(attn_layer_desc, .name = "encoder", .kind = ATTN_LAYER_ENCODER,
                 .encoder = ATTN_ENCODER_MULTIMODAL, .dtype = v->dtype,
                 .kv_dtype = ATTN_KV_FP8_E4M3, .num_q_heads = HEADS, .num_kv_heads = KV_HEADS,
                 .head_size = v->head_size, .head_size_v = v->head_size, .scale = 0.3f,
                 .window_left = -1, .window_right = -1, .q_scale_form = ATTN_SCALE_PER_TENSOR,
                 .k_scale_form = ATTN_SCALE_PER_TENSOR, .v_scale_form = ATTN_SCALE_PER_TENSOR,
                 .q_dtype = ATTN_DTYPE_FP8_E4M3);
}

static attn_status call_attend(struct kernel_call *call, const void *context,
                               struct attn_error *error)
{
    const struct attn_layer_desc layer = layer_of(context);
    const float *scales = call_array(call, SCALES);
    const struct attn_layer_params params =
        SIZED(attn_layer_params, .q_scale = scales, .k_scale = scales + 1, .v_scale = scales + 2);
    const struct attn_batch batch =
        SIZED(attn_batch, .num_reqs = REQS, .num_tokens = TOKENS, .num_actual_tokens = TOKENS,
              .max_query_len = TOKENS, .query_start_loc = call_array(call, STARTS),
              .query_start_loc_host = starts);
    const struct attn_limits limits = client_limits(REQS, TOKENS, TOKENS, TOKENS, 0);
    struct attn_attend_args args =
        SIZED(attn_attend_args, .flags = ATTN_RUN_NO_WRITE, .layer = &layer, .params = &params,
              .batch = &batch, .stream = call->stream, .q = &call->tensors[Q],
              .k = &call->tensors[K], .v = &call->tensors[V], .out = &call->tensors[OUT]);
    return planned_call(call->backend, call->device, &limits, &args, call->backend->kernels.attend,
                        error);
}

static enum trial_result run_inputs(struct trial *trial, const void *variant, uint64_t seed)
{
    static const float scales[] = {0.05f, 0.02f, 0.01f};
    const struct fp8_variant *v = variant;
    const int32_t d = v->head_size, fp8 = ATTN_DTYPE_FP8_E4M3;
    const struct operand o[NUM_OPERANDS] = {
        [Q] = {"q", fp8, 3, {TOKENS, HEADS, d}, .deviation = 30},
        [K] = {"k", fp8, 3, {TOKENS, KV_HEADS, d}, .deviation = 30},
        [V] = {"v", fp8, 3, {TOKENS, KV_HEADS, d}, .deviation = 30},
        [OUT] = {"out", v->dtype, 3, {TOKENS, HEADS, d}, .written = true},
        [SCALES] = {"q_scale, k_scale or v_scale", .bytes = sizeof scales, .from = scales},
        [STARTS] = {"query_start_loc", .bytes = sizeof starts, .from = starts},
    };
    OWNED(kernel_test_finish) struct kernel_test test;
    kernel_test_init(&test, trial, o, NUM_OPERANDS, &seed);
    TRIAL_TRY(kernel_test_run(&test, call_attend, v));
    return kernel_test_compare(&test, OUT, NULL, bound_of_dtype(v->dtype));
}

void fp8_inputs_cases(const struct kernel_sink *sink)
{
    static const int32_t sizes[] = {64, 80};
    for (int32_t dtype = ATTN_DTYPE_F16;
         dtype <= ATTN_DTYPE_F32 && sink->caps->features & ATTN_FEATURE_FP8_INPUTS; dtype++) {
        for (int32_t i = 0; i < 2 && sink->caps->dtypes >> dtype & 1; i++) {
            const struct fp8_variant v = {dtype, sizes[i]};
            kernel_try(sink, run_inputs, &v, "attend.fp8_inputs.%s.d%d", dtype_name(dtype),
                       sizes[i]);
        }
    }
}
