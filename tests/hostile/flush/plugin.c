/* SPDX-License-Identifier: Apache-2.0 */
/* Has the processor flush subnormal numbers to zero. */
#include <stdint.h>

#include "../stages.h"

static void misdeed(void)
{
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#elif defined(__aarch64__)
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    __asm__ volatile("msr fpcr, %0" : : "r"(control | UINT64_C(1) << 24));
#endif
}
