/* SPDX-License-Identifier: Apache-2.0 */
/* Caches whose decodes write in their attend: which steps and layers get it, that whatever is
 * next to it still writes before, and that the cache comes out the same by every bit. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "backend_recording.h"
#include "support/test.h"
#include "support/client.h"

static const int32_t prefill[4] = {9, 5, 12, 20}, decode[4] = {1, 1, 1, 1}, mixed[4] = {1, 1, 4, 9},
                     drafts[4] = {3, 3, 3, 3};
static const struct attn_layer_desc codes = DECODER(.kv_dtype = ATTN_KV_INT8_KV);

/* A step's calls, by what it is made of; its output and its cache are by every bit those of a
 * backend whose attends do not write. */
static void hold(const char *backend, const struct attn_layer_desc *layer, const int32_t *queries,
                 int32_t writes, int32_t fused)
{
    static const int32_t lens[] = {40, 17, 33, 29};
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    struct recorded *c = recorded_by_core();
    OWNED(fixture_finish) struct fixture f, apart;
    fixture_init(&f, backend, layer, queries, lens, 4, 0, NULL, false);
    fixture_init(&apart, "cpu_ref", layer, queries, lens, 4, 0, NULL, false);
    CHECK(&f, f.api->layer_cache_spec(f.bound, 0, &spec, &f.error));
    memset(c, 0, sizeof *c);
    fixture_step(&f);
    assert_int_equal(c->writes, writes);
    assert_int_equal(c->fused, fused);
    assert_int_equal(c->fused_prefills, 0);
    for (int32_t i = 0; i < 2; i++) { /* a run that only writes, then one that only attends */
        apart.io.flags = i == 0 ? ATTN_RUN_NO_ATTEND : ATTN_RUN_NO_WRITE;
        fixture_step(&apart);
    }
    assert_true(fixture_difference(&f, &apart) == 0);
    assert_memory_equal(f.cache, apart.cache, f.num_blocks * spec.page_bytes);
}

TEST(test_which_steps_and_layers)
{
    struct attn_layer_desc plain = codes, of_tokens = codes;
    plain.kv_dtype = ATTN_KV_AUTO;
    of_tokens.kv_dtype = ATTN_KV_INT8_PER_TOKEN_HEAD;
    hold("recording", &codes, prefill, 1, 0);
    hold("recording", &codes, decode, 0, 1);
    hold("recording", &codes, mixed, 1, 0); /* a mixed step writes first */
    hold("recording", &plain, decode, 1, 0);
    hold("recording", &of_tokens, decode, 1, 0);
}

/* Several queries of a request are decodes too where the layer drafts; they see each other's keys.
 */
TEST(test_drafts)
{
    struct attn_layer_desc drafting = codes;
    drafting.num_speculative_tokens = 2;
    hold("recording", &drafting, prefill, 1, 0);
    hold("recording", &drafting, drafts, 0, 1);
}

/* The backend of the decodes fuses, whatever serves the prefills. */
TEST(test_two_backends)
{
    hold("prefill=cpu_ref;decode=recording", &codes, prefill, 0, 0);
    hold("prefill=cpu_ref;decode=recording", &codes, mixed, 0, 0);
    hold("prefill=cpu_ref;decode=recording", &codes, decode, 0, 1);
    hold("prefill=recording;decode=recording_apart", &codes, prefill, 1, 0);
    hold("prefill=recording;decode=recording_apart", &codes, decode, 1, 0);
}

static void run(struct fixture *f, uint32_t flags, int32_t writes, int32_t fused)
{
    struct recorded *c = recorded_by_core();
    memset(c, 0, sizeof *c);
    f->io.flags = flags;
    CHECK(f, fixture_run(f));
    assert_int_equal(c->writes, writes);
    assert_int_equal(c->fused, fused);
}

/* Runs of one plan, the plain ones by the short way and by the general one. */
TEST(test_flags_of_runs)
{
    static const int32_t ones[] = {1, 1, 1}, lens[] = {40, 17, 33};
    for (int32_t general = 0; general < 2; general++) {
        OWNED(fixture_finish) struct fixture f;
        fixture_init(&f, "recording", &codes, ones, lens, 3, 0, NULL, general);
        f.io.lse = NULL;
        fixture_step(&f);
        run(&f, ATTN_RUN_NO_WRITE, 0, 0);
        run(&f, 0, 0, 1);
        run(&f, ATTN_RUN_NO_ATTEND, 1, 0);
        run(&f, 0, 0, 1);
        f.batch.num_slots = 0; /* the engine has written */
        f.io.flags = 0;
        f.io.k = f.io.v = NULL;
        fixture_step(&f);
        run(&f, 0, 0, 0);
    }
}

