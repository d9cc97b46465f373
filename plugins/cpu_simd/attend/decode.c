/* SPDX-License-Identifier: Apache-2.0 */
/* The direct (decode) path: a few queries, their groups' heads as rows, keys and values read in
 * place and once; keys that not all of them see go the packed way behind the others (run_keys). Per
 * KV head and key, D 128, bf16: 512 bytes and 1 KiFLOP per query head, so the memory bounds it.
 *
 * A tile is 32 to 128 keys. The scores of all its heads are taken before their values, in the order
 * in which memory has them: with heads apart (HND) head by head, with a token's heads side by side
 * (NHD) some tokens at a time. Many rows go head by head in both. */
#include "direct.h"

enum { SOFTMAX_ROWS = 4 }; /* between which lines are asked for */

static int32_t rows_of_head(const struct problem *problem, const struct work_item *item)
{
    int32_t rows = item->num_tokens * problem->shape.group;
    bool codes = problem->keys.direct_codes || problem->values.direct_codes;
    return rows == 1 && !codes ? 1 : round_up(rows, 4);
}

static void direct_terms(const struct direct *direct, int32_t head, int32_t first, int32_t n,
                         float *scores)
{
    const struct problem *problem = &direct->run->problem;
    const struct attn_layer_desc *layer = problem->layer;
    const struct work_item *item = direct->item;
    int32_t group = problem->shape.group;
    int32_t position = request_keys(problem, item->request) -
                       request_queries(problem, item->request) + item->token;
    struct score_terms terms = {
        .scale = key_factor(problem, head), .soft_cap = layer->soft_cap, .alibi = layer->alibi};
    if (problem->keys.row_scale) {
        terms.key_scale = direct->key_scale;
    }
    for (int32_t r = 0; r < item->num_tokens * group; r++) {
        int32_t query = r / group;
        terms.distance = (float)(position + query - first);
        if (layer->alibi != ATTN_ALIBI_NONE) {
            terms.slope = problem->params->alibi_slopes[head * group + r % group];
        }
        problem->instance->variant->terms(scores + (int64_t)r * SCORE_STRIDE,
                                          round_up(n, COLUMN_MULTIPLE), &terms);
    }
}

/* Rows of one head of the tile: in place, or staged where the engine cannot read them there. */
static const void **head_rows(const struct direct *direct, const struct direct_step *step,
                              const struct row_source *source, struct stage *stage, int64_t *offset)
{
    const void **rows = stage->rows + step->from;
    *offset = step->head * source->stride_head;
    if (!source->stage || source->direct_codes) {
        return rows;
    }
    for (int32_t i = 0; i < step->keys; i++) {
        direct->staged_rows[i] = (const char *)rows[i] + *offset;
    }
    *offset = 0;
    stage->problem = &direct->run->problem;
    stage->source = source;
    stage->n = step->keys;
    stage->first = step->first + step->from;
    stage->rows = direct->staged_rows;
    stage->scale_offset = step->head * source->scale_stride_head;
    stage_rows(stage);
    return direct->staged_rows;
}

/* Whether arithmetic, not memory, bounds the item, of keys and of values. */
static bool has_many_rows(const struct direct *direct)
{
    int32_t keys = direct->run->problem.keys.direct->many_rows;
    int32_t values = direct->run->problem.values.direct->many_rows;
    return keys > 0 && values > 0 && direct->rows_padded >= at_least(keys, values);
}

/* A share of the lines to come, into the second cache: softmax asks for none itself. */
static void prefetch_some(struct direct_args *ahead, int32_t keys)
{
    for (int32_t i = 0; i < keys; i++) {
        for (int32_t line = 0; line < ahead->next_lines; line++) {
            __builtin_prefetch(ahead->next_rows[i] + ahead->next_offset + 64 * line, 0, 2);
        }
    }
    ahead->next_rows += keys;
    ahead->next_keys -= keys;
}

