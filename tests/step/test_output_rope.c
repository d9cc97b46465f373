/* SPDX-License-Identifier: Apache-2.0 */
/* Outputs that are rotated back: what is refused, and which rows are left alone. Results are
 * attn-check's (compressed). */
#include <attn/draft/output_rope.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/client.h"
#include "support/tensor.h"
#include "support/test.h"

enum { HEADS = 4, D = 32, ROTARY = 8, POSITIONS = 64 };
enum { TOKENS = 31 }; /* fixture_mixed has so many */

struct rotated {
    struct fixture f;
    struct attn_output_rope rope;
    struct attn_io_output_rope io;
    struct attn_layer_desc layer;
    int64_t positions[MAX_TOKENS];
    float cos_sin[POSITIONS][ROTARY];
    struct shaped table;
};

static void describe(struct rotated *t, int32_t form)
{
    t->rope = EXTENSION(attn_output_rope, ATTN_EXT_DRAFT_OUTPUT_ROPE, NULL, .form = form,
                        .rotary_dim = ROTARY);
    t->layer = (struct attn_layer_desc){
        .next = &t->rope.ext, .kind = ATTN_LAYER_DECODER, .causal = ATTN_CAUSAL_YES};
}

static void bring(struct rotated *t)
{
    for (int32_t p = 0; p < POSITIONS; p++) {
        for (int32_t d = 0; d < ROTARY / 2; d++) {
            t->cos_sin[p][d] = cosf((float)p / (float)(d + 1));
            t->cos_sin[p][ROTARY / 2 + d] = sinf((float)p / (float)(d + 1));
        }
    }
    for (int32_t i = 0; i < MAX_TOKENS; i++) {
        t->positions[i] = (7 * i + 3) % POSITIONS;
    }
    t->io = EXTENSION(attn_io_output_rope, ATTN_EXT_DRAFT_IO_OUTPUT_ROPE, NULL,
                      .positions = t->positions,
                      .cos_sin = shaped_set(&t->table, t->cos_sin, ATTN_DTYPE_F32, 2,
                                            (int64_t[]){POSITIONS, ROTARY}, NULL));
    t->f.io.next = &t->io.ext;
}

static void init(struct rotated *t, int32_t form)
{
    describe(t, form);
    fixture_mixed(&t->f, "cpu_ref", &t->layer, false);
    bring(t);
    CHECK(&t->f, fixture_batch(&t->f));
}

#define RUN_REFUSED(field, text, change)                                                           \
    do {                                                                                           \
        change;                                                                                    \
        fixture_refuse_run(&t->f, field);                                                          \
        SAYS(&t->f, text);                                                                         \
        bring(t);                                                                                  \
    } while (0)

TEST(test_runs)
{
    OWNED(memory_end) struct rotated *t = calloc(1, sizeof *t);
    init(t, ATTN_ROPE_GPTJ);
    RUN_REFUSED("attn_io_output_rope", "is missing", t->f.io.next = NULL);
    RUN_REFUSED("attn_io_output_rope", "positions are NULL", t->io.positions = NULL);
    RUN_REFUSED("positions", "positions[30] is 64; 0 to 63, the rows of cos_sin",
                t->positions[TOKENS - 1] = POSITIONS);
    RUN_REFUSED("positions", "positions[0] is -1", t->positions[0] = -1);
    t->positions[TOKENS] = -1; /* no token's */
    CHECK(&t->f, fixture_run(&t->f));
    RUN_REFUSED("cos_sin", "[any, 8] f16, bf16 or f32", t->io.cos_sin = NULL);
    RUN_REFUSED("cos_sin", "[any, 8] f16, bf16 or f32", t->table.shape[1] = ROTARY - 2);
    t->f.io.next = NULL; /* what attends nothing rotates nothing */
    t->f.io.flags = ATTN_RUN_NO_ATTEND;
    fixture_step(&t->f);
    fixture_finish(&t->f);
}

/* Rows that the host's bounds have beyond the batch's are neither rotated nor looked at. */
TEST(test_host_bounds)
{
    OWNED(memory_end) struct rotated *t = calloc(1, sizeof *t);
    uint8_t padding[HEADS * D * sizeof(float)];
    int32_t start[MAX_REQS + 1];
    describe(t, ATTN_ROPE_NEOX);
    t->layer.host_bounds = 1;
    fixture_mixed(&t->f, "cpu_ref", &t->layer, false);
    bring(t);
    memcpy(start, t->f.query_start_loc, sizeof start);
    start[t->f.batch.num_reqs]--;
    t->f.batch.query_start_loc = start;
    t->f.batch.flags = ATTN_BATCH_HOST_BOUNDS;
    t->positions[TOKENS - 1] = -1;
    memset(padding, 0x3f, sizeof padding);
    memcpy(t->f.out + (TOKENS - 1) * HEADS * D, padding, sizeof padding);
    fixture_step(&t->f);
    assert_memory_equal(t->f.out + (TOKENS - 1) * HEADS * D, padding, sizeof padding);
    fixture_finish(&t->f);
}

static void refuse_layer(struct rotated *t, const char *field)
{
    const struct attn_layer_desc *layers[] = {&t->layer};
    attn_assignment *made = NULL;
    REFUSED(&t->f.error, field,
            t->f.api->select(t->f.runtime, CLIENT_ORDER(""), layers, 1, &made, &t->f.error));
}

/* Is cpu_ref refused, with a reason of that text? */
static bool unserved(struct rotated *t, const char *asked)
{
    const struct attn_reason reason = {.field = "attn_output_rope", .asked = asked};
    return client_refuses(t->f.api, t->f.runtime, &t->layer, ATTN_PHASE_DECODE, "cpu_ref",
                          &reason) > 0;
}

TEST(test_descriptions)
{
    OWNED(memory_end) struct rotated *t = calloc(1, sizeof *t);
    init(t, ATTN_ROPE_GPTJ);
    t->layer = t->f.layer;
    assert_false(unserved(t, NULL));
    WITH(t->rope, t->rope.form = ATTN_ROPE_NONE, refuse_layer(t, "form"));
    WITH(t->rope, t->rope.rotary_dim = 7, refuse_layer(t, "rotary_dim"));
    WITH(t->rope, t->rope.rotary_dim = D + 2, refuse_layer(t, "rotary_dim"));
    t->rope.form = ATTN_ROPE_NEOX;
    t->rope.rotary_dim = D;
    WITH(t->layer, t->layer.output_form = ATTN_OUTPUT_FP8_STATIC,
         assert_true(unserved(t, "with a quantized output_form")));
    t->layer.fast_prefill = 1;
    assert_true(unserved(t, "with fast_prefill"));
    t->layer.kind = ATTN_LAYER_CROSS;
    t->layer.causal = ATTN_CAUSAL_NO;
    refuse_layer(t, "attn_output_rope");
    fixture_finish(&t->f);
}
