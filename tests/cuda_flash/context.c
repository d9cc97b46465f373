/* SPDX-License-Identifier: Apache-2.0 */
/* On a machine with a GPU: a probe leaves CUDA alone, so that a child forked after it has the GPU;
 * and every call leaves the caller's current context as it was, one of the caller's own or none.
 * usage: context PLUGIN.so; exit 77 where no GPU is */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <attn/plugin.h>

#define COUNT 1024
#define EXIT_ABSENT 77
#define NOT_INITIALIZED 3 /* CUDA_ERROR_NOT_INITIALIZED */

/* The driver, found as a caller of its own would find it. */
static struct {
    int (*init)(unsigned);
    int (*count)(int *);
    int (*create)(void **, unsigned, int);
    int (*destroy)(void *);
    int (*current)(void **);
    int (*set)(void *);
    int (*retain)(void **, int);
    int (*allocate)(unsigned long long *, size_t);
    int (*read)(void *, unsigned long long, size_t);
    int (*synchronize)(void);
} cuda;

static int failures;

static void hold(int condition, const char *what)
{
    if (!condition) {
        printf("%s: not so\n", what);
        failures++;
    }
}

static int find(void *library, const char *symbol, void *function)
{
    void *address = dlsym(library, symbol);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

static int open_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    return library != NULL && find(library, "cuInit", &cuda.init) &&
           find(library, "cuDeviceGetCount", &cuda.count) &&
           find(library, "cuCtxCreate_v2", &cuda.create) &&
           find(library, "cuCtxDestroy_v2", &cuda.destroy) &&
           find(library, "cuCtxGetCurrent", &cuda.current) &&
           find(library, "cuCtxSetCurrent", &cuda.set) &&
           find(library, "cuDevicePrimaryCtxRetain", &cuda.retain) &&
           find(library, "cuMemAlloc_v2", &cuda.allocate) &&
           find(library, "cuMemcpyDtoH_v2", &cuda.read) &&
           find(library, "cuCtxSynchronize", &cuda.synchronize);
}

static void *allocate(void *user, size_t size, size_t alignment)
{
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void release(void *user, void *memory, size_t size)
{
    free(memory);
}

static attn_status take_device(void *user, const struct attn_device_info *device,
                               struct attn_error *why)
{
    return ATTN_OK;
}

static attn_status take_backend(void *user, const struct attn_backend_caps *caps,
                                struct attn_error *why)
{
    ++*(int *)user;
    return ATTN_OK;
}

static const struct attn_host host = {
    .struct_size = sizeof host, .allocate = allocate, .release = release};

static int probe(const struct attn_plugin *plugin)
{
    int backends = 0;
    const struct attn_probe_sink sink = {sizeof sink, NULL, &backends, take_device, take_backend};
    struct attn_error error = ATTN_ERROR_INIT;
    if (plugin->probe(&host, &sink, &error) != ATTN_OK) {
        printf("%s\n", error.message);
        return 0;
    }
    return backends;
}

/* A worker that is forked after the probe. */
static void fork_worker(void)
{
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        void *context = NULL;
        _exit(cuda.init(0) == 0 && cuda.retain(&context, 0) == 0 && context != NULL ? 0 : 1);
    }
    hold(child > 0 && waitpid(child, &status, 0) == child && status == 0,
         "a child that is forked after the probe has the GPU");
}

static void *current(void)
{
    void *context = NULL;
    hold(cuda.current(&context) == 0, "cuCtxGetCurrent");
    return context;
}

