/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_RECORD: one run of one layer as a file (host/capsule.h). What fails here is logged; the run
 * itself is as ever. */
#include "host/capsule.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bind/device.h"
#include "host/cache_file.h"
#include "step/plan_state.h"
#include "util/error.h"
#include "util/safe_text.h"
#include "util/text.h"

#define MOST_OF_BLOCK ((int64_t)64 << 20) /* bytes from a block's first row to its last */

/* One capsule in the making. */
struct taking {
    const attn_plan *plan;
    const attn_layer *layer;
    attn_open_device *device;
    struct arena arena;
    struct capsule *capsule;
    uint8_t *tensors[CAPSULE_TENSORS];
    int32_t *rows; /* [num_reqs]: of the step's tensors, where each request begins */
    struct text head;
    struct attn_error error;
};

static attn_status refuse(struct taking *t, const char *what)
{
    return error_set(&t->error, ATTN_ERROR_UNSUPPORTED, "layer", "'%s' has %s",
                     t->layer->desc->name, what);
}

static void *take_memory(struct taking *t, int64_t bytes)
{
    void *memory = arena_alloc(&t->arena, (size_t)(bytes > 0 ? bytes : 1));
    if (memory == NULL) {
        error_set(&t->error, ATTN_ERROR_OUT_OF_MEMORY, "capsule", "no memory for %lld bytes",
                  (long long)bytes);
    }
    return memory;
}

static attn_status fetch(struct taking *t, void *destination, const void *source, int64_t bytes)
{
    const struct attn_copy_args copy = {.struct_size = sizeof copy,
                                        .destination = destination,
                                        .source = source,
                                        .bytes = (size_t)bytes,
                                        .kind = ATTN_COPY_DEVICE_TO_HOST};
    TRY(device_copy(t->device, &copy, &t->error));
    return device_synchronize(t->device, NULL, &t->error);
}

static int32_t num_extensions(const struct attn_ext *ext)
{
    int32_t count = 0;
    for (; ext != NULL; ext = ext->next) {
        count++;
    }
    return count;
}

/* What a capsule has no room for. */
static const char *find_unrecorded(const attn_plan *plan, const attn_layer *layer,
                                   const struct attn_step_io *io)
{
    const struct attn_layer_desc *d = layer->desc;
    const struct attn_kv_view *k = &layer->owner->k_cache, *v = &layer->owner->v_cache;
    const struct attn_mla_desc *m = layer->selected->mla;
    const struct attn_io_mla *latent = m != NULL ? ext_find(io->next, ATTN_EXT_IO_MLA) : NULL;
    return (d->kind != ATTN_LAYER_DECODER && m == NULL) || num_extensions(d->next) != (m != NULL)
               ? "another kind than a plain decoder's or plain MLA's"
           : m != NULL && (m->topk > 0 || !m->absorb_in_core ||
                           (m->weight_dtype != 0 && m->weight_dtype != d->dtype))
               ? "lists of keys, queries in latent space or quantized weights"
           : d->kv_dtype != d->dtype || d->kv_dtype_v != 0 ? "a cache of another dtype"
           : d->output_form != ATTN_OUTPUT_PLAIN           ? "quantized outputs"
           : d->q_scale_form != ATTN_SCALE_NONE            ? "quantized queries"
           : d->sink_len > 0 || d->prefix_lm || d->tree_mask != 0 || d->causal_per_request
               ? "a static sink, spans, trees or a flag for each request"
           : num_extensions(io->next) != (latent != NULL) || (m != NULL && latent == NULL)
               ? "a run with extensions"
           : plan->capturing || plan->mode != ATTN_PLAN_EAGER ? "a step in a captured graph"
           : plan->given.logits_indices != NULL               ? "a step of fast prefill"
           : plan->given.num_reqs > CAPSULE_REQUESTS          ? "over 1024 requests"
           : d->num_q_heads > CAPSULE_HEADS || d->head_size > CAPSULE_HEAD_SIZE ||
                   d->head_size_v > CAPSULE_HEAD_SIZE
               ? "over 1024 heads or elements of one"
           : (k->pack > 0 && k->pack < k->head_size) || (v->pack > 0 && v->pack < v->head_size)
               ? "packed caches"
               : NULL;
}

