/* SPDX-License-Identifier: Apache-2.0 */
/* Lengths of a case's requests, and room for its buffers. */
#include "cases/problem.h"

#include <string.h>

#include "cases/output.h"
#include "support/number.h"
#include "support/random.h"
#include "cases/views.h"

#define MAX_SEQ_LEN 160
#define MAX_LONG_SEQ_LEN 1700
#define PADDING_ROWS 3
#define SHARED_KEYS 256 /* the least prefix of a cascade, a multiple of every block size */
#define SHARED_REQS 8   /* its least number of requests */
#define SPARE_BLOCKS 9  /* of a table's row: bounds may be that much longer than the requests */

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

static int32_t draw_query_len(const struct problem *p, int32_t r, uint64_t *random)
{
    switch (p->v[FACTOR_SHAPE].a) {
    case SHAPE_SPECULATIVE:
        return 4;
    case SHAPE_PREFILL:
    case SHAPE_CONTIGUOUS:
    case SHAPE_CROSS_KEYS:
        return draw_length(random, p->v[FACTOR_BLOCK_SIZE].a, 1) / 2 + 1;
    case SHAPE_EXTEND:
        return 1 + random_below(random, 37);
    case SHAPE_MIXED:
        return r >= p->num_reqs / 2 ? 1 + random_below(random, 37) : 1;
    case SHAPE_LONG_EXTEND:
        return 2 + random_below(random, 4);
    case SHAPE_SHARED:
    case SHAPE_CROSS:
        return 1 + random_below(random, 3);
    default:
        return 1;
    }
}

static struct request draw_request(const struct problem *p, int32_t r, uint64_t *random)
{
    int32_t shape = p->v[FACTOR_SHAPE].a;
    struct request request = {draw_query_len(p, r, random), 0};
    switch (shape) {
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
        request.seq_len = MAX_LONG_SEQ_LEN / (shape == SHAPE_LONG_EXTEND ? 2 : 1) -
                          random_below(random, MAX_LONG_SEQ_LEN / 3);
        break;
    default:
        request.seq_len = draw_length(random, p->v[FACTOR_BLOCK_SIZE].a, request.query_len);
    }
    return request;
}

static void draw_requests(struct problem *p, uint64_t *random)
{
    int32_t shape = p->v[FACTOR_SHAPE].a;
    int32_t block_size = p->v[FACTOR_BLOCK_SIZE].a;
    bool is_long = shape == SHAPE_LONG_DECODE || shape == SHAPE_LONG_EXTEND;
    /* where a static sink is composed, requests without keys are not known */
    bool unknown_sink = p->v[FACTOR_STATIC_SINK].a && p->v[FACTOR_LENGTHS].a == LENGTHS_DEVICE;
    p->num_reqs = is_long                 ? 1 + random_below(random, 2)
                  : shape == SHAPE_SHARED ? SHARED_REQS + random_below(random, 2)
                                          : 3 + random_below(random, 5);
    p->shared = shape == SHAPE_SHARED ? SHARED_KEYS : 0;
    for (int32_t r = 0; r < p->num_reqs; r++) {
        p->requests[r] = draw_request(p, r, random);
    }
    if (shape == SHAPE_MIXED) { /* an idle request after the decodes, with keys or without */
        struct request *idle = &p->requests[p->num_reqs / 2];
        *idle = (struct request){0, random_below(random, 2) * idle->seq_len};
    } else if (shape == SHAPE_DECODE && !unknown_sink && random_below(random, 3) == 0) {
        /* a padding row */
        p->requests[p->num_reqs - 1].seq_len = 0;
    }
    p->num_actual_tokens = p->num_keys = p->first_row = p->v[FACTOR_FIRST_ROW].a;
    for (int32_t r = 0; r < p->num_reqs; r++) {
        const struct request *request = &p->requests[r];
        p->num_actual_tokens += request->query_len;
        p->num_keys += p->paged ? request->query_len : request->seq_len;
        p->num_context += problem_context(p, r);
        int64_t blocks = (request->seq_len + block_size - 1) / block_size;
        p->num_blocks += p->paged ? blocks : 0;
        p->table_stride = blocks > p->table_stride ? blocks : p->table_stride;
    }
    p->num_blocks += 3; /* never written: poison */
    p->table_stride += SPARE_BLOCKS;
    p->num_tokens = p->num_actual_tokens + PADDING_ROWS;
    p->num_tokens += p->v[FACTOR_LENGTHS].a == LENGTHS_HOST_BOUNDS ? PROBLEM_LOOSE_ROWS : 0;
    p->num_logits = p->v[FACTOR_FAST_PREFILL].a ? p->num_actual_tokens / 3 + 2 : 0;
}

