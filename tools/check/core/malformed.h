/* SPDX-License-Identifier: Apache-2.0 */
/* One call through the core with one wrong argument, where everything else is right. */
#ifndef CHECK_MALFORMED_H
#define CHECK_MALFORMED_H

#include "core/engine.h"

/* The arguments of one step, one of which is made wrong. */
struct malformed_step {
    struct engine *engine;
    const struct problem *problem;
    struct side *side;
    struct attn_step_io io;
    struct attn_tensor tensor;
    int64_t shape[3], strides[3];
    struct attn_error error;
};

typedef attn_status make_wrong(struct malformed_step *s);

struct malformed {
    const char *name;
    make_wrong *make_wrong;
    const char *field; /* that the error has to name */
};

struct malformed_list {
    const struct malformed *items;
    size_t count;
};
extern const struct malformed_list malformed_runs;    /* malformed_run.c */
extern const struct malformed_list malformed_batches; /* malformed_batch.c */
extern const struct malformed_list malformed_binds;   /* malformed_bind.c */

/* malformed.c. The plan of the step with another batch. */
attn_status malformed_plan(struct malformed_step *s, const struct attn_batch *batch);

#endif
