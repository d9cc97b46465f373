/* SPDX-License-Identifier: Apache-2.0 */
/* The room of abi/README.md: each known feature that the ABI does not have yet, as an extension of
 * draft range, goes from an engine to kernels that declare it, on layers, batches and runs, and is
 * refused by its id where a backend does not: no struct, no slot and no bit is needed for that. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "backend_recording.h"
#include "support/client.h"
#include "support/test.h"

static const int32_t queries[] = {3, 1}, lens[] = {9, 5};

/* What each would say, in some first form; `value` is what the recording backend reports. */
struct room_extension {
    struct attn_ext ext;
    int32_t value;
    int32_t numbers[5];
    const void *arrays[3];
};

enum { ON_BATCH = 1, ON_RUN = 2, OF_STATES = 4 };

static const struct {
    const char *name;
    int32_t where; /* next to the layer */
} room[] = {{"index lists: granularity, groups of heads, ragged lengths", ON_RUN},
            {"a second list and cache under one softmax", ON_RUN},
            {"gates with a lower bound", OF_STATES},
            {"gates given ready", OF_STATES},
            {"states in 16 bits", OF_STATES},
            {"states as a ring of inputs", OF_STATES},
            {"a mask over cached keys", ON_BATCH},
            {"several shared prefixes", ON_BATCH},
            {"retained prefixes of requests", ON_BATCH},
            {"page tables of K and V apart", ON_BATCH},
            {"a limit on multiprocessors", 0}};
enum { ROOM = sizeof room / sizeof *room };
_Static_assert(ROOM <= RECORDED_DRAFTS, "the recording backend declares them");

static struct room_extension extension(int32_t i, int32_t value)
{
    return (struct room_extension){
        .ext = {ATTN_EXT_DRAFT_KERNELS + (uint32_t)i, 0, sizeof(struct room_extension), NULL},
        .value = value};
}

/* Refused by cpu_ref, and by the recording backend that declares vendors' ids alone, with the id.
 */
static void hold_refusals(struct fixture *f, const struct attn_layer_desc *layer, uint32_t id)
{
    static const struct {
        const char *backend, *declared;
    } others[] = {{"cpu_ref", "none"}, {"recording_apart", "0x10000"}};
    char asked[16];
    snprintf(asked, sizeof asked, "%#x", id);
    for (int32_t i = 0; i < 2; i++) {
        const struct attn_reason wanted = {sizeof wanted, NULL, "extension", asked,
                                           others[i].declared};
        for (int32_t phase = 0; phase < 2; phase++) {
            assert_int_equal(
                client_refuses(f->api, f->runtime, layer, phase, others[i].backend, &wanted), 1);
        }
    }
}

/* To attend, on the layer, the batch and the run; and no longer once the engine leaves it out. */
static void hold_attention(int32_t i)
{
    struct recorded *c = recorded_by_core();
    struct room_extension of_layer = extension(i, 7), of_batch = extension(i, 8),
                          of_run = extension(i, 9);
    const struct attn_layer_desc layer = {.next = &of_layer.ext, .kind = ATTN_LAYER_DECODER};
    struct fixture f;
    memset(c, 0, sizeof *c);
    c->extension = of_layer.ext.id;
    fixture_init(&f, "recording", &layer, queries, lens, 2, 0, NULL, false);
    for (int32_t there = 1; there >= 0; there--) {
        f.batch.next = there && room[i].where & ON_BATCH ? &of_batch.ext : NULL;
        f.io.next = there && room[i].where & ON_RUN ? &of_run.ext : NULL;
        fixture_step(&f);
        assert_int_equal(c->prepared, 7);
        assert_int_equal(c->planned, 7);
        assert_int_equal(c->of_layer, 7);
        assert_int_equal(c->planned_batch, f.batch.next != NULL ? 8 : 0);
        assert_int_equal(c->of_batch, f.batch.next != NULL ? 8 : 0);
        assert_int_equal(c->of_run, f.io.next != NULL ? 9 : 0);
    }
    of_batch.ext.id = of_run.ext.id = ATTN_EXT_DRAFT_KERNELS + ROOM; /* not of the layer */
    f.batch.next = &of_batch.ext;
    assert_int_equal(f.api->plan_batch(f.plan, &f.batch, NULL, &f.error), ATTN_ERROR_EXTENSION);
    f.batch.next = NULL;
    CHECK(&f, f.api->plan_batch(f.plan, &f.batch, NULL, &f.error));
    f.io.next = &of_run.ext;
    assert_int_equal(f.api->run(f.plan, f.api->model_layer(f.model, 0), &f.io, &f.error),
                     ATTN_ERROR_EXTENSION);
    hold_refusals(&f, &f.layer, of_layer.ext.id);
    fixture_finish(&f);
}

