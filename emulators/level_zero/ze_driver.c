/* SPDX-License-Identifier: Apache-2.0 */
/* A Level Zero driver of the tests, which the real loader opens (ZE_ENABLE_ALT_DRIVERS): one GPU
 * whose kernels run on the host as soon as they are appended. A module is SPIR-V of which a
 * translation lies in ATTN_TEST_ZE_MODULES (translate.sh): byte for byte the file NAME.spv next to
 * NAME.so. Allocations end at a page that may not be touched.
 * ATTN_TEST_ZE has words: no_double, no_half, small_groups, lost (at the first kernel),
 * broken_module, little_memory. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <level_zero/ze_api.h>
#include <level_zero/ze_ddi.h>

#define EXPORTED __attribute__((visibility("default")))
#define OK ZE_RESULT_SUCCESS
#define MAX_ARGUMENTS 2048
#define MEMORY_BYTES (UINT64_C(4) << 30)

typedef const char *run_kernel_fn(void (*entry)(const void *), const void *params, uint32_t threads,
                                  uint32_t groups);

struct module {
    void *library;
    run_kernel_fn *run;
    char log[256];
};

struct kernel {
    struct module *module;
    void (*entry)(const void *);
    uint32_t threads;
    size_t bytes;
    unsigned char arguments[MAX_ARGUMENTS] __attribute__((aligned(64)));
};

enum job_kind { JOB_KERNEL, JOB_COPY, JOB_FILL, JOB_CLOCK, JOB_SIGNAL, JOB_RESET, JOB_WAIT };

struct job {
    enum job_kind kind;
    struct job *next;
    struct kernel kernel;
    uint32_t groups;
    char *to;
    const char *from;
    size_t bytes;
    unsigned char value;
    struct event *event;
};

struct event {
    bool signalled;
};

struct list {
    bool immediate, closed;
    struct job *first, **last;
};

struct allocation {
    char *base, *data;
    size_t mapped, bytes;
    ze_memory_type_t type;
    struct allocation *next;
};

static struct {
    int unused;
} the_driver, the_device, the_context, the_pool, the_queue;

static struct allocation *allocations;
static size_t allocated;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_asked(const char *word)
{
    const char *words = getenv("ATTN_TEST_ZE");
    return words != NULL && strstr(words, word) != NULL;
}

/* ---- driver and device ---- */

static ze_result_t init(ze_init_flags_t flags)
{
    return is_asked("no_driver") ? ZE_RESULT_ERROR_UNINITIALIZED : OK;
}

static ze_result_t get_one(void *thing, uint32_t *count, void **things)
{
    if (things != NULL && *count > 0) {
        things[0] = thing;
    }
    *count = 1;
    return OK;
}

static ze_result_t driver_get(uint32_t *count, ze_driver_handle_t *drivers)
{
    return get_one(&the_driver, count, (void **)drivers);
}

static ze_result_t device_get(ze_driver_handle_t driver, uint32_t *count,
                              ze_device_handle_t *devices)
{
    return get_one(&the_device, count, (void **)devices);
}

static ze_result_t device_properties(ze_device_handle_t device, ze_device_properties_t *p)
{
    p->type = ZE_DEVICE_TYPE_GPU;
    p->vendorId = 0x8086;
    p->deviceId = 0x0bd5;
    p->numSlices = 1;
    p->numSubslicesPerSlice = 4;
    p->numEUsPerSubslice = 8;
    p->timerResolution = 80; /* nanoseconds of a tick */
    p->timestampValidBits = 36;
    snprintf(p->name, sizeof p->name, "a GPU of the tests");
    return OK;
}

static ze_result_t compute_properties(ze_device_handle_t device, ze_device_compute_properties_t *p)
{
    p->maxTotalGroupSize = p->maxGroupSizeX = is_asked("small_groups") ? 512 : 1024;
    p->maxSharedLocalMemory = 64 * 1024;
    p->numSubGroupSizes = 2;
    p->subGroupSizes[0] = 16;
    p->subGroupSizes[1] = 32;
    return OK;
}

