/* SPDX-License-Identifier: Apache-2.0 */
/* What stands in the buffers of a case. */
#include <math.h>
#include <stdlib.h>

#include "common/bound.h"
#include "common/command.h"
#include "support/number.h"
#include "cases/problem.h"
#include "support/random.h"

#define LOGIT_DEVIATION 4.0
#define GARBAGE_BLOCK 0x7ffffff0
#define P_SCALE (1.0 / 300)
#define HUGE_VALUE 1e38
#define TIE_STEP 0x1p-6 /* the exact int8 scale of one row */

static const double scales[] = {0.031, 0.047, 0.022, 0.039, 0.027, 0.052, 0.035, 0.044, 0.029};
#define SCALE_OF(i) scales[(i) % 9]

static void fill_lengths(struct check_problem *p, uint64_t *random)
{
    int32_t *query_start_loc = PROBLEM_AT(p, int32_t, query_start_loc);
    int32_t *key_start_loc = PROBLEM_AT(p, int32_t, key_start_loc);
    int32_t *seq_lens = PROBLEM_AT(p, int32_t, seq_lens);
    query_start_loc[0] = p->first_row;
    key_start_loc[0] = p->first_row;
    for (int32_t r = 0; r < p->num_reqs; r++) {
        query_start_loc[r + 1] = query_start_loc[r] + p->requests[r].query_len;
        key_start_loc[r + 1] = key_start_loc[r] + p->requests[r].seq_len;
        seq_lens[r] = p->requests[r].seq_len;
        PROBLEM_AT(p, uint8_t, causal)[r] = (uint8_t)random_below(random, 2);
    }
    /* Rows that fast prefill computes: ascending, padded with repetitions of the last. */
    int32_t *rows = PROBLEM_AT(p, int32_t, logits_indices);
    for (int32_t i = 0; i < p->num_logits; i++) {
        int32_t row = 3 * i + 1;
        rows[i] = row < p->num_actual_tokens ? row : p->num_actual_tokens - 1;
    }
}

/* A request's blocks, from a shuffled order of all, and the slots of its tokens. Shared keys are
 * those of the first request. */
static void fill_table(struct check_problem *p, int32_t r, int32_t *entries, const int32_t *order,
                       int64_t *slots, int64_t *context_slots)
{
    const struct request *request = &p->requests[r];
    int32_t window = p->v[FACTOR_WINDOW].a;
    int32_t context = problem_context(p, r);
    const int32_t *row = PROBLEM_AT(p, int32_t, block_table_row);
    const int32_t *first = PROBLEM_AT(p, int32_t, block_table) + row[0] * p->table_stride;
    for (int32_t j = 0; j < request->seq_len; j++) {
        bool shared = r > 0 && j < p->shared;
        if (j % p->block_size == 0) {
            entries[j / p->block_size] = (shared ? first : order)[j / p->block_size];
        }
        int64_t slot = (int64_t)entries[j / p->block_size] * p->block_size + j % p->block_size;
        if (j < context) {
            context_slots[j] = shared ? -1 : slot;
        } else {
            slots[j - context] = slot;
        }
    }
    /* what no query's window reaches may be anything */
    if (window > 0 && p->v[FACTOR_SPANS].a == 0 && p->shared == 0) {
        for (int32_t b = 0; (b + 1) * p->block_size <= context - window; b++) {
            entries[b] = -GARBAGE_BLOCK;
        }
    }
}

static void fill_tables(struct check_problem *p, uint64_t *random)
{
    int32_t *table = PROBLEM_AT(p, int32_t, block_table);
    int32_t *row = PROBLEM_AT(p, int32_t, block_table_row);
    int64_t *slots = PROBLEM_AT(p, int64_t, slot_mapping) + p->first_row;
    int64_t *context_slots = PROBLEM_AT(p, int64_t, context_slots);
    int32_t *order = command_calloc((size_t)p->num_blocks, sizeof *order), *next = order;
    random_order(random, order, (int32_t)p->num_blocks, 0);
    for (int64_t i = 0; i < 2 * p->num_reqs * p->table_stride; i++) {
        table[i] = GARBAGE_BLOCK;
        (PROBLEM_AT(p, int32_t, other_table))[i] = random_below(random, (int32_t)p->num_blocks);
    }
    for (int32_t t = 0; t < p->num_tokens; t++) {
        (PROBLEM_AT(p, int64_t, slot_mapping))[t] = -1;
        (PROBLEM_AT(p, int64_t, other_slots))[t] = -1;
    }
    for (int32_t r = 0; r < p->num_reqs; r++) {
        const struct request *request = &p->requests[r];
        row[r] = p->v[FACTOR_TABLE_ROW].a ? (2 * p->num_reqs - 1 - 2 * r) : r;
        fill_table(p, r, table + row[r] * p->table_stride, next, slots, context_slots);
        next += (request->seq_len + p->block_size - 1) / p->block_size;
        slots += request->query_len;
        context_slots += problem_context(p, r);
    }
    free(order);
}

