/* SPDX-License-Identifier: Apache-2.0 */
#include "problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats.h"

#define GARBAGE_BLOCK 0x7ffffff0
#define LOGIT_DEVIATION 4.0
#define NEEDLE_LOGIT 14.0

void *problem_memory(int64_t count, size_t size, int32_t byte)
{
    void *memory = malloc((size_t)(count > 0 ? count : 1) * size);
    if (memory == NULL) {
        abort(); /* a test without memory has no result */
    }
    memset(memory, byte, (size_t)(count > 0 ? count : 1) * size);
    return memory;
}

static double *make_doubles(int64_t count)
{
    return problem_memory(count, sizeof(double), 0);
}

int32_t problem_owner(const struct problem *p, int32_t request, int64_t key)
{
    return key < p->c->shared ? 0 : request;
}

int32_t problem_block(const struct problem *p, int32_t request, int64_t key)
{
    return p->table[p->table_row[request] * p->table_stride + key / p->c->block_size];
}

/* Elements, by the layout's index order; planes of K and V follow each other where they are two. */
int64_t problem_cache_offset(const struct problem *p, int32_t is_v, int64_t b, int64_t s, int64_t h,
                             int64_t d)
{
    int64_t B = p->c->block_size, H = p->c->num_kv_heads, D = p->c->head_size, E = p->dv;
    int64_t own = is_v ? E : D, plane = is_v ? p->num_blocks * B * H * D : 0;
    int64_t page = B * H * (D + E), inner = is_v ? B * H * D : 0;
    int64_t at = 0;
    switch (p->c->layout) {
    case ATTN_KV_LAYOUT_NHD:
        at = plane + ((b * B + s) * H + h) * own + d;
        break;
    case ATTN_KV_LAYOUT_HND:
        at = plane + ((b * H + h) * B + s) * own + d;
        break;
    case ATTN_KV_LAYOUT_NHD_INNER:
        at = b * page + inner + (s * H + h) * own + d;
        break;
    case ATTN_KV_LAYOUT_HND_INNER:
        at = b * page + inner + (h * B + s) * own + d;
        break;
    case ATTN_KV_LAYOUT_HND_ROWS:
        at = ((b * H + h) * B + s) * (D + E) + (is_v ? D : 0) + d;
        break;
    case ATTN_KV_LAYOUT_PACKED_K: /* K [N, Hk, D/8, B, 8], V [N, Hk, Dv, B] */
        at = is_v ? plane + ((b * H + h) * E + d) * B + s
                  : (((b * H + h) * (D / 8) + d / 8) * B + s) * 8 + d % 8;
        break;
    default: /* CASE_LAYOUT_LAYERS */
        at = (3 * b + 1) * page + inner + (s * H + h) * own + d;
    }
    return at * format_bytes(p->kv_number);
}

static void set_view(const struct problem *p, int32_t is_v, struct attn_kv_view *view)
{
    int64_t zero = problem_cache_offset(p, is_v, 0, 0, 0, 0);
    int32_t pack = p->c->layout == ATTN_KV_LAYOUT_PACKED_K ? (is_v ? 1 : 8) : 0;
    *view = (struct attn_kv_view){.struct_size = sizeof *view,
                                  .data = p->cache + zero,
                                  .num_blocks = p->num_blocks,
                                  .block_size = p->c->block_size,
                                  .num_heads = p->c->num_kv_heads,
                                  .head_size = is_v ? p->dv : p->c->head_size,
                                  .pack = pack};
    view->stride_block = problem_cache_offset(p, is_v, 1, 0, 0, 0) - zero;
    view->stride_slot = problem_cache_offset(p, is_v, 0, 1, 0, 0) - zero;
    view->stride_head = problem_cache_offset(p, is_v, 0, 0, 1, 0) - zero;
    view->stride_pack = pack ? problem_cache_offset(p, is_v, 0, 0, 0, pack) - zero : 0;
}