static void direct_softmax(const struct direct *direct, const struct direct_step *step,
                           float *scores, struct direct_args *ahead)
{
    const struct problem *problem = &direct->run->problem;
    const struct layer_shape *shape = &problem->shape;
    const struct scratch_layout *at = &direct->run->layout;
    int32_t index = step->head * direct->rows_padded;
    int32_t low[DIRECT_ROWS] = {0};
    int32_t high[DIRECT_ROWS];
    for (int32_t r = 0; r < DIRECT_ROWS; r++) {
        high[r] = step->n;
    }
    float factor = key_factor(problem, direct->item->head + step->head);
    float *rescale = (float *)(direct->scratch + at->rescale);
    struct softmax_args softmax = {
        .scores = scores,
        .rows = direct->item->num_tokens * shape->group,
        .end = round_up(step->n, COLUMN_MULTIPLE),
        .low = low,
        .high = high,
        .factor = problem->terms ? LOG2_E : factor * LOG2_E,
        .reference = (float *)(direct->scratch + at->reference) + index,
        .sum = (float *)(direct->scratch + at->sum) + index,
        .rescale = rescale,
        .value_scale = problem->values.row_scale ? direct->value_scale : NULL,
    };
    const int32_t rows = softmax.rows;
    const bool tiles = problem->values.direct->tiles && has_many_rows(direct);
    const int32_t some = tiles ? SOFTMAX_ROWS : rows,
                  keys = tiles ? ahead->next_keys / DIRECT_ROWS : 0;
    for (int32_t r = 0; r < rows; r += some) {
        prefetch_some(ahead, keys);
        softmax.rows = at_most(some, rows - r);
        shape->engine->softmax(&softmax);
        softmax.scores += (int64_t)some * SCORE_STRIDE;
        softmax.reference += some;
        softmax.sum += some;
        softmax.rescale += some;
    }
    float *accumulator = (float *)(direct->scratch + at->accumulator);
    for (int32_t r = 0; r < rows; r++) {
        if (rescale[r] != 1.0f) {
            problem->instance->variant->scale_row(accumulator +
                                                      (int64_t)(index + r) * shape->width_padded,
                                                  rescale[r], shape->width_padded);
        }
    }
}

static float *step_scores(const struct direct *direct, const struct direct_step *step)
{
    return (float *)(direct->scratch + direct->run->layout.scores) +
           (int64_t)(step->head - step->first_head) * direct->rows_padded * SCORE_STRIDE;
}

static void step_of_scores(const struct direct *direct, const struct direct_step *step)
{
    const struct problem *problem = &direct->run->problem;
    const struct layer_shape *shape = &problem->shape;
    const struct scratch_layout *at = &direct->run->layout;
    int32_t index = step->head * direct->rows_padded;
    const char *q = direct->scratch + at->q +
                    (int64_t)index * shape->depth_padded * shape->engine->element_bytes;
    struct direct_args args = {.keys = step->keys,
                               .rows = direct->rows_padded,
                               .q_scale = (float *)(direct->scratch + at->q_scale) + index,
                               .depth = shape->depth_padded,
                               .zero_row = direct->scratch + at->zero_row,
                               .zeros = direct->key_zero,
                               .element = problem->keys.element};
    struct stage stage = {.memory = direct->scratch + at->stage_keys,
                          .padded = shape->depth_padded,
                          .rows = direct->key_rows,
                          .scale_rows = direct->key_scales,
                          .scales = direct->key_scale};
    args.key_rows =
        (const char *const *)head_rows(direct, step, &problem->keys, &stage, &args.offset);
    ahead_of_scores(direct, step, &args);
    problem->keys.direct->scores(step_scores(direct, step) + step->from, q, &args);
}

static void step_of_values(const struct direct *direct, const struct direct_step *step)
{
    const struct problem *problem = &direct->run->problem;
    const struct layer_shape *shape = &problem->shape;
    const struct scratch_layout *at = &direct->run->layout;
    float *accumulator = (float *)(direct->scratch + at->accumulator) +
                         (int64_t)step->head * direct->rows_padded * shape->width_padded;
    struct direct_args args = {.keys = step->keys,
                               .rows = direct->rows_padded,
                               .depth = shape->width_padded,
                               .zero_row = direct->scratch + at->zero_row,
                               .zeros = direct->value_zero,
                               .element = problem->values.element};
    struct stage stage = {.memory = direct->scratch + at->stage_values,
                          .padded = shape->width_padded,
                          .rows = direct->value_rows,
                          .scale_rows = direct->value_scales,
                          .scales = direct->value_scale};
    args.key_rows =
        (const char *const *)head_rows(direct, step, &problem->values, &stage, &args.offset);
    float *scores = step_scores(direct, step);
    ahead_of_values(direct, step, &args);
    if (step->from == 0) {
        direct_softmax(direct, step, scores, &args);
    }
    problem->values.direct->values(
        accumulator, (const char *)scores + step->from * shape->engine->element_bytes, &args);
}