static void fill_scales(struct check_problem *p)
{
    double wide = p->q_dtype == ATTN_DTYPE_INT8 ? 4 : 1; /* 127 steps have to hold a query */
    *PROBLEM_AT(p, float, p_scale) = (float)P_SCALE;
    for (int32_t h = 0; h < p->hk; h++) {
        (PROBLEM_AT(p, float, q_scale))[h] = (float)(wide * SCALE_OF(h + 2));
        (PROBLEM_AT(p, float, k_scale))[h] = (float)SCALE_OF(h);
        (PROBLEM_AT(p, float, v_scale))[h] = (float)SCALE_OF(h + 4);
    }
    for (int32_t i = 0; i < p->hk * p->dv; i++) {
        (PROBLEM_AT(p, float, channel_scale))[i] = (float)SCALE_OF(5 * i + i / p->dv);
    }
}

static void fill_signs(struct check_problem *p, uint64_t *random)
{
    float *k = PROBLEM_AT(p, float, signs_k);
    float *v = PROBLEM_AT(p, float, signs_v);
    for (int32_t d = 0; d < p->d; d++) {
        k[d] = random_below(random, 2) ? 1 : -1;
    }
    for (int32_t d = 0; d < p->dv; d++) {
        v[d] = random_below(random, 2) ? 1 : -1;
    }
}

static void fill_spans(struct check_problem *p, uint64_t *random)
{
    int32_t *spans = PROBLEM_AT(p, int32_t, spans);
    int32_t *span_start_loc = PROBLEM_AT(p, int32_t, span_start_loc);
    span_start_loc[0] = 0;
    for (int32_t r = 0; r < p->num_reqs; r++) { /* two, inclusive, where there is room */
        int32_t length = p->requests[r].seq_len;
        if (length >= 8) {
            int32_t *span = spans + 2 * (size_t)p->num_spans;
            span[0] = random_below(random, length / 4);
            span[1] = span[0] + random_below(random, length / 4);
            span[2] = length / 2 + random_below(random, length / 4);
            span[3] = random_below(random, 3) ? span[2] + random_below(random, length - span[2])
                                              : INT32_MAX; /* to the request's end */
            p->num_spans += 2;
        }
        span_start_loc[r + 1] = p->num_spans;
    }
}

static void fill_terms(struct check_problem *p, uint64_t *random)
{
    for (int32_t h = 0; h < p->hq; h++) {
        (PROBLEM_AT(p, float, sinks))[h] = (float)(3 + 4 * random_normal(random));
        (PROBLEM_AT(p, float, alibi_slopes))[h] = (float)(0.9 * random_unit(random));
    }
    fill_spans(p, random);
    size_t rows = (size_t)p->num_reqs * PROBLEM_TREE_WIDTH;
    if (p->v[FACTOR_TREE].a == ATTN_TREE_BITS) {
        uint32_t *words = PROBLEM_AT(p, uint32_t, tree);
        for (size_t i = 0; i < rows * (PROBLEM_TREE_WIDTH / 32); i++) {
            words[i] = (uint32_t)random_bits(random);
        }
    } else if (p->v[FACTOR_TREE].a == ATTN_TREE_BIAS) {
        float *bias = PROBLEM_AT(p, float, tree);
        for (size_t i = 0; i < rows * PROBLEM_TREE_WIDTH; i++) {
            bias[i] = random_below(random, 3) ? (float)(2 * random_normal(random)) : -INFINITY;
        }
    }
}

