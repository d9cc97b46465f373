/* SPDX-License-Identifier: Apache-2.0 */
/* On every variant of this machine: more than a tile of a prompt's first keys give the same result
 * as static sinks and as its own keys; several threads give one thread's result; rows of zeros, of
 * numbers beyond float16 and of NaN become cpu_ref's codes; a query that is no finite number gives
 * NaN. */
#include <math.h>
#include <stdio.h>

#include "../step/opened.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/tensor.h"

enum {
    TOKENS = 300,
    MOST_TOKENS = 1000,
    BLOCK = 16,
    BLOCKS = (MOST_TOKENS + BLOCK - 1) / BLOCK,
    SIZE = 64,
    SINKS = 150,
    MOST_HEADS = 16
};

static const char *const variants[] = {"scalar", "avx2", "avx512",  "avx512bf16",
                                       "amx",    "neon", "neonbf16"};

struct setting {
    int32_t dtype, heads, kv_heads, window, sinks, threads; /* 0 threads: 1 */
    int32_t kv_dtype;
};

struct prompt {
    OPENED;
    void *cache;
    struct shaped sink_k, sink_v, rows[4];
    struct attn_batch batch;
    struct attn_step_io io;
    int32_t skipped; /* rows before the prompt's first token */
    struct attn_kv_quant_params int4;
    float signs[SIZE];
    uint32_t q[MOST_TOKENS * MOST_HEADS * SIZE], k[MOST_TOKENS * MOST_HEADS * SIZE],
        v[MOST_TOKENS * MOST_HEADS * SIZE], out[MOST_TOKENS * MOST_HEADS * SIZE];
};

/* Opens cpu_simd's variant; NULL: cpu_ref. */
static int open_prompt(struct prompt *p, const struct setting *s, const char *variant)
{
    struct attn_runtime_options options = client_options(PLUGINS);
    options.num_threads = s->threads > 0 ? s->threads : 1;
    struct attn_layer_desc layer = layer_decoder("layer", s->heads, s->kv_heads, SIZE, BLOCK);
    layer.dtype = s->dtype;
    layer.kv_dtype = s->kv_dtype;
    layer.has_window = s->window > 0;
    layer.window_left = s->window - 1;
    layer.sink_len = s->sinks;
    layer.batch_invariant = s->threads > 0 ? 0 : 2;
    const struct attn_layer_desc *layers[] = {&layer};
    const int64_t sinks[] = {s->sinks, s->kv_heads, SIZE};
    struct attn_layer_params params = {.struct_size = sizeof params};
    if (s->sinks > 0) { /* the first rows */
        params.sink_k = shaped_set(&p->sink_k, p->k, s->dtype, 3, sinks, NULL);
        params.sink_v = shaped_set(&p->sink_v, p->v, s->dtype, 3, sinks, NULL);
    }
    for (int32_t d = 0; d < SIZE; d++) {
        p->signs[d] = d * d % 7 < 2 ? -1 : 1;
    }
    p->int4 = EXTENSION(attn_kv_quant_params, ATTN_EXT_KV_QUANT_PARAMS, NULL,
                        .hadamard_signs_k = p->signs, .hadamard_signs_v = p->signs);
    params.next = s->kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD ? &p->int4.ext : NULL;
    char order[64];
    snprintf(order, sizeof order, variant != NULL ? "cpu_simd@%s" : "cpu_ref", variant);
    CHECK(p, client_open(CORE_FILE, &options, &p->api, &p->runtime, &p->error));
    if (client_model(p->api, p->runtime, CLIENT_ORDER(order), layers, 1, &p->model, &p->error) !=
        ATTN_OK) {
        return 0; /* not of this machine */
    }
    p->layer = p->api->model_layer(p->model, 0);
    CHECK(p, client_cache(p->api, p->layer, BLOCKS, NULL, &p->cache, &p->error));
    CHECK(p, p->api->layer_bind_params(p->layer, &params, &p->error));
    OPEN_PLAN(p, 1, MOST_TOKENS, MOST_TOKENS);
    return 1;
}

