/* SPDX-License-Identifier: Apache-2.0 */
/* Nothing is dropped in silence: every field of a layer's description and of a batch, for every
 * kind with keys, changes the output or is refused by name. Fields that ask for an ability, promise
 * something or are a hint are marked so. Recurrent layers' and MLA's: test_layer_check, test_gdn.
 */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/test.h"

static const int32_t queries[] = {5, 2, 1, 7}, lens[] = {40, 2, 33, 7};
static const struct attn_layer_desc kinds[] = {{.kind = ATTN_LAYER_DECODER, .causal = 1},
                                               {.kind = ATTN_LAYER_ENCODER},
                                               {.kind = ATTN_LAYER_CROSS}};
static const int32_t rows[] = {0, 1, 2, 3}, starts[] = {0, 5, 7, 8, 15};
static const int32_t spans[] = {36, 39, 0, 6}, span_starts[] = {0, 1, 1, 1, 2},
                     last_rows[] = {4, 6};
static const uint8_t flags[] = {0, 1, 0, 0};
static const struct attn_batch_recurrent states = {
    .ext = {ATTN_EXT_BATCH_RECURRENT, 0, sizeof states, NULL}, .state_slots = rows};
static const struct attn_batch_context_parallel context = {
    .ext = {ATTN_EXT_BATCH_CONTEXT, 0, sizeof context, NULL}, .local_seq_lens = rows};
static const uint32_t tree[8] = {1, 3, 1, 9, 17, 33, 65, 1};

#define LAYER(field, same, with, change)                                                           \
    static void with_##field(struct attn_layer_desc *l)                                            \
    {                                                                                              \
        with;                                                                                      \
    }                                                                                              \
    static void change_##field(struct attn_layer_desc *l)                                          \
    {                                                                                              \
        change;                                                                                    \
    }
#define BATCH(field, same, with, change)                                                           \
    static void batch_with_##field(struct attn_layer_desc *l)                                      \
    {                                                                                              \
        with;                                                                                      \
    }                                                                                              \
    static void batch_change_##field(struct attn_batch *b, int32_t kind)                           \
    {                                                                                              \
        change;                                                                                    \
    }
#include "fields.h"

#define LAYER(field, same, with, change) {#field, same, with_##field, change_##field},
#define BATCH(field, same, with, change)
static const struct {
    const char *name;
    bool same;
    void (*with)(struct attn_layer_desc *), (*change)(struct attn_layer_desc *);
} fields[] = {
#include "fields.h"
};

#define LAYER(field, same, with, change)
#define BATCH(field, same, with, change) {#field, same, batch_with_##field, batch_change_##field},
static const struct {
    const char *name;
    bool same;
    void (*with)(struct attn_layer_desc *);
    void (*change)(struct attn_batch *, int32_t);
} batches[] = {
#include "fields.h"
};

static void init(struct fixture *f, const struct attn_layer_desc *layer)
{
    fixture_init(f, "cpu_ref", layer, queries, lens, 4, 0, NULL, false);
}

/* Does select take it? If not, the error is in f. */
static bool taken(struct fixture *f, const struct attn_layer_desc *layer)
{
    const struct attn_layer_desc *layers[] = {layer};
    const struct attn_select_options options = {.struct_size = sizeof options,
                                                .backend = "cpu_ref"};
    attn_assignment *assignment = NULL;
    f->error = (struct attn_error)ATTN_ERROR_INIT;
    attn_status status = f->api->select(f->runtime, &options, layers, 1, &assignment, &f->error);
    f->api->assignment_destroy(assignment);
    return status == ATTN_OK;
}

/* num_spans is refused as spans */
static bool named(const struct fixture *f, const char *name)
{
    return strstr(name, f->error.field) != NULL || strstr(f->error.message, name) != NULL;
}

/* false: refused, with the error in f */
static bool run(struct fixture *f)
{
    f->error = (struct attn_error)ATTN_ERROR_INIT;
    return f->api->plan_batch(f->plan, &f->batch, NULL, &f->error) == ATTN_OK &&
           f->api->run(f->plan, f->api->model_layer(f->model, 0), &f->io, &f->error) == ATTN_OK;
}