static void build_lengths(struct problem *p)
{
    const struct attend_case *c = p->c;
    p->query_start[0] = c->first_row;
    for (int32_t r = 0; r < c->num_reqs; r++) {
        p->query_start[r + 1] = p->query_start[r] + c->query_lens[r];
        p->key_start[r + 1] = p->key_start[r] + c->seq_lens[r];
        p->lens[r] = c->seq_lens[r];
        p->causal[r] = (uint8_t)(random_bits() & 1);
        p->logits[2 * r] = p->logits[2 * r + 1] = p->query_start[r + 1] - 1;
        if (c->block_size > 0) {
            int32_t blocks = (c->seq_lens[r] + c->block_size - 1) / c->block_size;
            p->max_blocks = blocks > p->max_blocks ? blocks : p->max_blocks;
            p->num_blocks += blocks;
        }
    }
    p->num_blocks += 3; /* never written */
    p->num_rows = p->query_start[c->num_reqs] + c->padding;
    p->num_keys = p->key_start[c->num_reqs];
    for (int32_t r = 0; r < c->num_reqs && c->padding > 0; r++) {
        p->logits[2 * r + 1] = (int32_t)p->num_rows - 1; /* a row that is not to be written */
    }
}

/* Every entry that no key needs is garbage that would fault if it were followed. */
static void build_table(struct problem *p)
{
    const struct attend_case *c = p->c;
    int32_t next = 0, *order = problem_memory(p->num_blocks, sizeof(int32_t), 0);
    p->table_rows = c->num_reqs + (c->table_rows ? 5 : 0);
    p->table_stride = p->max_blocks + 3;
    p->table = problem_memory(p->table_rows * p->table_stride, sizeof(int32_t), 0);
    for (int64_t i = 0; i < p->table_rows * p->table_stride; i++) {
        p->table[i] = GARBAGE_BLOCK;
    }
    random_permutation(order, p->num_blocks);
    for (int32_t i = 0; i < p->num_blocks && c->ordered_blocks > 0; i++) {
        order[i] = c->ordered_blocks == 2 ? p->num_blocks - 1 - i : i;
    }
    int32_t rows[CASE_MAX_REQUESTS + 5];
    random_permutation(rows, (int32_t)p->table_rows);
    for (int32_t r = 0; r < c->num_reqs; r++) {
        p->table_row[r] = c->table_rows ? rows[r] : r;
    }
    for (int32_t i = 0; i < p->max_blocks * c->num_reqs; i++) {
        int32_t r = c->ordered_blocks == 3 ? i % c->num_reqs : i / p->max_blocks;
        int32_t b = c->ordered_blocks == 3 ? i / c->num_reqs : i % p->max_blocks;
        int32_t *entry = &p->table[p->table_row[r] * p->table_stride + b];
        if (b * c->block_size < c->seq_lens[r]) {
            int32_t shared = r > 0 && b < c->shared / c->block_size;
            *entry = shared ? p->table[p->table_row[0] * p->table_stride + b] : order[next++];
        }
    }
    free(order);
}

static void build_scales(struct problem *p)
{
    const struct attend_case *c = p->c;
    double size = c->small_scales ? 0.001 : 0.02;
    for (int32_t i = 0; i < 64; i++) {
        p->sinks[i] = (float)(3 * random_normal());
        p->slopes[i] = (float)(0.02 + 0.01 * random_below(10));
        p->q_scale[i] = (float)(0.05 * (1 + random_below(3)));
        p->k_scale[i] = (float)(size * (1 + random_below(4)));
        p->v_scale[i] = (float)(size * (1 + random_below(4)));
    }
    p->p_scale = c->kv_dtype == ATTN_KV_FP8_E5M2 ? 1.0f / 1024 : 1.0f / 448;
}

static double scale_at(int32_t form, const float *scales, int64_t head)
{
    return form == ATTN_SCALE_NONE ? 1 : scales[form == ATTN_SCALE_PER_HEAD ? head : 0];
}

static void fill_normal(double *values, int64_t count, double deviation, int32_t dtype)
{
    for (int64_t i = 0; i < count; i++) {
        values[i] = format_round(dtype, deviation * random_normal());
    }
}

/* A needle per request and KV head: one key in the direction of the last query of the group. */
static void plant_needles(struct problem *p)
{
    const struct attend_case *c = p->c;
    int32_t group = c->num_q_heads / c->num_kv_heads;
    for (int32_t r = 0; r < c->num_reqs; r++) {
        int32_t first = c->seq_lens[r] > c->shared ? c->shared : 0;
        if (c->query_lens[r] == 0 || c->seq_lens[r] == 0 || (r > 0 && first < c->shared)) {
            continue;
        }
        for (int32_t h = 0; h < c->num_kv_heads; h++) {
            int64_t key = first + random_below(c->seq_lens[r] - first);
            const double *q = p->q + ((int64_t)(p->query_start[r + 1] - 1) * c->num_q_heads +
                                      h * group + random_below(group)) *
                                         c->head_size;
            double *k = p->k_given + ((p->key_start[r] + key) * c->num_kv_heads + h) * c->head_size,
                   sum = 0;
            for (int32_t d = 0; d < c->head_size; d++) {
                sum += q[d] * q[d];
            }
            for (int32_t d = 0; d < c->head_size; d++) {
                k[d] = format_round(c->dtype, NEEDLE_LOGIT * q[d] / (sum * p->layer.scale));
            }
        }
    }
}

