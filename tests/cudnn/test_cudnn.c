/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of cudnn that need no GPU, over a library of the tests': versions, what a failing call
 * leaves, signals.
 * usage: test_cudnn PLUGIN.so, with fake_cudnn.c and fake_nvml.c first in the search path */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "../gpu/found.h"
#include "cudnn/graph.h"
#include "fake_cudnn.h"

static const struct attn_plugin *plugin;

static const struct graph_shape shape = {.dtype = CUDNN_DATA_BFLOAT16,
                                         .num_reqs = 4,
                                         .query_len = 8,
                                         .columns = 2,
                                         .block_size = 16,
                                         .num_q_heads = 4,
                                         .num_kv_heads = 2,
                                         .head_size = 64,
                                         .head_size_v = 64,
                                         .k = {8, 2048, 1024, 64},
                                         .v = {8, 2048, 1024, 64},
                                         .window = 5};

static void expect_absent(const char *message)
{
    const struct attn_host host = {.struct_size = sizeof host};
    const struct attn_probe_sink sink = {.struct_size = sizeof sink};
    struct attn_error error = ATTN_ERROR_INIT;
    assert_int_equal(plugin->probe(&host, &sink, &error), ATTN_ERROR_ABSENT);
    assert_string_equal(error.field, "library");
    assert_string_equal(error.message, message);
}

TEST(test_versions)
{
    set_variable("FAKE_CUDNN_VERSION", "91002");
    expect_absent("libcudnn.so.9 is version 9.10.2; 9.19 or newer is wanted");
    set_variable("FAKE_CUDNN_VERSION", "91900");
    expect_found(plugin, "0:sm_90/132 1:sm_90/132 2:sm_75/20 ", "0 1 ", NULL);
    set_variable("FAKE_NVML_GPUS", "1");
    expect_found(plugin, "0:sm_75/20 ", "", "compute_capability");
    set_variable("FAKE_NVML_GPUS", NULL);
    set_variable("FAKE_CUDNN_VERSION", NULL);
}

/* A plan that cannot be made says why and leaves nothing, whichever call fails. */
TEST(test_failures)
{
    struct cudnn_library library;
    struct graph_plan plan;
    char cause[GRAPH_CAUSE_BYTES] = "";
    void *data[GRAPH_TENSORS] = {NULL};
    assert_true(cudnn_open(&library, cause));
    fake_cudnn_fail(0);
    assert_true(graph_make(&library, NULL, &shape, &plan, cause));
    const int calls = fake_cudnn_calls();
    assert_int_equal(plan.workspace_bytes, 4096);
    assert_int_equal(fake_cudnn_operations(), 31);
    fake_cudnn_fail(0);
    assert_int_equal(graph_execute(&library, NULL, &plan, data, NULL), CUDNN_STATUS_SUCCESS);
    const int executing = fake_cudnn_calls(), living = fake_cudnn_living();
    for (int i = 1; i <= executing; i++) {
        fake_cudnn_fail(i);
        assert_int_not_equal(graph_execute(&library, NULL, &plan, data, NULL),
                             CUDNN_STATUS_SUCCESS);
        assert_int_equal(fake_cudnn_living(), living);
    }
    graph_free(&library, &plan);
    assert_int_equal(fake_cudnn_living(), 0);
    int served = 0;
    for (int i = 1; i <= calls; i++) {
        fake_cudnn_fail(i);
        cause[0] = '\0';
        if (graph_make(&library, NULL, &shape, &plan, cause)) {
            served++; /* by the heuristics' next mode */
            graph_free(&library, &plan);
        } else {
            assert_non_null(strstr(cause, "not supported (call "));
        }
        assert_null(plan.plan);
        assert_int_equal(fake_cudnn_living(), 0);
    }
    assert_in_range(served, 1, calls / 2);
}

static int operations_of(const struct cudnn_library *library, const struct graph_shape *of)
{
    struct graph_plan plan;
    char cause[GRAPH_CAUSE_BYTES];
    fake_cudnn_fail(0);
    assert_true(graph_make(library, NULL, of, &plan, cause));
    graph_free(library, &plan);
    return fake_cudnn_operations();
}

/* What a layer lacks is not in its graph. */
TEST(test_graphs)
{
    struct cudnn_library library;
    char cause[CUDNN_CAUSE_BYTES];
    struct graph_shape s = shape;
    assert_true(cudnn_open(&library, cause));
    s.window = 0;
    assert_int_equal(operations_of(&library, &s), 24);
    s.right = 3;
    assert_int_equal(operations_of(&library, &s), 25);
    s.right = -1;
    assert_int_equal(operations_of(&library, &s), 18);
    s.has = GRAPH_HAS_SOFT_CAP;
    assert_int_equal(operations_of(&library, &s), 21);
    s.has = GRAPH_HAS_SINKS;
    assert_int_equal(operations_of(&library, &s), 22);
    s.has = GRAPH_HAS_ROWS; /* no pages are loaded */
    assert_int_equal(operations_of(&library, &s), 16);
}

