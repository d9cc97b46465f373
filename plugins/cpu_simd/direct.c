/* SPDX-License-Identifier: Apache-2.0 */
/* The direct (decode) path: one query, its group's heads as rows, keys and values read in place and
 * once. Per KV head and key, D 128, bf16: 512 bytes and 1 KiFLOP per query head, so the memory
 * bounds it; the next tile's rows are prefetched through the block table while this one is
 * computed. */
#include "internal.h"

#define LINE_BYTES 64

struct direct {
    const struct attend_run *run;
    const struct work_item *item;
    char *scratch;
    const void **key_rows;
    const void **value_rows;
    const void **next_keys; /* of the tile to come */
    const void **next_values;
    const void **staged_rows;
    const void **key_scales; /* of the item's first head, where they are kept beside rows */
    const void **value_scales;
    const void **next_key_scales;
    const void **next_value_scales;
    float *key_scale; /* of the head at hand */
    float *value_scale;
    int32_t *key_zero; /* likewise, of int4 rows read in place */
    int32_t *value_zero;
    int32_t rows_padded; /* rows of a head in q and the accumulator */
};

static int32_t rows_of_group(const struct problem *problem)
{
    int32_t group = problem->shape.group;
    bool codes = problem->keys.direct_codes || problem->values.direct_codes;
    return group == 1 && !codes ? 1 : round_up(group, 4);
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
    struct score_terms terms = {.scale = key_factor(problem, head),
                                .soft_cap = layer->soft_cap,
                                .alibi = layer->alibi,
                                .distance = (float)(position - first)};
    if (problem->keys.scale != NULL) {
        terms.key_scale = direct->key_scale;
    }
    for (int32_t g = 0; g < group; g++) {
        if (layer->alibi != ATTN_ALIBI_NONE) {
            terms.slope = problem->params->alibi_slopes[head * group + g];
        }
        problem->instance->variant->terms(scores + (int64_t)g * SCORE_STRIDE,
                                          round_up(n, COLUMN_MULTIPLE), &terms);
    }
}

/* Rows of head h of the tile: in place, or staged where the engine cannot read them there. */
static const void **head_rows(const struct direct *direct, const struct row_source *source,
                              const void **rows, int32_t h, int32_t n, size_t stage, int32_t padded,
                              float *scales, int64_t *offset)
{
    *offset = h * source->stride_head;
    if (!source->stage || source->direct_codes) {
        return rows;
    }
    for (int32_t i = 0; i < n; i++) {
        direct->staged_rows[i] = (const char *)rows[i] + *offset;
    }
    *offset = 0;
    stage_rows(&direct->run->problem, source, direct->scratch + stage, padded, n,
               direct->staged_rows, scales);
    return direct->staged_rows;
}

/* Rows of one kind to prefetch: `keys` rows of `source` at rows[] + offset, `heads` heads of each.
 */
static void prefetch_rows(struct direct_args *args, const struct row_source *source,
                          const void **rows, int64_t offset, int32_t keys, int32_t heads)
{
    int64_t bytes = heads > 1 ? heads * source->stride_head : source->row_bytes;
    args->next_rows = (const char *const *)rows;
    args->next_offset = offset;
    args->next_keys = source->pack == 0 ? keys : 0;
    args->next_lines = (int32_t)((bytes + 63) / 64);
}

static bool heads_side_by_side(const struct direct *direct, const struct row_source *source)
{
    return direct->item->num_heads > 1 && source->stride_slot > source->stride_head;
}

/* This head's share of the next tile's tokens, all heads of each. */
static void prefetch_share(const struct direct *direct, struct direct_args *args,
                           const struct row_source *source, const void **next_rows, int32_t h,
                           int32_t next_n)
{
    int32_t heads = direct->item->num_heads;
    int32_t from = next_n * h / heads;
    prefetch_rows(args, source, next_rows + from, 0, next_n * (h + 1) / heads - from, heads);
}

/* What to prefetch during the scores of head h: with heads apart (HND) its values, so that only
 * two heads' rows compete for the nearest cache. */
