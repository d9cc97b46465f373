/* SPDX-License-Identifier: Apache-2.0 */
/* The machine's Intel GPUs by the kernel drivers' files in sysfs. Nothing is opened but files: the
 * driver in user space stays uninitialised, so that a process may fork after a probe. */
#ifndef LEVEL_ZERO_SYSFS_H
#define LEVEL_ZERO_SYSFS_H

#include "gpu/host/backend.h"

struct intel_device {
    struct gpu_found found; /* arch: as ocloc calls it, "pvc"; no memory_bytes: the host's */
    uint32_t domain, bus, slot, function; /* where it sits on PCI */
    bool has_double, has_matrix;
    bool discrete;
};

/* Fills devices, discrete ones first, in the order of their places on PCI, as Level Zero counts
 * them, less those that ZE_AFFINITY_MASK hides; 0: none, and `cause` says why. */
int32_t intel_devices(struct intel_device *devices, int32_t room, const char **cause);

#endif
