/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded by tests: files below /sys/class/kfd are read below ATTN_TEST_KFD instead, those below
 * /sys/class/drm below ATTN_TEST_DRM, so that plugins are probed as they are shipped. */
#define _GNU_SOURCE
#undef _FILE_OFFSET_BITS /* fopen and fopen64 are two functions here */
#include <dirent.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

static const char *moved(const char *path, char *room, size_t bytes)
{
    static const char *const folders[][2] = {{"/sys/class/kfd", "ATTN_TEST_KFD"},
                                             {"/sys/class/drm", "ATTN_TEST_DRM"}};
    for (size_t i = 0; path != NULL && i < sizeof folders / sizeof *folders; i++) {
        const char *instead = getenv(folders[i][1]);
        size_t length = strlen(folders[i][0]);
        if (instead != NULL && strncmp(path, folders[i][0], length) == 0) {
            snprintf(room, bytes, "%s%s", instead, path + length);
            return room;
        }
    }
    return path;
}

static FILE *open_as(const char *name, const char *path, const char *mode)
{
    FILE *(*real)(const char *, const char *);
    char room[512];
    void *symbol = dlsym(RTLD_NEXT, name);
    memcpy(&real, &symbol, sizeof real);
    return real(moved(path, room, sizeof room), mode);
}

EXPORTED FILE *fopen(const char *path, const char *mode)
{
    return open_as("fopen", path, mode);
}

EXPORTED FILE *fopen64(const char *path, const char *mode)
{
    return open_as("fopen64", path, mode);
}

EXPORTED DIR *opendir(const char *path)
{
    DIR *(*real)(const char *);
    char room[512];
    void *symbol = dlsym(RTLD_NEXT, "opendir");
    memcpy(&real, &symbol, sizeof real);
    return real(moved(path, room, sizeof room));
}
