/* SPDX-License-Identifier: Apache-2.0 */
/* The decode path: few queries, whose groups' heads are rows; keys and values are read in place,
 * once. Keys that only some rows see are attended afterwards on the packed path (run_keys). A KV
 * head and key at D 128 in bf16 take 512 bytes and 1 KiFLOP for each query head, so memory is the
 * limit.
 *
 * A tile is 32 to 128 keys. Scores of all heads of a tile come before their values, in the order of
 * memory: head by head where a head's tokens are contiguous (HND), some tokens at a time where a
 * token's heads are (NHD). With many rows, head by head in both. */
#include "decode.h"

enum { SOFTMAX_ROWS = 4 }; /* rows between two prefetches */

static int32_t rows_of_head(const struct attend_problem *problem, const struct work_item *item)
{
    int32_t rows = item->num_tokens * problem->shape.group;
    bool codes = problem->keys.decode_codes || problem->values.decode_codes;
    return rows == 1 && !codes ? 1 : round_up(rows, 4);
}

/* Arguments of a kernel's call, with rows of one head of the tile: in place, or staged where the
 * kernels cannot read them there. */
static struct decode_args args_of(const struct decode *decode, const struct decode_step *step,
                                  const struct decode_rows *rows)
{
    const struct row_source *source = rows->source;
    struct decode_args args = {.keys = step->keys,
                               .rows = decode->rows_padded,
                               .depth = rows->padded,
                               .zero_row = decode->at->zero_row,
                               .zeros = rows->zero,
                               .element = source->element,
                               .key_rows = (const char *const *)(rows->rows + step->from),
                               .offset = step->head * source->stride_head};
    if (!source->stage || source->decode_codes) {
        return args;
    }
    const struct stage stage = {.problem = &decode->run->problem,
                                .source = source,
                                .memory = rows->staged,
                                .padded = rows->padded,
                                .n = step->keys,
                                .first = step->first + step->from,
                                .rows = decode->staged_rows,
                                .scale_rows = rows->scales,
                                .scale_offset = step->head * source->scale_stride_head,
                                .scales = rows->scale};
    for (int32_t i = 0; i < step->keys; i++) {
        decode->staged_rows[i] = args.key_rows[i] + args.offset;
    }
    stage_rows(&stage);
    args.key_rows = (const char *const *)decode->staged_rows;
    args.offset = 0;
    return args;
}

/* Whether arithmetic, not memory, bounds the item, of keys and of values. */
static bool has_many_rows(const struct decode *decode)
{
    int32_t keys = decode->run->problem.keys.decode->many_rows;
    int32_t values = decode->run->problem.values.decode->many_rows;
    return keys > 0 && values > 0 && decode->rows_padded >= max_i32(keys, values);
}

/* Prefetches a share of the next lines into L2: the softmax prefetches nothing itself. */
static void prefetch_some(struct decode_args *prefetch, int32_t keys)
{
    for (int32_t i = 0; i < keys; i++) {
        for (int32_t line = 0; line < prefetch->next_lines; line++) {
            __builtin_prefetch(prefetch->next_rows[i] + prefetch->next_offset + 64 * line, 0, 2);
        }
    }
    prefetch->next_rows += keys;
    prefetch->next_keys -= keys;
}

static void decode_softmax(const struct decode *decode, const struct decode_step *step,
                           float *scores, struct decode_args *prefetch)
{
    const struct attend_problem *problem = &decode->run->problem;
    const struct layer_shape *shape = &problem->shape;
    int32_t index = step->head * decode->rows_padded;
    int32_t low[DECODE_ROWS] = {0};
    int32_t high[DECODE_ROWS];
    for (int32_t r = 0; r < DECODE_ROWS; r++) {
        high[r] = step->n;
    }
    float factor = key_factor(problem, decode->item->head + step->head);
    float *scores_scale = decode->at->scores_scale;
    struct softmax_args softmax = {
        .scores = scores,
        .rows = decode->item->num_tokens * shape->group,
        .end = round_up(step->n, COLUMN_MULTIPLE),
        .low = low,
        .high = high,
        .softmax_scale_log2 = problem->terms ? LOG2_E : factor * LOG2_E,
        .row_max = decode->at->row_max + index,
        .row_sum = decode->at->row_sum + index,
        .scores_scale = scores_scale,
        .value_scale = problem->values.row_scale ? decode->at->value_scale : NULL,
    };
    const int32_t rows = softmax.rows;
    const bool tiles = problem->values.decode->tiles && has_many_rows(decode);
    const int32_t some = tiles ? SOFTMAX_ROWS : rows,
                  keys = tiles ? prefetch->next_keys / DECODE_ROWS : 0;
    for (int32_t r = 0; r < rows; r += some) {
        prefetch_some(prefetch, keys);
        softmax.rows = min_i32(some, rows - r);
        shape->kernels->softmax(&softmax);
        softmax.scores += (int64_t)some * SCORE_STRIDE;
        softmax.row_max += some;
        softmax.row_sum += some;
        softmax.scores_scale += some;
    }
    rescale_o(problem, decode->at->acc_o + (int64_t)index * shape->width_padded, scores_scale,
              rows);
}

