/* SPDX-License-Identifier: Apache-2.0 */
#include "problem.h"

#include <math.h>
#include <string.h>

#include "number.h"
#include "random.h"

#define LOGIT_DEVIATION 4.0
#define NEEDLE_LOGIT 14.0
#define MAX_SEQ_LEN 160
#define PADDING_ROWS 3
#define GARBAGE_BLOCK 0x7ffffff0

static const double scales[] = {0.031, 0.047, 0.022, 0.039, 0.027, 0.052, 0.035, 0.044, 0.029};

static int32_t draw_length(uint64_t *random, int32_t block_size, int32_t least)
{
    static const int32_t edges[] = {-1, 0, 1};
    int32_t length = 1 + random_below(random, MAX_SEQ_LEN);
    if (random_below(random, 3) == 0 && block_size < MAX_SEQ_LEN) { /* at a page's edge */
        int32_t pages = 1 + random_below(random, MAX_SEQ_LEN / block_size);
        length = pages * block_size + edges[random_below(random, 3)];
    }
    return length < least ? least : length;
}

static void draw_requests(struct problem *p, uint64_t *random)
{
    int32_t shape = p->v[FACTOR_SHAPE].a;
    int32_t block_size = p->v[FACTOR_BLOCK_SIZE].a;
    p->num_reqs = 3 + random_below(random, 5);
    for (int32_t r = 0; r < p->num_reqs; r++) {
        struct request *request = &p->requests[r];
        int32_t query_len = 1;
        if (shape == SHAPE_SPECULATIVE) {
            query_len = 4;
        } else if (shape == SHAPE_PREFILL || shape >= SHAPE_CONTIGUOUS) {
            query_len = draw_length(random, block_size, 1) / 2 + 1;
        } else if (shape == SHAPE_EXTEND || (shape == SHAPE_MIXED && r >= p->num_reqs / 2)) {
            query_len = 1 + random_below(random, 37);
        }
        request->query_len = query_len;
        request->seq_len = shape == SHAPE_PREFILL || shape == SHAPE_CONTIGUOUS
                               ? query_len
                               : draw_length(random, block_size, query_len);
        if (shape == SHAPE_CROSS_KEYS) {
            request->seq_len = 1 + random_below(random, MAX_SEQ_LEN);
        }
    }
    if (shape == SHAPE_MIXED) { /* an idle request behind the decodes */
        p->requests[p->num_reqs / 2] = (struct request){0, 0};
    }
    for (int32_t r = 0; r < p->num_reqs; r++) {
        p->num_actual_tokens += p->requests[r].query_len;
        p->num_keys += p->paged ? p->requests[r].query_len : p->requests[r].seq_len;
        p->num_context += p->paged ? p->requests[r].seq_len - p->requests[r].query_len : 0;
        if (p->requests[r].seq_len > p->table_stride * block_size) {
            p->table_stride = (p->requests[r].seq_len + block_size - 1) / block_size;
        }
    }
    p->table_stride += 2;
    p->num_tokens = p->num_actual_tokens + PADDING_ROWS;
}

/* Rows of a tensor, contiguous or as a slice of a wider fused one. */
static int64_t row_elements(const struct problem *p, int32_t heads, int32_t head_size)
{
    return (int64_t)heads * head_size * (p->v[FACTOR_STRIDES].a ? 2 : 1);
}

static int32_t kv_bytes(const struct problem *p)
{
    static const int32_t bytes[] = {0, 2, 2, 4, 1, 1};
    return bytes[p->v[FACTOR_KV_DTYPE].a];
}

