/* SPDX-License-Identifier: Apache-2.0 */
/* gpu_device_* over Level Zero: devices, modules, launches. A device's modules are built once in a
 * process, when the first instance on it is created, and stay; in a context of the engine's they
 * live as long as its instances. */
#include <stdio.h>
#include <string.h>

#include "gpu/delta.h"
#include "gpu/index.h"
#include "gpu/latent.h"
#include "loaded.h"
#include "sysfs.h"

#define MAX_DRIVERS 8
#define MAX_LOADED 64
/* A SIMD32 thread of most kernels has more than 128 registers. */
#define BUILD_FLAGS "-ze-opt-large-register-file"

enum module_devices { FOR_ALL = 0, WITH_DOUBLE = 1, WITHOUT_DOUBLE = 2, WITH_MATRIX = 3 };

/* Modules of SPIR-V, one for each file of kernels (spirv.S); the linker names the ends. */
struct module {
    const uint8_t *spirv;
    uint64_t bytes;
    uint64_t devices; /* enum module_devices */
};
extern const struct module __start_level_zero_modules[] __attribute__((visibility("hidden")));
extern const struct module __stop_level_zero_modules[] __attribute__((visibility("hidden")));

static const struct {
    const char *name;
    uint32_t bytes; /* size of its parameters */
    uint32_t threads;
} kernels[] = {
#define KERNEL(name, params, threads) {"kernel_" #name, sizeof(struct params), threads},
    GPU_KERNELS(KERNEL)
#undef KERNEL
#define ATTEND(kind, KIND, size, rows)                                                             \
    {"kernel_attend_" #kind "_" #size "_" #rows, sizeof(struct gpu_params),                        \
     LEVEL_ZERO_SUBGROUPS(rows) * LEVEL_ZERO_LANES},
        LEVEL_ZERO_ATTENDS(ATTEND)
#undef ATTEND
};

int32_t level_zero_attend(int32_t dtype, int32_t size, int32_t rows)
{
    static const struct {
        int32_t dtype, size, rows;
    } attends[] = {
#define ATTEND(kind, KIND, size, rows) {ATTN_DTYPE_##KIND, size, rows},
        LEVEL_ZERO_ATTENDS(ATTEND)
#undef ATTEND
    };
    for (int32_t i = 0; i < (int32_t)(sizeof attends / sizeof *attends); i++) {
        if (attends[i].dtype == dtype && attends[i].size == size && attends[i].rows == rows) {
            return GPU_KERNEL_COUNT + i;
        }
    }
    return -1;
}

static struct loaded all[MAX_LOADED];
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

static bool is_at(const struct ze_functions *ze, ze_device_handle_t handle,
                  const struct intel_device *place)
{
    ze_pci_ext_properties_t pci = {.stype = ZE_STRUCTURE_TYPE_PCI_EXT_PROPERTIES};
    return ze->DevicePciGetPropertiesExt(handle, &pci) == ZE_RESULT_SUCCESS &&
           pci.address.domain == place->domain && pci.address.bus == place->bus &&
           pci.address.device == place->slot && pci.address.function == place->function;
}

/* The handle of the GPU at a place on PCI, and its driver's. NULL or the cause of a failure. */
static const char *find_device(const struct ze_functions *ze, const struct intel_device *place,
                               ze_driver_handle_t *driver, ze_device_handle_t *device)
{
    ze_driver_handle_t drivers[MAX_DRIVERS];
    uint32_t num_drivers = MAX_DRIVERS;
    ze_result_t result = ze->Init(ZE_INIT_FLAG_GPU_ONLY);
    result = result == ZE_RESULT_SUCCESS ? ze->DriverGet(&num_drivers, drivers) : result;
    if (result != ZE_RESULT_SUCCESS) {
        return ze_text(result);
    }
    for (uint32_t i = 0; i < num_drivers; i++) {
        ze_device_handle_t handles[GPU_MAX_FOUND];
        uint32_t count = GPU_MAX_FOUND;
        if (ze->DeviceGet(drivers[i], &count, handles) != ZE_RESULT_SUCCESS) {
            continue;
        }
        for (uint32_t n = 0; n < count; n++) {
            if (is_at(ze, handles[n], place)) {
                *driver = drivers[i];
                *device = handles[n];
                return NULL;
            }
        }
    }
    return "no Level Zero driver has the GPU that sysfs shows";
}

