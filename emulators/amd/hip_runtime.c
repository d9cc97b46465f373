/* SPDX-License-Identifier: Apache-2.0 */
/* libamdhip64.so.6 for tests: the entry points that the plugin uses, over the interpreter. Kernels
 * run at once and in order, so a stream is only a handle; a capture keeps what is enqueued and a
 * graph's launch runs it. ATTN_TEST_HIP_TARGET names the GPU, gfx942 if unset. What the interpreter
 * refuses is printed, and is the text of the error that the launch gives. ATTN_TEST_HIP_COUNTS
 * names a file to which counts are added at exit. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "isa.h"

#define EXPORTED __attribute__((visibility("default")))
#define MAX_GRAPH_BYTES 4096 /* the most that a launch's arguments take */

enum hip_error {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_IMAGE = 200,
    NO_BINARY = 209,
    NOT_FOUND = 500,
    LAUNCH_FAILURE = 719,
    CAPTURE_UNMATCHED = 903
};

enum job_kind { JOB_LAUNCH, JOB_COPY, JOB_FILL };

/* What a stream was asked to do. */
struct job {
    enum job_kind kind;
    struct function *function;
    uint32_t grid[3], block[3], lds;
    size_t arg_bytes;
    char args[MAX_GRAPH_BYTES];
    void *to;
    const void *from;
    size_t bytes, stride, rows;
    int value;
    struct job *next;
};

struct stream {
    bool captures;
    struct job *first, **last;
};

struct function {
    struct module *module;
    const struct kernel *kernel;
    uint64_t launches, counts[CLASS_COUNT], bytes[3]; /* read, written, of LDS */
};

struct module {
    struct code *code;
    const void *image;
    struct function *functions;
    struct module *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct machine machine;
static struct module *modules;
static _Thread_local int current_device;
static double seconds;

static const char *target(void)
{
    const char *name = getenv("ATTN_TEST_HIP_TARGET");
    return name != NULL ? name : "gfx942";
}

static void print_counts(FILE *file, const uint64_t *counts, uint64_t bytes_read,
                         uint64_t bytes_written, uint64_t lds_bytes)
{
    static const char *const units[CLASS_COUNT] = {"scalar", "vector",        "transcendental",
                                                   "matrix", "scalar_memory", "vector_memory",
                                                   "lds",    "control"};
    for (int u = 0; u < CLASS_COUNT; u++) {
        fprintf(file, " %s %lu", units[u], counts[u]);
    }
    fprintf(file, " bytes_read %lu bytes_written %lu lds_bytes %lu\n", bytes_read, bytes_written,
            lds_bytes);
}

__attribute__((destructor)) static void write_counts(void)
{
    const char *path = getenv("ATTN_TEST_HIP_COUNTS");
    FILE *file = path != NULL && machine.insns > 0 ? fopen(path, "a") : NULL;
    if (file == NULL) {
        return;
    }
    fprintf(file, "target %s instructions %lu seconds %.2f million_a_second %.1f", target(),
            machine.insns, seconds, (double)machine.insns * 1e-6 / seconds);
    print_counts(file, machine.counts, machine.bytes_read, machine.bytes_written,
                 machine.lds_bytes);
    for (const struct module *m = modules; m != NULL; m = m->next) {
        for (uint32_t n = 0; n < m->code->num_kernels; n++) {
            const struct function *f = &m->functions[n];
            if (f->launches > 0) {
                fprintf(file, "kernel %s launches %lu", f->kernel->name, f->launches);
                print_counts(file, f->counts, f->bytes[0], f->bytes[1], f->bytes[2]);
            }
        }
    }
    fclose(file);
}

/* ---- jobs ---- */

static int run_launch(struct job *j)
{
    struct launch launch = {.kernel = j->function->kernel,
                            .dynamic_lds = j->lds,
                            .args = j->args,
                            .arg_bytes = j->arg_bytes};
    struct timespec begin, end;
    struct code *code = j->function->module->code;
    if (!code_read(code, machine.error, sizeof machine.error)) { /* takes up to a second */
        fprintf(stderr, "%s: %s\n", target(), machine.error);
        return LAUNCH_FAILURE;
    }
    memcpy(launch.grid, j->grid, sizeof launch.grid);
    memcpy(launch.block, j->block, sizeof launch.block);
    machine.failed = false;
    j->function->launches++;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin); /* its rate, however busy the machine */
    const struct machine before = machine;
    bool ok = machine_launch(&machine, code, &launch);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    for (int u = 0; u < CLASS_COUNT; u++) {
        j->function->counts[u] += machine.counts[u] - before.counts[u];
    }
    j->function->bytes[0] += machine.bytes_read - before.bytes_read;
    j->function->bytes[1] += machine.bytes_written - before.bytes_written;
    j->function->bytes[2] += machine.lds_bytes - before.lds_bytes;
    seconds += (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) * 1e-9;
    if (!ok) {
        fprintf(stderr, "%s: %s\n", j->function->kernel->name, machine.error);
    }
    return ok ? SUCCESS : LAUNCH_FAILURE;
}

