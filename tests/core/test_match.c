/* SPDX-License-Identifier: Apache-2.0 */
/* Every reason against a backend, one change at a time: field, asked, supported. */
#include <attn/draft/index_write.h>
#include <attn/draft/mm_encoder.h>
#include <attn/draft/output_rope.h>
#include <math.h>

#include "match_setting.h"
#include "runtime/probe.h"
#include "select/bound.h"
#include "support/layer.h"

/* What every CASE begins with. */
static struct setting s;

static int begin(void **state)
{
    setting_init(&s);
    return 0;
}

static int end(void **state)
{
    setting_finish(&s);
    return 0;
}

#define CASE(name) TEST_AROUND(name, begin, end)

typedef void change(struct attn_layer_desc *layer, struct attn_backend_caps *caps);

static const struct attn_refused_combination together = {
    ATTN_TERM_CAUSAL | ATTN_TERM_SLIDING_WINDOW, ATTN_FEATURE_LSE, 0, "windows have no lse"};
static const struct attn_refused_combination sized = {.why = "128 in a decode",
                                                      .dtypes = 1u << ATTN_DTYPE_BF16,
                                                      .layer_kinds = 1u << ATTN_LAYER_DECODER,
                                                      .phases = 1u << ATTN_PHASE_DECODE,
                                                      .head_size = {64, 128, 64}};

static const struct attn_ext vendors = {ATTN_EXT_VENDOR, 0, sizeof vendors, NULL};
static const uint32_t declared = ATTN_EXT_VENDOR + 1;

static const struct attn_vendor_code codes[] = {{ATTN_NAMES_KV_DTYPE, 0x10001, "acme_q6"},
                                                {ATTN_NAMES_DTYPE, 0x10002, "acme_q"},
                                                {ATTN_NAMES_CACHE_ROLE, 0x10003, "acme_sums"}};
static const struct attn_cache_desc sums[] = {
    {.role = 0x10004, .kv_dtype = ATTN_KV_F32, .num_heads = 1, .head_size = 8},
    {.role = 0x10003, .kv_dtype = 0x10005, .num_heads = 1, .head_size = 8}};
static const struct attn_layer_caches strange_role = {
    {ATTN_EXT_LAYER_CACHES, 0, sizeof strange_role, NULL}, &sums[0], 1, sizeof *sums};
static const struct attn_layer_caches strange_rows = {
    {ATTN_EXT_LAYER_CACHES, 0, sizeof strange_rows, NULL}, &sums[1], 1, sizeof *sums};

#define REFUSAL(name, field, asked, supported, ...)                                                \
    static void name(struct attn_layer_desc *l, struct attn_backend_caps *c)                       \
    {                                                                                              \
        (void)l, (void)c;                                                                          \
        __VA_ARGS__;                                                                               \
    }
#include "match_refusals.h"

#define REFUSAL(name, field, asked, supported, ...) {name, field, asked, supported},
static const struct {
    change *change;
    const char *field, *asked, *supported;
} refusals[] = {
#include "match_refusals.h"
#include "util/counts.h"
};

TEST(test_each_reason)
{
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        OWNED(setting_finish) struct setting s;
        setting_init(&s);
        expect_reasons(&s, 0);
        refusals[i].change(&s.layer, s.caps);
        match_one(&s);
        if (s.reasons.count != 1) {
            fail_msg("%s %s gave %d reasons, the first %s", refusals[i].field, refusals[i].asked,
                     s.reasons.count, s.reasons.count > 0 ? s.reasons.items[0].field : "-");
        }
        assert_string_equal(s.reasons.items[0].field, refusals[i].field);
        assert_string_equal(s.reasons.items[0].asked, refusals[i].asked);
        assert_string_equal(s.reasons.items[0].supported, refusals[i].supported);
    }
}

