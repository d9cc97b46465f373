/* SPDX-License-Identifier: Apache-2.0 */
/* A case's arguments over one copy of its image. */
#include <string.h>

#include "support/client.h"
#include "support/number.h"
#include "cases/problem.h"

#define LOOSENESS 7 /* what inexact bounds exceed the lengths by */

/* A scale: floats on the device, or one number of the host per tensor, or neither, which reads as
 * 1. */
static void bind_scale(const struct check_problem *p, uint8_t *base, size_t offset, int32_t form,
                       const float **device, float *host)
{
    int32_t source = form == ATTN_SCALE_PER_TENSOR ? p->v[FACTOR_SCALE_SOURCE].a : 0;
    if (form == ATTN_SCALE_NONE) {
        return;
    }
    if (source == 0) {
        *device = (const float *)(base + offset);
    } else if (source == 1) {
        *host = *(const float *)(p->image.bytes + offset);
    }
}

static void bind_params(const struct check_problem *p, struct binding *b, uint8_t *base)
{
    const struct factor_value *v = p->v;
    struct attn_layer_params *params = &b->params;
    *params = (struct attn_layer_params){.struct_size = sizeof b->params};
    if (v[FACTOR_SINKS].a) {
        params->sinks = (const float *)(base + p->at.sinks);
    }
    if (v[FACTOR_ALIBI].a) {
        params->alibi_slopes = (const float *)(base + p->at.alibi_slopes);
    }
    if (v[FACTOR_STATIC_SINK].a) {
        params->sink_k = &b->sink_k;
        params->sink_v = &b->sink_v;
    }
    bind_scale(p, base, p->at.q_scale, b->layer.q_scale_form, &params->q_scale,
               &params->q_scale_host);
    bind_scale(p, base, p->at.k_scale, b->layer.k_scale_form, &params->k_scale,
               &params->k_scale_host);
    bind_scale(p, base, p->at.v_scale, b->layer.v_scale_form, &params->v_scale,
               &params->v_scale_host);
    bind_scale(p, base, p->at.p_scale, b->layer.p_scale_form, &params->p_scale,
               &params->p_scale_host);
    const bool channels = case_kv(v, true) == ATTN_KV_INT8_KV;
    const bool int4_k = case_kv(v, false) == ATTN_KV_INT4_PER_TOKEN_HEAD;
    const bool int4_v = case_kv(v, true) == ATTN_KV_INT4_PER_TOKEN_HEAD;
    if (channels || int4_k || int4_v) {
        b->quant = EXTENSION(
            attn_kv_quant_params, ATTN_EXT_KV_QUANT_PARAMS, NULL,
            .v_channel_scale = channels ? (const float *)(base + p->at.channel_scale) : NULL,
            .hadamard_signs_k = int4_k ? (const float *)(base + p->at.signs_k) : NULL,
            .hadamard_signs_v = int4_v ? (const float *)(base + p->at.signs_v) : NULL);
        params->next = &b->quant.ext;
    }
}

static void bind_lengths(const struct check_problem *p, struct binding *b, uint8_t *base,
                         uint8_t *host)
{
    struct attn_batch *batch = &b->batch;
    int32_t lengths = p->v[FACTOR_LENGTHS].a;
    for (int32_t r = 0; r < p->num_reqs; r++) {
        const struct request *request = &p->requests[r];
        batch->max_query_len =
            request->query_len > batch->max_query_len ? request->query_len : batch->max_query_len;
        batch->max_seq_len =
            request->seq_len > batch->max_seq_len ? request->seq_len : batch->max_seq_len;
    }
    if (lengths != LENGTHS_EXACT) { /* the decode way's query length is no bound */
        batch->max_seq_len += LOOSENESS;
        batch->max_query_len += p->phase == ATTN_PHASE_PREFILL ? LOOSENESS : 0;
    }
    if (p->paged) {
        batch->seq_lens = (const int32_t *)(base + p->at.seq_lens);
        batch->seq_lens_host =
            lengths == LENGTHS_DEVICE ? NULL : (const int32_t *)(host + p->at.seq_lens);
    } else if (p->shape == SHAPE_CROSS_KEYS) {
        batch->key_start_loc = (const int32_t *)(base + p->at.key_start_loc);
        batch->key_start_loc_host = (const int32_t *)(host + p->at.key_start_loc);
    }
}

