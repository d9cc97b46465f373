/* SPDX-License-Identifier: Apache-2.0 */
/* core/step: what a batch must hold, how it is split, what a run checks; no step allocates. */
#include "bind/caches.h"
#include "fake_backend.h"
#include "step/plan_state.h"

#include <attn/io.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCKS 8
#define TOKENS 40

/* Sanitizers bring allocators of their own, which cannot be counted here. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#if !defined(SANITIZED)
#define SANITIZED 0
#endif

static bool counting;
static int64_t allocations;

#if !SANITIZED
/* Every allocation of the process passes here while it is counted. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

void *malloc(size_t size)
{
    allocations += counting;
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    allocations += counting;
    return __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size)
{
    allocations += counting;
    return __libc_realloc(memory, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    allocations += counting;
    return __libc_memalign(alignment, size);
}
#endif

struct bench {
    struct fixture fixture;
    attn_model *model;
    attn_plan *plan;
    void *cache, *workspace;
    struct attn_tensor q, k, v, out;
    int64_t shapes[4][3];
    float data[4][TOKENS * 4 * FAKE_HEAD_SIZE];
    int32_t start[9], lens[8], table[8 * 3];
    int64_t slots[TOKENS];
    struct attn_batch batch;
    struct attn_step_io io;
    struct attn_error error;
};

/* Requests of `queries` tokens each, all keys of them new; blocks in falling order. */
static void set_batch(struct bench *b, const int32_t *queries, int32_t count)
{
    int32_t row = 0, block = BLOCKS;
    for (int32_t r = 0; r < count; r++) {
        b->start[r] = row;
        b->lens[r] = queries[r];
        for (int32_t i = 0; i < 3; i++) {
            b->table[3 * r + i] = i * FAKE_BLOCK_SIZE < queries[r] ? --block : -99;
        }
        for (int32_t i = 0; i < queries[r]; i++) {
            b->slots[row++] = b->table[3 * r + i / FAKE_BLOCK_SIZE] * (int64_t)FAKE_BLOCK_SIZE +
                              i % FAKE_BLOCK_SIZE;
        }
    }
    b->start[count] = row;
    b->batch = (struct attn_batch){.struct_size = sizeof b->batch,
                                   .num_reqs = count,
                                   .num_tokens = row,
                                   .num_actual_tokens = row,
                                   .query_start_loc = b->start,
                                   .query_start_loc_host = b->start,
                                   .seq_lens = b->lens,
                                   .seq_lens_host = b->lens,
                                   .block_table = b->table,
                                   .block_table_stride = 3,
                                   .slot_mapping = b->slots,
                                   .num_slots = row};
}

static const struct attn_layer_params *sink_params; /* of the next bench's layer */

/* `change`, or NULL: makes the fixture's backends others. */
static struct bench *bench_of(struct attn_layer_desc desc, bool validate,
                              void (*change)(struct fixture *fixture))
{
    struct bench *b = calloc(1, sizeof *b);
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    struct attn_plan_options options = {
        .struct_size = sizeof options,
        .limits = &(const struct attn_limits){.struct_size = sizeof(struct attn_limits),
                                              .max_num_reqs = 8,
                                              .max_num_tokens = TOKENS}};
    fake_init(&b->fixture)->features |= ATTN_FEATURE_BLOCK_TABLE_ROW;
    if (change != NULL) {
        change(&b->fixture);
    }
    b->fixture.runtime.settings.validate = validate;
    b->error = (struct attn_error)ATTN_ERROR_INIT;
    b->model = fake_model_of(&b->fixture, &desc, 1);
    attn_layer *layer = model_layer(b->model, 0);
    layer_cache_spec(layer, 0, &spec, NULL);
    if (spec.page_bytes > 0) {
        size_t bytes = (size_t)(spec.page_bytes * BLOCKS);
        b->cache = aligned_alloc(256, bytes);
        memset(b->cache, 0xff, bytes); /* NaN where nothing is written */
        assert_int_equal(layer_kv_views(layer, b->cache, BLOCKS, &k, &v, &b->error), ATTN_OK);
        assert_int_equal(layer_bind_own(layer, &k, &v, &b->error), ATTN_OK);
    }
    if (sink_params != NULL) {
        assert_int_equal(layer_bind_params(layer, sink_params, &b->error), ATTN_OK);
    }
    assert_int_equal(plan_create(b->model, 0, &options, &b->plan, &b->error), ATTN_OK);
    struct attn_workspace room = {.struct_size = sizeof room};
    assert_int_equal(plan_workspace(b->plan, &room, &b->error), ATTN_OK);
    room.memory = b->workspace = aligned_alloc((size_t)room.alignment, room.bytes);
    room.bytes--;
    assert_int_equal(plan_bind_workspace(b->plan, &room, &b->error), ATTN_ERROR_WORKSPACE);
    room.bytes++;
    assert_int_equal(plan_bind_workspace(b->plan, &room, &b->error), ATTN_OK);
    for (int32_t t = 0; t < 4; t++) {
        for (int32_t i = 0; i < TOKENS * 4 * FAKE_HEAD_SIZE; i++) {
            b->data[t][i] = (float)((i * 7 + t * 13) % 31 - 15) / 16;
        }
    }
    b->q = fake_tensor(b->data[0], b->shapes[0], TOKENS, 4);
    b->k = fake_tensor(b->data[1], b->shapes[1], TOKENS, 2);
    b->v = fake_tensor(b->data[2], b->shapes[2], TOKENS, 2);
    b->out = fake_tensor(b->data[3], b->shapes[3], TOKENS, 4);
    b->io = (struct attn_step_io){
        .struct_size = sizeof b->io, .q = &b->q, .k = &b->k, .v = &b->v, .out = &b->out};
    return b;
}

static struct bench *bench_create(struct attn_layer_desc desc, bool validate)
{
    return bench_of(desc, validate, NULL);
}

static void bench_destroy(struct bench *b)
{
    plan_destroy(b->plan);
    model_destroy(b->model);
    fixture_finish(&b->fixture);
    free(b->cache);
    free(b->workspace);
    free(b);
}

