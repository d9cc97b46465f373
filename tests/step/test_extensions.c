/* SPDX-License-Identifier: Apache-2.0 */
/* A vendor's extensions and drafts on layers, batches and runs: to backends that declare the id, by
 * every byte, and to no other. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "backend_recording.h"
#include "support/client.h"
#include "support/test.h"

static const int32_t queries[] = {3, 1}, lens[] = {9, 5};

static struct recorded_extension extension(uint32_t id, uint32_t flags, int32_t value)
{
    return (struct recorded_extension){
        {id, flags, sizeof(struct recorded_extension), NULL}, value, 0};
}

/* To prepare, plan and attend, on the layer, the batch and the run, and no longer once the engine
 * leaves it out. The layer's is copied when the layer is selected; a run's is read by the run. */
static void check_handed_through(uint32_t id)
{
    struct recorded_extension of_layer = extension(id, 0, 7), of_run = extension(id, 0, 9),
                              of_batch = extension(id, 0, 11),
                              other = extension(ATTN_EXT_VENDOR, 0, 1);
    const struct attn_layer_desc layer = {
        .next = &of_layer.ext, .kind = ATTN_LAYER_DECODER, .causal = 1};
    struct recorded *c = recorded_by_core();
    OWNED(fixture_finish) struct fixture f;
    memset(c, 0, sizeof *c);
    c->extension = id;
    fixture_init(&f, "recording", &layer, queries, lens, 2, 0, NULL, false);
    of_layer.value = 8;
    f.io.lse = NULL; /* without an extension a run is a plain one */
    for (int32_t there = 3; there >= 0; there--) {
        f.batch.next = there & 1 ? &of_batch.ext : NULL;
        f.io.next = there & 2 ? &of_run.ext : NULL;
        fixture_step(&f);
        assert_int_equal(c->prepared, 7);
        assert_int_equal(c->planned, 7);
        assert_int_equal(c->of_layer, 7);
        assert_int_equal(c->planned_batch, there & 1 ? 11 : 0);
        assert_int_equal(c->of_batch, there & 1 ? 11 : 0);
        assert_int_equal(c->of_run, there & 2 ? 9 : 0);
    }
    f.batch.next = &other.ext; /* the backend reads it; the layer says nothing of it */
    assert_int_equal(fixture_batch(&f), ATTN_ERROR_EXTENSION);
    f.batch.next = NULL;
    fixture_step(&f);
    assert_int_equal(c->of_batch, 0);
    f.io.next = &other.ext;
    assert_int_equal(fixture_run(&f), ATTN_ERROR_EXTENSION);
}

/* A vendor's, and drafts that this ABI has no struct, slot or bit for. */
TEST(test_handed_through)
{
    check_handed_through(RECORDED_EXTENSION);
    check_handed_through(ATTN_EXT_DRAFT_KERNELS);
    check_handed_through(ATTN_EXT_DRAFT_KERNELS + RECORDED_DRAFTS - 1);
}

/* A batch is every layer's of its group: it brings what all of them have. */
TEST(test_of_all_layers)
{
    struct recorded_extension ours = extension(RECORDED_EXTENSION, 0, 1),
                              theirs = extension(ATTN_EXT_VENDOR, 0, 2);
    const struct attn_layer_desc plain = DECODER();
    OWNED(fixture_finish) struct fixture f;
    fixture_init(&f, "recording", &plain, queries, lens, 2, 0, NULL, false);
    for (int32_t i = 0; i < 2; i++) {
        struct attn_layer_desc described[2] = {f.layer, f.layer};
        const struct attn_layer_desc *layers[2] = {&described[0], &described[1]};
        void *caches[2], *workspace;
        attn_model *model;
        attn_plan *plan;
        ours.ext.next = &theirs.ext;
        described[0].name = "first", described[1].name = "second";
        described[0].next = &ours.ext;
        described[1].next = i == 0 ? &theirs.ext : &ours.ext;
        CHECK(&f, client_model(f.api, f.runtime, CLIENT_ORDER("recording"), layers, 2, &model,
                               &f.error));
        for (int32_t l = 0; l < 2; l++) {
            CHECK(&f, client_cache(f.api, f.api->model_layer(model, l), f.num_blocks, NULL,
                                   &caches[l], &f.error));
        }
        CHECK(&f, client_plan(f.api, model, 0, CLIENT_LIMITS(MAX_REQS, MAX_TOKENS, 1024), &plan,
                              &workspace, &f.error));
        struct recorded_extension of_batch = extension(RECORDED_EXTENSION, 0, 11);
        f.batch.next = &of_batch.ext;
        assert_int_equal(f.api->plan_batch(plan, &f.batch, NULL, &f.error),
                         i == 0 ? ATTN_ERROR_EXTENSION : ATTN_OK);
        of_batch.ext.id = ATTN_EXT_VENDOR;
        CHECK(&f, f.api->plan_batch(plan, &f.batch, NULL, &f.error));
        f.batch.next = NULL;
        f.api->plan_destroy(plan);
        f.api->model_destroy(model);
        free(caches[0]), free(caches[1]), free(workspace);
    }
}