/* A refused combination with a term that is not known here refuses nothing. */
CASE(test_rows_of_unknown_terms)
{
    static const struct attn_refused_combination rows[] = {
        {.terms = ATTN_TERM_CAUSAL | UINT64_C(1) << NUM_TERMS, .why = "a later one"},
        {.terms = ATTN_TERM_CAUSAL, .why = "known"}};
    struct attn_error error = ATTN_ERROR_INIT;
    struct found found;
    s.caps->layouts = 1u << ATTN_KV_LAYOUT_NHD; /* the fixture has no views of the other */
    s.caps->refused = rows;
    s.caps->num_refused = 2;
    s.caps->refused_stride = sizeof *rows;
    assert_ok(found_init(&found, &s.arena, &error));
    const struct attn_probe_sink sink = found_sink(&found);
    assert_ok(sink.device(sink.user, &s.fixture.devices[0], NULL));
    if (sink.backend(sink.user, s.caps, NULL) != ATTN_OK) {
        fail_msg("%s: %s", found.error.field, found.error.message);
    }
    assert_int_equal(found.backends[0].caps.num_refused, 1);
    assert_string_equal(found.backends[0].caps.refused[0].why, "known");
}

/* A row refuses a layer that is of everything it says, and no other. */
CASE(test_rows_by_what_they_name)
{
    const struct attn_refused_combination others[] = {
        {.why = "", .dtypes = 1u << ATTN_DTYPE_F16},
        {.why = "", .layer_kinds = 1u << ATTN_LAYER_CROSS},
        {.why = "", .phases = 1u << ATTN_PHASE_PREFILL},
        {.why = "", .kv_dtypes = 1u << ATTN_KV_F32},
        {.why = "", .head_size = {64, 64, 1}},
        {.why = "", .head_size = {8, 256, 32}}};
    s.caps->num_refused = 1;
    s.caps->refused_stride = sizeof *others;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        s.caps->refused = &others[i];
        expect_reasons(&s, 0);
    }
}

/* Terms and features, and a layer that has them. */
#define TERMS_AND_FEATURES(ROW)                                                                    \
    ROW(set_per_request, ATTN_TERM_CAUSAL_PER_REQUEST, 0, l->causal_per_request = 1)               \
    ROW(set_window, ATTN_TERM_SLIDING_WINDOW, 0, l->has_window = 1)                                \
    ROW(set_symmetric, ATTN_TERM_SYMMETRIC_WINDOW, 0, l->has_window = 1;                           \
        l->causal = ATTN_CAUSAL_NO; l->window_left = l->window_right = 9)                          \
    ROW(set_chunk, ATTN_TERM_CHUNKED_LOCAL, 0, l->chunk_size = 64)                                 \
    ROW(set_soft_cap, ATTN_TERM_SOFT_CAP, 0, l->soft_cap = 50)                                     \
    ROW(set_alibi, ATTN_TERM_ALIBI, 0, l->alibi = ATTN_ALIBI_LINEAR)                               \
    ROW(set_sqrt, ATTN_TERM_ALIBI_SQRT, 0, l->alibi = ATTN_ALIBI_SQRT)                             \
    ROW(set_sinks, ATTN_TERM_SINKS, 0, l->has_sinks = 1)                                           \
    ROW(set_sink_len, ATTN_TERM_STATIC_SINK, 0, l->sink_len = 4)                                   \
    ROW(set_prefix_lm, ATTN_TERM_PREFIX_LM, 0, l->prefix_lm = 1)                                   \
    ROW(set_bits, ATTN_TERM_TREE_BITS, 0, l->tree_mask = ATTN_TREE_BITS)                           \
    ROW(set_bias, ATTN_TERM_TREE_BIAS, 0, l->tree_mask = ATTN_TREE_BIAS)                           \
    ROW(set_lse, 0, ATTN_FEATURE_LSE, l->needs_lse = 1)                                            \
    ROW(set_row, 0, ATTN_FEATURE_BLOCK_TABLE_ROW, l->needs_block_table_row = 1)                    \
    ROW(set_bounds, 0, ATTN_FEATURE_HOST_BOUNDS, l->host_bounds = 1)                               \
    ROW(set_device_lens, 0, ATTN_FEATURE_DEVICE_SEQ_LENS, l->device_seq_lens_only = 1)             \
    ROW(set_query, 0, ATTN_FEATURE_QUANTIZED_QUERY, l->q_scale_form = ATTN_SCALE_PER_TENSOR;       \
        l->q_dtype = ATTN_DTYPE_FP8_E4M3)                                                          \
    ROW(set_invariant, 0, ATTN_FEATURE_BATCH_INVARIANT, l->batch_invariant = 1)
