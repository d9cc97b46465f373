/* SPDX-License-Identifier: Apache-2.0 */
/* Page bytes of every cache dtype and kind of layer by the table of the features document, and that
 * the rows and scales of the views are just those bytes: each belongs to one of them, and none to
 * two. */
#include <attn/api.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "support/client.h"
#include "support/layer.h"
#include "support/test.h"

enum { BLOCKS = 3, PADDING = 512 };

static const struct attn_api *api;
static attn_runtime *runtime;
static struct {
    struct attn_error error;
} last = {ATTN_ERROR_INIT};

/* Bytes of one slot and head: of K's row, V's row, and their scales. */
struct row_bytes {
    int64_t k, v, k_scale, v_scale;
};

#define ROWS(name, ...)                                                                            \
    static struct row_bytes name(int64_t d, int64_t dv)                                            \
    {                                                                                              \
        return (struct row_bytes){__VA_ARGS__};                                                    \
    }
ROWS(four_bytes, 4 * d, 4 * dv, 0, 0)
ROWS(two_bytes, 2 * d, 2 * dv, 0, 0)
ROWS(one_byte, d, dv, 0, 0)
ROWS(one_byte_scaled, d, dv, 4, 4) /* per-token-head: + 2 B Hk 4 */
ROWS(half_a_byte_scaled, d / 2, dv / 2, 4, 4)
ROWS(level_1, d, dv, 4, 0)
ROWS(level_2, d, 2 * dv, 4, 0)
ROWS(nvfp4, d / 2, dv / 2, d / 16, dv / 16)
ROWS(turboquant_k8v4, d, dv / 2, 0, 4)
ROWS(turboquant_4bit, d / 2, dv / 2, 2, 4)
ROWS(turboquant_k3v4, d * 3 / 8, dv / 2, 2, 4)
ROWS(turboquant_3bit, d * 3 / 8, dv * 3 / 8, 2, 4)
ROWS(blocks_of_8, d / 32 * 34, dv / 32 * 34, 0, 0)
ROWS(blocks_of_4, d / 32 * 18, dv / 32 * 18, 0, 0)

static const struct {
    int32_t kv_dtype, dtype;
    struct row_bytes (*rows)(int64_t d, int64_t dv);
} dtypes[] = {
    {ATTN_KV_AUTO, ATTN_DTYPE_F32, four_bytes},
    {ATTN_KV_AUTO, ATTN_DTYPE_BF16, two_bytes},
    {ATTN_KV_F32, ATTN_DTYPE_BF16, four_bytes},
    {ATTN_KV_F16, ATTN_DTYPE_F32, two_bytes},
    {ATTN_KV_BF16, ATTN_DTYPE_F16, two_bytes},
    {ATTN_KV_FP8_E4M3, ATTN_DTYPE_BF16, one_byte},
    {ATTN_KV_FP8_E5M2, ATTN_DTYPE_F16, one_byte},
    {ATTN_KV_FP8_PER_TOKEN_HEAD, ATTN_DTYPE_BF16, one_byte_scaled},
    {ATTN_KV_INT8_PER_TOKEN_HEAD, ATTN_DTYPE_BF16, one_byte_scaled},
    {ATTN_KV_INT4_PER_TOKEN_HEAD, ATTN_DTYPE_BF16, half_a_byte_scaled},
    {ATTN_KV_INT8_KV, ATTN_DTYPE_F32, level_1},
    {ATTN_KV_INT8_K, ATTN_DTYPE_BF16, level_2},
    {ATTN_KV_NVFP4, ATTN_DTYPE_BF16, nvfp4},
    {ATTN_KV_TURBOQUANT_K8V4, ATTN_DTYPE_BF16, turboquant_k8v4},
    {ATTN_KV_TURBOQUANT_4BIT_NC, ATTN_DTYPE_BF16, turboquant_4bit},
    {ATTN_KV_TURBOQUANT_K3V4_NC, ATTN_DTYPE_F16, turboquant_k3v4},
    {ATTN_KV_TURBOQUANT_3BIT_NC, ATTN_DTYPE_F32, turboquant_3bit},
    {ATTN_KV_Q8_0, ATTN_DTYPE_F32, blocks_of_8},
    {ATTN_KV_Q4_0, ATTN_DTYPE_F16, blocks_of_4},
};