/* Keys that are rotated on their way are written by the kernel that rotates them. */
TEST(test_rotated_keys)
{
    static const int32_t ones[] = {1, 1, 1}, lens[] = {40, 17, 33};
    const struct attn_layer_desc layer =
        DECODER(.kv_dtype = ATTN_KV_INT8_KV, .rope = ATTN_ROPE_NEOX);
    static float cos_sin[64][32];
    static const int64_t positions[] = {39, 16, 32};
    int64_t shape[] = {64, 32};
    const struct attn_tensor table = {
        cos_sin, {ATTN_DEVICE_CPU, 0}, 2, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
    const struct attn_io_rope rope =
        EXTENSION(attn_io_rope, ATTN_EXT_IO_ROPE, NULL, .form = ATTN_ROPE_NEOX,
                  .positions = positions, .cos_sin = &table);
    OWNED(fixture_finish) struct fixture f;
    struct recorded *c = recorded_by_core();
    for (int32_t i = 0; i < 64 * 32; i++) {
        cos_sin[i / 32][i % 32] = i % 32 < 16 ? 1 : 0; /* by no angle */
    }
    fixture_init(&f, "recording", &layer, ones, lens, 3, 0, NULL, false);
    memset(c, 0, sizeof *c);
    f.io.next = &rope.ext;
    fixture_step(&f);
    assert_int_equal(c->rope_writes, 1);
    assert_int_equal(c->fused + c->writes, 0);
    f.io.next = NULL;
    fixture_step(&f);
    assert_int_equal(c->rope_writes, 1);
    assert_int_equal(c->fused, 1);
}

/* A shared prefix is attended apart; the attend of what is after it writes. */
TEST(test_cascade)
{
    const struct attn_layer_desc layer = DECODER(.kv_dtype = ATTN_KV_INT8_KV, .num_kv_heads = 4);
    int32_t ones[8], lens[8];
    OWNED(fixture_finish) struct fixture f, whole;
    struct recorded *c = recorded_by_core();
    for (int32_t r = 0; r < 8; r++) {
        ones[r] = 1;
        lens[r] = 260 + 3 * r;
    }
    fixture_init(&f, "recording", &layer, ones, lens, 8, 256, NULL, true);
    fixture_init(&whole, "cpu_ref", &layer, ones, lens, 8, 256, NULL, true);
    whole.batch.flags |= ATTN_BATCH_NO_CASCADE;
    memset(c, 0, sizeof *c);
    fixture_step(&f);
    fixture_step(&whole);
    assert_int_equal(c->attends, 2);
    assert_int_equal(c->fused, 1);
    assert_int_equal(c->writes, 0);
    assert_true(fixture_difference(&f, &whole) < 1e-5);
}

/* A step of eight requests whose output is static fp8; `codes` is of all of it. */
static void run_codes(const char *backend, uint32_t flags, uint8_t *codes, struct recorded *found)
{
    const struct attn_layer_desc layer = DECODER(.output_form = ATTN_OUTPUT_FP8_STATIC);
    const int32_t queries[8] = {1, 2, 1, 3, 1, 1, 2, 1};
    const int32_t lens[8] = {300, 280, 290, 401, 275, 273, 310, 300};
    const float scale = 0.002f;
    struct recorded *c = recorded_by_core();
    OWNED(fixture_finish) struct fixture f;
    fixture_init(&f, backend, &layer, queries, lens, 8, 272, NULL, false);
    struct attn_tensor out = f.tensors[3];
    const struct attn_io_output_quant quant =
        EXTENSION(attn_io_output_quant, ATTN_EXT_IO_OUTPUT_QUANT, NULL, .scale = &scale);
    out.data = codes;
    out.byte_offset = 0;
    out.dtype = (struct attn_dtype){ATTN_CODE_FLOAT8_E4M3FN, 8, 1};
    f.batch.flags |= flags;
    f.io.out = &out;
    f.io.next = &quant.ext;
    memset(c, 0, sizeof *c);
    fixture_step(&f);
    *found = *c;
}

/* Attends that write codes cannot be merged: over a common prefix both write numbers, whose merge
 * is quantized. The codes are those of one attend, but for numbers that rounding decides. */
TEST(test_cascade_of_codes)
{
    enum { ALL = 12 * 4 * 32 };
    static uint8_t whole[ALL], cascade[ALL];
    struct recorded c;
    int32_t moved = 0;
    memset(cascade, 0xff, sizeof cascade);
    run_codes("recording_codes", ATTN_BATCH_NO_CASCADE, whole, &c);
    assert_true(c.attends == 1 && c.coded == 1);
    run_codes("recording_codes", 0, cascade, &c);
    assert_true(c.attends == 2 && c.coded == 0);
    for (int32_t i = 0; i < ALL; i++) {
        moved += whole[i] != cascade[i];
        assert_true(abs(whole[i] - cascade[i]) <= 1);
    }
    print_message("%d of %d codes differ by one\n", moved, ALL);
    assert_true(moved < ALL / 50);
}
