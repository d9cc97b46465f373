/* SPDX-License-Identifier: Apache-2.0 */
/* Indexers through the public table: caches, blocks that move, idle steps, and what is refused. The
 * lists are attn-check's, and Python's next to Transformers' own. */
#include <attn/draft/index_write.h>
#include <attn/indexer.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "opened.h"
#include "support/layer.h"
#include "support/oracle.h"
#include "support/random.h"
#include "support/tensor.h"

enum { H = 6, D = 16, TOPK = 5, ROW = 4, BLOCK = 16, BLOCKS = 40, REQS = 3, LENGTH = 96 };
enum { WIDTH = LENGTH / BLOCK, STEPS = 2, ROOM = TOPK + 1 };

struct index {
    OPENED;
    void *cache;
    struct attn_indexer_desc desc;
    struct attn_index_write write;
    struct attn_layer_desc described;
    float q[LENGTH * REQS][H][D], k[LENGTH * REQS][D], w[LENGTH * REQS][H];
    int32_t out[LENGTH * REQS][ROOM], lengths[LENGTH * REQS];
    int32_t length[REQS], starts[REQS + 1], table[REQS][WIDTH];
    int64_t slots[LENGTH * REQS];
    struct shaped tensors[8];
    int64_t positions[LENGTH * REQS];
    float cos_sin[LENGTH][D / 2], norm[2][D];
    struct attn_io_indexer ext;
    struct attn_io_index_write written;
    struct attn_step_io io;
    struct attn_batch batch;
    uint64_t random;
};

static void describe(struct index *x)
{
    x->desc = (struct attn_indexer_desc){.topk = TOPK,
                                         .activation = ATTN_INDEXER_RELU,
                                         .has_weights = 1,
                                         .tokens_per_row = ROW,
                                         .tail = 1,
                                         .forced_on_top = 1};
    x->described =
        SIZED(attn_layer_desc, .name = "indexer", .dtype = ATTN_DTYPE_F32, .num_q_heads = H,
              .head_size = D, .window_left = -1, .window_right = -1, .block_size = BLOCK);
    layer_set_indexer(&x->described, &x->desc);
    x->desc.num_groups = x->desc.rows_per_entry = 0; /* which read as 1 */
}

static struct index *open_runtime(void)
{
    struct index *x = calloc(1, sizeof *x);
    x->random = 11;
    OPEN_RUNTIME(x, 1);
    describe(x);
    return x;
}

static void bind(struct index *x)
{
    struct attn_cache_spec spec;
    OPEN_LAYER(x, "cpu_ref", &x->described);
    CHECK(x, client_cache(x->api, x->layer, BLOCKS, &spec, &x->cache, &x->error));
    const int32_t row = x->desc.tokens_per_row;
    const bool scaled = x->described.kv_dtype == ATTN_KV_FP8_PER_TOKEN_HEAD;
    assert_int_equal(spec.role, ATTN_CACHE_INDEX_K);
    assert_int_equal(spec.tokens_per_row, row);
    assert_int_equal(spec.block_size, BLOCK / row);
    assert_int_equal(spec.page_bytes, BLOCK / row * (scaled ? D + 4 : 4 * D));
    OPEN_PLAN(x, REQS, LENGTH * REQS, LENGTH);
}

static void close_all(struct index **x)
{
    free((*x)->cache);
    CLOSE(*x);
}

static struct attn_tensor *tensor(struct index *x, int32_t which, void *data, int64_t a, int64_t b,
                                  int64_t c)
{
    return shaped_set(&x->tensors[which], data, ATTN_DTYPE_F32, c > 0 ? 3 : 2, (int64_t[]){a, b, c},
                      NULL);
}

static void draw(struct index *x, float *to, int64_t count)
{
    for (int64_t i = 0; i < count; i++) { /* whole numbers: sums are exact, scores often equal */
        to[i] = (float)(random_below(&x->random, 5) - 2);
    }
}