/* No dtype of K or of V alone; automatic ones have no name of their own. */
static bool is_of_both(int32_t kv_dtype)
{
    return kv_dtype == ATTN_KV_AUTO || kv_dtype == ATTN_KV_INT8_KV || kv_dtype == ATTN_KV_INT8_K ||
           (kv_dtype >= ATTN_KV_TURBOQUANT_K8V4 && kv_dtype <= ATTN_KV_TURBOQUANT_3BIT_NC);
}

static const struct {
    int32_t block_size, num_kv_heads, head_size, head_size_v;
} shapes[] = {{16, 2, 64, 64}, {32, 8, 128, 128}, {8, 1, 256, 64}, {4, 3, 64, 128}};

/* Kinds of layers over one shape, and what their caches are called. */
static const struct kind {
    int32_t kind, spec, window, chunk, sink_len;
} kinds[] = {
    {ATTN_LAYER_DECODER, ATTN_KV_SPEC_FULL, 0, 0, 0},
    {ATTN_LAYER_DECODER, ATTN_KV_SPEC_SLIDING_WINDOW, 9, 0, 0},
    {ATTN_LAYER_DECODER, ATTN_KV_SPEC_CHUNKED_LOCAL, 0, 32, 0},
    {ATTN_LAYER_CROSS, ATTN_KV_SPEC_CROSS, 0, 0, 0},
    {ATTN_LAYER_DECODER, ATTN_KV_SPEC_SINK_FULL, 0, 0, 16},
    {ATTN_LAYER_ENCODER, ATTN_KV_SPEC_NONE, 0, 0, 0},
};

static struct attn_layer_desc describe(size_t t, size_t s, const struct kind *kind)
{
    return SIZED(attn_layer_desc, .name = "layer", .kind = kind->kind, .dtype = dtypes[t].dtype,
                 .kv_dtype = kind->kind != ATTN_LAYER_ENCODER ? dtypes[t].kv_dtype : ATTN_KV_AUTO,
                 .num_q_heads = 2 * shapes[s].num_kv_heads, .num_kv_heads = shapes[s].num_kv_heads,
                 .head_size = shapes[s].head_size, .head_size_v = shapes[s].head_size_v,
                 .scale = 0.125f,
                 .causal = kind->kind != ATTN_LAYER_CROSS && kind->kind != ATTN_LAYER_ENCODER,
                 .has_window = kind->window > 0, .window_left = kind->window - 1,
                 .chunk_size = kind->chunk, .sink_len = kind->sink_len,
                 .block_size = kind->kind != ATTN_LAYER_ENCODER ? shapes[s].block_size : 0);
}

static attn_model *bind(const struct attn_layer_desc *layer, struct attn_cache_spec *spec)
{
    const struct attn_layer_desc *layers[] = {layer};
    attn_model *model;
    CHECK(&last, client_model(api, runtime, NULL, layers, 1, &model, &last.error));
    CHECK(&last, client_spec(api, api->model_layer(model, 0), spec, &last.error));
    return model;
}

static void mark(uint8_t *map, int64_t size, int64_t at, int64_t bytes)
{
    assert_true(at >= 0 && at + bytes <= size);
    for (int64_t i = at; i < at + bytes; i++) {
        assert_int_equal(map[i], 0);
        map[i] = 1;
    }
}

/* By the formula above struct attn_kv_view. Rows of whole dims; the scales' own strides. */
static void mark_view(const struct attn_kv_view *view, const uint8_t *base, uint8_t *map,
                      int64_t size, int64_t row, int64_t scale)
{
    assert_true(view->pack == 0 || view->pack == view->head_size);
    for (int64_t b = 0; b < BLOCKS; b++) {
        for (int64_t s = 0; s < view->block_size; s++) {
            for (int64_t h = 0; h < view->num_heads; h++) {
                mark(map, size,
                     (const uint8_t *)view->data - base + b * view->stride_block +
                         s * view->stride_slot + h * view->stride_head,
                     row);
                if (scale > 0) {
                    mark(map, size,
                         (const uint8_t *)view->scale - base + b * view->scale_stride_block +
                             s * view->scale_stride_slot + h * view->scale_stride_head,
                         scale);
                }
            }
        }
    }
}

