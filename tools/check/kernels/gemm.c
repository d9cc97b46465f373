/* SPDX-License-Identifier: Apache-2.0 */
/* batched_gemm: strided operands, transposed weights, fp8 weights with scales, mxfp4 weights with
 * theirs along either dimension, few rows of long sums, many rows, and rows that all batches share.
 */
#include "cases/kernel_test.h"
#include "common/names.h"
#include "kernels/kernels.h"
#include "support/client.h"
#include "support/random.h"

enum { BATCH = 5, FEW_ROWS = 4, MX_BLOCK = 32 };
enum { MX_NONE, MX_ALONG_K, MX_ALONG_N };

struct gemm_variant {
    int32_t dtype;
    int32_t w_dtype;
    int32_t w_scales; /* 0, 1 or BATCH */
    bool transposed;  /* w's columns are contiguous, not its rows */
    int32_t mx;       /* MX_*: w is mxfp4, whatever w_dtype says */
    int32_t rows;     /* 0: the usual ones */
    bool shared;      /* all batches multiply the same rows of a */
    bool parts;       /* the bits of a row do not depend on the number of rows */
};

struct sizes {
    int64_t rows, inner, columns;
};

static struct sizes sizes_of(const struct gemm_variant *v)
{
    return v->mx                ? (struct sizes){7, 96, 64} /* whole blocks along both */
           : v->rows > FEW_ROWS ? (struct sizes){v->rows, 328, 264}
           : v->rows > 0        ? (struct sizes){v->rows, 584, 132}
                                : (struct sizes){7, 72, 40};
}

enum { A, W, W_SCALE, BLOCK_SCALE, OUT, NUM_OPERANDS };

/* A batch-invariant layer's rows come in any number: parts of 1, 4, 5, 17 and 173 rows. */
static const int64_t first_rows[] = {0, 1, 5, 10, 27, 200};
enum { NUM_PARTS = sizeof first_rows / sizeof *first_rows - 1, PART_ROWS = 200 };

static attn_status call_gemm(struct kernel_call *call, const void *context,
                             struct attn_error *error)
{
    const struct gemm_variant *v = context;
    if (call->part >= 0) {
        const int64_t first = first_rows[call->part], count = first_rows[call->part + 1] - first;
        call_narrow(call, A, 1, first, count);
        call_narrow(call, OUT, 1, first, count);
    }
    const struct attn_batched_gemm_args args = SIZED(
        attn_batched_gemm_args, .instance = call->backend->instance, .stream = call->stream,
        .a = &call->tensors[A], .w = &call->tensors[W],
        .w_scale = v->w_scales > 0 ? call_array(call, W_SCALE) : NULL, .w_scale_count = v->w_scales,
        .w_block_scale = v->mx ? &call->tensors[BLOCK_SCALE] : NULL, .out = &call->tensors[OUT]);
    return KERNEL_CALL(call, batched_gemm, &args, error);
}

/* Any code is an e2m1; scales are powers of two around 1. */
static void fill_mxfp4(struct kernel_test *test, const struct sizes *n, uint64_t *random)
{
    uint8_t *codes = test_input(test, W), *scales = test_input(test, BLOCK_SCALE);
    const int64_t weights = BATCH * n->inner * n->columns;
    for (int64_t i = 0; i < weights / 2; i++) {
        codes[i] = (uint8_t)random_below(random, 256);
    }
    for (int64_t i = 0; i < weights / MX_BLOCK; i++) {
        scales[i] = (uint8_t)(123 + random_below(random, 9));
    }
}

