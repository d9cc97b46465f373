/* SPDX-License-Identifier: Apache-2.0 */
#include "fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/client.h"
#include "support/random.h"
#include "support/test.h"

enum { HQ = 4, BLOCK = 16 };
enum { T_Q, T_K, T_V, T_OUT, T_LSE, T_SINK_K, T_SINK_V };

static float *random_rows(uint64_t *random, int64_t count, double radius)
{
    float *rows = malloc((size_t)count * sizeof *rows);
    random_floats(random, rows, count, radius);
    return rows;
}

static void set_tensor(struct fixture *f, int32_t which, float *data, int32_t ndim, int64_t a,
                       int64_t b, int64_t c)
{
    int64_t *shape = f->shapes[which];
    shape[0] = a;
    shape[1] = b;
    shape[2] = c;
    f->tensors[which] = (struct attn_tensor){
        data, {ATTN_DEVICE_CPU, 0}, ndim, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
}

static void bind(struct fixture *f, const char *backend)
{
    const struct attn_layer_desc *layers[] = {&f->layer};
    struct attn_layer_params params = {.struct_size = sizeof params};
    CHECK(f,
          client_model(f->api, f->runtime, CLIENT_ORDER(backend), layers, 1, &f->model, &f->error));
    f->bound = f->api->model_layer(f->model, 0);
    CHECK(f, client_cache(f->api, f->bound, f->num_blocks, NULL, &f->cache, &f->error));
    for (int32_t i = 0; i < f->layer.num_kv_heads * f->layer.head_size; i++) {
        f->signs[i] = i * i % 7 < 3 ? -1 : 1;
        f->v_channel_scale[i] = 0.01f; /* v lies within +-1 */
    }
    const int32_t of_k = f->layer.kv_dtype,
                  of_v = f->layer.kv_dtype_v != 0 ? f->layer.kv_dtype_v : of_k;
    const struct attn_kv_quant_params quant =
        EXTENSION(attn_kv_quant_params, ATTN_EXT_KV_QUANT_PARAMS, NULL,
                  .hadamard_signs_k = of_k == ATTN_KV_INT4_PER_TOKEN_HEAD ? f->signs : NULL,
                  .hadamard_signs_v = of_v == ATTN_KV_INT4_PER_TOKEN_HEAD ? f->signs + 1 : NULL,
                  .v_channel_scale = of_v == ATTN_KV_INT8_KV ? f->v_channel_scale : NULL);
    params.next = &quant.ext;
    params.alibi_slopes = f->layer.alibi != ATTN_ALIBI_NONE ? f->sinks : NULL;
    params.sinks = f->layer.has_sinks ? f->sinks : NULL;
    params.sink_k = f->layer.sink_len > 0 ? &f->tensors[T_SINK_K] : NULL;
    params.sink_v = f->layer.sink_len > 0 ? &f->tensors[T_SINK_V] : NULL;
    CHECK(f, f->api->layer_bind_params(f->bound, &params, &f->error));
}

void fixture_plan(struct fixture *f)
{
    CHECK(f,
          client_plan(f->api, f->model, 0, CLIENT_LIMITS(MAX_REQS, MAX_TOKENS, MAX_BLOCKS * BLOCK),
                      &f->plan, &f->workspace, &f->error));
}

/* The keys before the step's own, written by runs that attend nothing. */
static void write_contexts(struct fixture *f, uint64_t *random, int32_t shared)
{
    int32_t d = f->layer.head_size, hk = f->layer.num_kv_heads;
    for (int32_t r = 0; r < f->batch.num_reqs; r++) {
        int32_t context = f->seq_lens[r] - (f->query_start_loc[r + 1] - f->query_start_loc[r]);
        for (int32_t first = r > 0 ? shared : 0; first < context; first += MAX_TOKENS) {
            int32_t count = context - first < MAX_TOKENS ? context - first : MAX_TOKENS;
            int32_t starts[2] = {0, count}, length = first + count;
            int64_t slots[MAX_TOKENS], shapes[2][3] = {{count, hk, d}, {count, hk, d}};
            float *k = random_rows(random, (int64_t)count * hk * d, 4),
                  *v = random_rows(random, (int64_t)count * hk * d, 1);
            struct attn_tensor tk = f->tensors[T_K], tv = f->tensors[T_V];
            struct attn_batch batch = f->batch;
            struct attn_step_io io =
                SIZED(attn_step_io, .flags = ATTN_RUN_NO_ATTEND, .k = &tk, .v = &tv);
            tk.data = k, tk.shape = shapes[0];
            tv.data = v, tv.shape = shapes[1];
            for (int32_t i = 0; i < count; i++) {
                int32_t j = first + i;
                slots[i] = (int64_t)f->block_table[r * MAX_BLOCKS + j / BLOCK] * BLOCK + j % BLOCK;
            }
            batch.num_reqs = 1;
            batch.num_tokens = batch.num_actual_tokens = count;
            batch.query_start_loc = batch.query_start_loc_host = starts;
            batch.seq_lens = batch.seq_lens_host = &length;
            batch.encoder_seq_lens = batch.encoder_seq_lens_host = &length;
            batch.block_table = f->block_table + r * MAX_BLOCKS;
            batch.block_table_rows = 1;
            batch.slot_mapping = slots;
            batch.num_slots = count;
            CHECK(f, f->api->plan_batch(f->plan, &batch, NULL, &f->error));
            CHECK(f, f->api->run(f->plan, f->bound, &io, &f->error));
            free(k);
            free(v);
        }
    }
}

static void make_batch(struct fixture *f, const int32_t *query_lens, const int32_t *lens,
                       int32_t num_reqs, int32_t shared)
{
    int32_t used = 0;
    for (int32_t r = 0; r < num_reqs; r++) {
        f->query_start_loc[r + 1] = f->query_start_loc[r] + query_lens[r];
        f->seq_lens[r] = lens[r];
        for (int32_t b = 0; b < MAX_BLOCKS; b++) {
            int32_t *entry = &f->block_table[r * MAX_BLOCKS + b];
            *entry = INT32_MIN;
            if (b * BLOCK < lens[r]) {
                *entry = r > 0 && (b + 1) * BLOCK <= shared ? f->block_table[b] : used++;
            }
        }
        for (int32_t i = 0; i < query_lens[r]; i++) {
            int32_t j = lens[r] - query_lens[r] + i;
            f->slots[f->query_start_loc[r] + i] =
                (int64_t)f->block_table[r * MAX_BLOCKS + j / BLOCK] * BLOCK + j % BLOCK;
        }
    }
    f->num_blocks = used + 2;
    f->batch = client_batch(num_reqs, f->query_start_loc, f->seq_lens);
    client_blocks(&f->batch, f->block_table, MAX_BLOCKS, f->slots);
    f->batch.encoder_seq_lens = f->seq_lens;
    f->batch.encoder_seq_lens_host = f->seq_lens;
    f->batch.common_prefix_len = shared;
}

static bool own_runtimes, reads_environment;

void fixture_own_runtimes(void)
{
    own_runtimes = true;
}

void fixture_read_environment(void)
{
    own_runtimes = reads_environment = true;
}

void fixture_init(struct fixture *f, const char *backend, const struct attn_layer_desc *layer,
                  const int32_t *query_lens, const int32_t *lens, int32_t num_reqs, int32_t shared,
                  const struct attn_host *host, bool validate)
{
    uint64_t random = 12345;
    struct attn_runtime_options options = client_options(PLUGINS);
    options.host = host;
    options.ignore_environment = !reads_environment;
    options.validate = validate ? 1 : -1;
    memset(f, 0, sizeof *f);
    f->error = (struct attn_error)ATTN_ERROR_INIT;
    f->layer = *layer;
    f->layer.struct_size = sizeof f->layer;
    f->layer.name = "layer";
    f->layer.dtype = ATTN_DTYPE_F32;
    f->layer.num_q_heads = HQ;
    f->layer.num_kv_heads = layer->num_kv_heads > 0 ? layer->num_kv_heads : 2;
    f->layer.head_size = layer->head_size > 0 ? layer->head_size : 32;
    f->layer.scale = layer->scale > 0 ? layer->scale : 0.3f;
    f->layer.block_size = f->layer.kind == ATTN_LAYER_ENCODER ? 0 : BLOCK;
    f->layer.needs_lse = 1;
    static attn_runtime *kept[2]; /* opening one takes longer than the step */
    f->owns_runtime = own_runtimes || host != NULL;
    if (!f->owns_runtime && kept[validate] != NULL) {
        CHECK(f, client_load(CORE_FILE, &f->api, &f->error));
        f->runtime = kept[validate];
    } else {
        CHECK(f, client_open(CORE_FILE, &options, &f->api, &f->runtime, &f->error));
        if (!f->owns_runtime) {
            kept[validate] = f->runtime;
        }
    }
    make_batch(f, query_lens, lens, num_reqs, shared);
    int64_t tokens = f->batch.num_tokens, d = f->layer.head_size, hk = f->layer.num_kv_heads;
    f->q = random_rows(&random, tokens * HQ * d, 4);
    f->k = random_rows(&random, tokens * hk * d, 4);
    f->v = random_rows(&random, tokens * hk * d, 1);
    f->out = calloc((size_t)(tokens * HQ * d), sizeof(float));
    f->lse = calloc((size_t)(tokens * HQ), sizeof(float));
    f->sink_k = random_rows(&random, 64 * hk * d, 4);
    f->sink_v = random_rows(&random, 64 * hk * d, 1);
    for (int32_t h = 0; h < 64; h++) {
        f->sinks[h] = (float)(2 + h % 3);
    }
    set_tensor(f, T_Q, f->q, 3, tokens, HQ, d);
    set_tensor(f, T_K, f->k, 3, tokens, hk, d);
    set_tensor(f, T_V, f->v, 3, tokens, hk, d);
    set_tensor(f, T_OUT, f->out, 3, tokens, HQ, d);
    set_tensor(f, T_LSE, f->lse, 2, HQ, tokens, 0);
    set_tensor(f, T_SINK_K, f->sink_k, 3, f->layer.sink_len, hk, d);
    set_tensor(f, T_SINK_V, f->sink_v, 3, f->layer.sink_len, hk, d);
    f->io = SIZED(attn_step_io, .q = &f->tensors[T_Q], .k = &f->tensors[T_K], .v = &f->tensors[T_V],
                  .out = &f->tensors[T_OUT], .lse = &f->tensors[T_LSE]);
    bind(f, backend);
    fixture_plan(f);
    if (f->cache != NULL) {
        write_contexts(f, &random, shared);
    }
}

void fixture_mixed(struct fixture *f, const char *backend, const struct attn_layer_desc *layer,
                   bool validate)
{
    static const int32_t queries[] = {1, 1, 9, 20}, lens[] = {40, 17, 33, 20};
    fixture_init(f, backend, layer, queries, lens, 4, 0, NULL, validate);
}

void fixture_finish(struct fixture *f)
{
    f->api->plan_destroy(f->plan);
    f->api->model_destroy(f->model);
    if (f->owns_runtime) {
        f->api->runtime_destroy(f->runtime);
    }
    free(f->cache);
    free(f->workspace);
    free(f->q);
    free(f->k);
    free(f->v);
    free(f->out);
    free(f->lse);
    free(f->sink_k);
    free(f->sink_v);
}

void fixture_skip_first(struct fixture *f)
{
    f->batch.num_reqs -= 1;
    f->batch.query_start_loc += 1;
    f->batch.query_start_loc_host += 1;
    f->batch.seq_lens += 1;
    f->batch.seq_lens_host += 1;
    f->batch.block_table += f->batch.block_table_stride;
}

attn_status fixture_batch(struct fixture *f)
{
    return f->api->plan_batch(f->plan, &f->batch, NULL, &f->error);
}

attn_status fixture_run(struct fixture *f)
{
    return f->api->run(f->plan, f->bound, &f->io, &f->error);
}

void fixture_step(struct fixture *f)
{
    CHECK(f, fixture_batch(f));
    CHECK(f, fixture_run(f));
}

void fixture_refuse_plan(struct fixture *f, const char *field)
{
    INVALID(&f->error, field, fixture_batch(f));
}

void fixture_refuse_run(struct fixture *f, const char *field)
{
    INVALID(&f->error, field, fixture_run(f));
}

double fixture_difference(const struct fixture *a, const struct fixture *b)
{
    double largest = 0;
    for (int64_t i = 0; i < (int64_t)a->batch.num_tokens * HQ * a->layer.head_size; i++) {
        double d = fabs((double)a->out[i] - b->out[i]);
        largest = d > largest || isnan(d) ? (isnan(d) ? INFINITY : d) : largest;
    }
    for (int64_t i = 0; i < (int64_t)a->batch.num_tokens * HQ; i++) {
        double d = a->lse[i] == b->lse[i] ? 0 : fabs((double)a->lse[i] - b->lse[i]);
        largest = d > largest || isnan(d) ? (isnan(d) ? INFINITY : d) : largest;
    }
    return largest;
}
