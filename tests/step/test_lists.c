/* SPDX-License-Identifier: Apache-2.0 */
/* Layers whose keys are chosen by lists: what a run must bring, what validation finds, and steps
 * whose keys the core does not take apart. Results are attn-check's. */
#include <attn/draft/index_lists.h>

#include <stdlib.h>

#include "fixture.h"
#include "support/client.h"
#include "support/test.h"

enum { ENTRIES = 24, GROUPS = 2, GRANULARITY = 4 }; /* more than all keys of a request here */

static const int32_t queries[] = {1, 1, 9, 20}, lens[] = {40, 17, 33, 20};

struct listed {
    struct fixture f;
    struct attn_index_lists lists;
    struct attn_io_index_lists io;
    int32_t indices[MAX_TOKENS][GROUPS][ENTRIES], lengths[MAX_TOKENS][GROUPS];
};

static void listed_end(struct listed **l)
{
    fixture_finish(&(*l)->f);
    free(*l);
}

static struct attn_layer_desc describe(struct listed *l)
{
    l->lists =
        EXTENSION(attn_index_lists, ATTN_EXT_DRAFT_INDEX_LISTS, NULL, .max_entries = ENTRIES,
                  .granularity = GRANULARITY, .groups = ATTN_LISTS_PER_KV_HEAD, .has_lengths = 1);
    return (struct attn_layer_desc){
        .next = &l->lists.ext, .kind = ATTN_LAYER_DECODER, .causal = ATTN_CAUSAL_YES};
}

/* Lists of every key, and entries past the end. */
static void bring(struct listed *l)
{
    for (int32_t t = 0; t < MAX_TOKENS; t++) {
        for (int32_t i = 0; i < GROUPS * ENTRIES; i++) {
            l->indices[t][i / ENTRIES][i % ENTRIES] = i % ENTRIES;
        }
        l->lengths[t][0] = l->lengths[t][1] = ENTRIES;
    }
    l->io = EXTENSION(attn_io_index_lists, ATTN_EXT_DRAFT_IO_INDEX_LISTS, NULL,
                      .indices = l->indices[0][0], .token_stride = GROUPS * ENTRIES,
                      .group_stride = ENTRIES, .lengths = l->lengths[0], .length_stride = GROUPS);
    l->f.io.next = &l->io.ext;
}

static void init(struct listed *l, bool validate)
{
    const struct attn_layer_desc layer = describe(l);
    fixture_init(&l->f, "cpu_ref", &layer, queries, lens, 4, 0, NULL, validate);
    bring(l);
    CHECK(&l->f, fixture_batch(&l->f));
}

#define RUN_REFUSED(field, text, change)                                                           \
    do {                                                                                           \
        change;                                                                                    \
        fixture_refuse_run(&l->f, field);                                                          \
        SAYS(&l->f, text);                                                                         \
        bring(l);                                                                                  \
    } while (0)

TEST(test_runs)
{
    OWNED(listed_end) struct listed *l = calloc(1, sizeof *l);
    init(l, false);
    l->f.io.lse = NULL; /* the plain way, but for the lists */
    RUN_REFUSED("attn_io_index_lists", "attn_index_lists needs", l->f.io.next = NULL);
    RUN_REFUSED("indices", "is NULL", l->io.indices = NULL);
    RUN_REFUSED("token_stride", "token_stride is 23; 24 or more", l->io.token_stride = ENTRIES - 1);
    RUN_REFUSED("group_stride", "group_stride is 0; 24 or more", l->io.group_stride = 0);
    RUN_REFUSED("lengths", "is NULL", l->io.lengths = NULL);
    RUN_REFUSED("length_stride", "length_stride is 1; 2 or more", l->io.length_stride = GROUPS - 1);
    /* a run that attends nothing, a step without keys and one that is idle bring none */
    l->f.io.next = NULL;
    l->f.io.flags = ATTN_RUN_NO_ATTEND;
    fixture_step(&l->f);
    l->f.io.flags = 0;
    l->f.batch.mode = ATTN_BATCH_IDLE;
    fixture_step(&l->f);
}

TEST(test_undescribed)
{
    static const struct attn_layer_desc dense = {.kind = ATTN_LAYER_DECODER};
    OWNED(listed_end) struct listed *l = calloc(1, sizeof *l);
    struct attn_layer_desc without = describe(l);
    fixture_init(&l->f, "cpu_ref", &dense, queries, lens, 4, 0, NULL, false);
    bring(l);
    CHECK(&l->f, fixture_batch(&l->f));
    RUN_REFUSED("attn_io_index_lists", "only a layer with attn_index_lists reads it", );
    fixture_finish(&l->f);
    l->lists.has_lengths = 0;
    fixture_init(&l->f, "cpu_ref", &without, queries, lens, 4, 0, NULL, false);
    bring(l);
    CHECK(&l->f, fixture_batch(&l->f));
    RUN_REFUSED("lengths", "the layer does not say has_lengths", );
}