#define SETTER(name, term, feature, change)                                                        \
    static void name(struct attn_layer_desc *l, struct attn_backend_caps *c)                       \
    {                                                                                              \
        (void)c;                                                                                   \
        change;                                                                                    \
    }
TERMS_AND_FEATURES(SETTER)
#define TERM_ROW(name, term, feature, change) {term, feature, name},

/* A row of one term or feature, alone and next to causality: it refuses the layer that has it, and
 * no other. Two of them refuse together. */
TEST(test_rows_by_each_term_and_feature)
{
    static const struct {
        uint64_t term, feature;
        change *change;
    } rows[] = {TERMS_AND_FEATURES(TERM_ROW)};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct attn_refused_combination row = {
            .terms = rows[i].term, .features = rows[i].feature, .why = "no"};
        OWNED(setting_finish) struct setting s;
        setting_init(&s);
        s.caps->terms = (UINT64_C(1) << NUM_TERMS) - 1;
        s.caps->features = (UINT64_C(1) << NUM_FEATURES) - 1;
        s.caps->q_dtypes = 1u << ATTN_DTYPE_FP8_E4M3;
        s.caps->refused = &row;
        s.caps->refused_stride = sizeof row;
        s.caps->num_refused = 1;
        row.terms |= ATTN_TERM_CAUSAL;
        expect_reasons(&s, 0);
        row.terms &= rows[i].term;
        expect_reasons(&s, 0);
        rows[i].change(&s.layer, s.caps);
        expect_reasons(&s, 1);
        assert_string_equal(s.reasons.items[0].field, "combination");
        row.terms |= s.layer.causal != ATTN_CAUSAL_NO ? ATTN_TERM_BIDIRECTIONAL : ATTN_TERM_CAUSAL;
        expect_reasons(&s, 0);
        row.terms &= rows[i].term;
        if (rows[i].term == ATTN_TERM_CHUNKED_LOCAL || rows[i].term == ATTN_TERM_STATIC_SINK) {
            s.caps->terms &= ~rows[i].term; /* the core's own: the backend is not asked for it */
            expect_reasons(&s, 0);
        }
    }
}

CASE(test_all_reasons_at_once)
{
    s.layer.head_size = 72;
    s.layer.soft_cap = 50;
    s.layer.has_sinks = 1;
    s.layer.block_size = 24;
    s.layer.alibi = ATTN_ALIBI_LINEAR;
    expect_reasons(&s, 5);
}

/* An engine's blocks of 192 are three of the kernels' 64, where nothing stands against it. */
CASE(test_what_keeps_blocks_whole)
{
    static const struct attn_range blocks[] = {{16, 64, 16}};
    struct attn_context_parallel cp =
        EXTENSION(attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL, NULL, .interleave = 96);
    s.caps->block_sizes = blocks;
    s.layer.block_size = 192;
    expect_reasons(&s, 0);
    s.caps->device.type = ATTN_DEVICE_CUDA;
    expect_fields(&s, ANY, "make_block_table");
    s.caps->kernels |= ATTN_KERNEL_MAKE_BLOCK_TABLE;
    expect_reasons(&s, 0);
    s.layer.next = &cp.ext;
    expect_fields(&s, ANY, "interleave");
    s.layer.next = NULL;
    s.layer.padded_page_bytes = 3 * 524289; /* odd parts, of 16-bit elements */
    expect_fields(&s, ANY, "padded_page_bytes");
    s.layer.padded_page_bytes = 3 * 524288;
    expect_reasons(&s, 0);
    s.layer.padded_page_bytes = 0;
    s.layer.needs_page_lists = 1;
    expect_reasons(&s, 0);
    s.caps->kernels &= ~(uint64_t)ATTN_KERNEL_MAKE_BLOCK_TABLE;
    s.layer.block_size = 64;
    expect_fields(&s, ANY, "kernel");
}

