/* SPDX-License-Identifier: Apache-2.0 */
/* What api.h says of a plan's life: what holds after a failed run, which stream everything goes to,
 * and what may not be bound while a plan holds the layer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "backend_recording.h"
#include "support/client.h"
#include "support/test.h"

enum { REQS = 9, SHARED = 320 };

static const int32_t queries[REQS] = {1, 1, 1, 1, 1, 1, 2, 1, 20},
                     lens[REQS] = {400, 333, 350, 401, 380, 352, 399, 336, 350};

static const struct {
    struct attn_layer_desc layer;
    const char *backend;
    int32_t shared, attends; /* shared keys, and attends in a run */
    const char *named;       /* in errors */
    const char *operations[2];
} steps[] = {
    {DECODER(), "recording", 0, 1, "recording", {"attend"}},
    {DECODER(), "recording", SHARED, 2, "recording", {"attend prefix", "attend"}},
    {DECODER(.chunk_size = 32), "recording_narrow", 0, 1, "recording_narrow", {"attend"}},
    {DECODER(.sink_len = 5),
     "recording_narrow",
     0,
     2,
     "recording_narrow",
     {"attend sink", "attend"}},
    {DECODER(),
     "prefill=recording;decode=recording_apart",
     0,
     2,
     "recording and recording_apart",
     {"attend", "attend"}},
};
enum { STEPS = sizeof steps / sizeof *steps };

static void init(struct fixture *f, int32_t i)
{
    memset(recorded_by_core(), 0, sizeof(struct recorded));
    fixture_init(f, steps[i].backend, &steps[i].layer, queries, lens, REQS, steps[i].shared, NULL,
                 false);
}

/* Whichever of a run's attends fails, the error says whose it was, the plan stays ready, and the
 * same run again is right. */
TEST(test_failed_run)
{
    for (int32_t i = 0; i < STEPS; i++) {
        OWNED(fixture_finish) struct fixture right, f;
        init(&right, i);
        fixture_step(&right);
        init(&f, i);
        CHECK(&f, fixture_batch(&f));
        for (int32_t failing = 1; failing <= steps[i].attends; failing++) {
            recorded_by_core()->failing = failing;
            assert_int_equal(fixture_run(&f), ATTN_ERROR_DEVICE);
            assert_int_equal(recorded_by_core()->failing, 0);
            char text[96];
            snprintf(text, sizeof text, "layer 'layer', %s: %s: as asked", steps[i].named,
                     steps[i].operations[failing - 1]);
            assert_string_equal(f.error.message, text);
            memset(f.out, 0xff, (size_t)f.batch.num_tokens * sizeof *f.out);
            recorded_by_core()->attends = 0;
            assert_ok(fixture_run(&f));
            assert_int_equal(recorded_by_core()->attends, steps[i].attends);
            assert_true(fixture_difference(&right, &f) == 0);
        }
    }
}

/* All that a step enqueues goes to the stream that plan and run name; the next plan may name
 * another. */
TEST(test_stream)
{
    for (int32_t i = 0; i < STEPS; i++) {
        OWNED(fixture_finish) struct fixture f;
        int streams[2];
        init(&f, i);
        for (int32_t s = 0; s < 2; s++) {
            recorded_by_core()->stream = f.io.stream = &streams[s];
            recorded_by_core()->attends = recorded_by_core()->writes =
                recorded_by_core()->other_streams = 0;
            CHECK(&f, f.api->plan_batch(f.plan, &f.batch, &streams[s], &f.error));
            assert_ok(fixture_run(&f));
            assert_int_equal(recorded_by_core()->other_streams, 0);
            assert_int_equal(recorded_by_core()->attends, steps[i].attends);
            assert_int_equal(recorded_by_core()->writes, 1);
        }
    }
}

static void refuse(struct fixture *f, attn_status status, const char *call)
{
    assert_int_equal(status, ATTN_ERROR_ORDER);
    assert_string_equal(f->error.field, call);
    assert_non_null(strstr(f->error.message, "layer 'layer' is in 1 plans"));
}

