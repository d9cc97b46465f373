/* SPDX-License-Identifier: Apache-2.0 */
#include "loader.h"

#include <pthread.h>
#include <stdio.h>

#include "common/library.h"

static struct ze_functions functions;
static char missing[192];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find(void *library, const char *name, void *function)
{
    if (!library_find(library, name, function) && missing[0] == '\0') {
        snprintf(missing, sizeof missing,
                 "libze_loader.so.1 has no %s: Level Zero 1.4 or later is needed", name);
    }
}

/* Never closed: its threads outlive any caller. */
static void open_loader(void)
{
    void *library = dlopen("libze_loader.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *text = dlerror();
        snprintf(missing, sizeof missing, "no Level Zero loader: %s",
                 text != NULL ? text : "libze_loader.so.1");
        return;
    }
#define ZE_FIND(name) find(library, "ze" #name, &functions.name);
    ZE_FUNCTIONS(ZE_FIND)
#undef ZE_FIND
}

const struct ze_functions *ze_loader(const char **cause)
{
    pthread_once(&once, open_loader);
    *cause = missing;
    return missing[0] == '\0' ? &functions : NULL;
}

const char *ze_text(ze_result_t result)
{
    static const struct {
        ze_result_t result;
        const char *text;
    } texts[] = {
        {ZE_RESULT_NOT_READY, "ZE_RESULT_NOT_READY"},
        {ZE_RESULT_ERROR_DEVICE_LOST,
         "ZE_RESULT_ERROR_DEVICE_LOST: the device hung, was reset or removed"},
        {ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY, "ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY"},
        {ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY, "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"},
        {ZE_RESULT_ERROR_MODULE_BUILD_FAILURE, "ZE_RESULT_ERROR_MODULE_BUILD_FAILURE"},
        {ZE_RESULT_ERROR_UNINITIALIZED,
         "ZE_RESULT_ERROR_UNINITIALIZED: no Level Zero driver is installed or may be used"},
        {ZE_RESULT_ERROR_UNSUPPORTED_VERSION, "ZE_RESULT_ERROR_UNSUPPORTED_VERSION"},
        {ZE_RESULT_ERROR_UNSUPPORTED_FEATURE, "ZE_RESULT_ERROR_UNSUPPORTED_FEATURE"},
        {ZE_RESULT_ERROR_INVALID_ARGUMENT, "ZE_RESULT_ERROR_INVALID_ARGUMENT"},
        {ZE_RESULT_ERROR_INVALID_NULL_HANDLE, "ZE_RESULT_ERROR_INVALID_NULL_HANDLE"},
        {ZE_RESULT_ERROR_INVALID_NULL_POINTER, "ZE_RESULT_ERROR_INVALID_NULL_POINTER"},
        {ZE_RESULT_ERROR_INVALID_SIZE, "ZE_RESULT_ERROR_INVALID_SIZE"},
        {ZE_RESULT_ERROR_UNSUPPORTED_SIZE, "ZE_RESULT_ERROR_UNSUPPORTED_SIZE"},
        {ZE_RESULT_ERROR_INVALID_KERNEL_NAME, "ZE_RESULT_ERROR_INVALID_KERNEL_NAME"},
        {ZE_RESULT_ERROR_INVALID_KERNEL_ARGUMENT_SIZE,
         "ZE_RESULT_ERROR_INVALID_KERNEL_ARGUMENT_SIZE"},
    };
    if (result == ZE_RESULT_SUCCESS) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (texts[i].result == result) {
            return texts[i].text;
        }
    }
    return "a Level Zero call failed";
}