CASE(test_compositions)
{
    struct match match;
    match = expect_composed(&s, ATTN_COMPOSE_CASCADE);
    assert_int_equal(match.graph_level, ATTN_GRAPH_ALWAYS);
    s.layer.has_window = 1; /* which a prefix has no part in */
    expect_composed(&s, 0);
    s.layer.has_window = 0;

    s.caps->features |= ATTN_FEATURE_BLOCK_TABLE_ROW;
    s.layer.chunk_size = 64;
    match = expect_composed(&s, ATTN_COMPOSE_CHUNKED);
    assert_int_equal(match.graph_level, ATTN_GRAPH_NEVER);
    s.layer.needs_block_table_row = 1; /* whose rows the host knows on a CPU alone */
    expect_composed(&s, ATTN_COMPOSE_CHUNKED);
    s.caps->device.type = ATTN_DEVICE_CUDA;
    expect_fields(&s, ANY, "chunk_size");
    s.caps->device.type = ATTN_DEVICE_CPU;
    s.layer.needs_block_table_row = 0;
    s.caps->terms |= ATTN_TERM_CHUNKED_LOCAL;
    expect_composed(&s, 0);

    s.layer = fixture_layer("l");
    s.layer.sink_len = 4;
    match = expect_composed(&s, ATTN_COMPOSE_STATIC_SINK);
    assert_int_equal(match.graph_level, ATTN_GRAPH_UNIFORM_BATCH);

    s.layer = fixture_layer("l");
    s.layer.kind = ATTN_LAYER_CROSS;
    s.layer.causal = ATTN_CAUSAL_NO;
    expect_composed(&s, ATTN_COMPOSE_CROSS);

    s.layer.kind = ATTN_LAYER_ENCODER;
    s.layer.block_size = 0;
    match = expect_composed(&s, ATTN_COMPOSE_ENCODER);
    assert_int_equal(match.block_size, 0);

    s.layer = fixture_layer("l");
    s.layer.output_form = ATTN_OUTPUT_FP8_STATIC;
    s.caps->kernels |= ATTN_KERNEL_QUANTIZE;
    expect_composed(&s, ATTN_COMPOSE_OUTPUT_QUANT | ATTN_COMPOSE_CASCADE);
    s.caps->output_forms |= 1u << ATTN_OUTPUT_FP8_STATIC; /* one attend makes it */
    expect_composed(&s, ATTN_COMPOSE_CASCADE);
    s.layer.sink_len = 4;
    expect_composed(&s, ATTN_COMPOSE_OUTPUT_QUANT | ATTN_COMPOSE_STATIC_SINK);
    s.layer.sink_len = 0;
    s.caps->kernels &= ~(uint64_t)ATTN_KERNEL_QUANTIZE; /* which ends a merge */
    expect_composed(&s, 0);
}

CASE(test_outputs_rotated_back)
{
    struct attn_output_rope rope = EXTENSION(attn_output_rope, ATTN_EXT_DRAFT_OUTPUT_ROPE, NULL,
                                             .form = ATTN_ROPE_NEOX, .rotary_dim = 64);
    s.layer.next = &rope.ext;
    expect_composed(&s, ATTN_COMPOSE_CASCADE | ATTN_COMPOSE_OUTPUT_ROPE);
    s.caps->device.type = ATTN_DEVICE_CUDA;
    expect_fields(&s, ANY, "attn_output_rope");
    s.caps->features |= ATTN_FEATURE_DRAFT_OUTPUT_ROPE;
    expect_composed(&s, ATTN_COMPOSE_CASCADE | ATTN_COMPOSE_OUTPUT_ROPE);
}

/* Limits of 0 are what every backend has. */
CASE(test_indexers)
{
    static const struct attn_range blocks[] = {{16, 64, 16}};
    struct attn_indexer_desc indexer = {.topk = 8};
    struct attn_indexer_caps limits =
        EXTENSION(attn_indexer_caps, ATTN_EXT_CAPS_INDEXER, NULL, .topk_max = 8);
    layer_set_indexer(&s.layer, &indexer);
    s.caps->layer_kinds |= 1u << ATTN_LAYER_INDEXER;
    expect_fields(&s, 1, "attn_indexer_caps");
    s.caps->next = &limits.ext;
    limits.head_size_max = s.layer.head_size - 1;
    expect_fields(&s, 1, "head_size");
    limits.head_size_max++;
    expect_reasons(&s, 0);
    indexer.activation = ATTN_INDEXER_RELU;
    indexer.num_groups = s.layer.num_q_heads;
    indexer.tokens_per_row = 2;
    indexer.rows_per_entry = 5;
    expect_fields(&s, 4, "activation", "num_groups", "tokens_per_row", "rows_per_entry");
    limits.activations = 1u << ATTN_INDEXER_RELU;
    limits.num_groups_max = s.layer.num_q_heads;
    limits.tokens_per_row_max = 96;
    limits.rows_per_entry_max = 5;
    expect_reasons(&s, 0);
    s.caps->block_sizes = blocks; /* three of a backend's blocks of 64 have two rows of 96 */
    s.layer.block_size = 192;
    expect_reasons(&s, 0);
    indexer.tokens_per_row = 96;
    expect_fields(&s, 2, "block_size", "tokens_per_row");
}

