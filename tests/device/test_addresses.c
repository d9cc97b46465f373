/* SPDX-License-Identifier: Apache-2.0 */
/* What an engine hands in from a wrong memory is refused by name, whatever it says of itself. Its
 * blocks are four of the device's, so that every block table is made there, of page lists too. */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <attn/collectives.h>
#include <attn/recurrent.h>

#include "support/client.h"
#include "support/layer.h"
#include "support/test.h"

enum { TOKENS = 20, HEADS = 2, SIZE = 64, BLOCK = 16, BLOCKS = 4 };

/* Every array of a step, at once on the host and in the device's memory. */
struct arrays {
    float q[TOKENS][HEADS][SIZE], k[TOKENS][HEADS][SIZE], v[TOKENS][HEADS][SIZE];
    float out[TOKENS][HEADS][SIZE], lse[HEADS][TOKENS], sinks[HEADS];
    int32_t query_start_loc[2], seq_lens[1], block_table[2];
    int32_t page_indices[3], page_start_loc[2], last_page_len[1];
    int64_t slots[TOKENS];
    float largest, amax[HEADS][SIZE];
};

static struct {
    const struct attn_api *api;
    attn_runtime *runtime;
    attn_open_device *opened;
    attn_model *model;
    attn_layer *layer;
    attn_plan *plan;
    struct arrays host, *device; /* what lies there may not be touched */
    void *cache, *workspace;
    struct attn_tensor q, k, v, out, lse;
    struct attn_batch batch;
    struct attn_step_io io;
} f;

static const struct attn_device fake = {ATTN_DEVICE_EXTENSION, 0}, cpu = {ATTN_DEVICE_CPU, 0};
static int64_t of_rows[] = {TOKENS, HEADS, SIZE}, of_lse[] = {HEADS, TOKENS};
static struct attn_error error;

#define OK(call)                                                                                   \
    do {                                                                                           \
        error = (struct attn_error)ATTN_ERROR_INIT;                                                \
        if ((call) != ATTN_OK) {                                                                   \
            fail_msg("%s: %s", error.field, error.message);                                        \
        }                                                                                          \
    } while (0)
#define ELSEWHERE(call, name)                                                                      \
    do {                                                                                           \
        error = (struct attn_error)ATTN_ERROR_INIT;                                                \
        assert_int_equal(call, ATTN_ERROR_INVALID_ARGUMENT);                                       \
        assert_string_equal(error.field, name);                                                    \
        assert_non_null(                                                                           \
            strstr(error.message, "on cpu:0; the layer's backend runs on extension:0"));           \
    } while (0)

static void make_runtime(bool validates)
{
    struct attn_runtime_options options = client_options(PLUGINS);
    options.validate = validates ? 1 : -1;
    options.isolation = -1;
    setenv("FAKE_DEVICE_BLOCK", "4", 1);
    OK(client_open(CORE_FILE, &options, &f.api, &f.runtime, &error));
}

static void make_layer(void)
{
    struct attn_layer_desc desc = layer_decoder("full", HEADS, HEADS, SIZE, BLOCK);
    desc.has_sinks = 1;
    desc.needs_lse = 1;
    desc.needs_page_lists = 1;
    const struct attn_layer_desc *layers[] = {&desc};
    const struct attn_select_options options = SIZED(attn_select_options, .device = fake);
    OK(client_model(f.api, f.runtime, &options, layers, 1, &f.model, &error));
    f.layer = f.api->model_layer(f.model, 0);
}

