/* SPDX-License-Identifier: Apache-2.0 */
#undef _FILE_OFFSET_BITS /* mmap and mmap64 are two names here */
#include "harness/watch.h"

#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/auxv.h>

static atomic_long allocations;
static _Thread_local long locks;
static bool drivers_run;
static uintptr_t loader_begin, loader_end; /* its code and data in this process */

void watch_allocation(void)
{
    atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
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
}

bool watch_allocated(const struct watch *watch)
{
    return atomic_load(&allocations) != watch->allocations;
}

attn_status watch_end(const struct watch *watch, struct backend *backend, attn_status status,
                      struct attn_error *error)
{
    const char *broken = watch_allocated(watch)  ? "a step allocated memory"
                         : locks != watch->locks ? "a step took a lock"
                                                 : NULL;
    bool judged = backend->stepped && !drivers_run;
    backend->stepped = true;
    if (status != ATTN_OK || broken == NULL || !judged) {
        return status;
    }
    error->status = ATTN_ERROR_PLUGIN;
    snprintf(error->field, sizeof error->field, "step");
    snprintf(error->message, sizeof error->message, "%s", broken);
    return ATTN_ERROR_PLUGIN;
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

#if defined(__GLIBC__) && !defined(SANITIZED)

#include <dlfcn.h>
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
static void count_caller(const void *caller)
{
    if ((uintptr_t)caller < loader_begin || (uintptr_t)caller >= loader_end) {
        watch_allocation();
    }
}

#define ALLOCATES(type, name, parameters, ...)                                                     \
    PASSED_ON(count_caller(__builtin_return_address(0)), type, name, parameters, __VA_ARGS__)
#define LOCKS(name, parameters, ...) PASSED_ON(locks++, int, name, parameters, __VA_ARGS__)

ALLOCATES(void *, malloc, (size_t size), size)
ALLOCATES(void *, calloc, (size_t count, size_t size), count, size)
ALLOCATES(void *, realloc, (void *memory, size_t size), memory, size)
ALLOCATES(void *, aligned_alloc, (size_t alignment, size_t size), alignment, size)
ALLOCATES(void *, memalign, (size_t alignment, size_t size), alignment, size)
ALLOCATES(int, posix_memalign, (void **memory, size_t alignment, size_t size), memory, alignment,
          size)
ALLOCATES(void *, mmap,
          (void *address, size_t length, int protection, int flags, int file, off_t offset),
          address, length, protection, flags, file, offset)
ALLOCATES(void *, mmap64,
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
