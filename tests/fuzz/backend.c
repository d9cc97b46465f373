/* SPDX-License-Identifier: Apache-2.0 */
#include <attn/draft/mm_encoder.h>

#include "backend.h"
#include "support/client.h"
#include "util/counts.h"

#include <string.h>

#define ALL(count) ((UINT64_C(1) << (count)) - 1)

struct promised promised;

struct hostile hostile;

/* What a kernel's call comes to. */
static attn_status finish(struct attn_error *error)
{
    if (hostile.after == 0 || --hostile.after > 0 || hostile.status == ATTN_OK) {
        return ATTN_OK;
    }
    if (error != NULL) {
        memset(error->field, 'f', sizeof error->field);
        memset(error->message, 0xf5, sizeof error->message);
        error->status = ~hostile.status;
    }
    return hostile.status;
}

/* Kernels that do nothing. */
#define NO_OP(name, type)                                                                          \
    static attn_status name(const struct type *args, struct attn_error *error)                     \
    {                                                                                              \
        (void)args;                                                                                \
        return finish(error);                                                                      \
    }
NO_OP(attend_other,
      attn_attend_args) /* MLA and recurrent layers, whose tensors are in extensions */
NO_OP(merge_states, attn_merge_states_args)
NO_OP(gather_kv, attn_gather_kv_args)
NO_OP(batched_gemm, attn_batched_gemm_args)
NO_OP(quantize, attn_quantize_args)
NO_OP(amax, attn_amax_args)
NO_OP(copy_blocks_nowhere, attn_copy_blocks_args)
NO_OP(fill, attn_fill_args)
NO_OP(make_block_table, attn_block_table_args)
NO_OP(exchange, attn_collective_args)

/* [at least rows, heads, size] of numbers that lie in memory, rows of a head in one piece. */
static void check_tensor(const struct attn_tensor *t, int32_t dtype_bits, int64_t rows,
                         int64_t heads, int64_t size)
{
    FUZZ_CHECK(t != NULL && t->data != NULL && t->ndim == 3 && t->shape != NULL);
    FUZZ_CHECK(t->dtype.lanes == 1 && t->dtype.bits == dtype_bits);
    FUZZ_CHECK(t->shape[0] >= rows && t->shape[1] == heads && t->shape[2] == size);
    FUZZ_CHECK(t->strides == NULL || t->strides[2] == 1);
}

static attn_status attend(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_layer_desc *l = args->layer;
    const struct attn_batch *b = args->batch;
    const int64_t rows = b->num_actual_tokens;
    const int32_t bits = l->q_scale_form != ATTN_SCALE_NONE ? 8 : 32;
    if (rows > 0 && b->mode != ATTN_BATCH_IDLE && b->mode != ATTN_BATCH_PROFILE) {
        check_tensor(args->q, bits, rows, l->num_q_heads, l->head_size);
        check_tensor(args->out, 32, rows, l->num_q_heads, l->head_size_v);
        if (args->lse != NULL) {
            FUZZ_CHECK(args->lse->data != NULL && args->lse->ndim == 2);
            FUZZ_CHECK(args->lse->dtype.bits == 32 && args->lse->shape[0] == l->num_q_heads);
            FUZZ_CHECK(args->lse->shape[1] >= rows);
        }
        if (args->k_cache == NULL) {
            check_tensor(args->k, bits, 0, l->num_kv_heads, l->head_size);
            check_tensor(args->v, bits, 0, l->num_kv_heads, l->head_size_v);
        }
    }
    return finish(error);
}

/* Each slot lies in the cache, and no two tokens in one. */
static attn_status write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    const struct attn_layer_desc *l = args->layer;
    if (l->kind == ATTN_LAYER_DECODER || l->kind == ATTN_LAYER_CROSS) {
        check_tensor(args->k, 32, args->num_slots, l->num_kv_heads, l->head_size);
        check_tensor(args->v, 32, args->num_slots, l->num_kv_heads, l->head_size_v);
    }
    const int64_t slots = args->k_cache->num_blocks * args->k_cache->block_size;
    for (int64_t i = 0; i < args->num_slots; i++) {
        FUZZ_CHECK(args->slot_mapping[i] < slots);
        for (int64_t j = 0; j < i && args->slot_mapping[i] >= 0; j++) {
            FUZZ_CHECK(args->slot_mapping[i] != args->slot_mapping[j]);
        }
    }
    return finish(error);
}