static void check_views(attn_model *model, const struct attn_cache_spec *spec,
                        const struct row_bytes *rows, bool latent)
{
    int64_t size = BLOCKS * spec->padded_page_bytes, used = 0;
    OWNED(memory_end) uint8_t *base = aligned_alloc(256, (size_t)(size + 255) / 256 * 256);
    OWNED(memory_end) uint8_t *map = calloc((size_t)size, 1);
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    attn_layer *layer = api->model_layer(model, 0);
    CHECK(&last, client_views(api, layer, base, BLOCKS, &k, latent ? NULL : &v, &last.error));
    CHECK(&last, client_bind(api, layer, &k, latent ? NULL : &v, &last.error));
    mark_view(&k, base, map, size, rows->k, rows->k_scale);
    if (!latent) {
        mark_view(&v, base, map, size, rows->v, rows->v_scale);
    }
    for (int64_t i = 0; i < size; i++) {
        int64_t in_page = i % spec->padded_page_bytes;
        used += map[i];
        assert_true(!map[i] || spec->ndim != 2 || in_page < spec->page_bytes);
    }
    assert_int_equal(used, BLOCKS * spec->page_bytes); /* no byte is left over */
}

TEST(test_every_dtype)
{
    for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++) {
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
            struct row_bytes rows = dtypes[t].rows(shapes[s].head_size, shapes[s].head_size_v);
            int64_t page = (int64_t)shapes[s].block_size * shapes[s].num_kv_heads *
                           (rows.k + rows.v + rows.k_scale + rows.v_scale);
            for (int32_t padded = 0; padded < 2; padded++) {
                struct attn_layer_desc layer = describe(t, s, &kinds[0]);
                struct attn_cache_spec spec, of_v = {.struct_size = sizeof of_v};
                layer.padded_page_bytes = padded ? page + PADDING : 0;
                attn_model *model = bind(&layer, &spec);
                assert_int_equal(spec.page_bytes, page);
                assert_int_equal(spec.padded_page_bytes, padded ? page + PADDING : page);
                assert_true(!padded || (spec.ndim == 2 && spec.shape[1] == page + PADDING));
                CHECK(&last, api->layer_cache_spec(api->model_layer(model, 0), 1, &of_v, NULL));
                assert_int_equal(of_v.head_size, shapes[s].head_size_v);
                check_views(model, &spec, &rows, false);
                api->model_destroy(model);
            }
        }
    }
}

/* K of one dtype and V of another: rows of both, each with its own bytes. */
TEST(test_two_dtypes)
{
    for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++) {
        const size_t of_v = (t + 5) % (sizeof dtypes / sizeof *dtypes);
        struct attn_layer_desc layer = describe(t, 0, &kinds[0]);
        struct row_bytes rows = dtypes[t].rows(64, 64), v = dtypes[of_v].rows(64, 64);
        struct attn_cache_spec spec;
        if (is_of_both(dtypes[t].kv_dtype) || is_of_both(dtypes[of_v].kv_dtype)) {
            continue;
        }
        layer.kv_dtype_v = dtypes[of_v].kv_dtype;
        rows.v = v.v, rows.v_scale = v.v_scale;
        attn_model *model = bind(&layer, &spec);
        assert_int_equal(spec.page_bytes, 16 * 2 * (rows.k + rows.v + rows.k_scale + rows.v_scale));
        check_views(model, &spec, &rows, false);
        api->model_destroy(model);
    }
}