/* The next `queries` tokens of each request: the batch and the run's tensors. */
static void fill(struct index *x, const int32_t queries[REQS])
{
    const int32_t row = x->desc.tokens_per_row;
    int32_t tokens = 0;
    for (int32_t r = 0; r < REQS; r++) {
        for (int32_t i = 0; i < queries[r]; i++, tokens++) {
            const int32_t at = x->length[r]++;
            draw(x, x->k[tokens], D);
            x->k[tokens][1] = at % row == row - 1 ? x->k[tokens][1] : NAN; /* which is not read */
            x->table[r][at / BLOCK] = (at / BLOCK * REQS + r) * 2 + 1;
            x->slots[tokens] = x->table[r][at / BLOCK] * BLOCK + at % BLOCK;
        }
        x->starts[r + 1] = tokens;
    }
    draw(x, &x->q[0][0][0], (int64_t)tokens * H * D);
    draw(x, &x->w[0][0], (int64_t)tokens * H);
    x->batch = client_batch(REQS, x->starts, x->length);
    client_blocks(&x->batch, x->table[0], WIDTH, x->slots);
    x->batch.max_query_len = LENGTH;
    x->batch.max_seq_len = LENGTH;
    x->ext = EXTENSION(attn_io_indexer, ATTN_EXT_IO_INDEXER, NULL,
                       .weights = tensor(x, 3, x->w, tokens, H, 0), .lengths = x->lengths);
    x->io =
        SIZED(attn_step_io, .next = &x->ext.ext, .q = tensor(x, 0, x->q, tokens, H, D),
              .k = tensor(x, 1, x->k, tokens, 1, D), .out = tensor(x, 2, x->out, tokens, 1, ROOM));
    x->tensors[2].tensor.dtype = (struct attn_dtype){ATTN_CODE_INT, 32, 1};
}

static void run(struct index *x, const int32_t queries[REQS])
{
    fill(x, queries);
    memset(x->out, 0x55, sizeof x->out);
    PLAN(x);
    RUN(x);
}

static const int32_t steps[STEPS][REQS] = {{30, 3, 1}, {1, 17, 0}};

TEST(blocks_move)
{
    OWNED(close_all) struct index *x = open_runtime();
    bind(x);
    run(x, steps[0]);
    int32_t before[LENGTH * REQS][ROOM];
    memcpy(before, x->out, sizeof before);
    const int64_t pairs[] = {x->table[0][0], 0, x->table[0][1], 2};
    const struct attn_block_transfer move = SIZED(
        attn_block_transfer, .kind = ATTN_COPY_DEVICE_TO_DEVICE, .pairs = pairs, .num_pairs = 2);
    CHECK(x, x->api->copy_blocks(x->model, &move, &x->error));
    x->table[0][0] = 0;
    x->table[0][1] = 2;
    x->io.flags = ATTN_RUN_NO_WRITE;
    memset(x->out, 0x55, sizeof x->out);
    PLAN(x);
    RUN(x);
    assert_memory_equal(before, x->out, sizeof before);
}

TEST(idle_steps_list_nothing)
{
    OWNED(close_all) struct index *x = open_runtime();
    bind(x);
    fill(x, steps[0]);
    x->batch.mode = ATTN_BATCH_IDLE;
    PLAN(x);
    RUN(x);
    for (int32_t t = 0; t < x->batch.num_tokens; t++) {
        for (int32_t i = 0; i < ROOM; i++) {
            assert_int_equal(x->out[t][i], -1);
        }
    }
    x->tensors[2].shape[0]--; /* the rows of out */
    REFUSED(&x->error, "out", x->api->run(x->plan, x->layer, &x->io, &x->error));
}