static attn_status copy(const struct attn_copy_args *args, struct attn_error *error)
{
    memcpy(args->destination, args->source, args->bytes);
    return ATTN_OK;
}

static attn_status schedule_size(const struct attn_schedule_size_args *args,
                                 struct attn_schedule_size *size, struct attn_error *error)
{
    size->host_bytes = (size_t)args->limits->max_num_reqs * sizeof(int64_t);
    size->device_bytes = 64;
    if (hostile.bytes > size->host_bytes) {
        size->host_bytes = size->device_bytes = hostile.bytes;
    }
    return finish(error);
}

/* Blocks of the keys that request r has, as far as no window hides some of them. */
static void follow_table(const struct attn_attend_args *args, int32_t r, int64_t length)
{
    const struct attn_batch *b = args->batch;
    const int64_t row = b->block_table_row != NULL ? b->block_table_row[r] : r;
    const int64_t blocks = (length + args->k_cache->block_size - 1) / args->k_cache->block_size;
    for (int64_t i = 0; i < blocks; i++) {
        const int32_t block = b->block_table[row * b->block_table_stride + i];
        FUZZ_CHECK(block >= 0 && block < promised.num_blocks);
    }
}

/* Every number that a schedule is made of: counts within the limits, rows in order, lengths that
 * are lengths. */
static attn_status plan(const struct attn_attend_args *args, int32_t mode, struct attn_error *error)
{
    const struct attn_batch *b = args->batch;
    const struct attn_layer_desc *l = args->layer;
    const bool hides = l->has_window || l->chunk_size > 0;
    int64_t *lengths = args->schedule_host;
    promised.plans++;
    FUZZ_CHECK(b->num_reqs >= 0 && b->num_actual_tokens >= 0);
    FUZZ_CHECK(b->num_actual_tokens <= promised.max_num_tokens);
    for (int32_t i = 0; b->logits_indices != NULL && i < b->num_logits_indices; i++) {
        FUZZ_CHECK(b->logits_indices[i] >= 0 && b->logits_indices[i] < promised.max_num_tokens);
    }
    for (int32_t r = 0; r < b->num_reqs; r++) {
        if (b->spans != NULL && b->span_start_loc != NULL) {
            FUZZ_CHECK(b->span_start_loc[r] >= 0 && b->span_start_loc[r + 1] <= b->num_spans);
        }
        const int32_t first = b->query_start_loc_host[r], end = b->query_start_loc_host[r + 1];
        FUZZ_CHECK(first >= 0 && end >= first && end <= b->num_actual_tokens);
        FUZZ_CHECK(end - first <= b->max_query_len);
        if (!promised.host_only) {
            FUZZ_CHECK(b->query_start_loc[r] == first && b->query_start_loc[r + 1] == end);
        }
        int64_t length = end - first;
        if (args->k_cache != NULL && l->kind != ATTN_LAYER_RECURRENT && b->seq_lens_host != NULL) {
            length = b->seq_lens_host[r];
            FUZZ_CHECK(length >= 0 && length <= b->max_seq_len);
            FUZZ_CHECK(promised.host_only || b->seq_lens[r] == length);
            if (promised.num_blocks > 0 && !hides && end > first) {
                follow_table(args, r, length);
            }
        }
        if (r < promised.max_num_reqs) {
            lengths[r] = length; /* memory of the size that was asked for */
        }
    }
    return finish(error);
}