/* Tokens first .. first+count-1 after those of earlier steps. */
static void run(struct prompt *p, const struct setting *s, int32_t first, int32_t count)
{
    int32_t starts[] = {0, count}, length = first + count, table[BLOCKS];
    int64_t slots[MOST_TOKENS];
    for (int32_t b = 0; b < BLOCKS; b++) {
        table[b] = BLOCKS - 1 - b;
    }
    for (int32_t i = 0; i < count; i++) {
        slots[i] = (int64_t)table[(first + i) / BLOCK] * BLOCK + (first + i) % BLOCK;
    }
    p->batch = client_batch(1, starts, &length);
    client_blocks(&p->batch, table, BLOCKS, slots);
    p->batch.block_table_rows = 1;
    void *rows[] = {p->q, p->k, p->v, p->out};
    for (int32_t i = 0; i < 4; i++) {
        int32_t heads = i == 1 || i == 2 ? s->kv_heads : s->heads;
        const int64_t shape[] = {count, heads, SIZE};
        const int64_t row = p->skipped + first;
        shaped_set(&p->rows[i],
                   (char *)rows[i] + row * heads * SIZE * (int64_t)number_bytes(s->dtype), s->dtype,
                   3, shape, NULL);
    }
    p->io = SIZED(attn_step_io, .q = &p->rows[0].tensor, .k = &p->rows[1].tensor,
                  .v = &p->rows[2].tensor, .out = &p->rows[3].tensor);
    PLAN(p);
    RUN(p);
}

/* An empty prompt's rows of the setting; NULL: the variant is not of this machine. */
static struct prompt *begin(const struct setting *s, const char *variant)
{
    struct prompt *p = calloc(1, sizeof *p);
    uint64_t random = 17;
    p->error = (struct attn_error)ATTN_ERROR_INIT;
    number_fill_normal(p->q, 0, (int64_t)MOST_TOKENS * s->heads * SIZE, s->dtype, 2, &random);
    number_fill_normal(p->k, 0, (int64_t)MOST_TOKENS * s->kv_heads * SIZE, s->dtype, 2, &random);
    number_fill_normal(p->v, 0, (int64_t)MOST_TOKENS * s->kv_heads * SIZE, s->dtype, 2, &random);
    if (open_prompt(p, s, variant)) {
        return p;
    }
    p->api->runtime_destroy(p->runtime);
    free(p);
    return NULL;
}

static void end(struct prompt *p)
{
    free(p->cache);
    CLOSE(p);
}

/* Outputs of rows first .. last-1. */
static void compare(const struct prompt *some, const struct prompt *other, const struct setting *s,
                    int32_t first, int32_t last, double bound, const char *variant)
{
    const int64_t row = (int64_t)s->heads * SIZE;
    for (int64_t i = first * row; i < last * row; i++) {
        double found = number_load(some->out, i, s->dtype);
        double wanted = number_load(other->out, i, s->dtype);
        if (!(found - wanted <= bound && wanted - found <= bound)) {
            fail_msg("%s, dtype %d: element %d of row %d is %g, not %g", variant, s->dtype,
                     (int)(i % row), (int)(i / row), found, wanted);
        }
    }
}

/* The prompt's first SINKS rows become static sinks of the rest. */
static void verify_sinks(const struct setting *s, double bound, const char *variant)
{
    struct setting with_sinks = *s;
    with_sinks.sinks = SINKS;
    struct prompt *whole = begin(s, variant), *rows_after = begin(&with_sinks, variant);
    if (whole == NULL || rows_after == NULL) {
        assert_true(whole == rows_after);
        return;
    }
    rows_after->skipped = SINKS;
    run(whole, s, 0, TOKENS);
    run(rows_after, &with_sinks, 0, TOKENS - SINKS);
    compare(rows_after, whole, s, SINKS, TOKENS, bound, variant);
    end(whole);
    end(rows_after);
}

TEST(sinks_are_keys)
{
    static const struct setting f32 = {ATTN_DTYPE_F32, 6, 2};
    static const struct setting bf16 = {ATTN_DTYPE_BF16, 8, 2};
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        verify_sinks(&f32, 2e-5, variants[i]);
        verify_sinks(&bf16, 0.05, variants[i]); /* values of 2, weights and outputs of 8 bits */
    }
}

/* The last `count` rows of a prompt. */
static void verify_threads(const struct setting *s, int32_t count, double bound,
                           const char *variant)
{
    struct setting shared = *s;
    shared.threads = 7;
    struct prompt *alone = begin(s, variant), *several = begin(&shared, variant);
    if (alone == NULL || several == NULL) {
        assert_true(alone == several);
        return;
    }
    const int32_t first = MOST_TOKENS - count;
    run(alone, s, 0, first);
    run(alone, s, first, count);
    run(several, &shared, 0, first);
    run(several, &shared, first, count);
    compare(several, alone, s, 0, MOST_TOKENS, bound, variant);
    end(alone);
    end(several);
}

