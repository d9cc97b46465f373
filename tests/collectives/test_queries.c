/* SPDX-License-Identifier: Apache-2.0 */
/* Queries split over the ranks of MPI: every rank gets for its slices what one rank gets for all,
 * over a whole cache, over one spread by the same ranks, and over one spread by heads' ranks too.
 * Run under mpirun. Exit status 0 if every rank agrees. */
#include <math.h>
#include <mpi.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fixture.h"

#define BOUND 4e-5

attn_mpi_collectives_create_fn attn_mpi_collectives_create;
attn_collectives_destroy_fn attn_mpi_collectives_destroy;

enum { BLOCK = 16, HQ = 4, ROWS = MAX_BLOCKS * BLOCK };

/* Over all ranks; over this one; and where there are four, two by two. */
static struct attn_collectives *all, *self, *row_pair, *head_pair;

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

struct side {
    attn_assignment *assignment;
    attn_model *model;
    attn_plan *plan;
    void *cache, *workspace;
    int32_t table[5 * MAX_BLOCKS], starts[6], own[5];
    int64_t slots[MAX_TOKENS];
    int32_t rows[MAX_TOKENS], num_rows; /* of the whole batch, that are this rank's */
    float q[MAX_TOKENS * HQ * 32], k[MAX_TOKENS * HQ * 32], v[MAX_TOKENS * HQ * 32];
    float out[MAX_TOKENS * HQ * 32], lse[HQ * MAX_TOKENS];
    int64_t shapes[5][3];
    struct attn_tensor tensors[5];
    struct attn_batch batch;
    struct attn_batch_context_parallel ext;
    struct attn_step_io io;
};

#define CHECK(f, call)                                                                             \
    do {                                                                                           \
        if ((call) != ATTN_OK) {                                                                   \
            fail_msg("rank %d: %s: %s: %s", all->rank, #call, (f)->error.field,                    \
                     (f)->error.message);                                                          \
        }                                                                                          \
    } while (0)

/* Whose is query i of Q? As attn/collectives.h says it. */
static int32_t rank_of(int32_t i, int32_t queries, int32_t ranks, int32_t order)
{
    int32_t parts = order == ATTN_CP_ZIGZAG ? 2 * ranks : ranks;
    int32_t part = i / ((queries + parts - 1) / parts);
    return part < ranks ? part : parts - 1 - part;
}

static void slots_of(struct side *s, const struct fixture *f, const struct trial *t, int32_t r,
                     int32_t first, int32_t count, int64_t *slots)
{
    static int64_t positions[ROWS];
    int32_t heads = t->heads != NULL ? t->heads->world_size : 1;
    int32_t n = t->heads != NULL ? heads * t->rows->world_size : 1;
    int32_t rank = t->heads != NULL ? t->rows->rank * heads + t->heads->rank : 0;
    for (int32_t i = 0; i < count; i++) {
        positions[i] = first + i;
    }
    assert_int_equal(f->api->context_parallel_slots(positions, count, &s->table[r * MAX_BLOCKS],
                                                    BLOCK, rank, n, t->interleave, slots, NULL),
                     ATTN_OK);
}

static void fill_cache(struct side *s, const struct fixture *f, const struct trial *t,
                       const struct attn_kv_view *full, const struct attn_kv_view *here)
{
    static int64_t slots[ROWS];
    for (int32_t r = 0; r < f->batch.num_reqs; r++) {
        int32_t context = f->seq_lens[r] - (f->query_start_loc[r + 1] - f->query_start_loc[r]);
        slots_of(s, f, t, r, 0, context, slots);
        for (int32_t j = 0; j < context; j++) {
            for (int32_t h = 0; h < full->num_heads && slots[j] >= 0; h++) {
                int32_t block = f->block_table[r * MAX_BLOCKS + j / BLOCK];
                memcpy((char *)here->data + slots[j] / BLOCK * here->stride_block +
                           slots[j] % BLOCK * here->stride_slot + h * here->stride_head,
                       (const char *)full->data + block * full->stride_block +
                           j % BLOCK * full->stride_slot + h * full->stride_head,
                       (size_t)f->layer.head_size * sizeof(float));
            }
        }
    }
}

