/* SPDX-License-Identifier: Apache-2.0 */
/* gpu_device_* over the HIP runtime. A device's module is loaded once in a process, when the first
 * instance on it is created, and stays; the caller's device comes back after every call. */
#include <pthread.h>

#include "gpu/delta.h"
#include "gpu/kernels/list.h"
#include "gpu/index.h"
#include "gpu/latent.h"
#include "gpu/params.h"
#include "device.h"
#include "kfd.h"
#include "runtime.h"

/* Bundles of code objects, one for each file of kernels (bundle.S); the linker names the ends. */
extern const char *const __start_hip_bundles[] __attribute__((visibility("hidden")));
extern const char *const __stop_hip_bundles[] __attribute__((visibility("hidden")));

#define MAX_BUNDLES 32

#define ATTEND_NUMBER(kind, KIND, size, rows) ATTEND_##kind##_##size##_##rows,
enum attend_kernel { HIP_ATTENDS(ATTEND_NUMBER) ATTEND_COUNT };
#undef ATTEND_NUMBER

/* What `context` of a gpu_device points to. */
struct loaded {
    const struct hip_runtime *hip;
    hip_function functions[GPU_KERNEL_COUNT];
    hip_function attends[ATTEND_COUNT]; /* NULL: the target has no matrix units, or no room */
    hip_module modules[MAX_BUNDLES];
};

static const struct {
    const char *name;
    size_t bytes; /* size of its parameters */
    int32_t threads;
} kernels[] = {
#define HIP_KERNEL(name, params, threads) {"kernel_" #name, sizeof(struct params), threads},
    GPU_KERNELS(HIP_KERNEL)
#undef HIP_KERNEL
};

static const char *const attend_names[] = {
#define ATTEND_NAME(kind, KIND, size, rows) "kernel_attend_" #kind "_" #size "_" #rows,
    HIP_ATTENDS(ATTEND_NAME)
#undef ATTEND_NAME
};

static const struct hip_attend attends[] = {HIP_ATTENDS(HIP_ATTEND_FOR)};

static struct loaded devices[GPU_MAX_FOUND];
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

static const struct hip_runtime *runtime_of(const struct gpu_device *device)
{
    return ((const struct loaded *)device->context)->hip;
}

static const char *text_of(const struct hip_runtime *hip, int error)
{
    return error == HIP_SUCCESS ? NULL : hip->GetErrorString(error);
}

/* Makes the device current; leave() puts the caller's back. */
static int enter(const struct hip_runtime *hip, int32_t id, int *before)
{
    int error = hip->GetDevice(before);
    return error == HIP_SUCCESS && *before != id ? hip->SetDevice(id) : error;
}

static void leave(const struct hip_runtime *hip, int32_t id, int before)
{
    if (before != id) {
        (void)hip->SetDevice(before);
    }
}

/* Runs `call`, an expression with `hip`, on the device; answers the function's text. */
#define ON_DEVICE(device, call)                                                                    \
    const struct hip_runtime *hip = runtime_of(device);                                            \
    int before = 0, error = enter(hip, (device)->id, &before);                                     \
    error = error == HIP_SUCCESS ? (call) : error;                                                 \
    leave(hip, (device)->id, before);                                                              \
    return text_of(hip, error)

static int32_t num_bundles(void)
{
    ptrdiff_t count = __stop_hip_bundles - __start_hip_bundles;
    return (int32_t)(count < MAX_BUNDLES ? count : MAX_BUNDLES);
}

/* Each kernel stands in one of the modules. */
static int find_kernel(const struct hip_runtime *hip, const struct loaded *d, const char *name,
                       hip_function *function)
{
    int error = HIP_NO_BINARY;
    *function = NULL;
    for (int32_t m = 0; m < num_bundles() && *function == NULL; m++) {
        if (d->modules[m] != NULL) {
            error = hip->ModuleGetFunction(function, d->modules[m], name);
        }
    }
    return *function == NULL ? error : HIP_SUCCESS;
}

static int find_kernels(const struct hip_runtime *hip, struct loaded *d)
{
    int error = HIP_SUCCESS;
    for (int32_t k = 0; k < GPU_KERNEL_COUNT && error == HIP_SUCCESS; k++) {
        error = find_kernel(hip, d, kernels[k].name, &d->functions[k]);
    }
    for (int32_t k = 0; k < ATTEND_COUNT; k++) {
        (void)find_kernel(hip, d, attend_names[k], &d->attends[k]);
    }
    return error;
}

