/* SPDX-License-Identifier: Apache-2.0 */
/* Prefetch for the packed path of latent rows: a decode's tile is 144 KiB of memory for 4.5 MFLOP
 * at 16 heads, and packing reads 16 rows at once, which no hardware prefetcher follows. */
#include "cpu_simd/internal.h"

#define LINE_BYTES 64
#define STEP 64 /* elements of depth, or columns, between two shares */

int32_t depth_step(const struct attend_problem *problem)
{
    return problem->latent != NULL ? STEP : problem->shape.depth_padded;
}

int32_t width_step(const struct attend_problem *problem)
{
    return problem->latent != NULL ? STEP : problem->shape.width_padded;
}

void tile_prefetch_begin(struct tile_prefetch *prefetch, const struct attend_problem *problem,
                         const struct work_item *item, int32_t first, int32_t row_blocks)
{
    const struct row_source *source = &problem->keys;
    const struct layer_shape *shape = &problem->shape;
    int32_t n = max_i32(0, min_i32(TILE_KEYS, item->key_end - first));
    prefetch->total = prefetch->done = 0;
    if (n == 0 || source->pack != 0) {
        return;
    }
    if (shape->topk > 0) {
        n = find_listed_rows(problem, source, item, first, n, prefetch->rows, NULL);
    } else {
        find_rows(problem, source, item->request, item->head, first, n, prefetch->rows, NULL);
    }
    prefetch->lines = (source->row_bytes + LINE_BYTES - 1) / LINE_BYTES;
    prefetch->total = n * prefetch->lines;
    int32_t shares =
        (shape->depth_padded + STEP - 1) / STEP + (shape->width_padded + STEP - 1) / STEP;
    prefetch->share = prefetch->total / (shares * row_blocks) + 1;
}

void tile_prefetch_share(struct tile_prefetch *prefetch)
{
    int32_t end = min_i32(prefetch->total, prefetch->done + prefetch->share);
    for (; prefetch->done < end; prefetch->done++) {
        const char *row = prefetch->rows[prefetch->done / prefetch->lines];
        __builtin_prefetch(row + prefetch->done % prefetch->lines * LINE_BYTES, 0, 2);
    }
}
