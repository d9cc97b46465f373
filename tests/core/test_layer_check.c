/* SPDX-License-Identifier: Apache-2.0 */
/* From a caller's description to a complete one: what is refused, by field, and what is filled in.
 */
#include <math.h>
#include <string.h>

#include "select/layer_check.h"
#include "select/names.h"
#include "select_fixture.h"

typedef void change(struct attn_layer_desc *layer);

#define CHANGE(name, body)                                                                         \
    static void name(struct attn_layer_desc *l)                                                    \
    {                                                                                              \
        body;                                                                                      \
    }

static const struct attn_ext unknown_ext = {0x1345, 0, sizeof(struct attn_ext), NULL};
static const struct attn_mla_desc mla_ext = {.ext = {ATTN_EXT_MLA_DESC, 0, sizeof mla_ext, NULL},
                                             .kv_lora_rank = 512,
                                             .qk_nope_head_dim = 128,
                                             .qk_rope_head_dim = 64,
                                             .v_head_dim = 128};
static const struct attn_mla_desc mla_topk = {.ext = {ATTN_EXT_MLA_DESC, 0, sizeof mla_topk, NULL},
                                              .kv_lora_rank = 512,
                                              .qk_nope_head_dim = 128,
                                              .qk_rope_head_dim = 64,
                                              .v_head_dim = 128,
                                              .topk = 8};
static const struct attn_recurrent_desc gdn_ext = {
    .ext = {ATTN_EXT_RECURRENT_DESC, 0, sizeof gdn_ext, NULL},
    .num_k_heads = 4,
    .num_v_heads = 6,
    .head_size_k = 64,
    .head_size_v = 64};
static const struct attn_recurrent_desc gdn_half = {
    .ext = {ATTN_EXT_RECURRENT_DESC, 0, sizeof gdn_half, NULL},
    .num_k_heads = 4,
    .num_v_heads = 8,
    .head_size_k = 64,
    .head_size_v = 64,
    .state_dtype = ATTN_DTYPE_F16};
static const struct attn_context_parallel cp_ext = {
    .ext = {ATTN_EXT_CONTEXT_PARALLEL, 0, sizeof cp_ext, NULL}, .interleave = 3};

CHANGE(name_null, l->name = NULL)
CHANGE(name_empty, l->name = "")
CHANGE(name_control, l->name = "a\nb")
CHANGE(kind_code, l->kind = 99)
CHANGE(dtype_code, l->dtype = ATTN_DTYPE_INT8)
CHANGE(dtype_negative, l->dtype = -1)
CHANGE(kv_code, l->kv_dtype = ATTN_KV_DTYPE_COUNT)
CHANGE(q_heads_zero, l->num_q_heads = 0)
CHANGE(q_heads_huge, l->num_q_heads = INT32_MAX)
CHANGE(kv_heads_negative, l->num_kv_heads = -8)
CHANGE(heads_divide, l->num_q_heads = 31)
CHANGE(head_size_odd, l->head_size = 100)
CHANGE(head_size_big, l->head_size = 520)
CHANGE(head_size_zero, l->head_size = 0)
CHANGE(head_size_v_odd, l->head_size_v = 12)
CHANGE(scale_zero, l->scale = 0)
CHANGE(scale_nan, l->scale = NAN)
CHANGE(scale_inf, l->scale = INFINITY)
CHANGE(cap_negative, l->soft_cap = -1)
CHANGE(cap_nan, l->soft_cap = NAN)
CHANGE(causal_code, l->causal = 2)
CHANGE(window_negative, l->has_window = 1; l->window_left = -2)
CHANGE(window_open, l->has_window = 1; l->window_left = l->window_right = -1)
CHANGE(chunk_negative, l->chunk_size = -1)
CHANGE(chunk_window, l->chunk_size = 64; l->has_window = 1; l->window_left = 3)
CHANGE(chunk_per_request, l->chunk_size = 64; l->causal_per_request = 1)
CHANGE(chunk_causal, l->chunk_size = 64; l->causal = 0)
CHANGE(sink_kind, l->kind = ATTN_LAYER_CROSS; l->causal = 0; l->sink_len = 4)
CHANGE(encoder_code, l->kind = ATTN_LAYER_ENCODER; l->causal = 0; l->encoder = 3)
CHANGE(encoder_of_decoder, l->encoder = ATTN_ENCODER_ONLY)
CHANGE(encoder_causal, l->kind = ATTN_LAYER_ENCODER)
CHANGE(prefix_causal, l->prefix_lm = 1; l->causal = 0)
CHANGE(block_negative, l->block_size = -16)
CHANGE(page_negative, l->padded_page_bytes = -1)
CHANGE(graph_code, l->graph_level = 4)
CHANGE(alibi_code, l->alibi = 3)
CHANGE(tree_code, l->tree_mask = 3)
CHANGE(output_code, l->output_form = ATTN_OUTPUT_FORM_COUNT)
CHANGE(target_missing, l->kv_sharing_target = "nobody")
CHANGE(target_self, l->kv_sharing_target = "l")
CHANGE(ext_unknown, l->next = &unknown_ext)
CHANGE(mla_missing, l->kind = ATTN_LAYER_MLA)
CHANGE(mla_on_decoder, l->next = &mla_ext.ext)
CHANGE(mla_heads, l->kind = ATTN_LAYER_MLA; l->next = &mla_ext.ext)
CHANGE(gdn_missing, l->kind = ATTN_LAYER_RECURRENT)
CHANGE(gdn_heads, l->kind = ATTN_LAYER_RECURRENT; l->next = &gdn_ext.ext)
CHANGE(cp_interleave, l->next = &cp_ext.ext)
CHANGE(dtype_missing, l->dtype = ATTN_DTYPE_DEFAULT)
CHANGE(feature_unknown, l->needed_features = UINT64_C(1) << 60)
CHANGE(walk_unknown, l->needed_view_forms = UINT64_C(1) << 5)
CHANGE(gdn_state, l->kind = ATTN_LAYER_RECURRENT; l->next = &gdn_half.ext)
CHANGE(size_small, l->struct_size = 100)

