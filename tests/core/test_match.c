/* SPDX-License-Identifier: Apache-2.0 */
/* Every reason against a backend, one change at a time: field, asked, supported. */
#include <string.h>

#include "select/layer_check.h"
#include "select/match.h"
#include "select_fixture.h"

typedef void change(struct attn_layer_desc *layer, struct attn_backend_caps *caps);

#define CHANGE(name, body)                                                                         \
    static void name(struct attn_layer_desc *l, struct attn_backend_caps *c)                       \
    {                                                                                              \
        (void)l;                                                                                   \
        (void)c;                                                                                   \
        body;                                                                                      \
    }

static const struct attn_refused_combination together = {
    ATTN_TERM_CAUSAL | ATTN_TERM_SLIDING_WINDOW, ATTN_FEATURE_LSE, 0, "windows have no lse"};
static const struct attn_refused_combination sized = {.why = "128 in a decode",
                                                      .dtypes = 1u << ATTN_DTYPE_BF16,
                                                      .layer_kinds = 1u << ATTN_LAYER_DECODER,
                                                      .phases = 1u << ATTN_PHASE_DECODE,
                                                      .head_size = {64, 128, 64}};

CHANGE(kind, c->layer_kinds = 1u << ATTN_LAYER_ENCODER)
CHANGE(phase, c->phases = 1u << ATTN_PHASE_PREFILL)
CHANGE(dtype, l->dtype = ATTN_DTYPE_F32; l->kv_dtype = ATTN_KV_F16)
CHANGE(kv_dtype, l->kv_dtype = ATTN_KV_NVFP4)
CHANGE(head_size, l->head_size = 72)
CHANGE(head_size_v, l->head_size = 192; l->head_size_v = 64)
CHANGE(block_size, l->block_size = 24)
CHANGE(causal, c->terms &= ~(uint64_t)ATTN_TERM_CAUSAL)
CHANGE(bidirectional, l->causal = 0; c->terms &= ~(uint64_t)ATTN_TERM_BIDIRECTIONAL)
CHANGE(per_request, l->causal_per_request = 1)
CHANGE(window, l->has_window = 1; l->window_left = 99;
       c->terms &= ~(uint64_t)ATTN_TERM_SLIDING_WINDOW)
CHANGE(symmetric, l->has_window = 1; l->causal = 0; l->window_left = l->window_right = 9)
CHANGE(chunk, l->chunk_size = 100; c->features |= ATTN_FEATURE_BLOCK_TABLE_ROW)
CHANGE(chunk_row, l->chunk_size = 64)
CHANGE(chunk_lens, l->chunk_size = 64; l->device_seq_lens_only = 1;
       c->features |= ATTN_FEATURE_BLOCK_TABLE_ROW | ATTN_FEATURE_DEVICE_SEQ_LENS)
CHANGE(chunk_spans, l->chunk_size = 64; l->prefix_lm = 1; c->terms |= ATTN_TERM_PREFIX_LM;
       c->features |= ATTN_FEATURE_BLOCK_TABLE_ROW)
CHANGE(soft_cap, l->soft_cap = 50)
CHANGE(alibi, l->alibi = ATTN_ALIBI_LINEAR)
CHANGE(alibi_sqrt, l->alibi = ATTN_ALIBI_SQRT)
CHANGE(sinks, l->has_sinks = 1)
CHANGE(static_lse, l->sink_len = 4; c->features &= ~(uint64_t)ATTN_FEATURE_LSE)
CHANGE(static_contiguous, l->sink_len = 4; c->features &= ~(uint64_t)ATTN_FEATURE_CONTIGUOUS_KV)
CHANGE(static_merge, l->sink_len = 4; c->kernels &= ~(uint64_t)ATTN_KERNEL_MERGE_STATES)
CHANGE(static_alibi, l->sink_len = 4; l->alibi = ATTN_ALIBI_LINEAR; c->terms |= ATTN_TERM_ALIBI)
CHANGE(prefix_lm, l->prefix_lm = 1)
CHANGE(tree_bits, l->tree_mask = ATTN_TREE_BITS)
CHANGE(tree_bias, l->tree_mask = ATTN_TREE_BIAS)
CHANGE(lse, l->needs_lse = 1; c->features &= ~(uint64_t)ATTN_FEATURE_LSE)
CHANGE(graph, l->graph_level = ATTN_GRAPH_ALWAYS; c->graph_level = ATTN_GRAPH_UNIFORM_BATCH)
CHANGE(k_scale, l->kv_dtype = ATTN_KV_FP8_E4M3; l->k_scale_form = ATTN_SCALE_PER_HEAD;
       c->kv_dtypes |= 1u << ATTN_KV_FP8_E4M3;
       c->k_scale_forms = c->v_scale_forms = 1u << ATTN_SCALE_PER_TENSOR)
