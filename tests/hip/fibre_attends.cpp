/* SPDX-License-Identifier: Apache-2.0 */
/* The attends of fibres.h on the device of tests/gpu/host_device.cpp: which there are, and their
 * launch, as plugins/hip/device.c has them for a GPU. */
#include "gpu/device/target.h"
#include "gpu/params.h"
#include "host_device.h"

extern "C" {
#include "hip/device.h"
}

#if defined(__GFX11__) /* multiplies no codes */
#define ATTENDS(X)                                                                                 \
    HIP_ATTEND_SHAPES(X, f16, F16)                                                                 \
    HIP_ATTEND_SHAPES(X, bf16, BF16)                                                               \
    HIP_ATTEND_SHAPES(X, e4m3, E4M3)                                                               \
    HIP_ATTEND_SHAPES(X, e5m2, E5M2)                                                               \
    HIP_ATTEND_SHAPES(X, int8, INT8)
#else
#define ATTENDS(X) HIP_ATTENDS(X)
#endif

#define DECLARE_ATTEND(kind, KIND, size, rows)                                                     \
    extern "C" void kernel_attend_##kind##_##size##_##rows(const gpu_params &p);                   \
    static void run_##kind##_##size##_##rows(void *p)                                              \
    {                                                                                              \
        kernel_attend_##kind##_##size##_##rows(*(const gpu_params *)p);                            \
    }
ATTENDS(DECLARE_ATTEND)

#define ATTEND_RUN(kind, KIND, size, rows) run_##kind##_##size##_##rows,
static const struct hip_attend attends[] = {ATTENDS(HIP_ATTEND_FOR)};
static void (*const runs[])(void *) = {ATTENDS(ATTEND_RUN)};

static int find_attend(const struct gpu_params *p, int32_t size)
{
    for (int i = 0; i < (int)(sizeof attends / sizeof *attends); i++) {
        if (hip_attend_takes(&attends[i], p, size)) {
            return i;
        }
    }
    return -1;
}

bool hip_has_attend(const struct gpu_device *, const struct gpu_params *p, int32_t size)
{
    return find_attend(p, size) >= 0;
}

const char *hip_launch_attend(const struct gpu_device *, const struct gpu_params *p, int32_t size,
                              void *)
{
    const int i = find_attend(p, size);
    if (i < 0) {
        return "no matrix kernel is there";
    }
    host_run_groups(runs[i], (uint32_t)HIP_ATTEND_WARPS(attends[i].rows) * GPU_LANES,
                    p->schedule.ctas, p);
    return NULL;
}