static float *step_scores(const struct decode *decode, const struct decode_step *step)
{
    return decode->at->scores +
           (int64_t)(step->head - step->first_head) * decode->rows_padded * SCORE_STRIDE;
}

static void step_of_scores(const struct decode *decode, const struct decode_step *step)
{
    const struct attend_problem *problem = &decode->run->problem;
    const struct layer_shape *shape = &problem->shape;
    int32_t index = step->head * decode->rows_padded;
    const char *q =
        decode->at->q + (int64_t)index * shape->depth_padded * shape->kernels->element_bytes;
    struct decode_args args = args_of(decode, step, &decode->keys);
    args.q_scale = decode->at->q_scale + index;
    prefetch_during_scores(decode, step, &args);
    problem->keys.decode->scores(step_scores(decode, step) + step->from, q, &args);
}

static void step_of_values(const struct decode *decode, const struct decode_step *step)
{
    const struct attend_problem *problem = &decode->run->problem;
    const struct layer_shape *shape = &problem->shape;
    float *acc_o =
        decode->at->acc_o + (int64_t)step->head * decode->rows_padded * shape->width_padded;
    struct decode_args args = args_of(decode, step, &decode->values);
    float *scores = step_scores(decode, step);
    prefetch_during_values(decode, step, &args);
    if (step->from == 0) {
        decode_softmax(decode, step, scores, &args);
    }
    problem->values.decode->values(
        acc_o, (const char *)scores + step->from * shape->kernels->element_bytes, &args);
}

static void clear_results(float *acc_o, float *row_max, float *row_sum, int32_t rows, int32_t width)
{
    memset(acc_o, 0, (size_t)rows * (size_t)width * sizeof(float));
    for (int32_t r = 0; r < rows; r++) {
        row_max[r] = -INFINITY;
        row_sum[r] = 0.0f;
    }
}

static void decode_init(struct decode *decode, const struct attend_run *run,
                        const struct work_item *item, const struct attend_scratch *at)
{
    const struct layer_shape *shape = &run->problem.shape;
    *decode = (struct decode){
        .run = run,
        .item = item,
        .at = at,
        .keys = {&run->problem.keys, at->key_rows, at->next_rows, at->scale_rows,
                 at->scale_rows + 2 * DECODE_MAX_KEYS, at->key_scale, at->key_zero, at->stage_keys,
                 shape->depth_padded},
        .values = {&run->problem.values, at->value_rows, at->next_rows + DECODE_MAX_KEYS,
                   at->scale_rows + DECODE_MAX_KEYS, at->scale_rows + 3 * DECODE_MAX_KEYS,
                   at->value_scale, at->value_zero, at->stage_values, shape->width_padded},
        .staged_rows = at->next_rows + 2 * DECODE_MAX_KEYS,
        .rows_padded = rows_of_head(&run->problem, item),
    };
    const struct row_source *keys = &run->problem.keys;
    const struct row_source *values = &run->problem.values;
    const struct decode_kernels *kernels = keys->decode;
    decode->heads_at_once = min_i32(item->num_heads, DECODE_SCORE_ROWS / decode->rows_padded);
    /* the number of heads of an item depends on the batch, and the bits of tile products on the
     * number of keys in a call */
    bool tiles = shape->kernels->flash != NULL;
    bool apart = has_many_rows(decode) || (shape->batch_invariant && tiles);
    decode->heads_contiguous = decode->heads_at_once > 1 && !apart && keys->stride_head > 0 &&
                               values->stride_head > 0 && keys->stride_slot > keys->stride_head &&
                               values->stride_slot > values->stride_head;
    int32_t rows = decode->rows_padded * item->num_heads;
    float *q_scale = at->q_scale;
    memset(q_scale, 0, (size_t)rows * sizeof(float));
    size_t row_bytes = (size_t)shape->depth_padded * (size_t)shape->kernels->element_bytes;
    for (int32_t h = 0; h < item->num_heads; h++) {
        char *q = at->q + (size_t)(h * decode->rows_padded) * row_bytes;
        load_queries(run, item, item->head + h, q, decode->rows_padded);
        int32_t count = item->num_tokens * shape->group;
        for (int32_t r = 0; r < count && kernels->order != NULL; r++) {
            q_scale[h * decode->rows_padded + r] =
                kernels->order(q + (size_t)r * row_bytes, shape->depth_padded);
        }
        if (kernels->pack != NULL) { /* the memory of packed keys is still free */
            kernels->pack(q, at->keys, decode->rows_padded, shape->depth_padded);
        }
    }
    memset(at->zero_row, 0,
           (size_t)max_i32(shape->width_padded, shape->depth_padded) *
               (size_t)shape->kernels->element_bytes);
    /* rows past the group keep zero probabilities */
    memset(at->scores, 0,
           (size_t)(decode->heads_at_once * decode->rows_padded) * SCORE_STRIDE * sizeof(float));
    clear_results(at->acc_o, at->row_max, at->row_sum, rows, shape->width_padded);
    memset(at->key_scale, 0, TILE_KEYS * sizeof(float));
    memset(at->value_scale, 0, TILE_KEYS * sizeof(float));
    memset(at->key_zero, 0, TILE_KEYS * sizeof(int32_t));
    memset(at->value_zero, 0, TILE_KEYS * sizeof(int32_t));
}

