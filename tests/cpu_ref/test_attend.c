/* SPDX-License-Identifier: Apache-2.0 */
/* attend and write_kv of cpu_ref against the oracle. Usage: test_attend FILE.so */
#include <stdio.h>

#include "case.h"
#include "support/test.h"

#define SEED 20261120
#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))

static const struct attend_case small = {
    .dtype = ATTN_DTYPE_F32,
    .num_q_heads = 4,
    .num_kv_heads = 2,
    .head_size = 16,
    .block_size = 4,
    .num_reqs = 4,
    .query_lens = {1, 5, 0, 9},
    .seq_lens = {7, 12, 3, 33},
};

static void run(const struct attend_case *c)
{
    static uint64_t n;
    n++;
    case_check(c, n % 2 ? &threaded : &serial, SEED + n);
}

static void test_shapes(void **state)
{
    static const struct attend_case shapes[] = {
        {.name = "32,40/1,1", .num_reqs = 2, .query_lens = {1, 1}, .seq_lens = {32, 40}},
        {.name = "32,40/8,8", .num_reqs = 2, .query_lens = {8, 8}, .seq_lens = {32, 40}},
        {.name = "32..56/1,1,5,5",
         .num_reqs = 4,
         .query_lens = {1, 1, 5, 5},
         .seq_lens = {32, 40, 48, 56}},
        {.name = "128..1024 x2/1",
         .num_reqs = 8,
         .query_lens = {1, 1, 1, 1, 1, 1, 1, 1},
         .seq_lens = {128, 256, 512, 1024, 128, 256, 512, 1024}},
        {.name = "256..2048/16",
         .num_reqs = 4,
         .query_lens = {16, 16, 16, 16},
         .seq_lens = {256, 512, 1024, 2048}},
        {.name = "512,1024,2048 x2/1,1,1,7,7,7",
         .num_reqs = 6,
         .query_lens = {1, 1, 1, 7, 7, 7},
         .seq_lens = {512, 1024, 2048, 512, 1024, 2048}},
        {.name = "4096x8/32",
         .num_reqs = 8,
         .query_lens = {32, 32, 32, 32, 32, 32, 32, 32},
         .seq_lens = {4096, 4096, 4096, 4096, 4096, 4096, 4096, 4096}},
        {.name = "1024/64", .num_reqs = 1, .query_lens = {64}, .seq_lens = {1024}},
        {.name = "page edges",
         .num_reqs = 9,
         .query_lens = {1, 1, 1, 4, 4, 4, 15, 16, 17},
         .seq_lens = {15, 16, 17, 31, 32, 33, 15, 16, 17}},
        {.name = "empty requests",
         .num_reqs = 6,
         .query_lens = {0, 3, 0, 0, 2, 0},
         .seq_lens = {5, 3, 0, 40, 17, 1}},
        {.name = "queries without keys",
         .num_reqs = 3,
         .query_lens = {2, 1, 3},
         .seq_lens = {0, 9, 0}},
        {.name = "no static sink without keys",
         .num_reqs = 3,
         .query_lens = {2, 1, 3},
         .seq_lens = {0, 9, 0},
         .sink_len = 3},
    };
    struct attend_case many = {.name = "2048x32/1", .num_reqs = 32};
    (void)state;
    for (int32_t r = 0; r < many.num_reqs; r++) {
        many.query_lens[r] = 1;
        many.seq_lens[r] = 2048;
    }
    for (int32_t i = 0; i <= COUNT(shapes); i++) {
        struct attend_case c = i < COUNT(shapes) ? shapes[i] : many;
        c.dtype = ATTN_DTYPE_F16 + i % 3;
        c.num_q_heads = 2;
        c.num_kv_heads = 1 + i % 2;
        c.head_size = 24;
        c.block_size = 16;
        run(&c);
    }
}

static void test_encoders(void **state)
{
    static const struct attend_case encoders[] = {
        {.name = "encoder 32..256",
         .num_reqs = 4,
         .query_lens = {32, 64, 128, 256},
         .seq_lens = {32, 64, 128, 256}},
        {.name = "encoder window",
         .num_reqs = 2,
         .query_lens = {40, 7},
         .seq_lens = {40, 7},
         .has_window = 1,
         .left = 5,
         .right = 5},
        {.name = "cross", .num_reqs = 3, .query_lens = {1, 6, 0}, .seq_lens = {31, 6, 9}},
        {.name = "cross, keys fewer than queries",
         .num_reqs = 2,
         .query_lens = {9, 4},
         .seq_lens = {3, 17}},
    };
    (void)state;
    for (int32_t i = 0; i < COUNT(encoders); i++) {
        for (int32_t fused = 0; fused < 2; fused++) {
            struct attend_case c = encoders[i];
            c.dtype = ATTN_DTYPE_F16 + (i + fused) % 3;
            c.num_q_heads = c.num_kv_heads = 3;
            c.head_size = 32;
            c.not_causal = 1;
            c.fused = fused;
            c.first_row = 2 * fused;
            c.padding = 3 * fused;
            run(&c);
        }
    }
}

