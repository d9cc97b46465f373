/* SPDX-License-Identifier: Apache-2.0 */
/* gather_kv: rows of every kind of cache through the block table, dequantized. */
#include "cases/kernel_test.h"
#include "cases/problem_copy.h"
#include "common/names.h"
#include "kernels/kernels.h"
#include "support/client.h"

enum { FIRST_KEY, OUT_START_LOC, OUT, NUM_OPERANDS };

static attn_status call_gather(struct kernel_call *call, const void *context,
                               struct attn_error *error)
{
    const struct problem_copies *s = context; /* the caches */
    const struct binding *b =
        call->backend == s->reference.backend ? &s->reference.binding : &s->tested.binding;
    const struct attn_gather_kv_args args = SIZED(
        attn_gather_kv_args, .instance = call->backend->instance, .layer = &b->layer,
        .params = &b->params, .cache = &b->k_cache, .batch = &b->batch,
        .first_key = call_array(call, FIRST_KEY), .out_start_loc = call_array(call, OUT_START_LOC),
        .stream = call->stream, .out = &call->tensors[OUT]);
    return KERNEL_CALL(call, gather_kv, &args, error);
}

/* The reference writes the step's keys, and both have its cache. */
static attn_status fill_caches(struct trial *trial, struct problem_copies *copies,
                               struct attn_error *error)
{
    const struct check_problem *p = &copies->problem;
    size_t first = p->at.cache, bytes = p->at.cache_end - first;
    attn_status status =
        trial->reference->kernels.write_kv(&copies->reference.binding.write, error);
    bool same = status == ATTN_OK && device_write(trial->device, copies->tested.memory + first,
                                                  copies->reference.memory + first, bytes);
    return status != ATTN_OK || same ? status : ATTN_ERROR_DEVICE;
}

/* Gathers some keys of each request, from the middle on. */
static enum trial_result run_gather(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct attend_variant *v = variant;
    OWNED(problem_copies_finish) struct problem_copies copies;
    TRIAL_TRY(problem_copies_init(&copies, trial, v->space, &v->attend_case, seed));
    const struct check_problem *p = &copies.problem;
    const int32_t dtype = p->dtype;
    int32_t first_key[PROBLEM_MAX_REQS], starts[PROBLEM_MAX_REQS + 1] = {0};
    struct attn_error error = ATTN_ERROR_INIT;
    for (int32_t r = 0; r < p->num_reqs; r++) {
        const int32_t length = p->requests[r].seq_len;
        first_key[r] = length / 3;
        starts[r + 1] = starts[r] + (length - length / 3) / 2 + (length > 0);
    }
    const struct operand o[NUM_OPERANDS] = {
        [FIRST_KEY] = {"first_key", .bytes = (size_t)p->num_reqs * 4, .from = first_key},
        [OUT_START_LOC] = {"out_start_loc", .bytes = (size_t)(p->num_reqs + 1) * 4, .from = starts},
        [OUT] = {"out", dtype, 3, {starts[p->num_reqs], p->hk, p->d}, .written = true},
    };
    TRIAL_CALL(trial, "reference write_kv", fill_caches(trial, &copies, &error), &error);
    OWNED(kernel_test_finish) struct kernel_test test;
    kernel_test_init(&test, trial, o, NUM_OPERANDS, NULL);
    TRIAL_TRY(kernel_test_run(&test, call_gather, &copies));
    return kernel_test_compare(&test, OUT, NULL, bound_of_dtype(dtype));
}

void gather_cases(const struct kernel_sink *sink)
{
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        for (int32_t kv = ATTN_KV_F16; kv <= ATTN_KV_Q4_0; kv++) {
            struct attend_variant v = {.space = sink->space};
            if (!case_of_cache(sink->space, dtype, kv, &v.attend_case)) {
                continue;
            }
            kernel_try(sink, run_gather, &v, "gather_kv.%s.%s", dtype_name(dtype),
                       kv_dtype_name(kv));
        }
    }
}
