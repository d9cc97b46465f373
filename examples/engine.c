/* SPDX-License-Identifier: Apache-2.0 */
/* A small engine: it opens the core, describes two layers, has their backends chosen, gives them a
 * paged cache, and decodes: a prompt, then token after token while the cache grows block by block.
 * Every step is checked against plain attention over all keys so far. docs/engine.md explains it
 * line by line.
 *
 *     cc -I abi examples/engine.c -ldl -lm -o engine && ./engine path/to/libattn.so.1 */
#include <attn/api.h>
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { HQ = 4, HK = 2, D = 64, BLOCK = 16, BLOCKS = 8, PROMPT = 20, LENGTH = 50, LAYERS = 2 };
enum { ROW_BLOCKS = (LENGTH + BLOCK - 1) / BLOCK, WINDOW = 8 };

static const struct attn_api *api;
static struct attn_error error = ATTN_ERROR_INIT;

/* Where this engine's memory lies. One for a GPU states the GPU, and has its memory there. */
static const struct attn_device device = {ATTN_DEVICE_CPU, 0};

/* One layer: its cache, and a plan for its block table (layers of one cache specification would
 * share both). */
struct layer {
    attn_layer *bound;
    attn_plan *plan;
    void *cache, *workspace;
    float keys[LENGTH][HK][D], values[LENGTH][HK][D]; /* for the check alone */
};
static struct layer layers[LAYERS];

/* The one request: which blocks hold its keys, in order. */
static int32_t block_table[ROW_BLOCKS], num_blocks;

static int fail(const char *what)
{
    fprintf(stderr, "engine: %s: %s: %s\n", what, error.field, error.message);
    return EXIT_FAILURE;
}

static float draw(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / (float)(1 << 23) - 1;
}

static void *take(size_t bytes) /* on a GPU this would be device memory */
{
    return aligned_alloc(256, (bytes + 255) / 256 * 256);
}

/* Once per layer: memory in the layout that its backend likes best, and a plan with its workspace.
 */
static attn_status bind(attn_model *model, int32_t index)
{
    struct layer *layer = &layers[index];
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    struct attn_cache_memory memory = {
        .struct_size = sizeof memory, .num_blocks = BLOCKS, .device = device};
    const struct attn_limits limits = {.struct_size = sizeof limits,
                                       .max_num_reqs = 1,
                                       .max_num_tokens = PROMPT,
                                       .max_seq_len = LENGTH};
    const struct attn_plan_options options = {.struct_size = sizeof options, .limits = &limits};
    struct attn_workspace workspace = {.struct_size = sizeof workspace};
    layer->bound = api->model_layer(model, index);
    attn_status status = api->layer_cache_spec(layer->bound, 0, &spec, &error);
    memory.base = layer->cache = take((size_t)(BLOCKS * spec.padded_page_bytes));
    status = status ? status : api->layer_bind_memory(layer->bound, &memory, &error);
    int32_t group = api->layer_group(layer->bound, ATTN_GROUP_BLOCK_TABLE, 0);
    status = status ? status : api->plan_create(model, group, &options, &layer->plan, &error);
    status = status ? status : api->plan_workspace(layer->plan, &workspace, &error);
    workspace.memory = layer->workspace = take(workspace.bytes); /* the limits' worst case */
    return status ? status : api->plan_bind_workspace(layer->plan, &workspace, &error);
}

/* A place in the cache for each new position, in a new block where the last one is full. */
static void give_slots(int32_t first, int32_t count, int64_t *slots)
{
    static const int32_t free_blocks[BLOCKS] = {5, 2, 7, 0, 3, 6, 1, 4};
    for (int32_t t = 0; t < count; t++) {
        int32_t position = first + t;
        if (position / BLOCK == num_blocks) {
            block_table[num_blocks] = free_blocks[num_blocks];
            num_blocks++;
        }
        slots[t] = (int64_t)block_table[position / BLOCK] * BLOCK + position % BLOCK;
    }
}

/* Plain attention of one query head, to see that the step is right. */
static float difference(const struct layer *layer, const float *q, const float *out, int32_t head,
                        int32_t position, int32_t window)
{
    double sum = 0, weighted[D] = {0}, largest = 0;
    for (int32_t j = window > 0 && position >= window ? position - window + 1 : 0; j <= position;
         j++) {
        double score = 0;
        for (int32_t d = 0; d < D; d++) {
            score += (double)q[d] * layer->keys[j][head / (HQ / HK)][d];
        }
        double weight = exp(0.125 * score);
        sum += weight;
        for (int32_t d = 0; d < D; d++) {
            weighted[d] += weight * layer->values[j][head / (HQ / HK)][d];
        }
    }
    for (int32_t d = 0; d < D; d++) {
        const double error = fabs(out[d] - weighted[d] / sum);
        largest = error <= largest ? largest : isnan(error) ? INFINITY : error;
    }
    return (float)largest;
}

