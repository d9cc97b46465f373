/* SPDX-License-Identifier: Apache-2.0 */
/* Views whose arrays the core makes itself: the prefix of a cascade, the fixed keys of a static
 * sink, chunks of local attention as requests of their own. They are built in host memory of the
 * plan and sent to the workspace. */
#include <string.h>

#include "step/mla.h"
#include "step/queries.h"
#include "step/schedule.h"
#include "util/error.h"

#define CASCADE_MIN_PREFIX 256
#define CASCADE_MIN_REQS 8
#define CASCADE_TILE 128 /* query rows and keys of a tile in the cost estimate */

/* `count` integers; their device address follows from their place. The plan has room for the worst
 * case. */
int32_t *compose_take(attn_plan *plan, int64_t count)
{
    int32_t *taken = plan->integers + plan->used_integers;
    plan->used_integers += count;
    return taken;
}

const int32_t *compose_on_device(const attn_plan *plan, const int32_t *host)
{
    return (const int32_t *)(plan->workspace + plan->scratch.integers) + (host - plan->integers);
}

/* A run of rows is two integers. */
static int64_t merge_max_integers(const attn_plan *plan)
{
    return plan->steps[0].layer->desc->sink_len > 0 ? 2 * (int64_t)plan->limits.max_num_reqs : 0;
}

/* Requests of a view that the core makes. */
static int64_t max_view_requests(const attn_plan *plan)
{
    const struct attn_layer_desc *layer = plan->steps[0].layer->desc;
    int64_t requests = (int64_t)plan->limits.max_num_reqs * queries_slices(plan->steps[0].layer);
    return layer->chunk_size > 0 ? 2 * requests + plan->limits.max_num_tokens / layer->chunk_size
                                 : requests;
}

int64_t compose_max_integers(const attn_plan *plan)
{
    return 3 * (max_view_requests(plan) + 1) + 16 + mla_max_integers(plan) +
           merge_max_integers(plan) + queries_max_integers(plan);
}

attn_status compose_send(attn_plan *plan, void *stream, struct attn_error *error)
{
    const struct instance *instance = plan->steps[0].layer->served[ATTN_PHASE_DECODE].instance;
    size_t bytes = (size_t)plan->used_integers * sizeof *plan->integers;
    if (bytes == 0) {
        return ATTN_OK;
    }
    void *to = plan->workspace + plan->scratch.integers;
    if (plan->model->device.type == ATTN_DEVICE_CPU) {
        memcpy(to, plan->integers, bytes);
        return ATTN_OK;
    }
    if (instance->kernels.copy == NULL) {
        return error_set(error, ATTN_ERROR_UNSUPPORTED, "copy",
                         "%s has no copy kernel, which a composed step needs",
                         instance->caps->name);
    }
    return instance->kernels.copy(instance->handle, to, plan->integers, bytes,
                                  ATTN_COPY_HOST_TO_DEVICE, stream, error);
}

/* All tokens of the step as one request. */
static void one_request(attn_plan *plan, struct attn_batch *view)
{
    const struct attn_batch *whole = &plan->given;
    int32_t *start = compose_take(plan, 2);
    *view = *whole;
    start[0] = whole->query_start_loc_host[0];
    start[1] = whole->query_start_loc_host[whole->num_reqs];
    view->num_reqs = 1;
    view->query_start_loc_host = start;
    view->query_start_loc = compose_on_device(plan, start);
    view->max_query_len = start[1] - start[0];
    view->causal = -1; /* the part's layer is not causal */
    view->causal_per_request = NULL;
    view->tree = NULL;
    view->spans = view->span_start_loc = NULL;
    view->num_spans = 0;
    view->slot_mapping = NULL;
    view->num_slots = 0;
}

/* Rows of requests without keys see no sink either: their part of the merge has no prefix. */
static void find_merge_runs(attn_plan *plan)
{
    const struct attn_batch *b = &plan->given;
    int32_t *runs = compose_take(plan, 2 * b->num_reqs);
    plan->merge_runs = (struct merge_run *)runs;
    plan->num_merge_runs = 0;
    for (int32_t r = 0; r < b->num_reqs; r++) {
        bool keys = b->seq_lens_host == NULL || b->seq_lens_host[r] > 0;
        int32_t last = plan->num_merge_runs - 1;
        if (last < 0 || plan->merge_runs[last].with_prefix != keys) {
            plan->merge_runs[++last].with_prefix = keys;
            plan->num_merge_runs++;
        }
        plan->merge_runs[last].end_row = b->query_start_loc_host[r + 1];
    }
}

attn_status compose_sink(attn_plan *plan, const struct attn_layer_desc *layer,
                         struct attn_error *error)
{
    struct attn_batch *view = &plan->views[VIEW_SINK];
    (void)error;
    one_request(plan, view);
    int32_t *keys = compose_take(plan, 2);
    keys[0] = 0;
    keys[1] = layer->sink_len;
    view->key_start_loc_host = keys;
    view->key_start_loc = compose_on_device(plan, keys);
    view->max_seq_len = layer->sink_len;
    view->seq_lens = view->seq_lens_host = NULL;
    view->block_table = view->block_table_row = NULL;
    find_merge_runs(plan);
    return ATTN_OK;
}

