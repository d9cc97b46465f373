/* SPDX-License-Identifier: Apache-2.0 */
/* Plans beyond the eager one: captured and replayed, in two parts, and with the tables of another
 * group. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/test.h"
#include "support/client.h"

static const struct attn_layer_desc decoder = {.kind = ATTN_LAYER_DECODER, .causal = 1};
enum { TOKENS = 31, OUT_BYTES = TOKENS * 4 * 32 * sizeof(float) };

static attn_plan *another_plan(struct fixture *f, int32_t graph, void **workspace)
{
    attn_plan *plan;
    CHECK(f, client_plan(f->api, f->model, 0,
                         CLIENT_PLAN(graph, MAX_REQS, MAX_TOKENS, MAX_BLOCKS * 16), &plan,
                         workspace, &f->error));
    return plan;
}

static void run(struct fixture *f, attn_plan *plan)
{
    memset(f->out, 0xff, OUT_BYTES);
    CHECK(f, f->api->run(plan, f->api->model_layer(f->model, 0), &f->io, &f->error));
}

/* The second step of a graph has other lengths, tables and slots at the same addresses. */
static void shorten(struct fixture *f)
{
    for (int32_t r = 0; r < 4; r++) {
        f->seq_lens[r] -= r < 3 ? 3 : 0;
        for (int32_t i = f->query_start_loc[r]; i < f->query_start_loc[r + 1]; i++) {
            int32_t j = f->seq_lens[r] - f->query_start_loc[r + 1] + i;
            f->slots[i] = (int64_t)f->block_table[r * MAX_BLOCKS + j / 16] * 16 + j % 16;
        }
    }
}

static void hold_replay(const char *backend)
{
    OWNED(fixture_finish) struct fixture f;
    void *workspace;
    OWNED(memory_end) unsigned char *eager = malloc(OUT_BYTES);
    fixture_mixed(&f, backend, &decoder, false);
    attn_plan *plan = another_plan(&f, 1, &workspace);
    assert_int_equal(f.api->plan_graph_level(plan), ATTN_GRAPH_ALWAYS);
    assert_int_equal(f.api->plan_graph(plan, ATTN_PLAN_REPLAY, &f.batch, NULL, &f.error),
                     ATTN_ERROR_ORDER);
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_CAPTURE, &f.batch, NULL, &f.error));
    run(&f, plan);
    for (int32_t step = 0; step < 3; step++) {
        shorten(&f);
        CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_REPLAY, &f.batch, NULL, &f.error));
        run(&f, plan);
        memcpy(eager, f.out, OUT_BYTES);
        memset(f.out, 0xff, OUT_BYTES);
        fixture_step(&f);
        assert_memory_equal(f.out, eager, OUT_BYTES);
    }
    /* Other counts are refused, and the refused ones do not become the captured ones. */
    struct attn_batch fewer = f.batch;
    fewer.num_reqs = 3;
    fewer.num_tokens = fewer.num_actual_tokens = 11;
    fewer.num_slots = 11;
    for (int32_t i = 0; i < 3; i++) {
        if (i == 2) { /* as many requests, and a row of padding more */
            fewer = f.batch;
            fewer.num_tokens++;
        }
        f.error = (struct attn_error)ATTN_ERROR_INIT;
        assert_int_equal(f.api->plan_graph(plan, ATTN_PLAN_REPLAY, &fewer, NULL, &f.error),
                         ATTN_ERROR_INVALID_ARGUMENT);
        assert_non_null(strstr(f.error.message, "captured were 4 (2), 31"));
        assert_int_equal(f.api->run(plan, f.api->model_layer(f.model, 0), &f.io, NULL),
                         ATTN_ERROR_ORDER);
    }
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_REPLAY, &f.batch, NULL, &f.error));
    f.api->plan_destroy(plan);
    free(workspace);
}

TEST(test_replay)
{
    hold_replay("cpu_ref");
}

TEST(test_two_parts)
{
    OWNED(fixture_finish) struct fixture f;
    void *workspace;
    OWNED(memory_end) unsigned char *eager = malloc(OUT_BYTES);
    fixture_mixed(&f, "cpu_ref", &decoder, false);
    fixture_step(&f);
    memcpy(eager, f.out, OUT_BYTES);
    attn_plan *plan = another_plan(&f, 1, &workspace);
    assert_int_equal(f.api->plan_graph(plan, ATTN_PLAN_IN_GRAPH, NULL, NULL, &f.error),
                     ATTN_ERROR_ORDER);
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_OUT_OF_GRAPH, &f.batch, NULL, &f.error));
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_IN_GRAPH, NULL, NULL, &f.error));
    run(&f, plan);
    assert_memory_equal(f.out, eager, OUT_BYTES);
    assert_int_equal(f.api->plan_graph(plan, 9, &f.batch, NULL, &f.error),
                     ATTN_ERROR_INVALID_ARGUMENT);
    assert_int_equal(f.api->plan_graph(f.plan, ATTN_PLAN_CAPTURE, &f.batch, NULL, &f.error),
                     ATTN_ERROR_ORDER); /* made without options.graph */
    f.api->plan_destroy(plan);
    free(workspace);
}

