/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of random models: chosen backends next to cpu_ref on the same inputs, in float32, with
 * threads that are cancelled and processes that fork in the middle. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "soak.h"
#include "support/client.h"

enum { MAX_LAYERS = 3, MAX_REQS = 5, MAX_TOKENS = 96, MAX_BLOCKS = 12, ROW = 4 * 128 };
#define BOUND 2e-4f

/* What one side, the tested or the reference, has of a model. */
struct side {
    attn_model *model;
    attn_plan *plan;
    void *cache[MAX_LAYERS], *workspace;
    float out[MAX_TOKENS * ROW];
};

struct run {
    struct round *round;
    struct attn_layer_desc layers[MAX_LAYERS];
    int32_t num_layers, block;
    struct side sides[2];
    int32_t lens[MAX_REQS], num_reqs;
    int32_t start[MAX_REQS + 1], seq_lens[MAX_REQS], table[MAX_REQS * MAX_BLOCKS];
    int64_t slots[MAX_TOKENS];
    float q[MAX_TOKENS * ROW], k[MAX_TOKENS * ROW], v[MAX_TOKENS * ROW];
    float sinks[8], slopes[8];
    struct attn_batch batch;
};

static void draw_layers(struct run *run)
{
    struct round *round = run->round;
    static const int32_t sizes[] = {8, 32, 64, 96, 128}, blocks[] = {16, 32, 64};
    static const char *const names[] = {"layers.0", "layers.1", "layers.2"};
    const int32_t kv_heads = 1 << soak_random(round, 3);
    struct attn_layer_desc first =
        SIZED(attn_layer_desc, .kind = ATTN_LAYER_DECODER, .dtype = ATTN_DTYPE_F32,
              .num_q_heads = kv_heads * (4 / kv_heads), .num_kv_heads = kv_heads,
              .head_size = sizes[soak_random(round, 5)], .scale = 0.25f, .causal = 1,
              .window_left = -1, .window_right = -1);
    run->block = first.block_size = blocks[soak_random(round, 3)];
    run->num_layers = 1 + (int32_t)soak_random(round, MAX_LAYERS);
    switch (soak_random(round, 5)) {
    case 0:
        first.has_window = 1;
        first.window_left = 1 + (int32_t)soak_random(round, 40);
        first.window_right = 0;
        break;
    case 1:
        first.chunk_size = run->block * (1 + (int32_t)soak_random(round, 2));
        break;
    default:
        break;
    }
    for (int32_t i = 0; i < run->num_layers; i++) {
        run->layers[i] = first;
        run->layers[i].name = names[i];
        run->layers[i].soft_cap = soak_chance(round, 4) ? 20.0f : 0;
        run->layers[i].has_sinks = soak_chance(round, 4);
        run->layers[i].alibi = soak_chance(round, 4) ? ATTN_ALIBI_LINEAR : ATTN_ALIBI_NONE;
    }
    for (int32_t i = 0; i < 8; i++) {
        run->sinks[i] = (float)soak_random(round, 100) / 50 - 1;
        run->slopes[i] = (float)soak_random(round, 100) / 400;
    }
}

static attn_status bind(struct run *run, struct side *side, const char *backend)
{
    struct round *round = run->round;
    const struct attn_api *api = round->api;
    const struct attn_layer_desc *layers[MAX_LAYERS];
    for (int32_t i = 0; i < run->num_layers; i++) {
        layers[i] = &run->layers[i];
    }
    attn_status status = client_model(api, round->runtime, CLIENT_ORDER(backend), layers,
                                      run->num_layers, &side->model, &round->error);
    for (int32_t i = 0; i < run->num_layers && status == ATTN_OK; i++) {
        attn_layer *layer = api->model_layer(side->model, i);
        const struct attn_layer_params params =
            SIZED(attn_layer_params, .sinks = run->layers[i].has_sinks ? run->sinks : NULL,
                  .alibi_slopes = run->layers[i].alibi ? run->slopes : NULL);
        status =
            client_cache(api, layer, MAX_REQS * MAX_BLOCKS, NULL, &side->cache[i], &round->error);
        status = status ? status : api->layer_bind_params(layer, &params, &round->error);
    }
    return status;
}

