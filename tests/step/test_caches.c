/* SPDX-License-Identifier: Apache-2.0 */
/* Every cache dtype through specification, views, writes and attends of whole steps: near the
 * unquantized output, by the dtype's own error; and what binding keeps and refuses. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/test.h"

enum { TOKENS = 31, BLOCK = 16, HK = 2, D = 64, ROW = 4 * D };

static const int32_t queries[] = {1, 1, 9, 20}, lens[] = {40, 17, 33, 20};
static const struct attn_layer_desc decoder = {
    .kind = ATTN_LAYER_DECODER, .causal = 1, .head_size = D};

/* What a writer of a later ABI would hand in. */
struct later_memory {
    struct attn_block_memory known;
    int64_t unknown;
};

/* Page bytes by the table of the features document; RMS of the error over the RMS of the output.
 * INT8_K, whose values are 16-bit, is no cache of this float32 layer. */
static const struct {
    const char *name;
    int32_t kv_dtype, scale_form;
    int64_t page_bytes;
    double least, most;
} caches[] = {
    {"f32", ATTN_KV_F32, 0, BLOCK *HK * 2 * D * 4, 0, 0},
    {"bf16", ATTN_KV_BF16, 0, BLOCK *HK * 2 * D * 2, 1e-4, 0.1},
    {"f16", ATTN_KV_F16, 0, BLOCK *HK * 2 * D * 2, 1e-5, 0.02},
    {"fp8_e4m3", ATTN_KV_FP8_E4M3, ATTN_SCALE_PER_TENSOR, BLOCK *HK * 2 * D, 1e-3, 0.6},
    {"fp8_e5m2", ATTN_KV_FP8_E5M2, ATTN_SCALE_PER_TENSOR, BLOCK *HK * 2 * D, 1e-3, 0.9},
    {"fp8_e4m3fnuz", ATTN_KV_FP8_E4M3FNUZ, ATTN_SCALE_PER_TENSOR, BLOCK *HK * 2 * D, 1e-3, 0.6},
    {"fp8_per_token_head", ATTN_KV_FP8_PER_TOKEN_HEAD, 0, BLOCK *HK *(2 * D + 8), 1e-3, 0.6},
    {"int8_per_token_head", ATTN_KV_INT8_PER_TOKEN_HEAD, 0, BLOCK *HK *(2 * D + 8), 1e-3, 0.1},
    {"int4_per_token_head", ATTN_KV_INT4_PER_TOKEN_HEAD, 0, BLOCK *HK *(D + 8), 1e-2, 0.9},
    {"int8_kv", ATTN_KV_INT8_KV, 0, BLOCK *HK *(2 * D + 4), 1e-3, 0.1},
    {"nvfp4", ATTN_KV_NVFP4, 0, BLOCK *HK * 2 * (D / 2 + D / 16), 1e-2, 0.9},
    {"turboquant_k8v4", ATTN_KV_TURBOQUANT_K8V4, 0, BLOCK *HK *(D + D / 2 + 4), 1e-3, 0.6},
    {"turboquant_4bit_nc", ATTN_KV_TURBOQUANT_4BIT_NC, 0, BLOCK *HK *(D + 6), 1e-2, 0.9},
    {"turboquant_k3v4_nc", ATTN_KV_TURBOQUANT_K3V4_NC, 0, BLOCK *HK *(D * 7 / 8 + 6), 1e-2, 1.2},
    {"turboquant_3bit_nc", ATTN_KV_TURBOQUANT_3BIT_NC, 0, BLOCK *HK *(D * 3 / 4 + 6), 1e-2, 1.2},
    {"q8_0", ATTN_KV_Q8_0, 0, BLOCK *HK * 2 * (D / 32 * 34), 1e-3, 0.1},
    {"q4_0", ATTN_KV_Q4_0, 0, BLOCK *HK * 2 * (D / 32 * 18), 1e-2, 0.9},
};

TEST(test_every_dtype)
{
    struct fixture plain;
    fixture_init(&plain, "cpu_ref", &decoder, queries, lens, 4, 0, NULL, false);
    fixture_step(&plain);
    for (size_t i = 0; i < sizeof caches / sizeof *caches; i++) {
        struct attn_layer_desc layer = decoder;
        struct attn_cache_spec spec = {.struct_size = sizeof spec};
        struct fixture f;
        double error = 0, sum = 0;
        layer.kv_dtype = caches[i].kv_dtype;
        layer.k_scale_form = layer.v_scale_form = caches[i].scale_form;
        fixture_init(&f, "cpu_ref", &layer, queries, lens, 4, 0, NULL, false);
        CHECK(&f, f.api->layer_cache_spec(f.api->model_layer(f.model, 0), 0, &spec, &f.error));
        assert_int_equal(spec.page_bytes, caches[i].page_bytes);
        fixture_step(&f);
        for (int32_t e = 0; e < TOKENS * ROW; e++) {
            double difference = (double)f.out[e] - plain.out[e];
            error += difference * difference;
            sum += (double)plain.out[e] * plain.out[e];
        }
        print_message("%s: %g\n", caches[i].name, sqrt(error / sum));
        assert_true(sqrt(error / sum) >= caches[i].least && sqrt(error / sum) <= caches[i].most);
        fixture_finish(&f);
    }
    fixture_finish(&plain);
}

static bool is_of_both(int32_t kv_dtype)
{
    return kv_dtype == ATTN_KV_INT8_KV ||
           (kv_dtype >= ATTN_KV_TURBOQUANT_K8V4 && kv_dtype <= ATTN_KV_TURBOQUANT_3BIT_NC);
}

