/* SPDX-License-Identifier: Apache-2.0 */
/* Sources: NVIDIA cuDNN Backend API, "Graph Library". */
#include "cudnn/library.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "common/library.h"

#define NAME "libcudnn.so.9"
#define SIGNALS 32

/* Signals are the process's, whichever instance makes a plan. */
static pthread_mutex_t changes = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before[SIGNALS];

static int32_t major_of(int32_t version)
{
    return version / 10000;
}

static int32_t minor_of(int32_t version)
{
    return version / 100 % 100;
}

int cudnn_open(struct cudnn_library *library, char cause[CUDNN_CAUSE_BYTES])
{
    void *handle = dlopen(NAME, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        snprintf(cause, CUDNN_CAUSE_BYTES, "%s is not there; %d.%d or newer is wanted", NAME,
                 major_of(CUDNN_OLDEST), minor_of(CUDNN_OLDEST));
        return 0;
    }
    int found = 1;
#define CUDNN_FIND(name, result, arguments)                                                        \
    found &= library_find(handle, "cudnn" #name, (void *)&library->name);
    CUDNN_FUNCTIONS(CUDNN_FIND)
#undef CUDNN_FIND
    library->version = library->GetVersion != NULL ? (int32_t)library->GetVersion() : 0;
    if (found && library->version >= CUDNN_OLDEST) {
        return 1;
    }
    snprintf(cause, CUDNN_CAUSE_BYTES, "%s is version %d.%d.%d; %d.%d or newer is wanted", NAME,
             major_of(library->version), minor_of(library->version), library->version % 100,
             major_of(CUDNN_OLDEST), minor_of(CUDNN_OLDEST));
    dlclose(handle);
    return 0;
}

static void read_signals(struct sigaction actions[SIGNALS])
{
    memset(actions, 0, SIGNALS * sizeof *actions); /* libc fills a part of a mask */
    for (int i = 1; i < SIGNALS; i++) {
        sigaction(i, NULL, &actions[i]);
    }
}

void cudnn_begin_changes(void)
{
    pthread_mutex_lock(&changes);
    read_signals(before);
}

void cudnn_end_changes(void)
{
    struct sigaction now[SIGNALS];
    read_signals(now);
    for (int i = 1; i < SIGNALS; i++) {
        if (now[i].sa_handler != before[i].sa_handler || now[i].sa_flags != before[i].sa_flags ||
            memcmp(&now[i].sa_mask, &before[i].sa_mask, sizeof now[i].sa_mask) != 0) {
            sigaction(i, &before[i], NULL);
        }
    }
    pthread_mutex_unlock(&changes);
}
