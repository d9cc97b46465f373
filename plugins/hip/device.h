/* SPDX-License-Identifier: Apache-2.0 */
/* What device.c has for this plugin alone: its own kernels. */
#ifndef HIP_DEVICE_H
#define HIP_DEVICE_H

#include "attend_list.h"
#include "gpu/params.h"

/* What an attend of attend_list.h is for: HIP_ATTEND_FOR with that list's arguments. */
struct hip_attend {
    int32_t dtype; /* the cache's */
    bool codes;    /* queries are of that dtype, too */
    int32_t size, rows;
};

#define HIP_ATTEND_FOR(kind, KIND, size, rows) {HIP_DTYPES_##KIND, size, rows},
#define HIP_DTYPES_F16 ATTN_DTYPE_F16, false
#define HIP_DTYPES_BF16 ATTN_DTYPE_BF16, false
#define HIP_DTYPES_E4M3 ATTN_DTYPE_FP8_E4M3, false
#define HIP_DTYPES_E5M2 ATTN_DTYPE_FP8_E5M2, false
#define HIP_DTYPES_INT8 ATTN_DTYPE_INT8, false
#define HIP_DTYPES_FP8 ATTN_DTYPE_FP8_E4M3, true

/* Whether it takes these queries and caches, heads padded to `size` and the schedule's items. */
static inline bool hip_attend_takes(const struct hip_attend *attend, const struct gpu_params *p,
                                    int32_t size)
{
    const bool codes = p->q.dtype >= ATTN_DTYPE_FP8_E4M3;
    return attend->dtype == p->k.dtype && attend->codes == codes &&
           (!codes || p->q.dtype == p->k.dtype) && attend->size == size &&
           attend->rows == p->schedule.tile_rows;
}

/* Whether the device's code has the attend for queries and caches of these dtypes, heads padded to
 * this size and the schedule's items. */
bool hip_has_attend(const struct gpu_device *device, const struct gpu_params *p, int32_t size);
/* Whether it has any. */
bool hip_has_attends(const struct gpu_device *device);
/* Launches it over p->schedule.ctas groups. NULL or the cause of a failure. */
const char *hip_launch_attend(const struct gpu_device *device, const struct gpu_params *p,
                              int32_t size, void *stream);

#endif
