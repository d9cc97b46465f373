/* SPDX-License-Identifier: Apache-2.0 */
#include <attn/draft/mm_encoder.h>

#include "backend.h"
#include "util/counts.h"
#include "util/structs.h"
#include "util/tensor.h"

#include <float.h>
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

BACKEND_KERNEL(gather_kv, attn_gather_kv_args, finish(error))
BACKEND_KERNEL(copy_blocks_nowhere, attn_copy_blocks_args, finish(error))
BACKEND_KERNEL(make_block_table, attn_block_table_args, finish(error))

attn_status backend_exchange(const struct attn_collective_args *args, struct attn_error *error)
{
    return finish(error);
}

/* The first and the last element of each row, of each head of it, of rows `first` to `end` - 1:
 * what a kernel would read or write of them lies between. */
static void touch(const struct attn_tensor *t, int64_t first, int64_t end, bool writes)
{
    const int64_t heads = t->ndim > 2 ? t->shape[1] : 1;
    const int64_t last = t->ndim > 1 ? t->shape[t->ndim - 1] - 1 : 0;
    const int64_t bytes = t->dtype.bits / 8, dim = tensor_stride(t, t->ndim - 1);
    for (int64_t i = first * heads; i < end * heads && last >= 0; i++) {
        const int64_t row = i / heads * tensor_stride(t, 0);
        const int64_t head = t->ndim > 2 ? i % heads * tensor_stride(t, 1) : 0;
        for (int32_t e = 0; e < 2; e++) {
            volatile uint8_t *at = tensor_data(t) + (row + head + e * last * dim) * bytes;
            at[0] = writes ? 0 : at[0];
            at[bytes - 1] = writes ? 0 : at[bytes - 1];
        }
    }
}

/* [at least `end`, heads, size] of numbers that lie in memory, rows of a head in one piece; heads
 * 0: [at least `end`, size]. */
static void check_tensor(const struct attn_tensor *t, int32_t dtype_bits, int64_t first,
                         int64_t end, int64_t heads, int64_t size, bool writes)
{
    const int32_t ndim = heads > 0 ? 3 : 2;
    FUZZ_CHECK(t != NULL && t->data != NULL && t->ndim == ndim && t->shape != NULL);
    FUZZ_CHECK(t->dtype.lanes == 1 && t->dtype.bits == dtype_bits);
    FUZZ_CHECK(t->shape[0] >= end && t->shape[ndim - 1] == size);
    FUZZ_CHECK((heads == 0 || t->shape[1] == heads) &&
               (t->strides == NULL || t->strides[ndim - 1] == 1));
    touch(t, first, end, writes);
}

/* Numbers that may be strided, in so many rows; NULL: not brought. */
static void check_numbers(const struct attn_tensor *t, int64_t rows)
{
    if (t != NULL) {
        FUZZ_CHECK(t->data != NULL && t->shape != NULL && t->shape[0] >= rows);
        touch(t, 0, rows, false);
    }
}

/* Rows of the batch, as the device says. */
struct span {
    int64_t first, end;
};
static struct span rows_of(const struct attn_batch *b)
{
    return (struct span){b->query_start_loc[0], b->query_start_loc[b->num_reqs]};
}

static void check_lse(const struct attn_attend_args *args, const struct span *at)
{
    const struct attn_tensor *lse = args->lse;
    if (lse != NULL) {
        FUZZ_CHECK(lse->data != NULL && lse->ndim == 2 && lse->dtype.bits == 32);
        FUZZ_CHECK(lse->shape[0] == args->layer->num_q_heads && lse->shape[1] >= at->end);
        touch(lse, 0, lse->shape[0], true);
    }
}

static void check_indexer(const struct attn_attend_args *args, const struct span *at)
{
    const struct attn_indexer_desc *x = ext_find(args->layer->next, ATTN_EXT_INDEXER_DESC);
    const struct attn_io_indexer *io = ext_find(args->next, ATTN_EXT_IO_INDEXER);
    FUZZ_CHECK(x != NULL && io != NULL && x->has_weights && x->forced_on_top);
    check_tensor(args->q, 32, at->first, at->end, args->layer->num_q_heads, args->layer->head_size,
                 false);
    check_tensor(args->out, 32, at->first, at->end, x->num_groups,
                 x->topk + x->first_entries + x->last_entries + x->tail, true);
    check_numbers(io->weights, at->end);
    FUZZ_CHECK(io->weights->shape[1] == args->layer->num_q_heads);
    for (int64_t i = 0; io->lengths != NULL && i < at->end * x->num_groups; i++) {
        io->lengths[i] = 0;
    }
}

