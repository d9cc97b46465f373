/* SPDX-License-Identifier: Apache-2.0 */
/* Lending the threads of an engine whose operators are entered by all of them at once (ggml and
 * many others): every thread calls the operator with its number, the first one runs the layer, and
 * the others wait and help with the loops that the kernels start. No thread is made, none
 * sleeps, nothing is locked.
 *
 *     cc -I abi examples/spmd.c -ldl -lm -lpthread -o spmd && ./spmd path/to/libattn.so.1 */
#include <attn/api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    THREADS = 3,
    HQ = 8,
    HK = 2,
    D = 64,
    BLOCK = 16,
    LENGTH = 512,
    BLOCKS = LENGTH / BLOCK,
    STEPS = 20
};

/* ---- the part to copy: a loop that waiting threads join ---- */

/* One team: the threads that stand inside the operator. A loop is open while `body` may be called;
 * a helper announces itself in `inside` before it looks, so the leader never returns while one is
 * still at work. */
struct team {
    attn_parallel_body *body;
    void *argument;
    int64_t count, grain;
    _Atomic int64_t next;
    atomic_int open, inside, finished; /* finished: the operator's run is over */
};

static void take_slices(struct team *team, int32_t worker)
{
    for (;;) {
        int64_t begin = atomic_fetch_add(&team->next, team->grain);
        if (begin >= team->count) {
            return;
        }
        int64_t end = begin + team->grain < team->count ? begin + team->grain : team->count;
        team->body(team->argument, begin, end, worker);
    }
}

/* attn_host.parallel_for: the leader opens a loop, works, and waits for those who joined. */
static void team_parallel_for(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                              void *argument)
{
    struct team *team = user;
    team->body = body, team->argument = argument, team->count = count,
    team->grain = grain > 0 ? grain : 1;
    atomic_store(&team->next, 0);
    atomic_store(&team->open, 1);
    take_slices(team, 0);
    atomic_store(&team->open, 0);
    while (atomic_load(&team->inside) > 0) {
    }
}

/* What every other thread does while the leader is in run(). */
static void team_help(struct team *team, int32_t worker)
{
    while (!atomic_load(&team->finished)) {
        if (atomic_load(&team->open)) {
            atomic_fetch_add(&team->inside, 1);
            if (atomic_load(&team->open)) {
                take_slices(team, worker);
            }
            atomic_fetch_sub(&team->inside, 1);
        }
    }
}

/* The operator, as the engine calls it in each of its threads. `status` is the leader's. */
static void attention_operator(struct team *team, int32_t thread, const struct attn_api *api,
                               attn_plan *plan, attn_layer *layer, const struct attn_step_io *io,
                               attn_status *status, struct attn_error *error)
{
    if (thread == 0) {
        *status = api->run(plan, layer, io, error);
        atomic_store(&team->finished, 1);
    } else {
        team_help(team, thread);
    }
}

/* ---- an engine around it ---- */

struct engine {
    struct team team;
    const struct attn_api *api;
    attn_plan *plan;
    attn_layer *layer;
    struct attn_step_io io;
    attn_status status;
    struct attn_error error;
    pthread_barrier_t barrier; /* the engine's own, between operators */
};

struct thread {
    struct engine *engine;
    int32_t number;
};

static void *thread_main(void *argument)
{
    const struct thread *me = argument;
    struct engine *e = me->engine;
    for (int step = 0; step < STEPS; step++) {
        pthread_barrier_wait(&e->barrier);
        attention_operator(&e->team, me->number, e->api, e->plan, e->layer, &e->io, &e->status,
                           &e->error);
        pthread_barrier_wait(&e->barrier);
        if (me->number == 0) { /* no thread is in the operator now */
            atomic_store(&e->team.finished, 0);
        }
    }
    return NULL;
}

static int fail(const struct engine *e, const char *what)
{
    fprintf(stderr, "spmd: %s: %s: %s\n", what, e->error.field, e->error.message);
    return EXIT_FAILURE;
}

/* One decode over LENGTH keys that lie in the cache already; every v is 1 + its position's parity.
 */
