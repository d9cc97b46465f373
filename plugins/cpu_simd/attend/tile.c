/* SPDX-License-Identifier: Apache-2.0 */
/* The packed path: keys outside, blocks of query rows inside. A tile of keys and values is packed
 * once and used by all query rows of the item (tokens of the block times heads of the group).
 *
 * Per tile and row block: scores (gemm), terms, online softmax, values (gemm). For 384 rows, D 128:
 * 64 KiB are packed for 25 MFLOP. */
#include "tile.h"

/* A masked value that is not finite must not be multiplied with a zero probability: such values are
 * packed as zero and added separately to the rows that see them. */
static void hide_non_finite_values(struct tile *tile, int32_t padded)
{
    const struct layer_shape *shape = &tile->run->problem.shape;
    const struct tile_kernels *kernels = shape->kernels;
    const struct tile_kernels *plain = tile->run->problem.instance->variant->f32;
    const void **rows = tile->at.value_rows + TILE_KEYS + 2;
    for (int32_t j = 0; j < tile->skip; j++) {
        rows[j] = tile->at.zero_row;
    }
    for (int32_t j = tile->skip; j < tile->n; j++) {
        plain->unpack[kernels->element](tile->at.row, tile->at.value_rows[j], shape->width);
        bool finite = true;
        for (int32_t d = 0; d < shape->width; d++) {
            finite = finite && isfinite(tile->at.row[d]);
        }
        rows[j] = finite ? tile->at.value_rows[j] : tile->at.zero_row;
    }
    kernels->pack_values(tile->at.values, rows, tile->n, padded, shape->width_padded);
}

static void add_non_finite_values(struct tile *tile, int32_t first_row, int32_t rows)
{
    const struct attend_problem *problem = &tile->run->problem;
    const struct layer_shape *shape = &problem->shape;
    const struct variant *variant = problem->instance->variant;
    const void **hidden = tile->at.value_rows + TILE_KEYS + 2;
    for (int32_t j = tile->skip; j < tile->n; j++) {
        if (hidden[j] != tile->at.zero_row) {
            continue;
        }
        variant->f32->unpack[shape->kernels->element](tile->at.row, tile->at.value_rows[j],
                                                      shape->width);
        for (int32_t d = shape->width; d < shape->width_padded; d++) {
            tile->at.row[d] = 0.0f;
        }
        for (int32_t r = 0; r < rows; r++) {
            int32_t m = first_row + r;
            int32_t token = tile->item->token + m / shape->group;
            if (j < tile->at.low[m] || j >= tile->at.high[m] ||
                !tree_row_visible(problem, tile->item->request, token, tile->first + j)) {
                continue;
            }
            const float *p_row = tile->at.scores + (int64_t)r * SCORE_STRIDE;
            float p = p_row[j];
            if (shape->kernels->element == ELEMENT_BF16) {
                uint16_t bits;
                memcpy(&bits, (const uint16_t *)p_row + j, sizeof(bits));
                variant->f32->unpack[ELEMENT_BF16](&p, &bits, 1);
            }
            variant->add_scaled(tile->at.acc_o + (int64_t)m * shape->width_padded, tile->at.row, p,
                                shape->width_padded);
        }
    }
}

/* A value's scale that is not finite is moved into its staged row, which then counts as non-finite:
 * as a scale it would be multiplied with the zero probabilities of rows that do not see it. */
static void move_non_finite_scales(struct tile *tile)
{
    const struct layer_shape *shape = &tile->run->problem.shape;
    for (int32_t j = tile->skip; j < tile->n; j++) {
        if (isfinite(tile->at.value_scale[j])) {
            continue;
        }
        for (int32_t d = 0; d < shape->width_padded; d++) {
            tile->at.row[d] = NAN;
        }
        tile->run->problem.instance->variant->store[shape->kernels->element](
            (void *)(uintptr_t)tile->at.value_rows[j], tile->at.row, 1.0f, shape->width_padded);
        tile->at.value_scale[j] = 1.0f;
    }
}

