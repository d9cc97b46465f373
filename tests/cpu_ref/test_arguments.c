/* SPDX-License-Identifier: Apache-2.0 */
/* What cpu_ref refuses. Usage: test_arguments FILE.so */
#include <string.h>

#include "harness.h"
#include "support/test.h"

static void test_create(void **state)
{
    static const struct {
        const char *backend, *variant;
        int32_t device;
    } wrong[] = {{"cpu_simd", "", ATTN_DEVICE_CPU},
                 {"cpu_ref", "avx2", ATTN_DEVICE_CPU},
                 {"cpu_ref", "", ATTN_DEVICE_CUDA}};
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct attn_error error = ATTN_ERROR_INIT;
        attn_instance *instance = serial.instance;
        const struct attn_kernels *kernels = serial.kernels;
        struct attn_device device = {wrong[i].device, 0};
        struct attn_host host = {.struct_size = sizeof host};
        const struct attn_create_args args = {.struct_size = sizeof(struct attn_create_args),
                                              .host = &host,
                                              .backend = wrong[i].backend,
                                              .variant = wrong[i].variant,
                                              .device = device};
        assert_int_equal(serial.plugin->create(&args, &instance, &kernels, &error),
                         ATTN_ERROR_NOT_FOUND);
        assert_null(instance);
        assert_null(kernels);
        assert_true(error.message[0] != '\0');
    }
}

/* What rows of quantized caches need next to the view. Each is refused by name, with and without
 * room for the text, and nothing is written. */
static void test_rows(void **state)
{
    static const struct {
        int32_t kv_dtype;
        const char *field;
    } rows[] = {{ATTN_KV_TURBOQUANT_4BIT_NC, "k_cache"},
                {ATTN_KV_INT8_PER_TOKEN_HEAD, "k_cache"},
                {ATTN_KV_INT8_K, "k_cache"},
                {ATTN_KV_INT8_KV, "v_channel_scale"},
                {ATTN_KV_INT4_PER_TOKEN_HEAD, "hadamard_signs"}};
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        float data[4 * 16], out[16], scale, untouched[16];
        int32_t starts[] = {0, 1}, table = 0, length = 1;
        struct test_tensor tensors[4];
        struct attn_error error = ATTN_ERROR_INIT;
        const struct attn_layer_desc layer = {.struct_size = sizeof layer,
                                              .dtype = ATTN_DTYPE_F32,
                                              .kv_dtype = rows[i].kv_dtype,
                                              .num_q_heads = 1,
                                              .num_kv_heads = 1,
                                              .head_size = 16,
                                              .head_size_v = 16,
                                              .block_size = 1};
        const struct attn_layer_params params = {.struct_size = sizeof params};
        const struct attn_batch batch = {.struct_size = sizeof batch,
                                         .num_reqs = 1,
                                         .num_tokens = 1,
                                         .num_actual_tokens = 1,
                                         .query_start_loc = starts,
                                         .query_start_loc_host = starts,
                                         .seq_lens = &length,
                                         .block_table = &table,
                                         .block_table_stride = 1};
        const struct attn_kv_view view = {.struct_size = sizeof view,
                                          .data = data,
                                          .num_blocks = 1,
                                          .block_size = 1,
                                          .num_heads = 1,
                                          .head_size = 16,
                                          .scale = i < 3 ? NULL : &scale};
        memset(out, POISON, sizeof out);
        memset(untouched, POISON, sizeof untouched);
        const int64_t shape[] = {1, 1, 16};
        const struct attn_attend_args args = {
            .struct_size = sizeof args,
            .instance = serial.instance,
            .layer = &layer,
            .params = &params,
            .batch = &batch,
            .k_cache = &view,
            .v_cache = &view,
            .flags = ATTN_RUN_NO_WRITE,
            .phase = ATTN_PHASE_DECODE,
            .q = tensor_set(&tensors[0], data, ATTN_DTYPE_F32, 3, shape, NULL),
            .out = tensor_set(&tensors[1], out, ATTN_DTYPE_F32, 3, shape, NULL)};
        REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &error, rows[i].field,
                   serial.kernels->attend(&args, &error));
        assert_int_equal(error.status, ATTN_ERROR_INVALID_ARGUMENT);
        assert_int_equal(serial.kernels->attend(&args, NULL), ATTN_ERROR_INVALID_ARGUMENT);
        assert_memory_equal(out, untouched, sizeof out);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create),
        cmocka_unit_test(test_rows),
    };
    return harness_main(argc, argv, 1, tests, sizeof tests / sizeof *tests);
}