/* Makes the plan again, over the same workspace. */
static void remake_plan(struct bench *b)
{
    const struct attn_plan_options options = {
        .struct_size = sizeof options,
        .limits = &(const struct attn_limits){.struct_size = sizeof(struct attn_limits),
                                              .max_num_reqs = 8,
                                              .max_num_tokens = TOKENS}};
    struct attn_workspace room = {.struct_size = sizeof room};
    plan_destroy(b->plan);
    assert_int_equal(plan_create(b->model, 0, &options, &b->plan, &b->error), ATTN_OK);
    assert_int_equal(plan_workspace(b->plan, &room, &b->error), ATTN_OK);
    room.memory = b->workspace;
    assert_int_equal(plan_bind_workspace(b->plan, &room, &b->error), ATTN_OK);
}

static attn_status step(struct bench *b)
{
    attn_status status = plan_batch(b->plan, &b->batch, NULL, &b->error);
    return status ? status : plan_run(b->plan, model_layer(b->model, 0), &b->io, &b->error);
}

/* The first query of a causal request sees its own key only: its output is its value. */
TEST(decodes_and_prefills_are_two_calls)
{
    static const int32_t queries[] = {1, 1, 20, 17};
    struct bench *b = bench_create(fake_layer("a"), false);
    struct attn_batch_split split = {.struct_size = sizeof split};
    set_batch(b, queries, 4);
    assert_int_equal(step(b), ATTN_OK);
    assert_int_equal(plan_split(b->plan, &split), ATTN_OK);
    assert_int_equal(split.num_decodes, 2);
    assert_int_equal(split.num_prefills, 2);
    assert_int_equal(split.num_decode_tokens, 2);
    assert_int_equal(split.num_prefill_tokens, 37);
    assert_int_equal(fake_calls.writes, 1);
    assert_int_equal(fake_calls.attends, 2);
    assert_int_equal(fake_calls.phase[0], ATTN_PHASE_DECODE);
    assert_int_equal(fake_calls.phase[1], ATTN_PHASE_PREFILL);
    assert_int_equal(fake_calls.num_reqs[0], 2);
    assert_int_equal(fake_calls.num_reqs[1], 2);
    assert_int_equal(fake_calls.table_rows[0], 4);
    assert_int_equal(fake_calls.table_rows[1], 2);
    assert_int_equal(fake_calls.schedules, 2);
    for (int32_t r = 0; r < 4; r++) {
        const float *out = b->data[3] + b->start[r] * 4 * FAKE_HEAD_SIZE + 3 * FAKE_HEAD_SIZE;
        const float *value = b->data[2] + b->start[r] * 2 * FAKE_HEAD_SIZE + FAKE_HEAD_SIZE;
        for (int32_t d = 0; d < FAKE_HEAD_SIZE; d++) {
            assert_true(fabsf(out[d] - value[d]) < 1e-6f);
        }
    }
    for (int32_t i = 0; i < b->start[4] * 4 * FAKE_HEAD_SIZE; i++) {
        assert_false(isnan(b->data[3][i]));
    }
    set_batch(b, queries, 2); /* decodes alone: nothing is planned for prefills */
    fake_reset();
    assert_int_equal(step(b), ATTN_OK);
    assert_int_equal(fake_calls.schedules, 1);
    assert_int_equal(fake_calls.scheduled_phase[0], ATTN_PHASE_DECODE);
    bench_destroy(b);
}

static void write_in_attends(struct fixture *fixture)
{
    fixture->backends[0].caps.features |= ATTN_FEATURE_FUSED_WRITE;
}

/* The same backend for decodes, and one for prefills that leaves the keys to a kernel of their own,
 * or the other way round. */
static void write_in_decodes(struct fixture *fixture)
{
    struct attn_backend_caps *decodes = &fixture->backends[0].caps;
    struct attn_backend_caps *prefills = fixture_add(fixture, "other", "", 10);
    const char *name = prefills->name;
    *prefills = *decodes;
    prefills->name = name;
    decodes->phases = 1u << ATTN_PHASE_DECODE;
    prefills->phases = 1u << ATTN_PHASE_PREFILL;
    decodes->features |= ATTN_FEATURE_FUSED_WRITE;
}

static void write_in_prefills(struct fixture *fixture)
{
    write_in_decodes(fixture);
    fixture->backends[0].caps.features &= ~ATTN_FEATURE_FUSED_WRITE;
    fixture->backends[1].caps.features |= ATTN_FEATURE_FUSED_WRITE;
}

/* Each of two attends gets the step's keys, which it writes itself only where both do. */
TEST(keys_of_two_calls)
{
    static const int32_t queries[] = {1, 1, 20, 17};
    void (*const changes[])(struct fixture *) = {write_in_attends, write_in_decodes,
                                                 write_in_prefills};
    for (int32_t i = 0; i < 3; i++) {
        struct bench *b = bench_of(fake_layer("a"), false, changes[i]);
        set_batch(b, queries, 4);
        assert_int_equal(step(b), ATTN_OK);
        assert_int_equal(fake_calls.attends, 2);
        assert_int_equal(fake_calls.fused, i == 0 ? 2 : 0);
        assert_int_equal(fake_calls.writes, i == 0 ? 0 : 1);
        assert_ptr_equal(fake_calls.k[0], &b->k);
        assert_ptr_equal(fake_calls.k[1], &b->k);
        bench_destroy(b);
    }
}

static void merge(struct fixture *fixture)
{
    fixture->backends[0].caps.kernels |= ATTN_KERNEL_MERGE_STATES;
}

/* A sink's keys are merged with those of decodes and of prefills. */
TEST(sinks_next_to_two_calls)
{
    static const int32_t queries[] = {1, 1, 20};
    static float keys[5 * 2 * FAKE_HEAD_SIZE];
    int64_t shape[3];
    struct attn_layer_desc layer = fake_layer("a");
    const struct attn_tensor sink = fake_tensor(keys, shape, 5, 2);
    const struct attn_layer_params params = {
        .struct_size = sizeof params, .sink_k = &sink, .sink_v = &sink};
    layer.sink_len = 5;
    sink_params = &params;
    struct bench *b = bench_of(layer, false, merge);
    sink_params = NULL;
    set_batch(b, queries, 3);
    assert_int_equal(step(b), ATTN_OK);
    assert_int_equal(fake_calls.attends, 3);
    bench_destroy(b);
}