/* What the kernels need of a device, with what was declared of it. */
static const char *check_device(struct loaded *d)
{
    ze_device_compute_properties_t compute = {.stype = ZE_STRUCTURE_TYPE_DEVICE_COMPUTE_PROPERTIES};
    ze_device_module_properties_t module = {.stype = ZE_STRUCTURE_TYPE_DEVICE_MODULE_PROPERTIES};
    ze_result_t result = d->ze->DeviceGetComputeProperties(d->device, &compute);
    result = result ? result : d->ze->DeviceGetModuleProperties(d->device, &module);
    if (result != ZE_RESULT_SUCCESS) {
        return ze_text(result);
    }
    bool has_32 = false, has_16 = !d->has_matrix;
    for (uint32_t i = 0; i < compute.numSubGroupSizes; i++) {
        has_32 |= compute.subGroupSizes[i] == 32;
        has_16 |= compute.subGroupSizes[i] == LEVEL_ZERO_LANES;
    }
    if (!has_32 || !has_16 || compute.maxTotalGroupSize < 1024) {
        snprintf(d->cause, sizeof d->cause,
                 "groups of %u threads%s%s; the kernels need 1024 in subgroups of 32%s",
                 compute.maxTotalGroupSize, has_32 ? "" : ", no subgroups of 32",
                 has_16 ? "" : ", none of 16", d->has_matrix ? ", and of 16" : "");
        return d->cause;
    }
    if (module.maxArgumentsSize < sizeof(struct gpu_latent_params) ||
        compute.maxSharedLocalMemory < 48 * 1024) {
        snprintf(d->cause, sizeof d->cause,
                 "%u bytes of arguments and %u of local memory; the kernels need %zu and %d",
                 module.maxArgumentsSize, compute.maxSharedLocalMemory,
                 sizeof(struct gpu_latent_params), 48 * 1024);
        return d->cause;
    }
    if (d->has_double && (module.flags & ZE_DEVICE_MODULE_FLAG_FP64) == 0) {
        return "the device has no double; one of its kind was declared with it";
    }
    return NULL;
}

static const char *build_failed(struct loaded *d, ze_result_t result,
                                ze_module_build_log_handle_t log)
{
    char text[192] = "";
    size_t bytes = 0;
    if (log != NULL && d->ze->ModuleBuildLogGetString(log, &bytes, NULL) == ZE_RESULT_SUCCESS &&
        bytes > 0 && bytes <= sizeof text) {
        (void)d->ze->ModuleBuildLogGetString(log, &bytes, text);
    }
    snprintf(d->cause, sizeof d->cause, "%s: %s", ze_text(result), text);
    return d->cause;
}

static bool is_for(const struct loaded *d, const struct module *module)
{
    switch (module->devices) {
    case WITH_DOUBLE:
        return d->has_double;
    case WITHOUT_DOUBLE:
        return !d->has_double;
    case WITH_MATRIX:
        return d->has_matrix;
    default:
        return true;
    }
}

static const char *build_modules(struct loaded *d)
{
    ptrdiff_t count = __stop_level_zero_modules - __start_level_zero_modules;
    int32_t built = 0;
    for (ptrdiff_t m = 0; m < count && built < MAX_MODULES; m++) {
        const struct module *module = &__start_level_zero_modules[m];
        if (!is_for(d, module)) {
            continue;
        }
        const ze_module_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_MODULE_DESC,
                                       .format = ZE_MODULE_FORMAT_IL_SPIRV,
                                       .inputSize = module->bytes,
                                       .pInputModule = module->spirv,
                                       .pBuildFlags = BUILD_FLAGS};
        ze_module_build_log_handle_t log = NULL;
        ze_result_t result =
            d->ze->ModuleCreate(d->context, d->device, &desc, &d->modules[built], &log);
        const char *cause = result == ZE_RESULT_SUCCESS ? NULL : build_failed(d, result, log);
        if (log != NULL) {
            (void)d->ze->ModuleBuildLogDestroy(log);
        }
        if (cause != NULL) {
            d->modules[built] = NULL;
            return cause;
        }
        built++;
    }
    return NULL;
}

