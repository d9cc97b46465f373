/* SPDX-License-Identifier: Apache-2.0 */
/* rope_write_kv: q and k are rotated in place, with q/k RMS norm before it, and the rotated keys
 * stand in the cache. */
#include <math.h>

#include "cases/kernel_test.h"
#include "cases/problem_copy.h"
#include "common/names.h"
#include "kernels/kernels.h"
#include "support/client.h"
#include "support/number.h"
#include "support/random.h"

#define MAX_POSITION 512
#define NORM_EPS 1e-5f

struct rope_variant {
    struct attend_case attend_case;
    const struct case_space *space;
    int32_t form;
    int32_t rotary_dim; /* 0: all */
    bool norm;
    bool float_table; /* cos and sin in float32, not in the activations' dtype */
};

/* What the kernel reads next to the problem's buffers. */
enum { POSITIONS, COS_SIN, Q_WEIGHT, K_WEIGHT, NUM_OPERANDS };

struct rope_case {
    const struct rope_variant *v;
    struct problem_copies *copies;
};

static void fill_tables(struct kernel_test *test, uint64_t *random)
{
    const struct operand *o = test->operands;
    const int32_t rotary = (int32_t)o[COS_SIN].shape[1], half = rotary / 2;
    const int32_t tokens = (int32_t)(o[POSITIONS].bytes / sizeof(int64_t));
    for (int32_t i = 0; i < tokens; i++) {
        ((int64_t *)test_input(test, POSITIONS))[i] = random_below(random, MAX_POSITION);
    }
    for (int32_t i = 0; i < MAX_POSITION * half; i++) {
        const int32_t position = i / half, pair = i % half, at = position * rotary + pair;
        const double angle = position * pow(10000, -2.0 * pair / rotary);
        number_store(test_input(test, COS_SIN), at, o[COS_SIN].dtype, cos(angle));
        number_store(test_input(test, COS_SIN), at + half, o[COS_SIN].dtype, sin(angle));
    }
    for (int32_t i = 0; i < 2 * o[Q_WEIGHT].shape[0]; i++) {
        number_store(test_input(test, Q_WEIGHT + i % 2), i / 2, o[Q_WEIGHT].dtype,
                     0.5 + random_unit(random));
    }
}

static attn_status call_rope(struct kernel_call *call, const void *context,
                             struct attn_error *error)
{
    const struct rope_case *c = context;
    const struct rope_variant *v = c->v;
    const struct problem_copies *copies = c->copies;
    const struct binding *b = call->backend == copies->reference.backend
                                  ? &copies->reference.binding
                                  : &copies->tested.binding;
    const struct attn_io_rope rope = EXTENSION(
        attn_io_rope, ATTN_EXT_IO_ROPE, NULL, .form = v->form, .rotary_dim = v->rotary_dim,
        .positions = call_array(call, POSITIONS), .cos_sin = &call->tensors[COS_SIN],
        .q_norm_weight = v->norm ? &call->tensors[Q_WEIGHT] : NULL,
        .k_norm_weight = v->norm ? &call->tensors[K_WEIGHT] : NULL,
        .norm_eps = v->norm ? NORM_EPS : 0);
    struct attn_write_kv_args args = b->write;
    args.next = &rope.ext;
    args.q = &b->q;
    return KERNEL_CALL(call, rope_write_kv, &args, error);
}

/* Compares numbers of both images. What agrees becomes equal in `found`, so that everything else
 * can be compared bit for bit; *off counts what did. */
static enum trial_result take_rows(struct trial *trial, const struct compared *rows,
                                   const uint8_t *expected, uint8_t *found, struct bound bound,
                                   int64_t *off)
{
    const int64_t bytes = (int64_t)number_bytes(rows->dtype), row = rows->heads * rows->dims;
    *off = 0;
    TRIAL_TRY(compare_rows(trial, rows, expected, found, bound));
    for (int64_t i = 0; i < rows->num_rows * row; i++) {
        const int64_t at = (i / row * rows->stride_row + i % row) * bytes;
        if (!is_poison(expected + at, bytes)) {
            *off += memcmp(found + at, expected + at, (size_t)bytes) != 0;
            memcpy(found + at, expected + at, (size_t)bytes);
        }
    }
    return TRIAL_PASSED;
}

/* Rows of q and k: half a unit of the activations' format next to float32's error. Rotated keys may
 * differ by the rounding before them: a unit of what the cache holds. */
