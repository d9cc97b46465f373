/* SPDX-License-Identifier: Apache-2.0 */
/* merge_states, rope_write_kv and gather_kv, each against its formula.
 * Usage: test_kernels FILE.so */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats.h"
#include "harness.h"
#include "support/test.h"

#define SEED 41
#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))
#define F32_BOUND 1e-6

/* ---- merge_states */

#define MERGE_ROWS 64
#define MERGE_HEADS 3
#define MERGE_DIMS 24

struct merge_data {
    float out[3][MERGE_ROWS][MERGE_HEADS][MERGE_DIMS];
    float lse[3][MERGE_HEADS][MERGE_ROWS];
    uint8_t quantized[MERGE_ROWS][MERGE_HEADS][MERGE_DIMS];
};

/* All pairs of these, row by row, then ordinary values. */
static void fill_merge(struct merge_data *data)
{
    static const float edges[] = {-INFINITY, INFINITY, NAN, 0, -80, 80};
    for (int32_t t = 0; t < MERGE_ROWS; t++) {
        for (int32_t h = 0; h < MERGE_HEADS; h++) {
            for (int32_t side = 0; side < 2; side++) {
                int32_t index = side ? t / COUNT(edges) : t % COUNT(edges);
                int32_t edge = t < COUNT(edges) * COUNT(edges);
                float lse = edge ? edges[index] : (float)(5 * random_normal());
                data->lse[side][h][t] = lse;
                for (int32_t d = 0; d < MERGE_DIMS; d++) {
                    /* what an empty side holds is not read */
                    data->out[side][t][h][d] = isinf(lse) ? NAN : (float)random_normal();
                }
            }
        }
    }
    memset(data->out[2], 0xff, sizeof data->out[2]);
    memset(data->lse[2], 0xff, sizeof data->lse[2]);
    memset(data->quantized, 0x55, sizeof data->quantized);
}

/* From the definition; weights as shares of the sum, empty sides left out. */
static void merge_formula(const struct merge_data *data, int32_t t, int32_t h, int32_t has_prefix,
                          double *out, double *lse)
{
    double a = data->lse[0][h][t], b = data->lse[1][h][t];
    int32_t first = has_prefix && !isinf(a), second = !isinf(b);
    *lse = first && second ? fmax(a, b) + log1p(exp(-fabs(a - b))) : first ? a : b;
    if (first && second && (isnan(a) || isnan(b))) {
        *lse = NAN;
    }
    *lse = first || second ? *lse : -INFINITY;
    for (int32_t d = 0; d < MERGE_DIMS; d++) {
        out[d] = first ? exp(a - *lse) * data->out[0][t][h][d] : 0;
        out[d] += second ? exp(b - *lse) * data->out[1][t][h][d] : 0;
    }
}

