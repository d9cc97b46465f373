/* SPDX-License-Identifier: Apache-2.0 */
/* core/step: the calls that a batch is split into. */
#include "plan_fixture.h"
#include "support/client.h"

TEST(decodes_and_prefills_are_two_calls)
{
    static const int32_t queries[] = {1, 1, 20, 17};
    OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), false);
    struct attn_batch_split split = {.struct_size = sizeof split};
    set_batch(b, queries, 4);
    assert_ok(step(b));
    assert_ok(plan_split(b->plan, &split));
    assert_int_equal(split.num_decodes, 2);
    assert_int_equal(split.num_prefills, 2);
    assert_int_equal(split.num_decode_tokens, 2);
    assert_int_equal(split.num_prefill_tokens, 37);
    assert_int_equal(fake_calls.writes, 1);
    assert_int_equal(fake_calls.attends, 2);
    assert_int_equal(fake_calls.phase[0], ATTN_PHASE_DECODE);
    assert_int_equal(fake_calls.phase[1], ATTN_PHASE_PREFILL);
    assert_int_equal(fake_calls.num_reqs[0], 2);
    assert_int_equal(fake_calls.num_reqs[1], 2);
    assert_int_equal(fake_calls.table_rows[0], 4);
    assert_int_equal(fake_calls.table_rows[1], 2);
    assert_int_equal(fake_calls.schedules, 2);
    set_batch(b, queries, 2); /* decodes alone: nothing is planned for prefills */
    fake_reset();
    assert_ok(step(b));
    assert_int_equal(fake_calls.schedules, 1);
    assert_int_equal(fake_calls.scheduled_phase[0], ATTN_PHASE_DECODE);
}

static void write_in_attends(struct fixture *fixture)
{
    fixture->backends[0].caps.features |= ATTN_FEATURE_FUSED_WRITE;
}

/* The same backend for decodes, and one for prefills that leaves the keys to a kernel of their own,
 * or the other way round. */
static void write_in_decodes(struct fixture *fixture)
{
    struct attn_backend_caps *decodes = &fixture->backends[0].caps;
    struct attn_backend_caps *prefills = fixture_add(fixture, "other", "", 10);
    const char *name = prefills->name;
    *prefills = *decodes;
    prefills->name = name;
    decodes->phases = 1u << ATTN_PHASE_DECODE;
    prefills->phases = 1u << ATTN_PHASE_PREFILL;
    decodes->features |= ATTN_FEATURE_FUSED_WRITE;
}

static void write_in_prefills(struct fixture *fixture)
{
    write_in_decodes(fixture);
    fixture->backends[0].caps.features &= ~ATTN_FEATURE_FUSED_WRITE;
    fixture->backends[1].caps.features |= ATTN_FEATURE_FUSED_WRITE;
}

/* Each of two attends gets the step's keys, which it writes itself only where both do. */
TEST(keys_of_two_calls)
{
    static const int32_t queries[] = {1, 1, 20, 17};
    void (*const changes[])(struct fixture *) = {write_in_attends, write_in_decodes,
                                                 write_in_prefills};
    for (int32_t i = 0; i < 3; i++) {
        OWNED(planned_end) struct planned *b = planned_of(fake_layer("a"), false, changes[i]);
        set_batch(b, queries, 4);
        assert_ok(step(b));
        assert_int_equal(fake_calls.attends, 2);
        assert_int_equal(fake_calls.fused, i == 0 ? 2 : 0);
        assert_int_equal(fake_calls.writes, i == 0 ? 0 : 1);
        assert_ptr_equal(fake_calls.k[0], &b->k);
        assert_ptr_equal(fake_calls.k[1], &b->k);
    }
}

/* A backend whose attends write keys leaves them to a kernel of their own where the layer says so.
 */