CASE(test_keys_changed_when_written)
{
    struct attn_index_write write =
        EXTENSION(attn_index_write, ATTN_EXT_DRAFT_INDEX_WRITE, NULL, .hadamard = 1);
    struct attn_indexer_desc indexer = {.topk = 8};
    const struct attn_indexer_caps limits = EXTENSION(attn_indexer_caps, ATTN_EXT_CAPS_INDEXER,
                                                      NULL, .head_size_max = 512, .topk_max = 8);
    layer_set_indexer(&s.layer, &indexer);
    s.caps->layer_kinds |= 1u << ATTN_LAYER_INDEXER;
    s.caps->next = &limits.ext;
    expect_composed(&s, 0);
    indexer.ext.next = &write.ext;
    expect_fields(&s, ANY, "attn_index_write");
    s.caps->features |= ATTN_FEATURE_DRAFT_INDEX_WRITE;
    expect_composed(&s, 0);
}

CASE(test_mla)
{
    struct attn_mla_desc mla = EXTENSION(
        attn_mla_desc, ATTN_EXT_MLA_DESC, NULL, .kv_lora_rank = 512, .qk_nope_head_dim = 128,
        .qk_rope_head_dim = 64, .v_head_dim = 128, .absorb_in_core = 1);
    struct attn_mla_caps limits =
        EXTENSION(attn_mla_caps, ATTN_EXT_CAPS_MLA, NULL, .kv_lora_rank_max = 512,
                  .qk_rope_head_dim_max = 64, .num_q_heads_multiple = 64, .max_query_len = 2);
    s.layer.kind = ATTN_LAYER_MLA;
    s.layer.next = &mla.ext;
    s.layer.num_q_heads = 128;
    s.layer.num_kv_heads = 1;
    s.layer.head_size = 576;
    expect_fields(&s, ANY, "layer_kind", "kernel");
    s.caps->layer_kinds |= 1u << ATTN_LAYER_MLA;
    s.caps->kernels |= ATTN_KERNEL_ATTEND_MLA | ATTN_KERNEL_BATCHED_GEMM;
    expect_fields(&s, ANY, "attn_mla_caps");
    s.caps->next = &limits.ext;
    expect_composed(&s, ATTN_COMPOSE_MLA);
    limits.kv_lora_rank_max = 256;
    limits.qk_rope_head_dim_max = 32;
    limits.num_q_heads_multiple = 100;
    s.layer.num_speculative_tokens = 2;
    s.caps->kernels &= ~(uint64_t)ATTN_KERNEL_BATCHED_GEMM;
    expect_fields(&s, 5, "kv_lora_rank", "qk_rope_head_dim", "padded_num_q_heads", "max_query_len",
                  "kernel");
    limits.topk_multiple = 64;
    mla.topk = 128;
    match_one(&s);
    const int32_t others = s.reasons.count;
    mla.topk = 100;
    expect_fields(&s, others + 1, "topk");
    s.layer.head_size = 568;
    expect_unresolved(&s, "head_size");
}

/* Projections in the core round 16-bit activations more often than an attend does, which adds to
 * what quantized probabilities do. */