static void add_tensors(struct problem *p)
{
    struct image *im = &p->image;
    struct problem_buffers *at = &p->at;
    int32_t hq = p->v[FACTOR_HEADS].a, hk = p->v[FACTOR_HEADS].b;
    int32_t d = p->v[FACTOR_HEAD_SIZE].a, dv = p->v[FACTOR_HEAD_SIZE].b;
    size_t e = number_bytes(p->v[FACTOR_DTYPE].a), q_e = number_bytes(p->q_dtype);
    size_t tokens = (size_t)p->num_tokens, context = (size_t)p->num_context;
    size_t keys = (size_t)(p->num_keys + p->num_tokens - p->num_actual_tokens),
           sink = (size_t)p->v[FACTOR_STATIC_SINK].a;
    int64_t blocks = p->paged ? p->num_blocks : 0;
    at->q = image_add(im, "q", tokens * (size_t)problem_row_elements(p, hq, d) * q_e, 256, false);
    at->k = image_add(im, "k", keys * (size_t)problem_row_elements(p, hk, d) * e, 256, false);
    at->v = image_add(im, "v", keys * (size_t)problem_row_elements(p, hk, dv) * e, 256, false);
    at->out = image_add(im, "out", tokens * (size_t)problem_row_elements(p, hq, dv) * e, 256, true);
    at->lse = image_add(im, "lse", tokens * (size_t)hq * 2 * sizeof(float), 256, true);
    at->cache =
        image_add(im, "k_cache or v_cache", (size_t)views_cache_bytes(p->v, blocks), 256, true);
    at->cache_scales =
        image_add(im, "the caches' scales", (size_t)views_scales_bytes(p->v, blocks), 256, true);
    at->context_k = image_add(im, "k of earlier steps", context * (size_t)(hk * d) * e, 256, false);
    at->cache_end = at->context_k;
    at->context_v =
        image_add(im, "v of earlier steps", context * (size_t)(hk * dv) * e, 256, false);
    at->sink_k = image_add(im, "sink_k", sink * (size_t)(hk * d) * e, 256, false);
    at->sink_v = image_add(im, "sink_v", sink * (size_t)(hk * dv) * e, 256, false);
}

