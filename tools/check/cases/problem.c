/* SPDX-License-Identifier: Apache-2.0 */
/* Lengths of a case's requests, and room for its buffers. */
#include "cases/problem.h"

#include <string.h>

#include "support/number.h"
#include "support/random.h"

#define MAX_SEQ_LEN 160
#define MAX_LONG_SEQ_LEN 1700
#define LEAST_PROMPT 40 /* queries of a prompt after a long context */
#define PADDING_ROWS 3
#define SHARED_KEYS 256 /* the least prefix of a cascade, a multiple of every block size */
#define SHARED_REQS 8   /* its least number of requests */
#define SPARE_BLOCKS 9  /* entries of a table's row by which bounds may exceed the requests */

static int32_t draw_length(uint64_t *random, int32_t block_size, int32_t least)
{
    static const int32_t edges[] = {-1, 0, 1};
    int32_t length = 1 + random_below(random, MAX_SEQ_LEN);
    if (random_below(random, 3) == 0 && block_size < MAX_SEQ_LEN) { /* at a page's edge */
        int32_t pages = 1 + random_below(random, MAX_SEQ_LEN / block_size);
        length = pages * block_size + edges[random_below(random, 3)];
    }
    return length < least ? least : length;
}

static int32_t draw_query_len(const struct check_problem *p, int32_t r, uint64_t *random)
{
    switch (p->shape) {
    case SHAPE_SPECULATIVE:
        return 4;
    case SHAPE_PREFILL:
    case SHAPE_CONTIGUOUS:
    case SHAPE_CROSS_KEYS:
        if (p->lists.prompts) {
            return MAX_SEQ_LEN + random_below(random, 2 * MAX_SEQ_LEN);
        }
        return draw_length(random, p->block_size, 1) / 2 + 1;
    case SHAPE_EXTEND:
        return 1 + random_below(random, 37);
    case SHAPE_MIXED:
        return r >= p->num_reqs / 2 ? 1 + random_below(random, 37) : 1;
    case SHAPE_LONG_EXTEND:
        return p->prompts ? LEAST_PROMPT + random_below(random, LEAST_PROMPT)
                          : 2 + random_below(random, 4);
    case SHAPE_SHARED:
    case SHAPE_CROSS:
        return 1 + random_below(random, 3);
    default:
        return 1;
    }
}

static struct request draw_request(const struct check_problem *p, int32_t r, uint64_t *random)
{
    struct request request = {draw_query_len(p, r, random), 0};
    switch (p->shape) {
    case SHAPE_PREFILL:
    case SHAPE_CONTIGUOUS:
        request.seq_len = request.query_len;
        break;
    case SHAPE_CROSS_KEYS:
        request.seq_len = 1 + random_below(random, MAX_SEQ_LEN);
        break;
    case SHAPE_SHARED:
        request.seq_len = SHARED_KEYS + request.query_len + random_below(random, 40);
        break;
    case SHAPE_LONG_DECODE:
    case SHAPE_LONG_EXTEND:
        request.seq_len =
            MAX_LONG_SEQ_LEN / (p->shape == SHAPE_LONG_EXTEND && !p->prompts ? 2 : 1) -
            random_below(random, MAX_LONG_SEQ_LEN / 3);
        break;
    default:
        request.seq_len = p->lists.many > 0
                              ? MAX_LONG_SEQ_LEN - random_below(random, MAX_LONG_SEQ_LEN / 3)
                              : draw_length(random, p->block_size, request.query_len);
    }
    return request;
}