TEST(test_every_kind)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++) {
            struct row_bytes rows = dtypes[t].rows(64, 64);
            struct attn_layer_desc layer = describe(t, 0, &kinds[i]);
            struct attn_cache_spec spec;
            bool none = kinds[i].spec == ATTN_KV_SPEC_NONE;
            attn_model *model = bind(&layer, &spec);
            assert_int_equal(spec.kind, kinds[i].spec);
            assert_int_equal(spec.sliding_window, kinds[i].window);
            assert_int_equal(spec.chunk_size, kinds[i].chunk);
            assert_int_equal(spec.page_bytes,
                             none ? 0 : 16 * 2 * (rows.k + rows.v + rows.k_scale + rows.v_scale));
            if (!none) {
                check_views(model, &spec, &rows, false);
            }
            api->model_destroy(model);
        }
    }
}

/* MLA: B 576 element size, also sliding; fp8_ds_mla: B 656, fp8_ds_v4: B 584. */
TEST(test_latent_rows)
{
    static const struct {
        int32_t kv_dtype, dtype;
        int64_t row;
    } rows[] = {
        {ATTN_KV_AUTO, ATTN_DTYPE_BF16, 2 * 576},   {ATTN_KV_AUTO, ATTN_DTYPE_F32, 4 * 576},
        {ATTN_KV_FP8_E4M3, ATTN_DTYPE_BF16, 576},   {ATTN_KV_FP8_E5M2, ATTN_DTYPE_BF16, 576},
        {ATTN_KV_FP8_DS_MLA, ATTN_DTYPE_BF16, 656}, {ATTN_KV_FP8_DS_V4, ATTN_DTYPE_BF16, 584}};
    struct attn_mla_desc mla = {
        .kv_lora_rank = 512, .qk_nope_head_dim = 128, .qk_rope_head_dim = 64, .v_head_dim = 128};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (int32_t sliding = 0; sliding < 2; sliding++) {
            struct attn_layer_desc layer =
                SIZED(attn_layer_desc, .name = "layer", .dtype = rows[i].dtype,
                      .kv_dtype = rows[i].kv_dtype, .num_q_heads = 4, .has_window = sliding,
                      .window_left = sliding ? 6 : 0, .block_size = 32);
            mla.qk_rope_head_dim = rows[i].kv_dtype == ATTN_KV_FP8_DS_V4 ? 0 : 64;
            layer_set_mla(&layer, &mla);
            const int64_t scales = rows[i].kv_dtype == ATTN_KV_FP8_DS_V4 ? 8 : 0;
            const struct row_bytes row = {rows[i].row - scales, 0, scales, 0};
            struct attn_cache_spec spec;
            attn_model *model = bind(&layer, &spec);
            assert_int_equal(spec.kind,
                             sliding ? ATTN_KV_SPEC_SLIDING_WINDOW_MLA : ATTN_KV_SPEC_MLA);
            assert_int_equal(spec.page_bytes, 32 * rows[i].row);
            check_views(model, &spec, &row, true);
            api->model_destroy(model);
        }
    }
}

/* GDN: S [Hv, Dv, Dk] float32 and the convolution's window of width - 1 and the drafts. */
TEST(test_states)
{
    struct attn_recurrent_desc gdn = {.num_k_heads = 2,
                                      .num_v_heads = 4,
                                      .head_size_k = 32,
                                      .head_size_v = 64,
                                      .conv_width = 4,
                                      .num_speculative_tokens = 2};
    struct attn_layer_desc layer =
        SIZED(attn_layer_desc, .name = "layer", .dtype = ATTN_DTYPE_BF16);
    layer_set_recurrent(&layer, &gdn);
    struct attn_cache_spec spec;
    attn_model *model = bind(&layer, &spec);
    assert_int_equal(spec.kind, ATTN_KV_SPEC_STATE);
    assert_int_equal(spec.page_bytes, 4 * 64 * 32 * 4 + (2 * 2 * 32 + 4 * 64) * (4 - 1 + 2) * 2);
    api->model_destroy(model);
}

static int open_runtime(void **state)
{
    struct attn_runtime_options options = client_options(PLUGINS);
    options.backend = "cpu_ref";
    return client_open(CORE_FILE, &options, &api, &runtime, &last.error) != ATTN_OK;
}

static int close_runtime(void **state)
{
    api->runtime_destroy(runtime);
    return 0;
}

int main(void)
{
    return test_run(open_runtime, close_runtime);
}
