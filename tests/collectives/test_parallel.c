/* SPDX-License-Identifier: Apache-2.0 */
/* A layer whose cache is spread over the ranks of MPI gives on every rank what it gives alone. Run
 * under mpirun; each rank has its own query heads, all ranks the same keys. Exit status 0 if every
 * rank agrees. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/client.h"
#include "heads.h"
#include "ranks.h"
#include "shard.h"

#define BOUND 4e-5

attn_mpi_collectives_create_fn attn_mpi_collectives_create;

/* A decode step; a mixed one with a draft, a chunk and a first prefill; one without any context. */
static const struct {
    const char *name;
    int32_t num_reqs, queries[6], lens[6];
} batches[] = {
    {"decode", 5, {1, 1, 1, 1, 1}, {40, 17, 1, 2, 333}},
    {"mixed", 5, {1, 3, 9, 20, 5}, {40, 17, 33, 20, 130}},
    {"prefill", 3, {20, 1, 7}, {20, 1, 7}},
};

/* How heads are exchanged: by `reduce`, or by the table's gather_heads and merge_heads, which a
 * table that was built before they came does not have, whatever lies after it. */
static const struct {
    const char *name;
    int32_t reduce;
    bool small, old;
} exchanges[] = {
    {"reduce-scatter", ATTN_CP_ALL_GATHER_REDUCE_SCATTER, false, false},
    {"all to all", ATTN_CP_ALL_TO_ALL, false, false},
    {"heads", ATTN_CP_ALL_TO_ALL, true, false},
    {"a shorter table", ATTN_CP_ALL_TO_ALL, false, true},
};

/* The same layer with its cache spread. */
struct spread {
    struct shard shard;
    struct attn_collectives table; /* where it is a shorter one */
    int64_t slots[MAX_TOKENS];
    struct attn_batch batch;
};

static void spread_init(struct spread *s, struct fixture *f, int32_t interleave, int32_t exchange)
{
    s->table = *heads_over(ranks);
    s->table.struct_size = offsetof(struct attn_collectives, gather_heads);
    const struct attn_context_parallel cp =
        EXTENSION(attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL, NULL,
                  .decode = exchanges[exchange].small ? heads_over(ranks)
                            : exchanges[exchange].old ? &s->table
                                                      : ranks,
                  .interleave = interleave, .reduce = exchanges[exchange].reduce);
    shard_init(&s->shard, f, &cp, ranks->rank, ranks->world_size);
    s->batch = f->batch;
    s->batch.block_table = s->shard.table;
    s->batch.slot_mapping = s->slots;
    for (int32_t r = 0; r < f->batch.num_reqs; r++) {
        int32_t first = f->query_start_loc[r], count = f->query_start_loc[r + 1] - first;
        shard_slots(&s->shard, f, r, f->seq_lens[r] - count, count, s->slots + first);
    }
}

static double difference(const float *a, const float *b, int64_t count)
{
    double most = 0;
    for (int64_t i = 0; i < count; i++) {
        double d = a[i] == b[i] ? 0 : fabs((double)a[i] - b[i]);
        most = isnan(d) ? INFINITY : fmax(most, d);
    }
    return most;
}

static void verify(size_t which, int32_t kv_heads, int32_t interleave, int32_t exchange,
                   int32_t sinks)
{
    const struct attn_layer_desc desc = DECODER(.num_kv_heads = kv_heads, .has_sinks = sinks);
    OWNED(fixture_finish) struct fixture f;
    struct spread s = {0};
    fixture_init(&f, "cpu_ref", &desc, batches[which].queries, batches[which].lens,
                 batches[which].num_reqs, 0, NULL, true);
    int64_t rows = (int64_t)f.batch.num_tokens * f.layer.num_q_heads,
            elements = rows * f.layer.head_size;
    for (int64_t i = 0; i < elements; i++) { /* this rank's own heads */
        f.q[i] = f.q[i] * (ranks->rank % 2 ? -1.0f : 1.0f) + 0.01f * (float)(i % 7 * ranks->rank);
    }
    fixture_step(&f);
    OWNED(memory_end) float *out = malloc((size_t)elements * sizeof *out);
    OWNED(memory_end) float *lse = malloc((size_t)rows * sizeof *lse);
    memcpy(out, f.out, (size_t)elements * sizeof *out);
    memcpy(lse, f.lse, (size_t)rows * sizeof *lse);
    spread_init(&s, &f, interleave, exchange);
    int64_t merges = heads_merges();
    for (int32_t i = 0; i < 2; i++) { /* a plan used again */
        memset(f.out, 0xff, (size_t)elements * sizeof *out);
        memset(f.lse, 0xff, (size_t)rows * sizeof *lse);
        CHECK(&f, f.api->plan_batch(s.shard.plan, &s.batch, NULL, &f.error));
        CHECK(&f, f.api->run(s.shard.plan, f.api->model_layer(s.shard.model, 0), &f.io, &f.error));
    }
    double d = fmax(difference(out, f.out, elements), difference(lse, f.lse, rows));
    if (ranks->rank == 0) {
        print_message("%s, %d key heads, interleave %d, %s%s: %g\n", batches[which].name, kv_heads,
                      interleave, exchanges[exchange].name, sinks ? ", sinks" : "", d);
    }
    assert_true(d < BOUND);
    assert_int_equal(heads_merges() - merges, exchanges[exchange].small ? 2 : 0);
    shard_finish(&s.shard, &f);
}

