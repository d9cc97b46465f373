/* SPDX-License-Identifier: Apache-2.0 */
/* Queries split over the ranks of MPI: every rank gets for its slices what one rank gets for ranks,
 * over a whole cache, over one spread by the same ranks, and over one spread by heads' ranks too.
 * Run under mpirun. Exit status 0 if every rank agrees. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/client.h"
#include "ranks.h"
#include "shard.h"

#define BOUND 4e-5

enum { HQ = 4 };

/* This rank alone; and where there are four, two by two. */
static struct attn_collectives *self, *row_pair, *head_pair;

/* Requests shorter than the ranks are many leave some of them without queries, and one alone leaves
 * all but one without any. */
static const struct {
    const char *name;
    int32_t num_reqs, queries[5], lens[5];
} batches[] = {
    {"prefill", 3, {20, 1, 7}, {20, 1, 7}},
    {"chunks", 5, {1, 3, 9, 33, 70}, {40, 17, 33, 60, 300}},
    {"one query", 1, {1}, {90}},
    {"decode", 4, {1, 1, 1, 1}, {40, 17, 1, 90}},
};

struct trial {
    size_t which;
    const struct attn_collectives *rows, *heads;
    int32_t order, interleave, reduce;
    bool split; /* else every rank has all queries */
};

struct rank_part {
    struct shard shard;
    int32_t starts[6], own[5];
    int64_t slots[MAX_TOKENS];
    int32_t rows[MAX_TOKENS], num_rows; /* this rank's rows of the whole batch */
    float q[MAX_TOKENS * HQ * 32], k[MAX_TOKENS * HQ * 32], v[MAX_TOKENS * HQ * 32];
    float out[MAX_TOKENS * HQ * 32], lse[HQ * MAX_TOKENS];
    int64_t shapes[5][3];
    struct attn_tensor tensors[5];
    struct attn_batch batch;
    struct attn_batch_context_parallel ext;
    struct attn_step_io io;
};

/* Whose is query i of Q? As attn/collectives.h says it. */
static int32_t rank_of(int32_t i, int32_t queries, int32_t ranks, int32_t order)
{
    int32_t parts = order == ATTN_CP_ZIGZAG ? 2 * ranks : ranks;
    int32_t part = i / ((queries + parts - 1) / parts);
    return part < ranks ? part : parts - 1 - part;
}

static void rank_part_bind(struct rank_part *s, struct fixture *f, const struct trial *t)
{
    const struct attn_context_parallel cp = EXTENSION(
        attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL, NULL, .decode = t->heads,
        .prefill = t->rows, .interleave = t->interleave, .reduce = t->reduce, .order = t->order);
    if (t->heads == NULL) {
        shard_init(&s->shard, f, &cp, 0, 1);
    } else {
        shard_init(&s->shard, f, &cp, t->rows->rank * t->heads->world_size + t->heads->rank,
                   t->heads->world_size * t->rows->world_size);
    }
}

/* This rank's rows of the fixture's batch. */
static void rank_part_cut(struct rank_part *s, struct fixture *f, const struct trial *t)
{
    int64_t row = f->layer.head_size, kv = f->layer.num_kv_heads;
    for (int32_t r = 0; r < f->batch.num_reqs; r++) {
        int32_t first = f->query_start_loc[r], count = f->query_start_loc[r + 1] - first;
        for (int32_t i = 0; i < count; i++) {
            if (!t->split || rank_of(i, count, t->rows->world_size, t->order) == t->rows->rank) {
                s->rows[s->num_rows++] = first + i;
            }
        }
        s->starts[r + 1] = s->num_rows;
        s->own[r] = count;
        shard_slots(&s->shard, f, r, f->seq_lens[r] - count, count, s->slots + first);
    }
    const int64_t heads[] = {HQ, kv, kv, HQ};
    const float *from[] = {f->q, f->k, f->v};
    float *data[] = {s->q, s->k, s->v, s->out};
    for (int32_t i = 0; i < 4; i++) {
        for (int32_t j = 0; i < 3 && j < s->num_rows; j++) {
            memcpy(data[i] + j * heads[i] * row, from[i] + s->rows[j] * heads[i] * row,
                   (size_t)(heads[i] * row) * sizeof(float));
        }
        memcpy(s->shapes[i], (int64_t[]){s->num_rows, heads[i], row}, sizeof s->shapes[i]);
        s->tensors[i] = f->tensors[0];
        s->tensors[i].data = data[i];
        s->tensors[i].shape = s->shapes[i];
    }
    s->shapes[4][0] = HQ;
    s->shapes[4][1] = s->num_rows;
    s->tensors[4] = *f->io.lse;
    s->tensors[4].data = s->lse;
    s->tensors[4].shape = s->shapes[4];
    s->ext = EXTENSION(attn_batch_context_parallel, ATTN_EXT_BATCH_CONTEXT, NULL,
                       .query_lens_host = s->own);
    s->batch = f->batch;
    s->batch.next = t->split ? &s->ext.ext : NULL;
    s->batch.num_tokens = s->batch.num_actual_tokens = s->num_rows;
    s->batch.query_start_loc = s->batch.query_start_loc_host = s->starts;
    s->batch.block_table = s->shard.table;
    s->batch.slot_mapping = s->slots;
    s->io = SIZED(attn_step_io, .q = &s->tensors[0], .k = &s->tensors[1], .v = &s->tensors[2],
                  .out = &s->tensors[3], .lse = &s->tensors[4]);
}

