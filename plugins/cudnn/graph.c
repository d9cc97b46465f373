/* SPDX-License-Identifier: Apache-2.0 */
/* Sources: NVIDIA cuDNN documentation, "Attention" and "Graph Patterns"; the operations of
 * cudnn-frontend's composite SDPA node, in its order, by which cuDNN recognizes the pattern. */
#include "cudnn/graph.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define MAX_OPERATIONS 48
#define MAX_ENGINES 16
#define ALIGNMENT 16 /* bytes, of all tensors */

typedef cudnnBackendDescriptor_t descriptor;

/* Making a graph. The first call that fails ends it: `failed` names the object. */
struct builder {
    const struct cudnn_library *cudnn;
    cudnnHandle_t handle; /* whose device it is for; NULL: `device` says */
    descriptor device;
    struct graph_plan *plan;
    descriptor operations[MAX_OPERATIONS];
    int32_t num_operations;
    int64_t next_id; /* for the next tensor between operations */
    cudnnStatus_t status;
    const char *failed;
};

static int check(struct builder *b, cudnnStatus_t status, const char *what)
{
    if (b->status == CUDNN_STATUS_SUCCESS && status != CUDNN_STATUS_SUCCESS) {
        b->status = status;
        b->failed = what;
    }
    return b->status == CUDNN_STATUS_SUCCESS;
}

static descriptor make(struct builder *b, cudnnBackendDescriptorType_t type, const char *what)
{
    descriptor made = NULL;
    int full = b->plan->num_made == GRAPH_DESCRIPTORS;
    if (check(b, full ? CUDNN_STATUS_INTERNAL_ERROR : CUDNN_STATUS_SUCCESS, what) &&
        check(b, b->cudnn->BackendCreateDescriptor(type, &made), what)) {
        b->plan->made[b->plan->num_made++] = made;
    }
    return made;
}

static void set(struct builder *b, descriptor d, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t count, const void *values)
{
    if (b->status == CUDNN_STATUS_SUCCESS) {
        check(b, b->cudnn->BackendSetAttribute(d, name, type, count, values), "an attribute");
    }
}