static void clear_sums(float *accumulator, float *reference, float *sum, int32_t rows,
                       int32_t width)
{
    memset(accumulator, 0, (size_t)rows * (size_t)width * sizeof(float));
    for (int32_t r = 0; r < rows; r++) {
        reference[r] = -INFINITY;
        sum[r] = 0.0f;
    }
}

static void direct_init(struct direct *direct, const struct attend_run *run,
                        const struct work_item *item, char *scratch)
{
    const struct scratch_layout *at = &run->layout;
    const struct layer_shape *shape = &run->problem.shape;
    *direct = (struct direct){
        .run = run,
        .item = item,
        .scratch = scratch,
        .key_rows = (const void **)(scratch + at->key_rows),
        .value_rows = (const void **)(scratch + at->value_rows),
        .next_keys = (const void **)(scratch + at->next_rows),
        .next_values = (const void **)(scratch + at->next_rows) + DIRECT_MOST_KEYS,
        .staged_rows = (const void **)(scratch + at->next_rows) + 2 * DIRECT_MOST_KEYS,
        .key_scales = (const void **)(scratch + at->scale_rows),
        .value_scales = (const void **)(scratch + at->scale_rows) + DIRECT_MOST_KEYS,
        .next_key_scales = (const void **)(scratch + at->scale_rows) + 2 * DIRECT_MOST_KEYS,
        .next_value_scales = (const void **)(scratch + at->scale_rows) + 3 * DIRECT_MOST_KEYS,
        .key_scale = (float *)(scratch + at->key_scale),
        .value_scale = (float *)(scratch + at->value_scale),
        .key_zero = (int32_t *)(scratch + at->key_zero),
        .value_zero = (int32_t *)(scratch + at->value_zero),
        .rows_padded = rows_of_head(&run->problem, item),
    };
    const struct row_source *keys = &run->problem.keys;
    const struct row_source *values = &run->problem.values;
    const struct direct_engine *engine = keys->direct;
    direct->bunch = at_most(item->num_heads, DIRECT_SCORE_ROWS / direct->rows_padded);
    /* how many heads an item has depends on the batch, and the bits of tiles' products on how many
     * keys a call has */
    bool tiles = shape->engine->flash != NULL;
    bool apart = has_many_rows(direct) || (shape->batch_invariant && tiles);
    direct->side_by_side = direct->bunch > 1 && !apart && keys->stride_head > 0 &&
                           values->stride_head > 0 && keys->stride_slot > keys->stride_head &&
                           values->stride_slot > values->stride_head;
    int32_t rows = direct->rows_padded * item->num_heads;
    float *q_scale = (float *)(scratch + at->q_scale);
    memset(q_scale, 0, (size_t)rows * sizeof(float));
    size_t row_bytes = (size_t)shape->depth_padded * (size_t)shape->engine->element_bytes;
    for (int32_t h = 0; h < item->num_heads; h++) {
        char *q = scratch + at->q + (size_t)(h * direct->rows_padded) * row_bytes;
        load_queries(run, item, item->head + h, q, direct->rows_padded);
        int32_t count = item->num_tokens * shape->group;
        for (int32_t r = 0; r < count && engine->order != NULL; r++) {
            q_scale[h * direct->rows_padded + r] =
                engine->order(q + (size_t)r * row_bytes, shape->depth_padded);
        }
        if (engine->pack != NULL) { /* no keys are packed yet */
            engine->pack(q, scratch + at->keys, direct->rows_padded, shape->depth_padded);
        }
    }
    memset(scratch + at->zero_row, 0,
           (size_t)at_least(shape->width_padded, shape->depth_padded) *
               (size_t)shape->engine->element_bytes);
    /* rows past the group keep zero probabilities */
    memset(scratch + at->scores, 0,
           (size_t)(direct->bunch * direct->rows_padded) * SCORE_STRIDE * sizeof(float));
    clear_sums((float *)(scratch + at->accumulator), (float *)(scratch + at->reference),
               (float *)(scratch + at->sum), rows, shape->width_padded);
    memset(direct->key_scale, 0, TILE_KEYS * sizeof(float));
    memset(direct->value_scale, 0, TILE_KEYS * sizeof(float));
    memset(direct->key_zero, 0, TILE_KEYS * sizeof(int32_t));
    memset(direct->value_zero, 0, TILE_KEYS * sizeof(int32_t));
}