CHANGE(v_scale, l->kv_dtype = ATTN_KV_FP8_E4M3; l->v_scale_form = ATTN_SCALE_PER_HEAD;
       c->kv_dtypes |= 1u << ATTN_KV_FP8_E4M3;
       c->k_scale_forms = c->v_scale_forms = 1u << ATTN_SCALE_PER_TENSOR)
CHANGE(p_scale, l->p_scale_form = ATTN_SCALE_PER_TENSOR)
CHANGE(q_scale, l->q_scale_form = ATTN_SCALE_PER_TENSOR; l->q_dtype = ATTN_DTYPE_INT8;
       c->q_dtypes = 1u << ATTN_DTYPE_INT8)
CHANGE(q_dtype, l->q_scale_form = ATTN_SCALE_PER_TENSOR; l->q_dtype = ATTN_DTYPE_INT8;
       c->features |= ATTN_FEATURE_QUANTIZED_QUERY)
CHANGE(output, l->output_form = ATTN_OUTPUT_NVFP4)
CHANGE(invariant, l->batch_invariant = 1)
CHANGE(invariant_prefix, l->batch_invariant = 2; c->features |= ATTN_FEATURE_BATCH_INVARIANT)
CHANGE(rope, l->rope = 1)
CHANGE(qk_norm, l->qk_norm = 1)
CHANGE(table_row, l->needs_block_table_row = 1)
CHANGE(device_lens, l->device_seq_lens_only = 1)
CHANGE(fast_prefill, l->fast_prefill = 1)
CHANGE(q_heads, c->max_num_q_heads = 16)
CHANGE(group, c->max_group = 2)
CHANGE(speculative, l->num_speculative_tokens = 5; c->max_speculative_tokens = 4)
CHANGE(drafting, l->num_speculative_tokens = 3; l->parallel_drafting = 1;
       c->max_speculative_tokens = 4)
CHANGE(no_attend, c->kernels &= ~(uint64_t)ATTN_KERNEL_ATTEND)
CHANGE(no_write, c->kernels &= ~(uint64_t)ATTN_KERNEL_WRITE_KV)
CHANGE(no_pages, c->features &= ~(uint64_t)ATTN_FEATURE_PAGED_KV)
CHANGE(view_forms, l->needed_view_forms = ATTN_VIEW_NHD | ATTN_VIEW_PACKED;
       c->view_forms |= ATTN_VIEW_LATENT)
CHANGE(combination, l->has_window = 1; l->needs_lse = 1; c->refused = &together; c->num_refused = 1;
       c->refused_bytes = sizeof together)
CHANGE(sized_combination, c->refused = &sized; c->num_refused = 1; c->refused_bytes = sizeof sized)

struct refusal {
    change *change;
    const char *field, *asked, *supported;
};

