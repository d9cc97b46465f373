/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_TRACE: what a trace has of a cascade, of captured steps, of threads, of runtimes and of
 * forked processes, and a profiler's ranges. tests/tools/trace.py reads traces of whole models. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fixture.h"
#include "support/client.h"
#include "support/test.h"

enum { PAGE = 65536 }; /* bytes, whatever the size of a page */

static const struct attn_layer_desc decoder = DECODER();
static char path[64];

static void begin_trace(void)
{
    snprintf(path, sizeof path, "/tmp/attn-trace-%ld", (long)getpid());
    unlink(path);
    setenv("ATTN_TRACE", path, 1);
    fixture_read_environment();
}

/* Lines of the trace that have both texts. */
static int32_t count(const char *text, const char *more)
{
    char line[4096];
    int32_t found = 0;
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    assert_non_null(fgets(line, sizeof line, file));
    assert_string_equal(line, "[\n");
    while (fgets(line, sizeof line, file) != NULL) {
        const size_t length = strlen(line);
        assert_memory_equal(line, "{\"name\":\"", 9);
        assert_memory_equal(line + length - 4, "}},\n", 4);
        found += strstr(line, text) != NULL && strstr(line, more) != NULL;
    }
    fclose(file);
    return found;
}

TEST(parts_of_a_cascade_are_named)
{
    static const int32_t queries[] = {1, 2, 1, 3, 1, 1, 2, 1};
    static const int32_t lens[] = {300, 290, 291, 401, 285, 283, 310, 300};
    OWNED(fixture_finish) struct fixture f;
    begin_trace();
    fixture_init(&f, "example", &decoder, queries, lens, 8, 272, NULL, false);
    f.batch.common_prefix_len = 272;
    const int32_t before = count("\"name\":", "");
    fixture_step(&f);
    assert_int_equal(count("\"attend prefix\"", "\"requests\":1,\"keys\":272,"), 1);
    assert_int_equal(count("\"attend\"", "\"requests\":8,\"keys\":284,"), 1);
    assert_int_equal(count("\"merge_states\"", "\"backend\":\"example\""), 1);
    assert_true(count("\"run\"", "\"layer\":\"layer\",\"index\":0") > 0);
    assert_true(count("\"name\":", "") > before + 5);
    unlink(path);
}

/* A traced model's plan for graphs. */
static attn_plan *begin_graphs(struct fixture *f, void **workspace)
{
    attn_plan *plan;
    begin_trace();
    fixture_mixed(f, "cpu_ref", &decoder, false);
    CHECK(f, client_plan(f->api, f->model, 0, CLIENT_PLAN(1, MAX_REQS, MAX_TOKENS, MAX_BLOCKS * 16),
                         &plan, workspace, &f->error));
    return plan;
}

TEST(captured_runs_say_so)
{
    struct fixture f;
    void *workspace;
    attn_plan *plan = begin_graphs(&f, &workspace);
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_CAPTURE, &f.batch, NULL, &f.error));
    CHECK(&f, f.api->run(plan, f.bound, &f.io, &f.error));
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_REPLAY, &f.batch, NULL, &f.error));
    CHECK(&f, f.api->run(plan, f.bound, &f.io, &f.error));
    f.api->plan_destroy(plan);
    free(workspace);
    fixture_finish(&f);
    assert_int_equal(count("\"captured\":true", "\"run\""), 1);
    assert_int_equal(count("\"plan_graph\"", "\"requests\":4"), 2);
    unlink(path);
}

/* Host copies of the lengths on pages of their own. */
static int32_t *lens_apart(struct fixture *f)
{
    int32_t *lens = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(lens, MAP_FAILED);
    memcpy(lens, f->batch.seq_lens_host, (size_t)f->batch.num_reqs * sizeof *lens);
    f->batch.seq_lens_host = lens;
    return lens;
}

/* An engine's host arrays end with the call that brought them: before the device's part. */
TEST(device_parts_read_no_earlier_arrays)
{
    struct fixture f;
    void *workspace;
    attn_plan *plan = begin_graphs(&f, &workspace);
    int32_t *lens = lens_apart(&f);
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_OUT_OF_GRAPH, &f.batch, NULL, &f.error));
    assert_int_equal(munmap(lens, PAGE), 0);
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_IN_GRAPH, NULL, NULL, &f.error));
    CHECK(&f, f.api->run(plan, f.bound, &f.io, &f.error));
    f.api->plan_destroy(plan);
    free(workspace);
    fixture_finish(&f);
    assert_int_equal(count("\"plan_graph\"", "\"requests\":4"), 2);
    unlink(path);
}

