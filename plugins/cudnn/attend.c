/* SPDX-License-Identifier: Apache-2.0 */
/* Attends through cuDNN. Its plans hold sizes and strides, so they are made with a plan's state,
 * one for each bucket of the number of requests and of queries; a step takes the smallest that
 * fits. The plan's schedule is the batch in cuDNN's terms, made on the device. */
#include "cudnn/attend.h"

#include <math.h>

#include "common/entry.h"
#include "cudnn/graph.h"
#include "cudnn/kernels.h"
#include "gpu/host/schedule.h"

#define MAX_BUCKETS 4        /* sizes of requests, and as many of queries */
#define BUCKET_STEP 8        /* from one bucket to the next */
#define SMALLEST_REQS 16     /* no bucket below it */
#define SMALLEST_QUERIES 128 /* a tile of cuDNN's kernels */

/* What a layer's plans need: struct attn_prepared is gpu/host's. */
struct cudnn_prepared {
    struct graph_shape shape; /* without num_reqs, query_len and columns */
    int32_t most_queries;     /* a request has in the decode phase; 0: the plan says */
    int32_t needs_lse;
};

struct attn_plan_state {
    const struct attn_host *host;
    cudnnHandle_t handle;
    struct graph_plan plans[MAX_BUCKETS * MAX_BUCKETS]; /* the largest first */
    int32_t num_plans;
};

/* The host's part of a schedule. */
struct schedule_host_part {
    int32_t plan; /* index into the state's plans */
    int32_t rows; /* no fewer than the batch's */
    /* 1: no plan fits what the batch says: all rows are the plain kernel's */
    int32_t plain;
};

/* Bytes from the beginning of the workspace and of the scratch. */
struct memory {
    struct cudnn_lengths lengths;
    char *q, *k, *v, *out, *lse, *unfinished, *workspace;
    size_t device_bytes, scratch_bytes;
};

static const struct cudnn_prepared *prepared_of(const attn_prepared *prepared)
{
    return (const struct cudnn_prepared *)(const void *)prepared;
}

static const struct cudnn_library *library_of(const attn_instance *instance)
{
    return instance->vendor;
}

static struct graph_cache cache_of(const struct attn_kv_view *view, int64_t element)
{
    return (struct graph_cache){view->num_blocks, view->stride_block / element,
                                view->stride_head / element, view->stride_slot / element};
}

struct graph_shape cudnn_shape(const struct attn_layer_desc *l)
{
    const bool window = l->has_window;
    return (struct graph_shape){
        .dtype = l->dtype == ATTN_DTYPE_F16 ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16,
        .has = (l->soft_cap > 0 ? GRAPH_HAS_SOFT_CAP : 0) | (l->has_sinks ? GRAPH_HAS_SINKS : 0),
        .window = window && l->window_left >= 0 ? l->window_left + 1 : 0,
        .right = l->causal == ATTN_CAUSAL_YES ? 0
                 : window                     ? l->window_right
                                              : -1,
        .num_q_heads = l->num_q_heads,
        .num_kv_heads = l->num_kv_heads,
        .head_size = l->head_size,
        .head_size_v = l->head_size_v};
}

void cudnn_set_query_len(struct graph_shape *shape, int64_t query_len, int32_t needs_lse)
{
    const bool hides = shape->window > 0 || shape->right > 0;
    shape->query_len =
        query_len + (query_len == 1 && (needs_lse || hides || (shape->has & GRAPH_HAS_SINKS)));
    if (shape->query_len == 1) {
        shape->right = -1; /* it sees all of its keys */
    }
}

