/* SPDX-License-Identifier: Apache-2.0 */
/* What engines get wrong is refused with the value found, never served quietly: tensors, lengths,
 * caches at odd addresses, loops that an engine's threads run otherwise than the ABI says. */
#include <string.h>

#include "fixture.h"
#include "support/test.h"

static const struct attn_layer_desc decoder = {.kind = ATTN_LAYER_DECODER, .causal = 1};
static const int32_t queries[] = {1, 1, 9, 20}, lens[] = {40, 17, 33, 20};

static void init(struct fixture *f, const struct attn_host *host, bool validate)
{
    fixture_init(f, "cpu_ref", &decoder, queries, lens, 4, 0, host, validate);
    CHECK(f, f->api->plan_batch(f->plan, &f->batch, NULL, &f->error));
}

static attn_status run(struct fixture *f)
{
    return f->api->run(f->plan, f->api->model_layer(f->model, 0), &f->io, &f->error);
}

static void refuse(struct fixture *f, attn_status status, const char *field, const char *text)
{
    assert_int_equal(status, ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(f->error.field, field);
    if (strstr(f->error.message, text) == NULL) {
        fail_msg("no '%s' in: %s", text, f->error.message);
    }
}

TEST(test_values)
{
    struct fixture f;
    int64_t shape[] = {31, 3, 32}, strides[] = {128, 32, 2}, few[] = {30, 2, 32};
    init(&f, NULL, false);
    struct attn_tensor bad = f.tensors[0];
    f.io.q = &bad;
    bad.shape = shape;
    refuse(&f, run(&f), "q", "q is [31, 3, 32]; [31 or more, 4, 32] is needed");
    bad = f.tensors[0];
    bad.strides = strides;
    refuse(&f, run(&f), "q", "the last stride of q is 2");
    bad = f.tensors[0];
    bad.dtype = (struct attn_dtype){ATTN_CODE_BFLOAT, 16, 1};
    refuse(&f, run(&f), "q", "q is bfloat16 (1 lanes); the layer's is float32");
    f.io.q = NULL;
    refuse(&f, run(&f), "q", "q is NULL");
    f.io.q = &f.tensors[0];
    bad = f.tensors[1];
    bad.shape = few;
    f.io.k = &bad;
    refuse(&f, run(&f), "k", "k is [30, 2, 32]; [31 or more, 2, 32] is needed");
    bad.shape = shape;
    refuse(&f, run(&f), "k", "k is [31, 3, 32]; [31 or more, 2, 32] is needed");
    fixture_finish(&f);
}

/* Keys that nothing says where to write, whatever their shape: the attend would read stale ones. */
TEST(test_keys_without_slots)
{
    struct fixture f;
    int64_t other_heads[] = {31, 3, 32};
    init(&f, NULL, false);
    f.batch.num_slots = 0;
    f.batch.slot_mapping = NULL;
    CHECK(&f, f.api->plan_batch(f.plan, &f.batch, NULL, &f.error));
    refuse(&f, run(&f), "slot_mapping", "brings k and the batch has no slots (num_slots 0)");
    struct attn_tensor bad = f.tensors[1];
    bad.shape = other_heads;
    f.io.k = &bad;
    refuse(&f, run(&f), "slot_mapping", "brings k and the batch has no slots (num_slots 0)");
    f.io.flags = ATTN_RUN_NO_WRITE;
    assert_int_equal(run(&f), ATTN_OK);
    f.io.flags = 0;
    f.io.k = f.io.v = NULL;
    assert_int_equal(run(&f), ATTN_OK);
    fixture_finish(&f);
}

/* Unknown flags are refused, unless they are hints; what is left at 0 is the layer's. */
TEST(test_flags)
{
    struct fixture f;
    float of_layer[31][4][32];
    init(&f, NULL, false);
    f.io.flags = 4;
    refuse(&f, run(&f), "flags", "a bit of the run's flags is not known");
    f.io.flags = 1u << 31;
    assert_int_equal(run(&f), ATTN_OK);
    f.io.flags = 0;
    f.batch.flags = 8;
    refuse(&f, f.api->plan_batch(f.plan, &f.batch, NULL, &f.error), "flags",
           "flags is 0x8; 0x8 is not");
    f.batch.flags = ATTN_BATCH_FAST_BUILD | 1u << 31;
    CHECK(&f, f.api->plan_batch(f.plan, &f.batch, NULL, &f.error));
    assert_int_equal(run(&f), ATTN_OK);
    memcpy(of_layer, f.io.out->data, sizeof of_layer);
    f.batch.causal = ATTN_CAUSAL_YES;
    CHECK(&f, f.api->plan_batch(f.plan, &f.batch, NULL, &f.error));
    assert_int_equal(run(&f), ATTN_OK);
    assert_memory_equal(of_layer, f.io.out->data, sizeof of_layer);
    f.batch.causal = ATTN_CAUSAL_NO;
    CHECK(&f, f.api->plan_batch(f.plan, &f.batch, NULL, &f.error));
    assert_int_equal(run(&f), ATTN_OK);
    assert_memory_not_equal(of_layer, f.io.out->data, sizeof of_layer);
    f.batch.causal = -1;
    refuse(&f, f.api->plan_batch(f.plan, &f.batch, NULL, &f.error), "causal",
           "causal is -1; 0 (as");
    fixture_finish(&f);
}

/* A vendor's own options: refused by the backend whose they are, passed over by the others. */
TEST(test_backend_options)
{
    const char *of_ref[] = {"cpu_ref.colour=red"}, *of_other[] = {"example.colour=red"},
               *of_nobody[] = {"cpu_rex.colour=red"}, *no_value[] = {"cpu_ref.colour"};
    const struct {
        const char **options;
        attn_status status;
        const char *field;
    } cases[] = {{of_ref, ATTN_ERROR_NOT_FOUND, "options"},
                 {of_other, ATTN_OK, ""},
                 {of_nobody, ATTN_ERROR_INVALID_ARGUMENT, "backend_options"},
                 {no_value, ATTN_ERROR_INVALID_ARGUMENT, "backend_options"}};
    struct fixture f;
    init(&f, NULL, false);
    const struct attn_layer_desc *layers[] = {&f.layer};
    const struct attn_select_options select = {.struct_size = sizeof select, .backend = "cpu_ref"};
    attn_assignment *assignment = NULL;
    CHECK(&f, f.api->select(f.runtime, &select, layers, 1, &assignment, &f.error));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct attn_model_options options = {.struct_size = sizeof options,
                                                   .backend_options = cases[i].options,
                                                   .num_backend_options = 1};
        attn_model *model = NULL;
        attn_status status = f.api->model_create(f.runtime, assignment, &options, &model, &f.error);
        assert_int_equal(status, cases[i].status);
        if (status != ATTN_OK) {
            assert_string_equal(f.error.field, cases[i].field);
        }
        f.api->model_destroy(model);
    }
    f.api->assignment_destroy(assignment);
    fixture_finish(&f);
}

