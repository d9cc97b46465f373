/* SPDX-License-Identifier: Apache-2.0 */
/* merge_states: two attends over disjoint keys become one, by their log-sum-exp. */
#include <math.h>

#include "common/number.h"
#include "common/tensors.h"
#include "reference.h"

/* One side's share of a row: exp(lse - m), 0 where it is empty. Both infinities mean empty. */
static double weight_of(double lse, double m)
{
    return isinf(lse) ? 0 : exp(lse - m);
}

static void merge_row(const struct attn_merge_states_args *args, double scale, int64_t t, int64_t h)
{
    double prefix[REF_MAX_HEAD_SIZE], suffix[REF_MAX_HEAD_SIZE];
    int32_t dims = (int32_t)args->out->shape[2];
    /* past them the prefix may have no rows at all */
    bool has_prefix = t - args->first_row < args->num_rows_with_prefix;
    double lse1 = has_prefix ? *(const float *)tensor_row(args->prefix_lse, h, t) : -INFINITY;
    double lse2 = *(const float *)tensor_row(args->suffix_lse, h, t);
    double m = fmax(isinf(lse1) ? -INFINITY : lse1, isinf(lse2) ? -INFINITY : lse2);
    double w1 = weight_of(lse1, m), w2 = weight_of(lse2, m);
    double sum = w1 + w2; /* NaN if an lse is: it came from a visible NaN */
    if (has_prefix) {
        number_load_row(prefix, tensor_row(args->prefix_out, t, h),
                        number_dtype_name(args->prefix_out->dtype), dims);
    }
    number_load_row(suffix, tensor_row(args->suffix_out, t, h),
                    number_dtype_name(args->suffix_out->dtype), dims);
    for (int32_t d = 0; d < dims; d++) {
        double first = w1 == 0 ? 0 : w1 * prefix[d];
        double second = w2 == 0 ? 0 : w2 * suffix[d];
        suffix[d] = sum == 0 ? 0 : (first + second) / sum / scale;
    }
    number_store_row(tensor_row(args->out, t, h), suffix, number_dtype_name(args->out->dtype),
                     dims);
    if (args->lse != NULL) {
        *(float *)tensor_row(args->lse, h, t) = sum == 0 ? -INFINITY : (float)(m + log(sum));
    }
}

static void merge_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct attn_merge_states_args *args = argument;
    double scale = 1;
    for (const struct attn_ext *ext = args->next; ext != NULL; ext = ext->next) {
        if (ext->id == ATTN_EXT_IO_OUTPUT_QUANT && args->out->dtype.bits == 8) {
            const struct attn_io_output_quant *quant = (const struct attn_io_output_quant *)ext;
            scale = quant->scale != NULL ? *quant->scale : 1;
        }
    }
    for (int64_t i = begin; i < end; i++) {
        for (int64_t h = 0; h < args->out->shape[1]; h++) {
            merge_row(args, scale, args->first_row + i, h);
        }
    }
}

attn_status ref_merge_states(const struct attn_merge_states_args *args, struct attn_error *error)
{
    const struct attn_host *host = args->instance->host;
    host->parallel_for(host->user, args->num_rows, 4, merge_rows, (void *)(uintptr_t)args);
    return ATTN_OK;
}