/* Finds the rows of the tile; of a list, those that the query sees. */
static void find_tile(struct tile *tile)
{
    const struct attend_problem *problem = &tile->run->problem;
    const struct work_item *item = tile->item;
    const void **value_scales = tile->at.scale_rows + FLASH_KEYS;
    int32_t skip = tile->skip;
    int32_t count = tile->n - skip;
    if (problem->latent != NULL && problem->shape.topk > 0) {
        tile->skip = 0;
        tile->n = find_listed_rows(problem, &problem->keys, item, tile->first + skip, count,
                                   tile->at.key_rows, tile->at.scale_rows);
        memcpy(tile->at.value_rows, tile->at.key_rows, (size_t)tile->n * sizeof(void *));
        memcpy(value_scales, tile->at.scale_rows, (size_t)tile->n * sizeof(void *));
        return;
    }
    if (problem->shape.topk > 0) {
        find_listed_rows(problem, &problem->keys, item, tile->first + skip, count,
                         tile->at.key_rows, tile->at.scale_rows);
        count = tile->n = find_listed_rows(problem, &problem->values, item, tile->first + skip,
                                           count, tile->at.value_rows, value_scales);
        tile->skip = skip = 0;
    } else {
        find_rows(problem, &problem->keys, item->request, item->head, tile->first + skip, count,
                  tile->at.key_rows + skip, tile->at.scale_rows + skip);
        find_rows(problem, &problem->values, item->request, item->head, tile->first + skip, count,
                  tile->at.value_rows + skip, value_scales + skip);
    }
    if (has_float_scales(&problem->keys)) {
        load_scales(tile->at.scale_rows + skip, 0, count, tile->at.key_scale + skip);
    }
    if (has_float_scales(&problem->values)) {
        load_scales(value_scales + skip, 0, count, tile->at.value_scale + skip);
    }
}

static void stage_rows_of_tile(const struct tile *tile, const struct row_source *source,
                               char *memory, int32_t padded, const void **rows,
                               const void **scale_rows, float *scales)
{
    const int32_t skip = tile->skip;
    const struct stage stage = {.problem = &tile->run->problem,
                                .source = source,
                                .memory = memory,
                                .padded = padded,
                                .n = tile->n - skip,
                                .first = tile->first + skip,
                                .rows = rows + skip,
                                .scale_rows = scale_rows + skip,
                                .scales = scales + skip};
    if (source->stage) {
        stage_rows(&stage);
    }
}

static void load_tile(struct tile *tile)
{
    const struct attend_problem *problem = &tile->run->problem;
    const struct layer_shape *shape = &problem->shape;
    find_tile(tile);
    int32_t padded = round_up(tile->n, shape->any_prefix ? TILE_KEYS : COLUMN_MULTIPLE);
    int32_t skip = tile->skip;
    for (int32_t j = 0; j < skip; j++) {
        tile->at.key_rows[j] = tile->at.value_rows[j] = tile->at.zero_row;
        tile->at.key_scale[j] = tile->at.value_scale[j] = 0.0f;
    }
    if (problem->keys.row_scale || problem->values.row_scale) {
        for (int32_t j = tile->n; j < padded; j++) {
            tile->at.key_scale[j] = 0.0f;
            tile->at.value_scale[j] = 0.0f;
        }
    }
    const struct attend_scratch *at = &tile->at;
    stage_rows_of_tile(tile, &problem->keys, at->stage_keys, shape->depth_padded, at->key_rows,
                       at->scale_rows, at->key_scale);
    stage_rows_of_tile(tile, &problem->values, at->stage_values, shape->width_padded,
                       at->value_rows, at->scale_rows + FLASH_KEYS, at->value_scale);
    if (problem->values.row_scale) { /* such rows are always staged */
        move_non_finite_scales(tile);
    }
    const struct tile_kernels *kernels = shape->kernels;
    if (tile->flash) {
        tile->non_finite = kernels->flash->pack_values(tile->at.values, tile->at.value_rows,
                                                       tile->n, padded, shape->width_padded) != 0;
        kernels->flash->pack_keys(tile->at.keys, tile->at.key_rows, tile->n, padded,
                                  shape->depth_padded);
        return;
    }
    kernels->pack_keys(tile->at.keys, tile->at.key_rows, tile->n, padded, shape->depth_padded);
    if (tile->only_maxima) {
        return;
    }
    tile->non_finite = kernels->pack_values(tile->at.values, tile->at.value_rows, tile->n, padded,
                                            shape->width_padded) != 0;
    if (tile->non_finite) {
        hide_non_finite_values(tile, padded);
    }
}

