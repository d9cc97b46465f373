/* SPDX-License-Identifier: Apache-2.0 */
/* Linked where a test has no main of its own. */
#include "test.h"

int main(void)
{
    return test_run(NULL, NULL);
}
