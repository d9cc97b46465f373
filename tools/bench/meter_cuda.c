/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA's ceilings: four kernels through the driver, and a GEMM where cuBLAS is installed. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "meter_cuda_ptx.h"
#include "meter_gpu.h"

#define THREADS 256
#define MEMORY_BLOCKS 1024
#define ARITHMETIC_BLOCKS 2048
#define ARITHMETIC_ROUNDS 2000
#define FMA_OPERATIONS (2.0 * 64) /* a thread's in a round */
#define MMA_OPERATIONS (8 * 2.0 * 16 * 8 * 16 / 32)
#define GEMM_SIZE 8192
#define GEMM_BYTES ((size_t)GEMM_SIZE * GEMM_SIZE * 2) /* one matrix */

enum { KERNEL_GEMM = GPU_KERNELS };

struct cuda_meter {
    struct gpu_meter gpu;
    void *context; /* the device's primary one, retained */
    int (*context_release)(int);
    void *cublas; /* dlopen handle, or NULL: no GEMM */
    void *handle;
    int (*gemm)(void *, int, int, int, int, int, const void *, const void *, int, int, const void *,
                int, int, const void *, void *, int, int, int, int);
    int (*cublas_destroy)(void *);
};

static bool load_kernels(struct gpu_meter *gpu)
{
    const size_t count = sizeof meter_ptx / sizeof *meter_ptx;
    size_t size = 1;
    for (size_t i = 0; i < count; i++) {
        size += strlen(meter_ptx[i]);
    }
    char *text = command_calloc(size, 1);
    for (size_t i = 0; i < count; i++) {
        strcat(text, meter_ptx[i]);
    }
    const bool ok = gpu->calls.module_load(&gpu->module, text) == 0;
    free(text);
    return ok;
}

/* cuBLAS, of any version, from the loader's search or the toolkit's usual place. */
static void find_gemm(struct cuda_meter *m)
{
    static const char *const names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11",
                                        "/usr/local/cuda/lib64/libcublas.so"};
    int (*create)(void **);
    for (size_t i = 0; i < sizeof names / sizeof *names && m->cublas == NULL; i++) {
        m->cublas = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    }
    bool found = m->cublas != NULL && gpu_find(m->cublas, "cublasCreate_v2", &create) &&
                 gpu_find(m->cublas, "cublasDestroy_v2", &m->cublas_destroy) &&
                 gpu_find(m->cublas, "cublasGemmEx", &m->gemm);
    if (!found || create(&m->handle) != 0) {
        m->handle = NULL;
    }
}

/* Its own kernels need the driver, in the context that the backends' memory is of. */
static bool cuda_open(struct gpu_meter *gpu)
{
    struct cuda_meter *m = (struct cuda_meter *)gpu;
    int (*init)(unsigned);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*event_create)(void **, unsigned);
    return gpu_find(gpu->library, "cuInit", &init) &&
           gpu_find(gpu->library, "cuDevicePrimaryCtxRetain", &retain) &&
           gpu_find(gpu->library, "cuDevicePrimaryCtxRelease_v2", &m->context_release) &&
           gpu_find(gpu->library, "cuCtxSetCurrent", &set_current) &&
           gpu_find(gpu->library, "cuEventCreate", &event_create) && init(0) == 0 &&
           retain(&m->context, gpu->device->device.id) == 0 && set_current(m->context) == 0 &&
           event_create(&gpu->begin, 0) == 0 && event_create(&gpu->end, 0) == 0 &&
           load_kernels(gpu);
}

static void cuda_close(struct gpu_meter *gpu)
{
    struct cuda_meter *m = (struct cuda_meter *)gpu;
    if (m->handle != NULL) {
        m->cublas_destroy(m->handle);
    }
    if (m->context != NULL) {
        m->context_release(gpu->device->device.id);
    }
}

static bool run_gemm(struct cuda_meter *m)
{
    enum { OP_N = 0, R_16BF = 14, COMPUTE_32F = 68, ALGO_DEFAULT = -1 };
    char *a = m->gpu.buffer, *b = a + GEMM_BYTES, *c = b + GEMM_BYTES;
    float one = 1, zero = 0;
    return m->gemm(m->handle, OP_N, OP_N, GEMM_SIZE, GEMM_SIZE, GEMM_SIZE, &one, a, R_16BF,
                   GEMM_SIZE, b, R_16BF, GEMM_SIZE, &zero, c, R_16BF, GEMM_SIZE, COMPUTE_32F,
                   ALGO_DEFAULT) == 0;
}

static bool cuda_launch(struct gpu_meter *gpu, int32_t code, double *amount)
{
    uint64_t from = (uint64_t)(uintptr_t)gpu->buffer, to = from + gpu->bytes / 2, count;
    void *arguments[] = {&from, &to, &count};
    bool memory = code == KERNEL_READ || code == KERNEL_COPY;
    unsigned blocks = memory ? MEMORY_BLOCKS : ARITHMETIC_BLOCKS;
    double threads = (double)blocks * THREADS;
    *amount = (double)gpu->bytes; /* a copy of one half reads and writes as much */
    count = code == KERNEL_COPY ? gpu->bytes / 2 : gpu->bytes;
    if (code == KERNEL_GEMM) {
        *amount = 2.0 * GEMM_SIZE * GEMM_SIZE * GEMM_SIZE;
        return run_gemm((struct cuda_meter *)gpu);
    }
    if (!memory) {
        count = ARITHMETIC_ROUNDS;
        *amount =
            threads * ARITHMETIC_ROUNDS * (code == KERNEL_FMA ? FMA_OPERATIONS : MMA_OPERATIONS);
    }
    return gpu->calls.launch(gpu->functions[code], blocks, 1, 1, THREADS, 1, 1, 0, NULL, arguments,
                             NULL) == 0;
}

static const struct gpu_driver driver = {
    .libraries = {"libcuda.so.1"},
    .calls = {"cuMemGetInfo_v2", "cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction",
              "cuLaunchKernel", "cuEventDestroy_v2", "cuEventRecord", "cuEventSynchronize",
              "cuEventElapsedTime"},
    .entries = {"read_all", "copy_all", "fma_all", "mma_all"},
    .matrix = "mma.sync in registers",
    .size = sizeof(struct cuda_meter),
    .open = cuda_open,
    .launch = cuda_launch,
    .close = cuda_close,
};

static attn_status cuda_create(void **state, struct meter_kernel *kernels, int32_t *num_kernels,
                               const struct device *device, int32_t num_units,
                               struct attn_error *error)
{
    attn_status status =
        gpu_meter_create(&driver, state, kernels, num_kernels, device, num_units, error);
    struct cuda_meter *m = *state;
    if (status == ATTN_OK && m->gpu.bytes >= 3 * GEMM_BYTES) {
        find_gemm(m);
    }
    if (status == ATTN_OK && m->handle != NULL) {
        kernels[(*num_kernels)++] =
            (struct meter_kernel){"cuBLAS, 8192^3", CEILING_BF16, KERNEL_GEMM};
    }
    return status;
}

const struct meter_type meter_cuda = {
    .device_type = ATTN_DEVICE_CUDA,
    .create = cuda_create,
    .destroy = gpu_meter_destroy,
    .run = gpu_meter_run,
};
