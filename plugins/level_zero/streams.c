/* SPDX-License-Identifier: Apache-2.0 */
/* gpu_device_* over Level Zero: memory, copies, streams, graphs. A stream is a command list of the
 * engine's, immediate or recorded by it; those made here are immediate. */
#include <stdlib.h>

#include "loaded.h"

static const ze_command_queue_desc_t queue_desc = {.stype = ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC,
                                                   .mode = ZE_COMMAND_QUEUE_MODE_ASYNCHRONOUS};

ze_command_list_handle_t target_of(struct loaded *d, void *stream)
{
    ze_command_list_handle_t list = stream != NULL ? stream : d->default_stream;
    if (atomic_load_explicit(&d->num_captures, memory_order_acquire) > 0) {
        for (int32_t i = 0; i < MAX_STREAMS; i++) {
            if (atomic_load_explicit(&d->captures[i].stream, memory_order_acquire) == list) {
                return d->captures[i].graph->list;
            }
        }
    }
    return list;
}

ze_result_t order(const struct loaded *d, ze_command_list_handle_t list)
{
    return d->ze->CommandListAppendBarrier(list, NULL, 0, NULL);
}

static ze_result_t make_stream(struct loaded *d, ze_command_list_handle_t *stream)
{
    ze_command_queue_desc_t desc = queue_desc;
    desc.ordinal = d->compute_ordinal;
    return d->ze->CommandListCreateImmediate(d->context, d->device, &desc, stream);
}

/* The first group of queues that runs kernels. */
static ze_result_t find_compute_queues(struct loaded *d)
{
    ze_command_queue_group_properties_t groups[16];
    uint32_t count = 16;
    for (int32_t i = 0; i < 16; i++) {
        groups[i] = (ze_command_queue_group_properties_t){
            .stype = ZE_STRUCTURE_TYPE_COMMAND_QUEUE_GROUP_PROPERTIES};
    }
    ze_result_t result = d->ze->DeviceGetCommandQueueGroupProperties(d->device, &count, groups);
    for (uint32_t i = 0; result == ZE_RESULT_SUCCESS && i < count; i++) {
        if ((groups[i].flags & ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE) != 0) {
            d->compute_ordinal = i;
            return ZE_RESULT_SUCCESS;
        }
    }
    return result ? result : ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
}

ze_result_t streams_open(struct loaded *d)
{
    const ze_event_pool_desc_t pool = {.stype = ZE_STRUCTURE_TYPE_EVENT_POOL_DESC,
                                       .flags = ZE_EVENT_POOL_FLAG_HOST_VISIBLE,
                                       .count = MAX_EVENTS};
    pthread_mutex_init(&d->lock, NULL);
    ze_result_t result = find_compute_queues(d);
    ze_command_queue_desc_t desc = queue_desc;
    desc.ordinal = d->compute_ordinal;
    result = result ? result : make_stream(d, &d->default_stream);
    result = result ? result : d->ze->CommandQueueCreate(d->context, d->device, &desc, &d->queue);
    return result ? result : d->ze->EventPoolCreate(d->context, &pool, 1, &d->device, &d->pool);
}

void streams_close(struct loaded *d)
{
    if (d->pool != NULL) {
        (void)d->ze->EventPoolDestroy(d->pool);
    }
    if (d->queue != NULL) {
        (void)d->ze->CommandQueueDestroy(d->queue);
    }
    if (d->default_stream != NULL) {
        (void)d->ze->CommandListDestroy(d->default_stream);
    }
    d->pool = NULL;
    d->queue = NULL;
    d->default_stream = NULL;
}

/* ---- events, by number; under d->lock ---- */

static ze_result_t take_event(struct loaded *d, int32_t *number)
{
    for (int32_t i = 0; i < MAX_EVENTS; i++) {
        if ((d->taken_events >> i & 1) == 0) {
            const ze_event_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_EVENT_DESC,
                                          .index = (uint32_t)i,
                                          .signal = ZE_EVENT_SCOPE_FLAG_HOST,
                                          .wait = ZE_EVENT_SCOPE_FLAG_HOST};
            ze_result_t result = d->ze->EventCreate(d->pool, &desc, &d->events[i]);
            if (result == ZE_RESULT_SUCCESS) {
                d->taken_events |= UINT64_C(1) << i;
                *number = i;
            }
            return result;
        }
    }
    return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
}

static void give_event(struct loaded *d, int32_t number)
{
    if (number >= 0) {
        (void)d->ze->EventDestroy(d->events[number]);
        d->taken_events &= ~(UINT64_C(1) << number);
    }
}

