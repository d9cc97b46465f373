/* SPDX-License-Identifier: Apache-2.0 */
#include "heads.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct attn_collectives *ranks;
static struct attn_collectives table;
static int64_t merges;

/* A place in [T, heads, D] of float32. */
static float *row_of(const struct attn_tensor *tensor, int64_t t, int64_t head)
{
    const int64_t *shape = tensor->shape, *strides = tensor->strides;
    float *data = (float *)((char *)tensor->data + tensor->byte_offset);
    return data + t * (strides != NULL ? strides[0] : shape[1] * shape[2]) +
           head * (strides != NULL ? strides[1] : shape[2]);
}

static float *lse_of(const struct attn_tensor *tensor, int64_t head, int64_t t)
{
    float *data = (float *)((char *)tensor->data + tensor->byte_offset);
    return data + head * (tensor->strides != NULL ? tensor->strides[0] : tensor->shape[1]) +
           t * (tensor->strides != NULL ? tensor->strides[1] : 1);
}

/* The place of rank r's head h among those of all ranks. */
static int64_t among_all(int64_t h, int64_t r, int64_t n, int64_t group)
{
    return (h / group * n + r) * group + h % group;
}

static attn_status pass(attn_status (*collective)(const struct attn_collective_args *,
                                                  struct attn_error *),
                        const float *send, float *receive, int64_t floats, struct attn_error *error)
{
    const struct attn_collective_args args = {.struct_size = sizeof args,
                                              .user = ranks->user,
                                              .send = send,
                                              .receive = receive,
                                              .count = (size_t)floats * sizeof *send};
    return collective(&args, error);
}

static attn_status gather_heads(const struct attn_gather_heads_args *a, struct attn_error *error)
{
    const int64_t n = ranks->world_size;
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < a->count && status == ATTN_OK; i++) {
        const int64_t *shape = a->all[i]->shape, tokens = shape[0], heads = shape[1] / n;
        const int64_t d = shape[2], part = tokens * heads * d, group = heads / a->num_kv_heads;
        float *send = malloc((size_t)(part * (n + 1)) * sizeof *send), *received = send + part;
        for (int64_t row = 0; row < tokens * heads; row++) {
            memcpy(send + row * d, row_of(a->own[i], row / heads, row % heads),
                   (size_t)d * sizeof *send);
        }
        status = pass(ranks->all_gather, send, received, part, error);
        for (int64_t row = 0; row < n * tokens * heads; row++) {
            const int64_t r = row / (tokens * heads), t = row / heads % tokens;
            memcpy(row_of(a->all[i], t, among_all(row % heads, r, n, group)), received + row * d,
                   (size_t)d * sizeof *send);
        }
        free(send);
    }
    return status;
}

/* Merges the parts of `count` ranks and what the rank had, each D values and their lse. */
static void merge(const float *const *parts, int64_t count, int64_t d, float *out, float *lse)
{
    double most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < count; i++) {
        most = fmax(most, isinf(parts[i][d]) ? -INFINITY : parts[i][d]);
    }
    for (int64_t i = 0; i < count; i++) {
        sum += isinf(parts[i][d]) ? 0 : exp(parts[i][d] - most);
    }
    for (int64_t j = 0; j < d; j++) {
        double value = 0;
        for (int64_t i = 0; i < count; i++) {
            value += isinf(parts[i][d]) ? 0 : exp(parts[i][d] - most) / sum * parts[i][j];
        }
        out[j] = (float)value;
    }
    *lse = (float)(sum == 0 ? -INFINITY : most + log(sum));
}

static attn_status merge_heads(const struct attn_merge_heads_args *a, struct attn_error *error)
{
    const int64_t n = ranks->world_size, tokens = a->all_out->shape[0];
    const int64_t heads = a->all_out->shape[1] / n, d = a->all_out->shape[2], row = d + 1;
    const int64_t part = tokens * heads * row, group = heads / a->num_kv_heads;
    float *send = malloc((size_t)(part * 2 * n + row) * sizeof *send), *received = send + part * n;
    float *own = received + part * n, lse;
    for (int64_t i = 0; i < n * tokens * heads; i++) {
        const int64_t r = i / (tokens * heads), t = i / heads % tokens;
        const int64_t head = among_all(i % heads, r, n, group);
        memcpy(send + i * row, row_of(a->all_out, t, head), (size_t)d * sizeof *send);
        send[i * row + d] = *lse_of(a->all_lse, head, t);
    }
    attn_status status = pass(ranks->all_to_all, send, received, part, error);
    for (int64_t i = 0; i < tokens * heads && status == ATTN_OK; i++) {
        const float *parts[HEADS_MAX_RANKS + 1];
        const int64_t t = i / heads, head = i % heads;
        int64_t count = 0;
        for (; count < n; count++) {
            parts[count] = received + count * part + i * row;
        }
        if (a->own_out != NULL) {
            memcpy(own, row_of(a->own_out, t, head), (size_t)d * sizeof *own);
            own[d] = *lse_of(a->own_lse, head, t);
            parts[count++] = own;
        }
        merge(parts, count, d, row_of(a->out, t, head), &lse);
        if (a->lse != NULL) {
            *lse_of(a->lse, head, t) = lse;
        }
    }
    free(send);
    merges++;
    return status;
}

const struct attn_collectives *heads_over(const struct attn_collectives *some)
{
    ranks = some;
    table = *some;
    table.struct_size = sizeof table;
    table.gather_heads = gather_heads;
    table.merge_heads = merge_heads;
    table.max_exchange_bytes = (size_t)1 << 20;
    return &table;
}

int64_t heads_merges(void)
{
    return merges;
}
