/* SPDX-License-Identifier: Apache-2.0 */
/* A decoder layer whose cache is spread over GPUs gives on every GPU what it gives there alone:
 * each has its own query heads, all the same keys. Decode, drafts and chunks of prefill; also out
 * of a CUDA graph that captured the exchange. */
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_ranks.h"
#include "support/client.h"

enum { BLOCK = 16, HQ = 8, HK = 2, D = 128, REQS = 6, BLOCKS = 80, MAX_ROWS = 4096 };

static const struct {
    const char *name;
    int32_t queries[REQS], lens[REQS];
} batches[] = {
    {"decode", {1, 1, 1, 1, 1, 1}, {40, 17, 1, 2, 333, 1234}},
    {"mixed", {1, 3, 9, 20, 5, 130}, {40, 17, 33, 20, 130, 1000}},
};

/* The layer, spread (`cp`) or whole. */
struct side {
    const struct attn_context_parallel *cp;
    attn_assignment *assignment;
    attn_model *model;
    attn_plan *plan;
    void *cache, *workspace;
};

struct trial {
    struct rank *rank;
    const struct attn_api *api;
    attn_runtime *runtime;
    int32_t dtype;
    int32_t tables[REQS * BLOCKS];
    void *used[64]; /* device memory of the trial */
    int32_t num_used;
    struct attn_error error;
};

#define TRY(t, call)                                                                               \
    do {                                                                                           \
        attn_status status_ = (call);                                                              \
        HOLD((t)->rank, status_ == ATTN_OK, "%s: %d, %s: %s", #call, status_, (t)->error.field,    \
             (t)->error.message);                                                                  \
        if (status_ != ATTN_OK) {                                                                  \
            return false;                                                                          \
        }                                                                                          \
    } while (0)

static void *keep(struct trial *t, const void *bytes, size_t size)
{
    void *memory = device_copy(bytes, size);
    HOLD(t->rank, memory != NULL && t->num_used < 64, "no device memory for %zu bytes", size);
    t->used[t->num_used++ % 64] = memory;
    return memory;
}

static void release(struct trial *t)
{
    cudaStreamSynchronize(t->rank->stream);
    for (int32_t i = 0; i < t->num_used && i < 64; i++) {
        cudaFree(t->used[i]);
    }
    t->num_used = 0;
}

static float random_value(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (1 << 24) - 0.5f;
}

/* [rows, heads, D] of the layer's dtype on the device. */
static struct attn_tensor random_rows(struct trial *t, uint32_t seed, int64_t *shape, float scale)
{
    int64_t count = shape[0] * shape[1] * shape[2];
    bool wide = t->dtype == ATTN_DTYPE_F32;
    size_t bytes = (size_t)count * (wide ? 4 : 2);
    char *host = calloc(1, bytes + 4);
    for (int64_t i = 0; i < count; i++) {
        float value = scale * random_value(&seed);
        memcpy(host + i * (wide ? 4 : 2), (char *)&value + (wide ? 0 : 2), wide ? 4 : 2);
    }
    struct attn_tensor rows = {keep(t, host, bytes),
                               {ATTN_DEVICE_CUDA, t->rank->ranks->rank},
                               3,
                               {wide ? ATTN_CODE_FLOAT : ATTN_CODE_BFLOAT, wide ? 32 : 16, 1},
                               shape,
                               NULL,
                               0};
    free(host);
    return rows;
}

static bool open_core(struct trial *t)
{
    attn_get_api_fn *get_api;
    void *library = dlopen(t->rank->core, RTLD_NOW | RTLD_LOCAL);
    void *symbol = library != NULL ? dlsym(library, ATTN_GET_API_SYMBOL) : NULL;
    const struct attn_runtime_options options = {.struct_size = sizeof options,
                                                 .plugin_path = t->rank->plugins,
                                                 .cache_dir = "",
                                                 .backend = "",
                                                 .validate = -1,
                                                 .ignore_environment = 1,
                                                 .isolation = -1,
                                                 .no_default_plugins = 1};
    HOLD(t->rank, symbol != NULL, "%s does not open", t->rank->core);
    if (symbol == NULL) {
        return false;
    }
    memcpy(&get_api, &symbol, sizeof get_api);
    TRY(t, get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &t->api, &t->error));
    TRY(t, t->api->runtime_create(&options, &t->runtime, &t->error));
    return true;
}

