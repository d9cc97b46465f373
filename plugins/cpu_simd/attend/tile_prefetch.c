/* SPDX-License-Identifier: Apache-2.0 */
/* Prefetch for the packed path of latent rows: a decode's tile is 144 KiB of memory for 4.5 MFLOP
 * at 16 heads, and packing reads 16 rows at once, which no hardware prefetcher follows. */
#include "internal.h"

#define LINE_BYTES 64
#define STEP 64 /* elements of depth, or columns, between two shares */

int32_t depth_step(const struct problem *problem)
{
    return problem->latent != NULL ? STEP : problem->shape.depth_padded;
}

int32_t width_step(const struct problem *problem)
{
    return problem->latent != NULL ? STEP : problem->shape.width_padded;
}

void ahead_begin(struct ahead *ahead, const struct problem *problem, const struct work_item *item,
                 int32_t first, int32_t row_blocks)
{
    const struct row_source *source = &problem->keys;
    const struct layer_shape *shape = &problem->shape;
    int32_t n = at_least(0, at_most(TILE_KEYS, item->key_end - first));
    ahead->total = ahead->done = 0;
    if (n == 0 || source->pack != 0) {
        return;
    }
    if (shape->topk > 0) {
        n = find_listed_rows(problem, item->request, item->token, first, n, ahead->rows);
    } else {
        find_rows(problem, source, item->request, item->head, first, n, ahead->rows, NULL);
    }
    ahead->lines = (source->row_bytes + LINE_BYTES - 1) / LINE_BYTES;
    ahead->total = n * ahead->lines;
    int32_t shares =
        (shape->depth_padded + STEP - 1) / STEP + (shape->width_padded + STEP - 1) / STEP;
    ahead->share = ahead->total / (shares * row_blocks) + 1;
}

void ahead_some(struct ahead *ahead)
{
    int32_t end = at_most(ahead->total, ahead->done + ahead->share);
    for (; ahead->done < end; ahead->done++) {
        const char *row = ahead->rows[ahead->done / ahead->lines];
        __builtin_prefetch(row + ahead->done % ahead->lines * LINE_BYTES, 0, 2);
    }
}