static void build_values(struct problem *p)
{
    const struct attend_case *c = p->c;
    int64_t group = c->num_q_heads / c->num_kv_heads;
    int64_t k_row = (int64_t)c->num_kv_heads * c->head_size;
    int64_t v_row = (int64_t)c->num_kv_heads * p->dv;
    int64_t q_count = p->num_rows * c->num_q_heads * c->head_size;
    p->q = make_doubles(q_count);
    p->k_given = make_doubles(p->num_keys * k_row);
    p->v_given = make_doubles(p->num_keys * v_row);
    p->sink_k = make_doubles(c->sink_len * k_row);
    p->sink_v = make_doubles(c->sink_len * v_row);
    for (int64_t i = 0; i < q_count; i++) {
        int64_t head = i / c->head_size % c->num_q_heads;
        double scale = scale_at(c->q_scale_form, p->q_scale, head / group);
        p->q[i] = format_round(p->q_number, LOGIT_DEVIATION * random_normal() / scale) * scale;
    }
    fill_normal(p->k_given, p->num_keys * k_row, 1, c->dtype);
    fill_normal(p->v_given, p->num_keys * v_row, 1, c->dtype);
    fill_normal(p->sink_k, c->sink_len * k_row, 1, c->dtype);
    fill_normal(p->sink_v, c->sink_len * v_row, 1, c->dtype);
    plant_needles(p);
    for (int32_t r = 1; r < c->num_reqs; r++) {
        int64_t keys = c->shared < c->seq_lens[r] ? c->shared : c->seq_lens[r];
        memcpy(p->k_given + p->key_start[r] * k_row, p->k_given, (size_t)(keys * k_row) * 8);
        memcpy(p->v_given + p->key_start[r] * v_row, p->v_given, (size_t)(keys * v_row) * 8);
    }
    for (int32_t r = 0; r < c->num_reqs && c->nan_key; r++) {
        int64_t key = p->key_start[r] + c->seq_lens[r] - c->query_lens[r];
        double *row = c->nan_key == 1 ? p->k_given + key * k_row : p->v_given + key * v_row;
        row[0] = NAN;
    }
    p->k = make_doubles(p->num_keys * k_row);
    p->v = make_doubles(p->num_keys * v_row);
    for (int64_t i = 0; i < p->num_keys * k_row; i++) {
        double scale = scale_at(c->k_scale_form, p->k_scale, i / c->head_size % c->num_kv_heads);
        p->k[i] =
            isnan(p->k_given[i]) ? NAN : format_round(p->kv_number, p->k_given[i] / scale) * scale;
    }
    for (int64_t i = 0; i < p->num_keys * v_row; i++) {
        double scale = scale_at(c->v_scale_form, p->v_scale, i / p->dv % c->num_kv_heads);
        p->v[i] =
            isnan(p->v_given[i]) ? NAN : format_round(p->kv_number, p->v_given[i] / scale) * scale;
    }
}

static uint8_t *store_rows(const double *values, int64_t rows, int64_t width, int64_t stride,
                           int32_t number)
{
    uint8_t *memory = problem_memory(rows * stride + 8, (size_t)format_bytes(number), POISON);
    for (int64_t i = 0; i < rows * width; i++) {
        if (!isnan(values[i])) { /* poison is NaN already */
            format_store(memory, i / width * stride + i % width, number, values[i]);
        }
    }
    return memory;
}

