/* SPDX-License-Identifier: Apache-2.0 */
/* Plugins that are sound until an engine uses them. Wrong answers to supports, create, prepare,
 * schedule_size, plan and kernels become errors. What ends the process there ends the engine: the
 * code of a vendor that serves runs in the engine's process, and no library can take that back;
 * these tests say so. The argument is libattn.so.1. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fixture.h"
#include "support/client.h"
#include "support/layer.h"
#include "support/tensor.h"
#include "support/test.h"

enum { HEADS = 2, HEAD_SIZE = 64, BLOCK = 16, BLOCKS = 2, TOKENS = 4 };

/* One layer of one request, as examples/engine.c has it; says how far it came. */
struct engine {
    attn_runtime *runtime;
    attn_assignment *assignment;
    attn_model *model;
    attn_plan *plan;
    void *cache, *workspace;
    float rows[4][TOKENS * HEADS * HEAD_SIZE];
    struct shaped tensors[4];
    struct attn_error error;
};

static attn_status begin(struct engine *e, const char *file, uint32_t flags)
{
    const struct attn_select_options choice = {.struct_size = sizeof choice, .flags = flags};
    struct attn_runtime_options options = client_options(file);
    const struct attn_layer_desc layer = layer_decoder("only", HEADS, HEADS, HEAD_SIZE, BLOCK);
    const struct attn_layer_desc *layers[] = {&layer};
    options.log_level = 1 + ATTN_LOG_ERROR;
    attn_status status = api->runtime_create(&options, &e->runtime, &e->error);
    return status ? status : api->select(e->runtime, &choice, layers, 1, &e->assignment, &e->error);
}

static attn_status bind_layer(struct engine *e, attn_layer *layer)
{
    attn_status status = client_cache(api, layer, BLOCKS, NULL, &e->cache, &e->error);
    return status ? status
                  : api->plan_create(e->model, api->layer_group(layer, ATTN_GROUP_BLOCK_TABLE, 0),
                                     CLIENT_LIMITS(1, TOKENS, BLOCK), &e->plan, &e->error);
}

static attn_status step(struct engine *e, attn_layer *layer, const char **at)
{
    static const int32_t starts[] = {0, TOKENS}, lens[] = {TOKENS}, table[] = {1};
    static const int64_t slots[TOKENS] = {BLOCK, BLOCK + 1, BLOCK + 2, BLOCK + 3};
    struct attn_batch batch = client_batch(1, starts, lens);
    client_blocks(&batch, table, 1, slots);
    const struct attn_step_io io =
        SIZED(attn_step_io, .q = &e->tensors[0].tensor, .k = &e->tensors[1].tensor,
              .v = &e->tensors[2].tensor, .out = &e->tensors[3].tensor);
    const size_t bytes = client_workspace_bytes(api, e->plan);
    attn_status status = ATTN_OK;
    for (int i = 0; i < 4; i++) {
        shaped_set(&e->tensors[i], e->rows[i], ATTN_DTYPE_F32, 3,
                   (const int64_t[]){TOKENS, HEADS, HEAD_SIZE}, NULL);
    }
    *at = "workspace";
    e->workspace = client_memory(bytes);
    status = client_bind_workspace(api, e->plan, e->workspace, bytes, &e->error);
    *at = "plan";
    status = status ? status : api->plan_batch(e->plan, &batch, NULL, &e->error);
    if (status != ATTN_OK) {
        return status;
    }
    *at = "run";
    return api->run(e->plan, layer, &io, &e->error);
}

