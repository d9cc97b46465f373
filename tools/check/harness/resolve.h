/* SPDX-License-Identifier: Apache-2.0 */
/* From what was named on the command line to files: the backend's plugin and cpu_ref's. */
#ifndef CHECK_RESOLVE_H
#define CHECK_RESOLVE_H

#include <attn/status.h>

struct resolved {
    char file[4096];      /* the plugin under test */
    char reference[4096]; /* cpu_ref's */
    const char *name;     /* the backend wanted of it; NULL: the first */
};

/* `target` is borrowed by `resolved`. A path (with a '/' or ending in .so) is taken as it is; a
 * name is looked up among the backends that the core finds. */
attn_status resolve(struct resolved *resolved, const char *target, struct attn_error *error);

#endif
