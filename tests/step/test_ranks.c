/* SPDX-License-Identifier: Apache-2.0 */
/* A layer whose cache is spread over two ranks, of which this is one, and whose collectives are the
 * test's: which of them a step calls, that their errors are a run's, and what is refused. */
#include <math.h>
#include <string.h>

#include "fixture.h"
#include "support/client.h"
#include "support/test.h"

enum { REQS = 3, HQ = 4, D = 32 };

static const int32_t ones[REQS] = {1, 1, 1}, several[REQS] = {1, 5, 9}, lens[REQS] = {40, 17, 33};

static struct {
    int32_t gathers, heads; /* calls */
    attn_status status;     /* what they answer */
} calls;

static attn_status gather(const struct attn_collective_args *args, struct attn_error *error)
{
    calls.gathers++;
    memcpy(args->receive, args->send, args->count);
    memcpy((char *)args->receive + args->count, args->send, args->count);
    return calls.status;
}

static attn_status exchange(const struct attn_collective_args *args, struct attn_error *error)
{
    memcpy(args->receive, args->send, 2 * args->count);
    return calls.status;
}

static attn_status gather_heads(const struct attn_gather_heads_args *args, struct attn_error *error)
{
    calls.heads++;
    return calls.status;
}

static attn_status merge_heads(const struct attn_merge_heads_args *args, struct attn_error *error)
{
    return calls.status;
}

static struct attn_collectives table = {.struct_size = sizeof table,
                                        .world_size = 2,
                                        .all_gather = gather,
                                        .all_to_all = exchange,
                                        .reduce_scatter_f32 = exchange,
                                        .gather_heads = gather_heads,
                                        .merge_heads = merge_heads};
static const struct attn_context_parallel spread = {
    .ext = {.id = ATTN_EXT_CONTEXT_PARALLEL, .struct_size = sizeof spread},
    .decode = &table,
    .interleave = 1,
    .reduce = ATTN_CP_ALL_TO_ALL};

static void init(struct fixture *f, const int32_t *queries)
{
    const struct attn_layer_desc layer = {
        .next = &spread.ext, .kind = ATTN_LAYER_DECODER, .causal = 1};
    calls.status = ATTN_OK;
    fixture_init(f, "cpu_ref", &layer, queries, lens, REQS, 0, NULL, queries == several);
}

/* Rows of all heads and a log-sum-exp each, up to what the table takes at once. */
TEST(test_small_exchanges)
{
    const size_t bytes = REQS * HQ * (8 + D * sizeof(float));
    for (size_t less = 0; less < 2; less++) {
        OWNED(fixture_finish) struct fixture f;
        table.max_exchange_bytes = bytes - less;
        init(&f, ones);
        calls.heads = calls.gathers = 0;
        fixture_step(&f);
        assert_int_equal(calls.heads, less == 0);
        assert_int_equal(calls.gathers, less);
    }
}

TEST(test_failing_collectives)
{
    for (size_t small = 0; small < 2; small++) {
        OWNED(fixture_finish) struct fixture f;
        table.max_exchange_bytes = small * 65536;
        init(&f, ones);
        fixture_step(&f);
        calls.status = ATTN_ERROR_DEVICE;
        assert_int_equal(fixture_run(&f), ATTN_ERROR_DEVICE);
        assert_non_null(strstr(f.error.message, "a collective of the engine failed"));
    }
}

static struct fixture f;

/* The attend reads k and v of all tokens, those among them that another rank's cache has. */
CASE(test_own_keys, init(&f, several))
{
    enum { ROW = 2 * D, OTHERS = 3 };
    static const char *const names[] = {"k", "v"};
    f.slots[OTHERS] = -1;
    fixture_step(&f);
    float *const data[] = {f.k, f.v};
    for (int32_t i = 0; i < 2; i++) {
        float *number = &data[i][OTHERS * ROW + ROW - 1];
        WITH(*number, *number = NAN,
             REFUSED_AS(ATTN_ERROR_NAN, &f.error, names[i], fixture_run(&f)));
        f.batch.num_slots = OTHERS;
        CHECK(&f, fixture_batch(&f));
        WITH(f.shapes[1 + i][0], f.shapes[1 + i][0]--, fixture_refuse_run(&f, names[i]));
        f.io.flags = ATTN_RUN_NO_ATTEND;
        WITH(f.shapes[1 + i][0], f.shapes[1 + i][0] = OTHERS, CHECK(&f, fixture_run(&f)));
        f.io.flags = 0;
    }
}

/* Parts are merged from the first row of out on, which has to be the batch's. */
CASE(test_rows_of_others, init(&f, several))
{
    fixture_skip_first(&f);
    fixture_refuse_plan(&f, "query_start_loc");
}

/* Layers share a table only where a block has the same tokens of the same ranks. */
CASE(test_groups, init(&f, ones))
{
    struct attn_collectives others = table;
    struct attn_context_parallel cps[] = {spread, spread, spread, spread};
    cps[1].reduce = ATTN_CP_ALL_GATHER_REDUCE_SCATTER; /* which changes no table */
    cps[2].interleave = 2;
    cps[3].decode = &others;
    for (int32_t i = 1; i < 4; i++) {
        struct attn_layer_desc second = f.layer;
        const struct attn_layer_desc *layers[] = {&f.layer, &second};
        attn_model *model;
        second.name = "second";
        second.next = &cps[i].ext;
        CHECK(&f,
              client_model(f.api, f.runtime, CLIENT_ORDER("cpu_ref"), layers, 2, &model, &f.error));
        assert_int_equal(f.api->model_num_groups(model, ATTN_GROUP_BLOCK_TABLE), i == 1 ? 1 : 2);
        f.api->model_destroy(model);
    }
}

/* A block of a cache that ranks of both tables share has the keys of all of them. */
TEST(test_ranks_of_a_cache)
{
    static const int32_t one[] = {1};
    const struct attn_collectives others = table;
    const struct attn_context_parallel both =
        EXTENSION(attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL, NULL, .decode = &table,
                  .prefill = &others, .interleave = 1, .reduce = ATTN_CP_ALL_TO_ALL);
    const struct attn_layer_desc layer = {
        .next = &both.ext, .kind = ATTN_LAYER_DECODER, .causal = 1};
    for (int32_t length = 64; length <= 65; length++) {
        OWNED(fixture_finish) struct fixture f;
        fixture_init(&f, "cpu_ref", &layer, one, &length, 1, 0, NULL, false);
        f.batch.block_table_stride = 1; /* one block of 16 slots on each of four ranks */
        if (length == 64) {
            CHECK(&f, fixture_batch(&f));
        } else {
            fixture_refuse_plan(&f, "block_table_stride");
        }
    }
}

/* An engine's own counts of the keys that are here: no more than the context has. */
CASE(test_local_lengths, init(&f, ones))
{
    int32_t local[REQS] = {20, 8, 16};
    const struct attn_batch_context_parallel counts =
        EXTENSION(attn_batch_context_parallel, ATTN_EXT_BATCH_CONTEXT, NULL,
                  .local_seq_lens = local, .local_seq_lens_host = local,
                  .query_lens_host = ones); /* not read: no ranks split the queries */
    f.batch.next = &counts.ext;
    fixture_step(&f);
    local[1] = 17; /* more than the context's 16 */
    fixture_refuse_plan(&f, "local_seq_lens");
    local[1] = -1;
    fixture_refuse_plan(&f, "local_seq_lens");
}
