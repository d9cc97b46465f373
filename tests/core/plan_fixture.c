/* SPDX-License-Identifier: Apache-2.0 */
#include "support/client.h"
#include "plan_fixture.h"

void set_batch(struct planned *b, const int32_t *queries, int32_t count)
{
    int32_t row = 0, block = BLOCKS;
    for (int32_t r = 0; r < count; r++) {
        b->start[r] = row;
        b->lens[r] = queries[r];
        for (int32_t i = 0; i < 3; i++) {
            b->table[3 * r + i] = i * FAKE_BLOCK_SIZE < queries[r] ? --block : -99;
        }
        for (int32_t i = 0; i < queries[r]; i++) {
            b->slots[row++] = b->table[3 * r + i / FAKE_BLOCK_SIZE] * (int64_t)FAKE_BLOCK_SIZE +
                              i % FAKE_BLOCK_SIZE;
        }
    }
    b->start[count] = row;
    b->batch = client_batch(count, b->start, b->lens);
    client_blocks(&b->batch, b->table, 3, b->slots);
}

const struct attn_layer_params *sink_params;

struct planned *planned_of(struct attn_layer_desc desc, bool validate,
                           void (*change)(struct fixture *fixture))
{
    struct planned *b = calloc(1, sizeof *b);
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    const struct attn_plan_options *options = CLIENT_LIMITS(8, TOKENS, 0);
    fake_init(&b->fixture)->features |= ATTN_FEATURE_BLOCK_TABLE_ROW;
    if (change != NULL) {
        change(&b->fixture);
    }
    b->fixture.runtime.settings.validate = validate;
    b->error = (struct attn_error)ATTN_ERROR_INIT;
    b->model = fake_model_of(&b->fixture, &desc, 1);
    attn_layer *layer = model_layer(b->model, 0);
    layer_cache_spec(layer, 0, &spec, NULL);
    if (spec.page_bytes > 0) {
        size_t bytes = (size_t)(spec.page_bytes * BLOCKS);
        b->cache = aligned_alloc(256, bytes);
        memset(b->cache, 0xff, bytes); /* NaN where nothing is written */
        assert_ok(layer_kv_views(layer, b->cache, BLOCKS, &k, &v, &b->error));
        assert_ok(bind_kv(layer, &k, &v, &b->error));
    }
    if (sink_params != NULL) {
        assert_ok(layer_bind_params(layer, sink_params, &b->error));
    }
    assert_ok(plan_create(b->model, 0, options, &b->plan, &b->error));
    struct attn_workspace room = {.struct_size = sizeof room};
    assert_ok(plan_workspace(b->plan, &room, &b->error));
    room.memory = b->workspace = aligned_alloc((size_t)room.alignment, room.bytes);
    room.bytes--;
    assert_int_equal(plan_bind_workspace(b->plan, &room, &b->error), ATTN_ERROR_WORKSPACE);
    room.bytes++;
    assert_ok(plan_bind_workspace(b->plan, &room, &b->error));
    for (int32_t t = 0; t < 4; t++) {
        for (int32_t i = 0; i < TOKENS * 4 * FAKE_HEAD_SIZE; i++) {
            b->data[t][i] = (float)((i * 7 + t * 13) % 31 - 15) / 16;
        }
    }
    b->q = fake_tensor(b->data[0], b->shapes[0], TOKENS, 4);
    b->k = fake_tensor(b->data[1], b->shapes[1], TOKENS, 2);
    b->v = fake_tensor(b->data[2], b->shapes[2], TOKENS, 2);
    b->out = fake_tensor(b->data[3], b->shapes[3], TOKENS, 4);
    b->io = SIZED(attn_step_io, .q = &b->q, .k = &b->k, .v = &b->v, .out = &b->out);
    return b;
}

struct planned *planned_create(struct attn_layer_desc desc, bool validate)
{
    return planned_of(desc, validate, NULL);
}

void planned_destroy(struct planned *b)
{
    plan_destroy(b->plan);
    model_destroy(b->model);
    fixture_finish(&b->fixture);
    free(b->cache);
    free(b->workspace);
    free(b);
}

void remake_plan(struct planned *b, const struct attn_plan_options *options)
{
    struct attn_workspace room = {.struct_size = sizeof room};
    plan_destroy(b->plan);
    assert_ok(plan_create(b->model, 0, options, &b->plan, &b->error));
    assert_ok(plan_workspace(b->plan, &room, &b->error));
    room.memory = b->workspace;
    assert_ok(plan_bind_workspace(b->plan, &room, &b->error));
}

attn_status step(struct planned *b)
{
    attn_status status = plan_batch(b->plan, &b->batch, NULL, &b->error);
    return status ? status : plan_run(b->plan, model_layer(b->model, 0), &b->io, &b->error);
}
