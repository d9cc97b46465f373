/* SPDX-License-Identifier: Apache-2.0 */
/* Layers whose cache is spread over ranks: what a backend must have for the core to compose their
 * step. */
#include "select/match_check.h"

static bool spreads(const struct attn_collectives *ranks)
{
    return ranks != NULL && ranks->world_size > 1;
}

bool check_is_spread(const struct check *check)
{
    return check->whole->cp != NULL && spreads(check->whole->cp->decode);
}

/* A cache spread over ranks: what the exchange is made of, and the terms whose keys it would lose
 * the positions of. */
void check_parallel(struct check *check)
{
    static const char field[] = "context_parallel";
    const struct attn_context_parallel *cp = check->whole->cp;
    const struct attn_layer_desc *l = check->layer;
    const struct attn_backend_caps *caps = check->caps;
    if (cp == NULL || (!spreads(cp->decode) && !spreads(cp->prefill))) {
        return;
    }
    int32_t n = spreads(cp->decode) ? cp->decode->world_size : 1;
    bool sums = cp->reduce == ATTN_CP_ALL_GATHER_REDUCE_SCATTER;
    bool positions = l->has_window || l->chunk_size > 0 || l->alibi || l->prefix_lm ||
                     l->tree_mask || l->causal_per_request || l->sink_len > 0;
    const struct {
        bool there;
        const char *asked;
        const char *supported;
    } parts[] = {
        {!spreads(cp->prefill), "queries spread over ranks", "keys spread over ranks"},
        {l->kind == ATTN_LAYER_DECODER && l->causal, "a layer of this kind",
         "causal decoder layers"},
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
        {caps->device.type == ATTN_DEVICE_CPU || caps->kernels & ATTN_KERNEL_COPY_BLOCKS,
         "copy_blocks, which orders heads by rank", "no"},
        {caps->max_group == 0 || l->num_q_heads / l->num_kv_heads * n <= caps->max_group,
         "the query heads of all ranks over a key head", "a smaller group"},
        {caps->max_num_q_heads == 0 || l->num_q_heads * n <= caps->max_num_q_heads,
         "the query heads of all ranks", "fewer"},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (!parts[i].there) {
            reasons_add(check->reasons, field, parts[i].asked, parts[i].supported);
        }
    }
    check_compose(check, ATTN_COMPOSE_CONTEXT_PARALLEL, ATTN_GRAPH_ALWAYS);
}