static void add_buffers(struct problem *p)
{
    struct image *im = &p->image;
    struct problem_buffers *at = &p->at;
    int32_t hq = p->v[FACTOR_HEADS].a, hk = p->v[FACTOR_HEADS].b;
    int32_t d = p->v[FACTOR_HEAD_SIZE].a, dv = p->v[FACTOR_HEAD_SIZE].b;
    size_t e = number_bytes(p->v[FACTOR_DTYPE].a);
    size_t reqs = (size_t)p->num_reqs, tokens = (size_t)p->num_tokens;
    size_t keys = (size_t)(p->num_keys + PADDING_ROWS), context = (size_t)p->num_context;
    size_t sink_len = (size_t)p->v[FACTOR_STATIC_SINK].a;
    size_t slots = (size_t)(p->num_blocks * p->v[FACTOR_BLOCK_SIZE].a);
    at->q = image_add(im, tokens * (size_t)row_elements(p, hq, d) * e, 256, false);
    at->k = image_add(im, keys * (size_t)row_elements(p, hk, d) * e, 256, false);
    at->v = image_add(im, keys * (size_t)row_elements(p, hk, dv) * e, 256, false);
    at->out = image_add(im, tokens * (size_t)row_elements(p, hq, dv) * e, 256, true);
    at->lse = image_add(im, tokens * (size_t)hq * 2 * sizeof(float), 256, true);
    size_t cache = slots * (size_t)hk * (size_t)kv_bytes(p) * (size_t)(d + dv);
    at->k_cache = image_add(im, p->paged ? cache : 0, 256, true);
    at->context_k = image_add(im, context * (size_t)(hk * d) * e, 256, false);
    at->context_v = image_add(im, context * (size_t)(hk * dv) * e, 256, false);
    at->context_slots = image_add(im, context * sizeof(int64_t), 256, false);
    at->query_start_loc = image_add(im, (reqs + 1) * sizeof(int32_t), 256, false);
    at->key_start_loc = image_add(im, (reqs + 1) * sizeof(int32_t), 256, false);
    at->seq_lens = image_add(im, reqs * sizeof(int32_t), 256, false);
    at->block_table = image_add(im, 2 * reqs * (size_t)p->table_stride * sizeof(int32_t), 256, false);
    at->other_table = image_add(im, 2 * reqs * (size_t)p->table_stride * sizeof(int32_t), 256, false);
    at->block_table_row = image_add(im, reqs * sizeof(int32_t), 256, false);
    at->slot_mapping = image_add(im, tokens * sizeof(int64_t), 256, false);
    at->causal = image_add(im, reqs, 256, false);
    at->sinks = image_add(im, (size_t)hq * sizeof(float), 256, false);
    at->alibi_slopes = image_add(im, (size_t)hq * sizeof(float), 256, false);
    at->k_scale = image_add(im, (size_t)hk * sizeof(float), 256, false);
    at->v_scale = image_add(im, (size_t)hk * sizeof(float), 256, false);
    at->sink_k = image_add(im, sink_len * (size_t)(hk * d) * e, 256, false);
    at->sink_v = image_add(im, sink_len * (size_t)(hk * dv) * e, 256, false);
    at->spans = image_add(im, 4 * reqs * sizeof(int32_t), 256, false);
    at->span_start_loc = image_add(im, (reqs + 1) * sizeof(int32_t), 256, false);
    at->tree = image_add(im, reqs * MAX_SEQ_LEN * MAX_SEQ_LEN * sizeof(float), 256, false);
}

static void fill_lengths(struct problem *p, uint64_t *random)
{
    uint8_t *base = p->image.bytes;
    int32_t *query_start_loc = (int32_t *)(base + p->at.query_start_loc);
    int32_t *key_start_loc = (int32_t *)(base + p->at.key_start_loc);
    int32_t *seq_lens = (int32_t *)(base + p->at.seq_lens);
    query_start_loc[0] = 0;
    key_start_loc[0] = 0;
    for (int32_t r = 0; r < p->num_reqs; r++) {
        query_start_loc[r + 1] = query_start_loc[r] + p->requests[r].query_len;
        key_start_loc[r + 1] = key_start_loc[r] + p->requests[r].seq_len;
        seq_lens[r] = p->requests[r].seq_len;
        (base + p->at.causal)[r] = (uint8_t)random_below(random, 2);
    }
}