static void prefetch_in_scores(const struct direct *direct, struct direct_args *args, int32_t h,
                               int32_t n, int32_t next_n)
{
    const struct row_source *source = &direct->run->problem.keys;
    if (heads_side_by_side(direct, source)) {
        prefetch_share(direct, args, source, direct->next_keys, h, next_n);
        return;
    }
    if (direct->run->problem.latent != NULL) { /* its values are its keys */
        prefetch_rows(args, source, direct->next_keys, 0, next_n / 2, 1);
        return;
    }
    source = &direct->run->problem.values;
    prefetch_rows(args, source, direct->value_rows, h * source->stride_head, n, 1);
}

/* And during its values: the next head's keys, behind the last one the next tile's first. */
static void prefetch_in_values(const struct direct *direct, struct direct_args *args, int32_t h,
                               int32_t n, int32_t next_n)
{
    const struct row_source *source = &direct->run->problem.values;
    if (heads_side_by_side(direct, source)) {
        prefetch_share(direct, args, source, direct->next_values, h, next_n);
        return;
    }
    source = &direct->run->problem.keys;
    if (direct->run->problem.latent != NULL) {
        prefetch_rows(args, source, direct->next_keys + next_n / 2, 0, next_n - next_n / 2, 1);
    } else if (h + 1 < direct->item->num_heads) {
        prefetch_rows(args, source, direct->key_rows, (h + 1) * source->stride_head, n, 1);
    } else {
        prefetch_rows(args, source, direct->next_keys, 0, next_n, 1);
    }
}

static void direct_softmax(const struct direct *direct, int32_t head, int32_t n, int32_t index)
{
    const struct problem *problem = &direct->run->problem;
    const struct layer_shape *shape = &problem->shape;
    const struct scratch_layout *at = &direct->run->layout;
    int32_t low[DIRECT_ROWS] = {0};
    int32_t high[DIRECT_ROWS];
    for (int32_t r = 0; r < DIRECT_ROWS; r++) {
        high[r] = n;
    }
    float *rescale = (float *)(direct->scratch + at->rescale);
    struct softmax_args softmax = {
        .scores = (float *)(direct->scratch + at->scores),
        .rows = shape->group,
        .end = round_up(n, COLUMN_MULTIPLE),
        .low = low,
        .high = high,
        .factor = problem->terms ? LOG2_E : key_factor(problem, head) * LOG2_E,
        .reference = (float *)(direct->scratch + at->reference) + index,
        .sum = (float *)(direct->scratch + at->sum) + index,
        .rescale = rescale,
        .value_scale = problem->values.scale != NULL ? direct->value_scale : NULL,
    };
    shape->engine->softmax(&softmax);
    float *accumulator = (float *)(direct->scratch + at->accumulator);
    for (int32_t r = 0; r < shape->group; r++) {
        if (rescale[r] != 1.0f) {
            problem->instance->variant->scale_row(accumulator +
                                                      (int64_t)(index + r) * shape->width_padded,
                                                  rescale[r], shape->width_padded);
        }
    }
}

