/* SPDX-License-Identifier: Apache-2.0 */
/* MLA layers: a history of latent rows, and queries that look for one key by its rope part. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"
#include "support/number.h"
#include "support/oracle.h"

#define LOGIT_DEVIATION 3.0
#define NEEDLE_LOGIT 9.0
#define MAX_THREADS 16

/* Tensors of one step. */
struct latent_step {
    struct run_layer *layer;
    const struct batch *batch;
    uint8_t *rows, *q, *out; /* [T, rank + rope], [T, Hq, nope + rope], [T, Hq, v] */
    struct step_lists lists;
    double *keys[MAX_REQUESTS]; /* the oracle's: [length, rank + rope] */
    int32_t next_head;
    bool failed;
    pthread_mutex_t lock;
};

attn_status mla_bind(struct run_engine *engine, struct run_layer *layer)
{
    const struct attn_mla_desc *m = &layer->source->mla;
    const struct attn_layer_desc *d = &layer->source->desc;
    int64_t rows = (int64_t)d->num_q_heads * (m->qk_nope_head_dim + m->v_head_dim);
    layer->terms = (struct row_terms){.dtype = d->dtype,
                                      .num_q_heads = d->num_q_heads,
                                      .num_kv_heads = 1,
                                      .head_size = d->head_size,
                                      .head_size_v = 1, /* no history of values */
                                      .scale = d->scale,
                                      .causal = 1};
    layer->roundings = 3; /* projected, attended (or merged), projected back */
    layer->weights = malloc((size_t)(rows * m->kv_lora_rank) * element_bytes(layer));
    if (layer->weights == NULL) {
        return engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "weights", "no memory for kv_b_proj");
    }
    for (int64_t i = 0; i < rows * m->kv_lora_rank; i++) {
        number_store(layer->weights, i, layer->terms.dtype,
                     random_almost_normal(&engine->random) / sqrt(m->kv_lora_rank));
    }
    int64_t shape[] = {rows, m->kv_lora_rank};
    attn_status status = params_send(engine, layer, 0, layer->weights,
                                     (size_t)(rows * m->kv_lora_rank) * element_bytes(layer));
    if (status != ATTN_OK) {
        return status;
    }
    struct attn_tensor kv_b = tensor_of(engine, layer, layer->device_params[0], 2, shape, NULL);
    struct attn_mla_weights weights = {.ext = {ATTN_EXT_MLA_WEIGHTS, 0, sizeof weights, NULL},
                                       .kv_b_proj = &kv_b};
    struct attn_layer_params params = {.struct_size = sizeof params, .next = &weights.ext};
    return engine->api->layer_bind_params(layer->handle, &params, &engine->error);
}

void mla_tensors_init(struct mla_tensors *t, const struct attn_mla_desc *m,
                      const struct attn_tensor *like, int64_t tokens, int64_t heads, void *q,
                      void *rows)
{
    const int64_t nope = m->qk_nope_head_dim, rope = m->qk_rope_head_dim, rank = m->kv_lora_rank;
    const int64_t sizes[] = {nope, rope, rank, rope}, starts[] = {0, nope, 0, rank};
    *t =
        (struct mla_tensors){.strides = {{heads * (nope + rope), nope + rope, 1}, {rank + rope, 1}},
                             .io = {.ext = {ATTN_EXT_IO_MLA, 0, sizeof t->io, NULL},
                                    .q_nope = q != NULL ? &t->parts[0] : NULL,
                                    .q_pe = q != NULL && rope > 0 ? &t->parts[1] : NULL,
                                    .kv_c = &t->parts[2],
                                    .k_pe = rope > 0 ? &t->parts[3] : NULL}};
    for (int32_t i = q != NULL ? 0 : 2; i < 4; i++) {
        t->parts[i] = *like;
        t->parts[i].ndim = i < 2 ? 3 : 2;
        t->parts[i].data = (uint8_t *)(i < 2 ? q : rows) + starts[i] * (like->dtype.bits / 8);
        t->parts[i].shape = t->shapes[i];
        t->parts[i].strides = t->strides[i / 2];
        t->shapes[i][0] = tokens;
        t->shapes[i][1] = i < 2 ? heads : sizes[i];
        t->shapes[i][2] = sizes[i];
    }
}