/* The scale that both sides use for a head, from the device's floats or the host's. */
static double scale_of_head(const struct check_problem *p, size_t scales, int32_t form,
                            int32_t head)
{
    const float *device = (const float *)(p->image.bytes + scales);
    if (p->v[FACTOR_SCALE_SOURCE].a == 2 && form == ATTN_SCALE_PER_TENSOR) {
        return 1;
    }
    return device[form == ATTN_SCALE_PER_HEAD ? head : 0];
}

/* Stored = saturate(x / scale); the scale is that of the query's KV head. */
static double query_scale(const struct check_problem *p, int32_t q_head)
{
    return p->v[FACTOR_QUERY].a == 0
               ? 1
               : scale_of_head(p, p->at.q_scale, p->v[FACTOR_QUERY].b, q_head / (p->hq / p->hk));
}

static void fill_queries(struct check_problem *p, uint64_t *random)
{
    int64_t stride = problem_row_elements(p, p->hq, p->d);
    for (int64_t t = p->first_row; t < p->num_actual_tokens; t++) {
        for (int32_t i = 0; i < p->hq * p->d; i++) {
            number_store(p->image.bytes + p->at.q, t * stride + i, p->q_dtype,
                         LOGIT_DEVIATION * random_normal(random) / query_scale(p, i / p->d));
        }
    }
}

/* Where key j of a request stands: among the context's rows or the step's. */
struct key_place {
    size_t rows; /* offset of the buffer */
    int64_t at;  /* first element of the row */
};

static struct key_place key_place(const struct check_problem *p, bool value, int32_t r, int32_t j)
{
    int32_t d = value ? p->dv : p->d;
    int64_t key = p->first_row, context = 0;
    for (int32_t i = 0; i < r; i++) {
        const struct request *request = &p->requests[i];
        key += p->paged ? request->query_len : request->seq_len;
        context += problem_context(p, i);
    }
    int32_t own = problem_context(p, r);
    if (j < own) {
        return (struct key_place){value ? p->at.context_v : p->at.context_k,
                                  (context + j) * p->hk * d};
    }
    return (struct key_place){value ? p->at.v : p->at.k,
                              (key + j - own) * problem_row_elements(p, p->hk, d)};
}

/* One key per request and KV head points along the last query of one of the head's queries. */
static void plant_needles(struct check_problem *p, uint64_t *random)
{
    uint8_t *base = p->image.bytes;
    const double times = case_score_times(p->v);
    int64_t end = p->first_row;
    for (int32_t r = 0; r < p->num_reqs; r++) {
        const struct request *request = &p->requests[r];
        end += request->query_len;
        for (int32_t h = 0; h < p->hk && request->query_len > 0 && request->seq_len > 0; h++) {
            int32_t q_head = h * (p->hq / p->hk) + random_below(random, p->hq / p->hk);
            int64_t q_row = (end - 1) * problem_row_elements(p, p->hq, p->d) + q_head * p->d;
            struct key_place key = key_place(p, false, r, random_below(random, request->seq_len));
            double norm = 0, scale = query_scale(p, q_head);
            for (int32_t i = 0; i < p->d; i++) {
                double x = scale * number_load(base + p->at.q, q_row + i, p->q_dtype);
                norm += x * x;
            }
            for (int32_t i = 0; i < p->d; i++) {
                double x = scale * number_load(base + p->at.q, q_row + i, p->q_dtype);
                number_store(base + key.rows, key.at + h * p->d + i, p->dtype,
                             times * LARGEST_SCORE * sqrt(p->d) / norm * x);
            }
        }
    }
}

/* Values of one sign and size; the sum of two is larger than the format can hold. */
static void enlarge_values(struct check_problem *p)
{
    for (int32_t r = 0; r < p->num_reqs && p->v[FACTOR_HUGE].a == HUGE_VALUES; r++) {
        for (int32_t j = 0; j < p->requests[r].seq_len; j++) {
            const struct key_place row = key_place(p, true, r, j);
            for (int32_t i = 0; i < p->hk * p->dv; i++) {
                uint8_t *values = p->image.bytes + row.rows;
                const double x = number_load(values, row.at + i, p->dtype);
                number_store(values, row.at + i, p->dtype, HUGE_VALUE * (1.2 + 0.2 * sin(x)));
            }
        }
    }
}

