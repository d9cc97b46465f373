/* SPDX-License-Identifier: Apache-2.0 */
/* An out-of-tree ggml backend: an accelerator device next to the CPU, as ggml's BLAS backend is
 * one, that computes attention (GGML_OP_FLASH_ATTN_EXT) on buffers of the CPU. An unmodified
 * llama.cpp loads it by GGML_BACKEND_PATH. */
#include <ggml-backend-impl.h>
#include <ggml-cpu.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

enum { MAX_COUNTS = 4 };

/* Multiply-adds below which waking threads costs more than it saves, and ggml's own may stand and
 * spin on the cores: such a step runs on the calling thread alone. */
#define LEAST_SHARED_WORK (INT64_C(16) << 20)

/* A backend's state: a runtime for each number of threads that steps ran with, since engines
 * change it between prefill and decode. */
struct context {
    struct attention *attention[MAX_COUNTS];
    int32_t threads[MAX_COUNTS];
    int32_t wanted;
};

/* Answers supports_op, from whatever thread asks first; ggml builds its graphs in one. */
static struct attention *judge;
static bool judge_wanted; /* once: a library that is not there is reported once */

static const char *get_name(ggml_backend_t backend)
{
    return "ATTN";
}

static void backend_free(ggml_backend_t backend)
{
    struct context *context = backend->context;
    for (int32_t i = 0; i < MAX_COUNTS; i++) {
        attention_destroy(context->attention[i]);
    }
    free(context);
    free(backend);
}

/* The state for so many threads; NULL: libattn cannot be opened. */
static struct attention *with_threads(struct context *context, int32_t threads)
{
    int32_t place = 0;
    while (place < MAX_COUNTS - 1 && context->threads[place] != threads &&
           context->threads[place] != 0) {
        place++;
    }
    if (context->threads[place] != threads) {
        attention_destroy(context->attention[place]);
        context->attention[place] = NULL;
        context->threads[place] = threads;
    }
    if (context->attention[place] == NULL) {
        context->attention[place] = attention_create(threads);
    }
    return context->attention[place];
}

/* Multiply-adds, masked ones included. */
static int64_t work_of(const struct ggml_tensor *op)
{
    const struct ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
    return q->ne[1] * q->ne[2] * q->ne[3] * k->ne[1] * (k->ne[0] + v->ne[0]);
}

static enum ggml_status graph_compute(ggml_backend_t backend, struct ggml_cgraph *graph)
{
    struct context *context = backend->context;
    int count = ggml_graph_n_nodes(graph);
    for (int i = 0; i < count; i++) {
        const struct ggml_tensor *node = ggml_graph_node(graph, i);
        if (node->op != GGML_OP_FLASH_ATTN_EXT) {
            continue;
        }
        int32_t threads = work_of(node) < LEAST_SHARED_WORK ? 1 : context->wanted;
        struct attention *attention = with_threads(context, threads);
        if (attention == NULL || !attention_run(attention, node)) {
            return GGML_STATUS_FAILED;
        }
    }
    return GGML_STATUS_SUCCESS;
}

static void set_n_threads(ggml_backend_t backend, int threads)
{
    struct context *context = backend->context;
    context->wanted = threads;
}

static ggml_guid_t guid(void)
{
    static ggml_guid value = {0x6c, 0x69, 0x62, 0x61, 0x74, 0x74, 0x6e, 0x2e,
                              0x67, 0x67, 0x6d, 0x6c, 0x2e, 0x30, 0x30, 0x31};
    return &value;
}

static const char *device_name(ggml_backend_dev_t device)
{
    return "ATTN";
}

static const char *device_description(ggml_backend_dev_t device)
{
    return "libattn";
}

static void device_memory(ggml_backend_dev_t device, size_t *free_bytes, size_t *total)
{
    *free_bytes = *total = 0; /* the CPU's */
}

static enum ggml_backend_dev_type device_type(ggml_backend_dev_t device)
{
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

static void device_props(ggml_backend_dev_t device, struct ggml_backend_dev_props *props)
{
    memset(props, 0, sizeof *props);
    props->name = device_name(device);
    props->description = device_description(device);
    props->type = device_type(device);
    props->caps.buffer_from_host_ptr = true;
}

static ggml_backend_t device_init(ggml_backend_dev_t device, const char *params)
{
    static const struct ggml_backend_i interface = {
        .get_name = get_name, .free = backend_free, .graph_compute = graph_compute};
    struct context *context = calloc(1, sizeof *context);
    ggml_backend_t backend = calloc(1, sizeof *backend);
    if (context == NULL || backend == NULL) {
        free(context);
        free(backend);
        return NULL;
    }
    backend->guid = guid();
    backend->iface = interface;
    backend->device = device;
    backend->context = context;
    return backend;
}

static ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device)
{
    return ggml_backend_cpu_buffer_type();
}

static ggml_backend_buffer_t device_buffer_from_ptr(ggml_backend_dev_t device, void *memory,
                                                    size_t size, size_t largest)
{
    return ggml_backend_cpu_buffer_from_ptr(memory, size);
}

static bool device_supports_op(ggml_backend_dev_t device, const struct ggml_tensor *op)
{
    switch (op->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
        return true;
    case GGML_OP_FLASH_ATTN_EXT:
        if (!judge_wanted) {
            judge_wanted = true;
            judge = attention_create(1);
        }
        return judge != NULL && attention_serves(judge, op);
    default:
        return false;
    }
}

static bool device_supports_buffer(ggml_backend_dev_t device, ggml_backend_buffer_type_t type)
{
    return ggml_backend_buft_is_host(type);
}

static const char *reg_name(ggml_backend_reg_t reg)
{
    return "ATTN";
}

static size_t reg_device_count(ggml_backend_reg_t reg)
{
    return 1;
}

static ggml_backend_dev_t reg_device(ggml_backend_reg_t reg, size_t index)
{
    static struct ggml_backend_device device = {
        .iface = {.get_name = device_name,
                  .get_description = device_description,
                  .get_memory = device_memory,
                  .get_type = device_type,
                  .get_props = device_props,
                  .init_backend = device_init,
                  .get_buffer_type = device_buffer_type,
                  .buffer_from_host_ptr = device_buffer_from_ptr,
                  .supports_op = device_supports_op,
                  .supports_buft = device_supports_buffer}};
    device.reg = reg;
    return index == 0 ? &device : NULL;
}

static void *reg_address(ggml_backend_reg_t reg, const char *name)
{
    return strcmp(name, "ggml_backend_set_n_threads") == 0 ? (void *)(uintptr_t)set_n_threads
                                                           : NULL;
}

/* The one symbol that ggml looks for. */
__attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void);

ggml_backend_reg_t ggml_backend_init(void)
{
    static struct ggml_backend_reg reg = {.api_version = GGML_BACKEND_API_VERSION,
                                          .iface = {.get_name = reg_name,
                                                    .get_device_count = reg_device_count,
                                                    .get_device = reg_device,
                                                    .get_proc_address = reg_address}};
    return &reg;
}