attn_status mla_write(struct run_engine *engine, struct run_layer *layer, int32_t r, int32_t first,
                      int32_t end)
{
    struct mla_tensors tensors;
    const size_t row = (size_t)layer->terms.head_size * element_bytes(layer);
    uint8_t *rows = pool_send(engine, &engine->rows, layer->k_history[r] + (size_t)first * row,
                              (size_t)(end - first) * row);
    if (rows == NULL) {
        return engine->error.status;
    }
    const struct attn_tensor like = tensor_of(engine, layer, NULL, 0, NULL, NULL);
    mla_tensors_init(&tensors, &layer->source->mla, &like, end - first, 0, NULL, rows);
    struct attn_step_io io = {.struct_size = sizeof io,
                              .next = &tensors.io.ext,
                              .stream = engine->stream,
                              .flags = ATTN_RUN_NO_ATTEND};
    return engine->api->run(engine->groups[layer->group].plan, layer->handle, &io, &engine->error);
}

/* One query row: noise of the logits' deviation in both parts, and a pull towards key j's rope
 * part, if there is one. */
static void draw_query(struct run_engine *engine, const struct run_layer *layer, int32_t r,
                       int64_t j, uint8_t *row)
{
    const struct attn_mla_desc *m = &layer->source->mla;
    const struct row_terms *t = &layer->terms;
    int32_t size = m->qk_nope_head_dim + m->qk_rope_head_dim;
    double deviation = LOGIT_DEVIATION / (t->scale * sqrt(size)), norm = 1e-30;
    int64_t pe = j * t->head_size + m->kv_lora_rank;
    for (int32_t d = 0; d < m->qk_rope_head_dim; d++) {
        double x = number_load(layer->k_history[r], pe + d, t->dtype);
        norm += x * x;
    }
    for (int32_t h = 0; h < t->num_q_heads; h++) {
        for (int32_t d = 0; d < size; d++) {
            int32_t p = d - m->qk_nope_head_dim;
            double x = p >= 0 ? number_load(layer->k_history[r], pe + p, t->dtype) : 0;
            number_store(row, (int64_t)h * size + d, t->dtype,
                         NEEDLE_LOGIT / (t->scale * norm) * x +
                             deviation * random_almost_normal(&engine->random));
        }
    }
}

static attn_status fill_step(struct run_engine *engine, struct latent_step *step)
{
    struct run_layer *layer = step->layer;
    const struct attn_mla_desc *m = &layer->source->mla;
    const struct batch *batch = step->batch;
    size_t row = (size_t)layer->terms.head_size * element_bytes(layer);
    size_t q_row = (size_t)layer->terms.num_q_heads *
                   ((size_t)m->qk_nope_head_dim + (size_t)m->qk_rope_head_dim) *
                   element_bytes(layer);
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        int32_t r = batch->request[i], first = batch->query_start_loc[i];
        int32_t count = batch->query_start_loc[i + 1] - first, own = batch->seq_lens[i] - count;
        attn_status status = add_keys(engine, layer, r, own, own + count, 0);
        if (status != ATTN_OK) {
            return status;
        }
        memcpy(step->rows + (size_t)first * row, layer->k_history[r] + (size_t)own * row,
               (size_t)count * row);
        for (int32_t c = 0; c < count; c++) {
            const int32_t j = random_below(&engine->random, own + c + 1);
            draw_query(engine, layer, r, j, step->q + (size_t)(first + c) * q_row);
        }
    }
    return ATTN_OK;
}

