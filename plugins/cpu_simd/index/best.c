/* SPDX-License-Identifier: Apache-2.0 */
/* The best of a stream of scores: candidates are appended while their score is above a threshold,
 * and when there is no room left all but the best are dropped, which raises the threshold. A
 * candidate costs a constant time, whatever their order. Entries stay in ascending order. */
#include "index.h"

int32_t best_capacity(int32_t most)
{
    return max_i32(2 * most, BEST_STEP) + BEST_STEP;
}

/* A score above which `most` candidates are, of which there are more, or the least one above which
 * fewer are: by halving, of which 32 bits need 32 counts at most. */
static int32_t cut_of(const struct variant *variant, const struct best *best, int32_t most,
                      int32_t *above)
{
    /* no kept candidate is below the threshold; some may equal it */
    int64_t low = (int64_t)best->threshold - 1;
    int64_t high = variant->highest(best->scores, best->count);
    *above = 0;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        const int32_t count = variant->count_above(best->scores, best->count, (int32_t)middle);
        if (count > most) {
            low = middle;
            continue;
        }
        high = middle;
        *above = count;
        if (count == most) {
            break;
        }
    }
    return (int32_t)high;
}

void best_keep(const struct variant *variant, struct best *best, int32_t most)
{
    int32_t above;
    if (best->count <= most) {
        return;
    }
    if (most == 0) {
        best->count = 0;
        return;
    }
    const int32_t cut = cut_of(variant, best, most, &above);
    const struct keep_args keep = {.from = best->scores,
                                   .entries = best->entries,
                                   .to = best->scores,
                                   .to_entries = best->entries,
                                   .n = best->count,
                                   .least = cut,
                                   .equals = most - above}; /* those of the smallest entries */
    best->count = variant->keep_above(&keep);
    best->threshold = cut;
}

void best_make_room(const struct variant *variant, struct best *best, int32_t most)
{
    if (best->count + BEST_STEP > best_capacity(most)) {
        best_keep(variant, best, most);
    }
}

void best_add_part(const struct variant *variant, const int32_t *partial, int32_t topk,
                   int32_t most, struct best *best)
{
    for (int32_t i = 0; i < partial[0]; i += BEST_STEP) {
        best_make_room(variant, best, most);
        const struct keep_args keep = {.from = partial + 1 + i,
                                       .entries = partial + 1 + topk + i,
                                       .to = best->scores + best->count,
                                       .to_entries = best->entries + best->count,
                                       .n = min_i32(BEST_STEP, partial[0] - i),
                                       .least = best->threshold};
        best->count += variant->keep_above(&keep);
    }
}
