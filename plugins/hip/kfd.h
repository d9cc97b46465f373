/* SPDX-License-Identifier: Apache-2.0 */
/* The machine's AMD GPUs by the kernel driver's topology in sysfs. Nothing is opened but files: the
 * runtime stays uninitialised, so that a process may fork after a probe. */
#ifndef HIP_KFD_H
#define HIP_KFD_H

#include <stdint.h>

#define KFD_MAX_DEVICES 64

struct kfd_device {
    char name[64], arch[16]; /* arch: as compilers call it, gfx942 */
    char uuid[32];           /* GPU-<16 digits>, as ROCR_VISIBLE_DEVICES takes it; empty: none */
    int32_t major, minor;    /* the arch's version */
    int32_t num_cus, lds_bytes;
    int64_t memory_bytes;
    int32_t served; /* 1: kernels for it are in the plugin */
};

/* Fills devices in the order and number in which the runtime counts them; 0: none, and `cause` says
 * why. */
int32_t kfd_devices(struct kfd_device *devices, int32_t room, const char **cause);

#endif
