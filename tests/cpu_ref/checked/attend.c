/* SPDX-License-Identifier: Apache-2.0 */
/* attend, attend_mla and attend_mla_sparse against softmax(q k^T) v from its definition
 * (support/oracle.h), a request and KV head at a time. Keys that no query sees are not read. */
#include <attn/draft/index_lists.h>
#include <attn/draft/compressed.h>
#include <attn/mla.h>
#include <math.h>
#include <string.h>

#include "checked.h"
#include "support/number.h"
#include "support/oracle.h"

/* Next to rounding to the output's dtype: what float64 sums in another order may differ by,
 * relative to the row's root mean square; and float32 LSE. */
#define ROW_BOUND 1e-6
#define LSE_BOUND 2e-6

/* One request of a call: rows first .. first + mask.num_queries - 1, and who sees whom there. */
struct checked_request {
    const struct attn_attend_args *args;
    const struct attn_mla_desc *mla;      /* NULL: attend */
    const struct attn_io_mla *io;         /* parts of q, lists of keys; may be NULL */
    const struct attn_index_lists *lists; /* or NULL */
    const struct attn_io_index_lists *given;
    int32_t request;
    int64_t first, first_key; /* first_key: of contiguous keys */
    int32_t dims, dims_v;
    struct oracle_request mask;
};

static double p_scale; /* the compared call's */

static int64_t queries_of(const struct attn_attend_args *args, int32_t r)
{
    return args->batch->query_start_loc[r + 1] - args->batch->query_start_loc[r];
}

static double round_e4m3(double w)
{
    return number_round(w / p_scale, ATTN_DTYPE_FP8_E4M3) * p_scale;
}

static double round_e5m2(double w)
{
    return number_round(w / p_scale, ATTN_DTYPE_FP8_E5M2) * p_scale;
}

/* The tree between the step's own tokens, as what is added to scores. */
static const double *tree_of(const struct attn_attend_args *args, int32_t r, int64_t n)
{
    const struct attn_batch *batch = args->batch;
    int32_t form = args->layer->tree_mask;
    if (form == ATTN_TREE_NONE || batch->tree == NULL) {
        return NULL;
    }
    double *tree = checked_memory(n * n);
    for (int64_t i = 0; i < n * n; i++) {
        int64_t row = r * batch->tree_stride_request + i / n * batch->tree_stride_row;
        int64_t column = i % n;
        if (form == ATTN_TREE_BIAS) {
            tree[i] = ((const float *)batch->tree)[row + column];
        } else {
            uint32_t word = ((const uint32_t *)batch->tree)[row + column / 32];
            tree[i] = word >> column % 32 & 1 ? 0 : -INFINITY;
        }
    }
    return tree;
}

static bool is_causal(const struct attn_attend_args *args, int32_t r)
{
    const struct attn_batch *batch = args->batch;
    if (args->layer->causal_per_request && batch->causal_per_request != NULL) {
        return batch->causal_per_request[r];
    }
    return (batch->causal != ATTN_CAUSAL_DEFAULT ? batch->causal : args->layer->causal) ==
           ATTN_CAUSAL_YES;
}

static struct checked_request checked_request_of(const struct attn_attend_args *args, int32_t r)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_batch *batch = args->batch;
    const int32_t *keys = batch->key_start_loc ? batch->key_start_loc : batch->query_start_loc;
    bool window = layer->has_window, spans = layer->prefix_lm && batch->spans != NULL;
    struct checked_request s = {
        .args = args,
        .mla = layer->kind == ATTN_LAYER_MLA ? extension(layer->next, ATTN_EXT_MLA_DESC) : NULL,
        .io = extension(args->next, ATTN_EXT_IO_MLA),
        .lists = extension(layer->next, ATTN_EXT_DRAFT_INDEX_LISTS),
        .given = extension(args->next, ATTN_EXT_DRAFT_IO_INDEX_LISTS),
        .request = r,
        .first = batch->query_start_loc[r],
        .first_key = keys[r],
        .dims = layer->head_size,
        .dims_v = layer->head_size_v,
        .mask = {.num_queries = queries_of(args, r),
                 .num_keys = args->k_cache ? batch->seq_lens[r] : keys[r + 1] - keys[r],
                 .scale = layer->scale,
                 .soft_cap = layer->soft_cap,
                 .causal = is_causal(args, r),
                 .left = window ? layer->window_left : -1,
                 .right = window ? layer->window_right : -1,
                 .chunk = layer->chunk_size,
                 .lookback = layer->chunk_lookback,
                 .alibi = layer->alibi == ATTN_ALIBI_LINEAR ? 1
                          : layer->alibi == ATTN_ALIBI_SQRT ? 2
                                                            : 0,
                 .span_window = layer->prefix_lm_window}};
    if (spans) {
        s.mask.num_spans = batch->span_start_loc[r + 1] - batch->span_start_loc[r];
        s.mask.spans = batch->spans + 2 * (int64_t)batch->span_start_loc[r];
    }
    s.mask.num_sink_keys = s.mask.num_keys > 0 ? layer->sink_len : 0;
    s.mask.tree = tree_of(args, r, s.mask.num_queries);
    if (layer->p_scale_form != ATTN_SCALE_NONE) {
        p_scale =
            head_scale(args->params->p_scale, args->params->p_scale_host, layer->p_scale_form, 0);
        s.mask.round_weight =
            layer_dtype(layer, true) == ATTN_KV_FP8_E5M2 ? round_e5m2 : round_e4m3;
    }
    return s;
}