static void bind_batch(const struct check_problem *p, struct binding *b, uint8_t *base,
                       uint8_t *host)
{
    struct attn_batch *batch = &b->batch;
    *batch = SIZED(attn_batch, .num_reqs = p->num_reqs, .num_tokens = p->num_tokens,
                   .num_actual_tokens = p->num_actual_tokens,
                   .causal = p->v[FACTOR_CAUSAL].a == CAUSAL_OVERRIDDEN ? ATTN_CAUSAL_NO
                                                                        : ATTN_CAUSAL_DEFAULT,
                   .query_start_loc = (const int32_t *)(base + p->at.query_start_loc),
                   .query_start_loc_host = (const int32_t *)(host + p->at.query_start_loc),
                   .slot_mapping = (const int64_t *)(base + p->at.slot_mapping),
                   .num_slots = p->num_actual_tokens);
    bind_lengths(p, b, base, host);
    batch->common_prefix_len = p->shared;
    if (p->shape == SHAPE_CROSS) {
        batch->encoder_seq_lens = batch->seq_lens;
        batch->encoder_seq_lens_host = batch->seq_lens_host;
        batch->max_encoder_seq_len = batch->max_seq_len;
        batch->num_slots = 0; /* nothing is written */
    }
    if (p->paged) {
        batch->block_table = (const int32_t *)(base + p->at.block_table);
        batch->block_table_stride = p->table_stride;
        batch->block_table_rows = 2 * p->num_reqs;
        if (p->v[FACTOR_TABLE_ROW].a) {
            batch->block_table_row = (const int32_t *)(base + p->at.block_table_row);
        }
    }
    if (p->v[FACTOR_CAUSAL].a == CAUSAL_PER_REQUEST) {
        batch->causal_per_request = base + p->at.causal;
    }
    if (p->v[FACTOR_FAST_PREFILL].a) {
        batch->logits_indices = (const int32_t *)(base + p->at.logits_indices);
        batch->num_logits_indices = p->num_logits;
    }
    if (p->v[FACTOR_SPANS].a) {
        batch->num_spans = p->num_spans;
        batch->spans = (const int32_t *)(base + p->at.spans);
        batch->span_start_loc = (const int32_t *)(base + p->at.span_start_loc);
    }
    if (p->v[FACTOR_TREE].a) {
        int32_t per_row =
            p->v[FACTOR_TREE].a == ATTN_TREE_BITS ? PROBLEM_TREE_WIDTH / 32 : PROBLEM_TREE_WIDTH;
        batch->tree = base + p->at.tree;
        batch->tree_stride_row = per_row;
        batch->tree_stride_request =
            p->v[FACTOR_TREE].b ? 0 : (int64_t)per_row * PROBLEM_TREE_WIDTH;
    }
}

