/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded by tests: files below /sys/class/kfd are read below ATTN_TEST_KFD instead, so that the
 * plugin is probed as it is shipped. */
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
    static const char kfd[] = "/sys/class/kfd";
    const char *folder = getenv("ATTN_TEST_KFD");
    if (path == NULL || folder == NULL || strncmp(path, kfd, sizeof kfd - 1) != 0) {
        return path;
    }
    snprintf(room, bytes, "%s%s", folder, path + sizeof kfd - 1);
    return room;
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