/* Each kernel stands in one of the modules. It may reach all memory of the context: pointers come
 * to it in structures. */
static ze_result_t make_kernel(struct loaded *d, int32_t k)
{
    const ze_kernel_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_KERNEL_DESC,
                                   .pKernelName = kernels[k].name};
    ze_result_t result = ZE_RESULT_ERROR_INVALID_KERNEL_NAME;
    for (int32_t m = 0; m < MAX_MODULES && d->modules[m] != NULL; m++) {
        result = d->ze->KernelCreate(d->modules[m], &desc, &d->kernels[k]);
        if (result != ZE_RESULT_ERROR_INVALID_KERNEL_NAME) {
            break;
        }
    }
    if (result != ZE_RESULT_SUCCESS) {
        d->kernels[k] = NULL;
        return result;
    }
    atomic_flag_clear(&d->in_use[k]);
    result = d->ze->KernelSetGroupSize(d->kernels[k], kernels[k].threads, 1, 1);
    return result ? result
                  : d->ze->KernelSetIndirectAccess(d->kernels[k],
                                                   ZE_KERNEL_INDIRECT_ACCESS_FLAG_HOST |
                                                       ZE_KERNEL_INDIRECT_ACCESS_FLAG_DEVICE |
                                                       ZE_KERNEL_INDIRECT_ACCESS_FLAG_SHARED);
}

static void unload(struct loaded *d)
{
    streams_close(d);
    for (int32_t k = 0; k < LEVEL_ZERO_KERNEL_COUNT; k++) {
        if (d->kernels[k] != NULL) {
            (void)d->ze->KernelDestroy(d->kernels[k]);
        }
    }
    for (int32_t m = 0; m < MAX_MODULES && d->modules[m] != NULL; m++) {
        (void)d->ze->ModuleDestroy(d->modules[m]);
    }
    memset(d->kernels, 0, sizeof d->kernels);
    memset(d->modules, 0, sizeof d->modules);
    d->device = NULL;
}

static const char *load(struct loaded *d)
{
    const int32_t count = d->has_matrix ? LEVEL_ZERO_KERNEL_COUNT : GPU_KERNEL_COUNT;
    const char *cause = check_device(d);
    cause = cause != NULL ? cause : build_modules(d);
    ze_result_t result = ZE_RESULT_SUCCESS;
    for (int32_t k = 0; cause == NULL && k < count; k++) {
        result = make_kernel(d, k);
        cause = ze_text(result);
    }
    if (cause == NULL) {
        cause = ze_text(streams_open(d));
    }
    if (cause != NULL) {
        unload(d);
    }
    return cause;
}

/* The process's own context of a driver. */
static ze_result_t own_context(const struct ze_functions *ze, ze_driver_handle_t driver,
                               ze_context_handle_t *context)
{
    static struct {
        ze_driver_handle_t driver;
        ze_context_handle_t context;
    } contexts[MAX_DRIVERS];
    const ze_context_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_CONTEXT_DESC};
    for (int32_t i = 0; i < MAX_DRIVERS; i++) {
        if (contexts[i].driver == driver) {
            *context = contexts[i].context;
            return ZE_RESULT_SUCCESS;
        }
        if (contexts[i].driver == NULL) {
            ze_result_t result = ze->ContextCreate(driver, &desc, &contexts[i].context);
            contexts[i].driver = result == ZE_RESULT_SUCCESS ? driver : NULL;
            *context = contexts[i].context;
            return result;
        }
    }
    return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
}

/* The entry for a device in a context: there already, or one that is free. */
static struct loaded *entry_of(ze_device_handle_t device, ze_context_handle_t context)
{
    struct loaded *empty = NULL;
    for (int32_t i = 0; i < MAX_LOADED; i++) {
        if (all[i].device == device && all[i].context == context) {
            return &all[i];
        }
        empty = empty == NULL && all[i].device == NULL ? &all[i] : empty;
    }
    return empty;
}

