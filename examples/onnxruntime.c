/* SPDX-License-Identifier: Apache-2.0 */
/* A custom operator of ONNX Runtime: libattn.GroupQueryAttention, on CPUs, in float32, for one
 * request whose keys a paged cache keeps from step to step.
 *
 * Attributes: num_heads, kv_num_heads, local_window_size (-1: none; counts a query's own position).
 * Inputs: query [1, T, num_heads D], key and value [1, T, kv_num_heads D], past int64 [1]: the
 * tokens of earlier steps that are kept. Output: [1, T, num_heads D].
 *
 *     cc -shared -fPIC -I abi -I /usr/include/onnxruntime examples/onnxruntime.c -ldl -lm -o gqa.so
 *
 * and in Python SessionOptions().register_custom_ops_library("gqa.so"). The header is in Debian
 * 13's libonnxruntime-dev. libattn.so.1 is found by the loader or named by ATTN_LIBRARY. */
#include <attn/api.h>
#include <dlfcn.h>
#include <math.h>
#include <onnxruntime_c_api.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 16, FIRST_BLOCKS = 4, INPUTS = 4 };

static const OrtApi *ort;
static const struct attn_api *api;
static attn_runtime *runtime;

/* One node: its layer, cache and plan. Calls of one session that overlap wait for each other. */
struct node {
    pthread_mutex_t lock;
    int64_t heads, kv_heads, head_size, window;
    int64_t length; /* tokens that the cache has */
    attn_assignment *assignment;
    attn_model *model;
    attn_plan *plan;
    char *cache, *workspace;
    int32_t *block_table;
    int64_t blocks, tokens; /* what the cache has room for; the longest step of the plan */
    struct attn_error error;
};

static OrtStatus *failed(const struct node *node, const char *what)
{
    char text[2048];
    snprintf(text, sizeof text, "libattn: %s: %s: %s", what, node->error.field,
             node->error.message);
    return ort->CreateStatus(ORT_FAIL, text);
}

static OrtStatus *refused(const char *format, ...)
{
    char text[512] = "libattn: ";
    va_list values;
    va_start(values, format);
    vsnprintf(text + strlen(text), sizeof text - strlen(text), format, values);
    va_end(values);
    return ort->CreateStatus(ORT_INVALID_ARGUMENT, text);
}

static attn_status no_memory(struct node *node)
{
    snprintf(node->error.field, sizeof node->error.field, "memory");
    snprintf(node->error.message, sizeof node->error.message, "there is no more");
    return ATTN_ERROR_OUT_OF_MEMORY;
}

static void *take(int64_t bytes)
{
    return aligned_alloc(256, (size_t)((bytes + 255) / 256 * 256));
}

static void drop_plan(struct node *node)
{
    api->plan_destroy(node->plan);
    free(node->workspace);
    node->plan = NULL, node->workspace = NULL;
}

static attn_status choose(struct node *node)
{
    const struct attn_layer_desc layer = {
        .struct_size = sizeof layer,
        .name = "attention",
        .kind = ATTN_LAYER_DECODER,
        .dtype = ATTN_DTYPE_F32,
        .num_q_heads = (int32_t)node->heads,
        .num_kv_heads = (int32_t)node->kv_heads,
        .head_size = (int32_t)node->head_size,
        .scale = 1 / sqrtf((float)node->head_size),
        .causal = ATTN_CAUSAL_YES,
        .block_size = BLOCK,
        .has_window = node->window > 0,
        .window_left = node->window > 0 ? (int32_t)node->window - 1 : 0,
    };
    const struct attn_layer_desc *layers[] = {&layer};
    api->assignment_destroy(node->assignment); /* a call before failed */
    node->assignment = NULL;
    attn_status status = api->select(runtime, NULL, layers, 1, &node->assignment, &node->error);
    return status ? status
                  : api->model_create(runtime, node->assignment, NULL, &node->model, &node->error);
}

