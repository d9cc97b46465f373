/* SPDX-License-Identifier: Apache-2.0 */
/* merge_states: empty sides of both signs, NaN after them, rows without a prefix, in place, as
 * fp8. */
#include <math.h>

#include "cases/kernel_test.h"
#include "common/names.h"
#include "kernels/kernels.h"
#include "support/client.h"
#include "support/number.h"
#include "support/random.h"

enum { TOKENS = 37, HEADS = 5, FIRST_ROW = 2, NUM_ROWS = TOKENS - 4 };

enum merge_form { MERGE_PLAIN, MERGE_INTO_PREFIX, MERGE_INTO_SUFFIX, MERGE_NO_LSE, MERGE_FP8 };
static const char *const form_names[] = {"plain", "into_prefix", "into_suffix", "no_lse", "fp8"};

struct merge_variant {
    int32_t dtype;
    int32_t form;
    int32_t dims;
    bool tokens_outside; /* lse strides */
};

enum { PREFIX, PREFIX_LSE, SUFFIX, SUFFIX_LSE, OUT, LSE, SCALE, NUM_OPERANDS };

static attn_status call_merge(struct kernel_call *call, const void *context,
                              struct attn_error *error)
{
    const struct merge_variant *v = context;
    struct attn_tensor *t = call->tensors;
    const struct attn_io_output_quant quant = EXTENSION(
        attn_io_output_quant, ATTN_EXT_IO_OUTPUT_QUANT, NULL, call_array(call, SCALE), NULL);
    const struct attn_merge_states_args args =
        SIZED(attn_merge_states_args, .next = v->form == MERGE_FP8 ? &quant.ext : NULL,
              .instance = call->backend->instance, .stream = call->stream, .prefix_out = &t[PREFIX],
              .prefix_lse = &t[PREFIX_LSE], .suffix_out = &t[SUFFIX], .suffix_lse = &t[SUFFIX_LSE],
              .out = &t[OUT], .lse = v->form != MERGE_NO_LSE ? &t[LSE] : NULL,
              .first_row = FIRST_ROW, .num_rows = NUM_ROWS, .num_rows_with_prefix = NUM_ROWS - 5);
    return KERNEL_CALL(call, merge_states, &args, error);
}

/* Sides without keys. */
static void plant_empty(struct kernel_test *test, const struct merge_variant *v, uint64_t *random)
{
    static const float special[] = {INFINITY, -INFINITY, NAN};
    const int64_t *strides = test->operands[LSE].strides;
    float *prefix = test_input(test, PREFIX_LSE), *suffix = test_input(test, SUFFIX_LSE);
    for (int64_t i = 0; i < HEADS * TOKENS; i++) {
        const int64_t head = i / TOKENS, token = i % TOKENS;
        const int64_t at = head * strides[0] + token * strides[1];
        const int32_t pick = random_below(random, 12);
        if (pick < 3) {
            prefix[at] = special[pick];
        }
        if (pick < 2 && random_below(random, 2)) {
            suffix[at] = special[1 - pick]; /* both empty */
        } else if (pick < 2) {              /* after an empty side nothing counts, not even NaN */
            number_store(test_input(test, PREFIX), (token * HEADS + head) * v->dims + 3, v->dtype,
                         NAN);
        }
    }
}

static enum trial_result verify_merge(struct kernel_test *test, const struct merge_variant *v)
{
    uint8_t rows[TOKENS] = {0};
    const int64_t *strides = test->operands[LSE].strides;
    const struct compared_lse lse = {HEADS, strides[0], strides[1], FIRST_ROW, NUM_ROWS, NULL};
    /* fp8: one step, where a quotient falls between two */
    const struct bound bound =
        v->form == MERGE_FP8 ? (struct bound){2e-3, 0.13} : bound_of_dtype(v->dtype);
    memset(rows + FIRST_ROW, 1, NUM_ROWS);
    enum trial_result result = kernel_test_compare(test, OUT, rows, bound);
    return result != TRIAL_PASSED || v->form == MERGE_NO_LSE
               ? result
               : compare_lse(test->trial, &lse, test_expected(test, LSE), test_found(test, LSE),
                             (struct bound){.relative = 1e-5, .least = 1e-4});
}

static enum trial_result run_merge(struct trial *trial, const void *variant, uint64_t seed)
{
    static const float scale = 0.013f;
    const struct merge_variant *v = variant;
    const bool fp8 = v->form == MERGE_FP8, outside = v->tokens_outside;
    const bool in_prefix = v->form == MERGE_INTO_PREFIX, in_suffix = v->form == MERGE_INTO_SUFFIX;
    const struct operand rows = {"prefix", v->dtype, 3, {TOKENS, HEADS, v->dims}, .deviation = 1};
    const struct operand sums = {"prefix_lse",
                                 ATTN_DTYPE_F32,
                                 2,
                                 {HEADS, TOKENS},
                                 {outside ? 1 : TOKENS, outside ? HEADS : 1},
                                 .deviation = 4};
    struct operand o[NUM_OPERANDS] = {[PREFIX] = rows,
                                      [PREFIX_LSE] = sums,
                                      [SUFFIX] = rows,
                                      [SUFFIX_LSE] = sums,
                                      [OUT] = rows,
                                      [LSE] = sums,
                                      [SCALE] = {"output_scale", .bytes = 4, .from = &scale}};
    OWNED(kernel_test_finish) struct kernel_test test;
    o[PREFIX].written = in_prefix;
    o[SUFFIX].written = in_suffix;
    o[SUFFIX].name = "suffix";
    o[SUFFIX_LSE].name = "suffix_lse";
    o[OUT].name = "out";
    o[OUT].dtype = fp8 ? ATTN_DTYPE_FP8_E4M3 : v->dtype;
    o[OUT].slice = in_prefix || in_suffix;
    o[OUT].of = in_prefix ? PREFIX : SUFFIX;
    o[LSE].name = "lse";
    o[OUT].written = o[LSE].written = true;
    o[OUT].deviation = o[LSE].deviation = 0;
    kernel_test_init(&test, trial, o, NUM_OPERANDS, &seed);
    plant_empty(&test, v, &seed);
    test.optional = fp8 && !(trial->tested->caps.output_forms >> ATTN_OUTPUT_FP8_STATIC & 1);
    TRIAL_TRY(kernel_test_run(&test, call_merge, v));
    return verify_merge(&test, v);
}

void merge_cases(const struct kernel_sink *sink)
{
    static const int32_t dims[] = {72, 256};
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        for (int32_t i = 0; i < 10 && sink->caps->dtypes >> dtype & 1; i++) {
            struct merge_variant v = {dtype, i / 2, dims[i % 2], (i + dtype) % 2 != 0};
            kernel_try(sink, run_merge, &v, "merge_states.%s.%s.d%d", dtype_name(dtype),
                       form_names[v.form], v.dims);
        }
    }
}
