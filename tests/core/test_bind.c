/* SPDX-License-Identifier: Apache-2.0 */
/* core/bind: specs, groups, caches that are handed in, and moving their blocks. */
#include <attn/draft/mm_encoder.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bind/bound.h"
#include "bind_case.h"
#include "support/layer.h"
#include "util/counts.h"

#define PAGE (FAKE_BLOCK_SIZE * 2 * 2 * FAKE_HEAD_SIZE * 4) /* B Hk (D + Dv) bytes */

/* Pages of caches beyond those of the kind, rows with their scales. */
CASE(spec_of_further_caches)
{
    static const struct attn_cache_desc caches[] = {{.role = ATTN_CACHE_INDEX_K,
                                                     .kv_dtype = ATTN_KV_INT8_PER_TOKEN_HEAD,
                                                     .num_heads = 2,
                                                     .head_size = 32,
                                                     .tokens_per_row = 1},
                                                    {.role = ATTN_CACHE_INDEX_K,
                                                     .kv_dtype = ATTN_KV_NVFP4,
                                                     .num_heads = 1,
                                                     .head_size = 32,
                                                     .tokens_per_row = 4}};
    static const int64_t pages[] = {FAKE_BLOCK_SIZE * 2 * (32 + 4),
                                    FAKE_BLOCK_SIZE / 4 * (32 / 2 + 32 / 16)};
    const struct attn_layer_caches described = layer_caches(caches, 2, NULL);
    struct attn_layer_desc layers[] = {fake_layer("a"), fake_layer("b")};
    fake_init(&fixture)->cache_roles = 1u << ATTN_CACHE_INDEX_K;
    layers[0].next = layers[1].next = &described.ext;
    OWNED(model_end) attn_model *model = fake_model_of(&fixture, layers, 2);
    assert_int_equal(model_num_groups(model, ATTN_GROUP_SCHEDULE),
                     NUM_PHASES); /* both share them */
    for (int32_t i = 0; i < 2; i++) {
        struct attn_cache_spec spec = {.struct_size = sizeof spec};
        assert_ok(layer_cache_spec(model_layer(model, 0), 2 + i, &spec, &error));
        assert_int_equal(spec.page_bytes, pages[i]);
    }
}

/* The views of each layout hold every row in bytes of its own, slots or heads innermost. */
TEST(views_of_each_layout)
{
    static const struct {
        int32_t layout;
        uint64_t forms;
        bool heads_apart; /* a head's slots lie together */
    } layouts[] = {{ATTN_KV_LAYOUT_NHD, ATTN_VIEW_NHD, false},
                   {ATTN_KV_LAYOUT_HND, ATTN_VIEW_HND, true},
                   {ATTN_KV_LAYOUT_NHD_INNER, ATTN_VIEW_NHD, false},
                   {ATTN_KV_LAYOUT_HND_INNER, ATTN_VIEW_HND, true},
                   {ATTN_KV_LAYOUT_HND_ROWS, ATTN_VIEW_HND, true}};
    static _Alignas(256) uint8_t cache[3 * PAGE];
    const struct attn_layer_desc layer = fake_layer("a");
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
        struct attn_error error = ATTN_ERROR_INIT;
        OWNED(fixture_finish) struct fixture fixture;
        struct attn_backend_caps *caps = fake_init(&fixture);
        caps->layouts = 1u << layouts[i].layout;
        caps->preferred_layout = layouts[i].layout;
        caps->view_forms = layouts[i].forms | ATTN_VIEW_SEPARATE_STRIDES;
        OWNED(model_end) attn_model *model = fake_model_of(&fixture, &layer, 1);
        assert_ok(layer_kv_views(model_layer(model, 0), cache, 3, &k, &v, &error));
        assert_int_equal(k.stride_head > k.stride_slot, layouts[i].heads_apart);
        assert_int_equal(v.stride_head > v.stride_slot, layouts[i].heads_apart);
        if (bind_kv(model_layer(model, 0), &k, &v, &error) != ATTN_OK) {
            fail_msg("layout %d: %s", layouts[i].layout, error.message);
        }
    }
}