static enum trial_result verify_rope(struct trial *trial, const struct check_problem *p,
                                     const struct problem_copy *reference,
                                     const struct problem_copy *tested)
{
    static const double relative[] = {
        [ATTN_DTYPE_F16] = 0x1p-10, [ATTN_DTYPE_BF16] = 0x1p-7, [ATTN_DTYPE_F32] = 1e-5};
    const bool fp8 = kv_is_fp8(p->v[FACTOR_KV_DTYPE].a);
    const int32_t kv = fp8 ? ATTN_DTYPE_FP8_E4M3 : p->dtype;
    const int64_t keys = (int64_t)((p->at.cache_scales - p->at.cache) / number_bytes(kv));
    const struct bound of_rows = {.relative = relative[p->dtype], .least = 3e-5};
    const struct bound of_keys = {.relative = fp8                     ? 0.13
                                              : kv == ATTN_DTYPE_BF16 ? 0x1p-7
                                                                      : 0x1p-10,
                                  .least = fp8 ? 0x1p-9 : 3e-5};
    const struct attn_tensor *q = &tested->binding.q, *k = &tested->binding.k;
    const struct compared q_rows = {"q", p->dtype, p->hq, p->d, q->strides[0], p->d, q->shape[0]},
                          k_rows = {"k", p->dtype, p->hk, p->d, k->strides[0], p->d, k->shape[0]},
                          cache = {"the cache", kv, 1, keys, keys, keys, 1};
    const uint8_t *expected = reference->memory;
    int64_t off;
    OWNED(memory_end)
    uint8_t *found = trial_read(trial, tested->device, tested->memory, p->image.size);
    if (found == NULL) {
        return TRIAL_FAILED;
    }
    TRIAL_TRY(take_rows(trial, &q_rows, expected + p->at.q, found + p->at.q, of_rows, &off));
    TRIAL_TRY(take_rows(trial, &k_rows, expected + p->at.k, found + p->at.k, of_rows, &off));
    TRIAL_TRY(take_rows(trial, &cache, expected + p->at.cache, found + p->at.cache, of_keys, &off));
    TRIAL_FAIL_IF(trial, fp8 && off > 2 + keys / 20, "%lld of %lld codes of the cache are off",
                  (long long)off, (long long)keys);
    TRIAL_FAIL_IF(trial, memcmp(expected, found, p->image.used) != 0,
                  "bytes outside of the outputs were written");
    return TRIAL_PASSED;
}

static enum trial_result run_rope(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct rope_variant *v = variant;
    OWNED(problem_copies_finish) struct problem_copies copies;
    TRIAL_TRY(problem_copies_init(&copies, trial, v->space, &v->attend_case, seed));
    const struct rope_case c = {v, &copies};
    const struct check_problem *p = &copies.problem;
    const int32_t d = p->d, dtype = p->dtype;
    const int32_t rotary = v->rotary_dim > 0 ? v->rotary_dim : d;
    const struct operand o[NUM_OPERANDS] = {
        [POSITIONS] = {"positions", .bytes = (size_t)p->num_tokens * sizeof(int64_t)},
        [COS_SIN] = {"cos_sin", v->float_table ? ATTN_DTYPE_F32 : dtype, 2, {MAX_POSITION, rotary}},
        [Q_WEIGHT] = {"q_weight", dtype, 1, {d}},
        [K_WEIGHT] = {"k_weight", dtype, 1, {d}},
    };
    OWNED(kernel_test_finish) struct kernel_test test;
    kernel_test_init(&test, trial, o, NUM_OPERANDS, NULL);
    fill_tables(&test, &seed);
    test.outputs_outside = true;
    TRIAL_TRY(kernel_test_run(&test, call_rope, &c));
    TRIAL_TRY(verify_rope(trial, p, &copies.reference, &copies.tested));
    return kernel_test_time(&test, call_rope, &c);
}

void rope_cases(const struct kernel_sink *sink)
{
    bool norm = sink->caps->features & ATTN_FEATURE_FUSED_ROPE_NORM;
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        for (int32_t i = 0; i < 16; i++) {
            int32_t kv = i & 8 ? ATTN_KV_FP8_E4M3 : dtype;
            struct rope_variant v = {.space = sink->space,
                                     .form = i & 1 ? ATTN_ROPE_GPTJ : ATTN_ROPE_NEOX,
                                     .norm = (i & 2) != 0,
                                     .float_table = (i + dtype) % 3 == 0};
            if ((v.norm && !norm) || !case_of_cache(sink->space, dtype, kv, &v.attend_case)) {
                continue;
            }
            struct factor_value size = case_value(sink->space, &v.attend_case, FACTOR_HEAD_SIZE);
            v.rotary_dim = i & 4 ? size.a / 2 : 0;
            kernel_try(sink, run_rope, &v, "rope_write_kv.%s.%s.%s%s%s%s", dtype_name(dtype),
                       kv_dtype_name(kv), i & 1 ? "gptj" : "neox", v.norm ? ".norm" : "",
                       v.rotary_dim > 0 ? ".half" : "", v.float_table ? ".f32_table" : "");
        }
    }
}
