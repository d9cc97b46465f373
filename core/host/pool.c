/* SPDX-License-Identifier: Apache-2.0 */
/* A loop is open while gate >= 0; gate then counts the workers inside. A worker that wakes up late
 * finds the gate shut, so a caller waits for no worker that has not begun. */
#include "host/host.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

/* A decode kernel takes about 100 us and the next one follows within some microseconds, so a
 * worker looks for work for about 50 us before it sleeps. */
#define SPINS_BEFORE_SLEEP 2000
/* Slices per thread that are aimed at: enough to even out, few enough to be cheap. */
#define SLICES_PER_THREAD 2

/* What threads get next to what the system takes of it: a body has ATTN_STEP_STACK_BYTES. */
#define STACK_BYTES ((size_t)512 << 10)

#define GATE_SHUT (-1)

struct worker {
    struct pool *pool;
    pthread_t thread;
    int32_t index; /* 1 .. num_threads - 1; 0 is the caller */
};

struct job {
    int64_t count;
    int64_t grain;
    attn_parallel_body *body;
    void *argument;
};

struct pool {
    const struct attn_host *host;
    int32_t num_threads;
    int32_t num_started; /* workers that run; written by the starter only */
    struct worker *workers;
    /* 0: never started; p: running in process p; -p: being started there */
    atomic_long owner;
    atomic_flag busy;
    struct job job; /* written while the gate is shut */
    _Alignas(64) atomic_int gate;
    _Alignas(64) atomic_llong next; /* first item that is not taken */
    _Alignas(64) atomic_uint generation;
    atomic_int sleepers;
    atomic_int caller_waits;
    atomic_bool stop;
    pthread_mutex_t lock;
    pthread_cond_t work;
    pthread_cond_t done;
};

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static bool take(struct pool *pool, int64_t *begin, int64_t *end)
{
    const struct job *job = &pool->job;
    long long next = atomic_load_explicit(&pool->next, memory_order_relaxed);
    long long size = 0;
    do {
        if (next >= job->count) {
            return false;
        }
        size = (job->count - next) / ((long long)pool->num_threads * SLICES_PER_THREAD);
        size = size < job->grain ? job->grain : size;
        size = size > job->count - next ? job->count - next : size;
    } while (!atomic_compare_exchange_weak_explicit(&pool->next, &next, next + size,
                                                    memory_order_relaxed, memory_order_relaxed));
    *begin = next;
    *end = next + size;
    return true;
}

static void work(struct pool *pool, int32_t index)
{
    int64_t begin, end;
    while (take(pool, &begin, &end)) {
        pool->job.body(pool->job.argument, begin, end, index);
    }
}

static bool enter(struct pool *pool)
{
    int inside = atomic_load(&pool->gate);
    while (inside != GATE_SHUT) {
        if (atomic_compare_exchange_weak(&pool->gate, &inside, inside + 1)) {
            return true;
        }
    }
    return false;
}

static void leave(struct pool *pool)
{
    if (atomic_fetch_sub(&pool->gate, 1) == 1 && atomic_load(&pool->caller_waits) != 0) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_signal(&pool->done);
        pthread_mutex_unlock(&pool->lock);
    }
}

/* Returns the generation that came after `seen`. */
static unsigned wait_for_work(struct pool *pool, unsigned seen)
{
    for (int i = 0; i < SPINS_BEFORE_SLEEP; i++) {
        unsigned generation = atomic_load(&pool->generation);
        if (generation != seen) {
            return generation;
        }
        relax();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(&pool->generation) == seen) {
        pthread_cond_wait(&pool->work, &pool->lock);
    }
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->lock);
    return atomic_load(&pool->generation);
}

static void *worker_main(void *argument)
{
    struct worker *worker = argument;
    struct pool *pool = worker->pool;
    unsigned seen = 0;
    for (;;) {
        seen = wait_for_work(pool, seen);
        if (atomic_load(&pool->stop)) {
            return NULL;
        }
        if (enter(pool)) {
            work(pool, worker->index);
            leave(pool);
        }
    }
}

static void wake_workers(struct pool *pool)
{
    atomic_fetch_add(&pool->generation, 1);
    if (atomic_load(&pool->sleepers) > 0) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->lock);
    }
}

/* Shuts the gate once no worker is inside. */
static void wait_until_done(struct pool *pool)
{
    int empty = 0;
    for (int i = 0; i < SPINS_BEFORE_SLEEP; i++) {
        empty = 0;
        if (atomic_compare_exchange_strong(&pool->gate, &empty, GATE_SHUT)) {
            return;
        }
        relax();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->caller_waits, 1);
    empty = 0;
    while (!atomic_compare_exchange_strong(&pool->gate, &empty, GATE_SHUT)) {
        pthread_cond_wait(&pool->done, &pool->lock);
        empty = 0;
    }
    atomic_store(&pool->caller_waits, 0);
    pthread_mutex_unlock(&pool->lock);
}

