/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels around an attend, against cpu_ref: merge_states, rope_write_kv, copy_blocks, fill;
 * and that a request's bits do not depend on its batch where that is promised. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels.h"

static const struct attn_dtype bf16_type = {ATTN_CODE_BFLOAT, 16, 1};
static const struct attn_dtype f32_type = {ATTN_CODE_FLOAT, 32, 1};

/* Both sides empty, one empty with NaN in its output, NaN sums, plain rows. */
static void check_merge(const struct backend *reference, const struct backend *simd)
{
    enum { ROWS = 12, HEADS = 3, SIZE = 72 };
    static float prefix[ROWS * HEADS * SIZE], suffix[ROWS * HEADS * SIZE];
    static float out[2][ROWS * HEADS * SIZE], lse[2][HEADS * ROWS];
    float sums[2][HEADS * ROWS];
    int64_t shape[3] = {ROWS, HEADS, SIZE};
    int64_t lse_shape[2] = {HEADS, ROWS};
    for (int i = 0; i < ROWS * HEADS * SIZE; i++) {
        prefix[i] = random_normal();
        suffix[i] = random_normal();
    }
    for (int i = 0; i < HEADS * ROWS; i++) {
        sums[0][i] = 5 * random_normal();
        sums[1][i] = 5 * random_normal();
    }
    sums[0][0] = sums[1][0] = -INFINITY;
    sums[0][1] = INFINITY;
    sums[1][2] = -INFINITY;
    sums[0][3] = NAN;
    prefix[1 * HEADS * SIZE] = NAN; /* of head 0, row 1: an empty side */
    const struct backend *const backends[2] = {reference, simd};
    for (int b = 0; b < 2; b++) {
        struct attn_tensor tensors[6] = {{.data = prefix},  {.data = suffix},  {.data = out[b]},
                                         {.data = sums[0]}, {.data = sums[1]}, {.data = lse[b]}};
        for (int i = 0; i < 6; i++) {
            tensors[i].device.type = ATTN_DEVICE_CPU;
            tensors[i].dtype = f32_type;
            tensors[i].ndim = i < 3 ? 3 : 2;
            tensors[i].shape = i < 3 ? shape : lse_shape;
        }
        struct attn_merge_states_args args = {.struct_size = sizeof(args),
                                              .instance = backends[b]->instance,
                                              .prefix_out = &tensors[0],
                                              .suffix_out = &tensors[1],
                                              .out = &tensors[2],
                                              .prefix_lse = &tensors[3],
                                              .suffix_lse = &tensors[4],
                                              .lse = &tensors[5],
                                              .num_rows = ROWS - 1,
                                              .num_rows_with_prefix = ROWS - 3};
        memset(out[b], 0x7b, sizeof(out[b]));
        memset(lse[b], 0x7b, sizeof(lse[b]));
        assert_int_equal(backends[b]->kernels->merge_states(&args, NULL), ATTN_OK);
    }
    for (int i = 0; i < ROWS * HEADS * SIZE; i++) {
        bool same = isnan(out[0][i]) ? isnan(out[1][i]) : fabsf(out[0][i] - out[1][i]) <= 2e-6f;
        assert_true(same);
    }
    for (int i = 0; i < HEADS * ROWS; i++) {
        bool same = isnan(lse[0][i])
                        ? isnan(lse[1][i])
                        : lse[0][i] == lse[1][i] || fabsf(lse[0][i] - lse[1][i]) <= 4e-6f;
        assert_true(same);
    }
}