/* `count` new tokens after the `first` that the cache holds: plan and run of every layer. */
static attn_status step(int32_t first, int32_t count, float *largest)
{
    static float q[PROMPT][HQ][D], k[PROMPT][HK][D], v[PROMPT][HK][D], out[PROMPT][HQ][D];
    int64_t slots[PROMPT], of_queries[] = {count, HQ, D}, of_keys[] = {count, HK, D};
    const struct attn_dtype f32 = {ATTN_CODE_FLOAT, 32, 1};
    const struct attn_tensor tq = {q, device, 3, f32, of_queries, NULL, 0};
    const struct attn_tensor tk = {k, device, 3, f32, of_keys, NULL, 0};
    const struct attn_tensor tv = {v, device, 3, f32, of_keys, NULL, 0};
    const struct attn_tensor to = {out, device, 3, f32, of_queries, NULL, 0};
    const int32_t query_start_loc[] = {0, count}, seq_lens[] = {first + count};
    give_slots(first, count, slots);
    /* clang-format off */
    const struct attn_step_io io = {.struct_size = sizeof io, .q = &tq, .k = &tk, .v = &tv, .out = &to};
    const struct attn_batch batch = {
        .struct_size = sizeof batch, .num_reqs = 1, .num_tokens = count, .num_actual_tokens = count,
        .query_start_loc = query_start_loc, .query_start_loc_host = query_start_loc,
        .seq_lens = seq_lens, .seq_lens_host = seq_lens, .block_table = block_table,
        .block_table_stride = ROW_BLOCKS, .slot_mapping = slots, .num_slots = count};
    /* clang-format on */
    for (int32_t i = 0; i < LAYERS; i++) {
        struct layer *layer = &layers[i];
        for (int32_t n = 0; n < count * HQ * D; n++) {
            (&q[0][0][0])[n] = 3 * draw();
        }
        for (int32_t n = 0; n < count * HK * D; n++) {
            (&k[0][0][0])[n] = (&layer->keys[first][0][0])[n] = draw();
            (&v[0][0][0])[n] = (&layer->values[first][0][0])[n] = draw();
        }
        attn_status status = api->plan_batch(layer->plan, &batch, NULL, &error);
        status = status ? status : api->run(layer->plan, layer->bound, &io, &error);
        if (status != ATTN_OK) {
            return status;
        }
        for (int32_t n = 0; n < count * HQ; n++) {
            int32_t t = n / HQ, h = n % HQ;
            *largest = fmaxf(
                *largest, difference(layer, q[t][h], out[t][h], h, first + t, i == 1 ? WINDOW : 0));
        }
    }
    return ATTN_OK;
}

int main(int argc, char **argv)
{
    void *library = dlopen(argc > 1 ? argv[1] : "libattn.so.1", RTLD_NOW | RTLD_LOCAL);
    attn_get_api_fn *get_api = NULL;
    if (library == NULL || (*(void **)&get_api = dlsym(library, ATTN_GET_API_SYMBOL)) == NULL) {
        fprintf(stderr, "engine: %s\n", dlerror());
        return EXIT_FAILURE;
    }
    if (get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &api, &error) != ATTN_OK) {
        return fail("api");
    }
    /* clang-format off */
    struct attn_layer_desc full = {
        .struct_size = sizeof full, .name = "full", .kind = ATTN_LAYER_DECODER, .dtype = ATTN_DTYPE_F32,
        .num_q_heads = HQ, .num_kv_heads = HK, .head_size = D, .scale = 0.125f, .causal = 1, .block_size = BLOCK};
    /* clang-format on */
    struct attn_layer_desc sliding = full;
    sliding.name = "sliding", sliding.has_window = 1, sliding.window_left = WINDOW - 1;
    const struct attn_layer_desc *described[LAYERS] = {&full, &sliding};
    const struct attn_select_options on_device = {.struct_size = sizeof on_device,
                                                  .device = device};
    attn_runtime *runtime;
    attn_assignment *assignment;
    attn_model *model;
    if (api->runtime_create(NULL, &runtime, &error) != ATTN_OK ||
        api->select(runtime, &on_device, described, LAYERS, &assignment, &error) != ATTN_OK ||
        api->model_create(runtime, assignment, NULL, &model, &error) != ATTN_OK) {
        return fail("selection");
    }
    for (int32_t i = 0; i < LAYERS; i++) {
        struct attn_choice choice = {.struct_size = sizeof choice};
        if (bind(model, i) != ATTN_OK) {
            return fail("binding");
        }
        api->assignment_choice(assignment, i, ATTN_PHASE_DECODE, &choice);
        printf("layer %s was served by %s\n", described[i]->name, choice.name);
    }
    float largest = 0;
    for (int32_t length = 0; length < LENGTH; length += length == 0 ? PROMPT : 1) {
        if (step(length, length == 0 ? PROMPT : 1, &largest) != ATTN_OK) {
            return fail("step");
        }
    }
    printf("%d tokens in %d blocks, largest difference %.1e\n", LENGTH, num_blocks,
           (double)largest);
    for (int32_t i = 0; i < LAYERS; i++) {
        api->plan_destroy(layers[i].plan);
        free(layers[i].workspace), free(layers[i].cache);
    }
    api->model_destroy(model);
    api->assignment_destroy(assignment);
    api->runtime_destroy(runtime);
    dlclose(library);
    return largest < 1e-4f ? EXIT_SUCCESS : EXIT_FAILURE;
}
