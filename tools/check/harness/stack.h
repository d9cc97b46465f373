/* SPDX-License-Identifier: Apache-2.0 */
/* How much of its thread's stack a call takes: the memory below the caller is filled with a
 * pattern, and what of it has changed afterwards was used. Both are called from one function. */
#ifndef CHECK_STACK_H
#define CHECK_STACK_H

#include <stddef.h>

/* Nothing is measured where the build's instrumentation makes frames larger than they are. */
void stack_paint(void);
/* Bytes of the deepest use since; at most 256 KiB are seen. */
size_t stack_used(void);

#endif
