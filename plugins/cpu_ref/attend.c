/* SPDX-License-Identifier: Apache-2.0 */
/* attend: one query token and KV head at a time, in double precision. */
#include <math.h>
#include <string.h>

#include "common/number.h"
#include "common/tensors.h"
#include "reference.h"

struct attend_loop {
    const struct attn_attend_args *args;
    const int32_t *rows; /* fast prefill: the rows to compute; NULL: all */
    int64_t first_row;
    int64_t end_row;
};

double dot(const double *a, const double *b, int32_t count)
{
    double sum = 0;
    for (int32_t i = 0; i < count; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

/* s = scale q.k, then the soft cap. Mask and biases follow in the caller. */
double rows_score(const struct attn_layer_desc *layer, const double *q, const double *k)
{
    double s = layer->scale * dot(q, k, layer->head_size);
    return layer->soft_cap > 0 ? layer->soft_cap * tanh(s / layer->soft_cap) : s;
}

/* Probabilities as an fp8 kernel holds them, where the layer asks for it. */
static double round_probability(const struct attn_attend_args *args, double w)
{
    double scale = scale_of_head(args->params->p_scale, args->params->p_scale_host,
                                 args->layer->p_scale_form, 0);
    if (args->layer->p_scale_form == ATTN_SCALE_NONE) {
        return w;
    }
    return layer_kv_dtype(args->layer, true) == ATTN_KV_FP8_E5M2
               ? number_from_e5m2(number_to_e5m2(w / scale)) * scale
               : number_from_e4m3(number_to_e4m3(w / scale)) * scale;
}

void rows_add_key(const struct attn_attend_args *args, struct softmax_rows *rows, int32_t row,
                  double s, const double *v)
{
    double row_max = fmax(rows->row_max[row], s);
    if (isnan(s)) { /* a visible NaN shows */
        row_max = s;
    } else if (row_max == -INFINITY) { /* a weight of 0, and no maximum to take it from */
        return;
    }
    double rescale_o = rows->row_max[row] == row_max ? 1 : exp(rows->row_max[row] - row_max);
    double w = exp(s - row_max);
    rows->row_max[row] = row_max;
    rows->row_sum[row] = rows->row_sum[row] * rescale_o + w;
    w = round_probability(args, w);
    for (int32_t d = 0; d < rows->head_size_v; d++) {
        rows->acc_o[row][d] = rows->acc_o[row][d] * rescale_o + w * v[d];
    }
}

static void scale_row(double *row, int32_t count, double scale)
{
    for (int32_t d = 0; d < count; d++) {
        row[d] *= scale;
    }
}

/* Key and value j of a request and KV head, wherever they stand. */
static void load_key(const struct attn_attend_args *args, const struct query *query, int64_t head,
                     int64_t j, double *k, double *v)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_batch *batch = args->batch;
    const struct attn_layer_params *params = args->params;
    if (args->k_cache == NULL) {
        const int32_t *start =
            batch->key_start_loc != NULL ? batch->key_start_loc : batch->query_start_loc;
        int64_t row = start[query->request] + j;
        number_load_row(k, tensor_row(args->k, row, head), number_dtype_name(args->k->dtype),
                        layer->head_size);
        number_load_row(v, tensor_row(args->v, row, head), number_dtype_name(args->v->dtype),
                        layer->head_size_v);
        if (number_dtype_name(args->k->dtype) == ATTN_DTYPE_FP8_E4M3) { /* quantized inputs */
            scale_row(
                k, layer->head_size,
                scale_of_head(params->k_scale, params->k_scale_host, layer->k_scale_form, head));
            scale_row(
                v, layer->head_size_v,
                scale_of_head(params->v_scale, params->v_scale_host, layer->v_scale_form, head));
        }
        return;
    }
    int64_t block_size = args->k_cache->block_size, block = query_block(query, j);
    struct cache_place key = {layer, params, args->k_cache, false, block, j % block_size, head};
    struct cache_place value = {layer, params, args->v_cache, true, block, j % block_size, head};
    cache_load(&key, k);
    cache_load(&value, v);
}

/* A request without keys is idle and sees no static sink either. */
static int64_t sink_keys(const struct attn_attend_args *args, const struct query *query)
{
    return query->length > 0 ? args->layer->sink_len : 0;
}

static void load_sink_key(const struct attn_attend_args *args, int64_t head, int64_t s, double *k,
                          double *v)
{
    number_load_row(k, tensor_row(args->params->sink_k, s, head),
                    number_dtype_name(args->params->sink_k->dtype), args->layer->head_size);
    number_load_row(v, tensor_row(args->params->sink_v, s, head),
                    number_dtype_name(args->params->sink_v->dtype), args->layer->head_size_v);
}

/* Static sink keys stand at positions -sink_len .. -1. */
static double sink_score(const struct attn_attend_args *args, const struct query *query,
                         const struct softmax_rows *rows, int32_t row, int64_t s, const double *k)
{
    return rows_score(args->layer, rows->q[row], k) + alibi_bias(args->layer->alibi,
                                                                 rows->slope[row], query->position,
                                                                 s - args->layer->sink_len);
}

/* One score more, without a value for the rows' maximum alone. */
static void add_score(const struct attn_attend_args *args, struct softmax_rows *rows, int32_t row,
                      double s, const double *v)
{
    if (v != NULL) {
        rows_add_key(args, rows, row, s, v);
    } else {
        rows->row_max[row] = fmax(rows->row_max[row], s);
    }
}

/* All keys that a query sees: their weights and values or, without `weighs`, the maximum alone. */
static void visit_keys(const struct attn_attend_args *args, const struct query *query, int64_t head,
                       bool weighs, struct softmax_rows *rows)
{
    double k[REF_MAX_HEAD_SIZE], v[REF_MAX_HEAD_SIZE];
    int64_t first, end;
    query_candidates(query, &first, &end);
    for (int64_t s = 0; s < sink_keys(args, query); s++) {
        load_sink_key(args, head, s, k, v);
        for (int32_t i = 0; i < rows->count; i++) {
            add_score(args, rows, i, sink_score(args, query, rows, i, s, k), weighs ? v : NULL);
        }
    }
    for (int64_t c = first; c < end; c++) {
        const int64_t j = query_key(query, c);
        if (j < 0) {
            continue;
        }
        load_key(args, query, head, j, k, v);
        for (int32_t i = 0; i < rows->count; i++) {
            double s =
                rows_score(args->layer, rows->q[i], k) + query_bias(query, rows->slope[i], j);
            add_score(args, rows, i, s, weighs ? v : NULL);
        }
    }
}

/* Queries are loaded by the caller; here they get their scale, slope and empty sums. */
void rows_start(const struct attn_attend_args *args, int32_t first_head, int32_t count,
                int32_t head_size_v, struct softmax_rows *rows)
{
    const struct attn_layer_desc *layer = args->layer;
    int64_t group = layer->num_q_heads / layer->num_kv_heads;
    rows->count = count;
    rows->first_head = first_head;
    rows->head_size_v = head_size_v;
    for (int32_t i = 0; i < count; i++) {
        int32_t h = first_head + i;
        double scale = 1;
        if (layer->q_scale_form != ATTN_SCALE_NONE) { /* per KV head */
            scale = scale_of_head(args->params->q_scale, args->params->q_scale_host,
                                  layer->q_scale_form, h / group);
        }
        for (int32_t d = 0; d < layer->head_size; d++) {
            rows->q[i][d] *= scale;
        }
        rows->slope[i] = layer->alibi != ATTN_ALIBI_NONE ? args->params->alibi_slopes[h] : 0;
        rows->row_max[i] = -INFINITY;
        rows->row_sum[i] = 0;
        memset(rows->acc_o[i], 0, sizeof rows->acc_o[i]);
    }
}

static void load_queries(const struct attn_attend_args *args, int64_t token, int32_t first_head,
                         int32_t count, struct softmax_rows *rows)
{
    for (int32_t i = 0; i < count; i++) {
        number_load_row(rows->q[i], tensor_row(args->q, token, first_head + i),
                        number_dtype_name(args->q->dtype), args->layer->head_size);
    }
}

/* The sink's logit joins the denominator; then out = acc_o / row_sum and lse = row_max + log
 * row_sum. */
void rows_write(const struct attn_attend_args *args, int64_t token, struct softmax_rows *rows)
{
    for (int32_t i = 0; i < rows->count; i++) {
        int32_t h = rows->first_head + i;
        double row_max = rows->row_max[i], row_sum = rows->row_sum[i];
        double rescale_o = 1;
        if (args->layer->has_sinks) {
            double sink = args->params->sinks[h];
            double larger = isnan(row_max) ? row_max : fmax(row_max, sink);
            rescale_o = row_max == larger ? 1 : exp(row_max - larger);
            row_sum = row_sum * rescale_o + (larger == -INFINITY ? 0 : exp(sink - larger));
            row_max = larger;
        }
        for (int32_t d = 0; d < rows->head_size_v; d++) {
            rows->acc_o[i][d] = row_sum == 0 ? 0 : rows->acc_o[i][d] * rescale_o / row_sum;
        }
        number_store_row(tensor_row(args->out, token, h), rows->acc_o[i],
                         number_dtype_name(args->out->dtype), rows->head_size_v);
        if (args->lse != NULL) {
            *(float *)tensor_row(args->lse, h, token) =
                row_sum == 0 ? -INFINITY : (float)(row_max + log(row_sum));
        }
    }
}

/* The request of a token row: the last whose query_start_loc is at most the row. */
static int32_t request_of(const struct attn_batch *batch, int64_t token)
{
    int32_t low = 0, high = batch->num_reqs - 1;
    while (low < high) {
        int32_t middle = low + (high - low + 1) / 2;
        if (batch->query_start_loc[middle] <= token) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

struct query query_of(const struct attn_attend_args *args, int64_t token)
{
    const struct attn_batch *batch = args->batch;
    int32_t r = request_of(batch, token);
    int64_t query_len = batch->query_start_loc[r + 1] - batch->query_start_loc[r];
    struct query query = {.layer = args->layer,
                          .batch = batch,
                          .request = r,
                          .index = token - batch->query_start_loc[r],
                          .k_cache = args->k_cache};
    if (args->k_cache != NULL) {
        query.length = batch->seq_lens[r];
    } else {
        const int32_t *start =
            batch->key_start_loc != NULL ? batch->key_start_loc : batch->query_start_loc;
        query.length = start[r + 1] - start[r];
    }
    query.own = query.length - query_len;
    query.position = query.own + query.index;
    query.causal = (batch->causal != ATTN_CAUSAL_DEFAULT ? batch->causal : args->layer->causal) ==
                   ATTN_CAUSAL_YES;
    if (args->layer->causal_per_request && batch->causal_per_request != NULL) {
        query.causal = batch->causal_per_request[r] != 0;
    }
    return query;
}

int32_t list_heads(const struct attn_layer_desc *layer)
{
    const struct attn_index_lists *lists = lists_of(layer);
    return lists != NULL && lists->groups == ATTN_LISTS_PER_Q_HEAD ? 1 : REF_MAX_LOOP_ROWS;
}

struct key_list list_of(const struct attn_attend_args *args, int64_t token, int32_t head)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_index_lists *lists = lists_of(layer);
    const struct attn_io_index_lists *io = ext_of(args->next, ATTN_EXT_DRAFT_IO_INDEX_LISTS);
    if (lists == NULL) {
        return (struct key_list){NULL, 0, 1, false};
    }
    int64_t group = lists->groups == ATTN_LISTS_SHARED ? 0
                    : lists->groups == ATTN_LISTS_PER_KV_HEAD
                        ? head / (layer->num_q_heads / layer->num_kv_heads)
                        : head;
    return (struct key_list){
        .entries = io->indices + token * io->token_stride + group * io->group_stride,
        .count = lists->has_lengths ? io->lengths[token * io->length_stride + group]
                                    : lists->max_entries,
        .granularity = lists->granularity,
        .physical_slots = lists->physical_slots};
}

/* Items are (token, KV head). */
static void attend_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct attend_loop *loop = argument;
    const struct attn_attend_args *args = loop->args;
    int32_t group = args->layer->num_q_heads / args->layer->num_kv_heads;
    const int32_t most = list_heads(args->layer);
    struct softmax_rows rows;
    for (int64_t item = begin; item < end; item++) {
        int64_t index = item / args->layer->num_kv_heads;
        int64_t token = loop->rows != NULL ? loop->rows[index] : loop->first_row + index;
        int32_t head = (int32_t)(item % args->layer->num_kv_heads);
        /* the list of rows is padded with repetitions, and a view of a batch has a part of them */
        if (token < loop->first_row || token >= loop->end_row ||
            (loop->rows != NULL && index > 0 && token == loop->rows[index - 1])) {
            continue;
        }
        struct query query = query_of(args, token);
        for (int32_t i = 0; i < group; i += most) {
            int32_t count = group - i < most ? group - i : most;
            query.list = list_of(args, token, head * group + i);
            load_queries(args, token, head * group + i, count, &rows);
            rows_start(args, head * group + i, count, args->layer->head_size_v, &rows);
            /* With quantized probabilities the maximum is known before the first weight, as it is
             * for a whole tile in a kernel. */
            if (args->layer->p_scale_form != ATTN_SCALE_NONE) {
                visit_keys(args, &query, head, false, &rows);
            }
            visit_keys(args, &query, head, true, &rows);
            rows_write(args, token, &rows);
        }
    }
}

attn_status ref_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    if (args->k_cache != NULL && !(args->flags & ATTN_RUN_NO_WRITE)) {
        const struct attn_write_kv_args write = write_of_attend(args);
        ref_write_kv(&write, error);
    }
    const struct attn_batch *batch = args->batch;
    const struct attn_host *host = args->instance->host;
    struct attend_loop loop = {args, NULL, batch->query_start_loc[0], batch->num_actual_tokens};
    if (batch->query_start_loc[batch->num_reqs] < loop.end_row) {
        loop.end_row = batch->query_start_loc[batch->num_reqs];
    }
    int64_t rows = loop.end_row - loop.first_row;
    if (args->layer->fast_prefill && batch->logits_indices != NULL) {
        loop.rows = batch->logits_indices;
        rows = batch->num_logits_indices;
    }
    if (rows <= 0) {
        return ATTN_OK;
    }
    host->parallel_for(host->user, rows * args->layer->num_kv_heads, 1, attend_items, &loop);
    return ATTN_OK;
}

/* Nothing is planned: tables and lengths are read when the step runs. */
attn_status ref_update_block_table(const struct attn_attend_args *args, struct attn_error *error)
{
    return ATTN_OK;
}
