/* SPDX-License-Identifier: Apache-2.0 */
/* What engines get wrong is refused with the value found, never served quietly: tensors, lengths,
 * caches at odd addresses, loops that an engine's threads run otherwise than the ABI says. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/client.h"
#include "support/tensor.h"
#include "support/test.h"

static const struct attn_layer_desc decoder = DECODER();
static const int32_t queries[] = {1, 1, 9, 20}, lens[] = {40, 17, 33, 20};

static void init(struct fixture *f, const struct attn_host *host, bool validate)
{
    fixture_init(f, "cpu_ref", &decoder, queries, lens, 4, 0, host, validate);
    CHECK(f, fixture_batch(f));
}

static void refuse(struct fixture *f, attn_status status, const char *field, const char *text)
{
    assert_int_equal(status, ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(f->error.field, field);
    SAYS(f, text);
}

static void plan(struct fixture *f)
{
    CHECK(f, fixture_batch(f));
}

static void refuse_plan(struct fixture *f, const char *field, const char *text)
{
    refuse(f, fixture_batch(f), field, text);
}

static void refuse_run(struct fixture *f, const char *field, const char *text)
{
    refuse(f, fixture_run(f), field, text);
}

static struct fixture f;

/* With a change of the fixture `f`, which is taken back: its batch, arrays, io and tensors. */
#define PLAN_REFUSED(field, text, change) WITH(f, change, refuse_plan(&f, field, text))
#define RUN_REFUSED(field, text, change) WITH(f, change, refuse_run(&f, field, text))
#define RUNS(change) WITH(f, change, assert_ok(fixture_run(&f)))

CASE(test_values, init(&f, NULL, false))
{
    int64_t shape[] = {31, 3, 32}, strides[] = {128, 32, 2}, few[] = {30, 2, 32};
    RUN_REFUSED("q",
                "q is [31, 3, 32] float32; [31 or more, 4, 32] float32, the last dimension "
                "contiguous, is needed",
                f.tensors[0].shape = shape);
    RUN_REFUSED("q", "q is [31, 4, 32] float32 with a last stride of 2",
                f.tensors[0].strides = strides);
    RUN_REFUSED("q", "q is [31, 4, 32] bfloat16; [31 or more, 4, 32] float32",
                f.tensors[0].dtype = ((struct attn_dtype){ATTN_CODE_BFLOAT, 16, 1}));
    RUN_REFUSED("q", "q is [31, 4, 32] float32 in 2 lanes; [31 or more, 4, 32] float32,",
                f.tensors[0].dtype.lanes = 2);
    RUN_REFUSED("q", "q is NULL", f.io.q = NULL);
    RUN_REFUSED("k", "k is [30, 2, 32] float32; [31 or more, 2, 32] float32",
                f.tensors[1].shape = few);
    RUN_REFUSED("k", "k is [31, 3, 32] float32; [31 or more, 2, 32] float32",
                f.tensors[1].shape = shape);
}

/* Keys that nothing says where to write, whatever their shape: the attend would read stale ones. */
CASE(test_keys_without_slots, init(&f, NULL, false))
{
    static const char text[] = "brings k and the batch has no slots (num_slots 0)";
    int64_t other_heads[] = {31, 3, 32};
    f.batch.num_slots = 0;
    f.batch.slot_mapping = NULL;
    plan(&f);
    RUN_REFUSED("slot_mapping", text, );
    RUN_REFUSED("slot_mapping", text, f.tensors[1].shape = other_heads);
    RUNS((f.io.flags = ATTN_RUN_NO_WRITE, f.tensors[1].shape = other_heads));
    RUNS(f.io.k = f.io.v = NULL);
}

