/* SPDX-License-Identifier: Apache-2.0 */
/* MLA steps through the public table: absorbed decodes, prefill per head over context in chunks,
 * sparse, against each head's own attention in float64; what a backend without fusion is refused
 * for, and what is composed of it. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mla_fixture.h"
#include "support/number.h"

/* Batches of decodes, then of prefills with and without context. */
#define ONE_REQ .num_reqs = 1, .queries = {1}, .lens = {30}
#define TWO_REQS .num_reqs = 2, .queries = {1, 6}, .lens = {30, 41}
#define THREE_REQS .num_reqs = 3, .queries = {1, 1, 6}, .lens = {30, 1, 41}
#define FOUR_REQS .num_reqs = 4, .queries = {1, 1, 6, 12}, .lens = {30, 1, 41, 12}
#define FIVE_REQS .num_reqs = 5, .queries = {1, 1, 4, 3, 20}, .lens = {30, 1, 41, 3, 60}

/* Each is run twice on one plan; per_head: prefills read the new keys as they came, not from the
 * cache. */
static const struct {
    struct setting s;
    bool per_head;
} steps[] = {
    /* decodes */
    {CPU_REF(.heads = 6, .num_reqs = 4, .queries = {1, 1, 1, 1}, .lens = {1, 8, 9, 70}), true},
    {CPU_REF(.heads = 4, .drafted = 3, .apart = true, .num_reqs = 3, .queries = {3, 1, 4},
             .lens = {17, 9, 24}),
     true},
    /* prefills: without context, and with all of it in one chunk, in several that cut requests, one
     * row at a time */
    {CPU_REF(.heads = 6, .num_reqs = 3, .queries = {5, 30, 2}, .lens = {5, 30, 2}), true},
    {CPU_REF(.heads = 6, FIVE_REQS), true},
    {CPU_REF(.heads = 6, .chunk = 7, .apart = true, FIVE_REQS), true},
    {CPU_REF(.heads = 6, .chunk = 16, .split = true, FIVE_REQS), true},
    {CPU_REF(.heads = 6, .chunk = 1, .no_lse = true, FIVE_REQS), true},
    /* idle requests */
    {CPU_REF(.heads = 4, .chunk = 8, .num_reqs = 5, .queries = {1, 0, 5, 0, 9},
             .lens = {12, 20, 17, 0, 40}),
     true},
    /* sparse */
    {CPU_REF(.heads = 6, .topk = 8, FOUR_REQS), false},
    {CPU_REF(.heads = 6, .fp8 = ATTN_KV_FP8_E4M3, .chunk = 16, FOUR_REQS), true},
    /* a quantized query in both ways, its parts in tensors of their own */
    {CPU_REF(.heads = 6, .fp8_query = true, .apart = true, .chunk = 16, .num_reqs = 3,
             .queries = {1, 1, 6}, .lens = {30, 9, 41}),
     true},
    {CPU_REF(.heads = 6, .fp8 = ATTN_KV_FP8_E5M2, .fp8_query = true, .apart = true, .chunk = 16,
             .num_reqs = 3, .queries = {1, 1, 6}, .lens = {30, 9, 41}),
     true},
    /* a sink counts once, whatever the step is made of */
    {CPU_REF(.heads = 6, .has_sinks = true, .chunk = 9, .num_reqs = 4, .queries = {1, 1, 6, 12},
             .lens = {30, 9, 41, 20}),
     true},
    /* a window needs positions, which projected context has not: everything goes the latent way */
    {CPU_REF(.heads = 4, .window = 7, FOUR_REQS), false},
    {CPU_REF(.heads = 5, .padded = 8, .chunk = 16, THREE_REQS), true},
    /* weights in codes: what they read as is what is multiplied */
    {CPU_REF(.heads = 4, .int8 = true, .chunk = 8, .num_reqs = 3, .queries = {1, 5, 3},
             .lens = {30, 20, 3}),
     true},
    {CPU_REF(.heads = 4, .mxfp4 = true, .num_reqs = 4, .queries = {1, 1, 1, 1},
             .lens = {30, 1, 41, 12}),
     true},
    {CPU_REF(.heads = 4, .mxfp4 = true, .chunk = 8, .num_reqs = 3, .queries = {1, 5, 3},
             .lens = {30, 20, 3}),
     true},
    {CPU_REF(.heads = 4, .mxfp4 = true, .topk = 6, .num_reqs = 3, .queries = {1, 5, 3},
             .lens = {30, 20, 3}),
     false},
    /* without absorption */
    {CPU_REF(.heads = 5, .latent = true, THREE_REQS), false},
};