static void set_descriptor(struct builder *b, descriptor d, cudnnBackendAttributeName_t name,
                           descriptor value)
{
    if (value != NULL) {
        set(b, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
    }
}

static descriptor finish(struct builder *b, descriptor d, const char *what)
{
    if (b->status == CUDNN_STATUS_SUCCESS) {
        check(b, b->cudnn->BackendFinalize(d), what);
    }
    return d;
}

static void add_operation(struct builder *b, descriptor operation, const char *what)
{
    finish(b, operation, what);
    if (check(b,
              b->num_operations == MAX_OPERATIONS ? CUDNN_STATUS_INTERNAL_ERROR
                                                  : CUDNN_STATUS_SUCCESS,
              what)) {
        b->operations[b->num_operations++] = operation;
    }
}

enum place { IN_MEMORY, ON_HOST, VIRTUAL };

static descriptor make_tensor(struct builder *b, int64_t id, cudnnDataType_t dtype,
                              const int64_t dims[4], const int64_t strides[4], enum place place,
                              descriptor ragged)
{
    const int64_t alignment = ALIGNMENT;
    const bool yes = true;
    descriptor t = make(b, CUDNN_BACKEND_TENSOR_DESCRIPTOR, "a tensor");
    set(b, t, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &dtype);
    set(b, t, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims);
    set(b, t, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides);
    set(b, t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
    set(b, t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    if (place != IN_MEMORY) {
        set(b, t, place == VIRTUAL ? CUDNN_ATTR_TENSOR_IS_VIRTUAL : CUDNN_ATTR_TENSOR_IS_BY_VALUE,
            CUDNN_TYPE_BOOLEAN, 1, &yes);
    }
    set_descriptor(b, t, CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, ragged);
    return finish(b, t, "a tensor");
}

/* One number for each of n: [n, 1, 1, 1]. */
static descriptor make_array(struct builder *b, int64_t id, cudnnDataType_t dtype, int64_t n,
                             enum place place)
{
    const int64_t dims[4] = {n, 1, 1, 1}, ones[4] = {1, 1, 1, 1};
    return make_tensor(b, id, dtype, dims, ones, place, NULL);
}

/* A tensor between operations: [B, Hq, Sq, width]. */
static descriptor make_between(struct builder *b, cudnnDataType_t dtype, int64_t width)
{
    const struct graph_shape *s = &b->plan->shape;
    const int64_t dims[4] = {s->num_reqs, s->num_q_heads, s->query_len, width};
    const int64_t strides[4] = {dims[1] * dims[2] * width, dims[2] * width, width, 1};
    return make_tensor(b, b->next_id++, dtype, dims, strides, VIRTUAL, NULL);
}

static int64_t keys_of(const struct graph_shape *s)
{
    return s->columns * s->block_size;
}

/* Adds y = mode(x, with, mask) and returns y, which has `width` columns. */
static descriptor add_pointwise_to(struct builder *b, cudnnPointwiseMode_t mode,
                                   cudnnDataType_t math, descriptor x, descriptor with,
                                   descriptor mask, descriptor y, int64_t axis)
{
    descriptor how = make(b, CUDNN_BACKEND_POINTWISE_DESCRIPTOR, "a pointwise operation");
    set(b, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set(b, how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &math);
    if (mode == CUDNN_POINTWISE_GEN_INDEX) {
        set(b, how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    }
    finish(b, how, "a pointwise operation");
    descriptor op = make(b, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, "a pointwise operation");
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, with);
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, mask);
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add_operation(b, op, "a pointwise operation");
    return y;
}

/* The same on scores, [B, Hq, Sq, keys], with a result of its own. */
static descriptor add_pointwise(struct builder *b, cudnnPointwiseMode_t mode, cudnnDataType_t math,
                                cudnnDataType_t dtype, descriptor x, descriptor with)
{
    descriptor y = make_between(b, dtype, keys_of(&b->plan->shape));
    return add_pointwise_to(b, mode, math, x, with, NULL, y, 0);
}

/* The row (axis 2) or column (axis 3) of each score. */
static descriptor add_index(struct builder *b, descriptor scores, int64_t axis,
                            cudnnDataType_t math)
{
    descriptor y = make_between(b, CUDNN_DATA_INT32, keys_of(&b->plan->shape));
    return add_pointwise_to(b, CUDNN_POINTWISE_GEN_INDEX, math, scores, NULL, NULL, y, axis);
}

/* Scores where the mask is set, elsewhere -inf, whose tensor is `id`. */
static descriptor add_select(struct builder *b, descriptor scores, descriptor mask, int64_t id)
{
    descriptor hidden = make_array(b, id, CUDNN_DATA_FLOAT, 1, ON_HOST);
    descriptor y = make_between(b, CUDNN_DATA_FLOAT, keys_of(&b->plan->shape));
    return add_pointwise_to(b, CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, scores, hidden,
                            mask, y, 0);
}

static descriptor add_reduction(struct builder *b, cudnnReduceTensorOp_t operation, descriptor x)
{
    const cudnnDataType_t math = CUDNN_DATA_FLOAT;
    descriptor y = make_between(b, CUDNN_DATA_FLOAT, 1);
    descriptor how = make(b, CUDNN_BACKEND_REDUCTION_DESCRIPTOR, "a reduction");
    set(b, how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &math);
    set(b, how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &operation);
    finish(b, how, "a reduction");
    descriptor op = make(b, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, "a reduction");
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    add_operation(b, op, "a reduction");
    return y;
}

/* c = a b over the lengths of each request: rows of a, then columns of b or of a. */
static void add_matmul(struct builder *b, descriptor a, descriptor with, descriptor c,
                       descriptor rows, descriptor columns, cudnnBackendAttributeName_t of_columns)
{
    const cudnnDataType_t math = CUDNN_DATA_FLOAT;
    descriptor how = make(b, CUDNN_BACKEND_MATMUL_DESCRIPTOR, "a product");
    set(b, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &math);
    finish(b, how, "a product");
    descriptor op = make(b, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, "a product");
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, with);
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, rows);
    set_descriptor(b, op, of_columns, columns);
    add_operation(b, op, "a product");
}

/* Rows of a tensor [T, heads, size] as [B, heads, rows, size]; `start` has each request's first
 * element. */
static descriptor make_rows_of(struct builder *b, int64_t id, int64_t start_id,
                               cudnnDataType_t dtype, const int64_t dims[4], bool turned)
{
    const int64_t heads = dims[1], rows = dims[2], size = dims[3];
    const int64_t turned_dims[4] = {dims[0], heads, size, rows};
    const int64_t strides[4] = {rows * heads * size, size, heads * size, 1};
    const int64_t turned_strides[4] = {strides[0], size, 1, heads * size};
    descriptor start = make_array(b, start_id, CUDNN_DATA_INT64, dims[0] + 1, IN_MEMORY);
    return make_tensor(b, id, dtype, turned ? turned_dims : dims, turned ? turned_strides : strides,
                       IN_MEMORY, start);
}

/* The same of queries. */
static descriptor make_rows(struct builder *b, int64_t id, int64_t start_id, cudnnDataType_t dtype,
                            int64_t size)
{
    const struct graph_shape *s = &b->plan->shape;
    const int64_t dims[4] = {s->num_reqs, s->num_q_heads, s->query_len, size};
    return make_rows_of(b, id, start_id, dtype, dims, false);
}

/* A request's keys, [B, Hk, D, keys], or values, [B, Hk, keys, Dv], read through the table. */
static descriptor add_pages(struct builder *b, int value, descriptor table, descriptor key_lens)
{
    const struct graph_shape *s = &b->plan->shape;
    const struct graph_cache *c = value ? &s->v : &s->k;
    const int64_t size = value ? s->head_size_v : s->head_size, keys = keys_of(s);
    const int64_t dims[4] = {c->num_blocks, s->num_kv_heads, s->block_size, size};
    const int64_t strides[4] = {c->stride_block, c->stride_head, c->stride_slot, 1};
    const int64_t rows[4] = {s->num_reqs, s->num_kv_heads, keys, size};
    const int64_t row_strides[4] = {size * keys * s->num_kv_heads, size * keys, size, 1};
    const int64_t turned[4] = {rows[0], rows[1], size, keys};
    const int64_t turned_strides[4] = {row_strides[0], row_strides[1], 1, size};
    if (s->has & GRAPH_HAS_ROWS) {
        return make_rows_of(b, value ? GRAPH_V : GRAPH_K, value ? GRAPH_V_START : GRAPH_K_START,
                            s->dtype, rows, !value);
    }
    descriptor container =
        make_tensor(b, value ? GRAPH_V : GRAPH_K, s->dtype, dims, strides, IN_MEMORY, NULL);
    descriptor y = make_tensor(b, b->next_id++, s->dtype, value ? rows : turned,
                               value ? row_strides : turned_strides, VIRTUAL, NULL);
    descriptor op = make(b, CUDNN_BACKEND_OPERATION_PAGED_CACHE_LOAD_DESCRIPTOR, "paged keys");
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_PAGED_CACHE_LOAD_CONTAINER_DESC, container);
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_PAGED_CACHE_LOAD_PAGE_TABLE_DESC, table);
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_PAGED_CACHE_LOAD_SEQUENCE_DESC, key_lens);
    set_descriptor(b, op, CUDNN_ATTR_OPERATION_PAGED_CACHE_LOAD_YDESC, y);
    add_operation(b, op, "paged keys");
    return y;
}