static bool side_init(struct trial *t, struct side *s)
{
    const struct attn_layer_desc desc = {.struct_size = sizeof desc,
                                         .next = s->cp != NULL ? &s->cp->ext : NULL,
                                         .name = "layer",
                                         .kind = ATTN_LAYER_DECODER,
                                         .causal = 1,
                                         .dtype = t->dtype,
                                         .num_q_heads = HQ,
                                         .num_kv_heads = HK,
                                         .head_size = D,
                                         .scale = 0.1f,
                                         .block_size = BLOCK,
                                         .needs_lse = 1};
    const struct attn_layer_desc *layers[] = {&desc};
    const struct attn_select_options options = {.struct_size = sizeof options,
                                                .device = {ATTN_DEVICE_CUDA, t->rank->ranks->rank},
                                                .backend = "cuda_flash"};
    const struct attn_plan_options limits = {
        .struct_size = sizeof limits,
        .limits = &(const struct attn_limits){sizeof(struct attn_limits), NULL, REQS, MAX_ROWS, 0,
                                              BLOCKS * BLOCK, 0, 0}};
    struct attn_kv_spec spec = {.struct_size = sizeof spec};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = k;
    TRY(t, t->api->select(t->runtime, &options, layers, 1, &s->assignment, &t->error));
    TRY(t, t->api->model_create(t->runtime, s->assignment, NULL, &s->model, &t->error));
    attn_layer *layer = t->api->model_layer(s->model, 0);
    TRY(t, t->api->layer_kv_spec(layer, &spec, &t->error));
    s->cache = keep(t, NULL, (size_t)(REQS * BLOCKS * spec.padded_page_bytes));
    TRY(t, t->api->layer_kv_views(layer, s->cache, REQS * BLOCKS, &k, &v, &t->error));
    TRY(t, t->api->layer_bind_kv(layer, &k, &v, &t->error));
    TRY(t, t->api->plan_create(s->model, 0, &limits, &s->plan, &t->error));
    size_t bytes = client_workspace_bytes(t->api, s->plan);
    s->workspace = keep(t, NULL, bytes);
    TRY(t, client_bind_workspace(t->api, s->plan, s->workspace, bytes, &t->error));
    return true;
}

static void side_finish(struct trial *t, struct side *s)
{
    t->api->plan_destroy(s->plan);
    t->api->model_destroy(s->model);
    t->api->assignment_destroy(s->assignment);
}

/* One run over positions first[r] .. end[r]-1 of every request; `graph`: captured, then launched.
 */