static void test_heads(void **state)
{
    static const int32_t heads[][2] = {{4, 4}, {8, 2}, {9, 3}, {32, 8}, {5, 1}, {20, 1}};
    static const int32_t sizes[][2] = {{24, 24},   {32, 32},   {40, 40},   {64, 64},   {72, 72},
                                       {80, 80},   {96, 96},   {112, 112}, {120, 120}, {128, 128},
                                       {160, 160}, {192, 192}, {224, 224}, {256, 256}, {512, 512},
                                       {192, 128}, {64, 128},  {8, 512},   {512, 8}};
    (void)state;
    for (int32_t i = 0; i < COUNT(heads) + COUNT(sizes); i++) {
        struct attend_case c = small;
        int32_t j = i - COUNT(heads);
        c.name = j < 0 ? "heads" : "head sizes";
        c.num_q_heads = heads[j < 0 ? i : 1][0];
        c.num_kv_heads = heads[j < 0 ? i : 1][1];
        c.head_size = sizes[j < 0 ? 0 : j][0];
        c.head_size_v = sizes[j < 0 ? 0 : j][1];
        c.dtype = ATTN_DTYPE_F16 + i % 3;
        run(&c);
    }
}

static void test_layouts(void **state)
{
    static const int32_t blocks[] = {1, 2, 8, 16, 24, 32, 64, 128};
    (void)state;
    for (int32_t layout = 0; layout < CASE_LAYOUT_COUNT; layout++) {
        for (int32_t i = 0; i < 2 * COUNT(blocks); i++) {
            struct attend_case c = small;
            c.name = layout == CASE_LAYOUT_LAYERS ? "layers inside" : "layout";
            c.layout = layout;
            c.block_size = blocks[i % COUNT(blocks)];
            c.head_size_v = i % 2 ? 24 : 16;
            c.dtype = ATTN_DTYPE_F16 + i % 3;
            c.fused = i % 2;
            c.ordered_blocks = i % 4;
            c.table_rows = i / 4 % 2;
            c.lse_by_token = i % 3 == 1;
            c.no_lse = i % 5 == 4;
            c.first_row = i % 4;
            c.padding = i % 3;
            run(&c);
        }
    }
}

static void test_shared_blocks(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 6; i++) {
        struct attend_case c = small;
        c.name = "shared blocks";
        c.shared = 8;
        c.seq_lens[0] = c.seq_lens[2] = 20;
        c.ordered_blocks = i % 4;
        c.table_rows = i / 4;
        run(&c);
    }
}

/* Every activation by every cache dtype, in each form of scale. */
static void test_dtypes(void **state)
{
    (void)state;
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        for (int32_t kv = ATTN_KV_F16; kv <= ATTN_KV_FP8_E5M2; kv++) {
            for (int32_t form = 0; form < 9; form++) {
                struct attend_case c = small;
                int32_t fp8 = kv >= ATTN_KV_FP8_E4M3;
                c.name = "dtypes";
                c.dtype = dtype;
                c.kv_dtype = kv;
                c.k_scale_form = fp8 ? form % 3 : 0;
                c.v_scale_form = fp8 ? form / 3 : 0;
                c.host_scales = form == 4;
                c.small_scales = form == 8;
                c.layout = form % 6;
                if (!fp8 && form > 0) {
                    break;
                }
                run(&c);
            }
        }
    }
}

static void test_quantized_query(void **state)
{
    static const int32_t q_dtypes[] = {ATTN_DTYPE_FP8_E4M3, ATTN_DTYPE_FP8_E5M2, ATTN_DTYPE_INT8};
    (void)state;
    for (int32_t i = 0; i < 24; i++) {
        struct attend_case c = small;
        c.name = "quantized query and probabilities";
        c.kv_dtype = i % 2 ? ATTN_KV_FP8_E5M2 : ATTN_KV_FP8_E4M3;
        c.k_scale_form = c.v_scale_form = ATTN_SCALE_PER_TENSOR;
        c.q_dtype = q_dtypes[i % 3];
        c.q_scale_form = i / 6;
        c.q_scale_form = c.q_scale_form == 3 ? 0 : c.q_scale_form;
        c.p_scale_form = i / 3 % 2;
        c.host_scales = i == 7;
        c.dtype = ATTN_DTYPE_F16 + i % 3;
        run(&c);
    }
}

