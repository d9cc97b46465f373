/* SPDX-License-Identifier: Apache-2.0 */
/* A step of one layer, of any kind: rows of histories and drawn queries to the device, the run, and
 * its output against the oracle. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"
#include "support/number.h"

#define MAX_THREADS 16

static bool is_indexer(const struct run_layer *layer)
{
    return layer->source->desc.kind == ATTN_LAYER_INDEXER;
}

/* The rows in which each tensor lies, and whether it takes their end or their beginning. */
static const struct {
    int32_t rows; /* enum step_rows */
    bool last;
} role_rows[LAYER_ROLES] = {[ROLE_Q] = {STEP_Q},
                            [ROLE_Q_NOPE] = {STEP_Q},
                            [ROLE_Q_PE] = {STEP_Q, true},
                            [ROLE_K] = {STEP_K},
                            [ROLE_KV_C] = {STEP_K},
                            [ROLE_K_PE] = {STEP_K, true},
                            [ROLE_MIXED_QKV] = {STEP_K},
                            [ROLE_V] = {STEP_V},
                            [ROLE_A] = {STEP_V},
                            [ROLE_B] = {STEP_V, true},
                            [ROLE_WEIGHTS] = {STEP_WEIGHTS},
                            [ROLE_OUT] = {STEP_OUT}};

/* Elements of a head's row, or of a token's where the tensors in it have no heads. */
static int32_t head_width(const struct run_layer *layer, int32_t rows)
{
    const struct row_terms *t = &layer->terms;
    const int32_t widths[STEP_ROWS] = {t->query_size, t->head_size, t->head_size_v, t->num_q_heads,
                                       t->out_size};
    return widths[rows];
}

/* Bytes of a token's row; 0: the layer has none. */
static size_t row_bytes(const struct run_layer *layer, int32_t rows)
{
    const struct row_terms *t = &layer->terms;
    const int32_t heads[STEP_ROWS] = {t->num_q_heads, t->num_kv_heads, t->num_kv_heads, 1,
                                      t->num_out_heads};
    const bool words = rows == STEP_WEIGHTS || (rows == STEP_OUT && is_indexer(layer));
    return (size_t)heads[rows] * (size_t)head_width(layer, rows) *
           (words ? sizeof(float) : element_bytes(layer));
}

/* Sends `tokens` rows, NULL: none, and makes the tensors that lie in them. */
static void send_rows(struct run_engine *engine, struct run_layer *layer,
                      const void *const rows[STEP_ROWS], int64_t tokens, struct layer_io *io,
                      void *sent[STEP_ROWS])
{
    layer_io_init(io, &layer->source->desc, engine->stream);
    for (int32_t i = 0; i < STEP_ROWS; i++) {
        sent[i] = rows[i] != NULL
                      ? memory_upload(&engine->rows, rows[i], (size_t)tokens * row_bytes(layer, i))
                      : NULL;
    }
    for (enum layer_role role = 0; role < LAYER_ROLES; role++) {
        struct layer_rows sizes = layer_rows(io->layer, role);
        const int32_t from = role_rows[role].rows, width = head_width(layer, from);
        if (sent[from] == NULL || sizes.dims == 0) {
            continue;
        }
        sizes.dtype = role == ROLE_WEIGHTS ? ATTN_DTYPE_F32 : sizes.dtype;
        const size_t skipped = role_rows[role].last ? (size_t)(width - sizes.dims) : 0;
        layer_io_set(io, role, sizes, tokens, engine->device.device,
                     (uint8_t *)sent[from] + skipped * element_bytes(layer),
                     width != sizes.dims ? width : 0);
    }
}

static attn_status run_io(struct run_engine *engine, const struct run_layer *layer,
                          const struct layer_io *io)
{
    TRY(engine_sent(engine, &engine->kept, "parameters"));
    TRY(engine_sent(engine, &engine->rows, "a step's tensors"));
    return engine->api->run(engine->groups[layer->group].plan, layer->handle, &io->io,
                            &engine->error);
}

attn_status layer_write(struct run_engine *engine, struct run_layer *layer,
                        const struct batch *batch)
{
    const int32_t r = batch->request[0], end = batch->seq_lens[0];
    const int32_t first = end - batch->query_start_loc[1];
    const void *rows[STEP_ROWS] = {
        [STEP_K] = layer->k_history[r] + (size_t)first * row_bytes(layer, STEP_K),
        [STEP_V] = layer->v_history[r] + (size_t)first * row_bytes(layer, STEP_V)};
    struct layer_io io;
    struct more_io more;
    void *sent[STEP_ROWS];
    send_rows(engine, layer, rows, end - first, &io, sent);
    io.io.flags = ATTN_RUN_NO_ATTEND;
    if (layer->kind->bring != NULL) {
        layer->kind->bring(engine, layer, batch, end - first, sent[STEP_V], &io, &more);
    }
    return run_io(engine, layer, &io);
}

static bool has_new_keys(const struct run_step *step)
{
    return !step->cross && step->layer->owner == NULL;
}