attn_status cudnn_prepare(const struct attn_prepare_args *args, attn_prepared **prepared,
                          struct attn_error *error)
{
    const struct attn_layer_desc *l = args->layer;
    const struct attn_host *host = args->instance->host;
    const bool decode = args->phase == ATTN_PHASE_DECODE;
    struct cudnn_prepared *made = host->allocate(host->user, sizeof *made, 64);
    *prepared = (attn_prepared *)(void *)made;
    if (made == NULL) {
        return plugin_error(error, ATTN_ERROR_OUT_OF_MEMORY, "prepared", "%zu bytes", sizeof *made);
    }
    *made = (struct cudnn_prepared){.shape = cudnn_shape(l),
                                    .needs_lse = l->needs_lse,
                                    .most_queries = decode ? 1 + l->num_speculative_tokens *
                                                                     (l->parallel_drafting ? 2 : 1)
                                                           : 0};
    if (args->k_cache != NULL) {
        made->shape.block_size = args->k_cache->block_size;
        made->shape.k = cache_of(args->k_cache, 2);
        made->shape.v = cache_of(args->v_cache, 2);
    } else {
        made->shape.block_size = 1;
        made->shape.has |= GRAPH_HAS_ROWS;
    }
    return ATTN_OK;
}

void cudnn_release(attn_instance *instance, attn_prepared *prepared)
{
    if (prepared != NULL) {
        instance->host->release(instance->host->user, prepared, sizeof(struct cudnn_prepared));
    }
}

/* `most`, then an eighth of it and so on, down to `smallest`; returns how many. */
static int32_t make_buckets(int32_t most, int32_t smallest, int32_t buckets[MAX_BUCKETS])
{
    int32_t count = 0;
    do {
        buckets[count++] = most;
        most = (most + BUCKET_STEP - 1) / BUCKET_STEP;
    } while (count < MAX_BUCKETS && buckets[count - 1] > smallest);
    return count;
}

static attn_status make_plans(const struct attn_schedule_size_args *args, attn_plan_state *state,
                              struct attn_error *error)
{
    const struct cudnn_library *library = library_of(args->instance);
    const struct cudnn_prepared *prepared = prepared_of(args->prepared);
    const struct attn_limits *limits = args->limits;
    struct graph_shape shape = prepared->shape;
    int32_t reqs[MAX_BUCKETS], queries[MAX_BUCKETS], most = limits->max_query_len;
    if (prepared->most_queries > 0 && (most <= 0 || most > prepared->most_queries)) {
        most = prepared->most_queries;
    }
    most = most > 0 ? most : limits->max_num_tokens;
    const int32_t num_reqs = make_buckets(limits->max_num_reqs, SMALLEST_REQS, reqs);
    const int32_t num_queries = make_buckets(most, SMALLEST_QUERIES, queries);
    const int32_t keys = /* an encoder's limits may say its queries alone */
        (shape.has & GRAPH_HAS_ROWS) && limits->max_seq_len < most ? most : limits->max_seq_len;
    shape.columns = (keys + shape.block_size - 1) / shape.block_size;
    for (int32_t i = 0; i < num_reqs * num_queries; i++) {
        char cause[GRAPH_CAUSE_BYTES];
        shape.right = prepared->shape.right;
        shape.num_reqs = reqs[i / num_queries];
        cudnn_set_query_len(&shape, queries[i % num_queries], prepared->needs_lse);
        if (!graph_make(library, state->handle, &shape, &state->plans[state->num_plans], cause)) {
            return plugin_error(error, ATTN_ERROR_UNSUPPORTED, "plan",
                                "cuDNN %d.%d.%d has none for %lld requests of %lld queries: %s",
                                library->version / 10000, library->version / 100 % 100,
                                library->version % 100, (long long)shape.num_reqs,
                                (long long)shape.query_len, cause);
        }
        state->num_plans++;
    }
    return ATTN_OK;
}

attn_status cudnn_create_plan_state(const struct attn_schedule_size_args *args,
                                    attn_plan_state **state, struct attn_error *error)
{
    attn_instance *instance = args->instance;
    const struct attn_host *host = instance->host;
    attn_plan_state *made = host->allocate(host->user, sizeof *made, 64);
    *state = NULL;
    if (made == NULL) {
        return plugin_error(error, ATTN_ERROR_OUT_OF_MEMORY, "plan", "%zu bytes", sizeof *made);
    }
    *made = (struct attn_plan_state){.host = host};
    cudnn_begin_changes();
    cudnn_enter(&instance->device);
    cudnnStatus_t created = library_of(instance)->Create(&made->handle);
    attn_status status = created == CUDNN_STATUS_SUCCESS
                             ? make_plans(args, made, error)
                             : plugin_error(error, ATTN_ERROR_DEVICE, "plan", "cudnnCreate: %s",
                                            library_of(instance)->GetErrorString(created));
    cudnn_leave(&instance->device);
    cudnn_end_changes();
    if (status != ATTN_OK) {
        cudnn_destroy_plan_state(instance, made);
        return status;
    }
    *state = made;
    return ATTN_OK;
}