/* Finds the rows of the item's first head in the next tile, of keys or list entries first ..
 * first+n-1. Returns their number, which with a list may be less than n. */
static int32_t find_tile(const struct decode *decode, int32_t first, int32_t n)
{
    const struct attend_problem *problem = &decode->run->problem;
    const struct work_item *item = decode->item;
    const struct decode_rows *const sides[] = {&decode->keys, &decode->values};
    if (problem->shape.topk > 0 && problem->latent != NULL) {
        n = find_listed_rows(problem, &problem->keys, item, first, n, decode->keys.next,
                             decode->keys.next_scales);
        memcpy(decode->values.next, decode->keys.next, (size_t)n * sizeof(void *));
        memcpy(decode->values.next_scales, decode->keys.next_scales, (size_t)n * sizeof(void *));
        return n;
    }
    int32_t seen = n;
    for (int32_t i = 0; i < 2; i++) {
        const struct decode_rows *rows = sides[i];
        if (problem->shape.topk > 0) {
            seen = find_listed_rows(problem, rows->source, item, first, n, rows->next,
                                    rows->next_scales);
        } else {
            find_rows(problem, rows->source, item->request, item->head, first, n, rows->next,
                      rows->next_scales);
        }
    }
    return seen;
}

static void swap_rows(struct decode_rows *rows)
{
    const void **tile = rows->rows, **scales = rows->scales;
    rows->rows = rows->next;
    rows->scales = rows->next_scales;
    rows->next = tile;
    rows->next_scales = scales;
}

/* Loads the scales of the step's head. The zero points of int4 rows that are not staged are split
 * off here. */
static void find_scales(const struct decode *decode, const struct decode_step *step,
                        const struct decode_rows *rows)
{
    const struct row_source *source = rows->source;
    if (source->scale == NULL) {
        return;
    }
    if (has_float_scales(source)) {
        load_scales(rows->scales, step->head * source->scale_stride_head, step->n, rows->scale);
    }
    for (int32_t i = 0; i < step->n && source->nibbles && source->decode_codes; i++) {
        rows->zero[i] = int4_zero(&rows->scale[i]);
    }
    prefetch_scales(decode, step, rows);
}

/* Scores, softmax and values of some heads for the tile of keys first .. first+n-1. Scales are
 * loaded for one head at a time: where rows of several heads are read together, after the head's
 * last scores and before its first values. */
static void decode_heads(const struct decode *decode, struct decode_step step, int32_t first)
{
    const struct attend_problem *problem = &decode->run->problem;
    int32_t together = keys_together(decode, &problem->keys, step.n);
    for (step.from = 0; step.from < step.n; step.from += together) {
        step.keys = min_i32(together, step.n - step.from);
        bool last = step.from + step.keys == step.n;
        for (step.head = step.first_head; step.head < step.end_head; step.head++) {
            if (last) {
                find_scales(decode, &step, &decode->keys);
            }
            step_of_scores(decode, &step);
            if (last && problem->terms) {
                const int32_t head = decode->item->head + step.head;
                apply_score_terms(problem, decode->item, head, 0,
                                  decode->item->num_tokens * problem->shape.group, first,
                                  key_factor(problem, head),
                                  problem->keys.row_scale ? decode->at->key_scale : NULL,
                                  step_scores(decode, &step), round_up(step.n, COLUMN_MULTIPLE));
            }
        }
    }
    together = keys_together(decode, &problem->values, step.n);
    for (step.from = 0; step.from < step.n; step.from += together) {
        step.keys = min_i32(together, step.n - step.from);
        for (step.head = step.first_head; step.head < step.end_head; step.head++) {
            if (step.from == 0) {
                find_scales(decode, &step, &decode->values);
            }
            step_of_values(decode, &step);
        }
    }
}

