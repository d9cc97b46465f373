/* SPDX-License-Identifier: Apache-2.0 */
/* Changes how numbers are written in the whole process. */
#include "../stages.h"

#include <locale.h>

static void misdeed(void)
{
    setlocale(LC_ALL, "C.UTF-8");
}