/* Unknown flags are refused, unless they are hints; what is left at 0 is the layer's. */
CASE(test_flags, init(&f, NULL, false))
{
    uint8_t of_layer[31 * 4 * 32 * sizeof(float)]; /* compared byte by byte */
    RUN_REFUSED("flags", "a bit of the run's flags is not known", f.io.flags = 4);
    RUNS(f.io.flags = 1u << 31);
    PLAN_REFUSED("flags", "flags is 0x8; 0x8 is not", f.batch.flags = 8);
    f.batch.flags = ATTN_BATCH_FAST_BUILD | 1u << 31;
    for (int32_t causal = 0; causal <= ATTN_CAUSAL_NO; causal++) {
        f.batch.causal = causal; /* left at 0: the layer's, which is causal */
        plan(&f);
        RUNS();
        if (causal == 0) {
            memcpy(of_layer, f.io.out->data, sizeof of_layer);
        }
        assert_int_equal(memcmp(of_layer, f.io.out->data, sizeof of_layer) == 0,
                         causal != ATTN_CAUSAL_NO);
    }
    PLAN_REFUSED("causal", "causal is -1; allowed are 0 to 2", f.batch.causal = -1);
    PLAN_REFUSED("common_prefix_len", "is -16; allowed are 0 to", f.batch.common_prefix_len = -16);
    PLAN_REFUSED("block_table_rows", "-1 rows",
                 (f.batch.block_table_row = lens, f.batch.block_table_rows = -1));
    PLAN_REFUSED("block_table_stride", "rows of -1 entries",
                 (f.batch.seq_lens_host = NULL, f.batch.block_table_stride = -1));
}

/* Rows of a tree before its first. */
CASE(test_tree_strides,
     fixture_init(&f, "cpu_ref", &(struct attn_layer_desc)DECODER(.tree_mask = ATTN_TREE_BITS),
                  queries, lens, 4, 0, NULL, false))
{
    static const uint32_t bits[32];
    f.batch.tree = bits;
    PLAN_REFUSED("tree", "trees lie 0 words apart, their rows -1", f.batch.tree_stride_row = -1);
    PLAN_REFUSED("tree", "trees lie -1 words apart", f.batch.tree_stride_request = -1);
    plan(&f);
}

/* Under validation every way of a run looks for NaN, in each row and head that it reads. */
CASE(test_nan, init(&f, NULL, true))
{
    static const char *const names[] = {"q", "k", "v"};
    float *const data[] = {f.q, f.k, f.v};
    for (int32_t i = 0; i < 12; i++) {
        const int32_t which = i % 3, heads = which == 0 ? 4 : 2;
        float *number = &data[which][(30 * heads + heads - 1) * 32 + 31], before = *number;
        f.io.lse = i < 6 ? NULL : &f.tensors[4];
        f.io.flags = i % 6 < 3 ? 0 : ATTN_RUN_NO_WRITE;
        *number = NAN;
        attn_status status = fixture_run(&f);
        assert_int_equal(status, f.io.flags == 0 || which == 0 ? ATTN_ERROR_NAN : ATTN_OK);
        if (status != ATTN_OK) {
            assert_string_equal(f.error.field, names[which]);
        }
        *number = before;
        assert_ok(fixture_run(&f));
    }
}

/* Rows before the batch's first are another batch's, and may hold anything. */
CASE(test_nan_of_others, init(&f, NULL, true))
{
    CHECK(&f, fixture_run(&f));
    fixture_skip_first(&f);
    f.io.flags = ATTN_RUN_NO_WRITE;
    f.q[0] = f.out[0] = NAN;
    fixture_step(&f);
    assert_true(isnan(f.out[0]));
    f.q[f.query_start_loc[1] * 4 * 32] = NAN;
    assert_int_equal(fixture_run(&f), ATTN_ERROR_NAN);
    PLAN_REFUSED("slot_mapping", "row 0: slot 1048576", f.slots[0] = 1 << 20);
}

/* Slots of padding may be more than the cache and the plan's limits have, among the step's own and
 * after them, over rows that hold anything. */
