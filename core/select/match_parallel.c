/* SPDX-License-Identifier: Apache-2.0 */
/* Layers whose cache is spread over ranks: what a backend must have for the core to compose their
 * step. */
#include "select/match_check.h"

static bool spreads(const struct attn_collectives *ranks)
{
    return ranks != NULL && ranks->world_size > 1;
}

/* Ranks that hold a part of the cache each. */
static int64_t cache_ranks(const struct attn_context_parallel *cp)
{
    if (cp == NULL || cp->decode == NULL) {
        return 1;
    }
    return (int64_t)cp->decode->world_size * (spreads(cp->prefill) ? cp->prefill->world_size : 1);
}

bool check_is_spread(const struct check *check)
{
    return cache_ranks(check->whole->cp) > 1;
}

struct need {
    bool there;
    const char *asked;
    const char *supported;
};

static void hold(struct check *check, const struct need *needs, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!needs[i].there) {
            reasons_add(check->reasons, "context_parallel", needs[i].asked, needs[i].supported);
        }
    }
}

/* A cache spread over ranks: what the exchange is made of, and the terms whose keys it would lose
 * the positions of. */
static void check_spread_cache(struct check *check)
{
    const struct attn_context_parallel *cp = check->whole->cp;
    const struct attn_layer_desc *l = check->layer;
    const struct attn_backend_caps *caps = check->caps;
    int32_t n = cp->decode->world_size;
    bool sums = n > 1 && cp->reduce == ATTN_CP_ALL_GATHER_REDUCE_SCATTER;
    bool positions = l->has_window || l->chunk_size > 0 || l->alibi || l->prefix_lm ||
                     l->tree_mask || l->causal_per_request || l->sink_len > 0;
    const struct need needs[] = {
        {!positions,
         "a window, chunks, ALiBi, spans, trees, a static sink or causality per request",
         "plain causal layers"},
        {l->q_scale_form == ATTN_SCALE_NONE, "quantized queries",
         "queries of the activation dtype"},
        {!sums || l->dtype == ATTN_DTYPE_F32, "sums over ranks (reduce 0) of 16-bit outputs",
         "all to all (reduce 1), or f32"},
        {caps->features & ATTN_FEATURE_LSE, "log-sum-exp", "no"},
        {caps->features & ATTN_FEATURE_CONTIGUOUS_KV, "contiguous keys", "no"},
        {caps->terms & ATTN_TERM_BIDIRECTIONAL, "a context that all queries see (bidirectional)",
         "no"},
        {caps->kernels & ATTN_KERNEL_MERGE_STATES, "merge_states of the ranks' parts", "no"},
        {check->whole->mla != NULL || caps->max_group == 0 ||
             l->num_q_heads / l->num_kv_heads * n <= caps->max_group,
         "the query heads of all ranks over a key head", "a smaller group"},
        {caps->max_num_q_heads == 0 || l->num_q_heads * n <= caps->max_num_q_heads,
         "the query heads of all ranks", "fewer"},
    };
    hold(check, needs, sizeof needs / sizeof *needs);
}

/* Queries split over ranks: slices are requests of their own over one table, and keys pass through
 * the ranks before they are written. */
static void check_split_queries(struct check *check)
{
    const struct attn_context_parallel *cp = check->whole->cp;
    const struct attn_layer_desc *l = check->layer;
    const struct attn_backend_caps *caps = check->caps;
    bool shares_rows = cp->order == ATTN_CP_ZIGZAG || cache_ranks(cp) > 1;
    const struct need needs[] = {
        {!l->prefix_lm && !l->tree_mask && !l->causal_per_request && l->sink_len == 0,
         "queries split over ranks with spans, trees, a static sink or causality per request",
         "causal layers, windows, chunks, ALiBi, sinks"},
        {!l->rope && !l->qk_norm, "queries split over ranks with RoPE or norm in the write",
         "rotated keys"},
        {!l->device_seq_lens_only, "queries split over ranks without seq_lens_host",
         "lengths on the host"},
        {!l->fast_prefill, "queries split over ranks with fast prefill", "either"},
        {!shares_rows || !l->needs_block_table_row,
         "queries split over ranks with the engine's block_table_row",
         "contiguous order and a whole cache"},
        {!shares_rows || caps->features & ATTN_FEATURE_BLOCK_TABLE_ROW,
         "slices of a request over one row of the block table (block_table_row)", "no"},
        {l->output_form == ATTN_OUTPUT_PLAIN, "queries split over ranks with quantized outputs",
         "plain outputs"},
        {check->whole->sharing_target >= 0 || caps->kernels & ATTN_KERNEL_WRITE_KV,
         "write_kv of all ranks' keys", "no"},
    };
    hold(check, needs, sizeof needs / sizeof *needs);
}

void check_parallel(struct check *check, int32_t phase)
{
    const struct attn_context_parallel *cp = check->whole->cp;
    const struct attn_layer_desc *l = check->layer;
    const struct attn_backend_caps *caps = check->caps;
    bool splits = cp != NULL && spreads(cp->prefill);
    if (!check_is_spread(check) && !splits) {
        return;
    }
    bool mla = l->kind == ATTN_LAYER_MLA && !splits;
    bool per_head = check->match->composed & ATTN_COMPOSE_MLA_PREFILL || phase == ATTN_PHASE_DECODE;
    bool plain = !mla || (!l->has_sinks && l->num_speculative_tokens == 0 &&
                          check->whole->mla->absorb_in_core &&
                          check->whole->mla->padded_num_q_heads <= l->num_q_heads);
    const struct need needs[] = {
        {(l->kind == ATTN_LAYER_DECODER || mla) && l->causal, "a layer of this kind",
         splits ? "causal decoder layers" : "causal decoder and MLA layers"},
        {!mla || per_head, "MLA's prefill in latent space", "per head, over gathered context"},
        {plain, "MLA with sinks, drafts, padded heads or latent queries", "none of them"},
        {caps->device.type == ATTN_DEVICE_CPU || caps->kernels & ATTN_KERNEL_COPY_BLOCKS,
         "copy_blocks, which orders rows and heads by rank", "no"},
    };
    hold(check, needs, sizeof needs / sizeof *needs);
    if (check_is_spread(check)) {
        check_spread_cache(check);
    }
    if (splits) {
        check_split_queries(check);
    }
    /* where the slices lie is the host's to say: only batches that are not split are captured */
    /* (of MLA, decodes: ATTN_COMPOSE_MLA_PREFILL says so) */
    check_compose(check, ATTN_COMPOSE_CONTEXT_PARALLEL, ATTN_GRAPH_ALWAYS);
}