static double difference(const struct rank_part *s, const struct fixture *f)
{
    double most = 0;
    int64_t row = HQ * f->layer.head_size, tokens = f->batch.num_tokens;
    for (int64_t i = 0; i < s->num_rows; i++) {
        for (int64_t j = 0; j < row; j++) {
            double d = fabs((double)s->out[i * row + j] - f->out[s->rows[i] * row + j]);
            most = isnan(d) ? INFINITY : fmax(most, d);
        }
        for (int64_t h = 0; h < HQ; h++) {
            float a = s->lse[h * s->num_rows + i], b = f->lse[h * tokens + s->rows[i]];
            double d = a == b ? 0 : fabs((double)a - b);
            most = isnan(d) ? INFINITY : fmax(most, d);
        }
    }
    return most;
}

static struct rank_part *rank_part_init(struct fixture *f, const struct trial *t,
                                        const struct attn_layer_desc *desc)
{
    struct rank_part *s = calloc(1, sizeof *s);
    fixture_init(f, "cpu_ref", desc, batches[t->which].queries, batches[t->which].lens,
                 batches[t->which].num_reqs, 0, NULL, true);
    int32_t head_rank = t->heads != NULL ? t->heads->rank : 0;
    for (int64_t i = 0; i < (int64_t)f->batch.num_tokens * HQ * f->layer.head_size; i++) {
        f->q[i] += 0.01f * (float)(i % 7 * head_rank); /* this rank's own heads */
    }
    rank_part_bind(s, f, t);
    rank_part_cut(s, f, t);
    return s;
}

static void rank_part_finish(struct rank_part *s, struct fixture *f)
{
    shard_finish(&s->shard, f);
    free(s);
    fixture_finish(f);
}

static void check_trial(const struct trial *t, const struct attn_layer_desc *desc)
{
    struct fixture f;
    struct rank_part *s = rank_part_init(&f, t, desc);
    fixture_step(&f);
    for (int32_t i = 0; i < 2; i++) { /* a plan used again */
        memset(s->out, 0xff, sizeof s->out);
        memset(s->lse, 0xff, sizeof s->lse);
        CHECK(&f, f.api->plan_batch(s->shard.plan, &s->batch, NULL, &f.error));
        CHECK(&f,
              f.api->run(s->shard.plan, f.api->model_layer(s->shard.model, 0), &s->io, &f.error));
    }
    double d = difference(s, &f);
    if (!(d < BOUND)) {
        print_message("rank %d: %s, %d by %d ranks%s, %s, interleave %d, reduce %d%s: %g\n",
                      ranks->rank, batches[t->which].name, t->rows->world_size,
                      t->heads != NULL ? t->heads->world_size : 1,
                      t->heads != NULL ? " over a spread cache" : "",
                      t->order == ATTN_CP_ZIGZAG ? "zig-zag" : "contiguous", t->interleave,
                      t->reduce, t->split ? "" : ", not split", d);
    }
    assert_true(d < BOUND);
    /* padding is not written: the row after the last stays as it was */
    assert_true(isnan(s->out[(int64_t)s->num_rows * HQ * f.layer.head_size]));
    rank_part_finish(s, &f);
}

TEST(test_whole_cache)
{
    static const struct attn_layer_desc descs[] = {
        DECODER(),
        DECODER(.has_window = 1, .window_left = 9, .has_sinks = 1, .soft_cap = 5),
        DECODER(.chunk_size = 24),
    };
    for (size_t which = 0; which < sizeof batches / sizeof *batches; which++) {
        for (int32_t order = 0; order < 2; order++) {
            for (size_t i = 0; i < sizeof descs / sizeof *descs; i++) {
                const struct trial t = {which, ranks, NULL, order, 1, 1, i + 2 > which};
                check_trial(&t, &descs[i]);
            }
        }
    }
}

