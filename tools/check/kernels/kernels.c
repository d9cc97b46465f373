/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/kernels.h"

#include <stdarg.h>
#include <stdio.h>

void kernel_try(const struct kernel_sink *sink, kernel_run *run, const void *variant,
                const char *format, ...)
{
    char name[192];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(name, sizeof name, format, arguments);
    va_end(arguments);
    sink->try(sink->user, name, run, variant);
}
