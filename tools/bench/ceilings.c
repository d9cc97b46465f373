/* SPDX-License-Identifier: Apache-2.0 */
#include "ceilings.h"

#include <stdlib.h>

#include "common/command.h"

static double pass(struct ceilings *ceilings, const struct meter_kernel *kernel)
{
    double rate = ceilings->type->run(ceilings->meter, kernel);
    if (rate > ceilings->best[kernel->ceiling]) {
        ceilings->best[kernel->ceiling] = rate;
    }
    return rate;
}

/* Every kernel in turn; the one with the fastest pass stands for its ceiling from then on. */
static void calibrate(struct ceilings *ceilings, int32_t passes)
{
    for (int32_t round = 0; round < passes; round++) {
        for (int32_t i = 0; i < ceilings->num_kernels; i++) {
            const struct meter_kernel *kernel = &ceilings->kernels[i];
            double before = ceilings->best[kernel->ceiling];
            if (pass(ceilings, kernel) > before) {
                ceilings->kernel[kernel->ceiling] = kernel;
            }
        }
    }
}

static const struct meter_type *type_of(int32_t device_type, struct attn_error *error)
{
    static const struct meter_type *const types[] = {&meter_cpu, &meter_cuda, &meter_hip};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (types[i]->device_type == device_type) {
            return types[i];
        }
    }
    command_error(error, ATTN_ERROR_UNSUPPORTED, "device",
                  "type %d: ceilings are measured on CPUs (%d), CUDA (%d) and ROCm devices (%d)",
                  device_type, ATTN_DEVICE_CPU, ATTN_DEVICE_CUDA, ATTN_DEVICE_ROCM);
    return NULL;
}

attn_status ceilings_create(struct ceilings **ceilings, const struct device *device,
                            int32_t num_units, int32_t passes, bool cpu_time,
                            struct attn_error *error)
{
    const struct meter_type *type = type_of(device->device.type, error);
    *ceilings = NULL;
    if (type == NULL) {
        return error->status;
    }
    struct ceilings *made = command_calloc(1, sizeof *made);
    made->type = type;
    attn_status status =
        type->create(&made->meter, made->kernels, &made->num_kernels, device, num_units, error);
    if (status != ATTN_OK) {
        free(made);
        return status;
    }
    if (cpu_time && type->count_cpu_time != NULL) {
        type->count_cpu_time(made->meter);
    }
    calibrate(made, passes);
    *ceilings = made;
    return ATTN_OK;
}

void ceilings_destroy(struct ceilings *ceilings)
{
    if (ceilings != NULL) {
        ceilings->type->destroy(ceilings->meter);
        free(ceilings);
    }
}

double ceilings_measure(struct ceilings *ceilings, enum ceiling ceiling)
{
    const struct meter_kernel *kernel = ceilings->kernel[ceiling];
    return kernel != NULL ? pass(ceilings, kernel) : 0;
}