static void load_view(const struct checked_request *s, const struct attn_kv_view *view, bool value,
                      int64_t key, int32_t head, double *row)
{
    const struct attn_batch *batch = s->args->batch;
    int64_t table_row = batch->block_table_row ? batch->block_table_row[s->request] : s->request;
    int64_t entry = table_row * batch->block_table_stride + key / view->block_size;
    row_load(&(struct cache_row){s->args->layer, s->args->params, view, value,
                                 batch->block_table[entry], key % view->block_size, head},
             row);
}

static void load_key(const struct checked_request *s, int64_t key, int32_t head, double *k,
                     double *v)
{
    const struct attn_attend_args *args = s->args;
    const struct attn_layer_params *p = args->params;
    if (args->k_cache != NULL) {
        load_view(s, args->k_cache, false, key, head, k);
        if (s->mla != NULL) {
            memcpy(v, k, (size_t)s->dims_v * sizeof *v);
        } else {
            load_view(s, args->v_cache, true, key, head, v);
        }
        return;
    }
    bool scaled = tensor_dtype(args->k) == ATTN_DTYPE_FP8_E4M3;
    tensor_load(args->k, s->first_key + key, head, 0, s->dims, k);
    tensor_load(args->v, s->first_key + key, head, 0, s->dims_v, v);
    for (int32_t d = 0; d < s->dims && scaled; d++) {
        k[d] *= head_scale(p->k_scale, p->k_scale_host, args->layer->k_scale_form, head);
    }
    for (int32_t d = 0; d < s->dims_v && scaled; d++) {
        v[d] *= head_scale(p->v_scale, p->v_scale_host, args->layer->v_scale_form, head);
    }
}

static void load_query(const struct checked_request *s, int64_t row, int32_t head, int32_t kv_head,
                       double *q)
{
    const struct attn_attend_args *args = s->args;
    const struct attn_layer_params *p = args->params;
    double scale = head_scale(p->q_scale, p->q_scale_host, args->layer->q_scale_form, kv_head);
    if (args->q != NULL) {
        tensor_load(args->q, row, head, 0, s->dims, q);
    } else {
        tensor_load(s->io->q_nope, row, head, 0, s->mla->kv_lora_rank, q);
        tensor_load(s->io->q_pe, row, head, 0, s->mla->qk_rope_head_dim, q + s->mla->kv_lora_rank);
    }
    for (int32_t d = 0; d < s->dims; d++) {
        q[d] *= scale;
    }
}

/* With fast prefill only the listed rows are written. */
static bool is_written(const struct attn_attend_args *args, int64_t row)
{
    const struct attn_batch *batch = args->batch;
    bool listed = !args->layer->fast_prefill || batch->logits_indices == NULL;
    for (int32_t i = 0; i < batch->num_logits_indices && !listed; i++) {
        listed = batch->logits_indices[i] == row;
    }
    return listed && row < batch->num_actual_tokens;
}

static attn_status compare(const struct checked_request *s, int64_t row, int32_t head,
                           const double *out, double lse, struct attn_error *error)
{
    double *found = checked_memory(s->dims_v), found_lse = lse;
    double slack = ROW_BOUND * checked_rms(out, s->dims_v);
    tensor_load(s->args->out, row, head, 0, s->dims_v, found);
    for (int32_t d = 0; d < s->dims_v; d++) {
        if (!checked_near(found[d], out[d], slack, tensor_dtype(s->args->out))) {
            return checked_wrong(error, "out", row, head, d, found[d], out[d]);
        }
    }
    if (s->args->lse != NULL) {
        tensor_load(s->args->lse, head, 0, row, 1, &found_lse);
    }
    return checked_near(found_lse, lse, LSE_BOUND * (1 + fabs(lse)), ATTN_DTYPE_F32) ||
                   s->args->lse == NULL
               ? ATTN_OK
               : checked_wrong(error, "lse", row, head, 0, found_lse, lse);
}