/* "ok", or the call that failed with its status, field and message. */
static void serve(const char *file, char *text, size_t size)
{
    struct engine *e = calloc(1, sizeof *e);
    const char *at = "select";
    attn_status status = ATTN_OK;
    e->error.struct_size = sizeof e->error;
    status = begin(e, file, 0);
    if (status == ATTN_OK) {
        at = "model_create";
        status = api->model_create(e->runtime, e->assignment, NULL, &e->model, &e->error);
    }
    if (status == ATTN_OK) {
        at = "plan_create";
        status = bind_layer(e, api->model_layer(e->model, 0));
    }
    status = status ? status : step(e, api->model_layer(e->model, 0), &at);
    snprintf(text, size, status == ATTN_OK ? "ok" : "%s %d %s: %s", at, status, e->error.field,
             e->error.message);
    api->plan_destroy(e->plan);
    api->model_destroy(e->model);
    api->assignment_destroy(e->assignment);
    api->runtime_destroy(e->runtime);
    free(e->workspace);
    free(e->cache);
    free(e);
}

static const struct {
    const char *name, *outcome;
} answers[] = {
    {"", "ok"},
    {"supports_reasons_are_foul",
     "select 8 ATTN_BACKEND: layer 'only', prefill: no backend can serve it; answers: (a "
     "text that is not clean UTF-8) (a text that is not clean UTF-8) (supported: not stated)"},
    {"supports_reasons_are_null",
     "select 8 ATTN_BACKEND: layer 'only', prefill: no backend can serve it; answers: "
     "supports this layer (supported: not stated)"},
    {"supports_error_is_foul",
     "select 8 ATTN_BACKEND: layer 'only', prefill: no backend can serve it; answers: "
     "supports this layer (supported: device error, with a text that is not clean UTF-8)"},
    {"supports_fails_silently",
     "select 8 ATTN_BACKEND: layer 'only', prefill: no backend can serve it; answers: "
     "supports this layer (supported: unknown status (status 12345), without a text)"},
    {"attend_fails_silently",
     "run 11 : layer 'only', answers: attend: unknown status (status 12345), without a text"},
    {"attend_error_is_foul",
     "run 12 : layer 'only', answers: attend: device error, with a text that is not clean UTF-8"},
    {"attend_error_is_told",
     "run 12 workspace: layer 'only', answers: attend: launch failed: \xc3\xbc of 7"},
    {"write_error_is_foul", "run 12 : layer 'only', answers: write keys: device error, with a text "
                            "that is not clean UTF-8"},
    {"write_fails_silently",
     "run 11 : layer 'only', answers: write keys: unknown status (status -1), without a text"},
    {"prepare_error_is_foul", "plan_create 12 : device error, with a text that is not clean UTF-8"},
    {"schedule_size_is_endless",
     "plan_create 11 schedule_size: answers asks for 9187201950435737471 bytes on the host, "
     "9187201950435737471 on the device and 9187201950435737471 of scratch; 1099511627776 are the "
     "most"},
    {"schedule_size_is_endless_on_the_device",
     "plan_create 11 schedule_size: answers asks for 0 bytes on the host, "
     "18446744073709551607 on the device and 0 of scratch; 1099511627776 are the most"},
    {"schedule_size_is_negative",
     "plan_create 11 schedule_size: answers asks for 18446744073709551615 bytes on the host, "
     "18446744073709551615 on the device and 18446744073709551615 of scratch; 1099511627776 are "
     "the most"},
    {"schedule_size_fails_silently", "plan_create 20 : internal error (status 20), without a text"},
    {"plan_error_is_foul", "plan 12 : device error, with a text that is not clean UTF-8"},
    {"slot_is_missing",
     "model_create 11 write_kv: answers declares the kernel write_kv and has NULL in its "
     "place"},
    {"release_is_missing", "model_create 11 release: answers has prepare without release"},
    {"kernels_size_is_8",
     "model_create 5 attn_kernels: attn_kernels.struct_size is 8; allowed are 272 to 65536"},
    {"kernels_size_is_endless",
     "model_create 5 attn_kernels: attn_kernels.struct_size is 18446744073709551615; "
     "allowed are 272 to 65536"},
    {"create_gives_no_instance",
     "model_create 11 create: answers answered ATTN_OK without an instance"},
    {"create_gives_no_kernels", "model_create 11 create: answers answered ATTN_OK without kernels"},
    {"create_fails_silently", "model_create 11 : unknown status (status 777), without a text"},
    {"create_error_is_foul", "model_create 12 : device error, with a text that is not clean UTF-8"},
};

