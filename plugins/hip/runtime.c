/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime.h"

#include <pthread.h>
#include <stdio.h>

#include "common/library.h"

static struct hip_runtime functions;
static char missing[192];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find(void *library, const char *name, void *function)
{
    if (!library_find(library, name, function) && missing[0] == '\0') {
        snprintf(missing, sizeof missing, "libamdhip64 has no %s", name);
    }
}

/* Never closed: its threads outlive any caller. */
static void open_runtime(void)
{
    static const char *const names[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"};
    void *library = NULL;
    for (size_t i = 0; library == NULL && i < sizeof names / sizeof *names; i++) {
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    }
    if (library == NULL) {
        const char *text = dlerror();
        snprintf(missing, sizeof missing, "no HIP runtime: %s",
                 text != NULL ? text : "libamdhip64.so.7, .6 or .5");
        return;
    }
#define HIP_FIND(type, name, arguments) find(library, "hip" #name, &functions.name);
    HIP_FUNCTIONS(HIP_FIND)
#undef HIP_FIND
}

const struct hip_runtime *hip_runtime(const char **cause)
{
    pthread_once(&once, open_runtime);
    *cause = missing;
    return missing[0] == '\0' ? &functions : NULL;
}