static const struct refusal refusals[] = {
    {kind, "layer_kind", "decoder", "encoder"},
    {phase, "phase", "decode", "prefill"},
    {dtype, "dtype", "f32", "f16, bf16"},
    {kv_dtype, "kv_dtype", "nvfp4", "f16, bf16"},
    {head_size, "head_size", "72", "64, 128..256 in steps of 8, 192 with head_size_v 128"},
    {head_size_v, "head_size_v", "64 with head_size 192",
     "64, 128..256 in steps of 8, 192 with head_size_v 128"},
    {block_size, "block_size", "24", "16..128 in steps of 16"},
    {causal, "causal", "yes", "no"},
    {bidirectional, "causal", "no (bidirectional)", "no"},
    {per_request, "causal_per_request", "yes", "no"},
    {window, "sliding_window", "(99, 0)", "no"},
    {symmetric, "symmetric_window", "(9, 9)", "no"},
    {chunk, "chunk_size", "100", "as virtual requests: multiples of block_size"},
    {chunk_row, "chunk_size", "as virtual requests: block_table_row", "no"},
    {chunk_lens, "chunk_size", "with lengths on the device only",
     "as virtual requests: host lengths"},
    {chunk_spans, "chunk_size", "with spans, trees or causal flags per request",
     "as virtual requests: none of them"},
    {soft_cap, "soft_cap", "50", "no"},
    {alibi, "alibi", "linear", "no"},
    {alibi_sqrt, "alibi_sqrt", "yes", "no"},
    {sinks, "sinks", "yes", "no"},
    {static_lse, "static_sink", "attend(sink) + attend(rest) + merge: log-sum-exp", "no"},
    {static_contiguous, "static_sink", "attend(sink) + attend(rest) + merge: contiguous keys",
     "no"},
    {static_merge, "static_sink", "attend(sink) + attend(rest) + merge: merge_states", "no"},
    {static_alibi, "static_sink", "with ALiBi", "only fused"},
    {prefix_lm, "prefix_lm", "yes", "no"},
    {tree_bits, "tree_mask", "bits", "no"},
    {tree_bias, "tree_mask", "bias", "no"},
    {lse, "lse", "yes", "no"},
    {graph, "graph_level", "always", "uniform_batch"},
    {k_scale, "k_scale_form", "per_head", "per_tensor"},
    {v_scale, "v_scale_form", "per_head", "per_tensor"},
    {p_scale, "p_scale_form", "per_tensor", "none"},
    {q_scale, "q_scale_form", "per_tensor", "no"},
    {q_dtype, "q_dtype", "int8", "none"},
    {output, "output_form", "nvfp4", "plain"},
    {invariant, "batch_invariant", "yes", "no"},
    {invariant_prefix, "batch_invariant", "with prefix caching", "no"},
    {rope, "rope", "yes", "no"},
    {qk_norm, "qk_norm", "yes", "no"},
    {table_row, "block_table_row", "yes", "no"},
    {device_lens, "device_seq_lens_only", "yes", "no"},
    {fast_prefill, "fast_prefill", "yes", "no"},
    {q_heads, "num_q_heads", "32", "at most 16"},
    {group, "group (num_q_heads / num_kv_heads)", "4", "at most 2"},
    {speculative, "num_speculative_tokens", "5", "at most 4"},
    {drafting, "num_speculative_tokens", "6", "at most 4"},
    {no_attend, "kernel", "attend", "not in the backend's table"},
    {no_write, "kernel", "write_kv", "not in the backend's table"},
    {no_pages, "paged_kv", "yes", "no"},
    {view_forms, "needed_view_forms", "packed", "nhd, latent"},
    {combination, "combination", "windows have no lse", "not together"},
    {sized_combination, "combination", "128 in a decode", "not together"},
};

/* Resolves the layer and matches it in the decode phase. */
static struct match match_one(struct fixture *f, struct arena *arena, struct reasons *reasons,
                              const struct attn_layer_desc *desc)
{
    struct assignment_layer *layer = arena_alloc(arena, sizeof *layer);
    struct attn_error error = ATTN_ERROR_INIT;
    struct match match;
    *reasons = (struct reasons){arena, &f->runtime.host, NULL, 0, 0, false};
    if (layer_resolve(arena, desc, 0, NULL, &layer->layer, &error) != ATTN_OK) {
        fail_msg("%s", error.message);
    }
    match_backend(&f->backends[0].caps, &layer->layer, ATTN_PHASE_DECODE, NULL, 0, &match, reasons);
    assert_false(reasons->failed);
    return match;
}

static void test_each_reason(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct attn_layer_desc layer = fixture_layer("l");
        struct fixture f;
        struct arena arena;
        struct reasons reasons;
        fixture_init(&f);
        arena_init(&arena, &f.runtime.host);
        struct attn_backend_caps *caps = fixture_add(&f, "alpha", "", 1);
        match_one(&f, &arena, &reasons, &layer);
        assert_int_equal(reasons.count, 0);
        refusals[i].change(&layer, caps);
        match_one(&f, &arena, &reasons, &layer);
        if (reasons.count != 1) {
            fail_msg("%s %s gave %d reasons, the first %s", refusals[i].field, refusals[i].asked,
                     reasons.count, reasons.count > 0 ? reasons.items[0].field : "-");
        }
        assert_string_equal(reasons.items[0].field, refusals[i].field);
        assert_string_equal(reasons.items[0].asked, refusals[i].asked);
        assert_string_equal(reasons.items[0].supported, refusals[i].supported);
        arena_finish(&arena);
        fixture_finish(&f);
    }
}