static void build_tensors(struct problem *p)
{
    const struct attend_case *c = p->c;
    int64_t wide = c->fused ? 24 : 0, D = c->head_size, T = p->num_rows, H = c->num_q_heads;
    int64_t group = H / c->num_kv_heads;
    p->q_stride = H * D + wide;
    p->k_stride = c->num_kv_heads * D + wide;
    p->v_stride = c->num_kv_heads * p->dv + 2 * wide;
    p->out_stride = H * p->dv + wide;
    double *scaled = make_doubles(T * H * D);
    for (int64_t i = 0; i < T * H * D; i++) {
        scaled[i] = p->q[i] / scale_at(c->q_scale_form, p->q_scale, i / D % H / group);
    }
    p->q_memory = store_rows(scaled, T, H * D, p->q_stride, p->q_number);
    free(scaled);
    tensor_set(&p->q_tensor, p->q_memory, p->q_number, 3, (int64_t[]){T, H, D},
               (int64_t[]){p->q_stride, D, 1});
    p->out_bytes = T * p->out_stride * format_bytes(c->dtype);
    p->out_memory = problem_memory(p->out_bytes, 1, POISON);
    tensor_set(&p->out_tensor, p->out_memory, c->dtype, 3, (int64_t[]){T, H, p->dv},
               (int64_t[]){p->out_stride, p->dv, 1});
    p->lse_bytes = H * T * 4;
    p->lse_memory = problem_memory(p->lse_bytes, 1, POISON);
    tensor_set(&p->lse_tensor, p->lse_memory, ATTN_DTYPE_F32, 2, (int64_t[]){H, T},
               c->lse_by_token ? (int64_t[]){1, H} : NULL);
    if (c->block_size == 0) {
        p->k_memory = store_rows(p->k, p->num_keys, c->num_kv_heads * D, p->k_stride, c->dtype);
        p->v_memory = store_rows(p->v, p->num_keys, c->num_kv_heads * p->dv, p->v_stride, c->dtype);
        tensor_set(&p->k_tensor, p->k_memory, c->dtype, 3,
                   (int64_t[]){p->num_keys, c->num_kv_heads, D}, (int64_t[]){p->k_stride, D, 1});
        tensor_set(&p->v_tensor, p->v_memory, c->dtype, 3,
                   (int64_t[]){p->num_keys, c->num_kv_heads, p->dv},
                   (int64_t[]){p->v_stride, p->dv, 1});
    }
    int64_t k_row = c->num_kv_heads * D, v_row = c->num_kv_heads * (int64_t)p->dv;
    int64_t bytes = format_bytes(c->dtype);
    p->sink_memory = problem_memory(c->sink_len * (k_row + v_row), (size_t)bytes, POISON);
    for (int64_t i = 0; i < c->sink_len * k_row; i++) {
        format_store(p->sink_memory, i, c->dtype, p->sink_k[i]);
    }
    for (int64_t i = 0; i < c->sink_len * v_row; i++) {
        format_store(p->sink_memory, c->sink_len * k_row + i, c->dtype, p->sink_v[i]);
    }
    tensor_set(&p->sink_k_tensor, p->sink_memory, c->dtype, 3,
               (int64_t[]){c->sink_len, c->num_kv_heads, D}, NULL);
    tensor_set(&p->sink_v_tensor, p->sink_memory + c->sink_len * k_row * bytes, c->dtype, 3,
               (int64_t[]){c->sink_len, c->num_kv_heads, p->dv}, NULL);
}

static void build_layer(struct problem *p)
{
    const struct attend_case *c = p->c;
    p->layer = (struct attn_layer_desc){
        .struct_size = sizeof p->layer,
        .name = c->name,
        .dtype = c->dtype,
        .kv_dtype = c->kv_dtype ? c->kv_dtype : c->dtype,
        .num_q_heads = c->num_q_heads,
        .num_kv_heads = c->num_kv_heads,
        .head_size = c->head_size,
        .head_size_v = p->dv,
        .scale = (float)(1 / sqrt(c->head_size)),
        .causal = !c->not_causal,
        .causal_per_request = c->causal_per_request,
        .has_window = c->has_window,
        .window_left = c->left,
        .window_right = c->right,
        .chunk_size = c->chunk,
        .chunk_lookback = c->lookback,
        .soft_cap = c->soft_cap,
        .alibi = c->alibi,
        .has_sinks = c->has_sinks,
        .sink_len = c->sink_len,
        .prefix_lm = c->num_spans > 0,
        .prefix_lm_window = c->span_window,
        .tree_mask = c->tree,
        .block_size = c->block_size,
        .q_scale_form = c->q_scale_form,
        .k_scale_form = c->k_scale_form,
        .v_scale_form = c->v_scale_form,
        .p_scale_form = c->p_scale_form,
        .q_dtype = c->q_dtype,
        .fast_prefill = c->fast_prefill,
    };
    p->params = (struct attn_layer_params){
        .struct_size = sizeof p->params,
        .sinks = c->has_sinks ? p->sinks : NULL,
        .alibi_slopes = c->alibi ? p->slopes : NULL,
        .sink_k = c->sink_len ? &p->sink_k_tensor.tensor : NULL,
        .sink_v = c->sink_len ? &p->sink_v_tensor.tensor : NULL,
        .q_scale = c->host_scales ? NULL : p->q_scale,
        .k_scale = c->host_scales ? NULL : p->k_scale,
        .v_scale = c->host_scales ? NULL : p->v_scale,
        .p_scale = c->host_scales ? NULL : &p->p_scale,
        .q_scale_host = p->q_scale[0],
        .k_scale_host = p->k_scale[0],
        .v_scale_host = p->v_scale[0],
        .p_scale_host = p->p_scale,
    };
}

