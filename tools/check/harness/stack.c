/* SPDX-License-Identifier: Apache-2.0 */
#include "harness/stack.h"

#include <alloca.h>
#include <stdint.h>

#define SEEN ((size_t)256 << 10)
#define WORDS (SEEN / sizeof(uint64_t))
#define PATTERN UINT64_C(0x5a17ac7ed57ac4a5)

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MEASURED 0
#else
#define MEASURED 1
#endif

/* Either paints the area below its own frame or counts what of it is no longer painted. */
static __attribute__((noinline)) size_t visit(int paint)
{
    volatile uint64_t *area = alloca(SEEN);
    size_t untouched = 0;
    for (size_t i = 0; i < WORDS && paint; i++) {
        area[i] = PATTERN;
    }
    while (!paint && untouched < WORDS && area[untouched] == PATTERN) {
        untouched++;
    }
    return SEEN - untouched * sizeof *area;
}

/* Measurements of this thread that have begun: painting again would hide what an outer one has
 * to see, which covers the inner ones. */
static _Thread_local int begun;

void stack_paint(void)
{
    if (begun++ == 0 && MEASURED) {
        (void)visit(1);
    }
}

size_t stack_used(void)
{
    return --begun == 0 && MEASURED ? visit(0) : 0;
}
