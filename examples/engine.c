/* SPDX-License-Identifier: Apache-2.0 */
/* An engine in a hundred lines: it opens the core, describes two layers, plans, steps, and says who
 * served it.
 *
 *     cc -I abi examples/engine.c -ldl -o engine && ./engine path/to/libattn.so.1 */
#include <attn/api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

enum { HQ = 4, HK = 2, D = 64, BLOCK = 16, BLOCKS = 8, TOKENS = 20 };

static struct attn_error error = ATTN_ERROR_INIT;

static int fail(const char *what)
{
    fprintf(stderr, "engine: %s: %s: %s\n", what, error.field, error.message);
    return EXIT_FAILURE;
}

/* The engine's own memory: a step's activations, [TOKENS, heads, D] float32. */
static float q[TOKENS][HQ][D], k[TOKENS][HK][D], v[TOKENS][HK][D], out[TOKENS][HQ][D];
static int64_t of_queries[] = {TOKENS, HQ, D}, of_keys[] = {TOKENS, HK, D};

/* Where that memory lies. An engine for a GPU states the GPU, and has its memory there. */
static const struct attn_device device = {ATTN_DEVICE_CPU, 0};

static struct attn_tensor tensor(void *data, int64_t *shape)
{
    return (struct attn_tensor){data, device, 3, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
}

int main(int argc, char **argv)
{
    void *library = dlopen(argc > 1 ? argv[1] : "libattn.so.1", RTLD_NOW | RTLD_LOCAL);
    attn_get_api_fn *get_api = NULL;
    const struct attn_api *api;
    if (library == NULL || (*(void **)&get_api = dlsym(library, ATTN_GET_API_SYMBOL)) == NULL) {
        fprintf(stderr, "engine: %s\n", dlerror());
        return EXIT_FAILURE;
    }
    if (get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &api, &error) != ATTN_OK) {
        return fail("api");
    }
    /* Describe the layers once: one sees everything, the other the last 8 tokens. */
    /* clang-format off */
    struct attn_layer_desc full = {
        .struct_size = sizeof full, .name = "full", .kind = ATTN_LAYER_DECODER, .causal = 1,
        .dtype = ATTN_DTYPE_F32, .num_q_heads = HQ, .num_kv_heads = HK, .head_size = D,
        .scale = 0.125f, .block_size = BLOCK}, sliding = full;
    /* clang-format on */
    sliding.name = "sliding", sliding.has_window = 1, sliding.window_left = 7;
    const struct attn_layer_desc *layers[] = {&full, &sliding};
    const struct attn_select_options on_device = {.struct_size = sizeof on_device,
                                                  .device = device};
    attn_runtime *runtime;
    attn_assignment *assignment;
    attn_model *model;
    if (api->runtime_create(NULL, &runtime, &error) != ATTN_OK ||
        api->select(runtime, &on_device, layers, 2, &assignment, &error) != ATTN_OK ||
        api->model_create(runtime, assignment, NULL, &model, &error) != ATTN_OK) {
        return fail("selection");
    }
    puts("device: the CPU, where this engine's memory lies");
    /* One request of 20 tokens in blocks 5 and 2; every v is 1, and so is every output. */
    const int32_t query_start_loc[] = {0, TOKENS}, seq_lens[] = {TOKENS}, block_table[] = {5, 2};
    int64_t slots[TOKENS];
    for (int t = 0; t < TOKENS; t++) {
        slots[t] = block_table[t / BLOCK] * BLOCK + t % BLOCK;
        for (int i = 0; i < HQ * D; i++) {
            q[t][i / D][i % D] = (float)(i % 7 - 3);
            k[t][i / D % HK][i % D] = (float)(i % 5 - 2);
            v[t][i / D % HK][i % D] = 1;
        }
    }
    struct attn_tensor tq = tensor(q, of_queries), tk = tensor(k, of_keys);
    struct attn_tensor tv = tensor(v, of_keys), to = tensor(out, of_queries);
    /* clang-format off */
    const struct attn_step_io io = {
        .struct_size = sizeof io, .q = &tq, .k = &tk, .v = &tv, .out = &to};
    const struct attn_batch batch = {
        .struct_size = sizeof batch, .num_reqs = 1, .num_tokens = TOKENS,
        .num_actual_tokens = TOKENS, .causal = -1, .query_start_loc = query_start_loc,
        .query_start_loc_host = query_start_loc, .seq_lens = seq_lens, .seq_lens_host = seq_lens,
        .block_table = block_table, .block_table_stride = 2,
        .slot_mapping = slots, .num_slots = TOKENS};
    const struct attn_plan_options options = {
        .struct_size = sizeof options,
        .limits = {.struct_size = sizeof options.limits,
                   .max_num_reqs = 8, .max_num_tokens = 64, .max_seq_len = 128}};
    /* clang-format on */
    for (int32_t i = 0; i < 2; i++) {
        attn_layer *layer = api->model_layer(model, i);
        struct attn_kv_spec spec = {.struct_size = sizeof spec};
        struct attn_kv_view kv[2] = {{.struct_size = sizeof *kv}, {.struct_size = sizeof *kv}};
        struct attn_choice choice = {.struct_size = sizeof choice};
        attn_plan *plan;
        api->layer_kv_spec(layer, &spec,
                           &error); /* a cache in the layout that the layer asks for */
        void *cache = aligned_alloc(256, (size_t)(BLOCKS * spec.padded_page_bytes));
        if (api->layer_kv_views(layer, cache, BLOCKS, &kv[0], &kv[1], &error) != ATTN_OK ||
            api->layer_bind_kv(layer, &kv[0], &kv[1], &error) != ATTN_OK ||
            api->plan_create(model, api->layer_group(layer, ATTN_GROUP_BLOCK_TABLE, 0), &options,
                             &plan, &error) != ATTN_OK) {
            return fail("binding");
        }
        size_t bytes = api->plan_workspace_bytes(plan);
        void *workspace = aligned_alloc(256, bytes);
        if (api->plan_bind_workspace(plan, workspace, bytes, &error) != ATTN_OK ||
            api->plan(plan, &batch, NULL, &error) != ATTN_OK ||
            api->run(plan, layer, &io, &error) != ATTN_OK) {
            return fail("step");
        }
        api->assignment_choice(assignment, i, ATTN_PHASE_PREFILL, &choice);
        printf("layer %s was served by %s: out[19, 0, 0] = %g\n", layers[i]->name, choice.name,
               out[19][0][0]);
        api->plan_destroy(plan);
        free(workspace), free(cache);
    }
    api->model_destroy(model);
    api->assignment_destroy(assignment);
    api->runtime_destroy(runtime);
    dlclose(library);
    return EXIT_SUCCESS;
}
