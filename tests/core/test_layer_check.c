/* SPDX-License-Identifier: Apache-2.0 */
/* From a caller's description to a complete one: what is refused, by field, and what is filled in.
 */
#include <attn/draft/index_lists.h>
#include <attn/draft/mm_encoder.h>

#include <math.h>
#include <string.h>

#include "select/layer.h"
#include "util/structs.h"
#include "select/names.h"
#include "select_fixture.h"

typedef void change(struct attn_layer_desc *layer);

static const struct attn_ext unknown_ext = {0x1345, 0, sizeof(struct attn_ext), NULL};
/* The core's own to read, and not a draft of kernels. */
static const struct attn_ext core_ext = {ATTN_EXT_DRAFT_KERNELS - 1, 0, sizeof core_ext, NULL};
#define MLA(name, listed, ...)                                                                     \
    static const struct attn_mla_desc name = {.ext = {ATTN_EXT_MLA_DESC, 0, sizeof name, NULL},    \
                                              .kv_lora_rank = 512,                                 \
                                              .qk_nope_head_dim = 128,                             \
                                              .qk_rope_head_dim = 64,                              \
                                              .v_head_dim = 128,                                   \
                                              .topk = listed,                                      \
                                              __VA_ARGS__}
MLA(mla_ext, 0, .absorb_in_core = 0);
MLA(mla_topk, 8, .absorb_in_core = 0);
MLA(mla_two_ext, 0, .absorb_in_core = 2);
MLA(mla_rows_ext, 0, .context_workspace_tokens = -1);
#define RECURRENT(name, values, silu, state)                                                       \
    static const struct attn_recurrent_desc name = {                                               \
        .ext = {ATTN_EXT_RECURRENT_DESC, 0, sizeof name, NULL},                                    \
        .num_k_heads = 4,                                                                          \
        .num_v_heads = values,                                                                     \
        .head_size_k = 64,                                                                         \
        .head_size_v = 64,                                                                         \
        .conv_silu = silu,                                                                         \
        .state_dtype = state}
RECURRENT(gdn_ext, 6, 0, 0);
RECURRENT(gdn_fp8, 8, 0, ATTN_DTYPE_FP8_E4M3);
RECURRENT(gdn_whole, 8, 0, 0);
RECURRENT(gdn_silu_alone, 8, 1, 0);
static const struct attn_mm_encoder_quant history_alone = {
    .ext = {ATTN_EXT_DRAFT_MM_ENCODER, 0, sizeof history_alone, NULL}, .amax_history_len = 16};
static const struct attn_context_parallel cp_ext = {
    .ext = {ATTN_EXT_CONTEXT_PARALLEL, 0, sizeof cp_ext, NULL}, .interleave = 3};
static const struct attn_context_parallel cp_reserved = {
    .ext = {ATTN_EXT_CONTEXT_PARALLEL, 0, sizeof cp_ext, NULL}, .reserved = 1};

static void set_recurrent(struct attn_layer_desc *l, const struct attn_recurrent_desc *gdn)
{
    l->kind = ATTN_LAYER_RECURRENT;
    l->next = &gdn->ext;
    l->num_q_heads = l->num_kv_heads = gdn->num_k_heads;
    l->head_size = gdn->head_size_k;
    l->block_size = 0;
}

/* A recurrent layer under the rule that the fields say. */
#define SET_RULE(...)                                                                              \
    static struct attn_recurrent_desc gdn;                                                         \
    static struct attn_recurrent_rule rule;                                                        \
    gdn = gdn_whole;                                                                               \
    rule = (struct attn_recurrent_rule){                                                           \
        .ext = {ATTN_EXT_DRAFT_RECURRENT_RULE, 0, sizeof rule, NULL}, __VA_ARGS__};                \
    gdn.ext.next = &rule.ext;                                                                      \
    set_recurrent(l, &gdn)

/* A recurrent layer with the norm that the fields say. */
#define SET_NORM(...)                                                                              \
    static struct attn_recurrent_desc gdn;                                                         \
    static struct attn_recurrent_norm norm;                                                        \
    gdn = gdn_whole;                                                                               \
    norm = (struct attn_recurrent_norm){                                                           \
        .ext = {ATTN_EXT_DRAFT_RECURRENT_NORM, 0, sizeof norm, NULL}, __VA_ARGS__};                \
    gdn.ext.next = &norm.ext;                                                                      \
    set_recurrent(l, &gdn)