static attn_status bind_params_with(attn_layer *layer, const float *channel, const float *signs_k,
                                    const float *signs_v, struct attn_error *error)
{
    const struct attn_kv_quant_params quant =
        EXTENSION(attn_kv_quant_params, ATTN_EXT_KV_QUANT_PARAMS, NULL, .hadamard_signs_k = signs_k,
                  .hadamard_signs_v = signs_v, .v_channel_scale = channel);
    const struct attn_layer_params params = SIZED(attn_layer_params, .next = &quant.ext);
    return layer_bind_params(layer, &params, error);
}

/* Scales of the rows, rows in one piece, and what else quantized rows are read with. */
TEST(quantized_rows_need_scales)
{
    static const struct {
        int32_t kv_dtype;
        const char *field; /* errors name it if it is missing; NULL: none is needed */
        bool scales, whole;
    } rows[] = {{ATTN_KV_FP8_PER_TOKEN_HEAD, NULL, true, false},
                {ATTN_KV_INT8_K, NULL, true, false},
                {ATTN_KV_TURBOQUANT_4BIT_NC, NULL, true, true},
                {ATTN_KV_INT8_KV, "v_channel_scale", true, false},
                {ATTN_KV_INT4_PER_TOKEN_HEAD, "hadamard_signs_k", true, false},
                {ATTN_KV_FP8_E4M3, NULL, false, false}};
    static _Alignas(256) uint8_t cache[3 * FAKE_BLOCK_SIZE * 2 * 2 * (FAKE_HEAD_SIZE * 4 + 8)];
    static const float number = 1;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        OWNED(fixture_finish) struct fixture fixture;
        struct attn_error error = ATTN_ERROR_INIT;
        struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v}, bad;
        struct attn_layer_desc desc = fake_layer("layer");
        struct attn_backend_caps *caps = fake_init(&fixture);
        caps->kv_dtypes |= UINT64_C(1) << rows[i].kv_dtype;
        caps->dtypes |= UINT64_C(1) << ATTN_DTYPE_F16;
        caps->k_scale_forms = caps->v_scale_forms = 15;
        if (rows[i].whole) { /* the preferred layout cuts rows, and so another one is taken */
            caps->layouts |= 1u << ATTN_KV_LAYOUT_PACKED_K;
            caps->view_forms |= ATTN_VIEW_PACKED;
            caps->preferred_layout = ATTN_KV_LAYOUT_PACKED_K;
        }
        desc.kv_dtype = rows[i].kv_dtype;
        desc.dtype = rows[i].kv_dtype == ATTN_KV_INT8_K ? ATTN_DTYPE_F16 : desc.dtype;
        desc.v_scale_form =
            rows[i].kv_dtype == ATTN_KV_INT8_KV ? ATTN_SCALE_PER_HEAD_CHANNEL : desc.v_scale_form;
        OWNED(model_end) attn_model *model = fake_model_of(&fixture, &desc, 1);
        attn_layer *layer = model_layer(model, 0);
        assert_ok(layer_kv_views(layer, cache, 3, &k, &v, &error));
        bad = k;
        bad.scale = NULL;
        attn_status status = bind_kv(layer, &bad, &v, &error);
        assert_int_equal(status, rows[i].scales ? ATTN_ERROR_INVALID_ARGUMENT : ATTN_OK);
        assert_string_equal(error.field, rows[i].scales ? "scale" : "");
        bad = k;
        bad.pack = k.head_size / 2;
        bad.stride_pack = 16; /* half of the codes */
        if (rows[i].whole) {
            INVALID(&error, "pack", bind_kv(layer, &bad, &v, &error));
        }
        assert_ok(bind_kv(layer, &k, &v, &error));
        if (rows[i].field != NULL) {
            INVALID(&error, rows[i].field, bind_params_with(layer, NULL, NULL, NULL, &error));
        }
        if (rows[i].kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD) {
            INVALID(&error, "hadamard_signs_v",
                    bind_params_with(layer, NULL, &number, NULL, &error));
        }
        const bool int4 = rows[i].kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD;
        const bool int8 = rows[i].kv_dtype == ATTN_KV_INT8_KV;
        const float *signs = int4 ? &number : NULL, *channel = int8 ? &number : NULL;
        assert_ok(bind_params_with(layer, channel, signs, signs, &error));
        if (!int8) {
            INVALID(&error, "v_channel_scale",
                    bind_params_with(layer, &number, signs, signs, &error));
        }
        if (!int4) {
            INVALID(&error, "hadamard_signs_k",
                    bind_params_with(layer, channel, &number, NULL, &error));
            INVALID(&error, "hadamard_signs_v",
                    bind_params_with(layer, channel, NULL, &number, &error));
        }
    }
}