static attn_status create(const struct attn_create_args *args, attn_instance **instance,
                          const struct attn_kernels **kernels, struct attn_error *error)
{
    static const struct attn_kernels table = {.struct_size = sizeof table,
                                              .attend = attend,
                                              .write_kv = write_kv,
                                              .merge_states = merge_states,
                                              .rope_write_kv = write_kv,
                                              .attend_mla = attend_other,
                                              .attend_mla_sparse = attend_other,
                                              .gather_kv = gather_kv,
                                              .recurrent = attend_other,
                                              .batched_gemm = batched_gemm,
                                              .quantize = quantize,
                                              .amax = amax,
                                              .copy_blocks = copy_blocks_nowhere,
                                              .copy = copy,
                                              .fill = fill,
                                              .make_block_table = make_block_table,
                                              .schedule_size = schedule_size,
                                              .schedule = plan};
    static int32_t one;
    *instance = (attn_instance *)(void *)&one;
    *kernels = &table;
    return ATTN_OK;
}

static void destroy(attn_instance *instance)
{
}

static void declare(struct attn_backend_caps *caps)
{
    static const struct attn_head_size_range heads[] = {{{8, 1024, 8}, {8, 1024, 8}, 0}};
    static const struct attn_range blocks[] = {{1, 65536, 1}};
    static const struct attn_index_lists_caps lists = {
        .ext = {ATTN_EXT_DRAFT_INDEX_LISTS_CAPS, 0, sizeof lists, NULL},
        .attend = 1,
        .attend_mla_sparse = 1,
        .granularities = 1 + 4 + 64 + 128,
        .groups = ALL(NUM_LIST_GROUPS),
        .physical_slots = 1};
    static const struct attn_recurrent_caps gdn = {
        {ATTN_EXT_CAPS_RECURRENT, 0, sizeof gdn, &lists.ext}, 512, 512, 64, 1024};
    static const struct attn_mla_caps mla = {.ext = {ATTN_EXT_CAPS_MLA, 0, sizeof mla, &gdn.ext},
                                             .kv_lora_rank_max = 1024,
                                             .qk_rope_head_dim_max = 512};
    caps->next = &mla.ext;
    caps->layer_kinds = ALL(NUM_LAYER_KINDS);
    caps->dtypes = caps->q_dtypes = ALL(NUM_DTYPES);
    caps->kv_dtypes = ALL(NUM_KV_DTYPES);
    caps->view_forms = ALL(5);
    caps->layouts = ALL(NUM_KV_LAYOUTS);
    caps->k_scale_forms = caps->v_scale_forms = caps->p_scale_forms = ALL(4);
    caps->output_forms = ALL(NUM_OUTPUT_FORMS);
    caps->head_sizes = heads;
    caps->num_head_sizes = 1;
    caps->block_sizes = blocks;
    caps->num_block_sizes = 1;
}

void backend_init(struct fixture *fixture)
{
    fixture_init(fixture);
    fixture->plugins[0].table_copy.create = create;
    fixture->plugins[0].table_copy.destroy = destroy;
    fixture->plugins[0].table = &fixture->plugins[0].table_copy;
    struct attn_backend_caps *parts = fixture_add(fixture, "parts", "", 1);
    declare(parts);
    parts->kernels = ALL(NUM_KERNELS);
    parts->layer_kinds = 1u << ATTN_LAYER_DECODER | 1u << ATTN_LAYER_MLA;
    parts->output_forms = 1u << ATTN_OUTPUT_PLAIN;
    parts->features &= ~(uint64_t)ATTN_FEATURE_MIXED_BATCH;
    struct attn_backend_caps *whole = fixture_add(fixture, "whole", "", 9);
    declare(whole);
    whole->kernels = ALL(NUM_KERNELS) & ~ATTN_KERNEL_GATHER_KV;
    whole->terms = ALL(NUM_TERMS);
    whole->features = ALL(NUM_FEATURES);
}

