/* SPDX-License-Identifier: Apache-2.0 */
/* The host's processors as a device. */
#ifndef PLUGINS_COMMON_CPU_DEVICE_H
#define PLUGINS_COMMON_CPU_DEVICE_H

#include <attn/plugin.h>
#include <unistd.h>

static inline struct attn_device_info cpu_device(const char *isa)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    return (struct attn_device_info)
    {
        .struct_size = sizeof(struct attn_device_info), .device = {ATTN_DEVICE_CPU, 0},
        .name = "CPU",
#if defined(__aarch64__)
        .arch = "aarch64",
#else
        .arch = "x86-64",
#endif
        .isa = isa, .num_multiprocessors = cores > 0 ? (int32_t)cores : 1,
        .memory_bytes = pages > 0 ? (int64_t)pages * page_bytes : 0,
    };
}

#endif
