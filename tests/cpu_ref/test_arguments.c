/* SPDX-License-Identifier: Apache-2.0 */
/* What cpu_ref refuses, and rows that attn-check does not draw. Usage: test_arguments FILE.so */
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

#define DIMS 64

/* One slot of one head, and one query. */
struct one_key {
    uint8_t data[2][4 * DIMS], scale[2][8];
    float x[DIMS], out[DIMS];
    int32_t starts[2], length, table;
    struct test_tensor tensors[2];
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_kv_quant_params quant;
    struct attn_batch batch;
    struct attn_kv_view views[2]; /* of K, of V */
};

static void one_key_init(struct one_key *k, int32_t kv_dtype)
{
    *k = (struct one_key){.starts = {0, 1}, .length = 1};
    k->layer = (struct attn_layer_desc){.struct_size = sizeof k->layer,
                                        .dtype = ATTN_DTYPE_F32,
                                        .kv_dtype = kv_dtype,
                                        .num_q_heads = 1,
                                        .num_kv_heads = 1,
                                        .head_size = DIMS,
                                        .head_size_v = DIMS,
                                        .scale = 1,
                                        .block_size = 1};
    k->params = (struct attn_layer_params){.struct_size = sizeof k->params};
    k->batch = (struct attn_batch){.struct_size = sizeof k->batch,
                                   .num_reqs = 1,
                                   .num_tokens = 1,
                                   .num_actual_tokens = 1,
                                   .query_start_loc = k->starts,
                                   .query_start_loc_host = k->starts,
                                   .seq_lens = &k->length,
                                   .block_table = &k->table,
                                   .block_table_stride = 1};
    for (int32_t i = 0; i < 2; i++) {
        k->views[i] = (struct attn_kv_view){.struct_size = sizeof k->views[i],
                                            .data = k->data[i],
                                            .num_blocks = 1,
                                            .block_size = 1,
                                            .num_heads = 1,
                                            .head_size = DIMS,
                                            .scale = k->scale[i]};
    }
    memset(k->out, POISON, sizeof k->out);
}

static attn_status one_key_attend(struct one_key *k, struct attn_error *error)
{
    const int64_t shape[] = {1, 1, DIMS};
    const struct attn_attend_args args = {
        .struct_size = sizeof args,
        .instance = serial.instance,
        .layer = &k->layer,
        .params = &k->params,
        .batch = &k->batch,
        .k_cache = &k->views[0],
        .v_cache = &k->views[1],
        .flags = ATTN_RUN_NO_WRITE,
        .phase = ATTN_PHASE_DECODE,
        .q = tensor_set(&k->tensors[0], k->x, ATTN_DTYPE_F32, 3, shape, NULL),
        .out = tensor_set(&k->tensors[1], k->out, ATTN_DTYPE_F32, 3, shape, NULL)};
    return serial.kernels->attend(&args, error);
}

/* Rows of zeros, of which no scale can be made, become what the formulas say and read as zeros. */
static void test_zeros(void **state)
{
    static float signs[DIMS], channels[DIMS];
    (void)state;
    for (int32_t i = 0; i < DIMS; i++) {
        signs[i] = i % 3 ? 1 : -1;
        channels[i] = 0.5f;
    }
    for (int32_t kv_dtype = ATTN_KV_F16; kv_dtype < ATTN_KV_DTYPE_COUNT; kv_dtype++) {
        if (kv_dtype == ATTN_KV_FP8_DS_MLA) {
            continue; /* of latent rows */
        }
        struct attn_error error = ATTN_ERROR_INIT;
        struct one_key k;
        const int64_t slot = 0, shape[] = {1, 1, DIMS};
        one_key_init(&k, kv_dtype);
        k.quant = (struct attn_kv_quant_params){
            .ext = {.id = ATTN_EXT_KV_QUANT_PARAMS, .struct_size = sizeof k.quant},
            .hadamard_signs_k = signs,
            .hadamard_signs_v = signs,
            .v_channel_scale = channels};
        k.params.next = &k.quant.ext;
        const struct attn_write_kv_args write = {
            .struct_size = sizeof write,
            .instance = serial.instance,
            .layer = &k.layer,
            .params = &k.params,
            .k_cache = &k.views[0],
            .v_cache = &k.views[1],
            .slot_mapping = &slot,
            .num_slots = 1,
            .k = tensor_set(&k.tensors[0], k.x, ATTN_DTYPE_F32, 3, shape, NULL),
            .v = &k.tensors[0].tensor};
        for (int32_t i = 0; i < DIMS; i++) {
            k.x[i] = -0.0f; /* of which no code may be made but zero's */
        }
        memset(k.data, POISON, sizeof k.data);
        if (serial.kernels->write_kv(&write, &error) != ATTN_OK ||
            one_key_attend(&k, &error) != ATTN_OK) {
            fail_msg("kv_dtype %d: %s: %s", kv_dtype, error.field, error.message);
        }
        for (int32_t i = 0; i < DIMS; i++) {
            if (k.out[i] != 0) {
                fail_msg("kv_dtype %d: element %d is %g", kv_dtype, i, k.out[i]);
            }
        }
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create),
        cmocka_unit_test(test_zeros),
    };
    return harness_main(argc, argv, 1, tests, sizeof tests / sizeof *tests);
}