TEST(test_steps)
{
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        print_message("step %zu: ", i);
        check(&steps[i].s, steps[i].per_head);
    }
}

/* Latent rows that no window reaches may be anything. */
TEST(test_rows_before_windows)
{
    const struct setting s = CPU_REF(.heads = 4, .window = 7, TWO_REQS);
    OWNED(mla_end) struct mla *m = mla_create(&s);
    for (int32_t r = 0; r < s.num_reqs; r++) {
        for (int32_t j = 0; j <= s.lens[r] - s.queries[r] - s.window; j++) {
            const int32_t slot = m->table[r][j / BLOCK] * BLOCK + j % BLOCK;
            memset((float *)m->cache + (int64_t)slot * ROW, 0xff, ROW * sizeof(float));
        }
    }
    step(m);
    compare(m, false);
}

/* Context that is projected lies before every tree, and its attends get none. */
TEST(test_tree)
{
    check(&(struct setting){"recording", .heads = 4, .tree = true, .chunk = 9, .num_reqs = 3,
                            .queries = {1, 6, 12}, .lens = {30, 41, 20}},
          true);
}

/* Parts of a query that stand apart are joined by products that copy: the bits are those of one
 * row. */
TEST(test_joined_queries)
{
    static const int32_t dtypes[] = {ATTN_DTYPE_F32, ATTN_DTYPE_F16, ATTN_DTYPE_BF16};
    for (int32_t i = 0; i < 3; i++) {
        const struct setting whole = CPU_REF(.heads = 4, .dtype = dtypes[i], .num_reqs = 3,
                                             .queries = {1, 6, 12}, .lens = {30, 41, 12});
        struct setting moved = whole;
        moved.moved = true;
        OWNED(mla_end) struct mla *a = mla_create(&whole), *b = mla_create(&moved);
        step(a);
        step(b);
        assert_memory_equal(a->out, b->out, (size_t)(19 * 4 * V) * (i == 0 ? 4 : 2));
    }
}

static attn_status no_collective(const struct attn_collective_args *args, struct attn_error *error)
{
    return ATTN_ERROR_DEVICE;
}

/* Where ranks share the cache a decode is one query, whatever the backend would take: several are
 * causal among keys that lie on several ranks. */
TEST(test_decodes_over_ranks)
{
    static const struct attn_collectives two = {.struct_size = sizeof two,
                                                .world_size = 2,
                                                .all_gather = no_collective,
                                                .all_to_all = no_collective,
                                                .reduce_scatter_f32 = no_collective};
    struct setting s = {"counted", .heads = 4, .num_reqs = 3, .queries = {1, 2, 3},
                        .lens = {9, 2, 3}};
    for (int32_t ranks = 1; ranks <= 2; ranks++) {
        struct attn_batch_split split = {.struct_size = sizeof split};
        s.ranks = ranks > 1 ? &two : NULL;
        s.interleave = 1;
        s.reduce = ATTN_CP_ALL_TO_ALL;
        OWNED(mla_end) struct mla *m = mla_create(&s);
        PLAN(m);
        assert_ok(m->api->plan_split(m->plan, &split));
        assert_int_equal(split.num_decodes, ranks > 1 ? 1 : 2);
    }
}

/* If layers ask for context workspaces of two sizes, the smaller counts. */
TEST(test_smallest_chunks)
{
    const struct setting s = CPU_REF(.heads = 4, .chunk = 8, ONE_REQ);
    OWNED(mla_end) struct mla *m = mla_create(&s);
    struct attn_mla_desc large = m->desc;
    struct attn_layer_desc second = m->described;
    const struct attn_layer_desc *layers[] = {&m->described, &second};
    large.context_workspace_tokens = 64;
    second.name = "second";
    second.next = &large.ext;
    for (int32_t swapped = 0; swapped < 2; swapped++) {
        void *caches[2], *workspace;
        attn_model *model;
        attn_plan *plan;
        layers[swapped] = &m->described;
        layers[1 - swapped] = &second;
        CHECK(m, client_model(m->api, m->runtime, CLIENT_ORDER("cpu_ref"), layers, 2, &model,
                              &m->error));
        for (int32_t i = 0; i < 2; i++) {
            const struct attn_mla_weights weights = EXTENSION(
                attn_mla_weights, ATTN_EXT_MLA_WEIGHTS, NULL,
                .kv_b_proj = tensor(m, 0, m->weights, 2, 4 * (NOPE + V), RANK, 0, RANK, 1));
            const struct attn_layer_params params = SIZED(attn_layer_params, .next = &weights.ext);
            attn_layer *layer = m->api->model_layer(model, i);
            CHECK(m, client_cache(m->api, layer, NUM_BLOCKS, NULL, &caches[i], &m->error));
            CHECK(m, m->api->layer_bind_params(layer, &params, &m->error));
        }
        CHECK(m, client_plan(m->api, model, 0, CLIENT_LIMITS(MAX_REQS, 100, MAX_LENGTH), &plan,
                             &workspace, &m->error));
        assert_int_equal(client_workspace_bytes(m->api, plan),
                         client_workspace_bytes(m->api, m->plan));
        m->api->plan_destroy(plan);
        m->api->model_destroy(model);
        free(caches[0]), free(caches[1]), free(workspace);
    }
}

