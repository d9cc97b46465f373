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
    void *stream;
    int32_t num_threads; /* of a CPU; 0 on other devices */
    int32_t num_units;   /* multiprocessors of another device */
    struct ceilings *ceilings;
};

/* `host` NULL: the core's own services, its threads included. `cached` false: plugins are probed
 * here and now, by no other process and from no file: under valgrind this processor is another. */
attn_status session_init(struct session *session, const struct options *options,
                         const struct attn_host *host, bool cached, struct attn_error *error);
void session_finish(struct session *session);
/* Measured at the first call, which takes some seconds. */
attn_status session_ceilings(struct session *session, struct attn_error *error);

#endif
