/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of the terms: what is masked, and what is added to a score or to the denominator. */
#include <math.h>

#include "mutants.h"

static void window_too_long(struct mutable_args *m)
{
    m->layer.window_left += m->layer.window_left >= 0;
}

static void window_too_short(struct mutable_args *m)
{
    m->layer.window_left -= m->layer.window_left > 0;
}

static void window_one_sided(struct mutable_args *m)
{
    m->layer.window_right = m->layer.has_window ? 0 : m->layer.window_right;
}

static void sink_missing(struct mutable_args *m)
{
    m->layer.has_sinks = 0;
    m->params.sinks = NULL;
}

static void sink_twice(struct mutable_args *m)
{
    for (int32_t h = 0; m->params.sinks != NULL && h < m->layer.num_q_heads; h++) {
        m->sinks[h] = m->params.sinks[h] + logf(2);
    }
    m->params.sinks = m->params.sinks != NULL ? m->sinks : NULL;
}

static void scale_twice(struct mutable_args *m)
{
    m->layer.scale *= m->layer.scale;
}

static void soft_cap_missing(struct mutable_args *m)
{
    m->layer.soft_cap = 0;
}

static void alibi_sign(struct mutable_args *m)
{
    for (int32_t h = 0; m->params.alibi_slopes != NULL && h < m->layer.num_q_heads; h++) {
        m->slopes[h] = -m->params.alibi_slopes[h];
    }
    m->params.alibi_slopes = m->params.alibi_slopes != NULL ? m->slopes : NULL;
}

static void alibi_sqrt_linear(struct mutable_args *m)
{
    m->layer.alibi = m->layer.alibi == ATTN_ALIBI_SQRT ? ATTN_ALIBI_LINEAR : m->layer.alibi;
}

/* Sees one key too many. */
static void causal_late(struct mutable_args *m)
{
    if (m->layer.causal == ATTN_CAUSAL_YES && !m->layer.has_window &&
        !m->layer.causal_per_request && !m->layer.prefix_lm && !m->layer.tree_mask &&
        !m->layer.chunk_size) {
        m->layer.causal = ATTN_CAUSAL_NO;
        m->layer.has_window = 1;
        m->layer.window_left = -1;
        m->layer.window_right = 1;
    }
}

static void chunk_lookback(struct mutable_args *m)
{
    m->layer.chunk_lookback += m->layer.chunk_size > 0;
}

static void static_sink_missing(struct mutable_args *m)
{
    m->layer.sink_len = 0;
    m->params.sink_k = m->params.sink_v = NULL;
}

static void spans_exclusive(struct mutable_args *m)
{
    for (int32_t i = 0; m->batch.spans != NULL && i < m->batch.num_spans && i < 2 * MAX_REQS; i++) {
        m->spans[2 * i] = m->batch.spans[2 * i];
        m->spans[2 * i + 1] = m->batch.spans[2 * i + 1] - 1;
    }
    m->batch.spans = m->batch.spans != NULL ? m->spans : NULL;
}

static void span_window_missing(struct mutable_args *m)
{
    m->layer.prefix_lm_window = 0;
}

static void tree_ignored(struct mutable_args *m)
{
    m->layer.tree_mask = ATTN_TREE_NONE;
    m->batch.tree = NULL;
}

static void tree_shared(struct mutable_args *m)
{
    m->batch.tree_stride_request = 0;
}

static void causal_flags_ignored(struct mutable_args *m)
{
    m->batch.causal_per_request = NULL;
}

static void override_ignored(struct mutable_args *m)
{
    m->batch.causal = ATTN_CAUSAL_DEFAULT;
}

static const struct mutant mutants[] = {
    {.name = "mutant_window_too_long", .before = window_too_long},
    {.name = "mutant_window_too_short", .before = window_too_short},
    {.name = "mutant_window_one_sided", .before = window_one_sided},
    {.name = "mutant_sink_missing", .before = sink_missing},
    {.name = "mutant_sink_twice", .before = sink_twice},
    {.name = "mutant_scale_twice", .before = scale_twice},
    {.name = "mutant_soft_cap_missing", .before = soft_cap_missing},
    {.name = "mutant_alibi_sign", .before = alibi_sign},
    {.name = "mutant_alibi_sqrt_linear", .before = alibi_sqrt_linear},
    {.name = "mutant_causal_late", .before = causal_late},
    {.name = "mutant_chunk_lookback", .before = chunk_lookback},
    {.name = "mutant_static_sink_missing", .before = static_sink_missing},
    {.name = "mutant_spans_exclusive", .before = spans_exclusive},
    {.name = "mutant_span_window_missing", .before = span_window_missing},
    {.name = "mutant_tree_ignored", .before = tree_ignored},
    {.name = "mutant_tree_shared", .before = tree_shared},
    {.name = "mutant_causal_flags_ignored", .before = causal_flags_ignored},
    {.name = "mutant_override_ignored", .before = override_ignored},
};
const struct mutant_list term_mutants = {mutants, sizeof mutants / sizeof *mutants};