/* To prepare, of a recurrent layer. */
static void hold_states(int32_t i)
{
    enum { HEADS = 2, SIZE = 16 };
    static const float weights[HEADS] = {0.5f, 0.25f};
    struct recorded *c = recorded_by_core();
    struct room_extension of_layer = extension(i, 7);
    const struct attn_recurrent_desc states = {
        .ext = {ATTN_EXT_RECURRENT_DESC, 0, sizeof states, &of_layer.ext},
        .num_k_heads = HEADS,
        .num_v_heads = HEADS,
        .head_size_k = SIZE,
        .head_size_v = SIZE};
    const struct attn_layer_desc layer = {.struct_size = sizeof layer,
                                          .next = &states.ext,
                                          .name = "states",
                                          .kind = ATTN_LAYER_RECURRENT,
                                          .dtype = ATTN_DTYPE_F32,
                                          .num_q_heads = HEADS,
                                          .num_kv_heads = HEADS,
                                          .head_size = SIZE,
                                          .scale = 0.25f};
    const struct attn_layer_desc *layers[] = {&layer};
    const struct attn_recurrent_weights given = {
        .ext = {ATTN_EXT_RECURRENT_WEIGHTS, 0, sizeof given, NULL},
        .a_log = weights,
        .dt_bias = weights};
    const struct attn_layer_params params = {.struct_size = sizeof params, .next = &given.ext};
    const struct attn_layer_desc plain = {.kind = ATTN_LAYER_DECODER};
    struct fixture f;
    void *cache, *workspace;
    attn_model *model;
    attn_plan *plan;
    fixture_init(&f, "cpu_ref", &plain, queries, lens, 2, 0, NULL, false);
    CHECK(&f,
          client_model(f.api, f.runtime, CLIENT_ORDER("recording"), layers, 1, &model, &f.error));
    memset(c, 0, sizeof *c);
    c->extension = of_layer.ext.id;
    attn_layer *bound = f.api->model_layer(model, 0);
    CHECK(&f, client_cache(f.api, bound, 4, NULL, &cache, &f.error));
    CHECK(&f, f.api->layer_bind_params(bound, &params, &f.error));
    CHECK(&f, client_plan(f.api, model, 0, CLIENT_LIMITS(2, 16, 64), &plan, &workspace, &f.error));
    assert_int_equal(c->prepared, 7);
    hold_refusals(&f, &layer, of_layer.ext.id);
    f.api->plan_destroy(plan);
    f.api->model_destroy(model);
    free(cache);
    free(workspace);
    fixture_finish(&f);
}

TEST(test_each)
{
    for (int32_t i = 0; i < ROOM; i++) {
        print_message("%s\n", room[i].name);
        if (room[i].where & OF_STATES) {
            hold_states(i);
        } else {
            hold_attention(i);
        }
    }
}

/* Ids of drafts that no backend has, and of drafts that are the core's own to read, are refused. */
TEST(test_nobody_s_ids)
{
    static const uint32_t ids[] = {ATTN_EXT_DRAFT_KERNELS + RECORDED_DRAFTS,
                                   ATTN_EXT_DRAFT_KERNELS - 1, 0x1000};
    const struct attn_layer_desc plain = {.kind = ATTN_LAYER_DECODER};
    struct fixture f;
    fixture_init(&f, "recording", &plain, queries, lens, 2, 0, NULL, false);
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        struct room_extension strange = extension(0, 1);
        struct attn_layer_desc layer = f.layer;
        const struct attn_layer_desc *layers[] = {&layer};
        attn_model *model;
        strange.ext.id = ids[i];
        layer.next = &strange.ext;
        assert_int_equal(
            client_model(f.api, f.runtime, CLIENT_ORDER("recording"), layers, 1, &model, &f.error),
            i == 0 ? ATTN_ERROR_REFUSED : ATTN_ERROR_EXTENSION);
    }
    fixture_finish(&f);
}
