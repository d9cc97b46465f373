/* SPDX-License-Identifier: Apache-2.0 */
/* attn-info's --layouts, the id of each layer's cache layout, its --html, and its --lock and
 * --diff. The core writes locks, under ATTN_LOCK=write:FILE. */
#ifndef TOOLS_INFO_INFO_H
#define TOOLS_INFO_INFO_H

#include <attn/api.h>
#include <limits.h>
#include <stdbool.h>

#include "common/json.h"
#include "common/model_config.h"

/* Binds the assignment with memory of two blocks and adds `layout_id` and `layout` (the lines that
 * the id is a hash of) to each of `layers`, empty where a layer has no cache of its own. */
attn_status layouts_add(const struct attn_api *api, attn_runtime *runtime,
                        const attn_assignment *assignment, struct attn_device device,
                        const struct model_config *config, struct json *layers,
                        struct attn_error *error);

/* Writes the document to `file` as a page. */
attn_status html_write(const char *file, const struct json *root, struct attn_error *error);

/* A lock that is written under a name of its own and then takes the place of `file`. */
struct lock_file {
    const char *file;
    char fresh[PATH_MAX];
};

/* Before the runtime is created, whose environment it sets. */
attn_status lock_begin(struct lock_file *lock, const char *file, struct attn_error *error);
/* Binds the assignment, at which the core writes, and puts the file in its place. */
attn_status lock_write(struct lock_file *lock, const struct attn_api *api, attn_runtime *runtime,
                       const attn_assignment *assignment, struct attn_error *error);

void lock_finish(const struct lock_file *lock); /* leaves no file that has not got its place */

/* Prints what differs between two locks; the exit status. */
int lock_diff(const char *a, const char *b, bool as_json);

#endif