/* A recurrent layer whose states are rounded as the fields say. */
#define SET_ROUNDING(...)                                                                          \
    static struct attn_recurrent_desc gdn;                                                         \
    static struct attn_recurrent_rounding rounding;                                                \
    gdn = gdn_whole;                                                                               \
    rounding = (struct attn_recurrent_rounding){                                                   \
        .ext = {ATTN_EXT_DRAFT_RECURRENT_ROUNDING, 0, sizeof rounding, NULL}, __VA_ARGS__};        \
    gdn.ext.next = &rounding.ext;                                                                  \
    set_recurrent(l, &gdn)

/* A recurrent layer with a ring, of which a field is set. */
#define SET_RING(...)                                                                              \
    static struct attn_recurrent_desc gdn;                                                         \
    static struct attn_cache_desc ring;                                                            \
    static struct attn_layer_caches caches = {                                                     \
        .ext = {ATTN_EXT_LAYER_CACHES, 0, sizeof caches, NULL},                                    \
        .caches = &ring,                                                                           \
        .num_caches = 1,                                                                           \
        .cache_stride = sizeof ring};                                                              \
    gdn = gdn_whole;                                                                               \
    ring = (struct attn_cache_desc){.role = ATTN_CACHE_REPLAY,                                     \
                                    .kv_dtype = ATTN_KV_BF16,                                      \
                                    .num_heads = 4,                                                \
                                    .head_size = 200,                                              \
                                    .block_size = 16};                                             \
    __VA_ARGS__;                                                                                   \
    gdn.ext.next = &caches.ext;                                                                    \
    set_recurrent(l, &gdn)

/* A layer with lists, and more of what they say. */
#define SET_LISTS(...)                                                                             \
    static struct attn_index_lists lists;                                                          \
    lists = (struct attn_index_lists){.ext = {ATTN_EXT_DRAFT_INDEX_LISTS, 0, sizeof lists, NULL},  \
                                      __VA_ARGS__};                                                \
    l->next = &lists.ext

#define REFUSAL(name, field, says, ...)                                                            \
    static void name(struct attn_layer_desc *l)                                                    \
    {                                                                                              \
        __VA_ARGS__;                                                                               \
    }
#include "layer_refusals.h"

#define REFUSAL(name, field, says, ...) {name, field, says},
static const struct {
    change *change;
    const char *field, *says;
} refusals[] = {
#include "layer_refusals.h"
#include "util/counts.h"
};

TEST(test_each_refusal)
{
    OWNED(fixture_finish) struct fixture f;
    fixture_init(&f);
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct attn_layer_desc desc = fixture_layer("l");
        struct layer layer = {0};
        struct attn_error error = ATTN_ERROR_INIT;
        struct arena arena;
        arena_init(&arena, &f.runtime.host);
        refusals[i].change(&desc);
        attn_status status = layer_resolve(&arena, &desc, 0, NULL, &layer, &error);
        if (status == ATTN_OK || strstr(error.message, refusals[i].says) == NULL ||
            (strcmp(refusals[i].field, "struct_size") != 0 &&
             strcmp(error.field, refusals[i].field) != 0)) {
            fail_msg("%d: %s, '%s' expected; got %d, %s, '%s'", (int)i, refusals[i].field,
                     refusals[i].says, status, error.field, error.message);
        }
        arena_finish(&arena);
    }
}

/* No field is missing from the table: what lies between two is alignment. */
TEST(test_every_field_is_listed)
{
    static const size_t sizes[] = {
        [FIELD_INT] = 4,  [FIELD_CODE] = 4, [FIELD_FLOAT] = 4,
        [FIELD_LONG] = 8, [FIELD_MASK] = 8, [FIELD_TEXT] = sizeof(char *)};
    size_t end = offsetof(struct attn_layer_desc, name);
    for (const struct abi_field *f = abi_structs[ABI_LAYER_DESC].fields; f->name != NULL; f++) {
        size_t size = sizes[f->kind];
        assert_int_equal(f->at, (end + size - 1) / size * size);
        end = f->at + size;
    }
    assert_int_equal(end, sizeof(struct attn_layer_desc));
}

