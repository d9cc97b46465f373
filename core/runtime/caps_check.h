/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend may declare: nothing that this ABI does not know, nothing that cannot be, nothing
 * that contradicts something else of it. */
#ifndef CORE_RUNTIME_CAPS_CHECK_H
#define CORE_RUNTIME_CAPS_CHECK_H

#include <attn/capability.h>

#include "util/error.h"

/* `variant` is not NULL; extensions have passed ext_check. */
attn_status caps_check(const struct attn_backend_caps *caps, struct attn_error *error);

attn_status device_check(const struct attn_device_info *device, struct attn_error *error);

#endif