static void bind_tensors(const struct check_problem *p, struct binding *b, uint8_t *base,
                         struct attn_device device)
{
    const struct problem_buffers *at = &p->at;
    const int32_t sink_len = p->v[FACTOR_STATIC_SINK].a;
    /* k and v, too, have rows after the last real one */
    const int32_t keys = p->num_keys + p->num_tokens - p->num_actual_tokens;
    const bool heads_outside = p->v[FACTOR_LSE].a == 1; /* for lse; else tokens, with a gap */
    const struct {
        struct attn_tensor *tensor;
        size_t at;
        int32_t dtype, rows, heads, head_size;
        int64_t stride;
    } tensors[] = {
        {&b->q, at->q, p->q_dtype, p->num_tokens, p->hq, p->d,
         problem_row_elements(p, p->hq, p->d)},
        {&b->k, at->k, p->dtype, keys, p->hk, p->d, problem_row_elements(p, p->hk, p->d)},
        {&b->v, at->v, p->dtype, keys, p->hk, p->dv, problem_row_elements(p, p->hk, p->dv)},
        {&b->out, at->out, p->dtype, p->num_tokens, p->hq, p->dv,
         problem_row_elements(p, p->hq, p->dv)},
        {&b->sink_k, at->sink_k, p->dtype, sink_len, p->hk, p->d, p->hk * p->d},
        {&b->sink_v, at->sink_v, p->dtype, sink_len, p->hk, p->dv, p->hk * p->dv},
        {&b->context_k, at->context_k, p->dtype, p->num_context, p->hk, p->d, p->hk * p->d},
        {&b->context_v, at->context_v, p->dtype, p->num_context, p->hk, p->dv, p->hk * p->dv},
        {&b->lse, at->lse, ATTN_DTYPE_F32, p->hq, p->num_tokens, heads_outside ? 1 : 2 * p->hq,
         heads_outside ? p->num_tokens : 1},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        const int64_t shape[] = {tensors[i].rows, tensors[i].heads, tensors[i].head_size};
        const int64_t strides[] = {tensors[i].stride, tensors[i].head_size, 1};
        memcpy(b->shapes[i], shape, sizeof shape);
        memcpy(b->strides[i], strides, sizeof strides);
        *tensors[i].tensor = (struct attn_tensor){base + tensors[i].at,
                                                  device,
                                                  tensors[i].tensor == &b->lse ? 2 : 3,
                                                  number_dtype(tensors[i].dtype),
                                                  b->shapes[i],
                                                  b->strides[i],
                                                  0};
    }
}

static void bind_writes(const struct check_problem *p, struct binding *b, uint8_t *base)
{
    /* Negative slots name rows to skip; the length of slot_mapping says how many rows of k are
     * real. */
    int64_t num_slots = p->v[FACTOR_STRIDES].a ? p->num_actual_tokens : p->num_tokens;
    num_slots = p->shape == SHAPE_CROSS ? 0 : num_slots;
    b->write =
        SIZED(attn_write_kv_args, .layer = &b->layer, .params = &b->params, .k_cache = &b->k_cache,
              .v_cache = &b->v_cache, .slot_mapping = b->batch.slot_mapping, .num_slots = num_slots,
              .k = &b->k, .v = &b->v);
    b->write_context = b->write;
    b->write_context.slot_mapping = (const int64_t *)(base + p->at.context_slots);
    b->write_context.num_slots = p->num_context;
    b->write_context.k = &b->context_k;
    b->write_context.v = &b->context_v;
}

void problem_bind(const struct check_problem *p, struct binding *b, uint8_t *base, uint8_t *host,
                  struct attn_device device)
{
    memset(b, 0, sizeof *b);
    bind_tensors(p, b, base, device);
    case_layer(p->v, &b->layer);
    bind_params(p, b, base);
    bind_batch(p, b, base, host);
    b->attend = SIZED(attn_attend_args, .layer = &b->layer, .params = &b->params,
                      .batch = &b->batch, .flags = p->v[FACTOR_WRITE].a ? 0 : ATTN_RUN_NO_WRITE,
                      .phase = p->phase, .q = &b->q, .k = &b->k, .v = &b->v, .out = &b->out);
    if (p->v[FACTOR_LSE].a != 0) {
        b->attend.lse = &b->lse;
    }
    if (p->paged) {
        for (int32_t i = 0; i < 2; i++) {
            views_make(p->v, i == 1, p->num_blocks, base + p->at.cache, base + p->at.cache_scales,
                       i ? &b->v_cache : &b->k_cache);
        }
        b->attend.k_cache = &b->k_cache;
        b->attend.v_cache = &b->v_cache;
    }
    if (p->lists.granularity > 0) {
        lists_bind(&p->lists, &p->lists_shape, (const int32_t *)(base + p->at.indices),
                   (const int32_t *)(base + p->at.list_lengths), &b->lists);
        b->layer.next = &b->lists.layer.ext;
        b->attend.next = &b->lists.io.ext;
    }
    bind_writes(p, b, base);
}
