/* SPDX-License-Identifier: Apache-2.0 */
/* layout_convert between caches of every order of rows, several block sizes and dtypes: each number
 * of a token is where the target's table says, no other byte has changed, and what cannot be
 * converted is refused by name. On the CPU's backends, or on the one that ATTN_TEST_BACKEND names.
 */
#include <attn/draft/layout.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/device.h"
#include "support/client.h"
#include "support/kv_format.h"
#include "support/number.h"
#include "support/test.h"

#define HEADS 3
#define MAX_BLOCKS 32
#define MOST_CACHES (2 + ATTN_MAX_CACHES)

static struct {
    const struct attn_api *api;
    struct attn_api table; /* the same, whose layers are caches of this file */
    attn_runtime *runtime, *validating;
    struct attn_device where;
    struct device device;
    struct attn_error error;
} engine = {.where = {ATTN_DEVICE_CPU, 0}, .error = ATTN_ERROR_INIT};

/* A cache in the device's memory, a copy of it in the host's, and its layer. */
struct cache {
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_cache_spec specs[MOST_CACHES];
    struct attn_kv_view views[MOST_CACHES];
    int32_t num_caches;
    int64_t bytes;
    uint8_t *host;
    void *memory;
};

static int64_t element_of(int32_t kv_dtype)
{
    return kv_dtype == ATTN_KV_F32 ? 4 : kv_dtype <= ATTN_KV_BF16 ? 2 : 1;
}

/* Bytes of row (token slot, head) of K or V in the host's copy. */
static uint8_t *row_of(const struct cache *c, int32_t part, int64_t slot, int64_t head)
{
    const struct attn_kv_view *v = &c->views[part];
    return c->host + ((char *)v->data - (char *)c->memory) +
           slot / v->block_size * v->stride_block + slot % v->block_size * v->stride_slot +
           head * v->stride_head;
}

static void cache_init(struct cache *c, int32_t layout, int32_t kv_dtype, int32_t block_size,
                       int32_t num_blocks, const int32_t sizes[2], int32_t activations)
{
    const int64_t e = element_of(kv_dtype), rows = (int64_t)HEADS * block_size;
    *c = (struct cache){.layer = {.name = "layer",
                                  .kind = ATTN_LAYER_DECODER,
                                  .dtype = activations,
                                  .kv_dtype = kv_dtype},
                        .params = {.struct_size = sizeof c->params}};
    c->num_caches = 2;
    c->bytes = num_blocks * rows * (sizes[0] + sizes[1]) * e;
    c->host = malloc((size_t)c->bytes);
    c->memory = device_alloc(&engine.device, (size_t)c->bytes);
    assert_non_null(c->memory);
    const struct kv_rows kv = {
        num_blocks, block_size, HEADS, {sizes[0], sizes[1]}, {sizes[0] * e, sizes[1] * e}};
    for (int32_t i = 0; i < 2; i++) {
        c->specs[i] = (struct attn_cache_spec){.role = i == 0 ? ATTN_CACHE_K : ATTN_CACHE_V,
                                               .kv_dtype = kv_dtype,
                                               .block_size = block_size};
        c->views[i] = kv_view(layout, i == 1, &kv, c->memory);
        c->views[i].device = engine.where;
    }
}

static void cache_finish(struct cache *c)
{
    free(c->host);
    device_free(&engine.device, c->memory);
}

/* Every byte of a 16-bit pattern comes up; f32 and what is to be rounded gets numbers. */
static void fill(struct cache *c, bool numbers)
{
    for (int64_t i = 0; i < c->bytes / element_of(c->specs[0].kv_dtype); i++) {
        const double x = sin(0.37 * (double)i) * exp(0.5 * (double)(i % 7 - 3));
        if (numbers) {
            number_store(c->host, i, c->specs[0].kv_dtype, x);
        } else if (element_of(c->specs[0].kv_dtype) == 1) {
            c->host[i] = (uint8_t)(i * 7);
        } else {
            ((uint16_t *)c->host)[i] = (uint16_t)(i * 40503);
        }
    }
}

static int32_t num_caches(const attn_layer *layer)
{
    return ((const struct cache *)(const void *)layer)->num_caches;
}