/* Parameters that no term of the layer reads; each is taken by a layer that has the term. */
CASE(unread_parameters)
{
    static const float number = 0.5f;
    int64_t shape[] = {4, 2, FAKE_HEAD_SIZE};
    const struct attn_tensor sink = {.data = (void *)(uintptr_t)&number,
                                     .device = {ATTN_DEVICE_CPU, 0},
                                     .ndim = 3,
                                     .dtype = {ATTN_CODE_BFLOAT, 16, 1},
                                     .shape = shape};
    struct attn_mla_weights mla = EXTENSION(attn_mla_weights, ATTN_EXT_MLA_WEIGHTS, NULL, );
    struct attn_recurrent_weights gdn =
        EXTENSION(attn_recurrent_weights, ATTN_EXT_RECURRENT_WEIGHTS, NULL, );
    struct attn_mm_encoder_state encoder =
        EXTENSION(attn_mm_encoder_state, ATTN_EXT_DRAFT_MM_ENCODER_STATE, NULL, );
#define PARAMS(...)                                                                                \
    {                                                                                              \
        .struct_size = sizeof(struct attn_layer_params), __VA_ARGS__                               \
    }
    const struct {
        const char *field;
        struct attn_layer_params params;
    } unread[] = {{"sinks", PARAMS(.sinks = &number)},
                  {"alibi_slopes", PARAMS(.alibi_slopes = &number)},
                  {"sink_k", PARAMS(.sink_k = &sink)},
                  {"sink_v", PARAMS(.sink_v = &sink)},
                  {"q_scale", PARAMS(.q_scale = &number)},
                  {"k_scale", PARAMS(.k_scale = &number)},
                  {"v_scale", PARAMS(.v_scale = &number)},
                  {"p_scale", PARAMS(.p_scale = &number)},
                  {"q_scale_host", PARAMS(.q_scale_host = 0.5f)},
                  {"k_scale_host", PARAMS(.k_scale_host = 0.5f)},
                  {"v_scale_host", PARAMS(.v_scale_host = NAN)},
                  {"p_scale_host", PARAMS(.p_scale_host = 2)}};
    struct attn_ext *const extensions[] = {&mla.ext, &gdn.ext, &encoder.ext};
    static const char *const names[] = {"attn_mla_weights", "attn_recurrent_weights",
                                        "attn_mm_encoder_state"};
    struct attn_layer_desc desc = fake_layer("layer");
    fake_init(&fixture)->terms |= ATTN_TERM_SINKS;
    attn_model *model = fake_model(&fixture, &desc, 1, &error);
    attn_layer *layer = model_layer(model, 0);
    for (size_t i = 0; i < sizeof unread / sizeof *unread; i++) {
        INVALID(&error, unread[i].field, layer_bind_params(layer, &unread[i].params, &error));
    }
    for (size_t i = 0; i < 3; i++) {
        const struct attn_layer_params params = PARAMS(.next = extensions[i]);
        INVALID(&error, names[i], layer_bind_params(layer, &params, &error));
        extensions[i]->flags = ATTN_EXT_OPTIONAL;
        assert_ok(layer_bind_params(layer, &params, &error));
    }
    const struct attn_layer_params ones =
        PARAMS(.q_scale_host = 1, .k_scale_host = 1, .v_scale_host = 1, .p_scale_host = 1);
    assert_ok(layer_bind_params(layer, &ones, &error));
    model_destroy(model);
    desc.has_sinks = 1;
    model = fake_model(&fixture, &desc, 1, &error);
    INVALID(&error, "sinks", layer_bind_params(model_layer(model, 0), &ones, &error));
    model_destroy(model);
}