static attn_status make_plan(struct run *run, struct side *side)
{
    struct round *round = run->round;
    const struct attn_api *api = round->api;
    const struct attn_plan_options *options = CLIENT_LIMITS(MAX_REQS, MAX_TOKENS, 0);
    attn_plan *endless = NULL;
    if (soak_chance(round, 8)) { /* limits that mean none: refused, or not, and never wrapped */
        struct attn_limits most = *options->limits;
        const struct attn_plan_options wild = SIZED(attn_plan_options, .limits = &most);
        most.max_num_reqs = INT32_MAX - (int32_t)soak_random(round, 1 << 30);
        const attn_status status = api->plan_create(side->model, 0, &wild, &endless, &round->error);
        soak_check_error(round, status);
        api->plan_destroy(endless);
    }
    return client_plan(api, side->model, 0, options, &side->plan, &side->workspace, &round->error);
}

/* Each request goes on by some tokens, or starts again; its blocks are its own, in any order. */
static void draw_batch(struct run *run)
{
    struct round *round = run->round;
    int32_t row = 0;
    const int32_t longest = run->block * MAX_BLOCKS;
    run->num_reqs = 1 + (int32_t)soak_random(round, MAX_REQS);
    run->start[0] = 0;
    for (int32_t r = 0; r < run->num_reqs; r++) {
        int32_t queries = soak_chance(round, 2) ? 1 : (int32_t)soak_random(round, 40);
        queries = queries < MAX_TOKENS - row ? queries : MAX_TOKENS - row;
        if (run->lens[r] + queries > longest || soak_chance(round, 30)) {
            run->lens[r] = 0;
        }
        for (int32_t i = 0; i < queries; i++) {
            const int32_t position = run->lens[r] + i;
            run->slots[row + i] =
                (int64_t)run->table[r * MAX_BLOCKS + position / run->block] * run->block +
                position % run->block;
        }
        run->lens[r] += queries;
        run->seq_lens[r] = run->lens[r];
        row += queries;
        run->start[r + 1] = row;
    }
    run->batch = client_batch(run->num_reqs, run->start, run->seq_lens);
    client_blocks(&run->batch, run->table, MAX_BLOCKS, run->slots);
    run->batch.max_query_len = MAX_TOKENS;
    run->batch.max_seq_len = longest;
    for (int32_t i = 0; i < row * ROW; i++) {
        run->q[i] = (float)soak_random(round, 4096) / 1024 - 2;
        run->k[i] = (float)soak_random(round, 4096) / 1024 - 2;
        run->v[i] = (float)soak_random(round, 4096) / 1024 - 2;
    }
}

static attn_status step(struct run *run, struct side *side, int32_t layer, struct attn_error *error)
{
    const struct attn_api *api = run->round->api;
    const struct attn_layer_desc *l = &run->layers[layer];
    int64_t q_shape[3] = {MAX_TOKENS, l->num_q_heads, l->head_size};
    int64_t k_shape[3] = {MAX_TOKENS, l->num_kv_heads, l->head_size};
#define TENSOR(memory, of)                                                                         \
    {                                                                                              \
        memory, {ATTN_DEVICE_CPU, 0}, 3, {ATTN_CODE_FLOAT, 32, 1}, of, NULL, 0                     \
    }
    const struct attn_tensor q = TENSOR(run->q, q_shape), k = TENSOR(run->k, k_shape),
                             v = TENSOR(run->v, k_shape), out = TENSOR(side->out, q_shape);
    const struct attn_step_io io = SIZED(attn_step_io, .q = &q, .k = &k, .v = &v, .out = &out);
    const attn_status status = api->plan_batch(side->plan, &run->batch, NULL, error);
    return status ? status : api->run(side->plan, api->model_layer(side->model, layer), &io, error);
}

static void compare(const struct run *run, int32_t layer)
{
    const struct attn_layer_desc *l = &run->layers[layer];
    const int32_t count = run->batch.num_actual_tokens * l->num_q_heads * l->head_size;
    for (int32_t i = 0; i < count; i++) {
        const float a = run->sides[0].out[i], b = run->sides[1].out[i];
        if (!(fabsf(a - b) <= BOUND * (1 + fabsf(b)))) {
            soak_broken(run->round, "layer %d, element %d: %g next to %g", layer, i, (double)a,
                        (double)b);
        }
    }
}

static void step_both(struct run *run, int32_t layer)
{
    struct round *round = run->round;
    for (int32_t s = 0; s < 2; s++) {
        const attn_status status = step(run, &run->sides[s], layer, &round->error);
        if (status != ATTN_OK) {
            soak_broken(round, "a step: status %d: %s: %s", status, round->error.field,
                        round->error.message);
        }
    }
    compare(run, layer);
    atomic_fetch_add(&soak_compared, 1);
}