static void side_bind(struct side *s, struct fixture *f, const struct trial *t)
{
    const struct attn_context_parallel cp = {
        .ext = {.id = ATTN_EXT_CONTEXT_PARALLEL, .struct_size = sizeof cp},
        .decode = t->heads,
        .prefill = t->rows,
        .interleave = t->interleave,
        .reduce = t->reduce,
        .order = t->order};
    const struct attn_select_options options = {.struct_size = sizeof options,
                                                .backend = "cpu_ref"};
    const struct attn_plan_options limits = {
        .struct_size = sizeof limits,
        .limits = {sizeof limits.limits, NULL, MAX_REQS, MAX_TOKENS, 0, ROWS, 0, 0}};
    struct attn_layer_desc layer = f->layer;
    const struct attn_layer_desc *layers[] = {&layer};
    const struct attn_layer_params params = {.struct_size = sizeof params,
                                             .sinks = layer.has_sinks ? f->sinks : NULL};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = k, full_k = k, full_v = k;
    struct attn_kv_spec spec = {.struct_size = sizeof spec};
    int32_t blocks = f->batch.num_reqs * MAX_BLOCKS;
    for (int32_t i = 0; i < blocks; i++) {
        s->table[i] = blocks - 1 - i; /* backwards */
    }
    layer.next = &cp.ext;
    CHECK(f, f->api->select(f->runtime, &options, layers, 1, &s->assignment, &f->error));
    CHECK(f, f->api->model_create(f->runtime, s->assignment, NULL, &s->model, &f->error));
    attn_layer *bound = f->api->model_layer(s->model, 0);
    CHECK(f, f->api->layer_kv_spec(bound, &spec, &f->error));
    s->cache = aligned_alloc(256, (size_t)(blocks * spec.padded_page_bytes));
    memset(s->cache, 0xff, (size_t)(blocks * spec.padded_page_bytes));
    CHECK(f, f->api->layer_kv_views(bound, s->cache, blocks, &k, &v, &f->error));
    CHECK(f, f->api->layer_bind_kv(bound, &k, &v, &f->error));
    CHECK(f, f->api->layer_bind_params(bound, &params, &f->error));
    CHECK(f, f->api->layer_kv_views(f->api->model_layer(f->model, 0), f->cache, f->num_blocks,
                                    &full_k, &full_v, &f->error));
    fill_cache(s, f, t, &full_k, &k);
    fill_cache(s, f, t, &full_v, &v);
    CHECK(f, f->api->plan_create(s->model, 0, &limits, &s->plan, &f->error));
    size_t bytes = f->api->plan_workspace_bytes(s->plan);
    s->workspace = aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset(s->workspace, 0xff, bytes);
    CHECK(f, f->api->plan_bind_workspace(s->plan, s->workspace, bytes, &f->error));
}

/* This rank's rows of the fixture's batch. */
static void side_cut(struct side *s, struct fixture *f, const struct trial *t)
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
        slots_of(s, f, t, r, f->seq_lens[r] - count, count, s->slots + first);
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
    s->ext = (struct attn_batch_context_parallel){
        .ext = {.id = ATTN_EXT_BATCH_CONTEXT, .struct_size = sizeof s->ext},
        .query_lens_host = s->own};
    s->batch = f->batch;
    s->batch.next = t->split ? &s->ext.ext : NULL;
    s->batch.num_tokens = s->batch.num_actual_tokens = s->num_rows;
    s->batch.query_start_loc = s->batch.query_start_loc_host = s->starts;
    s->batch.block_table = s->table;
    s->batch.slot_mapping = s->slots;
    s->io = (struct attn_step_io){.struct_size = sizeof s->io,
                                  .q = &s->tensors[0],
                                  .k = &s->tensors[1],
                                  .v = &s->tensors[2],
                                  .out = &s->tensors[3],
                                  .lse = &s->tensors[4]};
}