static void describe(struct taking *t)
{
    const attn_layer *layer = t->layer;
    const struct attn_layer_desc *d = layer->desc;
    const struct attn_kv_view *k = &layer->owner->k_cache, *v = &layer->owner->v_cache;
    struct capsule *c = t->capsule;
    const char *const names[] = {ATTN_LIBRARY_VERSION, d->name, "", ""};
    char *const texts[] = {c->library, c->layer, c->prefill, c->decode};
    for (int32_t i = 0; i < 4; i++) {
        const int32_t phase = i - 2;
        const char *name = names[i];
        if (phase >= 0) {
            name = layer->model->assignment->layers[layer->index].phases[phase].choice.name;
        }
        const size_t length = strlen(name);
        memcpy(texts[i], name, length < CAPSULE_NAME ? length : utf8_cut(name, CAPSULE_NAME - 1));
    }
    c->step = layer->model->runtime->settings.record.step;
    c->real = layer->model->runtime->settings.record.real;
    c->dtype = d->dtype;
    c->num_q_heads = d->num_q_heads;
    c->num_kv_heads = d->num_kv_heads;
    c->head_size = d->head_size;
    c->head_size_v = d->head_size_v;
    c->scale = d->scale;
    c->causal = t->plan->given.causal != ATTN_CAUSAL_DEFAULT ? t->plan->given.causal : d->causal;
    c->has_window = d->has_window;
    c->window_left = d->window_left;
    c->window_right = d->window_right;
    c->chunk_size = d->chunk_size;
    c->chunk_lookback = d->chunk_lookback;
    c->soft_cap = d->soft_cap;
    c->alibi = d->alibi;
    c->has_sinks = d->has_sinks;
    c->block_size = k->block_size;
    if (layer->selected->mla != NULL) {
        c->kv_lora_rank = layer->selected->mla->kv_lora_rank;
        c->qk_nope_head_dim = layer->selected->mla->qk_nope_head_dim;
    }
    c->k_stride_slot = (int32_t)k->stride_slot;
    c->k_stride_head = (int32_t)k->stride_head;
    c->v_stride_slot = (int32_t)v->stride_slot;
    c->v_stride_head = (int32_t)v->stride_head;
}

/* Lengths, from the device: the host's copies may be bounds, and ended with plan_batch. Padding
 * requests are left out; *batch_rows[i] is the batch's request that is the capsule's i-th. */
static attn_status read_lengths(struct taking *t, int32_t **batch_rows)
{
    const struct attn_batch *batch = &t->plan->given;
    const int32_t count = batch->num_reqs;
    struct capsule *c = t->capsule;
    int32_t *starts = take_memory(t, (count + 1) * (int64_t)sizeof *starts);
    int32_t *lens = take_memory(t, count * (int64_t)sizeof *lens);
    t->rows = take_memory(t, count * (int64_t)sizeof *t->rows);
    *batch_rows = take_memory(t, count * (int64_t)sizeof **batch_rows);
    if (starts == NULL || lens == NULL || t->rows == NULL || *batch_rows == NULL) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    TRY(fetch(t, starts, batch->query_start_loc, (count + 1) * (int64_t)sizeof *starts));
    TRY(fetch(t, lens, batch->seq_lens, count * (int64_t)sizeof *lens));
    for (int32_t r = 0; r < count; r++) {
        const int64_t rows = (int64_t)starts[r + 1] - starts[r];
        if (rows < 0 || starts[r] < 0 || starts[r + 1] > t->plan->num_tokens ||
            (rows > 0 && lens[r] < rows)) {
            return refuse(t, "lengths on the device that no batch has");
        }
        if (rows > 0) {
            t->rows[c->num_reqs] = starts[r];
            (*batch_rows)[c->num_reqs] = r;
            c->query_lens[c->num_reqs] = (int32_t)rows;
            c->seq_lens[c->num_reqs++] = lens[r];
        }
    }
    return c->num_reqs == 0 ? refuse(t, "no row in the step") : ATTN_OK;
}

/* Rows of a step's tensor, one request after the other: its part of a head from `first` on. */
static attn_status read_rows(struct taking *t, int32_t index, const struct attn_tensor *tensor,
                             int32_t first)
{
    const int64_t size = t->capsule->dtype == ATTN_DTYPE_F32 ? 4 : 2;
    const int64_t heads = capsule_heads(t->capsule, index), bytes = tensor->shape[2] * size;
    const int64_t apart = capsule_dims(t->capsule, index) * size;
    const int64_t stride_head = tensor->strides != NULL ? tensor->strides[1] * size : bytes;
    const int64_t stride_row =
        tensor->strides != NULL ? tensor->strides[0] * size : tensor->shape[1] * bytes;
    const bool whole = stride_head == bytes && bytes == apart;
    uint8_t *at = t->tensors[index] + first * size;
    for (int32_t r = 0; r < t->capsule->num_reqs; r++) {
        for (int64_t row = 0; row < t->capsule->query_lens[r]; row++) {
            const uint8_t *from = (const uint8_t *)tensor->data + tensor->byte_offset +
                                  (t->rows[r] + row) * stride_row;
            for (int64_t h = 0; h < (whole ? 1 : heads); h++) {
                TRY(fetch(t, at, from + h * stride_head, whole ? heads * bytes : bytes));
                at += whole ? heads * apart : apart;
            }
        }
    }
    return ATTN_OK;
}

