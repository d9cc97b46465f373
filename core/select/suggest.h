/* SPDX-License-Identifier: Apache-2.0 */
/* Suggestions for unknown backend names, or why a known one is absent. */
#ifndef CORE_SELECT_SUGGEST_H
#define CORE_SELECT_SUGGEST_H

#include "runtime/runtime.h"

/* Whether a pattern of the selection text fits any backend. */
bool names_known(const attn_runtime *runtime, const char *pattern);

/* ": did you mean 'cpu_ref'?", or why the plugin of that name gave no backend, or what there is. */
void names_suggest(const attn_runtime *runtime, const char *pattern, char *text, size_t size);

#endif