#define NUM_TERMS 15

static void add_term(struct attend_case *c, int32_t term)
{
    switch (term) {
    case 0:
        c->not_causal = 1;
        break;
    case 1:
        c->causal_per_request = 1;
        break;
    case 2:
        c->batch_causal = ATTN_CAUSAL_NO;
        break;
    case 3:
        c->has_window = 1;
        c->left = 4;
        c->right = 0;
        break;
    case 4:
        c->has_window = 1;
        c->left = 6;
        c->right = 6;
        break;
    case 5:
        c->chunk = 5;
        break;
    case 6:
        c->chunk = 3;
        c->lookback = 2;
        break;
    case 7:
        c->soft_cap = 3;
        break;
    case 8:
        c->alibi = ATTN_ALIBI_LINEAR;
        break;
    case 9:
        c->alibi = ATTN_ALIBI_SQRT;
        break;
    case 10:
        c->has_sinks = 1;
        break;
    case 11:
        c->sink_len = 5;
        break;
    case 12:
        c->num_spans = 3;
        c->span_window = c->has_window ? 3 : 0;
        break;
    case 13:
        c->tree = ATTN_TREE_BITS;
        break;
    default:
        c->tree = ATTN_TREE_BIAS;
    }
}

/* Every term and pair of terms, and random sets of them. */
static void test_terms(void **state)
{
    (void)state;
    for (int32_t i = 0; i < NUM_TERMS; i++) {
        for (int32_t j = i; j < NUM_TERMS; j++) {
            char name[64];
            struct attend_case c = small;
            snprintf(name, sizeof name, "terms %d and %d", i, j);
            c.name = name;
            c.one_tree = (i + j) % 2;
            add_term(&c, i);
            add_term(&c, j);
            run(&c);
            c.block_size = 0;
            run(&c);
        }
    }
    for (int32_t i = 0; i < 250; i++) {
        char name[96];
        struct attend_case c = small;
        random_seed(SEED + 1000 + (uint64_t)i);
        int32_t at = snprintf(name, sizeof name, "set %d of terms", i);
        c.block_size = 1 + random_below(9);
        for (int32_t n = 2 + random_below(5); n > 0; n--) {
            int32_t term = random_below(NUM_TERMS);
            add_term(&c, term);
            at += snprintf(name + at, sizeof name - (size_t)at, " %d", term);
        }
        c.name = name;
        c.dtype = ATTN_DTYPE_F16 + random_below(3);
        c.one_tree = random_below(2);
        c.span_window = random_below(2) * 4;
        c.layout = random_below(CASE_LAYOUT_COUNT);
        c.fused = random_below(2);
        c.table_rows = random_below(2);
        c.first_row = random_below(3);
        run(&c);
    }
}

/* A tree over more tokens than one word of bits holds. */
static void test_wide_tree(void **state)
{
    (void)state;
    for (int32_t tree = ATTN_TREE_BITS; tree <= ATTN_TREE_BIAS; tree++) {
        struct attend_case c = small;
        c.name = "wide tree";
        c.query_lens[1] = 70;
        c.seq_lens[1] = 75;
        c.tree = tree;
        run(&c);
    }
}

static void test_fast_prefill(void **state)
{
    struct attend_case c = small;
    (void)state;
    c.name = "fast prefill";
    c.fast_prefill = 1;
    c.query_lens[2] = 2;
    run(&c);
    run(&c);
    c.padding = 2;
    run(&c);
}

static void test_visible_nan(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 12; i++) {
        struct attend_case c = small;
        c.name = "visible NaN";
        c.nan_key = 1 + i % 2;
        c.kv_dtype = i / 2 < 5 ? 1 + i / 2 : 0;
        c.block_size = i < 10 ? 4 : 0;
        c.query_lens[2] = 1;
        run(&c);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),          cmocka_unit_test(test_encoders),
        cmocka_unit_test(test_heads),           cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_shared_blocks),   cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_quantized_query), cmocka_unit_test(test_terms),
        cmocka_unit_test(test_wide_tree),       cmocka_unit_test(test_fast_prefill),
        cmocka_unit_test(test_visible_nan),
    };
    return harness_main(argc, argv, SEED, tests, sizeof tests / sizeof *tests);
}