static void check_rope(const struct backend *reference, const struct backend *simd, int32_t form,
                       int32_t rotary, bool norm, int32_t dtype)
{
    enum { POSITIONS = 64 };
    struct test_case test = {.name = "rope",
                             .dtype = dtype,
                             .q_heads = 4,
                             .kv_heads = 2,
                             .depth = 64,
                             .num_reqs = 1,
                             .queries = {20, 20},
                             .block_size = 16};
    const struct backend *const backends[2] = {reference, simd};
    static float table[POSITIONS * 64], weights[64];
    int64_t table_shape[2] = {POSITIONS, rotary};
    int64_t weight_shape[1] = {64};
    int64_t positions[20];
    struct test_data data[2];
    for (int i = 0; i < POSITIONS * rotary; i++) {
        float angle =
            (float)(i / rotary) * powf(10000, -2.0f * (float)(i % (rotary / 2)) / (float)rotary);
        table[i] = i % rotary < rotary / 2 ? cosf(angle) : sinf(angle);
    }
    for (int i = 0; i < 64; i++) {
        weights[i] = 1 + 0.1f * random_normal();
    }
    uint64_t seed = random_bits();
    for (int b = 0; b < 2; b++) {
        random_seed(seed);
        data_make(&data[b], &test, reference);
        memset(data[b].cache, 0, data[b].cache_bytes);
        for (int i = 0; i < 20; i++) {
            positions[i] = random_int(0, POSITIONS - 1);
        }
        struct attn_tensor cos_sin = {
            .data = table, .ndim = 2, .dtype = f32_type, .shape = table_shape};
        struct attn_tensor weight = {
            .data = weights, .ndim = 1, .dtype = f32_type, .shape = weight_shape};
        struct attn_io_rope rope = {.ext = {.id = ATTN_EXT_IO_ROPE, .struct_size = sizeof(rope)},
                                    .form = form,
                                    .rotary_dim = rotary,
                                    .positions = positions,
                                    .cos_sin = &cos_sin,
                                    .q_norm_weight = norm ? &weight : NULL,
                                    .k_norm_weight = norm ? &weight : NULL,
                                    .norm_eps = 1e-6f};
        struct attn_write_kv_args args = {.struct_size = sizeof(args),
                                          .next = &rope.ext,
                                          .instance = backends[b]->instance,
                                          .layer = &data[b].layer,
                                          .params = &data[b].params,
                                          .k_cache = &data[b].k_view,
                                          .v_cache = &data[b].v_view,
                                          .slot_mapping = data[b].slots,
                                          .num_slots = 20,
                                          .q = &data[b].q,
                                          .k = &data[b].k,
                                          .v = &data[b].v};
        assert_int_equal(backends[b]->kernels->rope_write_kv(&args, NULL), ATTN_OK);
    }
    struct attn_tensor one = data[0].q, two = data[1].q;
    one.data = data[0].cache;
    two.data = data[1].cache;
    float bound = dtype == ATTN_DTYPE_F32 ? 4e-6f : dtype == ATTN_DTYPE_F16 ? 2e-3f : 1.6e-2f;
    for (size_t i = 0; i < data[0].cache_bytes / (size_t)dtype_bytes(dtype); i++) {
        float x = element_value(&one, (int64_t)i);
        float y = element_value(&two, (int64_t)i);
        assert_true(fabsf(x - y) <= bound * (1 + fabsf(x)));
    }
    for (int64_t i = 0; i < 20 * data[0].q_strides[0]; i++) {
        float x = element_value(&data[0].q, i);
        float y = element_value(&data[1].q, i);
        assert_true(isnan(x) ? isnan(y) : fabsf(x - y) <= bound * (1 + fabsf(x)));
    }
    data_free(&data[0]);
    data_free(&data[1]);
}

static void check_copies(const struct backend *simd)
{
    unsigned char source[8 * 32], destination[8 * 64];
    const int64_t pairs[] = {3, 0, 1, 5};
    struct attn_block_copy copy = {source, destination, 32, 64, 24};
    struct attn_copy_blocks_args args = {.struct_size = sizeof(args),
                                         .instance = simd->instance,
                                         .kind = ATTN_COPY_DEVICE_TO_HOST,
                                         .num_copies = 1,
                                         .copies = &copy,
                                         .pairs = pairs,
                                         .num_pairs = 2};
    for (size_t i = 0; i < sizeof(source); i++) {
        source[i] = (unsigned char)i;
    }
    memset(destination, 0xee, sizeof(destination));
    assert_int_equal(simd->kernels->copy_blocks(&args, NULL), ATTN_OK);
    for (size_t i = 0; i < sizeof(destination); i++) {
        size_t block = i / 64, byte = i % 64;
        unsigned char want = 0xee;
        if (byte < 24 && (block == 0 || block == 5)) {
            want = (unsigned char)((block == 0 ? 3 : 1) * 32 + byte);
        }
        assert_int_equal(destination[i], want);
    }
    assert_int_equal(simd->kernels->fill(simd->instance, destination, 7, 10, 20, 3, NULL, NULL),
                     ATTN_OK);
    for (size_t i = 0; i < 60; i++) {
        assert_int_equal(destination[i] == 7, i % 20 < 10);
    }
    assert_int_equal(simd->kernels->copy(simd->instance, destination, source, 40,
                                         ATTN_COPY_DEVICE_TO_DEVICE, NULL, NULL),
                     ATTN_OK);
    assert_memory_equal(destination, source, 40);
}