/* Head h of the item on the tile of keys first .. first+n-1; next_n keys stand in the next tile. */
static void direct_tile(const struct direct *direct, int32_t h, int32_t first, int32_t n,
                        int32_t next_n)
{
    const struct attend_run *run = direct->run;
    const struct problem *problem = &run->problem;
    const struct layer_shape *shape = &problem->shape;
    const struct engine *engine = shape->engine;
    const struct scratch_layout *at = &run->layout;
    int32_t index = h * direct->rows_padded;
    int32_t head = direct->item->head + h;
    float *scores = (float *)(direct->scratch + at->scores);
    float *accumulator =
        (float *)(direct->scratch + at->accumulator) + (int64_t)index * shape->width_padded;
    const char *q =
        direct->scratch + at->q + (int64_t)index * shape->depth_padded * engine->element_bytes;
    struct direct_args args = {.keys = n,
                               .rows = direct->rows_padded,
                               .q_scale = (float *)(direct->scratch + at->q_scale) + index,
                               .depth = shape->depth_padded,
                               .zero_row = direct->scratch + at->zero_row,
                               .zeros = direct->key_zero,
                               .element = problem->keys.element};
    const void **rows = head_rows(direct, &problem->keys, direct->key_rows, h, n, at->stage_keys,
                                  shape->depth_padded, direct->key_scale, &args.offset);
    args.key_rows = (const char *const *)rows;
    prefetch_in_scores(direct, &args, h, n, next_n);
    problem->keys.direct->scores(scores, q, &args);
    if (problem->terms) {
        direct_terms(direct, head, first, n, scores);
    }
    rows = head_rows(direct, &problem->values, direct->value_rows, h, n, at->stage_values,
                     shape->width_padded, direct->value_scale, &args.offset);
    direct_softmax(direct, head, n, index);
    args.depth = shape->width_padded;
    args.zeros = direct->value_zero;
    args.element = problem->values.element;
    args.key_rows = (const char *const *)rows;
    prefetch_in_values(direct, &args, h, n, next_n);
    problem->values.direct->values(accumulator, scores, &args);
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
        .next_values = (const void **)(scratch + at->next_rows) + DIRECT_KEYS,
        .staged_rows = (const void **)(scratch + at->next_rows) + 2 * DIRECT_KEYS,
        .key_scales = (const void **)(scratch + at->scale_rows),
        .value_scales = (const void **)(scratch + at->scale_rows) + DIRECT_KEYS,
        .next_key_scales = (const void **)(scratch + at->scale_rows) + 2 * DIRECT_KEYS,
        .next_value_scales = (const void **)(scratch + at->scale_rows) + 3 * DIRECT_KEYS,
        .key_scale = (float *)(scratch + at->key_scale),
        .value_scale = (float *)(scratch + at->value_scale),
        .key_zero = (int32_t *)(scratch + at->key_zero),
        .value_zero = (int32_t *)(scratch + at->value_zero),
        .rows_padded = rows_of_group(&run->problem),
    };
    int32_t rows = direct->rows_padded * item->num_heads;
    float *q_scale = (float *)(scratch + at->q_scale);
    memset(q_scale, 0, (size_t)rows * sizeof(float));
    size_t row_bytes = (size_t)shape->depth_padded * (size_t)shape->engine->element_bytes;
    for (int32_t h = 0; h < item->num_heads; h++) {
        char *q = scratch + at->q + (size_t)(h * direct->rows_padded) * row_bytes;
        load_queries(run, item, item->head + h, q, direct->rows_padded);
        for (int32_t r = 0; r < shape->group && run->problem.keys.direct->order != NULL; r++) {
            q_scale[h * direct->rows_padded + r] =
                run->problem.keys.direct->order(q + (size_t)r * row_bytes, shape->depth_padded);
        }
    }
    memset(scratch + at->accumulator, 0,
           (size_t)rows * (size_t)shape->width_padded * sizeof(float));
    memset(scratch + at->zero_row, 0,
           (size_t)at_least(shape->width_padded, shape->depth_padded) *
               (size_t)shape->engine->element_bytes);
    /* rows past the group keep zero probabilities */
    memset(scratch + at->scores, 0, (size_t)DIRECT_ROWS * SCORE_STRIDE * sizeof(float));
    for (int32_t m = 0; m < rows; m++) {
        ((float *)(scratch + at->reference))[m] = -INFINITY;
        ((float *)(scratch + at->sum))[m] = 0.0f;
    }
    memset(direct->key_scale, 0, TILE_KEYS * sizeof(float));
    memset(direct->value_scale, 0, TILE_KEYS * sizeof(float));
    memset(direct->key_zero, 0, TILE_KEYS * sizeof(int32_t));
    memset(direct->value_zero, 0, TILE_KEYS * sizeof(int32_t));
}

