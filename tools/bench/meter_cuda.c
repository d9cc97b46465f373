/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "meter.h"

static attn_status cuda_create(void **m, struct meter_kernel *kernels, int32_t *num_kernels,
                               const struct device *device, int32_t num_threads,
                               struct attn_error *error)
{
    (void)m, (void)kernels, (void)num_kernels, (void)device, (void)num_threads;
    snprintf(error->message, sizeof error->message, "not yet");
    return error->status = ATTN_ERROR_UNSUPPORTED;
}
const struct meter_type meter_cuda = {.device_type = ATTN_DEVICE_CUDA, .create = cuda_create};