/* The last request alone gives the bits that it had in its batch. */
static void check_invariance(const struct backend *simd, const struct backend *writer,
                             int32_t dtype)
{
    struct test_case test = {.name = "invariant",
                             .dtype = dtype,
                             .q_heads = 4,
                             .kv_heads = 2,
                             .depth = 64,
                             .num_reqs = 6,
                             .queries = {1, 130},
                             .context = {0, 900},
                             .block_size = 16,
                             .batch_invariant = 1};
    struct test_data data;
    struct attn_error error = ATTN_ERROR_INIT;
    void *all, *alone;
    float *all_lse, *alone_lse;
    data_make(&data, &test, writer);
    assert_int_equal(run_attend(simd, &data, &all, &all_lse, &error), ATTN_OK);
    data.batch.num_reqs = 1;
    data.batch.query_start_loc += 5;
    data.batch.query_start_loc_host += 5;
    data.batch.seq_lens += 5;
    data.batch.seq_lens_host += 5;
    data.batch.block_table += 5 * data.batch.block_table_stride;
    assert_int_equal(run_attend(simd, &data, &alone, &alone_lse, &error), ATTN_OK);
    int64_t first = data.query_start[5] * data.out_strides[0] * dtype_bytes(dtype);
    int64_t end = data.query_start[6] * data.out_strides[0] * dtype_bytes(dtype);
    assert_memory_equal((char *)all + first, (char *)alone + first, (size_t)(end - first));
    free(all);
    free(alone);
    free(all_lse);
    free(alone_lse);
    data_free(&data);
}

/* What cannot be served is told with the field, never crashed on. */
static void check_refusals(const struct backend *simd, const struct backend *writer)
{
    struct test_case test = {.name = "refusal",
                             .dtype = ATTN_DTYPE_BF16,
                             .q_heads = 2,
                             .kv_heads = 1,
                             .depth = 64,
                             .num_reqs = 1,
                             .queries = {2, 2},
                             .context = {3, 3},
                             .block_size = 16};
    struct test_data data;
    struct attn_error error = ATTN_ERROR_INIT;
    void *out;
    float *lse;
    data_make(&data, &test, writer);
    data.q.dtype = f32_type;
    assert_int_equal(run_attend(simd, &data, &out, &lse, &error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(error.field, "q");
    free(out);
    free(lse);
    data.q.dtype = bf16_type;
    data.layer.kv_dtype = ATTN_KV_NVFP4;
    assert_int_equal(run_attend(simd, &data, &out, &lse, &error), ATTN_ERROR_UNSUPPORTED);
    assert_string_equal(error.field, "kv_dtype");
    free(out);
    free(lse);
    data.layer.kv_dtype = ATTN_KV_BF16;
    data.batch.block_table = NULL;
    assert_int_equal(run_attend(simd, &data, &out, &lse, &error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(error.field, "block_table");
    free(out);
    free(lse);
    data_free(&data);
}

void check_kernels(const struct backend *reference, const struct backend *simd)
{
    check_merge(reference, simd);
    check_copies(simd);
    check_refusals(simd, reference);
    for (int32_t dtype = 0; dtype < 3; dtype++) {
        check_rope(reference, simd, ATTN_ROPE_NEOX, 64, false, dtype);
        check_rope(reference, simd, ATTN_ROPE_GPTJ, 32, true, dtype);
        check_invariance(simd, reference, dtype);
    }
}