/* A shuffled table; entries past a request's last block, and those that no query's window reaches, are garbage. */
static void fill_tables(struct problem *p, uint64_t *random)
{
    uint8_t *base = p->image.bytes;
    int32_t block_size = p->v[FACTOR_BLOCK_SIZE].a;
    int32_t *table = (int32_t *)(base + p->at.block_table);
    int32_t *row = (int32_t *)(base + p->at.block_table_row);
    int64_t *slots = (int64_t *)(base + p->at.slot_mapping);
    int64_t *context_slots = (int64_t *)(base + p->at.context_slots);
    int32_t order[PROBLEM_MAX_REQS * (MAX_SEQ_LEN + 4)];
    int32_t used = 0;
    for (int32_t b = 0; b < (int32_t)p->num_blocks; b++) {
        int32_t other = random_below(random, b + 1);
        order[b] = order[other];
        order[other] = b;
    }
    for (int64_t i = 0; i < 2 * p->num_reqs * p->table_stride; i++) {
        table[i] = GARBAGE_BLOCK;
        ((int32_t *)(base + p->at.other_table))[i] = random_below(random, (int32_t)p->num_blocks);
    }
    for (int32_t r = 0, t = 0, c = 0; r < p->num_reqs; r++) {
        const struct request *request = &p->requests[r];
        row[r] = p->v[FACTOR_TABLE_ROW].a ? (2 * p->num_reqs - 1 - 2 * r) : r;
        int32_t *entries = table + row[r] * p->table_stride;
        int32_t context = request->seq_len - request->query_len;
        for (int32_t j = 0; j < request->seq_len; j++) {
            if (j % block_size == 0) {
                entries[j / block_size] = order[used++];
            }
            int64_t slot = (int64_t)entries[j / block_size] * block_size + j % block_size;
            if (j < context) {
                context_slots[c++] = slot;
            } else {
                slots[t++] = slot;
            }
        }
        int32_t window = p->v[FACTOR_WINDOW].a;
        if (window > 0 && p->v[FACTOR_SPANS].a == 0) {
            for (int32_t b = 0; (b + 1) * block_size <= context - window; b++) {
                entries[b] = -GARBAGE_BLOCK;
            }
        }
    }
    for (int32_t t = p->num_actual_tokens; t < p->num_tokens; t++) {
        slots[t] = -1;
    }
}

static void fill_terms(struct problem *p, uint64_t *random)
{
    uint8_t *base = p->image.bytes;
    int32_t *spans = (int32_t *)(base + p->at.spans);
    int32_t *span_start_loc = (int32_t *)(base + p->at.span_start_loc);
    for (int32_t h = 0; h < p->v[FACTOR_HEADS].a; h++) {
        ((float *)(base + p->at.sinks))[h] = (float)(3 + 4 * random_normal(random));
        ((float *)(base + p->at.alibi_slopes))[h] = (float)(0.9 * random_unit(random));
    }
    for (int32_t h = 0; h < p->v[FACTOR_HEADS].b; h++) {
        bool per_head = p->v[FACTOR_SCALES].a == ATTN_SCALE_PER_HEAD;
        ((float *)(base + p->at.k_scale))[h] = (float)scales[per_head ? h % 9 : 0];
        ((float *)(base + p->at.v_scale))[h] = (float)scales[per_head ? (h + 4) % 9 : 1];
    }
    span_start_loc[0] = 0;
    for (int32_t r = 0; r < p->num_reqs; r++) { /* two spans, inclusive, where the request is long enough */
        int32_t length = p->requests[r].seq_len;
        if (length >= 8) {
            int32_t *span = spans + 2 * (size_t)p->num_spans;
            span[0] = random_below(random, length / 4);
            span[1] = span[0] + random_below(random, length / 4);
            span[2] = length / 2 + random_below(random, length / 4);
            span[3] = span[2] + random_below(random, length - span[2]);
            p->num_spans += 2;
        }
        span_start_loc[r + 1] = p->num_spans;
    }
    if (p->v[FACTOR_TREE].a == ATTN_TREE_BITS) {
        uint32_t *words = (uint32_t *)(base + p->at.tree);
        for (size_t i = 0; i < (size_t)p->num_reqs * MAX_SEQ_LEN * (MAX_SEQ_LEN / 32); i++) {
            words[i] = (uint32_t)random_bits(random);
        }
    } else if (p->v[FACTOR_TREE].a == ATTN_TREE_BIAS) {
        float *bias = (float *)(base + p->at.tree);
        for (size_t i = 0; i < (size_t)p->num_reqs * MAX_SEQ_LEN * MAX_SEQ_LEN; i++) {
            bias[i] = random_below(random, 3) ? (float)(2 * random_normal(random)) : -INFINITY;
        }
    }
}