TEST(keys_written_apart)
{
    OWNED(planned_end) struct planned *b = planned_of(fake_layer("a"), false, write_in_attends);
    assert_true(b->plan->steps[0].fused_write);
    ((struct layer *)(uintptr_t)b->plan->steps[0].layer->selected)->writes_apart = true;
    remake_plan(b, CLIENT_LIMITS(8, TOKENS, 0));
    assert_false(b->plan->steps[0].fused_write);
}

static void merge(struct fixture *fixture)
{
    fixture->backends[0].caps.kernels |= ATTN_KERNEL_MERGE_STATES;
}

/* A sink's keys are merged with those of decodes and of prefills. */
TEST(sinks_next_to_two_calls)
{
    static const int32_t queries[] = {1, 1, 20};
    static float keys[5 * 2 * FAKE_HEAD_SIZE];
    int64_t shape[3];
    struct attn_layer_desc layer = fake_layer("a");
    const struct attn_tensor sink = fake_tensor(keys, shape, 5, 2);
    const struct attn_layer_params params =
        SIZED(attn_layer_params, .sink_k = &sink, .sink_v = &sink);
    layer.sink_len = 5;
    sink_params = &params;
    OWNED(planned_end) struct planned *b = planned_of(layer, false, merge);
    sink_params = NULL;
    set_batch(b, queries, 3);
    assert_ok(step(b));
    assert_int_equal(fake_calls.attends, 3);
}

static void update_tables(struct fixture *fixture)
{
    fixture->backends[0].caps.features |= ATTN_FEATURE_UPDATE_BLOCK_TABLE;
}

/* Vendors' schedules are kept while they are of the source's last batch. */
TEST(tables_are_updated_in_schedules_of_one_batch)
{
    static const int32_t queries[] = {5, 7};
    OWNED(planned_end) struct planned *b = planned_of(fake_layer("a"), false, update_tables);
    attn_plan *source = b->plan;
    b->plan = NULL;
    remake_plan(b, CLIENT_LIMITS(8, TOKENS, 0)); /* over one workspace: nothing is run */
    for (int32_t i = 0; i < 3; i++) {
        set_batch(b, queries, 2);
        if (i != 1) {
            assert_ok(plan_batch(source, &b->batch, NULL, &b->error));
        }
        fake_reset();
        assert_ok(plan_update_block_table(b->plan, source, &b->batch, NULL, &b->error));
        assert_int_equal(fake_calls.schedules, i != 1);
        assert_int_equal(fake_calls.updates, i == 1);
    }
    plan_destroy(source);
}

TEST(only_leading_requests_are_decodes)
{
    static const int32_t queries[] = {1, 5, 1};
    OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), false);
    struct attn_batch_split split = {.struct_size = sizeof split};
    set_batch(b, queries, 3);
    assert_ok(step(b));
    assert_ok(plan_split(b->plan, &split));
    assert_int_equal(split.num_decodes, 1);
    assert_int_equal(split.num_prefills, 2);
}

/* Requests of up to so many queries as the backend declares go the decode way. */
TEST(declared_threshold_splits)
{
    static const int32_t queries[] = {4, 2, 5, 1};
    OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), false);
    struct attn_batch_split split = {.struct_size = sizeof split};
    for (int32_t declared = 3; declared <= 5; declared++) {
        b->fixture.backends[0].caps.reorder_threshold = declared;
        remake_plan(b, CLIENT_LIMITS(8, TOKENS, 0));
        set_batch(b, queries, 4);
        assert_ok(step(b));
        assert_ok(plan_split(b->plan, &split));
        assert_int_equal(split.num_decodes, declared == 3 ? 0 : declared == 4 ? 2 : 4);
    }
}

/* Zeros without a fill kernel; a profile step touches all of the workspace, too. Keys that the step
 * before had no slots for are no idle step's. */