CASE(groups_by_spec_and_by_schedule)
{
    struct attn_layer_desc layers[] = {fake_layer("a"), fake_layer("b"), fake_layer("c"),
                                       fake_layer("d")};
    int32_t members[4], count;
    fake_init(&fixture)->features |= ATTN_FEATURE_FAST_PREFILL;
    layers[1].scale = 0.25f; /* same cache, another schedule */
    layers[2].kv_sharing_target = "a";
    layers[3].fast_prefill = 1; /* a plan may leave rows out */
    OWNED(model_end) attn_model *model = fake_model_of(&fixture, layers, 4);
    assert_int_equal(model_num_groups(model, ATTN_GROUP_BLOCK_TABLE), 1);
    assert_ok(model_group(model, ATTN_GROUP_BLOCK_TABLE, 0, members, 2, &count));
    assert_int_equal(count, 4);
    assert_int_equal(members[1], 1);
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        int32_t a = layer_group(model_layer(model, 0), ATTN_GROUP_SCHEDULE, phase);
        assert_int_not_equal(a, layer_group(model_layer(model, 1), ATTN_GROUP_SCHEDULE, phase));
        assert_int_equal(a, layer_group(model_layer(model, 2), ATTN_GROUP_SCHEDULE, phase));
        assert_int_not_equal(a, layer_group(model_layer(model, 3), ATTN_GROUP_SCHEDULE, phase));
    }
}

/* Layers that differ in one thing: with block tables of their own, or schedules, or both. */
TEST(groups_by_each_difference)
{
    static const struct attn_ext vendor = {ATTN_EXT_VENDOR, ATTN_EXT_OPTIONAL, sizeof vendor, NULL};
    static const struct {
        size_t offset;
        int32_t value;
        bool table, schedule; /* whether it has its own */
        int32_t of_first;     /* the value of the first layer, if it is set there, too */
    } differences[] = {
        {offsetof(struct attn_layer_desc, window_left), 7, true, true},
        {offsetof(struct attn_layer_desc, window_right), 0, false, true},
        {offsetof(struct attn_layer_desc, num_kv_heads), 4, true, true},
        {offsetof(struct attn_layer_desc, num_q_heads), 8, false, true},
        {offsetof(struct attn_layer_desc, head_size_v), 128, true, true},
        {offsetof(struct attn_layer_desc, block_size), 2 * FAKE_BLOCK_SIZE, true, true},
        {offsetof(struct attn_layer_desc, chunk_size), 32, true, true, 64},
        {offsetof(struct attn_layer_desc, has_sinks), 1, false, true},
        {offsetof(struct attn_layer_desc, sink_len), 4, true, true, 8},
        {offsetof(struct attn_layer_desc, prefix_lm), 1, false, true},
        {offsetof(struct attn_layer_desc, alibi), ATTN_ALIBI_LINEAR, false, true},
        {offsetof(struct attn_layer_desc, tree_mask), ATTN_TREE_BITS, false, true},
        {offsetof(struct attn_layer_desc, causal_per_request), 1, false, true},
        {offsetof(struct attn_layer_desc, num_speculative_tokens), 2, false, true},
        {offsetof(struct attn_layer_desc, batch_invariant), 1, false, true},
        {offsetof(struct attn_layer_desc, needs_lse), 1, false, false}};
    const size_t count = sizeof differences / sizeof *differences;
    for (size_t i = 0; i < count + 2; i++) {
        OWNED(fixture_finish) struct fixture fixture;
        struct attn_error error = ATTN_ERROR_INIT;
        struct attn_layer_desc layers[] = {fake_layer("a"), fake_layer("b")};
        struct attn_backend_caps *caps = fake_init(&fixture);
        static const struct attn_head_size_range sizes[] = {{{64, 64, 1}, {64, 128, 64}, 0}};
        caps->terms = (UINT64_C(1) << NUM_TERMS) - 1;
        caps->features |= ATTN_FEATURE_BATCH_INVARIANT;
        caps->head_sizes = sizes;
        caps->num_head_sizes = 1;
        for (int32_t l = 0; l < 2; l++) {
            const bool windows = i < 2;
            layers[l].has_window = windows;
            layers[l].causal =
                i != 1 ? ATTN_CAUSAL_YES : ATTN_CAUSAL_NO; /* or a window has no right side */
            layers[l].window_left = layers[l].window_right = windows ? 5 : 0;
        }
        if (i < count && differences[i].of_first > 0) {
            memcpy((char *)&layers[0] + differences[i].offset, &differences[i].of_first,
                   sizeof differences[i].of_first);
        }
        if (i < count) {
            memcpy((char *)&layers[1] + differences[i].offset, &differences[i].value,
                   sizeof differences[i].value);
        } else if (i == count) {
            layers[1].padded_page_bytes = 2 * PAGE;
        } else {
            layers[1].next = &vendor;
            caps->extensions = &vendor.id;
            caps->num_extensions = 1;
        }
        OWNED(model_end) attn_model *model = fake_model(&fixture, layers, 2, &error);
        if (model == NULL) {
            fail_msg("%zu: %s", i, error.message);
        }
        const bool table = i < count ? differences[i].table : i == count;
        const bool schedule = i < count ? differences[i].schedule : true;
        const int32_t schedules = model_num_groups(model, ATTN_GROUP_SCHEDULE);
        if (model_num_groups(model, ATTN_GROUP_BLOCK_TABLE) != 1 + table ||
            (schedules > NUM_PHASES) != schedule) {
            fail_msg("difference %zu: %d tables, %d schedules", i,
                     model_num_groups(model, ATTN_GROUP_BLOCK_TABLE), schedules);
        }
    }
}