TEST(test_spread_cache)
{
    static const int32_t interleaves[] = {1, 2, 16};
    for (size_t which = 0; which < sizeof batches / sizeof *batches; which++) {
        for (int32_t i = 0; i < 6; i++) {
            const struct attn_layer_desc desc =
                DECODER(.num_kv_heads = 1 + i % 2, .has_sinks = i % 3 == 1);
            struct trial t = {which, ranks, self, i / 3, interleaves[i % 3], i % 2, true};
            check_trial(&t, &desc);
            t.split = false;
            check_trial(&t, &desc);
            if (head_pair != NULL) {
                t.rows = row_pair;
                t.heads = head_pair;
                check_trial(&t, &desc);
                t.split = true;
                check_trial(&t, &desc);
            }
        }
    }
}

TEST(test_refused_batches)
{
    const struct attn_layer_desc desc = DECODER();
    const struct trial t = {1, ranks, NULL, ATTN_CP_ZIGZAG, 1, 1, true};
    struct fixture f;
    struct rank_part *s = rank_part_init(&f, &t, &desc);
    struct attn_batch batch = s->batch;
    batch.seq_lens_host = NULL;
    INVALID(&f.error, "seq_lens_host", f.api->plan_batch(s->shard.plan, &batch, NULL, &f.error));
    assert_ok(f.api->plan_batch(s->shard.plan, &s->batch, NULL, &f.error));
    s->own[4] += 64;
    INVALID(&f.error, "query_start_loc",
            f.api->plan_batch(s->shard.plan, &s->batch, NULL, &f.error));
    s->own[4] = 301; /* more than the 300 keys */
    INVALID(&f.error, "query_lens_host",
            f.api->plan_batch(s->shard.plan, &s->batch, NULL, &f.error));
    s->own[4] = 70;
    batch = s->batch;
    batch.causal = ATTN_CAUSAL_NO;
    INVALID(&f.error, "causal", f.api->plan_batch(s->shard.plan, &batch, NULL, &f.error));
    batch = s->batch;
    batch.block_table_row = s->starts;
    INVALID(&f.error, "block_table_row", f.api->plan_batch(s->shard.plan, &batch, NULL, &f.error));
    rank_part_finish(s, &f);
}

/* Reasons name what a layer asks for that split queries do not go with. */
TEST(test_refused_layers)
{
    const struct attn_layer_desc plain = DECODER();
    const struct trial t = {0, ranks, NULL, ATTN_CP_ZIGZAG, 1, 1, true};
    struct fixture f;
    struct rank_part *s = rank_part_init(&f, &t, &plain);
    for (int32_t i = 0; i < 4; i++) {
        const struct attn_context_parallel cp =
            EXTENSION(attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL, NULL,
                      .decode = i == 3 ? self : NULL, .prefill = ranks, .order = ATTN_CP_ZIGZAG);
        static const char *const asked[] = {"spans", "seq_lens_host", "fast prefill", "a window"};
        struct attn_layer_desc layer = f.layer;
        const struct attn_layer_desc *layers[] = {&layer};
        attn_assignment *assignment = NULL;
        layer.next = &cp.ext;
        layer.prefix_lm = i == 0;
        layer.device_seq_lens_only = i == 1;
        layer.fast_prefill = i == 2;
        layer.has_window = i == 3;
        assert_int_not_equal(f.api->select(f.runtime, NULL, layers, 1, &assignment, &f.error),
                             ATTN_OK);
        assert_non_null(strstr(f.error.message, "context_parallel"));
        assert_non_null(strstr(f.error.message, asked[i]));
    }
    rank_part_finish(s, &f);
}

int main(int argc, char **argv)
{
    MPI_Comm rows = MPI_COMM_NULL, heads = MPI_COMM_NULL;
    ranks_begin(&argc, &argv);
    self = ranks_of(MPI_COMM_SELF);
    if (ranks->world_size == 4) {
        MPI_Comm_split(MPI_COMM_WORLD, ranks->rank % 2, ranks->rank, &rows);
        MPI_Comm_split(MPI_COMM_WORLD, ranks->rank / 2, ranks->rank, &heads);
        row_pair = ranks_of(rows);
        head_pair = ranks_of(heads);
    }
    int failed = test_run(NULL, NULL);
    ranks_destroy(head_pair);
    ranks_destroy(row_pair);
    ranks_destroy(self);
    if (rows != MPI_COMM_NULL) {
        MPI_Comm_free(&rows);
        MPI_Comm_free(&heads);
    }
    return ranks_end(failed);
}