/* A row refuses a layer that is of everything it says, and no other. */
static void test_rows_by_what_they_name(void **state)
{
    const struct attn_refused_combination others[] = {
        {.why = "", .dtypes = 1u << ATTN_DTYPE_F16},
        {.why = "", .layer_kinds = 1u << ATTN_LAYER_CROSS},
        {.why = "", .phases = 1u << ATTN_PHASE_PREFILL},
        {.why = "", .kv_dtypes = 1u << ATTN_KV_F32},
        {.why = "", .head_size = {64, 64, 1}},
        {.why = "", .head_size = {8, 256, 32}}};
    struct attn_layer_desc layer = fixture_layer("l");
    struct fixture f;
    struct arena arena;
    struct reasons reasons;
    (void)state;
    fixture_init(&f);
    arena_init(&arena, &f.runtime.host);
    struct attn_backend_caps *caps = fixture_add(&f, "alpha", "", 1);
    caps->num_refused = 1;
    caps->refused_bytes = sizeof *others;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        caps->refused = &others[i];
        match_one(&f, &arena, &reasons, &layer);
        assert_int_equal(reasons.count, 0);
    }
    arena_finish(&arena);
    fixture_finish(&f);
}

static void test_all_reasons_at_once(void **state)
{
    struct attn_layer_desc layer = fixture_layer("l");
    struct fixture f;
    struct arena arena;
    struct reasons reasons;
    (void)state;
    fixture_init(&f);
    arena_init(&arena, &f.runtime.host);
    fixture_add(&f, "alpha", "", 1);
    layer.head_size = 72;
    layer.soft_cap = 50;
    layer.has_sinks = 1;
    layer.block_size = 24;
    layer.alibi = ATTN_ALIBI_LINEAR;
    match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 5);
    arena_finish(&arena);
    fixture_finish(&f);
}

static void test_compositions(void **state)
{
    struct fixture f;
    struct arena arena;
    struct reasons reasons;
    struct attn_layer_desc layer = fixture_layer("l");
    struct match match;
    (void)state;
    fixture_init(&f);
    arena_init(&arena, &f.runtime.host);
    struct attn_backend_caps *caps = fixture_add(&f, "alpha", "", 1);
    match = match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(match.composed, ATTN_COMPOSE_CASCADE);
    assert_int_equal(match.graph_level, ATTN_GRAPH_ALWAYS);

    caps->features |= ATTN_FEATURE_BLOCK_TABLE_ROW;
    layer.chunk_size = 64;
    match = match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 0);
    assert_int_equal(match.composed, ATTN_COMPOSE_CHUNKED);
    assert_int_equal(match.graph_level, ATTN_GRAPH_NEVER);
    caps->terms |= ATTN_TERM_CHUNKED_LOCAL;
    match = match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(match.composed, 0);

    layer = fixture_layer("l");
    layer.sink_len = 4;
    match = match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 0);
    assert_int_equal(match.composed, ATTN_COMPOSE_STATIC_SINK);

    layer = fixture_layer("l");
    layer.kind = ATTN_LAYER_CROSS;
    layer.causal = 0;
    match = match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 0);
    assert_int_equal(match.composed, ATTN_COMPOSE_CROSS);

    layer.kind = ATTN_LAYER_ENCODER;
    match = match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 0);
    assert_int_equal(match.composed, ATTN_COMPOSE_ENCODER);
    assert_int_equal(match.block_size, 0);

    layer = fixture_layer("l");
    layer.output_form = ATTN_OUTPUT_FP8_STATIC;
    caps->kernels |= ATTN_KERNEL_QUANTIZE;
    match = match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 0);
    assert_int_equal(match.composed, ATTN_COMPOSE_OUTPUT_QUANT | ATTN_COMPOSE_CASCADE);
    arena_finish(&arena);
    fixture_finish(&f);
}

static bool has_reason(const struct reasons *reasons, const char *field)
{
    for (int32_t i = 0; i < reasons->count; i++) {
        if (strcmp(reasons->items[i].field, field) == 0) {
            return true;
        }
    }
    return false;
}