void sample_layer(struct sampled *s, int32_t sample)
{
    static const int32_t kinds[SAMPLE_COUNT] = {
        [SAMPLE_CROSS] = ATTN_LAYER_CROSS,         [SAMPLE_ENCODER] = ATTN_LAYER_ENCODER,
        [SAMPLE_STATIC_SINK] = ATTN_LAYER_DECODER, [SAMPLE_MLA] = ATTN_LAYER_MLA,
        [SAMPLE_MLA_SPARSE] = ATTN_LAYER_MLA,      [SAMPLE_GDN] = ATTN_LAYER_RECURRENT,
        [SAMPLE_MM_ENCODER] = ATTN_LAYER_ENCODER};
    const bool mla = sample == SAMPLE_MLA || sample == SAMPLE_MLA_SPARSE;
    *s = (struct sampled){.desc = fixture_layer("layers.0")};
    s->desc.kind = kinds[sample];
    s->desc.encoder = sample == SAMPLE_MM_ENCODER ? ATTN_ENCODER_MULTIMODAL : 0;
    s->desc.dtype = ATTN_DTYPE_F32;
    s->desc.num_q_heads = 2;
    s->desc.num_kv_heads = mla || sample == SAMPLE_PLAIN ? 1 : 2;
    s->desc.head_size = mla ? 40 : 64;
    s->desc.head_size_v = mla ? 16 : 0;
    s->desc.causal =
        sample != SAMPLE_CROSS && sample != SAMPLE_ENCODER && sample != SAMPLE_MM_ENCODER;
    s->desc.has_window = sample == SAMPLE_SLIDING;
    s->desc.window_left = sample == SAMPLE_SLIDING ? 19 : 0;
    s->desc.chunk_size = sample == SAMPLE_CHUNKED ? 16 : 0;
    s->desc.sink_len = sample == SAMPLE_STATIC_SINK ? 4 : 0;
    s->desc.num_speculative_tokens = sample == SAMPLE_SPECULATIVE ? 3 : 0;
    s->mla = EXTENSION(attn_mla_desc, ATTN_EXT_MLA_DESC, NULL, .kv_lora_rank = 32,
                       .qk_nope_head_dim = 16, .qk_rope_head_dim = 8, .v_head_dim = 16,
                       .topk = sample == SAMPLE_MLA_SPARSE ? 8 : 0, .absorb_in_core = 1,
                       .weight_dtype = ATTN_DTYPE_F32, .context_workspace_tokens = 48);
    s->gdn = EXTENSION(attn_recurrent_desc, ATTN_EXT_RECURRENT_DESC, NULL, .num_k_heads = 2,
                       .num_v_heads = 2, .head_size_k = 64, .head_size_v = 64, .conv_width = 4,
                       .num_speculative_tokens = 2, .state_dtype = ATTN_DTYPE_F32);
    s->ranks = SIZED(attn_collectives, .rank = 1, .world_size = 3, .all_gather = exchange,
                     .all_to_all = exchange, .reduce_scatter_f32 = exchange,
                     .all_reduce_max_f32 = exchange);
    s->cp = EXTENSION(attn_context_parallel, ATTN_EXT_CONTEXT_PARALLEL, NULL, .decode = &s->ranks,
                      .interleave = 2, .reduce = ATTN_CP_ALL_TO_ALL);
    s->mm_quant = EXTENSION(attn_mm_encoder_quant, ATTN_EXT_DRAFT_MM_ENCODER, NULL, .fp8 = 1);
    s->lists = EXTENSION(attn_index_lists, ATTN_EXT_DRAFT_INDEX_LISTS, NULL, .max_entries = 8,
                         .granularity = 4, .groups = ATTN_LISTS_PER_Q_HEAD, .has_lengths = 1);
    s->desc.next = mla                           ? &s->mla.ext
                   : sample == SAMPLE_LISTS      ? &s->lists.ext
                   : sample == SAMPLE_GDN        ? &s->gdn.ext
                   : sample == SAMPLE_PARALLEL   ? &s->cp.ext
                   : sample == SAMPLE_MM_ENCODER ? &s->mm_quant.ext
                                                 : NULL;
}