/* Rows of the item's first head in the tile to come, of keys or entries first .. first+n-1; their
 * number, which with a list may be less than n. */
static int32_t find_tile(const struct direct *direct, int32_t first, int32_t n)
{
    const struct problem *problem = &direct->run->problem;
    const struct work_item *item = direct->item;
    if (problem->shape.topk > 0) {
        n = find_listed_rows(problem, item->request, item->token, first, n, direct->next_keys);
        memcpy(direct->next_values, direct->next_keys, (size_t)n * sizeof(void *));
        return n;
    }
    find_rows(problem, &problem->keys, item->request, item->head, first, n, direct->next_keys,
              direct->next_key_scales);
    find_rows(problem, &problem->values, item->request, item->head, first, n, direct->next_values,
              direct->next_value_scales);
    return n;
}

static void swap_rows(const void ***one, const void ***other)
{
    const void **kept = *one;
    *one = *other;
    *other = kept;
}

static void swap_tiles(struct direct *direct)
{
    swap_rows(&direct->key_rows, &direct->next_keys);
    swap_rows(&direct->value_rows, &direct->next_values);
    swap_rows(&direct->key_scales, &direct->next_key_scales);
    swap_rows(&direct->value_scales, &direct->next_value_scales);
}

/* Of one kind of rows of head h; rows that are staged part with their zero points there. */
static void find_row_scales(const struct row_source *source, const void **scale_rows, int32_t h,
                            int32_t n, float *scales, int32_t *zeros)
{
    if (has_float_scales(source)) {
        load_scales(scale_rows, h * source->scale_stride_head, n, scales);
    }
    for (int32_t i = 0; i < n && source->nibbles && source->direct_codes; i++) {
        zeros[i] = int4_zero(&scales[i]);
    }
}

static void find_key_scales(const struct direct *direct, const struct direct_step *step)
{
    const struct row_source *keys = &direct->run->problem.keys;
    if (keys->scale != NULL) {
        find_row_scales(keys, direct->key_scales, step->head, step->n, direct->key_scale,
                        direct->key_zero);
        prefetch_scales(direct, keys, direct->key_scales, direct->next_key_scales, step->head,
                        step->n, step->next_n);
    }
}

static void find_value_scales(const struct direct *direct, const struct direct_step *step)
{
    const struct row_source *values = &direct->run->problem.values;
    if (values->scale != NULL) {
        find_row_scales(values, direct->value_scales, step->head, step->n, direct->value_scale,
                        direct->value_zero);
        prefetch_scales(direct, values, direct->value_scales, direct->next_value_scales, step->head,
                        step->n, step->next_n);
    }
}

/* One bunch of heads on the tile of keys first .. first+n-1. Scales are of one head at a time:
 * where rows of several heads are read together, they are wanted behind the last of a head's
 * scores and before the first of its values. */
static void direct_bunch(const struct direct *direct, struct direct_step step, int32_t first)
{
    const struct problem *problem = &direct->run->problem;
    int32_t together = keys_together(direct, &problem->keys, step.n);
    for (step.from = 0; step.from < step.n; step.from += together) {
        step.keys = at_most(together, step.n - step.from);
        bool last = step.from + step.keys == step.n;
        for (step.head = step.first_head; step.head < step.end_head; step.head++) {
            if (last) {
                find_key_scales(direct, &step);
            }
            step_of_scores(direct, &step);
            if (last && problem->terms) {
                direct_terms(direct, direct->item->head + step.head, first, step.n,
                             step_scores(direct, &step));
            }
        }
    }
    together = keys_together(direct, &problem->values, step.n);
    for (step.from = 0; step.from < step.n; step.from += together) {
        step.keys = at_most(together, step.n - step.from);
        for (step.head = step.first_head; step.head < step.end_head; step.head++) {
            if (step.from == 0) {
                find_value_scales(direct, &step);
            }
            step_of_values(direct, &step);
        }
    }
}

