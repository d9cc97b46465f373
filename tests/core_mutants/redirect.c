/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded: whoever opens the core's library gets the file in ATTN_REDIRECT, a mutant. */
#include <attn/version.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

ATTN_EXPORT void *dlopen(const char *file, int flags)
{
    void *(*real)(const char *, int);
    void *symbol = dlsym(RTLD_NEXT, "dlopen");
    const char *mutant = getenv("ATTN_REDIRECT"), *name = file != NULL ? strrchr(file, '/') : NULL;
    name = name != NULL ? name + 1 : file;
    memcpy(&real, &symbol, sizeof real);
    return real(mutant != NULL && name != NULL && strncmp(name, "libattn.so", 10) == 0 ? mutant
                                                                                       : file,
                flags);
}
