/* SPDX-License-Identifier: Apache-2.0 */
#include "library.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "support/client.h"

#define CORE_NAME "libattn.so.1"

/* The folder of this executable, ending in '/'; empty if it is not known. */
static void own_folder(char *folder, size_t size)
{
    ssize_t length = readlink("/proc/self/exe", folder, size - 1);
    folder[length > 0 ? length : 0] = '\0';
    char *slash = strrchr(folder, '/');
    if (slash != NULL) {
        slash[1] = '\0';
    }
}

attn_status library_open(const struct attn_api **api, struct attn_error *error)
{
    /* From build/tools/NAME, from an installed bin/NAME, in a wheel, by the loader's own search. */
    static const char *const places[] = {"../core/" CORE_NAME, "../" ATTN_LIBDIR "/" CORE_NAME,
                                         "../lib/" CORE_NAME, NULL};
    char folder[3072], path[4096];
    own_folder(folder, sizeof folder);
    for (int i = 0; places[i] != NULL && folder[0] != '\0'; i++) {
        /* a folder named core next to an installed tool's is nothing of ours */
        snprintf(path, sizeof path, "%s../meson-private/coredata.dat", folder);
        const bool readable = i > 0 || access(path, R_OK) == 0;
        snprintf(path, sizeof path, "%s%s", folder, places[i]);
        if (readable && access(path, R_OK) == 0) {
            return client_load(path, api, error);
        }
    }
    return client_load(CORE_NAME, api, error);
}