/* Blocks moved to other places: the plan follows by its tables alone. */
TEST(test_update_block_table)
{
    OWNED(fixture_finish) struct fixture f;
    void *workspace;
    OWNED(memory_end) unsigned char *before = malloc(OUT_BYTES);
    fixture_mixed(&f, "cpu_ref", &decoder, false);
    attn_plan *plan = another_plan(&f, 0, &workspace);
    struct attn_batch tables = {.struct_size = sizeof tables,
                                .block_table = f.block_table,
                                .block_table_stride = MAX_BLOCKS,
                                .slot_mapping = f.slots,
                                .num_slots = TOKENS};
    fixture_step(&f); /* the source's host copies are those of a batch that is still there */
    memcpy(before, f.out, OUT_BYTES);
    CHECK(&f, f.api->plan_update_block_table(plan, f.plan, &tables, NULL, &f.error));
    int32_t moved = f.block_table[2 * MAX_BLOCKS], target = (int32_t)f.num_blocks - 1;
    const int64_t pair[] = {moved, target};
    const struct attn_block_transfer move = {.struct_size = sizeof move,
                                             .kind = ATTN_COPY_DEVICE_TO_DEVICE,
                                             .pairs = pair,
                                             .num_pairs = 1};
    CHECK(&f, f.api->copy_blocks(f.model, &move, &f.error));
    for (int32_t step = 0; step < 3; step++) {
        OWNED(memory_end) int32_t *table = malloc(sizeof f.block_table);
        memcpy(table, f.block_table, sizeof f.block_table);
        table[2 * MAX_BLOCKS] = target;
        tables.block_table = table;
        /* From the source, from it again (only the tables differ), and by a plan of itself. */
        CHECK(&f, f.api->plan_update_block_table(plan, step < 2 ? f.plan : plan, &tables, NULL,
                                                 &f.error));
        run(&f, plan);
        assert_memory_equal(f.out, before, OUT_BYTES);
    }
    /* A caller of ABI 0.3 ends its attn_batch here, however much has been added since. */
    tables.struct_size = 296;
    tables.block_table = f.block_table;
    CHECK(&f, f.api->plan_update_block_table(plan, f.plan, &tables, NULL, &f.error));
    tables.struct_size = 295;
    assert_int_equal(f.api->plan_update_block_table(plan, f.plan, &tables, NULL, &f.error),
                     ATTN_ERROR_STRUCT_SIZE);
    tables.struct_size = 3;
    assert_int_equal(f.api->plan_update_block_table(plan, f.plan, &tables, NULL, &f.error),
                     ATTN_ERROR_STRUCT_SIZE);
    f.api->plan_destroy(plan);
    free(workspace);
}

/* Plans of one stream with one scratch between them: what they keep from plan_batch to a run is
 * their own. */
TEST(test_shared_scratch)
{
    static const struct attn_layer_desc layers[] = {{.kind = ATTN_LAYER_DECODER},
                                                    {.kind = ATTN_LAYER_DECODER, .sink_len = 5},
                                                    {.kind = ATTN_LAYER_DECODER, .chunk_size = 16}};
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        for (int32_t example = 0; example < 2; example++) {
            OWNED(fixture_finish) struct fixture f;
            struct attn_workspace parts[2];
            void *workspaces[2];
            attn_plan *plans[2];
            fixture_mixed(&f, example ? "example" : "cpu_ref", &layers[i], false);
            OWNED(memory_end) unsigned char *before = malloc(OUT_BYTES);
            fixture_step(&f);
            memcpy(before, f.out, OUT_BYTES);
            OWNED(memory_end) void *scratch = NULL;
            for (int32_t p = 0; p < 2; p++) {
                plans[p] = another_plan(&f, 0, &workspaces[p]);
                parts[p] = (struct attn_workspace){.struct_size = sizeof parts[p]};
                CHECK(&f, f.api->plan_workspace(plans[p], &parts[p], &f.error));
                scratch =
                    scratch != NULL ? scratch : aligned_alloc(256, parts[p].scratch_bytes + 256);
                parts[p].memory = workspaces[p];
                parts[p].scratch = scratch;
                CHECK(&f, f.api->plan_bind_workspace(plans[p], &parts[p], &f.error));
            }
            for (int32_t step = 0; step < 2; step++) {
                for (int32_t p = 0; p < 2; p++) {
                    CHECK(&f, f.api->plan_batch(plans[p], &f.batch, NULL, &f.error));
                    memset(scratch, 0xff, parts[p].scratch_bytes);
                }
                for (int32_t p = 0; p < 2; p++) {
                    run(&f, plans[p]);
                    assert_memory_equal(f.out, before, OUT_BYTES);
                    memset(scratch, 0xff, parts[p].scratch_bytes);
                }
            }
            for (int32_t p = 0; p < 2; p++) {
                f.api->plan_destroy(plans[p]);
                free(workspaces[p]);
            }
        }
    }
}

TEST(test_update_needs_a_plan)
{
    OWNED(fixture_finish) struct fixture f;
    void *workspace;
    fixture_mixed(&f, "cpu_ref", &decoder, false);
    attn_plan *plan = another_plan(&f, 0, &workspace);
    REFUSED_AS(ATTN_ERROR_ORDER, &f.error, "source",
               f.api->plan_update_block_table(f.plan, plan, &f.batch, NULL, &f.error));
    f.api->plan_destroy(plan);
    free(workspace);
}
