/* SPDX-License-Identifier: Apache-2.0 */
/* What a backend may declare: nothing that cannot be, nothing that contradicts something else of
 * it. What this ABI does not know is left out (declarations, attn/version.h). */
#ifndef CORE_RUNTIME_CAPS_CHECK_H
#define CORE_RUNTIME_CAPS_CHECK_H

#include <attn/capability.h>

#include "util/error.h"

/* Takes bits that are not known out of all masks. */
void caps_trim(struct attn_backend_caps *caps);
/* Row `at` without unknown bits of what it is of. False: a layer that it refuses cannot be
 * described here. */
bool refused_read(const struct attn_backend_caps *caps, int32_t at,
                  struct attn_refused_combination *row);

/* Element `at` of vendor_codes that have passed caps_check. */
const struct attn_vendor_code *vendor_code_at(const struct attn_backend_caps *caps, int32_t at);

/* `variant` is not NULL; extensions have passed ext_check. */
attn_status caps_check(const struct attn_backend_caps *caps, struct attn_error *error);

attn_status device_check(const struct attn_device_info *device, struct attn_error *error);

#endif