static uint64_t memory_of(const struct ze_functions *ze, ze_device_handle_t device)
{
    ze_device_memory_properties_t memory[8];
    uint32_t count = 8;
    uint64_t bytes = 0;
    for (int32_t i = 0; i < 8; i++) {
        memory[i] =
            (ze_device_memory_properties_t){.stype = ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES};
    }
    if (ze->DeviceGetMemoryProperties(device, &count, memory) == ZE_RESULT_SUCCESS) {
        for (uint32_t i = 0; i < count; i++) {
            bytes += memory[i].totalSize;
        }
    }
    return bytes;
}

static const char *enter(struct gpu_device *device, const struct intel_device *place,
                         const struct ze_functions *ze)
{
    ze_driver_handle_t driver = NULL;
    ze_device_handle_t handle = NULL;
    ze_context_handle_t context = device->native_context;
    const char *cause = find_device(ze, place, &driver, &handle);
    if (cause == NULL && context == NULL) {
        cause = ze_text(own_context(ze, driver, &context));
    }
    if (cause != NULL) {
        return cause;
    }
    handle = device->native_device != NULL ? device->native_device : handle;
    struct loaded *d = entry_of(handle, context);
    if (d == NULL) {
        return "too many devices and contexts in one process: 64 are served";
    }
    if (d->device == NULL) {
        d->ze = ze;
        d->device = handle;
        d->context = context;
        d->has_double = place->has_double;
        d->has_matrix = place->has_matrix;
        d->is_native = device->native_context != NULL;
        d->memory_bytes = memory_of(ze, handle);
        cause = load(d);
    }
    d->users += cause == NULL;
    device->context = cause == NULL ? d : NULL;
    return cause;
}

const char *gpu_device_open(struct gpu_device *device, int32_t id)
{
    struct intel_device found[GPU_MAX_FOUND];
    const char *cause = NULL;
    const struct ze_functions *ze = ze_loader(&cause);
    if (ze == NULL) {
        return cause;
    }
    int32_t known = intel_devices(found, GPU_MAX_FOUND, &cause);
    if (id < 0 || id >= known) {
        return known == 0 ? cause : "no such device";
    }
    pthread_mutex_lock(&loading);
    cause = enter(device, &found[id], ze);
    pthread_mutex_unlock(&loading);
    ze_device_properties_t properties = {.stype = ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES};
    if (cause == NULL) {
        cause = ze_text(ze->DeviceGetProperties(loaded_of(device)->device, &properties));
    }
    if (cause == NULL) {
        loaded_of(device)->tick_ns = (double)properties.timerResolution;
        loaded_of(device)->tick_bits = properties.timestampValidBits;
    }
    device->id = id;
    device->num_sms = (int32_t)(properties.numSlices * properties.numSubslicesPerSlice);
    device->num_sms = device->num_sms > 0 ? device->num_sms : 1;
    device->lanes = 32;
    return cause;
}

void gpu_device_close(struct gpu_device *device)
{
    struct loaded *d = loaded_of(device);
    if (d != NULL) {
        pthread_mutex_lock(&loading);
        d->users--;
        if (d->users == 0 && d->is_native) {
            unload(d);
        }
        pthread_mutex_unlock(&loading);
    }
    device->context = NULL;
}

/* Two threads may launch one kernel: its arguments are the driver's until the launch is appended,
 * which takes the flag for two calls. */
const char *level_zero_launch(const struct gpu_device *device, int32_t kernel, int64_t groups,
                              const void *params, void *stream)
{
    struct loaded *d = loaded_of(device);
    const ze_group_count_t count = {(uint32_t)groups, 1, 1};
    ze_kernel_handle_t handle = d->kernels[kernel];
    ze_command_list_handle_t list = target_of(d, stream);
    while (atomic_flag_test_and_set_explicit(&d->in_use[kernel], memory_order_acquire)) {
    }
    ze_result_t result = d->ze->KernelSetArgumentValue(handle, 0, kernels[kernel].bytes, params);
    if (result == ZE_RESULT_SUCCESS) {
        result = d->ze->CommandListAppendLaunchKernel(list, handle, &count, NULL, 0, NULL);
    }
    atomic_flag_clear_explicit(&d->in_use[kernel], memory_order_release);
    return ze_text(result ? result : order(d, list));
}

const char *gpu_device_launch(const struct gpu_device *device, enum gpu_kernel kernel,
                              int64_t groups, const void *params, void *stream)
{
    return level_zero_launch(device, (int32_t)kernel, groups, params, stream);
}
