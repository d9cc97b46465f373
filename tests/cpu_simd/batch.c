/* SPDX-License-Identifier: Apache-2.0 */
/* Batches: logits of standard deviation 4 and more, a planted needle per request and KV head, NaN
 * in all padding that must not be read. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_simd/convert.h"
#include "check.h"

#define PATTERN 0x7b

int32_t dtype_bytes(int32_t dtype)
{
    return dtype == ATTN_DTYPE_F32 ? 4 : 2;
}

static void store_value(void *memory, int32_t dtype, int64_t index, float value)
{
    if (dtype == ATTN_DTYPE_F32) {
        ((float *)memory)[index] = value;
    } else if (dtype == ATTN_DTYPE_F16) {
        ((uint16_t *)memory)[index] = f32_to_f16(value);
    } else {
        ((uint16_t *)memory)[index] = f32_to_bf16(value);
    }
}

float element_value(const struct attn_tensor *tensor, int64_t index)
{
    if (tensor->dtype.bits == 32) {
        return ((const float *)tensor->data)[index];
    }
    uint16_t bits = ((const uint16_t *)tensor->data)[index];
    return tensor->dtype.code == ATTN_CODE_BFLOAT ? bf16_to_f32(bits) : f16_to_f32(bits);
}

void *filled(size_t bytes, int byte)
{
    void *memory = malloc(bytes + 64);
    if (memory == NULL) {
        abort();
    }
    memset(memory, byte, bytes + 64);
    return memory;
}

static void tensor_make(struct attn_tensor *tensor, int32_t dtype, int32_t ndim, int64_t *shape,
                        int64_t *strides, void *data)
{
    tensor->data = data;
    tensor->device = (struct attn_device){ATTN_DEVICE_CPU, 0};
    tensor->ndim = ndim;
    tensor->dtype.code = dtype == ATTN_DTYPE_BF16 ? ATTN_CODE_BFLOAT : ATTN_CODE_FLOAT;
    tensor->dtype.bits = (uint8_t)(8 * dtype_bytes(dtype));
    tensor->dtype.lanes = 1;
    tensor->shape = shape;
    tensor->strides = strides;
}

static void make_layer(struct test_data *data)
{
    const struct test_case *test = data->test;
    struct attn_layer_desc *layer = &data->layer;
    layer->struct_size = sizeof(*layer);
    layer->name = test->name;
    layer->dtype = test->dtype;
    layer->kv_dtype = test->kv_dtype; /* AUTO is resolved before a kernel sees a layer */
    if (test->kv_dtype == ATTN_KV_AUTO) {
        layer->kv_dtype = test->dtype == ATTN_DTYPE_F32   ? ATTN_KV_F32
                          : test->dtype == ATTN_DTYPE_F16 ? ATTN_KV_F16
                                                          : ATTN_KV_BF16;
    }
    layer->num_q_heads = test->q_heads;
    layer->num_kv_heads = test->kv_heads;
    layer->head_size = test->depth;
    layer->head_size_v = test->width ? test->width : test->depth;
    layer->scale = 4.0f / sqrtf((float)test->depth);
    layer->causal = !test->not_causal;
    layer->causal_per_request = test->per_request_causal;
    layer->has_window = test->window > 0 || test->symmetric > 0;
    layer->window_left = test->window > 0 ? test->window - 1 : test->symmetric - 1;
    layer->window_right = test->symmetric > 0 ? test->symmetric - 1 : 0;
    layer->chunk_size = test->chunk;
    layer->chunk_lookback = test->lookback;
    layer->soft_cap = test->soft_cap;
    layer->alibi = test->alibi;
    layer->has_sinks = test->sinks;
    layer->prefix_lm = test->spans;
    layer->prefix_lm_window = test->span_window;
    layer->tree_mask = test->tree;
    layer->block_size = test->block_size;
    layer->k_scale_form = test->scale_form;
    layer->v_scale_form = test->scale_form;
    layer->needs_lse = 1;
    layer->batch_invariant = test->batch_invariant;
    layer->needs_block_table_row = test->table_rows;
    data->params.struct_size = sizeof(data->params);
}

