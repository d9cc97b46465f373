/* SPDX-License-Identifier: Apache-2.0 */
/* Tree masks and biases between the step's own tokens: the only term that is no interval. */
#include "cpu_simd/internal.h"

static int32_t context_keys(const struct attend_problem *problem, int32_t request)
{
    return request_keys(problem, request) - request_queries(problem, request);
}

static int64_t tree_row(const struct attn_batch *batch, int32_t request, int32_t token)
{
    return request * batch->tree_stride_request + token * batch->tree_stride_row;
}

bool tree_row_visible(const struct attend_problem *problem, int32_t request, int32_t token,
                      int32_t key)
{
    const struct attn_batch *batch = problem->batch;
    int32_t column = key - context_keys(problem, request);
    if (batch->tree == NULL || problem->layer->tree_mask == ATTN_TREE_NONE || column < 0) {
        return true;
    }
    int64_t row = tree_row(batch, request, token);
    if (problem->layer->tree_mask == ATTN_TREE_BITS) {
        const uint32_t *words = (const uint32_t *)batch->tree + row;
        return ((words[column / 32] >> (column % 32)) & 1u) != 0;
    }
    return ((const float *)batch->tree)[row + column] != -INFINITY;
}

/* scores[j] belongs to key first + j, begin <= j < end */
void tree_apply(const struct attend_problem *problem, int32_t request, int32_t token, int32_t first,
                int32_t begin, int32_t end, float *scores)
{
    const struct attn_batch *batch = problem->batch;
    int32_t context = context_keys(problem, request);
    int32_t num_keys = request_keys(problem, request);
    int64_t row = tree_row(batch, request, token);
    begin = max_i32(begin, context - first);
    end = min_i32(end, num_keys - first);
    for (int32_t j = begin; j < end; j++) {
        if (!tree_row_visible(problem, request, token, first + j)) {
            scores[j] = -INFINITY;
        } else if (problem->layer->tree_mask == ATTN_TREE_BIAS) {
            scores[j] += ((const float *)batch->tree)[row + first + j - context];
        }
    }
}
