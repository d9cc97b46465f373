/* SPDX-License-Identifier: Apache-2.0 */
/* A device's primary context, and launches of the portable kernels. The caller's context is
 * restored every time. */
#include "gpu/cuda/code.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/delta.h"
#include "gpu/index.h"
#include "gpu/latent.h"

#define DECLARE_KERNEL(name, params, threads)                                                      \
    extern "C" __global__ void kernel_##name(const __grid_constant__ params p);
GPU_KERNELS(DECLARE_KERNEL)

struct entry {
    const void *function;
    int32_t threads;
};

#define KERNEL_ENTRY(name, params, threads) {(const void *)kernel_##name, threads},
static const entry kernels[] = {GPU_KERNELS(KERNEL_ENTRY)};

#define MAX_DEVICES 64 /* others take the paths of sm_80 */
static bool runs_sm90[MAX_DEVICES];

extern "C" bool cuda_runs_sm90(const struct gpu_device *device)
{
    return device->id < MAX_DEVICES && runs_sm90[device->id];
}

typedef CUresult CUDAAPI get_fn(CUcontext *);
typedef CUresult CUDAAPI set_fn(CUcontext);

static cudaError_t entry_point(const char *name, void **function)
{
    cudaDriverEntryPointQueryResult found;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found != cudaDriverEntryPointSuccess ? cudaErrorNotSupported
                                                                        : error;
}

