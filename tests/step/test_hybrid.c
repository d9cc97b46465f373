/* SPDX-License-Identifier: Apache-2.0 */
/* Several layers in one model: full and sliding ones in groups of their own, and one that reads
 * another's cache. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/client.h"
#include "support/test.h"

enum { FULL, SLIDING, SHARED, LAYERS, OUT_BYTES = 31 * 4 * 32 * sizeof(float) };

static const struct attn_layer_desc kinds[] = {
    [FULL] = DECODER(),
    [SLIDING] = DECODER(.has_window = 1, .window_left = 6),
};

struct hybrid {
    struct fixture single[2]; /* FULL and SLIDING alone: caches, inputs, and what is right */
    attn_runtime *runtime;
    attn_model *model;
    attn_plan *plans[2];
    void *workspaces[2];
    struct attn_layer_desc descs[LAYERS];
    struct attn_error error;
};

static attn_status select_and_create(struct hybrid *h, const char *backend)
{
    const struct attn_layer_desc *layers[LAYERS] = {&h->descs[0], &h->descs[1], &h->descs[2]};
    h->error = (struct attn_error)ATTN_ERROR_INIT;
    return client_model(h->single[0].api, h->runtime, CLIENT_ORDER(backend), layers, LAYERS,
                        &h->model, &h->error);
}

static void hybrid_init(struct hybrid *h, const char *backend)
{
    memset(h, 0, sizeof *h);
    for (int32_t i = 0; i < 2; i++) {
        fixture_mixed(&h->single[i], backend, &kinds[i], false);
        fixture_step(&h->single[i]);
    }
    h->runtime = h->single[0].runtime;
    h->descs[FULL] = h->descs[SHARED] = h->single[FULL].layer;
    h->descs[SLIDING] = h->single[SLIDING].layer;
    h->descs[FULL].name = "full";
    h->descs[SLIDING].name = "sliding";
    h->descs[SHARED].name = "shared";
    h->descs[SHARED].kv_sharing_target = "full";
}

static void hybrid_bind(struct hybrid *h)
{
    const struct attn_api *api = h->single[0].api;
    for (int32_t i = 0; i < LAYERS; i++) {
        attn_layer *layer = api->model_layer(h->model, i);
        struct attn_cache_spec spec = {.struct_size = sizeof spec};
        struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
        CHECK(h, client_spec(api, layer, &spec, &h->error));
        if (i == SHARED) {
            assert_int_equal(spec.kind, ATTN_KV_SPEC_NONE);
            assert_int_equal(client_bind(api, layer, &k, &v, &h->error),
                             ATTN_ERROR_INVALID_ARGUMENT);
            assert_non_null(strstr(h->error.message, "the layer has 0 caches"));
            continue;
        }
        CHECK(h, client_views(api, layer, h->single[i].cache, h->single[i].num_blocks, &k, &v,
                              &h->error));
        CHECK(h, client_bind(api, layer, &k, &v, &h->error));
    }
    for (int32_t g = 0; g < 2; g++) {
        CHECK(h, client_plan(api, h->model, g, CLIENT_LIMITS(MAX_REQS, MAX_TOKENS, MAX_BLOCKS * 16),
                             &h->plans[g], &h->workspaces[g], &h->error));
    }
}

static void hybrid_finish(struct hybrid *h)
{
    const struct attn_api *api = h->single[0].api;
    for (int32_t i = 0; i < 2; i++) {
        api->plan_destroy(h->plans[i]);
        free(h->workspaces[i]);
    }
    api->model_destroy(h->model);
    for (int32_t i = 0; i < 2; i++) {
        fixture_finish(&h->single[i]);
    }
}

TEST(test_groups_and_outputs)
{
    static const char *const backends[] = {"cpu_ref", "example", "full=example;sliding=cpu_ref"};
    struct hybrid h;
    for (size_t b = 0; b < sizeof backends / sizeof *backends; b++) {
        hybrid_init(&h, b == 1 ? "example" : "cpu_ref");
        const struct attn_api *api = h.single[0].api;
        CHECK(&h, select_and_create(&h, backends[b]));
        hybrid_bind(&h);
        assert_int_equal(api->model_num_groups(h.model, ATTN_GROUP_BLOCK_TABLE), 2);
        attn_layer *layers[LAYERS];
        for (int32_t i = 0; i < LAYERS; i++) {
            layers[i] = api->model_layer(h.model, i);
            int32_t group = api->layer_group(layers[i], ATTN_GROUP_BLOCK_TABLE, 0);
            assert_int_equal(group, i == SLIDING ? 1 : 0);
        }
        CHECK(&h, api->plan_batch(h.plans[0], &h.single[FULL].batch, NULL, &h.error));
        CHECK(&h, api->plan_update_block_table(h.plans[1], h.plans[0], &h.single[SLIDING].batch,
                                               NULL, &h.error));
        for (int32_t i = 0; i < LAYERS; i++) {
            struct fixture *f = &h.single[i == SLIDING ? SLIDING : FULL];
            OWNED(memory_end) float *right = malloc(OUT_BYTES);
            struct attn_step_io io = f->io;
            memcpy(right, f->out, OUT_BYTES);
            memset(f->out, 0xff, OUT_BYTES);
            io.lse = NULL;
            if (i == SHARED) { /* brings no keys, and would not write them */
                io.k = io.v = NULL;
            }
            CHECK(&h, api->run(h.plans[i == SLIDING], layers[i], &io, &h.error));
            /* Where example serves what cpu_ref made right, they agree to rounding only. */
            for (size_t e = 0; e < OUT_BYTES / sizeof *right; e++) {
                assert_true(f->out[e] - right[e] < 3e-5f && right[e] - f->out[e] < 3e-5f);
            }
            memcpy(f->out, right, OUT_BYTES);
        }
        INVALID(&h.error, "layer",
                api->run(h.plans[0], layers[SLIDING], &h.single[0].io, &h.error));
        hybrid_finish(&h);
    }
}

/* Keys that a sharing layer is given all the same leave the cache as it is. */
TEST(test_shared_cache_is_not_written)
{
    struct hybrid h;
    hybrid_init(&h, "cpu_ref");
    const struct attn_api *api = h.single[0].api;
    CHECK(&h, select_and_create(&h, "cpu_ref"));
    hybrid_bind(&h);
    struct fixture *f = &h.single[FULL];
    size_t bytes = (size_t)f->num_blocks * 16 * 2 * 32 * 2 * sizeof(float);
    void *before = malloc(bytes);
    memcpy(before, f->cache, bytes);
    for (int32_t i = 0; i < 31 * 2 * 32; i++) {
        f->k[i] = f->v[i] = 1e9f;
    }
    CHECK(&h, api->plan_batch(h.plans[0], &f->batch, NULL, &h.error));
    CHECK(&h, api->run(h.plans[0], api->model_layer(h.model, SHARED), &f->io, &h.error));
    assert_memory_equal(before, f->cache, bytes);
    CHECK(&h, api->run(h.plans[0], api->model_layer(h.model, FULL), &f->io, &h.error));
    assert_memory_not_equal(before, f->cache, bytes);
    free(before);
    hybrid_finish(&h);
}