static void check_merge(int32_t fp8, int32_t in_place, int64_t first_row, int64_t rows,
                        int64_t with_prefix)
{
    static struct merge_data data, before;
    struct test_tensor out[3], lse[3], small;
    const float scale = 0.01f;
    const int64_t shape[] = {MERGE_ROWS, MERGE_HEADS, MERGE_DIMS};
    const int64_t lse_shape[] = {MERGE_HEADS, MERGE_ROWS};
    struct attn_io_output_quant quant = {
        .ext = {.id = ATTN_EXT_IO_OUTPUT_QUANT, .struct_size = sizeof quant}, .scale = &scale};
    fill_merge(&data);
    before = data;
    for (int32_t i = 0; i < 3; i++) {
        tensor_set(&out[i], data.out[i], ATTN_DTYPE_F32, 3, shape, NULL);
        tensor_set(&lse[i], data.lse[i], ATTN_DTYPE_F32, 2, lse_shape, NULL);
    }
    tensor_set(&small, data.quantized, ATTN_DTYPE_FP8_E4M3, 3, shape, NULL);
    int32_t target = in_place ? 1 : 2;
    struct attn_merge_states_args args = {.struct_size = sizeof args,
                                          .next = fp8 ? &quant.ext : NULL,
                                          .instance = threaded.instance,
                                          .prefix_out = &out[0].tensor,
                                          .prefix_lse = &lse[0].tensor,
                                          .suffix_out = &out[1].tensor,
                                          .suffix_lse = &lse[1].tensor,
                                          .out = fp8 ? &small.tensor : &out[target].tensor,
                                          .lse = fp8 ? NULL : &lse[target].tensor,
                                          .first_row = first_row,
                                          .num_rows = rows,
                                          .num_rows_with_prefix = with_prefix};
    assert_int_equal(threaded.kernels->merge_states(&args, NULL), ATTN_OK);
    for (int32_t t = 0; t < MERGE_ROWS; t++) {
        for (int32_t h = 0; h < MERGE_HEADS; h++) {
            double want[MERGE_DIMS], want_lse;
            int32_t inside = t >= first_row && t < first_row + rows;
            merge_formula(&before, t, h, t - first_row < with_prefix, want, &want_lse);
            for (int32_t d = 0; d < MERGE_DIMS && fp8; d++) {
                double got = format_decode(ATTN_DTYPE_FP8_E4M3, data.quantized[t][h][d]);
                double expected = inside ? format_round(ATTN_DTYPE_FP8_E4M3,
                                                        (isnan(want[d]) ? 0 : want[d]) / scale)
                                         : format_decode(ATTN_DTYPE_FP8_E4M3, 0x55);
                expect_near(got, inside && isnan(want[d]) ? NAN : expected, 0, "merged fp8", d);
            }
            if (!fp8 && !inside) {
                assert_memory_equal(data.out[target][t][h], before.out[target][t][h],
                                    sizeof before.out[target][t][h]);
            } else if (!fp8) {
                for (int32_t d = 0; d < MERGE_DIMS; d++) {
                    expect_near(data.out[target][t][h][d], want[d], F32_BOUND, "merged", t);
                }
                expect_near(data.lse[target][h][t], want_lse, F32_BOUND, "merged lse", t);
            }
        }
    }
}

static void test_merge(void **state)
{
    (void)state;
    for (int32_t in_place = 0; in_place < 2; in_place++) {
        check_merge(0, in_place, 0, MERGE_ROWS, MERGE_ROWS);
        check_merge(0, in_place, 7, 40, 20);
        check_merge(0, in_place, 3, 5, 0);
    }
    check_merge(1, 0, 0, MERGE_ROWS, MERGE_ROWS);
    check_merge(1, 0, 7, 40, 20);
}

/* ---- rope_write_kv */

#define ROPE_ROWS 11
#define ROPE_Q 4
#define ROPE_K 2

static void rope_formula(double *row, int32_t head_size, int32_t form, int32_t rotary,
                         const float *angles, const double *weight, double eps)
{
    double turned[256], sum = 0;
    for (int32_t d = 0; d < head_size; d++) {
        sum += row[d] * row[d];
    }
    for (int32_t d = 0; d < head_size && weight; d++) {
        row[d] *= weight[d] / sqrt(sum / head_size + eps);
    }
    memcpy(turned, row, sizeof(double) * (size_t)head_size);
    for (int32_t d = 0; d < rotary; d++) {
        int32_t low = form == ATTN_ROPE_NEOX ? d < rotary / 2 : d % 2 == 0;
        int32_t pair = form == ATTN_ROPE_NEOX ? d % (rotary / 2) : d / 2;
        int32_t other = form == ATTN_ROPE_NEOX ? (d + rotary / 2) % rotary : (d ^ 1);
        double c = angles[pair], s = angles[rotary / 2 + pair];
        turned[d] = row[d] * c + (low ? -row[other] : row[other]) * s;
    }
    memcpy(row, turned, sizeof(double) * (size_t)head_size);
}