static void fill_rows(uint8_t *memory, int32_t dtype, int64_t rows, int64_t row_stride,
                      int32_t width, double deviation, uint64_t *random)
{
    for (int64_t t = 0; t < rows; t++) {
        for (int32_t i = 0; i < width; i++) {
            number_store(memory, t * row_stride + i, dtype, deviation * random_normal(random));
        }
    }
}

/* One key per request and KV head is turned towards the last query of one of the head's queries. */
static void plant_needles(struct problem *p, uint64_t *random)
{
    uint8_t *base = p->image.bytes;
    int32_t dtype = p->v[FACTOR_DTYPE].a;
    int32_t hq = p->v[FACTOR_HEADS].a, hk = p->v[FACTOR_HEADS].b, d = p->v[FACTOR_HEAD_SIZE].a;
    for (int32_t r = 0, token = 0, key = 0, context = 0; r < p->num_reqs; r++) {
        const struct request *request = &p->requests[r];
        int32_t in_context = p->paged ? request->seq_len - request->query_len : 0;
        token += request->query_len;
        for (int32_t h = 0; h < hk && request->query_len > 0; h++) {
            int32_t j = random_below(random, request->seq_len);
            int64_t q_row = (token - 1) * row_elements(p, hq, d) +
                            (h * (hq / hk) + random_below(random, hq / hk)) * d;
            bool early = j < in_context;
            uint8_t *rows = base + (early ? p->at.context_k : p->at.k);
            int64_t k_row = early ? (int64_t)(context + j) * hk * d
                                  : (key + j - in_context) * row_elements(p, hk, d);
            double norm = 0;
            for (int32_t i = 0; i < d; i++) {
                double x = number_load(base + p->at.q, q_row + i, dtype);
                norm += x * x;
            }
            for (int32_t i = 0; i < d; i++) {
                double x = number_load(base + p->at.q, q_row + i, dtype);
                number_store(rows, k_row + h * d + i, dtype, NEEDLE_LOGIT * sqrt(d) / norm * x);
            }
        }
        key += p->paged ? request->query_len : request->seq_len;
        context += in_context;
    }
}

static void fill_activations(struct problem *p, uint64_t *random)
{
    uint8_t *base = p->image.bytes;
    int32_t dtype = p->v[FACTOR_DTYPE].a;
    int32_t hq = p->v[FACTOR_HEADS].a, hk = p->v[FACTOR_HEADS].b;
    int32_t d = p->v[FACTOR_HEAD_SIZE].a, dv = p->v[FACTOR_HEAD_SIZE].b;
    int32_t sink_len = p->v[FACTOR_STATIC_SINK].a;
    fill_rows(base + p->at.q, dtype, p->num_actual_tokens, row_elements(p, hq, d), hq * d,
              LOGIT_DEVIATION, random);
    fill_rows(base + p->at.k, dtype, p->num_keys, row_elements(p, hk, d), hk * d, 1, random);
    fill_rows(base + p->at.v, dtype, p->num_keys, row_elements(p, hk, dv), hk * dv, 1, random);
    fill_rows(base + p->at.context_k, dtype, p->num_context, hk * d, hk * d, 1, random);
    fill_rows(base + p->at.context_v, dtype, p->num_context, hk * dv, hk * dv, 1, random);
    fill_rows(base + p->at.sink_k, dtype, sink_len, hk * d, hk * d, 1, random);
    fill_rows(base + p->at.sink_v, dtype, sink_len, hk * dv, hk * dv, 1, random);
    plant_needles(p, random);
}

