/* SPDX-License-Identifier: Apache-2.0 */
/* core/step: what a plan is made of: limits, workspace, caches that it holds. That no step
 * allocates, attn-check holds. */
#include "support/client.h"
#include "plan_fixture.h"

#define ROOM_REFUSED(status, field, change)                                                        \
    WITH(room, change,                                                                             \
         REFUSED_AS(ATTN_ERROR_##status, &b->error, field,                                         \
                    plan_bind_workspace(plan, &room.known, &b->error)))

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
    OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), false);
    attn_plan *plan;
    INVALID(&b->error, "attn_limits", plan_create(b->model, 0, &options, &plan, &b->error));
    options.limits = &limits.known;
    WITH(limits, limits.unknown = 1,
         REFUSED_AS(ATTN_ERROR_STRUCT_SIZE, &b->error, "attn_limits",
                    plan_create(b->model, 0, &options, &plan, &b->error)));
    WITH(limits, limits.known.reserved = 1,
         INVALID(&b->error, "reserved", plan_create(b->model, 0, &options, &plan, &b->error)));
    WITH(limits, limits.known.next = &ext,
         REFUSED_AS(ATTN_ERROR_EXTENSION, &b->error, "attn_limits",
                    plan_create(b->model, 0, &options, &plan, &b->error)));
    assert_ok(plan_create(b->model, 0, &options, &plan, &b->error));
    assert_ok(plan_workspace(plan, &room.known, &b->error));
    assert_int_equal(room.unknown, 0); /* what this core does not say is 0 */
    assert_int_equal(room.known.alignment, 256);
    assert_int_equal(room.known.device.type, ATTN_DEVICE_CPU);
    assert_true(room.known.bytes > 0 && room.known.memory == NULL);
    assert_int_equal(plan_bind_workspace(plan, &room.known, &b->error),
                     ATTN_ERROR_INVALID_ARGUMENT);
    room.known.memory = aligned_alloc(256, (room.known.bytes + 255) / 256 * 256);
    ROOM_REFUSED(INVALID_ARGUMENT, "workspace", room.known.device.type = ATTN_DEVICE_CUDA);
    ROOM_REFUSED(STRUCT_SIZE, "attn_workspace", room.unknown = 1);
    ROOM_REFUSED(WORKSPACE, "bytes", room.known.bytes--);
    ROOM_REFUSED(INVALID_ARGUMENT, "workspace",
                 room.known.memory = (uint8_t *)room.known.memory + 8);
    assert_ok(plan_bind_workspace(plan, &room.known, &b->error));
    /* the scratch apart: what `memory` then has is the plan's own */
    const size_t scratch = room.known.scratch_bytes;
    assert_true(scratch < room.known.bytes);
    room.known.scratch = (uint8_t *)room.known.memory + 8;
    REFUSED(&b->error, "scratch", plan_bind_workspace(plan, &room.known, &b->error));
    room.known.scratch = room.known.memory; /* what a run would write over */
    REFUSED(&b->error, "scratch", plan_bind_workspace(plan, &room.known, &b->error));
    room.known.scratch = aligned_alloc(256, scratch + 256);
    assert_ok(plan_bind_workspace(plan, &room.known, &b->error));
    room.known.bytes--;
    REFUSED(&b->error, "scratch_bytes", plan_bind_workspace(plan, &room.known, &b->error));
    room.known.bytes += 1 + 64;
    room.known.scratch_bytes += 64; /* the largest of several plans' */
    assert_ok(plan_bind_workspace(plan, &room.known, &b->error));
    if (scratch > 0) {
        room.known.scratch_bytes = scratch - 1;
        REFUSED(&b->error, "scratch_bytes", plan_bind_workspace(plan, &room.known, &b->error));
    }
    free(room.known.scratch);
    plan_destroy(plan);
    free(room.known.memory);
    room.known.struct_size = 8;
    assert_int_equal(plan_workspace(b->plan, &room.known, &b->error), ATTN_ERROR_STRUCT_SIZE);
}

