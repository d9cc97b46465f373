/* SPDX-License-Identifier: Apache-2.0 */
/* A layer whose cache is spread over the ranks of MPI gives on every rank what it gives alone. Run
 * under mpirun; each rank has its own query heads, all ranks the same keys. Exit status 0 if every
 * rank agrees. */
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

enum { BLOCK = 16 };

static struct attn_collectives *ranks;

/* A decode step; a mixed one with a draft, a chunk and a first prefill; one without any context. */
static const struct {
    const char *name;
    int32_t num_reqs, queries[6], lens[6];
} batches[] = {
    {"decode", 5, {1, 1, 1, 1, 1}, {40, 17, 1, 2, 333}},
    {"mixed", 5, {1, 3, 9, 20, 5}, {40, 17, 33, 20, 130}},
    {"prefill", 3, {20, 1, 7}, {20, 1, 7}},
};

/* The same layer with its cache spread. */
struct spread {
    attn_assignment *assignment;
    attn_model *model;
    attn_plan *plan;
    void *cache, *workspace;
    int32_t table[6 * MAX_BLOCKS];
    int64_t slots[MAX_TOKENS];
    struct attn_batch batch;
};

#define CHECK(f, call)                                                                             \
    do {                                                                                           \
        if ((call) != ATTN_OK) {                                                                   \
            fail_msg("rank %d: %s: %s: %s", ranks->rank, #call, (f)->error.field,                  \
                     (f)->error.message);                                                          \
        }                                                                                          \
    } while (0)

/* This rank's slot of each position, -1 where it is another's. */
static void slots_of(struct spread *s, const struct fixture *f, int32_t r, int32_t first,
                     int32_t count, int32_t interleave, int64_t *slots)
{
    int64_t positions[MAX_BLOCKS * BLOCK];
    for (int32_t i = 0; i < count; i++) {
        positions[i] = first + i;
    }
    assert_int_equal(f->api->context_parallel_slots(positions, count, &s->table[r * MAX_BLOCKS],
                                                    BLOCK, ranks->rank, ranks->world_size,
                                                    interleave, slots, NULL),
                     ATTN_OK);
}

/* The context's rows from the full cache into this rank's shard; all else stays NaN. */
static void fill_shard(struct spread *s, const struct fixture *f, const struct attn_kv_view *full,
                       const struct attn_kv_view *shard, int32_t interleave)
{
    size_t row = (size_t)f->layer.head_size * sizeof(float);
    int64_t slots[MAX_BLOCKS * BLOCK];
    for (int32_t r = 0; r < f->batch.num_reqs; r++) {
        int32_t context = f->seq_lens[r] - (f->query_start_loc[r + 1] - f->query_start_loc[r]);
        slots_of(s, f, r, 0, context, interleave, slots);
        for (int32_t j = 0; j < context; j++) {
            for (int32_t h = 0; h < full->num_heads && slots[j] >= 0; h++) {
                int32_t block = f->block_table[r * MAX_BLOCKS + j / BLOCK];
                memcpy((char *)shard->data + slots[j] / BLOCK * shard->stride_block +
                           slots[j] % BLOCK * shard->stride_slot + h * shard->stride_head,
                       (const char *)full->data + block * full->stride_block +
                           j % BLOCK * full->stride_slot + h * full->stride_head,
                       row);
            }
        }
    }
}

static void spread_bind(struct spread *s, struct fixture *f, const struct attn_context_parallel *cp)
{
    const struct attn_select_options options = {.struct_size = sizeof options,
                                                .backend = "cpu_ref"};
    struct attn_layer_desc layer = f->layer;
    const struct attn_layer_desc *layers[] = {&layer};
    const struct attn_layer_params params = {.struct_size = sizeof params,
                                             .sinks = layer.has_sinks ? f->sinks : NULL};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = k, full_k = k, full_v = k;
    struct attn_kv_spec spec = {.struct_size = sizeof spec};
    int32_t blocks = f->batch.num_reqs * MAX_BLOCKS;
    layer.next = &cp->ext;
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
    fill_shard(s, f, &full_k, &k, cp->interleave);
    fill_shard(s, f, &full_v, &v, cp->interleave);
}

static void spread_init(struct spread *s, struct fixture *f, int32_t interleave, int32_t reduce)
{
    const struct attn_context_parallel cp = {
        .ext = {.id = ATTN_EXT_CONTEXT_PARALLEL, .struct_size = sizeof cp},
        .decode = ranks,
        .interleave = interleave,
        .reduce = reduce};
    const struct attn_plan_options limits = {
        .struct_size = sizeof limits,
        .limits = {sizeof limits.limits, NULL, MAX_REQS, MAX_TOKENS, 0, MAX_BLOCKS * BLOCK, 0, 0}};
    for (int32_t i = 0; i < f->batch.num_reqs * MAX_BLOCKS; i++) {
        s->table[i] = f->batch.num_reqs * MAX_BLOCKS - 1 - i; /* backwards */
    }
    spread_bind(s, f, &cp);
    CHECK(f, f->api->plan_create(s->model, 0, &limits, &s->plan, &f->error));
    size_t bytes = f->api->plan_workspace_bytes(s->plan);
    s->workspace = aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset(s->workspace, 0xff, bytes);
    CHECK(f, f->api->plan_bind_workspace(s->plan, s->workspace, bytes, &f->error));
    s->batch = f->batch;
    s->batch.block_table = s->table;
    s->batch.slot_mapping = s->slots;
    for (int32_t r = 0; r < f->batch.num_reqs; r++) {
        int32_t first = f->query_start_loc[r], count = f->query_start_loc[r + 1] - first;
        slots_of(s, f, r, f->seq_lens[r] - count, count, interleave, s->slots + first);
    }
}