TEST(test_slots_of_padding)
{
    enum { SLOTS = 4096, ROW = 2 * 32 };
    static float rows[2][SLOTS][ROW];
    static int64_t slots[SLOTS];
    OWNED(fixture_finish) struct fixture f, other;
    int64_t shape[] = {SLOTS, 2, 32};
    init(&f, NULL, true);
    CHECK(&f, fixture_run(&f));
    init(&other, NULL, true);
    assert_true(SLOTS > other.num_blocks * 16 + MAX_TOKENS);
    for (int32_t i = 0; i < SLOTS; i++) {
        const int32_t t = i / 3;
        const bool own = i % 3 == 1 && t < 31;
        slots[i] = own ? f.slots[t] : -1 - i;
        for (int32_t j = 0; j < ROW; j++) {
            rows[0][i][j] = own ? f.k[t * ROW + j] : NAN;
            rows[1][i][j] = own ? f.v[t * ROW + j] : NAN;
        }
    }
    other.batch.slot_mapping = slots;
    other.batch.num_slots = SLOTS;
    for (int32_t i = 0; i < 2; i++) {
        other.tensors[1 + i].data = rows[i];
        other.tensors[1 + i].shape = shape;
    }
    fixture_step(&other);
    assert_true(fixture_difference(&f, &other) == 0);
    rows[1][91][ROW - 1] = NAN; /* the last token has it */
    assert_int_equal(fixture_run(&other), ATTN_ERROR_NAN);
    SAYS(&other, "v[91, 1, 31] is NaN");
    slots[SLOTS - 1] = slots[91];
    refuse_plan(&other, "slot_mapping", "row 4095: slot");
    SAYS(&other, "is that of an earlier token, too");
}

/* Blocks that no query of a request sees may hold anything: before a window, or its chunks; those
 * that one sees are checked. */
