/* SPDX-License-Identifier: Apache-2.0 */
/* Compressors: states in blocks and in a ring give the same rows; and what is refused. Results are
 * attn-check's. */
#include <attn/draft/compressor.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "opened.h"
#include "support/random.h"
#include "support/tensor.h"

enum { HEADS = 4, D = 16, RATIO = 4, ROTARY = 8, BLOCK = 16, BLOCKS = 4, TOKENS = 60 };

struct compressor {
    OPENED;
    void *cache;
    struct attn_compressor_desc desc;
    struct attn_layer_desc described;
    float k[TOKENS][HEADS][D], out[TOKENS][D], bias[RATIO][HEADS / 2 * D], norm[D];
    float cos_sin[TOKENS][ROTARY];
    int32_t table[BLOCKS], starts[2], length;
    int64_t slots[TOKENS];
    struct shaped tensors[5];
    struct attn_io_compressor io_compressor;
    struct attn_step_io io;
    struct attn_batch batch;
};

static void describe(struct compressor *c)
{
    c->desc = EXTENSION(attn_compressor_desc, ATTN_EXT_DRAFT_COMPRESSOR_DESC, NULL,
                        .tokens_per_row = RATIO, .overlaps = 1, .rope = ATTN_ROPE_GPTJ,
                        .rotary_dim = ROTARY);
    c->described =
        SIZED(attn_layer_desc, .next = &c->desc.ext, .name = "rows",
              .kind = ATTN_LAYER_DRAFT_COMPRESSOR, .dtype = ATTN_DTYPE_F32, .num_q_heads = HEADS,
              .num_kv_heads = HEADS, .head_size = D, .scale = 1, .block_size = BLOCK);
}

/* `ring`: all of a request's tokens in one block. */
static struct compressor *open_model(bool ring)
{
    struct compressor *c = calloc(1, sizeof *c);
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    uint64_t random = 3;
    describe(c);
    for (size_t i = 0; i < sizeof c->k / sizeof(float); i++) {
        (&c->k[0][0][0])[i] = (float)random_normal(&random);
    }
    for (int32_t i = 0; i < TOKENS; i++) {
        c->table[i % BLOCKS] = ring ? 2 : i % BLOCKS;
        c->cos_sin[i][0] = 1;
    }
    OPEN_RUNTIME(c, 1);
    OPEN_LAYER(c, "cpu_ref", &c->described);
    CHECK(c, client_cache(c->api, c->layer, BLOCKS, &spec, &c->cache, &c->error));
    assert_int_equal(spec.page_bytes, BLOCK * HEADS * D * sizeof(float));
    assert_int_equal(spec.sliding_window, 2 * RATIO);
    assert_int_equal(spec.role, ATTN_CACHE_EXTRA);
    OPEN_PLAN(c, 1, TOKENS, TOKENS);
    return c;
}

static void close_model(struct compressor **c)
{
    free((*c)->cache);
    CLOSE(*c);
}

static const struct attn_tensor *tensor(struct compressor *c, int32_t which, void *data, int64_t a,
                                        int64_t b, int64_t d)
{
    const int32_t ndim = d > 0 ? 3 : b > 0 ? 2 : 1;
    return shaped_set(&c->tensors[which], data, ATTN_DTYPE_F32, ndim, (int64_t[]){a, b, d}, NULL);
}

/* The next `count` tokens, planned. */
static void plan(struct compressor *c, int32_t count)
{
    const int32_t first = c->length;
    c->length += count;
    c->starts[1] = count;
    for (int32_t i = 0; i < count; i++) {
        const int32_t at = first + i;
        c->slots[i] = (int64_t)c->table[at / BLOCK] * BLOCK + at % BLOCK;
    }
    c->batch = client_batch(1, c->starts, &c->length);
    client_blocks(&c->batch, c->table, BLOCKS, c->slots);
    c->io_compressor =
        EXTENSION(attn_io_compressor, ATTN_EXT_DRAFT_IO_COMPRESSOR, NULL,
                  .position_bias = tensor(c, 0, c->bias, RATIO, HEADS / 2 * D, 0),
                  .norm_weight = NULL, .cos_sin = tensor(c, 1, c->cos_sin, TOKENS, ROTARY, 0));
    c->io = SIZED(attn_step_io, .next = &c->io_compressor.ext,
                  .k = tensor(c, 2, c->k[first], count, HEADS, D),
                  .out = tensor(c, 3, c->out[first], count, 1, D));
    PLAN(c);
}

TEST(test_ring)
{
    static const int32_t steps[] = {5, 3, 1, 8, 7, 8, 8, 1, 1, 8, 6};
    OWNED(close_model) struct compressor *paged = open_model(false), *ring = open_model(true);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        plan(paged, steps[i]);
        plan(ring, steps[i]);
        RUN(paged);
        RUN(ring);
        if (i == 2) { /* two drafts, which are rejected */
            plan(ring, 2);
            ring->io.k = tensor(ring, 2, ring->k[40], 2, HEADS, D);
            RUN(ring);
            ring->length -= 2;
        }
    }
    assert_memory_equal(paged->out, ring->out, sizeof ring->out);
    for (int32_t t = 0; t < paged->length; t++) {
        assert_true((paged->out[t][0] != 0) == ((t + 1) % RATIO == 0));
    }
}