static attn_status cache_spec(const attn_layer *layer, int32_t index, struct attn_cache_spec *spec,
                              struct attn_error *error)
{
    *spec = ((const struct cache *)(const void *)layer)->specs[index];
    return ATTN_OK;
}

static attn_status cache_view(const attn_layer *layer, int32_t index, struct attn_kv_view *view,
                              struct attn_error *error)
{
    *view = ((const struct cache *)(const void *)layer)->views[index];
    return ATTN_OK;
}

struct tokens {
    const int32_t *source_blocks, *target_blocks;
    int64_t num_tokens;
};

static struct attn_layout_side side_of(struct cache *c, const int32_t *blocks)
{
    return SIZED(attn_layout_side, .layer = (attn_layer *)(void *)c, .desc = &c->layer,
                 .params = &c->params, .blocks = blocks, .num_blocks = MAX_BLOCKS);
}

static attn_status convert(struct cache *source, struct cache *target, const struct tokens *tokens)
{
    const struct attn_layout_side from = side_of(source, tokens->source_blocks);
    const struct attn_layout_side to = side_of(target, tokens->target_blocks);
    /* validation refuses NaN among the numbers */
    attn_runtime *runtime =
        source->specs[0].kv_dtype == target->specs[0].kv_dtype ? engine.runtime : engine.validating;
    return attn_layout_convert(&engine.table, runtime, &from, &to, tokens->num_tokens,
                               &engine.error);
}

/* Tables of blocks that are not in order. */
static struct tokens tokens_of(const struct cache *source, const struct cache *target,
                               int64_t num_tokens)
{
    static int32_t blocks[2][MAX_BLOCKS];
    for (int32_t i = 0; i < MAX_BLOCKS; i++) {
        blocks[0][i] = (int32_t)((i * 7 + 3) % source->views[0].num_blocks);
        blocks[1][i] = (int32_t)((i * 3 + 1) % target->views[0].num_blocks);
    }
    return (struct tokens){blocks[0], blocks[1], num_tokens};
}

static int64_t slot_of(const int32_t *blocks, int64_t size, int64_t token)
{
    return blocks[token / size] * size + token % size;
}

/* What a number of the source is in the target: by way of `between`, 0 for none. */
static double expected(double x, const struct cache *source, const struct cache *target,
                       int32_t part, int32_t between, uint8_t *element)
{
    const float from = part == 0 ? source->params.k_scale_host : source->params.v_scale_host;
    const float to = part == 0 ? target->params.k_scale_host : target->params.v_scale_host;
    uint32_t rounded;
    x *= from != 0 ? from : 1;
    if (between != 0) {
        number_store(&rounded, 0, between, x);
        x = number_load(&rounded, 0, between);
    }
    number_store(element, 0, target->specs[0].kv_dtype, x / (to != 0 ? to : 1));
    return number_load(element, 0, target->specs[0].kv_dtype);
}

/* All that the tokens do not have becomes 0xff, a NaN of every dtype. */
static void poison(struct cache *c, const struct tokens *t)
{
    const int64_t slots = c->views[0].num_blocks * c->views[0].block_size;
    for (int64_t slot = 0; slot < slots; slot++) {
        bool is_token = false;
        for (int64_t i = 0; i < t->num_tokens; i++) {
            is_token = is_token || slot_of(t->source_blocks, c->views[0].block_size, i) == slot;
        }
        for (int32_t h = 0; h < 2 * HEADS && !is_token; h++) {
            const int64_t row = c->views[h % 2].head_size * element_of(c->specs[0].kv_dtype);
            memset(row_of(c, h % 2, slot, h / 2), 0xff, (size_t)row);
        }
    }
    assert_true(device_write(&engine.device, c->memory, c->host, (size_t)c->bytes));
}

