/* SPDX-License-Identifier: Apache-2.0 */
/* merge_states: two attends over disjoint keys become one. Bytes: three rows and their sums. */
#include "internal.h"

#define MAX_MERGE_SIZE 1024

/* One of the rows that are merged or made, with what does not change from row to row. */
struct rows_of {
    char *data;
    int64_t token, head; /* bytes */
    int32_t element;
};

struct lse_of {
    char *data; /* NULL: none */
    int64_t token, head;
};

struct merge_loop {
    const struct attn_merge_states_args *args;
    struct rows_of prefix, suffix, out;
    struct lse_of prefix_lse, suffix_lse, lse;
};

static struct rows_of rows_of(const struct attn_tensor *tensor)
{
    int64_t bytes = tensor->dtype.bits / 8;
    return (struct rows_of){.data = tensor_data(tensor),
                            .token = tensor_stride(tensor, 0) * bytes,
                            .head = tensor_stride(tensor, 1) * bytes,
                            .element = element_of_any(tensor)};
}

static struct lse_of lse_of(const struct attn_tensor *tensor)
{
    if (tensor == NULL) {
        return (struct lse_of){.data = NULL};
    }
    return (struct lse_of){.data = tensor_data(tensor),
                           .token = tensor_stride(tensor, 1) * (int64_t)sizeof(float),
                           .head = tensor_stride(tensor, 0) * (int64_t)sizeof(float)};
}

static char *row_of(const struct rows_of *rows, int64_t t, int64_t h)
{
    return rows->data + t * rows->token + h * rows->head;
}

static float *lse_at(const struct lse_of *lse, int64_t t, int64_t h)
{
    return (float *)(lse->data + t * lse->token + h * lse->head);
}

static void merge_row(const struct merge_loop *loop, int64_t t, int64_t h, float *row, float *other)
{
    const struct attn_merge_states_args *args = loop->args;
    const struct variant *variant = args->instance->variant;
    int32_t size = (int32_t)args->out->shape[2];
    float lse1 = *lse_at(&loop->prefix_lse, t, h);
    float lse2 = *lse_at(&loop->suffix_lse, t, h);
    bool first = !isinf(lse1) && t - args->first_row < args->num_rows_with_prefix;
    bool second = !isinf(lse2);
    float top = -INFINITY;
    if (first || second) {
        top = !second || (first && lse1 > lse2) ? lse1 : lse2;
    }
    float w1 = !first ? 0.0f : lse1 == top ? 1.0f : expf(lse1 - top);
    float w2 = !second ? 0.0f : lse2 == top ? 1.0f : expf(lse2 - top);
    float sum = w1 + w2;
    if (first) {
        variant->f32->unpack[loop->prefix.element](row, row_of(&loop->prefix, t, h), size);
        variant->scale_row(row, w1 / sum, round_up(size, COLUMN_MULTIPLE));
    } else {
        memset(row, 0, (size_t)size * sizeof(float));
    }
    if (second) {
        variant->f32->unpack[loop->suffix.element](other, row_of(&loop->suffix, t, h), size);
        variant->add_scaled(row, other, w2 / sum, round_up(size, COLUMN_MULTIPLE));
    }
    variant->store[loop->out.element](row_of(&loop->out, t, h), row, 1.0f, size);
    if (loop->lse.data != NULL) {
        *lse_at(&loop->lse, t, h) = first || second ? top + logf(sum) : -INFINITY;
    }
}

static void merge_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct merge_loop *loop = argument;
    float row[MAX_MERGE_SIZE + 64] = {0}, other[MAX_MERGE_SIZE + 64] = {0}; /* what pads a row */
    (void)worker;
    for (int64_t t = begin; t < end; t++) {
        for (int64_t h = 0; h < loop->args->out->shape[1]; h++) {
            merge_row(loop, loop->args->first_row + t, h, row, other);
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
            tensor_stride(tensor, 2) != 1 || element_of_any(tensor) < 0 ||
            element_of_any(tensor) > ELEMENT_BF16) {
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
    struct merge_loop loop = {.args = args,
                              .prefix = rows_of(args->prefix_out),
                              .suffix = rows_of(args->suffix_out),
                              .out = rows_of(args->out),
                              .prefix_lse = lse_of(args->prefix_lse),
                              .suffix_lse = lse_of(args->suffix_lse),
                              .lse = lse_of(args->lse)};
    host->parallel_for(host->user, args->num_rows, 16, merge_rows, &loop);
    return ATTN_OK;
}