static void update_tables(struct fixture *fixture)
{
    fixture->backends[0].caps.features |= ATTN_FEATURE_UPDATE_BLOCK_TABLE;
}

/* Vendors' schedules are kept while they are of the source's last batch. */
TEST(tables_are_updated_in_schedules_of_one_batch)
{
    static const int32_t queries[] = {5, 7};
    struct bench *b = bench_of(fake_layer("a"), false, update_tables);
    attn_plan *source = b->plan;
    b->plan = NULL;
    remake_plan(b); /* over one workspace: nothing is run */
    for (int32_t i = 0; i < 3; i++) {
        set_batch(b, queries, 2);
        if (i != 1) {
            assert_int_equal(plan_batch(source, &b->batch, NULL, &b->error), ATTN_OK);
        }
        fake_reset();
        assert_int_equal(plan_update_block_table(b->plan, source, &b->batch, NULL, &b->error),
                         ATTN_OK);
        assert_int_equal(fake_calls.schedules, i != 1);
        assert_int_equal(fake_calls.updates, i == 1);
    }
    plan_destroy(source);
    bench_destroy(b);
}

/* Limits that mean "none" do not fit in a plan of composed requests: that is an error, and no small
 * allocation. */
TEST(limits_and_workspaces_may_grow)
{
    struct {
        struct attn_limits known;
        int64_t unknown;
    } limits = {{.struct_size = sizeof limits, .max_num_reqs = 1, .max_num_tokens = 1}, 0};
    struct {
        struct attn_workspace known;
        int64_t unknown;
    } room = {{.struct_size = sizeof room}, 7};
    const struct attn_ext ext = {.id = 77, .struct_size = sizeof ext};
    struct attn_plan_options options = {.struct_size = sizeof options};
    struct bench *b = bench_create(fake_layer("a"), false);
    attn_plan *plan;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "attn_limits",
               plan_create(b->model, 0, &options, &plan, &b->error));
    options.limits = &limits.known;
    limits.unknown = 1;
    assert_int_equal(plan_create(b->model, 0, &options, &plan, &b->error), ATTN_ERROR_STRUCT_SIZE);
    limits.unknown = 0;
    limits.known.reserved = 1;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "reserved",
               plan_create(b->model, 0, &options, &plan, &b->error));
    limits.known.reserved = 0;
    limits.known.next = &ext;
    assert_int_equal(plan_create(b->model, 0, &options, &plan, &b->error), ATTN_ERROR_EXTENSION);
    limits.known.next = NULL;
    assert_int_equal(plan_create(b->model, 0, &options, &plan, &b->error), ATTN_OK);
    assert_int_equal(plan_workspace(plan, &room.known, &b->error), ATTN_OK);
    assert_int_equal(room.unknown, 0); /* what this core does not say is 0 */
    assert_int_equal(room.known.alignment, 256);
    assert_int_equal(room.known.device.type, ATTN_DEVICE_CPU);
    assert_true(room.known.bytes > 0 && room.known.memory == NULL);
    assert_int_equal(plan_bind_workspace(plan, &room.known, &b->error),
                     ATTN_ERROR_INVALID_ARGUMENT);
    room.known.memory = aligned_alloc(256, (room.known.bytes + 255) / 256 * 256);
    room.known.device = (struct attn_device){ATTN_DEVICE_CUDA, 0};
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "workspace",
               plan_bind_workspace(plan, &room.known, &b->error));
    room.known.device.type = ATTN_DEVICE_CPU;
    room.unknown = 1;
    assert_int_equal(plan_bind_workspace(plan, &room.known, &b->error), ATTN_ERROR_STRUCT_SIZE);
    room.unknown = 0;
    room.known.bytes--;
    REFUSED_AS(ATTN_ERROR_WORKSPACE, &b->error, "bytes",
               plan_bind_workspace(plan, &room.known, &b->error));
    room.known.bytes++;
    room.known.memory = (uint8_t *)room.known.memory + 8;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "workspace",
               plan_bind_workspace(plan, &room.known, &b->error));
    room.known.memory = (uint8_t *)room.known.memory - 8;
    assert_int_equal(plan_bind_workspace(plan, &room.known, &b->error), ATTN_OK);
    /* the scratch apart: what `memory` then has is the plan's own */
    const size_t scratch = room.known.scratch_bytes;
    assert_true(scratch < room.known.bytes);
    room.known.scratch = (uint8_t *)room.known.memory + 8;
    REFUSED(&b->error, "scratch", plan_bind_workspace(plan, &room.known, &b->error));
    room.known.scratch = aligned_alloc(256, scratch + 256);
    assert_int_equal(plan_bind_workspace(plan, &room.known, &b->error), ATTN_OK);
    room.known.bytes--;
    REFUSED(&b->error, "scratch_bytes", plan_bind_workspace(plan, &room.known, &b->error));
    room.known.bytes += 1 + 64;
    room.known.scratch_bytes += 64; /* the largest of several plans' */
    assert_int_equal(plan_bind_workspace(plan, &room.known, &b->error), ATTN_OK);
    if (scratch > 0) {
        room.known.scratch_bytes = scratch - 1;
        REFUSED(&b->error, "scratch_bytes", plan_bind_workspace(plan, &room.known, &b->error));
    }
    free(room.known.scratch);
    plan_destroy(plan);
    free(room.known.memory);
    room.known.struct_size = 8;
    assert_int_equal(plan_workspace(b->plan, &room.known, &b->error), ATTN_ERROR_STRUCT_SIZE);
    bench_destroy(b);
}

TEST(plans_of_chunks_refuse_endless_limits)
{
    static const int32_t requests[] = {INT32_MAX, 715827883, 1 << 30, 357913942, 1 << 29};
    struct attn_layer_desc desc = fake_layer("a");
    desc.chunk_size = 16;
    struct bench *b = bench_create(desc, false);
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++) {
        struct attn_plan_options options = {
            .struct_size = sizeof options,
            .limits = &(const struct attn_limits){.struct_size = sizeof(struct attn_limits),
                                                  .max_num_reqs = requests[i],
                                                  .max_num_tokens = INT32_MAX}};
        attn_plan *plan = b->plan;
        assert_int_equal(plan_create(b->model, 0, &options, &plan, &b->error), ATTN_ERROR_LIMIT);
        assert_null(plan);
        assert_string_equal(b->error.field, "max_num_reqs");
    }
    bench_destroy(b);
}