bool problem_init(struct problem *p, const struct case_space *space,
                  const struct attend_case *attend_case, uint64_t seed)
{
    uint64_t random = seed;
    memset(p, 0, sizeof *p);
    p->space = space;
    p->attend_case = *attend_case;
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        p->v[i] = case_value(space, attend_case, i);
    }
    int32_t shape = p->v[FACTOR_SHAPE].a;
    p->paged = shape < SHAPE_CONTIGUOUS;
    p->phase = shape == SHAPE_DECODE || shape == SHAPE_SPECULATIVE ? ATTN_PHASE_DECODE
                                                                   : ATTN_PHASE_PREFILL;
    image_init(&p->image);
    draw_requests(p, &random);
    p->num_blocks = 0;
    for (int32_t r = 0; r < p->num_reqs; r++) {
        int32_t block_size = p->v[FACTOR_BLOCK_SIZE].a;
        p->num_blocks += (p->requests[r].seq_len + block_size - 1) / block_size;
    }
    p->num_blocks += 3; /* never written: poison */
    add_buffers(p);
    if (p->image.failed) {
        image_finish(&p->image);
        return false;
    }
    fill_lengths(p, &random);
    if (p->paged) {
        fill_tables(p, &random);
    }
    fill_terms(p, &random);
    fill_activations(p, &random);
    return true;
}

void problem_finish(struct problem *p)
{
    image_finish(&p->image);
}

/* Which of the binding's shape and stride arrays belongs to which tensor. */
enum { T_Q, T_K, T_V, T_OUT, T_LSE, T_SINK_K, T_SINK_V, T_CONTEXT_K, T_CONTEXT_V };

static void set_tensor(struct binding *b, struct attn_tensor *tensor, int32_t which, void *data,
                       struct attn_device device, int32_t dtype, int64_t rows, int32_t heads,
                       int32_t head_size, int64_t row_stride)
{
    int64_t *shape = b->shapes[which], *strides = b->strides[which];
    shape[0] = rows;
    shape[1] = heads;
    shape[2] = head_size;
    strides[0] = row_stride;
    strides[1] = head_size;
    strides[2] = 1;
    *tensor = (struct attn_tensor){data, device, 3, number_dtype(dtype), shape, strides, 0};
}

