/* SPDX-License-Identifier: Apache-2.0 */
/* Ceilings of AMD GPUs: kernels of meter_hip_kernels.cpp through the HIP runtime, which is opened
 * as the plugin does. Without clang at build time there are none. */
#include "meter_hip.h"

#include "common/command.h"
#include "meter_gpu.h"

#define GROUPS_OF_UNIT 8
#define ROUNDS 2000

extern const char *const __start_hip_bundles[] __attribute__((weak, visibility("hidden")));

static bool hip_open(struct gpu_meter *m)
{
    int (*set_device)(int);
    int (*event_create)(void **);
    return gpu_find(m->library, "hipSetDevice", &set_device) &&
           gpu_find(m->library, "hipEventCreate", &event_create) &&
           set_device(m->device->device.id) == 0 &&
           m->calls.module_load(&m->module, __start_hip_bundles[0]) == 0 &&
           event_create(&m->begin) == 0 && event_create(&m->end) == 0;
}

static void hip_close(struct gpu_meter *m)
{
}

static bool hip_launch(struct gpu_meter *m, int32_t code, double *amount)
{
    const bool memory = code == KERNEL_READ || code == KERNEL_COPY;
    const int32_t groups = m->num_units * GROUPS_OF_UNIT;
    struct meter_hip_args args = {.from = m->buffer,
                                  .to = m->buffer + m->bytes / 2,
                                  .bytes = code == KERNEL_COPY ? m->bytes / 2 : m->bytes,
                                  .rounds = ROUNDS,
                                  .groups = groups};
    size_t bytes = sizeof args;
    void *extra[] = {(void *)1, &args, (void *)2, &bytes, (void *)3}; /* args, their size, end */
    double threads = (double)groups * METER_THREADS;
    *amount = memory ? (double)m->bytes /* a copy of one half reads and writes as much */
                     : threads * ROUNDS * (code == KERNEL_FMA ? METER_FMA : METER_MATRIX);
    return m->calls.launch(m->functions[code], (unsigned)groups, 1, 1, METER_THREADS, 1, 1, 0, NULL,
                           NULL, extra) == 0;
}

static const struct gpu_driver driver = {
    .libraries = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"},
    .calls = {"hipMemGetInfo", "hipModuleLoadData", "hipModuleUnload", "hipModuleGetFunction",
              "hipModuleLaunchKernel", "hipEventDestroy", "hipEventRecord", "hipEventSynchronize",
              "hipEventElapsedTime"},
    .entries = {"read_all", "copy_all", "fma_all", "matrix_all"},
    .matrix = "matrix products in registers",
    .size = sizeof(struct gpu_meter),
    .open = hip_open,
    .launch = hip_launch,
    .close = hip_close,
};

static attn_status hip_create(void **state, struct meter_kernel *kernels, int32_t *num_kernels,
                              const struct device *device, int32_t num_units,
                              struct attn_error *error)
{
    return __start_hip_bundles != NULL
               ? gpu_meter_create(&driver, state, kernels, num_kernels, device, num_units, error)
               : command_error(error, ATTN_ERROR_DEVICE, "",
                               "attn-bench was built without clang's compiler for AMD GPUs");
}

const struct meter_type meter_hip = {
    .device_type = ATTN_DEVICE_ROCM,
    .create = hip_create,
    .destroy = gpu_meter_destroy,
    .run = gpu_meter_run,
};