static ze_result_t module_properties(ze_device_handle_t device, ze_device_module_properties_t *p)
{
    p->spirvVersionSupported = ZE_MAKE_VERSION(1, 2);
    p->maxArgumentsSize = MAX_ARGUMENTS;
    p->flags = (is_asked("no_half") ? 0 : ZE_DEVICE_MODULE_FLAG_FP16) |
               (is_asked("no_double") ? 0 : ZE_DEVICE_MODULE_FLAG_FP64);
    return OK;
}

static ze_result_t memory_properties(ze_device_handle_t device, uint32_t *count,
                                     ze_device_memory_properties_t *p)
{
    if (p != NULL && *count > 0) {
        p->totalSize = is_asked("little_memory") ? 1 << 20 : MEMORY_BYTES;
    }
    *count = 1;
    return OK;
}

static ze_result_t queue_properties(ze_device_handle_t device, uint32_t *count,
                                    ze_command_queue_group_properties_t *p)
{
    for (uint32_t i = 0; p != NULL && i < *count && i < 2; i++) { /* the first one only copies */
        p[i].flags = i == 0 ? ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COPY
                            : ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE |
                                  ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COPY;
        p[i].numQueues = 1;
    }
    *count = 2;
    return OK;
}

static ze_result_t pci_properties(ze_device_handle_t device, ze_pci_ext_properties_t *p)
{
    p->address = (ze_pci_address_ext_t){0, 0x3a, 0, 0};
    return OK;
}

static ze_result_t context_create(ze_driver_handle_t driver, const ze_context_desc_t *desc,
                                  ze_context_handle_t *context)
{
    *context = (ze_context_handle_t)&the_context;
    return OK;
}

/* ---- modules and kernels ---- */

static bool is_file(const char *path, const void *data, size_t bytes)
{
    FILE *file = fopen(path, "rb");
    char *text = malloc(bytes + 1);
    bool same = file != NULL && text != NULL && fread(text, 1, bytes + 1, file) == bytes &&
                memcmp(text, data, bytes) == 0;
    if (file != NULL) {
        fclose(file);
    }
    free(text);
    return same;
}

static void find_translation(struct module *m, const ze_module_desc_t *desc)
{
    const char *path = getenv("ATTN_TEST_ZE_MODULES");
    DIR *folder = opendir(path != NULL ? path : "/nowhere");
    snprintf(m->log, sizeof m->log, "no translation of this module in ATTN_TEST_ZE_MODULES");
    for (struct dirent *e; folder != NULL && (e = readdir(folder)) != NULL;) {
        char name[512];
        size_t length = strlen(e->d_name);
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        if (length < 5 || strcmp(e->d_name + length - 4, ".spv") != 0 ||
            !is_file(name, desc->pInputModule, desc->inputSize)) {
            continue;
        }
        memcpy(name + strlen(name) - 4, ".so", 4);
        m->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        void *run = m->library != NULL ? dlsym(m->library, "run_kernel") : NULL;
        memcpy(&m->run, &run, sizeof run);
        snprintf(m->log, sizeof m->log, "%s", m->library != NULL ? "" : dlerror());
        break;
    }
    if (folder != NULL) {
        closedir(folder);
    }
}

static ze_result_t module_create(ze_context_handle_t context, ze_device_handle_t device,
                                 const ze_module_desc_t *desc, ze_module_handle_t *module,
                                 ze_module_build_log_handle_t *log)
{
    struct module *m = calloc(1, sizeof *m);
    find_translation(m, desc);
    if (is_asked("broken_module")) {
        snprintf(m->log, sizeof m->log, "spilled beyond what there is");
        m->run = NULL;
    }
    if (log != NULL) {
        *log = (ze_module_build_log_handle_t)m;
    }
    *module = (ze_module_handle_t)(m->run != NULL ? m : NULL);
    return m->run != NULL ? OK : ZE_RESULT_ERROR_MODULE_BUILD_FAILURE;
}

