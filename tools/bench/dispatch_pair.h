/* SPDX-License-Identifier: Apache-2.0 */
/* The same kernels over the same tensors, once through the core's run() and once called directly.
 */
#ifndef BENCH_DISPATCH_PAIR_H
#define BENCH_DISPATCH_PAIR_H

#include "bare_backend.h"
#include "measured.h"

struct dispatch_pair {
    struct measured measured;
    struct bare_backend bare;
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_attend_args attend;
    struct attn_write_kv_args write;
    struct attn_schedule_size size;
    void *schedule_host;
    struct attn_limits limits;
    bool writes;
    int64_t warm_calls; /* no constant: a clone of either function for it would not be counted */
    attn_layer *handle;
};

/* `session` has been made with `host`, so that both ways do their loops alike. */
attn_status dispatch_init(struct dispatch_pair *pair, struct session *session,
                          const struct attn_host *host, const struct shape *shape,
                          const char *backend, bool writes, struct attn_error *error);
void dispatch_finish(struct dispatch_pair *pair);
/* So many calls, one like the other; the status of the last. Not inlined: valgrind counts inside
 * them by name. */
attn_status dispatch_run_calls(struct dispatch_pair *pair, int64_t calls);
attn_status dispatch_direct_calls(struct dispatch_pair *pair, int64_t calls);

#endif
