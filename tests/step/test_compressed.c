/* SPDX-License-Identifier: Apache-2.0 */
/* Compressed rows next to a window under one softmax: rows that are written apart, and what is
 * refused. Results are attn-check's (compressed). */
#include <attn/draft/compressed.h>
#include <attn/draft/index_lists.h>
#include <math.h>
#include <stdlib.h>

#include "opened.h"
#include "support/layer.h"
#include "support/random.h"
#include "support/tensor.h"

enum { HEADS = 3, D = 32, BLOCK = 16, ROW_BLOCK = 4, REQS = 4, LENGTH = 100, TOKENS = 128 };
enum { WIDTH = LENGTH / BLOCK + 1, ROW_WIDTH = LENGTH / ROW_BLOCK, BLOCKS = REQS * WIDTH + 1 };
enum { ROW_BLOCKS = REQS * ROW_WIDTH + 1, RATIO = 4, WINDOW = 8 };

struct compressed {
    OPENED;
    void *own, *rows;
    struct attn_mla_desc mla;
    struct layer_compressed more;
    struct attn_layer_desc described;
    float sinks[HEADS], q[TOKENS][HEADS][D], k[TOKENS][D], pooled[TOKENS][D];
    float out[TOKENS][HEADS][D], lse[HEADS][TOKENS];
    int32_t length[REQS], row_length[REQS], starts[REQS + 1];
    int32_t table[REQS][WIDTH], row_table[REQS][ROW_WIDTH], table_row[REQS];
    int64_t slots[TOKENS], row_slots[TOKENS];
    struct shaped tensors[5];
    const struct attn_tensor *pools[1];
    struct attn_io_caches io_caches;
    struct attn_io_mla io_mla;
    struct attn_step_io io;
    struct attn_batch_table second;
    struct attn_batch batch;
    uint64_t random;
};

static void describe(struct compressed *c)
{
    c->described = SIZED(attn_layer_desc, .name = "two", .dtype = ATTN_DTYPE_F32,
                         .num_q_heads = HEADS, .has_sinks = 1, .block_size = BLOCK);
    layer_set_window(&c->described, WINDOW);
    layer_set_compressed(&c->described, &c->mla, &c->more, D, 0, RATIO, ROW_BLOCK);
    c->described.scale = 1.0f / 6;
}

static struct compressed *open_runtime(void)
{
    struct compressed *c = calloc(1, sizeof *c);
    c->random = 5;
    OPEN_RUNTIME(c, 1);
    describe(c);
    return c;
}

static void bind(struct compressed *c, const char *backend, const float *sinks)
{
    const struct attn_layer_params params = SIZED(attn_layer_params, .sinks = sinks);
    OPEN_LAYER(c, backend, &c->described);
    c->own = client_memory((size_t)BLOCKS * BLOCK * D * 4);
    c->rows = client_memory((size_t)ROW_BLOCKS * ROW_BLOCK * D * 4);
    const struct attn_kv_view own = client_view(c->own, BLOCKS, BLOCK, 1, D, 4);
    const struct attn_kv_view rows = client_view(c->rows, ROW_BLOCKS, ROW_BLOCK, 1, D, 4);
    CHECK(c, client_bind(c->api, c->layer, &own, &rows, &c->error));
    CHECK(c, c->api->layer_bind_params(c->layer, &params, &c->error));
    OPEN_PLAN(c, REQS, TOKENS, LENGTH);
}

static void close_all(struct compressed **c)
{
    free((*c)->own);
    free((*c)->rows);
    CLOSE(*c);
}

/* Scores have a standard deviation of about 4. */
static void draw(struct compressed *c, float *to, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        to[i] = (float)(2 * random_almost_normal(&c->random));
    }
}