/* Returns when the list's work so far is done. */
static ze_result_t wait_for(struct loaded *d, ze_command_list_handle_t list)
{
    int32_t number = -1;
    pthread_mutex_lock(&d->lock);
    ze_result_t result = take_event(d, &number);
    pthread_mutex_unlock(&d->lock);
    if (result == ZE_RESULT_SUCCESS) {
        result = d->ze->CommandListAppendSignalEvent(list, d->events[number]);
    }
    if (result == ZE_RESULT_SUCCESS) {
        result = d->ze->EventHostSynchronize(d->events[number], UINT64_MAX);
    }
    pthread_mutex_lock(&d->lock);
    give_event(d, number);
    pthread_mutex_unlock(&d->lock);
    return result;
}

/* ---- memory ---- */

static bool is_known(const struct loaded *d, const void *address,
                     ze_memory_allocation_properties_t *properties, ze_device_handle_t *device)
{
    *properties = (ze_memory_allocation_properties_t){
        .stype = ZE_STRUCTURE_TYPE_MEMORY_ALLOCATION_PROPERTIES};
    return d->ze->MemGetAllocProperties(d->context, address, properties, device) ==
               ZE_RESULT_SUCCESS &&
           properties->type != ZE_MEMORY_TYPE_UNKNOWN;
}

/* Pageable host memory is read before return, where the list runs at once. */
const char *gpu_device_copy(const struct gpu_device *device, void *to, const void *from,
                            size_t bytes, int32_t kind, void *stream)
{
    struct loaded *d = loaded_of(device);
    ze_memory_allocation_properties_t properties;
    ze_device_handle_t owner = NULL;
    if (bytes == 0) {
        return NULL;
    }
    ze_command_list_handle_t list = target_of(d, stream), own = stream;
    ze_result_t result = d->ze->CommandListAppendMemoryCopy(list, to, from, bytes, NULL, 0, NULL);
    result = result ? result : order(d, list);
    bool pageable = kind == ATTN_COPY_HOST_TO_DEVICE && !is_known(d, from, &properties, &owner);
    if (result == ZE_RESULT_SUCCESS && pageable && (own == NULL || list == own)) {
        result = wait_for(d, list);
    }
    return ze_text(result);
}

const char *gpu_device_fill(const struct gpu_device *device, void *to, int32_t value,
                            size_t row_bytes, size_t stride, int64_t rows, void *stream)
{
    struct loaded *d = loaded_of(device);
    const uint8_t pattern = (uint8_t)value;
    ze_command_list_handle_t list = target_of(d, stream);
    ze_result_t result = ZE_RESULT_SUCCESS;
    if (rows <= 0 || row_bytes == 0) {
        return NULL;
    }
    if (stride == row_bytes) {
        row_bytes *= (size_t)rows;
        rows = 1;
    }
    for (int64_t i = 0; result == ZE_RESULT_SUCCESS && i < rows; i++) {
        result = d->ze->CommandListAppendMemoryFill(list, (char *)to + (size_t)i * stride, &pattern,
                                                    sizeof pattern, row_bytes, NULL, 0, NULL);
    }
    return ze_text(result ? result : order(d, list));
}

const char *gpu_device_allocate(const struct gpu_device *device, int32_t kind, size_t bytes,
                                void **memory, size_t room[2])
{
    struct loaded *d = loaded_of(device);
    const ze_device_mem_alloc_desc_t on_device = {.stype = ZE_STRUCTURE_TYPE_DEVICE_MEM_ALLOC_DESC};
    const ze_host_mem_alloc_desc_t on_host = {.stype = ZE_STRUCTURE_TYPE_HOST_MEM_ALLOC_DESC};
    bool host = kind == ATTN_MEMORY_HOST;
    ze_result_t result =
        host ? d->ze->MemAllocHost(d->context, &on_host, bytes, 256, memory)
             : d->ze->MemAllocDevice(d->context, &on_device, bytes, 256, d->device, memory);
    if (result == ZE_RESULT_SUCCESS) {
        atomic_fetch_add(&d->allocated, host ? 0 : bytes);
        return NULL;
    }
    *memory = NULL;
    if (result == ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY ||
        result == ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY ||
        result == ZE_RESULT_ERROR_UNSUPPORTED_SIZE) {
        size_t held = atomic_load(&d->allocated);
        room[1] = (size_t)d->memory_bytes; /* what other processes hold is not known */
        room[0] = room[1] > held ? room[1] - held : 0;
    }
    return ze_text(result);
}

