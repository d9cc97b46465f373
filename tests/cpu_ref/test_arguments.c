/* SPDX-License-Identifier: Apache-2.0 */
/* What cpu_ref declares, and how it answers bad arguments. Usage: test_arguments FILE.so */
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

/* One defect each: which, the field that the answer names. */
struct defect {
    const char *field;
    void (*apply)(struct problem *p, struct attn_attend_args *args);
};

#define DEFECT(name, statement)                                                                    \
    static void name(struct problem *p, struct attn_attend_args *args)                             \
    {                                                                                              \
        (void)p, (void)args;                                                                       \
        statement;                                                                                 \
    }
DEFECT(no_instance, args->instance = NULL)
DEFECT(no_layer, args->layer = NULL)
DEFECT(no_params, args->params = NULL)
DEFECT(no_batch, args->batch = NULL)
DEFECT(no_q, args->q = NULL)
DEFECT(no_out, args->out = NULL)
DEFECT(no_q_data, p->q_tensor.tensor.data = NULL)
DEFECT(no_q_shape, p->q_tensor.tensor.shape = NULL)
DEFECT(flat_q, p->q_tensor.tensor.ndim = 2)
DEFECT(odd_q_dtype, p->q_tensor.tensor.dtype.bits = 12)
DEFECT(odd_q_heads, p->q_tensor.shape[1] = 5)
DEFECT(odd_q_size, p->q_tensor.shape[2] = 24)
DEFECT(spread_q, p->q_tensor.strides[2] = 2)
DEFECT(short_q, p->q_tensor.shape[0] = 3)
DEFECT(short_out, p->out_tensor.shape[0] = 3)
DEFECT(fp8_out, p->out_tensor.tensor.dtype = format_dtype(ATTN_DTYPE_FP8_E4M3))
DEFECT(half_lse, p->lse_tensor.tensor.dtype = format_dtype(ATTN_DTYPE_F16))
DEFECT(uneven_heads, p->layer.num_kv_heads = 3)
DEFECT(no_heads, p->layer.num_kv_heads = 0)
DEFECT(large_head, p->layer.head_size = 100000)
DEFECT(no_width, p->layer.head_size_v = 0)
DEFECT(unknown_kv_dtype, p->layer.kv_dtype = 99)
DEFECT(no_norms, p->layer.kv_dtype = ATTN_KV_TURBOQUANT_4BIT_NC)
DEFECT(no_sinks, p->params.sinks = NULL)
DEFECT(no_slopes, p->params.alibi_slopes = NULL)
DEFECT(no_sink_k, p->params.sink_k = NULL)
DEFECT(no_sink_v, p->params.sink_v = NULL)
DEFECT(no_v_cache, args->v_cache = NULL)
DEFECT(no_k_anywhere, args->k_cache = NULL)
DEFECT(no_block_size, p->k_view.block_size = 0)
DEFECT(odd_pack, p->v_view.pack = 5)
DEFECT(odd_view_heads, p->k_view.num_heads = 1)
DEFECT(odd_view_size, p->v_view.head_size = 8)
DEFECT(no_seq_lens, p->batch.seq_lens = NULL)
DEFECT(no_table, p->batch.block_table = NULL)
DEFECT(no_span_start, p->batch.span_start_loc = NULL)
DEFECT(negative_reqs, p->batch.num_reqs = -1)
DEFECT(no_query_start, p->batch.query_start_loc = NULL)
DEFECT(write_in_prefill, args->flags = 0; args->phase = ATTN_PHASE_PREFILL)
DEFECT(write_of_plain_rows, args->flags = 0)

