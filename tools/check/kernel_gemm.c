/* SPDX-License-Identifier: Apache-2.0 */
/* batched_gemm: strided operands, transposed weights, fp8 weights with scales. */
#include <stdio.h>

#include "common/number.h"
#include "compare.h"
#include "kernels.h"
#include "pair.h"
#include "common/random.h"

enum { BATCH = 5, ROWS = 7, INNER = 72, COLUMNS = 40 };

struct gemm_variant {
    int32_t dtype;
    int32_t w_dtype;
    int32_t w_scales; /* 0, 1 or BATCH */
    bool transposed;  /* w's columns are contiguous, not its rows */
};

struct gemm_case {
    struct gemm_variant v;
    size_t a, w, out, scale;
};

/* a and out are views of [rows, batch, …], as heads lie in a step's tensors. */
static struct pair_tensor by_heads(int64_t width)
{
    return (struct pair_tensor){.shape = {BATCH, ROWS, width},
                                .strides = {width, BATCH * width, 1}};
}

static attn_status call_gemm(struct backend *backend, uint8_t *base, struct attn_device device,
                             void *stream, const void *context, struct attn_error *error)
{
    const struct gemm_case *c = context;
    struct pair_tensor a = by_heads(INNER), out = by_heads(COLUMNS);
    struct pair_tensor w = pair_rows(BATCH, INNER, COLUMNS);
    if (c->v.transposed) {
        w.strides[1] = 1;
        w.strides[2] = INNER;
    }
    struct attn_batched_gemm_args args = {
        .struct_size = sizeof args,
        .instance = backend->instance,
        .stream = stream,
        .a = pair_bind(&a, base + c->a, device, c->v.dtype, 3),
        .w = pair_bind(&w, base + c->w, device, c->v.w_dtype, 3),
        .w_scale = c->v.w_scales > 0 ? (const float *)(base + c->scale) : NULL,
        .w_scale_count = c->v.w_scales,
        .out = pair_bind(&out, base + c->out, device, c->v.dtype, 3),
    };
    return backend->kernels.batched_gemm(&args, error);
}

static enum trial_result run_gemm(struct trial *trial, const void *variant, uint64_t seed)
{
    struct gemm_case c = {.v = *(const struct gemm_variant *)variant};
    struct pair pair;
    struct mismatch worst;
    size_t e = number_bytes(c.v.dtype);
    pair_init(&pair, trial);
    c.a = pair_add(&pair, BATCH * ROWS * INNER * e, false);
    c.w = pair_add(&pair, BATCH * INNER * COLUMNS * number_bytes(c.v.w_dtype), false);
    c.out = pair_add(&pair, BATCH * ROWS * COLUMNS * e, true);
    c.scale = pair_add(&pair, BATCH * sizeof(float), false);
    for (int32_t i = 0; i < BATCH * ROWS * INNER && !pair.image.failed; i++) {
        number_store(pair.image.bytes + c.a, i, c.v.dtype, random_normal(&seed));
    }
    for (int32_t i = 0; i < BATCH * INNER * COLUMNS && !pair.image.failed; i++) {
        number_store(pair.image.bytes + c.w, i, c.v.w_dtype, random_normal(&seed));
    }
    for (int32_t i = 0; i < BATCH && !pair.image.failed; i++) {
        ((float *)(pair.image.bytes + c.scale))[i] = 0.3f + 0.4f * (float)i;
    }
    enum trial_result result = pair_run(&pair, call_gemm, &c);
    struct pair_tensor rows = pair_rows(ROWS, BATCH, COLUMNS);
    pair_bind(&rows, NULL, trial->device->device, c.v.dtype, 3);
    if (result == TRIAL_PASSED &&
        compare_rows(pair.expected + c.out, pair.found + c.out, &rows.tensor, c.v.dtype, NULL, ROWS,
                     bound_of_dtype(c.v.dtype), &worst) > 1) {
        result = trial_say(trial, TRIAL_FAILED, "out[%d, %lld, %d] is %g, not %g", worst.head,
                           (long long)worst.token, worst.dim, worst.found, worst.expected);
    }
    pair_finish(&pair);
    return result;
}

void gemm_cases(const struct kernel_sink *sink)
{
    static const int32_t scales[] = {0, 1, BATCH};
    char name[96];
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        bool there =
            (sink->caps->dtypes >> dtype & 1) && (sink->caps->kernels & ATTN_KERNEL_BATCHED_GEMM);
        for (int32_t i = 0; i < 8 && there; i++) {
            bool fp8 = i >= 4;
            struct gemm_variant v = {dtype, fp8 ? ATTN_DTYPE_FP8_E4M3 : dtype,
                                     scales[fp8 ? 1 + i % 2 : i % 2 * 2], i / 2 % 2 != 0};
            snprintf(name, sizeof name, "batched_gemm.%s.%s.scales%d%s", number_name(dtype),
                     number_name(v.w_dtype), v.w_scales, v.transposed ? ".transposed" : "");
            sink->try(sink->user, name, run_gemm, &v);
        }
    }
}