void cudnn_destroy_plan_state(attn_instance *instance, attn_plan_state *state)
{
    if (state == NULL) {
        return;
    }
    const struct cudnn_library *library = library_of(instance);
    cudnn_enter(&instance->device);
    for (int32_t i = 0; i < state->num_plans; i++) {
        graph_free(library, &state->plans[i]);
    }
    if (state->handle != NULL) {
        library->Destroy(state->handle);
    }
    cudnn_leave(&instance->device);
    state->host->release(state->host->user, state, sizeof *state);
}

/* The next `bytes` of memory, at a multiple of 256. */
static void *take(uintptr_t *end, size_t bytes)
{
    void *taken = (void *)*end;
    *end += (bytes + 255) / 256 * 256;
    return taken;
}

/* A plan's memory at two addresses, which may be NULL to measure it. */
static struct memory lay_out(const attn_plan_state *state, const struct attn_limits *limits,
                             void *device, void *scratch)
{
    const struct graph_shape *s = &state->plans[0].shape;
    const size_t reqs = (size_t)s->num_reqs, rows = (size_t)limits->max_num_tokens;
    const size_t heads = (size_t)s->num_q_heads, starts = (reqs + 1) * sizeof(int64_t);
    size_t most = 0;
    uintptr_t at = (uintptr_t)device, end = (uintptr_t)scratch;
    struct memory m = {.q = NULL};
    for (int32_t i = 0; i < state->num_plans; i++) {
        const size_t bytes = (size_t)state->plans[i].workspace_bytes;
        most = bytes > most ? bytes : most;
    }
    m.lengths.query_lens = take(&at, reqs * sizeof(int32_t));
    m.lengths.key_lens = take(&at, reqs * sizeof(int32_t));
    m.lengths.q_start = take(&at, starts);
    m.lengths.out_start = take(&at, starts);
    m.lengths.q_copy_start = take(&at, starts);
    m.lengths.out_copy_start = take(&at, starts);
    m.lengths.lse_copy_start = take(&at, starts);
    if (s->has & GRAPH_HAS_ROWS) {
        m.lengths.k_start = take(&at, starts);
        m.lengths.v_start = take(&at, starts);
        m.lengths.k_copy_start = take(&at, starts);
        m.lengths.v_copy_start = take(&at, starts);
        m.k = take(&end, rows * (size_t)(s->num_kv_heads * s->head_size) * 2);
        m.v = take(&end, rows * (size_t)(s->num_kv_heads * s->head_size_v) * 2);
    } else {
        m.lengths.table = take(&at, reqs * (size_t)s->columns * sizeof(int32_t));
    }
    m.q = take(&end, rows * heads * (size_t)s->head_size * 2);
    m.out = take(&end, rows * heads * (size_t)s->head_size_v * 2);
    m.lse = take(&end, rows * heads * sizeof(float));
    m.unfinished = take(&end, rows * sizeof(int32_t));
    m.workspace = take(&end, most);
    m.device_bytes = at - (uintptr_t)device;
    m.scratch_bytes = end - (uintptr_t)scratch;
    return m;
}

attn_status cudnn_schedule_size(const struct attn_schedule_size_args *args,
                                struct attn_schedule_size *size, struct attn_error *error)
{
    const struct memory m = lay_out(args->plan_state, args->limits, NULL, NULL);
    (void)error;
    size->host_bytes = sizeof(struct schedule_host_part);
    size->device_bytes = m.device_bytes;
    size->scratch_bytes = m.scratch_bytes;
    return ATTN_OK;
}

/* The smallest plan that the batch fits; -1: none. What is captured may be replayed with other
 * lengths, so it takes the largest. */
