/* SPDX-License-Identifier: Apache-2.0 */
/* Every allocation between a runtime and a plan fails in turn: each is reported as such, nothing
 * leaks. */
#include "support/client.h"
#include "support/layer.h"
#include "support/meter.h"
#include "support/test.h"

/* A full and a sliding layer, one with sinks; from runtime to plan and back. */
static attn_status attempt(const struct attn_api *api, struct meter *meter,
                           struct attn_error *error)
{
    static _Alignas(256) unsigned char cache[64 * 1024], workspace[4 << 20];
    static float sinks[4];
    const struct attn_host host = meter_host(meter);
    struct attn_runtime_options options = client_options(PLUGINS ":relative:/no/such/place");
    struct attn_layer_desc layers[2] = {layer_decoder("full", 4, 2, 16, 16)};
    const struct attn_layer_desc *descs[] = {&layers[0], &layers[1]};
    const struct attn_layer_params params = SIZED(attn_layer_params, .sinks = sinks),
                                   none = {.struct_size = sizeof none};
    attn_runtime *runtime = NULL;
    attn_model *model = NULL;
    attn_plan *plan = NULL;
    options.host = &host;
    options.backend = "cpu_ref";
    layers[1] = layer_decoder("sliding", 4, 2, 16, 16);
    layers[1].has_window = 1;
    layers[1].window_left = 7;
    layers[0].has_sinks = 1;
    attn_status status = api->runtime_create(&options, &runtime, error);
    status = status ? status : client_model(api, runtime, NULL, descs, 2, &model, error);
    for (int32_t i = 0; i < 2 && status == ATTN_OK; i++) {
        attn_layer *layer = api->model_layer(model, i);
        struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
        status = client_views(api, layer, cache, 4, &k, &v, error);
        status = status ? status : client_bind(api, layer, &k, &v, error);
        status = status ? status : api->layer_bind_params(layer, i == 0 ? &params : &none, error);
    }
    for (int32_t g = 0; g < 2 && status == ATTN_OK; g++) {
        status = api->plan_create(model, g, CLIENT_LIMITS(4, 64, 256), &plan, error);
        status =
            status ? status : client_bind_workspace(api, plan, workspace, sizeof workspace, error);
        if (g == 0) {
            api->plan_destroy(plan);
            plan = NULL;
        }
    }
    api->plan_destroy(plan);
    api->model_destroy(model);
    api->runtime_destroy(runtime);
    return status;
}

TEST(test_every_allocation_fails)
{
    const struct attn_api *api;
    struct attn_error error = ATTN_ERROR_INIT;
    struct meter meter = {0};
    assert_ok(client_load(CORE_FILE, &api, &error));
    assert_ok(attempt(api, &meter, &error));
    assert_int_equal(meter.alive, 0);
    assert_int_equal(meter.bytes, 0);
    long calls = meter.calls, refused = 0;
    assert_true(calls > 20);
    for (long i = 1; i <= calls; i++) {
        meter = (struct meter){.fail_at = i};
        error = (struct attn_error)ATTN_ERROR_INIT;
        attn_status status = attempt(api, &meter, &error);
        /* A plugin that finds no memory is a plugin that is not there: then cpu_ref cannot be
         * ordered. */
        assert_true(status == ATTN_ERROR_OUT_OF_MEMORY || status == ATTN_ERROR_REFUSED ||
                    status == ATTN_OK);
        assert_true(status == ATTN_OK || error.message[0] != '\0');
        refused += status == ATTN_ERROR_OUT_OF_MEMORY;
        assert_int_equal(meter.alive, 0);
        assert_int_equal(meter.bytes, 0);
    }
    print_message("%ld allocations, %ld reported as out of memory\n", calls, refused);
    assert_true(refused > calls / 2);
}