CASE(test_bounds_of_projections)
{
    static const struct {
        int32_t dtype, kv_dtype, p_scale_form;
        double rms, element, lse, more_rms, more_element, more_lse;
    } bounds[] = {
        {ATTN_DTYPE_F16, ATTN_KV_F16, ATTN_SCALE_NONE, 3e-3, 2e-3, 0x1p-10, 6e-3, 4e-3, 0x7p-10},
        {ATTN_DTYPE_BF16, ATTN_KV_BF16, ATTN_SCALE_NONE, 2e-2, 1.2e-2, 0x1p-7, 4e-2, 2.4e-2,
         0x7p-7},
        {ATTN_DTYPE_BF16, ATTN_KV_FP8_E4M3, ATTN_SCALE_PER_TENSOR, 0.22, 1.2e-2 + 2.0 / 17, 0x1p-7,
         4e-2, 2.4e-2, 0x7p-7},
        {ATTN_DTYPE_BF16, ATTN_KV_INT8_KV, ATTN_SCALE_NONE, 8e-2, 1.2e-2, 0x1p-7 + 6e-2, 4e-2,
         2.4e-2, 0x7p-7},
        {ATTN_DTYPE_F32, ATTN_KV_F32, ATTN_SCALE_NONE, 4e-5, 2e-5, 0x1p-12, 0, 0, 0},
        {ATTN_DTYPE_F32, ATTN_KV_TURBOQUANT_3BIT_NC, ATTN_SCALE_NONE, 3e-3 + 14 * 0x1p-13, 2e-3,
         0x1p-10, 0, 0, 0}};
    struct attn_mla_desc mla = EXTENSION(attn_mla_desc, ATTN_EXT_MLA_DESC, NULL, );
    s.layer.kind = ATTN_LAYER_MLA;
    s.layer.next = &mla.ext;
    for (size_t i = 0; i < 2 * (sizeof bounds / sizeof *bounds); i++) {
        const int32_t kv_dtype = bounds[i / 2].kv_dtype, more = i % 2;
        struct attn_choice choice = {.kv_dtype = kv_dtype, .kv_dtype_v = kv_dtype};
        s.layer.dtype = bounds[i / 2].dtype;
        s.layer.p_scale_form = bounds[i / 2].p_scale_form;
        mla.absorb_in_core = more;
        bound_set(&choice, &s.layer);
        const double wanted[] = {bounds[i / 2].rms + more * bounds[i / 2].more_rms,
                                 bounds[i / 2].element + more * bounds[i / 2].more_element,
                                 bounds[i / 2].lse + more * bounds[i / 2].more_lse};
        assert_true(fabs(choice.bound_of_row_rms - wanted[0]) < 1e-9);
        assert_true(fabs(choice.bound_of_element - wanted[1]) < 1e-9);
        assert_true(fabs(choice.bound_of_lse - wanted[2]) < 1e-9);
    }
}

/* A layer with caches beyond those of its kind: alone, not composed of others, and with keys of its
 * own. */
CASE(test_further_caches)
{
    static const struct attn_cache_desc cache = {.role = ATTN_CACHE_INDEX_K,
                                                 .kv_dtype = ATTN_KV_BF16,
                                                 .num_heads = 1,
                                                 .head_size = 64,
                                                 .tokens_per_row = 1};
    const struct attn_layer_caches caches = layer_caches(&cache, 1, NULL);
    s.layer.next = &caches.ext;
    s.caps->cache_roles = 1u << ATTN_CACHE_INDEX_K;
    s.caps->features |= ATTN_FEATURE_BLOCK_TABLE_ROW;
    expect_composed(&s, 0); /* and no cascade */
    s.layer.chunk_size = 64;
    expect_fields(&s, 1, "caches");
    s.layer.chunk_size = 0;
    s.layer.kv_sharing_target = "another";
    expect_unresolved(&s, "caches");
}