static attn_status run_step(struct run_engine *engine, const struct latent_step *step)
{
    struct run_layer *layer = step->layer;
    const struct attn_mla_desc *m = &layer->source->mla;
    int64_t tokens = step->batch->query_start_loc[step->batch->num_reqs],
            heads = layer->terms.num_q_heads;
    int64_t size = m->qk_nope_head_dim + m->qk_rope_head_dim;
    int64_t out_shape[] = {tokens, heads, m->v_head_dim};
    struct mla_tensors tensors;
    const size_t e = element_bytes(layer), bytes[] = {(size_t)(tokens * layer->terms.head_size) * e,
                                                      (size_t)(tokens * heads * size) * e,
                                                      (size_t)(tokens * heads * m->v_head_dim) * e};
    const void *sources[] = {step->rows, step->q, step->out};
    uint8_t *sent[3] = {NULL};
    for (int32_t i = 0; i < 3; i++) {
        sent[i] = pool_send(engine, &engine->rows, sources[i], bytes[i]);
        if (sent[i] == NULL) {
            return engine->error.status;
        }
    }
    const struct attn_tensor out = tensor_of(engine, layer, sent[2], 3, out_shape, NULL);
    struct attn_io_index_lists chosen;
    mla_tensors_init(&tensors, m, &out, tokens, heads, sent[1], sent[0]);
    struct attn_step_io io = {
        .struct_size = sizeof io, .next = &tensors.io.ext, .stream = engine->stream, .out = &out};
    attn_status status = ATTN_OK;
    if (step->lists.entries != NULL) {
        tensors.io.ext.next = &chosen.ext;
        status = lists_send(engine, &step->lists, &chosen);
    }
    if (status != ATTN_OK) {
        return status;
    }
    status =
        engine->api->run(engine->groups[layer->group].plan, layer->handle, &io, &engine->error);
    return status == ATTN_OK
               ? device_copy_out(&engine->device, step->out, sent[2], bytes[2], &engine->error)
               : status;
}

struct workplace {
    double *weights, *q, *scores, *out;
    int32_t *seen;
};

static void verify_head(const struct latent_step *step, int32_t h, const struct workplace *w,
                        struct tally *tally)
{
    const struct run_layer *layer = step->layer;
    const struct attn_mla_desc *m = &layer->source->mla;
    const struct batch *batch = step->batch;
    const bool listed = step->lists.entries != NULL;
    int32_t heads = layer->terms.num_q_heads, number = layer->terms.dtype;
    int64_t size = m->qk_nope_head_dim + m->qk_rope_head_dim;
    int64_t elements = (int64_t)(m->qk_nope_head_dim + m->v_head_dim) * m->kv_lora_rank;
    const struct oracle_mla head = {
        m->qk_nope_head_dim, m->qk_rope_head_dim, m->v_head_dim, m->kv_lora_rank,
        layer->terms.scale,  w->weights,          NULL};
    for (int64_t i = 0; i < elements; i++) {
        w->weights[i] = number_load(layer->weights, h * elements + i, number);
    }
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        int32_t first = batch->query_start_loc[i], end = batch->query_start_loc[i + 1];
        for (int32_t t = first; t < end; t++) {
            int32_t position = batch->seq_lens[i] - (end - t), count = position + 1;
            for (int64_t d = 0; d < size; d++) {
                w->q[d] = number_load(step->q, ((int64_t)t * heads + h) * size + d, number);
            }
            if (listed) {
                count = list_keys(&step->lists, t, 0, position, w->seen);
            }
            oracle_mla(&head, w->q, step->keys[i], listed ? w->seen : NULL, count, w->scores,
                       w->out);
            compare_row(layer, w->out, step->out, ((int64_t)t * heads + h) * m->v_head_dim,
                        m->v_head_dim, NULL, tally);
        }
    }
}