static attn_status prepare(struct engine *e, attn_model *model, struct attn_batch *batch)
{
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    const struct attn_limits limits = {.struct_size = sizeof limits,
                                       .max_num_reqs = 1,
                                       .max_num_tokens = 1,
                                       .max_seq_len = LENGTH};
    const struct attn_plan_options options = {.struct_size = sizeof options, .limits = &limits};
    struct attn_workspace workspace = {.struct_size = sizeof workspace};
    e->layer = e->api->model_layer(model, 0);
    attn_status status = e->api->layer_cache_spec(e->layer, 0, &spec, &e->error);
    void *cache = aligned_alloc(256, (size_t)(BLOCKS * spec.padded_page_bytes));
    const struct attn_cache_memory memory = {
        .struct_size = sizeof memory, .base = cache, .num_blocks = BLOCKS};
    status = status ? status : e->api->layer_bind_memory(e->layer, &memory, &e->error);
    status = status ? status : e->api->layer_cache_view(e->layer, 0, &k, &e->error);
    status = status ? status : e->api->layer_cache_view(e->layer, 1, &v, &e->error);
    status = status ? status : e->api->plan_create(model, 0, &options, &e->plan, &e->error);
    for (int32_t i = 0; status == ATTN_OK && i < LENGTH * HK * D; i++) {
        int64_t j = i / (HK * D), h = i / D % HK, d = i % D;
        int64_t at = j / BLOCK * k.stride_block + j % BLOCK * k.stride_slot + h * k.stride_head;
        int64_t to = j / BLOCK * v.stride_block + j % BLOCK * v.stride_slot + h * v.stride_head;
        ((float *)((char *)k.data + at))[d] = (float)((j * 7 + d) % 11 - 5) / 50;
        ((float *)((char *)v.data + to))[d] = (float)(1 + j % 2);
    }
    status = status ? status : e->api->plan_workspace(e->plan, &workspace, &e->error);
    workspace.memory = aligned_alloc(256, workspace.bytes);
    status = status ? status : e->api->plan_bind_workspace(e->plan, &workspace, &e->error);
    return status ? status : e->api->plan_batch(e->plan, batch, NULL, &e->error);
}

int main(int argc, char **argv)
{
    static struct engine e = {.error = ATTN_ERROR_INIT};
    static float q[HQ][D], out[HQ][D];
    static int32_t blocks[BLOCKS];
    void *library = dlopen(argc > 1 ? argv[1] : "libattn.so.1", RTLD_NOW | RTLD_LOCAL);
    attn_get_api_fn *get_api = NULL;
    if (library == NULL || (*(void **)&get_api = dlsym(library, ATTN_GET_API_SYMBOL)) == NULL ||
        get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &e.api, &e.error) != ATTN_OK) {
        return fail(&e, "core");
    }
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = (i * 5 + 3) % BLOCKS;
    }
    for (int i = 0; i < HQ * D; i++) {
        q[i / D][i % D] = (float)(i % 7 - 3) / 3;
    }
    /* clang-format off */
    const struct attn_host host = {
        .struct_size = sizeof host, .user = &e.team, .parallel_for = team_parallel_for, .num_threads = THREADS};
    const struct attn_runtime_options options = {.struct_size = sizeof options, .host = &host};
    const struct attn_layer_desc desc = {
        .struct_size = sizeof desc, .name = "layer", .kind = ATTN_LAYER_DECODER, .dtype = ATTN_DTYPE_F32,
        .num_q_heads = HQ, .num_kv_heads = HK, .head_size = D, .scale = 0.125f, .causal = 1, .block_size = BLOCK};
    const int32_t query_start_loc[] = {0, 1}, seq_lens[] = {LENGTH};
    struct attn_batch batch = {
        .struct_size = sizeof batch, .num_reqs = 1, .num_tokens = 1, .num_actual_tokens = 1,
        .query_start_loc = query_start_loc, .query_start_loc_host = query_start_loc, .seq_lens = seq_lens,
        .seq_lens_host = seq_lens, .block_table = blocks, .block_table_stride = BLOCKS};
    /* clang-format on */
    const struct attn_layer_desc *described = &desc;
    attn_runtime *runtime;
    attn_assignment *assignment;
    attn_model *model;
    if (e.api->runtime_create(&options, &runtime, &e.error) != ATTN_OK ||
        e.api->select(runtime, NULL, &described, 1, &assignment, &e.error) != ATTN_OK ||
        e.api->model_create(runtime, assignment, NULL, &model, &e.error) != ATTN_OK ||
        prepare(&e, model, &batch) != ATTN_OK) {
        return fail(&e, "setting up");
    }
    int64_t shape[] = {1, HQ, D};
    const struct attn_device cpu = {ATTN_DEVICE_CPU, 0};
    const struct attn_tensor tq = {q, cpu, 3, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
    const struct attn_tensor to = {out, cpu, 3, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
    e.io = (struct attn_step_io){.struct_size = sizeof e.io, .q = &tq, .out = &to};

    pthread_t threads[THREADS];
    struct thread numbers[THREADS];
    pthread_barrier_init(&e.barrier, NULL, THREADS);
    for (int32_t i = 0; i < THREADS; i++) {
        numbers[i] = (struct thread){&e, i};
        if (pthread_create(&threads[i], NULL, thread_main, &numbers[i]) != 0) {
            return fail(&e, "threads");
        }
    }
    for (int32_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    if (e.status != ATTN_OK) {
        return fail(&e, "run");
    }
    printf("%d threads, %d steps: out[0, 0] = %.4f\n", THREADS, STEPS, (double)out[0][0]);
    return out[0][0] > 1.3f && out[0][0] < 1.7f ? EXIT_SUCCESS : EXIT_FAILURE;
}
