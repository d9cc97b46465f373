/* SPDX-License-Identifier: Apache-2.0 */
/* A device's primary context and all launches; the caller's context is pushed back every time. */
#include <cuda.h>
#include <cuda_runtime.h>

#include "flash.h"
#include "launch.h"

cudaError_t launch_plan(const struct flash_params *p, cudaStream_t stream);
cudaError_t launch_plain(const struct flash_params *p, int32_t num_sms, cudaStream_t stream);
cudaError_t launch_write(const struct attn_write_kv_args *args);
cudaError_t launch_merge(const struct attn_merge_states_args *args, int32_t num_sms);

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
    error = error ? error : launch_bf16(NULL, 0, NULL);
    error = error ? error : launch_f16(NULL, 0, NULL);
    error = error ? error : launch_fp8(NULL, 0, NULL);
    error = error ? error : launch_plan(NULL, NULL);
    error = error ? error : launch_plain(NULL, 0, NULL);
    error = error ? error : launch_write(NULL);
    error = error ? error : launch_merge(NULL, 0);
    ((push_fn *)set)(before);
    return text_of(error);
}

extern "C" void flash_device_close(struct flash_device *device)
{
    device->context = NULL; /* the primary context is the process's, not ours to end */
}

extern "C" const char *flash_plan(struct flash_device *device, const struct flash_params *p,
                                  void *stream)
{
    scope inside(device);
    return text_of(launch_plan(p, (cudaStream_t)stream));
}

extern "C" const char *flash_attend(struct flash_device *device, const struct flash_params *p,
                                    void *stream)
{
    scope inside(device);
    cudaStream_t s = (cudaStream_t)stream;
    switch (p->kv_dtype) {
    case ATTN_KV_BF16:
        return text_of(launch_bf16(p, device->num_sms, s));
    case ATTN_KV_F16:
        return text_of(launch_f16(p, device->num_sms, s));
    default:
        return text_of(launch_fp8(p, device->num_sms, s));
    }
}

extern "C" const char *flash_attend_plain(struct flash_device *device,
                                          const struct flash_params *p, void *stream)
{
    scope inside(device);
    return text_of(launch_plain(p, device->num_sms, (cudaStream_t)stream));
}

extern "C" const char *flash_write(struct flash_device *device,
                                   const struct attn_write_kv_args *args, void *stream)
{
    scope inside(device);
    (void)stream;
    return text_of(launch_write(args));
}

extern "C" const char *flash_merge(struct flash_device *device,
                                   const struct attn_merge_states_args *args)
{
    scope inside(device);
    return text_of(launch_merge(args, device->num_sms));
}

extern "C" const char *flash_copy(struct flash_device *device, void *to, const void *from,
                                  size_t bytes, int32_t kind, void *stream)
{
    static const cudaMemcpyKind kinds[] = {cudaMemcpyDefault, cudaMemcpyHostToDevice,
                                           cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice};
    scope inside(device);
    return text_of(cudaMemcpyAsync(to, from, bytes, kinds[kind], (cudaStream_t)stream));
}

extern "C" const char *flash_fill(struct flash_device *device, void *to, int32_t value,
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
