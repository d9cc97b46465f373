/* SPDX-License-Identifier: Apache-2.0 */
#include "host/cache_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* NULL, or why root makes no folder there. A home is there and root's own; of XDG_CACHE_HOME the
 * folder above may be all that is. */
static const char *distrust_base(const char *folder, bool is_home)
{
    char path[PATH_MAX];
    struct stat info;
    bool there = stat(folder, &info) == 0;
    if (!there && !is_home && snprintf(path, sizeof path, "%s", folder) < (int)sizeof path) {
        char *last = strrchr(path, '/');
        last[last == path] = '\0';
        there = stat(path, &info) == 0;
    }
    if (!there) {
        return is_home ? "HOME is not there" : "XDG_CACHE_HOME and the folder above are not there";
    }
    return info.st_uid == geteuid() ? NULL
           : is_home                ? "HOME belongs to another user"
                                    : "XDG_CACHE_HOME belongs to another user";
}

void cache_folder_default(char *folder, size_t size, const char *xdg, const char *home,
                          const char **why)
{
    const bool by_xdg = xdg != NULL && xdg[0] == '/', by_home = home != NULL && home[0] == '/';
    folder[0] = '\0';
    *why = NULL;
    if (!by_xdg && !by_home) {
        return;
    }
    *why = geteuid() == 0 ? distrust_base(by_xdg ? xdg : home, !by_xdg) : NULL;
    if (*why != NULL) {
        return;
    }
    const int length = by_xdg ? snprintf(folder, size, "%s/libattn", xdg)
                              : snprintf(folder, size, "%s/.cache/libattn", home);
    if ((size_t)length >= size) {
        folder[0] = '\0';
        *why = by_xdg ? "XDG_CACHE_HOME is too long" : "HOME is too long";
    }
}

/* NULL, or why the file may not be trusted. */
static const char *distrust(const struct stat *info, size_t most)
{
    if (!S_ISREG(info->st_mode)) {
        return "is not a regular file";
    }
    if (info->st_uid != geteuid()) {
        return "belongs to another user";
    }
    if (info->st_mode & (S_IWGRP | S_IWOTH)) {
        return "is writable for others";
    }
    return info->st_size > (off_t)most ? "is too large" : info->st_size == 0 ? "is empty" : NULL;
}

const char *cache_file_open(struct cache_file *file, const char *path, size_t most)
{
    const char *why = NULL;
    file->descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
    if (file->descriptor < 0) {
        return errno == ENOENT || errno == ENOTDIR ? NULL
               : errno == ELOOP                    ? "is a symbolic link"
                                                   : "cannot be opened";
    }
    why =
        fstat(file->descriptor, &file->info) == 0 ? distrust(&file->info, most) : "cannot be read";
    if (why != NULL) {
        cache_file_close(file);
    }
    return why;
}

bool file_read(int descriptor, void *bytes, size_t size)
{
    size_t done = 0;
    while (done < size) {
        const ssize_t got = read(descriptor, (char *)bytes + done, size - done);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            break;
        }
        done += (size_t)got;
    }
    return done == size;
}

bool cache_file_read(struct cache_file *file, void *bytes)
{
    const bool read = file_read(file->descriptor, bytes, (size_t)file->info.st_size);
    cache_file_close(file);
    return read;
}

void cache_file_close(struct cache_file *file)
{
    if (file->descriptor >= 0) {
        close(file->descriptor);
    }
    file->descriptor = -1;
}

/* The folders above a file, for the user alone. */
static void make_folders(const char *file)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s", file) >= (int)sizeof path) {
        return;
    }
    for (char *at = path + 1; *at != '\0'; at++) {
        if (*at == '/') {
            *at = '\0';
            (void)mkdir(path, 0700);
            *at = '/';
        }
    }
}

static bool write_all(int descriptor, const char *bytes, size_t size)
{
    while (size > 0) {
        const ssize_t done = write(descriptor, bytes, size);
        if (done < 0 && errno == EINTR) {
            continue;
        }
        if (done <= 0) {
            return false;
        }
        bytes += done;
        size -= (size_t)done;
    }
    return true;
}

/* SIGXFSZ of this thread waits until it is taken back, unless it was blocked before. */
bool file_write(int descriptor, const void *bytes, size_t size)
{
    sigset_t signal, before, waiting;
    sigemptyset(&signal);
    sigaddset(&signal, SIGXFSZ);
    sigpending(&waiting);
    pthread_sigmask(SIG_BLOCK, &signal, &before);
    const bool written = write_all(descriptor, bytes, size);
    const int why = errno;
    if (!written && why == EFBIG && !sigismember(&waiting, SIGXFSZ)) {
        (void)sigtimedwait(&signal, NULL, &(struct timespec){0, 0});
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = why;
    return written;
}

bool cache_file_write(const char *path, const void *bytes, size_t size)
{
    char fresh[PATH_MAX + 8];
    if (snprintf(fresh, sizeof fresh, "%s.XXXXXX", path) >= PATH_MAX) {
        errno = ENAMETOOLONG;
        return false;
    }
    int descriptor = mkostemp(fresh, O_CLOEXEC);
    if (descriptor < 0 && errno == ENOENT) {
        make_folders(path);
        snprintf(fresh, sizeof fresh, "%s.XXXXXX", path);
        descriptor = mkostemp(fresh, O_CLOEXEC);
    }
    if (descriptor < 0) {
        return false;
    }
    bool written = file_write(descriptor, bytes, size) && fchmod(descriptor, 0600) == 0;
    int why = errno;
    if (close(descriptor) != 0 && written) {
        written = false;
        why = errno;
    }
    if (written && rename(fresh, path) == 0) {
        return true;
    }
    why = written ? errno : why;
    (void)unlink(fresh);
    errno = why;
    return false;
}