/* The calls of an engine's step, with `mine` current. `memory`: COUNT floats and one. */
static void step(const struct attn_kernels *kernels, attn_instance *instance, void *mine,
                 unsigned long long memory)
{
    static const float numbers[4] = {1, -3, 2, 0.5f};
    int64_t shape[3] = {1, 1, COUNT};
    struct attn_error error = ATTN_ERROR_INIT;
    char *device = (char *)(uintptr_t)memory;
    const struct attn_tensor x = {
        device, {ATTN_DEVICE_CUDA, 0}, 3, {ATTN_CODE_FLOAT, 32, 1}, shape, NULL, 0};
    const struct attn_amax_args amax = {.struct_size = sizeof amax,
                                        .instance = instance,
                                        .x = &x,
                                        .out = (float *)(device + sizeof(float) * COUNT)};
    const struct attn_fill_args fill = {.struct_size = sizeof fill,
                                        .instance = instance,
                                        .destination = device,
                                        .row_bytes = sizeof(float) * COUNT,
                                        .stride = sizeof(float) * COUNT,
                                        .rows = 1};
    const struct attn_copy_args copy = {.struct_size = sizeof copy,
                                        .instance = instance,
                                        .destination = device,
                                        .source = numbers,
                                        .bytes = sizeof numbers,
                                        .kind = ATTN_COPY_HOST_TO_DEVICE};
    const struct attn_memory_args more_than_there_is = {.struct_size = sizeof more_than_there_is,
                                                        .instance = instance,
                                                        .bytes = (size_t)1 << 50,
                                                        .kind = ATTN_MEMORY_DEVICE};
    hold(kernels->fill(&fill, &error) == ATTN_OK, "fill");
    hold(current() == mine, "fill leaves the context");
    hold(kernels->copy(&copy, &error) == ATTN_OK, "copy");
    hold(current() == mine, "copy leaves the context");
    hold(kernels->amax(&amax, &error) == ATTN_OK, "amax");
    hold(current() == mine, "a kernel leaves the context");
    void *none = NULL;
    hold(kernels->allocate_memory(&more_than_there_is, &none, &error) == ATTN_ERROR_OUT_OF_MEMORY,
         "more memory than there is");
    hold(current() == mine, "a refused call leaves the context");
}

static void check_result(void *primary, void *mine, unsigned long long memory)
{
    float found = 0;
    cuda.set(primary);
    hold(cuda.synchronize() == 0, "no kernel failed");
    hold(cuda.read(&found, memory + sizeof(float) * COUNT, sizeof found) == 0 && found == 3,
         "amax finds 3");
    cuda.set(mine);
}

static void use(const struct attn_plugin *plugin)
{
    void *mine = NULL, *primary = NULL;
    unsigned long long memory = 0;
    attn_instance *instance, *none;
    const struct attn_kernels *kernels, *no_kernels;
    struct attn_error error = ATTN_ERROR_INIT;
    struct attn_device device = {ATTN_DEVICE_CUDA, 0}, absent = {ATTN_DEVICE_CUDA, 99};
    hold(cuda.create(&mine, 0, 0) == 0, "a context of the caller's own");
    attn_status status =
        plugin->create(&(struct attn_create_args){.struct_size = sizeof(struct attn_create_args),
                                                  .host = &host,
                                                  .backend = "cuda_flash",
                                                  .variant = "",
                                                  .device = device},
                       &instance, &kernels, &error);
    hold(status == ATTN_OK, "create");
    hold(current() == mine, "create leaves the context");
    hold(plugin->create(&(struct attn_create_args){.struct_size = sizeof(struct attn_create_args),
                                                   .host = &host,
                                                   .backend = "cuda_flash",
                                                   .variant = "",
                                                   .device = absent},
                        &none, &no_kernels, &error) != ATTN_OK,
         "device 99 is refused");
    hold(current() == mine, "a refused create leaves the context");
    if (status != ATTN_OK) {
        return;
    }
    cuda.retain(&primary, 0);
    cuda.set(primary);
    hold(cuda.allocate(&memory, sizeof(float) * (COUNT + 1)) == 0, "memory");
    cuda.set(mine);
    step(kernels, instance, mine, memory);
    check_result(primary, mine, memory);
    cuda.set(NULL);
    step(kernels, instance, NULL, memory);
    check_result(primary, NULL, memory);
    plugin->destroy(instance);
    hold(current() == NULL, "destroy leaves the context");
    cuda.destroy(mine);
}

int main(int argc, char **argv)
{
    const struct attn_plugin *plugin = NULL;
    attn_plugin_entry_fn *entry = NULL;
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library == NULL || !find(library, ATTN_PLUGIN_ENTRY_SYMBOL, &entry) ||
        entry(ATTN_ABI_VERSION, ATTN_ABI_VERSION, &plugin, NULL) != ATTN_OK) {
        printf("usage: context PLUGIN.so\n");
        return 2;
    }
    if (probe(plugin) == 0) {
        return EXIT_ABSENT;
    }
    hold(open_driver(), "the driver has what this needs");
    if (failures == 0) {
        int count = 0;
        hold(cuda.count(&count) == NOT_INITIALIZED, "the probe initialises no driver");
        fork_worker();
        hold(cuda.init(0) == 0, "cuInit");
        use(plugin);
    }
    printf("contexts: %s\n", failures == 0 ? "all as found" : "FAILED");
    return failures != 0;
}