/* A weight [heads, rows, columns] into kv_b_proj's rows of each head, from `first` on; its columns
 * are those of kv_b_proj, or with `transposed` its rows are. */
static attn_status read_weight(struct taking *t, const struct attn_tensor *weight, int64_t first,
                               int64_t rows, bool transposed)
{
    const struct capsule *c = t->capsule;
    const int64_t size = c->dtype == ATTN_DTYPE_F32 ? 4 : 2, columns = c->kv_lora_rank;
    const int64_t of_head = c->qk_nope_head_dim + (int64_t)c->head_size_v;
    const int64_t stride_row = tensor_stride(weight, transposed ? 2 : 1);
    const int64_t stride_column = tensor_stride(weight, transposed ? 1 : 2);
    const int64_t extent = (rows - 1) * stride_row + (columns - 1) * stride_column + 1;
    if (extent > MOST_OF_BLOCK / size) {
        return refuse(t, "a weight whose rows lie far apart");
    }
    uint8_t *head = take_memory(t, extent * size);
    for (int64_t h = 0; head != NULL && h < c->num_q_heads; h++) {
        TRY(fetch(t, head,
                  (const uint8_t *)weight->data + weight->byte_offset +
                      h * tensor_stride(weight, 0) * size,
                  extent * size));
        for (int64_t i = 0; i < rows * columns; i++) {
            memcpy(t->tensors[2] + ((h * of_head + first) * columns + i) * size,
                   head + (i / columns * stride_row + i % columns * stride_column) * size,
                   (size_t)size);
        }
    }
    return head != NULL ? ATTN_OK : ATTN_ERROR_OUT_OF_MEMORY;
}

static attn_status read_weights(struct taking *t)
{
    const struct capsule *c = t->capsule;
    const struct attn_mla_weights *weights =
        ext_find(t->layer->params->params.next, ATTN_EXT_MLA_WEIGHTS);
    const int64_t of_head = c->qk_nope_head_dim + (int64_t)c->head_size_v;
    if (weights->kv_b_proj != NULL) {
        int64_t shape[] = {c->num_q_heads, of_head, c->kv_lora_rank};
        const int64_t row = tensor_stride(weights->kv_b_proj, 0);
        int64_t strides[] = {of_head * row, row, tensor_stride(weights->kv_b_proj, 1)};
        struct attn_tensor split = *weights->kv_b_proj;
        split.ndim = 3;
        split.shape = shape;
        split.strides = strides;
        return read_weight(t, &split, 0, of_head, false);
    }
    TRY(read_weight(t, weights->w_uk, 0, c->qk_nope_head_dim, false));
    return read_weight(t, weights->w_uv, c->qk_nope_head_dim, c->head_size_v, true);
}

/* The keys or values of a request, block by block. */
static attn_status read_request(struct taking *t, const struct attn_kv_view *view,
                                const int32_t *table, int32_t length, uint8_t *block, uint8_t **at)
{
    const int64_t bytes = (int64_t)view->head_size * (t->capsule->dtype == ATTN_DTYPE_F32 ? 4 : 2);
    const int64_t extent = (view->block_size - 1) * view->stride_slot +
                           (view->num_heads - 1) * view->stride_head + bytes;
    for (int32_t b = 0; b * (int64_t)view->block_size < length; b++) {
        const int64_t left = length - b * (int64_t)view->block_size;
        if (table[b] < 0 || table[b] >= view->num_blocks) {
            return refuse(t, "an entry of the block table that is no block");
        }
        TRY(fetch(t, block, (const uint8_t *)view->data + table[b] * view->stride_block, extent));
        for (int64_t s = 0; s < left && s < view->block_size; s++) {
            for (int64_t h = 0; h < view->num_heads; h++, *at += bytes) {
                memcpy(*at, block + s * view->stride_slot + h * view->stride_head, (size_t)bytes);
            }
        }
    }
    return ATTN_OK;
}

static int64_t extent_of(const struct attn_kv_view *view)
{
    return view->block_size * view->stride_slot + view->num_heads * view->stride_head +
           4 * (int64_t)view->head_size;
}