static void draw_requests(struct check_problem *p, uint64_t *random)
{
    bool is_long = p->shape == SHAPE_LONG_DECODE || p->shape == SHAPE_LONG_EXTEND;
    /* where a static sink is composed, requests without keys are not known */
    bool unknown_sink = p->v[FACTOR_STATIC_SINK].a && p->v[FACTOR_LENGTHS].a == LENGTHS_DEVICE;
    p->num_reqs = is_long                    ? 1 + random_below(random, 2)
                  : p->lists.many > 0        ? PROBLEM_MAX_REQS
                  : p->shape == SHAPE_SHARED ? SHARED_REQS + random_below(random, 2)
                                             : 3 + random_below(random, 5);
    p->shared = p->shape == SHAPE_SHARED ? SHARED_KEYS : 0;
    for (int32_t r = 0; r < p->num_reqs; r++) {
        p->requests[r] = draw_request(p, r, random);
    }
    if (p->shape == SHAPE_MIXED) { /* an idle request after the decodes, with keys or without */
        struct request *idle = &p->requests[p->num_reqs / 2];
        *idle = (struct request){0, random_below(random, 2) * idle->seq_len};
    } else if (p->shape == SHAPE_DECODE && !unknown_sink && random_below(random, 3) == 0) {
        /* a padding row */
        p->requests[p->num_reqs - 1].seq_len = 0;
    }
    p->num_actual_tokens = p->num_keys = p->first_row = p->v[FACTOR_FIRST_ROW].a;
    for (int32_t r = 0; r < p->num_reqs; r++) {
        const struct request *request = &p->requests[r];
        p->num_actual_tokens += request->query_len;
        p->num_keys += p->paged ? request->query_len : request->seq_len;
        p->num_context += problem_context(p, r);
        int64_t blocks = (request->seq_len + p->block_size - 1) / p->block_size;
        p->num_blocks += p->paged ? blocks : 0;
        p->table_stride = blocks > p->table_stride ? blocks : p->table_stride;
    }
    p->num_blocks += 3; /* never written: poison */
    p->table_stride += SPARE_BLOCKS;
    p->num_tokens = p->num_actual_tokens + PADDING_ROWS;
    p->num_tokens += p->v[FACTOR_LENGTHS].a == LENGTHS_HOST_BOUNDS ? PROBLEM_LOOSE_ROWS : 0;
    p->num_logits = p->v[FACTOR_FAST_PREFILL].a ? p->num_actual_tokens / 3 + 2 : 0;
}

/* Room for `count` of `size` bytes each. */
static size_t add(struct check_problem *p, const char *name, int64_t count, size_t size)
{
    return image_add(&p->image, name, (size_t)count * size, 256, false);
}

static size_t add_output(struct check_problem *p, const char *name, int64_t count, size_t size)
{
    return image_add(&p->image, name, (size_t)count * size, 256, true);
}

static void add_tensors(struct check_problem *p)
{
    struct problem_buffers *at = &p->at;
    const int32_t tokens = p->num_tokens, sink = p->v[FACTOR_STATIC_SINK].a;
    const int64_t keys = p->num_keys + p->num_tokens - p->num_actual_tokens;
    const int64_t blocks = p->paged ? p->num_blocks : 0;
    const size_t e = number_bytes(p->dtype);
    at->q = add(p, "q", tokens * problem_row_elements(p, p->hq, p->d), number_bytes(p->q_dtype));
    at->k = add(p, "k", keys * problem_row_elements(p, p->hk, p->d), e);
    at->v = add(p, "v", keys * problem_row_elements(p, p->hk, p->dv), e);
    at->out = add_output(p, "out", tokens * problem_row_elements(p, p->hq, p->dv), e);
    at->lse = add_output(p, "lse", tokens * 2 * p->hq, sizeof(float));
    at->cache = add_output(p, "k_cache or v_cache", views_cache_bytes(p->v, blocks), 1);
    at->cache_scales = add_output(p, "the caches' scales", views_scales_bytes(p->v, blocks), 1);
    at->context_k = add(p, "k of earlier steps", p->num_context * p->hk * p->d, e);
    at->cache_end = at->context_k;
    at->context_v = add(p, "v of earlier steps", p->num_context * p->hk * p->dv, e);
    at->sink_k = add(p, "sink_k", sink * p->hk * p->d, e);
    at->sink_v = add(p, "sink_v", sink * p->hk * p->dv, e);
}

