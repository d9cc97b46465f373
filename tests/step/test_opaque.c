/* SPDX-License-Identifier: Apache-2.0 */
/* Caches whose rows or blocks one vendor alone understands: the core sizes, binds, groups, writes,
 * attends and moves them as bytes, and gives them to no other backend. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "backend_opaque.h"
#include "support/client.h"
#include "support/test.h"

enum { TOKENS = 31, BLOCK = 16, HK = 2, D = 64, ROW = 4 * D };

static struct attn_layer_desc opaque_layer(int32_t kv_dtype, int32_t scale_bytes)
{
    return (struct attn_layer_desc){.kind = ATTN_LAYER_DECODER,
                                    .head_size = D,
                                    .kv_dtype = kv_dtype,
                                    .kv_row_bytes = 4 * D + OPAQUE_TAIL,
                                    .kv_row_bytes_v = 4 * D,
                                    .kv_scale_bytes = scale_bytes,
                                    .kv_scale_bytes_v = scale_bytes};
}

static const struct {
    const char *backend;
    int32_t kv_dtype, scale_bytes;
    int64_t page_bytes;
} caches[] = {
    {"opaque", ATTN_KV_OPAQUE, 0, BLOCK *HK *(8 * D + OPAQUE_TAIL)},
    {"opaque", OPAQUE_DTYPE, OPAQUE_SCALE, BLOCK *HK *(8 * D + OPAQUE_TAIL + 2 * OPAQUE_SCALE)},
    {"opaque_pages", OPAQUE_DTYPE, 0, OPAQUE_PAGE_HEAD + BLOCK *HK * 8 * D},
};

/* To the host, back into another block, and on from there inside of the cache. */
static void move_block(struct fixture *f, int64_t page_bytes)
{
    OWNED(memory_end) uint8_t *swap = malloc((size_t)(2 * page_bytes));
    const struct attn_block_memory other = {swap, page_bytes};
    int32_t *entry = &f->block_table[2 * MAX_BLOCKS];
    const int64_t last = f->num_blocks - 1;
    const int64_t pairs[][2] = {{*entry, 1}, {1, last - 1}, {last - 1, last}};
    static const int32_t kinds[] = {ATTN_COPY_DEVICE_TO_HOST, ATTN_COPY_HOST_TO_DEVICE,
                                    ATTN_COPY_DEVICE_TO_DEVICE};
    memset(swap, 0x55, (size_t)(2 * page_bytes));
    for (int32_t i = 0; i < 3; i++) {
        const struct attn_block_transfer move =
            SIZED(attn_block_transfer, .kind = kinds[i], .other = i < 2 ? &other : NULL,
                  .other_stride = i < 2 ? sizeof other : 0, .pairs = pairs[i], .num_pairs = 1);
        CHECK(f, f->api->copy_blocks(f->model, &move, &f->error));
    }
    for (int64_t b = 0; b < page_bytes; b++) { /* nothing next to the block is touched */
        assert_int_equal(swap[b], 0x55);
    }
    *entry = (int32_t)last;
}

TEST(test_end_to_end)
{
    OWNED(fixture_finish) struct fixture plain;
    const struct attn_layer_desc numbers = {.kind = ATTN_LAYER_DECODER, .head_size = D};
    fixture_mixed(&plain, "cpu_ref", &numbers, false);
    fixture_step(&plain);
    for (size_t i = 0; i < sizeof caches / sizeof *caches; i++) {
        const struct attn_layer_desc layer =
            opaque_layer(caches[i].kv_dtype, caches[i].scale_bytes);
        struct attn_cache_spec spec = {.struct_size = sizeof spec};
        OWNED(fixture_finish) struct fixture f;
        print_message("%s, %#x\n", caches[i].backend, (unsigned)caches[i].kv_dtype);
        fixture_mixed(&f, caches[i].backend, &layer, true);
        CHECK(&f, client_spec(f.api, f.bound, &spec, &f.error));
        assert_int_equal(spec.kv_dtype, caches[i].kv_dtype);
        assert_int_equal(spec.page_bytes, caches[i].page_bytes);
        assert_int_equal(spec.ndim, 2);
        assert_int_equal(spec.shape[1], caches[i].page_bytes);
        assert_int_equal(spec.layout == OPAQUE_LAYOUT, i == 2);
        fixture_step(&f);
        assert_memory_equal(f.out, plain.out, TOKENS * ROW * sizeof *f.out);
        move_block(&f, caches[i].page_bytes);
        memset(f.out, 0, TOKENS * ROW * sizeof *f.out);
        fixture_step(&f);
        assert_memory_equal(f.out, plain.out, TOKENS * ROW * sizeof *f.out);
    }
}

