/* SPDX-License-Identifier: Apache-2.0 */
/* Static sinks: fixed keys at positions before 0 that every query of a request with keys sees. They
 * are attended after the cache's keys, when acc_o is as if the values had been float32, with the
 * kernels of the layer's activation type. */
#include "cpu_simd/internal.h"

#define SINK_ROWS ROW_BLOCK_MAX

/* Rows of products: where a row's bits may not depend on other rows, a number that all kernels
 * compute alike. Rows of q past `count` are zero; results past an item's rows are not read. */
static int32_t product_rows(const struct layer_shape *shape, int32_t count)
{
    return shape->any_prefix ? round_up(count, ROW_MULTIPLE) : count;
}

/* A tile of sinks of one KV head, and where a block of rows is computed. */
struct sink_tile {
    const struct attend_run *run;
    int32_t head;
    int32_t first; /* sink */
    int32_t n;
    int32_t padded; /* n, up to COLUMN_MULTIPLE */
    int32_t depth;
    char *q;    /* [SINK_ROWS, depth] */
    char *keys; /* packed, as the values */
    char *values;
    char *rows; /* before they are packed */
    float *scores;
    float *scores_scale;
};

/* Rows of a head in the compute type, of `padded` elements. */
static void load_sinks(const struct sink_tile *tile, const struct attn_tensor *tensor,
                       int32_t length, int32_t padded, const void **rows)
{
    const struct tile_kernels *kernels = tile->run->problem.shape.kernels;
    const size_t bytes = (size_t)padded * (size_t)kernels->element_bytes;
    memset(tile->rows, 0, (size_t)tile->n * bytes);
    for (int32_t i = 0; i < tile->n; i++) {
        char *row = tile->rows + (size_t)i * bytes;
        kernels->unpack[element_of_any(tensor)](
            row, tensor_row(tensor, tile->first + i, tile->head), length);
        rows[i] = row;
    }
}

static void load_tile(const struct sink_tile *tile)
{
    const struct attend_problem *problem = &tile->run->problem;
    const struct layer_shape *shape = &problem->shape;
    const void *rows[TILE_KEYS];
    load_sinks(tile, problem->params->sink_k, shape->depth, tile->depth, rows);
    shape->kernels->pack_keys(tile->keys, rows, tile->n, tile->padded, tile->depth);
    load_sinks(tile, problem->params->sink_v, shape->width, shape->width_padded, rows);
    shape->kernels->pack_values(tile->values, rows, tile->n, tile->padded, shape->width_padded);
}

/* Scores of rows first_row .. first_row + count - 1, in natural units. */
static void score_rows(const struct sink_tile *tile, const struct row_block *rows,
                       int32_t first_row, int32_t count)
{
    const struct attend_problem *problem = &tile->run->problem;
    const struct tile_kernels *kernels = problem->shape.kernels;
    const size_t row_bytes = (size_t)tile->depth * (size_t)kernels->element_bytes;
    const int32_t group = problem->shape.group;
    const int64_t start = problem->batch->query_start_loc[rows->request];
    memset(tile->q, 0, SINK_ROWS * row_bytes);
    for (int32_t r = 0; r < count; r++) {
        const int32_t token = rows->token + (first_row + r) / group;
        const int32_t q_head = tile->head * group + (first_row + r) % group;
        kernels->unpack[problem->q_element](tile->q + (size_t)r * row_bytes,
                                            tensor_row(tile->run->args->q, start + token, q_head),
                                            problem->shape.depth);
    }
    kernels->gemm(tile->scores, SCORE_STRIDE, tile->q, tile->depth, tile->keys, TILE_KEYS,
                  product_rows(&problem->shape, count), tile->padded, tile->depth, 0);
    const struct work_item item = {.request = rows->request, .token = rows->token};
    apply_score_terms(problem, &item, tile->head, first_row, count,
                      tile->first - problem->layer->sink_len, query_factor(problem, tile->head),
                      NULL, tile->scores, tile->padded);
}

static void add_tile(const struct sink_tile *tile, const struct row_block *rows, int32_t first_row,
                     int32_t count)
{
    const struct attend_problem *problem = &tile->run->problem;
    const struct tile_kernels *kernels = problem->shape.kernels;
    const int64_t p_stride = SCORE_STRIDE * (int64_t)sizeof(float) / kernels->element_bytes;
    const int32_t width = problem->shape.width_padded;
    float *acc_o = rows->acc_o + (int64_t)first_row * width;
    int32_t low[SINK_ROWS] = {0}, high[SINK_ROWS];
    for (int32_t r = 0; r < count; r++) {
        high[r] = tile->n;
    }
    score_rows(tile, rows, first_row, count);
    const struct softmax_args softmax = {.scores = tile->scores,
                                         .rows = count,
                                         .end = tile->padded,
                                         .low = low,
                                         .high = high,
                                         .softmax_scale_log2 = LOG2_E,
                                         .row_max = rows->row_max + first_row,
                                         .row_sum = rows->row_sum + first_row,
                                         .scores_scale = tile->scores_scale};
    if (has_large_scores(problem->instance->variant, tile->scores, count, tile->padded)) {
        recompute_softmax(kernels, &softmax, 0.0f);
    } else {
        kernels->softmax(&softmax);
    }
    rescale_o(problem, acc_o, tile->scores_scale, count);
    kernels->gemm(acc_o, width, tile->scores, p_stride, tile->values, width,
                  product_rows(&problem->shape, count), width, tile->padded, 1);
}

void add_static_sinks(const struct attend_run *run, const struct row_block *rows,
                      const struct attend_scratch *scratch)
{
    const struct layer_shape *shape = &run->problem.shape;
    struct sink_tile tile = {.run = run,
                             .head = rows->head,
                             .depth = round_up(shape->depth, DEPTH_MULTIPLE),
                             .q = scratch->sink_q,
                             .keys = scratch->keys,
                             .values = scratch->values,
                             .rows = scratch->sink_rows,
                             .scores = scratch->scores,
                             .scores_scale = scratch->scores_scale};
    const int32_t count = rows->num_tokens * shape->group;
    if (request_keys(&run->problem, rows->request) == 0) { /* idle: it sees no sink either */
        return;
    }
    for (tile.first = 0; tile.first < shape->sink_len; tile.first += TILE_KEYS) {
        tile.n = min_i32(TILE_KEYS, shape->sink_len - tile.first);
        tile.padded = round_up(tile.n, COLUMN_MULTIPLE);
        load_tile(&tile);
        for (int32_t m = 0; m < count; m += SINK_ROWS) {
            add_tile(&tile, rows, m, min_i32(SINK_ROWS, count - m));
        }
    }
}
