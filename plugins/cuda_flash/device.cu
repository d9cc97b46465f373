/* SPDX-License-Identifier: Apache-2.0 */
/* A device's primary context and all launches; the caller's context is pushed back every time. */
#include <cuda.h>
#include <cuda_runtime.h>

#include "flash.h"
#include "launch.h"

static flash_launcher *const launchers[FLASH_KERNEL_COUNT] = {
    launch_plan,  launch_bf16,  launch_f16,        launch_e4m3,  launch_e5m2,     launch_int8,
    launch_plain, launch_write, launch_rope_write, launch_merge, launch_quantize, launch_amax,
    launch_gather};

typedef CUresult CUDAAPI push_fn(CUcontext);
typedef CUresult CUDAAPI pop_fn(CUcontext *);
typedef CUresult CUDAAPI get_fn(CUcontext *);

static const char *text_of(cudaError_t error)
{
    return error == cudaSuccess ? NULL : cudaGetErrorString(error);
}

struct scope {
    const struct flash_device *device;
    explicit scope(const struct flash_device *d) : device(d)
    {
        ((push_fn *)d->push)((CUcontext)d->context);
    }
    ~scope()
    {
        CUcontext popped;
        ((pop_fn *)device->pop)(&popped);
    }
};

static cudaError_t entry_point(const char *name, void **function)
{
    cudaDriverEntryPointQueryResult found;
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, function, 12000, cudaEnableDefault,
                                                         &found);
    return error == cudaSuccess && found != cudaDriverEntryPointSuccess ? cudaErrorNotSupported
                                                                        : error;
}

/* cudaSetDevice makes the primary context current; the caller's own comes back at the end. */
extern "C" const char *flash_device_open(struct flash_device *device, int32_t id)
{
    CUcontext before = NULL, own = NULL;
    void *get = NULL, *set = NULL;
    cudaError_t error = entry_point("cuCtxGetCurrent", &get);
    error = error ? error : entry_point("cuCtxSetCurrent", &set);
    error = error ? error : entry_point("cuCtxPushCurrent", &device->push);
    error = error ? error : entry_point("cuCtxPopCurrent", &device->pop);
    if (error != cudaSuccess) {
        return text_of(error);
    }
    ((get_fn *)get)(&before);
    error = cudaSetDevice(id);
    error = error ? error : cudaFree(NULL);
    if (error == cudaSuccess) {
        ((get_fn *)get)(&own);
        device->context = own;
        device->id = id;
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
    for (int kernel = 0; kernel < FLASH_KERNEL_COUNT; kernel++) {
        error = error ? error : launchers[kernel](NULL, 0, NULL);
    }
    ((push_fn *)set)(before);
    return text_of(error);
}

extern "C" void flash_device_close(struct flash_device *device)
{
    device->context = NULL; /* the primary context is the process's, not ours to end */
}

extern "C" const char *flash_launch(const struct flash_device *device, enum flash_kernel kernel,
                                    const void *params, void *stream)
{
    scope inside(device);
    return text_of(launchers[kernel](params, device->num_sms, (cudaStream_t)stream));
}

extern "C" const char *flash_copy(const struct flash_device *device, void *to, const void *from,
                                  size_t bytes, int32_t kind, void *stream)
{
    static const cudaMemcpyKind kinds[] = {cudaMemcpyDefault, cudaMemcpyHostToDevice,
                                           cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice};
    scope inside(device);
    return text_of(cudaMemcpyAsync(to, from, bytes, kinds[kind], (cudaStream_t)stream));
}

extern "C" const char *flash_fill(const struct flash_device *device, void *to, int32_t value,
                                  size_t row_bytes, size_t stride, int64_t rows, void *stream)
{
    scope inside(device);
    if (rows <= 0 || row_bytes == 0) {
        return NULL;
    }
    if (stride == row_bytes || rows == 1) {
        return text_of(cudaMemsetAsync(to, value, row_bytes * rows, (cudaStream_t)stream));
    }
    return text_of(
        cudaMemset2DAsync(to, stride, value, row_bytes, rows, (cudaStream_t)stream));
}