/* Rows before the first request's belong to no request: not read, not written. */
TEST(test_first_row)
{
    const struct setting s = {
        "cpu_ref",     .heads = 4,    .first_row = 50,          .chunk = 9,
        .apart = true, .num_reqs = 4, .queries = {1, 1, 6, 12}, .lens = {30, 9, 41, 20}};
    check(&s, true);
    OWNED(mla_end) struct mla *m = mla_create(&s);
    memset(m->out, 0xff, (size_t)s.first_row * 4 * V * 4);
    step(m);
    for (int32_t i = 0; i < s.first_row * 4 * V; i++) {
        assert_true(isnan(m->out[i]));
    }
}

/* The maximum of q is taken over both its parts. */
TEST(test_amax)
{
    const struct setting s =
        CPU_REF(.heads = 4, .apart = true, .num_reqs = 2, .queries = {1, 5}, .lens = {3, 9});
    float amax = 20, largest = 0;
    OWNED(mla_end) struct mla *m = mla_create(&s);
    const struct attn_io_mla *io = (const struct attn_io_mla *)m->io.next;
    m->pe[7] = -9;
    for (int32_t i = 0; i < 6 * 4 * NOPE; i++) {
        largest = fmaxf(largest, fabsf(m->nope[i]));
    }
    assert_true(largest < 9);
    struct attn_amax_args args = SIZED(attn_amax_args, .x = io->q_nope, .out = &amax);
    CHECK(m, m->api->layer_amax(m->layer, &args, &m->error));
    assert_true(amax == largest);
    args.x = io->q_pe;
    args.accumulate = 1;
    CHECK(m, m->api->layer_amax(m->layer, &args, &m->error));
    assert_true(amax == 9);
    struct attn_tensor pairs = *io->q_pe; /* pairs of numbers, which the ABI does not have */
    pairs.dtype.lanes = 2;
#define AMAX_REFUSED(field, change)                                                                \
    WITH(args, change, INVALID(&m->error, field, m->api->layer_amax(m->layer, &args, &m->error)))
    AMAX_REFUSED("x", args.x = NULL);
    AMAX_REFUSED("x", args.x = &pairs);
    AMAX_REFUSED("out", args.out = NULL);
    AMAX_REFUSED("out", args.instance = (attn_instance *)&pairs);
    AMAX_REFUSED("per_head", args.per_head = 2);
    AMAX_REFUSED("accumulate", args.accumulate = -1);
    AMAX_REFUSED("history_len", (args.accumulate = 0, args.history_len = 1));
}

/* The output through W_UV, then in e4m3: half a step of it away at most. */
TEST(test_fp8_output)
{
    const struct setting s = CPU_REF(.heads = 4, .fp8_out = true, .chunk = 16, THREE_REQS);
    OWNED(mla_end) struct mla *m = mla_create(&s);
    step(m);
    for (int32_t r = 0; r < s.num_reqs; r++) {
        for (int32_t i = 0; i < s.queries[r] * s.heads; i++) {
            double out[RANK];
            formula(m, r, i / s.heads, i % s.heads, true, out);
            for (int32_t d = 0; d < V; d++) {
                double got = 0.02 * number_load(m->out, (m->starts[r] * s.heads + i) * V + d,
                                                ATTN_DTYPE_FP8_E4M3);
                assert_true(fabs(got - out[d]) <= 0.0626 * fabs(out[d]) + 0.02 * 0x1p-10 + 1e-6);
            }
        }
    }
}

/* Rows of 656 bytes: written, gathered and attended as what they read as. */
TEST(test_ds_mla)
{
    check(&(struct setting)CPU_REF(.heads = 2, .ds_mla = true, .chunk = 5, .num_reqs = 3,
                                   .queries = {1, 3, 2}, .lens = {9, 12, 2}),
          true);
    check(&(struct setting)CPU_REF(.heads = 2, .ds_mla = true, .topk = 4, .num_reqs = 3,
                                   .queries = {1, 3, 2}, .lens = {9, 12, 2}),
          false);
}