/* Token `token` of the step, which is at `position` of request r. */
static void add_token(struct compressed *c, int32_t token, int32_t r, int32_t position)
{
    const int32_t row = (position + 1) / RATIO - 1;
    draw(c, c->k[token], D);
    draw(c, c->q[token][0], (int64_t)HEADS * D);
    c->slots[token] = c->table[r][position / BLOCK] * BLOCK + position % BLOCK;
    c->row_slots[token] = -1;
    memset(c->pooled[token], 0xff, sizeof c->pooled[token]); /* NaN */
    if ((position + 1) % RATIO == 0) {
        draw(c, c->pooled[token], D);
        c->row_slots[token] = c->row_table[r][row / ROW_BLOCK] * ROW_BLOCK + row % ROW_BLOCK;
    }
}

static const struct attn_tensor *tensor(struct compressed *c, int32_t which, void *data, int64_t a,
                                        int64_t b, int64_t d)
{
    return shaped_set(&c->tensors[which], data, ATTN_DTYPE_F32, d > 0 ? 3 : 2, (int64_t[]){a, b, d},
                      NULL);
}

/* The next `queries` tokens of each request. */
static void fill(struct compressed *c, const int32_t queries[REQS])
{
    int32_t tokens = 0;
    for (int32_t r = 0; r < REQS; r++) {
        c->starts[r] = tokens;
        c->table_row[r] = REQS - 1 - r;
        for (int32_t i = 0; i < WIDTH; i++) {
            c->table[r][i] = (i * REQS + r) % BLOCKS;
        }
        for (int32_t i = 0; i < ROW_WIDTH; i++) {
            c->row_table[r][i] = (ROW_WIDTH - 1 - i) * REQS + r;
        }
        for (int32_t i = 0; i < queries[r]; i++) {
            add_token(c, tokens++, r, c->length[r]++);
        }
        c->row_length[r] = c->length[r] / RATIO;
    }
    c->starts[REQS] = tokens;
}

static void set_step(struct compressed *c)
{
    static int32_t swapped[REQS][ROW_WIDTH];
    const int32_t tokens = c->starts[REQS];
    for (int32_t r = 0; r < REQS; r++) {
        memcpy(swapped[c->table_row[r]], c->row_table[r], sizeof swapped[0]);
    }
    c->second = (struct attn_batch_table){.block_table = swapped[0],
                                          .block_table_stride = ROW_WIDTH,
                                          .block_table_rows = REQS,
                                          .block_table_row = c->table_row,
                                          .slot_mapping = c->row_slots,
                                          .num_slots = tokens,
                                          .seq_lens = c->row_length};
    c->batch = client_batch(REQS, c->starts, c->length);
    client_blocks(&c->batch, c->table[0], WIDTH, c->slots);
    c->batch.block_table_rows = REQS;
    c->batch.tables = &c->second;
    c->batch.num_tables = 1;
    c->batch.table_stride = sizeof c->second;
    c->pools[0] = tensor(c, 0, c->pooled, tokens, 1, D);
    c->io_caches =
        EXTENSION(attn_io_caches, ATTN_EXT_IO_CACHES, NULL, .rows = c->pools, .num_rows = 1);
    c->io_mla = EXTENSION(attn_io_mla, ATTN_EXT_IO_MLA, &c->io_caches.ext,
                          .q_nope = tensor(c, 1, c->q, tokens, HEADS, D),
                          .kv_c = tensor(c, 2, c->k, tokens, D, 0));
    c->io =
        SIZED(attn_step_io, .next = &c->io_mla.ext, .out = tensor(c, 3, c->out, tokens, HEADS, D),
              .lse = tensor(c, 4, c->lse, HEADS, TOKENS, 0));
}

static const int32_t prompts[REQS] = {37, 3, 1, 64};

static struct compressed *open_layer(const char *backend)
{
    struct compressed *c = open_runtime();
    draw(c, c->sinks, HEADS);
    bind(c, backend, c->sinks);
    return c;
}

static void step(struct compressed *c, const int32_t queries[REQS])
{
    fill(c, queries);
    set_step(c);
    PLAN(c);
    RUN(c);
}

/* A layer that one phase's backend takes whole and the other's in parts, whose rows are those of
 * another order than the requests'. */