static void check_rope(int32_t form, int32_t head_size, int32_t rotary, int32_t norm)
{
    static float q[ROPE_ROWS * ROPE_Q * 256], k[ROPE_ROWS * ROPE_K * 256];
    static float v[ROPE_ROWS * ROPE_K * 8];
    static float q_given[ROPE_ROWS * ROPE_Q * 256], k_given[ROPE_ROWS * ROPE_K * 256];
    static float cache_k[ROPE_ROWS * ROPE_K * 256], cache_v[ROPE_ROWS * ROPE_K * 8];
    static float table[100 * 256], q_weight[256], k_weight[256];
    int64_t slots[ROPE_ROWS], positions[ROPE_ROWS];
    int32_t order[ROPE_ROWS], width = rotary ? rotary : head_size;
    struct test_tensor tq, tk, tv, tt, tqw, tkw;
    for (int32_t i = 0; i < 100 * width; i++) {
        int32_t position = i / width;
        double angle = position * pow(0.3, i % (width / 2));
        table[i] = (float)(i % width < width / 2 ? cos(angle) : sin(angle));
    }
    for (int32_t i = 0; i < head_size; i++) {
        q_weight[i] = (float)random_normal();
        k_weight[i] = (float)random_normal();
    }
    for (int32_t i = 0; i < ROPE_ROWS * ROPE_Q * head_size; i++) {
        q[i] = q_given[i] = (float)random_normal();
    }
    for (int32_t i = 0; i < ROPE_ROWS * ROPE_K * head_size; i++) {
        k[i] = k_given[i] = (float)random_normal();
    }
    for (int32_t i = 0; i < ROPE_ROWS * ROPE_K * 8; i++) {
        v[i] = (float)random_normal();
    }
    random_permutation(order, ROPE_ROWS);
    for (int32_t t = 0; t < ROPE_ROWS; t++) {
        slots[t] = t == 4 ? -1 : order[t];
        positions[t] = random_below(100);
    }
    struct attn_layer_desc layer = {.struct_size = sizeof layer,
                                    .dtype = ATTN_DTYPE_F32,
                                    .kv_dtype = ATTN_KV_F32,
                                    .num_q_heads = ROPE_Q,
                                    .num_kv_heads = ROPE_K,
                                    .head_size = head_size,
                                    .head_size_v = 8,
                                    .scale = 1,
                                    .rope = form,
                                    .qk_norm = norm};
    struct attn_layer_params params = {.struct_size = sizeof params};
    struct attn_kv_view kv = {.struct_size = sizeof kv,
                              .data = cache_k,
                              .num_blocks = 1,
                              .block_size = ROPE_ROWS,
                              .num_heads = ROPE_K,
                              .head_size = head_size,
                              .stride_block = 0,
                              .stride_slot = ROPE_K * head_size * 4,
                              .stride_head = head_size * 4};
    struct attn_kv_view vv = kv;
    vv.data = cache_v;
    vv.head_size = 8;
    vv.stride_slot = ROPE_K * 8 * 4;
    vv.stride_head = 8 * 4;
    struct attn_io_rope rope = {
        .ext = {.id = ATTN_EXT_IO_ROPE, .struct_size = sizeof rope},
        .form = form,
        .rotary_dim = rotary,
        .positions = positions,
        .cos_sin = tensor_set(&tt, table, ATTN_DTYPE_F32, 2, (int64_t[]){100, width}, NULL),
        .norm_eps = 1e-5f};
    if (norm) {
        rope.q_norm_weight =
            tensor_set(&tqw, q_weight, ATTN_DTYPE_F32, 1, (int64_t[]){head_size}, NULL);
        rope.k_norm_weight =
            tensor_set(&tkw, k_weight, ATTN_DTYPE_F32, 1, (int64_t[]){head_size}, NULL);
    }
    struct attn_write_kv_args args = {
        .struct_size = sizeof args,
        .next = &rope.ext,
        .instance = serial.instance,
        .layer = &layer,
        .params = &params,
        .k_cache = &kv,
        .v_cache = &vv,
        .slot_mapping = slots,
        .num_slots = ROPE_ROWS,
        .q = tensor_set(&tq, q, ATTN_DTYPE_F32, 3, (int64_t[]){ROPE_ROWS, ROPE_Q, head_size}, NULL),
        .k = tensor_set(&tk, k, ATTN_DTYPE_F32, 3, (int64_t[]){ROPE_ROWS, ROPE_K, head_size}, NULL),
        .v = tensor_set(&tv, v, ATTN_DTYPE_F32, 3, (int64_t[]){ROPE_ROWS, ROPE_K, 8}, NULL)};
    assert_int_equal(serial.kernels->rope_write_kv(&args, NULL), ATTN_OK);
    for (int32_t i = 0; i < ROPE_ROWS * (ROPE_Q + ROPE_K); i++) {
        int32_t is_k = i >= ROPE_ROWS * ROPE_Q, at = is_k ? i - ROPE_ROWS * ROPE_Q : i;
        int32_t heads = is_k ? ROPE_K : ROPE_Q, t = at / heads, h = at % heads;
        const float *given = (is_k ? k_given : q_given) + at * head_size;
        double row[256], weight[256];
        for (int32_t d = 0; d < head_size; d++) {
            row[d] = given[d];
            weight[d] = is_k ? k_weight[d] : q_weight[d];
        }
        rope_formula(row, head_size, form, width, table + positions[t] * width,
                     norm ? weight : NULL, rope.norm_eps);
        for (int32_t d = 0; d < head_size && (!is_k || slots[t] >= 0); d++) {
            float got =
                is_k ? cache_k[(slots[t] * ROPE_K + h) * head_size + d] : q[at * head_size + d];
            expect_near(got, row[d], 2e-6, is_k ? "rotated k" : "rotated q", i * head_size + d);
        }
    }
}