TEST(wrong_answers_are_errors)
{
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        char text[2048];
        assert_int_equal(setenv("HOSTILE_CASE", answers[i].name, 1), 0);
        serve(HOSTILE_DIR "/attn_answers.so", text, sizeof text);
        if (strcmp(text, answers[i].outcome) != 0) {
            fail_msg("%s: '%s'", answers[i].name, text);
        }
    }
    print_message("%zu wrong answers are errors\n", sizeof answers / sizeof *answers - 1);
}

/* A text without an end becomes one that fits, after the names. */
TEST(endless_texts_end)
{
    static const char begins[] = "run 12 ";
    char text[2048];
    assert_int_equal(setenv("HOSTILE_CASE", "attend_error_is_endless", 1), 0);
    serve(HOSTILE_DIR "/attn_answers.so", text, sizeof text);
    assert_memory_equal(text, begins, sizeof begins - 1);
    assert_int_equal(strspn(text + sizeof begins - 1, "f"), ATTN_ERROR_FIELD_SIZE - 1);
    const char *message = strstr(text, ": ");
    assert_non_null(message);
    assert_memory_equal(message + 2, "layer 'only', answers: attend: mmm", 34);
    assert_int_equal(strlen(message + 2), ATTN_ERROR_MESSAGE_SIZE - 1);
}

/* A hundred thousand reasons: the first ones are kept. */
TEST(reasons_end)
{
    struct engine *e = calloc(1, sizeof *e);
    int32_t verdict = 0, count = 0;
    e->error.struct_size = sizeof e->error;
    assert_int_equal(setenv("HOSTILE_CASE", "supports_never_ends_its_reasons", 1), 0);
    assert_ok(begin(e, HOSTILE_DIR "/attn_answers.so", ATTN_SELECT_KEEP_UNSERVED));
    assert_ok(api->assignment_verdict(e->assignment, 0, ATTN_PHASE_DECODE, 0, &verdict, &count));
    assert_int_equal(count, 32);
    api->assignment_destroy(e->assignment);
    api->runtime_destroy(e->runtime);
    free(e);
}

/* What a plugin does to the process in supports, create and its kernels, it does to the engine. */
TEST(later_misdeeds_are_the_engines)
{
    static const char *const stages[] = {"supports", "create", "write", "attend"};
    static const struct {
        const char *name;
        int signal, status;
    } deeds[] = {
        {"crash", SIGSEGV, 0}, {"abort", SIGABRT, 0}, {"exit", 0, 7}, {"throw", SIGABRT, 0}};
    const struct rlimit no_core = {0, 0};
    for (size_t i = 0; i < 4 * sizeof deeds / sizeof *deeds; i++) {
        char file[4096], text[2048];
        int status = -1;
        pid_t pid = -1;
        snprintf(file, sizeof file, "%s/attn_%s_in_%s.so", HOSTILE_DIR, deeds[i / 4].name,
                 stages[i % 4]);
        if (access(file, F_OK) != 0 && strcmp(deeds[i / 4].name, "throw") == 0) {
            continue; /* no C++ compiler */
        }
        pid = fork();
        if (pid == 0) {
            setrlimit(RLIMIT_CORE, &no_core);
            signal(SIGSEGV, SIG_DFL);
            signal(SIGABRT, SIG_DFL);
            serve(file, text, sizeof text);
            fprintf(stderr, "%s: %s\n", file, text);
            _exit(0);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        if (deeds[i / 4].signal != 0
                ? !WIFSIGNALED(status) || WTERMSIG(status) != deeds[i / 4].signal
                : !WIFEXITED(status) || WEXITSTATUS(status) != 7) {
            fail_msg("%s: %#x", file, status);
        }
    }
}

int main(int argc, char **argv)
{
    const int failed = fixture_open(argc, argv);
    return failed != 0 ? failed : test_run(NULL, NULL);
}
