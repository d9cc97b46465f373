/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of cpu_ref that attn-check does not draw. The plugin is cpu_ref with its formulas around it
 * (checked/), which make a wrong result a failed call. Usage: test_undrawn FILE.so */
#include <attn/mla.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "support/client.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/random.h"
#include "support/services.h"
#include "support/tensor.h"
#include "support/test.h"

#define POISON 0xff /* NaN in every float format here */
#define SHAPE(...) ((const int64_t[]){__VA_ARGS__})

static const struct attn_plugin *plugin;
static const struct attn_kernels *kernels;
static attn_instance *instance;
static struct attn_error error = ATTN_ERROR_INIT;
static uint64_t random_state = 97;

#define PASSES(what, call)                                                                         \
    do {                                                                                           \
        if ((call) != ATTN_OK) {                                                                   \
            fail_msg("%s: %s: %s: %s", what, #call, error.field, error.message);                   \
        }                                                                                          \
    } while (0)

static void host_for(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                     void *argument)
{
    if (count > 0) {
        body(argument, 0, count, 0);
    }
}

static const struct attn_host host = {.struct_size = sizeof host,
                                      .allocate = services_allocate,
                                      .release = services_release,
                                      .parallel_for = host_for,
                                      .num_threads = 1};

static attn_status create(const char *backend, const char *variant, int32_t device,
                          int32_t num_options, attn_instance **made,
                          const struct attn_kernels **table)
{
    const char *const option = "colour=red";
    const struct attn_create_args args =
        SIZED(attn_create_args, .host = &host, .backend = backend, .variant = variant,
              .device = {device, 0}, .options = &option, .num_options = num_options);
    return plugin->create(&args, made, table, &error);
}

TEST(test_create)
{
    static const struct {
        const char *backend, *variant;
        int32_t device, num_options;
    } wrong[] = {{"cpu_ref", "", ATTN_DEVICE_CPU, 1},
                 {"cpu_simd", "", ATTN_DEVICE_CPU},
                 {"cpu_ref", "avx2", ATTN_DEVICE_CPU},
                 {"cpu_ref", "", ATTN_DEVICE_CUDA}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        attn_instance *made = instance;
        const struct attn_kernels *table = kernels;
        error.message[0] = '\0';
        assert_int_equal(create(wrong[i].backend, wrong[i].variant, wrong[i].device,
                                wrong[i].num_options, &made, &table),
                         ATTN_ERROR_NOT_FOUND);
        assert_null(made);
        assert_null(table);
        assert_true(error.message[0] != '\0');
    }
    plugin->destroy(NULL);
}

static void draw(void *memory, int64_t count, int32_t dtype)
{
    for (int64_t i = 0; i < count; i++) {
        number_store(memory, i, dtype, random_normal(&random_state));
    }
}

/* ---- rows of zeros, of which no scale can be made */

TEST(test_zeros)
{
    enum { DIMS = 64 };
    static float signs[DIMS], channels[DIMS], x[DIMS], out[DIMS];
    const int64_t slot = 0, shape[] = {1, 1, DIMS};
    const int32_t starts[] = {0, 1}, table = 0, length = 1;
    struct shaped zeros, result;
    shaped_set(&zeros, x, ATTN_DTYPE_F32, 3, shape, NULL);
    shaped_set(&result, out, ATTN_DTYPE_F32, 3, shape, NULL);
    for (int32_t i = 0; i < DIMS; i++) {
        signs[i] = i % 3 ? 1 : -1;
        channels[i] = 0.5f;
        x[i] = -0.0f; /* its only code is zero's */
    }
    const struct attn_kv_quant_params quant =
        EXTENSION(attn_kv_quant_params, ATTN_EXT_KV_QUANT_PARAMS, NULL, .hadamard_signs_k = signs,
                  .hadamard_signs_v = signs, .v_channel_scale = channels);
    const struct attn_layer_params params = SIZED(attn_layer_params, .next = &quant.ext);
    struct attn_batch batch = client_batch(1, starts, NULL);
    batch.seq_lens = &length;
    batch.block_table = &table;
    batch.block_table_stride = 1;
    for (int32_t kv_dtype = ATTN_KV_F16; kv_dtype <= ATTN_KV_Q4_0; kv_dtype++) {
        uint8_t data[2][4 * DIMS], scale[2][8];
        char what[32];
        struct attn_layer_desc layer = layer_decoder("zeros", 1, 1, DIMS, 1);
        struct attn_kv_view k = client_view(data[0], 1, 1, 1, DIMS, 0);
        struct attn_kv_view v = client_view(data[1], 1, 1, 1, DIMS, 0);
        layer.kv_dtype = kv_dtype;
        layer.head_size_v = DIMS;
        k.scale = scale[0];
        v.scale = scale[1];
        const struct attn_write_kv_args write =
            SIZED(attn_write_kv_args, .instance = instance, .layer = &layer, .params = &params,
                  .k_cache = &k, .v_cache = &v, .slot_mapping = &slot, .num_slots = 1,
                  .k = &zeros.tensor, .v = &zeros.tensor);
        const struct attn_attend_args attend =
            SIZED(attn_attend_args, .instance = instance, .layer = &layer, .params = &params,
                  .batch = &batch, .k_cache = &k, .v_cache = &v, .flags = ATTN_RUN_NO_WRITE,
                  .q = &zeros.tensor, .out = &result.tensor);
        if (kv_dtype == ATTN_KV_FP8_DS_MLA) {
            continue; /* holds latent rows */
        }
        snprintf(what, sizeof what, "kv_dtype %d", kv_dtype);
        memset(data, POISON, sizeof data);
        memset(scale, POISON, sizeof scale);
        PASSES(what, kernels->write_kv(&write, &error));
        PASSES(what, kernels->attend(&attend, &error));
        for (int32_t i = 0; i < DIMS; i++) {
            assert_true(out[i] == 0);
        }
    }
}

/* ---- rows of caches that attn-check does not gather */

TEST(test_gathered_rows)
{
    enum { BLOCK = 4, BLOCKS = 16, KEYS = 30, FIRST = 10, COUNT = 7, ROW = 576 };
    static const struct {
        int32_t kv_dtype, size, bytes;
    } caches[] = {{ATTN_KV_FP8_E5M2, ROW, ROW},
                  {ATTN_KV_FP8_DS_MLA, ROW, 656},
                  {ATTN_KV_FP8_DS_V4, 512, 576}};
    static uint8_t keys[KEYS * ROW * 4], cache[BLOCKS * BLOCK * 656], out[COUNT * ROW * 4];
    static float scales[BLOCKS * BLOCK * 2];
    static const int32_t starts[] = {0, 1}, length = KEYS, table_row = 1, first = FIRST,
                         rows[] = {0, COUNT};
    int32_t table[2][BLOCKS];
    int64_t slots[KEYS];
    memset(table, POISON, sizeof table);
    for (int32_t j = 0; j < KEYS; j++) {
        table[1][j / BLOCK] = j / BLOCK * 7 % BLOCKS;
        slots[j] = table[1][j / BLOCK] * BLOCK + j % BLOCK;
    }
    struct attn_batch batch = client_batch(1, starts, &length);
    client_blocks(&batch, table[0], BLOCKS, slots);
    batch.block_table_rows = 2;
    batch.block_table_row = &table_row;
    for (size_t i = 0; i < sizeof caches / sizeof *caches; i++) {
        const int32_t size = caches[i].size, bytes = caches[i].bytes;
        const struct attn_mla_desc mla =
            EXTENSION(attn_mla_desc, ATTN_EXT_MLA_DESC, NULL, .kv_lora_rank = 512,
                      .qk_nope_head_dim = 128, .qk_rope_head_dim = size - 512, .v_head_dim = 128);
        const struct attn_layer_desc layer = SIZED(
            attn_layer_desc, .next = &mla.ext, .kind = ATTN_LAYER_MLA, .dtype = ATTN_DTYPE_BF16,
            .kv_dtype = caches[i].kv_dtype, .num_q_heads = 4, .num_kv_heads = 1, .head_size = size,
            .head_size_v = 512, .scale = 0.3f, .block_size = BLOCK,
            .k_scale_form = i == 0 ? ATTN_SCALE_PER_TENSOR : ATTN_SCALE_NONE);
        const struct attn_layer_params params = SIZED(attn_layer_params, .k_scale_host = 0.5f);
        const struct attn_kv_view view = SIZED(
            attn_kv_view, .data = cache, .num_blocks = BLOCKS, .block_size = BLOCK, .num_heads = 1,
            .head_size = size, .stride_block = BLOCK * bytes, .stride_slot = bytes,
            .stride_head = bytes, .scale = scales, .scale_stride_block = (int64_t)BLOCK * 8,
            .scale_stride_slot = 8, .scale_stride_head = 8);
        struct shaped written, read;
        const struct attn_write_kv_args write =
            SIZED(attn_write_kv_args, .instance = instance, .layer = &layer, .params = &params,
                  .k_cache = &view, .slot_mapping = slots, .num_slots = KEYS,
                  .k = shaped_set(&written, keys, layer.dtype, 3, SHAPE(KEYS, 1, size), NULL));
        const struct attn_gather_kv_args gather =
            SIZED(attn_gather_kv_args, .instance = instance, .layer = &layer, .params = &params,
                  .cache = &view, .batch = &batch, .first_key = &first, .out_start_loc = rows,
                  .out = shaped_set(&read, out, layer.dtype, 3, SHAPE(COUNT, 1, size), NULL));
        draw(keys, (int64_t)KEYS * size, layer.dtype);
        PASSES("latent rows", kernels->write_kv(&write, &error));
        PASSES("latent rows", kernels->gather_kv(&gather, &error));
    }
}

/* ---- numbers */

TEST(test_fnuz)
{
    enum { TOKENS = 5, GROUPS = 4, DIMS = 64, COUNT = TOKENS * GROUPS * DIMS };
    static const float scales[GROUPS] = {0.01f, 0.3f, 0.00001f, 0.05f}; /* one saturates */
    static float x[COUNT];
    static uint8_t codes[COUNT];
    struct shaped in, out;
    draw(x, COUNT, ATTN_DTYPE_F32);
    for (int32_t form = ATTN_SCALE_PER_TENSOR; form <= ATTN_SCALE_PER_HEAD; form++) {
        const struct attn_quantize_args args =
            SIZED(attn_quantize_args, .instance = instance, .form = ATTN_OUTPUT_FP8_STATIC,
                  .scale_form = form, .scale = scales,
                  .x = shaped_set(&in, x, ATTN_DTYPE_F32, 3, SHAPE(TOKENS, GROUPS, DIMS), NULL),
                  .out = shaped_set(&out, codes, ATTN_DTYPE_FP8_E4M3FNUZ, 3,
                                    SHAPE(TOKENS, GROUPS, DIMS), NULL));
        PASSES("e4m3fnuz", kernels->quantize(&args, &error));
    }
}

/* More rows and columns than a tile has; and a block scale that says NaN. */
TEST(test_gemm)
{
    enum { B = 3, M = 19, K = 96, N = 160 };
    static const float scales[B] = {0.5f, 2, 3};
    static float a[B * M * K], w[B * K * N], c[B * M * N];
    static uint8_t exponents[B * 3 * N];
    struct shaped ta, tw, to, ts;
    draw(a, B * M * K, ATTN_DTYPE_F32);
    draw(w, B * K * N, ATTN_DTYPE_F32);
    memset(exponents, 127, sizeof exponents);
    exponents[3] = 255;
    for (int32_t form = 0; form < 3; form++) { /* plain, transposed, mxfp4 */
        struct attn_batched_gemm_args args = SIZED(
            attn_batched_gemm_args, .instance = instance, .w_scale = scales, .w_scale_count = B,
            .a = shaped_set(&ta, a, ATTN_DTYPE_F32, 3, SHAPE(B, M, K), NULL),
            .w = shaped_set(&tw, w, form == 2 ? ATTN_DTYPE_INT8 : ATTN_DTYPE_F32, 3, SHAPE(B, K, N),
                            form == 1 ? SHAPE(N * K, 1, K) : NULL),
            .out = shaped_set(&to, c, ATTN_DTYPE_F32, 3, SHAPE(B, M, N), NULL));
        if (form == 2) {
            args.w_block_scale =
                shaped_set(&ts, exponents, ATTN_DTYPE_INT8, 3, SHAPE(B, K / 32, N), NULL);
            tw.tensor.dtype = (struct attn_dtype){ATTN_CODE_FLOAT4_E2M1FN, 4, 1};
        }
        PASSES("batched_gemm", kernels->batched_gemm(&args, &error));
        assert_true(form < 2 || (isnan(c[3]) && !isnan(c[2]) && !isnan(c[4])));
    }
}

int main(int argc, char **argv)
{
    if (argc != 2 ||
        client_plugin(argv[1], ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &plugin, &error) !=
            ATTN_OK ||
        create("cpu_ref", "", ATTN_DEVICE_CPU, 0, &instance, &kernels) != ATTN_OK) {
        fprintf(stderr, "usage: %s FILE.so, of cpu_ref\n", argv[0]);
        return 2;
    }
    int failed = test_run(NULL, NULL);
    plugin->destroy(instance);
    return failed;
}
