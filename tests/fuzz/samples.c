/* SPDX-License-Identifier: Apache-2.0 */
/* One layer of each sort, with everything that hangs on it. */
#include "backend.h"

#include "bind/bound.h"
#include "support/client.h"

/* Its kind, and the chain of the extensions that it has. */
static void set_sort(struct sampled *s, int32_t sample)
{
    const struct {
        int32_t kind;
        struct attn_ext *chain[5];
    } sorts[SAMPLE_COUNT] = {
        [SAMPLE_CROSS] = {ATTN_LAYER_CROSS},
        [SAMPLE_ENCODER] = {ATTN_LAYER_ENCODER},
        [SAMPLE_MLA] = {ATTN_LAYER_MLA, {&s->mla.ext}},
        [SAMPLE_MLA_SPARSE] = {ATTN_LAYER_MLA, {&s->mla.ext}},
        [SAMPLE_GDN] = {ATTN_LAYER_RECURRENT, {&s->gdn.ext}},
        [SAMPLE_PARALLEL] = {ATTN_LAYER_DECODER, {&s->cp.ext}},
        [SAMPLE_MM_ENCODER] = {ATTN_LAYER_ENCODER, {&s->mm_quant.ext}},
        [SAMPLE_LISTS] = {ATTN_LAYER_DECODER, {&s->lists.ext}},
        [SAMPLE_OUTPUT_ROPE] = {ATTN_LAYER_DECODER, {&s->output_rope.ext}},
        [SAMPLE_RULE] = {ATTN_LAYER_RECURRENT,
                         {&s->gdn.ext, &s->rule.ext, &s->norm.ext, &s->rounding.ext}},
        [SAMPLE_RING] = {ATTN_LAYER_RECURRENT, {&s->gdn.ext, &s->caches.ext}},
        [SAMPLE_INDEXER] = {ATTN_LAYER_INDEXER, {&s->indexer.ext, &s->index_write.ext}},
        [SAMPLE_COMPRESSOR] = {ATTN_LAYER_DRAFT_COMPRESSOR, {&s->compressor.ext}},
        [SAMPLE_COMPRESSED] = {ATTN_LAYER_MLA, {&s->mla.ext, &s->compressed.ext, &s->caches.ext}}};
    struct attn_ext *const *chain = sorts[sample].chain;
    s->desc.kind = sorts[sample].kind;
    s->desc.next = chain[0];
    for (int32_t i = 0; chain[i] != NULL; i++) {
        chain[i]->next = chain[i + 1];
    }
}

/* Extensions that come after the others. */
static void add_drafts(struct sampled *s, bool ring)
{
    s->rule = EXTENSION(attn_recurrent_rule, ATTN_EXT_DRAFT_RECURRENT_RULE, NULL,
                        .gate_per_channel = 1, .dt_max = 2);
    s->norm = EXTENSION(attn_recurrent_norm, ATTN_EXT_DRAFT_RECURRENT_NORM, NULL, .epsilon = 1e-6f);
    s->rounding = EXTENSION(attn_recurrent_rounding, ATTN_EXT_DRAFT_RECURRENT_ROUNDING, NULL,
                            .seed = 1, .philox_rounds = 7);
    s->indexer = EXTENSION(attn_indexer_desc, ATTN_EXT_INDEXER_DESC, NULL, .topk = 8,
                           .num_groups = 2, .activation = ATTN_INDEXER_RELU, .has_weights = 1,
                           .tokens_per_row = 4, .first_entries = 1, .tail = 1, .forced_on_top = 1);
    s->index_write =
        EXTENSION(attn_index_write, ATTN_EXT_DRAFT_INDEX_WRITE, NULL, .norm = ATTN_KEY_NORM_LAYER,
                  .rope = ATTN_ROPE_NEOX, .rotary_dim = 16, .rotary_first = 4, .hadamard = 1);
    s->compressor =
        EXTENSION(attn_compressor_desc, ATTN_EXT_DRAFT_COMPRESSOR_DESC, NULL, .tokens_per_row = 4,
                  .overlaps = 1, .rope = ATTN_ROPE_NEOX, .rotary_dim = 16);
    s->compressed = EXTENSION(attn_compressed_rows, ATTN_EXT_DRAFT_COMPRESSED_ROWS, NULL, 0);
    s->output_rope = EXTENSION(attn_output_rope, ATTN_EXT_DRAFT_OUTPUT_ROPE, NULL,
                               .form = ATTN_ROPE_NEOX, .rotary_dim = 32);
    /* a ring's row is k [64], u [64], a gate, rounded up */
    s->cache = (struct attn_cache_desc){.role = ring ? ATTN_CACHE_REPLAY : ATTN_CACHE_COMPRESSED,
                                        .table = !ring,
                                        .kv_dtype = ATTN_KV_F32,
                                        .num_heads = ring ? 2 : 1,
                                        .head_size = ring ? 136 : 32,
                                        .block_size = ring ? 8 : 16,
                                        .tokens_per_row = ring ? 1 : 4};
    s->caches = EXTENSION(attn_layer_caches, ATTN_EXT_LAYER_CACHES, NULL, .caches = &s->cache,
                          .num_caches = 1, .cache_stride = sizeof s->cache);
}