static void test_mla(void **state)
{
    struct attn_mla_desc mla = {.ext = {ATTN_EXT_MLA_DESC, 0, sizeof mla, NULL},
                                .kv_lora_rank = 512,
                                .qk_nope_head_dim = 128,
                                .qk_rope_head_dim = 64,
                                .v_head_dim = 128,
                                .absorb_in_core = 1};
    struct attn_mla_caps limits = {.ext = {ATTN_EXT_CAPS_MLA, 0, sizeof limits, NULL},
                                   .kv_lora_rank_max = 512,
                                   .qk_rope_head_dim_max = 64,
                                   .num_q_heads_multiple = 64,
                                   .max_query_len = 2};
    struct attn_layer_desc layer = fixture_layer("l");
    struct fixture f;
    struct arena arena;
    struct reasons reasons;
    (void)state;
    layer.kind = ATTN_LAYER_MLA;
    layer.next = &mla.ext;
    layer.num_q_heads = 128;
    layer.num_kv_heads = 1;
    layer.head_size = 576;
    fixture_init(&f);
    arena_init(&arena, &f.runtime.host);
    struct attn_backend_caps *caps = fixture_add(&f, "alpha", "", 1);
    match_one(&f, &arena, &reasons, &layer);
    assert_true(has_reason(&reasons, "layer_kind"));
    assert_true(has_reason(&reasons, "kernel"));
    caps->layer_kinds |= 1u << ATTN_LAYER_MLA;
    caps->kernels |= ATTN_KERNEL_ATTEND_MLA | ATTN_KERNEL_BATCHED_GEMM;
    match_one(&f, &arena, &reasons, &layer);
    assert_true(has_reason(&reasons, "attn_mla_caps"));
    caps->next = &limits.ext;
    struct match match = match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 0);
    assert_int_equal(match.composed, ATTN_COMPOSE_MLA);
    limits.kv_lora_rank_max = 256;
    limits.qk_rope_head_dim_max = 32;
    limits.num_q_heads_multiple = 100;
    layer.num_speculative_tokens = 2;
    caps->kernels &= ~(uint64_t)ATTN_KERNEL_BATCHED_GEMM;
    match_one(&f, &arena, &reasons, &layer);
    assert_true(has_reason(&reasons, "kv_lora_rank"));
    assert_true(has_reason(&reasons, "qk_rope_head_dim"));
    assert_true(has_reason(&reasons, "padded_num_q_heads"));
    assert_true(has_reason(&reasons, "max_query_len"));
    assert_true(has_reason(&reasons, "kernel"));
    assert_int_equal(reasons.count, 5);
    arena_finish(&arena);
    fixture_finish(&f);
}

static void test_gdn(void **state)
{
    struct attn_recurrent_desc gdn = {.ext = {ATTN_EXT_RECURRENT_DESC, 0, sizeof gdn, NULL},
                                      .num_k_heads = 8,
                                      .num_v_heads = 16,
                                      .head_size_k = 128,
                                      .head_size_v = 128,
                                      .conv_width = 4,
                                      .num_speculative_tokens = 3,
                                      .state_dtype = ATTN_DTYPE_F32};
    struct attn_recurrent_caps limits = {.ext = {ATTN_EXT_CAPS_RECURRENT, 0, sizeof limits, NULL},
                                         .head_size_k_max = 128,
                                         .head_size_v_max = 128,
                                         .conv_width_max = 4,
                                         .max_speculative_tokens = 3};
    struct attn_layer_desc layer = fixture_layer("l");
    struct fixture f;
    struct arena arena;
    struct reasons reasons;
    (void)state;
    layer.kind = ATTN_LAYER_RECURRENT;
    layer.next = &gdn.ext;
    layer.num_q_heads = layer.num_kv_heads = 8;
    fixture_init(&f);
    arena_init(&arena, &f.runtime.host);
    struct attn_backend_caps *caps = fixture_add(&f, "alpha", "", 1);
    match_one(&f, &arena, &reasons, &layer);
    assert_true(has_reason(&reasons, "layer_kind"));
    assert_true(has_reason(&reasons, "kernel"));
    caps->layer_kinds |= 1u << ATTN_LAYER_RECURRENT;
    caps->kernels |= ATTN_KERNEL_GATED_DELTA;
    caps->next = &limits.ext;
    match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 0);
    limits.head_size_k_max = limits.head_size_v_max = 64;
    limits.conv_width_max = 3;
    limits.max_speculative_tokens = 2;
    match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 4);
    arena_finish(&arena);
    fixture_finish(&f);
}

static attn_status no_collective(const struct attn_collective_args *args, struct attn_error *error)
{
    (void)args, (void)error;
    return ATTN_ERROR_DEVICE;
}

