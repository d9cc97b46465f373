/* SPDX-License-Identifier: Apache-2.0 */
/* A driver of CUDA that reports when it is opened, and has nothing that a runtime needs. */
#include <stdlib.h>

__attribute__((constructor)) static void tell(void)
{
    setenv("FAKE_CUDA_OPENED", "1", 1);
}