/* A thread takes heads until none is left. */
static void *verify_heads(void *argument)
{
    struct latent_step *step = argument;
    const struct attn_mla_desc *m = &step->layer->source->mla;
    size_t rank = (size_t)m->kv_lora_rank,
           rows = (size_t)m->qk_nope_head_dim + (size_t)m->v_head_dim, most = 0;
    struct tally tally = {0, 0};
    for (int32_t i = 0; i < step->batch->num_reqs; i++) {
        most = (size_t)step->batch->seq_lens[i] > most ? (size_t)step->batch->seq_lens[i] : most;
    }
    const struct workplace w = {
        calloc(rows * rank, sizeof(double)),
        calloc((size_t)m->qk_nope_head_dim + (size_t)m->qk_rope_head_dim, sizeof(double)),
        calloc(most, sizeof(double)), calloc((size_t)m->v_head_dim, sizeof(double)),
        calloc(most, sizeof(int32_t))};
    bool ready =
        w.weights != NULL && w.q != NULL && w.scores != NULL && w.out != NULL && w.seen != NULL;
    for (;;) {
        pthread_mutex_lock(&step->lock);
        int32_t h = step->next_head++;
        step->failed |= !ready;
        pthread_mutex_unlock(&step->lock);
        if (!ready || h >= step->layer->terms.num_q_heads) {
            break;
        }
        verify_head(step, h, &w, &tally);
    }
    pthread_mutex_lock(&step->lock);
    step->layer->tally.max_error = fmax(step->layer->tally.max_error, tally.max_error);
    step->layer->tally.compared += tally.compared;
    pthread_mutex_unlock(&step->lock);
    free(w.weights);
    free(w.q);
    free(w.scores);
    free(w.out);
    free(w.seen);
    return NULL;
}

static attn_status verify_step(struct run_engine *engine, struct latent_step *step)
{
    const struct batch *batch = step->batch;
    const struct row_terms *t = &step->layer->terms;
    pthread_t threads[MAX_THREADS];
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int32_t started = 0;
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        int64_t elements = (int64_t)batch->seq_lens[i] * t->head_size;
        step->keys[i] = malloc((size_t)elements * sizeof(double));
        for (int64_t e = 0; step->keys[i] != NULL && e < elements; e++) {
            step->keys[i][e] = number_load(step->layer->k_history[batch->request[i]], e, t->dtype);
        }
        step->failed |= step->keys[i] == NULL;
    }
    const bool ready = !step->failed; /* from here on the threads write it, under the lock */
    pthread_mutex_init(&step->lock, NULL);
    while (ready && started + 1 < cores && started < MAX_THREADS &&
           pthread_create(&threads[started], NULL, verify_heads, step) == 0) {
        started++;
    }
    if (ready) {
        verify_heads(step);
    }
    for (int32_t i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_mutex_destroy(&step->lock);
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        free(step->keys[i]);
    }
    return step->failed
               ? engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "verify", "no memory; try --scale")
               : ATTN_OK;
}

attn_status mla_run(struct run_engine *engine, struct run_layer *layer, const struct batch *batch)
{
    const struct attn_mla_desc *m = &layer->source->mla;
    size_t tokens = (size_t)batch->query_start_loc[batch->num_reqs], e = element_bytes(layer);
    size_t heads = (size_t)layer->terms.num_q_heads,
           size = (size_t)m->qk_nope_head_dim + (size_t)m->qk_rope_head_dim;
    struct latent_step step = {.layer = layer,
                               .batch = batch,
                               .rows = malloc(tokens * (size_t)layer->terms.head_size * e),
                               .q = malloc(tokens * heads * size * e),
                               .out = malloc(tokens * heads * (size_t)m->v_head_dim * e)};
    attn_status status = lists_of_step(engine, layer, batch, &step.lists);
    if (step.rows == NULL || step.q == NULL || step.out == NULL) {
        status = engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "rows", "no memory; try --scale");
    } else if (status == ATTN_OK) {
        memset(step.out, 0xff, tokens * heads * (size_t)m->v_head_dim * e);
        status = fill_step(engine, &step);
    }
    status = status == ATTN_OK ? run_step(engine, &step) : status;
    if (status == ATTN_OK && engine->settings->verify) {
        status = verify_step(engine, &step);
    }
    pool_reset(engine, &engine->rows);
    free(step.rows);
    free(step.q);
    free(step.out);
    free(step.lists.entries);
    return status;
}
