/* SPDX-License-Identifier: Apache-2.0 */
/* Sources: NVIDIA cuDNN documentation, "Deviceless Ahead-of-Time Compilation"; CUDA programming
 * guide, "Technical Specifications per Compute Capability". */
#include "cudnn/ask.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "cudnn/attend.h"
#include "gpu/cuda/nvml.h"

#define MAX_ANSWERS 32 /* different layers of a process that are remembered */
#define ASKED_REQS 16  /* sizes of a batch, on which answers do not depend */
#define ASKED_QUERIES 128
#define ASKED_KEYS 4096
#define DEVICE_BYTES 1024

struct answer {
    struct graph_shape shape;
    int32_t device, has_engine;
    char cause[GRAPH_CAUSE_BYTES];
};

/* The library and the devices are the process's, as are the answers. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct cudnn_library library;
static struct gpu_found devices[GPU_MAX_FOUND];
static int32_t opened, num_devices, num_answers;
static struct answer answers[MAX_ANSWERS];

/* A device as CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION has it. Engines are chosen by the
 * capability and by shared memory. */
static void describe(int32_t id, char text[DEVICE_BYTES])
{
    const struct gpu_found *d = &devices[id];
    const int small = d->major == 12 || (d->major == 8 && d->minor != 0 && d->minor != 7);
    const int shared = small ? 101376 : d->major == 8 ? 166912 : 232448;
    snprintf(text, DEVICE_BYTES,
             "{\"deviceName\":\"%s\",\"deviceVer\":%d,\"driverVer\":13000,\"cudaDeviceId\":%d,"
             "\"multiProcessorCount\":%d,\"totalGlobalMem\":%lld,\"maxSharedMemoryPerBlock\":49152,"
             "\"maxSharedMemoryPerBlockOptin\":%d,\"reservedSharedMemoryPerBlock\":1024,"
             "\"maxRegistersPerSM\":65536,\"regsPerBlock\":65536,\"maxCtasPerSM\":%d,"
             "\"maxThreadsPerBlock\":1024,\"maxThreadsPerSM\":%d,\"warpSize\":32,"
             "\"l2CacheSize\":50331648,\"smClockRateKHz\":1500000,\"memClockRateKHz\":2500000,"
             "\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],"
             "\"isTccDriver\":0,\"supportCoopLaunch\":1,\"pciDeviceId\":0}",
             d->name, d->major * 100 + d->minor * 10, id, d->num_sms, (long long)d->memory_bytes,
             shared, small ? 24 : 32, small ? 1536 : 2048);
}

static void open_once(void)
{
    char cause[CUDNN_CAUSE_BYTES];
    const char *none = "";
    if (!opened) {
        opened = 1;
        num_devices = cudnn_open(&library, cause) ? nvml_devices(devices, GPU_MAX_FOUND, &none) : 0;
    }
}

static struct graph_shape shape_of(const struct attn_layer_desc *l, int32_t phase)
{
    struct graph_shape s = cudnn_shape(l);
    const bool rows = l->kind == ATTN_LAYER_ENCODER;
    s.num_reqs = ASKED_REQS;
    s.block_size = rows ? 1 : l->block_size;
    s.columns = ASKED_KEYS / s.block_size;
    if (rows) {
        s.has |= GRAPH_HAS_ROWS;
    } else {
        const int64_t k = s.block_size * s.head_size, v = s.block_size * s.head_size_v;
        s.k = (struct graph_cache){s.columns * ASKED_REQS, k * s.num_kv_heads, k, s.head_size};
        s.v = (struct graph_cache){s.columns * ASKED_REQS, v * s.num_kv_heads, v, s.head_size_v};
    }
    cudnn_set_query_len(&s, phase == ATTN_PHASE_DECODE ? 1 : ASKED_QUERIES, l->needs_lse);
    return s;
}

static struct answer ask(const struct graph_shape *shape, int32_t device)
{
    struct answer made;
    char text[DEVICE_BYTES];
    memset(&made, 0, sizeof made);
    made.shape = *shape;
    made.device = device;
    describe(device, text);
    made.has_engine = graph_has_engine(&library, text, shape, made.cause);
    return made;
}

static int same(const struct answer *a, const struct graph_shape *shape, int32_t device)
{
    return a->device == device && memcmp(&a->shape, shape, sizeof *shape) == 0;
}

int cudnn_has_engine(const struct attn_supports_args *args, char cause[GRAPH_CAUSE_BYTES])
{
    const int32_t device = args->caps->device.id;
    const struct graph_shape shape = shape_of(args->layer, args->phase);
    struct answer answer = {.has_engine = 1};
    int32_t i = 0;
    pthread_mutex_lock(&lock);
    open_once();
    while (i < num_answers && !same(&answers[i], &shape, device)) {
        i++;
    }
    if (i < num_answers) {
        answer = answers[i];
    } else if (device >= 0 && device < num_devices) {
        answer = ask(&shape, device);
        answers[num_answers < MAX_ANSWERS ? num_answers++ : MAX_ANSWERS - 1] = answer;
    }
    pthread_mutex_unlock(&lock);
    memcpy(cause, answer.cause, sizeof answer.cause);
    return answer.has_engine;
}