TEST(test_validation)
{
    OWNED(listed_end) struct listed *l = calloc(1, sizeof *l);
    init(l, true);
    RUN_REFUSED("indices", "indices[30, 1, 5] is 3, which stands in the list before",
                l->indices[30][1][5] = 3);
    l->indices[30][1][5] = 3; /* past the list's end */
    l->lengths[30][1] = 5;
    l->indices[0][0][4] = l->indices[0][0][9] = -1; /* none, and past the cache's last slot */
    l->indices[0][0][5] = l->indices[0][0][8] = INT32_MAX;
    l->indices[31][0][1] = l->indices[31][0][0]; /* a padding row */
    fixture_step(&l->f);
    RUN_REFUSED("lengths", "lengths[30, 1] is 25; 0 to max_entries, 24",
                l->lengths[30][1] = ENTRIES + 1);
    RUN_REFUSED("lengths", "lengths[0, 0] is -1; 0 to max_entries, 24", l->lengths[0][0] = -1);
    fixture_skip_first(&l->f);
    l->f.io.flags = ATTN_RUN_NO_WRITE;
    l->lengths[0][0] = -1;
    fixture_step(&l->f);
    RUN_REFUSED("lengths", "is -1; 0 to max_entries, 24",
                l->lengths[l->f.batch.query_start_loc[0]][1] = -1);
}

/* The host knows bounds of lengths and of tokens: lists of rows after the last token are not read.
 */
TEST(test_bounds)
{
    OWNED(listed_end) struct listed *l = calloc(1, sizeof *l);
    struct attn_layer_desc layer = describe(l);
    int32_t bounds[5];
    layer.host_bounds = 1;
    fixture_init(&l->f, "cpu_ref", &layer, queries, lens, 4, 0, NULL, true);
    bring(l);
    l->f.batch.flags = ATTN_BATCH_HOST_BOUNDS;
    for (int32_t r = 0; r <= 4; r++) {
        bounds[r] = l->f.query_start_loc[r];
        l->f.query_start_loc[r] -= r > 2 ? 5 : 0; /* 4 of 9 queries are there */
    }
    l->f.batch.query_start_loc_host = bounds;
    l->indices[26][0][1] = l->indices[26][0][0];
    l->lengths[27][1] = -1;
    fixture_step(&l->f);
    RUN_REFUSED("lengths", "lengths[25, 1] is -1", l->lengths[25][1] = -1);
}

/* Requests with a common prefix: its keys stay where the lists say they are. */
TEST(test_common_prefix)
{
    enum { REQS = 8, SHARED = 256 };
    int32_t one[REQS], long_lens[REQS];
    OWNED(listed_end) struct listed *l = calloc(1, sizeof *l), *apart = calloc(1, sizeof *apart);
    for (int32_t r = 0; r < REQS; r++) {
        one[r] = 1;
        long_lens[r] = SHARED + 10 + r;
    }
    const struct attn_layer_desc layer = describe(l), other = describe(apart);
    fixture_init(&l->f, "cpu_ref", &layer, one, long_lens, REQS, SHARED, NULL, false);
    fixture_init(&apart->f, "cpu_ref", &other, one, long_lens, REQS, SHARED, NULL, false);
    bring(l);
    bring(apart);
    l->f.batch.common_prefix_len = SHARED;
    apart->f.batch.common_prefix_len = 0;
    fixture_step(&l->f);
    fixture_step(&apart->f);
    assert_true(fixture_difference(&l->f, &apart->f) == 0);
}

/* Lists that differ are no schedule to share. */
TEST(test_schedules)
{
    OWNED(listed_end) struct listed *l = calloc(1, sizeof *l);
    init(l, false);
    struct attn_index_lists other = l->lists;
    other.max_entries = ENTRIES + 1;
    struct attn_layer_desc descs[3] = {l->f.layer, l->f.layer, l->f.layer};
    const struct attn_layer_desc *layers[] = {&descs[0], &descs[1], &descs[2]};
    descs[1].name = "same";
    descs[2].name = "longer";
    descs[2].next = &other.ext;
    attn_model *model;
    CHECK(&l->f, client_model(l->f.api, l->f.runtime, CLIENT_ORDER("cpu_ref"), layers, 3, &model,
                              &l->f.error));
    assert_int_equal(l->f.api->model_num_groups(model, ATTN_GROUP_BLOCK_TABLE), 1);
    assert_int_equal(l->f.api->model_num_groups(model, ATTN_GROUP_SCHEDULE), 4); /* two phases */
    l->f.api->model_destroy(model);
}