static double difference(const struct side *s, const struct fixture *f)
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

static struct side *side_init(struct fixture *f, const struct trial *t,
                              const struct attn_layer_desc *desc)
{
    struct side *s = calloc(1, sizeof *s);
    fixture_init(f, "cpu_ref", desc, batches[t->which].queries, batches[t->which].lens,
                 batches[t->which].num_reqs, 0, NULL, true);
    int32_t head_rank = t->heads != NULL ? t->heads->rank : 0;
    for (int64_t i = 0; i < (int64_t)f->batch.num_tokens * HQ * f->layer.head_size; i++) {
        f->q[i] += 0.01f * (float)(i % 7 * head_rank); /* this rank's own heads */
    }
    side_bind(s, f, t);
    side_cut(s, f, t);
    return s;
}

static void side_finish(struct side *s, struct fixture *f)
{
    f->api->plan_destroy(s->plan);
    f->api->model_destroy(s->model);
    f->api->assignment_destroy(s->assignment);
    free(s->cache);
    free(s->workspace);
    free(s);
    fixture_finish(f);
}

static void hold(const struct trial *t, const struct attn_layer_desc *desc)
{
    struct fixture f;
    struct side *s = side_init(&f, t, desc);
    fixture_step(&f);
    for (int32_t i = 0; i < 2; i++) { /* a plan used again */
        memset(s->out, 0xff, sizeof s->out);
        memset(s->lse, 0xff, sizeof s->lse);
        CHECK(&f, f.api->plan(s->plan, &s->batch, NULL, &f.error));
        CHECK(&f, f.api->run(s->plan, f.api->model_layer(s->model, 0), &s->io, &f.error));
    }
    double d = difference(s, &f);
    if (!(d < BOUND)) {
        print_message("rank %d: %s, %d by %d ranks%s, %s, interleave %d, reduce %d%s: %g\n",
                      all->rank, batches[t->which].name, t->rows->world_size,
                      t->heads != NULL ? t->heads->world_size : 1,
                      t->heads != NULL ? " over a spread cache" : "",
                      t->order == ATTN_CP_ZIGZAG ? "zig-zag" : "contiguous", t->interleave,
                      t->reduce, t->split ? "" : ", not split", d);
    }
    assert_true(d < BOUND);
    /* padding is nobody's: the row behind the last stays as it was */
    assert_true(isnan(s->out[(int64_t)s->num_rows * HQ * f.layer.head_size]));
    side_finish(s, &f);
}

static void test_whole_cache(void **state)
{
    static const struct attn_layer_desc descs[] = {
        {.kind = ATTN_LAYER_DECODER, .causal = 1},
        {.kind = ATTN_LAYER_DECODER,
         .causal = 1,
         .has_window = 1,
         .window_left = 9,
         .has_sinks = 1,
         .soft_cap = 5},
        {.kind = ATTN_LAYER_DECODER, .causal = 1, .chunk_size = 24},
    };
    (void)state;
    for (size_t which = 0; which < sizeof batches / sizeof *batches; which++) {
        for (int32_t order = 0; order < 2; order++) {
            for (size_t i = 0; i < sizeof descs / sizeof *descs; i++) {
                const struct trial t = {which, all, NULL, order, 1, 1, i + 2 > which};
                hold(&t, &descs[i]);
            }
        }
    }
}

static void test_spread_cache(void **state)
{
    static const int32_t interleaves[] = {1, 2, 16};
    (void)state;
    for (size_t which = 0; which < sizeof batches / sizeof *batches; which++) {
        for (int32_t i = 0; i < 6; i++) {
            const struct attn_layer_desc desc = {.kind = ATTN_LAYER_DECODER,
                                                 .causal = 1,
                                                 .num_kv_heads = 1 + i % 2,
                                                 .has_sinks = i % 3 == 1};
            struct trial t = {which, all, self, i / 3, interleaves[i % 3], i % 2, true};
            hold(&t, &desc);
            t.split = false;
            hold(&t, &desc);
            if (head_pair != NULL) {
                t.rows = row_pair;
                t.heads = head_pair;
                hold(&t, &desc);
                t.split = true;
                hold(&t, &desc);
            }
        }
    }
}

