/* SPDX-License-Identifier: Apache-2.0 */
/* The text files of the cache folder that steer selections: measured ranks, conformance. */
#ifndef CORE_SELECT_LINES_H
#define CORE_SELECT_LINES_H

#include "runtime/runtime.h"

struct lines {
    char **items; /* neither empty ones nor those that begin with '#' */
    int32_t count;
};

/* The lines of `<cache_dir>/name`. None where there is no file, or one that others could have
 * written (with a warning that says which `things` are not used). False without memory. */
bool lines_read(struct lines *lines, const attn_runtime *runtime, const char *name,
                const char *things, struct arena *arena);
/* Warns of `broken` lines that are no `thing`, if there are any. */
void lines_warn(const attn_runtime *runtime, const char *name, const char *thing, int32_t broken);

#endif