void sample_layer(struct sampled *s, int32_t sample)
{
    const bool mla = sample == SAMPLE_MLA || sample == SAMPLE_MLA_SPARSE;
    const bool compressed = sample == SAMPLE_COMPRESSED;
    *s = (struct sampled){.desc = fixture_layer("layers.0")};
    s->desc.encoder = sample == SAMPLE_MM_ENCODER ? ATTN_ENCODER_MULTIMODAL : 0;
    s->desc.dtype = ATTN_DTYPE_F32;
    s->desc.num_q_heads = 2;
    s->desc.num_kv_heads = mla || compressed || sample == SAMPLE_PLAIN ? 1 : 2;
    s->desc.head_size = mla ? 40 : compressed ? 32 : 64;
    s->desc.head_size_v = mla || compressed ? 16 : 0;
    s->desc.causal =
        sample != SAMPLE_CROSS && sample != SAMPLE_ENCODER && sample != SAMPLE_MM_ENCODER;
    s->desc.has_window = sample == SAMPLE_SLIDING || compressed;
    s->desc.window_left = s->desc.has_window ? 19 : 0;
    s->desc.chunk_size = sample == SAMPLE_CHUNKED ? 16 : 0;
    s->desc.sink_len = sample == SAMPLE_STATIC_SINK ? 4 : 0;
    s->desc.num_speculative_tokens = sample == SAMPLE_SPECULATIVE ? 3 : 0;
    s->desc.rope = sample == SAMPLE_ROPE ? ATTN_ROPE_NEOX : ATTN_ROPE_NONE;
    s->desc.qk_norm = sample == SAMPLE_ROPE;
    s->desc.output_form = sample == SAMPLE_QUANTIZED ? ATTN_OUTPUT_FP8_GROUP_64 : 0;
    if (sample == SAMPLE_INDEXER || sample == SAMPLE_COMPRESSOR) {
        s->desc.num_q_heads = 4;
        s->desc.num_kv_heads = sample == SAMPLE_INDEXER ? 1 : 4;
        s->desc.head_size = 32;
    }
    s->mla =
        EXTENSION(attn_mla_desc, ATTN_EXT_MLA_DESC, NULL, .kv_lora_rank = 32,
                  .qk_nope_head_dim = 16, .qk_rope_head_dim = compressed ? 0 : 8, .v_head_dim = 16,
                  .topk = sample == SAMPLE_MLA_SPARSE ? 8 : 0, .absorb_in_core = !compressed,
                  .weight_dtype = ATTN_DTYPE_F32, .context_workspace_tokens = 48);
    s->gdn = EXTENSION(attn_recurrent_desc, ATTN_EXT_RECURRENT_DESC, NULL, .num_k_heads = 2,
                       .num_v_heads = 2, .head_size_k = 64, .head_size_v = 64, .conv_width = 4,
                       .num_speculative_tokens = 2,
                       .state_dtype = sample == SAMPLE_RULE ? ATTN_DTYPE_BF16 : ATTN_DTYPE_F32,
                       .has_initial_slots = sample == SAMPLE_RULE,
                       .checkpoint_interval = sample == SAMPLE_RULE ? 4 : 0);
    s->ranks = SIZED(attn_collectives, .rank = 1, .world_size = 3, .all_gather = backend_exchange,
                     .all_to_all = backend_exchange, .reduce_scatter_f32 = backend_exchange,
                     .all_reduce_max_f32 = backend_exchange);
    s->cp = EXTENSION(attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL, NULL, .decode = &s->ranks,
                      .interleave = 2, .reduce = ATTN_CP_ALL_TO_ALL);
    s->mm_quant = EXTENSION(attn_mm_encoder_quant, ATTN_EXT_DRAFT_MM_ENCODER, NULL, .fp8 = 1);
    s->lists = EXTENSION(attn_index_lists, ATTN_EXT_DRAFT_INDEX_LISTS, NULL, .max_entries = 8,
                         .granularity = 4, .groups = ATTN_LISTS_PER_Q_HEAD, .has_lengths = 1);
    add_drafts(s, sample == SAMPLE_RING);
    set_sort(s, sample);
}

