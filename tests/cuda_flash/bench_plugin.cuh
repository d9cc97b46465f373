/* SPDX-License-Identifier: Apache-2.0 */
/* A plugin under the bench: its instance, memory on the device, and medians of captured launches.
 */
#ifndef CUDA_FLASH_BENCH_PLUGIN_CUH
#define CUDA_FLASH_BENCH_PLUGIN_CUH

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <functional>
#include <vector>

#include <attn/plugin.h>

#define MUST(x)                                                                                    \
    do {                                                                                           \
        auto status_ = (x);                                                                        \
        if (status_) {                                                                             \
            printf("%s:%d: %d\n", #x, __LINE__, (int)status_);                                     \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static void *host_allocate(void *, size_t size, size_t alignment)
{
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}
static void host_release(void *, void *memory, size_t)
{
    free(memory);
}
static struct attn_host host = {sizeof host,  nullptr, nullptr, nullptr, host_allocate,
                                host_release, nullptr, 1,       0};
static const struct attn_plugin *plugin;
static const struct attn_kernels *kernels;
static attn_instance *instance;
static cudaStream_t stream;

/* The plugin of a file, an instance of it and its kernels; ends the program where there is none. */
static void open_plugin(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        printf("%s\n", dlerror());
        exit(1);
    }
    auto entry = (attn_plugin_entry_fn *)dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL);
    struct attn_error error = ATTN_ERROR_INIT;
    MUST(entry(ATTN_ABI_VERSION, ATTN_ABI_VERSION, &plugin, &error));
    struct attn_create_args create = {sizeof create};
    create.host = &host, create.backend = "cuda_flash", create.variant = "";
    create.device.type = ATTN_DEVICE_CUDA;
    MUST(plugin->create(&create, &instance, &kernels, nullptr));
}

static __global__ void random_bf16(__nv_bfloat16 *data, size_t count)
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        unsigned x = (unsigned)i * 2654435761u;
        x ^= x >> 15;
        x *= 2246822519u;
        data[i] = __float2bfloat16((float)(x >> 8) / 8388608.0f - 1.0f);
    }
}

/* Adds us a launch of `count` replays of a graph of so many launches; before them `warming` more.
 */
static void time_graph(cudaGraphExec_t graph, int launches, int warming, int count,
                       std::vector<double> &times)
{
    static cudaEvent_t begin, end;
    if (begin == nullptr) {
        MUST(cudaEventCreate(&begin));
        MUST(cudaEventCreate(&end));
    }
    for (int i = 0; i < warming + count; i++) {
        float ms;
        MUST(cudaEventRecord(begin, stream));
        MUST(cudaGraphLaunch(graph, stream));
        MUST(cudaEventRecord(end, stream));
        MUST(cudaEventSynchronize(end));
        MUST(cudaEventElapsedTime(&ms, begin, end));
        if (i >= warming) {
            times.push_back(ms * 1e3 / launches);
        }
    }
}

/* Median us of one launch: `copies` launches, each on its own data, in one graph. */
static double median_us(int copies, const std::function<void(int)> &launch)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    std::vector<double> times;
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    for (int i = 0; i < copies; i++) {
        launch(i);
    }
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    time_graph(exec, copies, 3, 20, times);
    std::sort(times.begin(), times.end());
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    return times[times.size() / 2];
}

template <class T> static T *upload(const std::vector<T> &v)
{
    T *p;
    MUST(cudaMalloc(&p, v.size() * sizeof(T)));
    MUST(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    MUST(cudaDeviceSynchronize()); /* of pageable memory: the copy may come later than the return */
    return p;
}

static struct attn_tensor tensor(void *data, int64_t *shape, int code, int bits)
{
    return {data, {ATTN_DEVICE_CUDA, 0}, 3, {(uint8_t)code, (uint8_t)bits, 1}, shape, nullptr, 0};
}

static char *pool;
static size_t pool_bytes;

#endif