static void apply_terms(struct tile *tile, int32_t first_row, int32_t rows, int32_t begin,
                        int32_t end)
{
    const struct attend_problem *problem = &tile->run->problem;
    const struct work_item *item = tile->item;
    const float *key_scale = problem->keys.row_scale ? tile->at.key_scale + begin : NULL;
    apply_score_terms(problem, item, item->head, first_row, rows, tile->first + begin,
                      key_factor(problem, item->head), key_scale, tile->at.scores + begin,
                      end - begin);
    for (int32_t r = 0;
         r < rows && problem->batch->tree != NULL && problem->layer->tree_mask != ATTN_TREE_NONE;
         r++) {
        tree_apply(problem, item->request, item->token + (first_row + r) / problem->shape.group,
                   tile->first, begin, end, tile->at.scores + (int64_t)r * SCORE_STRIDE);
    }
}

/* Raises row_max to the largest visible score of each row. */
static void raise_row_max(struct tile *tile, int32_t first_row, int32_t rows, float factor)
{
    for (int32_t r = 0; r < rows; r++) {
        const float *scores = tile->at.scores + (int64_t)r * SCORE_STRIDE;
        float *row_max = &tile->at.row_max[first_row + r];
        for (int32_t j = tile->at.low[first_row + r]; j < tile->at.high[first_row + r]; j++) {
            *row_max = scores[j] * factor > *row_max ? scores[j] * factor : *row_max;
        }
    }
}

/* Rounds probabilities to fp8, as an fp8 kernel would; row_sum is of the unrounded ones. */
static void round_probabilities(struct tile *tile, int32_t rows, int32_t begin, int32_t end)
{
    const struct attend_problem *problem = &tile->run->problem;
    const struct attn_layer_params *params = problem->params;
    const struct variant *variant = problem->instance->variant;
    int32_t element =
        layer_kv_dtype(problem->layer, true) == ATTN_KV_FP8_E5M2 ? ELEMENT_E5M2 : ELEMENT_E4M3;
    float scale = (float)scale_of_head(params->p_scale, params->p_scale_host,
                                       problem->layer->p_scale_form, 0);
    uint8_t codes[TILE_KEYS];
    for (int32_t r = 0; r < rows; r++) {
        float *p = tile->at.scores + (int64_t)r * SCORE_STRIDE;
        variant->codes->encode[element](codes, p + begin, scale, NULL, end - begin);
        variant->f32->unpack[element](p + begin, codes, end - begin);
        for (int32_t j = begin; j < end; j++) {
            p[j] *= problem->values.row_scale ? scale * tile->at.value_scale[j] : scale;
        }
    }
}

/* One tile for rows first_row .. first_row+rows-1 of the item. */
static void row_block(struct tile *tile, int32_t first_row, int32_t rows, int32_t block)
{
    const struct attend_problem *problem = &tile->run->problem;
    const struct layer_shape *shape = &problem->shape;
    const struct tile_kernels *kernels = shape->kernels;
    const struct interval seen = find_columns(tile, first_row, rows, NULL);
    if (seen.high <= seen.low) {
        return;
    }
    int32_t begin = shape->any_prefix ? 0 : seen.low / COLUMN_MULTIPLE * COLUMN_MULTIPLE;
    int32_t end = shape->any_prefix ? TILE_KEYS : round_up(seen.high, COLUMN_MULTIPLE);
    /* only the last block has fewer rows than row_block, and no rows follow it */
    bool pad_rows = shape->any_prefix && rows < kernels->row_block;
    int32_t gemm_rows = pad_rows ? min_i32(kernels->row_block, round_up(rows, ROW_MULTIPLE)) : rows;
    int64_t element = kernels->element_bytes;
    int64_t pair = kernels->element == ELEMENT_BF16 ? 2 : 1;
    const char *q = tile->at.q + (int64_t)first_row * shape->depth_padded * element;
    for (int32_t d = 0, step = depth_step(problem); d < shape->depth_padded; d += step) {
        tile_prefetch_share(&tile->prefetch);
        kernels->gemm(tile->at.scores + begin, SCORE_STRIDE, q + d * element, shape->depth_padded,
                      tile->at.keys + ((int64_t)d * TILE_KEYS + begin * pair) * element, TILE_KEYS,
                      gemm_rows, end - begin, min_i32(step, shape->depth_padded - d), d > 0);
    }
    if (problem->terms) {
        apply_terms(tile, first_row, rows, begin, end);
    }
    float factor = problem->terms ? LOG2_E : key_factor(problem, tile->item->head) * LOG2_E;
    if (tile->only_maxima) {
        raise_row_max(tile, first_row, rows, factor);
        return;
    }
    float *acc_o = tile->at.acc_o + (int64_t)first_row * shape->width_padded;
    struct softmax_args softmax = {
        .scores = tile->at.scores,
        .rows = rows,
        .begin = begin,
        .end = end,
        .low = tile->at.low + first_row,
        .high = tile->at.high + first_row,
        .softmax_scale_log2 = factor,
        .row_max = tile->at.row_max + first_row,
        .row_sum = tile->at.row_sum + first_row,
        .scores_scale = tile->at.scores_scale,
        .value_scale = problem->values.row_scale && !shape->rounds ? tile->at.value_scale : NULL,
    };
    if (tile->recompute) {
        recompute_softmax(kernels, &softmax, shape->rounds ? 0.0f : EXPONENT_SHIFT);
    } else {
        kernels->softmax(&softmax);
    }
    if (shape->rounds) {
        round_probabilities(tile, rows, begin, end);
    }
    if (tile->at.seen[block]) {
        rescale_o(problem, acc_o, tile->at.scores_scale, rows);
    }
    const char *p = (const char *)tile->at.scores + begin * element;
    const char *values = tile->at.values + (int64_t)begin * shape->width_padded * element;
    for (int32_t d = 0, step = width_step(problem); d < shape->width_padded; d += step) {
        tile_prefetch_share(&tile->prefetch);
        kernels->gemm(acc_o + d, shape->width_padded, p, SCORE_STRIDE * pair,
                      values + d * pair * element, shape->width_padded, gemm_rows,
                      min_i32(step, shape->width_padded - d), end - begin, tile->at.seen[block]);
    }
    tile->at.seen[block] = 1;
    if (tile->non_finite) {
        add_non_finite_values(tile, first_row, rows);
    }
}