/* Decodes are captured and replayed with other lengths; a capture that holds prefills is refused.
 */
TEST(test_graph)
{
    const struct setting s =
        CPU_REF(.heads = 4, .num_reqs = 3, .queries = {1, 1, 6}, .lens = {30, 9, 41});
    static struct setting shorter =
        CPU_REF(.heads = 4, .num_reqs = 2, .queries = {1, 1}, .lens = {22, 4});
    OWNED(mla_end) struct mla *m = mla_create(&s);
    m->api->plan_destroy(m->plan);
    free(m->workspace);
    CHECK(m, client_plan(m->api, m->model, 0, CLIENT_PLAN(1, MAX_REQS, 100, MAX_LENGTH), &m->plan,
                         &m->workspace, &m->error));
    assert_int_equal(m->api->plan_graph_level(m->plan), ATTN_GRAPH_UNIFORM_BATCH);
    REFUSED(&m->error, "num_prefills",
            m->api->plan_graph(m->plan, ATTN_PLAN_CAPTURE, &m->batch, NULL, &m->error));
    m->batch.num_reqs = m->batch.num_tokens = m->batch.num_actual_tokens = m->batch.num_slots = 2;
    CHECK(m, m->api->plan_graph(m->plan, ATTN_PLAN_CAPTURE, &m->batch, NULL, &m->error));
    RUN(m);
    m->lens[0] = shorter.lens[0];
    m->lens[1] = shorter.lens[1];
    m->s = &shorter; /* the keys that far are in the cache */
    m->io.flags = ATTN_RUN_NO_WRITE;
    set_io(m, 2);
    m->io.flags = ATTN_RUN_NO_WRITE;
    CHECK(m, m->api->plan_graph(m->plan, ATTN_PLAN_REPLAY, &m->batch, NULL, &m->error));
    RUN(m);
    compare(m, false);
}

/* Request r as the only one of its step: its rows, lengths and blocks as they lie. */
static void only_request(struct mla *m, int32_t r)
{
    m->batch.num_reqs = 1;
    m->batch.query_start_loc += r;
    m->batch.query_start_loc_host += r;
    m->batch.seq_lens += r;
    m->batch.seq_lens_host += r;
    m->batch.block_table += (int64_t)r * MAX_BLOCKS;
    m->batch.num_actual_tokens = m->starts[r + 1];
    m->io.flags = ATTN_RUN_NO_WRITE;
}

/* Every request again alone, bit for bit, whatever its neighbours made of the chunks. */
static void check_invariant(const struct setting *s)
{
    int32_t size = V;
    OWNED(mla_end) struct mla *m = mla_create(s);
    int64_t count = (int64_t)m->starts[s->num_reqs] * s->heads * size;
    OWNED(memory_end) float *together = calloc((size_t)count, sizeof *together);
    step(m);
    compare(m, s->invariant == 1);
    memcpy(together, m->out, (size_t)count * sizeof *together);
    const struct attn_batch whole = m->batch;
    for (int32_t r = 0; r < s->num_reqs; r++) {
        int64_t first = (int64_t)m->starts[r] * s->heads * size;
        int64_t end = (int64_t)m->starts[r + 1] * s->heads * size;
        m->batch = whole;
        only_request(m, r);
        memset(m->out, 0xff, (size_t)count * sizeof *together);
        step(m);
        assert_memory_equal(m->out + first, together + first, (size_t)(end - first) * 4);
    }
}

TEST(test_invariant)
{
    static const char *const backends[] = {"cpu_ref", "cpu_simd"};
    static const int32_t rows[] = {0, 7, 16, 1, 30};
    for (int32_t b = 0; b <= CPU_SIMD; b++) {
        for (int32_t chunk = 0; chunk < 5; chunk++) {
            check_invariant(&(struct setting){
                backends[b], .heads = 6, .chunk = rows[chunk], .invariant = 1, .num_reqs = 5,
                .queries = {1, 1, 4, 3, 20}, .lens = {30, 1, 41, 33, 60}});
            check_invariant(&(struct setting){backends[b], .heads = 6, .chunk = rows[chunk],
                                              .invariant = 1, .num_reqs = 4,
                                              .queries = {2, 5, 0, 9}, .lens = {20, 17, 30, 47}});
        }
        check_invariant(&(struct setting){backends[b], .heads = 4, .invariant = 1, .drafted = 3,
                                          .num_reqs = 3, .queries = {3, 1, 4},
                                          .lens = {17, 9, 24}});
    }
}