/* A block table is shared by indexers whose rows have as many tokens. */
TEST(rows_of_other_tokens_have_another_table)
{
    OWNED(close_all) struct index *x = open_runtime();
    struct attn_indexer_desc others[2] = {x->desc, x->desc};
    struct attn_layer_desc descs[2] = {x->described, x->described};
    const struct attn_layer_desc *layers[] = {&x->described, &descs[0], &descs[1]};
    for (int32_t i = 0; i < 2; i++) {
        descs[i].name = i == 0 ? "same" : "longer";
        descs[i].next = &others[i].ext;
    }
    others[1].tokens_per_row = 2 * ROW;
    CHECK(x, client_model(x->api, x->runtime, CLIENT_ORDER("cpu_ref"), layers, 3, &x->model,
                          &x->error));
    assert_int_equal(x->api->model_num_groups(x->model, ATTN_GROUP_BLOCK_TABLE), 2);
}

TEST(lists_of_groups_without_weights)
{
    OWNED(close_all) struct index *x = open_runtime();
    x->desc.num_groups = 2;
    x->desc.has_weights = 0;
    bind(x);
    fill(x, steps[0]);
    PLAN(x);
    const int32_t tokens = x->batch.num_tokens;
    INVALID(&x->error, "out", x->api->run(x->plan, x->layer, &x->io, &x->error));
    OWNED(memory_end) int32_t *lists = malloc(2 * sizeof x->out);
    x->io.out = tensor(x, 2, lists, tokens, 2, ROOM);
    x->tensors[2].tensor.dtype = (struct attn_dtype){ATTN_CODE_INT, 32, 1};
    INVALID(&x->error, "weights", x->api->run(x->plan, x->layer, &x->io, &x->error));
    SAYS(x, "does not say has_weights");
    x->io.next = NULL;
    RUN(x);
}

TEST(keys_of_padding_may_be_nan)
{
    OWNED(close_all) struct index *x = open_runtime();
    x->desc.tokens_per_row = 1;
    x->desc.tail = 0;
    bind(x);
    fill(x, steps[0]);
    const int32_t tokens = x->batch.num_tokens;
    x->k[4][2] = x->k[tokens][2] = NAN;
    x->slots[tokens] = x->slots[4];
    x->slots[4] = -1;
    x->batch.num_slots = tokens + 1;
    x->io.k = tensor(x, 1, x->k, tokens + 1, 1, D);
    x->io.flags = ATTN_RUN_NO_ATTEND;
    PLAN(x);
    REFUSED(&x->error, "k", x->api->run(x->plan, x->layer, &x->io, &x->error));
    x->k[tokens][2] = 0;
    RUN(x);
}

TEST(layers_are_refused_by_field)
{
    OWNED(close_all) struct index *x = open_runtime();
    LAYER_REFUSED(x, "topk", "topk is 0", x->desc.topk = 0);
    LAYER_REFUSED(x, "activation", "activation is 2", x->desc.activation = 2);
    LAYER_REFUSED(x, "has_weights", "has_weights is 2", x->desc.has_weights = 2);
    LAYER_REFUSED(x, "num_groups", "4 does not divide num_q_heads 6", x->desc.num_groups = 4);
    LAYER_REFUSED(x, "tokens_per_row", "is -1; allowed are 0", x->desc.tokens_per_row = -1);
    LAYER_REFUSED(x, "tokens_per_row", "5 does not divide block_size 16",
                  x->desc.tokens_per_row = 5);
    LAYER_REFUSED(x, "rows_per_entry", "is 5000", x->desc.rows_per_entry = 5000);
    LAYER_REFUSED(x, "first_entries", "first_entries is -1", x->desc.first_entries = -1);
    LAYER_REFUSED(x, "first_entries", "are 6 together and topk is 5",
                  (x->desc.last_entries = TOPK, x->desc.forced_on_top = 0));
    LAYER_REFUSED(x, "tail", "rows_per_entry 2", x->desc.rows_per_entry = 2);
    LAYER_REFUSED(x, "tail", "tokens_per_row 1 and", x->desc.tokens_per_row = 0);
    LAYER_REFUSED(x, "forced_on_top", "forced_on_top is 2", x->desc.forced_on_top = 2);
    LAYER_REFUSED(x, "num_kv_heads", "num_kv_heads 2", x->described.num_kv_heads = 2);
    LAYER_REFUSED(x, "num_kv_heads", "head_size_v 8", x->described.head_size_v = D / 2);
    LAYER_REFUSED(x, "kv_dtype", "kv_dtype is nvfp4", x->described.kv_dtype = ATTN_KV_NVFP4);
    LAYER_REFUSED(x, "has_window", "has_window is 1",
                  (x->described.has_window = 1, x->described.window_left = 3));
    LAYER_REFUSED(x, "needs_lse", "needs_lse is 1", x->described.needs_lse = 1);
    LAYER_REFUSED(x, "causal", "is causal", x->described.causal = ATTN_CAUSAL_NO);
    LAYER_REFUSED(x, "attn_indexer_desc", "indexer needs", x->described.next = NULL);
    LAYER_REFUSED(x, "attn_indexer_desc", "takes no", x->described.kind = ATTN_LAYER_DECODER);
}

