/* SPDX-License-Identifier: Apache-2.0 */
/* Plans beyond the eager one: captured and replayed, in two parts, and with the tables of another
 * group. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/test.h"
#include "support/client.h"

static const struct attn_layer_desc decoder = DECODER();
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
    CHECK(f, f->api->run(plan, f->bound, &f->io, &f->error));
}

static struct fixture f;

/* Replays of a graph next to eager steps are attn-check's (engine.*). Other counts are refused, and
 * the refused ones do not become the captured ones. */
CASE(test_refused_graphs, fixture_mixed(&f, "cpu_ref", &decoder, true))
{
    void *workspace;
    attn_plan *plan = another_plan(&f, 1, &workspace);
    const struct attn_batch *b = &f.batch;
    assert_int_equal(f.api->plan_graph_level(plan), ATTN_GRAPH_ALWAYS);
    REFUSED_AS(ATTN_ERROR_ORDER, &f.error, "mode",
               f.api->plan_graph(plan, ATTN_PLAN_REPLAY, b, NULL, &f.error));
    REFUSED_AS(ATTN_ERROR_ORDER, &f.error, "mode",
               f.api->plan_graph(plan, ATTN_PLAN_IN_GRAPH, NULL, NULL, &f.error));
    CHECK(&f, f.api->plan_batch(plan, b, NULL, &f.error)); /* an eager plan, which began nothing */
    REFUSED_AS(ATTN_ERROR_ORDER, &f.error, "mode",
               f.api->plan_graph(plan, ATTN_PLAN_IN_GRAPH, NULL, workspace, &f.error));
    run(&f, plan); /* on the eager plan's stream, as before */
    INVALID(&f.error, "mode", f.api->plan_graph(plan, 9, b, NULL, &f.error));
    REFUSED_AS(ATTN_ERROR_ORDER, &f.error, "graph", /* made without options.graph */
               f.api->plan_graph(f.plan, ATTN_PLAN_CAPTURE, b, NULL, &f.error));
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_CAPTURE, b, NULL, &f.error));
    struct attn_batch other = f.batch;
    other.num_reqs = 3;
    other.num_tokens = other.num_actual_tokens = other.num_slots = 11;
    for (int32_t i = 0; i < 3; i++) {
        if (i == 2) { /* as many requests, and a row of padding more */
            other = f.batch;
            other.num_tokens++;
        }
        assert_int_equal(f.api->plan_graph(plan, ATTN_PLAN_REPLAY, &other, NULL, &f.error),
                         ATTN_ERROR_INVALID_ARGUMENT);
        SAYS(&f, "captured were 4 (2), 31");
        assert_int_equal(f.api->run(plan, f.bound, &f.io, NULL), ATTN_ERROR_ORDER);
    }
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_REPLAY, b, NULL, &f.error));
    run(&f, plan);
    /* launches have the captured rows */
    int32_t fewer[5];
    memcpy(fewer, b->query_start_loc_host, sizeof fewer);
    fewer[4] = 30;
    other = f.batch;
    other.num_actual_tokens = 30;
    other.query_start_loc = other.query_start_loc_host = fewer;
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_REPLAY, &other, NULL, &f.error));
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_CAPTURE, &other, NULL, &f.error));
    INVALID(&f.error, "num_actual_tokens",
            f.api->plan_graph(plan, ATTN_PLAN_REPLAY, b, NULL, &f.error));
    SAYS(&f, "a replay of rows 0 to 30; captured were rows 0 to 29");
    assert_int_equal(f.api->run(plan, f.bound, &f.io, NULL), ATTN_ERROR_ORDER);
    fewer[0] = 1; /* the first request has no token */
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_CAPTURE, b, NULL, &f.error));
    INVALID(&f.error, "num_actual_tokens",
            f.api->plan_graph(plan, ATTN_PLAN_REPLAY, &other, NULL, &f.error));
    SAYS(&f, "a replay of rows 1 to 29; captured were rows 0 to 30");
    /* an idle step has the counts of a step of prefills */
    other = SIZED(attn_batch, .mode = ATTN_BATCH_IDLE, .num_tokens = b->num_tokens,
                  .num_actual_tokens = b->num_tokens, .num_reqs = 1);
    CHECK(&f, f.api->plan_graph(plan, ATTN_PLAN_CAPTURE, &other, NULL, &f.error));
    const int32_t starts[] = {0, b->num_tokens}, keys[] = {b->num_tokens};
    other = client_batch(1, starts, keys);
    client_blocks(&other, f.block_table, MAX_BLOCKS, f.slots);
    assert_int_equal(f.api->plan_graph(plan, ATTN_PLAN_REPLAY, &other, NULL, &f.error),
                     ATTN_ERROR_INVALID_ARGUMENT);
    SAYS(&f, "captured were 1 (0), 31, none attended");
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

/* A source that is planned, and a batch of a size that there is. */
CASE(test_updates, fixture_mixed(&f, "cpu_ref", &decoder, false))
{
    void *workspace;
    attn_plan *plan = another_plan(&f, 0, &workspace);
    struct attn_batch tables =
        SIZED(attn_batch, .block_table = f.block_table, .block_table_stride = MAX_BLOCKS,
              .slot_mapping = f.slots, .num_slots = TOKENS);
    REFUSED_AS(ATTN_ERROR_ORDER, &f.error, "source",
               f.api->plan_update_block_table(f.plan, plan, &f.batch, NULL, &f.error));
    fixture_step(&f);
    for (tables.struct_size = 296; tables.struct_size > 0; tables.struct_size /= 2) {
        /* a caller of ABI 0.3 ends its attn_batch there, however much has been added since */
        assert_int_equal(f.api->plan_update_block_table(plan, f.plan, &tables, NULL, &f.error),
                         tables.struct_size == 296 ? ATTN_OK : ATTN_ERROR_STRUCT_SIZE);
    }
    f.api->plan_destroy(plan);
    free(workspace);
}