TEST(plans_of_chunks_refuse_endless_limits)
{
    static const int32_t requests[] = {INT32_MAX, 715827883, 1 << 30, 357913942, 1 << 29};
    struct attn_layer_desc desc = fake_layer("a");
    desc.chunk_size = 16;
    OWNED(planned_end) struct planned *b = planned_create(desc, false);
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++) {
        const struct attn_plan_options *options = CLIENT_LIMITS(requests[i], INT32_MAX, 0);
        attn_plan *plan = b->plan;
        assert_int_equal(plan_create(b->model, 0, options, &plan, &b->error), ATTN_ERROR_LIMIT);
        assert_null(plan);
        assert_string_equal(b->error.field, "max_num_reqs");
    }
}

/* Sizes of a plan's areas and of a vendor's schedule that no machine has. */
TEST(areas_have_a_largest)
{
    struct attn_layer_desc desc = fake_layer("a");
    desc.num_q_heads = 65536;
    OWNED(planned_end) struct planned *b = planned_create(desc, false);
    const struct attn_plan_options *options = CLIENT_LIMITS(1, INT32_MAX, 0);
    attn_plan *plan;
    REFUSED_AS(ATTN_ERROR_LIMIT, &b->error, "max_num_tokens",
               plan_create(b->model, 0, options, &plan, &b->error));
    const struct attn_plan_options *few = CLIENT_LIMITS(1, 1, 0);
    for (int32_t i = 0; i < 2; i++) {
        fake_calls.schedule.host_bytes = i == 0 ? ((size_t)1 << 40) + 1 : 0;
        fake_calls.schedule.device_bytes = i == 1 ? ((size_t)1 << 40) + 1 : 0;
        REFUSED_AS(ATTN_ERROR_PLUGIN, &b->error, "schedule_size",
                   plan_create(b->model, 0, few, &plan, &b->error));
    }
}

/* A plan is captured as far as the lowest level of its phases. */
TEST(graphs_need_every_phase)
{
    OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), false);
    const struct attn_plan_options *options = CLIENT_PLAN(1, 1, 1, 0);
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        struct served *served = &model_layer(b->model, 0)->served[phase];
        const int32_t level = served->graph_level;
        attn_plan *plan;
        served->graph_level = ATTN_GRAPH_UNIFORM_BATCH;
        assert_int_equal(plan_graph_level(b->plan), ATTN_GRAPH_UNIFORM_BATCH);
        assert_ok(plan_create(b->model, 0, options, &plan, &b->error));
        plan_destroy(plan);
        served->graph_level = ATTN_GRAPH_NEVER;
        REFUSED_AS(ATTN_ERROR_UNSUPPORTED, &b->error, "graph",
                   plan_create(b->model, 0, options, &plan, &b->error));
        served->graph_level = level;
    }
}

/* Plans hold views of caches, of readers too, that are planned apart from the layer whose cache
 * they read. */
TEST(caches_stay_while_a_readers_plan_holds_them)
{
    const struct attn_context_parallel cp = EXTENSION(
        attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL, NULL, .prefill = &fixture_ranks);
    struct attn_layer_desc layers[] = {fake_layer("a"), fake_layer("b")};
    const struct attn_plan_options *options = CLIENT_LIMITS(1, 1, 0);
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    struct attn_error error = ATTN_ERROR_INIT;
    static _Alignas(256) uint8_t cache[FAKE_BLOCK_SIZE * 2 * 2 * FAKE_HEAD_SIZE * 4];
    OWNED(fixture_finish) struct fixture fixture;
    attn_plan *plan;
    layers[1].kv_sharing_target = "a";
    layers[1].next = &cp.ext;
    fake_init(&fixture);
    OWNED(model_end) attn_model *model = fake_model_of(&fixture, layers, 2);
    attn_layer *owner = model_layer(model, 0);
    assert_ok(layer_kv_views(owner, cache, 1, &k, &v, &error));
    assert_ok(bind_kv(owner, &k, &v, &error));
    assert_int_equal(model_num_groups(model, ATTN_GROUP_BLOCK_TABLE), 2);
    assert_ok(plan_create(model, 1, options, &plan, &error));
    REFUSED_AS(ATTN_ERROR_ORDER, &error, "layer_bind_caches", bind_kv(owner, &k, &v, &error));
    plan_destroy(plan);
    assert_ok(bind_kv(owner, &k, &v, &error));
}