/* Sizes of a plan's areas and of a vendor's schedule that no machine has. */
TEST(areas_have_a_largest)
{
    struct attn_layer_desc desc = fake_layer("a");
    desc.num_q_heads = 65536;
    struct bench *b = bench_create(desc, false);
    const struct attn_plan_options options = {
        .struct_size = sizeof options,
        .limits = &(const struct attn_limits){.struct_size = sizeof(struct attn_limits),
                                              .max_num_reqs = 1,
                                              .max_num_tokens = INT32_MAX}};
    attn_plan *plan;
    REFUSED_AS(ATTN_ERROR_LIMIT, &b->error, "max_num_tokens",
               plan_create(b->model, 0, &options, &plan, &b->error));
    const struct attn_plan_options few = {
        .struct_size = sizeof few,
        .limits = &(const struct attn_limits){
            .struct_size = sizeof(struct attn_limits), .max_num_reqs = 1, .max_num_tokens = 1}};
    for (int32_t i = 0; i < 2; i++) {
        fake_calls.schedule.host_bytes = i == 0 ? ((size_t)1 << 40) + 1 : 0;
        fake_calls.schedule.device_bytes = i == 1 ? ((size_t)1 << 40) + 1 : 0;
        REFUSED_AS(ATTN_ERROR_PLUGIN, &b->error, "schedule_size",
                   plan_create(b->model, 0, &few, &plan, &b->error));
    }
    bench_destroy(b);
}

/* A plan is captured as far as the lowest level of its phases. */
TEST(graphs_need_every_phase)
{
    struct bench *b = bench_create(fake_layer("a"), false);
    const struct attn_plan_options options = {
        .struct_size = sizeof options,
        .graph = 1,
        .limits = &(const struct attn_limits){
            .struct_size = sizeof(struct attn_limits), .max_num_reqs = 1, .max_num_tokens = 1}};
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        struct served *served = &model_layer(b->model, 0)->served[phase];
        const int32_t level = served->graph_level;
        attn_plan *plan;
        served->graph_level = ATTN_GRAPH_UNIFORM_BATCH;
        assert_int_equal(plan_graph_level(b->plan), ATTN_GRAPH_UNIFORM_BATCH);
        assert_int_equal(plan_create(b->model, 0, &options, &plan, &b->error), ATTN_OK);
        plan_destroy(plan);
        served->graph_level = ATTN_GRAPH_NEVER;
        REFUSED_AS(ATTN_ERROR_UNSUPPORTED, &b->error, "graph",
                   plan_create(b->model, 0, &options, &plan, &b->error));
        served->graph_level = level;
    }
    bench_destroy(b);
}

/* Plans hold views of the cache: it is bound again after they are gone. */
TEST(caches_stay_while_a_plan_holds_them)
{
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    struct bench *b = bench_create(fake_layer("a"), false);
    attn_layer *layer = model_layer(b->model, 0);
    assert_int_equal(layer_kv_views(layer, b->cache, 1, &k, &v, &b->error), ATTN_OK);
    REFUSED_AS(ATTN_ERROR_ORDER, &b->error, "layer_bind_caches",
               layer_bind_own(layer, &k, &v, &b->error));
    plan_destroy(b->plan);
    b->plan = NULL;
    assert_int_equal(layer_bind_own(layer, &k, &v, &b->error), ATTN_OK);
    bench_destroy(b);
}

/* Of readers, too, that are planned apart from the layer whose cache they read. */
TEST(caches_stay_while_a_readers_plan_holds_them)
{
    const struct attn_context_parallel cp = {.ext = {ATTN_EXT_CONTEXT_PARALLEL, 0, sizeof cp, NULL},
                                             .prefill = &fixture_ranks};
    struct attn_layer_desc layers[] = {fake_layer("a"), fake_layer("b")};
    const struct attn_plan_options options = {
        .struct_size = sizeof options,
        .limits = &(const struct attn_limits){
            .struct_size = sizeof(struct attn_limits), .max_num_reqs = 1, .max_num_tokens = 1}};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    struct attn_error error = ATTN_ERROR_INIT;
    static _Alignas(256) uint8_t cache[FAKE_BLOCK_SIZE * 2 * 2 * FAKE_HEAD_SIZE * 4];
    struct fixture fixture;
    attn_plan *plan;
    layers[1].kv_sharing_target = "a";
    layers[1].next = &cp.ext;
    fake_init(&fixture);
    attn_model *model = fake_model_of(&fixture, layers, 2);
    attn_layer *owner = model_layer(model, 0);
    assert_int_equal(layer_kv_views(owner, cache, 1, &k, &v, &error), ATTN_OK);
    assert_int_equal(layer_bind_own(owner, &k, &v, &error), ATTN_OK);
    assert_int_equal(model_num_groups(model, ATTN_GROUP_BLOCK_TABLE), 2);
    assert_int_equal(plan_create(model, 1, &options, &plan, &error), ATTN_OK);
    REFUSED_AS(ATTN_ERROR_ORDER, &error, "layer_bind_caches",
               layer_bind_own(owner, &k, &v, &error));
    plan_destroy(plan);
    assert_int_equal(layer_bind_own(owner, &k, &v, &error), ATTN_OK);
    model_destroy(model);
    fixture_finish(&fixture);
}

TEST(only_leading_requests_are_decodes)
{
    static const int32_t queries[] = {1, 5, 1};
    struct bench *b = bench_create(fake_layer("a"), false);
    struct attn_batch_split split = {.struct_size = sizeof split};
    set_batch(b, queries, 3);
    assert_int_equal(step(b), ATTN_OK);
    assert_int_equal(plan_split(b->plan, &split), ATTN_OK);
    assert_int_equal(split.num_decodes, 1);
    assert_int_equal(split.num_prefills, 2);
    bench_destroy(b);
}