/* A layer that reads another's cache goes with that one's table, and by its own window with a
 * schedule of its own. */
CASE(groups_of_readers)
{
    struct attn_layer_desc layers[] = {fake_layer("a"), fake_layer("b"), fake_layer("c")};
    fake_init(&fixture);
    for (int32_t i = 1; i < 3; i++) {
        layers[i].kv_sharing_target = "a";
        layers[i].has_window = 1;
        layers[i].window_left = 3 + i;
    }
    OWNED(model_end) attn_model *model = fake_model_of(&fixture, layers, 3);
    assert_int_equal(model_num_groups(model, ATTN_GROUP_BLOCK_TABLE), 1);
    assert_int_equal(model_num_groups(model, ATTN_GROUP_SCHEDULE), 3 * NUM_PHASES);
}

/* Nor does the reader of a cache that ranks share go with the tables of one that they do not. */
CASE(groups_of_a_shared_caches_reader)
{
    const struct attn_context_parallel cp =
        EXTENSION(attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL, NULL, .decode = &fixture_ranks);
    struct attn_layer_desc layers[] = {fake_layer("spread"), fake_layer("whole"),
                                       fake_layer("reader")};
    fake_init(&fixture)->kernels |= ATTN_KERNEL_MERGE_STATES;
    layers[0].next = &cp.ext;
    layers[2].kv_sharing_target = "spread";
    OWNED(model_end) attn_model *model = fake_model_of(&fixture, layers, 3);
    assert_int_equal(model_num_groups(model, ATTN_GROUP_BLOCK_TABLE), 3);
}

/* Two backends that lay their blocks out in two ways. */
CASE(groups_by_layout)
{
    struct attn_layer_desc layers[] = {fake_layer("a"), fake_layer("b")};
    attn_assignment *assignment;
    attn_model *model;
    struct attn_backend_caps *caps = fake_init(&fixture);
    struct attn_backend_caps *other = fixture_add(&fixture, "other", "", 5);
    const char *name = other->name;
    *other = *caps;
    other->name = name;
    other->layouts = 1u << ATTN_KV_LAYOUT_HND;
    other->preferred_layout = ATTN_KV_LAYOUT_HND;
    other->view_forms = ATTN_VIEW_HND;
    if (fixture_select(&fixture, "layers.0=fake;layers.1=other", layers, 2, &assignment, &error) !=
        ATTN_OK) {
        fail_msg("%s", error.message);
    }
    assert_ok(model_create(&fixture.runtime, assignment, NULL, &model, &error));
    assert_int_equal(model_num_groups(model, ATTN_GROUP_BLOCK_TABLE), 2);
    model_destroy(model);
    assignment_destroy(assignment);
}