static void build_batch(struct problem *p)
{
    const struct attend_case *c = p->c;
    int32_t bits = c->tree == ATTN_TREE_BITS || c->tree == ATTN_TREE_BIAS;
    p->batch = (struct attn_batch){
        .struct_size = sizeof p->batch,
        .num_reqs = c->num_reqs,
        .num_tokens = (int32_t)p->num_rows,
        .num_actual_tokens = p->query_start[c->num_reqs],
        .max_query_len = (int32_t)problem_longest_query(c),
        .max_seq_len = 1 << 20,
        .causal = c->batch_causal,
        .query_start_loc = p->query_start,
        .query_start_loc_host = p->query_start,
        .seq_lens = c->block_size ? p->lens : NULL,
        .key_start_loc = c->block_size ? NULL : p->key_start,
        .block_table = p->table,
        .block_table_stride = p->table_stride,
        .block_table_rows = p->table_rows,
        .block_table_row = c->table_rows ? p->table_row : NULL,
        .causal_per_request = c->causal_per_request ? p->causal : NULL,
        .num_spans = c->num_spans ? p->span_start[c->num_reqs] : 0,
        .spans = c->num_spans ? p->spans : NULL,
        .span_start_loc = c->num_spans ? p->span_start : NULL,
        .tree = bits ? p->tree : NULL,
        .tree_stride_row = p->tree_width,
        .tree_stride_request = c->one_tree ? 0 : problem_longest_query(c) * p->tree_width,
        .logits_indices = c->fast_prefill ? p->logits : NULL,
        .num_logits_indices = c->fast_prefill ? 2 * c->num_reqs : 0,
    };
}

struct problem *problem_create(const struct attend_case *c, uint64_t seed)
{
    struct problem *p = problem_memory(1, sizeof *p, 0);
    random_seed(seed);
    p->c = c;
    p->dv = c->head_size_v ? c->head_size_v : c->head_size;
    p->kv_number = c->kv_dtype ? c->kv_dtype : c->dtype;
    p->q_number = c->q_scale_form ? c->q_dtype : c->dtype;
    build_lengths(p);
    build_scales(p);
    build_layer(p);
    build_values(p);
    problem_build_spans(p);
    problem_build_tree(p);
    build_tensors(p);
    if (c->block_size > 0) {
        build_table(p);
        p->cache_bytes = p->num_blocks * (int64_t)c->block_size * c->num_kv_heads *
                         (c->head_size + p->dv) * format_bytes(p->kv_number) *
                         (c->layout == CASE_LAYOUT_LAYERS ? 3 : 1);
        p->cache = problem_memory(p->cache_bytes, 1, POISON);
        p->cache_expected = problem_memory(p->cache_bytes, 1, POISON);
        set_view(p, 0, &p->k_view);
        set_view(p, 1, &p->v_view);
    }
    build_batch(p);
    return p;
}

void problem_destroy(struct problem *p)
{
    void *const memory[] = {p->spans,      p->table,    p->slots,       p->tree,
                            p->tree_bias,  p->q,        p->k,           p->v,
                            p->sink_k,     p->sink_v,   p->k_given,     p->v_given,
                            p->cache,      p->q_memory, p->out_memory,  p->k_memory,
                            p->lse_memory, p->v_memory, p->sink_memory, p->cache_expected};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) {
        free(memory[i]);
    }
    free(p);
}