/* Requests of up to so many queries as the backend declares go the decode way. */
TEST(declared_threshold_splits)
{
    static const int32_t queries[] = {4, 2, 5, 1};
    struct bench *b = bench_create(fake_layer("a"), false);
    struct attn_batch_split split = {.struct_size = sizeof split};
    for (int32_t declared = 3; declared <= 5; declared++) {
        b->fixture.backends[0].caps.reorder_threshold = declared;
        remake_plan(b);
        set_batch(b, queries, 4);
        assert_int_equal(step(b), ATTN_OK);
        assert_int_equal(plan_split(b->plan, &split), ATTN_OK);
        assert_int_equal(split.num_decodes, declared == 3 ? 0 : declared == 4 ? 2 : 4);
    }
    bench_destroy(b);
}

/* Memory that is handed in anew: a workspace needs a new plan of the batch, parameters no plan. */
TEST(memory_is_bound_before_a_step)
{
    static const int32_t queries[] = {1, 5};
    const struct attn_layer_params params = {.struct_size = sizeof params};
    struct bench *b = bench_create(fake_layer("a"), false);
    attn_layer *layer = model_layer(b->model, 0);
    struct attn_workspace room = {.struct_size = sizeof room};
    set_batch(b, queries, 2);
    assert_int_equal(step(b), ATTN_OK);
    assert_int_equal(plan_workspace(b->plan, &room, &b->error), ATTN_OK);
    room.memory = b->workspace;
    assert_int_equal(plan_bind_workspace(b->plan, &room, &b->error), ATTN_OK);
    REFUSED_AS(ATTN_ERROR_ORDER, &b->error, "plan", plan_run(b->plan, layer, &b->io, &b->error));
    REFUSED_AS(ATTN_ERROR_ORDER, &b->error, "layer_bind_params",
               layer_bind_params(layer, &params, &b->error));
    plan_destroy(b->plan);
    b->plan = NULL;
    assert_int_equal(layer_bind_params(layer, &params, &b->error), ATTN_OK);
    bench_destroy(b);
}

/* Zeros without a fill kernel; a profile step touches all of the workspace, too. Keys that the step
 * before had no slots for are no idle step's. */
TEST(idle_steps_are_zeros)
{
    static const int32_t queries[] = {5};
    static int64_t apart[] = {8 * FAKE_HEAD_SIZE, FAKE_HEAD_SIZE, 1};
    struct bench *b = bench_create(fake_layer("a"), false);
    struct attn_workspace room = {.struct_size = sizeof room};
    set_batch(b, queries, 1);
    b->batch.num_slots = 0;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "slot_mapping", step(b));
    assert_int_equal(plan_workspace(b->plan, &room, &b->error), ATTN_OK);
    for (int32_t mode = 0; mode < 2; mode++) {
        set_batch(b, NULL, 0);
        b->batch.mode = mode == 0 ? ATTN_BATCH_IDLE : ATTN_BATCH_PROFILE;
        memset(b->data[3], 0xff, sizeof b->data[3]);
        memset(b->workspace, 0xff, room.bytes);
        assert_int_equal(step(b), ATTN_OK);
        for (int32_t i = 0; i < TOKENS * 4 * FAKE_HEAD_SIZE; i++) {
            assert_true(b->data[3][i] == 0);
        }
        for (size_t i = 0; i < room.bytes; i++) {
            assert_int_equal(((uint8_t *)b->workspace)[i], mode == 0 ? 0xff : 0);
        }
    }
    memset(b->data[3], 0xff, sizeof b->data[3]);
    b->out.shape[0] = TOKENS / 2; /* every second row */
    b->out.strides = apart;
    assert_int_equal(step(b), ATTN_OK);
    for (int32_t i = 0; i < TOKENS * 4 * FAKE_HEAD_SIZE; i++) {
        assert_true(i / 4 / FAKE_HEAD_SIZE % 2 == 0 ? b->data[3][i] == 0 : isnan(b->data[3][i]));
    }
    bench_destroy(b);
}