static int run_job(struct job *j)
{
    switch (j->kind) {
    case JOB_LAUNCH:
        return run_launch(j);
    case JOB_COPY:
        memmove(j->to, j->from, j->bytes);
        return SUCCESS;
    default:
        for (size_t row = 0; row < j->rows; row++) {
            memset((char *)j->to + row * j->stride, j->value, j->bytes);
        }
        return SUCCESS;
    }
}

/* Runs a job, or keeps a copy of it where the stream is captured. */
static int enqueue(void *handle, struct job *j)
{
    struct stream *stream = handle;
    int status = SUCCESS;
    pthread_mutex_lock(&lock);
    if (stream != NULL && stream->captures) {
        struct job *kept = malloc(sizeof *kept);
        status = kept == NULL ? OUT_OF_MEMORY : SUCCESS;
        if (kept != NULL) {
            *kept = *j;
            kept->next = NULL;
            *stream->last = kept;
            stream->last = &kept->next;
        }
    } else {
        status = run_job(j);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* ---- devices and memory ---- */

EXPORTED int hipGetDeviceCount(int *count)
{
    *count = 1;
    return SUCCESS;
}

EXPORTED int hipGetDevice(int *device)
{
    *device = current_device;
    return SUCCESS;
}

EXPORTED int hipSetDevice(int device)
{
    current_device = device;
    return device == 0 ? SUCCESS : INVALID_VALUE;
}

EXPORTED int hipDeviceSynchronize(void)
{
    return SUCCESS;
}

EXPORTED int hipStreamSynchronize(void *stream)
{
    return SUCCESS;
}

EXPORTED const char *hipGetErrorString(int error)
{
    return error == LAUNCH_FAILURE ? machine.error
           : error == SUCCESS      ? "no error"
           : error == NO_BINARY    ? "no kernel image for this device"
                                   : "an error of the test's runtime";
}

EXPORTED int hipMemGetInfo(size_t *available, size_t *total)
{
    *total = (size_t)8 << 30;
    *available = (size_t)256 << 20; /* attn-bench walks an eighth of it */
    return SUCCESS;
}

static int allocate(void **memory, size_t bytes)
{
    *memory = bytes > (size_t)8 << 30 ? NULL : aligned_alloc(256, (bytes + 511) / 256 * 256);
    if (*memory == NULL) {
        return OUT_OF_MEMORY;
    }
    memset(*memory, 0xcd, bytes);
    pthread_mutex_lock(&lock);
    machine_allow(&machine, *memory, bytes, true);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

static int release(void *memory)
{
    pthread_mutex_lock(&lock);
    machine_forbid(&machine, memory);
    pthread_mutex_unlock(&lock);
    free(memory);
    return SUCCESS;
}

EXPORTED int hipMalloc(void **memory, size_t bytes)
{
    return allocate(memory, bytes);
}

EXPORTED int hipHostMalloc(void **memory, size_t bytes, unsigned flags)
{
    return allocate(memory, bytes);
}

/* The device's number is the one attribute that is asked for. */
EXPORTED int hipPointerGetAttribute(void *value, int attribute, void *memory)
{
    pthread_mutex_lock(&lock);
    bool known = machine_region(&machine, (uint64_t)memory) != NULL;
    pthread_mutex_unlock(&lock);
    if (attribute != 9 || !known) {
        return INVALID_VALUE;
    }
    *(int *)value = 0;
    return SUCCESS;
}

EXPORTED int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream)
{
    struct job j = {.kind = JOB_COPY, .to = to, .from = from, .bytes = bytes};
    return kind < 0 || kind > 4 ? INVALID_VALUE : enqueue(stream, &j);
}

EXPORTED int hipMemsetAsync(void *to, int value, size_t bytes, void *stream)
{
    struct job j = {.kind = JOB_FILL, .to = to, .value = value, .bytes = bytes, .rows = 1};
    return enqueue(stream, &j);
}

EXPORTED int hipMemset2DAsync(void *to, size_t stride, int value, size_t bytes, size_t rows,
                              void *stream)
{
    struct job j = {
        .kind = JOB_FILL, .to = to, .value = value, .bytes = bytes, .stride = stride, .rows = rows};
    return enqueue(stream, &j);
}

/* ---- modules ---- */

/* The target's code object in a bundle of clang's: a count, then offset, size and name of each. */
static const char *find_object(const char *bundle, size_t *bytes)
{
    static const char magic[] = "__CLANG_OFFLOAD_BUNDLE__";
    uint64_t count, offset, size, length;
    const char *at = bundle + sizeof magic - 1;
    if (memcmp(bundle, magic, sizeof magic - 1) != 0) {
        return NULL;
    }
    memcpy(&count, at, 8);
    at += 8;
    for (uint64_t n = 0; n < count; n++) {
        memcpy(&offset, at, 8);
        memcpy(&size, at + 8, 8);
        memcpy(&length, at + 16, 8);
        const char *name = at + 24, *dashes = "--", *wanted = target();
        const char *arch = memmem(name, length, dashes, 2);
        at = name + length;
        if (arch != NULL && (size_t)(at - arch) == strlen(wanted) + 2 &&
            memcmp(arch + 2, wanted, strlen(wanted)) == 0) {
            *bytes = size;
            return bundle + offset;
        }
    }
    return NULL;
}

EXPORTED int hipModuleLoadData(void **handle, const void *image)
{
    static char cause[16384];
    size_t bytes = 0;
    int status = SUCCESS;
    *handle = NULL;
    pthread_mutex_lock(&lock);
    for (struct module *m = modules; m != NULL; m = m->next) {
        if (m->image == image) { /* its instructions are read once */
            *handle = m;
        }
    }
    const char *object = *handle == NULL ? find_object(image, &bytes) : NULL;
    if (*handle == NULL && object == NULL) {
        status = NO_BINARY;
    } else if (*handle == NULL) {
        struct module *m = calloc(1, sizeof *m);
        m->image = image;
        m->code = code_load(object, bytes, cause, sizeof cause);
        if (m->code == NULL) {
            fprintf(stderr, "%s: %s\n", target(), cause);
            snprintf(machine.error, sizeof machine.error, "%.400s", cause);
            free(m);
            status = LAUNCH_FAILURE;
        } else {
            m->functions = calloc(m->code->num_kernels, sizeof *m->functions);
            for (uint32_t n = 0; n < m->code->num_kernels; n++) {
                m->functions[n] = (struct function){m, &m->code->kernels[n], 0};
            }
            m->next = modules;
            modules = m;
            *handle = m;
        }
    }
    pthread_mutex_unlock(&lock);
    return status;
}

EXPORTED int hipModuleUnload(void *module)
{
    return module != NULL ? SUCCESS : INVALID_VALUE; /* kept for the next one that loads it */
}

EXPORTED int hipModuleGetFunction(void **function, void *module, const char *name)
{
    struct module *m = module;
    const struct kernel *kernel = code_kernel(m->code, name);
    *function = kernel != NULL ? &m->functions[kernel - m->code->kernels] : NULL;
    return kernel != NULL ? SUCCESS : NOT_FOUND;
}

/* Arguments come as one buffer: (1, its address, 2, its size's address, 3). */
EXPORTED int hipModuleLaunchKernel(void *function, unsigned grid_x, unsigned grid_y,
                                   unsigned grid_z, unsigned block_x, unsigned block_y,
                                   unsigned block_z, unsigned lds, void *stream, void **params,
                                   void **extra)
{
    struct job j = {.kind = JOB_LAUNCH,
                    .function = function,
                    .grid = {grid_x, grid_y, grid_z},
                    .block = {block_x, block_y, block_z},
                    .lds = lds};
    if (params != NULL || extra == NULL || extra[0] != (void *)1 || extra[2] != (void *)2 ||
        extra[4] != (void *)3 || *(size_t *)extra[3] > MAX_GRAPH_BYTES) {
        return INVALID_VALUE;
    }
    j.arg_bytes = *(size_t *)extra[3];
    memcpy(j.args, extra[1], j.arg_bytes);
    return enqueue(stream, &j);
}

/* ---- events: work has been done when it is enqueued ---- */

EXPORTED int hipEventCreate(void **event)
{
    *event = calloc(1, sizeof(struct timespec));
    return *event != NULL ? SUCCESS : OUT_OF_MEMORY;
}

EXPORTED int hipEventRecord(void *event, void *stream)
{
    clock_gettime(CLOCK_MONOTONIC, event);
    return SUCCESS;
}

EXPORTED int hipEventSynchronize(void *event)
{
    return event != NULL ? SUCCESS : INVALID_VALUE;
}

EXPORTED int hipEventElapsedTime(float *milliseconds, void *begin, void *end)
{
    const struct timespec *from = begin, *to = end;
    *milliseconds = (float)((double)(to->tv_sec - from->tv_sec) * 1e3 +
                            (double)(to->tv_nsec - from->tv_nsec) * 1e-6);
    return SUCCESS;
}

/* ---- streams and graphs ---- */

EXPORTED int hipStreamCreateWithFlags(void **stream, unsigned flags)
{
    *stream = calloc(1, sizeof(struct stream));
    return *stream != NULL ? SUCCESS : OUT_OF_MEMORY;
}

EXPORTED int hipStreamBeginCapture(void *handle, int mode)
{
    struct stream *stream = handle;
    if (stream == NULL || stream->captures) {
        return INVALID_VALUE;
    }
    stream->captures = true;
    stream->first = NULL;
    stream->last = &stream->first;
    return SUCCESS;
}

EXPORTED int hipStreamEndCapture(void *handle, void **graph)
{
    struct stream *stream = handle;
    *graph = NULL;
    if (stream == NULL || !stream->captures) {
        return CAPTURE_UNMATCHED;
    }
    struct job **kept = malloc(sizeof *kept);
    *kept = stream->first;
    *graph = kept;
    stream->captures = false;
    return SUCCESS;
}

EXPORTED int hipGraphInstantiate(void **exec, void *graph, void *node, char *log, size_t room)
{
    struct job **first = malloc(sizeof *first);
    *first = *(struct job **)graph;
    *(struct job **)graph = NULL; /* the jobs are the instance's now */
    *exec = first;
    return SUCCESS;
}

EXPORTED int hipGraphLaunch(void *exec, void *stream)
{
    for (struct job *j = *(struct job **)exec; j != NULL; j = j->next) {
        pthread_mutex_lock(&lock);
        int status = run_job(j);
        pthread_mutex_unlock(&lock);
        if (status != SUCCESS) {
            return status;
        }
    }
    return SUCCESS;
}

static int free_jobs(void *handle)
{
    struct job *j = *(struct job **)handle;
    while (j != NULL) {
        struct job *next = j->next;
        free(j);
        j = next;
    }
    free(handle);
    return SUCCESS;
}

/* ---- ends ---- */

static int free_handle(void *handle)
{
    free(handle);
    return SUCCESS;
}

#define ENDS(name, end)                                                                            \
    EXPORTED int name(void *handle)                                                                \
    {                                                                                              \
        return end(handle);                                                                        \
    }
ENDS(hipFree, release)
ENDS(hipHostFree, release)
ENDS(hipEventDestroy, free_handle)
ENDS(hipStreamDestroy, free_handle)
ENDS(hipGraphDestroy, free_jobs)
ENDS(hipGraphExecDestroy, free_jobs)