/* The item's keys that all its queries see. */
static struct interval common_keys(const struct attend_run *run, const struct work_item *item)
{
    struct interval common = {item->key_begin, item->key_end};
    for (int32_t t = 0; t < item->num_tokens; t++) {
        struct interval seen = row_interval(&run->problem, item->request, item->token + t);
        common.low = at_least(common.low, seen.low);
        common.high = at_most(common.high, seen.high);
    }
    common.low = at_most(common.low, item->key_end);
    common.high = at_least(common.high, common.low);
    return common;
}

/* What is left of one head's item behind its common keys. */
static void finish_head(const struct direct *direct, struct interval common, int32_t h)
{
    const struct attend_run *run = direct->run;
    const struct work_item *item = direct->item;
    const struct layer_shape *shape = &run->problem.shape;
    int32_t row = h * direct->rows_padded;
    float *reference = (float *)(direct->scratch + run->layout.reference) + row;
    float *sum = (float *)(direct->scratch + run->layout.sum) + row;
    float *accumulator =
        (float *)(direct->scratch + run->layout.accumulator) + (int64_t)row * shape->width_padded;
    const struct direct_engine *engine = run->problem.values.direct;
    const int32_t rows = direct->rows_padded;
    if (engine->finish != NULL && !engine->finish(accumulator, rows, shape->width_padded)) {
        clear_sums(accumulator, reference, sum, rows, shape->width_padded);
        common = (struct interval){item->key_begin, item->key_begin};
    }
    const struct interval edges[] = {{item->key_begin, common.low}, {common.high, item->key_end}};
    const struct row_block sums = {item->request, item->head + h, item->token, item->num_tokens,
                                   accumulator,   reference,      sum};
    for (int32_t i = 0; i < 2; i++) {
        if (edges[i].low < edges[i].high) {
            run_keys(run, item, &sums, edges[i], false, direct->scratch);
        }
    }
    finish_sums(run, item, &sums, direct->scratch);
}

/* Vectors read a list's rows in tiles of the plain size: larger ones are 5 % slower. */
static int32_t tile_size(const struct direct *direct)
{
    const struct direct_engine *engine = direct->run->problem.keys.direct;
    bool larger = has_many_rows(direct) && (engine->tiles || direct->run->problem.shape.topk == 0);
    return larger ? DIRECT_MOST_KEYS : DIRECT_KEYS;
}

/* Nothing has asked for an item's first rows; those of a list are few, then. */
static int32_t first_tile(const struct direct *direct, int32_t whole)
{
    bool listed = direct->run->problem.shape.topk > 0;
    return listed && direct->run->problem.keys.direct->tiles ? DIRECT_KEYS / 2 : whole;
}

void run_direct(const struct attend_run *run, const struct work_item *item, char *scratch)
{
    struct direct direct;
    struct interval common = common_keys(run, item);
    direct_init(&direct, run, item, scratch);
    const int32_t whole = tile_size(&direct);
    int32_t tile_keys = first_tile(&direct, whole);
    int32_t next_n = find_tile(&direct, common.low, at_most(tile_keys, common.high - common.low));
    for (int32_t first = common.low, next = first; first < common.high; first = next) {
        struct direct_step step = {.first = first, .n = next_n};
        swap_tiles(&direct);
        next = at_most(first + tile_keys, common.high);
        tile_keys = at_most(2 * tile_keys, whole);
        next_n = find_tile(&direct, next, at_most(tile_keys, common.high - next));
        step.next_n = next_n;
        for (int32_t h = 0; h < item->num_heads && step.n > 0; h = step.end_head) {
            step.first_head = h;
            step.end_head = at_most(h + direct.bunch, item->num_heads);
            direct_bunch(&direct, step, first);
        }
    }
    for (int32_t h = 0; h < item->num_heads; h++) {
        finish_head(&direct, common, h);
    }
}
