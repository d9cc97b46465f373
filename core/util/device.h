/* SPDX-License-Identifier: Apache-2.0 */
/* Devices compared and named. */
#ifndef CORE_UTIL_DEVICE_H
#define CORE_UTIL_DEVICE_H

#include <attn/tensor.h>
#include <stdbool.h>
#include <string.h>

#define DEVICE_TEXT_SIZE 32

static inline bool device_same(struct attn_device a, struct attn_device b)
{
    return memcmp(&a, &b, sizeof a) == 0; /* one comparison, in every run */
}

/* Is it one that its driver numbers, alike for all plugins? Others have a namespace. */
static inline bool device_is_numbered(struct attn_device device)
{
    return device.type == ATTN_DEVICE_CPU || device.type == ATTN_DEVICE_CUDA ||
           device.type == ATTN_DEVICE_ROCM || device.type == ATTN_DEVICE_ONEAPI;
}

/* "cuda:0" into `text` of DEVICE_TEXT_SIZE bytes, which it returns; "type 77:0" for a type that is
 * not known. */
const char *device_text(struct attn_device device, char *text);

#endif