static int32_t choose_plan(const attn_plan_state *state, const struct attn_batch *batch,
                           int32_t mode)
{
    int32_t chosen = -1;
    for (int32_t i = 0; i < state->num_plans; i++) {
        const struct graph_shape *s = &state->plans[i].shape;
        const bool fits = s->num_reqs >= batch->num_reqs && s->query_len >= batch->max_query_len;
        chosen = fits && (chosen < 0 || mode == ATTN_PLAN_EAGER) ? i : chosen;
    }
    return chosen;
}

static const char *launch_lengths(const struct attn_attend_args *args)
{
    const attn_plan_state *state = args->plan_state;
    const struct graph_shape *largest = &state->plans[0].shape;
    const struct memory m = lay_out(state, args->limits, args->workspace, args->scratch);
    struct cudnn_lengths_params p = {.to = m.lengths,
                                     .num_slots = (int32_t)largest->num_reqs,
                                     .num_columns = (int32_t)largest->columns,
                                     .num_blocks = (int32_t)largest->k.num_blocks};
    set_problem(&p.problem, args);
    return cudnn_launch_lengths(&args->instance->device, &p, args->stream);
}

/* Whether the plans, which are made for the layer's own mask and for so many keys, do not fit. */
static bool is_plain(const struct attn_attend_args *args)
{
    const struct attn_batch *batch = args->batch;
    const struct graph_shape *s = &args->plan_state->plans[0].shape;
    bool plain = batch->causal != ATTN_CAUSAL_DEFAULT && batch->causal != args->layer->causal;
    for (int32_t r = 0;
         (s->has & GRAPH_HAS_ROWS) && batch->key_start_loc != NULL && r < batch->num_reqs; r++) {
        const int32_t *start = batch->key_start_loc_host;
        plain = plain || start == NULL || start[r + 1] - start[r] > s->columns;
    }
    return plain;
}

attn_status cudnn_schedule(const struct attn_attend_args *args, int32_t mode,
                           struct attn_error *error)
{
    struct schedule_host_part *plan = args->schedule_host;
    const struct attn_batch *batch = args->batch;
    if (mode != ATTN_PLAN_IN_GRAPH && mode != ATTN_PLAN_REPLAY) {
        plan->plan = choose_plan(args->plan_state, batch, mode);
        plan->rows = mode == ATTN_PLAN_EAGER ? batch->num_tokens : args->limits->max_num_tokens;
        plan->plain = is_plain(args);
    }
    if (plan->plan < 0) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "batch",
                            "%d requests of up to %d queries; the plan's limits are %d of %lld",
                            batch->num_reqs, batch->max_query_len, args->limits->max_num_reqs,
                            (long long)args->plan_state->plans[0].shape.query_len);
    }
    if (mode == ATTN_PLAN_OUT_OF_GRAPH) {
        return ATTN_OK;
    }
    return device_status(launch_lengths(args), "schedule", error);
}

attn_status cudnn_update_block_table(const struct attn_attend_args *args, struct attn_error *error)
{
    return device_status(launch_lengths(args), "update_block_table", error);
}

/* Whether rows are [T, heads, size] without gaps, as the plans want them. */
static bool is_compact(const struct gpu_tensor *t, int64_t heads, int64_t size)
{
    return t->head == size * 2 && t->row == heads * size * 2 && (uintptr_t)t->data % 16 == 0;
}

static bool same_cache(const struct graph_cache *a, const struct graph_cache *b)
{
    return a->stride_block == b->stride_block && a->stride_head == b->stride_head &&
           a->stride_slot == b->stride_slot && a->num_blocks == b->num_blocks;
}

/* Where a plan reads rows, or writes them: the tensor itself, or a compact copy. */
struct rows {
    void *data, *start;
};

/* Rows that a plan reads: copied to `copy` where they are not compact. */
static const char *read_rows(const struct attn_attend_args *args, const struct gpu_tensor *from,
                             const int32_t *first_rows, int64_t heads, int64_t size, char *copy,
                             int64_t *start, int64_t *copy_start, struct rows *rows)
{
    *rows = (struct rows){from->data, start};
    if (is_compact(from, heads, size)) {
        return NULL;
    }
    *rows = (struct rows){copy, copy_start};
    const struct cudnn_rows_params params = {.from = *from,
                                             .to = copy,
                                             .row_bytes = size * 2,
                                             .first_rows = first_rows,
                                             .num_reqs = args->batch->num_reqs,
                                             .heads = (int32_t)heads};
    return cudnn_launch_copy(&args->instance->device, &params, args->stream);
}