/* The engine's prefix, cut to whole blocks that lie before every request's queries; 0: no cascade.
 */
static int32_t usable_prefix(const attn_plan *plan)
{
    const struct attn_batch *b = &plan->given;
    int32_t block = plan->steps[0].layer->desc->block_size;
    int32_t prefix = b->common_prefix_len;
    if (b->seq_lens_host == NULL || b->num_reqs < CASCADE_MIN_REQS || block <= 0) {
        return 0;
    }
    for (int32_t r = 0; r < b->num_reqs; r++) {
        int32_t context =
            b->seq_lens_host[r] - (b->query_start_loc_host[r + 1] - b->query_start_loc_host[r]);
        prefix = context < prefix ? context : prefix;
    }
    prefix = prefix / block * block;
    return prefix >= CASCADE_MIN_PREFIX ? prefix : 0;
}

/* Terms under which the prefix can be attended apart, and then whether it is cheaper than split-KV
 * decode (the heuristic of vLLM's use_cascade_attention). */
bool cascade_pays(const attn_plan *plan, const struct step *step)
{
    const struct attn_batch *b = &plan->given;
    const struct attn_layer_desc *l = step->layer->desc;
    int32_t prefix = usable_prefix(plan);
    bool excluded = l->alibi != ATTN_ALIBI_NONE || l->has_window || l->chunk_size > 0 ||
                    l->prefix_lm || l->sink_len > 0 || l->causal_per_request ||
                    step->layer->selected->cp != NULL || l->kind != ATTN_LAYER_DECODER ||
                    !l->causal || b->causal == 0 || l->batch_invariant ||
                    (l->output_form != ATTN_OUTPUT_PLAIN && !step->quantizes);
    bool flags = b->flags & (ATTN_BATCH_NO_CASCADE | ATTN_BATCH_IN_CAPTURE);
    bool parts =
        step->merge != NULL && step->launches[ATTN_PHASE_PREFILL][PART_PREFIX].kernel != NULL;
    if (prefix == 0 || excluded || flags || !parts) {
        return false;
    }
    int64_t g = l->num_q_heads / l->num_kv_heads, reqs = b->num_reqs;
    if (g == 1 || b->max_query_len > 1) {
        return true;
    }
    int64_t tiles = (prefix + CASCADE_TILE - 1) / CASCADE_TILE;
    int64_t sms = plan->num_multiprocessors > 0 ? plan->num_multiprocessors : 1;
    int64_t cascade_ctas = l->num_q_heads * ((reqs + CASCADE_TILE - 1) / CASCADE_TILE);
    int64_t cascade = (cascade_ctas + sms - 1) / sms * tiles;
    int64_t split_ctas = reqs * l->num_kv_heads * ((g + CASCADE_TILE - 1) / CASCADE_TILE) * tiles;
    return cascade < (split_ctas + sms - 1) / sms;
}

attn_status compose_cascade(attn_plan *plan, struct attn_error *error)
{
    const struct attn_batch *whole = &plan->given;
    struct attn_batch *prefix = &plan->views[VIEW_PREFIX], *suffix = &plan->views[VIEW_SUFFIX];
    int32_t length = usable_prefix(plan);
    int32_t block = plan->steps[0].layer->desc->block_size;
    (void)error;
    one_request(plan, prefix);
    int32_t *prefix_len = compose_take(plan, 1);
    *prefix_len = length;
    prefix->seq_lens_host = prefix_len;
    prefix->seq_lens = compose_on_device(plan, prefix_len);
    prefix->max_seq_len = length;

    int32_t *lens = compose_take(plan, whole->num_reqs);
    *suffix = *whole;
    suffix->max_seq_len = 0;
    for (int32_t r = 0; r < whole->num_reqs; r++) {
        lens[r] = whole->seq_lens_host[r] - length;
        suffix->max_seq_len = lens[r] > suffix->max_seq_len ? lens[r] : suffix->max_seq_len;
    }
    suffix->seq_lens_host = lens;
    suffix->seq_lens = compose_on_device(plan, lens);
    suffix->block_table += length / block;
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

attn_status compose_chunks(attn_plan *plan, const struct attn_layer_desc *layer,
                           struct attn_error *error)
{
    const struct attn_batch *whole = &plan->given;
    struct attn_batch *view = &plan->views[VIEW_WHOLE];
    int64_t most = max_view_requests(plan) + 1;
    struct chunks chunks = {compose_take(plan, most), compose_take(plan, most),
                            compose_take(plan, most), 0};
    if (whole->seq_lens_host == NULL) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "seq_lens_host",
                         "chunks as virtual requests need the lengths on the host");
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
    *view = *whole;
    view->num_reqs = chunks.count;
    view->query_start_loc_host = chunks.start;
    view->query_start_loc = compose_on_device(plan, chunks.start);
    view->seq_lens_host = chunks.lens;
    view->seq_lens = compose_on_device(plan, chunks.lens);
    view->block_table_row = compose_on_device(plan, chunks.rows);
    view->block_table_rows = whole->block_table_rows * whole->block_table_stride;
    view->block_table_stride = 1;
    int64_t longest = (int64_t)layer->chunk_size * (layer->chunk_lookback + 1);
    view->max_seq_len = view->max_seq_len < longest ? view->max_seq_len : (int32_t)longest;
    return ATTN_OK;
}
