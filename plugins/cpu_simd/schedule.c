/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule of one batch: which parts there are, longest first, and which are merged. It depends
 * on lengths and on the number of threads only, so that results do not depend on who runs what. */
#include "internal.h"

#define MIN_ITEM_ROWS 24
#define PARTS_PER_THREAD 4 /* an item larger than 1 / (4 threads) of all is split */

static size_t align_up(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static int32_t max_partials(int32_t num_threads)
{
    return 2 * PARTS_PER_THREAD * num_threads;
}

/* of one partial: accumulator rows, references, sums */
size_t partial_floats(const struct layer_shape *shape, const struct needs *needs)
{
    size_t rows = (size_t)needs->partial_rows;
    return align_up(rows * (size_t)(shape->width_padded + 2) * sizeof(float)) / sizeof(float);
}

/* Rows of several queries that one direct item takes, of all its heads. */
static int32_t draft_rows(const struct layer_shape *shape)
{
    return at_most(2 * SPLIT_ROWS, DIRECT_ROWS * shape->num_heads);
}

static int64_t max_items(const struct layer_shape *shape, int64_t requests, int64_t tokens,
                         int32_t num_threads)
{
    int64_t least_tokens = shape->topk > 0 ? 1 : at_least(1, MIN_ITEM_ROWS / shape->group);
    return (tokens / least_tokens + requests) * shape->num_heads + max_partials(num_threads);
}

static size_t bytes_of(int64_t items, int64_t merges)
{
    return align_up(sizeof(struct schedule)) + align_up((size_t)items * sizeof(struct work_item)) +
           align_up((size_t)items * sizeof(int32_t)) +
           align_up((size_t)merges * sizeof(struct merge_item));
}

size_t schedule_bytes(const struct layer_shape *shape, const struct attn_limits *limits,
                      int32_t num_threads)
{
    int64_t items = max_items(shape, limits->max_num_reqs, limits->max_num_tokens, num_threads);
    return bytes_of(items, max_partials(num_threads));
}

/* Tokens of an item in a batch of `tokens`: fewer where the batch would not fill the threads. Batch
 * invariance wants a number that depends on the layer alone. */
static int32_t tokens_of_item(const struct layer_shape *shape, int64_t tokens, int32_t num_threads)
{
    int64_t rows = shape->item_rows;
    if (shape->topk > 0) {
        return 1; /* each query has its own list */
    }
    if (!shape->batch_invariant) {
        int64_t share = tokens * shape->group * shape->num_heads / (8 * (int64_t)num_threads);
        rows = share < MIN_ITEM_ROWS ? MIN_ITEM_ROWS : share < rows ? share : rows;
    }
    return at_least(at_least(1, MIN_ITEM_ROWS / shape->group), (int32_t)(rows / shape->group));
}

static struct needs needs_of(const struct layer_shape *shape, const struct attn_limits *limits,
                             int32_t num_threads)
{
    int64_t tokens = limits->max_num_tokens;
    int32_t item_tokens = tokens_of_item(shape, tokens, num_threads);
    int32_t packed = (item_tokens < tokens ? item_tokens : (int32_t)tokens) * shape->group;
    int32_t whole = round_up(shape->group, 4) * shape->num_heads; /* see choose_heads */
    int32_t direct = whole <= shape->item_rows ? whole : round_up(shape->group, 4);
    int32_t drafts = tokens > 1 ? draft_rows(shape) : 0;
    struct needs needs = {.rows = at_least(at_least(packed, direct), drafts)};
    int64_t partials = max_partials(num_threads);
    if (limits->max_seq_len > 0) { /* a longer list of keys finds no place for its parts */
        int64_t items = max_items(shape, limits->max_num_reqs, tokens, 0);
        int64_t parts = limits->max_seq_len < 2 * SPLIT_KEYS ? 0 : limits->max_seq_len / SPLIT_KEYS;
        partials = parts == 0 || items < partials / parts ? items * parts : partials;
    }
    needs.partials = num_threads == 1 || shape->batch_invariant ? 0 : (int32_t)partials;
    needs.partial_rows = at_least(at_most(packed, at_least(SPLIT_ROWS, shape->group)),
                                  at_least(drafts, shape->group * shape->num_heads));
    return needs;
}

size_t workspace_bytes(const struct layer_shape *shape, const struct attn_limits *limits,
                       int32_t num_threads)
{
    struct scratch_layout layout;
    struct needs needs = needs_of(shape, limits, num_threads);
    scratch_init(&layout, shape, needs.rows);
    return layout.bytes * (size_t)num_threads + 256 +
           (size_t)needs.partials * partial_floats(shape, &needs) * sizeof(float);
}

struct work_item *schedule_items(const struct schedule *schedule)
{
    return (struct work_item *)((char *)schedule + align_up(sizeof(*schedule)));
}

int32_t *schedule_order(const struct schedule *schedule)
{
    return (int32_t *)((char *)schedule_items(schedule) +
                       align_up((size_t)schedule->max_items * sizeof(struct work_item)));
}

struct merge_item *schedule_merges(const struct schedule *schedule)
{
    return (struct merge_item *)((char *)schedule_order(schedule) +
                                 align_up((size_t)schedule->max_items * sizeof(int32_t)));
}

/* What an item costs, in keys times rows; 12 rows stand for reading the keys at all. */
static int64_t item_cost(const struct problem *problem, const struct work_item *item)
{
    int64_t rows = (int64_t)item->num_tokens * problem->shape.group + 12;
    return ((int64_t)item->key_end - item->key_begin + 16) * rows * item->num_heads;
}

/* A request's only queries, if all their rows fit, go the direct way, and every query with a list
 * of its own. */
static void choose_path(const struct problem *problem, int32_t direct_heads, struct work_item *item)
{
    const struct layer_shape *shape = &problem->shape;
    bool tree = problem->batch->tree != NULL && problem->layer->tree_mask != ATTN_TREE_NONE;
    int32_t rows = item->num_tokens * shape->group;
    bool apart = shape->topk > 0 || request_queries(problem, item->request) == item->num_tokens;
    item->direct = shape->engine->direct != NULL && !tree && !shape->rounds && !shape->any_prefix &&
                   rows <= shape->engine->direct_rows && apart;
    bool together = item->num_tokens == 1 || direct_heads * round_up(rows, 4) <= draft_rows(shape);
    item->num_heads = item->direct && together ? direct_heads : 1;
}

/* Heads that one decode item takes: all, so that a block's memory is read in one run whatever the
 * layout (random 16 KiB runs cost twice the time of 128 KiB ones), unless threads would idle. */
static int32_t choose_heads(const struct problem *problem, int32_t num_threads)
{
    const struct layer_shape *shape = &problem->shape;
    int64_t parts = 0;
    for (int32_t r = 0; r < problem->batch->num_reqs; r++) {
        bool one = problem->layer->batch_invariant != 0;
        parts += one ? 1 : 1 + request_keys(problem, r) / SPLIT_KEYS;
    }
    bool enough = num_threads == 1 || parts >= 2 * (int64_t)num_threads;
    int32_t rows = shape->num_heads * round_up(shape->group, 4);
    return enough && rows <= shape->item_rows ? shape->num_heads : 1;
}

static void item_range(const struct problem *problem, struct work_item *item)
{
    item->key_begin = INT32_MAX;
    item->key_end = 0;
    for (int32_t i = 0; i < item->num_tokens; i++) {
        struct interval seen = row_interval(problem, item->request, item->token + i);
        if (seen.high > seen.low) {
            item->key_begin = at_most(item->key_begin, seen.low);
            item->key_end = at_least(item->key_end, seen.high);
        }
    }
    item->key_begin = at_most(item->key_begin, item->key_end);
}

struct builder {
    const struct problem *problem;
    struct schedule *schedule;
    int32_t tokens_per_item;
    int32_t direct_heads;
    int32_t num_threads;
    int64_t total;  /* cost of all, after the first pass */
    int64_t target; /* largest cost of an item that may be split */
};

/* Calls `visit` for every item before splitting. */
static attn_status each_item(struct builder *builder,
                             attn_status (*visit)(struct builder *, const struct work_item *))
{
    const struct problem *problem = builder->problem;
    for (int32_t r = 0; r < problem->batch->num_reqs; r++) {
        int32_t queries = request_queries(problem, r);
        for (int32_t t = 0; t < queries; t += builder->tokens_per_item) {
            struct work_item item = {.request = r, .token = t, .partial = -1};
            item.num_tokens = at_most(builder->tokens_per_item, queries - t);
            choose_path(problem, builder->direct_heads, &item);
            item_range(problem, &item);
            for (int32_t h = 0; h < problem->shape.num_heads; h += item.num_heads) {
                item.head = h;
                attn_status status = visit(builder, &item);
                if (status != ATTN_OK) {
                    return status;
                }
            }
        }
    }
    return ATTN_OK;
}

static attn_status add_cost(struct builder *builder, const struct work_item *item)
{
    builder->total += item_cost(builder->problem, item);
    return ATTN_OK;
}

static int32_t parts_of(const struct builder *builder, const struct work_item *item)
{
    int64_t rows = (int64_t)item->num_tokens * builder->problem->shape.group;
    int64_t keys = (int64_t)item->key_end - item->key_begin;
    if (builder->target == 0 || builder->problem->shape.rounds ||
        (item->num_heads == 1 && rows > at_least(SPLIT_ROWS, builder->problem->shape.group)) ||
        keys < 2 * SPLIT_KEYS) {
        return 1;
    }
    int64_t parts = (item_cost(builder->problem, item) + builder->target - 1) / builder->target;
    parts = parts < keys / SPLIT_KEYS ? parts : keys / SPLIT_KEYS;
    int64_t left = (int64_t)builder->schedule->needs.partials - builder->schedule->num_partials;
    return parts <= 1 || parts > left ? 1 : (int32_t)parts;
}

static attn_status add_item(struct builder *builder, const struct work_item *whole)
{
    struct schedule *schedule = builder->schedule;
    int32_t parts = parts_of(builder, whole);
    if (schedule->num_items + parts > schedule->max_items) {
        return ATTN_ERROR_LIMIT;
    }
    struct work_item item = *whole;
    int64_t keys = (int64_t)whole->key_end - whole->key_begin;
    if (parts > 1) {
        struct merge_item merge = {.first = schedule->num_partials,
                                   .count = parts,
                                   .request = item.request,
                                   .head = item.head,
                                   .num_heads = item.num_heads,
                                   .token = item.token,
                                   .num_tokens = item.num_tokens};
        schedule_merges(schedule)[schedule->num_merges++] = merge;
    }
    for (int32_t i = 0; i < parts; i++) {
        /* cut at multiples of 64 keys, so that pages and tiles stay whole */
        int32_t from = (int32_t)(keys * i / parts) / 64 * 64;
        int32_t to = i + 1 == parts ? (int32_t)keys : (int32_t)(keys * (i + 1) / parts) / 64 * 64;
        item.key_begin = whole->key_begin + from;
        item.key_end = whole->key_begin + to;
        item.partial = parts > 1 ? schedule->num_partials++ : -1;
        schedule_items(schedule)[schedule->num_items++] = item;
    }
    return ATTN_OK;
}

/* Costs in steps of a quarter octave: counting sort, largest first, stable. */
static int32_t cost_class(int64_t cost)
{
    int32_t log = 0;
    while (cost >> (log + 1) != 0) {
        log++;
    }
    int32_t quarter = log >= 2 ? (int32_t)(cost >> (log - 2)) & 3 : 0;
    return 255 - (4 * log + quarter);
}

static void sort_items(const struct problem *problem, struct schedule *schedule)
{
    int32_t start[257] = {0};
    const struct work_item *items = schedule_items(schedule);
    int32_t *order = schedule_order(schedule);
    for (int32_t i = 0; i < schedule->num_items; i++) {
        start[cost_class(item_cost(problem, &items[i])) + 1]++;
    }
    for (int32_t i = 0; i < 256; i++) {
        start[i + 1] += start[i];
    }
    for (int32_t i = 0; i < schedule->num_items; i++) {
        order[start[cost_class(item_cost(problem, &items[i]))]++] = i;
    }
}

attn_status schedule_make(const struct problem *problem, const struct attn_limits *limits,
                          void *memory, int32_t num_threads, struct attn_error *error)
{
    struct schedule *schedule = memory;
    struct builder builder = {.problem = problem, .schedule = schedule, .num_threads = num_threads};
    const struct attn_batch *batch = problem->batch;
    int64_t tokens = (int64_t)batch->query_start_loc[batch->num_reqs] - batch->query_start_loc[0];
    /* no more than what schedule_bytes counted for the limits that the core holds batches to */
    *schedule = (struct schedule){
        .max_items = (int32_t)max_items(&problem->shape, batch->num_reqs, tokens, num_threads),
        .max_merges = max_partials(num_threads),
        .needs = needs_of(&problem->shape, limits, num_threads)};
    builder.tokens_per_item = tokens_of_item(&problem->shape, tokens, num_threads);
    builder.direct_heads = choose_heads(problem, num_threads);
    if (problem->layer->batch_invariant == 0 && num_threads > 1) {
        attn_status status = each_item(&builder, add_cost);
        if (status != ATTN_OK) {
            return status;
        }
        builder.target = at_least(1, PARTS_PER_THREAD * num_threads);
        builder.target = builder.total / builder.target + 1;
    }
    if (each_item(&builder, add_item) != ATTN_OK) {
        return fail(error, ATTN_ERROR_LIMIT, "num_tokens",
                    "the batch has more work items than the plan's limits allow");
    }
    sort_items(problem, schedule);
    return ATTN_OK;
}

size_t packed_bytes(const struct layer_shape *shape, bool keys)
{
    size_t row = (size_t)(keys ? shape->depth_padded : shape->width_padded);
    return align_up((TILE_KEYS + 2) * row * (size_t)shape->engine->element_bytes);
}

void scratch_init(struct scratch_layout *layout, const struct layer_shape *shape, int32_t item_rows)
{
    size_t at = 0;
    size_t element = (size_t)shape->engine->element_bytes;
    size_t rows = (size_t)item_rows + ROW_BLOCK_MAX;
    size_t depth = (size_t)shape->depth_padded;
    size_t width = (size_t)shape->width_padded;
    size_t wider = depth > width ? depth : width;
    size_t tile = TILE_KEYS + 2;
    size_t tiles = shape->engine->flash != NULL ? FLASH_TILES : 1; /* packed at a time */
#define PLACE(field, bytes) (layout->field = at, at += align_up(bytes) + 64)
    PLACE(q, rows * depth * element);
    PLACE(accumulator, rows * width * sizeof(float));
    PLACE(scores,
          (rows < DIRECT_SCORE_ROWS ? rows : DIRECT_SCORE_ROWS) * SCORE_STRIDE * sizeof(float));
    PLACE(keys, tiles * packed_bytes(shape, true));
    PLACE(values, tiles * packed_bytes(shape, false));
    PLACE(stage_keys, tile * depth * element);
    PLACE(stage_values, tile * width * element);
    PLACE(zero_row, wider * element);
    PLACE(row, wider * sizeof(float));
    PLACE(q_scale, rows * sizeof(float));
    PLACE(reference, rows * sizeof(float));
    PLACE(sum, rows * sizeof(float));
    PLACE(rescale, rows * sizeof(float));
    PLACE(low, tiles * rows * sizeof(int32_t));
    PLACE(high, tiles * rows * sizeof(int32_t));
    PLACE(token_low, rows * sizeof(int32_t));
    PLACE(token_high, rows * sizeof(int32_t));
    PLACE(seen, rows * sizeof(int32_t));
    PLACE(blocks, tiles * (rows / FLASH_ROWS + 1) * sizeof(struct flash_block));
    PLACE(key_rows, 2 * tile * sizeof(void *));
    PLACE(value_rows, 2 * tile * sizeof(void *));
    PLACE(next_rows, 4 * (size_t)DIRECT_MOST_KEYS * sizeof(void *));
    PLACE(scale_rows, 4 * tile * sizeof(void *));
    PLACE(key_scale, tile * sizeof(float));
    PLACE(value_scale, tile * sizeof(float));
    PLACE(key_zero, tile * sizeof(int32_t));
    PLACE(value_zero, tile * sizeof(int32_t));
    PLACE(sink_q, shape->sink_len > 0 ? ROW_BLOCK_MAX * depth * element : 0);
    PLACE(sink_rows, shape->sink_len > 0 ? TILE_KEYS * wider * element : 0);
#undef PLACE
    /* pages of their own, and not all at the same place in the caches' sets */
    layout->bytes = (at + 4095) / 4096 * 4096 + 256;
}
