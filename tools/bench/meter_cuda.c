/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA's ceilings: four kernels through the driver, bulk copies and wgmma where the GPU has them,
 * and a GEMM where cuBLAS is installed. */
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
#define WGMMA_OPERATIONS (4 * 2.0 * 64 * 256 * 16 / 128)
#define WGMMA_BLOCKS 4  /* for each multiprocessor, one after the other */
#define WGMMA_ROUNDS 60 /* 0.15 ms: a longer one lowers the clock of what is timed next */
#define BULK_BLOCKS 40  /* for each multiprocessor, five at once */
#define GEMM_SIZE 8192
#define GEMM_BYTES ((size_t)GEMM_SIZE * GEMM_SIZE * 2) /* one matrix */

enum { KERNEL_WGMMA = GPU_KERNELS, KERNEL_BULK, KERNEL_GEMM };

struct cuda_meter {
    struct gpu_meter gpu;
    void *context; /* the device's primary one, retained */
    int (*context_release)(int);
    void *sm90_module, *wgmma, *bulk; /* NULL: not compute capability 9.0 */
    void *cublas;                     /* dlopen handle, or NULL: no GEMM */
    void *handle;
    int (*gemm)(void *, int, int, int, int, int, const void *, const void *, int, int, const void *,
                int, int, const void *, void *, int, int, int, int);
    int (*cublas_destroy)(void *);
};

/* A module of a text in parts, of which the last is NULL. */
static bool load_text(struct gpu_meter *gpu, const char *const *parts, void **module)
{
    size_t size = 1;
    for (const char *const *part = parts; *part != NULL; part++) {
        size += strlen(*part);
    }
    char *text = command_calloc(size, 1);
    for (const char *const *part = parts; *part != NULL; part++) {
        strcat(text, *part);
    }
    const bool ok = gpu->calls.module_load(module, text) == 0;
    free(text);
    return ok;
}

static bool load_kernels(struct cuda_meter *m)
{
    const struct gpu_calls *calls = &m->gpu.calls;
    if (!load_text(&m->gpu, meter_sm90_ptx, &m->sm90_module) ||
        calls->get_function(&m->wgmma, m->sm90_module, "wgmma_all") != 0 ||
        calls->get_function(&m->bulk, m->sm90_module, "read_bulk") != 0) {
        m->wgmma = NULL;
    }
    return load_text(&m->gpu, meter_ptx, &m->gpu.module);
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
           event_create(&gpu->begin, 0) == 0 && event_create(&gpu->end, 0) == 0 && load_kernels(m);
}

static void cuda_close(struct gpu_meter *gpu)
{
    struct cuda_meter *m = (struct cuda_meter *)gpu;
    if (m->handle != NULL) {
        m->cublas_destroy(m->handle);
    }
    if (m->sm90_module != NULL) {
        gpu->calls.module_unload(m->sm90_module);
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
    struct cuda_meter *m = (struct cuda_meter *)gpu;
    uint64_t from = (uint64_t)(uintptr_t)gpu->buffer, to = from + gpu->bytes / 2;
    uint64_t count = ARITHMETIC_ROUNDS;
    void *arguments[] = {&from, &to, &count};
    void *function = code < GPU_KERNELS ? gpu->functions[code] : NULL;
    const unsigned units = (unsigned)gpu->num_units;
    unsigned blocks = ARITHMETIC_BLOCKS;
    double operations = 0; /* a thread's in a round; 0: bytes are counted */
    switch (code) {
    case KERNEL_FMA:
        operations = FMA_OPERATIONS;
        break;
    case KERNEL_MATRIX:
        operations = MMA_OPERATIONS;
        break;
    case KERNEL_WGMMA:
        operations = WGMMA_OPERATIONS;
        count = WGMMA_ROUNDS;
        blocks = WGMMA_BLOCKS * units;
        function = m->wgmma;
        break;
    case KERNEL_BULK:
        blocks = BULK_BLOCKS * units;
        function = m->bulk;
        break;
    case KERNEL_GEMM:
        *amount = 2.0 * GEMM_SIZE * GEMM_SIZE * GEMM_SIZE;
        return run_gemm(m);
    default:
        blocks = MEMORY_BLOCKS;
    }
    if (operations > 0) {
        *amount = operations * (double)count * blocks * THREADS;
    } else {
        *amount = (double)gpu->bytes; /* a copy of one half reads and writes as much */
        count = code == KERNEL_COPY ? gpu->bytes / 2 : gpu->bytes;
    }
    return gpu->calls.launch(function, blocks, 1, 1, THREADS, 1, 1, 0, NULL, arguments, NULL) == 0;
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
    if (status == ATTN_OK && m->wgmma != NULL) {
        kernels[(*num_kernels)++] =
            (struct meter_kernel){"wgmma from shared memory", CEILING_BF16, KERNEL_WGMMA};
        kernels[(*num_kernels)++] =
            (struct meter_kernel){"bulk copies of 8 KiB", CEILING_READ, KERNEL_BULK};
    }
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
