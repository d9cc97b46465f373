/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA's ceilings: four kernels through the driver, and a GEMM where cuBLAS is installed. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "meter.h"
#include "meter_cuda_ptx.h"

/* a gibibyte takes a quarter of a millisecond: too little beside a launch */
#define MEMORY_BYTES (INT64_C(4) << 30)
#define THREADS 256
#define MEMORY_BLOCKS 1024
#define ARITHMETIC_BLOCKS 2048
#define ARITHMETIC_ROUNDS 2000
#define FMA_OPERATIONS (2.0 * 64) /* of a thread's round */
#define MMA_OPERATIONS (8 * 2.0 * 16 * 8 * 16 / 32)
#define GEMM_SIZE 8192

enum { KERNEL_READ, KERNEL_COPY, KERNEL_FMA, KERNEL_MMA, NUM_KERNELS, KERNEL_GEMM = NUM_KERNELS };
static const char *const entries[NUM_KERNELS] = {"read_all", "copy_all", "fma_all", "mma_all"};

struct cuda_meter {
    struct memory memory;
    uint8_t *buffer;
    int32_t device;
    void *context; /* the device's primary one, retained */
    void *module, *begin, *end;
    void *functions[NUM_KERNELS];
    int (*context_set)(void *);
    int (*context_release)(int);
    int (*module_load)(void **, const void *);
    int (*module_unload)(void *);
    int (*get_function)(void **, void *, const char *);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  void *, void **, void **);
    int (*event_create)(void **, unsigned);
    int (*event_destroy)(void *);
    int (*event_record)(void *, void *);
    int (*event_wait)(void *);
    int (*event_time)(float *, void *, void *);
    void *cublas; /* dlopen handle, or NULL: no GEMM */
    void *handle;
    int (*gemm)(void *, int, int, int, int, int, const void *, const void *, int, int, const void *,
                int, int, const void *, void *, int, int, int, int);
    int (*cublas_destroy)(void *);
};

static bool find(void *library, const char *symbol, void *function)
{
    void *address = dlsym(library, symbol);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

/* Its own kernels need the driver, in the context that the backends' memory is of. */
static bool find_driver(struct cuda_meter *m)
{
    int (*init)(unsigned);
    int (*retain)(void **, int);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); /* it cannot be closed again */
    return driver != NULL && find(driver, "cuInit", &init) &&
           find(driver, "cuDevicePrimaryCtxRetain", &retain) &&
           find(driver, "cuDevicePrimaryCtxRelease_v2", &m->context_release) &&
           find(driver, "cuCtxSetCurrent", &m->context_set) && init(0) == 0 &&
           retain(&m->context, m->device) == 0 && m->context_set(m->context) == 0 &&
           find(driver, "cuModuleLoadData", &m->module_load) &&
           find(driver, "cuModuleUnload", &m->module_unload) &&
           find(driver, "cuModuleGetFunction", &m->get_function) &&
           find(driver, "cuLaunchKernel", &m->launch) &&
           find(driver, "cuEventCreate", &m->event_create) &&
           find(driver, "cuEventDestroy_v2", &m->event_destroy) &&
           find(driver, "cuEventRecord", &m->event_record) &&
           find(driver, "cuEventSynchronize", &m->event_wait) &&
           find(driver, "cuEventElapsedTime", &m->event_time);
}

static bool load_kernels(struct cuda_meter *m)
{
    const size_t count = sizeof meter_ptx / sizeof *meter_ptx;
    size_t size = 1;
    for (size_t i = 0; i < count; i++) {
        size += strlen(meter_ptx[i]);
    }
    char *text = calloc(size, 1);
    for (size_t i = 0; text != NULL && i < count; i++) {
        strcat(text, meter_ptx[i]);
    }
    bool ok = text != NULL && m->module_load(&m->module, text) == 0 &&
              m->event_create(&m->begin, 0) == 0 && m->event_create(&m->end, 0) == 0;
    for (int32_t i = 0; i < NUM_KERNELS && ok; i++) {
        ok = m->get_function(&m->functions[i], m->module, entries[i]) == 0;
    }
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
    bool found = m->cublas != NULL && find(m->cublas, "cublasCreate_v2", &create) &&
                 find(m->cublas, "cublasDestroy_v2", &m->cublas_destroy) &&
                 find(m->cublas, "cublasGemmEx", &m->gemm);
    if (!found || create(&m->handle) != 0) {
        m->handle = NULL;
    }
}

static bool run_gemm(struct cuda_meter *m)
{
    enum { OP_N = 0, R_16BF = 14, COMPUTE_32F = 68, ALGO_DEFAULT = -1 };
    size_t bytes = (size_t)GEMM_SIZE * GEMM_SIZE * 2;
    float one = 1, zero = 0;
    return m->gemm(m->handle, OP_N, OP_N, GEMM_SIZE, GEMM_SIZE, GEMM_SIZE, &one, m->buffer, R_16BF,
                   GEMM_SIZE, m->buffer + bytes, R_16BF, GEMM_SIZE, &zero, m->buffer + 2 * bytes,
                   R_16BF, GEMM_SIZE, COMPUTE_32F, ALGO_DEFAULT) == 0;
}