/* A prompt in two steps, whatever its first part was computed with: all goes the latent way. */
static void check_prefix(const char *backend)
{
    const struct setting whole = {backend,       .heads = 6,         .invariant = 2,
                                  .num_reqs = 2, .queries = {30, 9}, .lens = {30, 9}};
    struct setting rest = whole;
    check_invariant(&whole);
    rest.queries[0] = 12;
    OWNED(mla_end) struct mla *m = mla_create(&whole), *second = mla_create(&rest);
    memcpy(second->rows, m->rows, sizeof m->rows);
    memcpy(second->q[0], m->q[18], 12 * sizeof m->q[0]);
    step(m);
    memcpy(second->cache, m->cache, sizeof(float) * BLOCK * ROW * NUM_BLOCKS);
    set_io(second, stage_keys(second, false));
    second->io.flags = ATTN_RUN_NO_WRITE;
    step(second);
    assert_memory_equal(second->out, m->out + 18 * 6 * V, 12 * 6 * V * sizeof(float));
}

TEST(test_invariant_prefix)
{
    check_prefix("cpu_ref");
    if (CPU_SIMD) {
        check_prefix("cpu_simd");
    }
}

/* In a batch of another order a decode would be computed as a prefill. */
TEST(test_invariant_order)
{
    const struct setting s =
        CPU_REF(.heads = 4, .invariant = 1, .num_reqs = 2, .queries = {5, 1}, .lens = {9, 9});
    OWNED(mla_end) struct mla *m = mla_create(&s);
    assert_int_equal(m->api->plan_batch(m->plan, &m->batch, NULL, &m->error),
                     ATTN_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(m->error.message, "request 1 has 1 queries"));
}

