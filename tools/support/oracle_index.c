/* SPDX-License-Identifier: Apache-2.0 */
/* The lists of an indexer, by sorting nothing: a list is judged against all scores; and what its
 * keys are before they are stored. */
#include "oracle.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

void oracle_norm(double *row, int32_t size, bool centered, double eps, const double *weight,
                 const double *bias)
{
    double mean = 0, squares = 0;
    for (int32_t d = 0; d < size; d++) {
        mean += centered ? row[d] / size : 0;
    }
    for (int32_t d = 0; d < size; d++) {
        squares += (row[d] - mean) * (row[d] - mean) / size;
    }
    for (int32_t d = 0; d < size; d++) {
        row[d] = (row[d] - mean) / sqrt(squares + eps) * weight[d] + (bias != NULL ? bias[d] : 0);
    }
}

void oracle_hadamard(double *row, int32_t size)
{
    double x[ORACLE_MAX_KEY];
    memcpy(x, row, (size_t)size * sizeof *x);
    for (int32_t i = 0; i < size; i++) {
        row[i] = 0;
        for (int32_t j = 0; j < size; j++) {
            row[i] += (__builtin_popcount((uint32_t)(i & j)) % 2 ? -x[j] : x[j]) / sqrt(size);
        }
    }
}

int64_t oracle_index_entries(const struct oracle_indexer *x, int64_t position)
{
    const int64_t rows = (position + 1) / x->tokens_per_row;
    return (rows + x->rows_per_entry - 1) / x->rows_per_entry;
}

void oracle_index_scores(const struct oracle_indexer *x, int64_t position, const double *q,
                         const double *weights, const double *keys, double *scores)
{
    const int64_t rows = (position + 1) / x->tokens_per_row;
    for (int64_t j = 0; j < rows; j++) {
        double sum = 0;
        for (int32_t h = 0; h < x->num_heads; h++) {
            double s = 0;
            for (int32_t d = 0; d < x->head_size; d++) {
                s += q[h * x->head_size + d] * keys[j * x->head_size + d];
            }
            s *= x->scale;
            s = x->relu && s < 0 ? 0 : s;
            sum += (weights != NULL ? weights[h] : 1) * s;
        }
        double *entry = &scores[j / x->rows_per_entry];
        if (j % x->rows_per_entry == 0 || isnan(sum) || sum > *entry) {
            *entry = sum;
        }
    }
}

/* NaN counts as more than any number of the tests. */
static double rank_of(double score)
{
    return isnan(score) ? INFINITY : score;
}

const char *oracle_index_judge(const struct oracle_indexer *x, int64_t position,
                               const double *scores, const int32_t *list, int32_t room,
                               double slack)
{
    const int64_t entries = oracle_index_entries(x, position);
    const bool tail = x->tail && (position + 1) % x->tokens_per_row != 0;
    const int64_t ends = x->first_entries + x->last_entries;
    const int64_t forced = ends < entries ? ends : entries;
    const int64_t most = x->topk + (x->forced_on_top ? forced + tail : 0);
    const int64_t length = entries + tail < most ? entries + tail : most;
    double worst = INFINITY; /* among entries listed for their score; the last such entry */
    int64_t worst_entry = -1, at = 0;
    for (int32_t i = 0; i < room; i++) {
        if (i >= length ? list[i] != -1 : list[i] < 0 || list[i] >= entries + tail) {
            return i >= length ? "an entry past the list's end is not -1"
                               : "an entry is none that the query sees";
        }
        if (i > 0 && i < length && list[i] <= list[i - 1]) {
            return "entries do not ascend";
        }
    }
    if (tail && list[length - 1] != entries) {
        return "the row that is not finished is missing";
    }
    for (int64_t e = 0; e < entries; e++) {
        const bool listed = at < length && list[at] == e;
        const bool must = e < x->first_entries || e >= entries - x->last_entries;
        at += listed;
        if (must && !listed) {
            return "a forced entry is missing";
        }
        if (listed && !must && rank_of(scores[e]) <= worst) {
            worst = rank_of(scores[e]);
            worst_entry = e;
        }
    }
    at = 0;
    for (int64_t e = 0; e < entries; e++) {
        const bool listed = at < length && list[at] == e;
        const double score = rank_of(scores[e]);
        at += listed;
        if (listed || e < x->first_entries || e >= entries - x->last_entries) {
            continue;
        }
        if (worst_entry >= 0 && score > worst + slack) {
            return "an entry is listed and one of a higher score is not";
        }
        if (worst_entry > e && score == worst && slack == 0) {
            return "of two equal scores the larger index is listed";
        }
    }
    return NULL;
}