static bool step(struct trial *t, struct side *s, const int32_t *first, const int32_t *end,
                 struct attn_step_io *io, bool graph)
{
    int32_t starts[REQS + 1] = {0};
    int64_t slots[MAX_ROWS], positions[BLOCKS * BLOCK];
    int32_t n = s->cp != NULL ? s->cp->decode->world_size : 1;
    int32_t me = s->cp != NULL ? s->cp->decode->rank : 0;
    for (int32_t r = 0; r < REQS; r++) {
        int32_t count = end[r] - first[r];
        starts[r + 1] = starts[r] + count;
        for (int32_t i = 0; i < count; i++) {
            positions[i] = first[r] + i;
        }
        TRY(t, t->api->context_parallel_slots(positions, count, t->tables + r * BLOCKS, BLOCK, me,
                                              n, s->cp != NULL ? s->cp->interleave : 1,
                                              slots + starts[r], &t->error));
    }
    const struct attn_batch batch = {.struct_size = sizeof batch,
                                     .num_reqs = REQS,
                                     .num_tokens = starts[REQS],
                                     .num_actual_tokens = starts[REQS],
                                     .query_start_loc = keep(t, starts, sizeof starts),
                                     .query_start_loc_host = starts,
                                     .seq_lens = keep(t, end, REQS * sizeof *end),
                                     .seq_lens_host = end,
                                     .block_table = keep(t, t->tables, sizeof t->tables),
                                     .block_table_stride = BLOCKS,
                                     .slot_mapping =
                                         keep(t, slots, (size_t)starts[REQS] * sizeof *slots),
                                     .num_slots = starts[REQS]};
    cudaStream_t stream = t->rank->stream;
    attn_layer *layer = t->api->model_layer(s->model, 0);
    io->stream = stream;
    TRY(t, t->api->plan_batch(s->plan, &batch, stream, &t->error));
    if (!graph) {
        TRY(t, t->api->run(s->plan, layer, io, &t->error));
        cudaError_t ran = cudaStreamSynchronize(stream);
        HOLD(t->rank, ran == cudaSuccess, "the step: %s", cudaGetErrorString(ran));
        return ran == cudaSuccess;
    }
    cudaGraph_t captured = NULL;
    cudaGraphExec_t exec = NULL;
    HOLD(t->rank, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
         "no capture");
    attn_status status = t->api->run(s->plan, layer, io, &t->error);
    cudaError_t ran = cudaStreamEndCapture(stream, &captured);
    HOLD(t->rank, status == ATTN_OK, "run in a capture: %s: %s", t->error.field, t->error.message);
    ran = ran == cudaSuccess ? cudaGraphInstantiate(&exec, captured, 0) : ran;
    for (int32_t i = 0; i < 2 && ran == cudaSuccess; i++) {
        ran = cudaGraphLaunch(exec, stream);
    }
    ran = ran == cudaSuccess ? cudaStreamSynchronize(stream) : ran;
    HOLD(t->rank, ran == cudaSuccess, "the captured step: %s", cudaGetErrorString(ran));
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(captured);
    return status == ATTN_OK && ran == cudaSuccess;
}

/* Largest difference of elements, infinite for a NaN on one side. */
static double difference(const void *a, const void *b, size_t count, bool wide)
{
    size_t size = wide ? 4 : 2;
    char *host_a = malloc(count * size), *host_b = malloc(count * size);
    double most = 0;
    cudaMemcpy(host_a, a, count * size, cudaMemcpyDeviceToHost);
    cudaMemcpy(host_b, b, count * size, cudaMemcpyDeviceToHost);
    for (size_t i = 0; i < count; i++) {
        float x = 0, y = 0;
        memcpy((char *)&x + (wide ? 0 : 2), host_a + i * size, size);
        memcpy((char *)&y + (wide ? 0 : 2), host_b + i * size, size);
        double d = fabs((double)x - (double)y);
        most = isnan(d) ? INFINITY : fmax(most, d);
    }
    free(host_a);
    free(host_b);
    return most;
}

