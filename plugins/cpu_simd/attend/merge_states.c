/* SPDX-License-Identifier: Apache-2.0 */
/* merge_states: merges two attends over disjoint keys. Bytes: three rows and their log-sum-exps. */
#include "cpu_simd/internal.h"

#define MAX_MERGE_SIZE 1024

/* A tensor's strides between tokens and heads, computed once. */
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

/* Tokens and heads whose weights are found together. */
#define MERGE_TOKENS 16
#define MERGE_HEADS 32
#define ABSENT (-1e30f) /* its weight is 0 next to any log-sum-exp */

struct weights {
    float prefix[MERGE_TOKENS], suffix[MERGE_TOKENS], both[MERGE_TOKENS];
    bool has_prefix[MERGE_TOKENS], has_suffix[MERGE_TOKENS];
};

/* Finds the weights of tokens t .. t + count - 1 of a head, and writes their log-sum-exps. */
static void find_weights(const struct merge_loop *loop, int64_t t, int64_t count, int64_t h,
                         struct weights *found)
{
    const struct attn_merge_states_args *args = loop->args;
    float a[MERGE_TOKENS] = {0}, b[MERGE_TOKENS] = {0};
    for (int64_t i = 0; i < count; i++) {
        a[i] = *(const float *)place_of(&loop->prefix_lse, t + i, h);
        b[i] = *(const float *)place_of(&loop->suffix_lse, t + i, h);
        found->has_prefix[i] = !isinf(a[i]) && t + i - args->first_row < args->num_rows_with_prefix;
        found->has_suffix[i] = !isinf(b[i]);
        a[i] = found->has_prefix[i] ? a[i] : ABSENT;
        b[i] = found->has_suffix[i] ? b[i] : ABSENT;
    }
    const struct merge_weights weights = {a, b, found->prefix, found->suffix, found->both};
    args->instance->variant->merge_weights(&weights, MERGE_TOKENS);
    for (int64_t i = 0; i < count && loop->lse.data != NULL; i++) {
        bool any = found->has_prefix[i] || found->has_suffix[i];
        *(float *)place_of(&loop->lse, t + i, h) = any ? found->both[i] : -INFINITY;
    }
}

/* An absent row is not read; the other then has a weight of 1, or NaN where its log-sum-exp is. */
static void merge_row(const struct merge_loop *loop, int64_t t, int64_t h,
                      const struct weights *weights, int64_t i)
{
    const struct variant *variant = loop->args->instance->variant;
    const bool first = weights->has_prefix[i], second = weights->has_suffix[i];
    const void *a = first ? place_of(&loop->prefix, t, h) : NULL;
    const void *b = second ? place_of(&loop->suffix, t, h) : NULL;
    void *out = place_of(&loop->out, t, h);
    const int32_t element = loop->out.element, size = (int32_t)loop->args->out->shape[2];
    if (first && second && loop->prefix.element == element && loop->suffix.element == element) {
        variant->blend[element](out, a, b, weights->prefix[i], weights->suffix[i], size);
        return;
    }
    float row[MAX_MERGE_SIZE] = {0}, other[MAX_MERGE_SIZE];
    float factor = first ? weights->prefix[i] : second ? weights->suffix[i] : 1.0f;
    if (first) {
        variant->f32->unpack[loop->prefix.element](row, a, size);
    }
    if (second) {
        variant->f32->unpack[loop->suffix.element](first ? other : row, b, size);
    }
    if (first && second) {
        variant->blend[ELEMENT_F32](row, row, other, weights->prefix[i], weights->suffix[i], size);
        factor = 1.0f;
    }
    variant->store[element](out, row, factor, size);
}

static void merge_rows(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct merge_loop *loop = argument;
    const int64_t heads = loop->args->out->shape[1], first = loop->args->first_row;
    struct weights weights[MERGE_HEADS];
    for (int64_t t = begin; t < end; t += MERGE_TOKENS) {
        int64_t tokens = end - t < MERGE_TOKENS ? end - t : MERGE_TOKENS;
        for (int64_t h = 0; h < heads; h += MERGE_HEADS) {
            int64_t together = heads - h < MERGE_HEADS ? heads - h : MERGE_HEADS;
            for (int64_t j = 0; j < together; j++) {
                find_weights(loop, first + t, tokens, h + j, &weights[j]);
            }
            for (int64_t i = 0; i < tokens; i++) {
                for (int64_t j = 0; j < together; j++) {
                    merge_row(loop, first + t + i, h + j, &weights[j], i);
                }
            }
        }
    }
}

attn_status simd_merge_states(const struct attn_merge_states_args *args, struct attn_error *error)
{
    const int32_t element = element_of_any(args->out);
    if (element < 0 || element > ELEMENT_BF16) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "out",
                            "its dtype is code %d of %d bits; f16, bf16 and f32 are served",
                            args->out->dtype.code, args->out->dtype.bits);
    }
    struct merge_loop loop = {.args = args,
                              .prefix = places_of(args->prefix_out, 0, 1),
                              .suffix = places_of(args->suffix_out, 0, 1),
                              .out = places_of(args->out, 0, 1),
                              .prefix_lse = places_of(args->prefix_lse, 1, 0),
                              .suffix_lse = places_of(args->suffix_lse, 1, 0),
                              .lse = places_of(args->lse, 1, 0)};
    return run_parallel(args->instance, args->num_rows, 16, merge_rows, &loop);
}
