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

#endif
