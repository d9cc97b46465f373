/* SPDX-License-Identifier: Apache-2.0 */
/* A machine with other GPUs, preloaded: files below /sys/class/kfd are read below ATTN_TEST_KFD
 * instead, those below /sys/class/drm below ATTN_TEST_DRM, so that plugins probe as they are
 * shipped. Where ATTN_TEST_HIP_TARGET is set, the GPU below ATTN_TEST_KFD is one of that target. */
#define _GNU_SOURCE
#undef _FILE_OFFSET_BITS /* fopen and fopen64 are two functions here */
#include <dirent.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* A copy of `properties` with the target's version: 90010 of gfx90a, 110501 of gfx1151. */
static FILE *with_target(FILE *properties, const char *target)
{
    char line[256];
    unsigned major = 0, minor = 0, stepping = 0, version = 0;
    FILE *copy = tmpfile();
    if (copy == NULL || sscanf(target, strlen(target) == 6 ? "gfx%1u%1x%1x" : "gfx%2u%1x%1x",
                               &major, &minor, &stepping) != 3) {
        return properties;
    }
    while (fgets(line, sizeof line, properties) != NULL) {
        if (sscanf(line, "gfx_target_version %u", &version) == 1 && version != 0) { /* 0: a CPU */
            fprintf(copy, "gfx_target_version %u\n", major * 10000 + minor * 100 + stepping);
        } else {
            fputs(line, copy);
        }
    }
    fclose(properties);
    rewind(copy);
    return copy;
}

static FILE *open_as(const char *name, const char *path, const char *mode)
{
    FILE *(*real)(const char *, const char *);
    char room[512];
    void *symbol = dlsym(RTLD_NEXT, name);
    memcpy(&real, &symbol, sizeof real);
    const char *target = getenv("ATTN_TEST_HIP_TARGET"), *at = moved(path, room, sizeof room);
    FILE *file = real(at, mode);
    bool changes = at == room && target != NULL && strstr(path, "/properties") != NULL;
    return file != NULL && changes ? with_target(file, target) : file;
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