/* The tile of keys first .. first+count-1, of which the item's are packed. */
static void begin_tile(struct tile *tile, int32_t first, int32_t count)
{
    tile->first = first;
    tile->skip = max_i32(0, tile->item->key_begin - first);
    tile->n = min_i32(count, tile->item->key_end - first);
    load_tile(tile);
}

static void run_rows(struct tile *tile, int32_t rows)
{
    const struct attend_problem *problem = &tile->run->problem;
    int32_t step = problem->shape.kernels->row_block;
    if (problem->latent != NULL) {
        tile_prefetch_begin(&tile->prefetch, problem, tile->item,
                            tile->first + min_i32(TILE_KEYS, tile->item->key_end - tile->first),
                            (rows + step - 1) / step);
    }
    for (int32_t m = 0, block = 0; m < rows; m += step, block++) {
        row_block(tile, m, min_i32(step, rows - m), block);
    }
}

/* Runs every tile of keys begin .. end-1 of the item for every block of its rows. Tiles begin at
 * multiples of TILE_KEYS wherever the item begins, so that a row's bits do not depend on which rows
 * share its item. */
static void run_narrow_tiles(struct tile *tile, int32_t begin, int32_t end, int32_t rows)
{
    for (int32_t first = begin / TILE_KEYS * TILE_KEYS; first < end;
         first += min_i32(TILE_KEYS, end - first)) {
        begin_tile(tile, first, TILE_KEYS);
        run_rows(tile, rows);
    }
}

/* Runs all keys of the item, in tiles of FLASH_KEYS where flash takes them. */
static void run_tiles(struct tile *tile, int32_t rows)
{
    const struct work_item *item = tile->item;
    if (!tile->flash) {
        run_narrow_tiles(tile, item->key_begin, item->key_end, rows);
        return;
    }
    for (int32_t first = item->key_begin / TILE_KEYS * TILE_KEYS, keys; first < item->key_end;
         first += keys) {
        keys = min_i32(FLASH_KEYS, item->key_end - first);
        begin_tile(tile, first, FLASH_KEYS);
        if (!tile->non_finite) {
            flash_attend(tile, rows);
            continue;
        }
        tile->flash = false;
        run_narrow_tiles(tile, max_i32(first, item->key_begin), first + keys, rows);
        tile->flash = true;
    }
}

/* Loads the item's queries, zeros up to `rows_padded` rows, and the keys that each token sees. */
static void load_item(struct tile *tile, int32_t rows_padded)
{
    const struct work_item *item = tile->item;
    load_queries(tile->run, item, item->head, tile->at.q, rows_padded);
    for (int32_t t = 0; t < item->num_tokens; t++) {
        struct interval seen = row_interval(&tile->run->problem, item->request, item->token + t);
        tile->at.token_low[t] = seen.low;
        tile->at.token_high[t] = seen.high;
    }
}