/* Query heads of a KV head that see the same keys. */
struct checked_heads {
    int32_t kv_head, first, count;
};

/* What they share: sinks, slopes and static keys. */
static void bind_heads(const struct checked_request *s, const struct checked_heads *heads,
                       struct oracle_request *o)
{
    const struct attn_layer_params *p = s->args->params;
    double *sinks = checked_memory(heads->count), *slopes = checked_memory(heads->count);
    double *sink_k = checked_memory(o->num_sink_keys * s->dims);
    double *sink_v = checked_memory(o->num_sink_keys * s->dims_v);
    for (int32_t h = 0; h < heads->count; h++) {
        sinks[h] = s->args->layer->has_sinks ? p->sinks[heads->first + h] : 0;
        slopes[h] = o->alibi ? p->alibi_slopes[heads->first + h] : 0;
    }
    for (int64_t i = 0; i < o->num_sink_keys; i++) {
        tensor_load(p->sink_k, i, heads->kv_head, 0, s->dims, sink_k + i * s->dims);
        tensor_load(p->sink_v, i, heads->kv_head, 0, s->dims_v, sink_v + i * s->dims_v);
    }
    o->num_q_heads = heads->count;
    o->num_kv_heads = 1;
    o->head_size = s->dims;
    o->head_size_v = s->dims_v;
    o->sinks = s->args->layer->has_sinks ? sinks : NULL;
    o->slopes = slopes;
    o->sink_k = sink_k;
    o->sink_v = sink_v;
}

/* Queries first .. first + o->num_queries - 1 of the request, whose keys are loaded. */
static attn_status verify(const struct checked_request *s, struct oracle_request *o, int64_t first,
                          const struct checked_heads *heads, struct attn_error *error)
{
    int32_t group = heads->count;
    int64_t rows = o->num_queries * group;
    double *q = checked_memory(rows * s->dims);
    attn_status status = ATTN_OK;
    for (int64_t i = 0; i < rows; i++) {
        load_query(s, s->first + first + i / group, heads->first + (int32_t)(i % group),
                   heads->kv_head, q + i * s->dims);
    }
    o->q = q;
    o->out = checked_memory(rows * s->dims_v);
    o->lse = checked_memory(rows);
    oracle_attend(o, checked_memory(o->num_sink_keys + o->num_keys));
    for (int64_t i = 0; i < rows && status == ATTN_OK; i++) {
        int64_t row = s->first + first + i / group;
        if (is_written(s->args, row)) {
            status = compare(s, row, heads->first + (int32_t)(i % group), o->out + i * s->dims_v,
                             o->lse[i], error);
        }
    }
    return status;
}

/* Which keys the lists of these heads have, for each query. */
static const uint8_t *mask_of_lists(const struct checked_request *s,
                                    const struct checked_heads *heads)
{
    const struct attn_batch *batch = s->args->batch;
    const int64_t keys = s->mask.num_keys, all = s->mask.num_queries * keys;
    const int32_t head[] = {[ATTN_LISTS_SHARED] = 0,
                            [ATTN_LISTS_PER_KV_HEAD] = heads->kv_head,
                            [ATTN_LISTS_PER_Q_HEAD] = heads->first};
    uint8_t *listed = (uint8_t *)checked_memory(all / (int64_t)sizeof(double) + 1);
    if (s->lists == NULL) {
        return NULL;
    }
    const int32_t group = head[s->lists->groups];
    const int64_t row = batch->block_table_row ? batch->block_table_row[s->request] : s->request;
    const int32_t *blocks = batch->block_table + row * batch->block_table_stride;
    const int64_t size = s->args->k_cache->block_size;
    for (int64_t q = 0; q < s->mask.num_queries; q++) {
        const struct attn_io_index_lists *io = s->given;
        const int32_t *list =
            io->indices + (s->first + q) * io->token_stride + group * io->group_stride;
        int32_t count = io->lengths ? io->lengths[(s->first + q) * io->length_stride + group]
                                    : s->lists->max_entries;
        for (int64_t j = 0; j < keys; j++) {
            int64_t at = s->lists->physical_slots ? blocks[j / size] * size + j % size : j;
            for (int32_t i = 0; i < count; i++) {
                listed[q * keys + j] |=
                    list[i] >= 0 && at >= 0 && list[i] == at / s->lists->granularity;
            }
        }
    }
    return listed;
}