static ze_result_t log_text(ze_module_build_log_handle_t log, size_t *bytes, char *text)
{
    const struct module *m = (const struct module *)log;
    if (text != NULL) {
        snprintf(text, *bytes, "%s", m->log);
    }
    *bytes = strlen(m->log) + 1;
    return OK;
}

static ze_result_t kernel_create(ze_module_handle_t module, const ze_kernel_desc_t *desc,
                                 ze_kernel_handle_t *kernel)
{
    struct module *m = (struct module *)module;
    void *entry = dlsym(m->library, desc->pKernelName);
    if (entry == NULL) {
        return ZE_RESULT_ERROR_INVALID_KERNEL_NAME;
    }
    struct kernel *k = aligned_alloc(64, sizeof *k);
    memset(k, 0, sizeof *k);
    k->module = m;
    memcpy(&k->entry, &entry, sizeof entry);
    *kernel = (ze_kernel_handle_t)k;
    return OK;
}

static ze_result_t kernel_group_size(ze_kernel_handle_t kernel, uint32_t x, uint32_t y, uint32_t z)
{
    struct kernel *k = (struct kernel *)kernel;
    k->threads = x;
    return x * y * z <= (is_asked("small_groups") ? 512u : 1024u)
               ? OK
               : ZE_RESULT_ERROR_INVALID_GROUP_SIZE_DIMENSION;
}

static ze_result_t kernel_argument(ze_kernel_handle_t kernel, uint32_t index, size_t bytes,
                                   const void *value)
{
    struct kernel *k = (struct kernel *)kernel;
    if (index != 0) {
        return ZE_RESULT_ERROR_INVALID_KERNEL_ARGUMENT_INDEX;
    }
    if (bytes > MAX_ARGUMENTS) {
        return ZE_RESULT_ERROR_INVALID_KERNEL_ARGUMENT_SIZE;
    }
    memcpy(k->arguments, value, bytes);
    k->bytes = bytes;
    return OK;
}

static ze_result_t kernel_access(ze_kernel_handle_t kernel, ze_kernel_indirect_access_flags_t flags)
{
    return flags != 0 ? OK : ZE_RESULT_ERROR_INVALID_ARGUMENT;
}

/* ---- lists ---- */

