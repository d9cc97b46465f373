/* SPDX-License-Identifier: Apache-2.0 */
/* Chunked local attention as virtual requests, for backends without the term. */
#include <stdio.h>

#include "compositions.h"
#include "select/match.h"
#include "step/plan_state.h"
#include "util/error.h"

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

/* A request lies in two chunks, and in one more for each chunk_size tokens. */
static int64_t max_chunks(const attn_plan *plan)
{
    return 2 * plan->max_reqs +
           plan->limits.max_num_tokens / plan->steps[0].layer->desc->chunk_size;
}

static attn_status build(attn_plan *plan, struct attn_error *error)
{
    const int64_t most = max_chunks(plan);
    plan->num_integers += 3 * (most + 1);
    for (int32_t part = 0; part < PART_COUNT; part++) { /* a static sink's, too */
        plan->part_limits[part].max_num_reqs = (int32_t)(most < INT32_MAX ? most : INT32_MAX);
    }
    return ATTN_OK;
}

/* Chunks that request r's queries lie in become requests over their own chunk and the
 * chunk_lookback ones before it. With a table stride of 1 a row is any place in the engine's table,
 * so that no table is copied. */
struct chunks {
    int32_t *start, *lens, *rows;
    int32_t count;
};

static void add_chunks(struct chunks *chunks, const struct attn_layer_desc *layer,
                       int32_t row_begin, int32_t query_len, int32_t seq_len, int64_t table_place)
{
    int64_t size = layer->chunk_size, position = seq_len - query_len;
    int32_t row = row_begin;
    /* an idle request stays one: its rows are still its own */
    if (position < 0 || query_len == 0) {
        chunks->start[chunks->count] = row;
        chunks->lens[chunks->count] = 0;
        chunks->rows[chunks->count++] = (int32_t)table_place;
        return;
    }
    while (position < seq_len) {
        int64_t chunk = position / size;
        int64_t end = (chunk + 1) * size < seq_len ? (chunk + 1) * size : seq_len;
        int64_t from = chunk > layer->chunk_lookback ? (chunk - layer->chunk_lookback) * size : 0;
        chunks->start[chunks->count] = row;
        chunks->lens[chunks->count] = (int32_t)(end - from);
        chunks->rows[chunks->count] = (int32_t)(table_place + from / layer->block_size);
        chunks->count++;
        row += (int32_t)(end - position);
        position = end;
    }
}

static attn_status view(attn_plan *plan, struct attn_error *error)
{
    const struct attn_layer_desc *layer = plan->steps[0].layer->desc;
    const struct attn_batch *whole = &plan->given;
    struct attn_batch *cut = &plan->whole;
    int64_t most = max_chunks(plan) + 1;
    struct chunks chunks = {plan_take(plan, most), plan_take(plan, most), plan_take(plan, most), 0};
    if (whole->seq_lens_host == NULL) {
        return BAD("seq_lens_host", "chunks as virtual requests need the lengths on the host");
    }
    if (whole->block_table_row != NULL && plan->model->device.type != ATTN_DEVICE_CPU) {
        return error_set(error, ATTN_ERROR_UNSUPPORTED, "block_table_row",
                         "chunks as virtual requests take no block_table_row on this device");
    }
    if (whole->block_table_rows * whole->block_table_stride > INT32_MAX) {
        return error_set(error, ATTN_ERROR_LIMIT, "block_table", "more than 2^31 entries");
    }
    for (int32_t r = 0; r < whole->num_reqs; r++) {
        const int32_t *start = whole->query_start_loc_host;
        int64_t row = whole->block_table_row != NULL ? whole->block_table_row[r] : r;
        add_chunks(&chunks, layer, start[r], start[r + 1] - start[r], whole->seq_lens_host[r],
                   row * whole->block_table_stride);
    }
    chunks.start[chunks.count] = whole->query_start_loc_host[whole->num_reqs];
    *cut = *whole;
    cut->num_reqs = chunks.count;
    view_starts(plan, cut, chunks.start);
    cut->seq_lens_host = chunks.lens;
    cut->seq_lens = plan_on_device(plan, chunks.lens);
    cut->block_table_row = plan_on_device(plan, chunks.rows);
    cut->block_table_rows = whole->block_table_rows * whole->block_table_stride;
    cut->block_table_stride = 1;
    int64_t longest = layer->chunk_size * ((int64_t)layer->chunk_lookback + 1);
    cut->max_seq_len = cut->max_seq_len < longest ? cut->max_seq_len : (int32_t)longest;
    return ATTN_OK;
}

const struct composition composition_chunked = {
    .match = match,
    .composed = ATTN_COMPOSE_CHUNKED,
    .bind = bind,
    .build = build,
    .view = view,
};
