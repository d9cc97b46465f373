/* SPDX-License-Identifier: Apache-2.0 */
/* Chunked local attention as virtual requests, for backends without the term. */
#include <stdio.h>

#include "step/plan_state.h"

static void match(struct check *check, int32_t phase)
{
    const struct attn_layer_desc *l = check->layer;
    if (l->chunk_size == 0 || check->caps->terms & ATTN_TERM_CHUNKED_LOCAL) {
        return;
    }
    check_compose(check, ATTN_COMPOSE_CHUNKED, ATTN_GRAPH_NEVER);
    const int32_t block = check->match->kernel_block_size;
    char size[16];
    snprintf(size, sizeof size, "%d", l->chunk_size);
    CHECK_NEEDS(check, "chunk_size",
                {check->caps->features & ATTN_FEATURE_BLOCK_TABLE_ROW,
                 "as virtual requests: block_table_row"},
                {block <= 0 || l->chunk_size % block == 0, size,
                 "as virtual requests: multiples of block_size"},
                {!l->device_seq_lens_only && !l->host_bounds, "with lengths on the device only",
                 "as virtual requests: host lengths"},
                {!l->needs_block_table_row || check->caps->device.type == ATTN_DEVICE_CPU,
                 "with block_table_row on a device",
                 "as virtual requests: tables without it, whose places are known on the host"},
                {!l->prefix_lm && !l->tree_mask && !l->causal_per_request,
                 "with spans, trees or causal flags per request",
                 "as virtual requests: none of them"});
}

static attn_status bind(attn_layer *layer, struct attn_error *error)
{
    layer->parts[PART_MAIN].chunk_size = layer->parts[PART_MAIN].chunk_lookback = 0;
    return ATTN_OK;
}

static attn_status build(attn_plan *plan, struct attn_error *error)
{
    const int32_t most = view_pieces(plan, plan->steps[0].layer->desc->chunk_size);
    plan->num_host_ints += 3 * (int64_t)most + 1;
    for (int32_t part = 0; part < PART_COUNT; part++) { /* a static sink's, too */
        plan->part_limits[part].max_num_reqs = most;
    }
    return ATTN_OK;
}

/* Chunks that a request's queries, from row `row` on, lie in become requests over their own chunk
 * and the chunk_lookback ones before it. With a table stride of 1 a row is any place in the
 * engine's table, so that no table is copied. */
static void add_chunks(struct view_requests *chunks, const struct attn_layer_desc *layer,
                       int32_t row, int32_t query_len, int32_t seq_len, int64_t table_place)
{
    int64_t size = layer->chunk_size, position = seq_len - query_len;
    /* an idle request stays one: its rows are still its own */
    if (position < 0 || query_len == 0) {
        view_add(chunks, row + query_len, 0, (int32_t)table_place);
        return;
    }
    while (position < seq_len) {
        int64_t chunk = position / size;
        int64_t end = (chunk + 1) * size < seq_len ? (chunk + 1) * size : seq_len;
        int64_t from = chunk > layer->chunk_lookback ? (chunk - layer->chunk_lookback) * size : 0;
        row += (int32_t)(end - position);
        view_add(chunks, row, (int32_t)(end - from),
                 (int32_t)(table_place + from / layer->block_size));
        position = end;
    }
}

static attn_status view(attn_plan *plan, struct attn_error *error)
{
    const struct attn_layer_desc *layer = plan->steps[0].layer->desc;
    const struct attn_batch *whole = &plan->given;
    struct attn_batch *cut = &plan->whole;
    const int32_t *start = whole->query_start_loc_host;
    struct view_requests chunks = view_begin(plan, view_pieces(plan, layer->chunk_size), start[0]);
    BAD_IF(whole->seq_lens_host == NULL, "seq_lens_host",
           "chunks as virtual requests need the lengths on the host");
    ERROR_IF(whole->block_table_row != NULL && plan->model->device.type != ATTN_DEVICE_CPU,
             ATTN_ERROR_UNSUPPORTED, "block_table_row",
             "chunks as virtual requests take no block_table_row on this device");
    ERROR_IF(whole->block_table_rows * whole->block_table_stride > INT32_MAX, ATTN_ERROR_LIMIT,
             "block_table", "more than 2^31 entries");
    for (int32_t r = 0; r < whole->num_reqs; r++) {
        int64_t row = whole->block_table_row != NULL ? whole->block_table_row[r] : r;
        add_chunks(&chunks, layer, start[r], num_queries(whole, r), whole->seq_lens_host[r],
                   row * whole->block_table_stride);
    }
    *cut = *whole;
    view_end(plan, &chunks, true, cut);
    cut->block_table_rows = whole->block_table_rows * whole->block_table_stride;
    cut->block_table_stride = 1;
    return ATTN_OK;
}

const struct composition composition_chunked = {
    .match = match,
    .composed = ATTN_COMPOSE_CHUNKED,
    .bind = bind,
    .build = build,
    .view = view,
};