static ze_result_t run_job(struct job *j)
{
    struct timespec now;
    switch (j->kind) {
    case JOB_KERNEL: {
        const char *defect = j->kernel.module->run(j->kernel.entry, j->kernel.arguments,
                                                   j->kernel.threads, j->groups);
        if (defect != NULL) {
            fprintf(stderr, "ze_driver: %s\n", defect);
        }
        return defect == NULL ? OK : ZE_RESULT_ERROR_DEVICE_LOST;
    }
    case JOB_COPY:
        memcpy(j->to, j->from, j->bytes);
        return OK;
    case JOB_FILL:
        memset(j->to, j->value, j->bytes);
        return OK;
    case JOB_CLOCK:
        clock_gettime(CLOCK_MONOTONIC, &now);
        *(uint64_t *)(void *)j->to =
            ((uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec) / 80 % (UINT64_C(1) << 36);
        return OK;
    case JOB_SIGNAL:
    case JOB_RESET:
        j->event->signalled = j->kind == JOB_SIGNAL;
        return OK;
    default: /* all is done in order: what is not signalled by now never will be */
        return j->event->signalled ? OK : ZE_RESULT_ERROR_DEVICE_LOST;
    }
}

static ze_result_t append(ze_command_list_handle_t handle, const struct job *job)
{
    struct list *list = (struct list *)handle;
    ze_result_t result = OK;
    if (is_asked("lost") && job->kind == JOB_KERNEL) {
        return ZE_RESULT_ERROR_DEVICE_LOST;
    }
    if (list->closed) {
        return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    pthread_mutex_lock(&lock);
    if (list->immediate) {
        result = run_job((struct job *)job);
    } else {
        struct job *kept = aligned_alloc(64, sizeof *kept);
        *kept = *job;
        kept->next = NULL;
        *list->last = kept;
        list->last = &kept->next;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static ze_result_t append_kernel(ze_command_list_handle_t list, ze_kernel_handle_t kernel,
                                 const ze_group_count_t *groups, ze_event_handle_t signal,
                                 uint32_t num_waits, ze_event_handle_t *waits)
{
    struct job j = {.kind = JOB_KERNEL, .groups = groups->groupCountX};
    j.kernel = *(struct kernel *)kernel;
    return append(list, &j);
}

static ze_result_t append_copy(ze_command_list_handle_t list, void *to, const void *from,
                               size_t bytes, ze_event_handle_t signal, uint32_t num_waits,
                               ze_event_handle_t *waits)
{
    const struct job j = {.kind = JOB_COPY, .to = to, .from = from, .bytes = bytes};
    return append(list, &j);
}

static ze_result_t append_fill(ze_command_list_handle_t list, void *to, const void *pattern,
                               size_t pattern_bytes, size_t bytes, ze_event_handle_t signal,
                               uint32_t num_waits, ze_event_handle_t *waits)
{
    const struct job j = {
        .kind = JOB_FILL, .to = to, .bytes = bytes, .value = *(const unsigned char *)pattern};
    return pattern_bytes == 1 ? append(list, &j) : ZE_RESULT_ERROR_INVALID_SIZE;
}

static ze_result_t append_clock(ze_command_list_handle_t list, uint64_t *to,
                                ze_event_handle_t signal, uint32_t num_waits,
                                ze_event_handle_t *waits)
{
    const struct job j = {.kind = JOB_CLOCK, .to = (char *)to};
    return append(list, &j);
}

static ze_result_t append_barrier(ze_command_list_handle_t list, ze_event_handle_t signal,
                                  uint32_t num_waits, ze_event_handle_t *waits)
{
    return ((struct list *)list)->closed ? ZE_RESULT_ERROR_INVALID_ARGUMENT : OK;
}

static ze_result_t append_event(ze_command_list_handle_t list, ze_event_handle_t event,
                                enum job_kind kind)
{
    const struct job j = {.kind = kind, .event = (struct event *)event};
    return append(list, &j);
}

static ze_result_t append_signal(ze_command_list_handle_t list, ze_event_handle_t event)
{
    return append_event(list, event, JOB_SIGNAL);
}

static ze_result_t append_reset(ze_command_list_handle_t list, ze_event_handle_t event)
{
    return append_event(list, event, JOB_RESET);
}

static ze_result_t append_waits(ze_command_list_handle_t list, uint32_t count,
                                ze_event_handle_t *events)
{
    ze_result_t result = OK;
    for (uint32_t i = 0; result == OK && i < count; i++) {
        result = append_event(list, events[i], JOB_WAIT);
    }
    return result;
}

static ze_result_t make_list(bool immediate, ze_command_list_handle_t *handle)
{
    struct list *list = calloc(1, sizeof *list);
    list->immediate = immediate;
    list->last = &list->first;
    *handle = (ze_command_list_handle_t)list;
    return OK;
}

static ze_result_t list_create(ze_context_handle_t context, ze_device_handle_t device,
                               const ze_command_list_desc_t *desc, ze_command_list_handle_t *list)
{
    return desc->commandQueueGroupOrdinal == 1 ? make_list(false, list)
                                               : ZE_RESULT_ERROR_INVALID_ARGUMENT;
}

static ze_result_t list_create_immediate(ze_context_handle_t context, ze_device_handle_t device,
                                         const ze_command_queue_desc_t *desc,
                                         ze_command_list_handle_t *list)
{
    return desc->ordinal == 1 ? make_list(true, list) : ZE_RESULT_ERROR_INVALID_ARGUMENT;
}

static ze_result_t list_close(ze_command_list_handle_t list)
{
    ((struct list *)list)->closed = true;
    return OK;
}

static ze_result_t list_destroy(ze_command_list_handle_t handle)
{
    struct list *list = (struct list *)handle;
    for (struct job *j = list->first, *next; j != NULL; j = next) {
        next = j->next;
        free(j);
    }
    free(list);
    return OK;
}

/* ---- queues and events ---- */

static ze_result_t queue_create(ze_context_handle_t context, ze_device_handle_t device,
                                const ze_command_queue_desc_t *desc, ze_command_queue_handle_t *q)
{
    *q = (ze_command_queue_handle_t)&the_queue;
    return OK;
}

static ze_result_t queue_execute(ze_command_queue_handle_t queue, uint32_t count,
                                 ze_command_list_handle_t *lists, ze_fence_handle_t fence)
{
    ze_result_t result = is_asked("lost") ? ZE_RESULT_ERROR_DEVICE_LOST : OK;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < count; i++) {
        const struct list *list = (struct list *)lists[i];
        result = list->closed && !list->immediate ? result : ZE_RESULT_ERROR_INVALID_ARGUMENT;
        for (struct job *j = list->first; result == OK && j != NULL; j = j->next) {
            result = run_job(j);
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static ze_result_t queue_synchronize(ze_command_queue_handle_t queue, uint64_t timeout)
{
    return is_asked("lost") ? ZE_RESULT_ERROR_DEVICE_LOST : OK;
}

static ze_result_t pool_create(ze_context_handle_t context, const ze_event_pool_desc_t *desc,
                               uint32_t count, ze_device_handle_t *devices,
                               ze_event_pool_handle_t *pool)
{
    *pool = (ze_event_pool_handle_t)&the_pool;
    return OK;
}

static ze_result_t event_create(ze_event_pool_handle_t pool, const ze_event_desc_t *desc,
                                ze_event_handle_t *event)
{
    *event = calloc(1, sizeof(struct event));
    return OK;
}

static ze_result_t event_wait(ze_event_handle_t event, uint64_t timeout)
{
    return ((struct event *)event)->signalled ? OK : ZE_RESULT_ERROR_DEVICE_LOST;
}

/* ---- memory ---- */

static ze_result_t allocate(size_t bytes, ze_memory_type_t type, void **memory)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + 255) & ~(size_t)255;
    size_t mapped = (whole + page - 1) / page * page;
    uint64_t most = is_asked("little_memory") ? 1 << 20 : MEMORY_BYTES;
    if (type == ZE_MEMORY_TYPE_DEVICE && (bytes > most || allocated + bytes > most)) {
        return ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY;
    }
    char *base = mmap(NULL, mapped + page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct allocation *a = malloc(sizeof *a);
    if (base == MAP_FAILED || a == NULL || mprotect(base + mapped, page, PROT_NONE) != 0) {
        return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
    }
    *a = (struct allocation){base, base + mapped - whole, mapped + page, bytes, type, NULL};
    pthread_mutex_lock(&lock);
    allocated += type == ZE_MEMORY_TYPE_DEVICE ? bytes : 0;
    a->next = allocations;
    allocations = a;
    pthread_mutex_unlock(&lock);
    *memory = a->data;
    return OK;
}

static ze_result_t alloc_device(ze_context_handle_t context, const ze_device_mem_alloc_desc_t *desc,
                                size_t bytes, size_t alignment, ze_device_handle_t device,
                                void **memory)
{
    return alignment <= 256 ? allocate(bytes, ZE_MEMORY_TYPE_DEVICE, memory)
                            : ZE_RESULT_ERROR_UNSUPPORTED_ALIGNMENT;
}

static ze_result_t alloc_host(ze_context_handle_t context, const ze_host_mem_alloc_desc_t *desc,
                              size_t bytes, size_t alignment, void **memory)
{
    return alignment <= 256 ? allocate(bytes, ZE_MEMORY_TYPE_HOST, memory)
                            : ZE_RESULT_ERROR_UNSUPPORTED_ALIGNMENT;
}

/* The allocation that holds an address, and where it is linked. */
static struct allocation **find(const void *address)
{
    const char *at = address;
    for (struct allocation **a = &allocations; *a != NULL; a = &(*a)->next) {
        if (at >= (*a)->data && at < (*a)->data + (*a)->bytes) {
            return a;
        }
    }
    return NULL;
}

static ze_result_t mem_free(ze_context_handle_t context, void *memory)
{
    pthread_mutex_lock(&lock);
    struct allocation **a = find(memory), *gone = a != NULL ? *a : NULL;
    if (gone != NULL && gone->data == memory) {
        *a = gone->next;
        allocated -= gone->type == ZE_MEMORY_TYPE_DEVICE ? gone->bytes : 0;
        munmap(gone->base, gone->mapped);
        free(gone);
    } else {
        gone = NULL;
    }
    pthread_mutex_unlock(&lock);
    return gone != NULL ? OK : ZE_RESULT_ERROR_INVALID_ARGUMENT;
}

static ze_result_t mem_properties(ze_context_handle_t context, const void *address,
                                  ze_memory_allocation_properties_t *p, ze_device_handle_t *device)
{
    pthread_mutex_lock(&lock);
    struct allocation **a = find(address);
    p->type = a != NULL ? (*a)->type : ZE_MEMORY_TYPE_UNKNOWN;
    if (device != NULL) {
        *device = p->type == ZE_MEMORY_TYPE_DEVICE ? (ze_device_handle_t)&the_device : NULL;
    }
    pthread_mutex_unlock(&lock);
    return OK;
}

static ze_result_t mem_range(ze_context_handle_t context, const void *address, void **base,
                             size_t *bytes)
{
    pthread_mutex_lock(&lock);
    struct allocation **a = find(address);
    ze_result_t result = a != NULL ? OK : ZE_RESULT_ERROR_UNKNOWN;
    if (a != NULL && base != NULL) {
        *base = (*a)->data;
    }
    if (a != NULL && bytes != NULL) {
        *bytes = (*a)->bytes;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- ends ---- */

#define ENDS(name, handle_type, end)                                                               \
    static ze_result_t name(handle_type handle)                                                    \
    {                                                                                              \
        end;                                                                                       \
        return OK;                                                                                 \
    }
ENDS(module_destroy, ze_module_handle_t, free(handle))
ENDS(kernel_destroy, ze_kernel_handle_t, free(handle))
ENDS(event_destroy, ze_event_handle_t, free(handle))
ENDS(log_destroy, ze_module_build_log_handle_t, ) /* the module's */
ENDS(queue_destroy, ze_command_queue_handle_t, )  /* this and the next are static */
ENDS(pool_destroy, ze_event_pool_handle_t, )

/* ---- the tables that the loader fills in ---- */

#define TABLE(name, type, ...)                                                                     \
    EXPORTED ze_result_t zeGet##name##ProcAddrTable(ze_api_version_t version, type *t);            \
    ze_result_t zeGet##name##ProcAddrTable(ze_api_version_t version, type *t)                      \
    {                                                                                              \
        (void)version;                                                                             \
        *t = (type){__VA_ARGS__};                                                                  \
        return OK;                                                                                 \
    }
TABLE(Global, ze_global_dditable_t, .pfnInit = init)
TABLE(Driver, ze_driver_dditable_t, .pfnGet = driver_get)
TABLE(Device, ze_device_dditable_t, .pfnGet = device_get, .pfnGetProperties = device_properties,
      .pfnGetComputeProperties = compute_properties, .pfnGetModuleProperties = module_properties,
      .pfnGetMemoryProperties = memory_properties,
      .pfnGetCommandQueueGroupProperties = queue_properties,
      .pfnPciGetPropertiesExt = pci_properties)
TABLE(Context, ze_context_dditable_t, .pfnCreate = context_create)
TABLE(Module, ze_module_dditable_t, .pfnCreate = module_create, .pfnDestroy = module_destroy)
TABLE(ModuleBuildLog, ze_module_build_log_dditable_t, .pfnDestroy = log_destroy,
      .pfnGetString = log_text)
TABLE(Kernel, ze_kernel_dditable_t, .pfnCreate = kernel_create, .pfnDestroy = kernel_destroy,
      .pfnSetGroupSize = kernel_group_size, .pfnSetArgumentValue = kernel_argument,
      .pfnSetIndirectAccess = kernel_access)
TABLE(CommandList, ze_command_list_dditable_t, .pfnCreate = list_create,
      .pfnCreateImmediate = list_create_immediate, .pfnDestroy = list_destroy,
      .pfnClose = list_close, .pfnAppendBarrier = append_barrier,
      .pfnAppendEventReset = append_reset, .pfnAppendLaunchKernel = append_kernel,
      .pfnAppendMemoryCopy = append_copy, .pfnAppendMemoryFill = append_fill,
      .pfnAppendWriteGlobalTimestamp = append_clock, .pfnAppendSignalEvent = append_signal,
      .pfnAppendWaitOnEvents = append_waits)
TABLE(CommandQueue, ze_command_queue_dditable_t, .pfnCreate = queue_create,
      .pfnDestroy = queue_destroy, .pfnExecuteCommandLists = queue_execute,
      .pfnSynchronize = queue_synchronize)
TABLE(EventPool, ze_event_pool_dditable_t, .pfnCreate = pool_create, .pfnDestroy = pool_destroy)
TABLE(Event, ze_event_dditable_t, .pfnCreate = event_create, .pfnDestroy = event_destroy,
      .pfnHostSynchronize = event_wait)
TABLE(Mem, ze_mem_dditable_t, .pfnAllocDevice = alloc_device, .pfnAllocHost = alloc_host,
      .pfnFree = mem_free, .pfnGetAllocProperties = mem_properties, .pfnGetAddressRange = mem_range)
TABLE(Fence, ze_fence_dditable_t, NULL)
TABLE(Image, ze_image_dditable_t, NULL)
TABLE(PhysicalMem, ze_physical_mem_dditable_t, NULL)
TABLE(Sampler, ze_sampler_dditable_t, NULL)
TABLE(VirtualMem, ze_virtual_mem_dditable_t, NULL)
TABLE(DeviceExp, ze_device_exp_dditable_t, NULL)
TABLE(KernelExp, ze_kernel_exp_dditable_t, NULL)
TABLE(ImageExp, ze_image_exp_dditable_t, NULL)
TABLE(EventExp, ze_event_exp_dditable_t, NULL)
TABLE(FabricEdgeExp, ze_fabric_edge_exp_dditable_t, NULL)
TABLE(FabricVertexExp, ze_fabric_vertex_exp_dditable_t, NULL)

/* The loader insists on those of its tools and of its system management, too. */
#define NO_TABLE(name)                                                                             \
    EXPORTED ze_result_t name##ProcAddrTable(ze_api_version_t version, void *t);                   \
    ze_result_t name##ProcAddrTable(ze_api_version_t version, void *t)                             \
    {                                                                                              \
        (void)version, (void)t;                                                                    \
        return OK;                                                                                 \
    }
#define NO_TABLES(a, b, c) NO_TABLE(a) NO_TABLE(b) NO_TABLE(c)
NO_TABLES(zesGetDevice, zesGetDiagnostics, zesGetDriver)
NO_TABLES(zesGetEngine, zesGetFabricPort, zesGetFan)
NO_TABLES(zesGetFirmware, zesGetFrequency, zesGetLed)
NO_TABLES(zesGetMemory, zesGetPerformanceFactor, zesGetPower)
NO_TABLES(zesGetPsu, zesGetRas, zesGetScheduler)
NO_TABLES(zesGetStandby, zesGetTemperature, zetGetCommandList)
NO_TABLES(zetGetContext, zetGetDebug, zetGetDevice)
NO_TABLES(zetGetKernel, zetGetMetricGroupExp, zetGetMetricGroup)
NO_TABLES(zetGetMetric, zetGetMetricQueryPool, zetGetMetricQuery)
NO_TABLES(zetGetMetricStreamer, zetGetModule, zetGetTracerExp)