static void check_compressor(const struct attn_attend_args *args, const struct span *at)
{
    const struct attn_compressor_desc *x =
        ext_find(args->layer->next, ATTN_EXT_DRAFT_COMPRESSOR_DESC);
    const struct attn_io_compressor *io = ext_find(args->next, ATTN_EXT_DRAFT_IO_COMPRESSOR);
    FUZZ_CHECK(x != NULL && io != NULL && io->norm_eps >= 0 && io->norm_eps <= FLT_MAX);
    FUZZ_CHECK(args->q == NULL && args->v_cache == NULL);
    check_tensor(args->out, 32, at->first, at->end, 1, args->layer->head_size, true);
    check_numbers(io->position_bias, x->tokens_per_row);
    check_numbers(io->norm_weight, args->layer->head_size);
    check_numbers(io->cos_sin, x->rope != ATTN_ROPE_NONE ? args->batch->max_seq_len : 0);
}

static attn_status attend(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_layer_desc *l = args->layer;
    const struct attn_batch *b = args->batch;
    const int32_t bits = l->q_scale_form != ATTN_SCALE_NONE ? 8 : 32;
    FUZZ_CHECK(b->mode != ATTN_BATCH_IDLE && b->mode != ATTN_BATCH_PROFILE);
    const struct span at = rows_of(b);
    if (at.end > at.first && l->kind == ATTN_LAYER_INDEXER) {
        check_indexer(args, &at);
    } else if (at.end > at.first && l->kind == ATTN_LAYER_DRAFT_COMPRESSOR) {
        check_compressor(args, &at);
    } else if (at.end > at.first) {
        const struct attn_io_output_quant *codes = ext_find(args->next, ATTN_EXT_IO_OUTPUT_QUANT);
        const bool quantized = l->output_form != ATTN_OUTPUT_PLAIN;
        check_tensor(args->q, bits, at.first, at.end, l->num_q_heads, l->head_size, false);
        check_tensor(args->out, quantized ? 8 : 32, at.first, at.end, l->num_q_heads,
                     l->head_size_v, true);
        check_lse(args, &at);
        FUZZ_CHECK(!quantized || codes != NULL);
        if (quantized) {
            FUZZ_CHECK(codes->block_scales->shape[1] == l->num_q_heads * l->head_size_v / 64);
            touch(codes->block_scales, at.first, at.end, true);
        }
        if (args->k_cache == NULL) {
            check_tensor(args->k, bits, 0, 0, l->num_kv_heads, l->head_size, false);
            check_tensor(args->v, bits, 0, 0, l->num_kv_heads, l->head_size_v, false);
        }
    }
    return finish(error);
}

static attn_status attend_mla(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_layer_desc *l = args->layer;
    const struct attn_mla_desc *m = ext_find(l->next, ATTN_EXT_MLA_DESC);
    const struct attn_io_mla *io = ext_find(args->next, ATTN_EXT_IO_MLA);
    const struct span at = rows_of(args->batch);
    FUZZ_CHECK(m != NULL && io != NULL && args->q == NULL);
    if (at.end > at.first) {
        check_tensor(io->q_nope, 32, at.first, at.end, l->num_q_heads, m->kv_lora_rank, false);
        if (m->qk_rope_head_dim > 0) {
            check_tensor(io->q_pe, 32, at.first, at.end, l->num_q_heads, m->qk_rope_head_dim,
                         false);
        }
        check_tensor(args->out, 32, at.first, at.end, l->num_q_heads, m->kv_lora_rank, true);
        check_lse(args, &at);
        for (int64_t t = at.first; m->topk > 0 && t < at.end; t++) {
            volatile int32_t entry = io->topk_indices[t * io->topk_stride + m->topk - 1];
            (void)entry;
        }
    }
    return finish(error);
}