static void make_lengths(struct test_data *data)
{
    const struct test_case *test = data->test;
    data->query_start[0] = test->first_row;
    data->key_start[0] = test->longer_keys ? 3 : test->first_row;
    for (int32_t r = 0; r < test->num_reqs; r++) {
        int32_t queries = random_int(test->queries[0], test->queries[1]);
        int32_t context = random_int(test->context[0], test->context[1]);
        if (test->idle && r % 3 == 1) {
            queries = 0;
            context = 0;
        }
        data->query_start[r + 1] = data->query_start[r] + queries;
        data->lengths[r] = queries + (test->block_size || test->longer_keys ? context : 0);
        data->key_start[r + 1] = data->key_start[r] + data->lengths[r];
        data->causal[r] = (uint8_t)(r % 2);
    }
    data->num_rows = data->query_start[test->num_reqs];
    data->rows_allocated = data->num_rows + 2;
    data->num_keys = data->key_start[test->num_reqs] - data->key_start[0];
}

/* q in a wider row, as a slice of a fused qkv; the rest is NaN. */
static void make_queries(struct test_data *data)
{
    const struct test_case *test = data->test;
    int64_t head = test->depth + 8;
    data->q_shape[0] = data->rows_allocated;
    data->q_shape[1] = test->q_heads;
    data->q_shape[2] = test->depth;
    data->q_strides[0] = head * test->q_heads + 16;
    data->q_strides[1] = head;
    data->q_strides[2] = 1;
    size_t elements = (size_t)(data->q_strides[0] * data->rows_allocated);
    void *memory = filled(elements * (size_t)dtype_bytes(test->dtype), 0xff);
    for (int64_t t = 0; t < data->num_rows; t++) {
        for (int64_t h = 0; h < test->q_heads; h++) {
            for (int64_t d = 0; d < test->depth; d++) {
                store_value(memory, test->dtype,
                            t * data->q_strides[0] + h * data->q_strides[1] + d, random_normal());
            }
        }
    }
    tensor_make(&data->q, test->dtype, 3, data->q_shape, data->q_strides, memory);
}

/* Keys of all requests, row i of request r at key_start[r] - key_start[0] + i. A needle resembles
 * the last query of the request's first head in the group. */
static void make_keys(struct test_data *data)
{
    const struct test_case *test = data->test;
    int64_t heads = test->kv_heads;
    int64_t width = data->layer.head_size_v;
    int64_t n = data->num_keys;
    data->keys_f32 = filled((size_t)(n * heads * test->depth) * 4, 0);
    data->values_f32 = filled((size_t)(n * heads * width) * 4, 0);
    for (int64_t i = 0; i < n * heads * test->depth; i++) {
        data->keys_f32[i] = random_normal();
    }
    for (int64_t i = 0; i < n * heads * width; i++) {
        data->values_f32[i] = random_normal();
    }
    for (int32_t r = 0; r < test->num_reqs; r++) {
        int32_t queries = data->query_start[r + 1] - data->query_start[r];
        if (queries == 0 || data->lengths[r] == 0) {
            continue;
        }
        int64_t first = data->key_start[r] - data->key_start[0];
        for (int64_t h = 0; h < heads; h++) {
            int64_t j = first + random_int(0, data->lengths[r] - 1);
            int64_t from = (data->query_start[r + 1] - 1) * data->q_strides[0] +
                           h * (test->q_heads / heads) * data->q_strides[1];
            for (int64_t d = 0; d < test->depth; d++) {
                data->keys_f32[(j * heads + h) * test->depth + d] =
                    0.6f * element_value(&data->q, from + d);
            }
        }
        if (test->nan_key) {
            int64_t last = first + data->lengths[r] - 1;
            data->values_f32[last * heads * width + 1] = NAN;
            data->keys_f32[(last * heads + heads - 1) * test->depth] = NAN;
        }
    }
}