#define RUN_REFUSED(field, text, change)                                                           \
    do {                                                                                           \
        c->length = 0;                                                                             \
        plan(c, 8);                                                                                \
        change;                                                                                    \
        REFUSED(&c->error, field, c->api->run(c->plan, c->layer, &c->io, &c->error));              \
        SAYS(c, text);                                                                             \
    } while (0)

TEST(test_runs)
{
    OWNED(close_model) struct compressor *c = open_model(false);
    RUN_REFUSED("attn_io_compressor", "is missing", c->io.next = NULL);
    RUN_REFUSED("norm_eps", "is -1; finite, 0 or above", c->io_compressor.norm_eps = -1);
    RUN_REFUSED("norm_eps", "is nan", c->io_compressor.norm_eps = NAN);
    RUN_REFUSED("norm_eps", "is inf", c->io_compressor.norm_eps = INFINITY);
    RUN_REFUSED("q", "has neither q nor v nor lse", c->io.q = c->io.k);
    RUN_REFUSED("k", "", c->io.k = tensor(c, 2, c->k, 8, HEADS - 1, D));
    RUN_REFUSED("out", "", c->io.out = tensor(c, 3, c->out, 8, HEADS, D));
    RUN_REFUSED("position_bias", "[4 or more, 32]",
                c->io_compressor.position_bias =
                    tensor(c, 0, c->bias, RATIO - 1, HEADS / 2 * D, 0));
    RUN_REFUSED("cos_sin", "[8 or more, 8]",
                c->io_compressor.cos_sin = tensor(c, 1, c->cos_sin, 7, ROTARY, 0));
    RUN_REFUSED("cos_sin", "[8 or more, 8]", c->io_compressor.cos_sin = NULL);
    RUN_REFUSED("norm_weight", "[16] f16, bf16 or f32",
                c->io_compressor.norm_weight = tensor(c, 4, c->norm, D - 1, 0, 0));
    RUN_REFUSED("k", "", c->k[3][1][2] = NAN);
    c->slots[8] = c->slots[3];
    c->slots[3] = -1; /* as padding it may be NaN; a row after the tokens has a slot */
    c->batch.num_slots = 9;
    PLAN(c);
    c->io.k = tensor(c, 2, c->k, 9, HEADS, D);
    RUN(c);
    c->k[8][1][2] = NAN;
    REFUSED(&c->error, "k", c->api->run(c->plan, c->layer, &c->io, &c->error));
    SAYS(c, "k[8, 1, 2] is NaN");
}

TEST(test_descriptions)
{
    OWNED(close_model) struct compressor *c = open_model(false);
    LAYER_REFUSED(c, "num_kv_heads", "", c->described.num_kv_heads = c->described.num_q_heads = 2);
    LAYER_REFUSED(c, "num_kv_heads", "", c->desc.overlaps = 0);
    LAYER_REFUSED(c, "kv_dtype", "", c->described.kv_dtype = ATTN_KV_BF16);
    /* its states are float32, whatever dtype it has */
    LAYER_REFUSED(c, "skip_kv_quantization", "", c->described.skip_kv_quantization = 1);
    LAYER_REFUSED(c, "rotary_dim", "", c->desc.rotary_dim = 0);
    LAYER_REFUSED(c, "rotary_dim", "", c->desc.rope = ATTN_ROPE_NONE);
    LAYER_REFUSED(c, "rotary_dim", "", c->desc.rotary_dim = 7);
    LAYER_REFUSED(c, "rotary_dim", "", c->desc.rotary_dim = D + 2);
    LAYER_REFUSED(c, "tokens_per_row", "", c->desc.tokens_per_row = 0);
    LAYER_REFUSED(c, "attn_compressor_desc", "", c->described.next = NULL);
    LAYER_REFUSED(c, "attn_compressor_desc", "", c->described.kind = ATTN_LAYER_DECODER);
    LAYER_REFUSED(c, "has_window", "", c->described.has_window = 1);
    LAYER_REFUSED(c, "causal", "", c->described.causal = ATTN_CAUSAL_NO);
    describe(c);
    const struct attn_layer_desc reader =
        SIZED(attn_layer_desc, .name = "reader", .kv_sharing_target = c->described.name,
              .dtype = ATTN_DTYPE_F32, .num_q_heads = HEADS, .num_kv_heads = HEADS, .head_size = D,
              .scale = 1, .block_size = c->described.block_size);
    const struct attn_layer_desc *layers[] = {&c->described, &reader};
    attn_assignment *made = NULL;
    REFUSED(&c->error, "kv_sharing_target",
            c->api->select(c->runtime, CLIENT_ORDER(""), layers, 2, &made, &c->error));
}
