/* SPDX-License-Identifier: Apache-2.0 */
/* core/step: what a batch must hold, how it is split, what a run checks; no step allocates. */
#include "fake_backend.h"

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

static struct bench *bench_create(struct attn_layer_desc desc, bool validate)
{
    struct bench *b = calloc(1, sizeof *b);
    struct attn_kv_spec spec = {.struct_size = sizeof spec};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    struct attn_plan_options options = {
        .struct_size = sizeof options,
        .limits = &(const struct attn_limits){.struct_size = sizeof(struct attn_limits),
                                              .max_num_reqs = 8,
                                              .max_num_tokens = TOKENS}};
    fake_init(&b->fixture)->features |= ATTN_FEATURE_BLOCK_TABLE_ROW;
    b->fixture.runtime.settings.validate = validate;
    b->error = (struct attn_error)ATTN_ERROR_INIT;
    b->model = fake_model(&b->fixture, &desc, 1, &b->error);
    if (b->model == NULL) {
        fail_msg("%s", b->error.message);
    }
    attn_layer *layer = model_layer(b->model, 0);
    layer_kv_spec(layer, &spec, NULL);
    if (spec.page_bytes > 0) {
        size_t bytes = (size_t)(spec.page_bytes * BLOCKS);
        b->cache = aligned_alloc(256, bytes);
        memset(b->cache, 0xff, bytes); /* NaN where nothing is written */
        assert_int_equal(layer_kv_views(layer, b->cache, BLOCKS, &k, &v, &b->error), ATTN_OK);
        assert_int_equal(layer_bind_kv(layer, &k, &v, &b->error), ATTN_OK);
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

static void bench_destroy(struct bench *b)
{
    plan_destroy(b->plan);
    model_destroy(b->model);
    fixture_finish(&b->fixture);
    free(b->cache);
    free(b->workspace);
    free(b);
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
    struct attn_batch_split split;
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

/* Plans hold views of the cache: it is bound again after they are gone. */
TEST(caches_stay_while_a_plan_holds_them)
{
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    struct bench *b = bench_create(fake_layer("a"), false);
    attn_layer *layer = model_layer(b->model, 0);
    assert_int_equal(layer_kv_views(layer, b->cache, 1, &k, &v, &b->error), ATTN_OK);
    REFUSED_AS(ATTN_ERROR_ORDER, &b->error, "layer_bind_kv",
               layer_bind_kv(layer, &k, &v, &b->error));
    plan_destroy(b->plan);
    b->plan = NULL;
    assert_int_equal(layer_bind_kv(layer, &k, &v, &b->error), ATTN_OK);
    bench_destroy(b);
}

TEST(only_leading_requests_are_decodes)
{
    static const int32_t queries[] = {1, 5, 1};
    struct bench *b = bench_create(fake_layer("a"), false);
    struct attn_batch_split split;
    set_batch(b, queries, 3);
    assert_int_equal(step(b), ATTN_OK);
    assert_int_equal(plan_split(b->plan, &split), ATTN_OK);
    assert_int_equal(split.num_decodes, 1);
    assert_int_equal(split.num_prefills, 2);
    bench_destroy(b);
}

/* A plan anew over the workspace that is there. */
static void plan_anew(struct bench *b)
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

/* Requests of up to so many queries as the backend declares go the decode way. */
TEST(declared_threshold_splits)
{
    static const int32_t queries[] = {4, 2, 5, 1};
    struct bench *b = bench_create(fake_layer("a"), false);
    struct attn_batch_split split;
    for (int32_t declared = 3; declared <= 5; declared++) {
        b->fixture.backends[0].caps.reorder_threshold = declared;
        plan_anew(b);
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

/* Zeros without a fill kernel; a profile step touches all of the workspace, too. */
TEST(idle_steps_are_zeros)
{
    struct bench *b = bench_create(fake_layer("a"), false);
    struct attn_workspace room = {.struct_size = sizeof room};
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
        plan_anew(b);
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
        bench_destroy(b);
    }
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
