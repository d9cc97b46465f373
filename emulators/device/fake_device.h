/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DEVICE_FAKE_DEVICE_H
#define DEVICE_FAKE_DEVICE_H

#include <attn/plugin.h>
#include <stdbool.h>

#define FAKE_DEVICE                                                                                \
    {                                                                                              \
        ATTN_DEVICE_EXTENSION, 0                                                                   \
    }

bool fake_device_owns(const void *address);

#endif