/* New rows into the histories and the step, and a query for each token. */
static void fill_step(struct run_step *step)
{
    struct run_engine *engine = step->engine;
    struct run_layer *layer = step->layer;
    const struct batch *batch = step->batch;
    const bool writes = has_new_keys(step);
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        const int32_t r = batch->request[i], first = batch->query_start_loc[i];
        const int32_t count = batch->query_start_loc[i + 1] - first;
        const int32_t own = batch->seq_lens[i] - count;
        /* a recurrent layer's prompt is run as it was drawn with its arrival */
        const bool drawn = own < engine->requests[r].drawn;
        if (writes && !drawn) {
            add_keys(engine, layer, r, own, own + count, 0);
        }
        const uint8_t *histories[] = {NULL, layer->k_history[r], layer->v_history[r]};
        for (int32_t b = STEP_K; b <= STEP_V && writes; b++) {
            const size_t row = row_bytes(layer, b);
            memcpy(step->rows[b] + (size_t)first * row, histories[b] + (size_t)own * row,
                   (size_t)count * row);
        }
        for (int32_t c = 0; c < count && layer->kind->make_query != NULL; c++) {
            layer->kind->make_query(step, i, c);
        }
    }
}

static attn_status run_step(struct run_step *step)
{
    struct run_engine *engine = step->engine;
    const void *rows[STEP_ROWS];
    struct layer_io io;
    struct more_io more;
    void *sent[STEP_ROWS];
    const int32_t *lists = NULL;
    memcpy(rows, step->rows, sizeof rows);
    send_rows(engine, step->layer, rows, step->tokens, &io, sent);
    if (step->lists.entries != NULL) {
        lists = memory_upload(&engine->rows, step->lists.entries, step->lists.bytes);
    }
    if (step->layer->kind->bring != NULL) {
        step->layer->kind->bring(engine, step->layer, step->batch, step->tokens, sent[STEP_V], &io,
                                 &more);
    }
    if (lists != NULL && step->layer->source->mla.topk > 0) {
        io.mla.topk_indices = lists;
        io.mla.topk_stride = step->lists.form->max_entries;
    } else if (lists != NULL) {
        layer_io_lists(&io, lists, step->lists.per_token, step->lists.form->max_entries);
    }
    TRY(run_io(engine, step->layer, &io));
    return device_copy_out(&engine->device, step->rows[STEP_OUT], sent[STEP_OUT],
                           (size_t)step->tokens * row_bytes(step->layer, STEP_OUT), &engine->error);
}

/* A thread verifies parts until none is left. */
static void *verify_parts(void *argument)
{
    struct run_step *step = argument;
    struct tally tally = {0, 0};
    pthread_mutex_lock(&step->lock);
    while (step->next_part < step->num_parts) {
        const int32_t part = step->next_part++;
        pthread_mutex_unlock(&step->lock);
        step->layer->kind->verify(step, part, &tally);
        pthread_mutex_lock(&step->lock);
    }
    step->layer->tally.max_error = fmax(step->layer->tally.max_error, tally.max_error);
    step->layer->tally.compared += tally.compared;
    pthread_mutex_unlock(&step->lock);
    return NULL;
}

static void verify_step(struct run_step *step)
{
    const struct row_terms *t = &step->layer->terms;
    pthread_t threads[MAX_THREADS];
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int32_t started = 0;
    for (int32_t i = 0; i < step->batch->num_reqs && step->layer->kind->wants_keys; i++) {
        const int64_t count = (int64_t)step_keys(step, i) * t->num_kv_heads * t->head_size;
        step->keys[i] = command_calloc((size_t)count, sizeof(double));
        for (int64_t e = 0; e < count; e++) {
            step->keys[i][e] =
                number_load(step->layer->k_history[step->batch->request[i]], e, t->dtype);
        }
    }
    step->num_parts =
        step->layer->kind->by_heads ? step->layer->terms.num_q_heads : step->batch->num_reqs;
    pthread_mutex_init(&step->lock, NULL);
    while (started + 1 < cores && started + 1 < step->num_parts && started < MAX_THREADS &&
           pthread_create(&threads[started], NULL, verify_parts, step) == 0) {
        started++;
    }
    verify_parts(step);
    for (int32_t i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_mutex_destroy(&step->lock);
}

attn_status layer_run(struct run_engine *engine, struct run_layer *layer, const struct batch *batch)
{
    struct run_step step = {.engine = engine,
                            .layer = layer,
                            .batch = batch,
                            .tokens = batch->query_start_loc[batch->num_reqs],
                            .cross = layer->source->desc.kind == ATTN_LAYER_CROSS};
    lists_of_step(engine, layer, batch, &step.lists);
    for (int32_t i = 0; i < STEP_ROWS; i++) {
        const bool has = (i != STEP_WEIGHTS || is_indexer(layer)) &&
                         (has_new_keys(&step) || (i != STEP_K && i != STEP_V));
        const size_t bytes = has ? (size_t)step.tokens * row_bytes(layer, i) : 0;
        step.rows[i] = bytes > 0 ? command_calloc(1, bytes) : NULL;
        if (i == STEP_OUT) {
            memset(step.rows[i], POISON, bytes);
        }
    }
    fill_step(&step);
    const attn_status status = run_step(&step);
    if (status == ATTN_OK && layer->kind->keep != NULL) {
        layer->kind->keep(&step);
    }
    if (status == ATTN_OK && engine->settings->verify) {
        verify_step(&step);
    }
    memory_finish(&engine->rows);
    if (is_indexer(layer)) { /* for the sparse layers after it */
        free(layer->lists);
        layer->lists = (int32_t *)(void *)step.rows[STEP_OUT];
        step.rows[STEP_OUT] = NULL;
    }
    for (int32_t i = 0; i < STEP_ROWS; i++) {
        free(step.rows[i]);
    }
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        free(step.keys[i]);
    }
    free(step.lists.entries);
    return status;
}