/* Converts, and holds each token's rows to the source's and all other bytes to what they were. */
static void hold(struct cache *source, struct cache *target, int64_t num_tokens, bool bits,
                 int32_t between)
{
    const struct tokens t = tokens_of(source, target, num_tokens);
    const int64_t e = element_of(target->specs[0].kv_dtype);
    uint8_t *seen = malloc((size_t)target->bytes);
    poison(source, &t);
    memset(target->host, 0x5a, (size_t)target->bytes);
    assert_true(device_write(&engine.device, target->memory, target->host, (size_t)target->bytes));
    CHECK(&engine, convert(source, target, &t));
    assert_true(device_read(&engine.device, seen, target->memory, (size_t)target->bytes));
    for (int64_t i = 0; i < num_tokens; i++) {
        const int64_t from = slot_of(t.source_blocks, source->specs[0].block_size, i);
        const int64_t to = slot_of(t.target_blocks, target->specs[0].block_size, i);
        for (int32_t h = 0; h < 2 * HEADS; h++) {
            const int32_t part = h % 2, size = source->views[part].head_size;
            const uint8_t *row = row_of(source, part, from, h / 2);
            uint8_t *want = row_of(target, part, to, h / 2);
            const uint8_t *have = seen + (want - target->host);
            for (int32_t d = 0; d < size && !bits; d++) {
                uint8_t element[4];
                const double x = number_load(row, d, source->specs[0].kv_dtype);
                assert_float_equal(number_load(have, d, target->specs[0].kv_dtype),
                                   expected(x, source, target, part, between, element), 0);
                memcpy(want + d * e, have + d * e, (size_t)e); /* -0 and 0 are the same number */
            }
            if (bits) {
                memcpy(want, row, (size_t)(size * e));
            }
        }
    }
    assert_memory_equal(seen, target->host, (size_t)target->bytes);
    free(seen);
}