TEST(test_phases)
{
    static const int32_t steps[][REQS] = {{37, 3, 1, 64}, {1, 1, 1, 1}};
    if (!CPU_SIMD) {
        skip();
    }
    OWNED(close_all) struct compressed *right = open_layer("cpu_ref");
    OWNED(close_all) struct compressed *c = open_layer("prefill=cpu_simd;decode=cpu_ref");
    for (int32_t i = 0; i < 2; i++) {
        step(right, steps[i]);
        step(c, steps[i]);
        for (int32_t e = 0; e < c->starts[REQS] * HEADS * D; e++) {
            assert_float_equal(c->out[0][0][e], right->out[0][0][e], 1e-4);
        }
    }
}

/* Partial outputs and log-sum-exps of heads that an engine adds have room of their own. */
TEST(test_room_of_padded_heads)
{
    enum { ADDED = 29, MANY = 8192 }; /* the areas of so many tokens, not kernels' scratch, count */
    const float sinks[HEADS + ADDED] = {0};
    size_t bytes[2];
    for (int32_t i = 0; i < (CPU_SIMD ? 2 : 0); i++) {
        OWNED(close_all) struct compressed *c = open_runtime();
        struct attn_workspace workspace = SIZED(attn_workspace, );
        c->mla.padded_num_q_heads = i * (HEADS + ADDED);
        bind(c, "cpu_simd", sinks);
        c->api->plan_destroy(c->plan);
        free(c->workspace);
        OPEN_PLAN(c, REQS, MANY, LENGTH);
        CHECK(c, c->api->plan_workspace(c->plan, &workspace, &c->error));
        bytes[i] = workspace.bytes;
    }
    if (!CPU_SIMD) {
        skip();
    }
    assert_true(bytes[1] >= bytes[0] + (size_t)MANY * ADDED * (D + 2) * sizeof(float));
}

/* A run that brings no rows writes none; one that only writes does. */
TEST(test_rows_written_apart)
{
    OWNED(close_all) struct compressed *right = open_layer("cpu_ref"), *c = open_layer("cpu_ref");
    step(right, prompts);
    fill(c, prompts);
    set_step(c);
    PLAN(c);
    c->pools[0] = NULL;
    c->io.flags = ATTN_RUN_NO_ATTEND;
    RUN(c);
    float first[D];
    memcpy(first, (float *)c->rows + c->row_slots[3] * D, sizeof first);
    assert_true(isnan(first[0]));
    set_step(c);
    c->io.flags = ATTN_RUN_NO_ATTEND;
    RUN(c);
    assert_memory_equal((float *)c->rows + c->row_slots[3] * D, c->pooled[3], sizeof first);
    c->io.flags = ATTN_RUN_NO_WRITE;
    RUN(c);
    assert_memory_equal(c->out, right->out, sizeof c->out);
    assert_memory_equal(c->lse, right->lse, sizeof c->lse);
}

TEST(test_batches)
{
    OWNED(close_all) struct compressed *c = open_runtime();
    bind(c, "cpu_ref", c->sinks);
    fill(c, prompts);
    set_step(c);
    c->row_length[3] = 15; /* 64 tokens finish 16 */
    REFUSED(&c->error, "tables", c->api->plan_batch(c->plan, &c->batch, NULL, &c->error));
    assert_non_null(strstr(c->error.message, "request 3 has 15 compressed rows"));
    c->row_length[3] = 17;
    PLAN(c);
    c->batch.mode = ATTN_BATCH_IDLE;
    PLAN(c);
    RUN(c);
    /* a request whose keys are not counted sees nothing but the sink */
    c->batch.mode = ATTN_BATCH_AUTO;
    c->length[0] = c->row_length[0] = 0;
    memset(c->slots, 0xff, (size_t)c->starts[1] * sizeof *c->slots);
    PLAN(c);
    RUN(c);
    for (int32_t t = 0; t < c->starts[1]; t++) {
        assert_true(c->out[t][0][0] == 0);
        assert_true(fabsf(c->lse[1][t] - c->sinks[1]) < 1e-6f);
    }
}