const char *gpu_device_free(const struct gpu_device *device, int32_t kind, void *memory)
{
    struct loaded *d = loaded_of(device);
    size_t bytes = 0;
    bool counted = kind != ATTN_MEMORY_HOST &&
                   d->ze->MemGetAddressRange(d->context, memory, NULL, &bytes) == ZE_RESULT_SUCCESS;
    ze_result_t result = d->ze->MemFree(d->context, memory);
    atomic_fetch_sub(&d->allocated, counted && result == ZE_RESULT_SUCCESS ? bytes : 0);
    return ze_text(result);
}

const char *gpu_device_of_memory(const struct gpu_device *device, const void *address,
                                 struct attn_device *owner)
{
    const struct loaded *d = loaded_of(device);
    ze_memory_allocation_properties_t properties;
    ze_device_handle_t handle = NULL;
    bool known = is_known(d, address, &properties, &handle) && handle == d->device &&
                 properties.type != ZE_MEMORY_TYPE_HOST;
    *owner = known ? (struct attn_device){ATTN_DEVICE_ONEAPI, device->id}
                   : (struct attn_device){ATTN_DEVICE_CPU, 0};
    return NULL;
}

/* ---- streams ---- */

const char *gpu_device_stream_create(const struct gpu_device *device, void **stream)
{
    struct loaded *d = loaded_of(device);
    ze_result_t result = ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    *stream = NULL;
    pthread_mutex_lock(&d->lock);
    for (int32_t i = 0; i < MAX_STREAMS; i++) {
        if (d->streams[i] == NULL) {
            result = make_stream(d, &d->streams[i]);
            d->streams[i] = result == ZE_RESULT_SUCCESS ? d->streams[i] : NULL;
            *stream = d->streams[i];
            break;
        }
    }
    pthread_mutex_unlock(&d->lock);
    return ze_text(result);
}

const char *gpu_device_stream_destroy(const struct gpu_device *device, void *stream)
{
    struct loaded *d = loaded_of(device);
    ze_result_t result = wait_for(d, stream);
    pthread_mutex_lock(&d->lock);
    for (int32_t i = 0; i < MAX_STREAMS; i++) {
        if (d->streams[i] == stream) {
            ze_result_t ended = d->ze->CommandListDestroy(stream);
            result = result ? result : ended;
            d->streams[i] = NULL;
            break;
        }
    }
    pthread_mutex_unlock(&d->lock);
    return ze_text(result);
}

/* NULL: the streams made here, and the default one. */
const char *gpu_device_synchronize(const struct gpu_device *device, void *stream)
{
    struct loaded *d = loaded_of(device);
    ze_result_t result = wait_for(d, stream != NULL ? stream : d->default_stream);
    for (int32_t i = 0; stream == NULL && result == ZE_RESULT_SUCCESS && i < MAX_STREAMS; i++) {
        pthread_mutex_lock(&d->lock);
        ze_command_list_handle_t other = d->streams[i];
        pthread_mutex_unlock(&d->lock);
        result = other != NULL ? wait_for(d, other) : result;
    }
    return ze_text(result);
}

/* ---- moments, for traces ---- */

/* In host memory, where the device writes its clock. */
struct moment {
    uint64_t ticks;
    ze_command_list_handle_t list;
};

const char *gpu_device_event_create(const struct gpu_device *device, void **event)
{
    return gpu_device_allocate(device, ATTN_MEMORY_HOST, sizeof(struct moment), event,
                               (size_t[2]){0});
}

const char *gpu_device_event_record(const struct gpu_device *device, void *event, void *stream)
{
    struct loaded *d = loaded_of(device);
    struct moment *moment = event;
    moment->list = stream != NULL ? stream : d->default_stream;
    ze_result_t result =
        d->ze->CommandListAppendWriteGlobalTimestamp(moment->list, &moment->ticks, NULL, 0, NULL);
    return ze_text(result ? result : order(d, moment->list));
}

const char *gpu_device_event_elapsed(const struct gpu_device *device, void *since, void *event,
                                     int64_t *nanoseconds)
{
    struct loaded *d = loaded_of(device);
    const struct moment *from = since, *to = event;
    const uint64_t mask =
        d->tick_bits > 0 && d->tick_bits < 64 ? (UINT64_C(1) << d->tick_bits) - 1 : UINT64_MAX;
    ze_result_t result = wait_for(d, to->list);
    *nanoseconds = (int64_t)((double)((to->ticks - from->ticks) & mask) * d->tick_ns);
    return ze_text(result);
}

const char *gpu_device_event_destroy(const struct gpu_device *device, void *event)
{
    return gpu_device_free(device, ATTN_MEMORY_HOST, event);
}