/* A kind that does not read a field refuses it by name. */
TEST(test_fields_of_other_kinds)
{
    static const uint32_t all = (1u << NUM_LAYER_KINDS) - 1;
    int32_t refused[NUM_LAYER_KINDS] = {0};
    for (const struct abi_field *f = abi_structs[ABI_LAYER_DESC].fields; f->name != NULL; f++) {
        for (int32_t kind = 0; kind < NUM_LAYER_KINDS && f->layer_kinds != all; kind++) {
            struct attn_layer_desc desc = fixture_layer("l");
            struct attn_error error = ATTN_ERROR_INIT;
            static const char *const target = "other";
            const int64_t one = 1;
            if (f->layer_kinds >> kind & 1) {
                continue;
            }
            desc.kind = kind;
            desc.block_size = desc.causal = 0;
            memcpy((char *)&desc + f->at, f->kind == FIELD_TEXT ? (const void *)&target : &one,
                   f->kind == FIELD_INT || f->kind == FIELD_CODE || f->kind == FIELD_FLOAT ? 4 : 8);
            if (f->kind == FIELD_FLOAT) {
                memcpy((char *)&desc + f->at, &(const float){0.5f}, sizeof(float));
            }
            assert_int_equal(layer_check_fields(&desc, &error), ATTN_ERROR_INVALID_ARGUMENT);
            assert_string_equal(error.field, f->name);
            assert_non_null(strstr(error.message, name_of(ATTN_NAMES_LAYER_KIND, kind)));
            refused[kind]++;
        }
    }
    assert_true(refused[ATTN_LAYER_RECURRENT] >= 25 && refused[ATTN_LAYER_ENCODER] >= 15);
}

/* What kernels get where an engine says nothing, or says what the kind is anyway. */
TEST(test_causal_of_kinds)
{
    static const int32_t is[] = {ATTN_CAUSAL_YES, ATTN_CAUSAL_NO, ATTN_CAUSAL_NO};
    for (int32_t i = 0; i < 6; i++) {
        struct attn_layer_desc desc = fixture_layer("l");
        struct attn_error error = ATTN_ERROR_INIT;
        struct layer layer = {0};
        OWNED(fixture_finish) struct fixture f;
        struct arena arena;
        fixture_init(&f);
        arena_init(&arena, &f.runtime.host);
        desc.kind = i % 3;
        desc.block_size = desc.kind == ATTN_LAYER_ENCODER ? 0 : 16;
        desc.causal = i < 3 ? ATTN_CAUSAL_DEFAULT : is[i % 3];
        assert_ok(layer_resolve(&arena, &desc, 0, NULL, &layer, &error));
        assert_int_equal(layer.desc.causal, is[i % 3]);
        arena_finish(&arena);
    }
}

TEST(test_completion)
{
    struct attn_layer_desc desc = fixture_layer("l");
    struct attn_error error = ATTN_ERROR_INIT;
    struct layer layer = {0};
    struct attn_ext optional = {0x2000, ATTN_EXT_OPTIONAL, sizeof optional, NULL};
    OWNED(fixture_finish) struct fixture f;
    struct arena arena;
    fixture_init(&f);
    arena_init(&arena, &f.runtime.host);
    desc.next = &optional;
    assert_ok(layer_resolve(&arena, &desc, 0, NULL, &layer, &error));
    assert_int_equal(layer.desc.head_size_v, 128);
    assert_int_equal(layer.desc.kv_dtype, ATTN_KV_BF16);
    assert_int_equal(layer.desc.window_left, -1);
    assert_int_equal(layer.sharing_target, -1);
    assert_null(layer.desc.next); /* an unknown optional extension is left out */
    desc.next = NULL;
    desc.kv_dtype = ATTN_KV_FP8_E4M3;
    assert_ok(layer_resolve(&arena, &desc, 0, NULL, &layer, &error));
    assert_int_equal(layer.desc.kv_dtype, ATTN_KV_FP8_E4M3);
    assert_int_equal(layer.desc.k_scale_form, ATTN_SCALE_PER_TENSOR);
    assert_int_equal(layer.desc.v_scale_form, ATTN_SCALE_PER_TENSOR);
    desc.skip_kv_quantization = 1;
    assert_ok(layer_resolve(&arena, &desc, 0, NULL, &layer, &error));
    assert_int_equal(layer.desc.kv_dtype, ATTN_KV_BF16);
    desc = fixture_layer("mla");
    desc.kind = ATTN_LAYER_MLA;
    desc.num_kv_heads = 1;
    desc.head_size = 576;
    desc.next = &mla_ext.ext;
    assert_ok(layer_resolve(&arena, &desc, 0, NULL, &layer, &error));
    assert_int_equal(layer.desc.head_size_v, 128);
    assert_non_null(layer.mla);
    assert_ptr_not_equal(layer.mla, &mla_ext);
    assert_ptr_not_equal(layer.desc.name, desc.name);
    assert_int_equal(layer.mla->kv_lora_rank, 512);
    assert_int_equal(layer.desc.kind, ATTN_LAYER_MLA);
    desc.next = &mla_topk.ext; /* names that follow from a parameter */
    assert_ok(layer_resolve(&arena, &desc, 0, NULL, &layer, &error));
    assert_string_equal(name_of_layer(&layer.desc), "mla_sparse");
    desc = fixture_layer("sink");
    desc.sink_len = 4;
    assert_ok(layer_resolve(&arena, &desc, 0, NULL, &layer, &error));
    assert_string_equal(name_of_layer(&layer.desc), "static_sink");
    arena_finish(&arena);
}