/* Rows of the item's first head in the tile to come. */
static void find_tile(const struct direct *direct, int32_t first, int32_t n)
{
    const struct problem *problem = &direct->run->problem;
    const struct work_item *item = direct->item;
    find_rows(problem, &problem->keys, item->request, item->head, first, n, direct->next_keys,
              direct->next_key_scales);
    find_rows(problem, &problem->values, item->request, item->head, first, n, direct->next_values,
              direct->next_value_scales);
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

/* Scales that come next: with heads side by side this head's share of the next tile's slots, all
 * heads of each; with heads apart the next head's, behind the last one the next tile's first. */
static void prefetch_scales(const struct direct *direct, const struct row_source *source,
                            const void **scales, const void **next_scales, int32_t h, int32_t n,
                            int32_t next_n)
{
    int32_t heads = direct->item->num_heads;
    bool apart = source->scale_stride_head > source->scale_stride_slot;
    bool here = apart && h + 1 < heads;
    int64_t offset = here ? (h + 1) * source->scale_stride_head : 0;
    int32_t from = apart ? 0 : next_n * h / heads;
    int32_t to = here ? n : apart ? next_n : next_n * (h + 1) / heads;
    int64_t step = source->scale_stride_slot > 0 && source->scale_stride_slot < LINE_BYTES
                       ? LINE_BYTES / source->scale_stride_slot
                       : 1;
    for (int64_t i = from; i < to; i += step) {
        __builtin_prefetch((const char *)(here ? scales : next_scales)[i] + offset, 0, 3);
    }
}

/* Of one kind of rows of head h; rows that are staged part with their zero points there. */
static void find_row_scales(const struct row_source *source, const void **scale_rows, int32_t h,
                            int32_t n, float *scales, int32_t *zeros)
{
    load_scales(scale_rows, h * source->scale_stride_head, n, scales);
    for (int32_t i = 0; i < n && source->nibbles && source->direct_codes; i++) {
        zeros[i] = int4_zero(&scales[i]);
    }
}

static void find_scales(const struct direct *direct, int32_t h, int32_t n, int32_t next_n)
{
    const struct row_source *keys = &direct->run->problem.keys;
    const struct row_source *values = &direct->run->problem.values;
    if (keys->scale != NULL) {
        find_row_scales(keys, direct->key_scales, h, n, direct->key_scale, direct->key_zero);
        prefetch_scales(direct, keys, direct->key_scales, direct->next_key_scales, h, n, next_n);
    }
    if (values->scale != NULL) {
        find_row_scales(values, direct->value_scales, h, n, direct->value_scale,
                        direct->value_zero);
        prefetch_scales(direct, values, direct->value_scales, direct->next_value_scales, h, n,
                        next_n);
    }
}

void run_direct(const struct attend_run *run, const struct work_item *item, char *scratch)
{
    const struct layer_shape *shape = &run->problem.shape;
    struct direct direct;
    direct_init(&direct, run, item, scratch);
    int32_t next_n = at_most(DIRECT_KEYS, item->key_end - item->key_begin);
    find_tile(&direct, item->key_begin, next_n);
    for (int32_t first = item->key_begin; first < item->key_end; first += DIRECT_KEYS) {
        int32_t n = next_n;
        swap_tiles(&direct);
        next_n = at_least(0, at_most(DIRECT_KEYS, item->key_end - first - n));
        find_tile(&direct, first + n, next_n);
        for (int32_t h = 0; h < item->num_heads; h++) {
            find_scales(&direct, h, n, next_n);
            direct_tile(&direct, h, first, n, next_n);
        }
    }
    for (int32_t h = 0; h < item->num_heads; h++) {
        int32_t row = h * direct.rows_padded;
        float *accumulator =
            (float *)(scratch + run->layout.accumulator) + (int64_t)row * shape->width_padded;
        for (int32_t g = 0; g < shape->group && run->problem.values.direct->finish != NULL; g++) {
            run->problem.values.direct->finish(accumulator + (int64_t)g * shape->width_padded,
                                               shape->width_padded);
        }
        finish_item(run, item, item->head + h, accumulator,
                    (float *)(scratch + run->layout.reference) + row,
                    (float *)(scratch + run->layout.sum) + row);
    }
}