/* An encoder's heads are looked for in the size to which they are padded. */
CASE(test_padded_heads)
{
    struct attn_mm_encoder_quant quant =
        EXTENSION(attn_mm_encoder_quant, ATTN_EXT_DRAFT_MM_ENCODER, NULL, .fp8 = 1);
    s.caps->layer_kinds |= 1u << ATTN_LAYER_ENCODER;
    s.caps->features |= ATTN_FEATURE_FP8_INPUTS | ATTN_FEATURE_QUANTIZED_QUERY;
    s.caps->q_dtypes |= 1u << ATTN_DTYPE_FP8_E4M3;
    s.caps->kv_dtypes |= UINT64_C(1) << ATTN_KV_FP8_E4M3;
    s.caps->k_scale_forms = s.caps->v_scale_forms = 1u << ATTN_SCALE_PER_TENSOR;
    s.caps->kernels |= ATTN_KERNEL_QUANTIZE;
    s.layer.kind = ATTN_LAYER_ENCODER;
    s.layer.encoder = ATTN_ENCODER_MULTIMODAL;
    s.layer.causal = s.layer.block_size = 0;
    s.layer.head_size = 120;
    s.layer.head_size_v = 128;
    s.layer.next = &quant.ext;
    expect_fields(&s, ANY, "head_size");
    quant.padded_head_size = 192;
    expect_fields(&s, ANY, "kernel"); /* fill, for the padding */
    s.caps->kernels |= ATTN_KERNEL_FILL | ATTN_KERNEL_AMAX;
    expect_composed(&s, ATTN_COMPOSE_MM_ENCODER);
    quant.amax_history_len = 16;
    expect_fields(&s, ANY, "mm_encoder_fp8"); /* scales that follow the inputs */
    s.caps->features |= ATTN_FEATURE_AMAX_HISTORY;
    expect_composed(&s, ATTN_COMPOSE_MM_ENCODER);
}

CASE(test_gdn)
{
    struct attn_recurrent_desc gdn =
        EXTENSION(attn_recurrent_desc, ATTN_EXT_RECURRENT_DESC, NULL, .num_k_heads = 8,
                  .num_v_heads = 16, .head_size_k = 128, .head_size_v = 128, .conv_width = 4,
                  .num_speculative_tokens = 3, .state_dtype = ATTN_DTYPE_F32);
    struct attn_recurrent_caps limits =
        EXTENSION(attn_recurrent_caps, ATTN_EXT_CAPS_RECURRENT, NULL, .head_size_k_max = 128,
                  .head_size_v_max = 128, .conv_width_max = 4, .max_speculative_tokens = 3);
    s.layer.kind = ATTN_LAYER_RECURRENT;
    s.layer.block_size = 0;
    s.layer.next = &gdn.ext;
    s.layer.num_q_heads = s.layer.num_kv_heads = 8;
    expect_fields(&s, ANY, "layer_kind", "kernel");
    s.caps->layer_kinds |= 1u << ATTN_LAYER_RECURRENT;
    s.caps->kernels |= ATTN_KERNEL_RECURRENT;
    s.caps->next = &limits.ext;
    expect_reasons(&s, 0);
    gdn.state_dtype = ATTN_DTYPE_BF16;
    expect_fields(&s, 1, "state_dtype");
    limits.state_dtypes = 1u << ATTN_DTYPE_BF16;
    expect_reasons(&s, 0);
    struct attn_recurrent_rule rule = EXTENSION(
        attn_recurrent_rule, ATTN_EXT_DRAFT_RECURRENT_RULE, NULL, .rule = ATTN_RULE_ADDITIVE,
        .write_gate = ATTN_WRITE_GATE_STEP, .values_first = 1, .has_skip = 1);
    struct attn_recurrent_rule_caps rules =
        EXTENSION(attn_recurrent_rule_caps, ATTN_EXT_DRAFT_RECURRENT_CAPS, NULL,
                  .rules = 1u << ATTN_RULE_ADDITIVE, .write_gates = 1u << ATTN_WRITE_GATE_STEP,
                  .values_first = 1);
    gdn.ext.next = &rule.ext;
    expect_fields(&s, 4, "values_first");
    limits.ext.next = &rules.ext;
    expect_fields(&s, 1, "has_skip");
    rules.skip = 1;
    expect_reasons(&s, 0);
    rule = (struct attn_recurrent_rule){.ext = rule.ext, .gate_per_channel = 1};
    expect_reasons(&s, 3); /* rule, write_gate: those of the mask alone */
    gdn.ext.next = NULL;
    expect_reasons(&s, 2);
    struct attn_recurrent_norm norm =
        EXTENSION(attn_recurrent_norm, ATTN_EXT_DRAFT_RECURRENT_NORM, NULL, .epsilon = 1);
    gdn.ext.next = &norm.ext;
    expect_fields(&s, 3, "attn_recurrent_norm");
    rules.norm = 1;
    expect_reasons(&s, 2);
    struct attn_recurrent_rounding rounding =
        EXTENSION(attn_recurrent_rounding, ATTN_EXT_DRAFT_RECURRENT_ROUNDING, NULL, .seed = 1);
    gdn.ext.next = &rounding.ext;
    expect_fields(&s, 3, "attn_recurrent_rounding");
    rules.stochastic_rounding = 1;
    expect_reasons(&s, 2);
    const struct attn_cache_desc ring = {.role = ATTN_CACHE_REPLAY,
                                         .kv_dtype = s.layer.dtype,
                                         .num_heads = 8,
                                         .head_size = 128 + 2 * 128 + 8,
                                         .block_size = 22};
    const struct attn_layer_caches caches = layer_caches(&ring, 1, NULL);
    gdn.ext.next = &caches.ext;
    expect_fields(&s, 3, "caches");
    s.caps->cache_roles = 1u << ATTN_CACHE_REPLAY;
    expect_reasons(&s, 2);
    gdn.ext.next = NULL;
    limits.ext.next = NULL;
    limits.head_size_k_max = limits.head_size_v_max = 64;
    limits.conv_width_max = 3;
    limits.max_speculative_tokens = 2;
    expect_reasons(&s, 4);
}

