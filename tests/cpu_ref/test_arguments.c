/* SPDX-License-Identifier: Apache-2.0 */
/* What cpu_ref declares, and what of its arguments it answers for. Usage: test_arguments FILE.so */
#include <string.h>

#include "formats.h"
#include "harness.h"
#include "problem.h"
#include "support/test.h"

static const struct attend_case paged = {
    .name = "paged",
    .dtype = ATTN_DTYPE_F32,
    .num_q_heads = 4,
    .num_kv_heads = 2,
    .head_size = 16,
    .block_size = 4,
    .num_reqs = 2,
    .query_lens = {1, 3},
    .seq_lens = {7, 12},
    .has_sinks = 1,
    .alibi = ATTN_ALIBI_LINEAR,
    .sink_len = 2,
    .num_spans = 2,
};

static struct attn_backend_caps declared;
static int32_t num_devices;

static attn_status take_device(void *user, const struct attn_device_info *device)
{
    (void)user;
    num_devices += device->device.type == ATTN_DEVICE_CPU;
    return ATTN_OK;
}

static attn_status take_backend(void *user, const struct attn_backend_caps *caps)
{
    (void)user;
    declared = *caps;
    return ATTN_OK;
}

static void test_entry(void **state)
{
    const struct attn_plugin *plugin = serial.plugin;
    struct attn_probe_sink sink = {sizeof sink, NULL, NULL, take_device, take_backend};
    struct attn_host host = {.struct_size = sizeof host};
    (void)state;
    assert_int_equal(plugin->abi_version, ATTN_ABI_VERSION);
    assert_int_equal(plugin->probe(&host, &sink, NULL), ATTN_OK);
    assert_int_equal(num_devices, 1);
    assert_string_equal(declared.name, "cpu_ref");
}

/* A bit in the capabilities for every slot, and a slot for every bit. */
static void test_declared_kernels(void **state)
{
    const struct attn_kernels *k = serial.kernels;
    const int32_t there[ATTN_KERNEL_COUNT] = {
        k->attend != NULL,        k->write_kv != NULL,    k->merge_states != NULL,
        k->rope_write_kv != NULL, k->attend_mla != NULL,  k->attend_mla_sparse != NULL,
        k->gather_kv != NULL,     k->gated_delta != NULL, k->batched_gemm != NULL,
        k->quantize != NULL,      k->amax != NULL,        k->copy_blocks != NULL,
        k->copy != NULL,          k->fill != NULL,        k->make_block_table != NULL};
    (void)state;
    for (int32_t i = 0; i < ATTN_KERNEL_COUNT; i++) {
        assert_int_equal(declared.kernels >> i & 1, there[i]);
    }
}

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
        float scale;
        struct attn_error error = ATTN_ERROR_INIT;
        struct problem *p = problem_create(&paged, 7);
        const struct attn_attend_args args = {.struct_size = sizeof args,
                                              .instance = serial.instance,
                                              .layer = &p->layer,
                                              .params = &p->params,
                                              .batch = &p->batch,
                                              .k_cache = &p->k_view,
                                              .v_cache = &p->v_view,
                                              .flags = ATTN_RUN_NO_WRITE,
                                              .phase = ATTN_PHASE_DECODE,
                                              .q = &p->q_tensor.tensor,
                                              .out = &p->out_tensor.tensor,
                                              .lse = &p->lse_tensor.tensor};
        assert_int_equal(problem_write(p, &serial, NULL), ATTN_OK);
        p->layer.kv_dtype = rows[i].kv_dtype;
        p->k_view.scale = p->v_view.scale = i < 3 ? NULL : &scale;
        attn_status status = serial.kernels->attend(&args, &error);
        assert_int_equal(status, ATTN_ERROR_INVALID_ARGUMENT);
        assert_int_equal(error.status, status);
        assert_string_equal(error.field, rows[i].field);
        assert_int_equal(serial.kernels->attend(&args, NULL), status);
        for (int64_t j = 0; j < p->out_bytes; j++) {
            assert_int_equal(p->out_memory[j], POISON);
        }
        problem_destroy(p);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_entry),
        cmocka_unit_test(test_declared_kernels),
        cmocka_unit_test(test_create),
        cmocka_unit_test(test_rows),
    };
    return harness_main(argc, argv, 1, tests, sizeof tests / sizeof *tests);
}