/* Makes room for `length` keys and steps of `tokens`. Blocks keep their numbers and rows. */
static attn_status grow(struct node *node, int64_t length, int64_t tokens)
{
    attn_layer *layer = api->model_layer(node->model, 0);
    int64_t blocks = node->blocks > 0 ? node->blocks : FIRST_BLOCKS;
    while (blocks * BLOCK < length) {
        blocks *= 2;
    }
    if (node->plan != NULL && blocks == node->blocks && tokens <= node->tokens) {
        return ATTN_OK;
    }
    drop_plan(node); /* it holds the cache */
    attn_status status = ATTN_OK;
    if (blocks > node->blocks) { /* a block is its keys, then its values: [2, BLOCK, heads, D] */
        int64_t slot = node->kv_heads * node->head_size * (int64_t)sizeof(float);
        struct attn_kv_view k = {.struct_size = sizeof k,
                                 .num_blocks = blocks,
                                 .block_size = BLOCK,
                                 .num_heads = (int32_t)node->kv_heads,
                                 .head_size = (int32_t)node->head_size,
                                 .stride_block = 2 * BLOCK * slot,
                                 .stride_slot = slot,
                                 .stride_head = node->head_size * (int64_t)sizeof(float)};
        char *larger = take(blocks * k.stride_block);
        int32_t *table = malloc((size_t)blocks * sizeof *table);
        if (larger == NULL || table == NULL) {
            free(larger), free(table);
            return no_memory(node);
        }
        if (node->blocks > 0) {
            memcpy(larger, node->cache, (size_t)(node->blocks * k.stride_block));
        }
        for (int64_t i = 0; i < blocks; i++) {
            table[i] = (int32_t)i;
        }
        k.data = larger;
        struct attn_kv_view v = k;
        v.data = larger + BLOCK * slot;
        const struct attn_kv_view *views[] = {&k, &v};
        status = api->layer_bind_caches(layer, views, 2, &node->error);
        if (status != ATTN_OK) {
            free(larger), free(table);
            return status;
        }
        free(node->cache), free(node->block_table);
        node->cache = larger, node->block_table = table, node->blocks = blocks;
    }
    node->tokens = tokens > node->tokens ? tokens : node->tokens;
    const struct attn_limits limits = {.struct_size = sizeof limits,
                                       .max_num_reqs = 1,
                                       .max_num_tokens = (int32_t)node->tokens,
                                       .max_seq_len = (int32_t)(blocks * BLOCK)};
    const struct attn_plan_options options = {.struct_size = sizeof options, .limits = &limits};
    struct attn_workspace workspace = {.struct_size = sizeof workspace};
    int32_t group = api->layer_group(layer, ATTN_GROUP_BLOCK_TABLE, 0);
    status = api->plan_create(node->model, group, &options, &node->plan, &node->error);
    status = status ? status : api->plan_workspace(node->plan, &workspace, &node->error);
    if (status == ATTN_OK) {
        workspace.memory = node->workspace = take((int64_t)workspace.bytes + 1);
        status = node->workspace == NULL
                     ? no_memory(node)
                     : api->plan_bind_workspace(node->plan, &workspace, &node->error);
    }
    if (status != ATTN_OK) {
        drop_plan(node); /* the next call makes another */
    }
    return status;
}

/* Writes the step's keys after the `past` ones and attends. */
static attn_status step(struct node *node, int64_t past, int64_t tokens, float *const rows[4])
{
    int64_t of_queries[] = {tokens, node->heads, node->head_size},
            of_keys[] = {tokens, node->kv_heads, node->head_size};
    struct attn_tensor tensors[4]; /* q, k, v, out */
    for (int i = 0; i < 4; i++) {
        tensors[i] = (struct attn_tensor){rows[i],
                                          {ATTN_DEVICE_CPU, 0},
                                          3,
                                          {ATTN_CODE_FLOAT, 32, 1},
                                          i == 0 || i == 3 ? of_queries : of_keys,
                                          NULL,
                                          0};
    }
    const struct attn_step_io io = {.struct_size = sizeof io,
                                    .q = &tensors[0],
                                    .k = &tensors[1],
                                    .v = &tensors[2],
                                    .out = &tensors[3]};
    const int32_t starts[] = {0, (int32_t)tokens}, lengths[] = {(int32_t)(past + tokens)};
    int64_t *slots = malloc((size_t)tokens * sizeof *slots);
    if (slots == NULL) {
        return no_memory(node);
    }
    for (int64_t t = 0; t < tokens; t++) {
        slots[t] = past + t; /* the block table is 0, 1, 2 ... */
    }
    const struct attn_batch batch = {.struct_size = sizeof batch,
                                     .num_reqs = 1,
                                     .num_tokens = starts[1],
                                     .num_actual_tokens = starts[1],
                                     .query_start_loc = starts,
                                     .query_start_loc_host = starts,
                                     .seq_lens = lengths,
                                     .seq_lens_host = lengths,
                                     .block_table = node->block_table,
                                     .block_table_stride = node->blocks,
                                     .slot_mapping = slots,
                                     .num_slots = tokens};
    attn_status status = api->plan_batch(node->plan, &batch, NULL, &node->error);
    status =
        status ? status : api->run(node->plan, api->model_layer(node->model, 0), &io, &node->error);
    free(slots);
    return status;
}