TEST(idle_steps_are_zeros)
{
    static const int32_t queries[] = {5};
    static int64_t apart[] = {8 * FAKE_HEAD_SIZE, FAKE_HEAD_SIZE, 1};
    OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), false);
    struct attn_workspace room = {.struct_size = sizeof room};
    set_batch(b, queries, 1);
    b->batch.num_slots = 0;
    INVALID(&b->error, "slot_mapping", step(b));
    assert_ok(plan_workspace(b->plan, &room, &b->error));
    for (int32_t mode = 0; mode < 2; mode++) {
        set_batch(b, NULL, 0);
        b->batch.mode = mode == 0 ? ATTN_BATCH_IDLE : ATTN_BATCH_PROFILE;
        memset(b->data[3], 0xff, sizeof b->data[3]);
        memset(b->workspace, 0xff, room.bytes);
        assert_ok(step(b));
        for (int32_t i = 0; i < TOKENS * 4 * FAKE_HEAD_SIZE; i++) {
            assert_true(b->data[3][i] == 0);
        }
        for (size_t i = 0; i < room.bytes; i++) {
            assert_int_equal(((uint8_t *)b->workspace)[i], mode == 0 ? 0xff : 0);
        }
    }
    b->batch.num_tokens = -1; /* counts of rows, of a profile step, too */
    INVALID(&b->error, "num_tokens", step(b));
    b->batch.num_tokens = 0;
    memset(b->data[3], 0xff, sizeof b->data[3]);
    b->out.shape[0] = -2;
    INVALID(&b->error, "out", step(b));
    b->out.shape[0] = TOKENS / 2; /* every second row */
    b->out.strides = apart;
    assert_ok(step(b));
    for (int32_t i = 0; i < TOKENS * 4 * FAKE_HEAD_SIZE; i++) {
        assert_true(i / 4 / FAKE_HEAD_SIZE % 2 == 0 ? b->data[3][i] == 0 : isnan(b->data[3][i]));
    }
}

/* Decodes over a common prefix: taken apart where that is fewer rounds of thread blocks. */
TEST(cascade_where_it_pays)
{
    static const int32_t queries[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    static int32_t table[8][20];
    for (int32_t multiprocessors = 0; multiprocessors <= 1000; multiprocessors += 1000) {
        OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), false);
        b->fixture.devices[0].num_multiprocessors = multiprocessors;
        plan_destroy(b->plan);
        b->plan = NULL;
        free(b->workspace);
        b->workspace = aligned_alloc(256, 1 << 20);
        remake_plan(b, CLIENT_LIMITS(8, TOKENS, 0));
        set_batch(b, queries, 8);
        for (int32_t r = 0; r < 8; r++) {
            b->lens[r] = 300;
        }
        b->batch.block_table = table[0];
        b->batch.block_table_stride = 20;
        b->batch.num_slots = 0;
        b->batch.common_prefix_len = 272;
        b->io.flags = ATTN_RUN_NO_WRITE;
        fake_reset();
        assert_ok(step(b));
        assert_int_equal(fake_calls.attends, multiprocessors > 0 ? 1 : 2);
        assert_int_equal(fake_calls.most_reqs[0], multiprocessors > 0 ? 8 : 1);
    }
}

TEST(empty_batch_is_no_error)
{
    struct planned *b = planned_create(fake_layer("a"), false);
    set_batch(b, NULL, 0);
    assert_ok(step(b));
    b->batch.mode = ATTN_BATCH_IDLE;
    assert_ok(step(b));
    assert_int_equal(fake_calls.attends, 0);
    planned_destroy(b);
    struct attn_layer_desc chunked = fake_layer("a");
    chunked.chunk_size = 16;
    b = planned_create(chunked, false);
    set_batch(b, NULL,
              0); /* rows that belong to another batch, and nothing that a composition reads */
    b->start[0] = b->batch.num_tokens = b->batch.num_actual_tokens = 5;
    b->batch.seq_lens_host = NULL;
    assert_ok(step(b));
    assert_int_equal(fake_calls.attends, 0);
    planned_destroy(b);
}