static bool launch(struct cuda_meter *m, int32_t code, double *amount)
{
    uint64_t from = (uint64_t)(uintptr_t)m->buffer, to = from + MEMORY_BYTES / 2, count;
    void *arguments[] = {&from, &to, &count};
    bool memory = code == KERNEL_READ || code == KERNEL_COPY;
    unsigned blocks = memory ? MEMORY_BLOCKS : ARITHMETIC_BLOCKS;
    double threads = (double)blocks * THREADS;
    *amount = MEMORY_BYTES; /* a copy of one half reads and writes as much */
    count = code == KERNEL_COPY ? MEMORY_BYTES / 2 : MEMORY_BYTES;
    if (code == KERNEL_GEMM) {
        *amount = 2.0 * GEMM_SIZE * GEMM_SIZE * GEMM_SIZE;
        return run_gemm(m);
    }
    if (!memory) {
        count = ARITHMETIC_ROUNDS;
        *amount =
            threads * ARITHMETIC_ROUNDS * (code == KERNEL_FMA ? FMA_OPERATIONS : MMA_OPERATIONS);
    }
    return m->launch(m->functions[code], blocks, 1, 1, THREADS, 1, 1, 0, NULL, arguments, NULL) ==
           0;
}

static double cuda_run(void *state, const struct meter_kernel *kernel)
{
    struct cuda_meter *m = state;
    double amount = 0;
    float milliseconds = 0;
    bool ok = device_wait(m->memory.device) && m->event_record(m->begin, NULL) == 0 &&
              launch(m, kernel->code, &amount) && m->event_record(m->end, NULL) == 0 &&
              m->event_wait(m->end) == 0 && m->event_time(&milliseconds, m->begin, m->end) == 0;
    return ok && milliseconds > 0 ? 1e3 * amount / milliseconds : 0;
}

static void cuda_destroy(void *state)
{
    struct cuda_meter *m = state;
    if (m == NULL) {
        return;
    }
    if (m->handle != NULL) {
        m->cublas_destroy(m->handle);
    }
    if (m->begin != NULL) {
        m->event_destroy(m->begin);
    }
    if (m->end != NULL) {
        m->event_destroy(m->end);
    }
    if (m->module != NULL) {
        m->module_unload(m->module);
    }
    if (m->context != NULL) {
        m->context_release(m->device);
    }
    memory_finish(&m->memory);
    free(m);
}

/* Random bfloat16 numbers everywhere: products of zeros draw less power and run faster. */
static bool fill(struct cuda_meter *m)
{
    uint64_t random = 1;
    size_t part = (size_t)GEMM_SIZE * GEMM_SIZE * 2;
    void *source = memory_normal(&m->memory, ATTN_DTYPE_BF16, (int64_t)part / 2, 1, &random);
    uint8_t *host = source != NULL ? malloc(part) : NULL;
    m->buffer = memory_take(&m->memory, MEMORY_BYTES);
    bool ok =
        host != NULL && m->buffer != NULL && device_read(m->memory.device, host, source, part);
    for (int64_t at = 0; ok && at < MEMORY_BYTES; at += (int64_t)part) {
        ok = device_write(m->memory.device, m->buffer + at, host, part);
    }
    free(host);
    return ok;
}

static attn_status cuda_create(void **state, struct meter_kernel *kernels, int32_t *num_kernels,
                               const struct device *device, int32_t num_units,
                               struct attn_error *error)
{
    static const struct meter_kernel all[] = {{"eight words a thread", CEILING_READ, KERNEL_READ},
                                              {"four words a thread", CEILING_COPY, KERNEL_COPY},
                                              {"fma in registers", CEILING_F32, KERNEL_FMA},
                                              {"mma.sync in registers", CEILING_BF16, KERNEL_MMA},
                                              {"cuBLAS, 8192^3", CEILING_BF16, KERNEL_GEMM}};
    struct cuda_meter *m = calloc(1, sizeof *m);
    (void)num_units;
    *state = NULL;
    if (m == NULL) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    memory_init(&m->memory, device);
    m->device = device->device.id;
    if (!find_driver(m) || !load_kernels(m) || !fill(m)) {
        cuda_destroy(m);
        snprintf(error->message, sizeof error->message,
                 "the ceilings' kernels cannot be loaded, or %lld MiB of memory are not free",
                 (long long)(MEMORY_BYTES >> 20));
        return error->status = ATTN_ERROR_DEVICE;
    }
    find_gemm(m);
    *num_kernels = m->handle != NULL ? NUM_KERNELS + 1 : NUM_KERNELS;
    memcpy(kernels, all, sizeof *all * (size_t)*num_kernels);
    *state = m;
    return ATTN_OK;
}

const struct meter_type meter_cuda = {
    .device_type = ATTN_DEVICE_CUDA,
    .create = cuda_create,
    .destroy = cuda_destroy,
    .run = cuda_run,
};