static OrtStatusPtr ORT_API_CALL create(const struct OrtCustomOp *op, const OrtApi *of,
                                        const OrtKernelInfo *info, void **kernel)
{
    struct node *node = calloc(1, sizeof *node);
    (void)op;
    if (node == NULL) {
        return of->CreateStatus(ORT_FAIL, "libattn: no memory for a node");
    }
    pthread_mutex_init(&node->lock, NULL);
    node->error = (struct attn_error)ATTN_ERROR_INIT;
    OrtStatus *status = of->KernelInfoGetAttribute_int64(info, "num_heads", &node->heads);
    if (status == NULL) {
        status = of->KernelInfoGetAttribute_int64(info, "kv_num_heads", &node->kv_heads);
    }
    OrtStatus *absent = of->KernelInfoGetAttribute_int64(info, "local_window_size", &node->window);
    if (absent != NULL) {
        of->ReleaseStatus(absent);
        node->window = -1;
    }
    if (status == NULL && (node->heads < 1 || node->kv_heads < 1 || node->window == 0 ||
                           node->window < -1 || node->heads % node->kv_heads != 0)) {
        status =
            refused("num_heads is %lld, kv_num_heads %lld, local_window_size %lld; allowed are "
                    "a multiple of kv_num_heads, 1 or more, and -1 or 1 or more",
                    (long long)node->heads, (long long)node->kv_heads, (long long)node->window);
    }
    if (status != NULL) {
        pthread_mutex_destroy(&node->lock);
        free(node);
        return status;
    }
    *kernel = node;
    return NULL;
}

static void ORT_API_CALL destroy(void *kernel)
{
    struct node *node = kernel;
    drop_plan(node);
    api->model_destroy(node->model);
    api->assignment_destroy(node->assignment);
    pthread_mutex_destroy(&node->lock);
    free(node->cache), free(node->block_table), free(node);
}

/* The data of an input, and its dimensions [1, T, width] or [1]. */
static OrtStatus *input(OrtKernelContext *context, size_t index, void **data, int64_t sizes[3])
{
    const OrtValue *value = NULL;
    OrtTensorTypeAndShapeInfo *info = NULL;
    size_t rank = 0;
    OrtStatus *status = ort->KernelContext_GetInput(context, index, &value);
    status = status ? status : ort->GetTensorTypeAndShape(value, &info);
    status = status ? status : ort->GetDimensionsCount(info, &rank);
    status = status ? status : ort->GetDimensions(info, sizes, rank < 3 ? rank : 3);
    ort->ReleaseTensorTypeAndShapeInfo(info);
    if (status == NULL && (rank != (index == 3 ? 1 : 3) || sizes[0] != 1)) {
        status = refused("input %zu has %zu dimensions, the first %lld; allowed are [1, T, width] "
                         "of query, key and value, [1] of past",
                         index, rank, (long long)sizes[0]);
    }
    return status ? status : ort->GetTensorMutableData((OrtValue *)value, data);
}

/* The head size, or why the inputs do not fit the node. */
static OrtStatus *check_sizes(const struct node *node, int64_t sizes[INPUTS][3], int64_t past,
                              int64_t *width)
{
    const int64_t tokens = sizes[0][1];
    *width = sizes[0][2] / node->heads;
    if (*width < 1 || sizes[0][2] != node->heads * *width ||
        (node->model != NULL && *width != node->head_size)) {
        return refused("query has %lld numbers a token; allowed are %lld heads of %lld",
                       (long long)sizes[0][2], (long long)node->heads,
                       (long long)(node->model != NULL ? node->head_size : *width));
    }
    for (int i = 1; i < 3; i++) {
        if (sizes[i][1] != tokens || sizes[i][2] != node->kv_heads * *width) {
            return refused("%s is [1, %lld, %lld]; allowed is [1, %lld, %lld]",
                           i == 1 ? "key" : "value", (long long)sizes[i][1], (long long)sizes[i][2],
                           (long long)tokens, (long long)(node->kv_heads * *width));
        }
    }
    if (past < 0 || past > node->length || past + tokens > INT32_MAX / 2) {
        return refused("past is %lld; allowed are 0 to the %lld tokens that the cache has",
                       (long long)past, (long long)node->length);
    }
    return NULL;
}