static void add_arrays(struct problem *p)
{
    struct image *im = &p->image;
    struct problem_buffers *at = &p->at;
    int32_t hq = p->v[FACTOR_HEADS].a, hk = p->v[FACTOR_HEADS].b;
    int32_t d = p->v[FACTOR_HEAD_SIZE].a, dv = p->v[FACTOR_HEAD_SIZE].b;
    size_t reqs = (size_t)p->num_reqs, tokens = (size_t)p->num_tokens;
    size_t table = 2 * reqs * (size_t)p->table_stride * sizeof(int32_t);
    size_t tree = reqs * PROBLEM_TREE_WIDTH * PROBLEM_TREE_WIDTH * sizeof(float);
    at->context_slots = image_add(im, "slots of earlier steps",
                                  (size_t)p->num_context * sizeof(int64_t), 256, false);
    at->query_start_loc =
        image_add(im, "query_start_loc", (reqs + 1) * sizeof(int32_t), 256, false);
    at->key_start_loc = image_add(im, "key_start_loc", (reqs + 1) * sizeof(int32_t), 256, false);
    at->seq_lens = image_add(im, "seq_lens", reqs * sizeof(int32_t), 256, false);
    at->block_table = image_add(im, "block_table", table, 256, false);
    at->other_table = image_add(im, "another block_table", table, 256, false);
    at->block_table_row = image_add(im, "block_table_row", reqs * sizeof(int32_t), 256, false);
    at->slot_mapping = image_add(im, "slot_mapping", tokens * sizeof(int64_t), 256, false);
    at->other_slots = image_add(im, "another slot_mapping", tokens * sizeof(int64_t), 256, false);
    at->logits_indices =
        image_add(im, "logits_indices", (size_t)p->num_logits * sizeof(int32_t), 256, false);
    at->causal = image_add(im, "causal_per_request", reqs, 256, false);
    at->sinks = image_add(im, "sinks", (size_t)hq * sizeof(float), 256, false);
    at->alibi_slopes = image_add(im, "alibi_slopes", (size_t)hq * sizeof(float), 256, false);
    at->q_scale = image_add(im, "q_scale", (size_t)hk * sizeof(float), 256, false);
    at->k_scale = image_add(im, "k_scale", (size_t)hk * sizeof(float), 256, false);
    at->v_scale = image_add(im, "v_scale", (size_t)hk * sizeof(float), 256, false);
    at->p_scale = image_add(im, "p_scale", sizeof(float), 256, false);
    at->signs_k = image_add(im, "hadamard_signs_k", (size_t)d * sizeof(float), 256, false);
    at->signs_v = image_add(im, "hadamard_signs_v", (size_t)dv * sizeof(float), 256, false);
    at->channel_scale =
        image_add(im, "v_channel_scale", (size_t)(hk * dv) * sizeof(float), 256, false);
    at->spans = image_add(im, "spans", 4 * reqs * sizeof(int32_t), 256, false);
    at->span_start_loc = image_add(im, "span_start_loc", (reqs + 1) * sizeof(int32_t), 256, false);
    at->tree = image_add(im, "tree", p->v[FACTOR_TREE].a ? tree : 0, 256, false);
}

static void add_lists(struct problem *p)
{
    const size_t tokens = (size_t)p->num_tokens;
    if (p->lists.granularity == 0) {
        return;
    }
    p->lists_shape =
        lists_shape(&p->space->caps, &p->lists, p->v[FACTOR_HEADS].a, p->v[FACTOR_HEADS].b);
    p->at.indices =
        image_add(&p->image, "indices",
                  tokens * (size_t)p->lists_shape.token_stride * sizeof(int32_t), 256, false);
    p->at.list_lengths =
        image_add(&p->image, "lengths of lists",
                  tokens * (size_t)p->lists_shape.per_token * sizeof(int32_t), 256, false);
}

bool problem_init(struct problem *p, const struct case_space *space,
                  const struct attend_case *attend_case, uint64_t seed)
{
    uint64_t random = seed;
    memset(p, 0, sizeof *p);
    p->space = space;
    case_values(space, attend_case, p->v);
    p->output = attend_case->output;
    p->lists = attend_case->lists;
    int32_t shape = p->v[FACTOR_SHAPE].a;
    p->paged = shape_is_paged(shape);
    p->phase = case_phase(p->v);
    p->q_dtype = p->v[FACTOR_QUERY].a ? p->v[FACTOR_QUERY].a : p->v[FACTOR_DTYPE].a;
    image_init(&p->image);
    draw_requests(p, &random);
    add_tensors(p);
    add_arrays(p);
    output_add(p);
    add_lists(p);
    if (p->image.failed) {
        image_finish(&p->image);
        return false;
    }
    problem_fill(p, &random);
    if (p->image.failed) {
        image_finish(&p->image);
        return false;
    }
    return true;
}

void problem_finish(struct problem *p)
{
    image_finish(&p->image);
}
