/* SPDX-License-Identifier: Apache-2.0 */
#include "case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats.h"
#include "support/oracle.h"
#include "problem.h"
#include "support/test.h"

#define GARBAGE_BLOCK 0x7ffffff0
/* Next to rounding to the output's dtype: what float64 sums in another order may differ by,
 * relative to the row's root mean square; float32 LSE, and scales that are float32 products. */
#define ROW_BOUND 1e-6
#define LSE_BOUND 2e-6

static double round_e4m3(double w)
{
    return format_round(ATTN_DTYPE_FP8_E4M3, w * 448) / 448;
}

static double round_e5m2(double w)
{
    return format_round(ATTN_DTYPE_FP8_E5M2, w * 1024) / 1024;
}

/* Views of one request's part of the problem; `widened` holds float64 sinks and slopes. */
static struct oracle_request oracle_of(const struct problem *p, int32_t r, double *widened,
                                       double *tree, double *out, double *lse)
{
    const struct attend_case *c = p->c;
    int64_t n = c->query_lens[r], width = p->batch.max_query_len;
    struct oracle_request o = {
        .num_q_heads = c->num_q_heads,
        .num_kv_heads = c->num_kv_heads,
        .head_size = c->head_size,
        .head_size_v = p->dv,
        .num_queries = n,
        .num_keys = c->seq_lens[r],
        .q = p->q + (int64_t)p->query_start[r] * c->num_q_heads * c->head_size,
        .k = p->k + (int64_t)p->key_start[r] * c->num_kv_heads * c->head_size,
        .v = p->v + (int64_t)p->key_start[r] * c->num_kv_heads * p->dv,
        .scale = p->layer.scale,
        .soft_cap = c->soft_cap,
        .left = -1,
        .right = -1,
        .chunk = c->chunk,
        .lookback = c->lookback,
        .alibi = c->alibi,
        .slopes = widened + 64,
        .sinks = c->has_sinks ? widened : NULL,
        .num_sink_keys = c->seq_lens[r] > 0 ? c->sink_len : 0,
        .sink_k = p->sink_k,
        .sink_v = p->sink_v,
        .num_spans = p->span_start[r + 1] - p->span_start[r],
        .spans = p->spans + 2 * p->span_start[r],
        .span_window = c->span_window,
        .out = out,
        .lse = lse,
    };
    o.causal = c->batch_causal ? c->batch_causal == ATTN_CAUSAL_YES : !c->not_causal;
    if (c->causal_per_request) {
        o.causal = p->causal[r];
    }
    if (c->has_window) {
        o.left = c->left;
        o.right = c->right;
    }
    if (c->p_scale_form) {
        o.round_weight = c->kv_dtype == ATTN_KV_FP8_E5M2 ? round_e5m2 : round_e4m3;
    }
    if (c->tree) {
        for (int64_t i = 0; i < n * n; i++) {
            tree[i] = p->tree_bias[p->tree_start[r] + i / n * width + i % n];
        }
        o.tree = tree;
    }
    return o;
}

/* What no query of the request sees is NaN from now on, and tables of whole hidden blocks lead
 * nowhere. */
static void hide_unseen(struct problem *p, const struct oracle_request *o, int32_t r)
{
    const struct attend_case *c = p->c;
    int64_t block = c->block_size > 0 ? c->block_size : 1;
    for (int64_t first = 0; first < o->num_keys; first += block) {
        int32_t any = 0;
        for (int64_t j = first; j < first + block && j < o->num_keys; j++) {
            int32_t seen = 0;
            for (int64_t i = 0; i < o->num_queries && !seen; i++) {
                seen = oracle_visible(o, i, j);
            }
            any |= seen;
            if (!seen) {
                problem_hide(p, r, j);
            }
        }
        if (!any && c->block_size > 0) {
            p->table[p->table_row[r] * p->table_stride + first / block] = GARBAGE_BLOCK;
        }
    }
}

static void expect_close(const struct problem *p, int32_t r, int64_t row, int64_t head, int64_t d,
                         double got, double want, double bound)
{
    int32_t same = isnan(want) || isinf(want) ? (isnan(want) ? isnan(got) : got == want)
                                              : fabs(got - want) <= bound;
    if (!same) {
        fail_msg("%s: request %d, row %d, head %d, element %d: %.9g, not %.9g within %.3g",
                 p->c->name, r, (int)row, (int)head, (int)d, got, want, bound);
    }
}

