/* SPDX-License-Identifier: Apache-2.0 */
#undef _FILE_OFFSET_BITS /* mmap and mmap64 are two names here */
#include "harness/watch.h"

#include <alloca.h>
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/auxv.h>

static atomic_long allocations;
static atomic_size_t allocated_bytes;
static _Thread_local long locks;
/* The caller of the first since watch_begin; 0: there was none. */
static _Atomic(uintptr_t) first_allocation;
static atomic_size_t first_bytes;
static _Thread_local const void *first_lock;
static bool drivers_run;
static uintptr_t loader_begin, loader_end; /* its code and data in this process */

void watch_allocation(size_t size, const void *caller)
{
    uintptr_t none = 0;
    atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&allocated_bytes, size, memory_order_relaxed);
    if (atomic_compare_exchange_strong(&first_allocation, &none, (uintptr_t)caller)) {
        atomic_store(&first_bytes, size);
    }
}

static int find_loader(struct dl_phdr_info *object, size_t size, void *base)
{
    if (object->dlpi_addr != *(const uintptr_t *)base) {
        return 0;
    }
    loader_begin = object->dlpi_addr;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        uintptr_t end = loader_begin + object->dlpi_phdr[i].p_vaddr + object->dlpi_phdr[i].p_memsz;
        loader_end = object->dlpi_phdr[i].p_type == PT_LOAD && end > loader_end ? end : loader_end;
    }
    return 1;
}

void watch_init(int32_t device_type)
{
    uintptr_t base = getauxval(AT_BASE);
    drivers_run = device_type != ATTN_DEVICE_CPU;
    (void)dl_iterate_phdr(find_loader, &base);
}

void watch_begin(struct watch *watch)
{
    *watch = (struct watch){atomic_load(&allocations), locks};
    atomic_store(&allocated_bytes, 0);
    atomic_store(&first_allocation, 0);
    first_lock = NULL;
}

/* "dgemm_ in /usr/lib/libopenblas.so.0", or where in the library. */
static void name_caller(const void *caller, char *text, size_t size)
{
    Dl_info info;
    if (caller == NULL || dladdr(caller, &info) == 0 || info.dli_fname == NULL) {
        snprintf(text, size, "%p", caller);
    } else if (info.dli_sname != NULL) {
        snprintf(text, size, "%s in %s", info.dli_sname, info.dli_fname);
    } else {
        snprintf(text, size, "%s+0x%zx", info.dli_fname,
                 (size_t)((uintptr_t)caller - (uintptr_t)info.dli_fbase));
    }
}

static bool is_judged(const struct backend *backend)
{
    return !drivers_run && !(backend->caps.features & ATTN_FEATURE_STEP_ALLOCATES);
}

bool watch_allocated(const struct watch *watch, const struct backend *backend, char *why,
                     size_t size)
{
    const long count = atomic_load(&allocations) - watch->allocations;
    char caller[512];
    if (count == 0 || !is_judged(backend)) {
        return false;
    }
    name_caller((const void *)atomic_load(&first_allocation), caller, sizeof caller);
    snprintf(why, size,
             "a step allocated memory: %ld allocations of %zu bytes in all, the first of %zu bytes "
             "by %s; a backend whose libraries do so declares STEP_ALLOCATES",
             count, atomic_load(&allocated_bytes), atomic_load(&first_bytes), caller);
    return true;
}

attn_status watch_end(const struct watch *watch, struct backend *backend, attn_status status,
                      struct attn_error *error)
{
    const bool judged = backend->stepped && is_judged(backend);
    char caller[512];
    backend->stepped = true;
    if (status != ATTN_OK || !judged) {
        return status;
    }
    if (!watch_allocated(watch, backend, error->message, sizeof error->message)) {
        if (locks == watch->locks) {
            return status;
        }
        name_caller(first_lock, caller, sizeof caller);
        snprintf(error->message, sizeof error->message, "a step took a lock: %s", caller);
    }
    snprintf(error->field, sizeof error->field, "step");
    return error->status = ATTN_ERROR_PLUGIN;
}

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ||                         \
    __has_feature(memory_sanitizer)
#define SANITIZED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#endif

#define SEEN ((size_t)256 << 10)
#define WORDS (SEEN / sizeof(uint64_t))
#define PATTERN UINT64_C(0x5a17ac7ed57ac4a5)