/* A length above the plan's limit is the length's fault. */
TEST(test_lengths)
{
    struct fixture f;
    init(&f, NULL, false);
    f.seq_lens[2] = MAX_BLOCKS * 16 + 1;
    REFUSED_AS(ATTN_ERROR_LIMIT, &f.error, "seq_lens_host",
               f.api->plan_batch(f.plan, &f.batch, NULL, &f.error));
    assert_non_null(strstr(f.error.message, "a request has 1537 keys"));
    fixture_finish(&f);
}

/* What the layer's terms need of its parameters. */
TEST(test_params)
{
    const struct {
        struct attn_layer_desc layer;
        const char *field;
    } cases[] = {
        {{.kind = ATTN_LAYER_DECODER, .causal = 1, .has_sinks = 1}, "sinks"},
        {{.kind = ATTN_LAYER_DECODER, .causal = 1, .sink_len = 3}, "sink_k"},
        {{.kind = ATTN_LAYER_DECODER, .causal = 1}, "alibi_slopes"},
    };
    const struct attn_layer_params none = {.struct_size = sizeof none};
    struct fixture f;
    float slopes[4];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct attn_layer_params slopes_only = {.struct_size = sizeof slopes_only,
                                                      .alibi_slopes = slopes};
        fixture_init(&f, "cpu_ref", &cases[i].layer, queries, lens, 4, 0, NULL, false);
        f.api->plan_destroy(f.plan);
        f.plan = NULL;
        refuse(&f,
               f.api->layer_bind_params(f.api->model_layer(f.model, 0),
                                        i < 2 ? &none : &slopes_only, &f.error),
               cases[i].field, "layer '");
        fixture_finish(&f);
    }
}