TEST(threads_share_keys)
{
    static const struct setting f32 = {ATTN_DTYPE_F32, 4, 1};
    static const struct setting wide = {ATTN_DTYPE_BF16, 8, 1};
    static const struct setting window = {ATTN_DTYPE_BF16, 6, 2, 700};
    for (size_t i = 1; i < sizeof variants / sizeof *variants; i++) { /* scalar is slow */
        verify_threads(&f32, 90, 2e-5, variants[i]);
        verify_threads(&wide, 21, 0.1, variants[i]);
        verify_threads(&wide, 130, 0.1, variants[i]);
        verify_threads(&window, 67, 0.1, variants[i]);
    }
}

/* A block of zeros, one whose step exceeds float16, one with a NaN or two infinities, one with two
 * of the largest magnitude, where the first one's sign counts, or a usual one. */
static void draw_odd_block(float *x, int32_t kind, bool finite)
{
    const float first[] = {0, 1e8f, finite ? x[3] : -INFINITY, 8, x[3]};
    for (int32_t i = 0; i < 32; i++) {
        x[i] = kind == 0 ? 0 : kind == 1 ? 1e8f * x[i] : x[i];
    }
    x[9] = first[kind];
    x[17] = kind == 3 ? -8 : kind == 2 && !finite ? (x[4] > 0 ? NAN : -INFINITY) : x[17];
}

static void verify_codes(int32_t kv_dtype, const char *variant)
{
    enum { COUNT = (BLOCKS - 1) * BLOCK };
    const struct setting s = {ATTN_DTYPE_F32, 1, 1, .kv_dtype = kv_dtype};
    const bool finite =
        kv_dtype == ATTN_KV_FP8_PER_TOKEN_HEAD || kv_dtype == ATTN_KV_INT8_PER_TOKEN_HEAD;
    struct prompt *right = begin(&s, NULL), *found = begin(&s, variant);
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    if (found != NULL) {
        for (int32_t b = 0; b < 2 * COUNT * SIZE / 32; b++) {
            float *rows = (float *)(b % 2 ? right->k : right->v);
            draw_odd_block(rows + b / 2 * 32, b / 2 * 7 / 4 % 5, finite);
        }
        memcpy(found->k, right->k, sizeof found->k);
        memcpy(found->v, right->v, sizeof found->v);
        run(right, &s, 0, COUNT);
        run(found, &s, 0, COUNT);
        CHECK(found, found->api->layer_cache_spec(found->layer, 0, &spec, &found->error));
        assert_memory_equal((char *)found->cache + spec.page_bytes,
                            (char *)right->cache + spec.page_bytes,
                            (size_t)spec.page_bytes * (BLOCKS - 1));
        end(found);
    }
    end(right);
}

TEST(odd_rows_become_the_same_codes)
{
    static const int32_t dtypes[] = {ATTN_KV_Q8_0, ATTN_KV_Q4_0, ATTN_KV_FP8_PER_TOKEN_HEAD,
                                     ATTN_KV_INT8_PER_TOKEN_HEAD, ATTN_KV_INT4_PER_TOKEN_HEAD};
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
            verify_codes(dtypes[d], variants[i]);
        }
    }
}

/* The next token's first query has an element of these bits in bfloat16, no finite number: its
 * output is NaN, whatever the kernels make of queries over codes. */
static void verify_odd_query(int32_t kv_dtype, uint16_t bits, const char *variant)
{
    enum { HEADS = 4, FIRST = TOKENS * HEADS * SIZE };
    const struct setting s = {ATTN_DTYPE_BF16, HEADS, 1, .threads = 1, .kv_dtype = kv_dtype};
    struct prompt *p = begin(&s, variant);
    if (p == NULL) {
        return;
    }
    run(p, &s, 0, TOKENS);
    memcpy((char *)p->q + (FIRST + 5) * sizeof bits, &bits, sizeof bits);
    run(p, &s, TOKENS, 1);
    for (int32_t d = 0; d < HEADS * SIZE; d++) {
        assert_int_equal(isnan(number_load(p->out, FIRST + d, s.dtype)) != 0, d < SIZE);
    }
    end(p);
}

TEST(odd_queries_show)
{
    static const int32_t dtypes[] = {ATTN_KV_AUTO, ATTN_KV_INT8_PER_TOKEN_HEAD,
                                     ATTN_KV_INT4_PER_TOKEN_HEAD};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        verify_odd_query(dtypes[d], 0x7f80, NULL);
        for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
            verify_odd_query(dtypes[d], 0x7f80, variants[i]);
            verify_odd_query(dtypes[d], 0x7fc0, variants[i]);
        }
    }
}