static const char *execute(const struct attn_attend_args *args, const struct memory *m,
                           const struct rows *q, const struct rows *k, const struct rows *v,
                           const struct rows *out, char cause[GRAPH_CAUSE_BYTES])
{
    attn_plan_state *state = args->plan_state;
    const struct cudnn_library *library = library_of(args->instance);
    const struct schedule_host_part *host = args->schedule_host;
    const struct graph_plan *plan = &state->plans[host->plan];
    const struct cudnn_lengths *l = &m->lengths;
    float scale = args->layer->scale, soft_cap = args->layer->soft_cap, hidden = -INFINITY;
    int32_t window = plan->shape.window, right = plan->shape.right;
    char said[256] = "";
    void *const data[GRAPH_TENSORS] = {
        [GRAPH_Q] = q->data,
        [GRAPH_K] = k->data,
        [GRAPH_V] = v->data,
        [GRAPH_OUT] = out->data,
        [GRAPH_LSE] = m->lse,
        [GRAPH_Q_START] = q->start,
        [GRAPH_K_START] = k->start,
        [GRAPH_V_START] = v->start,
        [GRAPH_OUT_START] = out->start,
        [GRAPH_LSE_START] = l->lse_copy_start,
        [GRAPH_QUERY_LENS] = l->query_lens,
        [GRAPH_KEY_LENS] = l->key_lens,
        [GRAPH_TABLE] = l->table,
        [GRAPH_SCALE] = &scale,
        [GRAPH_HIDDEN_PADDING] = &hidden,
        [GRAPH_HIDDEN_CAUSAL] = &hidden,
        [GRAPH_HIDDEN_WINDOW] = &hidden,
        [GRAPH_WINDOW] = &window,
        [GRAPH_RIGHT] = &right,
        [GRAPH_SOFT_CAP] = &soft_cap,
        [GRAPH_SINKS] = (void *)(uintptr_t)args->params->sinks,
    };
    cudnn_enter(&args->instance->device);
    cudnnStatus_t s = library->SetStream(state->handle, (cudaStream_t)args->stream);
    s = s ? s : graph_execute(library, state->handle, plan, data, m->workspace);
    cudnn_leave(&args->instance->device);
    if (s == CUDNN_STATUS_SUCCESS) {
        return NULL;
    }
    library->GetLastErrorString(said, sizeof said);
    snprintf(cause, GRAPH_CAUSE_BYTES, "%s (%s)", library->GetErrorString(s), said);
    return cause;
}

/* The attend by cuDNN; *copied says whether its output is in the scratch. */
static const char *run_plan(const struct attn_attend_args *args, const struct memory *m,
                            const struct gpu_tensor *q, const struct gpu_tensor *out, bool *copied,
                            char text[GRAPH_CAUSE_BYTES])
{
    const struct attn_layer_desc *l = args->layer;
    const struct attn_batch *batch = args->batch;
    const struct cudnn_lengths *at = &m->lengths;
    struct rows q_rows, k_rows = {0}, v_rows = {0}, out_rows = {out->data, at->out_start};
    const char *cause = read_rows(args, q, batch->query_start_loc, l->num_q_heads, l->head_size,
                                  m->q, at->q_start, at->q_copy_start, &q_rows);
    if (args->k_cache != NULL) {
        k_rows.data = args->k_cache->data;
        v_rows.data = args->v_cache->data;
    } else {
        const struct gpu_tensor k = gpu_tensor_of(args->k), v = gpu_tensor_of(args->v);
        const int32_t *first_rows =
            batch->key_start_loc != NULL ? batch->key_start_loc : batch->query_start_loc;
        cause = cause ? cause
                      : read_rows(args, &k, first_rows, l->num_kv_heads, l->head_size, m->k,
                                  at->k_start, at->k_copy_start, &k_rows);
        cause = cause ? cause
                      : read_rows(args, &v, first_rows, l->num_kv_heads, l->head_size_v, m->v,
                                  at->v_start, at->v_copy_start, &v_rows);
    }
    *copied = !is_compact(out, l->num_q_heads, l->head_size_v);
    if (*copied) {
        out_rows = (struct rows){m->out, at->out_copy_start};
    }
    return cause != NULL ? cause : execute(args, m, &q_rows, &k_rows, &v_rows, &out_rows, text);
}