/* Hides keys past a request's length, and rows past its queries. */
static descriptor add_padding_mask(struct builder *b, descriptor scores, descriptor query_lens,
                                   descriptor key_lens)
{
    const cudnnDataType_t boolean = CUDNN_DATA_BOOLEAN;
    descriptor row = add_index(b, scores, 2, CUDNN_DATA_INT32);
    descriptor column = add_index(b, scores, 3, CUDNN_DATA_INT32);
    row = add_pointwise(b, CUDNN_POINTWISE_CMP_LT, boolean, boolean, row, query_lens);
    column = add_pointwise(b, CUDNN_POINTWISE_CMP_LT, boolean, boolean, column, key_lens);
    row = add_pointwise(b, CUDNN_POINTWISE_LOGICAL_AND, boolean, boolean, row, column);
    return add_select(b, scores, row, GRAPH_HIDDEN_PADDING);
}

/* Hides keys after a query's own: row + key_len - query_len >= column. */
static descriptor add_causal_mask(struct builder *b, descriptor scores, descriptor query_lens,
                                  descriptor key_lens)
{
    const cudnnDataType_t integer = CUDNN_DATA_INT32, boolean = CUDNN_DATA_BOOLEAN;
    descriptor row = add_index(b, scores, 2, CUDNN_DATA_FLOAT);
    descriptor column = add_index(b, scores, 3, CUDNN_DATA_FLOAT);
    row = add_pointwise(b, CUDNN_POINTWISE_ADD, integer, integer, row, key_lens);
    row = add_pointwise(b, CUDNN_POINTWISE_SUB, integer, integer, row, query_lens);
    if (b->plan->shape.right > 0) {
        descriptor right = make_array(b, GRAPH_RIGHT, integer, 1, ON_HOST);
        row = add_pointwise(b, CUDNN_POINTWISE_ADD, integer, integer, row, right);
    }
    row = add_pointwise(b, CUDNN_POINTWISE_CMP_GE, boolean, boolean, row, column);
    return add_select(b, scores, row, GRAPH_HIDDEN_CAUSAL);
}

