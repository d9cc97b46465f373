/* SPDX-License-Identifier: Apache-2.0 */
/* Backends that attn-check has found without a failure on this machine, by host/conformance.h. */
#ifndef CORE_SELECT_CONFORMANT_H
#define CORE_SELECT_CONFORMANT_H

#include "runtime/runtime.h"

/* What a selection that asks for them knows of each backend. */
struct conformant {
    const char **lacks; /* [num_backends]: NULL: conformant; or the reason why not */
};

/* Hashes the plugins' files. False without memory. */
bool conformant_read(struct conformant *conformant, const attn_runtime *runtime,
                     struct arena *arena);

#endif
