/* SPDX-License-Identifier: Apache-2.0 */
/* The packed path with flash kernels: the columns of a tile that each block of rows sees. */
#include "tile.h"

/* A block of fewer rows is mostly padding. */
#define FLASH_LEAST_ROWS 17

bool flash_takes(const struct attend_problem *problem, int32_t rows)
{
    const struct tile_kernels *kernels = problem->shape.kernels;
    return kernels->flash != NULL && kernels->row_block == FLASH_ROWS && rows >= FLASH_LEAST_ROWS &&
           !problem->terms && !problem->shape.any_prefix && !problem->values.row_scale &&
           problem->latent == NULL && problem->shape.topk == 0;
}

/* Columns of the tile that a token sees. */
static struct interval token_columns(const struct tile *tile, int32_t token)
{
    int32_t last = min_i32(tile->item->key_end, tile->at.token_high[token]) - tile->first;
    return (struct interval){max_i32(tile->skip, tile->at.token_low[token] - tile->first),
                             min_i32(tile->n, last)};
}

/* Rows first .. first+rows-1 of the item. */
static struct flash_block find_block(const struct tile *tile, int32_t first, int32_t rows)
{
    int32_t group = tile->run->problem.shape.group;
    int32_t low = FLASH_KEYS, high = 0, latest_low = 0, earliest_high = FLASH_KEYS;
    for (int32_t token = first / group; token * group < first + rows; token++) {
        struct interval seen = token_columns(tile, token);
        latest_low = max_i32(latest_low, seen.low);
        earliest_high = min_i32(earliest_high, seen.high);
        if (seen.high > seen.low) {
            low = min_i32(low, seen.low);
            high = max_i32(high, seen.high);
        }
    }
    struct flash_block block = {0};
    if (high > low) {
        block.begin = low / COLUMN_MULTIPLE * COLUMN_MULTIPLE;
        block.end = round_up(high, COLUMN_MULTIPLE);
        block.masked = latest_low > block.begin || earliest_high < block.end;
    }
    return block;
}

static void find_masks(const struct tile *tile, int32_t first, int32_t rows, int32_t *low,
                       int32_t *high)
{
    int32_t group = tile->run->problem.shape.group;
    for (int32_t m = first; m < first + rows;) {
        struct interval seen = token_columns(tile, m / group);
        int32_t next = min_i32((m / group + 1) * group, first + rows);
        for (; m < next; m++) {
            low[m] = seen.low;
            high[m] = seen.high;
        }
    }
    for (int32_t m = first + rows; m < first + FLASH_ROWS; m++) {
        low[m] = high[m] = 0;
    }
}

void flash_attend(struct tile *tile, int32_t rows)
{
    const struct attend_problem *problem = &tile->run->problem;
    const struct layer_shape *shape = &problem->shape;
    for (int32_t first = 0; first < rows; first += FLASH_ROWS) {
        int32_t of_block = min_i32(FLASH_ROWS, rows - first);
        struct flash_block *block = &tile->at.blocks[first / FLASH_ROWS];
        *block = find_block(tile, first, of_block);
        if (block->masked) {
            find_masks(tile, first, of_block, tile->at.low, tile->at.high);
        }
        if (block->begin < block->end) {
            block->first_tile = !tile->at.seen[first / FLASH_ROWS];
            tile->at.seen[first / FLASH_ROWS] = 1;
        }
    }
    const struct flash_args args = {
        .keys = tile->at.keys,
        .values = tile->at.values,
        .blocks = tile->at.blocks,
        .low = tile->at.low,
        .high = tile->at.high,
        .q = tile->at.q,
        .acc_o = tile->at.acc_o,
        .depth = shape->depth_padded,
        .width = shape->width_padded,
        .num_blocks = round_up(rows, FLASH_ROWS) / FLASH_ROWS,
        .softmax_scale_log2 = key_factor(problem, tile->item->head) * LOG2_E,
        .row_max = tile->at.row_max,
        .row_sum = tile->at.row_sum,
    };
    shape->kernels->flash->attend(&args);
}