static attn_status read_cache(struct taking *t, const int32_t *batch_rows)
{
    const struct attn_batch *batch = &t->plan->given;
    const struct attn_kv_view *views[] = {&t->layer->owner->k_cache, &t->layer->owner->v_cache};
    const int64_t extents[] = {extent_of(views[0]), extent_of(views[1])};
    const int64_t extent = extents[0] > extents[1] ? extents[0] : extents[1];
    if (extent > MOST_OF_BLOCK) {
        return refuse(t, "a cache whose blocks lie within each other");
    }
    uint8_t *block = take_memory(t, extent), *at[] = {t->tensors[1], t->tensors[2]};
    int32_t *table = take_memory(t, batch->block_table_stride * (int64_t)sizeof *table);
    if (block == NULL || table == NULL) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    for (int32_t r = 0; r < t->capsule->num_reqs; r++) {
        const int32_t length = t->capsule->seq_lens[r], size = views[0]->block_size;
        int32_t row = batch_rows[r];
        if (batch->block_table_row != NULL) {
            TRY(fetch(t, &row, batch->block_table_row + batch_rows[r], sizeof row));
        }
        const int64_t blocks = ((int64_t)length + size - 1) / size;
        const int64_t rows =
            batch->block_table_rows > 0 ? batch->block_table_rows : batch->num_reqs;
        if (row < 0 || row >= rows || blocks > batch->block_table_stride) {
            return refuse(t, "a block table of fewer rows or columns");
        }
        TRY(fetch(t, table, batch->block_table + row * batch->block_table_stride,
                  blocks * (int64_t)sizeof *table));
        for (int32_t i = 0; i < (t->capsule->kv_lora_rank > 0 ? 1 : 2); i++) {
            TRY(read_request(t, views[i], table, length, block, &at[i]));
        }
    }
    return ATTN_OK;
}

