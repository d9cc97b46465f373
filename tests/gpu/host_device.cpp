/* SPDX-License-Identifier: Apache-2.0 */
/* A device of the test's own: the host's memory, and kernels as fibres (target_host.h), one group
 * after another. Without matrix kernels of a plugin every attend is the plain one's. */
#include <atomic>
#include <thread>

#include "gpu/delta.h"
#include "gpu/device/target.h"
#include "gpu/index.h"
#include "gpu/latent.h"
#include "gpu/params.h"
#include "host_device.h"

#define DECLARE_KERNEL(name, params, threads) extern "C" void kernel_##name(const params &p);
GPU_KERNELS(DECLARE_KERNEL)

#define RUN_KERNEL(name, params, threads)                                                          \
    static void run_##name(void *p)                                                                \
    {                                                                                              \
        kernel_##name(*(const params *)p);                                                         \
    }
GPU_KERNELS(RUN_KERNEL)

#define KERNEL_ENTRY(name, params, threads) {run_##name, threads},
static const struct {
    void (*run)(void *);
    uint32_t threads;
} kernels[] = {GPU_KERNELS(KERNEL_ENTRY)};

/* Not a mutex: a step takes no lock, which attn-check holds. */
static std::atomic_flag running = ATOMIC_FLAG_INIT;

void host_run_groups(void (*run)(void *), uint32_t threads, int64_t groups, const void *params)
{
    while (running.test_and_set(std::memory_order_acquire)) {
        std::this_thread::yield();
    }
    for (int64_t i = 0; i < groups; i++) {
        host_run_group(threads, (uint32_t)i, (uint32_t)groups, run, (void *)params);
    }
    running.clear(std::memory_order_release);
}

extern "C" const char *gpu_device_open(struct gpu_device *device, int32_t id)
{
    device->id = id;
    device->num_sms = 12; /* several groups for a list, and writes of more than 48 tokens as many */
    device->lanes = GPU_LANES;
    return NULL;
}

extern "C" void gpu_device_close(struct gpu_device *device)
{
    (void)device;
}

extern "C" const char *gpu_device_launch(const struct gpu_device *device, enum gpu_kernel kernel,
                                         int64_t groups, const void *params, void *stream)
{
    (void)device, (void)stream;
    host_run_groups(kernels[kernel].run, kernels[kernel].threads, groups, params);
    return NULL;
}

extern "C" const char *gpu_device_copy(const struct gpu_device *, void *to, const void *from,
                                       size_t bytes, int32_t, void *)
{
    memmove(to, from, bytes);
    return NULL;
}

extern "C" const char *gpu_device_fill(const struct gpu_device *, void *to, int32_t value,
                                       size_t row_bytes, size_t stride, int64_t rows, void *)
{
    for (int64_t i = 0; i < rows; i++) {
        memset((char *)to + i * stride, value, row_bytes);
    }
    return NULL;
}

/* gpu/host/services.c links to these; the backend's table has none of its slots. */
extern "C" const char *gpu_device_allocate(const struct gpu_device *, int32_t, size_t, void **,
                                           size_t[2])
{
    return "not here";
}

extern "C" const char *gpu_device_free(const struct gpu_device *, int32_t, void *)
{
    return "not here";
}

extern "C" const char *gpu_device_of_memory(const struct gpu_device *, const void *,
                                            struct attn_device *)
{
    return "not here";
}

#define NO_STREAMS(name, ...)                                                                      \
    extern "C" const char *gpu_device_##name(__VA_ARGS__)                                          \
    {                                                                                              \
        return "not here";                                                                         \
    }
NO_STREAMS(stream_create, const struct gpu_device *, void **)
NO_STREAMS(stream_destroy, const struct gpu_device *, void *)
NO_STREAMS(synchronize, const struct gpu_device *, void *)
NO_STREAMS(capture_begin, const struct gpu_device *, void *)
NO_STREAMS(capture_end, const struct gpu_device *, void *, void **)
NO_STREAMS(graph_launch, const struct gpu_device *, void *, void *)
NO_STREAMS(event_create, const struct gpu_device *, void **)
NO_STREAMS(event_record, const struct gpu_device *, void *, void *)
NO_STREAMS(event_elapsed, const struct gpu_device *, void *, void *, int64_t *)
NO_STREAMS(event_destroy, const struct gpu_device *, void *)
NO_STREAMS(graph_destroy, const struct gpu_device *, void *)