/* Hides keys before a query's window: column + window - key_len + query_len > row. */
static descriptor add_window_mask(struct builder *b, descriptor scores, descriptor query_lens,
                                  descriptor key_lens)
{
    const cudnnDataType_t integer = CUDNN_DATA_INT32, boolean = CUDNN_DATA_BOOLEAN;
    descriptor window = make_array(b, GRAPH_WINDOW, CUDNN_DATA_INT32, 1, ON_HOST);
    descriptor row = add_index(b, scores, 2, CUDNN_DATA_FLOAT);
    descriptor column = add_index(b, scores, 3, CUDNN_DATA_FLOAT);
    column = add_pointwise(b, CUDNN_POINTWISE_ADD, integer, integer, column, window);
    column = add_pointwise(b, CUDNN_POINTWISE_SUB, integer, integer, column, key_lens);
    column = add_pointwise(b, CUDNN_POINTWISE_ADD, integer, integer, column, query_lens);
    column = add_pointwise(b, CUDNN_POINTWISE_CMP_GT, boolean, boolean, column, row);
    return add_select(b, scores, column, GRAPH_HIDDEN_WINDOW);
}

/* tanh(scores / cap) cap */
static descriptor add_soft_cap(struct builder *b, descriptor scores)
{
    const cudnnDataType_t number = CUDNN_DATA_FLOAT;
    descriptor cap = make_array(b, GRAPH_SOFT_CAP, number, 1, ON_HOST);
    scores = add_pointwise(b, CUDNN_POINTWISE_DIV, number, number, scores, cap);
    scores = add_pointwise(b, CUDNN_POINTWISE_TANH_FWD, number, number, scores, NULL);
    return add_pointwise(b, CUDNN_POINTWISE_MUL, number, number, scores, cap);
}

/* One number a row: mode(x, with). */
static descriptor add_to_rows(struct builder *b, cudnnPointwiseMode_t mode, descriptor x,
                              descriptor with)
{
    descriptor y = make_between(b, CUDNN_DATA_FLOAT, 1);
    return add_pointwise_to(b, mode, CUDNN_DATA_FLOAT, x, with, NULL, y, 0);
}

static void add_attention(struct builder *b)
{
    const struct graph_shape *s = &b->plan->shape;
    const cudnnDataType_t number = CUDNN_DATA_FLOAT;
    const int64_t dims[4] = {s->num_reqs, 1, s->columns, 1};
    const int64_t strides[4] = {s->columns, s->columns, 1, 1};
    descriptor query_lens =
        make_array(b, GRAPH_QUERY_LENS, CUDNN_DATA_INT32, s->num_reqs, IN_MEMORY);
    descriptor key_lens = make_array(b, GRAPH_KEY_LENS, CUDNN_DATA_INT32, s->num_reqs, IN_MEMORY);
    descriptor table =
        make_tensor(b, GRAPH_TABLE, CUDNN_DATA_INT32, dims, strides, IN_MEMORY, NULL);
    descriptor scale = make_array(b, GRAPH_SCALE, number, 1, ON_HOST);
    descriptor q = make_rows(b, GRAPH_Q, GRAPH_Q_START, s->dtype, s->head_size);
    descriptor out = make_rows(b, GRAPH_OUT, GRAPH_OUT_START, s->dtype, s->head_size_v);
    descriptor lse = make_rows(b, GRAPH_LSE, GRAPH_LSE_START, number, 1);
    descriptor k = add_pages(b, 0, table, key_lens);
    descriptor scores = make_between(b, number, keys_of(s));
    add_matmul(b, q, k, scores, query_lens, key_lens,
               CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC);
    scores = add_pointwise(b, CUDNN_POINTWISE_MUL, number, number, scores, scale);
    scores = s->has & GRAPH_HAS_SOFT_CAP ? add_soft_cap(b, scores) : scores;
    scores = add_padding_mask(b, scores, query_lens, key_lens);
    if (s->right >= 0) {
        scores = add_causal_mask(b, scores, query_lens, key_lens);
    }
    if (s->window > 0) {
        scores = add_window_mask(b, scores, query_lens, key_lens);
    }
    descriptor row_max = add_reduction(b, CUDNN_REDUCE_TENSOR_MAX, scores), sinks = NULL;
    if (s->has & GRAPH_HAS_SINKS) {
        const int64_t heads[4] = {1, s->num_q_heads, 1, 1}, ones[4] = {s->num_q_heads, 1, 1, 1};
        sinks = make_tensor(b, GRAPH_SINKS, number, heads, ones, IN_MEMORY, NULL);
        row_max = add_to_rows(b, CUDNN_POINTWISE_MAX, row_max, sinks);
    }
    descriptor p = add_pointwise(b, CUDNN_POINTWISE_SUB, number, number, scores, row_max);
    p = add_pointwise(b, CUDNN_POINTWISE_EXP, number, number, p, NULL);
    if (s->has & GRAPH_HAS_SINKS) {
        sinks = add_to_rows(b, CUDNN_POINTWISE_SUB, sinks, row_max);
        sinks = add_to_rows(b, CUDNN_POINTWISE_EXP, sinks, NULL);
    }
    descriptor row_sum = add_reduction(b, CUDNN_REDUCE_TENSOR_ADD, p);
    row_sum =
        s->has & GRAPH_HAS_SINKS ? add_to_rows(b, CUDNN_POINTWISE_ADD, row_sum, sinks) : row_sum;
    descriptor log = make_between(b, number, 1);
    add_pointwise_to(b, CUDNN_POINTWISE_LOG, number, row_sum, NULL, NULL, log, 0);
    add_pointwise_to(b, CUDNN_POINTWISE_ADD, number, row_max, log, NULL, lse, 0);
    p = add_pointwise(b, CUDNN_POINTWISE_DIV, number, s->dtype, p, row_sum);
    descriptor v = add_pages(b, 1, table, key_lens);
    add_matmul(b, p, v, out, query_lens, key_lens,
               CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC);
}