/* A cache spread over two ranks: each part that the exchange lacks is a reason of its own. */
static void test_context_parallel(void **state)
{
    const struct attn_collectives ranks = {.struct_size = sizeof ranks,
                                           .world_size = 2,
                                           .all_gather = no_collective,
                                           .all_to_all = no_collective,
                                           .reduce_scatter_f32 = no_collective};
    struct attn_context_parallel cp = {.ext = {ATTN_EXT_CONTEXT_PARALLEL, 0, sizeof cp, NULL},
                                       .decode = &ranks,
                                       .interleave = 16,
                                       .reduce = ATTN_CP_ALL_TO_ALL};
    struct attn_layer_desc layer = fixture_layer("l");
    struct fixture f;
    struct arena arena;
    struct reasons reasons;
    (void)state;
    layer.next = &cp.ext;
    fixture_init(&f);
    arena_init(&arena, &f.runtime.host);
    struct attn_backend_caps *caps = fixture_add(&f, "alpha", "", 1);
    caps->features |= ATTN_FEATURE_LSE | ATTN_FEATURE_CONTIGUOUS_KV;
    caps->terms |= ATTN_TERM_BIDIRECTIONAL | ATTN_TERM_SLIDING_WINDOW;
    caps->kernels |= ATTN_KERNEL_MERGE_STATES;
    match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 0);
    cp.reduce = ATTN_CP_ALL_GATHER_REDUCE_SCATTER; /* sums are of float32 */
    match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 1);
    cp.reduce = ATTN_CP_ALL_TO_ALL;
    layer.has_window = 1;
    layer.window_left = 9;
    caps->features &= ~(uint64_t)ATTN_FEATURE_LSE;
    caps->kernels &= ~(uint64_t)ATTN_KERNEL_MERGE_STATES;
    caps->max_num_q_heads = layer.num_q_heads; /* enough for one rank's */
    match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 4);
    for (int32_t i = 0; i < reasons.count; i++) {
        assert_string_equal(reasons.items[i].field, "context_parallel");
    }
    arena_finish(&arena);
    fixture_finish(&f);
}

/* Queries split over two ranks, whose slices share a row of the table: what a poor backend lacks,
 * and what no backend is asked for. */
static void test_split_queries(void **state)
{
    const struct attn_collectives ranks = {.struct_size = sizeof ranks,
                                           .world_size = 2,
                                           .all_gather = no_collective,
                                           .all_to_all = no_collective,
                                           .reduce_scatter_f32 = no_collective};
    struct attn_context_parallel cp = {.ext = {ATTN_EXT_CONTEXT_PARALLEL, 0, sizeof cp, NULL},
                                       .prefill = &ranks,
                                       .order = ATTN_CP_ZIGZAG};
    struct attn_layer_desc layer = fixture_layer("l");
    struct fixture f;
    struct arena arena;
    struct reasons reasons;
    (void)state;
    layer.next = &cp.ext;
    fixture_init(&f);
    arena_init(&arena, &f.runtime.host);
    struct attn_backend_caps *caps = fixture_add(&f, "alpha", "", 1);
    caps->terms |= ATTN_TERM_SLIDING_WINDOW;
    caps->features &=
        ~(uint64_t)(ATTN_FEATURE_LSE | ATTN_FEATURE_CONTIGUOUS_KV | ATTN_FEATURE_BLOCK_TABLE_ROW);
    caps->kernels = ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV;
    match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 1); /* block_table_row */
    cp.order = ATTN_CP_CONTIGUOUS;
    layer.has_window = 1; /* one request's slice is a request: windows are as ever */
    layer.window_left = 9;
    match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 0);
    layer.fast_prefill = layer.device_seq_lens_only = 1;
    caps->features |= ATTN_FEATURE_FAST_PREFILL | ATTN_FEATURE_DEVICE_SEQ_LENS;
    caps->kernels &= ~(uint64_t)ATTN_KERNEL_WRITE_KV;
    caps->features |= ATTN_FEATURE_FUSED_WRITE;
    match_one(&f, &arena, &reasons, &layer);
    assert_int_equal(reasons.count, 3);
    for (int32_t i = 0; i < reasons.count; i++) {
        assert_string_equal(reasons.items[i].field, "context_parallel");
    }
    arena_finish(&arena);
    fixture_finish(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_reason),
        cmocka_unit_test(test_rows_by_what_they_name),
        cmocka_unit_test(test_all_reasons_at_once),
        cmocka_unit_test(test_compositions),
        cmocka_unit_test(test_mla),
        cmocka_unit_test(test_gdn),
        cmocka_unit_test(test_context_parallel),
        cmocka_unit_test(test_split_queries),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
