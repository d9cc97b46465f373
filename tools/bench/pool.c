/* SPDX-License-Identifier: Apache-2.0 */
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "support/services.h"

/* A worker looks for the next loop for some ten microseconds before it sleeps: kernels follow each
 * other, and ceilings that come between must find the CPUs free. */
#define SPINS 20000

struct worker {
    struct pool *pool;
    pthread_t thread;
    int32_t index;
};

struct pool {
    struct attn_host host;
    struct worker *workers;
    int32_t num_started; /* index 0 is the caller */
    int64_t count;
    int32_t parts;
    attn_parallel_body *body;
    void *argument;
    atomic_uint generation;
    atomic_int pending;
    atomic_bool stop;
    pthread_mutex_t lock;
    pthread_cond_t work;
};

static void do_part(struct pool *pool, int32_t index)
{
    if (index < pool->parts) {
        int64_t begin = pool->count * index / pool->parts;
        int64_t end = pool->count * (index + 1) / pool->parts;
        pool->body(pool->argument, begin, end, index);
    }
}

static void *worker_main(void *argument)
{
    struct worker *worker = argument;
    struct pool *pool = worker->pool;
    unsigned seen = 0;
    for (;;) {
        for (int32_t i = 0; i < SPINS && atomic_load(&pool->generation) == seen; i++) {
        }
        pthread_mutex_lock(&pool->lock);
        while (atomic_load(&pool->generation) == seen) {
            pthread_cond_wait(&pool->work, &pool->lock);
        }
        pthread_mutex_unlock(&pool->lock);
        seen = atomic_load(&pool->generation);
        if (atomic_load(&pool->stop)) {
            return NULL;
        }
        do_part(pool, worker->index);
        atomic_fetch_sub(&pool->pending, 1);
    }
}

/* Every worker takes part in every generation, if only to say that it has seen it. */
static void wake(struct pool *pool)
{
    atomic_store(&pool->pending, pool->num_started - 1);
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->generation, 1);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

static void parallel_for(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                         void *argument)
{
    struct pool *pool = user;
    int64_t most = grain > 0 ? (count + grain - 1) / grain : count;
    if (count <= 0) {
        return;
    }
    if (pool->num_started == 1 || most <= 1) {
        body(argument, 0, count, 0);
        return;
    }
    pool->count = count;
    pool->parts = most < pool->num_started ? (int32_t)most : pool->num_started;
    pool->body = body;
    pool->argument = argument;
    wake(pool);
    do_part(pool, 0);
    while (atomic_load(&pool->pending) > 0) {
    }
}

static void log_warnings(void *user, int32_t level, const char *who, const char *message)
{
    (void)user;
    if (level <= ATTN_LOG_WARN) {
        fprintf(stderr, "attn-bench: %s: %s\n", who, message);
    }
}

struct pool *pool_create(int32_t num_threads)
{
    struct pool *pool = calloc(1, sizeof *pool);
    num_threads = num_threads > 0 ? num_threads : 1;
    if (pool == NULL) {
        return NULL;
    }
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pool->host = (struct attn_host){.struct_size = sizeof pool->host,
                                    .user = pool,
                                    .log = log_warnings,
                                    .allocate = services_allocate,
                                    .release = services_release,
                                    .parallel_for = parallel_for,
                                    .num_threads = num_threads};
    pool->workers = calloc((size_t)num_threads, sizeof *pool->workers);
    pool->num_started = 1;
    while (pool->workers != NULL && pool->num_started < num_threads) {
        struct worker *worker = &pool->workers[pool->num_started];
        *worker = (struct worker){.pool = pool, .index = pool->num_started};
        if (pthread_create(&worker->thread, NULL, worker_main, worker) != 0) {
            break;
        }
        pool->num_started++;
    }
    if (pool->workers == NULL || pool->num_started < num_threads) {
        pool_destroy(pool);
        return NULL;
    }
    return pool;
}

void pool_destroy(struct pool *pool)
{
    if (pool == NULL) {
        return;
    }
    atomic_store(&pool->stop, true);
    wake(pool);
    for (int32_t i = 1; i < pool->num_started; i++) {
        pthread_join(pool->workers[i].thread, NULL);
    }
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}

const struct attn_host *pool_host(const struct pool *pool)
{
    return &pool->host;
}