/* What is optional needs no backend that knows it, and reaches the one that does. */
TEST(test_optional)
{
    static const char *const backends[] = {"recording", "cpu_ref"};
    struct recorded_extension optional = extension(RECORDED_EXTENSION, ATTN_EXT_OPTIONAL, 5);
    const struct attn_layer_desc layer = {
        .next = &optional.ext, .kind = ATTN_LAYER_DECODER, .causal = 1};
    struct recorded *c = recorded_by_core();
    for (int32_t i = 0; i < 2; i++) {
        OWNED(fixture_finish) struct fixture f;
        fixture_init(&f, backends[i], &layer, queries, lens, 2, 0, NULL, false);
        memset(c, 0, sizeof *c);
        fixture_step(&f);
        assert_int_equal(c->of_layer, i == 0 ? 5 : 0);
    }
}

/* A kernel sees nothing of unknown ids, however they are marked: known ones come as they
 * were, in their order. */
TEST(test_strange_ones)
{
    struct recorded_extension known = extension(RECORDED_EXTENSION, 0, 7),
                              strange = extension(0x20000, ATTN_EXT_OPTIONAL, 1),
                              ours = extension(ATTN_EXT_MLA_DESC, ATTN_EXT_OPTIONAL, 2),
                              behind = extension(ATTN_EXT_VENDOR, 0, 3);
    struct {
        struct attn_ext ext;
        char bytes[ATTN_EXT_COPIED_BYTES];
    } large = {.ext = {ATTN_EXT_VENDOR, 0, sizeof large, NULL}};
    struct attn_layer_desc layer = {.next = &strange.ext, .kind = ATTN_LAYER_DECODER};
    struct recorded *c = recorded_by_core();
    OWNED(fixture_finish) struct fixture f;
    strange.ext.next = &known.ext;
    known.ext.next = &behind.ext;
    fixture_init(&f, "recording", &layer, queries, lens, 2, 0, NULL, false);
    memset(c, 0, sizeof *c);
    fixture_step(&f);
    assert_int_equal(c->of_layer, 7);
    behind.ext.next = &ours.ext;
    f.batch.next = f.io.next = &strange.ext;
    for (int32_t i = 0; i < 3; i++) {
        fixture_step(&f);
        assert_true(c->of_batch == 7 && c->of_run == 7 && c->planned_batch == 7);
    }
    assert_int_equal(c->strange, 0);
    behind.ext.next = &large.ext; /* twice */
    assert_int_equal(fixture_batch(&f), ATTN_ERROR_EXTENSION);
    known.ext.next = &large.ext;
    assert_int_equal(fixture_batch(&f), ATTN_ERROR_EXTENSION);
    assert_non_null(strstr(f.error.message, "more than 4096 bytes"));
    f.batch.next = &known.ext; /* nothing else: nothing is copied */
    CHECK(&f, fixture_batch(&f));
    large.ext.flags = 2;
    assert_int_equal(fixture_batch(&f), ATTN_ERROR_EXTENSION);
    assert_non_null(strstr(f.error.message, "flags 0x2"));
    large.ext.flags = ATTN_FLAG_HINTS;
    CHECK(&f, fixture_batch(&f));
}

/* An optional one that one backend of a layer knows and the other not reaches neither. */
TEST(test_of_both_backends)
{
    static const char *const orders[] = {"recording", "prefill=recording;decode=cpu_ref"};
    struct recorded_extension optional = extension(RECORDED_EXTENSION, ATTN_EXT_OPTIONAL, 5);
    const struct attn_layer_desc layer = {.next = &optional.ext, .kind = ATTN_LAYER_DECODER};
    struct recorded *c = recorded_by_core();
    for (int32_t i = 0; i < 2; i++) {
        OWNED(fixture_finish) struct fixture f;
        fixture_init(&f, orders[i], &layer, queries, lens, 2, 0, NULL, false);
        memset(c, 0, sizeof *c);
        fixture_step(&f);
        assert_true(c->attends > 0);
        assert_int_equal(c->of_layer, i == 0 ? 5 : 0);
    }
}