/* Decodes over a common prefix: taken apart where that is fewer rounds of thread blocks. */
TEST(cascade_where_it_pays)
{
    static const int32_t queries[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    static int32_t table[8][20];
    for (int32_t multiprocessors = 0; multiprocessors <= 1000; multiprocessors += 1000) {
        struct bench *b = bench_create(fake_layer("a"), false);
        b->fixture.devices[0].num_multiprocessors = multiprocessors;
        plan_destroy(b->plan);
        b->plan = NULL;
        free(b->workspace);
        b->workspace = aligned_alloc(256, 1 << 20);
        remake_plan(b);
        set_batch(b, queries, 8);
        for (int32_t r = 0; r < 8; r++) {
            b->lens[r] = 300;
        }
        b->batch.block_table = table[0];
        b->batch.block_table_stride = 20;
        b->batch.num_slots = 0;
        b->batch.common_prefix_len = 272;
        b->io.flags = ATTN_RUN_NO_WRITE;
        fake_reset();
        assert_int_equal(step(b), ATTN_OK);
        assert_int_equal(fake_calls.attends, multiprocessors > 0 ? 1 : 2);
        assert_int_equal(fake_calls.most_reqs[0], multiprocessors > 0 ? 8 : 1);
        bench_destroy(b);
    }
}

/* With more tokens partial results would have no room. */
TEST(cascades_have_a_largest_step)
{
    static int32_t table[8][40], start[9], lens[8];
    struct bench *b = bench_create(fake_layer("a"), false);
    const struct attn_plan_options options = {
        .struct_size = sizeof options,
        .limits = &(const struct attn_limits){
            .struct_size = sizeof(struct attn_limits), .max_num_reqs = 8, .max_num_tokens = 4096}};
    struct attn_workspace room = {.struct_size = sizeof room};
    plan_destroy(b->plan);
    free(b->workspace);
    assert_int_equal(plan_create(b->model, 0, &options, &b->plan, &b->error), ATTN_OK);
    assert_int_equal(plan_workspace(b->plan, &room, &b->error), ATTN_OK);
    room.memory = b->workspace = aligned_alloc(256, (room.bytes + 255) / 256 * 256);
    assert_int_equal(plan_bind_workspace(b->plan, &room, &b->error), ATTN_OK);
    for (int32_t queries = 256; queries <= 257; queries++) { /* 2048 tokens, and 2056 */
        for (int32_t r = 0; r < 8; r++) {
            start[r + 1] = start[r] + queries;
            lens[r] = 272 + queries;
        }
        b->batch = (struct attn_batch){.struct_size = sizeof b->batch,
                                       .num_reqs = 8,
                                       .num_tokens = start[8],
                                       .num_actual_tokens = start[8],
                                       .query_start_loc = start,
                                       .query_start_loc_host = start,
                                       .seq_lens = lens,
                                       .seq_lens_host = lens,
                                       .block_table = table[0],
                                       .block_table_stride = 40,
                                       .common_prefix_len = 272};
        fake_reset();
        assert_int_equal(plan_batch(b->plan, &b->batch, NULL, &b->error), ATTN_OK);
        assert_int_equal(fake_calls.schedules, queries == 256 ? 2 : 1);
    }
    bench_destroy(b);
}

/* One area for all layers: as large as the layer that needs most, whichever comes first. */
TEST(areas_hold_the_widest_layer)
{
    static _Alignas(256) uint8_t cache[FAKE_BLOCK_SIZE * 2 * 2 * FAKE_HEAD_SIZE * 4];
    struct attn_layer_desc layers[] = {fake_layer("a"), fake_layer("b"), fake_layer("c")};
    const struct attn_plan_options options = {
        .struct_size = sizeof options,
        .limits = &(const struct attn_limits){
            .struct_size = sizeof(struct attn_limits), .max_num_reqs = 8, .max_num_tokens = 64}};
    size_t bytes[2];
    layers[0].num_q_heads = layers[2].num_q_heads = 2;
    for (int32_t i = 0; i < 2; i++) { /* the wide layer alone, and between narrow ones */
        struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
        struct attn_workspace room = {.struct_size = sizeof room};
        struct attn_error error = ATTN_ERROR_INIT;
        struct fixture fixture;
        attn_plan *plan;
        fake_init(&fixture);
        attn_model *model = fake_model_of(&fixture, i == 0 ? &layers[1] : layers, i == 0 ? 1 : 3);
        for (int32_t layer = 0; layer < (i == 0 ? 1 : 3); layer++) {
            assert_int_equal(layer_kv_views(model_layer(model, layer), cache, 1, &k, &v, &error),
                             ATTN_OK);
            assert_int_equal(layer_bind_own(model_layer(model, layer), &k, &v, &error), ATTN_OK);
        }
        assert_int_equal(plan_create(model, 0, &options, &plan, &error), ATTN_OK);
        assert_int_equal(plan_workspace(plan, &room, &error), ATTN_OK);
        bytes[i] = room.scratch_bytes;
        plan_destroy(plan);
        model_destroy(model);
        fixture_finish(&fixture);
    }
    assert_true(bytes[0] > 0 && bytes[0] == bytes[1]);
}

TEST(wrong_batches_are_refused)
{
    static const int32_t queries[] = {1, 5};
    struct bench *b = bench_create(fake_layer("a"), false);
    set_batch(b, queries, 2);
    b->start[1] = 9;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "query_start_loc", step(b));
    set_batch(b, queries, 2);
    b->lens[1] = 4;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "seq_lens", step(b));
    set_batch(b, queries, 2);
    b->batch.block_table_rows = 1;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "block_table_rows", step(b));
    for (int32_t count = 1; count <= 2; count++) { /* one row, and several */
        set_batch(b, queries, count);
        b->batch.block_table_stride = 0;
        REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "block_table_stride", step(b));
    }
    set_batch(b, queries, 2);
    b->batch.num_reqs = 9;
    REFUSED_AS(ATTN_ERROR_LIMIT, &b->error, "num_reqs", step(b));
    b->batch.num_reqs = 2;
    b->batch.max_query_len = 4;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "max_query_len", step(b));
    b->batch.max_query_len = 0;
    b->batch.max_seq_len = 4;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "max_seq_len", step(b));
    b->batch.max_seq_len = 0;
    b->batch.block_table_stride = 0;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "block_table_stride", step(b));
    set_batch(b, queries, 2);
    b->batch.spans = b->lens; /* of a layer that has none */
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "spans", step(b));
    set_batch(b, queries, 2);
    b->batch.flags = ATTN_BATCH_HOST_BOUNDS;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "flags", step(b));
    set_batch(b, queries, 2);
    b->batch.num_actual_tokens = 7;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "num_actual_tokens", step(b));
    assert_int_equal(fake_calls.attends, 0);
    assert_int_equal(plan_run(b->plan, model_layer(b->model, 0), &b->io, &b->error),
                     ATTN_ERROR_ORDER);
    bench_destroy(b);
}

TEST(empty_batch_is_no_error)
{
    struct bench *b = bench_create(fake_layer("a"), false);
    set_batch(b, NULL, 0);
    assert_int_equal(step(b), ATTN_OK);
    b->batch.mode = ATTN_BATCH_IDLE;
    assert_int_equal(step(b), ATTN_OK);
    assert_int_equal(fake_calls.attends, 0);
    bench_destroy(b);
    struct attn_layer_desc chunked = fake_layer("a");
    chunked.chunk_size = 16;
    b = bench_create(chunked, false);
    set_batch(b, NULL,
              0); /* rows that belong to another batch, and nothing that a composition reads */
    b->start[0] = b->batch.num_tokens = b->batch.num_actual_tokens = 5;
    b->batch.seq_lens_host = NULL;
    assert_int_equal(step(b), ATTN_OK);
    assert_int_equal(fake_calls.attends, 0);
    bench_destroy(b);
}

TEST(wrong_tensors_are_refused)
{
    static const int32_t queries[] = {5};
    struct bench *b = bench_create(fake_layer("a"), false);
    set_batch(b, queries, 1);
    b->q.shape[0] = 4;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "q", step(b));
    b->q.shape[0] = 5;
    b->v.dtype.bits = 16;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "v", step(b));
    b->v.dtype.bits = 32;
    b->io.out = NULL;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "out", step(b));
    assert_int_equal(fake_calls.attends, 0);
    bench_destroy(b);
}

static void quantize_queries(struct fixture *fixture)
{
    struct attn_backend_caps *caps = &fixture->backends[0].caps;
    caps->features |= ATTN_FEATURE_QUANTIZED_QUERY;
    caps->q_dtypes = UINT64_C(1) << ATTN_DTYPE_FP8_E4M3;
}