static const struct {
    change *change;
    const char *field, *says;
} refusals[] = {
    {name_null, "name", "NULL"},
    {name_empty, "name", "empty"},
    {name_control, "name", "not clean"},
    {kind_code, "kind", "99"},
    {dtype_code, "dtype", "7"},
    {dtype_negative, "dtype", "-1"},
    {kv_code, "kv_dtype", "19"},
    {q_heads_zero, "num_q_heads", "0"},
    {q_heads_huge, "num_q_heads", "2147483647"},
    {kv_heads_negative, "num_kv_heads", "-8"},
    {heads_divide, "num_q_heads", "31 is not a multiple of num_kv_heads 8"},
    {head_size_odd, "head_size", "100"},
    {head_size_big, "head_size", "512"},
    {head_size_zero, "head_size", "0"},
    {head_size_v_odd, "head_size_v", "12"},
    {scale_zero, "scale", "0"},
    {scale_nan, "scale", "nan"},
    {scale_inf, "scale", "inf"},
    {cap_negative, "soft_cap", "-1"},
    {cap_nan, "soft_cap", "nan"},
    {causal_code, "causal", "2"},
    {window_negative, "window_left", "(-2, 0)"},
    {window_open, "has_window", "open on both sides"},
    {chunk_negative, "chunk_size", "-1"},
    {chunk_window, "chunk_size", "exclude each other"},
    {chunk_per_request, "causal_per_request", "chunk_size 64"},
    {chunk_causal, "chunk_size", "causal"},
    {sink_kind, "sink_len", "4"},
    {encoder_code, "encoder", "3"},
    {encoder_of_decoder, "encoder", "1"},
    {encoder_causal, "causal", "encoder"},
    {prefix_causal, "prefix_lm", "causal is 0"},
    {block_negative, "block_size", "-16"},
    {page_negative, "padded_page_bytes", "-1"},
    {graph_code, "graph_level", "4"},
    {alibi_code, "alibi", "3"},
    {tree_code, "tree_mask", "3"},
    {output_code, "output_form", "5"},
    {target_missing, "kv_sharing_target", "nobody"},
    {target_self, "kv_sharing_target", "no earlier layer"},
    {ext_unknown, "attn_layer_desc", "4933"},
    {mla_missing, "attn_mla_desc", "needs"},
    {mla_on_decoder, "attn_mla_desc", "takes no"},
    {mla_heads, "head_size", "576"},
    {gdn_missing, "attn_recurrent_desc", "needs"},
    {gdn_heads, "num_v_heads", "6 is not a multiple of num_k_heads 4"},
    {cp_interleave, "interleave", "3 must divide block_size 16"},
    {dtype_missing, "dtype", "0"},
    {feature_unknown, "needed_features", "0x1000000000000000"},
    {walk_unknown, "needed_view_forms", "0x20"},
    {gdn_state, "state_dtype", "1"},
    {size_small, "struct_size", "100"},
};

static void test_each_refusal(void **state)
{
    struct fixture f;
    (void)state;
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
    fixture_finish(&f);
}