/* The item's keys that all its queries see. */
static struct interval common_keys(const struct attend_run *run, const struct work_item *item)
{
    struct interval common = {item->key_begin, item->key_end};
    for (int32_t t = 0; t < item->num_tokens; t++) {
        struct interval seen = row_interval(&run->problem, item->request, item->token + t);
        common.low = max_i32(common.low, seen.low);
        common.high = min_i32(common.high, seen.high);
    }
    common.low = min_i32(common.low, item->key_end);
    common.high = max_i32(common.high, common.low);
    return common;
}

/* Attends to the keys of one head that only some of its rows see, then writes the result. */
static void finish_head(const struct decode *decode, struct interval common, int32_t h)
{
    const struct attend_run *run = decode->run;
    const struct work_item *item = decode->item;
    const struct layer_shape *shape = &run->problem.shape;
    int32_t row = h * decode->rows_padded;
    float *row_max = decode->at->row_max + row;
    float *row_sum = decode->at->row_sum + row;
    float *acc_o = decode->at->acc_o + (int64_t)row * shape->width_padded;
    const struct decode_kernels *kernels = run->problem.values.decode;
    const int32_t rows = decode->rows_padded;
    if (kernels->finish != NULL && !kernels->finish(acc_o, rows, shape->width_padded)) {
        clear_results(acc_o, row_max, row_sum, rows, shape->width_padded);
        common = (struct interval){item->key_begin, item->key_begin};
    }
    const struct interval edges[] = {{item->key_begin, common.low}, {common.high, item->key_end}};
    const struct row_block sums = {item->request, item->head + h, item->token, item->num_tokens,
                                   acc_o,         row_max,        row_sum};
    for (int32_t i = 0; i < 2; i++) {
        if (edges[i].low < edges[i].high) {
            run_keys(run, item, &sums, edges[i], false, decode->at);
        }
    }
    finish_head_rows(run, item, &sums, decode->at);
}

/* Vectors read a list's rows in tiles of the plain size: larger ones are 5 % slower. */
static int32_t tile_size(const struct decode *decode)
{
    const struct decode_kernels *kernels = decode->run->problem.keys.decode;
    bool larger = has_many_rows(decode) && (kernels->tiles || decode->run->problem.shape.topk == 0);
    return larger ? DECODE_MAX_KEYS : DECODE_KEYS;
}

/* An item's first rows were not prefetched, so a list's first tile is half as long. */
static int32_t first_tile(const struct decode *decode, int32_t whole)
{
    bool listed = decode->run->problem.shape.topk > 0;
    return listed && decode->run->problem.keys.decode->tiles ? DECODE_KEYS / 2 : whole;
}

void run_decode(const struct attend_run *run, const struct work_item *item,
                const struct attend_scratch *at)
{
    struct decode decode;
    struct interval common = common_keys(run, item);
    decode_init(&decode, run, item, at);
    const int32_t whole = tile_size(&decode);
    int32_t tile_keys = first_tile(&decode, whole);
    int32_t next_n = find_tile(&decode, common.low, min_i32(tile_keys, common.high - common.low));
    for (int32_t first = common.low, next = first; first < common.high; first = next) {
        struct decode_step step = {.first = first, .n = next_n};
        swap_rows(&decode.keys);
        swap_rows(&decode.values);
        next = first + min_i32(tile_keys, common.high - first); /* lengths end at 2^31 - 1 */
        tile_keys = min_i32(2 * tile_keys, whole);
        next_n = find_tile(&decode, next, min_i32(tile_keys, common.high - next));
        step.next_n = next_n;
        for (int32_t h = 0; h < item->num_heads && step.n > 0; h = step.end_head) {
            step.first_head = h;
            step.end_head = min_i32(h + decode.heads_at_once, item->num_heads);
            decode_heads(&decode, step, first);
        }
    }
    for (int32_t h = 0; h < item->num_heads; h++) {
        finish_head(&decode, common, h);
    }
}