TEST(backends_refuse_what_they_do_not_declare)
{
    OWNED(close_all) struct index *x = open_runtime();
    const struct {
        const char *backend, *field, *asked;
        int32_t topk, last_entries;
    } refused[] = {{"cpu_ref", "topk", "4096", 4096, 0},
                   {"cpu_ref", "first_entries, last_entries, tail", "101", TOPK, 100},
                   {"cpu_simd", "topk", "32768", 32768, 0}};
    for (int32_t i = 0; i < 2 + CPU_SIMD; i++) {
        const struct attn_reason wanted =
            SIZED(attn_reason, .field = refused[i].field, .asked = refused[i].asked);
        x->desc.topk = refused[i].topk;
        x->desc.last_entries = refused[i].last_entries;
        assert_true(client_refuses(x->api, x->runtime, &x->described, ATTN_PHASE_DECODE,
                                   refused[i].backend, &wanted) > 0); /* each variant */
    }
}

#define RUN_REFUSED(field, change)                                                                 \
    do {                                                                                           \
        fill(x, steps[1]);                                                                         \
        x->length[0] -= steps[1][0];                                                               \
        x->length[1] -= steps[1][1];                                                               \
        change;                                                                                    \
        INVALID(&x->error, field, x->api->run(x->plan, x->layer, &x->io, &x->error));              \
    } while (0)

TEST(runs_are_refused_by_field)
{
    OWNED(close_all) struct index *x = open_runtime();
    bind(x);
    run(x, steps[1]);
    RUN_REFUSED("weights", x->ext.weights = NULL);
    RUN_REFUSED("weights", x->tensors[3].shape[1] = H - 1);
    RUN_REFUSED("weights", x->io.next = NULL);
    RUN_REFUSED("out", x->tensors[2].tensor.dtype.bits = 64);
    RUN_REFUSED("out", x->tensors[2].shape[2] = TOPK);
    RUN_REFUSED("q", x->io.q = NULL);
    RUN_REFUSED("k", x->tensors[1].shape[1] = 2);
    RUN_REFUSED("v", x->io.v = x->io.k);
    RUN_REFUSED("lse", x->io.lse = x->io.k);
    fill(x, steps[1]);
    x->w[3][2] = NAN;
    REFUSED(&x->error, "weights", x->api->run(x->plan, x->layer, &x->io, &x->error));
    fill(x, steps[1]);
    x->batch.causal = ATTN_CAUSAL_NO;
    INVALID(&x->error, "causal", x->api->plan_batch(x->plan, &x->batch, NULL, &x->error));
}

/* As bind, of a layer whose keys are normed, rotated and transformed when they are written. */
static void bind_written(struct index *x)
{
    x->write =
        EXTENSION(attn_index_write, ATTN_EXT_DRAFT_INDEX_WRITE, NULL, .norm = ATTN_KEY_NORM_LAYER,
                  .rope = ATTN_ROPE_NEOX, .rotary_dim = D / 2, .hadamard = 1);
    x->desc.ext.next = &x->write.ext;
    bind(x);
}