/* Spans without the starts of each request's; a rotation without its table, or of no even number.
 */
TEST(test_spans_and_rotation)
{
    const struct attn_layer_desc rotated = {
        .kind = ATTN_LAYER_DECODER, .causal = 1, .rope = ATTN_ROPE_NEOX};
    static const int64_t positions[31];
    static float angles[64][32];
    int64_t shape[] = {64, 32};
    const struct attn_tensor table = {
        angles, {ATTN_DEVICE_CPU, 0}, 2, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
    const struct attn_io_rope good = {.ext = {ATTN_EXT_IO_ROPE, 0, sizeof good, NULL},
                                      .form = ATTN_ROPE_NEOX,
                                      .positions = positions,
                                      .cos_sin = &table};
    const struct attn_tensor flat = {
        angles, {ATTN_DEVICE_CPU, 0}, 1, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
    struct attn_io_rope bad[] = {good, good, good, good, good, good, good};
    struct fixture f;
    bad[0].form = 9;
    bad[1].positions = NULL;
    bad[2].cos_sin = NULL;
    bad[3].cos_sin = &flat;
    bad[4].q_norm_weight = &table;
    bad[5].rotary_dim = 7;
    bad[6].rotary_dim = 34;
    fixture_init(&f, "cpu_ref", &rotated, queries, lens, 4, 0, NULL, false);
    f.batch.spans = f.seq_lens;
    refuse(&f, f.api->plan_batch(f.plan, &f.batch, NULL, &f.error), "span_start_loc", "is NULL");
    f.batch.spans = NULL;
    CHECK(&f, f.api->plan_batch(f.plan, &f.batch, NULL, &f.error));
    for (int32_t i = 0; i < 7; i++) {
        f.io.next = &bad[i].ext;
        refuse(&f, run(&f), i < 5 ? "attn_io_rope" : "rotary_dim", "");
    }
    f.io.next = &good.ext;
    assert_int_equal(run(&f), ATTN_OK);
    fixture_finish(&f);
}

TEST(test_odd_address)
{
    struct fixture f;
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    init(&f, NULL, false);
    attn_layer *layer = f.api->model_layer(f.model, 0);
    CHECK(&f,
          f.api->layer_kv_views(layer, (char *)f.cache + 256, f.num_blocks - 1, &k, &v, &f.error));
    k.data = (char *)k.data + 2;
    refuse(&f, f.api->layer_bind_kv(layer, &k, &v, &f.error), "data", "multiple of 4 bytes");
    fixture_finish(&f);
}

enum mistake { RIGHT, FOREIGN_WORKER, LEFT_OUT };

/* An engine that has lent more threads than it said, or has lost a slice. */
static void wrong_parallel_for(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                               void *argument)
{
    const enum mistake *mistake = user;
    body(argument, 0, 1, *mistake == FOREIGN_WORKER ? 2 : 1);
    if (*mistake != LEFT_OUT && count > 1) {
        body(argument, 1, count, 0);
    }
}

TEST(test_threads)
{
    enum mistake mistake = RIGHT;
    const struct attn_host host = {.struct_size = sizeof host,
                                   .user = &mistake,
                                   .parallel_for = wrong_parallel_for,
                                   .num_threads = 2};
    struct fixture f;
    init(&f, &host, true);
    assert_int_equal(run(&f), ATTN_OK);
    mistake = FOREIGN_WORKER;
    refuse(&f, run(&f), "parallel_for", "worker 2; workers are 0 to 1");
    mistake = LEFT_OUT;
    refuse(&f, run(&f), "parallel_for", "ran 1 items");
    mistake = RIGHT;
    assert_int_equal(run(&f), ATTN_OK);
    fixture_finish(&f);
}
