/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of libraries that are opened by name, in place of linking with them. */
#ifndef COMMON_LIBRARY_H
#define COMMON_LIBRARY_H

#include <dlfcn.h>
#include <string.h>

/* Sets the function pointer at `function` to a library's symbol, as POSIX has it for dlsym. False,
 * and NULL, where the library has none of that name. */
static inline int library_find(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

#endif
