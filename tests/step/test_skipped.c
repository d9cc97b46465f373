/* SPDX-License-Identifier: Apache-2.0 */
/* One model of quantized layers and of layers that skip the quantization, by name or because they
 * slide: their groups and their pages, and that a layer that skips it is a plain one. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/client.h"
#include "support/test.h"

enum { FULL, SLIDING, NAMED, LAST, SHARING, SLIDING_TOO, LAYERS, D = 32, ROWS = 16 * 2 };

static const struct {
    int32_t kv_dtype, scale_form;
    int64_t page_bytes;
} models[] = {
    {ATTN_KV_INT8_KV, ATTN_SCALE_NONE, ROWS *(2 * D + 4)},
    {ATTN_KV_INT8_K, ATTN_SCALE_NONE, ROWS *(3 * D + 4)},
    {ATTN_KV_FP8_E4M3, ATTN_SCALE_PER_TENSOR, ROWS * 2 * D},
    {ATTN_KV_INT8_PER_TOKEN_HEAD, ATTN_SCALE_NONE, ROWS *(2 * D + 8)},
};
enum { MODELS = sizeof models / sizeof *models };

/* Described as engines do it, one dtype and its scale forms for the whole model; SHARING reads
 * NAMED's cache. */
static void describe(struct attn_layer_desc *layers, const struct fixture *f, size_t model)
{
    static const char *const names[] = {"a", "b", "c", "d", "e", "f"};
    for (int32_t i = 0; i < LAYERS; i++) {
        const bool slides = i == SLIDING || i == SLIDING_TOO;
        layers[i] = f->layer;
        layers[i].name = names[i];
        layers[i].dtype = ATTN_DTYPE_BF16;
        layers[i].kv_dtype = models[model].kv_dtype;
        layers[i].k_scale_form = layers[i].v_scale_form = models[model].scale_form;
        layers[i].has_window = slides;
        layers[i].window_left = slides ? 6 : 0;
        layers[i].skip_kv_quantization = slides || i == NAMED || i == SHARING;
    }
    layers[SHARING].kv_sharing_target = "c";
}

static attn_status make_model(struct fixture *f, const struct attn_layer_desc *layers,
                              const char *backend, attn_model **model)
{
    const struct attn_layer_desc *descs[LAYERS];
    for (int32_t i = 0; i < LAYERS; i++) {
        descs[i] = &layers[i];
    }
    return client_model(f->api, f->runtime, CLIENT_ORDER(backend), descs, LAYERS, model, &f->error);
}

static struct attn_cache_spec spec_of(struct fixture *f, attn_model *model, int32_t i)
{
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    CHECK(f, f->api->layer_cache_spec(f->api->model_layer(model, i), 0, &spec, &f->error));
    return spec;
}

/* Quantized full layers are one group, skipped sliding ones another, skipped full ones a third. */
TEST(test_groups)
{
    static const int32_t group[LAYERS] = {0, 1, 2, 0, 2, 1};
    static const char *const backends[] = {"cpu_ref", "prefill=cpu_ref;decode=recording"};
    const struct attn_layer_desc decoder = {.kind = ATTN_LAYER_DECODER};
    struct attn_layer_desc layers[LAYERS];
    struct fixture f;
    attn_model *model;
    fixture_mixed(&f, "cpu_ref", &decoder, false);
    for (size_t m = 0; m < 2 * MODELS; m++) {
        describe(layers, &f, m % MODELS);
        CHECK(&f, make_model(&f, layers, backends[m / MODELS], &model));
        assert_int_equal(f.api->model_num_groups(model, ATTN_GROUP_BLOCK_TABLE), 3);
        for (int32_t i = 0; i < LAYERS; i++) {
            const bool quantized = i == FULL || i == LAST;
            assert_int_equal(
                f.api->layer_group(f.api->model_layer(model, i), ATTN_GROUP_BLOCK_TABLE, 0),
                group[i]);
            if (i == SHARING) { /* which has no cache of its own */
                continue;
            }
            const struct attn_cache_spec spec = spec_of(&f, model, i);
            assert_int_equal(spec.kv_dtype, quantized ? models[m % MODELS].kv_dtype : ATTN_KV_BF16);
            assert_int_equal(spec.page_bytes,
                             quantized ? models[m % MODELS].page_bytes : ROWS * 2 * D * 2);
            assert_int_equal(spec.kind, i == SLIDING || i == SLIDING_TOO
                                            ? ATTN_KV_SPEC_SLIDING_WINDOW
                                            : ATTN_KV_SPEC_FULL);
        }
        f.api->model_destroy(model);
    }
    describe(layers, &f, 0); /* nothing skipped: of two groups and one dtype */
    for (int32_t i = 0; i < LAYERS; i++) {
        layers[i].skip_kv_quantization = 0;
    }
    CHECK(&f, make_model(&f, layers, "cpu_ref", &model));
    assert_int_equal(f.api->model_num_groups(model, ATTN_GROUP_BLOCK_TABLE), 2);
    for (int32_t i = 0; i < LAYERS; i++) {
        assert_true(i == SHARING || spec_of(&f, model, i).kv_dtype == ATTN_KV_INT8_KV);
    }
    f.api->model_destroy(model);
    fixture_finish(&f);
}

/* By every bit of the output and of the cache. */
TEST(test_step)
{
    struct attn_layer_desc layer = {.kind = ATTN_LAYER_DECODER, .has_window = 1, .window_left = 6};
    OWNED(fixture_finish) struct fixture plain, skipped;
    fixture_mixed(&plain, "cpu_ref", &layer, false);
    layer.kv_dtype = ATTN_KV_FP8_E4M3;
    layer.k_scale_form = layer.v_scale_form = ATTN_SCALE_PER_TENSOR;
    layer.skip_kv_quantization = 1;
    fixture_mixed(&skipped, "cpu_ref", &layer, false);
    fixture_step(&plain);
    fixture_step(&skipped);
    assert_true(fixture_difference(&plain, &skipped) == 0);
    assert_memory_equal(plain.cache, skipped.cache, plain.num_blocks * ROWS * 2 * D * 4);
}

/* A cache cannot be read as another dtype than it was written in. */
TEST(test_sharing_across_the_skip)
{
    const struct attn_layer_desc decoder = {.kind = ATTN_LAYER_DECODER};
    struct attn_layer_desc layers[LAYERS];
    OWNED(fixture_finish) struct fixture f;
    attn_model *model = NULL;
    fixture_mixed(&f, "cpu_ref", &decoder, false);
    describe(layers, &f, 0);
    layers[SHARING].skip_kv_quantization = 0;
    assert_int_not_equal(make_model(&f, layers, "cpu_ref", &model), ATTN_OK);
    assert_non_null(strstr(f.error.message, "'e'"));
    assert_non_null(strstr(f.error.message, "'c'"));
}
