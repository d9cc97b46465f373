/* SPDX-License-Identifier: Apache-2.0 */
/* Search in a list of prefix sums. */
#ifndef GPU_DEVICE_SEARCH_H
#define GPU_DEVICE_SEARCH_H

#include "gpu/device/target.h"

/* The last i of 0 .. count - 1 with starts[i] <= x. */
GPU_INLINE int32_t find_last(const int32_t *starts, int32_t count, int32_t x)
{
    int32_t low = 0, high = count - 1;
    while (low < high) {
        int32_t middle = (low + high + 1) >> 1;
        if (starts[middle] <= x) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* The same by all lanes of a warp, whose loads wait together. */
GPU_INLINE int32_t find_last_by_lanes(const int32_t *starts, int32_t count, int32_t x)
{
    int32_t first = 0, rest = count;
    while (rest > 1) {
        const int32_t step = (rest + GPU_LANES - 1) / GPU_LANES, at = lane_index() * step;
        int32_t before = at < rest && starts[first + at] <= x;
        for (int32_t d = GPU_LANES / 2; d > 0; d >>= 1) {
            before += lane_xor(before, d);
        }
        const int32_t low = max(before - 1, 0) * step;
        first += low;
        rest = min(step, rest - low);
    }
    return first;
}

#endif