/* ---- graphs ---- */

static void free_graph(struct loaded *d, struct graph *graph)
{
    if (graph->list != NULL) {
        (void)d->ze->CommandListDestroy(graph->list);
    }
    give_event(d, graph->begin);
    give_event(d, graph->end);
    free(graph);
}

static ze_result_t make_graph(struct loaded *d, struct graph *graph)
{
    const ze_command_list_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_COMMAND_LIST_DESC,
                                         .commandQueueGroupOrdinal = d->compute_ordinal};
    ze_result_t result = take_event(d, &graph->begin);
    result = result ? result : take_event(d, &graph->end);
    result = result ? result : d->ze->CommandListCreate(d->context, d->device, &desc, &graph->list);
    if (result != ZE_RESULT_SUCCESS) {
        return result;
    }
    ze_event_handle_t *begin = &d->events[graph->begin];
    result = d->ze->CommandListAppendWaitOnEvents(graph->list, 1, begin);
    result = result ? result : d->ze->CommandListAppendEventReset(graph->list, *begin);
    return result ? result : order(d, graph->list);
}

const char *gpu_device_capture_begin(const struct gpu_device *device, void *stream)
{
    struct loaded *d = loaded_of(device);
    void *list = stream != NULL ? stream : d->default_stream;
    struct capture *place = NULL;
    struct graph *graph = calloc(1, sizeof *graph);
    if (graph == NULL) {
        return ze_text(ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY);
    }
    graph->begin = graph->end = -1;
    pthread_mutex_lock(&d->lock);
    bool records = false;
    for (int32_t i = 0; i < MAX_STREAMS; i++) {
        void *other = atomic_load(&d->captures[i].stream);
        records |= other == list;
        place = place == NULL && other == NULL ? &d->captures[i] : place;
    }
    const char *cause = records         ? "the stream is recorded already"
                        : place == NULL ? "64 streams are recorded already"
                                        : ze_text(make_graph(d, graph));
    if (cause == NULL) {
        place->graph = graph;
        atomic_store(&place->stream, list);
        atomic_fetch_add(&d->num_captures, 1);
    } else {
        free_graph(d, graph);
    }
    pthread_mutex_unlock(&d->lock);
    return cause;
}

const char *gpu_device_capture_end(const struct gpu_device *device, void *stream, void **graph)
{
    struct loaded *d = loaded_of(device);
    void *list = stream != NULL ? stream : d->default_stream;
    struct graph *made = NULL;
    const char *cause = "the stream is not recorded";
    *graph = NULL;
    pthread_mutex_lock(&d->lock);
    for (int32_t i = 0; i < MAX_STREAMS; i++) {
        if (atomic_load(&d->captures[i].stream) == list) {
            made = d->captures[i].graph;
            atomic_store(&d->captures[i].stream, NULL);
            atomic_fetch_sub(&d->num_captures, 1);
            break;
        }
    }
    if (made != NULL) {
        ze_result_t result = d->ze->CommandListAppendSignalEvent(made->list, d->events[made->end]);
        cause = ze_text(result ? result : d->ze->CommandListClose(made->list));
        if (cause != NULL) {
            free_graph(d, made);
        }
    }
    *graph = cause == NULL ? made : NULL;
    pthread_mutex_unlock(&d->lock);
    return cause;
}

/* The graph's list runs on a queue of its own, between the stream's work before and after. */
const char *gpu_device_graph_launch(const struct gpu_device *device, void *graph, void *stream)
{
    struct loaded *d = loaded_of(device);
    struct graph *made = graph;
    ze_command_list_handle_t list = stream != NULL ? stream : d->default_stream;
    ze_event_handle_t *end = &d->events[made->end];
    ze_result_t result = d->ze->CommandListAppendSignalEvent(list, d->events[made->begin]);
    result =
        result ? result : d->ze->CommandQueueExecuteCommandLists(d->queue, 1, &made->list, NULL);
    result = result ? result : d->ze->CommandListAppendWaitOnEvents(list, 1, end);
    result = result ? result : d->ze->CommandListAppendEventReset(list, *end);
    return ze_text(result ? result : order(d, list));
}

const char *gpu_device_graph_destroy(const struct gpu_device *device, void *graph)
{
    struct loaded *d = loaded_of(device);
    ze_result_t result = d->ze->CommandQueueSynchronize(d->queue, UINT64_MAX);
    pthread_mutex_lock(&d->lock);
    free_graph(d, graph);
    pthread_mutex_unlock(&d->lock);
    return ze_text(result);
}