/* K of one dtype and V of another: the log-sum-exp is that of K's dtype alone; with queries of 0,
 * under which all keys count alike, the output is that of V's. */
TEST(test_two_dtypes)
{
    for (size_t i = 0; i < sizeof caches / sizeof *caches * 3; i++) {
        const size_t of_k = i / 3, of_v = (of_k + 1 + i % 3 * 5) % (sizeof caches / sizeof *caches);
        struct fixture f[3]; /* K's alone, V's alone, both */
        if (is_of_both(caches[of_k].kv_dtype) || is_of_both(caches[of_v].kv_dtype)) {
            continue;
        }
        for (int32_t j = 0; j < 3; j++) {
            struct attn_layer_desc layer = decoder;
            layer.kv_dtype = caches[j == 1 ? of_v : of_k].kv_dtype;
            layer.kv_dtype_v = j == 2 ? caches[of_v].kv_dtype : 0;
            layer.k_scale_form = caches[j == 1 ? of_v : of_k].scale_form;
            layer.v_scale_form = caches[j == 0 ? of_k : of_v].scale_form;
            fixture_init(&f[j], "cpu_ref", &layer, queries, lens, 4, 0, NULL, false);
            fixture_step(&f[j]);
        }
        print_message("%s, %s\n", caches[of_k].name, caches[of_v].name);
        assert_memory_equal(f[0].lse, f[2].lse, TOKENS * 4 * sizeof *f[0].lse);
        for (int32_t j = 1; j < 3; j++) {
            memset(f[j].q, 0, TOKENS * ROW * sizeof *f[j].q);
            fixture_step(&f[j]);
        }
        assert_memory_equal(f[1].out, f[2].out, TOKENS * ROW * sizeof *f[1].out);
        for (int32_t j = 0; j < 3; j++) {
            fixture_finish(&f[j]);
        }
    }
}

/* Structs and shapes handed to layer_bind_params are the engine's to forget. */
TEST(test_parameters_are_kept)
{
    struct attn_layer_desc layer = {
        .kind = ATTN_LAYER_DECODER, .causal = 1, .sink_len = 16, .has_sinks = 1, .head_size = D};
    struct fixture f;
    float right[TOKENS * ROW];
    fixture_init(&f, "cpu_ref", &layer, queries, lens, 4, 0, NULL, false);
    fixture_step(&f);
    memcpy(right, f.out, sizeof right);
    memset(f.shapes[5], 0x7f, sizeof f.shapes[5]); /* sink_k's, sink_v's */
    memset(f.shapes[6], 0x7f, sizeof f.shapes[6]);
    memset(&f.tensors[5], 0x7f, 2 * sizeof f.tensors[5]);
    fixture_step(&f);
    assert_memory_equal(f.out, right, sizeof right);
    fixture_finish(&f);
}

TEST(test_no_binding_under_a_plan)
{
    const struct attn_layer_params params = {.struct_size = sizeof params};
    struct fixture f;
    fixture_init(&f, "cpu_ref", &decoder, queries, lens, 4, 0, NULL, false);
    attn_layer *layer = f.api->model_layer(f.model, 0);
    assert_int_equal(f.api->layer_bind_params(layer, &params, &f.error), ATTN_ERROR_ORDER);
    assert_non_null(strstr(f.error.message, "in 1 plans"));
    f.api->plan_destroy(f.plan);
    f.plan = NULL;
    CHECK(&f, f.api->layer_bind_params(layer, &params, &f.error));
    fixture_finish(&f);
}

/* Blocks go to host memory of another stride and come back to other places, all dtypes alike: by
 * bytes. */
TEST(test_swap)
{
    for (size_t i = 0; i < sizeof caches / sizeof *caches; i++) {
        struct attn_layer_desc layer = decoder;
        struct fixture f;
        float right[TOKENS * ROW];
        layer.kv_dtype = caches[i].kv_dtype;
        layer.k_scale_form = layer.v_scale_form = caches[i].scale_form;
        fixture_init(&f, "cpu_ref", &layer, queries, lens, 4, 0, NULL, false);
        fixture_step(&f);
        memcpy(right, f.out, sizeof right);
        int64_t stride = caches[i].page_bytes + 4096;
        uint8_t *swap = malloc((size_t)(2 * stride));
        const struct attn_block_memory other = {swap, stride};
        int32_t *entry = &f.block_table[2 * MAX_BLOCKS];
        int32_t target = (int32_t)f.num_blocks - 1;
        const int64_t out[] = {*entry, 1}, in[] = {1, target};
        memset(swap, 0x55, (size_t)(2 * stride));
        struct later_memory later = {other, 0};
        struct attn_block_transfer move = {.struct_size = sizeof move,
                                           .kind = ATTN_COPY_DEVICE_TO_HOST,
                                           .other = &later.known,
                                           .other_stride = sizeof later,
                                           .pairs = out,
                                           .num_pairs = 1};
        CHECK(&f, f.api->copy_blocks(f.model, &move, &f.error));
        for (int64_t b = 0; b < 2 * stride; b++) { /* nothing next to the block is touched */
            bool inside = b >= stride && b < stride + caches[i].page_bytes;
            assert_true(inside || swap[b] == 0x55);
        }
        move.kind = ATTN_COPY_HOST_TO_DEVICE;
        move.pairs = in;
        later.unknown = 1;
        assert_int_equal(f.api->copy_blocks(f.model, &move, &f.error), ATTN_ERROR_STRUCT_SIZE);
        later.unknown = 0;
        CHECK(&f, f.api->copy_blocks(f.model, &move, &f.error));
        *entry = target;
        fixture_step(&f);
        assert_memory_equal(f.out, right, sizeof right);
        free(swap);
        fixture_finish(&f);
    }
}