static void bind_views(const struct problem *p, struct binding *b, uint8_t *base)
{
    int64_t e = kv_bytes(p), hk = p->v[FACTOR_HEADS].b, n = p->num_blocks;
    int64_t size = p->v[FACTOR_BLOCK_SIZE].a;
    int64_t d = p->v[FACTOR_HEAD_SIZE].a, dv = p->v[FACTOR_HEAD_SIZE].b;
    int32_t layout = p->v[FACTOR_LAYOUT].a;
    for (int32_t i = 0; i < 2; i++) {
        struct attn_kv_view *view = i ? &b->v_cache : &b->k_cache;
        int64_t mine = i ? dv : d;
        int64_t before = i ? n * size * hk * d * e : 0; /* V stands behind K */
        *view = (struct attn_kv_view){.struct_size = sizeof *view,
                                      .num_blocks = n,
                                      .block_size = (int32_t)size,
                                      .num_heads = (int32_t)hk,
                                      .head_size = (int32_t)mine,
                                      .stride_block = size * hk * mine * e,
                                      .stride_slot = hk * mine * e,
                                      .stride_head = mine * e};
        if (layout == ATTN_KV_LAYOUT_HND || layout == ATTN_KV_LAYOUT_HND_INNER) {
            view->stride_slot = mine * e;
            view->stride_head = size * mine * e;
        }
        if (layout == ATTN_KV_LAYOUT_NHD_INNER || layout == ATTN_KV_LAYOUT_HND_INNER) {
            view->stride_block = size * hk * (d + dv) * e;
            before = i ? size * hk * d * e : 0;
        } else if (layout == ATTN_KV_LAYOUT_HND_ROWS) {
            view->stride_slot = (d + dv) * e;
            view->stride_head = size * (d + dv) * e;
            view->stride_block = hk * size * (d + dv) * e;
            before = i ? d * e : 0;
        } else if (layout == ATTN_KV_LAYOUT_PACKED_K && i == 0) {
            view->pack = d % (16 / e) == 0 ? (int32_t)(16 / e) : 8; /* 16 bytes where it divides D */
            view->stride_slot = view->pack * e;
            view->stride_pack = size * view->pack * e;
            view->stride_head = size * d * e;
        }
        view->data = base + p->at.k_cache + before;
    }
}

static void bind_layer(const struct problem *p, struct binding *b, uint8_t *base)
{
    const struct factor_value *v = p->v;
    bool fp8 = v[FACTOR_KV_DTYPE].a >= ATTN_KV_FP8_E4M3;
    b->layer = (struct attn_layer_desc){
        .struct_size = sizeof b->layer,
        .name = "case",
        .kind = p->paged ? ATTN_LAYER_DECODER : ATTN_LAYER_ENCODER_ONLY,
        .dtype = v[FACTOR_DTYPE].a,
        .kv_dtype = v[FACTOR_KV_DTYPE].a,
        .num_q_heads = v[FACTOR_HEADS].a,
        .num_kv_heads = v[FACTOR_HEADS].b,
        .head_size = v[FACTOR_HEAD_SIZE].a,
        .head_size_v = v[FACTOR_HEAD_SIZE].b,
        .scale = (float)(1 / sqrt(v[FACTOR_HEAD_SIZE].a)),
        .causal = v[FACTOR_CAUSAL].a != CAUSAL_NO,
        .causal_per_request = v[FACTOR_CAUSAL].a == CAUSAL_PER_REQUEST,
        .has_window = v[FACTOR_WINDOW].a > 0,
        .window_left = v[FACTOR_WINDOW].a - 1,
        .window_right = v[FACTOR_WINDOW].b ? v[FACTOR_WINDOW].a - 1 : 0,
        .chunk_size = v[FACTOR_CHUNK].a,
        .chunk_lookback = v[FACTOR_CHUNK].b,
        .soft_cap = (float)v[FACTOR_SOFT_CAP].a,
        .alibi = v[FACTOR_ALIBI].a,
        .has_sinks = v[FACTOR_SINKS].a,
        .sink_len = v[FACTOR_STATIC_SINK].a,
        .prefix_lm = v[FACTOR_SPANS].a,
        .prefix_lm_window = v[FACTOR_SPANS].b,
        .tree_mask = v[FACTOR_TREE].a,
        .block_size = p->paged ? v[FACTOR_BLOCK_SIZE].a : 0,
        .num_speculative_tokens = v[FACTOR_SHAPE].a == SHAPE_SPECULATIVE ? 3 : 0,
        .k_scale_form = fp8 ? v[FACTOR_SCALES].a : ATTN_SCALE_NONE,
        .v_scale_form = fp8 ? v[FACTOR_SCALES].a : ATTN_SCALE_NONE,
        .needs_lse = v[FACTOR_LSE].a != 0,
        .needs_block_table_row = v[FACTOR_TABLE_ROW].a,
    };
    if (!b->layer.has_window) {
        b->layer.window_left = b->layer.window_right = -1;
    }
    b->params = (struct attn_layer_params){.struct_size = sizeof b->params};
    if (v[FACTOR_SINKS].a) {
        b->params.sinks = (const float *)(base + p->at.sinks);
    }
    if (v[FACTOR_ALIBI].a) {
        b->params.alibi_slopes = (const float *)(base + p->at.alibi_slopes);
    }
    if (v[FACTOR_STATIC_SINK].a) {
        b->params.sink_k = &b->sink_k;
        b->params.sink_v = &b->sink_v;
    }
    if (fp8) {
        b->params.k_scale = (const float *)(base + p->at.k_scale);
        b->params.v_scale = (const float *)(base + p->at.v_scale);
    }
}

