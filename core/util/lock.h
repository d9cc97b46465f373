/* SPDX-License-Identifier: Apache-2.0 */
/* Locks under which foreign code may run: a plugin's, and the engine's through its log. That code
 * may be cancelled, or call back into the same lock. */
#ifndef CORE_UTIL_LOCK_H
#define CORE_UTIL_LOCK_H

#include <pthread.h>
#include <stdbool.h>

struct lock {
    pthread_mutex_t mutex;
    int cancel_state; /* the holder's before it */
};

static inline void lock_init(struct lock *lock)
{
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_ERRORCHECK);
    pthread_mutex_init(&lock->mutex, &kind);
    pthread_mutexattr_destroy(&kind);
}

static inline void lock_finish(struct lock *lock)
{
    pthread_mutex_destroy(&lock->mutex);
}

/* False: this thread holds it already, further out in the stack, and gives it there. */
static inline bool lock_take(struct lock *lock)
{
    int before;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    if (pthread_mutex_lock(&lock->mutex) != 0) {
        pthread_setcancelstate(before, NULL);
        return false;
    }
    lock->cancel_state = before;
    return true;
}

static inline void lock_give(struct lock *lock)
{
    const int before = lock->cancel_state;
    pthread_mutex_unlock(&lock->mutex);
    pthread_setcancelstate(before, NULL);
}

#endif