/* Bundles of attends have the targets that they are for. */
static int load_modules(const struct hip_runtime *hip, struct loaded *d)
{
    for (int32_t m = 0; m < num_bundles(); m++) {
        if (d->modules[m] == NULL) {
            int error = hip->ModuleLoadData(&d->modules[m], __start_hip_bundles[m]);
            if (error != HIP_SUCCESS) {
                d->modules[m] = NULL;
            }
            if (error != HIP_SUCCESS && error != HIP_NO_BINARY) {
                return error;
            }
        }
    }
    return find_kernels(hip, d);
}

const char *gpu_device_open(struct gpu_device *device, int32_t id)
{
    struct gpu_found found[GPU_MAX_FOUND];
    const char *cause = NULL;
    int before = 0, count = 0;
    const struct hip_runtime *hip = hip_runtime(&cause);
    if (hip == NULL) {
        return cause;
    }
    int32_t known = kfd_devices(found, GPU_MAX_FOUND, &cause);
    if (id < 0 || id >= known) {
        return known == 0 ? cause : "no such device";
    }
    int error = hip->GetDeviceCount(&count);
    if (error == HIP_SUCCESS && id >= count) {
        return "the HIP runtime counts fewer devices than the driver's topology";
    }
    error = error == HIP_SUCCESS ? enter(hip, id, &before) : error;
    if (error == HIP_SUCCESS) {
        pthread_mutex_lock(&loading);
        if (devices[id].hip == NULL) {
            error = load_modules(hip, &devices[id]);
            devices[id].hip = error == HIP_SUCCESS ? hip : NULL;
        }
        pthread_mutex_unlock(&loading);
        leave(hip, id, before);
    }
    device->context = &devices[id];
    device->id = id;
    device->num_sms = found[id].num_sms;
    device->major = found[id].major;
    device->lanes = found[id].major == 9 ? 64 : 32;
    return text_of(hip, error);
}

void gpu_device_close(struct gpu_device *device)
{
    device->context = NULL; /* modules stay for the process's next instance */
}

static int launch(const struct loaded *d, hip_function function, int32_t threads, int64_t groups,
                  const void *params, size_t bytes, void *stream)
{
    void *extra[] = {HIP_ARGUMENTS, (void *)params, HIP_ARGUMENT_BYTES, &bytes, HIP_ARGUMENTS_END};
    return d->hip->ModuleLaunchKernel(function, (unsigned)groups, 1, 1, (unsigned)threads, 1, 1, 0,
                                      stream, NULL, extra);
}

const char *gpu_device_launch(const struct gpu_device *device, enum gpu_kernel kernel,
                              int64_t groups, const void *params, void *stream)
{
    const struct loaded *d = device->context;
    ON_DEVICE(device, launch(d, d->functions[kernel], kernels[kernel].threads, groups, params,
                             kernels[kernel].bytes, stream));
}

static int32_t find_attend(const struct gpu_device *device, const struct gpu_params *p,
                           int32_t size)
{
    const struct loaded *d = device->context;
    for (int32_t k = 0; k < ATTEND_COUNT; k++) {
        if (d->attends[k] != NULL && hip_attend_takes(&attends[k], p, size)) {
            return k;
        }
    }
    return -1;
}

bool hip_has_attend(const struct gpu_device *device, const struct gpu_params *p, int32_t size)
{
    return find_attend(device, p, size) >= 0;
}

bool hip_has_attends(const struct gpu_device *device)
{
    const struct loaded *d = device->context;
    for (int32_t k = 0; k < ATTEND_COUNT; k++) {
        if (d->attends[k] != NULL) {
            return true;
        }
    }
    return false;
}

const char *hip_launch_attend(const struct gpu_device *device, const struct gpu_params *p,
                              int32_t size, void *stream)
{
    const struct loaded *d = device->context;
    const int32_t kernel = find_attend(device, p, size);
    if (kernel < 0) {
        return "no matrix kernel is there";
    }
    ON_DEVICE(device,
              launch(d, d->attends[kernel], HIP_ATTEND_WARPS(attends[kernel].rows) * device->lanes,
                     p->schedule.ctas, p, sizeof *p, stream));
}

const char *gpu_device_copy(const struct gpu_device *device, void *to, const void *from,
                            size_t bytes, int32_t kind, void *stream)
{
    /* by enum attn_copy_kind: default, to the device, to the host, on the device */
    static const int kinds[] = {4, 1, 2, 3};
    ON_DEVICE(device, hip->MemcpyAsync(to, from, bytes, kinds[kind], stream));
}