TEST(test_equal_to_one_rank)
{
    static const int32_t interleaves[] = {1, 2, 16};
    for (size_t which = 0; which < sizeof batches / sizeof *batches; which++) {
        for (int32_t i = 0; i < 3; i++) {
            for (int32_t exchange = 0; exchange < (int32_t)(sizeof exchanges / sizeof *exchanges);
                 exchange++) {
                verify(which, 1 + (i + exchange) % 2, interleaves[i], exchange, i == 1);
            }
        }
    }
}

/* A captured step whose context has the own keys takes no batch that wants them apart, whatever is
 * planned between. */
TEST(test_graph_stays)
{
    static const int32_t uneven[] = {0, 2, 2, 3, 4, 5};
    const struct attn_layer_desc desc = DECODER(.num_kv_heads = 1);
    OWNED(fixture_finish) struct fixture f;
    struct spread s = {0};
    fixture_init(&f, "cpu_ref", &desc, batches[0].queries, batches[0].lens, batches[0].num_reqs, 0,
                 NULL, true);
    const int64_t elements = f.batch.num_tokens * f.layer.num_q_heads * f.layer.head_size;
    fixture_step(&f);
    OWNED(memory_end) float *out = malloc((size_t)elements * sizeof *out);
    memcpy(out, f.out, (size_t)elements * sizeof *out);
    spread_init(&s, &f, 2, 2);
    struct attn_batch other = s.batch;
    other.query_start_loc = other.query_start_loc_host = uneven;
    CHECK(&f, f.api->plan_graph(s.shard.plan, ATTN_PLAN_CAPTURE, &s.batch, NULL, &f.error));
    INVALID(&f.error, "query_start_loc",
            f.api->plan_graph(s.shard.plan, ATTN_PLAN_REPLAY, &other, NULL, &f.error));
    CHECK(&f, f.api->plan_batch(s.shard.plan, &other, NULL, &f.error));
    CHECK(&f, f.api->plan_graph(s.shard.plan, ATTN_PLAN_REPLAY, &s.batch, NULL, &f.error));
    memset(f.out, 0xff, (size_t)elements * sizeof *out);
    CHECK(&f, f.api->run(s.shard.plan, f.api->model_layer(s.shard.model, 0), &f.io, &f.error));
    assert_true(difference(out, f.out, elements) < BOUND);
    shard_finish(&s.shard, &f);
}

/* gather_heads and merge_heads come together. */
TEST(test_half_a_table)
{
    const struct attn_layer_desc desc = DECODER(.num_kv_heads = 1);
    OWNED(fixture_finish) struct fixture f;
    struct attn_collectives half = *heads_over(ranks);
    const struct attn_context_parallel cp =
        EXTENSION(attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL, NULL, .decode = &half);
    half.merge_heads = NULL;
    fixture_init(&f, "cpu_ref", &desc, batches[0].queries, batches[0].lens, batches[0].num_reqs, 0,
                 NULL, true);
    struct attn_layer_desc layer = f.layer;
    const struct attn_layer_desc *layers[] = {&layer};
    const struct attn_select_options options = SIZED(attn_select_options, .backend = "cpu_ref");
    attn_assignment *assignment = NULL;
    layer.next = &cp.ext;
    INVALID(&f.error, "decode",
            f.api->select(f.runtime, &options, layers, 1, &assignment, &f.error));
}

TEST(test_table)
{
    struct attn_error error = ATTN_ERROR_INIT;
    int32_t send = 100 + ranks->rank, received[16];
    INVALID(&error, "collectives", attn_mpi_collectives_create(0, NULL, &error));
    const struct attn_collective_args gather =
        SIZED(attn_collective_args, .user = ranks->user, .send = &send, .receive = received,
              .count = sizeof send);
    assert_ok(ranks->all_gather(&gather, &error));
    for (int32_t i = 0; i < ranks->world_size; i++) {
        assert_int_equal(received[i], 100 + i);
    }
    float mine = (float)(ranks->rank % 3), most = -1;
    struct attn_collective_args reduce = SIZED(attn_collective_args, .user = ranks->user,
                                               .send = &mine, .receive = &most, .count = 1);
    assert_ok(ranks->all_reduce_max_f32(&reduce, NULL));
    assert_true(most == (float)(ranks->world_size > 2 ? 2 : ranks->world_size - 1));
    reduce.count = (size_t)1 << 40;
    REFUSED_AS(ATTN_ERROR_LIMIT, &error, "count", ranks->all_reduce_max_f32(&reduce, &error));
}

int main(int argc, char **argv)
{
    ranks_begin(&argc, &argv);
    return ranks_end(test_run(NULL, NULL));
}
