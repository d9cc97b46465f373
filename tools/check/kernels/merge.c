/* SPDX-License-Identifier: Apache-2.0 */
/* merge_states: empty sides of both signs, NaN after them, rows without a prefix, in place, as
 * fp8. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/names.h"
#include "support/number.h"
#include "cases/compare.h"
#include "kernels/kernels.h"
#include "cases/kernel_test.h"
#include "support/random.h"
#include "harness/watch.h"

#define TOKENS 37
#define HEADS 5
#define FIRST_ROW 2
#define NUM_ROWS (TOKENS - 4)
#define FP8_SCALE 0.013f

enum merge_form { MERGE_PLAIN, MERGE_INTO_PREFIX, MERGE_INTO_SUFFIX, MERGE_NO_LSE, MERGE_FP8 };
static const char *const form_names[] = {"plain", "into_prefix", "into_suffix", "no_lse", "fp8"};

struct merge_variant {
    int32_t dtype;
    int32_t form;
    int32_t dims;
    bool tokens_outside; /* lse strides */
};

enum { M_PREFIX, M_PREFIX_LSE, M_SUFFIX, M_SUFFIX_LSE, M_OUT, M_LSE, M_SCALE, M_COUNT };

struct merge_case {
    struct merge_variant v;
    size_t at[M_COUNT];
};

static int32_t out_dtype(const struct merge_variant *v)
{
    return v->form == MERGE_FP8 ? ATTN_DTYPE_FP8_E4M3 : v->dtype;
}

static int64_t lse_at(const struct merge_variant *v, int64_t head, int64_t token)
{
    return v->tokens_outside ? token * HEADS + head : head * TOKENS + token;
}

static attn_status call_merge(struct backend *backend, uint8_t *base, const struct device *device,
                              void *stream, const void *context, struct attn_error *error)
{
    const struct merge_case *c = context;
    struct case_tensor s[M_SCALE];
    for (int32_t i = 0; i < M_SCALE; i++) {
        bool lse = i == M_PREFIX_LSE || i == M_SUFFIX_LSE || i == M_LSE;
        s[i] = case_rows(TOKENS, HEADS, c->v.dims);
        if (lse) {
            s[i] = (struct case_tensor){.shape = {HEADS, TOKENS},
                                        .strides = {lse_at(&c->v, 1, 0), lse_at(&c->v, 0, 1)}};
        }
        int32_t dtype = lse ? ATTN_DTYPE_F32 : i == M_OUT ? out_dtype(&c->v) : c->v.dtype;
        case_bind(&s[i], base + c->at[i], device, dtype, lse ? 2 : 3);
    }
    const struct attn_io_output_quant quant = {{ATTN_EXT_IO_OUTPUT_QUANT, 0, sizeof quant, NULL},
                                               (const float *)(base + c->at[M_SCALE]),
                                               NULL};
    struct attn_merge_states_args args = {.struct_size = sizeof args,
                                          .next = c->v.form == MERGE_FP8 ? &quant.ext : NULL,
                                          .instance = backend->instance,
                                          .stream = stream,
                                          .prefix_out = &s[M_PREFIX].tensor,
                                          .prefix_lse = &s[M_PREFIX_LSE].tensor,
                                          .suffix_out = &s[M_SUFFIX].tensor,
                                          .suffix_lse = &s[M_SUFFIX_LSE].tensor,
                                          .out = &s[M_OUT].tensor,
                                          .lse = &s[M_LSE].tensor,
                                          .first_row = FIRST_ROW,
                                          .num_rows = NUM_ROWS,
                                          .num_rows_with_prefix = NUM_ROWS - 5};
    if (c->v.form == MERGE_NO_LSE) {
        args.lse = NULL;
    }
    struct watch watch;
    watch_begin(&watch);
    return watch_end(&watch, backend, backend->kernels.merge_states(&args, error), error);
}

static void fill_merge(struct image *image, const struct merge_case *c, uint64_t *random)
{
    static const float special[] = {INFINITY, -INFINITY, NAN};
    int32_t dims = c->v.dims;
    for (int32_t i = 0; i < TOKENS * HEADS * dims; i++) {
        number_store(image->bytes + c->at[M_PREFIX], i, c->v.dtype, random_normal(random));
        number_store(image->bytes + c->at[M_SUFFIX], i, c->v.dtype, random_normal(random));
    }
    float *prefix = (float *)(image->bytes + c->at[M_PREFIX_LSE]);
    float *suffix = (float *)(image->bytes + c->at[M_SUFFIX_LSE]);
    *(float *)(image->bytes + c->at[M_SCALE]) = FP8_SCALE;
    for (int32_t i = 0; i < HEADS * TOKENS; i++) {
        int64_t at = lse_at(&c->v, i / TOKENS, i % TOKENS);
        int32_t pick = random_below(random, 12);
        prefix[at] = (float)(4 * random_normal(random));
        suffix[at] = (float)(4 * random_normal(random));
        if (pick < 3) {
            prefix[at] = special[pick];
        }
        if (pick < 2 && random_below(random, 2)) {
            suffix[at] = special[1 - pick]; /* both empty */
        } else if (pick < 2) {              /* after an empty side nothing counts, not even NaN */
            int64_t row = (int64_t)(i % TOKENS) * HEADS + i / TOKENS;
            number_store(image->bytes + c->at[M_PREFIX], row * dims + 3, c->v.dtype, NAN);
        }
    }
}

