/* SPDX-License-Identifier: Apache-2.0 */
/* The schedule of one batch: which parts there are, longest first, and which are merged. It depends
 * on lengths and on the number of threads only, so that results do not depend on who runs what. */
#include "cpu_simd/internal.h"

#define MIN_ITEM_ROWS 24
#define PARTS_PER_THREAD 4 /* an item larger than 1 / (4 threads) of all is worth a cut */
#define DRAFT_ROWS 128     /* rows of a decode item of several queries, of all its heads */
#define MERGE_ROWS 64      /* rows of a merge, of one head */

static size_t align_up(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static int32_t max_parts(int32_t num_threads)
{
    return 2 * PARTS_PER_THREAD * num_threads;
}

static int32_t max_merges(int32_t num_threads)
{
    return 2 * max_parts(num_threads);
}

static int32_t draft_rows(const struct layer_shape *shape)
{
    return min_i32(DRAFT_ROWS, DECODE_ROWS * shape->num_heads);
}

static int64_t max_items(const struct layer_shape *shape, int64_t requests, int64_t tokens,
                         int32_t num_threads)
{
    int64_t least_tokens = shape->topk > 0 ? 1 : max_i32(1, MIN_ITEM_ROWS / shape->group);
    return (tokens / least_tokens + requests) * shape->num_heads + max_parts(num_threads);
}

static size_t bytes_of(int64_t items, int64_t merges)
{
    return align_up(sizeof(struct attend_schedule)) +
           align_up((size_t)items * sizeof(struct work_item)) +
           align_up((size_t)items * sizeof(int32_t)) +
           align_up((size_t)merges * sizeof(struct merge_item));
}

size_t schedule_bytes(const struct layer_shape *shape, const struct attn_limits *limits,
                      int32_t num_threads)
{
    int64_t items = max_items(shape, limits->max_num_reqs, limits->max_num_tokens, num_threads);
    return bytes_of(items, max_merges(num_threads));
}

static int32_t tokens_of_rows(const struct layer_shape *shape, int32_t rows)
{
    return max_i32(max_i32(1, MIN_ITEM_ROWS / shape->group), rows / shape->group);
}

/* Most tokens of an item. */
static int32_t tokens_of_item(const struct layer_shape *shape)
{
    return shape->topk > 0 ? 1 /* each query has its own list */
                           : tokens_of_rows(shape, shape->item_rows);
}

static struct needs needs_of(const struct layer_shape *shape, const struct attn_limits *limits,
                             int32_t num_threads)
{
    int64_t tokens = limits->max_num_tokens;
    int32_t item_tokens = tokens_of_item(shape);
    int32_t packed = (item_tokens < tokens ? item_tokens : (int32_t)tokens) * shape->group;
    int32_t whole = round_up(shape->group, 4) * shape->num_heads; /* see choose_heads */
    int32_t decode = whole <= shape->item_rows ? whole : round_up(shape->group, 4);
    int32_t drafts = tokens > 1 ? draft_rows(shape) : 0;
    struct needs needs = {.rows = max_i32(max_i32(packed, decode), drafts)};
    int32_t all_heads = shape->group * shape->num_heads;
    int64_t partial_rows = (int64_t)max_parts(num_threads) * max_i32(drafts, all_heads);
    if (limits->max_seq_len > 0) { /* a longer list of keys finds no place for its parts */
        int64_t parts = limits->max_seq_len < 2 * SPLIT_KEYS ? 0 : limits->max_seq_len / SPLIT_KEYS;
        bool few = parts == 0 || tokens * all_heads < partial_rows / parts;
        partial_rows = few ? tokens * all_heads * parts : partial_rows;
    }
    bool whole_items = num_threads == 1 || shape->batch_invariant;
    needs.partial_rows = whole_items ? 0 : (int32_t)partial_rows;
    return needs;
}

size_t workspace_bytes(const struct layer_shape *shape, const struct attn_limits *limits,
                       int32_t num_threads)
{
    struct attend_scratch scratch;
    struct needs needs = needs_of(shape, limits, num_threads);
    return place_scratch(&scratch, NULL, shape, needs.rows) * (size_t)num_threads + 256 +
           (size_t)needs.partial_rows * (size_t)(shape->width_padded + 2) * sizeof(float);
}

struct work_item *schedule_items(const struct attend_schedule *schedule)
{
    return (struct work_item *)((char *)schedule + align_up(sizeof(*schedule)));
}

int32_t *schedule_order(const struct attend_schedule *schedule)
{
    return (int32_t *)((char *)schedule_items(schedule) +
                       align_up((size_t)schedule->max_items * sizeof(struct work_item)));
}

struct merge_item *schedule_merges(const struct attend_schedule *schedule)
{
    return (struct merge_item *)((char *)schedule_order(schedule) +
                                 align_up((size_t)schedule->max_items * sizeof(int32_t)));
}

/* Packing keys costs as much as attending so many rows to them; most of it is reading memory. */
static int32_t pack_rows(const struct layer_shape *shape)
{
    return shape->kernels->flash != NULL ? 48 : 24;
}

/* A partial result costs a row as much as attending to so many keys. */
static int32_t part_keys(const struct layer_shape *shape)
{
    return shape->kernels->flash != NULL ? 256 : 64;
}

/* Rows of an item, of all its heads. */
static int32_t item_rows(const struct attend_problem *problem, const struct work_item *item)
{
    return item->num_tokens * problem->shape.group * item->num_heads;
}

/* Cost of an item, in keys times rows; 12 rows of a head account for reading the keys in place. */
static int64_t item_cost(const struct attend_problem *problem, const struct work_item *item)
{
    int64_t rows = item_rows(problem, item);
    rows += item->decode ? 12 * item->num_heads : pack_rows(&problem->shape);
    return ((int64_t)item->key_end - item->key_begin + 16) * rows;
}

/* Items of the decode path: a request's only queries if all their rows fit, and every query with a
 * list of its own. */
static void choose_path(const struct attend_problem *problem, int32_t decode_heads_of_item,
                        struct work_item *item)
{
    const struct layer_shape *shape = &problem->shape;
    bool tree = problem->batch->tree != NULL && problem->layer->tree_mask != ATTN_TREE_NONE;
    int32_t rows = item->num_tokens * shape->group;
    bool apart = shape->topk > 0 || request_queries(problem, item->request) == item->num_tokens;
    item->decode = shape->kernels->decode != NULL && !tree && !shape->rounds &&
                   !shape->any_prefix && rows <= shape->kernels->decode_rows && apart;
    bool together =
        item->num_tokens == 1 || decode_heads_of_item * round_up(rows, 4) <= draft_rows(shape);
    item->num_heads = item->decode && together ? decode_heads_of_item : 1;
}

/* Heads that one decode item takes: all, so that a block's memory is read in one run whatever the
 * layout (random 16 KiB runs cost twice the time of 128 KiB ones), unless threads would idle. */
static int32_t choose_heads(const struct attend_problem *problem, int32_t num_threads)
{
    const struct layer_shape *shape = &problem->shape;
    int64_t parts = 0;
    for (int32_t r = 0; r < problem->batch->num_reqs; r++) {
        bool one = problem->layer->batch_invariant != 0;
        parts += one ? 1 : 1 + request_keys(problem, r) / SPLIT_KEYS;
    }
    bool enough = num_threads == 1 || parts >= 2 * (int64_t)num_threads;
    int32_t rows = shape->num_heads * round_up(shape->group, 4);
    return enough && !shape->lists_per_head && rows <= shape->item_rows ? shape->num_heads : 1;
}

static void item_range(const struct attend_problem *problem, struct work_item *item)
{
    item->key_begin = INT32_MAX;
    item->key_end = 0;
    for (int32_t i = 0; i < item->num_tokens; i++) {
        struct interval seen = row_interval(problem, item->request, item->token + i);
        if (seen.high > seen.low) {
            item->key_begin = min_i32(item->key_begin, seen.low);
            item->key_end = max_i32(item->key_end, seen.high);
        }
    }
    item->key_begin = min_i32(item->key_begin, item->key_end);
}

struct builder {
    const struct attend_problem *problem;
    struct attend_schedule *schedule;
    int32_t decode_heads_of_item;
    int32_t num_threads;
    int32_t part_keys; /* most keys of a packed part of the request */
    int64_t total;     /* cost of all, after the first pass */
    int64_t target;    /* a larger item is split; 0: none is */
};

/* A request whose keys are packed. */
struct packed {
    int64_t queries;
    int64_t keys;      /* keys of its last item */
    int64_t mean_keys; /* mean keys of its items */
};

/* How a request is split into items. */
struct cut {
    int32_t tokens; /* tokens of an item */
    int32_t keys;   /* most keys of a part */
};

/* Cost of splitting a request this way, in keys times rows of a thread: work that is repeated or
 * added, and a third of the largest item, since some threads end before others. */
static int64_t cut_cost(const struct builder *builder, const struct packed *packed, int64_t tokens,
                        int64_t parts)
{
    const struct layer_shape *shape = &builder->problem->shape;
    int64_t items = (packed->queries + tokens - 1) / tokens;
    int64_t largest = (tokens * shape->group + pack_rows(shape)) * packed->keys / parts;
    int64_t extra = items * pack_rows(shape) * packed->mean_keys;
    if (parts > 1) {
        extra += packed->queries * shape->group * parts * part_keys(shape);
    }
    return (largest > builder->target ? largest : builder->target) / 3 +
           extra * shape->num_heads / builder->num_threads;
}

/* Chooses the cheapest split: items of fewer rows pack the same keys again, items of fewer keys
 * leave partial results. */
static struct cut cut_request(const struct builder *builder, int32_t request)
{
    const struct layer_shape *shape = &builder->problem->shape;
    int32_t queries = request_queries(builder->problem, request);
    int32_t most = min_i32(tokens_of_item(shape), max_i32(1, queries));
    struct cut best = {.tokens = most, .keys = INT32_MAX};
    if (builder->target == 0 || shape->topk > 0 || queries <= 0) {
        return best;
    }
    struct work_item last = {.request = request, .token = queries - most, .num_tokens = most};
    choose_path(builder->problem, builder->decode_heads_of_item, &last);
    if (last.decode) {
        return best; /* nothing is packed */
    }
    item_range(builder->problem, &last);
    struct interval first = row_interval(builder->problem, request, 0);
    struct packed packed = {.queries = queries, .keys = last.key_end - last.key_begin};
    packed.mean_keys = (packed.keys + first.high - first.low) / 2;
    int64_t least = INT64_MAX;
    int32_t step = max_i32(1, FLASH_ROWS / shape->group);
    for (int32_t rows = shape->item_rows;;
         rows = rows == shape->item_rows ? rows / 3 * 2 : rows / 2) {
        int32_t most_tokens = tokens_of_rows(shape, rows);
        int32_t items = (queries + most_tokens - 1) / most_tokens;
        int32_t tokens = min_i32(most_tokens, round_up((queries + items - 1) / items, step));
        int64_t heads = (int64_t)shape->num_heads;
        for (int32_t parts = 1;
             parts == 1 || (parts * SPLIT_KEYS <= packed.keys && !shape->rounds &&
                            items * heads * parts <= max_parts(builder->num_threads) &&
                            packed.queries * shape->group * heads * parts <=
                                builder->schedule->needs.partial_rows);
             parts *= 2) {
            int64_t cost = cut_cost(builder, &packed, tokens, parts);
            if (cost < least) {
                least = cost;
                best = (struct cut){tokens, (int32_t)((packed.keys + parts - 1) / parts)};
            }
        }
        if (rows <= MIN_ITEM_ROWS) {
            return best;
        }
    }
}

/* Calls `visit` for every item before splitting. */
static attn_status each_item(struct builder *builder,
                             attn_status (*visit)(struct builder *, const struct work_item *))
{
    const struct attend_problem *problem = builder->problem;
    for (int32_t r = 0; r < problem->batch->num_reqs; r++) {
        int32_t queries = request_queries(problem, r);
        struct cut cut = cut_request(builder, r);
        builder->part_keys = cut.keys;
        for (int32_t t = 0; t < queries; t += cut.tokens) {
            struct work_item item = {.request = r, .token = t, .partial = -1};
            item.num_tokens = min_i32(cut.tokens, queries - t);
            choose_path(problem, builder->decode_heads_of_item, &item);
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

/* Tokens of an item that are merged together; rows of many by several threads. */
static int32_t merge_tokens(const struct work_item *item, int32_t group)
{
    return item->num_heads > 1 ? item->num_tokens : max_i32(1, MERGE_ROWS / group);
}

static int32_t parts_of(const struct builder *builder, const struct work_item *item)
{
    const struct attend_schedule *schedule = builder->schedule;
    int64_t keys = (int64_t)item->key_end - item->key_begin;
    int32_t step = merge_tokens(item, builder->problem->shape.group);
    int32_t merges = (item->num_tokens + step - 1) / step;
    if (builder->target == 0 || builder->problem->shape.rounds || keys < 2 * SPLIT_KEYS ||
        schedule->num_merges + merges > schedule->max_merges) {
        return 1;
    }
    int64_t parts =
        item->decode ? (item_cost(builder->problem, item) + builder->target - 1) / builder->target
                     : (keys + builder->part_keys - 1) / builder->part_keys;
    parts = parts < keys / SPLIT_KEYS ? parts : keys / SPLIT_KEYS;
    int32_t left = min_i32(max_parts(builder->num_threads) - schedule->num_parts,
                           (schedule->needs.partial_rows - schedule->num_partial_rows) /
                               item_rows(builder->problem, item));
    return left < 2 ? 1 : parts < left ? (int32_t)parts : left;
}

static void add_merges(struct attend_schedule *schedule, const struct work_item *item,
                       int32_t group, int32_t parts)
{
    int32_t part_rows = item->num_tokens * group * item->num_heads;
    struct merge_item merge = {.first = schedule->num_partial_rows,
                               .part_rows = part_rows,
                               .count = parts,
                               .request = item->request,
                               .head = item->head,
                               .num_heads = item->num_heads};
    int32_t step = merge_tokens(item, group);
    for (int32_t t = 0; t < item->num_tokens; t += step, merge.first += step * group) {
        merge.token = item->token + t;
        merge.num_tokens = min_i32(step, item->num_tokens - t);
        schedule_merges(schedule)[schedule->num_merges++] = merge;
    }
}

static attn_status add_item(struct builder *builder, const struct work_item *whole)
{
    struct attend_schedule *schedule = builder->schedule;
    int32_t parts = parts_of(builder, whole);
    int32_t rows = item_rows(builder->problem, whole);
    if (schedule->num_items + parts > schedule->max_items) {
        return ATTN_ERROR_LIMIT;
    }
    struct work_item item = *whole;
    int64_t keys = (int64_t)whole->key_end - whole->key_begin;
    if (parts > 1) {
        add_merges(schedule, whole, builder->problem->shape.group, parts);
        schedule->num_parts += parts;
    }
    for (int32_t i = 0; i < parts; i++) {
        /* cut where pages and tiles end */
        int64_t end = (whole->key_begin + keys * (i + 1) / parts) / TILE_KEYS * TILE_KEYS;
        item.key_end = i + 1 == parts ? whole->key_end : (int32_t)end;
        if (parts > 1) {
            item.partial = schedule->num_partial_rows;
            schedule->num_partial_rows += rows;
        }
        schedule_items(schedule)[schedule->num_items++] = item;
        item.key_begin = item.key_end;
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

static void sort_items(const struct attend_problem *problem, struct attend_schedule *schedule)
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

attn_status schedule_make(const struct attend_problem *problem, const struct attn_limits *limits,
                          void *memory, int32_t num_threads, struct attn_error *error)
{
    struct attend_schedule *schedule = memory;
    struct builder builder = {.problem = problem, .schedule = schedule, .num_threads = num_threads};
    const struct attn_batch *batch = problem->batch;
    int64_t tokens = (int64_t)batch->query_start_loc[batch->num_reqs] - batch->query_start_loc[0];
    /* no more than what schedule_bytes counted for the limits that the core holds batches to */
    *schedule = (struct attend_schedule){
        .max_items = (int32_t)max_items(&problem->shape, batch->num_reqs, tokens, num_threads),
        .max_merges = max_merges(num_threads),
        .needs = needs_of(&problem->shape, limits, num_threads)};
    builder.decode_heads_of_item = choose_heads(problem, num_threads);
    if (problem->layer->batch_invariant == 0 && num_threads > 1) {
        attn_status status = each_item(&builder, add_cost);
        if (status != ATTN_OK) {
            return status;
        }
        builder.target = max_i32(1, PARTS_PER_THREAD * num_threads);
        builder.target = builder.total / builder.target + 1;
    }
    if (each_item(&builder, add_item) != ATTN_OK) {
        return plugin_error(error, ATTN_ERROR_LIMIT, "num_tokens",
                            "the batch has more work items than the plan's limits allow");
    }
    sort_items(problem, schedule);
    return ATTN_OK;
}

/* keys of a tile, and those that kernels read past its end */
static size_t packed_keys(const struct layer_shape *shape)
{
    return (shape->kernels->flash != NULL ? FLASH_KEYS : TILE_KEYS) + 2;
}

size_t packed_bytes(const struct layer_shape *shape, bool keys)
{
    size_t row = (size_t)(keys ? shape->depth_padded : shape->width_padded);
    return align_up(packed_keys(shape) * row * (size_t)shape->kernels->element_bytes);
}

size_t place_scratch(struct attend_scratch *scratch, char *memory, const struct layer_shape *shape,
                     int32_t item_rows)
{
    size_t at = 0;
    size_t element = (size_t)shape->kernels->element_bytes;
    size_t rows = (size_t)item_rows + ROW_BLOCK_MAX;
    size_t depth = (size_t)shape->depth_padded;
    size_t width = (size_t)shape->width_padded;
    size_t wider = depth > width ? depth : width;
    size_t tile = packed_keys(shape);
#define PLACE(field, bytes)                                                                        \
    (scratch->field = memory != NULL ? (void *)(memory + at) : NULL, at += align_up(bytes) + 64)
    PLACE(q, rows * depth * element);
    PLACE(acc_o, rows * width * sizeof(float));
    PLACE(scores,
          (rows < DECODE_SCORE_ROWS ? rows : DECODE_SCORE_ROWS) * SCORE_STRIDE * sizeof(float));
    PLACE(keys, packed_bytes(shape, true));
    PLACE(values, packed_bytes(shape, false));
    PLACE(stage_keys, tile * depth * element);
    PLACE(stage_values, tile * width * element);
    PLACE(zero_row, wider * element);
    PLACE(row, wider * sizeof(float));
    PLACE(q_scale, rows * sizeof(float));
    PLACE(row_max, rows * sizeof(float));
    PLACE(row_sum, rows * sizeof(float));
    PLACE(scores_scale, rows * sizeof(float));
    PLACE(low, rows * sizeof(int32_t));
    PLACE(high, rows * sizeof(int32_t));
    PLACE(token_low, rows * sizeof(int32_t));
    PLACE(token_high, rows * sizeof(int32_t));
    PLACE(seen, rows * sizeof(int32_t));
    PLACE(blocks, (rows / FLASH_ROWS + 1) * sizeof(struct flash_block));
    PLACE(key_rows, 2 * tile * sizeof(void *));
    PLACE(value_rows, 2 * tile * sizeof(void *));
    PLACE(next_rows, 4 * (size_t)DECODE_MAX_KEYS * sizeof(void *));
    PLACE(scale_rows, (FLASH_KEYS + tile) * sizeof(void *));
    PLACE(key_scale, tile * sizeof(float));
    PLACE(value_scale, tile * sizeof(float));
    PLACE(key_zero, tile * sizeof(int32_t));
    PLACE(value_zero, tile * sizeof(int32_t));
    PLACE(sink_q, shape->sink_len > 0 ? ROW_BLOCK_MAX * depth * element : 0);
    PLACE(sink_rows, shape->sink_len > 0 ? TILE_KEYS * wider * element : 0);
#undef PLACE
    /* pages of their own, and not all at the same place in the caches' sets */
    return (at + 4095) / 4096 * 4096 + 256;
}
