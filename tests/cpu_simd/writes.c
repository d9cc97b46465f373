/* SPDX-License-Identifier: Apache-2.0 */
/* write_kv against cpu_ref, byte by byte: every kv_dtype, and values beside the middle of two
 * codes, which come out wrong if they are rounded on the way. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "cpu_simd/convert.h"
#include "kernels.h"

/* Both write the same bytes, and none where nothing belongs. */
static void check_same_bytes(const struct backend *reference, const struct backend *simd,
                             const struct test_case *test)
{
    struct test_data one, two;
    uint64_t seed = random_bits();
    random_seed(seed);
    data_make(&one, test, reference);
    random_seed(seed);
    data_make(&two, test, simd);
    assert_int_equal(one.cache_bytes, two.cache_bytes);
    assert_memory_equal(one.cache, two.cache, one.cache_bytes);
    data_free(&one);
    data_free(&two);
}

enum { TIES = 128 };

/* One row of keys and values through both. */
static void check_row(const struct backend *reference, const struct backend *simd, int32_t kv_dtype,
                      float scale, float *row)
{
    const struct backend *const backends[2] = {reference, simd};
    uint8_t cache[2][2][TIES];
    float scales[2][2];
    float channels[TIES];
    int64_t shape[3] = {1, 1, TIES}, slot = 0;
    for (int i = 0; i < TIES; i++) {
        channels[i] = scale;
    }
    for (int b = 0; b < 2; b++) {
        struct attn_kv_view views[2];
        for (int i = 0; i < 2; i++) {
            views[i] = (struct attn_kv_view){.struct_size = sizeof(views[i]),
                                             .data = cache[b][i],
                                             .num_blocks = 1,
                                             .block_size = 1,
                                             .num_heads = 1,
                                             .head_size = TIES,
                                             .scale = &scales[b][i]};
        }
        struct attn_kv_quant_params quant = {
            .ext = {.id = ATTN_EXT_KV_QUANT_PARAMS, .struct_size = sizeof(quant)},
            .v_channel_scale = channels};
        struct attn_layer_params params = {.struct_size = sizeof(params),
                                           .next = &quant.ext,
                                           .k_scale_host = scale,
                                           .v_scale_host = scale};
        struct attn_layer_desc layer = {.struct_size = sizeof(layer),
                                        .dtype = ATTN_DTYPE_F32,
                                        .kv_dtype = kv_dtype,
                                        .num_q_heads = 1,
                                        .num_kv_heads = 1,
                                        .head_size = TIES,
                                        .head_size_v = TIES,
                                        .k_scale_form = ATTN_SCALE_PER_TENSOR,
                                        .v_scale_form = ATTN_SCALE_PER_TENSOR};
        struct attn_tensor tensor = {
            .data = row, .ndim = 3, .dtype = {ATTN_CODE_FLOAT, 32, 1}, .shape = shape};
        struct attn_write_kv_args args = {.struct_size = sizeof(args),
                                          .instance = backends[b]->instance,
                                          .layer = &layer,
                                          .params = &params,
                                          .k_cache = &views[0],
                                          .v_cache = &views[1],
                                          .slot_mapping = &slot,
                                          .num_slots = 1,
                                          .k = &tensor,
                                          .v = &tensor};
        assert_int_equal(backends[b]->kernels->write_kv(&args, NULL), ATTN_OK);
    }
    assert_memory_equal(cache[0], cache[1], sizeof(cache[0]));
}

/* x / scale a few units of a double from the middle of codes d and d+1: nearer to it than float32
 * can tell, on either side. */
static void check_ties(const struct backend *reference, const struct backend *simd,
                       int32_t kv_dtype, float (*value_of_code)(uint8_t), uint8_t last)
{
    for (uint8_t code = 0; code < last; code++) {
        double middle = ((double)value_of_code(code) + value_of_code(code + 1)) / 2;
        float row[TIES];
        for (int i = 0; i < 8; i++) {
            float x = 1 + (float)i / 8; /* what bf16 and f16 hold */
            float scale = (float)(x / middle);
            for (int d = 0; d < TIES; d++) {
                row[d] = d % 2 ? -x : x;
            }
            check_row(reference, simd, kv_dtype, scale, row);
        }
    }
}

static float int8_value(uint8_t code)
{
    return (float)code;
}

/* The row's own scale is its largest element's share. */
static void check_row_ties(const struct backend *reference, const struct backend *simd)
{
    for (int i = 0; i < 64; i++) {
        float row[TIES];
        float largest = 1 + (float)i / 64;
        float scale = (float)((double)largest / 127);
        for (int d = 0; d < TIES; d++) {
            row[d] = (float)((d - 0.5 * TIES + 0.5) * scale);
        }
        row[0] = largest;
        check_row(reference, simd, ATTN_KV_INT8_PER_TOKEN_HEAD, 1, row);
    }
}

void check_writes(const struct backend *reference, const struct backend *simd)
{
    static const int32_t kv_dtypes[] = {ATTN_KV_AUTO,
                                        ATTN_KV_F16,
                                        ATTN_KV_BF16,
                                        ATTN_KV_F32,
                                        ATTN_KV_FP8_E4M3,
                                        ATTN_KV_FP8_E5M2,
                                        ATTN_KV_FP8_PER_TOKEN_HEAD,
                                        ATTN_KV_INT8_PER_TOKEN_HEAD,
                                        ATTN_KV_INT4_PER_TOKEN_HEAD,
                                        ATTN_KV_INT8_KV,
                                        ATTN_KV_INT8_K};
    for (size_t i = 0; i < sizeof(kv_dtypes) / sizeof(kv_dtypes[0]); i++) {
        for (int j = 0; j < 3 * 2; j++) {
            struct test_case test = {.name = "write",
                                     .q_heads = 4,
                                     .kv_heads = 2,
                                     .depth = 72,
                                     .width = 64,
                                     .num_reqs = 3,
                                     .queries = {1, 40},
                                     .context = {0, 50},
                                     .block_size = 16,
                                     .kv_dtype = kv_dtypes[i],
                                     .dtype = j % 3,
                                     .pack = j / 3 * 8};
            bool fp8 = test.kv_dtype == ATTN_KV_FP8_E4M3 || test.kv_dtype == ATTN_KV_FP8_E5M2;
            if (test.kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD) {
                test.depth = 128; /* powers of two */
            }
            test.nan_key = test.kv_dtype != ATTN_KV_FP8_E5M2; /* whose NaNs are many */
            test.scale_form = fp8 ? ATTN_SCALE_PER_HEAD : ATTN_SCALE_NONE;
            if (test.kv_dtype != ATTN_KV_INT8_K || test.dtype != ATTN_DTYPE_F32) {
                check_same_bytes(reference, simd, &test);
            }
        }
    }
    check_ties(reference, simd, ATTN_KV_FP8_E4M3, e4m3_to_f32, 0x7e);
    check_ties(reference, simd, ATTN_KV_FP8_E5M2, e5m2_to_f32, 0x7b);
    check_ties(reference, simd, ATTN_KV_INT8_KV, int8_value, 127);
    check_row_ties(reference, simd);
}
