/* SPDX-License-Identifier: Apache-2.0 */
/* One model of quantized layers and of layers that skip the quantization, by name or because they
 * slide: their groups, their pages, and every output of their common steps. */
#include <stdlib.h>
#include <string.h>

#include "history.h"
#include "support/test.h"

enum { FULL, SLIDING, NAMED, LAST, SHARING, SLIDING_TOO, ROWS = H_BLOCK * H_HK };

/* Described as engines do it, one dtype and its scale forms for the whole model; SHARING reads
 * NAMED's cache. */
static void describe(struct attn_layer_desc *layers, int32_t kv_dtype, int32_t scale_form)
{
    for (int32_t i = 0; i < H_LAYERS; i++) {
        bool slides = i == SLIDING || i == SLIDING_TOO;
        layers[i] = (struct attn_layer_desc){.kind = ATTN_LAYER_DECODER,
                                             .kv_dtype = kv_dtype,
                                             .k_scale_form = scale_form,
                                             .v_scale_form = scale_form,
                                             .has_window = slides,
                                             .window_left = slides ? 6 : 0};
        layers[i].skip_kv_quantization = slides || i == NAMED || i == SHARING;
    }
    layers[SHARING].kv_sharing_target = "c";
}

static const struct {
    int32_t kv_dtype, scale_form;
    int64_t page_bytes;
} models[] = {
    {ATTN_KV_INT8_KV, ATTN_SCALE_NONE, ROWS *(2 * H_D + 4)},
    {ATTN_KV_INT8_K, ATTN_SCALE_NONE, ROWS *(3 * H_D + 4)},
    {ATTN_KV_FP8_E4M3, ATTN_SCALE_PER_TENSOR, ROWS * 2 * H_D},
    {ATTN_KV_INT8_PER_TOKEN_HEAD, ATTN_SCALE_NONE, ROWS *(2 * H_D + 8)},
};
enum { MODELS = sizeof models / sizeof *models };

/* Quantized full layers are one group, skipped sliding ones another, skipped full ones a third. */
static void hold_groups(const struct history *h, size_t m)
{
    static const int32_t group[H_LAYERS] = {0, 1, 2, 0, 2, 1};
    assert_int_equal(h->num_groups, 3);
    for (int32_t i = 0; i < H_LAYERS; i++) {
        const struct history_layer *l = &h->layers[i];
        bool quantized = i == FULL || i == LAST;
        assert_int_equal(l->group, group[i]);
        if (i == SHARING) {
            assert_int_equal(l->owner, NAMED);
            continue;
        }
        assert_int_equal(l->spec.kv_dtype, quantized ? models[m].kv_dtype : ATTN_KV_BF16);
        assert_int_equal(l->spec.page_bytes, quantized ? models[m].page_bytes : ROWS * 2 * H_D * 2);
        assert_int_equal(l->spec.kind, i == SLIDING || i == SLIDING_TOO
                                           ? ATTN_KV_SPEC_SLIDING_WINDOW
                                           : ATTN_KV_SPEC_FULL);
    }
}

/* Prefills, decodes, both in one step, and a request that rests. */
TEST(test_steps)
{
    static const int32_t steps[][H_REQS] = {{9, 5, 12, 20}, {1, 1, 1, 1}, {1, 1, 7, 30},
                                            {0, 1, 1, 1},   {1, 1, 1, 1}, {1, 2, 3, 25}};
    static const char *const backends[] = {"cpu_ref", "prefill=cpu_ref;decode=recording"};
    for (size_t m = 0; m < MODELS * sizeof backends / sizeof *backends; m++) {
        struct attn_layer_desc layers[H_LAYERS];
        struct history *h = calloc(1, sizeof *h);
        describe(layers, models[m % MODELS].kv_dtype, models[m % MODELS].scale_form);
        history_init(h, backends[m / MODELS], layers, H_LAYERS);
        hold_groups(h, m % MODELS);
        for (size_t s = 0; s < sizeof steps / sizeof *steps; s++) {
            history_step(h, steps[s], HISTORY_ONE_RUN);
        }
        history_finish(h);
        free(h);
    }
}

/* Without the skip the same layers are of two groups and one dtype. */
TEST(test_nothing_skipped)
{
    static const int32_t steps[][H_REQS] = {{9, 5, 12, 20}, {1, 1, 1, 1}, {1, 1, 7, 30}};
    struct attn_layer_desc layers[H_LAYERS];
    struct history *h = calloc(1, sizeof *h);
    describe(layers, ATTN_KV_INT8_KV, ATTN_SCALE_NONE);
    for (int32_t i = 0; i < H_LAYERS; i++) {
        layers[i].skip_kv_quantization = 0;
    }
    history_init(h, "cpu_ref", layers, H_LAYERS);
    assert_int_equal(h->num_groups, 2);
    for (int32_t i = 0; i < H_LAYERS; i++) {
        assert_int_equal(h->layers[i].spec.kv_dtype,
                         h->layers[i].owner == i ? ATTN_KV_INT8_KV : ATTN_KV_AUTO);
    }
    for (size_t s = 0; s < sizeof steps / sizeof *steps; s++) {
        history_step(h, steps[s], HISTORY_ONE_RUN);
    }
    history_finish(h);
    free(h);
}

/* A cache cannot be read as another dtype than it was written in. */
TEST(test_sharing_across_the_skip)
{
    struct attn_layer_desc layers[H_LAYERS];
    const struct attn_layer_desc *descs[H_LAYERS];
    struct history *h = calloc(1, sizeof *h);
    attn_assignment *assignment;
    describe(layers, ATTN_KV_INT8_KV, ATTN_SCALE_NONE);
    history_init(h, "cpu_ref", layers, H_LAYERS);
    h->layers[SHARING].desc.skip_kv_quantization = 0;
    for (int32_t i = 0; i < H_LAYERS; i++) {
        descs[i] = &h->layers[i].desc;
    }
    assert_int_not_equal(h->api->select(h->runtime, NULL, descs, H_LAYERS, &assignment, &h->error),
                         ATTN_OK);
    assert_null(assignment);
    assert_non_null(strstr(h->error.message, "'e'"));
    assert_non_null(strstr(h->error.message, "'c'"));
    history_finish(h);
    free(h);
}
