/* SPDX-License-Identifier: Apache-2.0 */
/* Refused batches: the field, the value, and no run after them. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/test.h"

static const struct attn_layer_desc decoder = {.kind = ATTN_LAYER_DECODER, .causal = 1};
static void refuse_plan(struct fixture *f, const char *field, const char *text)
{
    f->error = (struct attn_error)ATTN_ERROR_INIT;
    attn_status status = f->api->plan_batch(f->plan, &f->batch, NULL, &f->error);
    print_message("%s: %s\n", f->error.field, f->error.message);
    assert_int_not_equal(status, ATTN_OK);
    assert_string_equal(f->error.field, field);
    assert_non_null(strstr(f->error.message, text));
    /* Nothing half-done remains: a run is refused, too. */
    assert_int_equal(f->api->run(f->plan, f->api->model_layer(f->model, 0), &f->io, &f->error),
                     ATTN_ERROR_ORDER);
}

TEST(test_bad_batches)
{
    OWNED(fixture_finish) struct fixture f;
    fixture_mixed(&f, "cpu_ref", &decoder, true);
    const struct attn_ext unknown = {0xfff, 0, sizeof unknown, NULL};
    const struct attn_batch good = f.batch;
    int32_t saved;

    f.batch.num_reqs = MAX_REQS + 1;
    refuse_plan(&f, "num_reqs", "13");
    f.batch = good;
    f.batch.query_start_loc_host = NULL;
    refuse_plan(&f, "query_start_loc", "required");
    f.batch = good;
    f.query_start_loc[2] = 0;
    refuse_plan(&f, "query_start_loc", "never decreases");
    f.query_start_loc[2] = 2;
    saved = f.seq_lens[3];
    f.seq_lens[3] = 19;
    refuse_plan(&f, "seq_lens", "19");
    f.seq_lens[3] = saved;
    saved = f.block_table[MAX_BLOCKS + 1];
    f.block_table[MAX_BLOCKS + 1] = 12345;
    refuse_plan(&f, "block_table", "request 1, position 16");
    f.block_table[MAX_BLOCKS + 1] = saved;
    f.slots[5] = 1 << 30;
    refuse_plan(&f, "slot_mapping", "request 2, token 5");
    f.slots[5] = -1;
    f.seq_lens[0] = -3;
    refuse_plan(&f, "seq_lens", "-3");
    f.seq_lens[0] = 40;
    f.batch.num_tokens = 1 << 20;
    refuse_plan(&f, "num_tokens", "1048576");
    f.batch = good;
    f.batch.mode = 77;
    refuse_plan(&f, "mode", "77");
    f.batch = good;
    f.batch.causal = 5;
    refuse_plan(&f, "causal", "5");
    f.batch = good;
    f.batch.block_table = NULL;
    refuse_plan(&f, "block_table", "a layer with a cache needs both");
    f.batch = good;
    f.batch.slot_mapping = NULL;
    refuse_plan(&f, "slot_mapping", "slots at");
    f.batch = good;
    f.batch.next = &unknown;
    refuse_plan(&f, "attn_batch", "extension 4095");
    f.batch = good;
    f.batch.struct_size = 8;
    f.error = (struct attn_error)ATTN_ERROR_INIT;
    assert_int_equal(f.api->plan_batch(f.plan, &f.batch, NULL, &f.error), ATTN_ERROR_STRUCT_SIZE);
    f.batch = good;
    f.slots[5] = (int64_t)f.block_table[2 * MAX_BLOCKS + 27 / 16] * 16 + 27 % 16;
    fixture_step(&f);
}
