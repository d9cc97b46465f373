/* SPDX-License-Identifier: Apache-2.0 */
/* What all measurements of one process share: the runtime, the device, its stream, and the
 * ceilings. */
#ifndef BENCH_SESSION_H
#define BENCH_SESSION_H

#include <attn/api.h>

#include "ceilings.h"
#include "options.h"

struct session {
    const struct options *options;
    const struct attn_api *api;
    attn_runtime *runtime;
    struct device device;
    const char *device_name; /* the runtime's */
    const char *device_arch;
    bool against; /* device and stream are another session's */
    void *stream;
    int32_t num_threads; /* a CPU's; 0 on other devices */
    int32_t num_units;   /* multiprocessors of another device */
    struct ceilings *ceilings;
};

/* `cached` false: plugins are probed here and now, by no other process and from no file: under
 * valgrind this processor is another. */
attn_status session_init(struct session *session, const struct options *options, bool cached,
                         struct attn_error *error);
/* The same device for what --against names: the core and plugins of a build folder, or the core of
 * `first` and one plugin. Finish it before `first`. */
attn_status session_init_against(struct session *session, const struct session *first,
                                 struct attn_error *error);
void session_finish(struct session *session);
/* Measured at the first call, which takes some seconds. */
attn_status session_ceilings(struct session *session, struct attn_error *error);

#endif