static enum trial_result verify_merge(struct kernel_test *test, const struct merge_case *c)
{
    int32_t dtype = out_dtype(&c->v);
    size_t row = (size_t)(HEADS * c->v.dims) * number_bytes(dtype), out = c->at[M_OUT];
    const uint8_t *found = test->found + out + FIRST_ROW * row;
    bool others =
        memcmp(test->found + out, test->image.bytes + out, FIRST_ROW * row) == 0 &&
        memcmp(found + NUM_ROWS * row, test->image.bytes + out + (FIRST_ROW + NUM_ROWS) * row,
               (TOKENS - FIRST_ROW - NUM_ROWS) * row) == 0;
    if (!others) {
        return trial_say(test->trial, TRIAL_FAILED, "rows next to the merged ones were written");
    }
    /* fp8: one step, where a quotient falls between two */
    struct bound bound =
        c->v.form == MERGE_FP8 ? (struct bound){2e-3, 0.13} : bound_of_dtype(c->v.dtype);
    enum trial_result result = kernel_test_compare(test, "merged", out + FIRST_ROW * row, NUM_ROWS,
                                                   HEADS, c->v.dims, dtype, bound);
    const struct compared_lse lse = {
        HEADS, lse_at(&c->v, 1, 0), lse_at(&c->v, 0, 1), FIRST_ROW, NUM_ROWS, NULL};
    return result != TRIAL_PASSED || c->v.form == MERGE_NO_LSE
               ? result
               : compare_lse(test->trial, &lse, test->expected + c->at[M_LSE],
                             test->found + c->at[M_LSE],
                             (struct bound){.relative = 1e-5, .least = 1e-4});
}

static enum trial_result run_merge(struct trial *trial, const void *variant, uint64_t seed)
{
    static const char *const names[M_SCALE] = {"prefix",     "prefix_lse", "suffix",
                                               "suffix_lse", "out",        "lse"};
    struct merge_case c = {.v = *(const struct merge_variant *)variant};
    struct kernel_test test;
    kernel_test_init(&test, trial);
    test.optional =
        c.v.form == MERGE_FP8 && !(trial->tested->caps.output_forms >> ATTN_OUTPUT_FP8_STATIC & 1);
    for (int32_t i = 0; i < M_SCALE; i++) {
        bool lse = i == M_PREFIX_LSE || i == M_SUFFIX_LSE || i == M_LSE;
        size_t bytes = lse ? TOKENS * HEADS * sizeof(float)
                           : (size_t)(TOKENS * HEADS * c.v.dims) * number_bytes(c.v.dtype);
        bool written = i >= M_OUT || (i == M_PREFIX && c.v.form == MERGE_INTO_PREFIX) ||
                       (i == M_SUFFIX && c.v.form == MERGE_INTO_SUFFIX);
        c.at[i] = kernel_test_add(&test, names[i], bytes, written);
    }
    c.at[M_SCALE] = kernel_test_add(&test, "output_scale", sizeof(float), false);
    if (c.v.form == MERGE_INTO_PREFIX || c.v.form == MERGE_INTO_SUFFIX) {
        c.at[M_OUT] = c.at[c.v.form == MERGE_INTO_PREFIX ? M_PREFIX : M_SUFFIX];
    }
    if (!test.image.failed) {
        fill_merge(&test.image, &c, &seed);
    }
    enum trial_result result = kernel_test_run(&test, call_merge, &c);
    if (result == TRIAL_PASSED) {
        result = verify_merge(&test, &c);
    }
    kernel_test_finish(&test);
    return result;
}

void merge_cases(const struct kernel_sink *sink)
{
    static const int32_t dims[] = {72, 256};
    char name[96];
    if (!(sink->caps->kernels & ATTN_KERNEL_MERGE_STATES)) {
        return;
    }
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        for (int32_t i = 0; i < 10 && sink->caps->dtypes >> dtype & 1; i++) {
            struct merge_variant v = {dtype, i / 2, dims[i % 2], (i + dtype) % 2 != 0};
            snprintf(name, sizeof name, "merge_states.%s.%s.d%d", dtype_name(dtype),
                     form_names[v.form], v.dims);
            sink->try(sink->user, name, run_merge, &v);
        }
    }
}