/* Memory that is handed in again: a workspace needs a new plan of the batch, parameters no plan. */
TEST(memory_is_bound_before_a_step)
{
    static const int32_t queries[] = {1, 5};
    const struct attn_layer_params params = {.struct_size = sizeof params};
    OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), false);
    attn_layer *layer = model_layer(b->model, 0);
    struct attn_workspace room = {.struct_size = sizeof room};
    set_batch(b, queries, 2);
    assert_ok(step(b));
    assert_ok(plan_workspace(b->plan, &room, &b->error));
    room.memory = b->workspace;
    assert_ok(plan_bind_workspace(b->plan, &room, &b->error));
    REFUSED_AS(ATTN_ERROR_ORDER, &b->error, "plan", plan_run(b->plan, layer, &b->io, &b->error));
    REFUSED_AS(ATTN_ERROR_ORDER, &b->error, "layer_bind_params",
               layer_bind_params(layer, &params, &b->error));
    plan_destroy(b->plan);
    b->plan = NULL;
    assert_ok(layer_bind_params(layer, &params, &b->error));
}

/* With more tokens partial results would have no room. */
TEST(cascades_have_a_largest_step)
{
    static int32_t table[8][40], start[9], lens[8];
    OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), false);
    const struct attn_plan_options *options = CLIENT_LIMITS(8, 4096, 0);
    struct attn_workspace room = {.struct_size = sizeof room};
    plan_destroy(b->plan);
    free(b->workspace);
    assert_ok(plan_create(b->model, 0, options, &b->plan, &b->error));
    assert_ok(plan_workspace(b->plan, &room, &b->error));
    room.memory = b->workspace = aligned_alloc(256, (room.bytes + 255) / 256 * 256);
    assert_ok(plan_bind_workspace(b->plan, &room, &b->error));
    for (int32_t queries = 256; queries <= 257; queries++) { /* 2048 tokens, and 2056 */
        for (int32_t r = 0; r < 8; r++) {
            start[r + 1] = start[r] + queries;
            lens[r] = 272 + queries;
        }
        b->batch = client_batch(8, start, lens);
        b->batch.block_table = table[0];
        b->batch.block_table_stride = 40;
        b->batch.common_prefix_len = 272;
        fake_reset();
        assert_ok(plan_batch(b->plan, &b->batch, NULL, &b->error));
        assert_int_equal(fake_calls.schedules, queries == 256 ? 2 : 1);
    }
}

/* One area for all layers: as large as the layer that needs most, whichever comes first. */
TEST(areas_hold_the_widest_layer)
{
    static _Alignas(256) uint8_t cache[FAKE_BLOCK_SIZE * 2 * 2 * FAKE_HEAD_SIZE * 4];
    struct attn_layer_desc layers[] = {fake_layer("a"), fake_layer("b"), fake_layer("c")};
    const struct attn_plan_options *options = CLIENT_LIMITS(8, 64, 0);
    size_t bytes[2];
    layers[0].num_q_heads = layers[2].num_q_heads = 2;
    for (int32_t i = 0; i < 2; i++) { /* the wide layer alone, and between narrow ones */
        struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
        struct attn_workspace room = {.struct_size = sizeof room};
        struct attn_error error = ATTN_ERROR_INIT;
        OWNED(fixture_finish) struct fixture fixture;
        attn_plan *plan;
        fake_init(&fixture);
        OWNED(model_end)
        attn_model *model = fake_model_of(&fixture, i == 0 ? &layers[1] : layers, i == 0 ? 1 : 3);
        for (int32_t layer = 0; layer < (i == 0 ? 1 : 3); layer++) {
            assert_ok(layer_kv_views(model_layer(model, layer), cache, 1, &k, &v, &error));
            assert_ok(bind_kv(model_layer(model, layer), &k, &v, &error));
        }
        assert_ok(plan_create(model, 0, options, &plan, &error));
        assert_ok(plan_workspace(plan, &room, &error));
        bytes[i] = room.scratch_bytes;
        uint8_t *around = aligned_alloc(256, (room.bytes + 511) / 256 * 256);
        room.memory = around + 256; /* the scratch begins before it and reaches into it */
        room.scratch = around;
        REFUSED(&error, "scratch", plan_bind_workspace(plan, &room, &error));
        plan_destroy(plan);
        free(around);
    }
    assert_true(bytes[0] > 0 && bytes[0] == bytes[1]);
}
