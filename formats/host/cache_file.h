/* SPDX-License-Identifier: Apache-2.0 */
/* The one door to the files of the cache folder: records of probes and measured ranks. They steer
 * which code is run, so only those that no other user could have written are read; they are written
 * next to and renamed, so that many processes may do so at once. Nothing but libc is needed here:
 * attn-bench --tune is built with this source too. */
#ifndef CORE_HOST_CACHE_FILE_H
#define CORE_HOST_CACHE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

/* The user's own folder, from the values of XDG_CACHE_HOME and HOME (or NULL): libattn in XDG's,
 * else in ~/.cache. Empty, with *why (or NULL), where there is none: root takes no folder of a home
 * that belongs to another user. */
void cache_folder_default(char *folder, size_t size, const char *xdg, const char *home,
                          const char **why);

struct cache_file {
    int descriptor; /* -1: there is no such file */
    struct stat info;
};

/* Opens it for reading. NULL, or why a file that is there is not trusted. */
const char *cache_file_open(struct cache_file *file, const char *path, size_t most);
/* Reads all of its info.st_size bytes, and closes it. False: it became shorter. */
bool cache_file_read(struct cache_file *file, void *bytes);
void cache_file_close(struct cache_file *file);

/* Replaces the file, for the user alone; makes the folders above it. False with errno. A limit on
 * the size of files is an error like any other, and raises no signal. */
bool cache_file_write(const char *path, const void *bytes, size_t size);

/* All bytes from or to an open file, whatever it is. False: it has ended before, or errno. */
bool file_read(int descriptor, void *bytes, size_t size);
bool file_write(int descriptor, const void *bytes, size_t size); /* raises no SIGXFSZ */

#endif