static attn_status recurrent(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_recurrent_desc *g = ext_find(args->layer->next, ATTN_EXT_RECURRENT_DESC);
    const struct attn_io_recurrent *io = ext_find(args->next, ATTN_EXT_IO_RECURRENT);
    const struct attn_io_recurrent_gate *gate =
        ext_find(args->next, ATTN_EXT_DRAFT_IO_RECURRENT_GATE);
    const struct attn_batch_recurrent *states =
        ext_find(args->batch->next, ATTN_EXT_BATCH_RECURRENT);
    const struct span at = rows_of(args->batch);
    FUZZ_CHECK(g != NULL && io != NULL && states != NULL && states->state_slots != NULL);
    if (at.end > at.first) {
        check_numbers(io->mixed_qkv, at.end);
        check_numbers(io->a, at.end);
        check_numbers(io->b, at.end);
        check_tensor(args->out, 32, at.first, at.end, g->num_v_heads, g->head_size_v, true);
        if (ext_find(args->layer->next, ATTN_EXT_DRAFT_RECURRENT_NORM) != NULL) {
            FUZZ_CHECK(gate != NULL);
            check_numbers(gate->gate, at.end);
        }
    }
    for (int32_t r = 0; promised.slots && r < args->batch->num_reqs; r++) {
        volatile int32_t slot = states->state_slots[r * states->state_slots_stride];
        slot = states->initial_slots != NULL
                   ? states->initial_slots[r * states->initial_slots_stride]
                   : slot;
    }
    return finish(error);
}

/* What a write of keys brings besides them. */
static void check_written(const struct attn_write_kv_args *args)
{
    const struct attn_layer_desc *l = args->layer;
    const struct attn_io_mla *mla = ext_find(args->next, ATTN_EXT_IO_MLA);
    const struct attn_io_index_write *index = ext_find(args->next, ATTN_EXT_DRAFT_IO_INDEX_WRITE);
    const struct attn_io_rope *rope = ext_find(args->next, ATTN_EXT_IO_ROPE);
    if (l->kind == ATTN_LAYER_MLA && args->k == NULL) {
        FUZZ_CHECK(mla != NULL);
        check_tensor(mla->kv_c, 32, 0, args->num_slots, 0, mla->kv_c->shape[1], false);
        check_numbers(mla->k_pe, mla->k_pe != NULL ? args->num_slots : 0);
    } else {
        check_tensor(args->k, 32, 0, args->num_slots, l->num_kv_heads, l->head_size, false);
    }
    if (l->kind == ATTN_LAYER_DECODER || l->kind == ATTN_LAYER_CROSS) {
        check_tensor(args->v, 32, 0, args->num_slots, l->num_kv_heads, l->head_size_v, false);
    }
    if (l->kind == ATTN_LAYER_INDEXER && args->num_slots > 0) {
        FUZZ_CHECK(index != NULL && index->norm_eps >= 0 && index->norm_eps <= FLT_MAX);
        check_numbers(index->norm_weight, l->head_size);
        check_numbers(index->norm_bias, l->head_size);
        check_numbers(index->cos_sin, index->cos_sin->shape[0]);
        volatile int64_t position = index->positions[args->num_slots - 1];
        (void)position;
    }
    if (args->q != NULL && args->num_slots > 0) {
        FUZZ_CHECK(rope != NULL && rope->norm_eps >= 0 && rope->norm_eps <= FLT_MAX);
        check_tensor(args->q, 32, 0, args->num_slots, l->num_q_heads, l->head_size, true);
        check_numbers(rope->q_norm_weight, l->head_size);
        check_numbers(rope->k_norm_weight, l->head_size);
        volatile int64_t position = rope->positions[args->num_slots - 1];
        (void)position;
    }
}

/* Each slot lies in the cache, and no two tokens in one. */
static attn_status write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    check_written(args);
    const int64_t slots = args->k_cache->num_blocks * args->k_cache->block_size;
    for (int64_t i = 0; i < args->num_slots && promised.slots; i++) {
        FUZZ_CHECK(args->layer->kind == ATTN_LAYER_INDEXER || args->slot_mapping[i] < slots);
        for (int64_t j = 0; j < i && args->slot_mapping[i] >= 0; j++) {
            FUZZ_CHECK(args->slot_mapping[i] != args->slot_mapping[j]);
        }
    }
    return finish(error);
}

static attn_status merge_states(const struct attn_merge_states_args *args, struct attn_error *error)
{
    const int64_t first = args->first_row, end = first + args->num_rows;
    FUZZ_CHECK(first >= 0 && args->num_rows >= 0 && args->out->shape[0] >= end);
    FUZZ_CHECK(args->num_rows_with_prefix >= 0 && args->num_rows_with_prefix <= args->num_rows);
    touch(args->suffix_out, first, end, false);
    touch(args->prefix_out, first, first + args->num_rows_with_prefix, false);
    touch(args->out, first, end, true);
    return finish(error);
}

static attn_status batched_gemm(const struct attn_batched_gemm_args *args, struct attn_error *error)
{
    FUZZ_CHECK(args->a->shape[0] == args->out->shape[0] &&
               args->a->shape[1] == args->out->shape[1]);
    touch(args->a, 0, args->a->shape[0], false);
    touch(args->out, 0, args->out->shape[0], true);
    return finish(error);
}