/* A query of a dtype of its own; values of another head size than the keys. */
TEST(tensors_have_their_own_forms)
{
    static const int32_t queries[] = {5};
    struct attn_layer_desc quantized = fake_layer("a"), narrow = quantized;
    quantized.q_dtype = ATTN_DTYPE_FP8_E4M3;
    quantized.q_scale_form = ATTN_SCALE_PER_TENSOR;
    narrow.head_size = 192;
    narrow.head_size_v = 128;
    struct bench *b = bench_of(quantized, false, quantize_queries);
    set_batch(b, queries, 1);
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "q", step(b));
    assert_non_null(strstr(b->error.message, "q is float32; the layer's is float8_e4m3fn"));
    bench_destroy(b);
    b = bench_create(narrow, false);
    set_batch(b, queries, 1);
    b->q.shape[2] = b->k.shape[2] = b->v.shape[2] = 192;
    b->out.shape[2] = 128;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "v", step(b));
    b->v.shape[2] = 128;
    assert_int_equal(step(b), ATTN_OK);
    bench_destroy(b);
}

/* One fault of a tensor, `how` from 0 on; false: there are no more. */
static bool spoil(struct attn_tensor *t, int32_t how)
{
    static int64_t strides[] = {4 * FAKE_HEAD_SIZE, FAKE_HEAD_SIZE, 2};
    switch (how) {
    case 0:
        t->ndim = 2;
        return true;
    case 1:
        t->dtype.code = ATTN_CODE_INT;
        return true;
    case 2:
        t->dtype.bits = 16;
        return true;
    case 3:
        t->device.type = ATTN_DEVICE_CUDA;
        return true;
    case 4:
        t->shape = NULL;
        return true;
    case 5:
        t->shape[0] = 4; /* of 5 */
        return true;
    case 6:
    case 7:
        t->shape[how - 5]--;
        return true;
    case 8:
        t->strides = strides;
        return true;
    default:
        return false;
    }
}

/* Each fault of each tensor, by its name, where one run of many is fast: over keys that are there,
 * and with keys that are written. The others have no strides, or some. */
TEST(every_fault_of_every_tensor_is_named)
{
    static const char *const names[] = {"q", "k", "v", "out"};
    static const int32_t queries[] = {5};
    static int64_t dense[4][3];
    struct bench *b = bench_create(fake_layer("a"), false);
    struct attn_tensor *const tensors[] = {&b->q, &b->k, &b->v, &b->out};
    const struct attn_tensor **const fields[] = {&b->io.q, &b->io.k, &b->io.v, &b->io.out};
    for (int32_t i = 0; i < 4 * 4; i++) {
        const int32_t t = i / 4;
        const bool writes = i & 1, strided = i & 2;
        set_batch(b, queries, 1);
        b->batch.num_slots = writes ? b->batch.num_slots : 0;
        b->io.flags = writes ? 0 : ATTN_RUN_NO_WRITE;
        for (int32_t j = 0; j < 4; j++) {
            const int64_t *shape = tensors[j]->shape;
            dense[j][0] = shape[1] * shape[2], dense[j][1] = shape[2], dense[j][2] = 1;
            tensors[j]->strides = strided ? dense[j] : NULL;
        }
        if (!writes && (t == 1 || t == 2)) {
            continue;
        }
        const struct attn_tensor right = *tensors[t];
        int64_t shape[3] = {right.shape[0], right.shape[1], right.shape[2]};
        assert_int_equal(step(b), ATTN_OK);
        fake_calls.attends = fake_calls.writes = 0;
        *fields[t] = NULL;
        assert_int_equal(step(b), ATTN_ERROR_INVALID_ARGUMENT);
        *fields[t] = tensors[t];
        assert_string_equal(b->error.field, names[t]);
        for (int32_t how = 0; spoil(tensors[t], how); how++) {
            REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, names[t], step(b));
            *tensors[t] = right;
            memcpy(right.shape, shape, sizeof shape);
        }
        assert_int_equal(fake_calls.attends + fake_calls.writes, 0);
    }
    bench_destroy(b);
}

TEST(encoder_needs_a_row_per_key)
{
    static const int32_t queries[] = {3, 2};
    struct attn_layer_desc layer = fake_layer("a");
    layer.kind = ATTN_LAYER_ENCODER;
    layer.causal = layer.block_size = 0;
    struct bench *b = bench_create(layer, false);
    set_batch(b, queries, 2);
    b->k.shape[0] = 4;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "k", step(b));
    b->k.shape[0] = 5;
    assert_int_equal(step(b), ATTN_OK);
    b->batch.key_start_loc = b->batch.key_start_loc_host = (const int32_t[]){0, 4, 6};
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "k", step(b));
    b->k.shape[0] = 6;
    assert_int_equal(step(b), ATTN_OK);
    assert_int_equal(fake_calls.writes, 0);
    bench_destroy(b);
}

TEST(validation_names_request_and_index)
{
    static const int32_t queries[] = {1, 20};
    struct bench *b = bench_create(fake_layer("a"), true);
    set_batch(b, queries, 2); /* entries past the end are -99 and never looked at */
    assert_int_equal(step(b), ATTN_OK);
    b->table[4] = BLOCKS;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "block_table", step(b));
    assert_non_null(strstr(b->error.message, "request 1, position 16 (entry 1): block 8"));
    set_batch(b, queries, 2);
    b->slots[3] = BLOCKS * FAKE_BLOCK_SIZE;
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "slot_mapping", step(b));
    assert_non_null(strstr(b->error.message, "request 1, token 3: slot 128"));
    set_batch(b, queries, 2);
    b->data[0][(2 * 4 + 1) * FAKE_HEAD_SIZE + 5] = NAN;
    assert_int_equal(step(b), ATTN_ERROR_NAN);
    assert_non_null(strstr(b->error.message, "q[2, 1, 5]"));
    bench_destroy(b);
}