struct doomed {
    struct run *run;
    int32_t layer;
    atomic_bool began;
};

static void *step_cancelled(void *argument)
{
    struct doomed *doomed = argument;
    struct attn_error error = ATTN_ERROR_INIT;
    atomic_store(&doomed->began, true);
    for (;;) {
        (void)step(doomed->run, &doomed->run->sides[0], doomed->layer, &error);
        pthread_testcancel();
    }
    return NULL;
}

/* A thread that steps is cancelled; the same step by another thread finds nothing locked. */
static void cancel_one(struct run *run, int32_t layer)
{
    struct doomed doomed = {.run = run, .layer = layer};
    pthread_t thread;
    if (pthread_create(&thread, NULL, step_cancelled, &doomed) != 0) {
        return;
    }
    while (!atomic_load(&doomed.began)) {
        usleep(10);
    }
    usleep((useconds_t)soak_random(run->round, 300));
    pthread_cancel(thread);
    pthread_join(thread, NULL);
}

/* A worker process of the engine takes the step, too. */
static void fork_one(struct run *run, int32_t layer)
{
    int status = 0;
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(300);
        step_both(run, layer);
        _exit(0);
    }
    if (pid > 0 && (waitpid(pid, &status, 0) != pid || status != 0)) {
        soak_broken(run->round, "a forked process ended with status %x", status);
    }
}

static void take_steps(struct run *run)
{
    struct round *round = run->round;
    const int32_t steps = 1 + (int32_t)soak_random(round, 6);
    for (int32_t r = 0; r < MAX_REQS; r++) { /* a shuffle of all blocks */
        for (int32_t i = 0; i < MAX_BLOCKS; i++) {
            run->table[r * MAX_BLOCKS + i] = r * MAX_BLOCKS + i;
        }
    }
    for (int32_t i = MAX_REQS * MAX_BLOCKS - 1; i > 0; i--) {
        const int32_t j = (int32_t)soak_random(round, (uint64_t)i + 1), kept = run->table[i];
        run->table[i] = run->table[j];
        run->table[j] = kept;
    }
    for (int32_t s = 0; s < steps; s++) {
        draw_batch(run);
        faults_jump_clock(round);
        for (int32_t layer = 0; layer < run->num_layers; layer++) {
            if (soak_chance(round, 8)) {
                cancel_one(run, layer);
            }
            if (round->alone && getenv("SOAK_NO_FORK") == NULL && soak_chance(round, 20)) {
                fork_one(run, layer);
            }
            step_both(run, layer);
        }
    }
}

void steps_run(struct round *round)
{
    static const char *const texts[] = {"",
                                        "cpu_ref",
                                        "cpu_simd?",
                                        "cpu_*",
                                        "^cpu_ref",
                                        "cpu_simd@scalar?",
                                        "nonsuch",
                                        "cpu_simd@avx2?",
                                        "decode=cpu_ref",
                                        ";;",
                                        "prefill=cpu_simd?;cpu_ref"};
    struct run *run = calloc(1, sizeof *run);
    run->round = round;
    draw_layers(run);
    attn_status status =
        bind(run, &run->sides[0], texts[soak_random(round, sizeof texts / sizeof *texts)]);
    soak_check_error(round, status);
    status = status ? status : bind(run, &run->sides[1], "cpu_ref");
    status = status ? status : make_plan(run, &run->sides[0]);
    status = status ? status : make_plan(run, &run->sides[1]);
    soak_check_error(round, status);
    if (status == ATTN_OK) {
        atomic_store(&round->fail_at, 0); /* a step allocates nothing */
        const long before = atomic_load(&round->allocations);
        take_steps(run);
        if (atomic_load(&round->allocations) != before) {
            soak_broken(round, "a step allocated");
        }
    }
    for (int32_t s = 0; s < 2; s++) {
        struct side *side = &run->sides[s];
        round->api->plan_destroy(side->plan);
        round->api->model_destroy(side->model);
        free(side->workspace);
        for (int32_t i = 0; i < MAX_LAYERS; i++) {
            free(side->cache[i]);
        }
    }
    atomic_fetch_add(&soak_refused, status != ATTN_OK);
    if (status != ATTN_OK && getenv("SOAK_TELL") != NULL) {
        fprintf(stderr, "%s: %s\n", round->error.field, round->error.message);
    }
    free(run);
}