static double number_at(const uint8_t *bytes, int64_t at, int32_t dtype)
{
    uint32_t bits = 0;
    float number;
    memcpy(&bits, bytes + at * (dtype == ATTN_DTYPE_F32 ? 4 : 2), dtype == ATTN_DTYPE_F32 ? 4 : 2);
    if (dtype == ATTN_DTYPE_F16) {
        const int32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
        const double size = exponent == 31  ? (fraction > 0 ? NAN : INFINITY)
                            : exponent == 0 ? ldexp(fraction, -24)
                                            : ldexp(1024 + fraction, exponent - 25);
        return bits >> 15 ? -size : size;
    }
    bits <<= dtype == ATTN_DTYPE_BF16 ? 16 : 0;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Mean and deviation of each head's finite numbers. */
static void count(struct capsule *c, int32_t tensor, const uint8_t *bytes)
{
    const int64_t rows = capsule_rows(c, tensor);
    const int32_t heads = capsule_heads(c, tensor), dims = capsule_dims(c, tensor);
    for (int32_t h = 0; h < heads; h++) {
        double sum = 0, squares = 0;
        int64_t finite = 0;
        for (int64_t i = 0; i < rows * dims; i++) {
            const double x = number_at(bytes, (i / dims * heads + h) * dims + i % dims, c->dtype);
            if (isfinite(x)) {
                sum += x;
                squares += x * x;
                finite++;
            } else if (c->not_finite[tensor] < INT32_MAX) {
                c->not_finite[tensor]++;
            }
        }
        const double mean = finite > 0 ? sum / (double)finite : 0;
        const double variance = finite > 0 ? squares / (double)finite - mean * mean : 0;
        c->statistics[tensor][h][0] = (float)mean;
        c->statistics[tensor][h][1] = variance > 0 ? (float)sqrt(variance) : 0;
    }
}

static void put(void *user, const char *line)
{
    text_add_string(user, line);
}

/* What a file with the run is made of; the arena has it all. */
static attn_status read_run(struct taking *t, const struct attn_step_io *io)
{
    const struct layer_params_copy *params = t->layer->params;
    struct capsule *c = t->capsule = take_memory(t, sizeof *t->capsule);
    int32_t *batch_rows = NULL;
    if (c == NULL) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    describe(t);
    TRY(read_lengths(t, &batch_rows));
    if (capsule_bytes(c) < 0) {
        return refuse(t, "more than 256 MiB of queries, keys, values and outputs in the step");
    }
    for (int32_t i = 0; i < CAPSULE_TENSORS; i++) {
        t->tensors[i] =
            take_memory(t, capsule_rows(c, i) * capsule_heads(c, i) * capsule_dims(c, i) *
                               (c->dtype == ATTN_DTYPE_F32 ? 4 : 2));
        if (t->tensors[i] == NULL) {
            return ATTN_ERROR_OUT_OF_MEMORY;
        }
    }
    const struct attn_io_mla *mla =
        c->kv_lora_rank > 0 ? ext_find(io->next, ATTN_EXT_IO_MLA) : NULL;
    TRY(read_rows(t, 0, mla != NULL ? mla->q_nope : io->q, 0));
    if (mla != NULL) {
        TRY(read_rows(t, 0, mla->q_pe, c->qk_nope_head_dim));
        TRY(read_weights(t));
    }
    TRY(read_rows(t, 3, io->out, 0));
    TRY(read_cache(t, batch_rows));
    if (c->has_sinks) {
        TRY(fetch(t, c->sinks, params->params.sinks, 4 * (int64_t)c->num_q_heads));
    }
    if (c->alibi != ATTN_ALIBI_NONE) {
        TRY(fetch(t, c->slopes, params->params.alibi_slopes, 4 * (int64_t)c->num_q_heads));
    }
    for (int32_t i = 0; i < CAPSULE_TENSORS; i++) {
        count(c, i, t->tensors[i]);
    }
    return ATTN_OK;
}

static attn_status write_file(struct taking *t, const char *path)
{
    const struct capsule *c = t->capsule;
    text_init(&t->head, &t->layer->model->runtime->host);
    capsule_write(c, put, &t->head);
    for (int32_t i = 0; i < CAPSULE_TENSORS && c->real; i++) {
        text_add_bytes(&t->head, t->tensors[i],
                       (size_t)(capsule_rows(c, i) * capsule_heads(c, i) * capsule_dims(c, i) *
                                (c->dtype == ATTN_DTYPE_F32 ? 4 : 2)));
    }
    attn_status status = ATTN_OK;
    if (t->head.failed) {
        status =
            error_set(&t->error, ATTN_ERROR_OUT_OF_MEMORY, "capsule", "no memory for the file");
    } else if (!cache_file_write(path, t->head.data, t->head.length)) {
        status =
            error_set(&t->error, ATTN_ERROR_IO, "ATTN_RECORD", "%s: %s", path, strerror(errno));
    }
    text_finish(&t->head);
    return status;
}

static void take_capsule(const attn_plan *plan, const struct step *step,
                         const struct attn_step_io *io)
{
    attn_runtime *runtime = plan->model->runtime;
    const struct record_settings *record = &runtime->settings.record;
    struct taking t = {.plan = plan, .layer = step->layer, .error = ATTN_ERROR_INIT};
    char path[PATH_MAX];
    const char *why = find_unrecorded(plan, step->layer, io);
    attn_status status = why != NULL ? refuse(&t, why) : ATTN_OK;
    arena_init(&t.arena, &runtime->host);
    if (snprintf(path, sizeof path, "%s/layer-%d-step-%d-%ld.capsule", record->folder,
                 record->layer, record->step, (long)getpid()) >= (int)sizeof path) {
        status = error_set(&t.error, ATTN_ERROR_IO, "ATTN_RECORD", "the folder's path is too long");
    }
    status =
        status == ATTN_OK ? device_open(runtime, plan->model->device, &t.device, &t.error) : status;
    status = status == ATTN_OK ? device_synchronize(t.device, NULL, &t.error) : status;
    status = status == ATTN_OK ? read_run(&t, io) : status;
    status = status == ATTN_OK ? write_file(&t, path) : status;
    if (status == ATTN_OK) {
        runtime_log(runtime, ATTN_LOG_WARN, "ATTN_RECORD: %s has been written, with %s", path,
                    record->real ? "the real contents of queries, keys, values and outputs, which "
                                   "are users' data"
                                 : "statistics in place of contents");
    } else {
        runtime_log(runtime, ATTN_LOG_WARN, "ATTN_RECORD: no capsule is written: %s: %s",
                    t.error.field, t.error.message);
    }
    device_close(t.device);
    arena_finish(&t.arena);
}

/* Counts runs that attend. */
static attn_status run_watched(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                               struct attn_error *error)
{
    attn_runtime *runtime = plan->model->runtime;
    const attn_status status = run_general(plan, step, io, error);
    if (status == ATTN_OK && !(io->flags & ATTN_RUN_NO_ATTEND) &&
        atomic_fetch_add(&runtime->num_recorded, 1) == runtime->settings.record.step) {
        take_capsule(plan, step, io);
    }
    return status;
}

void capsule_watch(const attn_plan *plan, struct step *step)
{
    if (step->layer->index == plan->model->runtime->settings.record.layer) {
        step->enter = run_watched;
    }
}