/* A row of halves of int8 steps, so that a wrong rounding shows: its scale is TIE_STEP exactly. */
static void plant_ties(struct check_problem *p)
{
    int32_t kv = p->v[FACTOR_KV_DTYPE].a;
    bool of_value = kv == ATTN_KV_INT8_PER_TOKEN_HEAD;
    bool of_key = of_value || kv == ATTN_KV_INT8_KV || kv == ATTN_KV_INT8_K;
    for (int32_t value = 0; value < 2; value++) {
        int32_t d = value ? p->dv : p->d;
        if (!(value ? of_value : of_key) || p->requests[0].seq_len == 0) {
            continue;
        }
        struct key_place row = key_place(p, value != 0, 0, p->requests[0].seq_len - 1);
        for (int32_t i = 0; i < p->hk * d; i++) {
            double x = (i % d % 31 + 0.5) * (i % 2 ? -1 : 1);
            number_store(p->image.bytes + row.rows, row.at + i, p->dtype,
                         TIE_STEP * (i % d == 0 ? 127 : x));
        }
    }
}

/* One key and one value carry a NaN: queries that see them show it, others do not. Static int8
 * values have no NaN. */
static void plant_nans(struct check_problem *p, uint64_t *random)
{
    int32_t r = random_below(random, p->num_reqs), dtype = p->dtype;
    if (!p->v[FACTOR_NAN].a || p->requests[r].seq_len == 0) {
        return;
    }
    for (int32_t value = 0; value < 2; value++) {
        int32_t d = value ? p->dv : p->d;
        int32_t element = random_below(random, p->hk * d);
        int32_t least = p->requests[r].seq_len / 2; /* so that some query does not see it */
        int32_t j = least + random_below(random, p->requests[r].seq_len - least);
        struct key_place row = key_place(p, value != 0, r, j);
        if (!value || p->v[FACTOR_KV_DTYPE].a != ATTN_KV_INT8_KV) {
            number_store(p->image.bytes + row.rows, row.at + element, dtype, NAN);
        }
    }
}

static void fill_keys(struct check_problem *p, uint64_t *random)
{
    const int32_t hk = p->hk, sink_len = p->v[FACTOR_STATIC_SINK].a;
    const int32_t k = hk * p->d, v = hk * p->dv;
    const int32_t first = p->first_row, apart = p->v[FACTOR_STRIDES].a ? 2 : 1;
    const struct {
        size_t at;
        int32_t first, end, width;
        int64_t stride;
    } rows[] = {
        {p->at.k, first, p->num_keys, k, apart * k}, {p->at.v, first, p->num_keys, v, apart * v},
        {p->at.context_k, 0, p->num_context, k, k},  {p->at.context_v, 0, p->num_context, v, v},
        {p->at.sink_k, 0, sink_len, k, k},           {p->at.sink_v, 0, sink_len, v, v}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (int64_t t = rows[i].first; t < rows[i].end; t++) {
            number_fill_normal(p->image.bytes + rows[i].at, t * rows[i].stride, rows[i].width,
                               p->dtype, 1, random);
        }
    }
}

/* Every token's lists, of its own request. */
static void fill_lists(struct check_problem *p, uint64_t *random)
{
    const int32_t *row = PROBLEM_AT(p, int32_t, block_table_row);
    int64_t first = p->first_row;
    for (int32_t r = 0; r < p->num_reqs && p->lists.granularity > 0; r++) {
        const struct listed_request request = {p->requests[r].seq_len, p->block_size,
                                               PROBLEM_AT(p, int32_t, block_table) +
                                                   row[r] * p->table_stride,
                                               p->num_blocks * p->block_size};
        lists_fill(&p->lists, &p->lists_shape, &request, first, first + p->requests[r].query_len,
                   PROBLEM_AT(p, int32_t, indices), PROBLEM_AT(p, int32_t, list_lengths), random);
        first += p->requests[r].query_len;
    }
}

void problem_fill(struct check_problem *p, uint64_t *random)
{
    fill_lengths(p, random);
    if (p->paged) {
        fill_tables(p, random);
    }
    fill_scales(p);
    fill_signs(p, random);
    fill_terms(p, random);
    fill_queries(p, random);
    fill_keys(p, random);
    plant_needles(p, random);
    plant_ties(p);
    plant_nans(p, random);
    enlarge_values(p);
    fill_lists(p, random);
}