/* The engines that a mode of the heuristics names; returns how many. */
static int64_t find_engines(struct builder *b, descriptor graph, cudnnBackendHeurMode_t mode,
                            descriptor engines[MAX_ENGINES])
{
    int64_t count = 0;
    b->status = CUDNN_STATUS_SUCCESS; /* the mode before may have failed */
    descriptor heuristics = make(b, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, "heuristics");
    set_descriptor(b, heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
    set_descriptor(b, heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, b->device);
    set(b, heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    finish(b, heuristics, "heuristics");
    for (int32_t i = 0; i < MAX_ENGINES; i++) {
        engines[i] = make(b, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, "an engine");
    }
    if (b->status == CUDNN_STATUS_SUCCESS) {
        check(b,
              b->cudnn->BackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                            CUDNN_TYPE_BACKEND_DESCRIPTOR, MAX_ENGINES, &count,
                                            engines),
              "heuristics");
    }
    check(b, count == 0 ? CUDNN_STATUS_NOT_SUPPORTED : CUDNN_STATUS_SUCCESS, "an engine");
    count = count < MAX_ENGINES ? count : MAX_ENGINES;
    return b->status == CUDNN_STATUS_SUCCESS ? count : 0;
}

/* Tries the engines that a mode of the heuristics names, in its order. */
static int choose_engine(struct builder *b, descriptor graph, cudnnBackendHeurMode_t mode)
{
    descriptor engines[MAX_ENGINES];
    const int64_t count = find_engines(b, graph, mode, engines);
    for (int64_t i = 0; i < count; i++) {
        b->status = CUDNN_STATUS_SUCCESS;
        descriptor plan = make(b, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, "a plan");
        set(b, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &b->handle);
        set_descriptor(b, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, engines[i]);
        finish(b, plan, "a plan");
        if (b->status == CUDNN_STATUS_SUCCESS) {
            b->plan->plan = plan;
            return 1;
        }
    }
    return 0;
}

static descriptor make_graph(struct builder *b)
{
    add_attention(b);
    descriptor graph = make(b, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, "a graph");
    set(b, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, b->num_operations,
        b->operations);
    if (b->handle != NULL) {
        set(b, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &b->handle);
    }
    return finish(b, graph, "a graph");
}

static void make_plan(struct builder *b)
{
    int64_t bytes = 0, count = 0;
    descriptor graph = make_graph(b);
    if (b->status != CUDNN_STATUS_SUCCESS || !(choose_engine(b, graph, CUDNN_HEUR_MODE_A) ||
                                               choose_engine(b, graph, CUDNN_HEUR_MODE_FALLBACK))) {
        return;
    }
    check(b,
          b->cudnn->BackendGetAttribute(b->plan->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                        CUDNN_TYPE_INT64, 1, &count, &bytes),
          "a plan");
    b->plan->workspace_bytes = bytes;
}

static void write_cause(struct builder *b, char cause[GRAPH_CAUSE_BYTES])
{
    char said[256] = "";
    b->cudnn->GetLastErrorString(said, sizeof said);
    snprintf(cause, GRAPH_CAUSE_BYTES, "%s: %s (%s)", b->failed,
             b->cudnn->GetErrorString(b->status), said);
}

int graph_has_engine(const struct cudnn_library *library, const char *device,
                     const struct graph_shape *shape, char cause[GRAPH_CAUSE_BYTES])
{
    struct graph_plan plan = {.shape = *shape};
    struct builder b = {.cudnn = library, .plan = &plan, .next_id = GRAPH_TENSORS, .failed = ""};
    descriptor engines[MAX_ENGINES];
    int answer = 1;
    b.device = make(&b, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, "a device");
    set(&b, b.device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
        (int64_t)strlen(device), device);
    finish(&b, b.device, "a device");
    if (b.status == CUDNN_STATUS_SUCCESS) { /* else this version describes devices otherwise */
        descriptor graph = make_graph(&b);
        answer = b.status == CUDNN_STATUS_SUCCESS &&
                 (find_engines(&b, graph, CUDNN_HEUR_MODE_A, engines) > 0 ||
                  find_engines(&b, graph, CUDNN_HEUR_MODE_FALLBACK, engines) > 0);
    }
    if (!answer) {
        write_cause(&b, cause);
    }
    graph_free(library, &plan);
    return answer;
}

int graph_make(const struct cudnn_library *library, cudnnHandle_t handle,
               const struct graph_shape *shape, struct graph_plan *plan,
               char cause[GRAPH_CAUSE_BYTES])
{
    struct builder b = {
        .cudnn = library, .handle = handle, .plan = plan, .next_id = GRAPH_TENSORS, .failed = ""};
    *plan = (struct graph_plan){.shape = *shape};
    make_plan(&b);
    if (b.status == CUDNN_STATUS_SUCCESS) {
        return 1;
    }
    write_cause(&b, cause);
    graph_free(library, plan);
    return 0;
}

void graph_free(const struct cudnn_library *library, struct graph_plan *plan)
{
    while (plan->num_made > 0) {
        library->BackendDestroyDescriptor(plan->made[--plan->num_made]);
    }
    plan->plan = NULL;
}

/* Whether a shape's graph has the tensor. */
static bool has_tensor(const struct graph_shape *s, int64_t id)
{
    switch (id) {
    case GRAPH_TABLE:
        return !(s->has & GRAPH_HAS_ROWS);
    case GRAPH_K_START:
    case GRAPH_V_START:
        return (s->has & GRAPH_HAS_ROWS) != 0;
    case GRAPH_HIDDEN_CAUSAL:
        return s->right >= 0;
    case GRAPH_RIGHT:
        return s->right > 0;
    case GRAPH_WINDOW:
    case GRAPH_HIDDEN_WINDOW:
        return s->window > 0;
    case GRAPH_SOFT_CAP:
        return (s->has & GRAPH_HAS_SOFT_CAP) != 0;
    case GRAPH_SINKS:
        return (s->has & GRAPH_HAS_SINKS) != 0;
    default:
        return true;
    }
}

cudnnStatus_t graph_execute(const struct cudnn_library *library, cudnnHandle_t handle,
                            const struct graph_plan *plan, void *const data[GRAPH_TENSORS],
                            void *workspace)
{
    int64_t ids[GRAPH_TENSORS], count = 0;
    void *addresses[GRAPH_TENSORS];
    descriptor pack = NULL;
    for (int64_t i = 0; i < GRAPH_TENSORS; i++) {
        if (has_tensor(&plan->shape, i)) {
            ids[count] = i;
            addresses[count++] = data[i];
        }
    }
    cudnnStatus_t s =
        library->BackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack);
    s = s ? s
          : library->BackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64,
                                         count, ids);
    s = s ? s
          : library->BackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
                                         CUDNN_TYPE_VOID_PTR, count, addresses);
    s = s ? s
          : library->BackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
                                         CUDNN_TYPE_VOID_PTR, 1, &workspace);
    s = s ? s : library->BackendFinalize(pack);
    s = s ? s : library->BackendExecute(handle, plan->plan, pack);
    if (pack != NULL) {
        library->BackendDestroyDescriptor(pack);
    }
    return s;
}