TEST(test_unseen_blocks)
{
    static const int32_t one[] = {1}, long_lens[] = {120}; /* position 119, blocks 0 to 7 */
    static const struct {
        struct attn_layer_desc layer;
        int32_t first; /* block that is seen */
    } cases[] = {
        {DECODER(), 0},
        {DECODER(.has_window = 1, .window_left = 39), 5},
        {DECODER(.has_window = 1, .window_left = 40), 4},
        {DECODER(.chunk_size = 32), 6},
        {DECODER(.chunk_size = 32, .chunk_lookback = 1), 4},
        {DECODER(.has_window = 1, .window_left = 40, .prefix_lm = 1), 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        OWNED(fixture_finish) struct fixture f;
        fixture_init(&f, "cpu_ref", &cases[i].layer, one, long_lens, 1, 0, NULL, true);
        for (int32_t b = 0; b < 8; b++) {
            const int32_t before = f.block_table[b];
            f.block_table[b] = (int32_t)f.num_blocks; /* one after the cache */
            attn_status status = fixture_batch(&f);
            if ((status != ATTN_OK) != (b >= cases[i].first)) {
                fail_msg("case %zu, block %d: status %d", i, b, status);
            }
            f.block_table[b] = before;
        }
    }
}

/* A length above the plan's limit is the length's fault. */
CASE(test_lengths, init(&f, NULL, false))
{
    f.seq_lens[2] = MAX_BLOCKS * 16 + 1;
    REFUSED_AS(ATTN_ERROR_LIMIT, &f.error, "seq_lens_host", fixture_batch(&f));
    assert_non_null(strstr(f.error.message, "a request has 1537 keys"));
}

/* The keys of a static sink, in each dimension and dtype. */
TEST(test_sink_tensors)
{
    const struct attn_layer_desc layer = DECODER(.sink_len = 3);
    OWNED(fixture_finish) struct fixture f;
    int64_t shape[] = {3, 2, 30}, strides[] = {128, 64, 2}, longer[] = {4, 2, 32};
    fixture_mixed(&f, "cpu_ref", &layer, false);
    f.api->plan_destroy(f.plan);
    f.plan = NULL;
    for (int32_t i = 0; i < 6; i++) {
        struct attn_tensor bad = f.tensors[5];
        const struct attn_layer_params params =
            SIZED(attn_layer_params, .sink_k = i == 5 ? NULL : &bad, .sink_v = &f.tensors[6]);
        bad.shape = i == 0 ? shape : i == 4 ? longer : bad.shape;
        bad.strides = i == 1 ? strides : bad.strides;
        bad.dtype.bits = i == 2 ? 16 : 32;
        bad.data = i == 3 ? NULL : bad.data;
        refuse(&f, f.api->layer_bind_params(f.bound, &params, &f.error), "sink_k",
               i == 5 ? "layer '" : "; [3, 2, 32] float32, the last");
    }
}

CASE(test_spans,
     fixture_mixed(&f, "cpu_ref", &(struct attn_layer_desc)DECODER(.prefix_lm = 1), true))
{
    static const int32_t spans[4][2], starts[] = {0, 1, 2, 2, 4};
    f.batch.spans = spans[0];
    f.batch.num_spans = 4;
    PLAN_REFUSED("spans", "span_start_loc (nil)", );
    f.batch.span_start_loc = starts;
    PLAN_REFUSED("span_start_loc", "ends at num_spans, 3", f.batch.num_spans = 3);
    plan(&f);
}

/* Keys that are called common and are not: caught where batches are validated. */
TEST(test_common_prefix)
{
    static const int32_t many[] = {5, 2, 1, 7}, longer[] = {40, 35, 33, 47};
    for (int32_t i = 0; i < 4; i++) {
        OWNED(fixture_finish) struct fixture f;
        fixture_init(&f, "cpu_ref", &decoder, many, longer, 4, 32, NULL, true);
        OWNED(memory_end) int32_t *table = malloc(sizeof f.block_table);
        memcpy(table, f.block_table, sizeof f.block_table);
        f.batch.block_table = table;
        f.batch.common_prefix_len = i == 1 ? 48 : i == 2 ? -1 : 32;
        table[2 * MAX_BLOCKS + 1] += i == 3 ? 1 : 0;
        f.error = (struct attn_error)ATTN_ERROR_INIT;
        attn_status status = fixture_batch(&f);
        assert_int_equal(status, i == 0 ? ATTN_OK : ATTN_ERROR_INVALID_ARGUMENT);
        assert_string_equal(f.error.field, i == 0 ? "" : "common_prefix_len");
    }
}

/* Terms that a batch's word cannot turn round: chunks and spans are of causal layers. */
TEST(test_causal_terms)
{
    static const struct attn_layer_desc layers[] = {DECODER(.chunk_size = 16),
                                                    DECODER(.chunk_size = 16, .chunk_lookback = 1),
                                                    DECODER(.prefix_lm = 1)};
    for (size_t i = 0; i < sizeof layers / sizeof *layers; i++) {
        OWNED(fixture_finish) struct fixture f;
        fixture_mixed(&f, "cpu_ref", &layers[i], false);
        f.batch.causal = ATTN_CAUSAL_NO;
        fixture_refuse_plan(&f, "causal");
        f.batch.causal = ATTN_CAUSAL_YES;
        fixture_step(&f);
    }
}

/* Rows that alone are wanted are rows of the step. */
CASE(test_wanted_rows,
     fixture_mixed(&f, "cpu_ref", &(struct attn_layer_desc)DECODER(.fast_prefill = 1), true))
{
    f.batch.num_logits_indices = 2;
    f.batch.logits_indices = (const int32_t[]){0, 30};
    plan(&f);
    PLAN_REFUSED("logits_indices", "logits_indices[1] is 31; the step has rows 0 to 30",
                 f.batch.logits_indices = ((const int32_t[]){0, 31}));
}

#define ROPE_REFUSED(field, change)                                                                \
    do {                                                                                           \
        io = good;                                                                                 \
        table = right;                                                                             \
        change;                                                                                    \
        refuse_run(&f, field, "");                                                                 \
    } while (0)

/* A rotation: each of its tensors in each dimension and dtype, its form, its number of tokens, and,
 * under validation, each position. */
TEST(test_rotation)
{
    const struct attn_layer_desc rotated = DECODER(.rope = ATTN_ROPE_NEOX, .qk_norm = 1);
    static int64_t positions[31];
    static float angles[64][32], weights[32];
    struct shaped angled, normed, short_norm;
    const struct attn_tensor right =
        *shaped_set(&angled, angles, ATTN_DTYPE_F32, 2, (int64_t[]){64, 32}, NULL);
    struct attn_tensor table;
    const struct attn_io_rope good = EXTENSION(
        attn_io_rope, ATTN_EXT_IO_ROPE, NULL, .form = ATTN_ROPE_NEOX, .positions = positions,
        .cos_sin = &table,
        .q_norm_weight = shaped_set(&normed, weights, ATTN_DTYPE_F32, 1, (int64_t[]){32}, NULL),
        .k_norm_weight = &normed.tensor);
    struct attn_io_rope io;
    OWNED(fixture_finish) struct fixture f;
    fixture_mixed(&f, "cpu_ref", &rotated, true);
    plan(&f);
    f.io.next = &io.ext;
    ROPE_REFUSED("attn_io_rope", io.form = ATTN_ROPE_GPTJ); /* the layer says NeoX */
    ROPE_REFUSED("attn_io_rope", io.positions = NULL);
    ROPE_REFUSED("cos_sin", io.cos_sin = NULL);
    ROPE_REFUSED("cos_sin", table.ndim = 1);
    ROPE_REFUSED("cos_sin", table.shape = ((int64_t[]){64, 30}));
    ROPE_REFUSED("cos_sin", table.shape = ((int64_t[]){-1, 32}));
    ROPE_REFUSED("cos_sin", table.dtype.code = ATTN_CODE_INT);
    ROPE_REFUSED("cos_sin", table.strides = ((int64_t[]){64, 2}));
    ROPE_REFUSED("cos_sin", table.data = NULL);
    ROPE_REFUSED("rotary_dim", io.rotary_dim = 7);
    ROPE_REFUSED("rotary_dim", io.rotary_dim = 34);
    ROPE_REFUSED("cos_sin", io.rotary_dim = 16); /* the table has rows of twice as much */
    ROPE_REFUSED("q_norm_weight", io.q_norm_weight = &table);
    ROPE_REFUSED("k_norm_weight",
                 io.k_norm_weight =
                     shaped_set(&short_norm, weights, ATTN_DTYPE_F32, 1, (int64_t[]){31}, NULL));
    ROPE_REFUSED("reserved", io.reserved = 1);
    ROPE_REFUSED("norm_eps", io.norm_eps = -1);
    ROPE_REFUSED("norm_eps", io.norm_eps = NAN);
    ROPE_REFUSED("norm_eps", io.norm_eps = INFINITY);
    io = good;
    positions[30] = 64;
    refuse_run(&f, "positions", "positions[30] is 64; cos_sin has positions 0 to 63");
    positions[30] = 63;
    assert_ok(fixture_run(&f));
    /* q is rotated with the keys: a run without them is refused, and one with fewer keys than
     * queries */
    f.io.flags = ATTN_RUN_NO_WRITE;
    refuse_run(&f, "attn_io_rope", "the run writes no keys");
    f.io.flags = 0;
    f.batch.num_slots = 30;
    plan(&f);
    refuse_run(&f, "num_slots", "30 slots");
    f.batch.num_slots = 0;
    f.io.k = f.io.v = NULL;
    plan(&f);
    refuse_run(&f, "attn_io_rope", "the run writes no keys");
}

/* Runs go to the stream of the plan's batch, which another plan_batch may change. */
CASE(test_stream, init(&f, NULL, true))
{
    f.io.stream = &f;
    RUN_REFUSED("stream", "is not the stream that plan_batch was given", );
    CHECK(&f, f.api->plan_batch(f.plan, &f.batch, &f, &f.error));
    RUNS();
}

/* Reserved fields that no other test sets, with keys and without (the fast path). */
CASE(test_reserved, init(&f, NULL, false))
{
    struct attn_workspace workspace = {.struct_size = sizeof workspace};
    CHECK(&f, f.api->plan_workspace(f.plan, &workspace, &f.error));
    workspace.memory = f.workspace;
    workspace.reserved = 1;
    refuse(&f, f.api->plan_bind_workspace(f.plan, &workspace, &f.error), "reserved", "is 1");
    const struct attn_plan_options twice =
        SIZED(attn_plan_options, .limits = CLIENT_LIMITS(1, 1, 16)->limits, .graph = 2);
    attn_plan *plan_of_two;
    refuse(&f, f.api->plan_create(f.model, 0, &twice, &plan_of_two, &f.error), "graph",
           "is 2; allowed are 0 to 1");
    const struct attn_model_options options = SIZED(attn_model_options, .reserved = 2);
    const struct attn_layer_desc *layers[] = {&f.layer};
    attn_assignment *assignment;
    attn_model *model;
    CHECK(&f, f.api->select(f.runtime, NULL, layers, 1, &assignment, &f.error));
    refuse(&f, f.api->model_create(f.runtime, assignment, &options, &model, &f.error), "reserved",
           "is 2");
    f.api->assignment_destroy(assignment);
    const struct attn_batch_context_parallel ranks = {
        .ext = {ATTN_EXT_BATCH_CONTEXT, ATTN_EXT_OPTIONAL, sizeof ranks, NULL}, .reserved = 3};
    f.batch.next = &ranks.ext;
    refuse_plan(&f, "reserved", "attn_batch_context_parallel: reserved is 3");
    f.batch.next = NULL;
    plan(&f);
    for (int32_t i = 0; i < 2; i++) {
        f.io.reserved = 1;
        refuse_run(&f, "reserved", "");
        f.io.reserved = 0;
        CHECK(&f, fixture_run(&f));
        f.io.flags = ATTN_RUN_NO_WRITE;
    }
}

/* Extensions that the layer does not read, each by its name; one marked optional is passed over. */
TEST(test_unread_extensions)
{
    const struct {
        const char *name;
        uint32_t id;
        size_t size;
    } unread[] = {
        {"attn_io_mla", ATTN_EXT_IO_MLA, sizeof(struct attn_io_mla)},
        {"attn_io_recurrent", ATTN_EXT_IO_RECURRENT, sizeof(struct attn_io_recurrent)},
        {"attn_io_output_quant", ATTN_EXT_IO_OUTPUT_QUANT, sizeof(struct attn_io_output_quant)},
        {"attn_io_rope", ATTN_EXT_IO_ROPE, sizeof(struct attn_io_rope)},
        {"attn_io_caches", ATTN_EXT_IO_CACHES, sizeof(struct attn_io_caches)}};
    OWNED(fixture_finish) struct fixture f;
    init(&f, NULL, false);
    for (size_t i = 0; i < sizeof unread / sizeof *unread; i++) {
        _Alignas(struct attn_ext) uint8_t bytes[128] = {0};
        struct attn_ext *ext = (struct attn_ext *)bytes;
        *ext = (struct attn_ext){.id = unread[i].id, .struct_size = unread[i].size};
        f.io.next = ext;
        refuse_run(&f, unread[i].name, "only a layer with");
        ext->flags = ATTN_EXT_OPTIONAL;
        assert_ok(fixture_run(&f));
    }
}

/* What is written lies in no place twice. */
CASE(test_shared_places, init(&f, NULL, true))
{
    int64_t rows_on_rows[] = {64, 32, 1}, one_row[] = {0, 32, 1}, turned[] = {1, 4},
            one_head[] = {0, 1}, endless[] = {INT64_MAX / 8, 32, 1};
    RUN_REFUSED("out", "stride 64 of dimension 0", f.tensors[3].strides = rows_on_rows);
    RUN_REFUSED("out", "stride 0 of dimension 0", f.tensors[3].strides = one_row);
    RUN_REFUSED("out", "or reach past all memory", f.tensors[3].strides = endless);
    RUN_REFUSED("lse", "stride 0 of dimension 0", f.tensors[4].strides = one_head);
    RUNS(f.tensors[4].strides = turned);
}

/* Slots: two tokens in one, wherever the slots lie, and more of them than a cache and a step can
 * have. */
CASE(test_slots, init(&f, NULL, true))
{
    PLAN_REFUSED("slot_mapping", "request 3, token 30: slot 147 is that of an earlier token, too",
                 f.slots[5] = f.slots[30]);
    WITH(f, f.slots[5] = f.slots[6] = -1, plan(&f)); /* skipped, any number of times */
    PLAN_REFUSED("slot_mapping", "2147483648 slots at", f.batch.num_slots = INT64_C(1) << 31);
}

/* Layers of one table whose caches have other numbers of blocks: the fewest count. */
TEST(test_smallest_cache)
{
    OWNED(fixture_finish) struct fixture f;
    void *caches[2], *workspace;
    attn_model *model;
    attn_plan *plan;
    init(&f, NULL, true);
    struct attn_layer_desc second = f.layer;
    second.name = "second";
    const struct attn_layer_desc *layers[] = {&f.layer, &second};
    CHECK(&f, client_model(f.api, f.runtime, CLIENT_ORDER("cpu_ref"), layers, 2, &model, &f.error));
    for (int32_t i = 0; i < 2; i++) {
        CHECK(&f, client_cache(f.api, f.api->model_layer(model, i), f.num_blocks - 3 * i, NULL,
                               &caches[i], &f.error));
    }
    CHECK(&f, client_plan(f.api, model, 0, CLIENT_LIMITS(MAX_REQS, MAX_TOKENS, MAX_BLOCKS * 16),
                          &plan, &workspace, &f.error));
    refuse(&f, f.api->plan_batch(plan, &f.batch, NULL, &f.error), "block_table",
           "block 9; the cache of layer 'second' has blocks 0 to 8");
    f.api->plan_destroy(plan);
    f.api->model_destroy(model);
    free(caches[0]);
    free(caches[1]);
    free(workspace);
}

/* The keys of a cross layer are the encoder's: no more of them than the plan has room for. */
CASE(test_encoder_lengths,
     fixture_mixed(&f, "cpu_ref", &(struct attn_layer_desc){.kind = ATTN_LAYER_CROSS}, true))
{
    PLAN_REFUSED("max_encoder_seq_len", "a request has 40 keys", f.batch.max_encoder_seq_len = 39);
    PLAN_REFUSED("seq_lens", "request 0 has 40 keys on the device",
                 (f.batch.max_encoder_seq_len = 39, f.batch.encoder_seq_lens_host = NULL));
    for (int32_t i = 0; i < 2; i++) { /* by its bound, by a length */
        f.batch.max_encoder_seq_len = i == 0 ? MAX_BLOCKS * 16 + 1 : 0;
        f.seq_lens[2] = i == 0 ? 33 : MAX_BLOCKS * 16 + 1;
        REFUSED_AS(ATTN_ERROR_LIMIT, &f.error, "max_encoder_seq_len", fixture_batch(&f));
    }
}

/* Fewer keys than queries, by blocks: no entry before a row's first is looked at. */
TEST(test_fewer_keys_than_queries)
{
    static const int32_t many[] = {1, 40}, few[] = {40, 3};
    const struct attn_layer_desc cross = {.kind = ATTN_LAYER_CROSS};
    OWNED(fixture_finish) struct fixture f;
    fixture_init(&f, "cpu_ref", &cross, many, few, 2, 0, NULL, true);
    f.block_table[MAX_BLOCKS - 1] = INT32_MIN; /* the entry before request 1's */
    memset(f.slots, 0xff, sizeof f.slots);     /* and nothing is written */
    plan(&f);
}

/* Lengths that only the device knows are held to the bounds, too. */
CASE(test_device_lengths, init(&f, NULL, true))
{
    f.batch.seq_lens_host = NULL;
    f.batch.max_seq_len = 40;
    plan(&f);
    PLAN_REFUSED("seq_lens", "request 0 has 40 keys on the device and 1 queries",
                 f.batch.max_seq_len = 39);
    PLAN_REFUSED("seq_lens", "request 3 has 19 keys on the device and 20 queries",
                 f.seq_lens[3] = 19);
}

CASE(test_odd_address, init(&f, NULL, false))
{
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    CHECK(&f,
          client_views(f.api, f.bound, (char *)f.cache + 256, f.num_blocks - 1, &k, &v, &f.error));
    k.data = (char *)k.data + 2;
    refuse(&f, client_bind(f.api, f.bound, &k, &v, &f.error), "data", "multiple of 4 bytes");
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
    const struct attn_host host =
        SIZED(attn_host, .user = &mistake, .parallel_for = wrong_parallel_for, .num_threads = 2);
    OWNED(fixture_finish) struct fixture f;
    init(&f, &host, true);
    assert_ok(fixture_run(&f));
    mistake = FOREIGN_WORKER;
    refuse_run(&f, "parallel_for", "worker 2; workers are 0 to 1");
    mistake = LEFT_OUT;
    refuse_run(&f, "parallel_for", "ran 1 items");
    mistake = RIGHT;
    assert_ok(fixture_run(&f));
}