#if defined(SANITIZED)
#define MEASURED 0
#else
#define MEASURED 1
#endif

/* Either paints the area below its own frame or counts what of it is no longer painted. */
static __attribute__((noinline)) size_t visit(int paint)
{
    volatile uint64_t *area = alloca(SEEN);
    size_t untouched = 0;
    for (size_t i = 0; i < WORDS && paint; i++) {
        area[i] = PATTERN;
    }
    while (!paint && untouched < WORDS && area[untouched] == PATTERN) {
        untouched++;
    }
    return SEEN - untouched * sizeof *area;
}

/* Measurements of this thread that have begun: painting again would hide what an outer one has
 * to see, which covers the inner ones. */
static _Thread_local int begun;

void stack_paint(void)
{
    if (begun++ == 0 && MEASURED) {
        (void)visit(1);
    }
}

size_t stack_used(void)
{
    return --begun == 0 && MEASURED ? visit(0) : 0;
}

#if defined(__GLIBC__) && !defined(SANITIZED)

#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <threads.h>

/* A function of the C library, found by every library first here: counted, then called where the
 * next library (libc, or a sanitizer that was preloaded for the plugin) has it. */
#define PASSED_ON(count, type, name, parameters, ...)                                              \
    __attribute__((visibility("default"))) type name parameters                                    \
    {                                                                                              \
        static _Atomic(uintptr_t) next;                                                            \
        uintptr_t function = atomic_load_explicit(&next, memory_order_relaxed);                    \
        if (function == 0) {                                                                       \
            function = (uintptr_t)dlsym(RTLD_NEXT, #name);                                         \
            atomic_store_explicit(&next, function, memory_order_relaxed);                          \
        }                                                                                          \
        count;                                                                                     \
        return ((type(*) parameters)function)(__VA_ARGS__);                                        \
    }

/* Not for the loader: a thread that first meets a library gets its thread-local storage there. */
static void count_caller(size_t size, const void *caller)
{
    if ((uintptr_t)caller < loader_begin || (uintptr_t)caller >= loader_end) {
        watch_allocation(size, caller);
    }
}

static void count_lock(const void *caller)
{
    first_lock = first_lock == NULL ? caller : first_lock;
    locks++;
}

#define ALLOCATES(bytes, type, name, parameters, ...)                                              \
    PASSED_ON(count_caller(bytes, __builtin_return_address(0)), type, name, parameters, __VA_ARGS__)
#define LOCKS(name, parameters, ...)                                                               \
    PASSED_ON(count_lock(__builtin_return_address(0)), int, name, parameters, __VA_ARGS__)

ALLOCATES(size, void *, malloc, (size_t size), size)
ALLOCATES(count *size, void *, calloc, (size_t count, size_t size), count, size)
ALLOCATES(size, void *, realloc, (void *memory, size_t size), memory, size)
ALLOCATES(size, void *, aligned_alloc, (size_t alignment, size_t size), alignment, size)
ALLOCATES(size, void *, memalign, (size_t alignment, size_t size), alignment, size)
ALLOCATES(size, int, posix_memalign, (void **memory, size_t alignment, size_t size), memory,
          alignment, size)
ALLOCATES(length, void *, mmap,
          (void *address, size_t length, int protection, int flags, int file, off_t offset),
          address, length, protection, flags, file, offset)
ALLOCATES(length, void *, mmap64,
          (void *address, size_t length, int protection, int flags, int file, off64_t offset),
          address, length, protection, flags, file, offset)
LOCKS(pthread_mutex_lock, (pthread_mutex_t * mutex), mutex)
LOCKS(pthread_mutex_timedlock, (pthread_mutex_t * mutex, const struct timespec *until), mutex,
      until)
LOCKS(pthread_rwlock_rdlock, (pthread_rwlock_t * lock), lock)
LOCKS(pthread_rwlock_wrlock, (pthread_rwlock_t * lock), lock)
LOCKS(pthread_spin_lock, (pthread_spinlock_t * lock), lock)
LOCKS(pthread_cond_wait, (pthread_cond_t * condition, pthread_mutex_t *mutex), condition, mutex)
LOCKS(sem_wait, (sem_t * semaphore), semaphore)
LOCKS(mtx_lock, (mtx_t * mutex), mutex)

#endif