TEST(failed_batches_read_no_earlier_arrays)
{
    OWNED(fixture_finish) struct fixture f;
    begin_trace();
    fixture_mixed(&f, "cpu_ref", &decoder, false);
    int32_t *lens = lens_apart(&f);
    CHECK(&f, fixture_batch(&f));
    assert_int_equal(munmap(lens, PAGE), 0);
    f.batch.num_reqs = -1;
    assert_int_not_equal(fixture_batch(&f), ATTN_OK);
    unlink(path);
}

static void *step_often(void *argument)
{
    for (int32_t i = 0; i < 50; i++) {
        fixture_step(argument);
    }
    return NULL;
}

/* Every line whole; each thread, and the child, its own. */
TEST(threads_runtimes_and_forks_share_a_file)
{
    struct fixture f[2];
    pthread_t thread;
    begin_trace();
    fixture_mixed(&f[0], "cpu_ref", &decoder, false);
    fixture_mixed(&f[1], "example", &decoder, false);
    assert_true(f[0].runtime != f[1].runtime);
    const int32_t before = count("\"run\"", "");
    assert_int_equal(pthread_create(&thread, NULL, step_often, &f[0]), 0);
    step_often(&f[1]);
    pthread_join(thread, NULL);
    assert_int_equal(count("\"run\"", "") - before, 100);
    const pid_t child = fork();
    if (child == 0) {
        step_often(&f[0]);
        _exit(0);
    }
    int status = 1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    char own[32];
    snprintf(own, sizeof own, "\"pid\":%ld,", (long)child);
    assert_int_equal(count("\"run\"", own), 50);
    fixture_finish(&f[0]);
    fixture_finish(&f[1]);
    unlink(path);
}

TEST(a_file_that_is_no_trace_is_kept)
{
    struct attn_runtime_options options = client_options(PLUGINS);
    const struct attn_api *api;
    struct attn_error error = ATTN_ERROR_INIT;
    attn_runtime *runtime;
    char line[32] = "";
    begin_trace();
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("of the user\n", file);
    fclose(file);
    options.ignore_environment = 0;
    assert_int_equal(client_open(CORE_FILE, &options, &api, &runtime, &error), ATTN_ERROR_IO);
    assert_string_equal(error.field, "ATTN_TRACE");
    assert_non_null(strstr(error.message, "is there and is no trace"));
    assert_null(runtime);
    file = fopen(path, "r");
    assert_non_null(fgets(line, sizeof line, file));
    assert_string_equal(line, "of the user\n");
    assert_null(fgets(line, sizeof line, file));
    fclose(file);
    unlink(path);
}

TEST(profilers_get_ranges)
{
    struct fixture f;
    begin_trace();
    void *markers = dlopen(MARKERS, RTLD_NOW);
    assert_non_null(markers);
    const int *depth = dlsym(markers, "marker_depth"), *ranges = dlsym(markers, "marker_count");
    fixture_mixed(&f, "cpu_ref", &decoder, false);
    fixture_step(&f);
    fixture_finish(&f);
    assert_int_equal(*depth, 0);
    assert_int_equal(*ranges, count("\"ph\":\"X\"", ""));
    dlclose(markers);
    unlink(path);
}

/* One step in three. */
TEST(steps_are_sampled)
{
    OWNED(fixture_finish) struct fixture f;
    begin_trace();
    setenv("ATTN_TRACE_EVERY", "3", 1);
    fixture_mixed(&f, "cpu_ref", &decoder, false);
    unsetenv("ATTN_TRACE_EVERY");
    const int32_t before = count("\"plan_batch\"", "");
    for (int32_t i = 0; i < 9; i++) {
        fixture_step(&f);
    }
    assert_int_equal(count("\"plan_batch\"", "") - before, 3);
    unlink(path);
}

/* More instances at a time than have wrappers: the others' steps are traced without operations. */
TEST(many_models_are_fine)
{
    enum { MODELS = 70 };
    static struct fixture f[MODELS];
    begin_trace();
    for (int32_t i = 0; i < MODELS; i++) {
        fixture_mixed(&f[i], "cpu_ref", &decoder, false);
        fixture_step(&f[i]);
    }
    assert_true(count("\"run\"", "") >= MODELS);
    for (int32_t i = 0; i < MODELS; i++) {
        fixture_finish(&f[i]);
    }
    fixture_mixed(&f[0], "cpu_ref", &decoder, false);
    const int32_t before = count("\"attend\"", "");
    fixture_step(&f[0]);
    assert_true(count("\"attend\"", "") > before);
    fixture_finish(&f[0]);
    unlink(path);
}
