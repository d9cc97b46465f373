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

#include "host/cache_file.h"
#include "observers.h"
#include "step/plan_state.h"
#include "util/error.h"
#include "util/safe_text.h"
#include "util/text.h"

#define MOST_OF_PIECE ((int64_t)64 << 20) /* bytes that are fetched at once */

/* One capsule in the making. */
struct taking {
    const attn_plan *plan;
    const attn_layer *layer;
    attn_open_device *device;
    struct arena arena;
    struct capsule *capsule;
    uint8_t *tensors[CAPSULE_TENSORS];
    int32_t *rows;       /* [num_reqs]: of the step's tensors, where each request begins */
    int32_t *batch_rows; /* [num_reqs]: the batch's request that is the capsule's i-th */
    uint8_t *piece;      /* what fetch_grid fetches */
    int64_t piece_bytes;
    struct attn_error error;
};

static attn_status refuse(struct taking *t, const char *what)
{
    return error_set(&t->error, ATTN_ERROR_UNSUPPORTED, "layer", "'%s' has %s",
                     t->layer->desc->name, what);
}

static attn_status take_memory(struct taking *t, void *to, int64_t bytes)
{
    void *memory = arena_alloc(&t->arena, (size_t)(bytes > 0 ? bytes : 1));
    memcpy(to, &memory, sizeof memory); /* whatever it points at */
    return memory != NULL ? ATTN_OK
                          : error_set(&t->error, ATTN_ERROR_OUT_OF_MEMORY, "capsule",
                                      "no memory for %lld bytes", (long long)bytes);
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

/* Places [rows, columns] in memory, with the bytes from each to the next. */
struct places {
    const uint8_t *data;
    int64_t row, column;
};

/* `bytes` of each place to `to`, whose places begin there: fetched in one piece. */
static attn_status fetch_grid(struct taking *t, uint8_t *to, int64_t to_row, int64_t to_column,
                              struct places from, int64_t rows, int64_t columns, int64_t bytes)
{
    const int64_t extent = (rows - 1) * from.row + (columns - 1) * from.column + bytes;
    if (from.row > MOST_OF_PIECE / rows || from.column > MOST_OF_PIECE / columns) {
        return refuse(t, "rows that lie far apart, or blocks within each other");
    }
    if (extent > t->piece_bytes) {
        TRY(take_memory(t, &t->piece, extent));
        t->piece_bytes = extent;
    }
    TRY(fetch(t, t->piece, from.data, extent));
    for (int64_t i = 0; i < rows * columns; i++) {
        const int64_t row = i / columns, column = i % columns;
        memcpy(to + row * to_row + column * to_column,
               t->piece + row * from.row + column * from.column, (size_t)bytes);
    }
    return ATTN_OK;
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
    const struct recording *record = &layer->model->runtime->observers->record;
    c->step = record->step;
    c->real = record->real;
    c->dtype = d->dtype;
    c->num_q_heads = d->num_q_heads;
    c->num_kv_heads = d->num_kv_heads;
    c->head_size = d->head_size;
    c->head_size_v = d->head_size_v;
    c->scale = d->scale;
    c->has_window = d->has_window;
    c->window_left = d->window_left;
    c->window_right = d->window_right;
    c->chunk_size = d->chunk_size;
    c->chunk_lookback = d->chunk_lookback;
    c->soft_cap = d->soft_cap;
    c->alibi = d->alibi;
    c->has_sinks = d->has_sinks;
    c->causal = t->plan->given.causal != ATTN_CAUSAL_DEFAULT ? t->plan->given.causal : d->causal;
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
 * requests are left out. */
static attn_status read_lengths(struct taking *t)
{
    const struct attn_batch *batch = &t->plan->given;
    const int32_t count = batch->num_reqs;
    const int64_t bytes = count * (int64_t)sizeof(int32_t);
    struct capsule *c = t->capsule;
    int32_t *starts, *lens;
    TRY(take_memory(t, &starts, bytes + (int64_t)sizeof *starts));
    TRY(take_memory(t, &lens, bytes));
    TRY(take_memory(t, &t->rows, bytes));
    TRY(take_memory(t, &t->batch_rows, bytes));
    TRY(fetch(t, starts, batch->query_start_loc, bytes + (int64_t)sizeof *starts));
    TRY(fetch(t, lens, batch->seq_lens, bytes));
    for (int32_t r = 0; r < count; r++) {
        const int64_t rows = (int64_t)starts[r + 1] - starts[r];
        if (rows < 0 || starts[r] < 0 || starts[r + 1] > t->plan->num_tokens ||
            (rows > 0 && lens[r] < rows)) {
            return refuse(t, "lengths on the device that no batch has");
        }
        if (rows > 0) {
            t->rows[c->num_reqs] = starts[r];
            t->batch_rows[c->num_reqs] = r;
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
    const int64_t size = capsule_element(t->capsule), heads = capsule_heads(t->capsule, index);
    const int64_t apart = capsule_dims(t->capsule, index) * size;
    uint8_t *at = t->tensors[index] + first * size;
    for (int32_t r = 0; r < t->capsule->num_reqs; r++) {
        for (int64_t row = 0; row < t->capsule->query_lens[r]; row++, at += heads * apart) {
            const int64_t from = (t->rows[r] + row) * tensor_stride(tensor, 0) * size;
            const struct places places = {(const uint8_t *)tensor->data + tensor->byte_offset +
                                              from,
                                          0, tensor_stride(tensor, 1) * size};
            TRY(fetch_grid(t, at, 0, apart, places, 1, heads, tensor->shape[2] * size));
        }
    }
    return ATTN_OK;
}

/* A weight [heads, rows, columns], its strides in elements, into kv_b_proj's rows of each head from
 * `first` on. */
static attn_status read_weight(struct taking *t, const struct attn_tensor *weight, int64_t first,
                               int64_t rows, int64_t head, int64_t row, int64_t column)
{
    const struct capsule *c = t->capsule;
    const int64_t size = capsule_element(c), columns = c->kv_lora_rank;
    const int64_t of_head = c->qk_nope_head_dim + (int64_t)c->head_size_v;
    for (int64_t h = 0; h < c->num_q_heads; h++) {
        const struct places from = {(const uint8_t *)weight->data + weight->byte_offset +
                                        h * head * size,
                                    row * size, column * size};
        TRY(fetch_grid(t, t->tensors[2] + (h * of_head + first) * columns * size, columns * size,
                       size, from, rows, columns, size));
    }
    return ATTN_OK;
}

static attn_status read_weights(struct taking *t)
{
    const struct attn_mla_weights *weights =
        ext_find(t->layer->params->params.next, ATTN_EXT_MLA_WEIGHTS);
    const int64_t nope = t->capsule->qk_nope_head_dim, v = t->capsule->head_size_v;
    const struct attn_tensor *w = weights->kv_b_proj;
    if (w != NULL) {
        const int64_t row = tensor_stride(w, 0);
        return read_weight(t, w, 0, nope + v, (nope + v) * row, row, tensor_stride(w, 1));
    }
    w = weights->w_uk;
    TRY(read_weight(t, w, 0, nope, tensor_stride(w, 0), tensor_stride(w, 1), tensor_stride(w, 2)));
    w = weights->w_uv; /* whose columns are kv_b_proj's rows */
    return read_weight(t, w, nope, v, tensor_stride(w, 0), tensor_stride(w, 2),
                       tensor_stride(w, 1));
}

/* The keys or values of a request, block by block. */
static attn_status read_request(struct taking *t, const struct attn_kv_view *view,
                                const int32_t *table, int32_t length, uint8_t **at)
{
    const int64_t bytes = view->head_size * capsule_element(t->capsule);
    const int64_t row = view->num_heads * bytes;
    for (int32_t b = 0; b * (int64_t)view->block_size < length; b++) {
        const int64_t left = length - b * (int64_t)view->block_size;
        const int64_t slots = left < view->block_size ? left : view->block_size;
        if (table[b] < 0 || table[b] >= view->num_blocks) {
            return refuse(t, "an entry of the block table that is no block");
        }
        const struct places from = {(const uint8_t *)view->data + table[b] * view->stride_block,
                                    view->stride_slot, view->stride_head};
        TRY(fetch_grid(t, *at, row, bytes, from, slots, view->num_heads, bytes));
        *at += slots * row;
    }
    return ATTN_OK;
}

static attn_status read_cache(struct taking *t)
{
    const struct attn_batch *batch = &t->plan->given;
    const struct attn_kv_view *views[] = {&t->layer->owner->k_cache, &t->layer->owner->v_cache};
    const int64_t rows = batch->block_table_rows > 0 ? batch->block_table_rows : batch->num_reqs;
    const int64_t size = views[0]->block_size;
    uint8_t *at[] = {t->tensors[1], t->tensors[2]};
    int32_t *table;
    TRY(take_memory(t, &table, batch->block_table_stride * (int64_t)sizeof *table));
    for (int32_t r = 0; r < t->capsule->num_reqs; r++) {
        const int32_t length = t->capsule->seq_lens[r];
        const int64_t blocks = (length + size - 1) / size;
        int32_t row = t->batch_rows[r];
        TRY_IF(batch->block_table_row != NULL,
               fetch(t, &row, batch->block_table_row + t->batch_rows[r], sizeof row));
        if (row < 0 || row >= rows || blocks > batch->block_table_stride) {
            return refuse(t, "a block table of fewer rows or columns");
        }
        TRY(fetch(t, table, batch->block_table + row * batch->block_table_stride,
                  blocks * (int64_t)sizeof *table));
        for (int32_t i = 0; i < (t->capsule->kv_lora_rank > 0 ? 1 : 2); i++) {
            TRY(read_request(t, views[i], table, length, &at[i]));
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
    text_add(user, "%s", line);
}

/* What a file with the run is made of; the arena has it all. */
static attn_status read_run(struct taking *t, const struct attn_step_io *io)
{
    const struct layer_params_copy *params = t->layer->params;
    TRY(take_memory(t, &t->capsule, sizeof *t->capsule));
    struct capsule *c = t->capsule;
    describe(t);
    TRY(read_lengths(t));
    if (capsule_bytes(c) < 0) {
        return refuse(t, "more than 256 MiB of queries, keys, values and outputs in the step");
    }
    for (int32_t i = 0; i < CAPSULE_TENSORS; i++) {
        TRY(take_memory(t, &t->tensors[i], capsule_tensor_bytes(c, i)));
    }
    const struct attn_io_mla *mla =
        c->kv_lora_rank > 0 ? ext_find(io->next, ATTN_EXT_IO_MLA) : NULL;
    TRY(read_rows(t, 0, mla != NULL ? mla->q_nope : io->q, 0));
    if (mla != NULL) {
        TRY(read_rows(t, 0, mla->q_pe, c->qk_nope_head_dim));
        TRY(read_weights(t));
    }
    TRY(read_rows(t, 3, io->out, 0));
    TRY(read_cache(t));
    TRY_IF(c->has_sinks, fetch(t, c->sinks, params->params.sinks, 4 * (int64_t)c->num_q_heads));
    TRY_IF(c->alibi != ATTN_ALIBI_NONE,
           fetch(t, c->slopes, params->params.alibi_slopes, 4 * (int64_t)c->num_q_heads));
    for (int32_t i = 0; i < CAPSULE_TENSORS; i++) {
        count(c, i, t->tensors[i]);
    }
    return ATTN_OK;
}

static attn_status write_file(struct taking *t, const char *path)
{
    const struct capsule *c = t->capsule;
    struct text file;
    text_init(&file, &t->layer->model->runtime->host);
    capsule_write(c, put, &file);
    for (int32_t i = 0; i < CAPSULE_TENSORS && c->real; i++) {
        text_add_bytes(&file, t->tensors[i], (size_t)capsule_tensor_bytes(c, i));
    }
    attn_status status = ATTN_OK;
    if (file.failed) {
        status =
            error_set(&t->error, ATTN_ERROR_OUT_OF_MEMORY, "capsule", "no memory for the file");
    } else if (!cache_file_write(path, file.data, file.length)) {
        status =
            error_set(&t->error, ATTN_ERROR_IO, "ATTN_RECORD", "%s: %s", path, strerror(errno));
    }
    text_finish(&file);
    return status;
}

static attn_status take_capsule(struct taking *t, const struct attn_step_io *io,
                                const struct recording *record, char path[PATH_MAX])
{
    const char *why = find_unrecorded(t->plan, t->layer, io);
    TRY_IF(why != NULL, refuse(t, why));
    if (snprintf(path, PATH_MAX, "%s/layer-%d-step-%d-%ld.capsule", record->folder, record->layer,
                 record->step, (long)getpid()) >= PATH_MAX) {
        return error_set(&t->error, ATTN_ERROR_IO, "ATTN_RECORD", "the folder's path is too long");
    }
    const attn_model *model = t->plan->model;
    TRY(device_open(model->runtime, model->device, &t->device, &t->error));
    TRY(device_synchronize(t->device, NULL, &t->error));
    TRY(read_run(t, io));
    return write_file(t, path);
}

/* Counts runs that attend, and takes the one that is asked for. */
static attn_status run_watched(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                               struct attn_error *error)
{
    const attn_runtime *runtime = plan->model->runtime;
    struct recording *record = &runtime->observers->record;
    struct taking t = {.plan = plan, .layer = step->layer, .error = ATTN_ERROR_INIT};
    char path[PATH_MAX];
    const attn_status status = run_general(plan, step, io, error);
    if (status != ATTN_OK || io->flags & ATTN_RUN_NO_ATTEND ||
        atomic_fetch_add(&record->num_runs, 1) != record->step) {
        return status;
    }
    arena_init(&t.arena, &runtime->host);
    if (take_capsule(&t, io, record, path) == ATTN_OK) {
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
    return status;
}

void capsule_watch(attn_plan *plan)
{
    for (int32_t i = 0; i < plan->num_steps; i++) {
        struct step *step = &plan->steps[i];
        if (step->layer->index == plan->model->runtime->observers->record.layer &&
            step->program != run_idle) {
            step->enter = run_watched;
        }
    }
}