static void spread_finish(struct spread *s, struct fixture *f)
{
    f->api->plan_destroy(s->plan);
    f->api->model_destroy(s->model);
    f->api->assignment_destroy(s->assignment);
    free(s->cache);
    free(s->workspace);
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

static void hold(size_t which, int32_t kv_heads, int32_t interleave, int32_t reduce, int32_t sinks)
{
    const struct attn_layer_desc desc = {
        .kind = ATTN_LAYER_DECODER, .causal = 1, .num_kv_heads = kv_heads, .has_sinks = sinks};
    struct fixture f;
    struct spread s = {0};
    fixture_init(&f, "cpu_ref", &desc, batches[which].queries, batches[which].lens,
                 batches[which].num_reqs, 0, NULL, true);
    int64_t rows = (int64_t)f.batch.num_tokens * f.layer.num_q_heads,
            elements = rows * f.layer.head_size;
    for (int64_t i = 0; i < elements; i++) { /* this rank's own heads */
        f.q[i] = f.q[i] * (ranks->rank % 2 ? -1.0f : 1.0f) + 0.01f * (float)(i % 7 * ranks->rank);
    }
    fixture_step(&f);
    float *out = malloc((size_t)elements * sizeof *out), *lse = malloc((size_t)rows * sizeof *lse);
    memcpy(out, f.out, (size_t)elements * sizeof *out);
    memcpy(lse, f.lse, (size_t)rows * sizeof *lse);
    spread_init(&s, &f, interleave, reduce);
    for (int32_t i = 0; i < 2; i++) { /* a plan used again */
        memset(f.out, 0xff, (size_t)elements * sizeof *out);
        memset(f.lse, 0xff, (size_t)rows * sizeof *lse);
        CHECK(&f, f.api->plan(s.plan, &s.batch, NULL, &f.error));
        CHECK(&f, f.api->run(s.plan, f.api->model_layer(s.model, 0), &f.io, &f.error));
    }
    double d = fmax(difference(out, f.out, elements), difference(lse, f.lse, rows));
    if (ranks->rank == 0) {
        print_message("%s, %d key heads, interleave %d, %s%s: %g\n", batches[which].name, kv_heads,
                      interleave, reduce == ATTN_CP_ALL_TO_ALL ? "all to all" : "reduce-scatter",
                      sinks ? ", sinks" : "", d);
    }
    assert_true(d < BOUND);
    spread_finish(&s, &f);
    fixture_finish(&f);
    free(out);
    free(lse);
}

static void test_equal_to_one_rank(void **state)
{
    static const int32_t interleaves[] = {1, 2, 16};
    (void)state;
    for (size_t which = 0; which < sizeof batches / sizeof *batches; which++) {
        for (int32_t i = 0; i < 3; i++) {
            for (int32_t reduce = 0; reduce < 2; reduce++) {
                hold(which, 1 + (i + reduce) % 2, interleaves[i], reduce, i == 1);
            }
        }
    }
}

static void test_table(void **state)
{
    struct attn_error error = ATTN_ERROR_INIT;
    int32_t send = 100 + ranks->rank, received[16];
    (void)state;
    assert_int_equal(attn_mpi_collectives_create(0, NULL, &error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(error.field, "collectives");
    assert_int_equal(ranks->all_gather(ranks->user, &send, received, sizeof send, NULL), ATTN_OK);
    for (int32_t i = 0; i < ranks->world_size; i++) {
        assert_int_equal(received[i], 100 + i);
    }
    float mine = (float)(ranks->rank % 3), most = -1;
    assert_int_equal(ranks->all_reduce_max_f32(ranks->user, &mine, &most, 1, NULL), ATTN_OK);
    assert_true(most == (float)(ranks->world_size > 2 ? 2 : ranks->world_size - 1));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_equal_to_one_rank),
    };
    struct attn_error error = ATTN_ERROR_INIT;
    MPI_Init(&argc, &argv);
    if (attn_mpi_collectives_create(MPI_Comm_c2f(MPI_COMM_WORLD), &ranks, &error) != ATTN_OK) {
        fprintf(stderr, "%s: %s\n", error.field, error.message);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    int failed = cmocka_run_group_tests(tests, NULL, NULL), any = 0;
    MPI_Allreduce(&failed, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    attn_mpi_collectives_destroy(ranks);
    MPI_Finalize();
    return any;
}