/* cudaSetDevice makes the primary context current; the caller's context is restored at the end. */
extern "C" const char *gpu_device_open(struct gpu_device *device, int32_t id)
{
    CUcontext before = NULL, own = NULL;
    void *get = NULL, *set = NULL;
    cudaError_t error = entry_point("cuCtxGetCurrent", &get);
    error = error ? error : entry_point("cuCtxSetCurrent", &set);
    error = error ? error : entry_point("cuCtxPushCurrent", &device->push);
    error = error ? error : entry_point("cuCtxPopCurrent", &device->pop);
    if (error != cudaSuccess) {
        return cause_of(error);
    }
    if (entry_point("cuTensorMapEncodeTiled", &device->encode_map) != cudaSuccess) {
        device->encode_map = NULL;
    }
    ((get_fn *)get)(&before);
    error = cudaSetDevice(id);
    error = error ? error : cudaFree(NULL);
    if (error == cudaSuccess) {
        ((get_fn *)get)(&own);
        device->context = own;
        device->id = id;
        device->lanes = 32;
        error = cudaDeviceGetAttribute(&device->num_sms, cudaDevAttrMultiProcessorCount, id);
    }
    error = error ? error
                  : cudaDeviceGetAttribute(&device->major, cudaDevAttrComputeCapabilityMajor, id);
    error = error ? error
                  : cudaDeviceGetAttribute(&device->smem_of_sm,
                                           cudaDevAttrMaxSharedMemoryPerMultiprocessor, id);
    error = error ? error
                  : cudaDeviceGetAttribute(&device->smem_of_cta,
                                           cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
    cudaFuncAttributes attributes = {};
    for (const entry &kernel : kernels) { /* loads the kernel, so that no step does */
        error = error ? error : cudaFuncGetAttributes(&attributes, kernel.function);
    }
    if (error == cudaSuccess && id < MAX_DEVICES) { /* all such units have the same targets */
        runs_sm90[id] = attributes.ptxVersion >= 90;
    }
    ((set_fn *)set)(before);
    return cause_of(error);
}

extern "C" void gpu_device_close(struct gpu_device *device)
{
    device->context = NULL; /* the primary context belongs to the process */
}

extern "C" const char *gpu_device_launch(const struct gpu_device *device, enum gpu_kernel kernel,
                                         int64_t groups, const void *params, void *stream)
{
    device_scope inside(device);
    void *arguments[] = {(void *)params};
    return cause_of(cudaLaunchKernel(kernels[kernel].function, dim3((unsigned)groups),
                                     dim3(kernels[kernel].threads), arguments, 0,
                                     (cudaStream_t)stream));
}

extern "C" const char *gpu_device_copy(const struct gpu_device *device, void *to, const void *from,
                                       size_t bytes, int32_t kind, void *stream)
{
    static const cudaMemcpyKind kinds[] = {cudaMemcpyDefault, cudaMemcpyHostToDevice,
                                           cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice};
    device_scope inside(device);
    return cause_of(cudaMemcpyAsync(to, from, bytes, kinds[kind], (cudaStream_t)stream));
}

extern "C" const char *gpu_device_fill(const struct gpu_device *device, void *to, int32_t value,
                                       size_t row_bytes, size_t stride, int64_t rows, void *stream)
{
    device_scope inside(device);
    if (rows <= 0 || row_bytes == 0) {
        return NULL;
    }
    if (stride == row_bytes || rows == 1) {
        return cause_of(cudaMemsetAsync(to, value, row_bytes * rows, (cudaStream_t)stream));
    }
    return cause_of(cudaMemset2DAsync(to, stride, value, row_bytes, rows, (cudaStream_t)stream));
}

extern "C" const char *gpu_device_allocate(const struct gpu_device *device, int32_t kind,
                                           size_t bytes, void **memory, size_t room[2])
{
    device_scope inside(device);
    cudaError_t error = kind == ATTN_MEMORY_DEVICE
                            ? cudaMalloc(memory, bytes)
                            : cudaHostAlloc(memory, bytes, cudaHostAllocPortable);
    const char *cause = cause_of(error);
    if (error != cudaSuccess) {
        *memory = NULL;
    }
    if (error == cudaErrorMemoryAllocation && cudaMemGetInfo(&room[0], &room[1]) != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return cause;
}

extern "C" const char *gpu_device_of_memory(const struct gpu_device *device, const void *address,
                                            struct attn_device *owner)
{
    device_scope inside(device);
    cudaPointerAttributes found;
    int pageable = 0;
    cudaError_t error = cudaPointerGetAttributes(&found, address);
    if (error != cudaSuccess) {
        return cause_of(error);
    }
    switch (found.type) {
    case cudaMemoryTypeDevice:
        *owner = {ATTN_DEVICE_CUDA, found.device};
        break;
    case cudaMemoryTypeManaged:
        *owner = {ATTN_DEVICE_CUDA_MANAGED, 0};
        break;
    case cudaMemoryTypeHost:
        *owner = {ATTN_DEVICE_CUDA_HOST, 0};
        break;
    default: /* pageable host memory, which kernels of some systems can read */
        error = cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device->id);
        *owner = {pageable ? ATTN_DEVICE_CUDA_MANAGED : ATTN_DEVICE_CPU, 0};
    }
    return cause_of(error);
}

extern "C" const char *gpu_device_event_elapsed(const struct gpu_device *device, void *since,
                                                void *event, int64_t *nanoseconds)
{
    device_scope inside(device);
    float milliseconds = 0;
    cudaError_t error = cudaEventSynchronize((cudaEvent_t)event);
    error =
        error ? error : cudaEventElapsedTime(&milliseconds, (cudaEvent_t)since, (cudaEvent_t)event);
    *nanoseconds = (int64_t)((double)milliseconds * 1e6);
    return cause_of(error);
}

/* Only the instantiated graph is kept. */
extern "C" const char *gpu_device_capture_end(const struct gpu_device *device, void *stream,
                                              void **graph)
{
    device_scope inside(device);
    cudaGraph_t recorded = NULL;
    cudaGraphExec_t made = NULL;
    cudaError_t error = cudaStreamEndCapture((cudaStream_t)stream, &recorded);
    error = error ? error : cudaGraphInstantiateWithFlags(&made, recorded, 0);
    if (recorded != NULL) {
        cudaGraphDestroy(recorded);
    }
    *graph = error == cudaSuccess ? made : NULL;
    return cause_of(error);
}

/* A function that is one call of the runtime. */
#define DEVICE_CALL(name, call, ...)                                                               \
    extern "C" const char *gpu_device_##name(const struct gpu_device *device, __VA_ARGS__)         \
    {                                                                                              \
        device_scope inside(device);                                                               \
        return cause_of(call);                                                                     \
    }

DEVICE_CALL(stream_create, cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking),
            void **stream)
DEVICE_CALL(stream_destroy, cudaStreamDestroy((cudaStream_t)stream), void *stream)
DEVICE_CALL(synchronize,
            stream != NULL ? cudaStreamSynchronize((cudaStream_t)stream) : cudaDeviceSynchronize(),
            void *stream)
DEVICE_CALL(event_create, cudaEventCreate((cudaEvent_t *)event), void **event)
DEVICE_CALL(event_record, cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream), void *event,
            void *stream)
DEVICE_CALL(event_destroy, cudaEventDestroy((cudaEvent_t)event), void *event)
DEVICE_CALL(capture_begin,
            cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeThreadLocal),
            void *stream)
DEVICE_CALL(graph_launch, cudaGraphLaunch((cudaGraphExec_t)graph, (cudaStream_t)stream),
            void *graph, void *stream)
DEVICE_CALL(graph_destroy, cudaGraphExecDestroy((cudaGraphExec_t)graph), void *graph)
DEVICE_CALL(free, kind == ATTN_MEMORY_DEVICE ? cudaFree(memory) : cudaFreeHost(memory),
            int32_t kind, void *memory)