static void compare_row(const struct problem *p, int32_t r, int64_t i, int64_t h,
                        const struct oracle_request *o)
{
    const struct attend_case *c = p->c;
    int64_t t = p->query_start[r] + i;
    const double *want = o->out + (i * c->num_q_heads + h) * p->dv;
    double squares = 0;
    for (int32_t d = 0; d < p->dv; d++) {
        squares += isnan(want[d]) ? 0 : want[d] * want[d];
    }
    for (int32_t d = 0; d < p->dv; d++) {
        double bound = fabs(want[d]) * format_half_step(c->dtype) * 1.0001 +
                       format_smallest(c->dtype) + ROW_BOUND * sqrt(squares / p->dv);
        expect_close(p, r, t, h, d,
                     format_load(p->out_memory, t * p->out_stride + h * p->dv + d, c->dtype),
                     want[d], bound);
    }
    if (!c->no_lse) {
        double lse = o->lse[i * c->num_q_heads + h];
        int64_t at = c->lse_by_token ? t * c->num_q_heads + h : h * p->num_rows + t;
        expect_close(p, r, t, h, -1, format_load(p->lse_memory, at, ATTN_DTYPE_F32), lse,
                     LSE_BOUND * (1 + fabs(lse)));
    }
}

static void expect_poison(const struct problem *p, int64_t t, int64_t column, int64_t count)
{
    int64_t size = format_bytes(p->c->dtype);
    for (int64_t i = 0; i < count * size; i++) {
        if (p->out_memory[(t * p->out_stride + column) * size + i] != POISON) {
            fail_msg("%s: row %d of out was written at column %d, where nothing belongs",
                     p->c->name, (int)t, (int)(column + i / size));
        }
    }
}

/* Rows that are not of this batch, columns between rows, and the cache as it was. */
static void compare_rest(const struct problem *p)
{
    const struct attend_case *c = p->c;
    int64_t width = (int64_t)c->num_q_heads * p->dv;
    for (int64_t t = 0; t < p->num_rows; t++) {
        int32_t ours = t >= c->first_row && t < p->query_start[c->num_reqs];
        for (int32_t r = 0; r < c->num_reqs && c->fast_prefill && ours; r++) {
            ours = t == p->query_start[r + 1] - 1 ? 2 : ours;
        }
        ours = c->fast_prefill ? ours == 2 : ours;
        expect_poison(p, t, ours ? width : 0, p->out_stride - (ours ? width : 0));
    }
    for (int64_t i = 0; i < p->cache_bytes && !c->nan_key; i++) {
        if (p->cache[i] != p->cache_expected[i]) {
            fail_msg("%s: byte %lld of the cache is %02x, not %02x", c->name, (long long)i,
                     p->cache[i], p->cache_expected[i]);
        }
    }
}

static void check_requests(struct problem *p, int32_t compare)
{
    const struct attend_case *c = p->c;
    double widened[128];
    double *tree = problem_memory(p->batch.max_query_len * p->batch.max_query_len, 8, 0);
    for (int32_t i = 0; i < 64; i++) {
        widened[i] = p->sinks[i];
        widened[64 + i] = p->slopes[i];
    }
    for (int32_t r = 0; r < c->num_reqs; r++) {
        int64_t rows = (int64_t)c->query_lens[r] * c->num_q_heads;
        double *out = malloc(8 * (size_t)(rows * p->dv + 1)), *lse = malloc(8 * (size_t)(rows + 1));
        double *scores = malloc(8 * (size_t)(c->seq_lens[r] + c->sink_len + 1));
        struct oracle_request o = oracle_of(p, r, widened, tree, out, lse);
        if (!compare && c->shared == 0) {
            hide_unseen(p, &o, r);
        } else if (compare) {
            oracle_attend(&o, scores);
            for (int64_t i = c->fast_prefill ? o.num_queries - 1 : 0; i < o.num_queries; i++) {
                for (int32_t h = 0; h < c->num_q_heads; h++) {
                    compare_row(p, r, i, h, &o);
                }
            }
        }
        free(out);
        free(lse);
        free(scores);
    }
    free(tree);
}

void case_check(const struct attend_case *c, const struct reference *reference, uint64_t seed)
{
    struct attn_error error = ATTN_ERROR_INIT;
    struct problem *p = problem_create(c, seed);
    if (c->block_size > 0 && problem_write(p, reference, &error) != ATTN_OK) {
        fail_msg("%s: write_kv: %s: %s", c->name, error.field, error.message);
    }
    check_requests(p, 0);
    if (problem_attend(p, reference, &error) != ATTN_OK) {
        fail_msg("%s: attend: %s: %s", c->name, error.field, error.message);
    }
    check_requests(p, 1);
    compare_rest(p);
    problem_destroy(p);
}