static attn_status quantize(const struct attn_quantize_args *args, struct attn_error *error)
{
    const int64_t rows = args->x->shape[0];
    FUZZ_CHECK(rows >= 0 && args->out->shape[0] >= rows);
    touch(args->x, 0, rows, false);
    touch(args->out, 0, rows, true);
    if (args->block_scales != NULL && args->form != ATTN_OUTPUT_FP8_STATIC) {
        touch(args->block_scales, 0, rows, true);
    }
    return finish(error);
}

static attn_status amax(const struct attn_amax_args *args, struct attn_error *error)
{
    FUZZ_CHECK(args->x->shape[0] >= 0);
    touch(args->x, 0, args->x->shape[0], false);
    return finish(error);
}

static attn_status fill(const struct attn_fill_args *args, struct attn_error *error)
{
    FUZZ_CHECK(args->rows >= 0);
    for (int64_t i = 0; i < args->rows && args->row_bytes > 0; i++) {
        uint8_t *row = (uint8_t *)args->destination + (size_t)i * args->stride;
        row[0] = row[args->row_bytes - 1] = (uint8_t)args->value;
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
    const int64_t tokens = args->layer->block_size; /* which rows may stand for several of */
    const int64_t blocks = (length + tokens - 1) / tokens;
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
    if (mode == ATTN_PLAN_IN_GRAPH) { /* the host's copies are gone */
        return finish(error);
    }
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
                                              .attend_mla = attend_mla,
                                              .attend_mla_sparse = attend_mla,
                                              .gather_kv = gather_kv,
                                              .recurrent = recurrent,
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
    static const struct attn_indexer_caps indexer = {
        .ext = {ATTN_EXT_CAPS_INDEXER, 0, sizeof indexer, &lists.ext},
        .activations = ALL(NUM_ACTIVATIONS),
        .head_size_max = 512,
        .topk_max = 1 << 20,
        .num_groups_max = 64,
        .tokens_per_row_max = 64,
        .rows_per_entry_max = 64,
        .forced_max = 64};
    static const struct attn_recurrent_rule_caps rules = {
        .ext = {ATTN_EXT_DRAFT_RECURRENT_CAPS, 0, sizeof rules, &indexer.ext},
        .rules = ALL(NUM_RULES),
        .gates = ALL(NUM_GATES),
        .write_gates = ALL(NUM_WRITE_GATES),
        .gate_per_channel = 1,
        .values_first = 1,
        .skip = 1,
        .norm = 1,
        .stochastic_rounding = 1};
    static const struct attn_compressed_caps compressed = {
        .ext = {ATTN_EXT_DRAFT_COMPRESSED_CAPS, 0, sizeof compressed, &rules.ext},
        .kv_dtypes = ALL(NUM_KV_DTYPES),
        .dtypes = ALL(NUM_DTYPES)};
    static const struct attn_recurrent_caps gdn = {
        {ATTN_EXT_CAPS_RECURRENT, 0, sizeof gdn, &compressed.ext},
        512,
        512,
        64,
        1024,
        .initial_slots = 1,
        .checkpoints = 1,
        .state_dtypes = ALL(ATTN_DTYPE_F32 + 1)};
    static const struct attn_mla_caps mla = {.ext = {ATTN_EXT_CAPS_MLA, 0, sizeof mla, &gdn.ext},
                                             .kv_lora_rank_max = 1024,
                                             .qk_rope_head_dim_max = 512};
    caps->next = &mla.ext;
    caps->layer_kinds = ALL(NUM_LAYER_KINDS);
    caps->dtypes = caps->q_dtypes = ALL(NUM_DTYPES);
    caps->kv_dtypes = ALL(NUM_KV_DTYPES);
    caps->view_forms = ALL(5);
    caps->layouts = ALL(NUM_KV_LAYOUTS);
    caps->cache_roles = ALL(NUM_CACHE_ROLES);
    caps->max_tables = ATTN_MAX_TABLES;
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
    parts->features |= ATTN_FEATURE_DRAFT_COMPRESSED_ROWS | ATTN_FEATURE_BLOCK_TABLE_ROW;
    struct attn_backend_caps *whole = fixture_add(fixture, "whole", "", 9);
    declare(whole);
    whole->kernels = ALL(NUM_KERNELS) & ~ATTN_KERNEL_GATHER_KV;
    whole->terms = ALL(NUM_TERMS);
    whole->features = ALL(NUM_FEATURES);
}
