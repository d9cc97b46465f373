/* SPDX-License-Identifier: Apache-2.0 */
/* The default parallel_for: every item once, workers apart, many callers, nested loops, forks. And
 * what a log gets. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "host/host.h"
#include "support/test.h"

#define NUM_THREADS 4
#define MAX_ITEMS 5000

static struct host_services services;
static struct attn_host host;

struct loop {
    struct pool *pool;
    int64_t grain;
    int64_t count;
    atomic_int hits[MAX_ITEMS];
    atomic_int inside[NUM_THREADS];
    atomic_int wrong;
};

static void body(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    struct loop *loop = argument;
    if (worker < 0 || worker >= NUM_THREADS) {
        atomic_fetch_add(&loop->wrong, 1);
        return;
    }
    if (atomic_fetch_add(&loop->inside[worker], 1) != 0 ||
        (end - begin < loop->grain && end != loop->count)) {
        atomic_fetch_add(&loop->wrong, 1);
    }
    for (int64_t i = begin; i < end; i++) {
        atomic_fetch_add(&loop->hits[i], 1);
    }
    atomic_fetch_sub(&loop->inside[worker], 1);
}

static atomic_int sleepers;
static atomic_size_t smallest_stack, largest_stack; /* the workers' */

/* Every item is a cancellation point. */
static void sleeping_body(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    for (int64_t i = begin; i < end; i++) {
        atomic_fetch_add(&sleepers, 1);
        usleep(500);
    }
    if (worker > 0) {
        pthread_attr_t attributes;
        size_t bytes = 0;
        pthread_getattr_np(pthread_self(), &attributes);
        pthread_attr_getstacksize(&attributes, &bytes);
        pthread_attr_destroy(&attributes);
        if (bytes < atomic_load(&smallest_stack)) {
            atomic_store(&smallest_stack, bytes);
        }
        if (bytes > atomic_load(&largest_stack)) {
            atomic_store(&largest_stack, bytes);
        }
    }
}

/* 0 if the loop was right. */
static int run_loop(struct loop *loop, struct pool *pool, int64_t count, int64_t grain)
{
    int wrong = 0;
    memset(loop, 0, sizeof *loop);
    loop->pool = pool;
    loop->grain = grain;
    loop->count = count;
    pool_run(pool, count, grain, body, loop);
    wrong = atomic_load(&loop->wrong);
    for (int64_t i = 0; i < MAX_ITEMS; i++) {
        wrong += atomic_load(&loop->hits[i]) != (i < count);
    }
    return wrong;
}

TEST(every_item_once)
{
    static const int64_t counts[] = {0, 1, 2, 3, 7, 64, 1000, MAX_ITEMS};
    static const int64_t grains[] = {1, 3, 100, MAX_ITEMS};
    struct pool *pool = pool_create(&host, NUM_THREADS);
    struct loop *loop = malloc(sizeof *loop);
    assert_non_null(pool);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (size_t j = 0; j < sizeof grains / sizeof *grains; j++) {
            assert_int_equal(run_loop(loop, pool, counts[i], grains[j]), 0);
        }
    }
    free(loop);
    pool_destroy(pool);
}

enum { ALONE = -1000 };

/* Items rendezvous with one another, which only works if several threads are really there; signals
 * are not for those of the pool. */
static void wait_for_others(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    atomic_int *arrived = argument;
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    for (int64_t i = begin; i < end; i++) {
        int tries = 0;
        atomic_fetch_add(arrived, 1);
        while (atomic_load(arrived) < 2 && ++tries < 20000) {
            usleep(100);
        }
        if (tries == 20000 || (worker > 0) != sigismember(&blocked, SIGUSR1)) {
            atomic_store(arrived, ALONE);
        }
    }
}

TEST(runs_in_several_threads)
{
    struct pool *pool = pool_create(&host, 2);
    atomic_int arrived = 0;

    pool_run(pool, 2, 1, wait_for_others, &arrived);
    assert_int_equal(atomic_load(&arrived), 2);
    usleep(20000); /* the worker sleeps by now and has to be woken */
    atomic_store(&arrived, 0);
    pool_run(pool, 2, 1, wait_for_others, &arrived);
    assert_int_equal(atomic_load(&arrived), 2);
    pool_destroy(pool);
}

static void *many_loops(void *argument)
{
    struct pool *pool = argument;
    struct loop *loop = malloc(sizeof *loop);
    intptr_t wrong = 0;

    for (int i = 0; i < 150; i++) {
        wrong += run_loop(loop, pool, 1 + (i * 37) % 900, 1 + i % 5);
    }
    free(loop);
    return (void *)wrong;
}

