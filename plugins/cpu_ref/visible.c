/* SPDX-License-Identifier: Apache-2.0 */
/* Which keys a query sees, and what position adds to their scores. */
#include <math.h>

#include "reference.h"

static bool in_window(const struct attn_layer_desc *layer, int64_t p, int64_t j)
{
    if (!layer->has_window) {
        return true;
    }
    return (layer->window_left < 0 || j >= p - layer->window_left) &&
           (layer->window_right < 0 || j <= p + layer->window_right);
}

static bool in_chunk(const struct attn_layer_desc *layer, int64_t p, int64_t j)
{
    return layer->chunk_size == 0 ||
           p / layer->chunk_size - j / layer->chunk_size <= layer->chunk_lookback;
}

/* Both positions in one span, where attention is bidirectional. */
static bool in_span(const struct query *query, int64_t j)
{
    const struct attn_batch *batch = query->batch;
    int64_t p = query->position;
    if (!query->layer->prefix_lm || batch->spans == NULL) {
        return false;
    }
    int32_t window = query->layer->prefix_lm_window;
    for (int32_t s = batch->span_start_loc[query->request];
         s < batch->span_start_loc[query->request + 1]; s++) {
        int32_t first = batch->spans[2 * (int64_t)s], last = batch->spans[2 * (int64_t)s + 1];
        if (p >= first && p <= last && j >= first && j <= last) {
            return window == 0 || p - j < window;
        }
    }
    return false;
}

/* Between the step's own tokens the tree decides, too: a clear bit or a bias of -inf hides. */
static bool in_tree(const struct query *query, int64_t j)
{
    const struct attn_batch *batch = query->batch;
    int64_t column = j - query->own;
    if (query->layer->tree_mask == ATTN_TREE_NONE || batch->tree == NULL || column < 0) {
        return true;
    }
    int64_t row =
        query->request * batch->tree_stride_request + query->index * batch->tree_stride_row;
    if (query->layer->tree_mask == ATTN_TREE_BIAS) {
        return ((const float *)batch->tree)[row + column] != -INFINITY;
    }
    return ((const uint32_t *)batch->tree)[row + column / 32] >> (column % 32) & 1;
}

static bool sees(const struct query *query, int64_t j)
{
    int64_t p = query->position;
    bool plain =
        (!query->causal || j <= p) && in_window(query->layer, p, j) && in_chunk(query->layer, p, j);
    return (plain || in_span(query, j)) && in_tree(query, j);
}

int64_t query_block(const struct query *query, int64_t j)
{
    const struct attn_batch *batch = query->batch;
    int64_t row =
        batch->block_table_row != NULL ? batch->block_table_row[query->request] : query->request;
    return batch->block_table[row * batch->block_table_stride + j / query->k_cache->block_size];
}

/* The slot of key j is listed. */
static bool has_slot(const struct query *query, int64_t j)
{
    int64_t size = query->k_cache->block_size;
    int64_t entry = (query_block(query, j) * size + j % size) / query->list.granularity;
    for (int32_t i = 0; i < query->list.count; i++) {
        if (query->list.entries[i] == entry) {
            return true;
        }
    }
    return false;
}

int64_t query_key(const struct query *query, int64_t candidate)
{
    const struct key_list *list = &query->list;
    int64_t j = candidate;
    if (list->entries != NULL && !list->physical_slots) {
        j = list->entries[candidate / list->granularity] * (int64_t)list->granularity +
            candidate % list->granularity;
    }
    bool seen = j >= 0 && j < query->length && sees(query, j);
    return seen && (!list->physical_slots || has_slot(query, j)) ? j : -1;
}

void query_candidates(const struct query *query, int64_t *first, int64_t *end)
{
    int64_t p = query->position;
    *first = 0;
    *end = query->length;
    if (query->list.entries != NULL && !query->list.physical_slots) {
        *end = query->list.count * (int64_t)query->list.granularity;
        return;
    }
    if (query->layer->prefix_lm && query->batch->spans != NULL) {
        return;
    }
    if (query->layer->has_window && query->layer->window_left >= 0) {
        *first = p - query->layer->window_left > 0 ? p - query->layer->window_left : 0;
    }
    if (query->layer->chunk_size > 0) {
        int64_t chunk = p / query->layer->chunk_size - query->layer->chunk_lookback;
        int64_t from = chunk > 0 ? chunk * query->layer->chunk_size : 0;
        *first = from > *first ? from : *first;
    }
    if (query->causal && p + 1 < *end) {
        *end = p + 1;
    }
}

double alibi_bias(int32_t alibi, double slope, int64_t position, int64_t j)
{
    double distance = (double)(position - j);
    switch (alibi) {
    case ATTN_ALIBI_LINEAR:
        return -slope * fabs(distance);
    case ATTN_ALIBI_SQRT:
        return distance >= 0 ? -slope * sqrt(distance) : 0;
    default:
        return 0;
    }
}

double query_bias(const struct query *query, double slope, int64_t j)
{
    const struct attn_batch *batch = query->batch;
    double bias = alibi_bias(query->layer->alibi, slope, query->position, j);
    int64_t column = j - query->own;
    if (query->layer->tree_mask == ATTN_TREE_BIAS && batch->tree != NULL && column >= 0) {
        const float *row = (const float *)batch->tree +
                           query->request * batch->tree_stride_request +
                           query->index * batch->tree_stride_row;
        bias += row[column];
    }
    return bias;
}