static bool trial(struct trial *t, size_t which, int32_t interleave, int32_t reduce, bool graph)
{
    const struct attn_context_parallel cp = {
        .ext = {.id = ATTN_EXT_CONTEXT_PARALLEL, .struct_size = sizeof cp},
        .decode = t->rank->ranks,
        .interleave = interleave,
        .reduce = reduce};
    struct side whole = {0}, spread = {.cp = &cp};
    int32_t context[REQS], start[REQS] = {0}, contexts = 0, tokens = 0;
    bool wide = t->dtype == ATTN_DTYPE_F32;
    /* float32: the order of sums; bf16: each part and each merge rounds once, |out| < 1 */
    double bound = wide ? 1e-4 : 1.6e-2;
    for (int32_t r = 0; r < REQS; r++) {
        context[r] = batches[which].lens[r] - batches[which].queries[r];
        contexts += context[r];
        tokens += batches[which].queries[r];
    }
    int64_t old[] = {contexts, HK, D}, fresh[] = {tokens, HK, D}, rows[] = {tokens, HQ, D};
    int64_t heads[] = {HQ, tokens};
    uint32_t own = 900 + (uint32_t)t->rank->ranks->rank; /* this rank's own heads */
    struct attn_tensor old_k = random_rows(t, 1, old, 4), old_v = random_rows(t, 2, old, 2),
                       k = random_rows(t, 3, fresh, 4), v = random_rows(t, 4, fresh, 2),
                       q = random_rows(t, own, rows, 4), out[2], lse[2];
    if (!side_init(t, &whole) || !side_init(t, &spread)) {
        return false;
    }
    for (int32_t i = 0; i < 2; i++) {
        struct side *side = i == 0 ? &whole : &spread;
        out[i] = random_rows(t, 5 + (uint32_t)i, rows, 99);
        lse[i] = (struct attn_tensor){keep(t, NULL, (size_t)(HQ * tokens) * 4),
                                      q.device,
                                      2,
                                      {ATTN_CODE_FLOAT, 32, 1},
                                      heads,
                                      NULL,
                                      0};
        struct attn_step_io write = {
            .struct_size = sizeof write, .flags = ATTN_RUN_NO_ATTEND, .k = &old_k, .v = &old_v};
        struct attn_step_io io = {
            .struct_size = sizeof io, .q = &q, .k = &k, .v = &v, .out = &out[i], .lse = &lse[i]};
        if (!step(t, side, start, context, &write, false) ||
            !step(t, side, context, batches[which].lens, &io, graph && i == 1)) {
            return false;
        }
    }
    double d = difference(out[0].data, out[1].data, (size_t)(tokens * HQ * D), wide);
    double d_lse = difference(lse[0].data, lse[1].data, (size_t)(tokens * HQ), true);
    HOLD(t->rank, d < bound && d_lse < 1e-3, "%s: out differs by %g, lse by %g",
         batches[which].name, d, d_lse);
    if (t->rank->ranks->rank == 0) {
        printf("%s, %s, interleave %d, %s%s: out %g, lse %g\n", batches[which].name,
               wide ? "f32" : "bf16", interleave,
               reduce == ATTN_CP_ALL_TO_ALL ? "all to all" : "reduce-scatter",
               graph ? ", captured" : "", d, d_lse);
    }
    side_finish(t, &whole);
    side_finish(t, &spread);
    return true;
}

void check_spread(struct rank *rank)
{
    static const int32_t interleaves[] = {1, 2, 16};
    struct trial *t = calloc(1, sizeof *t);
    t->rank = rank;
    t->error = (struct attn_error)ATTN_ERROR_INIT;
    for (int32_t i = 0; i < REQS * BLOCKS; i++) {
        t->tables[i] = REQS * BLOCKS - 1 - i; /* backwards */
    }
    bool held = open_core(t);
    /* Every rank makes the same trials: one that failed on one rank alone would leave the others
     * waiting, so nothing follows it. */
    for (size_t which = 0; which < sizeof batches / sizeof *batches; which++) {
        for (int32_t i = 0; i < 3 * 3 && held; i++) {
            t->dtype = i % 3 == 0 ? ATTN_DTYPE_BF16 : ATTN_DTYPE_F32;
            int32_t reduce = i % 3 == 1 ? ATTN_CP_ALL_GATHER_REDUCE_SCATTER : ATTN_CP_ALL_TO_ALL;
            held = trial(t, which, interleaves[i / 3], reduce, which == 0 && i >= 3);
            release(t);
        }
    }
    if (t->api != NULL) {
        t->api->runtime_destroy(t->runtime);
    }
    free(t);
}