/* V over K: at its first row, at another one, and half a row after one. */
static void views_share_no_bytes(attn_layer *layer, const struct attn_kv_view *k,
                                 const struct attn_kv_view *v)
{
    const int64_t at[] = {0, k->stride_slot, k->stride_block + k->stride_slot, k->stride_head / 2,
                          (uint8_t *)v->data - (uint8_t *)k->data - 8};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        struct attn_error error = ATTN_ERROR_INIT;
        struct attn_kv_view low = *v, high = *k;
        low.data = (uint8_t *)k->data + at[i];
        INVALID(&error, "data", bind_kv(layer, k, &low, &error));
        low.data = v->data;
        high.data = (uint8_t *)v->data + at[i];
        assert_int_equal(bind_kv(layer, &high, &low, &error), ATTN_ERROR_INVALID_ARGUMENT);
    }
    /* One pool of pages, seen twice a page apart: the table says which are K's. */
    struct attn_kv_view shifted = *k;
    shifted.data = (uint8_t *)k->data + k->stride_block;
    assert_ok(bind_kv(layer, k, &shifted, NULL));
    assert_ok(bind_kv(layer, k, v, NULL));
}

/* Strides and counts whose products leave 64 bits, or any machine's memory. */
static void views_end_in_memory(attn_layer *layer, const struct attn_kv_view *k,
                                const struct attn_kv_view *v)
{
    static const int64_t blocks[] = {INT64_MAX, (int64_t)1 << 62, (int64_t)1 << 50, 3};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) {
        struct attn_error error = ATTN_ERROR_INIT;
        struct attn_kv_view views[2] = {*k, *v};
        for (int32_t j = 0; j < 2; j++) {
            views[j].num_blocks = blocks[i];
            views[j].stride_block = blocks[i] > 3 ? views[j].stride_block : INT64_MAX;
        }
        REFUSED_AS(ATTN_ERROR_LIMIT, &error, "num_blocks",
                   bind_kv(layer, &views[0], &views[1], &error));
        if (blocks[i] > 3) {
            assert_int_equal(
                layer_kv_views(layer, k->data, blocks[i], &views[0], &views[1], &error),
                ATTN_ERROR_LIMIT);
        }
    }
}

