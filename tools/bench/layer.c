/* SPDX-License-Identifier: Apache-2.0 */
/* From a shape to the layer that an engine would describe for it. */
#include <math.h>

#include "measured.h"
#include "support/layer.h"

#define MOST_QUERIES_OF_DRAFTS 1025 /* the ABI's limit of num_speculative_tokens, and one more */

static void describe_mla(struct measured *measured)
{
    const struct bench_shape *shape = &measured->shape;
    struct attn_layer_desc *desc = &measured->layer.desc;
    struct attn_mla_desc *mla = &measured->layer.mla;
    *mla = (struct attn_mla_desc){
        .kv_lora_rank = shape_int(shape, PARAMETER_LORA),
        .qk_nope_head_dim = shape_int(shape, PARAMETER_NOPE),
        .qk_rope_head_dim = shape_int(shape, PARAMETER_ROPE),
        .v_head_dim = shape_int(shape, PARAMETER_DV),
        .topk = shape->kind == SHAPE_MLA_SPARSE ? shape_int(shape, PARAMETER_TOPK) : 0,
        .absorb_in_core = shape_int(shape, PARAMETER_ABSORB),
        .weight_dtype = desc->dtype,
    };
    layer_set_mla(desc, mla);
    desc->v_scale_form = ATTN_SCALE_NONE; /* a value is a part of its key */
    measured->has_cache = true;
}

/* Compressed rows are read from the same memory as the layer's own rows (measured_rows_table). */
static void describe_compressed(struct measured *measured)
{
    const struct bench_shape *shape = &measured->shape;
    struct attn_layer_desc *desc = &measured->layer.desc;
    const int32_t rank = shape_int(shape, PARAMETER_LORA), all = shape_int(shape, PARAMETER_ALL);
    model_layer_compress(&measured->layer, rank, all ? 0 : shape_int(shape, PARAMETER_TOPK),
                         shape_int(shape, PARAMETER_RATIO), desc->block_size);
    desc->scale = 1 / sqrtf((float)rank);
    layer_set_window(desc, shape_int(shape, PARAMETER_WINDOW));
    desc->has_sinks = shape_int(shape, PARAMETER_SINKS);
    measured->has_cache = true;
}

static void describe_gdn(struct measured *measured)
{
    static const struct attn_recurrent_rule rules[BENCH_RULES] = {
        [BENCH_KDA] = {.gate_per_channel = 1},
        [BENCH_MAMBA2] = {.rule = ATTN_RULE_ADDITIVE,
                          .write_gate = ATTN_WRITE_GATE_STEP,
                          .values_first = 1},
        [BENCH_LIGHTNING] = {.rule = ATTN_RULE_ADDITIVE,
                             .gate = ATTN_GATE_CONSTANT,
                             .write_gate = ATTN_WRITE_GATE_NONE}};
    const int32_t rule = shape_int(&measured->shape, PARAMETER_RULE);
    const struct bench_shape *shape = &measured->shape;
    struct attn_layer_desc *desc = &measured->layer.desc;
    struct attn_recurrent_desc *gdn = &measured->layer.gdn;
    int32_t conv = shape_int(shape, PARAMETER_CONV);
    *gdn = (struct attn_recurrent_desc){
        .num_k_heads = shape_int(shape, PARAMETER_HK),
        .num_v_heads = shape_int(shape, PARAMETER_HV),
        .head_size_k = shape_int(shape, PARAMETER_DK),
        .head_size_v = shape_int(shape, PARAMETER_DV),
        .conv_width = conv,
        .conv_silu = conv > 0,
        .state_dtype =
            shape_int(shape, PARAMETER_STATE_BITS) == 16 ? ATTN_DTYPE_BF16 : ATTN_DTYPE_F32,
        .qk_l2norm = rule == BENCH_GATED_DELTA || rule == BENCH_KDA,
        .num_speculative_tokens = shape_int(shape, PARAMETER_DRAFTS),
    };
    layer_set_recurrent(desc, gdn);
    desc->num_speculative_tokens = gdn->num_speculative_tokens;
    measured->layer.rule = rules[rule];
    if (rule != BENCH_GATED_DELTA) {
        measured->layer.rule.ext =
            (struct attn_ext){ATTN_EXT_DRAFT_RECURRENT_RULE, 0, sizeof measured->layer.rule, NULL};
    }
    if (shape_int(shape, PARAMETER_PHILOX) > 0) {
        measured->layer.rounding =
            EXTENSION(attn_recurrent_rounding, ATTN_EXT_DRAFT_RECURRENT_ROUNDING, NULL, .seed = 1,
                      .philox_rounds = shape_int(shape, PARAMETER_PHILOX));
    }
    if (shape_int(shape, PARAMETER_REPLAY) > 0) {
        model_layer_replay(&measured->layer, shape_int(shape, PARAMETER_REPLAY));
    }
    desc->block_size = 0; /* states are in slots */
    desc->kv_dtype = ATTN_KV_AUTO;
    desc->k_scale_form = desc->v_scale_form = ATTN_SCALE_NONE;
}