static void *symbol_of(const char *name)
{
    void *library = dlopen(MLA_WITHOUT_FUSION, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(library);
    void *symbol = dlsym(library, name);
    assert_non_null(symbol);
    return symbol;
}

/* The composition on other kernels, and its promise: each row of context is gathered once. */
TEST(test_gathered_once)
{
    const struct setting s = {"counted",
                              .heads = 4,
                              .chunk = 16,
                              .num_reqs = 5,
                              .queries = {1, 4, 3, 20, 1},
                              .lens = {30, 41, 3, 60, 1},
                              .apart = true};
    int32_t *gathered = symbol_of("seen_gathered"), *calls = symbol_of("seen_gather_calls"),
            rows = 0;
    int32_t *attends = symbol_of("seen_attend_calls"), *latent = symbol_of("seen_latent_calls"),
            *requests = symbol_of("seen_latent_requests");
    OWNED(mla_end) struct mla *m = mla_create(&s);
    memset(gathered, 0, 4096 * sizeof *gathered);
    *calls = *attends = *latent = *requests = 0;
    step(m);
    compare(m, true);
    for (int32_t i = 0; i < 4096; i++) {
        assert_true(gathered[i] <= 1);
        rows += gathered[i];
    }
    /* contexts of the prefills; the last request, of one token, stands after them */
    assert_int_equal(rows, 37 + 40);
    assert_int_equal(*calls, 5);
    assert_int_equal(*attends, 6); /* the new keys, and the chunks */
    assert_int_equal(*latent, 1);
    assert_int_equal(*requests, 1); /* the decode */
}

/* Without attend, gather and merge everything goes the latent way. */
TEST(test_latent_only)
{
    int32_t *latent = symbol_of("seen_latent_calls"), *attends = symbol_of("seen_attend_calls");
    *latent = *attends = 0;
    check(&(struct setting){"latent_only", .heads = 5, .num_reqs = 4, .queries = {1, 1, 6, 12},
                            .lens = {30, 1, 41, 12}},
          false);
    assert_int_equal(*latent, 4); /* decodes and prefills, twice */
    assert_int_equal(*attends, 0);
}

/* A backend without the parts is refused with each that is missing; heads that are no multiple,
 * too. */
TEST(test_refusals)
{
    static const struct {
        const char *backend, *field, *asked;
        int32_t heads, topk;
    } cases[] = {{"one_query", "mla_prefill", "gather_kv of the context", 4, 0},
                 {"one_query", "mla_prefill", "merge_states of context and new keys", 4, 0},
                 {"one_query", "max_query_len", "prefill in latent space", 4, 0},
                 {"counted", "padded_num_q_heads", "6", 6, 0},
                 {"counted", "kernel", "attend_mla_sparse", 4, 8}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct setting s = {cases[c].backend, .heads = cases[c].heads, .topk = cases[c].topk};
        struct mla m = {.s = &s, .error = ATTN_ERROR_INIT};
        const struct attn_reason wanted = {.field = cases[c].field, .asked = cases[c].asked};
        open_core(&m);
        describe(&m);
        if (client_refuses(m.api, m.runtime, &m.described, ATTN_PHASE_PREFILL, s.backend, &wanted) <
            1) {
            fail_msg("%s is not refused for %s: %s", s.backend, cases[c].field, cases[c].asked);
        }
        m.api->runtime_destroy(m.runtime);
    }
}

/* A run of the io as `change` leaves it. */
#define RUN_REFUSED(field, change)                                                                 \
    WITH(m->ext, ,                                                                                 \
         WITH(m->lists_io, ,                                                                       \
              WITH(m->io, change,                                                                  \
                   REFUSED(&m->error, field, m->api->run(m->plan, m->layer, &m->io, &m->error)))))

TEST(test_bad_runs)
{
    const struct setting s = CPU_REF(.heads = 4, .topk = 0, TWO_REQS);
    OWNED(mla_end) struct mla *m = mla_create(&s);
    step(m);
    struct attn_tensor few = *m->ext.kv_c; /* prefills read them where nothing is written, too */
    few.shape = (int64_t[]){6, RANK};
    RUN_REFUSED("attn_io_mla", m->io.next = NULL);
    RUN_REFUSED("attn_io_mla", m->io.q = m->ext.q_nope);
    RUN_REFUSED("q_nope", m->ext.q_nope = NULL);
    RUN_REFUSED("q_pe", m->ext.q_pe = m->ext.q_nope);
    RUN_REFUSED("kv_c", m->ext.kv_c = NULL);
    RUN_REFUSED("kv_c", (m->ext.kv_c = &few, m->io.flags = ATTN_RUN_NO_WRITE));
    RUN_REFUSED("k_pe", m->ext.k_pe = m->ext.kv_c);
    RUN_REFUSED("out", m->io.out = m->ext.q_nope);
    RUN_REFUSED("lse", m->io.lse = m->ext.kv_c);
    RUN_REFUSED("q_nope", m->q[3][1][2] = NAN);
    m->q[3][1][2] = 1;
    const float kept = m->kv_c[1][2];
    RUN_REFUSED("kv_c", m->kv_c[1][2] = NAN);
    m->kv_c[1][2] = kept;
    step(m);
    compare(m, true);
    m->batch.seq_lens_host = NULL;
    REFUSED(&m->error, "seq_lens_host", m->api->plan_batch(m->plan, &m->batch, NULL, &m->error));
}

/* Padding may hold NaN where rows are written alone; rows after the tokens may have slots. */
TEST(test_nan_of_padding)
{
    static const struct setting alone = CPU_REF(.heads = 4, .topk = 0, .num_reqs = 2,
                                                .queries = {1, 1}, .lens = {30, 41}),
                                projected = CPU_REF(.heads = 4, .topk = 0, TWO_REQS);
    for (int32_t i = 0; i < 2; i++) {
        OWNED(mla_end) struct mla *m = mla_create(i == 0 ? &alone : &projected);
        const int32_t tokens = i == 0 ? 2 : 7;
        step(m);
        m->slots[tokens] = m->slots[1];
        m->slots[1] = -1;
        m->batch.num_slots = tokens + 1;
        PLAN(m);
        m->tensors[0].shape[0] = m->tensors[1].shape[0] = tokens + 1;
        RUN_REFUSED("k_pe", m->k_pe[tokens][2] = NAN);
        m->k_pe[tokens][2] = 1;
        RUN(m);
        m->kv_c[1][2] = NAN;
        assert_int_equal(m->api->run(m->plan, m->layer, &m->io, &m->error),
                         i == 0 ? ATTN_OK : ATTN_ERROR_NAN);
    }
}

/* Heads that the engine pads to may hold anything, under validation too. */
TEST(test_nan_of_padded_heads)
{
    static const struct setting s = {"cpu_ref",     .heads = 5,        .padded = 8,
                                     .num_reqs = 2, .queries = {1, 6}, .lens = {30, 41}};
    OWNED(mla_end) struct mla *m = mla_create(&s);
    step(m);
    PLAN(m);
    m->q[6][5][0] = m->q[6][7][NOPE] = NAN;
    RUN(m);
    compare(m, true);
    RUN_REFUSED("q_nope", m->q[6][4][NOPE - 1] = NAN);
    m->q[6][4][NOPE - 1] = 1;
    RUN_REFUSED("q_pe", m->q[6][4][NOPE] = NAN);
}

TEST(test_bad_topk)
{
    const struct setting s =
        CPU_REF(.heads = 4, .topk = 4, .num_reqs = 2, .queries = {1, 1}, .lens = {30, 41});
    OWNED(mla_end) struct mla *m = mla_create(&s);
    step(m);
    RUN_REFUSED("topk_indices", m->ext.topk_stride = 3);
    RUN_REFUSED("topk_indices", m->ext.topk_indices = NULL);
}

TEST(test_lists)
{
    static const struct setting all[] = {
        CPU_REF(.heads = 6, .topk = 8, .lists = true),
        CPU_REF(.heads = 6, .topk = 8, .lists = true, .lengths = true),
        CPU_REF(.heads = 6, .topk = 8, .lists = true, .lengths = true, .window = 7),
        {"cpu_simd", .heads = 6, .topk = 8, .lists = true},
        {"cpu_simd", .heads = 6, .topk = 8, .lists = true, .lengths = true}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct setting s = all[i];
        if (!CPU_SIMD && strcmp(s.backend, "cpu_simd") == 0) {
            continue;
        }
        s.num_reqs = 3;
        memcpy(s.queries, (const int32_t[]){1, 6, 12}, 3 * sizeof *s.queries);
        memcpy(s.lens, (const int32_t[]){30, 41, 60}, 3 * sizeof *s.lens);
        check(&s, false);
    }
}

TEST(test_bad_lists)
{
    const struct setting s = CPU_REF(.heads = 4, .topk = 4, .lists = true, .num_reqs = 2,
                                     .queries = {1, 1}, .lens = {30, 41});
    OWNED(mla_end) struct mla *m = mla_create(&s);
    step(m);
    RUN_REFUSED("topk_indices", m->ext.topk_indices = m->topk[0]);
    RUN_REFUSED("token_stride", m->lists_io.token_stride = 3);
    RUN_REFUSED("indices", m->topk[1][1] = m->topk[1][0] = 2);
    RUN_REFUSED("attn_io_index_lists", m->ext.ext.next = NULL);
}

#define WEIGHTS_REFUSED(field, change)                                                             \
    do {                                                                                           \
        change;                                                                                    \
        REFUSED(&m->error, field, m->api->layer_bind_params(m->layer, &params, &m->error));        \
    } while (0)

TEST(test_bad_weights)
{
    const struct setting s = CPU_REF(.heads = 4, ONE_REQ);
    struct attn_mla_weights weights = EXTENSION(attn_mla_weights, ATTN_EXT_MLA_WEIGHTS, NULL, );
    struct attn_layer_params params = {.struct_size = sizeof params};
    OWNED(mla_end) struct mla *m = mla_create(&s);
    m->api->plan_destroy(m->plan);
    m->plan = NULL;
    WEIGHTS_REFUSED("attn_mla_weights", params.next = NULL);
    WEIGHTS_REFUSED("w_uk", params.next = &weights.ext);
    weights.w_uk = tensor(m, 0, m->uk, 3, 4, NOPE, RANK, NOPE * RANK, RANK);
    WEIGHTS_REFUSED("w_uv", weights.w_uv = tensor(m, 1, m->uv, 3, 4, RANK, V + 1, RANK * V, V));
    weights.w_uv = tensor(m, 1, m->uv, 3, 4, RANK, V, RANK * V, V);
    WEIGHTS_REFUSED("w_uk_scale", weights.w_uk_scale = tensor(m, 2, m->uv, 1, 3, 0, 0, 1, 0));
    weights.w_uk_scale = NULL;
    const struct attn_tensor right = *weights.w_uv;
    struct attn_tensor *w_uv = &m->tensors[1].tensor;
    WEIGHTS_REFUSED("w_uv", w_uv->dtype.bits = 64);
    WEIGHTS_REFUSED("w_uv", w_uv->dtype = ((struct attn_dtype){ATTN_CODE_INT, 8, 1}));
    WEIGHTS_REFUSED("w_uv", (*w_uv = right, w_uv->data = NULL));
    *w_uv = right;
    WEIGHTS_REFUSED("kv_b_proj", weights.kv_b_proj = tensor(m, 3, m->weights, 2, 4 * (NOPE + V),
                                                            RANK + 1, 0, RANK, 1));
}

TEST(test_mxfp4_is_refused_at_selection)
{
    const struct setting s = CPU_REF(.heads = 4, ONE_REQ);
    const struct attn_select_options options = SIZED(attn_select_options, .backend = "latent_only");
    OWNED(mla_end) struct mla *m = mla_create(&s);
    const struct attn_layer_desc *layers[] = {&m->described};
    attn_assignment *assignment;
    CHECK(m, m->api->select(m->runtime, &options, layers, 1, &assignment, &m->error));
    m->api->assignment_destroy(assignment);
    m->desc.weight_dtype = ATTN_DTYPE_MXFP4;
    REFUSED(&m->error, "ATTN_BACKEND",
            m->api->select(m->runtime, &options, layers, 1, &assignment, &m->error));
    assert_non_null(strstr(m->error.message, "weight_dtype mxfp4"));
    m->desc.weight_dtype = 15;
    REFUSED(&m->error, "weight_dtype",
            m->api->select(m->runtime, NULL, layers, 1, &assignment, &m->error));
    assert_non_null(strstr(m->error.message, "weight_dtype is 15; 0 to 7, or 16 (mxfp4)"));
}

TEST(test_bad_mxfp4_weights)
{
    const struct setting s = CPU_REF(.heads = 4, .mxfp4 = true, ONE_REQ);
    OWNED(mla_end) struct mla *m = mla_create(&s);
    struct attn_mla_weights weights = m->given;
    const struct attn_layer_params params = SIZED(attn_layer_params, .next = &weights.ext);
    const struct attn_dtype f32 = {ATTN_CODE_FLOAT, 32, 1};
    m->api->plan_destroy(m->plan);
    m->plan = NULL;
    WEIGHTS_REFUSED("w_uk_scale", weights.w_uk_scale = NULL);
    WEIGHTS_REFUSED("w_uk_scale", weights.w_uk_scale = weights.w_uv_scale);
    weights.w_uk_scale = m->given.w_uk_scale;
    WEIGHTS_REFUSED("w_uv_scale", m->weight[3].tensor.dtype = f32);
    m->weight[3].tensor.dtype = m->weight[2].tensor.dtype;
    WEIGHTS_REFUSED("w_uv", m->weight[1].tensor.dtype = f32);
    m->weight[1].tensor.dtype = m->weight[0].tensor.dtype;
    WEIGHTS_REFUSED("kv_b_proj", weights.kv_b_proj =
                                     tensor(m, 4, m->weights, 2, 4 * (NOPE + V), RANK, 0, RANK, 1));
    SAYS(m, "mxfp4");
}

int main(void)
{
    /* with the published sizes only the test that needs them */
    (RANK == 512 ? cmocka_set_test_filter : cmocka_set_skip_filter)("test_ds_mla");
    return test_run(NULL, NULL);
}

/* The contents of the capsule of one step, but for its output. */
static uint8_t *take_contents(const struct setting *s, size_t *size)
{
    char record[80], file[160];
    snprintf(record, sizeof record, "/tmp/attn-mla-%ld:layer=0,step=0,contents=real",
             (long)getpid());
    snprintf(file, sizeof file, "/tmp/attn-mla-%ld/layer-0-step-0-%ld.capsule", (long)getpid(),
             (long)getpid());
    setenv("ATTN_RECORD", record, 1);
    OWNED(mla_end) struct mla *m = mla_create(s);
    unsetenv("ATTN_RECORD");
    step(m);
    FILE *opened = fopen(file, "rb");
    assert_non_null(opened);
    uint8_t *bytes = calloc(1, 1 << 20);
    const size_t whole = fread(bytes, 1, 1 << 20, opened);
    fclose(opened);
    unlink(file);
    *strrchr(file, '/') = '\0';
    rmdir(file);
    const uint8_t *end = memmem(bytes, whole, "\nend\n", 5);
    assert_non_null(end);
    *size = whole - (size_t)(end + 5 - bytes) -
            sizeof(float) * V * (size_t)s->heads * (size_t)m->starts[s->num_reqs];
    memmove(bytes, end + 5, *size);
    const float *pe = m->q[0][0] + (s->moved ? RANK : NOPE);
    assert_memory_equal(bytes, m->q[0][0], sizeof(float) * NOPE);
    assert_memory_equal(bytes + sizeof(float) * NOPE, pe, sizeof(float) * ROPE);
    return bytes;
}

/* However an engine lays them out: weights joined or split, queries in one tensor or two. */
TEST(test_capsules_hold_the_same)
{
    const struct setting plain =
        CPU_REF(.heads = 6, .num_reqs = 3, .queries = {1, 4, 20}, .lens = {30, 41, 60});
    size_t size, sizes[3];
    uint8_t *bytes = take_contents(&plain, &size);
    assert_int_equal(size,
                     sizeof(float) * (25 * 6 * (NOPE + ROPE) + 131 * ROW + 6 * (NOPE + V) * RANK));
    for (int32_t i = 0; i < 3; i++) {
        struct setting other = plain;
        other.split = i == 0;
        other.apart = i == 1;
        other.moved = i == 2;
        uint8_t *same = take_contents(&other, &sizes[i]);
        assert_int_equal(sizes[i], size);
        assert_memory_equal(same, bytes, size);
        free(same);
    }
    free(bytes);
}