TEST(test_descriptions)
{
    OWNED(close_all) struct compressed *c = open_runtime();
    struct attn_index_lists lists =
        EXTENSION(attn_index_lists, ATTN_EXT_DRAFT_INDEX_LISTS, NULL, .max_entries = 8);
    LAYER_REFUSED(c, "reserved", "reserved is 1", c->more.rows.reserved = 1);
    LAYER_REFUSED(c, "absorb_in_core", "0: queries and output in latent space",
                  c->mla.absorb_in_core = 1);
    LAYER_REFUSED(c, "caches", "0 further caches with attn_compressed_rows; 1",
                  c->mla.ext.next = &c->more.rows.ext);
    LAYER_REFUSED(c, "attn_index_lists", "takes no attn_index_lists",
                  c->more.rows.ext.next = &lists.ext);
    LAYER_REFUSED(c, "attn_compressed_rows", "takes no attn_compressed_rows",
                  (c->described.kind = ATTN_LAYER_DECODER, c->described.num_kv_heads = 1,
                   c->described.next = &c->more.caches.ext));
    static const char needed[] =
        "role compressed (9), table 1 or above, 1 head of head_size 32, kv_dtype f32";
    LAYER_REFUSED(c, "caches", needed, c->more.cache.role = ATTN_CACHE_EXTRA);
    LAYER_REFUSED(c, "caches", needed, c->more.cache.table = 0);
    LAYER_REFUSED(c, "caches", needed, c->more.cache.num_heads = 2);
    LAYER_REFUSED(c, "caches", needed, c->more.cache.head_size = D - 8);
    LAYER_REFUSED(c, "caches", needed, c->more.cache.kv_dtype = ATTN_KV_BF16);
}

/* Is the layer refused, with a reason of that text? */
static void unserved(struct compressed *c, const char *asked)
{
    const struct attn_reason reason = {.field = "attn_compressed_rows", .asked = asked};
    assert_int_equal(
        client_refuses(c->api, c->runtime, &c->described, ATTN_PHASE_PREFILL, "cpu_ref", &reason),
        asked != NULL);
    describe(c);
}

TEST(test_terms)
{
    OWNED(close_all) struct compressed *c = open_runtime();
    unserved(c, NULL);
    c->described.causal = ATTN_CAUSAL_NO;
    c->described.window_right = c->described.window_left;
    unserved(c, "not causal");
    c->described.tree_mask = ATTN_TREE_BITS;
    unserved(c, "with chunks, ALiBi, spans, trees or static sinks");
    c->described.alibi = ATTN_ALIBI_LINEAR;
    unserved(c, "with chunks, ALiBi, spans, trees or static sinks");
    c->described.device_seq_lens_only = 1;
    unserved(c, "with lengths on the device only");
    c->described.batch_invariant = 1;
    unserved(c, "fast_prefill or batch_invariant");
    c->more.cache.block_size = 5000;
    unserved(c, "blocks of so many rows");
}

/* A backend names the dtypes of latent rows that it has. */
TEST(test_latent_dtypes)
{
    static const char *const backends[] = {"cpu_ref", "cpu_simd"};
    const struct attn_reason reason = {
        .field = "kv_dtype",
        .supported = "f16, bf16, f32, fp8_e4m3, fp8_e5m2, fp8_ds_mla, fp8_ds_v4 in MLA layers"};
    OWNED(close_all) struct compressed *c = open_runtime();
    c->mla.ext.next = NULL;
    c->described.kv_dtype = ATTN_KV_INT8_PER_TOKEN_HEAD;
    for (int32_t b = 0; b < 1 + CPU_SIMD; b++) {
        assert_true(client_refuses(c->api, c->runtime, &c->described, ATTN_PHASE_PREFILL,
                                   backends[b], &reason) > 0);
    }
}
