/* SPDX-License-Identifier: Apache-2.0 */
/* merge_states: two attends over disjoint keys become one. Bytes: three rows and their sums. */
#include "internal.h"

#define MAX_MERGE_SIZE 1024

static int32_t element_of_tensor(const struct attn_tensor *tensor)
{
    return tensor->dtype.code == ATTN_CODE_BFLOAT ? ELEMENT_BF16
           : tensor->dtype.bits == 16             ? ELEMENT_F16
                                                  : ELEMENT_F32;
}

static void merge_row(const struct attn_merge_states_args *args, int64_t t, int64_t h)
{
    const struct variant *variant = args->instance->variant;
    int32_t size = (int32_t)args->out->shape[2];
    float row[MAX_MERGE_SIZE + 64];
    float other[MAX_MERGE_SIZE + 64];
    float lse1 = *(const float *)tensor_row(args->prefix_lse, h, t);
    float lse2 = *(const float *)tensor_row(args->suffix_lse, h, t);
    bool first = !isinf(lse1) && t - args->first_row < args->num_rows_with_prefix;
    bool second = !isinf(lse2);
    float top = -INFINITY;
    if (first || second) {
        top = !second || (first && lse1 > lse2) ? lse1 : lse2;
    }
    float w1 = first ? expf(lse1 - top) : 0.0f;
    float w2 = second ? expf(lse2 - top) : 0.0f;
    float sum = w1 + w2;
    memset(row, 0, (size_t)round_up(size, COLUMN_MULTIPLE) * sizeof(float));
    memset(other, 0, (size_t)round_up(size, COLUMN_MULTIPLE) * sizeof(float));
    if (first) {
        variant->f32->unpack[element_of_tensor(args->prefix_out)](
            other, tensor_row(args->prefix_out, t, h), size);
        variant->add_scaled(row, other, w1 / sum, round_up(size, COLUMN_MULTIPLE));
    }
    if (second) {
        variant->f32->unpack[element_of_tensor(args->suffix_out)](
            other, tensor_row(args->suffix_out, t, h), size);
        variant->add_scaled(row, other, w2 / sum, round_up(size, COLUMN_MULTIPLE));
    }
    variant->store[element_of_tensor(args->out)](tensor_row(args->out, t, h), row, 1.0f, size);
    if (args->lse != NULL) {
        *(float *)tensor_row(args->lse, h, t) = first || second ? top + logf(sum) : -INFINITY;
    }
}

static void merge_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct attn_merge_states_args *args = argument;
    (void)worker;
    for (int64_t t = begin; t < end; t++) {
        for (int64_t h = 0; h < args->out->shape[1]; h++) {
            merge_row(args, args->first_row + t, h);
        }
    }
}

attn_status simd_merge_states(const struct attn_merge_states_args *args, struct attn_error *error)
{
    const struct attn_tensor *const tensors[] = {args->out, args->prefix_out, args->suffix_out};
    static const char *const names[] = {"out", "prefix_out", "suffix_out"};
    attn_status status = STRUCT_KNOWN(attn_merge_states_args, args, error);
    if (status != ATTN_OK) {
        return status;
    }
    for (int32_t i = 0; i < 3; i++) {
        const struct attn_tensor *tensor = tensors[i];
        if (tensor == NULL || tensor->ndim != 3 || tensor->shape[1] != args->out->shape[1] ||
            tensor->shape[2] != args->out->shape[2] || tensor->shape[2] > MAX_MERGE_SIZE ||
            tensor_stride(tensor, 2) != 1 || tensor->dtype.bits < 16) {
            return fail(error, ATTN_ERROR_INVALID_ARGUMENT, names[i],
                        "must be f16, bf16 or f32 [tokens, heads, size up to 1024], the same in "
                        "all three, the last stride 1");
        }
    }
    if (args->prefix_lse == NULL || args->suffix_lse == NULL || args->prefix_lse->ndim != 2 ||
        args->suffix_lse->ndim != 2 || args->prefix_lse->dtype.bits != 32 ||
        args->suffix_lse->dtype.bits != 32) {
        return fail(error, ATTN_ERROR_INVALID_ARGUMENT, "prefix_lse",
                    "both must be float32 [heads, tokens]");
    }
    const struct attn_host *host = args->instance->host;
    host->parallel_for(host->user, args->num_rows, 4, merge_rows, (void *)(uintptr_t)args);
    return ATTN_OK;
}