static void run_passes(struct tile *tile, int32_t rows)
{
    if (tile->run->problem.shape
            .rounds) { /* relative to the largest score, which has to be known first */
        tile->only_maxima = true;
        run_tiles(tile, rows);
        tile->only_maxima = false;
    }
    run_tiles(tile, rows);
}

void run_keys(const struct attend_run *run, const struct work_item *item,
              const struct row_block *rows, struct interval keys, bool recompute,
              const struct attend_scratch *scratch)
{
    const struct layer_shape *shape = &run->problem.shape;
    const int32_t count = item->num_tokens * shape->group, step = shape->kernels->row_block;
    struct work_item part = *item;
    part.head = rows->head;
    part.key_begin = keys.low;
    part.key_end = keys.high;
    struct tile tile = {.run = run,
                        .item = &part,
                        .at = *scratch,
                        .prefetch = {.rows = scratch->next_rows},
                        .recompute = recompute};
    tile.at.acc_o = rows->acc_o;
    tile.at.row_max = rows->row_max;
    tile.at.row_sum = rows->row_sum;
    for (int32_t block = 0; block * step < count; block++) {
        tile.at.seen[block] = 1;
    }
    load_item(&tile, shape->any_prefix ? round_up(count, ROW_MULTIPLE) : count);
    run_passes(&tile, count);
}

void finish_head_rows(const struct attend_run *run, const struct work_item *item,
                      const struct row_block *rows, const struct attend_scratch *scratch)
{
    const struct layer_shape *shape = &run->problem.shape;
    const int32_t count = item->num_tokens * shape->group;
    int32_t *out_of_range = scratch->low;
    const bool any = find_rows_out_of_range(&run->problem, count, rows, out_of_range);
    finish_item(run, item, rows, scratch);
    if (!any) {
        return;
    }
    memset(rows->acc_o, 0, (size_t)count * (size_t)shape->width_padded * sizeof *rows->acc_o);
    for (int32_t m = 0; m < count; m++) {
        rows->row_max[m] = out_of_range[m] ? -INFINITY : ROW_IS_DONE;
        rows->row_sum[m] = 0.0f;
    }
    run_keys(run, item, rows, (struct interval){item->key_begin, item->key_end}, true, scratch);
    for (int32_t m = 0; m < count; m++) {
        rows->row_max[m] += shape->rounds ? 0.0f : EXPONENT_SHIFT;
    }
    finish_item(run, item, rows, scratch);
}

void run_packed(const struct attend_run *run, const struct work_item *item,
                const struct attend_scratch *scratch)
{
    const struct layer_shape *shape = &run->problem.shape;
    int32_t rows = item->num_tokens * shape->group;
    int32_t step = shape->kernels->row_block;
    struct tile tile = {
        .run = run, .item = item, .at = *scratch, .prefetch = {.rows = scratch->next_rows}};
    tile.flash = flash_takes(&run->problem, rows);
    int32_t rows_padded = tile.flash          ? round_up(rows, FLASH_ROWS)
                          : shape->any_prefix ? round_up(rows, ROW_MULTIPLE)
                                              : rows;
    load_item(&tile, rows_padded);
    for (int32_t m = 0; m < rows_padded; m++) {
        tile.at.row_max[m] = -INFINITY;
        tile.at.row_sum[m] = 0.0f;
    }
    for (int32_t block = 0; block * step < rows; block++) {
        tile.at.seen[block] = 0;
    }
    memset(tile.at.zero_row, 0,
           (size_t)max_i32(shape->width_padded, shape->depth_padded) *
               (size_t)shape->kernels->element_bytes);
    run_passes(&tile, rows);
    for (int32_t m = 0, block = 0; m < rows; m += step, block++) {
        if (!tile.at.seen[block]) {
            memset(tile.at.acc_o + (int64_t)m * shape->width_padded, 0,
                   (size_t)min_i32(step, rows - m) * (size_t)shape->width_padded * sizeof(float));
        }
    }
    const struct row_block sums = {item->request, item->head,      item->token,    item->num_tokens,
                                   tile.at.acc_o, tile.at.row_max, tile.at.row_sum};
    finish_head_rows(run, item, &sums, scratch);
}