/* a and out are views of [rows, batch, ...], as heads lie in a step's tensors. */
static enum trial_result run_gemm(struct trial *trial, const void *variant, uint64_t seed)
{
    static const float scales[BATCH] = {0.3f, 0.7f, 1.1f, 1.5f, 1.9f};
    const struct gemm_variant *v = variant;
    const struct sizes n = sizes_of(v);
    const int64_t blocks_k = n.inner / (v->mx == MX_ALONG_K ? MX_BLOCK : 1);
    const int64_t blocks_n = n.columns / (v->mx == MX_ALONG_N ? MX_BLOCK : 1);
    struct operand o[NUM_OPERANDS] = {
        [A] = {"a",
               v->dtype,
               3,
               {BATCH, n.rows, n.inner},
               {n.inner, BATCH * n.inner, 1},
               .deviation = 1},
        [W] = {"w", v->w_dtype, 3, {BATCH, n.inner, n.columns}, .deviation = 1},
        [W_SCALE] = {"scale", .bytes = sizeof scales, .from = scales},
        [BLOCK_SCALE] = {"block_scale",
                         ATTN_DTYPE_INT8,
                         3,
                         {BATCH, blocks_k, blocks_n},
                         .as = {ATTN_CODE_FLOAT8_E8M0FNU, 8, 1}},
        [OUT] = {"out",
                 v->dtype,
                 3,
                 {BATCH, n.rows, n.columns},
                 {n.columns, BATCH * n.columns, 1},
                 .written = true},
    };
    OWNED(kernel_test_finish) struct kernel_test test;
    if (v->shared) {
        o[A].strides[0] = 0;
        /* once odd: kernels of pairs of elements cannot halve it */
        o[A].strides[1] = n.inner + (v->transposed ? 1 : 0);
    }
    for (int32_t i = W; i <= BLOCK_SCALE && v->transposed; i++) {
        const int64_t *shape = o[i].shape, strides[] = {shape[1] * shape[2], 1, shape[1]};
        memcpy(o[i].strides, strides, sizeof strides);
    }
    if (v->mx) {
        o[W].as = (struct attn_dtype){ATTN_CODE_FLOAT4_E2M1FN, 4, 1};
    }
    kernel_test_init(&test, trial, o, NUM_OPERANDS, &seed);
    if (v->mx) {
        fill_mxfp4(&test, &n, &seed);
    }
    TRIAL_TRY(kernel_test_run(&test, call_gemm, v));
    /* a batch is a row here, and its rows are heads */
    TRIAL_TRY(kernel_test_compare(&test, OUT, NULL, bound_of_dtype(v->dtype)));
    return v->parts ? kernel_test_parts(&test, call_gemm, v, NUM_PARTS) : TRIAL_PASSED;
}

void gemm_cases(const struct kernel_sink *sink)
{
    static const int32_t scales[] = {0, 1, BATCH}, many[] = {5, 17, 64, 70, 130, 130};
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        bool there = sink->caps->dtypes >> dtype & 1;
        for (int32_t i = 0; i < 8 && there; i++) {
            bool fp8 = i >= 4;
            struct gemm_variant v = {dtype, fp8 ? ATTN_DTYPE_FP8_E4M3 : dtype,
                                     scales[fp8 ? 1 + i % 2 : i % 2 * 2], i / 2 % 2 != 0};
            kernel_try(sink, run_gemm, &v, "batched_gemm.%s.%s.scales%d%s", dtype_name(dtype),
                       dtype_name(v.w_dtype), v.w_scales, v.transposed ? ".transposed" : "");
        }
        for (int32_t i = 0; i < 4 && there; i++) {
            struct gemm_variant v = {dtype, dtype, scales[i / 2 * 2], i % 2 != 0,
                                     .rows = i == 1 || i == 2 ? 1 : 3};
            kernel_try(sink, run_gemm, &v, "batched_gemm.%s.rows%d%s", dtype_name(dtype), v.rows,
                       v.transposed ? ".transposed" : "");
        }
        for (size_t i = 0; i < sizeof many / sizeof *many && there; i++) {
            struct gemm_variant v = {dtype,      dtype,           scales[i % 3],
                                     i % 2 != 0, .rows = many[i], .shared = i > 3};
            kernel_try(sink, run_gemm, &v, "batched_gemm.%s.rows%d%s%s", dtype_name(dtype), v.rows,
                       v.transposed ? ".transposed" : "", v.shared ? ".shared" : "");
        }
        for (int32_t i = 0; i < 2 && there; i++) {
            struct gemm_variant v = {dtype,
                                     i != 0 ? ATTN_DTYPE_FP8_E4M3 : dtype,
                                     scales[i],
                                     (dtype + i) % 2 != 0,
                                     .rows = PART_ROWS,
                                     .parts = true};
            if (sink->caps->features & ATTN_FEATURE_BATCH_INVARIANT) {
                kernel_try(sink, run_gemm, &v, "batched_gemm.%s.%s.rows%d%s.invariant",
                           dtype_name(dtype), dtype_name(v.w_dtype), v.rows,
                           v.transposed ? ".transposed" : "");
            }
        }
        there = there && sink->caps->features & ATTN_FEATURE_MXFP4_WEIGHTS;
        for (int32_t i = 0; i < 4 && there; i++) {
            bool along_n = i / 2 != 0;
            struct gemm_variant v = {dtype, dtype, scales[i % 2], i % 2 != 0,
                                     along_n ? MX_ALONG_N : MX_ALONG_K};
            kernel_try(sink, run_gemm, &v, "batched_gemm.%s.mxfp4.%s.scales%d%s", dtype_name(dtype),
                       along_n ? "n" : "k", v.w_scales, v.transposed ? ".transposed" : "");
        }
    }
}
