/* SPDX-License-Identifier: Apache-2.0 */
/* The entry points of libamdhip64 that the plugin uses, found when they are first needed. Only
 * calls whose arguments are the same in ROCm 5, 6 and 7: no structure that changed. Source: "HIP
 * Runtime API Reference". */
#ifndef HIP_RUNTIME_H
#define HIP_RUNTIME_H

#include <stddef.h>

typedef void *hip_stream, *hip_module, *hip_function, *hip_graph, *hip_graph_exec;

#define HIP_SUCCESS 0
#define HIP_OUT_OF_MEMORY 2
#define HIP_NO_BINARY 209
#define HIP_STREAM_NON_BLOCKING 1
#define HIP_CAPTURE_THREAD_LOCAL 1
#define HIP_ATTRIBUTE_DEVICE_ORDINAL 9
/* Keys of hipModuleLaunchKernel's `extra`. */
#define HIP_ARGUMENTS ((void *)1)
#define HIP_ARGUMENT_BYTES ((void *)2)
#define HIP_ARGUMENTS_END ((void *)3)

#define HIP_FUNCTIONS(X)                                                                           \
    X(int, GetDeviceCount, (int *count))                                                           \
    X(int, GetDevice, (int *device))                                                               \
    X(int, SetDevice, (int device))                                                                \
    X(int, DeviceSynchronize, (void))                                                              \
    X(const char *, GetErrorString, (int error))                                                   \
    X(int, MemGetInfo, (size_t * available, size_t * total))                                       \
    X(int, Malloc, (void **memory, size_t bytes))                                                  \
    X(int, Free, (void *memory))                                                                   \
    X(int, HostMalloc, (void **memory, size_t bytes, unsigned flags))                              \
    X(int, HostFree, (void *memory))                                                               \
    X(int, PointerGetAttribute, (void *value, int attribute, void *memory))                        \
    X(int, MemcpyAsync, (void *to, const void *from, size_t bytes, int kind, hip_stream stream))   \
    X(int, MemsetAsync, (void *to, int value, size_t bytes, hip_stream stream))                    \
    X(int, Memset2DAsync,                                                                          \
      (void *to, size_t stride, int value, size_t bytes, size_t rows, hip_stream stream))          \
    X(int, ModuleLoadData, (hip_module * module, const void *image))                               \
    X(int, ModuleGetFunction, (hip_function * function, hip_module module, const char *name))      \
    X(int, ModuleLaunchKernel,                                                                     \
      (hip_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, \
       unsigned block_y, unsigned block_z, unsigned lds_bytes, hip_stream stream, void **params,   \
       void **extra))                                                                              \
    X(int, StreamCreateWithFlags, (hip_stream * stream, unsigned flags))                           \
    X(int, StreamDestroy, (hip_stream stream))                                                     \
    X(int, StreamSynchronize, (hip_stream stream))                                                 \
    X(int, StreamBeginCapture, (hip_stream stream, int mode))                                      \
    X(int, StreamEndCapture, (hip_stream stream, hip_graph * graph))                               \
    X(int, EventCreate, (void **event))                                                            \
    X(int, EventRecord, (void *event, hip_stream stream))                                          \
    X(int, EventSynchronize, (void *event))                                                        \
    X(int, EventElapsedTime, (float *milliseconds, void *since, void *event))                      \
    X(int, EventDestroy, (void *event))                                                            \
    X(int, GraphInstantiate,                                                                       \
      (hip_graph_exec * exec, hip_graph graph, void **node, char *log, size_t log_bytes))          \
    X(int, GraphLaunch, (hip_graph_exec exec, hip_stream stream))                                  \
    X(int, GraphDestroy, (hip_graph graph))                                                        \
    X(int, GraphExecDestroy, (hip_graph_exec exec))

#define HIP_MEMBER(type, name, arguments) type(*name) arguments;
struct hip_runtime {
    HIP_FUNCTIONS(HIP_MEMBER)
};
#undef HIP_MEMBER

/* The process's runtime, opened by the first call; loading it does not initialise it. NULL: it is
 * not there, and `cause` says what is missing. */
const struct hip_runtime *hip_runtime(const char **cause);

#endif
