/* SPDX-License-Identifier: Apache-2.0 */
/* Prefix sums of a group's threads. */
#ifndef GPU_DEVICE_SCAN_H
#define GPU_DEVICE_SCAN_H

#include "gpu/device/target.h"

/* The sum of the values of all threads before this one, plus `carry`, which becomes the new total.
 */
template <int THREADS> GPU_DEVICE int32_t running_sum(int32_t value, int32_t *carry, int32_t *warps)
{
    int lane = lane_index(), warp = warp_index();
    static_assert(THREADS / GPU_LANES <= GPU_LANES, "one warp adds the others' sums");
    int32_t sum = value;
    for (int d = 1; d < GPU_LANES; d <<= 1) {
        int32_t other = lane_up(sum, d);
        sum += lane >= d ? other : 0;
    }
    if (lane == GPU_LANES - 1) {
        warps[warp] = sum;
    }
    sync_group();
    if (warp == 0) {
        int32_t all = lane < THREADS / GPU_LANES ? warps[lane] : 0;
        for (int d = 1; d < GPU_LANES; d <<= 1) {
            int32_t other = lane_up(all, d);
            all += lane >= d ? other : 0;
        }
        warps[lane] = all;
    }
    sync_group();
    int32_t before = *carry + sum - value + (warp > 0 ? warps[warp - 1] : 0);
    *carry += warps[GPU_LANES - 1];
    sync_group();
    return before;
}

#endif
