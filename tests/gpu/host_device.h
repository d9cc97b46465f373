/* SPDX-License-Identifier: Apache-2.0 */
/* For plugins' own kernels on the device of fibres. */
#ifndef TESTS_GPU_HOST_DEVICE_H
#define TESTS_GPU_HOST_DEVICE_H

#include <stdint.h>

/* run(params) in `threads` fibres of each of `groups` groups, one group after another. */
void host_run_groups(void (*run)(void *), uint32_t threads, int64_t groups, const void *params);

#endif