static void make_key_tensors(struct test_data *data)
{
    const struct test_case *test = data->test;
    int64_t first = test->block_size ? 0 : data->key_start[0];
    int64_t rows = data->num_keys + first + 1;
    int64_t width = data->layer.head_size_v;
    size_t bytes = (size_t)dtype_bytes(test->dtype);
    int64_t k_row = (int64_t)test->kv_heads * test->depth;
    int64_t v_row = (int64_t)test->kv_heads * width;
    void *k = filled((size_t)(rows * k_row) * bytes, 0xff);
    void *v = filled((size_t)(rows * v_row) * bytes, 0xff);
    for (int64_t i = 0; i < data->num_keys * k_row; i++) {
        store_value(k, test->dtype, first * k_row + i, data->keys_f32[i]);
    }
    for (int64_t i = 0; i < data->num_keys * v_row; i++) {
        store_value(v, test->dtype, first * v_row + i, data->values_f32[i]);
    }
    data->k_shape[0] = data->v_shape[0] = rows;
    data->k_shape[1] = data->v_shape[1] = test->kv_heads;
    data->k_shape[2] = test->depth;
    data->v_shape[2] = width;
    tensor_make(&data->k, test->dtype, 3, data->k_shape, NULL, k);
    tensor_make(&data->v, test->dtype, 3, data->v_shape, NULL, v);
}

static void make_spans(struct test_data *data)
{
    const struct test_case *test = data->test;
    data->spans = filled((size_t)test->num_reqs * 4 * sizeof(int32_t), 0);
    int32_t count = 0;
    for (int32_t r = 0; r < test->num_reqs; r++) {
        data->span_start[r] = count;
        int32_t at = 0;
        for (int32_t i = 0; i < 2 && at + 2 < data->lengths[r]; i++, count++) {
            int32_t first = random_int(at, data->lengths[r] - 2);
            int32_t last = random_int(first, data->lengths[r] - 1);
            data->spans[2 * count] = first;
            data->spans[2 * count + 1] = last;
            at = last + 1;
        }
    }
    data->span_start[test->num_reqs] = count;
    data->batch.num_spans = count;
    data->batch.spans = data->spans;
    data->batch.span_start_loc = data->span_start;
}

/* Every row sees itself; other tokens by chance. */
static void make_tree(struct test_data *data)
{
    const struct test_case *test = data->test;
    int32_t n = test->queries[1];
    int32_t words = (n + 31) / 32;
    bool bits = test->tree == ATTN_TREE_BITS;
    int64_t row = bits ? words : n;
    int64_t request = row * n;
    data->tree = filled((size_t)(request * test->num_reqs) * 4, 0);
    for (int64_t r = 0; r < test->num_reqs; r++) {
        for (int64_t i = 0; i < n; i++) {
            for (int64_t j = 0; j < n; j++) {
                bool seen = i == j || random_int(0, 1) != 0;
                int64_t at = r * request + i * row;
                if (bits) {
                    ((uint32_t *)data->tree)[at + j / 32] |= (uint32_t)seen << (j % 32);
                } else {
                    ((float *)data->tree)[at + j] = seen ? random_normal() : -INFINITY;
                }
            }
        }
    }
    data->batch.tree = data->tree;
    data->batch.tree_stride_request = request;
    data->batch.tree_stride_row = row;
}

