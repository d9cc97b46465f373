/* SPDX-License-Identifier: Apache-2.0 */
/* Devices that no driver numbers: two plugins share one by naming its namespace, and never by
 * chance. */
#include <stdio.h>
#include <string.h>

#include "support/client.h"
#include "support/test.h"

static const struct attn_layer_desc layer = {.struct_size = sizeof layer,
                                             .name = "layers.0",
                                             .kind = ATTN_LAYER_DECODER,
                                             .causal = 1,
                                             .dtype = ATTN_DTYPE_F32,
                                             .num_q_heads = 4,
                                             .num_kv_heads = 2,
                                             .head_size = 64,
                                             .scale = 0.125f};
static const struct attn_layer_desc *const layers[] = {&layer};

static const struct attn_api *api;
static attn_runtime *runtime;

static int open_runtime(void **state)
{
    struct attn_runtime_options options = client_options(PLUGINS);
    struct attn_error error = ATTN_ERROR_INIT;
    options.isolation = -1;
    return client_open(CORE_FILE, &options, &api, &runtime, &error) == ATTN_OK ? 0 : -1;
}

static int close_runtime(void **state)
{
    api->runtime_destroy(runtime);
    return 0;
}

static attn_status take(int32_t type, const char *device_namespace, const char *backend,
                        attn_assignment **assignment, struct attn_error *error)
{
    const struct attn_select_options options =
        SIZED(attn_select_options, .device = {type, 0}, .device_namespace = device_namespace,
              .backend = backend);
    return api->select(runtime, &options, layers, 1, assignment, error);
}

static const char *server(const attn_assignment *assignment, int32_t phase)
{
    struct attn_choice choice = {.struct_size = sizeof choice};
    assert_ok(api->assignment_choice(assignment, 0, phase, &choice));
    return choice.name;
}

/* ascend and metal have 12:0 of their own; npu_a and npu_b share namespace npu. */
static void test_reported(void **state)
{
    char all[512] = "";
    for (int32_t i = 0; i < api->device_count(runtime); i++) {
        struct attn_device_info info = {.struct_size = sizeof info};
        char one[96];
        assert_ok(api->device_info(runtime, i, &info));
        snprintf(one, sizeof one, "%d:%d/%s ", info.device.type, info.device.id,
                 info.device_namespace);
        strcat(all, one);
    }
    assert_string_equal(all, "8:0/apple 12:0/ascend 12:0/metal 12:0/npu 65537:0/own ");
}

static void test_own_numbers(void **state)
{
    struct attn_error error = ATTN_ERROR_INIT;
    attn_assignment *assignment;
    assert_int_equal(take(12, NULL, "", &assignment, &error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(error.field, "device_namespace");
    assert_non_null(strstr(error.message, "extension:0 of ascend"));
    assert_non_null(strstr(error.message, "extension:0 of metal"));
    assert_ok(take(12, "metal", "", &assignment, &error));
    assert_string_equal(server(assignment, ATTN_PHASE_PREFILL), "metal");
    assert_string_equal(server(assignment, ATTN_PHASE_DECODE), "metal");
    api->assignment_destroy(assignment);
    assert_int_equal(take(12, "metal", "prefill=ascend;decode=metal", &assignment, &error),
                     ATTN_ERROR_REFUSED);
    assert_non_null(strstr(error.message, "extension:0 of ascend"));
    assert_int_equal(take(12, "nobody", "", &assignment, &error), ATTN_ERROR_NOT_FOUND);
    assert_non_null(strstr(error.message, "extension:0 of nobody"));
}

static void test_shared(void **state)
{
    struct attn_error error = ATTN_ERROR_INIT;
    attn_assignment *assignment;
    assert_int_equal(take(12, "npu", "prefill=npu_a;decode=npu_b", &assignment, &error), ATTN_OK);
    assert_string_equal(server(assignment, ATTN_PHASE_PREFILL), "npu_a");
    assert_string_equal(server(assignment, ATTN_PHASE_DECODE), "npu_b");
    api->assignment_destroy(assignment);
}

/* DLPack's other types and vendors' own need no namespace where one plugin alone has them. */
static void test_types(void **state)
{
    struct attn_error error = ATTN_ERROR_INIT;
    attn_assignment *assignment;
    const int32_t types[] = {8, ATTN_DEVICE_VENDOR + 1};
    const char *names[] = {"apple", "own"};
    for (int32_t i = 0; i < 2; i++) {
        assert_ok(take(types[i], NULL, "", &assignment, &error));
        assert_string_equal(server(assignment, ATTN_PHASE_DECODE), names[i]);
        api->assignment_destroy(assignment);
    }
}

static void test_opened(void **state)
{
    struct attn_error error = ATTN_ERROR_INIT;
    attn_open_device *opened;
    assert_int_equal(
        api->device->open(runtime, (struct attn_device){ATTN_DEVICE_EXTENSION, 0}, &opened, &error),
        ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(error.field, "device_namespace");
    assert_null(opened);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reported), cmocka_unit_test(test_own_numbers),
        cmocka_unit_test(test_shared),   cmocka_unit_test(test_types),
        cmocka_unit_test(test_opened),
    };
    return cmocka_run_group_tests(tests, open_runtime, close_runtime);
}