/* Heuristics that name no engine refuse; a version that describes devices otherwise is not asked.
 */
TEST(test_engines)
{
    struct cudnn_library library;
    char cause[GRAPH_CAUSE_BYTES] = "";
    assert_true(cudnn_open(&library, cause));
    fake_cudnn_fail(0);
    assert_true(graph_has_engine(&library, "{}", &shape, cause));
    const int calls = fake_cudnn_calls();
    int refused = 0;
    for (int i = 1; i <= calls; i++) {
        fake_cudnn_fail(i);
        cause[0] = '\0';
        const int answer = graph_has_engine(&library, "{}", &shape, cause);
        assert_int_equal(answer, cause[0] == '\0');
        refused += !answer;
        assert_int_equal(fake_cudnn_living(), 0);
    }
    assert_in_range(refused, calls / 2, calls - 3); /* the description's calls are not among them */
}

struct seen {
    int count;
    char field[32], asked[32], supported[GRAPH_CAUSE_BYTES];
};

static void see(void *user, const char *field, const char *asked, const char *supported)
{
    struct seen *seen = user;
    seen->count++;
    snprintf(seen->field, sizeof seen->field, "%s", field);
    snprintf(seen->asked, sizeof seen->asked, "%s", asked);
    snprintf(seen->supported, sizeof seen->supported, "%s", supported);
}

/* What cuDNN refuses for a layer is a reason of supports; equal layers are asked about once. */
TEST(test_supports)
{
    struct attn_layer_desc layer = {.struct_size = sizeof layer,
                                    .name = "layers.0",
                                    .kind = ATTN_LAYER_DECODER,
                                    .dtype = ATTN_DTYPE_BF16,
                                    .kv_dtype = ATTN_KV_BF16,
                                    .num_q_heads = 8,
                                    .num_kv_heads = 2,
                                    .head_size = 64,
                                    .head_size_v = 64,
                                    .scale = 1,
                                    .causal = ATTN_CAUSAL_YES,
                                    .block_size = 16};
    const struct attn_backend_caps caps = {.struct_size = sizeof caps,
                                           .device = {ATTN_DEVICE_CUDA, 0}};
    const struct attn_supports_args args = {
        .struct_size = sizeof args, .caps = &caps, .layer = &layer, .phase = ATTN_PHASE_PREFILL};
    struct seen seen = {0};
    const struct attn_reason_sink reasons = {
        .struct_size = sizeof reasons, .user = &seen, .refuse = see};
    struct attn_error error = ATTN_ERROR_INIT;
    fake_cudnn_fail(0);
    assert_int_equal(plugin->supports(&args, &reasons, &error), ATTN_OK);
    assert_int_equal(seen.count, 0);
    assert_int_not_equal(fake_cudnn_calls(), 0);
    fake_cudnn_fail(0);
    layer.name = "layers.1";
    assert_int_equal(plugin->supports(&args, &reasons, &error), ATTN_OK);
    assert_int_equal(fake_cudnn_calls(), 0);
    layer.head_size = layer.head_size_v = 128;
    fake_cudnn_fail(8); /* a call for the graph's first descriptor fails */
    assert_int_equal(plugin->supports(&args, &reasons, &error), ATTN_OK);
    assert_int_equal(seen.count, 1);
    assert_string_equal(seen.field, "layer");
    assert_string_equal(seen.asked, "layers.1");
    assert_non_null(strstr(seen.supported, "not supported (call 8)"));
    layer.kv_dtype = ATTN_KV_F16;
    assert_int_equal(plugin->supports(&args, &reasons, &error), ATTN_OK);
    assert_string_equal(seen.field, "kv_dtype");
}

TEST(test_signals)
{
    struct sigaction action, changed = {.sa_flags = SA_RESTART};
    changed.sa_handler = SIG_IGN;
    cudnn_begin_changes();
    sigaction(SIGINT, &changed, NULL);
    cudnn_end_changes();
    assert_int_equal(sigaction(SIGINT, NULL, &action), 0);
    assert_ptr_equal(action.sa_handler, SIG_DFL);
    assert_false(action.sa_flags & SA_RESTART);
}

int main(int argc, char **argv)
{
    plugin = plugin_of_argument(argc, argv);
    return plugin == NULL ? 2 : test_run(NULL, NULL);
}