static void make_params(struct test_data *data)
{
    const struct test_case *test = data->test;
    data->sinks = filled((size_t)test->q_heads * 4, 0);
    data->slopes = filled((size_t)test->q_heads * 4, 0);
    data->scales = filled((size_t)test->kv_heads * 8, 0);
    for (int32_t h = 0; h < test->q_heads; h++) {
        data->sinks[h] = 4 * random_normal();
        data->slopes[h] = 0.02f + 0.3f * (float)h / (float)test->q_heads;
    }
    for (int32_t h = 0; h < 2 * test->kv_heads; h++) {
        data->scales[h] = 0.01f + 0.02f * fabsf(random_normal());
    }
    data->channel_scales = filled((size_t)(test->kv_heads * data->layer.head_size_v) * 4, 0);
    for (int32_t i = 0; i < test->kv_heads * data->layer.head_size_v; i++) {
        data->channel_scales[i] = 0.02f + 0.02f * fabsf(random_normal());
    }
    data->signs = filled((size_t)(test->depth + data->layer.head_size_v) * 4, 0);
    for (int32_t i = 0; i < test->depth + data->layer.head_size_v; i++) {
        data->signs[i] = random_int(0, 1) ? 1.0f : -1.0f;
    }
    data->quant = (struct attn_kv_quant_params){
        .ext = {.id = ATTN_EXT_KV_QUANT_PARAMS, .struct_size = sizeof(data->quant)},
        .hadamard_signs_k = data->signs,
        .hadamard_signs_v = data->signs + test->depth,
        .v_channel_scale = data->channel_scales};
    data->params.next = &data->quant.ext;
    data->params.sinks = test->sinks ? data->sinks : NULL;
    data->params.alibi_slopes = test->alibi ? data->slopes : NULL;
    if (test->scale_form == ATTN_SCALE_PER_HEAD) {
        data->params.k_scale = data->scales;
        data->params.v_scale = data->scales + test->kv_heads;
    } else if (test->scale_form == ATTN_SCALE_PER_TENSOR) {
        data->params.k_scale_host = 0.021f;
        data->params.v_scale = data->scales;
    }
}

static void make_batch(struct test_data *data)
{
    const struct test_case *test = data->test;
    struct attn_batch *batch = &data->batch;
    batch->struct_size = sizeof(*batch);
    batch->num_reqs = test->num_reqs;
    batch->num_tokens = data->rows_allocated;
    batch->num_actual_tokens = data->num_rows;
    batch->max_query_len = test->queries[1];
    batch->max_seq_len = test->queries[1] + test->context[1];
    batch->causal = -1;
    batch->query_start_loc = batch->query_start_loc_host = data->query_start;
    batch->seq_lens = batch->seq_lens_host = data->lengths;
    if (test->longer_keys) {
        batch->key_start_loc = batch->key_start_loc_host = data->key_start;
    }
    batch->causal_per_request = test->per_request_causal ? data->causal : NULL;
}

void data_make(struct test_data *data, const struct test_case *test, const struct backend *writer)
{
    memset(data, 0, sizeof(*data));
    data->test = test;
    make_layer(data);
    make_lengths(data);
    make_batch(data);
    make_queries(data);
    make_keys(data);
    make_key_tensors(data);
    make_params(data);
    if (test->spans) {
        make_spans(data);
    }
    if (test->tree) {
        make_tree(data);
    }
    if (test->block_size > 0) {
        make_cache(data);
        write_cache(data, writer);
    }
}

void data_free(struct test_data *data)
{
    void *const all[] = {data->q.data,     data->k.data,         data->v.data, data->table,
                         data->spans,      data->slots,          data->tree,   data->sinks,
                         data->slopes,     data->scales,         data->cache,  data->keys_f32,
                         data->values_f32, data->channel_scales, data->signs};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        free(all[i]);
    }
}