static void bring_written(struct index *x)
{
    for (int32_t i = 0; i < LENGTH * D / 2; i++) {
        x->cos_sin[i / (D / 2)][i % (D / 2)] = sinf((float)i);
    }
    for (int32_t d = 0; d < 2 * D; d++) {
        x->norm[d / D][d % D] = 0.5f + (float)d;
    }
    for (int32_t t = 0; t < x->batch.num_tokens; t++) { /* only rows that are written have one */
        x->positions[t] = x->slots[t] % ROW == ROW - 1 ? (7 * t) % LENGTH : -1;
    }
    x->written = EXTENSION(attn_io_index_write, ATTN_EXT_DRAFT_IO_INDEX_WRITE, NULL,
                           .positions = x->positions, .norm_eps = 1e-6f,
                           .cos_sin = tensor(x, 5, x->cos_sin, LENGTH, D / 2, 0));
    x->written.norm_weight =
        shaped_set(&x->tensors[6], x->norm[0], ATTN_DTYPE_F32, 1, (int64_t[]){D}, NULL);
    x->written.norm_bias =
        shaped_set(&x->tensors[7], x->norm[1], ATTN_DTYPE_F32, 1, (int64_t[]){D}, NULL);
    x->ext.ext.next = &x->written.ext;
}

#define WRITE_REFUSED(field, text, change)                                                         \
    do {                                                                                           \
        bring_written(x);                                                                          \
        change;                                                                                    \
        INVALID(&x->error, field, x->api->run(x->plan, x->layer, &x->io, &x->error));              \
        SAYS(x, text);                                                                             \
    } while (0)

/* The first slot that finishes a row. */
static int32_t first_written(const struct index *x)
{
    int32_t t = 0;
    while (x->slots[t] % ROW != ROW - 1) {
        t++;
    }
    return t;
}

TEST(writes_that_change_keys_are_checked)
{
    OWNED(close_all) struct index *x = open_runtime();
    bind_written(x);
    fill(x, steps[0]);
    PLAN(x);
    bring_written(x);
    RUN(x);
    WRITE_REFUSED("attn_io_index_write", "is missing", x->ext.ext.next = NULL);
    WRITE_REFUSED("norm_eps", "is nan; finite, 0 or above", x->written.norm_eps = NAN);
    WRITE_REFUSED("norm_eps", "is inf", x->written.norm_eps = INFINITY);
    WRITE_REFUSED("norm_eps", "is -0.5", x->written.norm_eps = -0.5f);
    WRITE_REFUSED("positions", "is NULL", x->written.positions = NULL);
    WRITE_REFUSED("positions", "cos_sin has positions 0 to 95",
                  x->positions[first_written(x)] = LENGTH);
    WRITE_REFUSED("positions", "cos_sin has positions 0 to 95",
                  x->positions[first_written(x)] = -1);
    WRITE_REFUSED("cos_sin", "[any, 8]", x->tensors[5].shape[1] = D);
    WRITE_REFUSED("cos_sin", "[any, 8]", x->written.cos_sin = NULL);
    WRITE_REFUSED("norm_weight", "[16]", x->written.norm_weight = NULL);
    WRITE_REFUSED("norm_weight", "[16]", x->tensors[6].shape[0] = D - 1);
    WRITE_REFUSED("norm_bias", "[16]", x->tensors[7].shape[0] = D + 1);
    bring_written(x);
    x->written.norm_bias = NULL;
    x->written.norm_eps = 0;
    RUN(x);
    x->ext.ext.next = NULL; /* what writes nothing needs nothing */
    x->io.flags = ATTN_RUN_NO_WRITE;
    RUN(x);
}