CASE(wrong_views_are_refused)
{
    struct attn_layer_desc layers[] = {fake_layer("a"), fake_layer("b")};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v}, bad;
    fake_init(&fixture);
    layers[1].kv_sharing_target = "a";
    OWNED(model_end) attn_model *model = fake_model_of(&fixture, layers, 2);
    attn_layer *layer = model_layer(model, 0);
    OWNED(memory_end) void *base = aligned_alloc(256, 4 * PAGE);
    assert_ok(layer_kv_views(layer, base, 4, &k, &v, &error));
    assert_int_equal((uint8_t *)v.data - (uint8_t *)k.data, 2 * PAGE);
    INVALID(&error, "base", layer_kv_views(layer, (uint8_t *)base + 64, 1, &k, &v, &error));

    WITH(k, k.stride_slot /= 2, INVALID(&error, "stride_slot", bind_kv(layer, &k, &v, &error)));
    WITH(k, k.head_size = 32, INVALID(&error, "num_heads", bind_kv(layer, &k, &v, &error)));
    WITH(k, k.num_heads = 1, INVALID(&error, "num_heads", bind_kv(layer, &k, &v, &error)));
    WITH(k, k.pack = k.head_size - 1, INVALID(&error, "pack", bind_kv(layer, &k, &v, &error)));
    struct attn_kv_view odd[] = {k, v}; /* one block each: a stride that no block needs */
    odd[0].num_blocks = odd[1].num_blocks = 1;
    odd[0].stride_block += 2;
    INVALID(&error, "data", bind_kv(layer, &odd[0], &odd[1], &error));
    bad = k; /* hnd, which the fake does not declare */
    bad.stride_slot = k.stride_head;
    bad.stride_head = k.stride_head * FAKE_BLOCK_SIZE;
    REFUSED_AS(ATTN_ERROR_UNSUPPORTED, &error, "view_forms", bind_kv(layer, &bad, &v, &error));
    WITH(v, v.num_blocks = 3,
         assert_int_equal(bind_kv(layer, &k, &v, &error), ATTN_ERROR_INVALID_ARGUMENT));
    assert_int_equal(bind_kv(layer, &k, NULL, &error), ATTN_ERROR_INVALID_ARGUMENT);
    views_share_no_bytes(layer, &k, &v);
    views_end_in_memory(layer, &k, &v);
    assert_int_equal(bind_kv(model_layer(model, 1), &k, &v, &error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_ok(bind_kv(layer, &k, &v, &error));
}

/* K, V and scales that lie apart, their blocks further apart than they fill: into the host's memory
 * one after the other, and back into another block. */
CASE(moves_every_plane_of_a_block)
{
    enum { ROWS = FAKE_BLOCK_SIZE * 2 * FAKE_HEAD_SIZE, SCALES = FAKE_BLOCK_SIZE * 2, BLOCKS = 3 };
    enum { BYTES = 2 * ROWS + 2 * SCALES * 4, STRIDE = BYTES + 32, APART = ROWS + 512 };
    static _Alignas(256) uint8_t rows[2][BLOCKS * APART], before[ROWS];
    static float scales[2][BLOCKS * SCALES];
    static uint8_t swap[2 * STRIDE];
    const int64_t out[] = {0, 1}, in[] = {1, 2};
    struct attn_layer_desc desc = fake_layer("a");
    fake_init(&fixture)->kv_dtypes |= UINT64_C(1) << ATTN_KV_INT8_PER_TOKEN_HEAD;
    desc.kv_dtype = ATTN_KV_INT8_PER_TOKEN_HEAD;
    OWNED(model_end) attn_model *model = fake_model_of(&fixture, &desc, 1);
    struct attn_kv_view views[2];
    for (int32_t i = 0; i < 2; i++) {
        memset(rows[i], 40 * (i + 1), sizeof rows[i]);
        memset(rows[i], 40 * (i + 1) + 7, ROWS); /* block 0 */
        for (int32_t j = 0; j < SCALES; j++) {
            scales[i][j] = (float)(i * SCALES + j);
        }
        views[i] = SIZED(
            attn_kv_view, .data = rows[i], .num_blocks = BLOCKS, .block_size = FAKE_BLOCK_SIZE,
            .num_heads = 2, .head_size = FAKE_HEAD_SIZE, .stride_block = APART,
            .stride_slot = 2 * FAKE_HEAD_SIZE, .stride_head = FAKE_HEAD_SIZE, .scale = scales[i],
            .scale_stride_block = 4 * SCALES, .scale_stride_slot = 8, .scale_stride_head = 4);
    }
    assert_ok(bind_kv(model_layer(model, 0), &views[0], &views[1], &error));
    struct attn_block_memory other = {swap, BYTES - 1};
    struct attn_block_transfer move =
        SIZED(attn_block_transfer, .kind = ATTN_COPY_DEVICE_TO_HOST, .other = &other,
              .other_stride = sizeof other, .pairs = out, .num_pairs = 1);
    INVALID(&error, "other", copy_blocks(model, &move, &error));
    other.stride = -STRIDE;
    INVALID(&error, "other", copy_blocks(model, &move, &error));
    other.stride = STRIDE;
    other.base = NULL;
    INVALID(&error, "other", copy_blocks(model, &move, &error));
    other.base = swap;
    assert_ok(copy_blocks(model, &move, &error));
    move.kind = ATTN_COPY_HOST_TO_DEVICE;
    move.pairs = in;
    assert_ok(copy_blocks(model, &move, &error));
    for (int32_t i = 0; i < 2; i++) {
        memset(before, 40 * (i + 1), sizeof before);
        assert_memory_equal(rows[i] + 2 * APART, rows[i], ROWS);
        assert_memory_equal(rows[i] + APART, before, ROWS);
        assert_int_equal(rows[i][2 * APART + ROWS], before[0]); /* between two blocks */
        assert_memory_equal(scales[i] + 2 * SCALES, scales[i], SCALES * sizeof(float));
    }
}

CASE(declared_kernel_must_be_there)
{
    struct attn_layer_desc desc = fake_layer("a");
    fake_init(&fixture)->kernels |= ATTN_KERNEL_GATHER_KV;
    assert_null(fake_model(&fixture, &desc, 1, &error));
    assert_int_equal(error.status, ATTN_ERROR_PLUGIN);
    assert_string_equal(error.field, "gather_kv");
}
