/* SPDX-License-Identifier: Apache-2.0 */
/* The entry points of libze_loader that the plugin uses, found when they are first needed: calls of
 * Level Zero 1.4, by the distribution's header. */
#ifndef LEVEL_ZERO_LOADER_H
#define LEVEL_ZERO_LOADER_H

#include <level_zero/ze_api.h>

#define ZE_FUNCTIONS(X)                                                                            \
    X(Init)                                                                                        \
    X(DriverGet)                                                                                   \
    X(DeviceGet)                                                                                   \
    X(DeviceGetProperties)                                                                         \
    X(DeviceGetComputeProperties)                                                                  \
    X(DeviceGetModuleProperties)                                                                   \
    X(DeviceGetMemoryProperties)                                                                   \
    X(DeviceGetCommandQueueGroupProperties)                                                        \
    X(DevicePciGetPropertiesExt)                                                                   \
    X(ContextCreate)                                                                               \
    X(ModuleCreate)                                                                                \
    X(ModuleDestroy)                                                                               \
    X(ModuleBuildLogGetString)                                                                     \
    X(ModuleBuildLogDestroy)                                                                       \
    X(KernelCreate)                                                                                \
    X(KernelDestroy)                                                                               \
    X(KernelSetGroupSize)                                                                          \
    X(KernelSetArgumentValue)                                                                      \
    X(KernelSetIndirectAccess)                                                                     \
    X(CommandListCreate)                                                                           \
    X(CommandListCreateImmediate)                                                                  \
    X(CommandListClose)                                                                            \
    X(CommandListDestroy)                                                                          \
    X(CommandListAppendBarrier)                                                                    \
    X(CommandListAppendEventReset)                                                                 \
    X(CommandListAppendLaunchKernel)                                                               \
    X(CommandListAppendMemoryCopy)                                                                 \
    X(CommandListAppendMemoryFill)                                                                 \
    X(CommandListAppendSignalEvent)                                                                \
    X(CommandListAppendWaitOnEvents)                                                               \
    X(CommandListAppendWriteGlobalTimestamp)                                                       \
    X(CommandQueueCreate)                                                                          \
    X(CommandQueueDestroy)                                                                         \
    X(CommandQueueExecuteCommandLists)                                                             \
    X(CommandQueueSynchronize)                                                                     \
    X(EventPoolCreate)                                                                             \
    X(EventPoolDestroy)                                                                            \
    X(EventCreate)                                                                                 \
    X(EventDestroy)                                                                                \
    X(EventHostSynchronize)                                                                        \
    X(MemAllocDevice)                                                                              \
    X(MemAllocHost)                                                                                \
    X(MemFree)                                                                                     \
    X(MemGetAddressRange)                                                                          \
    X(MemGetAllocProperties)

#define ZE_MEMBER(name) __typeof__(ze##name) *name;
struct ze_functions {
    ZE_FUNCTIONS(ZE_MEMBER)
};
#undef ZE_MEMBER

/* The process's loader, opened by the first call, which initialises nothing. NULL: it is not there
 * or too old, and `cause` says what is missing. */
const struct ze_functions *ze_loader(const char **cause);

/* A result's name in the specification; NULL for success. */
const char *ze_text(ze_result_t result);

#endif