static struct attn_tensor tensor(void *data, int32_t ndim, int64_t *shape)
{
    return (struct attn_tensor){data, fake, ndim, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
}

static void make_arrays(void)
{
    for (int32_t t = 0; t < TOKENS; t++) {
        f.host.slots[t] = t < BLOCK ? 2 * BLOCK + t : t;
        for (int32_t i = 0; i < HEADS * SIZE; i++) {
            f.host.v[t][i / SIZE][i % SIZE] = 1 + (float)t;
        }
    }
    f.host.query_start_loc[1] = f.host.seq_lens[0] = TOKENS;
    f.host.block_table[0] = f.host.page_indices[1] = 2; /* keys 0 to 15 */
    f.host.block_table[1] = f.host.page_indices[2] = 1;
    f.host.page_start_loc[0] = 1;
    f.host.page_start_loc[1] = 3;
    f.host.last_page_len[0] = TOKENS - BLOCK;
    f.host.sinks[0] = f.host.sinks[1] = -100; /* next to nothing */
    OK(f.api->device->allocate(f.opened, ATTN_MEMORY_DEVICE, sizeof f.host, (void **)&f.device,
                               &error));
    OK(client_copy(f.api, f.opened, f.device, &f.host, sizeof f.host, ATTN_COPY_HOST_TO_DEVICE,
                   NULL, &error));
    f.q = tensor(f.device->q, 3, of_rows);
    f.k = tensor(f.device->k, 3, of_rows);
    f.v = tensor(f.device->v, 3, of_rows);
    f.out = tensor(f.device->out, 3, of_rows);
    f.lse = tensor(f.device->lse, 2, of_lse);
    f.io = SIZED(attn_step_io, .q = &f.q, .k = &f.k, .v = &f.v, .out = &f.out, .lse = &f.lse);
    f.batch = client_batch(1, f.host.query_start_loc, f.host.seq_lens);
    f.batch.query_start_loc = f.device->query_start_loc;
    f.batch.seq_lens = f.device->seq_lens;
    client_blocks(&f.batch, f.device->block_table, 2, f.device->slots);
}

static int set_up(bool validates)
{
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    memset(&f, 0, sizeof f);
    make_runtime(validates);
    OK(f.api->device->open(f.runtime, fake, &f.opened, &error));
    make_layer();
    make_arrays();
    OK(f.api->layer_cache_spec(f.layer, 0, &spec, &error));
    OK(f.api->device->allocate(f.opened, ATTN_MEMORY_DEVICE,
                               (size_t)(BLOCKS * spec.padded_page_bytes), &f.cache, &error));
    return 0;
}

static int plain(void **state)
{
    return set_up(false);
}

static int validating(void **state)
{
    return set_up(true);
}

static void bind_all(void)
{
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    const struct attn_layer_params params =
        SIZED(attn_layer_params, .sinks = f.device->sinks, .device = fake);
    OK(client_views(f.api, f.layer, f.cache, BLOCKS, &k, &v, &error));
    assert_memory_equal(&k.device, &fake, sizeof fake);
    OK(client_bind(f.api, f.layer, &k, &v, &error));
    OK(f.api->layer_bind_params(f.layer, &params, &error));
    OK(f.api->plan_create(f.model, 0, CLIENT_LIMITS(1, TOKENS, TOKENS + 3), &f.plan, &error));
    size_t bytes = client_workspace_bytes(f.api, f.plan);
    void *wrong = client_memory(bytes);
    ELSEWHERE(client_bind_workspace(f.api, f.plan, wrong, bytes, &error), "workspace");
    free(wrong);
    OK(f.api->device->allocate(f.opened, ATTN_MEMORY_DEVICE, bytes, &f.workspace, &error));
    OK(client_bind_workspace(f.api, f.plan, f.workspace, bytes, &error));
}

static int tear_down(void **state)
{
    void *memory[] = {f.device, f.cache, f.workspace};
    f.api->plan_destroy(f.plan);
    f.api->model_destroy(f.model);
    for (int32_t i = 0; i < 3; i++) {
        f.api->device->free(f.opened, ATTN_MEMORY_DEVICE, memory[i]);
    }
    f.api->device->close(f.opened);
    f.api->runtime_destroy(f.runtime);
    return 0;
}

static void runs_and_is_right(void)
{
    OK(f.api->run(f.plan, f.layer, &f.io, &error));
    OK(client_copy(f.api, f.opened, &f.host, f.device, sizeof f.host, ATTN_COPY_DEVICE_TO_HOST,
                   NULL, &error));
    for (int32_t t = 0; t < TOKENS; t++) { /* the mean of the values up to it */
        assert_true(fabsf(f.host.out[t][1][SIZE - 1] - (float)(t + 2) / 2) < 1e-3f);
    }
}

TEST_AROUND(test_bindings, plain, tear_down)
{
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    struct attn_layer_params params = SIZED(attn_layer_params, .sinks = f.device->sinks);
    OK(client_views(f.api, f.layer, f.cache, BLOCKS, &k, &v, &error));
    v.device = cpu;
    ELSEWHERE(client_bind(f.api, f.layer, &k, &v, &error), "v");
    v.device = (struct attn_device){0, 0}; /* not stated: the driver knows */
    void *own = k.data;
    k.data = &f.host;
    k.data = (void *)((uintptr_t)k.data / 64 * 64);
    ELSEWHERE(client_bind(f.api, f.layer, &k, &v, &error), "k");
    k.device = (struct attn_device){0, 0};
    ELSEWHERE(client_bind(f.api, f.layer, &k, &v, &error), "k");
    k.data = own;
    OK(client_bind(f.api, f.layer, &k, &v, &error));
    params.device = cpu;
    ELSEWHERE(f.api->layer_bind_params(f.layer, &params, &error), "attn_layer_params");
    params.device = fake;
    params.sinks = f.host.sinks;
    ELSEWHERE(f.api->layer_bind_params(f.layer, &params, &error), "sinks");
    params.sinks = f.device->sinks;
    OK(f.api->layer_bind_params(f.layer, &params, &error));
}

/* Every array of a plan's first batch. */
TEST_AROUND(test_first_batch, plain, tear_down)
{
    const struct attn_batch whole = f.batch;
    bind_all();
    f.batch.query_start_loc = f.host.query_start_loc;
    ELSEWHERE(f.api->plan_batch(f.plan, &f.batch, NULL, &error), "query_start_loc");
    f.batch = whole, f.batch.seq_lens = f.host.seq_lens;
    ELSEWHERE(f.api->plan_batch(f.plan, &f.batch, NULL, &error), "seq_lens");
    f.batch = whole, f.batch.block_table = f.host.block_table;
    ELSEWHERE(f.api->plan_batch(f.plan, &f.batch, NULL, &error), "block_table");
    f.batch = whole, f.batch.slot_mapping = f.host.slots;
    ELSEWHERE(f.api->plan_batch(f.plan, &f.batch, NULL, &error), "slot_mapping");
    f.batch = whole, f.batch.query_start_loc_host = f.device->query_start_loc;
    INVALID(&error, "query_start_loc_host", f.api->plan_batch(f.plan, &f.batch, NULL, &error));
    assert_string_equal(error.message, "on extension:0; the host reads it");
    f.batch = whole;
    OK(f.api->plan_batch(f.plan, &f.batch, NULL, &error));
    runs_and_is_right();
}

/* Whatever else a batch may bring: each array where its reader is. */
TEST_AROUND(test_every_array, plain, tear_down)
{
    static struct attn_batch_recurrent gdn = {
        .ext = {.id = ATTN_EXT_BATCH_RECURRENT, .struct_size = sizeof gdn}};
    static struct attn_batch_context_parallel context = {
        .ext = {.id = ATTN_EXT_BATCH_CONTEXT, .struct_size = sizeof context, .next = &gdn.ext}};
    const struct {
        const char *name;
        void *field;
        bool of_host;
    } arrays[] = {
        {"key_start_loc", &f.batch.key_start_loc, false},
        {"block_table_row", &f.batch.block_table_row, false},
        {"page_indices", &f.batch.page_indices, false},
        {"page_start_loc", &f.batch.page_start_loc, false},
        {"last_page_len", &f.batch.last_page_len, false},
        {"causal_per_request", &f.batch.causal_per_request, false},
        {"encoder_seq_lens", &f.batch.encoder_seq_lens, false},
        {"logits_indices", &f.batch.logits_indices, false},
        {"spans", &f.batch.spans, false},
        {"span_start_loc", &f.batch.span_start_loc, false},
        {"tree", &f.batch.tree, false},
        {"state_slots", &gdn.state_slots, false},
        {"has_initial_state", &gdn.has_initial_state, false},
        {"num_accepted_tokens", &gdn.num_accepted_tokens, false},
        {"initial_slots", &gdn.initial_slots, false},
        {"checkpoint_slots", &gdn.checkpoint_slots, false},
        {"local_seq_lens", &context.local_seq_lens, false},
        {"seq_lens_host", &f.batch.seq_lens_host, true},
        {"key_start_loc_host", &f.batch.key_start_loc_host, true},
        {"encoder_seq_lens_host", &f.batch.encoder_seq_lens_host, true},
        {"page_start_loc_host", &f.batch.page_start_loc_host, true},
        {"last_page_len_host", &f.batch.last_page_len_host, true},
    };
    bind_all();
    f.batch.next = &context.ext;
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        void *before, *wrong = arrays[i].of_host ? (void *)f.device : (void *)&f.host;
        memcpy(&before, arrays[i].field, sizeof before);
        memcpy(arrays[i].field, &wrong, sizeof wrong);
        INVALID(&error, arrays[i].name, f.api->plan_batch(f.plan, &f.batch, NULL, &error));
        memcpy(arrays[i].field, &before, sizeof before);
    }
}