static void add_arrays(struct check_problem *p)
{
    struct problem_buffers *at = &p->at;
    const int32_t reqs = p->num_reqs;
    const int64_t tree = PROBLEM_TREE_WIDTH * PROBLEM_TREE_WIDTH * (p->v[FACTOR_TREE].a != 0);
    at->context_slots = add(p, "slots of earlier steps", p->num_context, sizeof(int64_t));
    at->query_start_loc = add(p, "query_start_loc", reqs + 1, sizeof(int32_t));
    at->key_start_loc = add(p, "key_start_loc", reqs + 1, sizeof(int32_t));
    at->seq_lens = add(p, "seq_lens", reqs, sizeof(int32_t));
    at->block_table = add(p, "block_table", 2 * reqs * p->table_stride, sizeof(int32_t));
    at->other_table = add(p, "another block_table", 2 * reqs * p->table_stride, sizeof(int32_t));
    at->block_table_row = add(p, "block_table_row", reqs, sizeof(int32_t));
    at->slot_mapping = add(p, "slot_mapping", p->num_tokens, sizeof(int64_t));
    at->other_slots = add(p, "another slot_mapping", p->num_tokens, sizeof(int64_t));
    at->logits_indices = add(p, "logits_indices", p->num_logits, sizeof(int32_t));
    at->causal = add(p, "causal_per_request", reqs, 1);
    at->sinks = add(p, "sinks", p->hq, sizeof(float));
    at->alibi_slopes = add(p, "alibi_slopes", p->hq, sizeof(float));
    at->q_scale = add(p, "q_scale", p->hk, sizeof(float));
    at->k_scale = add(p, "k_scale", p->hk, sizeof(float));
    at->v_scale = add(p, "v_scale", p->hk, sizeof(float));
    at->p_scale = add(p, "p_scale", 1, sizeof(float));
    at->signs_k = add(p, "hadamard_signs_k", p->d, sizeof(float));
    at->signs_v = add(p, "hadamard_signs_v", p->dv, sizeof(float));
    at->channel_scale = add(p, "v_channel_scale", p->hk * p->dv, sizeof(float));
    at->spans = add(p, "spans", 4 * reqs, sizeof(int32_t));
    at->span_start_loc = add(p, "span_start_loc", reqs + 1, sizeof(int32_t));
    at->tree = add(p, "tree", reqs * tree, sizeof(float));
}

static void add_lists(struct check_problem *p)
{
    const struct lists_shape *shape = &p->lists_shape;
    if (p->lists.granularity > 0) {
        p->lists_shape = lists_shape(&p->space->caps, &p->lists, p->hq, p->hk);
        p->at.indices = add(p, "indices", p->num_tokens * shape->token_stride, sizeof(int32_t));
        p->at.list_lengths =
            add(p, "lengths of lists", p->num_tokens * shape->per_token, sizeof(int32_t));
    }
}

void problem_init(struct check_problem *p, const struct case_space *space,
                  const struct attend_case *attend_case, uint64_t seed)
{
    uint64_t random = seed;
    memset(p, 0, sizeof *p);
    p->space = space;
    case_values(space, attend_case, p->v);
    p->output = attend_case->output;
    p->lists = attend_case->lists;
    p->prompts = attend_case->prompts;
    p->shape = p->v[FACTOR_SHAPE].a;
    p->dtype = p->v[FACTOR_DTYPE].a;
    p->hq = p->v[FACTOR_HEADS].a;
    p->hk = p->v[FACTOR_HEADS].b;
    p->d = p->v[FACTOR_HEAD_SIZE].a;
    p->dv = p->v[FACTOR_HEAD_SIZE].b;
    p->block_size = p->v[FACTOR_BLOCK_SIZE].a;
    p->paged = shape_is_paged(p->shape);
    p->phase = case_phase(p->v);
    p->q_dtype = p->v[FACTOR_QUERY].a ? p->v[FACTOR_QUERY].a : p->dtype;
    draw_requests(p, &random);
    add_tensors(p);
    add_arrays(p);
    output_add(p);
    add_lists(p);
    problem_fill(p, &random);
}