TEST(test_struct_sizes)
{
    struct {
        struct attn_layer_desc desc;
        int64_t tail[2];
    } newer = {.desc = fixture_layer("l")};
    struct attn_error error = ATTN_ERROR_INIT;
    struct layer layer = {0};
    OWNED(fixture_finish) struct fixture f;
    struct arena arena;
    newer.desc.struct_size = sizeof newer;
    fixture_init(&f);
    arena_init(&arena, &f.runtime.host);
    assert_ok(layer_resolve(&arena, &newer.desc, 0, NULL, &layer, &error));
    newer.tail[1] = 1;
    assert_int_equal(layer_resolve(&arena, &newer.desc, 0, NULL, &layer, &error),
                     ATTN_ERROR_STRUCT_SIZE);
    arena_finish(&arena);
}

TEST(test_names_and_sharing)
{
    struct attn_layer_desc layers[3] = {fixture_layer("0"), fixture_layer("1"), fixture_layer("2")};
    struct attn_error error;
    OWNED(fixture_finish) struct fixture f;
    OWNED(assignment_end) attn_assignment *a = NULL;
    fixture_init(&f);
    fixture_add(&f, "alpha", "", 1);
    layers[2].name = "0";
    INVALID(&error, "name", fixture_select(&f, "", layers, 3, &a, &error));
    assert_non_null(strstr(error.message, "layers 0 and 2"));
    layers[2].name = "2";
    layers[0].kv_sharing_target = "1"; /* later */
    INVALID(&error, "kv_sharing_target", fixture_select(&f, "", layers, 3, &a, &error));
    layers[0].kv_sharing_target = NULL;
    layers[2].kv_sharing_target = "1";
    layers[2].num_kv_heads = 4; /* another specification */
    INVALID(&error, "kv_sharing_target", fixture_select(&f, "", layers, 3, &a, &error));
    layers[2].num_kv_heads = 8;
    layers[2].kv_dtype = ATTN_KV_F16;
    INVALID(&error, "kv_sharing_target", fixture_select(&f, "", layers, 3, &a, &error));
    layers[2].kv_dtype = ATTN_KV_AUTO;
    layers[1].kv_sharing_target = "0"; /* a chain */
    assert_int_equal(fixture_select(&f, "", layers, 3, &a, &error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(error.message, "which itself reads"));
    layers[2].kv_sharing_target = "0";
    assert_ok(fixture_select(&f, "", layers, 3, &a, &error));
    assert_int_equal(a->layers[2].layer.sharing_target, 0);
    assignment_end(&a);
    for (int32_t i = 0; i < 3; i++) {
        layers[i].block_size = 0; /* the backend's, and then the target's */
    }
    assert_ok(fixture_select(&f, "", layers, 3, &a, &error));
    assert_int_not_equal(a->layers[0].layer.desc.block_size, 0);
    assert_int_equal(a->layers[2].layer.desc.block_size, a->layers[0].layer.desc.block_size);
}
