/* SPDX-License-Identifier: Apache-2.0 */
/* What goes with its scope. */
#ifndef SUPPORT_OWNED_H
#define SUPPORT_OWNED_H

#include <stdlib.h>

/* A variable; when it goes out of scope, `end` is called with its address. */
#define OWNED(end) __attribute__((cleanup(end)))

/* Such an end for a pointer to memory. */
static inline void memory_end(void *pointer)
{
    free(*(void **)pointer);
}

#endif