/* Outputs and sums of a shape with gaps, filled with a pattern. */
static void make_outputs(struct test_data *data, void **out, float **lse)
{
    const struct test_case *test = data->test;
    int64_t width = data->layer.head_size_v;
    data->out_shape[0] = data->rows_allocated;
    data->out_shape[1] = test->q_heads;
    data->out_shape[2] = width;
    data->out_strides[0] = test->q_heads * width + 24;
    data->out_strides[1] = width;
    data->out_strides[2] = 1;
    data->lse_shape[0] = test->q_heads;
    data->lse_shape[1] = data->rows_allocated;
    data->lse_strides[0] = 1; /* [T, Hq] in memory */
    data->lse_strides[1] = test->q_heads;
    size_t bytes =
        (size_t)(data->out_strides[0] * data->rows_allocated) * (size_t)dtype_bytes(test->dtype);
    *out = filled(bytes, PATTERN);
    *lse = filled((size_t)(test->q_heads * data->rows_allocated) * 4, PATTERN);
    tensor_make(&data->out, test->dtype, 3, data->out_shape, data->out_strides, *out);
    tensor_make(&data->lse, ATTN_DTYPE_F32, 2, data->lse_shape, data->lse_strides, *lse);
}

attn_status run_attend(const struct backend *backend, struct test_data *data, void **out,
                       float **lse, struct attn_error *error)
{
    const struct attn_kernels *kernels = backend->kernels;
    const struct test_case *test = data->test;
    struct attn_attend_args args = {.struct_size = sizeof(args),
                                    .instance = backend->instance,
                                    .layer = &data->layer,
                                    .params = &data->params,
                                    .batch = &data->batch,
                                    .flags = ATTN_RUN_NO_WRITE};
    struct attn_limits limits = {.struct_size = sizeof(limits),
                                 .max_num_reqs = test->num_reqs,
                                 .max_num_tokens = data->rows_allocated,
                                 .max_query_len = test->queries[1],
                                 .max_seq_len = test->queries[1] + test->context[1]};
    struct attn_plan_size size = {.struct_size = sizeof(size)};
    attn_status status = ATTN_OK;
    void *host = NULL;
    void *workspace = NULL;
    make_outputs(data, out, lse);
    if (test->block_size > 0) {
        args.k_cache = &data->k_view;
        args.v_cache = &data->v_view;
    }
    if (kernels->prepare != NULL) {
        status = kernels->prepare(backend->instance, &data->layer, &data->params,
                                  ATTN_PHASE_PREFILL, &args.state, error);
    }
    if (status == ATTN_OK && kernels->plan_size != NULL) {
        status = kernels->plan_size(backend->instance, args.state, &limits, &size, error);
    }
    if (status == ATTN_OK && kernels->plan != NULL) {
        host = aligned_alloc(64, (size.host_bytes + 63) / 64 * 64 + 64);
        workspace = aligned_alloc(256, (size.device_bytes + 255) / 256 * 256 + 256);
        if (host == NULL || workspace == NULL) {
            abort();
        }
        memset(workspace, 0xff, size.device_bytes + 64); /* NaN: nothing may be taken for zero */
        memset(host, PATTERN, size.host_bytes + 64);
        args.plan_host = host;
        args.workspace = workspace;
        status = kernels->plan(&args, ATTN_PLAN_EAGER, error);
    }
    args.q = &data->q;
    args.out = &data->out;
    args.lse = &data->lse;
    args.k = test->block_size > 0 ? NULL : &data->k;
    args.v = test->block_size > 0 ? NULL : &data->v;
    if (status == ATTN_OK) {
        status = kernels->attend(&args, error);
    }
    if (status == ATTN_OK && host != NULL) { /* neither memory was overrun */
        const unsigned char *end = (const unsigned char *)host + size.host_bytes;
        const unsigned char *last = (const unsigned char *)workspace + size.device_bytes;
        for (int i = 0; i < 64 && status == ATTN_OK; i++) {
            status = end[i] == PATTERN && last[i] == 0xff ? ATTN_OK : ATTN_ERROR_INTERNAL;
        }
    }
    if (kernels->release != NULL) {
        kernels->release(backend->instance, args.state);
    }
    free(host);
    free(workspace);
    return status;
}