/* Writes out and the log-sum-exp where cuDNN did not, and computes the rows that it cannot. */
static const char *finish_rows(const struct attn_attend_args *args, const struct memory *m,
                               const struct gpu_tensor *q, const struct gpu_tensor *out,
                               bool copied, bool plain)
{
    const struct attn_layer_desc *l = args->layer;
    const struct schedule_host_part *host = args->schedule_host;
    const struct gpu_device *device = &args->instance->device;
    const struct graph_shape *plan = &args->plan_state->plans[host->plan].shape;
    struct gpu_params p = {
        .q = *q, .out = *out, .lse = gpu_lse_of(args->lse), .q_scale_host = 1, .p_dtype = -1};
    if (args->k_cache != NULL) {
        p.k = gpu_cache_of(l, args->params, args->k_cache, false);
        p.v = gpu_cache_of(l, args->params, args->v_cache, true);
    } else {
        p.k = gpu_cache_of_tensor(l, args->params, args->k, false);
        p.v = gpu_cache_of_tensor(l, args->params, args->v, true);
    }
    set_problem(&p.problem, args);
    p.problem.wanted_rows = (const int32_t *)(const void *)m->unfinished;
    p.problem.num_wanted_rows = host->rows;
    const struct cudnn_finish_params finish = {
        .out = *out,
        .lse = p.lse,
        .copied = copied ? m->out : NULL,
        .log_sum_exp = (const float *)(const void *)m->lse,
        .query_start = p.problem.query_start,
        .key_lens = m->lengths.key_lens,
        .unfinished = (int32_t *)(void *)m->unfinished,
        .num_reqs = p.problem.num_reqs,
        .num_rows = host->rows,
        .all_unfinished = plain || (args->lse != NULL && plan->query_len == 1),
        .heads = l->num_q_heads,
        .head_size = l->head_size_v};
    const char *cause = cudnn_launch_finish(device, &finish, args->stream);
    return cause != NULL ? cause
                         : gpu_device_launch(device, GPU_KERNEL_plain, (int64_t)device->num_sms * 8,
                                             &p, args->stream);
}

/* Whether keys fit the scratch, or need no place there: it has as many rows as there are queries.
 */
static bool keys_fit(const struct attn_attend_args *args)
{
    if (args->k_cache != NULL || args->batch->key_start_loc == NULL) {
        return true;
    }
    const struct attn_layer_desc *l = args->layer;
    const struct gpu_tensor k = gpu_tensor_of(args->k), v = gpu_tensor_of(args->v);
    return is_compact(&k, l->num_kv_heads, l->head_size) &&
           is_compact(&v, l->num_kv_heads, l->head_size_v);
}

attn_status cudnn_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    const attn_plan_state *state = args->plan_state;
    const struct graph_shape *mine = &prepared_of(args->prepared)->shape;
    const struct graph_shape *planned = &state->plans[0].shape;
    if (args->batch->num_reqs == 0) {
        return ATTN_OK;
    }
    if (!same_cache(&mine->k, &planned->k) || !same_cache(&mine->v, &planned->v)) {
        return plugin_error(error, ATTN_ERROR_UNSUPPORTED, "k_cache",
                            "its strides or blocks are not those of the first layer that shares "
                            "this plan, for which cuDNN's plans are made");
    }
    const struct schedule_host_part *host = args->schedule_host;
    const struct memory m = lay_out(state, args->limits, args->workspace, args->scratch);
    const struct gpu_tensor q = gpu_tensor_of(args->q), out = gpu_tensor_of(args->out);
    const bool plain = host->plain || !keys_fit(args);
    bool copied = false;
    char text[GRAPH_CAUSE_BYTES];
    const char *cause = plain ? NULL : run_plan(args, &m, &q, &out, &copied, text);
    cause = cause != NULL ? cause : finish_rows(args, &m, &q, &out, copied, plain);
    return device_status(cause, "attend", error);
}
