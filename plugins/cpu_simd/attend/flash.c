/* SPDX-License-Identifier: Apache-2.0 */
/* The columns of a tile that blocks of rows see, and the packed path with flash kernels. */
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

struct interval find_columns(struct tile *tile, int32_t first_row, int32_t rows,
                             struct interval *common)
{
    const int32_t group = tile->run->problem.shape.group;
    struct interval any = {FLASH_KEYS, 0}, all = {0, FLASH_KEYS};
    for (int32_t m = first_row, token = m / group; m < first_row + rows; token++) {
        const int32_t last = min_i32(tile->item->key_end, tile->at.token_high[token]) - tile->first;
        /* keys of the tile before the item's first belong to another item */
        const int32_t low = max_i32(tile->skip, tile->at.token_low[token] - tile->first);
        const int32_t high = min_i32(tile->n, last);
        const int32_t next = min_i32((token + 1) * group, first_row + rows);
        for (; m < next; m++) {
            tile->at.low[m] = low;
            tile->at.high[m] = high;
        }
        if (high > low) {
            any = (struct interval){min_i32(any.low, low), max_i32(any.high, high)};
        }
        all = (struct interval){max_i32(all.low, low), min_i32(all.high, high)};
    }
    if (common != NULL) {
        *common = all;
    }
    return any;
}

/* Rows first .. first+rows-1 of the item, padded to a block with rows that see nothing. */
static struct flash_block find_block(struct tile *tile, int32_t first, int32_t rows)
{
    struct interval common;
    const struct interval seen = find_columns(tile, first, rows, &common);
    struct flash_block block = {0};
    for (int32_t m = first + rows; m < first + FLASH_ROWS; m++) {
        tile->at.low[m] = tile->at.high[m] = 0;
    }
    if (seen.high > seen.low) {
        block.begin = seen.low / COLUMN_MULTIPLE * COLUMN_MULTIPLE;
        block.end = round_up(seen.high, COLUMN_MULTIPLE);
        block.masked = common.low > block.begin || common.high < block.end;
    }
    return block;
}

void flash_attend(struct tile *tile, int32_t rows)
{
    const struct attend_problem *problem = &tile->run->problem;
    const struct layer_shape *shape = &problem->shape;
    for (int32_t first = 0; first < rows; first += FLASH_ROWS) {
        int32_t of_block = min_i32(FLASH_ROWS, rows - first);
        struct flash_block *block = &tile->at.blocks[first / FLASH_ROWS];
        *block = find_block(tile, first, of_block);
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