static void describe_decoder(struct measured *measured)
{
    const struct bench_shape *shape = &measured->shape;
    struct attn_layer_desc *desc = &measured->layer.desc;
    bool writes_only = shape->kind == SHAPE_WRITE;
    desc->kind = ATTN_LAYER_DECODER;
    desc->num_kv_heads = shape_int(shape, PARAMETER_HKV);
    desc->num_q_heads = writes_only ? desc->num_kv_heads : shape_int(shape, PARAMETER_HQ);
    desc->head_size = shape_int(shape, PARAMETER_D);
    desc->head_size_v = shape_int(shape, PARAMETER_DV);
    desc->scale = 1 / sqrtf((float)desc->head_size);
    desc->causal = shape->kind != SHAPE_PREFILL || shape->value[PARAMETER_CAUSAL] != 0
                       ? ATTN_CAUSAL_YES
                       : ATTN_CAUSAL_NO;
    layer_set_window(desc, shape_int(shape, PARAMETER_WINDOW));
    desc->chunk_size = shape_int(shape, PARAMETER_CHUNK);
    desc->soft_cap = (float)shape->value[PARAMETER_SOFTCAP];
    desc->alibi = shape_int(shape, PARAMETER_ALIBI);
    desc->has_sinks = shape_int(shape, PARAMETER_SINKS);
    desc->tree_mask = shape_int(shape, PARAMETER_TREE) ? ATTN_TREE_BITS : ATTN_TREE_NONE;
    if (shape_int(shape, PARAMETER_Q8)) {
        desc->q_scale_form = ATTN_SCALE_PER_TENSOR;
        desc->q_dtype = ATTN_DTYPE_FP8_E4M3;
    }
    measured->has_cache = true;
}

static void describe_sparse(struct measured *measured)
{
    const struct bench_shape *shape = &measured->shape;
    measured->layer.lists =
        EXTENSION(attn_index_lists, ATTN_EXT_DRAFT_INDEX_LISTS, NULL,
                  .max_entries = shape_int(shape, PARAMETER_TOPK),
                  .granularity = shape_int(shape, PARAMETER_GRAIN),
                  .groups = shape_int(shape, PARAMETER_LISTS) > 1 ? ATTN_LISTS_PER_KV_HEAD
                                                                  : ATTN_LISTS_SHARED);
}

static void describe_index(struct measured *measured)
{
    const struct bench_shape *shape = &measured->shape;
    struct attn_layer_desc *desc = &measured->layer.desc;
    const int32_t ratio = shape_int(shape, PARAMETER_RATIO),
                  pool = shape_int(shape, PARAMETER_POOL);
    desc->head_size = shape_int(shape, PARAMETER_D);
    desc->v_scale_form = ATTN_SCALE_NONE;
    if (desc->kv_dtype == ATTN_KV_FP8_E4M3 || desc->kv_dtype == ATTN_KV_FP8_PER_TOKEN_HEAD) {
        desc->q_scale_form = ATTN_SCALE_PER_TENSOR; /* queries have the keys' dtype */
        desc->q_dtype = ATTN_DTYPE_FP8_E4M3;
    }
    measured->layer.indexer =
        (struct attn_indexer_desc){.topk = shape_int(shape, PARAMETER_TOPK),
                                   .num_groups = shape_int(shape, PARAMETER_LISTS),
                                   .activation = shape_int(shape, PARAMETER_RELU),
                                   .has_weights = shape_int(shape, PARAMETER_WEIGHTS),
                                   .tokens_per_row = ratio,
                                   .rows_per_entry = pool,
                                   .tail = ratio > 1 && pool == 1,
                                   .forced_on_top = ratio > 1};
    layer_set_indexer(desc, &measured->layer.indexer);
    desc->window_left = desc->window_right = -1;
    measured->has_cache = true;
}

/* Forms that the formats need; both scales of fp8 are host floats of 1. */
static void describe_cache(struct attn_layer_desc *desc, int32_t kv_dtype)
{
    desc->kv_dtype = kv_dtype;
    if (kv_dtype == ATTN_KV_FP8_E4M3 || kv_dtype == ATTN_KV_FP8_E5M2) {
        desc->k_scale_form = desc->v_scale_form = ATTN_SCALE_PER_TENSOR;
    } else if (kv_dtype == ATTN_KV_INT8_KV) {
        desc->v_scale_form = ATTN_SCALE_PER_HEAD_CHANNEL;
    }
}

void measured_describe(struct measured *measured)
{
    const struct bench_shape *shape = &measured->shape;
    struct attn_layer_desc *desc = &measured->layer.desc;
    const struct requests *requests = &measured->requests;
    *desc = SIZED(attn_layer_desc, .dtype = measured->session->options->dtype,
                  .num_q_heads = shape_int(shape, PARAMETER_HQ),
                  .block_size = shape_int(shape, PARAMETER_BLOCK),
                  .max_seq_len = requests->max_seq_len, .max_num_reqs = requests->count,
                  .batch_invariant = shape_int(shape, PARAMETER_INVARIANT));
    describe_cache(desc, measured->session->options->kv_dtype);
    if (measured->phase == ATTN_PHASE_DECODE && shape->kind != SHAPE_MIXED &&
        requests->max_query_len > 1 && requests->max_query_len <= MOST_QUERIES_OF_DRAFTS) {
        desc->num_speculative_tokens = requests->max_query_len - 1;
    }
    switch (shape->kind) {
    case SHAPE_MLA:
    case SHAPE_MLA_SPARSE:
        describe_mla(measured);
        break;
    case SHAPE_COMPRESSED:
        describe_compressed(measured);
        break;
    case SHAPE_INDEX:
    case SHAPE_TOP_K:
        describe_index(measured);
        break;
    case SHAPE_SPARSE:
        describe_decoder(measured);
        describe_sparse(measured);
        break;
    case SHAPE_GDN:
        describe_gdn(measured);
        break;
    default:
        describe_decoder(measured);
        break;
    }
    model_layer_link(&measured->layer, false, false);
}