TEST(test_layers)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields * 3; i++) {
        struct attn_layer_desc layer = kinds[i % 3];
        const char *name = fields[i / 3].name;
        struct fixture base, changed;
        init(&base, &layer);
        struct attn_layer_desc whole = base.layer;
        fields[i / 3].with(&layer);
        fields[i / 3].with(&whole);
        if (!taken(&base, &whole)) { /* the kind has no such term at all */
            fixture_finish(&base);
            continue;
        }
        fixture_finish(&base);
        init(&base, &layer);
        fields[i / 3].change(&whole);
        fields[i / 3].change(&layer);
        if (!taken(&base, &whole)) {
            if (!named(&base, name)) {
                fail_msg("kind %d, %s: refused for '%s'", layer.kind, name, base.error.message);
            }
        } else if (!fields[i / 3].same) {
            init(&changed, &layer);
            fixture_step(&base);
            if (run(&changed) && fixture_difference(&base, &changed) == 0) {
                fail_msg("kind %d: %s changes nothing and is not refused", layer.kind, name);
            }
            fixture_finish(&changed);
        }
        fixture_finish(&base);
    }
}

TEST(test_batches)
{
    for (size_t i = 0; i < sizeof batches / sizeof *batches * 6; i++) {
        struct attn_layer_desc layer = kinds[i % 3];
        const char *name = batches[i / 6].name;
        struct fixture base, changed;
        if (i / 3 % 2 == 1) { /* the layer says what it has to say for it */
            init(&base, &layer);
            struct attn_layer_desc whole = base.layer;
            batches[i / 6].with(&whole);
            bool has = taken(&base, &whole);
            fixture_finish(&base);
            batches[i / 6].with(&layer);
            if (!has) {
                continue;
            }
        }
        init(&base, &layer);
        init(&changed, &layer);
        fixture_step(&base);
        batches[i / 6].change(&changed.batch, layer.kind);
        if (!run(&changed)) {
            if (!named(&changed, name)) {
                fail_msg("kind %d, %s: refused for '%s'", layer.kind, name, changed.error.message);
            }
        } else if (!batches[i / 6].same && fixture_difference(&base, &changed) == 0) {
            fail_msg("kind %d: a batch's %s changes nothing and is not refused", layer.kind, name);
        }
        fixture_finish(&base);
        fixture_finish(&changed);
    }
}

/* Keys that are called common and are not: caught where batches are validated. */
TEST(test_common_prefix)
{
    static const int32_t longer[] = {40, 35, 33, 47};
    for (int32_t i = 0; i < 4; i++) {
        OWNED(fixture_finish) struct fixture f;
        fixture_init(&f, "cpu_ref", &kinds[0], queries, longer, 4, 32, NULL, true);
        OWNED(memory_end) int32_t *table = malloc(sizeof f.block_table);
        memcpy(table, f.block_table, sizeof f.block_table);
        f.batch.block_table = table;
        f.batch.common_prefix_len = i == 1 ? 48 : i == 2 ? -1 : 32;
        table[2 * MAX_BLOCKS + 1] += i == 3 ? 1 : 0;
        f.error = (struct attn_error)ATTN_ERROR_INIT;
        attn_status status = f.api->plan_batch(f.plan, &f.batch, NULL, &f.error);
        assert_int_equal(status, i == 0 ? ATTN_OK : ATTN_ERROR_INVALID_ARGUMENT);
        assert_string_equal(f.error.field, i == 0 ? "" : "common_prefix_len");
    }
}

/* Terms that a batch's word cannot turn round: chunks and spans are of causal layers. */
TEST(test_causal_terms)
{
    static const struct attn_layer_desc layers[] = {
        {.kind = ATTN_LAYER_DECODER, .causal = 1, .chunk_size = 16},
        {.kind = ATTN_LAYER_DECODER, .causal = 1, .chunk_size = 16, .chunk_lookback = 1},
        {.kind = ATTN_LAYER_DECODER, .causal = 1, .prefix_lm = 1}};
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        OWNED(fixture_finish) struct fixture f;
        init(&f, &layers[i]);
        f.batch.causal = ATTN_CAUSAL_NO;
        fixture_refuse_plan(&f, "causal");
        f.batch.causal = ATTN_CAUSAL_YES;
        fixture_step(&f);
    }
}