static void test_rope(void **state)
{
    (void)state;
    for (int32_t form = ATTN_ROPE_NEOX; form <= ATTN_ROPE_GPTJ; form++) {
        for (int32_t norm = 0; norm < 2; norm++) {
            check_rope(form, 64, 0, norm);
            check_rope(form, 64, 64, norm);
            check_rope(form, 80, 32, norm);
            check_rope(form, 256, 64, norm);
        }
    }
}

/* ---- gather_kv */

static void test_gather(void **state)
{
    enum { BLOCKS = 9, SLOTS = 4, HEADS = 2, DIMS = 24 };
    static const int32_t table[2][4] = {{7, 2, 0x7ffffff0, 0x7ffffff0}, {5, 0, 8, 3}};
    static const int32_t rows[] = {1, 0}, first[] = {3, 1}, start[] = {0, 10, 15};
    static const int32_t formats[] = {ATTN_DTYPE_F16, ATTN_DTYPE_BF16, ATTN_DTYPE_F32,
                                      ATTN_DTYPE_FP8_E4M3, ATTN_DTYPE_FP8_E5M2};
    const float scales[HEADS] = {0.5f, 0.25f};
    (void)state;
    for (int32_t f = 0; f < COUNT(formats); f++) {
        static uint8_t cache[BLOCKS * SLOTS * HEADS * DIMS * 4];
        static float out[15][HEADS][DIMS];
        struct test_tensor to;
        int32_t bytes = format_bytes(formats[f]);
        for (int32_t i = 0; i < BLOCKS * SLOTS * HEADS * DIMS; i++) {
            format_store(cache, i, formats[f], random_normal());
        }
        struct attn_layer_desc layer = {.struct_size = sizeof layer,
                                        .kv_dtype = ATTN_KV_F16 + f,
                                        .k_scale_form = f < 3 ? 0 : ATTN_SCALE_PER_HEAD};
        struct attn_layer_params params = {.struct_size = sizeof params, .k_scale = scales};
        struct attn_kv_view view = {.struct_size = sizeof view,
                                    .data = cache,
                                    .num_blocks = BLOCKS,
                                    .block_size = SLOTS,
                                    .num_heads = HEADS,
                                    .head_size = DIMS,
                                    .stride_head = SLOTS * DIMS * bytes,
                                    .stride_block = SLOTS * HEADS * DIMS * bytes,
                                    .stride_slot = DIMS * bytes};
        struct attn_batch batch = {.struct_size = sizeof batch,
                                   .num_reqs = 2,
                                   .block_table = &table[0][0],
                                   .block_table_stride = 4,
                                   .block_table_row = rows};
        struct attn_gather_kv_args args = {
            .struct_size = sizeof args,
            .instance = threaded.instance,
            .layer = &layer,
            .params = &params,
            .cache = &view,
            .batch = &batch,
            .first_key = first,
            .out_start_loc = start,
            .out = tensor_set(&to, out, ATTN_DTYPE_F32, 3, (int64_t[]){15, HEADS, DIMS}, NULL)};
        assert_int_equal(threaded.kernels->gather_kv(&args, NULL), ATTN_OK);
        for (int32_t i = 0; i < 15 * HEADS * DIMS; i++) {
            int32_t row = i / (HEADS * DIMS), h = i / DIMS % HEADS, r = row >= 10;
            int32_t key = first[r] + row - start[r];
            int32_t at = ((table[rows[r]][key / SLOTS] * HEADS + h) * SLOTS + key % SLOTS) * DIMS;
            double want = format_load(cache, at + i % DIMS, formats[f]) * (f < 3 ? 1 : scales[h]);
            expect_near(out[row][h][i % DIMS], want, 1e-7, "gathered", i);
        }
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merge),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_gather),
    };
    return harness_main(argc, argv, SEED, tests, sizeof tests / sizeof *tests);
}