static const struct defect defects[] = {
    {"instance", no_instance},
    {"num_q_heads", no_layer},
    {"params", no_params},
    {"batch", no_batch},
    {"batch", no_query_start},
    {"q", no_q},
    {"out", no_out},
    {"q", no_q_data},
    {"q", no_q_shape},
    {"q", flat_q},
    {"q", odd_q_dtype},
    {"q", odd_q_heads},
    {"q", odd_q_size},
    {"q", spread_q},
    {"q", short_q},
    {"out", short_out},
    {"out", fp8_out},
    {"lse", half_lse},
    {"num_q_heads", uneven_heads},
    {"num_q_heads", no_heads},
    {"head_size", large_head},
    {"head_size", no_width},
    {"kv_dtype", unknown_kv_dtype},
    {"k_cache", no_norms},
    {"sinks", no_sinks},
    {"alibi_slopes", no_slopes},
    {"sink_k", no_sink_k},
    {"sink_v", no_sink_v},
    {"v_cache", no_v_cache},
    {"k", no_k_anywhere},
    {"k_cache", no_block_size},
    {"v_cache", odd_pack},
    {"k_cache", odd_view_heads},
    {"v_cache", odd_view_size},
    {"block_table", no_seq_lens},
    {"block_table", no_table},
    {"span_start_loc", no_span_start},
    {"num_reqs", negative_reqs},
    {"flags", write_in_prefill},
    {"flags", write_of_plain_rows},
};

/* Each is refused by name, with and without room for the text, and nothing is written. */
static void test_attend_defects(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof defects / sizeof *defects; i++) {
        struct attn_error error = ATTN_ERROR_INIT;
        struct problem *p = problem_create(&paged, 7);
        struct attn_attend_args args = {.struct_size = sizeof args,
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
        defects[i].apply(p, &args);
        attn_status status = serial.kernels->attend(&args, &error);
        if (status == ATTN_OK || strcmp(error.field, defects[i].field) != 0 ||
            error.status != status || error.message[0] == '\0') {
            fail_msg("defect %d: status %d, field %s, not %s: %s", (int)i, status, error.field,
                     defects[i].field, error.message);
        }
        assert_int_equal(serial.kernels->attend(&args, NULL), status);
        for (int64_t j = 0; j < p->out_bytes; j++) {
            assert_int_equal(p->out_memory[j], POISON);
        }
        problem_destroy(p);
    }
}

static void test_write_defects(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 6; i++) {
        static const char *const fields[] = {"slot_mapping", "k", "v", "k_cache", "k", "kv_dtype"};
        struct attn_error error = ATTN_ERROR_INIT;
        struct problem *p = problem_create(&paged, 7);
        float rows[2 * 2 * 16] = {0};
        const int64_t slots[] = {0, 1};
        struct test_tensor k, v;
        struct attn_write_kv_args args = {
            .struct_size = sizeof args,
            .instance = serial.instance,
            .layer = &p->layer,
            .params = &p->params,
            .k_cache = &p->k_view,
            .v_cache = &p->v_view,
            .slot_mapping = slots,
            .num_slots = 2,
            .k = tensor_set(&k, rows, ATTN_DTYPE_F32, 3, (int64_t[]){2, 2, 16}, NULL),
            .v = tensor_set(&v, rows, ATTN_DTYPE_F32, 3, (int64_t[]){2, 2, 16}, NULL)};
        args.slot_mapping = i == 0 ? NULL : slots;
        args.k = i == 1 ? NULL : args.k;
        args.v = i == 2 ? NULL : args.v;
        args.k_cache = i == 3 ? NULL : &p->k_view;
        args.num_slots = i == 4 ? 3 : 2;
        p->layer.kv_dtype = i == 5 ? ATTN_KV_AUTO : ATTN_KV_F32;
        attn_status status = serial.kernels->write_kv(&args, &error);
        assert_true(status != ATTN_OK && error.message[0] != '\0');
        assert_string_equal(error.field, fields[i]);
        for (int64_t j = 0; j < p->cache_bytes; j++) {
            assert_int_equal(p->cache[j], POISON);
        }
        problem_destroy(p);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_entry),         cmocka_unit_test(test_declared_kernels),
        cmocka_unit_test(test_create),        cmocka_unit_test(test_attend_defects),
        cmocka_unit_test(test_write_defects),
    };
    return harness_main(argc, argv, 1, tests, sizeof tests / sizeof *tests);
}