/* A run brings nothing for steps that the layer does not have. */
TEST(norms_and_rotations_that_the_layer_does_not_have)
{
    OWNED(close_all) struct index *x = open_runtime();
    x->write = EXTENSION(attn_index_write, ATTN_EXT_DRAFT_INDEX_WRITE, NULL, .hadamard = 1);
    x->desc.ext.next = &x->write.ext;
    bind(x);
    fill(x, steps[0]);
    PLAN(x);
    const struct attn_io_index_write nothing =
        EXTENSION(attn_io_index_write, ATTN_EXT_DRAFT_IO_INDEX_WRITE, NULL, );
#define BROUGHT(field, value) (x->written = nothing, x->written.field = (value))
    WRITE_REFUSED("norm_eps", "is 0.5, and the layer's norm is none", BROUGHT(norm_eps, 0.5f));
    WRITE_REFUSED("norm_weight", "norm is none", BROUGHT(norm_weight, &x->tensors[6].tensor));
    WRITE_REFUSED("norm_bias", "no bias", BROUGHT(norm_bias, &x->tensors[7].tensor));
    WRITE_REFUSED("positions", "rotates no keys", BROUGHT(positions, x->positions));
    WRITE_REFUSED("cos_sin", "rotates no keys", BROUGHT(cos_sin, &x->tensors[5].tensor));
#undef BROUGHT
    x->written = nothing;
    RUN(x);
}

TEST(writes_are_refused_by_field)
{
    OWNED(close_all) struct index *x = open_runtime();
#define CHANGED(...)                                                                               \
    (x->write = EXTENSION(attn_index_write, ATTN_EXT_DRAFT_INDEX_WRITE, NULL, __VA_ARGS__),        \
     x->desc.ext.next = &x->write.ext)
    LAYER_REFUSED(x, "norm", "norm is 3", CHANGED(.norm = 3));
    LAYER_REFUSED(x, "rotary_dim", "is 0 with rope 1", CHANGED(.rope = ATTN_ROPE_NEOX));
    LAYER_REFUSED(x, "rotary_dim", "is 8 with rope 0", CHANGED(.rotary_dim = 8));
    LAYER_REFUSED(x, "rotary_dim", "is 7", CHANGED(.rope = ATTN_ROPE_GPTJ, .rotary_dim = 7));
    LAYER_REFUSED(x, "rotary_first", "dims 10 to 17",
                  CHANGED(.rope = ATTN_ROPE_NEOX, .rotary_dim = 8, .rotary_first = 10));
    LAYER_REFUSED(x, "rotary_first", "is 3; 0 without rope", CHANGED(.rotary_first = 3));
    LAYER_REFUSED(x, "attn_index_write", "neither norm nor rope nor hadamard", CHANGED(.norm = 0));
    LAYER_REFUSED(x, "hadamard", "power of two",
                  (CHANGED(.hadamard = 1), x->described.head_size = x->described.head_size_v = 24));
    LAYER_REFUSED(x, "attn_index_write", "takes no",
                  (CHANGED(.hadamard = 1), x->described.kind = ATTN_LAYER_DECODER,
                   x->described.next = &x->write.ext));
#undef CHANGED
}

/* The oracle's judge sees a tie that went to the larger index. */
TEST(of_equal_scores_the_smaller_index)
{
    const struct oracle_indexer oracle = {.num_heads = 1,
                                          .head_size = 1,
                                          .topk = 2,
                                          .tokens_per_row = 1,
                                          .rows_per_entry = 1,
                                          .scale = 1};
    const double scores[] = {1, 3, 1, 0};
    assert_null(oracle_index_judge(&oracle, 3, scores, (int32_t[]){0, 1}, 2, 0));
    assert_string_equal(oracle_index_judge(&oracle, 3, scores, (int32_t[]){1, 2}, 2, 0),
                        "of two equal scores the larger index is listed");
    assert_non_null(oracle_index_judge(&oracle, 3, scores, (int32_t[]){0, 2}, 2, 0));
}
