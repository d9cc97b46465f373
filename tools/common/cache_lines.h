/* SPDX-License-Identifier: Apache-2.0 */
/* Text files of the core's cache folder, of a line for each thing: measured ranks, conformance. */
#ifndef TOOLS_COMMON_CACHE_LINES_H
#define TOOLS_COMMON_CACHE_LINES_H

#include <attn/status.h>
#include <stdbool.h>
#include <stddef.h>

/* Where the core finds the file: in ATTN_CACHE_DIR, where empty means none, else in the user's
 * cache folder. */
attn_status cache_lines_path(const char *name, char *path, size_t size, struct attn_error *error);

/* The file's text, which is the caller's to free; NULL where the file is absent or not trusted,
 * with *why (or NULL). */
char *cache_lines_read(const char *path, const char **why);

/* Appends `lines` to those that stand in the file and are not replaced. A file that the core would
 * not trust is replaced, which `tool` says on stderr. */
attn_status cache_lines_write(const char *tool, const char *path, const char *lines,
                              bool (*is_replaced)(const void *user, const char *line),
                              const void *user, struct attn_error *error);

/* Writes an error of such a file and returns its status. */
attn_status cache_lines_fail(struct attn_error *error, const char *what, const char *why);

#endif