static void test_refused_batches(void **state)
{
    const struct attn_layer_desc desc = {.kind = ATTN_LAYER_DECODER, .causal = 1};
    const struct trial t = {1, all, NULL, ATTN_CP_ZIGZAG, 1, 1, true};
    struct fixture f;
    struct side *s = side_init(&f, &t, &desc);
    struct attn_batch batch = s->batch;
    (void)state;
    batch.seq_lens_host = NULL;
    assert_int_equal(f.api->plan(s->plan, &batch, NULL, &f.error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(f.error.field, "seq_lens_host");
    assert_int_equal(f.api->plan(s->plan, &s->batch, NULL, &f.error), ATTN_OK);
    s->own[4] += 64;
    assert_int_equal(f.api->plan(s->plan, &s->batch, NULL, &f.error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(f.error.field, "query_start_loc");
    s->own[4] = 301; /* of 300 keys */
    assert_int_equal(f.api->plan(s->plan, &s->batch, NULL, &f.error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(f.error.field, "query_lens_host");
    s->own[4] = 70;
    batch = s->batch;
    batch.causal = 0;
    assert_int_equal(f.api->plan(s->plan, &batch, NULL, &f.error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(f.error.field, "causal");
    batch = s->batch;
    batch.block_table_row = s->starts;
    assert_int_equal(f.api->plan(s->plan, &batch, NULL, &f.error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(f.error.field, "block_table_row");
    side_finish(s, &f);
}

/* Reasons name what a layer asks for that split queries do not go with. */
static void test_refused_layers(void **state)
{
    const struct attn_layer_desc plain = {.kind = ATTN_LAYER_DECODER, .causal = 1};
    const struct trial t = {0, all, NULL, ATTN_CP_ZIGZAG, 1, 1, true};
    struct fixture f;
    struct side *s = side_init(&f, &t, &plain);
    (void)state;
    for (int32_t i = 0; i < 4; i++) {
        const struct attn_context_parallel cp = {
            .ext = {.id = ATTN_EXT_CONTEXT_PARALLEL, .struct_size = sizeof cp},
            .decode = i == 3 ? self : NULL,
            .prefill = all,
            .order = ATTN_CP_ZIGZAG};
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
    side_finish(s, &f);
}

static struct attn_collectives *ranks_of(MPI_Comm comm)
{
    struct attn_error error = ATTN_ERROR_INIT;
    struct attn_collectives *made = NULL;
    if (attn_mpi_collectives_create(MPI_Comm_c2f(comm), &made, &error) != ATTN_OK) {
        fprintf(stderr, "%s: %s\n", error.field, error.message);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    return made;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_cache),
        cmocka_unit_test(test_spread_cache),
        cmocka_unit_test(test_refused_batches),
        cmocka_unit_test(test_refused_layers),
    };
    MPI_Comm rows = MPI_COMM_NULL, heads = MPI_COMM_NULL;
    MPI_Init(&argc, &argv);
    all = ranks_of(MPI_COMM_WORLD);
    self = ranks_of(MPI_COMM_SELF);
    if (all->world_size == 4) {
        MPI_Comm_split(MPI_COMM_WORLD, all->rank % 2, all->rank, &rows);
        MPI_Comm_split(MPI_COMM_WORLD, all->rank / 2, all->rank, &heads);
        row_pair = ranks_of(rows);
        head_pair = ranks_of(heads);
    }
    int failed = cmocka_run_group_tests(tests, NULL, NULL), any = 0;
    MPI_Allreduce(&failed, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    attn_mpi_collectives_destroy(head_pair);
    attn_mpi_collectives_destroy(row_pair);
    attn_mpi_collectives_destroy(self);
    attn_mpi_collectives_destroy(all);
    if (rows != MPI_COMM_NULL) {
        MPI_Comm_free(&rows);
        MPI_Comm_free(&heads);
    }
    MPI_Finalize();
    return any;
}
