/* SPDX-License-Identifier: Apache-2.0 */
/* The best of a stream of scores: candidates are appended while their score is above a threshold,
 * and when there is no room left all but the best are dropped, which raises the threshold. A
 * candidate costs a constant time, whatever their order. Entries stay in ascending order. */
#include "index.h"

#define DIGITS 256

int32_t best_capacity(int32_t most)
{
    return max_i32(2 * most, 2 * BEST_STEP) + BEST_STEP;
}

/* The score of place `wanted` (0: the highest), by its digits from the highest on. `above` is how
 * many scores are higher. */
static int32_t nth_highest(const int32_t *scores, int32_t count, int32_t wanted, int32_t *above)
{
    uint32_t prefix = 0, mask = 0;
    *above = 0;
    for (int32_t shift = 24; shift >= 0; shift -= 8) {
        int32_t counts[DIGITS] = {0}, digit = DIGITS - 1;
        for (int32_t i = 0; i < count; i++) {
            const uint32_t x = (uint32_t)scores[i] ^ 0x80000000u;
            counts[x >> shift & (DIGITS - 1)] += (x & mask) == prefix;
        }
        for (; *above + counts[digit] <= wanted; digit--) {
            *above += counts[digit];
        }
        prefix |= (uint32_t)digit << shift;
        mask |= (uint32_t)(DIGITS - 1) << shift;
    }
    return (int32_t)(prefix ^ 0x80000000u);
}

void best_keep(struct best *best, int32_t most)
{
    int32_t above, kept = 0;
    if (best->count <= most) {
        return;
    }
    const int32_t worst = nth_highest(best->scores, best->count, most - 1, &above);
    int32_t equals = most - above; /* those of the smallest entries */
    for (int32_t i = 0; i < best->count; i++) {
        const int32_t score = best->scores[i];
        const bool equal = score == worst && equals > 0;
        best->scores[kept] = score;
        best->entries[kept] = best->entries[i];
        kept += score > worst || equal;
        equals -= equal;
    }
    best->count = kept;
    best->threshold = worst;
}

void best_make_room(struct best *best, int32_t most)
{
    if (best->count + BEST_STEP > best_capacity(most)) {
        best_keep(best, most);
    }
}
