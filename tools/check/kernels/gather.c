/* SPDX-License-Identifier: Apache-2.0 */
/* gather_kv: rows of every kind of cache through the block table, dequantized. */
#include <stdio.h>

#include "common/names.h"
#include "support/number.h"
#include "cases/compare.h"
#include "kernels/kernels.h"
#include "cases/kernel_test.h"
#include "cases/problem_copy.h"
#include "harness/watch.h"

struct gather_variant {
    struct attend_case attend_case;
    const struct case_space *space;
};

struct gather_case {
    const struct problem_copies *copies; /* the caches */
    size_t first_key, out_start_loc, out;
    int32_t num_rows;
    int32_t dtype;
};

static attn_status call_gather(struct backend *backend, uint8_t *base, const struct device *device,
                               void *stream, const void *context, struct attn_error *error)
{
    const struct gather_case *c = context;
    const struct problem_copies *s = c->copies;
    const struct binding *b =
        backend == s->reference.backend ? &s->reference.binding : &s->tested.binding;
    struct case_tensor out = case_rows(c->num_rows, b->layer.num_kv_heads, b->k_cache.head_size);
    struct attn_gather_kv_args args = {
        .struct_size = sizeof args,
        .instance = backend->instance,
        .layer = &b->layer,
        .params = &b->params,
        .cache = &b->k_cache,
        .batch = &b->batch,
        .first_key = (const int32_t *)(base + c->first_key),
        .out_start_loc = (const int32_t *)(base + c->out_start_loc),
        .stream = stream,
        .out = case_bind(&out, base + c->out, device, c->dtype, 3),
    };
    struct watch watch;
    watch_begin(&watch);
    return watch_end(&watch, backend, backend->kernels.gather_kv(&args, error), error);
}

/* Of each request some keys from the middle on. */
static int32_t draw_chunks(const struct problem *p, int32_t *first_key, int32_t *out_start_loc)
{
    out_start_loc[0] = 0;
    for (int32_t r = 0; r < p->num_reqs; r++) {
        int32_t length = p->requests[r].seq_len;
        first_key[r] = length / 3;
        out_start_loc[r + 1] = out_start_loc[r] + (length - length / 3) / 2 + (length > 0);
    }
    return out_start_loc[p->num_reqs];
}

/* The reference writes the step's keys, and both have its cache. */
static attn_status fill_caches(struct trial *trial, struct problem_copies *copies,
                               struct attn_error *error)
{
    const struct problem *p = &copies->problem;
    size_t first = p->at.cache, bytes = p->at.cache_end - first;
    attn_status status =
        trial->reference->kernels.write_kv(&copies->reference.binding.write, error);
    bool same = status == ATTN_OK && device_write(trial->device, copies->tested.memory + first,
                                                  copies->reference.memory + first, bytes);
    return status != ATTN_OK || same ? status : ATTN_ERROR_DEVICE;
}

static enum trial_result gather(struct trial *trial, struct problem_copies *copies)
{
    const struct problem *p = &copies->problem;
    struct gather_case c = {.copies = copies, .dtype = p->v[FACTOR_DTYPE].a};
    int32_t first_key[PROBLEM_MAX_REQS], out_start_loc[PROBLEM_MAX_REQS + 1];
    int64_t heads = p->v[FACTOR_HEADS].b, d = p->v[FACTOR_HEAD_SIZE].a;
    struct attn_error error = ATTN_ERROR_INIT;
    struct kernel_test test;
    enum trial_result result;
    kernel_test_init(&test, trial);
    c.num_rows = draw_chunks(p, first_key, out_start_loc);
    c.first_key = kernel_test_add(&test, "first_key", sizeof first_key, false);
    c.out_start_loc = kernel_test_add(&test, "out_start_loc", sizeof out_start_loc, false);
    c.out = kernel_test_add(&test, "out", (size_t)(c.num_rows * heads * d) * number_bytes(c.dtype),
                            true);
    attn_status status = fill_caches(trial, copies, &error);
    if (status != ATTN_OK || test.image.failed) {
        result = trial_call_failed(trial, "reference write_kv", status, &error);
    } else {
        for (int32_t r = 0; r <= p->num_reqs; r++) {
            ((int32_t *)(test.image.bytes + c.out_start_loc))[r] = out_start_loc[r];
            if (r < p->num_reqs) {
                ((int32_t *)(test.image.bytes + c.first_key))[r] = first_key[r];
            }
        }
        result = kernel_test_run(&test, call_gather, &c);
    }
    if (result == TRIAL_PASSED) {
        result = kernel_test_compare(&test, "out", c.out, c.num_rows, heads, d, c.dtype,
                                     bound_of_dtype(c.dtype));
    }
    kernel_test_finish(&test);
    return result;
}

static enum trial_result run_gather(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct gather_variant *v = variant;
    struct problem_copies copies;
    enum trial_result result = problem_copies_init(&copies, trial, v->space, &v->attend_case, seed);
    result = result == TRIAL_PASSED ? gather(trial, &copies) : result;
    problem_copies_finish(&copies);
    return result;
}

void gather_cases(const struct kernel_sink *sink)
{
    char name[128];
    if (!(sink->caps->kernels & ATTN_KERNEL_GATHER_KV)) {
        return;
    }
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        for (int32_t kv = ATTN_KV_F16; kv <= ATTN_KV_Q4_0; kv++) {
            struct gather_variant v = {.space = sink->space};
            if (!case_of_cache(sink->space, dtype, kv, &v.attend_case)) {
                continue;
            }
            snprintf(name, sizeof name, "gather_kv.%s.%s", dtype_name(dtype), kv_dtype_name(kv));
            sink->try(sink->user, name, run_gather, &v);
        }
    }
}
