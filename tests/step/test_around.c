/* SPDX-License-Identifier: Apache-2.0 */
/* What stands around an attend: the two points of a transfer, scales from the first batch, rows
 * that alone are wanted. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/test.h"
#include "support/client.h"

enum { TOKENS = 31, ROW = 4 * 32 };

static const int32_t queries[] = {1, 1, 9, 20}, lens[] = {40, 17, 33, 20};

struct transfer {
    struct fixture *f;
    int32_t before, after;
    bool waits, saves, waited_too_late, saved_too_early;
};

/* Before: nothing of the step has been written or attended. After: all of it. */
static void wait_for_keys(void *user, int32_t layer, void *stream)
{
    struct transfer *t = user;
    t->before += layer == 0;
    t->waited_too_late |= t->saves && t->before != t->after + 1;
    t->waited_too_late |= t->f->out[0] != 7;
}

static void save_keys(void *user, int32_t layer, void *stream)
{
    struct transfer *t = user;
    t->after += layer == 0;
    t->saved_too_early |= t->waits && t->before != t->after;
    t->saved_too_early |= t->f->out[0] == 7;
}

/* Of a model with both, or with one of them alone. */
static void hold_points(bool waits, bool saves)
{
    const struct attn_layer_desc decoder = {.kind = ATTN_LAYER_DECODER, .causal = 1};
    struct fixture f;
    struct transfer transfer = {.f = &f, .waits = waits, .saves = saves};
    const struct attn_model_options options = {.struct_size = sizeof options,
                                               .user = &transfer,
                                               .before_layer = waits ? wait_for_keys : NULL,
                                               .after_layer = saves ? save_keys : NULL};
    const struct attn_layer_desc *layers[] = {&f.layer};
    const struct attn_select_options select = {.struct_size = sizeof select, .backend = "cpu_ref"};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    attn_assignment *assignment;
    attn_model *model;
    attn_plan *plan;
    void *workspace;
    fixture_init(&f, "cpu_ref", &decoder, queries, lens, 4, 0, NULL, false);
    CHECK(&f, f.api->select(f.runtime, &select, layers, 1, &assignment, &f.error));
    CHECK(&f, f.api->model_create(f.runtime, assignment, &options, &model, &f.error));
    attn_layer *layer = f.api->model_layer(model, 0);
    CHECK(&f, f.api->layer_kv_views(layer, f.cache, f.num_blocks, &k, &v, &f.error));
    CHECK(&f, f.api->layer_bind_kv(layer, &k, &v, &f.error));
    CHECK(&f, client_plan(f.api, model, 0, CLIENT_LIMITS(MAX_REQS, MAX_TOKENS, MAX_BLOCKS * 16),
                          &plan, &workspace, &f.error));
    CHECK(&f, f.api->plan_batch(plan, &f.batch, NULL, &f.error));
    f.io.lse = NULL;
    for (int32_t i = 1; i <= 2; i++) {
        f.out[0] = 7;
        CHECK(&f, f.api->run(plan, layer, &f.io, &f.error));
        assert_int_equal(transfer.before, waits ? i : 0);
        assert_int_equal(transfer.after, saves ? i : 0);
    }
    assert_false(transfer.saved_too_early);
    f.io.q = NULL; /* a run that fails still ends what it began */
    f.out[0] = 7;
    assert_int_not_equal(f.api->run(plan, layer, &f.io, &f.error), ATTN_OK);
    assert_int_equal(transfer.after, saves ? 3 : 0);
    assert_false(transfer.waited_too_late);
    f.api->plan_destroy(plan);
    f.api->model_destroy(model);
    f.api->assignment_destroy(assignment);
    free(workspace);
    fixture_finish(&f);
}

TEST(test_transfer_points)
{
    hold_points(true, true);
    hold_points(true, false);
    hold_points(false, true);
}

static float largest(const float *values, int64_t count)
{
    float most = 0;
    for (int64_t i = 0; i < count; i++) {
        most = fmaxf(most, fabsf(values[i]));
    }
    return most;
}

TEST(test_scales_from_the_first_batch)
{
    const struct attn_layer_desc decoder = {.kind = ATTN_LAYER_DECODER, .causal = 1};
    float q = -1, k = -1, v = -1;
    struct fixture f;
    fixture_init(&f, "cpu_ref", &decoder, queries, lens, 4, 0, NULL, false);
    attn_layer *layer = f.api->model_layer(f.model, 0);
    f.k[77] = -500;
    struct attn_calibration asked = {
        .struct_size = sizeof asked, .io = &f.io, .q_scale = &q, .k_scale = &k, .v_scale = &v};
    CHECK(&f, f.api->layer_calculate_scales(layer, &asked, &f.error));
    assert_true(fabsf(q - largest(f.q, TOKENS * ROW) / 200) <= 1e-6f * q);
    assert_true(k == 500.0f / 200);
    assert_true(fabsf(v - largest(f.v, TOKENS * ROW / 2) / 100) <= 1e-6f * v);
    asked.range = 448;
    CHECK(&f, f.api->layer_calculate_scales(layer, &asked, &f.error));
    assert_true(k == 500.0f / 448);
    assert_true(fabsf(v - largest(f.v, TOKENS * ROW / 2) / 448) <= 1e-6f * v);
    static const float bad[] = {-1, NAN, INFINITY};
    for (int32_t i = 0; i < 3; i++) {
        asked.range = bad[i];
        REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &f.error, "range",
                   f.api->layer_calculate_scales(layer, &asked, &f.error));
    }
    asked.range = 0;
    memset(f.v, 0, TOKENS * ROW / 2 * sizeof *f.v);
    k = -1;
    asked.q_scale = asked.k_scale = NULL;
    CHECK(&f, f.api->layer_calculate_scales(layer, &asked, &f.error));
    assert_true(v == 1 && k == -1);          /* nothing to scale; not asked for */
    struct attn_tensor pairs = f.tensors[1]; /* of numbers that are none of the ABI's */
    pairs.dtype.lanes = 2;
    asked.k_scale = &k;
    asked.v_scale = NULL;
    for (int32_t i = 0; i < 2; i++) {
        f.io.k = i == 0 ? NULL : &pairs;
        REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &f.error, "k",
                   f.api->layer_calculate_scales(layer, &asked, &f.error));
    }
    fixture_finish(&f);
}

TEST(test_fast_prefill)
{
    static const int32_t wanted[] = {0, 1, 10, 30, 30}; /* the last token of each request, padded */
    const struct attn_layer_desc decoder = {
        .kind = ATTN_LAYER_DECODER, .causal = 1, .fast_prefill = 1};
    float right[TOKENS * ROW];
    struct fixture f;
    fixture_init(&f, "cpu_ref", &decoder, queries, lens, 4, 0, NULL, false);
    fixture_step(&f);
    memcpy(right, f.out, sizeof right);
    memset(f.out, 0xff, sizeof right);
    f.batch.logits_indices = wanted;
    f.batch.num_logits_indices = 5;
    f.io.lse = NULL;
    fixture_step(&f);
    for (int32_t i = 0; i < 5; i++) {
        assert_memory_equal(&f.out[wanted[i] * ROW], &right[wanted[i] * ROW], ROW * sizeof *right);
    }
    assert_true(isnan(f.out[20 * ROW])); /* and no other is computed */
    fixture_finish(&f);
}