/* Everything that threads of this process share; after a fork the old state is void, since the
 * threads that held it are gone. */
static void reset(struct pool *pool)
{
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    atomic_store(&pool->gate, GATE_SHUT);
    atomic_store(&pool->generation, 0);
    atomic_store(&pool->sleepers, 0);
    atomic_store(&pool->caller_waits, 0);
    atomic_store(&pool->stop, false);
    atomic_flag_clear(&pool->busy);
    pool->num_started = 0;
}

/* A stack of stated size, whatever the process's limit or libc says; the system's share grows with
 * the thread-local storage of libraries. False: the system's own. */
static bool set_stack(pthread_attr_t *attributes)
{
    const long least = sysconf(_SC_THREAD_STACK_MIN);
    return pthread_attr_init(attributes) == 0 &&
           pthread_attr_setstacksize(attributes, STACK_BYTES + (least > 0 ? (size_t)least : 0)) ==
               0;
}

/* As many workers as the system grants: with none the loops run in their callers. */
static void start_workers(struct pool *pool)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    const bool sized = set_stack(&attributes);
    /* The engine's signals are for the engine's threads. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int32_t i = 1; i < pool->num_threads; i++) {
        struct worker *worker = &pool->workers[pool->num_started];
        worker->pool = pool;
        worker->index = pool->num_started + 1;
        if (pthread_create(&worker->thread, sized ? &attributes : NULL, worker_main, worker) != 0) {
            break;
        }
        pool->num_started++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* True if the workers of this process run. False while another thread starts them. */
static bool ensure_started(struct pool *pool)
{
    long self = (long)getpid();
    long owner = atomic_load_explicit(&pool->owner, memory_order_acquire);
    if (owner == self) {
        return true;
    }
    if (owner == -self || !atomic_compare_exchange_strong(&pool->owner, &owner, -self)) {
        return false;
    }
    reset(pool);
    start_workers(pool);
    atomic_store_explicit(&pool->owner, self, memory_order_release);
    return true;
}

struct pool *pool_create(const struct attn_host *host, int32_t num_threads)
{
    struct pool *pool = host_alloc(host, sizeof *pool);
    if (pool == NULL) {
        return NULL;
    }
    pool->host = host;
    pool->num_threads = num_threads;
    pool->workers = host_alloc(host, (size_t)(num_threads - 1) * sizeof *pool->workers);
    if (pool->workers == NULL && num_threads > 1) {
        host_free(host, pool, sizeof *pool);
        return NULL;
    }
    atomic_init(&pool->owner, 0);
    reset(pool);
    return pool;
}

void pool_destroy(struct pool *pool)
{
    if (pool == NULL) {
        return;
    }
    if (atomic_load(&pool->owner) == (long)getpid()) {
        atomic_store(&pool->stop, true);
        wake_workers(pool);
        for (int32_t i = 0; i < pool->num_started; i++) {
            pthread_join(pool->workers[i].thread, NULL);
        }
        pthread_cond_destroy(&pool->done);
        pthread_cond_destroy(&pool->work);
        pthread_mutex_destroy(&pool->lock);
    }
    host_free(pool->host, pool->workers, (size_t)(pool->num_threads - 1) * sizeof *pool->workers);
    host_free(pool->host, pool, sizeof *pool);
}

void pool_run(struct pool *pool, int64_t count, int64_t grain, attn_parallel_body *body,
              void *argument)
{
    if (count <= 0) {
        return;
    }
    grain = grain < 1 ? 1 : grain;
    if (count <= grain || pool->num_threads == 1) {
        body(argument, 0, count, 0);
        return;
    }
    /* A caller that is cancelled in the loop ends after it: its workers and the pool are free. */
    int cancelled_before;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelled_before);
    if (!ensure_started(pool) ||
        atomic_flag_test_and_set_explicit(&pool->busy, memory_order_acquire)) {
        body(argument, 0, count, 0);
        pthread_setcancelstate(cancelled_before, NULL);
        return;
    }
    pool->job = (struct job){count, grain, body, argument};
    atomic_store(&pool->next, 0);
    atomic_store(&pool->gate, 0);
    wake_workers(pool);
    work(pool, 0);
    wait_until_done(pool);
    atomic_flag_clear_explicit(&pool->busy, memory_order_release);
    pthread_setcancelstate(cancelled_before, NULL);
}