TEST(many_callers)
{
    struct pool *pool = pool_create(&host, NUM_THREADS);
    pthread_t threads[6];
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, many_loops, pool), 0);
    }
    for (size_t i = 0; i < 6; i++) {
        void *wrong = NULL;
        pthread_join(threads[i], &wrong);
        assert_null(wrong);
    }
    pool_destroy(pool);
}

static void inner(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    atomic_fetch_add((atomic_llong *)argument, end - begin);
}

struct outer {
    struct pool *pool;
    atomic_llong items;
};

static void outer_body(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    struct outer *outer = argument;
    for (int64_t i = begin; i < end; i++) {
        pool_run(outer->pool, 10, 1, inner, &outer->items);
    }
}

TEST(nested_loops)
{
    struct outer outer = {pool_create(&host, NUM_THREADS), 0};
    pool_run(outer.pool, 50, 1, outer_body, &outer);
    assert_int_equal(atomic_load(&outer.items), 500);
    pool_destroy(outer.pool);
}

/* In the child: the pool works and has threads of its own. Exit code 0 if so. */
static int child(struct pool *pool)
{
    atomic_int arrived = 0;
    struct loop *loop = malloc(sizeof *loop);
    int wrong = run_loop(loop, pool, 1000, 1);
    pool_run(pool, 2, 1, wait_for_others, &arrived);
    wrong += atomic_load(&arrived) != 2;
    free(loop);
    pool_destroy(pool);
    return wrong != 0;
}

TEST(fork_before_and_after_first_use)
{
#if defined(__SANITIZE_THREAD__)
    (void)state; /* TSan ends a child of a threaded process that starts threads */
    skip();
#else
    OWNED(memory_end) struct loop *loop = malloc(sizeof *loop);

    for (int used = 0; used < 2; used++) {
        struct pool *pool = pool_create(&host, 2);
        if (used) {
            assert_int_equal(run_loop(loop, pool, 1000, 1), 0);
        }
        if (test_apart()) {
            _exit(child(pool));
        }
        assert_int_equal(run_loop(loop, pool, 1000, 1), 0);
        pool_destroy(pool);
    }
#endif
}

TEST(destroy_accepts_null)
{
    pool_destroy(NULL);
    pool_destroy(pool_create(&host, NUM_THREADS)); /* never used */
}

static void *cancelled_caller(void *argument)
{
    struct pool *pool = argument;
    pthread_testcancel(); /* not yet */
    pool_run(pool, 64, 1, sleeping_body, NULL);
    pthread_testcancel();
    return NULL;
}

/* The pool is as good as new after a caller was cancelled in the middle of a loop. */
TEST(cancelled_in_a_loop)
{
    struct pool *pool = pool_create(&host, NUM_THREADS);
    pthread_t thread;
    void *result = NULL;
    assert_non_null(pool);
    atomic_store(&sleepers, 0);
    assert_int_equal(pthread_create(&thread, NULL, cancelled_caller, pool), 0);
    while (atomic_load(&sleepers) == 0) {
        usleep(100);
    }
    pthread_cancel(thread);
    assert_int_equal(pthread_join(thread, &result), 0);
    assert_ptr_equal(result, PTHREAD_CANCELED);
    assert_int_equal(atomic_load(&sleepers), 64);
    atomic_store(&smallest_stack, SIZE_MAX);
    atomic_store(&largest_stack, 0);
    pool_run(pool, 64, 1, sleeping_body, NULL);
    assert_true(atomic_load(&largest_stack) > 0); /* other threads take part again */
    assert_true(atomic_load(&smallest_stack) >= 8 * ATTN_STEP_STACK_BYTES);
    assert_true(atomic_load(&largest_stack) <= (size_t)1 << 20); /* and not the process's 8 MiB */
    pool_destroy(pool);
}

static char heard[256];

static void hear(void *user, int32_t level, const char *who, const char *message)
{
    snprintf(heard, sizeof heard, "%d %s %s", level, who, message);
}

/* No level above the one that was asked for, and no control character. */
TEST(a_log_gets_clean_lines_of_its_level)
{
    struct host_services own = {.engine = {.log = hear}, .log_level = ATTN_LOG_WARN};
    struct attn_host logging;
    host_init(&logging, &own, 1);
    logging.log(logging.user, ATTN_LOG_WARN + 1, "who", "too fine");
    assert_string_equal(heard, "");
    logging.log(logging.user, ATTN_LOG_WARN, "w\to", "\x1b[31m\n");
    assert_string_equal(heard, "1 w?o ?[31m?");
}

int main(void)
{
    host_init(&host, &services, NUM_THREADS);
    return test_run(NULL, NULL);
}
