/* SPDX-License-Identifier: Apache-2.0 */
/* merge_states: two attends over disjoint keys become one. Bytes: three rows and their sums. */
#include "internal.h"

#define MAX_MERGE_SIZE 1024

/* What a tensor has of a token and head, with what does not change from one to the next. */
struct places {
    char *data;          /* NULL: there is no such tensor */
    int64_t token, head; /* bytes */
    int32_t element;
};

struct merge_loop {
    const struct attn_merge_states_args *args;
    struct places prefix, suffix, out; /* [T, H, D] */
    struct places prefix_lse, suffix_lse, lse;
};

static struct places places_of(const struct attn_tensor *tensor, int32_t token, int32_t head)
{
    if (tensor == NULL) {
        return (struct places){.data = NULL};
    }
    int64_t bytes = tensor->dtype.bits / 8;
    return (struct places){.data = tensor_data(tensor),
                           .token = tensor_stride(tensor, token) * bytes,
                           .head = tensor_stride(tensor, head) * bytes,
                           .element = element_of_any(tensor)};
}

static char *place_of(const struct places *places, int64_t t, int64_t h)
{
    return places->data + t * places->token + h * places->head;
}

static void merge_row(const struct merge_loop *loop, int64_t t, int64_t h, float *row, float *other)
{
    const struct attn_merge_states_args *args = loop->args;
    const struct variant *variant = args->instance->variant;
    int32_t size = (int32_t)args->out->shape[2];
    float lse1 = *(const float *)place_of(&loop->prefix_lse, t, h);
    float lse2 = *(const float *)place_of(&loop->suffix_lse, t, h);
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
        variant->f32->unpack[loop->prefix.element](row, place_of(&loop->prefix, t, h), size);
        variant->scale_row(row, w1 / sum, round_up(size, COLUMN_MULTIPLE));
    } else {
        memset(row, 0, (size_t)size * sizeof(float));
    }
    if (second) {
        variant->f32->unpack[loop->suffix.element](other, place_of(&loop->suffix, t, h), size);
        variant->add_scaled(row, other, w2 / sum, round_up(size, COLUMN_MULTIPLE));
    }
    variant->store[loop->out.element](place_of(&loop->out, t, h), row, 1.0f, size);
    if (loop->lse.data != NULL) {
        *(float *)place_of(&loop->lse, t, h) = first || second ? top + logf(sum) : -INFINITY;
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
                              .prefix = places_of(args->prefix_out, 0, 1),
                              .suffix = places_of(args->suffix_out, 0, 1),
                              .out = places_of(args->out, 0, 1),
                              .prefix_lse = places_of(args->prefix_lse, 1, 0),
                              .suffix_lse = places_of(args->suffix_lse, 1, 0),
                              .lse = places_of(args->lse, 1, 0)};
    host->parallel_for(host->user, args->num_rows, 16, merge_rows, &loop);
    return ATTN_OK;
}