static void bind_batch(const struct problem *p, struct binding *b, uint8_t *base, uint8_t *host)
{
    struct attn_batch *batch = &b->batch;
    *batch = (struct attn_batch){
        .struct_size = sizeof *batch,
        .num_reqs = p->num_reqs,
        .num_tokens = p->num_tokens,
        .num_actual_tokens = p->num_actual_tokens,
        .causal = -1,
        .query_start_loc = (const int32_t *)(base + p->at.query_start_loc),
        .query_start_loc_host = (const int32_t *)(host + p->at.query_start_loc),
        .slot_mapping = (const int64_t *)(base + p->at.slot_mapping),
        .num_slots = p->num_actual_tokens,
    };
    for (int32_t r = 0; r < p->num_reqs; r++) {
        const struct request *request = &p->requests[r];
        batch->max_query_len = request->query_len > batch->max_query_len ? request->query_len
                                                                         : batch->max_query_len;
        batch->max_seq_len = request->seq_len > batch->max_seq_len ? request->seq_len
                                                                   : batch->max_seq_len;
    }
    if (p->paged) {
        batch->seq_lens = (const int32_t *)(base + p->at.seq_lens);
        batch->seq_lens_host = (const int32_t *)(host + p->at.seq_lens);
        batch->block_table = (const int32_t *)(base + p->at.block_table);
        batch->block_table_stride = p->table_stride;
        batch->block_table_rows = 2 * p->num_reqs;
        if (p->v[FACTOR_TABLE_ROW].a) {
            batch->block_table_row = (const int32_t *)(base + p->at.block_table_row);
        }
    } else if (p->v[FACTOR_SHAPE].a == SHAPE_CROSS_KEYS) {
        batch->key_start_loc = (const int32_t *)(base + p->at.key_start_loc);
        batch->key_start_loc_host = (const int32_t *)(host + p->at.key_start_loc);
    }
    if (p->v[FACTOR_CAUSAL].a == CAUSAL_PER_REQUEST) {
        batch->causal_per_request = base + p->at.causal;
    }
    if (p->v[FACTOR_SPANS].a) {
        batch->num_spans = p->num_spans;
        batch->spans = (const int32_t *)(base + p->at.spans);
        batch->span_start_loc = (const int32_t *)(base + p->at.span_start_loc);
    }
    if (p->v[FACTOR_TREE].a) {
        int32_t per_row = p->v[FACTOR_TREE].a == ATTN_TREE_BITS ? MAX_SEQ_LEN / 32 : MAX_SEQ_LEN;
        batch->tree = base + p->at.tree;
        batch->tree_stride_row = per_row;
        batch->tree_stride_request = p->v[FACTOR_TREE].b ? 0 : (int64_t)per_row * MAX_SEQ_LEN;
    }
}

