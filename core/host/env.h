/* SPDX-License-Identifier: Apache-2.0 */
/* The environment, read once when a runtime is created, and never in a setuid process. */
#ifndef CORE_HOST_ENV_H
#define CORE_HOST_ENV_H

#include <attn/runtime.h>

#include "util/arena.h"
#include "util/error.h"

struct settings;

/* Options first, then variables, then defaults. */
attn_status settings_read(struct settings *settings, const struct attn_runtime_options *options,
                          struct arena *arena, struct attn_error *error);
/* A variable's value; NULL for an empty one, or where the options leave the environment out. */
const char *env_get(const struct attn_runtime_options *options, const char *name);

#endif
