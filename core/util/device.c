/* SPDX-License-Identifier: Apache-2.0 */
#include "util/device.h"

#include <stdio.h>

const char *device_text(struct attn_device device, char *text)
{
    static const struct {
        int32_t type;
        const char *name;
    } names[] = {{0, "cpu"}, /* not stated */
                 {ATTN_DEVICE_CPU, "cpu"},
                 {ATTN_DEVICE_CUDA, "cuda"},
                 {ATTN_DEVICE_CUDA_HOST, "cuda_host"},
                 {ATTN_DEVICE_ROCM, "rocm"},
                 {ATTN_DEVICE_ROCM_HOST, "rocm_host"},
                 {ATTN_DEVICE_EXTENSION, "extension"},
                 {ATTN_DEVICE_CUDA_MANAGED, "cuda_managed"},
                 {ATTN_DEVICE_ONEAPI, "oneapi"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (names[i].type == device.type) {
            snprintf(text, DEVICE_TEXT_SIZE, "%s:%d", names[i].name, device.id);
            return text;
        }
    }
    snprintf(text, DEVICE_TEXT_SIZE, "type %d:%d", device.type, device.id);
    return text;
}