/* A cache spread over two ranks: each part that the exchange lacks is a reason of its own. */
CASE(test_context_parallel)
{
    struct attn_context_parallel cp = EXTENSION(attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL,
                                                NULL, .decode = &fixture_ranks, .interleave = 16);
    s.layer.next = &cp.ext;
    s.caps->features |= ATTN_FEATURE_LSE | ATTN_FEATURE_CONTIGUOUS_KV;
    s.caps->terms |= ATTN_TERM_BIDIRECTIONAL | ATTN_TERM_SLIDING_WINDOW;
    s.caps->kernels |= ATTN_KERNEL_MERGE_STATES;
    expect_reasons(&s, 0);
    s.caps->max_group = s.layer.num_q_heads / s.layer.num_kv_heads; /* enough for one rank's */
    expect_reasons(&s, 1);
    s.caps->max_group = 0;
    struct attn_collectives none = fixture_ranks;
    cp.decode = &none;
    for (none.rank = -1; none.rank <= 2; none.rank += 3) {
        expect_unresolved(&s, "decode");
    }
    cp.decode = &fixture_ranks;
    s.layer.has_window = 1;
    s.layer.window_left = 9;
    s.caps->features &= ~(uint64_t)ATTN_FEATURE_LSE;
    s.caps->kernels &= ~(uint64_t)ATTN_KERNEL_MERGE_STATES;
    s.caps->max_num_q_heads = s.layer.num_q_heads; /* enough for one rank's */
    expect_reasons(&s, 4);
    for (int32_t i = 0; i < s.reasons.count; i++) {
        assert_string_equal(s.reasons.items[i].field, "context_parallel");
    }
}

/* Queries split over two ranks, whose slices share a row of the table: what a backend lacks,
 * and what no backend is asked for. */
CASE(test_split_queries)
{
    struct attn_context_parallel cp =
        EXTENSION(attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL, NULL, .prefill = &fixture_ranks,
                  .order = ATTN_CP_ZIGZAG);
    s.layer.next = &cp.ext;
    s.caps->terms |= ATTN_TERM_SLIDING_WINDOW;
    s.caps->features &=
        ~(uint64_t)(ATTN_FEATURE_LSE | ATTN_FEATURE_CONTIGUOUS_KV | ATTN_FEATURE_BLOCK_TABLE_ROW);
    s.caps->kernels = ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV;
    expect_reasons(&s, 1); /* block_table_row */
    cp.order = ATTN_CP_CONTIGUOUS;
    s.layer.has_window = 1; /* one request's slice is a request: windows are as ever */
    s.layer.window_left = 9;
    expect_reasons(&s, 0);
    s.layer.fast_prefill = s.layer.device_seq_lens_only = 1;
    s.caps->features |= ATTN_FEATURE_FAST_PREFILL | ATTN_FEATURE_DEVICE_SEQ_LENS;
    s.caps->kernels &= ~(uint64_t)ATTN_KERNEL_WRITE_KV;
    s.caps->features |= ATTN_FEATURE_FUSED_WRITE;
    expect_reasons(&s, 3);
    for (int32_t i = 0; i < s.reasons.count; i++) {
        assert_string_equal(s.reasons.items[i].field, "context_parallel");
    }
}