/* Equal dtypes: every pattern of bits arrives. */
TEST(test_places)
{
    static const struct {
        int32_t from, to, from_size, to_size, kv_dtype, sizes[2];
    } cases[] = {
        {ATTN_KV_LAYOUT_NHD, ATTN_KV_LAYOUT_HND, 16, 64, ATTN_KV_BF16, {64, 64}},
        {ATTN_KV_LAYOUT_HND, ATTN_KV_LAYOUT_NHD, 64, 16, ATTN_KV_BF16, {64, 64}},
        {ATTN_KV_LAYOUT_NHD_INNER, ATTN_KV_LAYOUT_HND_INNER, 16, 32, ATTN_KV_F16, {128, 64}},
        {ATTN_KV_LAYOUT_HND_INNER, ATTN_KV_LAYOUT_HND, 32, 32, ATTN_KV_F16, {64, 128}},
        {ATTN_KV_LAYOUT_NHD, ATTN_KV_LAYOUT_NHD, 48, 16, ATTN_KV_F32, {64, 64}},
        {ATTN_KV_LAYOUT_NHD, ATTN_KV_LAYOUT_HND, 16, 64, ATTN_KV_FP8_E4M3, {64, 64}},
        {ATTN_KV_LAYOUT_HND, ATTN_KV_LAYOUT_NHD_INNER, 64, 16, ATTN_KV_FP8_E5M2, {128, 128}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct cache source, target;
        const int32_t kv_dtype = cases[i].kv_dtype;
        const int32_t activations = kv_dtype <= ATTN_KV_F32 ? kv_dtype : ATTN_DTYPE_BF16;
        cache_init(&source, cases[i].from, kv_dtype, cases[i].from_size, 512 / cases[i].from_size,
                   cases[i].sizes, activations);
        cache_init(&target, cases[i].to, kv_dtype, cases[i].to_size, 512 / cases[i].to_size,
                   cases[i].sizes, activations);
        source.params.k_scale_host = target.params.k_scale_host = kv_dtype > ATTN_KV_F32 ? 0.3f : 0;
        source.layer.k_scale_form = target.layer.k_scale_form =
            kv_dtype > ATTN_KV_F32 ? ATTN_SCALE_PER_TENSOR : 0;
        fill(&source, kv_dtype == ATTN_KV_F32);
        hold(&source, &target, 203, true, 0);
        hold(&source, &target, 1, true, 0);
        cache_finish(&source);
        cache_finish(&target);
    }
}

/* Other dtypes: plain numbers are rounded once, those of fp8 are read in the activations' dtype. */
TEST(test_dtypes)
{
    static const struct {
        int32_t from, to, activations, between;
        float k_scale[2], v_scale[2];
    } cases[] = {
        {ATTN_KV_BF16, ATTN_KV_FP8_E4M3, ATTN_DTYPE_BF16, 0, {0, 0.02f}, {0, 0.5f}},
        {ATTN_KV_FP8_E4M3, ATTN_KV_BF16, ATTN_DTYPE_BF16, 0, {0.3f, 0}, {2, 0}},
        {ATTN_KV_FP8_E5M2, ATTN_KV_F16, ATTN_DTYPE_F16, 0, {0.25f, 0}, {0.5f, 0}},
        {ATTN_KV_FP8_E4M3, ATTN_KV_FP8_E4M3, ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, {1, 0.3f}, {2, 3}},
        {ATTN_KV_F32, ATTN_KV_BF16, ATTN_DTYPE_F32, 0, {0}, {0}},
        {ATTN_KV_F32, ATTN_KV_F16, ATTN_DTYPE_F32, 0, {0}, {0}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static const int32_t sizes[] = {64, 64};
        struct cache source, target;
        cache_init(&source, ATTN_KV_LAYOUT_NHD, cases[i].from, 16, 20, sizes, cases[i].activations);
        cache_init(&target, ATTN_KV_LAYOUT_HND, cases[i].to, 64, 5, sizes, cases[i].activations);
        for (int32_t side = 0; side < 2; side++) {
            struct cache *c = side == 0 ? &source : &target;
            const int32_t form =
                c->specs[0].kv_dtype > ATTN_KV_F32 ? ATTN_SCALE_PER_TENSOR : ATTN_SCALE_NONE;
            c->layer.k_scale_form = c->layer.v_scale_form = form;
            c->params.k_scale_host = cases[i].k_scale[side];
            c->params.v_scale_host = cases[i].v_scale[side];
        }
        fill(&source, true);
        hold(&source, &target, 300, false, cases[i].between);
        hold(&source, &target, 40, false, cases[i].between);
        cache_finish(&source);
        cache_finish(&target);
    }
}

/* With one change of a side or of the tokens. */
#define CONVERT_REFUSED(status, field, change)                                                     \
    WITH(source, ,                                                                                 \
         WITH(target, ,                                                                            \
              WITH(t, change,                                                                      \
                   REFUSED_AS(ATTN_ERROR_##status, &engine.error, field,                           \
                              convert(&source, &target, &t)))))

TEST(test_refused)
{
    static const int32_t sizes[] = {64, 64}, other[] = {128, 64};
    static const int32_t twice[] = {2, 3, 2}, far[] = {0, 32};
    struct cache source, target, wide;
    cache_init(&source, ATTN_KV_LAYOUT_NHD, ATTN_KV_BF16, 16, 32, sizes, ATTN_DTYPE_BF16);
    cache_init(&target, ATTN_KV_LAYOUT_HND, ATTN_KV_BF16, 64, 8, sizes, ATTN_DTYPE_BF16);
    cache_init(&wide, ATTN_KV_LAYOUT_HND, ATTN_KV_BF16, 64, 8, other, ATTN_DTYPE_BF16);
    struct tokens t = tokens_of(&source, &target, 40);
    INVALID(&engine.error, "head_size", convert(&source, &wide, &t));
    CONVERT_REFUSED(INVALID_ARGUMENT, "num_kv_heads", target.views[1].num_heads = 2);
    CONVERT_REFUSED(INVALID_ARGUMENT, "rope", target.layer.rope = ATTN_ROPE_NEOX);
    CONVERT_REFUSED(UNSUPPORTED, "caches",
                    (target.specs[0].role = ATTN_CACHE_LATENT, target.num_caches = 1));
    CONVERT_REFUSED(UNSUPPORTED, "kv_dtype", source.specs[0].kv_dtype = ATTN_KV_NVFP4);
    CONVERT_REFUSED(UNSUPPORTED, "pack", source.views[0].pack = 8);
    CONVERT_REFUSED(INVALID_ARGUMENT, "source_blocks", t.source_blocks = twice);
    CONVERT_REFUSED(INVALID_ARGUMENT, "source_blocks", t.source_blocks = NULL);
    CONVERT_REFUSED(INVALID_ARGUMENT, "source_blocks", t.num_tokens = -1);
    REFUSED(&engine.error, "layer",
            attn_layout_convert(&engine.table, engine.runtime, NULL, NULL, 1, &engine.error));
    CONVERT_REFUSED(INVALID_ARGUMENT, "source_blocks", (t.source_blocks = far, t.num_tokens = 17));
    t = tokens_of(&source, &target, 129);
    CONVERT_REFUSED(INVALID_ARGUMENT, "target_blocks", t.target_blocks = twice);
    CONVERT_REFUSED(INVALID_ARGUMENT, "source_blocks", t.num_tokens = 64 * MAX_BLOCKS + 1);
    cache_finish(&source);
    cache_finish(&target);
    cache_finish(&wide);
}

/* Layers of as many caches as there may be, and texts that do not fit. */
TEST(test_ids)
{
    static const int32_t sizes[] = {64, 64};
    char id[ATTN_LAYOUT_ID_SIZE], text[ATTN_LAYOUT_TEXT_SIZE + 1];
    struct cache c;
    cache_init(&c, ATTN_KV_LAYOUT_NHD, ATTN_KV_BF16, 16, 32, sizes, ATTN_DTYPE_BF16);
    struct attn_layout_side side = side_of(&c, NULL);
    for (int32_t i = 2; i < MOST_CACHES; i++) {
        c.specs[i] = c.specs[i % 2];
        c.views[i] = c.views[i % 2];
    }
    c.num_caches = MOST_CACHES;
    text[ATTN_LAYOUT_TEXT_SIZE] = 'x';
    assert_ok(attn_layout_id(&engine.table, &side, id, text, &engine.error));
    REFUSED(&engine.error, "id", attn_layout_id(&engine.table, &side, NULL, text, &engine.error));
    REFUSED(&engine.error, "text", attn_layout_id(&engine.table, &side, id, NULL, &engine.error));
    REFUSED(&engine.error, "layer", attn_layout_id(&engine.table, NULL, id, text, &engine.error));
    for (int32_t i = 0; i < MOST_CACHES; i++) { /* numbers of many digits */
        struct attn_kv_view *v = &c.views[i];
        v->num_blocks = 1;
        v->stride_slot = v->stride_head = v->stride_pack = INT64_MAX;
        v->scale_stride_slot = v->scale_stride_head = INT64_MAX;
        v->block_size = v->num_heads = v->head_size = INT32_MAX;
        v->pack = 1 << 30;
        v->scale = c.memory;
    }
    REFUSED_AS(ATTN_ERROR_LIMIT, &engine.error, "text",
               attn_layout_id(&engine.table, &side, id, text, &engine.error));
    assert_true(text[ATTN_LAYOUT_TEXT_SIZE] == 'x');
    c.num_caches = MOST_CACHES + 1;
    REFUSED_AS(ATTN_ERROR_LIMIT, &engine.error, "caches",
               attn_layout_id(&engine.table, &side, id, text, &engine.error));
    cache_finish(&c);
}

int main(void)
{
    static const char *const backends[] = {"cpu_ref", "cpu_simd"}; /* if it is built */
    const char *asked = getenv("ATTN_TEST_BACKEND"), *plugins = getenv("ATTN_TEST_PLUGINS");
    int failed = 0;
    for (size_t i = 0; i < (asked != NULL ? 1 : 1 + CPU_SIMD); i++) {
        struct attn_runtime_options options = client_options(plugins != NULL ? plugins : PLUGINS);
        options.backend = asked != NULL ? asked : backends[i];
        if (client_open(CORE_FILE, &options, &engine.api, &engine.runtime, &engine.error) !=
                ATTN_OK ||
            (options.validate = 1,
             engine.api->runtime_create(&options, &engine.validating, &engine.error)) != ATTN_OK ||
            engine.api->best_device(engine.runtime, NULL, &engine.where, &engine.error) !=
                ATTN_OK ||
            device_init(&engine.device, engine.api, engine.runtime, engine.where, &engine.error) !=
                ATTN_OK) {
            fprintf(stderr, "%s: %s: %s\n", options.backend, engine.error.field,
                    engine.error.message);
            return 1;
        }
        engine.table = *engine.api;
        engine.table.layer_num_caches = num_caches;
        engine.table.layer_cache_spec = cache_spec;
        engine.table.layer_cache_view = cache_view;
        fprintf(stderr, "%s\n", options.backend);
        failed += test_run(NULL, NULL);
        device_finish(&engine.device);
        engine.api->runtime_destroy(engine.runtime);
        engine.api->runtime_destroy(engine.validating);
    }
    return failed;
}
