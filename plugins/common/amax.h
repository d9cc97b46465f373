/* SPDX-License-Identifier: Apache-2.0 */
/* amax on a CPU: the history of maxima and its scale, after `out` is known. */
#ifndef PLUGINS_COMMON_AMAX_H
#define PLUGINS_COMMON_AMAX_H

#include <attn/numeric_kernels.h>

#include <math.h>
#include <string.h>

#define AMAX_SCALED_TO 448.0f /* e4m3's largest */

static inline void amax_keep(const struct attn_amax_args *args)
{
    const int32_t length = args->struct_size >= sizeof *args ? args->history_len : 0;
    float largest = 0;
    if (length <= 0) {
        return;
    }
    memmove(args->history, args->history + 1, (size_t)(length - 1) * sizeof(float));
    args->history[length - 1] = args->out[0];
    for (int32_t n = 0; n < length; n++) {
        const float x = args->history[n];
        largest = isnan(x) || x > largest ? x : largest;
    }
    *args->scale = largest == 0 ? 1 : largest / AMAX_SCALED_TO;
}

#endif