/* The first NaN of each dtype, behind its last number. */
TEST(validation_knows_each_dtypes_nan)
{
    static const struct {
        struct attn_dtype dtype;
        uint32_t number, nan;
    } cases[] = {{{ATTN_CODE_FLOAT, 16, 1}, 0x7c00, 0x7c01},
                 {{ATTN_CODE_BFLOAT, 16, 1}, 0x7f80, 0x7f81},
                 {{ATTN_CODE_FLOAT, 32, 1}, 0x7f800000, 0x7f800001},
                 {{ATTN_CODE_FLOAT8_E4M3FN, 8, 1}, 0x7e, 0x7f},
                 {{ATTN_CODE_FLOAT8_E5M2, 8, 1}, 0x7c, 0x7d},
                 {{ATTN_CODE_FLOAT8_E4M3FNUZ, 8, 1}, 0x7f, 0x80}};
    static const int32_t queries[] = {1};
    int64_t shape[] = {1, 1};
    struct bench *b = bench_create(fake_layer("a"), true);
    set_batch(b, queries, 1);
    assert_int_equal(step(b), ATTN_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t bits = cases[i].number;
        const struct attn_tensor one = {&bits, {ATTN_DEVICE_CPU, 0}, 2, cases[i].dtype, shape, NULL,
                                        0};
        assert_int_equal(validate_tensor(b->plan, &one, "one", "a", &b->error), ATTN_OK);
        bits = cases[i].nan;
        assert_int_equal(validate_tensor(b->plan, &one, "one", "a", &b->error), ATTN_ERROR_NAN);
    }
    bench_destroy(b);
}

static attn_status late;
static int32_t waits;

static attn_status wait_for_stream(const struct attn_stream_args *args, struct attn_error *error)
{
    waits++;
    return late;
}

/* Validation waits for the stream, and finds what failed there, but never while it is captured. */
TEST(validation_waits_for_the_stream)
{
    static const int32_t queries[] = {1, 1};
    struct bench *b = bench_create(fake_layer("a"), true);
    const struct attn_plan_options options = {
        .struct_size = sizeof options,
        .graph = 1,
        .limits = &(const struct attn_limits){.struct_size = sizeof(struct attn_limits),
                                              .max_num_reqs = 8,
                                              .max_num_tokens = TOKENS}};
    struct attn_workspace room = {.struct_size = sizeof room};
    b->model->instances[0].kernels.synchronize = wait_for_stream;
    plan_destroy(b->plan);
    assert_int_equal(plan_create(b->model, 0, &options, &b->plan, &b->error), ATTN_OK);
    assert_int_equal(plan_workspace(b->plan, &room, &b->error), ATTN_OK);
    room.memory = b->workspace;
    assert_int_equal(plan_bind_workspace(b->plan, &room, &b->error), ATTN_OK);
    set_batch(b, queries, 2);
    late = ATTN_OK, waits = 0;
    assert_int_equal(step(b), ATTN_OK);
    assert_int_equal(waits, 2);
    assert_int_equal(plan_graph(b->plan, ATTN_PLAN_CAPTURE, &b->batch, NULL, &b->error), ATTN_OK);
    assert_int_equal(plan_run(b->plan, model_layer(b->model, 0), &b->io, &b->error), ATTN_OK);
    assert_int_equal(waits, 2);
    assert_int_equal(plan_batch(b->plan, &b->batch, NULL, &b->error), ATTN_OK);
    late = ATTN_ERROR_DEVICE;
    assert_int_equal(plan_run(b->plan, model_layer(b->model, 0), &b->io, &b->error), late);
    assert_int_equal(plan_batch(b->plan, &b->batch, NULL, &b->error), late);
    bench_destroy(b);
}

static const int32_t elsewhere[1]; /* what the driver calls a GPU's */

static attn_status find_owner(const struct attn_memory_args *args, struct attn_device *device,
                              struct attn_error *error)
{
    *device =
        (struct attn_device){args->memory == elsewhere ? ATTN_DEVICE_CUDA : ATTN_DEVICE_CPU, 0};
    return ATTN_OK;
}

#define TABLE(field) offsetof(struct attn_batch_table, field)

/* Each array of a further table, and what extensions of a run point at. */
TEST(validation_asks_where_arrays_lie)
{
    static const size_t fields[] = {TABLE(block_table),         TABLE(block_table_row),
                                    TABLE(slot_mapping),        TABLE(seq_lens),
                                    TABLE(page_indices),        TABLE(page_start_loc),
                                    TABLE(last_page_len),       TABLE(seq_lens_host),
                                    TABLE(page_start_loc_host), TABLE(last_page_len_host)};
    const struct attn_io_mla mla = {.ext = {ATTN_EXT_IO_MLA, 0, sizeof mla, NULL},
                                    .topk_indices = elsewhere};
    const struct attn_io_output_quant quant = {
        .ext = {ATTN_EXT_IO_OUTPUT_QUANT, 0, sizeof quant, NULL},
        .scale = (const float *)(const void *)elsewhere};
    const struct attn_io_rope rope = {.ext = {ATTN_EXT_IO_ROPE, 0, sizeof rope, NULL},
                                      .positions = (const int64_t *)(const void *)elsewhere};
    const struct {
        const char *name;
        const struct attn_ext *ext;
    } runs[] = {{"topk_indices", &mla.ext}, {"scale", &quant.ext}, {"positions", &rope.ext}};
    const void *address = elsewhere;
    struct bench *b = bench_create(fake_layer("a"), true);
    b->model->asked = &b->model->instances[0];
    b->model->instances[0].kernels.memory_device = find_owner;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        struct attn_batch_table table = {.num_slots = 0};
        assert_int_equal(places_check_table(b->plan, &table, &b->error), ATTN_OK);
        memcpy((char *)&table + fields[i], &address, sizeof address);
        REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, "tables",
                   places_check_table(b->plan, &table, &b->error));
    }
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        b->io.next = runs[i].ext;
        REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &b->error, runs[i].name,
                   places_check_run(b->plan, &b->io, &b->error));
    }
    bench_destroy(b);
}

TEST(steps_allocate_nothing)
{
    static const int32_t queries[] = {1, 20};
    struct bench *b = bench_create(fake_layer("a"), false);
    void *volatile one;
    set_batch(b, queries, 2);
    assert_int_equal(step(b), ATTN_OK);
    counting = true;
    one = malloc(1); /* the count itself works */
    int64_t before = allocations;
    for (int32_t i = 0; i < 10; i++) {
        step(b);
    }
    counting = false;
    free(one);
    assert_int_equal(fake_calls.attends, 22);
    assert_int_equal(allocations, before);
    bench_destroy(b);
    if (SANITIZED) {
        skip();
    }
    assert_int_equal(before, 1);
}