/* The same step by page lists, with and without what the host may know of them. */
TEST_AROUND(test_page_lists, plain, tear_down)
{
    bind_all();
    f.batch.block_table = NULL;
    f.batch.block_table_stride = 0;
    f.batch.page_indices = f.host.page_indices;
    f.batch.page_start_loc = f.device->page_start_loc;
    f.batch.num_pages = 3;
    ELSEWHERE(f.api->plan_batch(f.plan, &f.batch, NULL, &error), "page_indices");
    f.batch.page_indices = f.device->page_indices;
    OK(f.api->plan_batch(f.plan, &f.batch, NULL, &error));
    runs_and_is_right();
    f.batch.seq_lens = f.batch.seq_lens_host = NULL;
    f.batch.last_page_len = f.device->last_page_len;
    OK(f.api->plan_batch(f.plan, &f.batch, NULL, &error));
    runs_and_is_right();
    f.batch.page_start_loc_host = f.host.page_start_loc;
    f.batch.last_page_len_host = f.host.last_page_len;
    OK(f.api->plan_batch(f.plan, &f.batch, NULL, &error));
    runs_and_is_right();
    f.host.last_page_len[0] = 0;
    INVALID(&error, "last_page_len", f.api->plan_batch(f.plan, &f.batch, NULL, &error));
}