/* Views of the vendor's pages are alike and say no other stride. */
TEST(test_views_of_pages)
{
    const struct attn_layer_desc layer = opaque_layer(OPAQUE_DTYPE, 0);
    struct attn_kv_view own[2] = {{.struct_size = sizeof *own}, {.struct_size = sizeof *own}};
    OWNED(fixture_finish) struct fixture f;
    fixture_mixed(&f, "opaque_pages", &layer, false);
    f.api->plan_destroy(f.plan);
    f.plan = NULL;
    for (int32_t i = 0; i < 2; i++) {
        CHECK(&f, f.api->layer_cache_view(f.bound, i, &own[i], &f.error));
        assert_int_equal(own[i].stride_slot, 0);
    }
    CHECK(&f, client_bind(f.api, f.bound, &own[0], &own[1], &f.error));
    for (int32_t i = 0; i < 7; i++) {
        static const char *const fields[] = {"data",      "num_blocks", "stride_slot", "num_heads",
                                             "num_heads", "data",       "data"};
        struct attn_kv_view v = own[1];
        v.stride_block -= i == 0;
        v.num_blocks -= i == 1;
        v.stride_slot = i == 2 ? 256 : 0;
        v.head_size += 8 * (i == 3);
        v.block_size *= 1 + (i == 4);
        v.data = i == 5 ? NULL : (uint8_t *)v.data + 256 * (i == 6);
        assert_int_equal(client_bind(f.api, f.bound, &own[0], &v, &f.error),
                         ATTN_ERROR_INVALID_ARGUMENT);
        assert_string_equal(f.error.field, fields[i]);
    }
}

/* Layers of other rows are of another block-table group. */
TEST(test_groups)
{
    OWNED(fixture_finish) struct fixture f;
    const struct attn_layer_desc first = opaque_layer(ATTN_KV_OPAQUE, 0);
    fixture_mixed(&f, "opaque", &first, false);
    for (int32_t i = 0; i < 4; i++) {
        struct attn_layer_desc described[2] = {f.layer, f.layer};
        const struct attn_layer_desc *layers[2] = {&described[0], &described[1]};
        attn_model *model;
        described[0].name = "a", described[1].name = "b";
        described[1].kv_row_bytes += 8 * (i == 1);
        described[1].kv_scale_bytes_v += 4 * (i == 2);
        described[1].kv_dtype = i == 3 ? OPAQUE_DTYPE : ATTN_KV_OPAQUE;
        CHECK(&f,
              client_model(f.api, f.runtime, CLIENT_ORDER("opaque"), layers, 2, &model, &f.error));
        assert_int_equal(f.api->model_num_groups(model, ATTN_GROUP_BLOCK_TABLE), i == 0 ? 1 : 2);
        f.api->model_destroy(model);
    }
}

/* Other backends refuse them, and say what they were asked for; a plugin that gives a page no size
 * fails by name. */
TEST(test_refused)
{
    OWNED(fixture_finish) struct fixture f;
    const struct attn_layer_desc plain = {.kind = ATTN_LAYER_DECODER, .head_size = D};
    fixture_mixed(&f, "cpu_ref", &plain, false);
    static const struct {
        const char *backend, *asked;
        int32_t kv_dtype, block_size;
    } cases[] = {
        {"cpu_ref", "opaque", ATTN_KV_OPAQUE, BLOCK},
        {"cpu_ref", "0x10007", OPAQUE_DTYPE, BLOCK},
        {"opaque", "0x10009", OPAQUE_DTYPE + 2, BLOCK},
        {"opaque_pages", "opaque_pages says 0 bytes of a block in layout 0x10008", OPAQUE_DTYPE, 3},
        {"prefill=opaque;decode=opaque_pages", NULL, OPAQUE_DTYPE, BLOCK}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct attn_layer_desc layer = opaque_layer(cases[i].kv_dtype, 0);
        const struct attn_layer_desc *layers[] = {&layer};
        attn_model *model = NULL;
        layer.name = "l", layer.dtype = ATTN_DTYPE_F32, layer.scale = 1;
        layer.num_q_heads = layer.num_kv_heads = HK, layer.struct_size = sizeof layer;
        layer.block_size = cases[i].block_size;
        f.error = (struct attn_error)ATTN_ERROR_INIT;
        const attn_status status = client_model(f.api, f.runtime, CLIENT_ORDER(cases[i].backend),
                                                layers, 1, &model, &f.error);
        if (cases[i].asked == NULL) { /* both read a layout that all know */
            struct attn_cache_spec spec = {.struct_size = sizeof spec};
            CHECK(&f, status);
            CHECK(&f, client_spec(f.api, f.api->model_layer(model, 0), &spec, &f.error));
            assert_true(spec.layout < ATTN_VENDOR_CODE);
        } else if (status == ATTN_OK || strstr(f.error.message, cases[i].asked) == NULL) {
            fail_msg("%s: '%s' expected; got %d, %s", cases[i].backend, cases[i].asked, status,
                     f.error.message);
        }
        f.api->model_destroy(model);
    }
}