static OrtStatus *compute_alone(struct node *node, OrtKernelContext *context)
{
    void *data[INPUTS];
    float *out = NULL;
    int64_t sizes[INPUTS][3] = {{0}};
    OrtValue *value = NULL;
    for (size_t i = 0; i < INPUTS; i++) {
        OrtStatus *status = input(context, i, &data[i], sizes[i]);
        if (status != NULL) {
            return status;
        }
    }
    const int64_t past = *(int64_t *)data[3], tokens = sizes[0][1];
    int64_t width = 0;
    OrtStatus *status = check_sizes(node, sizes, past, &width);
    status = status ? status : ort->KernelContext_GetOutput(context, 0, sizes[0], 3, &value);
    status = status ? status : ort->GetTensorMutableData(value, (void **)&out);
    if (status != NULL || tokens == 0) {
        return status;
    }
    if (node->model == NULL) {
        node->head_size = width;
        if (choose(node) != ATTN_OK) {
            return failed(node, "selection");
        }
    }
    float *const rows[4] = {data[0], data[1], data[2], out};
    if (grow(node, past + tokens, tokens) != ATTN_OK) {
        return failed(node, "cache");
    }
    if (step(node, past, tokens, rows) != ATTN_OK) {
        return failed(node, "step");
    }
    node->length = past + tokens;
    return NULL;
}

static OrtStatusPtr ORT_API_CALL compute(void *kernel, OrtKernelContext *context)
{
    struct node *node = kernel;
    pthread_mutex_lock(&node->lock);
    OrtStatus *status = compute_alone(node, context);
    pthread_mutex_unlock(&node->lock);
    return status;
}

static const char *ORT_API_CALL name(const struct OrtCustomOp *op)
{
    (void)op;
    return "GroupQueryAttention";
}

static const char *ORT_API_CALL provider(const struct OrtCustomOp *op)
{
    (void)op;
    return NULL; /* CPUs */
}

static ONNXTensorElementDataType ORT_API_CALL type(const struct OrtCustomOp *op, size_t index)
{
    (void)op;
    return index == 3 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

static size_t ORT_API_CALL inputs(const struct OrtCustomOp *op)
{
    (void)op;
    return INPUTS;
}

static size_t ORT_API_CALL outputs(const struct OrtCustomOp *op)
{
    (void)op;
    return 1;
}

static OrtCustomOpInputOutputCharacteristic ORT_API_CALL required(const struct OrtCustomOp *op,
                                                                  size_t index)
{
    (void)op, (void)index;
    return INPUT_OUTPUT_REQUIRED;
}

static OrtMemType ORT_API_CALL memory(const struct OrtCustomOp *op, size_t index)
{
    (void)op, (void)index;
    return OrtMemTypeDefault;
}

static const OrtCustomOp attention = {
    .version = ORT_API_VERSION,
    .GetName = name,
    .GetExecutionProviderType = provider,
    .GetInputType = type,
    .GetInputTypeCount = inputs,
    .GetOutputType = type,
    .GetOutputTypeCount = outputs,
    .KernelDestroy = destroy,
    .GetInputCharacteristic = required,
    .GetOutputCharacteristic = required,
    .GetInputMemoryType = memory,
    .CreateKernelV2 = create,
    .KernelComputeV2 = compute,
};

/* What ONNX Runtime looks for in the library. */
ORT_EXPORT OrtStatus *ORT_API_CALL RegisterCustomOps(OrtSessionOptions *options,
                                                     const OrtApiBase *base);

OrtStatus *ORT_API_CALL RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base)
{
    static OrtCustomOpDomain *domain; /* lives as long as the process, as every session's */
    struct node none = {.error = ATTN_ERROR_INIT};
    ort = base->GetApi(ORT_API_VERSION);
    if (ort == NULL) {
        return base->GetApi(1)->CreateStatus(
            ORT_FAIL, "libattn: this library was built for a newer ONNX Runtime");
    }
    if (runtime == NULL) {
        const char *path = getenv("ATTN_LIBRARY");
        void *library = dlopen(path != NULL ? path : "libattn.so.1", RTLD_NOW | RTLD_LOCAL);
        attn_get_api_fn *get_api = NULL;
        if (library == NULL || (*(void **)&get_api = dlsym(library, ATTN_GET_API_SYMBOL)) == NULL) {
            return ort->CreateStatus(ORT_FAIL, dlerror());
        }
        if (get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &api, &none.error) != ATTN_OK ||
            api->runtime_create(NULL, &runtime, &none.error) != ATTN_OK) {
            return failed(&none, "runtime");
        }
    }
    OrtStatus *status = NULL;
    if (domain == NULL) {
        status = ort->CreateCustomOpDomain("libattn", &domain);
        status = status ? status : ort->CustomOpDomain_Add(domain, &attention);
    }
    return status ? status : ort->AddCustomOpDomain(options, domain);
}