/* A vendor's own state of a plan: there from its creation to its end, whichever way that comes. */
TEST(test_states_of_plans)
{
    struct recorded *c = recorded_by_core();
    OWNED(fixture_finish) struct fixture f;
    init(&f, 3);
    const int32_t states = c->states;
    assert_true(states > 1);
    fixture_step(&f); /* each attend got the one of its limits */
    for (int32_t n = 1; n <= states; n++) {
        const struct attn_limits limits =
            SIZED(attn_limits, .max_num_reqs = REQS, .max_num_tokens = 64);
        const struct attn_plan_options options = SIZED(attn_plan_options, .limits = &limits);
        attn_plan *plan;
        c->no_state = n;
        assert_int_equal(f.api->plan_create(f.model, 0, &options, &plan, &f.error),
                         ATTN_ERROR_OUT_OF_MEMORY);
        assert_null(plan);
        assert_int_equal(c->states, states);
    }
    f.api->plan_destroy(f.plan);
    f.plan = NULL;
    assert_int_equal(c->states, 0);
}

/* The folder of a backend's compiled kernels lies in the engine's cache folder. */
TEST(test_kernel_folder)
{
    char folder[] = "/tmp/attn-kernels-XXXXXX", kernels[64], command[64];
    assert_non_null(mkdtemp(folder));
    snprintf(kernels, sizeof kernels, "%s/kernels/recording", folder);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    const char *const folders[] = {"", folder}, *const seen[] = {"none", kernels};
    for (int32_t i = 0; i < 2; i++) {
        struct attn_runtime_options options = client_options(PLUGINS);
        OWNED(fixture_finish) struct fixture f;
        const struct attn_layer_desc *layers[] = {&f.layer};
        attn_runtime *runtime;
        attn_model *model;
        init(&f, 0);
        options.cache_dir = folders[i];
        CHECK(&f, f.api->runtime_create(&options, &runtime, &f.error));
        CHECK(&f,
              client_model(f.api, runtime, CLIENT_ORDER("recording"), layers, 1, &model, &f.error));
        assert_string_equal(recorded_by_core()->folder, seen[i]);
        f.api->model_destroy(model);
        f.api->runtime_destroy(runtime);
    }
    assert_int_equal(system(command), 0);
}

/* By every call that binds; the plan's runs are right before and after. */
TEST(test_bound_while_planned)
{
    OWNED(fixture_finish) struct fixture right, f;
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    const struct attn_kv_view *views[] = {&k, &v};
    const struct attn_layer_params params = {.struct_size = sizeof params};
    init(&right, 0);
    fixture_step(&right);
    init(&f, 0);
    attn_layer *layer = f.bound;
    const struct attn_cache_memory memory =
        SIZED(attn_cache_memory, .base = f.cache, .num_blocks = 1);
    CHECK(&f, fixture_batch(&f));
    CHECK(&f, client_views(f.api, layer, f.cache, 1, &k, &v, &f.error));
    refuse(&f, client_bind(f.api, layer, &k, &v, &f.error), "layer_bind_caches");
    refuse(&f, f.api->layer_bind_caches(layer, views, 2, &f.error), "layer_bind_caches");
    refuse(&f, f.api->layer_bind_memory(layer, &memory, &f.error), "layer_bind_caches");
    refuse(&f, f.api->layer_bind_params(layer, &params, &f.error), "layer_bind_params");
    assert_ok(fixture_run(&f));
    assert_true(fixture_difference(&right, &f) == 0);
    f.api->plan_destroy(f.plan);
    f.plan = NULL;
    CHECK(&f, client_bind(f.api, layer, &k, &v, &f.error));
    CHECK(&f, f.api->layer_bind_caches(layer, views, 2, &f.error));
    CHECK(&f, f.api->layer_bind_memory(layer, &memory, &f.error));
    CHECK(&f, f.api->layer_bind_params(layer, &params, &f.error));
}