const char *gpu_device_fill(const struct gpu_device *device, void *to, int32_t value,
                            size_t row_bytes, size_t stride, int64_t rows, void *stream)
{
    if (rows <= 0 || row_bytes == 0) {
        return NULL;
    }
    bool dense = stride == row_bytes || rows == 1;
    ON_DEVICE(device, dense
                          ? hip->MemsetAsync(to, value, row_bytes * (size_t)rows, stream)
                          : hip->Memset2DAsync(to, stride, value, row_bytes, (size_t)rows, stream));
}

static int allocate(const struct hip_runtime *hip, int32_t kind, size_t bytes, void **memory,
                    size_t room[2])
{
    int error =
        kind == ATTN_MEMORY_HOST ? hip->HostMalloc(memory, bytes, 0) : hip->Malloc(memory, bytes);
    if (error != HIP_SUCCESS) {
        *memory = NULL;
    }
    if (error == HIP_OUT_OF_MEMORY) {
        (void)hip->MemGetInfo(&room[0], &room[1]);
    }
    return error;
}

/* The runtime refuses addresses that it does not know. */
const char *gpu_device_of_memory(const struct gpu_device *device, const void *address,
                                 struct attn_device *owner)
{
    const struct hip_runtime *hip = runtime_of(device);
    int id = 0;
    bool known =
        hip->PointerGetAttribute(&id, HIP_ATTRIBUTE_DEVICE_ORDINAL, (void *)address) == HIP_SUCCESS;
    *owner = known ? (struct attn_device){ATTN_DEVICE_ROCM, id}
                   : (struct attn_device){ATTN_DEVICE_CPU, 0};
    return NULL;
}

static int elapsed(const struct hip_runtime *hip, void *since, void *event, int64_t *nanoseconds)
{
    float milliseconds = 0;
    int error = hip->EventSynchronize(event);
    error = error != HIP_SUCCESS ? error : hip->EventElapsedTime(&milliseconds, since, event);
    *nanoseconds = (int64_t)((double)milliseconds * 1e6);
    return error;
}

static int end_capture(const struct hip_runtime *hip, void *stream, void **graph)
{
    hip_graph recorded = NULL;
    int error = hip->StreamEndCapture(stream, &recorded);
    *graph = NULL;
    if (error == HIP_SUCCESS) {
        error = hip->GraphInstantiate(graph, recorded, NULL, NULL, 0);
        (void)hip->GraphDestroy(recorded);
    }
    return error;
}

/* A function that is one call of the runtime. */
#define DEVICE_CALL(name, call, ...)                                                               \
    const char *gpu_device_##name(const struct gpu_device *device, __VA_ARGS__)                    \
    {                                                                                              \
        ON_DEVICE(device, call);                                                                   \
    }

DEVICE_CALL(stream_create, hip->StreamCreateWithFlags(stream, HIP_STREAM_NON_BLOCKING),
            void **stream)
DEVICE_CALL(stream_destroy, hip->StreamDestroy(stream), void *stream)
DEVICE_CALL(synchronize, stream != NULL ? hip->StreamSynchronize(stream) : hip->DeviceSynchronize(),
            void *stream)
DEVICE_CALL(event_create, hip->EventCreate(event), void **event)
DEVICE_CALL(event_record, hip->EventRecord(event, stream), void *event, void *stream)
DEVICE_CALL(event_destroy, hip->EventDestroy(event), void *event)
DEVICE_CALL(event_elapsed, elapsed(hip, since, event, nanoseconds), void *since, void *event,
            int64_t *nanoseconds)
DEVICE_CALL(capture_begin, hip->StreamBeginCapture(stream, HIP_CAPTURE_THREAD_LOCAL), void *stream)
DEVICE_CALL(capture_end, end_capture(hip, stream, graph), void *stream, void **graph)
DEVICE_CALL(graph_launch, hip->GraphLaunch(graph, stream), void *graph, void *stream)
DEVICE_CALL(graph_destroy, hip->GraphExecDestroy(graph), void *graph)
DEVICE_CALL(allocate, allocate(hip, kind, bytes, memory, room), int32_t kind, size_t bytes,
            void **memory, size_t room[2])
DEVICE_CALL(free, kind == ATTN_MEMORY_HOST ? hip->HostFree(memory) : hip->Free(memory),
            int32_t kind, void *memory)