bool sample_has(const struct sampled *s, const struct attn_ext *ext)
{
    const struct attn_ext *at = s->desc.next;
    while (at != NULL && at != ext) {
        at = at->next;
    }
    return at != NULL;
}

/* The caches are addresses: nothing reads or writes them here. */
static uint8_t cache[1 << 20] __attribute__((aligned(256)));

static void bind_memory(attn_layer *layer, struct attn_error *error)
{
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    if (layer_num_caches(layer) > 0) {
        FUZZ_CHECK(layer_cache_spec(layer, 0, &spec, error) == ATTN_OK);
    }
    if (spec.kind == ATTN_KV_SPEC_STATE || layer->num_further > 0) {
        void *const further[] = {cache};
        const int64_t blocks = spec.kind == ATTN_KV_SPEC_STATE ? NUM_SLOTS : NUM_BLOCKS;
        const struct attn_cache_memory memory =
            SIZED(attn_cache_memory, .base = cache, .num_blocks = blocks, .further = further,
                  .further_num_blocks = &blocks, .num_further = layer->num_further);
        FUZZ_CHECK(spec.padded_page_bytes * blocks <= (int64_t)sizeof cache);
        FUZZ_CHECK(layer_bind_memory(layer, &memory, error) == ATTN_OK);
    } else if (spec.kind != ATTN_KV_SPEC_NONE) {
        FUZZ_CHECK(spec.padded_page_bytes * NUM_BLOCKS <= (int64_t)sizeof cache);
        FUZZ_CHECK(layer_kv_views(layer, cache, NUM_BLOCKS, &k, &v, error) == ATTN_OK);
        const struct attn_kv_view *const views[] = {&k, &v};
        FUZZ_CHECK(layer_bind_caches(layer, views, layer->num_own, error) == ATTN_OK);
    }
}

static struct attn_tensor addressed(int64_t *shape, int32_t ndim)
{
    return (struct attn_tensor){
        cache, {ATTN_DEVICE_CPU, 0}, ndim, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
}

static void bind_params(const struct sampled *s, attn_layer *layer, struct attn_error *error)
{
    const struct attn_layer_desc *l = &s->desc;
    const struct attn_mla_desc *m = &s->mla;
    const struct attn_recurrent_desc *g = &s->gdn;
    int64_t sink_shape[] = {l->sink_len, l->num_kv_heads, l->head_size};
    int64_t proj_shape[] = {l->num_q_heads * (m->qk_nope_head_dim + m->v_head_dim),
                            m->kv_lora_rank};
    int64_t conv_shape[] = {2 * g->num_k_heads * g->head_size_k + g->num_v_heads * g->head_size_v,
                            g->conv_width};
    int64_t scales_shape[] = {g->head_size_v};
    const struct attn_tensor sink = addressed(sink_shape, 3), proj = addressed(proj_shape, 2),
                             conv = addressed(conv_shape, 2), scales = addressed(scales_shape, 1);
    const struct attn_mla_weights mla =
        EXTENSION(attn_mla_weights, ATTN_EXT_MLA_WEIGHTS, NULL, .kv_b_proj = &proj);
    const struct attn_recurrent_norm_weight norm = EXTENSION(
        attn_recurrent_norm_weight, ATTN_EXT_DRAFT_RECURRENT_NORM_WEIGHT, NULL, .weight = &scales);
    const struct attn_recurrent_weights gdn =
        EXTENSION(attn_recurrent_weights, ATTN_EXT_RECURRENT_WEIGHTS,
                  sample_has(s, &s->norm.ext) ? &norm.ext : NULL, (const float *)cache,
                  (const float *)cache, &conv, NULL);
    const struct attn_mm_encoder_state encoder = EXTENSION(
        attn_mm_encoder_state, ATTN_EXT_DRAFT_MM_ENCODER_STATE, NULL, NULL, (float *)(void *)cache);
    const struct attn_layer_params params =
        SIZED(attn_layer_params,
              .next = l->kind == ATTN_LAYER_RECURRENT                  ? &gdn.ext
                      : sample_has(s, &s->mm_quant.ext)                ? &encoder.ext
                      : m->absorb_in_core && l->kind == ATTN_LAYER_MLA ? &mla.ext
                                                                       : NULL,
              .sink_k = l->sink_len > 0 ? &sink : NULL, .sink_v = l->sink_len > 0 ? &sink : NULL);
    const attn_status status = layer_bind_params(layer, &params, error);
    fuzz_check_error(status, error);
    FUZZ_CHECK(status == ATTN_OK);
}

void sample_bind(const struct sampled *s, attn_layer *layer, struct attn_error *error)
{
    bind_params(s, layer, error);
    bind_memory(layer, error);
}