static void test_completion(void **state)
{
    struct attn_layer_desc desc = fixture_layer("l");
    struct attn_error error = ATTN_ERROR_INIT;
    struct layer layer = {0};
    struct attn_ext optional = {0x2000, ATTN_EXT_OPTIONAL, sizeof optional, NULL};
    struct fixture f;
    struct arena arena;
    (void)state;
    fixture_init(&f);
    arena_init(&arena, &f.runtime.host);
    desc.next = &optional;
    assert_int_equal(layer_resolve(&arena, &desc, 0, NULL, &layer, &error), ATTN_OK);
    assert_int_equal(layer.desc.head_size_v, 128);
    assert_int_equal(layer.desc.kv_dtype, ATTN_KV_BF16);
    assert_int_equal(layer.desc.window_left, -1);
    assert_int_equal(layer.sharing_target, -1);
    assert_null(layer.desc.next); /* an unknown optional extension is left out */
    desc.next = NULL;
    desc.kv_dtype = ATTN_KV_FP8_E4M3;
    assert_int_equal(layer_resolve(&arena, &desc, 0, NULL, &layer, &error), ATTN_OK);
    assert_int_equal(layer.desc.kv_dtype, ATTN_KV_FP8_E4M3);
    assert_int_equal(layer.desc.k_scale_form, ATTN_SCALE_PER_TENSOR);
    desc.skip_kv_quantization = 1;
    assert_int_equal(layer_resolve(&arena, &desc, 0, NULL, &layer, &error), ATTN_OK);
    assert_int_equal(layer.desc.kv_dtype, ATTN_KV_BF16);
    desc = fixture_layer("mla");
    desc.kind = ATTN_LAYER_MLA;
    desc.num_kv_heads = 1;
    desc.head_size = 576;
    desc.next = &mla_ext.ext;
    assert_int_equal(layer_resolve(&arena, &desc, 0, NULL, &layer, &error), ATTN_OK);
    assert_int_equal(layer.desc.head_size_v, 128);
    assert_non_null(layer.mla);
    assert_ptr_not_equal(layer.mla, &mla_ext);
    assert_ptr_not_equal(layer.desc.name, desc.name);
    assert_int_equal(layer.mla->kv_lora_rank, 512);
    assert_int_equal(layer.desc.kind, ATTN_LAYER_MLA);
    desc.next = &mla_topk.ext; /* names that follow from a parameter */
    assert_int_equal(layer_resolve(&arena, &desc, 0, NULL, &layer, &error), ATTN_OK);
    assert_string_equal(name_of_layer(&layer.desc), "mla_sparse");
    desc = fixture_layer("sink");
    desc.sink_len = 4;
    assert_int_equal(layer_resolve(&arena, &desc, 0, NULL, &layer, &error), ATTN_OK);
    assert_string_equal(name_of_layer(&layer.desc), "static_sink");
    arena_finish(&arena);
    fixture_finish(&f);
}

static void test_struct_sizes(void **state)
{
    struct {
        struct attn_layer_desc desc;
        int64_t tail[2];
    } newer = {.desc = fixture_layer("l")};
    struct attn_error error = ATTN_ERROR_INIT;
    struct layer layer = {0};
    struct fixture f;
    struct arena arena;
    (void)state;
    newer.desc.struct_size = sizeof newer;
    fixture_init(&f);
    arena_init(&arena, &f.runtime.host);
    assert_int_equal(layer_resolve(&arena, &newer.desc, 0, NULL, &layer, &error), ATTN_OK);
    newer.tail[1] = 1;
    assert_int_equal(layer_resolve(&arena, &newer.desc, 0, NULL, &layer, &error),
                     ATTN_ERROR_STRUCT_SIZE);
    arena_finish(&arena);
    fixture_finish(&f);
}

static void test_names_and_sharing(void **state)
{
    struct attn_layer_desc layers[3] = {fixture_layer("0"), fixture_layer("1"), fixture_layer("2")};
    struct attn_error error;
    attn_assignment *a = NULL;
    struct fixture f;
    (void)state;
    fixture_init(&f);
    fixture_add(&f, "alpha", "", 1);
    layers[2].name = "0";
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &error, "name",
               fixture_select(&f, "", layers, 3, &a, &error));
    assert_non_null(strstr(error.message, "layers 0 and 2"));
    layers[2].name = "2";
    layers[0].kv_sharing_target = "1"; /* later */
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &error, "kv_sharing_target",
               fixture_select(&f, "", layers, 3, &a, &error));
    layers[0].kv_sharing_target = NULL;
    layers[2].kv_sharing_target = "1";
    layers[2].num_kv_heads = 4; /* another specification */
    REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &error, "kv_sharing_target",
               fixture_select(&f, "", layers, 3, &a, &error));
    layers[2].num_kv_heads = 8;
    layers[1].kv_sharing_target = "0"; /* a chain */
    assert_int_equal(fixture_select(&f, "", layers, 3, &a, &error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(error.message, "which itself reads"));
    layers[2].kv_sharing_target = "0";
    assert_int_equal(fixture_select(&f, "", layers, 3, &a, &error), ATTN_OK);
    assert_int_equal(a->layers[2].layer.sharing_target, 0);
    assignment_destroy(a);
    fixture_finish(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_refusal),
        cmocka_unit_test(test_completion),
        cmocka_unit_test(test_struct_sizes),
        cmocka_unit_test(test_names_and_sharing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