static void read_back(void)
{
    OK(client_copy(f.api, f.opened, &f.host, f.device, sizeof f.host, ATTN_COPY_DEVICE_TO_HOST,
                   NULL, &error));
}

/* Into floats of the device, from rows of the device. */
TEST_AROUND(test_amax, plain, tear_down)
{
    int64_t shape[] = {TOKENS, HEADS * SIZE, 1};
    struct attn_tensor channels = f.v;
    struct attn_amax_args args = SIZED(attn_amax_args, .x = &f.v, .out = &f.device->largest);
    OK(f.api->layer_amax(f.layer, &args, &error));
    channels.shape = shape;
    channels.strides = NULL;
    args.x = &channels;
    args.out = &f.device->amax[0][0];
    args.per_head = args.accumulate = 1;
    f.host.amax[0][3] = 5 * TOKENS; /* an earlier batch left it */
    OK(client_copy(f.api, f.opened, f.device->amax, f.host.amax, sizeof f.host.amax,
                   ATTN_COPY_HOST_TO_DEVICE, NULL, &error));
    OK(f.api->layer_amax(f.layer, &args, &error));
    read_back();
    assert_true(f.host.largest == (float)TOKENS);
    for (int32_t i = 0; i < HEADS * SIZE; i++) {
        assert_true((&f.host.amax[0][0])[i] == (float)(i == 3 ? 5 * TOKENS : TOKENS));
    }
    channels.device = cpu;
    ELSEWHERE(f.api->layer_amax(f.layer, &args, &error), "x");
}

static void refuse_tensors(void)
{
    struct attn_tensor *all[] = {&f.q, &f.k, &f.v, &f.out, &f.lse};
    static const char *const names[] = {"q", "k", "v", "out", "lse"};
    bind_all();
    OK(f.api->plan_batch(f.plan, &f.batch, NULL, &error));
    for (int32_t lse = 0; lse < 2; lse++) { /* the general way, and the fast one */
        f.io.lse = lse ? NULL : &f.lse;
        for (int32_t i = 0; i < 5 - lse; i++) {
            all[i]->device = cpu;
            ELSEWHERE(f.api->run(f.plan, f.layer, &f.io, &error), names[i]);
            assert_non_null(strstr(error.message, "layer 'full', fake_device: "));
            all[i]->device = (struct attn_device){0, 0}; /* reads as the CPU */
            ELSEWHERE(f.api->run(f.plan, f.layer, &f.io, &error), names[i]);
            all[i]->device = (struct attn_device){ATTN_DEVICE_CUDA, 1};
            assert_int_equal(f.api->run(f.plan, f.layer, &f.io, &error),
                             ATTN_ERROR_INVALID_ARGUMENT);
            assert_non_null(strstr(error.message, "on cuda:1; the layer's"));
            all[i]->device = fake;
        }
        runs_and_is_right();
    }
    f.q.device.type = ATTN_DEVICE_CUDA_MANAGED; /* anybody's */
    runs_and_is_right();
}

TEST_AROUND(test_tensors, plain, tear_down)
{
    refuse_tensors();
}

TEST_AROUND(test_tensors_validated, validating, tear_down)
{
    refuse_tensors();
}

/* Under validation addresses are asked for, whatever a tensor says. */
TEST_AROUND(test_validation, validating, tear_down)
{
    bind_all();
    OK(f.api->plan_batch(f.plan, &f.batch, NULL, &error));
    runs_and_is_right();
    f.q.data = f.host.q;
    ELSEWHERE(f.api->run(f.plan, f.layer, &f.io, &error), "q");
    f.q.data = f.device->q;
    f.batch.block_table = f.host.block_table;
    ELSEWHERE(f.api->plan_batch(f.plan, &f.batch, NULL, &error), "block_table");
    f.batch.block_table = f.device->block_table;
    OK(f.api->plan_batch(f.plan, &f.batch, NULL, &error));
    runs_and_is_right();
}