static attn_status verify_dense(const struct checked_request *s, const struct checked_heads *heads,
                                struct attn_error *error)
{
    struct oracle_request o = s->mask;
    const int32_t head = heads->kv_head;
    o.listed = mask_of_lists(s, heads);
    double *k = checked_memory(o.num_keys * s->dims), *v = checked_memory(o.num_keys * s->dims_v);
    for (int64_t j = 0; j < o.num_keys; j++) {
        bool seen = false;
        for (int64_t i = 0; i < o.num_queries && !seen; i++) {
            seen = oracle_visible(&o, i, j);
        }
        if (seen) {
            load_key(s, j, head, k + j * s->dims, v + j * s->dims_v);
        }
    }
    o.k = k;
    o.v = v;
    bind_heads(s, heads, &o);
    return verify(s, &o, 0, heads, error);
}

/* A query's list: what is hidden or out of range leaves, then all that is left is seen. */
static attn_status verify_list(const struct checked_request *s, int64_t query, int32_t num_heads,
                               struct attn_error *error)
{
    const struct checked_heads heads = {0, 0, num_heads};
    const int32_t *list = s->io->topk_indices + (s->first + query) * s->io->topk_stride;
    struct oracle_request o = {.num_queries = 1,
                               .scale = s->mask.scale,
                               .soft_cap = s->mask.soft_cap,
                               .round_weight = s->mask.round_weight,
                               .left = -1,
                               .right = -1};
    double *k = checked_memory(s->mla->topk * (int64_t)s->dims);
    double *v = checked_memory(s->mla->topk * (int64_t)s->dims_v);
    for (int32_t i = 0; i < s->mla->topk; i++) {
        int32_t j = list[i];
        if (j >= 0 && j < s->mask.num_keys && oracle_visible(&s->mask, query, j)) {
            load_key(s, j, 0, k + o.num_keys * s->dims, v + o.num_keys * s->dims_v);
            o.num_keys++;
        }
    }
    o.k = k;
    o.v = v;
    bind_heads(s, &heads, &o);
    return verify(s, &o, query, &heads, error);
}

static attn_status check(const struct attn_attend_args *args, bool sparse, struct attn_error *error)
{
    const struct attn_layer_desc *layer = args->layer;
    const struct attn_index_lists *lists = extension(layer->next, ATTN_EXT_DRAFT_INDEX_LISTS);
    const int32_t group = layer->num_q_heads / layer->num_kv_heads;
    const int32_t count = lists && lists->groups == ATTN_LISTS_PER_Q_HEAD ? 1 : group;
    const bool topk = sparse && lists == NULL;
    attn_status status = ATTN_OK;
    checked_begin();
    for (int32_t r = 0; r < args->batch->num_reqs; r++) {
        int64_t parts = topk ? queries_of(args, r) : layer->num_q_heads / count;
        for (int64_t i = 0; i < parts && queries_of(args, r) > 0 && status == ATTN_OK; i++) {
            checked_clear();
            struct checked_request s = checked_request_of(args, r);
            const int32_t first = (int32_t)i * count;
            const struct checked_heads heads = {first / group, first, count};
            status = topk ? verify_list(&s, i, layer->num_q_heads, error)
                          : verify_dense(&s, &heads, error);
        }
    }
    checked_end();
    return status;
}

attn_status checked_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    attn_status status = cpu_ref_kernels->attend(args, error);
    return status == ATTN_OK && attends(args->layer) ? check(args, false, error) : status;
}

/* attn-check compares layers with a second cache with a formula of its own. */
static bool has_one_cache(const struct attn_attend_args *args)
{
    return extension(args->layer->next, ATTN_EXT_DRAFT_BOTH_CACHES) == NULL;
}

attn_status checked_attend_mla(const struct attn_attend_args *args, struct attn_error *error)
{
    attn_status status = cpu_ref_kernels->attend_mla(args, error);
    return status == ATTN_OK && has_one_cache(args) ? check(args, false, error) : status;
}

attn_status checked_attend_mla_sparse(const struct attn_attend_args *args, struct attn_error *error)
{
    attn_status status = cpu_ref_kernels->attend_mla_sparse(args, error);
    return status == ATTN_OK && has_one_cache(args) ? check(args, true, error) : status;
}