static void bind_tensors(const struct problem *p, struct binding *b, uint8_t *base,
                         struct attn_device device)
{
    const struct problem_buffers *at = &p->at;
    int32_t dtype = p->v[FACTOR_DTYPE].a, sink_len = p->v[FACTOR_STATIC_SINK].a;
    int32_t hq = p->v[FACTOR_HEADS].a, hk = p->v[FACTOR_HEADS].b;
    int32_t d = p->v[FACTOR_HEAD_SIZE].a, dv = p->v[FACTOR_HEAD_SIZE].b;
    set_tensor(b, &b->q, T_Q, base + at->q, device, dtype, p->num_tokens, hq, d,
               row_elements(p, hq, d));
    set_tensor(b, &b->k, T_K, base + at->k, device, dtype, p->num_keys + PADDING_ROWS, hk, d,
               row_elements(p, hk, d));
    set_tensor(b, &b->v, T_V, base + at->v, device, dtype, p->num_keys + PADDING_ROWS, hk, dv,
               row_elements(p, hk, dv));
    set_tensor(b, &b->out, T_OUT, base + at->out, device, dtype, p->num_tokens, hq, dv,
               row_elements(p, hq, dv));
    set_tensor(b, &b->sink_k, T_SINK_K, base + at->sink_k, device, dtype, sink_len, hk, d, hk * d);
    set_tensor(b, &b->sink_v, T_SINK_V, base + at->sink_v, device, dtype, sink_len, hk, dv,
               hk * dv);
    set_tensor(b, &b->context_k, T_CONTEXT_K, base + at->context_k, device, dtype, p->num_context,
               hk, d, hk * d);
    set_tensor(b, &b->context_v, T_CONTEXT_V, base + at->context_v, device, dtype, p->num_context,
               hk, dv, hk * dv);
    /* lse [Hq, T]: heads outside, or tokens outside with a gap. */
    bool heads_outside = p->v[FACTOR_LSE].a == 1;
    int64_t *shape = b->shapes[T_LSE], *strides = b->strides[T_LSE];
    shape[0] = hq;
    shape[1] = p->num_tokens;
    strides[0] = heads_outside ? p->num_tokens : 1;
    strides[1] = heads_outside ? 1 : 2 * hq;
    b->lse = (struct attn_tensor){
        base + at->lse, device, 2, number_dtype(ATTN_DTYPE_F32), shape, strides, 0};
}

void problem_bind(const struct problem *p, struct binding *b, uint8_t *base, uint8_t *host,
                  struct attn_device device)
{
    memset(b, 0, sizeof *b);
    bind_tensors(p, b, base, device);
    bind_layer(p, b, base);
    bind_batch(p, b, base, host);
    bind_views(p, b, base);
    b->attend = (struct attn_attend_args){.struct_size = sizeof b->attend,
                                          .layer = &b->layer,
                                          .params = &b->params,
                                          .batch = &b->batch,
                                          .flags = ATTN_RUN_NO_WRITE,
                                          .phase = p->phase,
                                          .q = &b->q,
                                          .k = &b->k,
                                          .v = &b->v,
                                          .out = &b->out};
    if (p->v[FACTOR_LSE].a != 0) {
        b->attend.lse = &b->lse;
    }
    if (p->paged) {
        b->attend.k_cache = &b->k_cache;
        b->attend.v_cache = &b->v_cache;
    }
    /* Negative slots name rows to skip; the length of slot_mapping says how many rows of k are real. */
    int64_t num_slots = p->v[FACTOR_STRIDES].a ? p->num_actual_tokens : p->num_tokens;
    b->write = (struct attn_write_kv_args){.struct_size = sizeof b->write,
                                           .layer = &b->layer,
                                           .params = &b->params,
                                           .k_cache = &b->k_cache,
                                           .v_cache = &b->v_cache,
                                           .slot_mapping = b->batch.slot_mapping,
                                           .num_slots = num_slots,
                                           .k = &b->k,
                                           .v = &b->v};
    b->write_context = b->write;
    b->write_context.slot_mapping = (const int64_t *)(base + p->at.context_slots);
    b->write_context.num_slots = p->num_context;
    b->write_context.k = &b->context_k;
    b->write_context.v = &b->context_v;
}
