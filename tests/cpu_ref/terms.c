/* SPDX-License-Identifier: Apache-2.0 */
/* What a case's batch carries next to lengths: prefix-LM spans and trees. */
#include <math.h>

#include "problem.h"

/* Spans of a request: equal parts of its keys, a gap before each. */
void problem_build_spans(struct problem *p)
{
    const struct attend_case *c = p->c;
    int32_t n = 0;
    p->spans = problem_memory(2 * c->num_reqs * c->num_spans, sizeof(int32_t), 0);
    for (int32_t r = 0; r < c->num_reqs; r++) {
        p->span_start[r] = n;
        int32_t part = c->num_spans ? c->seq_lens[r] / c->num_spans : 0;
        for (int32_t s = 0; s < c->num_spans && part >= 3; s++, n++) {
            p->spans[2 * n] = s * part + 1;
            p->spans[2 * n + 1] = s * part + part - 1 - random_below(part - 2);
        }
    }
    p->span_start[c->num_reqs] = n;
}

int64_t problem_longest_query(const struct attend_case *c)
{
    int64_t longest = 1;
    for (int32_t r = 0; r < c->num_reqs; r++) {
        longest = c->query_lens[r] > longest ? c->query_lens[r] : longest;
    }
    return longest;
}

/* Each token sees itself and a random part of the earlier ones; a bias also has finite values. */
void problem_build_tree(struct problem *p)
{
    const struct attend_case *c = p->c;
    int64_t n = problem_longest_query(c), words = (n + 31) / 32 + 1;
    int64_t trees = c->one_tree ? 1 : c->num_reqs;
    p->tree_width = c->tree == ATTN_TREE_BITS ? words : n + 2;
    p->tree = problem_memory(trees * n * p->tree_width, 4, 0);
    p->tree_bias = problem_memory(c->num_reqs * n * n, sizeof(double), 0);
    for (int64_t t = 0; t < trees; t++) {
        for (int64_t i = 0; i < n * n; i++) {
            int64_t row = i / n, column = i % n;
            /* no token sees the second one, itself included */
            int32_t visible = column != 1 && (column == row || (column < row && random_below(2)));
            double bias = c->tree == ATTN_TREE_BIAS ? (float)random_normal() : 0;
            int64_t at = (t * n + row) * p->tree_width;
            if (c->tree == ATTN_TREE_BITS && visible) {
                ((uint32_t *)p->tree)[at + column / 32] |= UINT32_C(1) << column % 32;
            } else if (c->tree == ATTN_TREE_BIAS) {
                ((float *)p->tree)[at + column] = visible ? (float)bias : -INFINITY;
            }
            p->tree_bias[t * n * n + i] = visible ? bias : -INFINITY;
        }
    }
    for (int32_t r = 0; r < c->num_reqs; r++) {
        p->tree_start[r] = c->one_tree ? 0 : r * n * n;
    }
}
